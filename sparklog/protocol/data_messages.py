"""Messages of the data plane: hello, metadata, produce, fetch, offsets of the log.

Body of Produce and FetchReply: for each partition in order, ``batch_count`` batch headers (96 bytes each), then their
bodies back to back (``body_bytes`` in all, each body padded to 8 as stored).
"""

from __future__ import annotations

import msgspec

from sparklog.model import NO_EPOCH, NO_LEADER, BrokerEndpoint, Int31, Replicas, TopicSchema
from sparklog.protocol.fields import (
    Columns,
    Entries,
    KeyIds,
    Listed,
    Message,
    Name,
    PeerEntries,
    Plain,
    Settings,
    Token,
)

#: ``ListOffsetsPartition.timestamp_us`` for the ends of the log. Source: Kafka ListOffsets (-1 latest, -2 earliest).
LATEST = -1
EARLIEST = -2

CONSUMER = -1  #: ``Fetch.replica_id`` of a client
ACKS_ALL = -1

# --- connection -------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection. ``cluster_id`` empty: the client takes any cluster.

    The other fields are the offer of a broker or controller to prove who it is, see ``protocol.proof``: its role, its
    number (of a broker its id) and incarnation (of a controller its epoch), and the ids of the secrets it knows."""

    min_version: int
    max_version: int
    client_id: Name
    cluster_id: Name = ""
    nonce: Token = b""
    role: Name = ""
    number: Int31 = -1
    incarnation: Int31 = -1
    key_ids: KeyIds = ()


class HelloReply(Message, frozen=True, tag="hello_reply"):
    """``local_socket``: where processes of the host with this ``boot_id`` may ask for open files, see ``local_reads``;
    empty: nowhere. ``unix_socket``: abstract name, without its leading zero, of the Unix socket over which the
    connection may go on, of whoever has asked for ``reached_at``, which is the broker's own end of it; told there as
    well, as proof that it is the same broker in the same life. See ``net/unix_socket``. Empty: there is none.
    ``proof``: the broker's, with the secret ``key_id``; empty where nothing was offered, or it knows no such secret."""

    version: int
    broker_id: int
    incarnation: int
    cluster_id: str
    max_frame_bytes: int
    boot_id: str = ""
    local_socket: str = ""
    unix_socket: str = ""
    reached_at: tuple[str, int] = ("", 0)
    nonce: Token = b""
    key_id: Name = ""
    proof: Token = b""


class Prove(Message, frozen=True, tag="prove"):
    """The second message of a connection whose ``HelloReply`` has a proof: the opener's own. Answered with Ack, after
    which the connection speaks for the broker or controller that hello named."""

    proof: Token


class ErrorReply(Message, frozen=True, tag="error_reply"):
    """The whole request failed. ``cid`` is -1 when the request could not be decoded far enough to know it."""

    code: int
    detail: str


# --- metadata ---------------------------------------------------------------------------------------------------------


class Metadata(Message, frozen=True, tag="metadata"):
    """``topics`` None asks for all, internal ones only with ``internal``. Without ``schemas`` the topics' schema bytes
    are left out. ``start``: the ``next`` of a reply that held only a piece."""

    topics: Plain[str] | None = None
    schemas: bool = True
    internal: bool = False
    start: tuple[str, int] | None = None


class PartitionMetadata(msgspec.Struct, frozen=True, array_like=True):
    partition: int
    leader: int
    leader_epoch: int
    replicas: Replicas[int]
    isr: Replicas[int]


class TopicMetadata(msgspec.Struct, frozen=True, array_like=True):
    """``code`` not 0: the topic is unknown or its name is bad, and only ``name`` and ``detail`` mean anything.

    ``order``: of two topics of one name, with different ids, the later one has the greater; 0: unknown. Of one topic
    it may grow."""

    code: int
    name: str
    topic_id: str = ""
    partitions: Listed[PartitionMetadata] = ()
    schemas: Columns[TopicSchema] = ()
    key_columns: Columns[str] = ()
    event_time: str | None = None
    config: Settings = {}
    detail: str = ""
    order: int = 0


class MetadataReply(Message, frozen=True, tag="metadata_reply"):
    """``controller_epoch`` orders replies of different brokers only roughly; leader epochs decide per partition.

    A reply is never larger than a broker can make without being missed by others: where there is more, ``next`` is the
    topic and the partition that the next piece begins with. Then the last topic may be cut, and goes on in that piece.
    Source: KIP-966, the cursor of DescribeTopicPartitions."""

    cluster_id: str
    controller_epoch: int
    brokers: Listed[BrokerEndpoint]
    topics: Listed[TopicMetadata]
    next: tuple[str, int] | None = None


# --- data plane -------------------------------------------------------------------------------------------------------


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
    partitions: Entries[ProducePartition]
    transaction: Name = ""


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

    results: Listed[ProduceResult]


class FetchPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``leader_epoch`` is the fetcher's current one (-1: not checked); ``last_epoch`` that of its last batch
    (-1: its history is not compared). ``columns``: only these of the topic's newest schema are sent, those that a batch
    has; (): headers alone; None: batches as they are stored, as followers need them. ``verify``: the fetcher has found
    that what it was sent of these columns fails its checksum; the broker is to verify what is stored. ``refuses``: the
    follower holds committed records that this leader has said it lacks, and does not cut them."""

    topic: str
    partition: int
    topic_id: str
    leader_epoch: int
    fetch_offset: int
    max_bytes: int
    last_epoch: int = -1
    log_start_offset: int = -1
    columns: Columns[str] | None = None
    verify: bool = False
    refuses: bool = False


class Fetch(Message, frozen=True, tag="fetch"):
    """``replica_id`` CONSUMER for clients; a follower names itself and its incarnation.

    Sessions (Source: KIP-227): ``session_epoch`` -1 is sessionless; 0 asks for a new session with ``partitions``
    as its content; later epochs count up by one and name only changed partitions; ``forgotten`` leave the session. A
    consumer names ``MAX_ENTRIES`` partitions at most.
    """

    replica_id: int
    incarnation: Int31
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation: int  #: 0 read uncommitted (below the high watermark), 1 read committed (below the last stable offset)
    session_id: int
    session_epoch: int
    partitions: PeerEntries[FetchPartition]
    forgotten: PeerEntries[tuple[str, int]] = ()


class AbortedRange(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    first_offset: int
    last_offset: int


class FetchedPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    aborted: Listed[AbortedRange] = ()
    detail: str = ""
    stored_bytes: int = 0


class FetchReply(Message, frozen=True, tag="fetch_reply"):
    """``code`` is about the session. In a session, only partitions with something to say are named."""

    code: int
    session_id: int
    partitions: Listed[FetchedPartition]


class ListOffsetsPartition(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    timestamp_us: int  #: LATEST, EARLIEST, or: first batch record at or after this time
    leader_epoch: int = -1


class ListOffsets(Message, frozen=True, tag="list_offsets"):
    isolation: int
    partitions: Entries[ListOffsetsPartition]


class ListedOffset(msgspec.Struct, frozen=True, array_like=True):
    """``offset`` -1: no record at or after the asked time. A time is answered with its batch's base offset: no
    record before it has the asked timestamp or a later one."""

    code: int
    offset: int
    timestamp_us: int
    leader_epoch: int
    detail: str = ""


class ListOffsetsReply(Message, frozen=True, tag="list_offsets_reply"):
    results: Listed[ListedOffset]


class InitProducerId(Message, frozen=True, tag="init_producer_id"):
    transactional_id: str | None = None


class InitProducerIdReply(Message, frozen=True, tag="init_producer_id_reply"):
    producer_id: int
    producer_epoch: int
