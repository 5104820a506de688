"""Values that describe topics, partitions, brokers and leadership decisions.

All values are frozen, comparable and picklable. This module uses no I/O and no clock. Times are microseconds since the
epoch (``_us``) in records and milliseconds (``_ms``) in settings. Ranges are half-open.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple, NoReturn, TypeVar

import msgspec

#: Topic names that Kafka accepts. Source: org.apache.kafka.common.internals.Topic (legal characters, 249 bytes).
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")

#: Epochs, versions and broker ids: four signed bytes in ZooKeeper and on disk, -1 for none. The decoders of messages
#: check the range, so that every received number can be stored.
Int31 = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

#: Values of ``LeaderAndIsr.lossy_epoch`` that are not leader epochs.
NO_LOSS = -1
UNKNOWN_LOSS = -2

#: Maximum number of brokers in one list of replicas. The decoders of messages check it.
MAX_REPLICAS = 1000
_T = TypeVar("_T")
Replicas = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_REPLICAS)]

NO_LEADER = -1
NO_EPOCH = -1
NO_PRODUCER = -1

#: Number of producer ids between the floors of two consecutive seconds: more than the cluster assigns in one second.
PRODUCER_IDS_PER_SECOND = 2**20
#: The latest second that raises the floor; above its floor, half of the range of 64-bit signed integers is left.
_LAST_SECOND = 2**62 // PRODUCER_IDS_PER_SECOND
#: Maximum plausible distance of a producer id above the floor of the current second: the ids of 34 years.
_BELIEVED_LEAD = 2**50


def producer_id_floor(now_s: float) -> int:
    """Return the lowest first producer id of a block that is reserved at ``now_s``, in seconds since 1970.

    Blocks of a later second are higher, even if the counter in ZooKeeper is lower.
    """
    return min(max(int(now_s), 0), _LAST_SECOND) * PRODUCER_IDS_PER_SECOND


def believed_producer_ids(end: int, now_s: float) -> int:
    """Return ``end``, the end of a block as reported by a broker, or 0 if it is implausibly far ahead of the clock.

    A damaged number must not move all later ids out of the range of a batch header.
    """
    return end if end - producer_id_floor(now_s) <= _BELIEVED_LEAD else 0


class TopicPartition(NamedTuple):
    """One partition of one topic; the key of nearly every table."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetRange(NamedTuple):
    """Offsets ``[start, end)`` of one partition."""

    start: int
    end: int


class Span(NamedTuple):
    """Values ``[low, high)`` of any kind; by default, the range of 64-bit signed integers."""

    low: int = -(2**63)
    high: int = 2**63 - 1

    def __and__(self, other: Span) -> Span:
        return Span(max(self.low, other.low), min(self.high, other.high))


class EpochEnd(NamedTuple):
    """End of a leader epoch in a log: the largest epoch <= the requested one, and its exclusive end offset."""

    epoch: int
    end_offset: int


def host_and_port(host: str, port: int) -> str:
    """Return an address as clients accept it: ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class BrokerEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Address of a live broker. ``incarnation`` is the version of its persistent incarnation node in ZooKeeper."""

    broker_id: int
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    incarnation: int
    rack: str | None = None
    #: Whether the broker proves in hello that it knows the cluster's secret. A broker of release 0.1.0, or without a
    #: secret, does not.
    proves: bool = False


class SeenNumbers(msgspec.Struct, frozen=True):
    """Highest numbers of its cluster that a broker's log directory has recorded, as reported in its registration.

    ZooKeeper's counters are not lower, unless ZooKeeper was restored from an older copy. ``controller_id`` is the
    controller of ``controller_epoch``, ``producer_ids`` is the end of the highest block of producer ids, and
    ``leader_epoch`` is the highest leader epoch in any of the broker's logs. A broker of an earlier release does not
    report them.
    """

    controller_epoch: int = NO_EPOCH
    controller_id: str = ""
    producer_ids: int = 0
    leader_epoch: int = NO_EPOCH


NOTHING_SEEN = SeenNumbers()


class BrokerRegistration(msgspec.Struct, frozen=True):
    """Registration of a live broker under ``/brokers/ids/<id>``.

    ``trusted`` is false if the process cannot guarantee that its logs end where the last process left them, because the
    page cache was lost. Its claims to in-sync membership are then void. If ``doubted`` names partitions, only the
    claims to these are void; a controller of an earlier release ignores the names and treats all claims as void.

    The code that registers the broker sets ``incarnation`` and the identity of the process. ``pid`` is its number in
    ``pid_namespace`` on the boot ``boot_id``. ``start_time``, in clock ticks after boot, distinguishes the process from
    a later one with the same pid. A namespace or start time of 0 is unknown: earlier releases do not set it.
    ``proves``: as in ``BrokerEndpoint``.
    """

    broker_id: int
    host: str
    port: int
    boot_id: str
    cluster_id: str
    trusted: bool = True
    rack: str | None = None
    incarnation: int = NO_EPOCH
    pid: int = 0
    pid_namespace: int = 0
    proves: bool = False
    seen: SeenNumbers = NOTHING_SEEN
    doubted: tuple[TopicPartition, ...] = ()
    start_time: int = 0

    def doubts(self, tp: TopicPartition) -> bool:
        """Return whether this broker's claim to be in sync on ``tp`` is void."""
        return not self.trusted and (not self.doubted or tp in self.doubted)

    @property
    def endpoint(self) -> BrokerEndpoint:
        return BrokerEndpoint(self.broker_id, self.host, self.port, self.incarnation, self.rack, self.proves)


