"""The data types for topics, partitions, brokers, and the controller's decisions about partitions.

All values are frozen, comparable and picklable. This module uses no I/O and no clock. Times are microseconds since the
epoch (``_us``) in records and milliseconds (``_ms``) in settings. Ranges are half-open.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple, NoReturn, TypeVar

import msgspec

#: The pattern of topic names, as in Kafka. Source: org.apache.kafka.common.internals.Topic (legal characters, 249
#: bytes).
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")

#: The type of epochs, versions and broker ids, which are signed 32-bit integers in ZooKeeper and on disk; -1 means
#: none. The decoders of messages check the range, so that every received number can be stored.
Int31 = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

#: The special values of ``LeaderAndIsr.lossy_epoch``. Any other value of this attribute is a leader epoch.
NO_LOSS = -1
UNKNOWN_LOSS = -2

#: The maximum number of brokers in one list of replicas. The decoders of messages check it.
MAX_REPLICAS = 1000
_T = TypeVar("_T")
Replicas = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_REPLICAS)]

#: The type of every principal that a login gives, as in Kafka.
USER = "User"

NO_LEADER = -1
NO_EPOCH = -1
NO_PRODUCER = -1
#: The prefix of the key of a transactional id in the transaction coordinator. The key of a Spark sink has no prefix.
TRANSACTIONAL_ID_PREFIX = "id:"

#: The lowest producer id that may be assigned (``producer_id_floor``) rises by this number each second. A cluster
#: assigns fewer ids in a second.
PRODUCER_IDS_PER_SECOND = 2**20
#: The last second in which the floor rises. Half of the range of 64-bit signed integers remains above it.
_LAST_SECOND = 2**62 // PRODUCER_IDS_PER_SECOND
#: The maximum plausible distance of a producer id above the current floor: the ids of 34 years.
_BELIEVED_LEAD = 2**50


class Principal(NamedTuple):
    """The identity of a client, such as ``User:anna``. ``kind`` is the part before the colon."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def producer_id_floor(now_s: float) -> int:
    """Return the lowest producer id with which a block of ids reserved at ``now_s`` (seconds since 1970) may begin.

    A block that is reserved in a later second has higher ids, even if ZooKeeper's counter was lost and starts again.
    """
    return min(max(int(now_s), 0), _LAST_SECOND) * PRODUCER_IDS_PER_SECOND


def believed_producer_ids(end: int, now_s: float) -> int:
    """Return ``end``, the end of a block of producer ids as reported by a broker, or 0 if it is implausibly high.

    A producer id is implausible if it is far above ``producer_id_floor(now_s)``. Without this check, a damaged number
    could raise all later ids above the range of a batch header.
    """
    return end if end - producer_id_floor(now_s) <= _BELIEVED_LEAD else 0


class TopicPartition(NamedTuple):
    """The name of one partition: its topic and number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetRange(NamedTuple):
    """A range of offsets ``[start, end)`` of one partition."""

    start: int
    end: int


class Span(NamedTuple):
    """A range of numbers ``[low, high)``. By default, it has all signed 64-bit integers except the greatest."""

    low: int = -(2**63)
    high: int = 2**63 - 1

    def __and__(self, other: Span) -> Span:
        return Span(max(self.low, other.low), min(self.high, other.high))


class EpochEnd(NamedTuple):
    """The end of a leader epoch in a log, in response to a request for an epoch.

    ``epoch`` is the largest epoch in the log that is at most the requested epoch. ``end_offset`` is exclusive.
    """

    epoch: int
    end_offset: int


def host_and_port(host: str, port: int) -> str:
    """Return an address in the form that clients accept: ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: The name of the listener of a broker without the setting ``listeners``.
DEFAULT_LISTENER = "PLAINTEXT"
#: The maximum number of listeners of one broker.
MAX_LISTENERS = 100
#: The beginning of the internal name of a listener of Kafka's protocol, which distinguishes it from a listener of
#: sparklog's own protocol with the same name.
KAFKA_LISTENER = "kafka:"


class ListenerEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The advertised address of one listener of a broker. ``protocol`` is the Kafka name of its security protocol."""

    name: str
    protocol: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class BrokerEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The address of a broker in one incarnation.

    ``incarnation`` is the version of the broker's incarnation node in ZooKeeper. Each registration of the broker raises
    it.
    """

    broker_id: int
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    incarnation: int
    rack: str | None = None
    #: Whether the broker proves its identity on each connection. A broker of release 0.1.0, or without a secret, does
    #: not.
    proves: bool = False
    #: The broker's listeners. The tuple is empty for a broker with one listener, at ``host`` and ``port``, and in
    #: replies to clients.
    endpoints: Annotated[tuple[ListenerEndpoint, ...], msgspec.Meta(max_length=MAX_LISTENERS)] = ()
    #: The broker's listeners of Kafka's protocol. The tuple is empty in replies to clients.
    kafka_endpoints: Annotated[tuple[ListenerEndpoint, ...], msgspec.Meta(max_length=MAX_LISTENERS)] = ()

    def at(self, listener: str) -> BrokerEndpoint | None:
        """Return the broker with the address of this listener only. Return None if the broker has no such listener.

        The name of a listener of Kafka's protocol begins with ``KAFKA_LISTENER``.
        """
        if listener.startswith(KAFKA_LISTENER):
            name, endpoints = listener.removeprefix(KAFKA_LISTENER), self.kafka_endpoints
        elif not self.endpoints:
            if listener != DEFAULT_LISTENER:
                return None
            return msgspec.structs.replace(self, kafka_endpoints=()) if self.kafka_endpoints else self
        else:
            name, endpoints = listener, self.endpoints
        for found in endpoints:
            if found.name == name:
                return msgspec.structs.replace(self, host=found.host, port=found.port, endpoints=(), kafka_endpoints=())
        return None


class SeenNumbers(msgspec.Struct, frozen=True):
    """The highest epochs and producer ids recorded in a broker's log directory. A part of the broker's registration.

    ZooKeeper's counters are lower than these numbers only if ZooKeeper was restored from an older copy.
    ``controller_id`` is the controller of ``controller_epoch``, ``producer_ids`` is the end of the highest block of
    producer ids, and ``leader_epoch`` is the highest leader epoch in any of the broker's logs. A broker of an earlier
    release does not report these numbers.
    """

    controller_epoch: int = NO_EPOCH
    controller_id: str = ""
    producer_ids: int = 0
    leader_epoch: int = NO_EPOCH


NOTHING_SEEN = SeenNumbers()


class BrokerRegistration(msgspec.Struct, frozen=True):
    """The registration of a live broker, in the ZooKeeper node ``/brokers/ids/<id>``.

    ``trusted`` is false if the logs may lack records that the broker's last process wrote, because the page cache was
    lost. Then the broker does not count as in sync. If ``doubted`` names partitions, the broker counts as not in sync
    only for these partitions. A controller of an earlier release ignores ``doubted``, and counts none of the broker's
    replicas as in sync.

    The code that registers the broker sets ``incarnation`` and the identity of the process: the id of the host's boot,
    the namespace of process ids, and the process id. ``start_time``, in clock ticks after boot, distinguishes the
    process from a later process with the same pid. A namespace or start time of 0 is unknown, because earlier releases
    do not set it. ``BrokerEndpoint`` describes ``proves``, ``endpoints`` and ``kafka_endpoints``. ``host`` and ``port``
    are the address of the first listener for clients, for releases that do not know ``endpoints``.
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
    endpoints: tuple[ListenerEndpoint, ...] = ()
    kafka_endpoints: tuple[ListenerEndpoint, ...] = ()

    def doubts(self, tp: TopicPartition) -> bool:
        """Return whether this broker must not count as in sync for ``tp``, because its log may lack records."""
        return not self.trusted and (not self.doubted or tp in self.doubted)

    @property
    def endpoint(self) -> BrokerEndpoint:
        return BrokerEndpoint(
            self.broker_id,
            self.host,
            self.port,
            self.incarnation,
            self.rack,
            self.proves,
            self.endpoints,
            self.kafka_endpoints,
        )


class LeaderAndIsr(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The leader, leader epoch and ISR of one partition, as stored in ZooKeeper.

    ``isr`` is the committed in-sync set; new members are added at its end. The leader is a member unless ``leader`` is
    ``NO_LEADER``. Without a leader, ``isr`` is the last leader's ISR, whose members may still be elected.

    ``lossy_epoch`` is the leader epoch of the last election that may have lost committed records. Such an election
    is unclean, or was held when all members of the ISR may have lost the ends of their logs. ``NO_LOSS`` means that
    there was no such election since the topic was created, and ``UNKNOWN_LOSS`` that an earlier release wrote the
    state. ``disputed`` is true if replicas have contradictory committed records. Then the partition has no leader until
    an operator requests an unclean election.
    """

    leader: Int31
    leader_epoch: Int31
    isr: Replicas[Int31]
    controller_epoch: Int31
    lossy_epoch: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] = UNKNOWN_LOSS
    disputed: bool = False


