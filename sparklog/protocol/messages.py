"""Every message of the wire, as typed structs in MessagePack.

A message is the header of a frame; batches travel in the frame's body and are described here only by counts and
lengths, so that nothing on the way parses them. Structs are array-like and may grow at the end with defaults: an old
peer ignores what it does not know.

Body of Produce and FetchReply: for each partition in order, ``batch_count`` batch headers (96 bytes each), then their
bodies back to back (``body_bytes`` in all, each body padded to 8 as stored).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from sparklog.model import NO_EPOCH, NO_LEADER, BrokerEndpoint, Int31, LeaderAndIsr, TopicSchema

PROTOCOL_MIN_VERSION = 1
PROTOCOL_MAX_VERSION = 1

#: Topics or partitions one request may name. Each costs the broker some microseconds of its only thread, and a request
#: is dealt with in one go: a million of them would look like a broker that hangs. Refused before they are decoded.
MAX_ENTRIES = 100_000
_T = TypeVar("_T")
_Entries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
#: Names that are kept or compared as long as a connection lives.
_Name = Annotated[str, msgspec.Meta(max_length=255)]

#: ``ListOffsetsPartition.timestamp_us`` for the ends of the log. Source: Kafka ListOffsets (-1 latest, -2 earliest).
LATEST = -1
EARLIEST = -2

CONSUMER = -1  #: ``Fetch.replica_id`` of a client
ACKS_ALL = -1


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: ``cid`` correlates a reply with its request on one connection."""

    cid: int