class LeaderAndIsr(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Replicated decision about one partition, as stored in ZooKeeper.

    ``isr`` is the committed in-sync set; new members are added at its end. The leader is a member unless ``leader`` is
    ``NO_LEADER``. Without a leader, ``isr`` is the last leader's set, whose members remain eligible.

    ``lossy_epoch`` is the leader epoch of the last election that may have lost committed records: an unclean one, or
    one among members that all lost their tails. ``NO_LOSS``: there was none since the topic was created.
    ``UNKNOWN_LOSS``: an earlier release wrote the state. ``disputed``: replicas hold contradictory committed records,
    and the partition has no leader until an operator requests an unclean election.
    """

    leader: Int31
    leader_epoch: Int31
    isr: Replicas[Int31]
    controller_epoch: Int31
    lossy_epoch: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] = UNKNOWN_LOSS
    disputed: bool = False


class VersionedState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``LeaderAndIsr`` with the version of its ZooKeeper node when it was read or written.

    ``leader_incarnation`` is the last incarnation of the leader's process when this was written; ``NO_EPOCH`` if
    unknown. If the leader is registered with another incarnation, the controller raises the leader epoch, because an
    epoch belongs to one process. Brokers ignore this field.
    """

    state: LeaderAndIsr
    version: int
    leader_incarnation: int = NO_EPOCH


class TopicStates(msgspec.Struct, frozen=True, array_like=True):
    """States of some partitions of one topic, by partition: as their leader wrote them, not necessarily the newest."""

    topic: str
    topic_id: str
    states: dict[int, VersionedState]


class TopicSchema(msgspec.Struct, frozen=True, array_like=True):
    """One schema of a topic. ``message`` is the encapsulated Arrow IPC Schema message, stored and sent verbatim."""

    schema_id: int
    message: bytes


class Reassignment(msgspec.Struct, frozen=True, array_like=True):
    """Move of one partition's replicas that is in progress. Source: KIP-455.

    ``target`` are the replicas after the move, preferred leader first. ``original`` are the replicas before the move; a
    cancellation makes them the target. ``throttle_bytes`` is the maximum number of bytes per second that a broker
    copies for the move; 0: no limit.
    """

    target: tuple[Int31, ...]
    original: tuple[Int31, ...]
    throttle_bytes: int = 0


class TopicRecord(msgspec.Struct, frozen=True):
    """Record of a topic, as stored under ``/brokers/topics/<name>``.

    ``assignment[p]`` are the replicas of partition p, preferred leader first. While p is in ``reassigning``, the
    assignment is the target, followed by the replicas that are removed when all of the target is in sync. ``schemas``
    are only added to; brokers accept only the last one from producers. ``config`` has only the settings of this topic,
    without defaults.
    """

    name: str
    topic_id: str
    assignment: tuple[tuple[int, ...], ...]
    schemas: tuple[TopicSchema, ...]
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    config: dict[str, str] = {}
    reassigning: dict[int, Reassignment] = {}

    @property
    def latest_schema(self) -> TopicSchema:
        return self.schemas[-1]

    @property
    def replication_factor(self) -> int:
        """Return the number of replicas of partition 0, or of its target during a move."""
        if not self.assignment:
            return 0
        move = self.reassigning.get(0)
        return len(move.target if move else self.assignment[0])


class TopicNote(msgspec.Struct, frozen=True):
    """Copy of the record of a topic that a broker hosts, stored in its log directory in case ZooKeeper's data is lost.

    ``replicas[p]`` are the replicas of partition p, preferred leader first. ``order`` grows with each topic of one
    name, and ``noted_ms`` grows with each change of one topic.
    """

    name: str
    topic_id: str
    schemas: tuple[TopicSchema, ...]
    key_columns: tuple[str, ...]
    event_time: str | None
    config: dict[str, str]
    replicas: tuple[tuple[int, ...], ...]
    order: int = 0
    noted_ms: int = 0


class LogCopy(msgspec.Struct, frozen=True):
    """Log of one replica on a broker's disk: its partition and its end.

    ``set_aside`` is its directory in ``set-aside/``, from which the broker serves no records.
    """

    broker_id: int
    topic: str
    partition: int
    topic_id: str
    schemas: tuple[TopicSchema, ...]
    last_epoch: int
    log_end_offset: int
    set_aside: str = ""


class DirectoryInventory(msgspec.Struct, frozen=True):
    """Data about the cluster in one log directory.

    ``incarnation`` is the broker's highest one, registered or about to be registered. ``problems`` are logs that cannot
    be read.
    """

    path: str
    cluster_id: str
    broker_id: int
    seen: SeenNumbers
    incarnation: int
    logs: tuple[LogCopy, ...]
    topics: tuple[TopicNote, ...] = ()
    problems: tuple[str, ...] = ()
    version: int = 1


#: Prefix of the names of internal topics.
INTERNAL_PREFIX = "__"


def is_internal(topic: str) -> bool:
    """Return whether the topic is internal: clients cannot write to it, and lists omit it."""
    return topic.startswith(INTERNAL_PREFIX)


def check_topic_name(name: str) -> str | None:
    """Return why ``name`` is not a valid topic name; None if it is valid."""
    if name in {".", ".."} or not TOPIC_NAME.match(name):
        return f"topic name {name[:60]!r} ({len(name)} characters) must match [a-zA-Z0-9._-]{{1,249}}, not '.' or '..'"
    return None


def assert_never(value: NoReturn) -> NoReturn:
    """End a ``match`` over a union: the type checker proves that no case is missing."""
    raise AssertionError(f"not a case: {value!r}")