class VersionedState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ``LeaderAndIsr``, with the version of its ZooKeeper node when the state was read or written.

    ``leader_incarnation`` is the leader's incarnation when the state was written, or ``NO_EPOCH`` if unknown. If the
    leader is registered with another incarnation, the controller raises the leader epoch, because only one process may
    lead in an epoch. Brokers ignore this field.
    """

    state: LeaderAndIsr
    version: int
    leader_incarnation: int = NO_EPOCH


class TopicStates(msgspec.Struct, frozen=True, array_like=True):
    """The states of some partitions of one topic, as their leader wrote them to ZooKeeper.

    By now, ZooKeeper may have newer states.
    """

    topic: str
    topic_id: str
    states: dict[int, VersionedState]


class TopicSchema(msgspec.Struct, frozen=True, array_like=True):
    """One of the schemas that a topic has had.

    ``message`` is the encapsulated Arrow IPC Schema message, which is stored and sent unchanged.
    """

    schema_id: int
    message: bytes


class Reassignment(msgspec.Struct, frozen=True, array_like=True):
    """A reassignment in progress: the move of one partition's replicas. Source: KIP-455.

    ``target`` are the replicas after the move, preferred leader first. ``original`` are the replicas before the move; a
    cancellation makes them the target. ``throttle_bytes`` is the maximum number of bytes per second that a broker
    copies for the move; 0 means no limit.
    """

    target: tuple[Int31, ...]
    original: tuple[Int31, ...]
    throttle_bytes: int = 0


class TopicRecord(msgspec.Struct, frozen=True):
    """The metadata of a topic, as stored in the ZooKeeper node ``/brokers/topics/<name>``.

    ``assignment[p]`` are the replicas of partition p, preferred leader first. While p is in ``reassigning``, the
    assignment is the target, followed by the replicas that are removed when the whole target is in sync. New schemas
    are appended to ``schemas``. Brokers accept only the last schema from producers. ``config`` has only the settings of
    this topic, without defaults.
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
        """Return the number of replicas of partition 0.

        During a move of this partition, return the size of the target.
        """
        if not self.assignment:
            return 0
        move = self.reassigning.get(0)
        return len(move.target if move else self.assignment[0])


class TopicNote(msgspec.Struct, frozen=True):
    """A copy of a topic's metadata in the log directory of a broker that hosts it, in case ZooKeeper's data is lost.

    ``replicas[p]`` are the replicas of partition p, preferred leader first. ``order`` is higher for a topic that was
    created later with the same name. ``noted_ms`` is higher after a later change of the topic.
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
    """One partition's log on a broker's disk, with its last leader epoch and its log end offset.

    If ``set_aside`` is not empty, it is the log's directory in ``set-aside/``, from which the broker serves no records.
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
    """The data that one log directory contains about its cluster: its broker, logs and topics.

    ``incarnation`` is the broker's highest incarnation, registered or about to be registered. ``problems`` are the logs
    that cannot be read.
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


#: The prefix of the names of internal topics.
INTERNAL_PREFIX = "__"


def is_internal(topic: str) -> bool:
    """Return whether the topic is internal. Clients cannot write to internal topics, and lists omit them."""
    return topic.startswith(INTERNAL_PREFIX)


def check_topic_name(name: str) -> str | None:
    """Return the reason why ``name`` is not a valid topic name, or None if it is valid."""
    if name in {".", ".."} or not TOPIC_NAME.match(name):
        return f"topic name {name[:60]!r} ({len(name)} characters) must match [a-zA-Z0-9._-]{{1,249}}, not '.' or '..'"
    return None


def assert_never(value: NoReturn) -> NoReturn:
    """Raise AssertionError. A call in the last case of a ``match`` lets the type checker find missing cases."""
    raise AssertionError(f"not a case: {value!r}")
