"""Values of ZooKeeper nodes, which are JSON objects with a format version.

Each ``decode_*`` function takes the node's path only for error messages. A value with a newer format version is
refused. Within one version, a reader ignores fields that it does not know. The module is pure: bytes in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from sparklog.errors import ClusterError
from sparklog.model import (
    NOTHING_SEEN,
    UNKNOWN_LOSS,
    BrokerRegistration,
    Int31,
    LeaderAndIsr,
    ListenerEndpoint,
    Reassignment,
    SeenNumbers,
    TopicPartition,
    TopicRecord,
    TopicSchema,
    TopicStates,
    VersionedState,
    check_topic_name,
)

#: The format version of the values that this release writes. All kinds of values have the same version.
VERSION = 1


_BrokerId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Replicas = Annotated[tuple[_BrokerId, ...], msgspec.Meta(min_length=1)]


class ZkFormatError(ClusterError):
    """The error for an unreadable ZooKeeper value: it has a newer format, or is not a valid value of its node.

    ``newer`` means that the value has a newer format. No process of this release may overwrite such a value.
    """

    def __init__(self, detail: str, newer: bool = False) -> None:
        self.newer = newer
        super().__init__(detail, newer)

    def __str__(self) -> str:
        return str(self.args[0])


class GenerationName(msgspec.Struct, frozen=True, order=True):
    """The driver epoch and the number that together identify one run (generation) of the driver's barrier job.

    The driver's directive (its orders to a generation) and the generation's report contain these two numbers. This
    package decodes no other field of directive and report.
    """

    driver_epoch: int
    generation: int


class _VersionedNode(msgspec.Struct, frozen=True):
    version: int = 0


class _State(msgspec.Struct, frozen=True):
    version: int
    leader: Int31
    leader_epoch: Int31
    isr: tuple[_BrokerId, ...]
    controller_epoch: Int31
    leader_incarnation: Int31 = -1
    lossy_epoch: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] = UNKNOWN_LOSS
    disputed: bool = False


class _Schema(msgspec.Struct, frozen=True):
    id: int
    message: bytes


class _TopicNode(msgspec.Struct, frozen=True):
    version: int
    topic_id: str
    assignment: Annotated[tuple[_Replicas, ...], msgspec.Meta(min_length=1)]
    schemas: tuple[_Schema, ...]
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    config: dict[str, str] = {}
    reassigning: dict[int, Reassignment] = {}


class _BrokerNode(msgspec.Struct, frozen=True):
    version: int
    host: str
    port: int
    incarnation: int
    boot_id: str
    cluster_id: str
    trusted: bool
    rack: str | None = None
    pid: int = 0
    pid_namespace: int = 0
    proves: bool = False
    seen: SeenNumbers = NOTHING_SEEN
    doubted: tuple[tuple[str, int], ...] = ()
    start_time: int = 0
    endpoints: tuple[ListenerEndpoint, ...] = ()
    kafka_endpoints: tuple[ListenerEndpoint, ...] = ()


class _IsrChanges(msgspec.Struct, frozen=True):
    """The value of a leader's notification of the controller.

    ``topics`` has the states that the leader has written.

    An earlier release writes only ``partitions``. If both are empty, any partition may have changed.
    """

    version: int
    partitions: tuple[tuple[str, int], ...] = ()
    topics: tuple[TopicStates, ...] = ()


class ControllerNode(msgspec.Struct, frozen=True):
    """The value of ``/controller``: the current controller and its epoch."""

    controller_id: str
    controller_epoch: int
    version: int = VERSION


class DriverNode(msgspec.Struct, frozen=True):
    """The value of ``/driver``: the current driver process.

    If a second driver starts, it fails with an error that names the host and pid of the current one.

    ``start_time``, ``boot_id`` and ``pid_namespace`` distinguish the driver's process from a later process with the
    same pid, and from a process in another container. An earlier release omits these fields.
    """

    driver_epoch: int
    host: str
    pid: int
    version: int = VERSION
    start_time: int = 0
    boot_id: str = ""
    pid_namespace: int = 0


class DeletionRequest(msgspec.Struct, frozen=True):
    """The value of ``/admin/delete_topics/<t>``: the id of the topic to delete."""

    topic_id: str
    version: int = VERSION


class DeletedTopic(msgspec.Struct, frozen=True):
    """The value of ``/brokers/deleted_topics/<id>``: a topic that was deleted at ``deleted_ms``.

    The time is from the controller's wall clock. If there are too many of these nodes, the controller removes the
    oldest ones.
    """

    name: str
    deleted_ms: int
    version: int = VERSION


class ElectionRequest(msgspec.Struct, frozen=True):
    """The value of ``/admin/elections/<name>``: a request to elect leaders.

    An election of the kind "preferred" elects the first replica if it is in sync. The kind "unclean" elects any live
    replica if no member of the ISR is alive. If ``partitions`` is None, the request is for all partitions.
    """

    kind: str
    partitions: tuple[tuple[str, int], ...] | None = None
    #: The ids of the topics at the time of the request, because a topic may be recreated before the election.
    topic_ids: dict[str, str] = {}
    version: int = VERSION


class TruncationRefusal(msgspec.Struct, frozen=True):
    """The value of ``/admin/cut_refusals/<name>``: a replica's refusal to truncate committed records.

    The replica on broker ``broker_id`` has committed records up to ``high_watermark``. The leader of ``leader_epoch``
    lacks these records from ``offset`` on.
    """

    topic: str
    partition: int
    topic_id: str
    broker_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    high_watermark: int
    version: int = VERSION


class StoppingNode(msgspec.Struct, frozen=True):
    """The value of ``/admin/stopping/<id>``: the incarnation of the broker that requests a controlled shutdown."""

    incarnation: int
    version: int = VERSION


class UntrustedNode(msgspec.Struct, frozen=True):
    """The value of ``/brokers/untrusted/<id>``: the incarnation of a broker whose logs may lack acknowledged records.

    ``value`` is the incarnation. The controller ignores the broker's earlier memberships in the ISRs of ``partitions``.
    If ``partitions`` is empty, as in values of an earlier release, this is true for all partitions of the broker.
    """

    value: int = 0
    version: int = VERSION
    partitions: tuple[tuple[str, int], ...] = ()


class CounterNode(msgspec.Struct, frozen=True):
    """The value of a node with a counter that only increases.

    The counters are the controller epoch, the driver epoch and the next producer id. The node of a retired broker also
    has this value, with the broker's last incarnation.
    """

    value: int = 0
    version: int = VERSION


T = TypeVar("T")
_json = msgspec.json.Encoder()
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def encode(value: msgspec.Struct) -> bytes:
    return _json.encode(value)


def decode(path: str, data: bytes, kind: type[T]) -> T:
    """Decode the value of the node ``path`` as a struct of type ``kind``.

    Raises:
      ZkFormatError: the value has a newer format version, or is not of this type. The error names the path.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    # Check the version first, because a newer format may lack fields that this one requires.
    try:
        version = _decode_version(data)
    except _NOT_JSON as error:
        raise ZkFormatError(f"ZooKeeper node {path}: not a value of sparklog ({error}): {data[:80]!r}") from None
    if version > VERSION:
        raise ZkFormatError(
            f"ZooKeeper node {path} has format version {version}; this version of sparklog supports up to {VERSION}:"
            " upgrade it",
            newer=True,
        )
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except _NOT_JSON as error:
        raise ZkFormatError(f"ZooKeeper node {path}: {error}: {data[:80]!r}") from None


