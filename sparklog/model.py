"""The nouns of the log: what topics, partitions, brokers and leadership decisions are.

Values only: frozen, comparable, picklable, without I/O and without clocks. Times are microseconds since the epoch
(``_us``) in records and milliseconds (``_ms``) in settings. Ranges are half-open.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple, NoReturn, TypeVar

import msgspec

#: Topic names Kafka accepts. Source: org.apache.kafka.common.internals.Topic (legal characters, 249 bytes).
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")

#: Epochs, versions and broker ids: four signed bytes in ZooKeeper and on disk, -1 for none. Checked where messages are
#: decoded, so that no number gets in that could not be written down.
Int31 = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

#: Values of ``LeaderAndIsr.lossy_epoch`` that are no leader epochs.
NO_LOSS = -1
UNKNOWN_LOSS = -2

#: Brokers that one list of replicas may name. Checked where messages are decoded.
MAX_REPLICAS = 1000
_T = TypeVar("_T")
Replicas = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_REPLICAS)]

NO_LEADER = -1
NO_EPOCH = -1
NO_PRODUCER = -1

#: Producer ids between the floors of two seconds: more than the cluster gives out in one.
PRODUCER_IDS_PER_SECOND = 2**20
#: The latest second that counts: its floor leaves half of 64 signed bits to count on.
_LAST_SECOND = 2**62 // PRODUCER_IDS_PER_SECOND
#: Producer ids above the floor of the present second that are believed: those of 34 years.
_BELIEVED_LEAD = 2**50


def producer_id_floor(now_s: float) -> int:
    """Return the lowest producer id that a block taken at ``now_s``, in seconds since 1970, may begin with.

    Blocks of a later second are higher, whatever the counter in ZooKeeper says.
    """
    return min(max(int(now_s), 0), _LAST_SECOND) * PRODUCER_IDS_PER_SECOND


def believed_producer_ids(end: int, now_s: float) -> int:
    """Return ``end``, the end of a block that a broker says it has seen, or 0 where no clock was ever so far ahead.

    A damaged number must not push all later ids out of the range of a batch header.
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
    """Values ``[low, high)``; of any kind; by default all that 64 bits hold."""

    low: int = -(2**63)
    high: int = 2**63 - 1

    def __and__(self, other: Span) -> Span:
        return Span(max(self.low, other.low), min(self.high, other.high))


class EpochEnd(NamedTuple):
    """Where a leader epoch ends in a log: the largest epoch <= the asked one and its exclusive end offset."""

    epoch: int
    end_offset: int


def host_and_port(host: str, port: int) -> str:
    """Return an address as clients take it: ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class BrokerEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a live broker listens. ``incarnation`` is the version of its persistent incarnation node in ZooKeeper."""

    broker_id: int
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    incarnation: int
    rack: str | None = None
    #: It proves in hello that it knows the cluster's secret; false: it is of release 0.1.0, or has been given none.
    proves: bool = False


class SeenNumbers(msgspec.Struct, frozen=True):
    """What a broker's log directory has seen its cluster count to, as its registration says it.

    ZooKeeper counts no lower, unless it was put back from an older copy. ``controller_id`` is the controller of
    ``controller_epoch``, ``producer_ids`` the end of the highest block of producer ids, ``leader_epoch`` the highest
    leader epoch in any of the broker's logs. An earlier release says nothing.
    """

    controller_epoch: int = NO_EPOCH
    controller_id: str = ""
    producer_ids: int = 0
    leader_epoch: int = NO_EPOCH


NOTHING_SEEN = SeenNumbers()


