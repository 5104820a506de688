"""Messages of the data plane: hello, metadata, produce, fetch and offsets of the log.

The body of Produce and FetchReply has a part for each partition in order. A part has ``batch_count`` batch headers (96
bytes each), then their bodies without gaps (``body_bytes`` in total, each body padded to 8 as stored).
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

#: Values of ``ListOffsetsPartition.timestamp_us`` for the ends of the log. Source: Kafka ListOffsets (-1 latest, -2
#: earliest).
LATEST = -1
EARLIEST = -2

CONSUMER = -1  #: ``Fetch.replica_id`` of a client
ACKS_ALL = -1

# --- connection -------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a connection.

    With an empty ``cluster_id`` the client accepts any cluster.

    The other fields are the offer of a broker or controller to prove its identity; see ``protocol.proof``. They are its
    role, its number (a broker's id), its incarnation (a controller's epoch), and the ids of the secrets that it knows.
    """

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
    """The reply to Hello.

    ``local_socket``: the path at which processes of the host with this ``boot_id`` request open files (see
    ``local_reads``); empty if there is none.

    ``unix_socket``: the abstract name, without its leading zero, of a Unix socket (see ``net/unix_socket``); empty if
    there is none. A client that connected to ``reached_at``, the broker's end of the TCP connection, may continue on
    that socket. The reply there has the same ``reached_at``, which proves that the same process listens.

    ``proof``: the broker's proof that it knows the secret ``key_id``. It is empty if Hello offered no proof, or the
    broker knows none of the offered secrets.
    """

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
    """The second message of a connection whose ``HelloReply`` has a proof: the opener's own proof.

    After the reply, an Ack, the connection belongs to the broker or controller that hello named.
    """

    proof: Token


class ErrorReply(Message, frozen=True, tag="error_reply"):
    """The failure of a whole request. ``cid`` is -1 if the request could not be decoded far enough to know it."""

    code: int
    detail: str


# --- metadata ---------------------------------------------------------------------------------------------------------


class Metadata(Message, frozen=True, tag="metadata"):
    """A request for metadata.

    ``topics`` None requests all topics, internal ones only with ``internal``. Without ``schemas`` the reply omits the
    topics' schema bytes. ``start`` is the ``next`` of a reply that was only a piece.
    """

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
    """One topic of a MetadataReply.

    If ``code`` is not 0, the topic is unknown or its name is invalid, and only ``name`` and ``detail`` have a meaning.
    ``order``: of two topics with one name and different ids, the later one has the greater order; 0: unknown. The order
    of one topic may grow.
    """

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
    """The reply to Metadata.

    ``controller_epoch`` orders replies of different brokers only roughly; leader epochs decide per partition.

    A broker limits the size of a reply, so that it does not block its event loop for long. If there is more, ``next``
    is the topic and the partition that the next piece starts with. Then the last topic may be incomplete and continues
    in that piece. Source: KIP-966, the cursor of DescribeTopicPartitions.
    """

    cluster_id: str
    controller_epoch: int
    brokers: Listed[BrokerEndpoint]
    topics: Listed[TopicMetadata]
    next: tuple[str, int] | None = None


# --- data plane -------------------------------------------------------------------------------------------------------


class ProducePartition(msgspec.Struct, frozen=True, array_like=True):
    """One partition of Produce. An empty ``topic_id`` is not checked."""

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int


class Produce(Message, frozen=True, tag="produce"):
    """A request to append batches.

    ``acks`` is 0, 1 or ACKS_ALL. With 0 there is no reply, not even for an error. ``transaction`` is the key of the
    transaction of transactional batches; the leader asks its coordinator before it accepts the first batch of a
    producer id.
    """

    acks: int
    timeout_ms: int
    partitions: Entries[ProducePartition]
    transaction: Name = ""


class ProduceResult(msgspec.Struct, frozen=True, array_like=True):
    """One result of Produce.

    ``base_offset`` is the first batch's; the others follow without gaps. -1 on error.

    With NOT_LEADER_OR_FOLLOWER, ``leader`` and its epoch are the broker's newest knowledge. Source: KIP-951.
    """

    code: int
    base_offset: int
    append_time_us: int
    log_start_offset: int
    detail: str = ""
    leader: int = NO_LEADER
    leader_epoch: int = NO_EPOCH


class ProduceReply(Message, frozen=True, tag="produce_reply"):
    """The results in the order of the request's partitions."""

    results: Listed[ProduceResult]


class FetchPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition of Fetch.

    ``leader_epoch`` is the fetcher's current one (-1: not checked); ``last_epoch`` is that of its last batch (-1: its
    history is not compared). ``columns``: the broker sends only these of the topic's newest schema, as far as a batch
    has them; (): only headers; None: batches as they are stored, as followers need them. ``verify``: the data that the
    fetcher received for these columns failed its checksum; the broker must verify the stored data. ``refuses``: the
    follower holds committed records that this leader has reported as missing, and does not truncate them.
    """

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
    """A request for batches.

    ``replica_id`` is CONSUMER for clients; a follower sends its id and its incarnation.

    Sessions (Source: KIP-227): ``session_epoch`` -1 has no session; 0 requests a new session with ``partitions`` as its
    content; later epochs increase by one and name only changed partitions; ``forgotten`` leave the session. A consumer
    names at most ``MAX_ENTRIES`` partitions.
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
    """One partition of FetchReply.

    ``diverging`` (epoch, end offset) tells a follower to truncate to the smaller of that and its own epoch end. It
    tells a consumer that the records that it has read from there on are no longer in the log. ``stored_bytes``: the
    size of the batches in the log if only some of their columns were sent (each is marked in its header); else 0.
    """

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
    """The reply to Fetch. ``code`` is about the session. In a session, only partitions with news are named."""

    code: int
    session_id: int
    partitions: Listed[FetchedPartition]


class ListOffsetsPartition(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    timestamp_us: int  #: LATEST, EARLIEST, or a time: the first batch with a record at or after it
    leader_epoch: int = -1


class ListOffsets(Message, frozen=True, tag="list_offsets"):
    isolation: int
    partitions: Entries[ListOffsetsPartition]


class ListedOffset(msgspec.Struct, frozen=True, array_like=True):
    """One result of ListOffsets.

    ``offset`` -1: no record at or after the requested time.

    The offset for a time is the base offset of a batch: no record before it has this timestamp or a later one.
    """

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