#: The errors that the decoder raises for invalid bytes, including values that are nested too deeply.
_NOT_JSON = (msgspec.MsgspecError, RecursionError, UnicodeError)
_version_decoder = msgspec.json.Decoder(_VersionedNode)


def _decode_version(data: bytes) -> int:
    return _version_decoder.decode(data).version


def encode_state(state: LeaderAndIsr, leader_incarnation: int) -> bytes:
    return _json.encode(
        _State(
            VERSION,
            state.leader,
            state.leader_epoch,
            state.isr,
            state.controller_epoch,
            leader_incarnation,
            state.lossy_epoch,
            state.disputed,
        )
    )


def decode_state(path: str, data: bytes, znode_version: int) -> VersionedState:
    found = decode(path, data, _State)
    state = LeaderAndIsr(
        found.leader, found.leader_epoch, found.isr, found.controller_epoch, found.lossy_epoch, found.disputed
    )
    return VersionedState(state, znode_version, found.leader_incarnation)


def encode_topic(record: TopicRecord) -> bytes:
    return _json.encode(
        _TopicNode(
            VERSION,
            record.topic_id,
            record.assignment,
            tuple(_Schema(schema.schema_id, schema.message) for schema in record.schemas),
            record.key_columns,
            record.event_time,
            record.config,
            record.reassigning,
        )
    )