class PartitionResult(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    code: int
    detail: str = ""


# --- connection -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection. ``cluster_id`` empty: the client takes any cluster."""

    min_version: int
    max_version: int
    client_id: _Name
    cluster_id: _Name = ""


class HelloReply(Message, frozen=True, tag="hello_reply"):
    """``local_socket``: where processes of the host with this ``boot_id`` may ask for open files, see ``local_reads``;
    empty: nowhere."""

    version: int
    broker_id: int
    incarnation: int
    cluster_id: str
    max_frame_bytes: int
    boot_id: str = ""
    local_socket: str = ""


class ErrorReply(Message, frozen=True, tag="error_reply"):
    """The whole request failed. ``cid`` is -1 when the request could not be decoded far enough to know it."""

    code: int
    detail: str


# --- metadata ---------------------------------------------------------------------------------------------------


class Metadata(Message, frozen=True, tag="metadata"):
    """``topics`` None asks for all, internal ones only with ``internal``. Without ``schemas`` the topics' schema bytes
    are left out."""

    topics: _Entries[str] | None = None
    schemas: bool = True
    internal: bool = False


class PartitionMetadata(msgspec.Struct, frozen=True, array_like=True):
    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class TopicMetadata(msgspec.Struct, frozen=True, array_like=True):
    """``code`` not 0: the topic is unknown or its name is bad, and only ``name`` and ``detail`` mean anything."""

    code: int
    name: str
    topic_id: str = ""
    partitions: tuple[PartitionMetadata, ...] = ()
    schemas: tuple[TopicSchema, ...] = ()
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    config: dict[str, str] = {}
    detail: str = ""


class MetadataReply(Message, frozen=True, tag="metadata_reply"):
    """``controller_epoch`` orders replies of different brokers only roughly; leader epochs decide per partition."""

    cluster_id: str
    controller_epoch: int
    brokers: tuple[BrokerEndpoint, ...]
    topics: tuple[TopicMetadata, ...]


# --- data plane -------------------------------------------------------------------------------------------------


class ProducePartition(msgspec.Struct, frozen=True, array_like=True):
    """``topic_id`` empty: not checked."""

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int


class Produce(Message, frozen=True, tag="produce"):
    """``acks``: 0, 1 or ACKS_ALL. With 0 there is no reply, not even for an error. ``transaction``: the key of the
    transaction that transactional batches belong to; the leader asks its coordinator before it takes the first batch
    of a producer id."""

    acks: int
    timeout_ms: int
    partitions: _Entries[ProducePartition]
    transaction: _Name = ""


class ProduceResult(msgspec.Struct, frozen=True, array_like=True):
    """``base_offset`` is the first batch's; the others follow without gaps. -1 on error.

    With NOT_LEADER_OR_FOLLOWER, ``leader`` and its epoch are who leads as far as the broker knows. Source: KIP-951.
    """

    code: int
    base_offset: int
    append_time_us: int
    log_start_offset: int
    detail: str = ""
    leader: int = NO_LEADER
    leader_epoch: int = NO_EPOCH


class ProduceReply(Message, frozen=True, tag="produce_reply"):
    """Results in the order of the request's partitions."""

    results: tuple[ProduceResult, ...]


class FetchPartition(msgspec.Struct, frozen=True, array_like=True):
    """``leader_epoch`` is the fetcher's current one (-1: not checked); ``last_epoch`` that of its last batch
    (-1: its history is not compared). ``columns``: only these of the topic's newest schema are sent, those that a batch
    has; (): headers alone; None: batches as they are stored, as followers need them."""

    topic: str
    partition: int
    topic_id: str
    leader_epoch: int
    fetch_offset: int
    max_bytes: int
    last_epoch: int = -1
    log_start_offset: int = -1
    columns: _Entries[str] | None = None


class Fetch(Message, frozen=True, tag="fetch"):
    """``replica_id`` CONSUMER for clients; a follower names itself and its incarnation.

    Sessions (Source: KIP-227): ``session_epoch`` -1 is sessionless; 0 asks for a new session with ``partitions``
    as its content; later epochs count up by one and name only changed partitions; ``forgotten`` leave the session.
    """

    replica_id: int
    incarnation: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation: int  #: 0 read uncommitted (below the high watermark), 1 read committed (below the last stable offset)
    session_id: int
    session_epoch: int
    partitions: _Entries[FetchPartition]
    forgotten: _Entries[tuple[str, int]] = ()


class AbortedRange(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    first_offset: int
    last_offset: int


class FetchedPartition(msgspec.Struct, frozen=True, array_like=True):
    """``diverging`` (epoch, end offset) tells a follower to truncate to the smaller of that and its own epoch end, and
    a consumer that what it has read from there on is not in the log any more. ``stored_bytes``: what the batches take
    in the log, where only some of their columns were sent (each is marked in its header); else 0."""

    topic: str
    partition: int
    code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    log_end_offset: int
    batch_count: int = 0
    body_bytes: int = 0
    diverging: tuple[int, int] | None = None
    aborted: tuple[AbortedRange, ...] = ()
    detail: str = ""
    stored_bytes: int = 0


class FetchReply(Message, frozen=True, tag="fetch_reply"):
    """``code`` is about the session. In a session, only partitions with something to say are named."""

    code: int
    session_id: int
    partitions: tuple[FetchedPartition, ...]


class ListOffsetsPartition(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    timestamp_us: int  #: LATEST, EARLIEST, or: first batch record at or after this time
    leader_epoch: int = -1


class ListOffsets(Message, frozen=True, tag="list_offsets"):
    isolation: int
    partitions: _Entries[ListOffsetsPartition]


class ListedOffset(msgspec.Struct, frozen=True, array_like=True):
    """``offset`` -1: no record at or after the asked time. A time is answered with its batch's base offset: no
    record before it has the asked timestamp or a later one."""

    code: int
    offset: int
    timestamp_us: int
    leader_epoch: int
    detail: str = ""


class ListOffsetsReply(Message, frozen=True, tag="list_offsets_reply"):
    results: tuple[ListedOffset, ...]


class InitProducerId(Message, frozen=True, tag="init_producer_id"):
    transactional_id: str | None = None


class InitProducerIdReply(Message, frozen=True, tag="init_producer_id_reply"):
    producer_id: int
    producer_epoch: int


# --- coordinators: transactions and group offsets ---------------------------------------------------------------


class FindCoordinator(Message, frozen=True, tag="find_coordinator"):
    """Which broker coordinates this transaction or group. ``kind``: "transaction" or "group". Any broker answers; the
    internal topic is made on first use."""

    kind: str
    key: _Name


class FindCoordinatorReply(Message, frozen=True, tag="find_coordinator_reply"):
    """``partition``: of the kind's internal topic; its leader is the coordinator."""

    broker: BrokerEndpoint
    partition: int


class BeginTransaction(Message, frozen=True, tag="begin_transaction"):
    """Begin, or join, the transaction of ``key`` as run ``run_id``; each call gives a producer id of its own.

    ``version`` -1: a producer's, ``run_id`` names one life of it; a begin ends what it has open. ``version`` >= 0: a
    sink's (batch id, or txnVersion); many tasks of one run join; a version at or below the last committed one is a
    replay and only told so. A run id not seen before fences all earlier ones of the key, and aborts what they have
    open; a fenced run gets INVALID_PRODUCER_EPOCH.
    ``timeout_ms``: without a sign of life for so long the transaction is aborted.
    """

    key: _Name
    run_id: _Name
    version: int
    timeout_ms: int


class BeginTransactionReply(Message, frozen=True, tag="begin_transaction_reply"):
    """``committed``: this version, or a later one, is committed already: nothing is to be written (ids are -1).
    ``run``: number of the run, counted by key in order of appearance."""

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


class GroupOffset(msgspec.Struct, frozen=True, array_like=True):
    """``offset``: the next one the group will read. ``topic_id`` and ``leader_epoch`` say of which log; empty and -1
    when not known."""

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    leader_epoch: int = -1
    metadata: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class AddToTransaction(Message, frozen=True, tag="add_to_transaction"):
    """Register before use: partitions that ``producer_id`` will append to, and offsets that ``group`` gets when the
    transaction commits. Durable when answered with an Ack. A sign of life."""

    key: _Name
    run_id: _Name
    producer_id: int
    producer_epoch: int
    partitions: _Entries[tuple[str, int]] = ()
    group: _Name = ""
    offsets: _Entries[GroupOffset] = ()


class TouchTransaction(Message, frozen=True, tag="touch_transaction"):
    """A sign of life of a run; answered by an Ack, or by what it has become."""

    key: _Name
    run_id: _Name


class EndTransaction(Message, frozen=True, tag="end_transaction"):
    """Decide. With ``commit`` the ``winners`` (producer ids; of a producer: its own) are committed and every other
    registered one is aborted. The first durable decision about a version counts: repeating it succeeds, another run's
    gets INVALID_PRODUCER_EPOCH. Answered when all markers are written, or after ``timeout_ms`` when the decision is
    durable and they are still on their way."""

    key: _Name
    run_id: _Name
    version: int
    commit: bool
    winners: _Entries[int]
    timeout_ms: int


class EndTransactionReply(Message, frozen=True, tag="end_transaction_reply"):
    """``complete``: the markers are in every partition. ``replayed``: the version had been committed before."""

    complete: bool
    replayed: bool = False


class ListTransactions(Message, frozen=True, tag="list_transactions"):
    """Transactions that this broker coordinates, and keys whose last committed version is kept."""


class TransactionDescription(msgspec.Struct, frozen=True, array_like=True):
    """``state``: empty, open, committing, aborting. Times in ms since the epoch. ``participants``: producer id, epoch
    and partitions."""

    key: str
    state: str
    run_id: str
    run: int
    version: int
    last_version: int
    began_ms: int
    deadline_ms: int
    participants: tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...]


class ListTransactionsReply(Message, frozen=True, tag="list_transactions_reply"):
    transactions: tuple[TransactionDescription, ...]


class AbortTransaction(Message, frozen=True, tag="abort_transaction"):
    """An operator ends an open transaction; its run is fenced."""

    key: _Name


class VerifyTransaction(Message, frozen=True, tag="verify_transaction"):
    """A leader asks: may this producer append to this partition for this transaction? Ack, or why not. Source:
    KIP-890."""

    key: _Name
    producer_id: int
    producer_epoch: int
    topic: str
    partition: int


class TransactionMarker(msgspec.Struct, frozen=True, array_like=True):
    """The end of one transaction in one partition: (producer id, epoch) of those committed and those aborted. Ids
    that have nothing open there are only fenced."""

    topic: str
    partition: int
    committed: tuple[tuple[int, int], ...]
    aborted: tuple[tuple[int, int], ...]


class WriteMarkers(Message, frozen=True, tag="write_markers"):
    """A coordinator tells a leader durable decisions. Writing one twice is writing it once."""

    markers: _Entries[TransactionMarker]


class WriteMarkersReply(Message, frozen=True, tag="write_markers_reply"):
    """NONE: the marker is committed."""

    results: tuple[PartitionResult, ...]


class CommitOffsets(Message, frozen=True, tag="commit_offsets"):
    """Set a group's offsets. Answered when they are committed. ``transaction`` (key and decision number) when a
    transaction's coordinator hands over what was sent with it: repeating one is doing it once."""

    group: _Name
    offsets: _Entries[GroupOffset]
    transaction: tuple[str, int] | None = None


class CommitOffsetsReply(Message, frozen=True, tag="commit_offsets_reply"):
    results: tuple[PartitionResult, ...]


class FetchOffsets(Message, frozen=True, tag="fetch_offsets"):
    """``partitions`` None: all the group has."""

    group: _Name
    partitions: _Entries[tuple[str, int]] | None = None


class FetchOffsetsReply(Message, frozen=True, tag="fetch_offsets_reply"):
    """Partitions without an offset are left out."""

    offsets: tuple[GroupOffset, ...]


class ListGroups(Message, frozen=True, tag="list_groups"):
    """Groups that this broker coordinates."""


class ListGroupsReply(Message, frozen=True, tag="list_groups_reply"):
    groups: tuple[str, ...]


# --- administration ---------------------------------------------------------------------------------------------


class CreateTopic(Message, frozen=True, tag="create_topic"):
    """``schema`` empty: the default schema. ``assignment`` empty: placed by the broker. Waits for the leaders."""

    name: str
    partitions: int
    replication_factor: int
    timeout_ms: int
    schema: bytes = b""
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    config: Annotated[dict[str, str], msgspec.Meta(max_length=1000)] = {}
    assignment: _Entries[tuple[int, ...]] = ()


class CreateTopicReply(Message, frozen=True, tag="create_topic_reply"):
    """``warning``: why the placement is weaker than asked (replicas on one host)."""

    topic_id: str
    warning: str = ""


class DeleteTopic(Message, frozen=True, tag="delete_topic"):
    name: str
    timeout_ms: int


class CreatePartitions(Message, frozen=True, tag="create_partitions"):
    """``partitions`` is the topic's new number. ``assignment``: replicas of the added ones; empty: placed by the
    broker. Waits for the leaders; answered by a CreateTopicReply."""

    topic: str
    partitions: int
    timeout_ms: int
    assignment: _Entries[tuple[Int31, ...]] = ()


class AddColumns(Message, frozen=True, tag="add_columns"):
    """``columns``: an Arrow IPC Schema message of nullable columns; what the topic has of them already is left as it
    is. Answered when the broker asked knows of them."""

    topic: str
    columns: bytes
    timeout_ms: int


class ReplicaMove(msgspec.Struct, frozen=True, array_like=True):
    """``target``: the replicas wanted, preferred leader first; None takes a move under way back."""

    topic: str
    partition: int
    target: tuple[Int31, ...] | None


class AlterReassignments(Message, frozen=True, tag="alter_reassignments"):
    """Begin, change or cancel moves; does not wait for them to end. ``throttle_bytes``: bytes per second each broker
    copies at most, 0: no limit; naming a move's target again changes its throttle."""

    moves: _Entries[ReplicaMove]
    timeout_ms: int
    throttle_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class AlterReassignmentsReply(Message, frozen=True, tag="alter_reassignments_reply"):
    """One result a move, in order. ``warning`` as in CreateTopicReply."""

    results: tuple[PartitionResult, ...]
    warning: str = ""


class ListReassignments(Message, frozen=True, tag="list_reassignments"):
    """Which moves are under way."""


class ReassignmentStatus(msgspec.Struct, frozen=True, array_like=True):
    """How far each replica's copy is stands in the brokers' descriptions."""

    topic: str
    partition: int
    target: tuple[int, ...]
    original: tuple[int, ...]
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    throttle_bytes: int


class ListReassignmentsReply(Message, frozen=True, tag="list_reassignments_reply"):
    moves: tuple[ReassignmentStatus, ...]


class ElectLeaders(Message, frozen=True, tag="elect_leaders"):
    """``kind``: "preferred" or "unclean", as in ``codecs.ElectionRequest``. ``partitions`` None: all. Waits until the
    controller has carried it out."""

    kind: str
    timeout_ms: int
    partitions: _Entries[tuple[str, int]] | None = None


class ElectLeadersReply(Message, frozen=True, tag="elect_leaders_reply"):
    """Results of the partitions asked for; of all of them, only those that did not get the leader wanted."""

    results: tuple[PartitionResult, ...]


class RestartBroker(Message, frozen=True, tag="restart_broker"):
    """Stop in an orderly way, and be started again by the supervisor. ``incarnation``: the one that is meant (so that
    a request told twice restarts once). Answered by an Ack when the stop begins."""

    incarnation: int


class Ack(Message, frozen=True, tag="ack"):
    """Done; for requests that have nothing else to say."""


class DescribeBroker(Message, frozen=True, tag="describe_broker"):
    """What this broker process is doing: for people, tests and counters."""


class ReplicaDescription(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    role: str  #: leader, follower, offline
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    size_bytes: int
    directory: str
    last_epoch: int = -1  #: leader epoch of the last batch, -1 for an empty log


class DescribeBrokerReply(Message, frozen=True, tag="describe_broker_reply"):
    broker_id: int
    incarnation: int
    pid: int
    version: str
    log_dir: str
    state: str  #: running, stopping
    replicas: tuple[ReplicaDescription, ...]
    counters: dict[str, int]


# --- controller to broker ---------------------------------------------------------------------------------------


class PartitionDecision(msgspec.Struct, frozen=True, array_like=True):
    """A partition's state as the controller read or wrote it at ``version`` of the ZooKeeper node.

    ``target`` and ``original`` are empty unless the partition is being moved (see ``model.Reassignment``). ``leaving``
    are replicas that the leader is to take out of the ISR, and not in again: the target is in sync. They stay
    replicas, and fetch, until they are named no more.
    """

    topic: str
    topic_id: str
    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    state: LeaderAndIsr
    version: Int31
    replicas: tuple[int, ...]
    target: tuple[int, ...] = ()
    original: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    throttle_bytes: int = 0


class TopicChange(msgspec.Struct, frozen=True, array_like=True):
    """What a broker must know of a topic besides its partitions."""

    name: str
    topic_id: str
    schemas: tuple[TopicSchema, ...]
    key_columns: tuple[str, ...]
    event_time: str | None
    config: dict[str, str]


class ControlUpdate(Message, frozen=True, tag="control_update"):
    """One controller request for all it has to tell a broker: leadership, metadata, deletions, in that order.

    ``incarnation`` is the broker's, as registered: another one refuses with STALE_BROKER_EPOCH. ``full`` says that
    ``partitions`` and ``topics`` are all there is: replicas of this broker that are not named are not its own any
    more. ``brokers`` None: unchanged. ``sequence`` grows from update to update of one controller epoch: a broker that
    has taken a later one ignores what comes after all, for the controller has told it again since.
    """

    controller_id: str
    controller_epoch: Int31
    incarnation: Int31
    full: bool
    brokers: tuple[BrokerEndpoint, ...] | None
    topics: tuple[TopicChange, ...]
    partitions: tuple[PartitionDecision, ...]
    deleted: tuple[tuple[str, str], ...] = ()  #: (topic, topic id) to forget and, where hosted, delete from disk
    sequence: int = 0


class ControlUpdateReply(Message, frozen=True, tag="control_update_reply"):
    """``failed``: (topic, partition, code, detail) of replicas that could not follow the decision."""

    code: int
    failed: tuple[tuple[str, int, int, str], ...] = ()
    detail: str = ""


Request = (
    Hello
    | Metadata
    | Produce
    | Fetch
    | ListOffsets
    | InitProducerId
    | FindCoordinator
    | BeginTransaction
    | AddToTransaction
    | TouchTransaction
    | EndTransaction
    | ListTransactions
    | AbortTransaction
    | VerifyTransaction
    | WriteMarkers
    | CommitOffsets
    | FetchOffsets
    | ListGroups
    | CreateTopic
    | DeleteTopic
    | CreatePartitions
    | AddColumns
    | AlterReassignments
    | ListReassignments
    | ElectLeaders
    | RestartBroker
    | DescribeBroker
    | ControlUpdate
)
Reply = (
    HelloReply
    | ErrorReply
    | MetadataReply
    | ProduceReply
    | FetchReply
    | ListOffsetsReply
    | InitProducerIdReply
    | FindCoordinatorReply
    | BeginTransactionReply
    | EndTransactionReply
    | ListTransactionsReply
    | WriteMarkersReply
    | CommitOffsetsReply
    | FetchOffsetsReply
    | ListGroupsReply
    | CreateTopicReply
    | AlterReassignmentsReply
    | ListReassignmentsReply
    | ElectLeadersReply
    | Ack
    | DescribeBrokerReply
    | ControlUpdateReply
)

#: What decoding raises for bytes that are no message of ours: msgspec's own errors, and for text that is not UTF-8 and
#: for nesting without end (in fields this version skips) Python's.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_message(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(header: bytes | memoryview) -> Request:
    """Raises one of ``UNDECODABLE``; ``connection`` turns them into typed answers."""
    return _request_decoder.decode(header)


def decode_reply(header: bytes | memoryview) -> Reply:
    """As ``decode_request``."""
    return _reply_decoder.decode(header)