class BrokerRegistration(msgspec.Struct, frozen=True):
    """What a live broker says of itself under ``/brokers/ids/<id>``.

    ``trusted`` false: the process cannot vouch that its logs end where the last process left them (the page cache
    was lost), so its claims to in-sync membership are void. Where ``doubted`` names partitions, only the claims to
    these are void: an earlier release does not read the names and takes all claims for void. ``incarnation`` and
    ``pid``, the process on the boot of ``boot_id`` by the numbers of ``pid_namespace``, are filled in by the
    registration, as is ``start_time``, clock ticks after boot, which tells it from a later process with its pid.
    Earlier releases leave namespace or start time 0: unknown. ``proves``: as in ``BrokerEndpoint``.
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
    """The replicated decision about one partition, as stored in ZooKeeper.

    ``isr`` is the committed in-sync set in assignment order of insertion; the leader is in it unless ``leader`` is
    ``NO_LEADER``: then it is the set of the last leader, which keeps its claim.

    ``lossy_epoch`` is the leader epoch of the last election that may have lost committed records: an unclean one, or
    one among members that all lost their tails. ``NO_LOSS``: there was none since the topic was created;
    ``UNKNOWN_LOSS``: written by an earlier release. ``disputed``: replicas hold committed records that contradict each
    other, and nobody leads before an operator asks for an unclean election.
    """

    leader: Int31
    leader_epoch: Int31
    isr: Replicas[Int31]
    controller_epoch: Int31
    lossy_epoch: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] = UNKNOWN_LOSS
    disputed: bool = False


class VersionedState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ``LeaderAndIsr`` with the version of the ZooKeeper node it was read at or written as.

    ``leader_incarnation`` is the incarnation the leader's process last had when this was written; ``NO_EPOCH`` when
    unknown. A controller that finds the leader registered under another one raises the leader epoch: an epoch
    belongs to one process. Brokers need not look at it.
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
    """A move of one partition's replicas under way. Source: KIP-455.

    ``target`` are the replicas wanted, preferred leader first; ``original`` those before the move began, which a
    cancel makes the target. ``throttle_bytes``: bytes per second a broker copies at most for it; 0: no limit.
    """

    target: tuple[Int31, ...]
    original: tuple[Int31, ...]
    throttle_bytes: int = 0


class TopicRecord(msgspec.Struct, frozen=True):
    """What is fixed about a topic, as stored under ``/brokers/topics/<name>``.

    ``assignment[p]`` are the replicas of partition p, preferred leader first. While p is ``reassigning`` that is the
    target, followed by the replicas that will go when all of the target is in sync. ``schemas`` grow, never shrink;
    only the last is accepted from producers. ``config`` holds only what was set for this topic.
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
        """Replicas a partition has when it is not being moved, by partition 0."""
        if not self.assignment:
            return 0
        move = self.reassigning.get(0)
        return len(move.target if move else self.assignment[0])


class TopicNote(msgspec.Struct, frozen=True):
    """What a broker was told of a topic that it hosts, as its log directory keeps it for a loss of ZooKeeper.

    ``replicas[p]`` are those of partition p, preferred leader first. ``order`` grows with each topic of one name,
    ``noted_ms`` with each change of one topic.
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
    """One replica's log on a broker's disk: its partition and its end.

    ``set_aside`` names its directory in ``set-aside/``, where it is not served.
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
    """What one log directory records about its cluster.

    ``incarnation`` is the broker's highest one, registered or about to be. ``problems`` are logs that cannot be read.
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


#: Names of topics that the log keeps for itself begin so.
INTERNAL_PREFIX = "__"


def is_internal(topic: str) -> bool:
    """Whether the topic is the log's own: closed to clients' writes, and left out of lists."""
    return topic.startswith(INTERNAL_PREFIX)


def check_topic_name(name: str) -> str | None:
    """Return why ``name`` is not a topic name, or None."""
    if name in {".", ".."} or not TOPIC_NAME.match(name):
        return f"topic name {name[:60]!r} ({len(name)} characters) must match [a-zA-Z0-9._-]{{1,249}}, not '.' or '..'"
    return None


def assert_never(value: NoReturn) -> NoReturn:
    """End a ``match`` over a union: the type checker proves that no case is missing."""
    raise AssertionError(f"not a case: {value!r}")