def decode_topic(path: str, data: bytes, name: str) -> TopicRecord:
    found = decode(path, data, _TopicNode)
    problem = check_topic_name(name) or check_topic_name(found.topic_id) or _misassigned(found)
    if problem:
        raise ZkFormatError(f"ZooKeeper node {path!r} is not a topic: {problem}")
    return TopicRecord(
        name=name,
        topic_id=found.topic_id,
        assignment=found.assignment,
        schemas=tuple(TopicSchema(schema.id, schema.message) for schema in found.schemas),
        key_columns=found.key_columns,
        event_time=found.event_time,
        config=found.config,
        reassigning=found.reassigning,
    )


def _misassigned(found: _TopicNode) -> str:
    """Return what is wrong with the topic's assignment, or an empty string."""
    for number, replicas in enumerate(found.assignment):
        if len(set(replicas)) < len(replicas):
            return f"partition {number} is assigned to {list(replicas)}, a broker twice"
    for number, move in found.reassigning.items():
        if not (0 <= number < len(found.assignment) and move.target and move.original):
            return f"partition {number} of {len(found.assignment)} moves from {move.original} to {move.target}"
    return ""


def encode_broker(registration: BrokerRegistration) -> bytes:
    return _json.encode(
        _BrokerNode(
            VERSION,
            registration.host,
            registration.port,
            registration.incarnation,
            registration.boot_id,
            registration.cluster_id,
            registration.trusted,
            registration.rack,
            registration.pid,
            registration.pid_namespace,
            registration.proves,
            registration.seen,
            tuple((tp.topic, tp.partition) for tp in registration.doubted),
            registration.start_time,
            registration.endpoints,
            registration.kafka_endpoints,
        )
    )


def decode_broker(path: str, data: bytes, broker_id: int) -> BrokerRegistration:
    found = decode(path, data, _BrokerNode)
    return BrokerRegistration(
        broker_id=broker_id,
        host=found.host,
        port=found.port,
        boot_id=found.boot_id,
        cluster_id=found.cluster_id,
        trusted=found.trusted,
        rack=found.rack,
        incarnation=found.incarnation,
        pid=found.pid,
        pid_namespace=found.pid_namespace,
        proves=found.proves,
        seen=found.seen,
        doubted=tuple(TopicPartition(*pair) for pair in found.doubted),
        start_time=found.start_time,
        endpoints=found.endpoints,
        kafka_endpoints=found.kafka_endpoints,
    )


class IsrChanges(NamedTuple):
    """The partitions whose state (leader and ISR) a leader has changed, in its notification to the controller.

    ``reported`` has the new states. ``named`` has partitions without their states, which the controller must read. If
    both are empty, any partition may have changed.
    """

    reported: tuple[TopicStates, ...] = ()
    named: tuple[TopicPartition, ...] = ()


def encode_isr_changes(states: Iterable[TopicStates]) -> bytes:
    return _json.encode(_IsrChanges(VERSION, (), tuple(states)))


def decode_isr_changes(path: str, data: bytes) -> IsrChanges:
    found = decode(path, data, _IsrChanges)
    return IsrChanges(found.topics, tuple(TopicPartition(*pair) for pair in found.partitions))
