"""Messages of the data plane: hello, metadata, produce, fetch and offsets of the log.

The body of Produce and FetchReply has one part for each partition, in the order of the partitions. A part has
``batch_count`` batch headers of 96 bytes each, and then the batches' bodies without gaps (``body_bytes`` in total). A
body is padded to a multiple of 8 bytes, as it is stored.
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
    """The first message of a connection, with the protocol versions that the client supports.

    If ``cluster_id`` is empty, the client accepts any cluster.

    The other fields are for a broker or controller that offers to prove its identity; see ``protocol.proof``. They are
    its role, its number (a broker's id), its incarnation (for a controller, its epoch), and the ids of the secrets that
    it knows.
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

    ``local_socket`` is the path of the Unix socket for local reads (see ``local_reads``). Processes on the host with
    this ``boot_id`` can get a segment's open files there. It is empty if the broker has no such socket.

    ``unix_socket`` is the abstract name, without the leading zero byte, of a Unix socket for all requests (see
    ``net/unix_socket``). It is empty if the broker has no such socket. ``reached_at`` is the broker's end of the TCP
    connection. A client on the same host may continue on the Unix socket. The HelloReply there has the same
    ``reached_at``, which proves that the same broker process has replied.

    ``proof`` is the broker's proof that it knows the secret ``key_id``. It is empty if Hello offered no proof, or the
    broker knows none of the offered secrets.

    If there are ``sasl_mechanisms``, the client must log in by one of them before any other request. The names of the
    sockets are then empty.
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
    sasl_mechanisms: KeyIds = ()


class Prove(Message, frozen=True, tag="prove"):
    """The second message of a connection whose ``HelloReply`` has a proof: the proof of the process that connected.

    The reply is an Ack. From then on the broker knows that the peer is the broker or controller that Hello named.
    """

    proof: Token


class ErrorReply(Message, frozen=True, tag="error_reply"):
    """The failure of a whole request. ``cid`` is -1 if the request's correlation id could not be decoded."""

    code: int
    detail: str


# --- metadata ---------------------------------------------------------------------------------------------------------


class Metadata(Message, frozen=True, tag="metadata"):
    """A request for metadata.

    ``topics`` None requests all topics. Internal topics are then included only with ``internal``. Without ``schemas``
    the reply omits the topics' schemas. If a reply was incomplete, its ``next`` is the ``start`` of the next request.
    """

    topics: Plain[str] | None = None
    schemas: bool = True
    internal: bool = False
    start: tuple[str, int] | None = None


class PartitionMetadata(msgspec.Struct, frozen=True, array_like=True):
    """One partition of TopicMetadata."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: Replicas[int]
    isr: Replicas[int]


class TopicMetadata(msgspec.Struct, frozen=True, array_like=True):
    """One topic of a MetadataReply.

    If ``code`` is not 0, the topic is unknown or its name is invalid, and only ``name`` and ``detail`` have a meaning.
    ``order`` shows which of two topics with the same name and different ids is newer: it has the greater order. The
    order of a topic may increase. 0 means unknown.
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

    A reply with a higher ``controller_epoch`` is usually newer. For a partition only its leader epoch shows that.

    A broker limits the size of a reply, so that it does not block its event loop for long. If the reply is incomplete,
    ``next`` is the topic and partition at which the next reply must start. The last topic of the reply may then be
    incomplete too, and continues in the next reply. Source: KIP-966, the cursor of DescribeTopicPartitions.
    """

    cluster_id: str
    controller_epoch: int
    brokers: Listed[BrokerEndpoint]
    topics: Listed[TopicMetadata]
    next: tuple[str, int] | None = None


# --- data plane -------------------------------------------------------------------------------------------------------


class ProducePartition(msgspec.Struct, frozen=True, array_like=True):
    """One partition of Produce. If ``topic_id`` is empty, the broker does not check it."""

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int


class Produce(Message, frozen=True, tag="produce"):
    """A request to append batches.

    ``acks`` is 0, 1 or ACKS_ALL. With 0 there is no reply, not even for an error. If the batches are transactional,
    ``transaction`` is the key of their transaction. Before the leader accepts the first batch of a producer id, it asks
    the transaction's coordinator whether the transaction is open.
    """

    acks: int
    timeout_ms: int
    partitions: Entries[ProducePartition]
    transaction: Name = ""


class ProduceResult(msgspec.Struct, frozen=True, array_like=True):
    """One result of Produce.

    ``base_offset`` is the offset of the first batch; the other batches follow without gaps. It is -1 after an error.

    With NOT_LEADER_OR_FOLLOWER, ``leader`` and ``leader_epoch`` are the newest that the broker knows. Source: KIP-951.
    """

    code: int
    base_offset: int
    append_time_us: int
    log_start_offset: int
    detail: str = ""
    leader: int = NO_LEADER
    leader_epoch: int = NO_EPOCH


class ProduceReply(Message, frozen=True, tag="produce_reply"):
    """The reply to Produce: one result per partition, in order.

    If a quota is exceeded, the broker handles the connection's next request after ``throttle_time_ms``.
    """

    results: Listed[ProduceResult]
    throttle_time_ms: int = 0


class FetchPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition of Fetch.

    - ``leader_epoch``: the current leader epoch, as the fetcher knows it. -1: the broker does not check it.
    - ``last_epoch``: the leader epoch of the fetcher's last batch. -1: the broker does not check for divergence.
    - ``columns``: the broker sends only these columns of the topic's newest schema, if a batch has them. An empty tuple
      requests only headers. None requests the batches as they are stored, as followers need them.
    - ``verify``: the fetcher has received data of these columns with a wrong checksum. The broker must verify the
      stored data.
    - ``refuses``: the follower refuses to truncate its log, because it has committed records that this leader lacks.
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

    ``replica_id`` is CONSUMER for a client. A follower sends its broker id and its incarnation.

    Fetch sessions are those of KIP-227. With ``session_epoch`` -1 there is no session. With 0 the request begins a new
    session of ``partitions``. In later requests of the session the epoch increases by one, ``partitions`` has only the
    changed partitions, and those in ``forgotten`` leave the session. A consumer may name at most ``MAX_ENTRIES``
    partitions.
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
    """An aborted transaction: the batches of ``producer_id`` from its first offset to its marker at ``last_offset``."""

    producer_id: int
    first_offset: int
    last_offset: int


class FetchedPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition of FetchReply.

    ``diverging`` (leader epoch, end offset) is set if the fetcher's last records are not in the leader's log. A
    follower must truncate its log to this end offset or to its own end of that epoch, whichever is lower. For a
    consumer it means that the records that it has read from that offset on are no longer in the log.

    ``stored_bytes`` is the size of the batches in the log if only some of their columns were sent, and else 0. The
    header of such a batch has a flag.
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
    """The reply to Fetch. ``code`` is an error of the session. In a session, unchanged partitions are left out.

    ``throttle_time_ms`` is that of ProduceReply.
    """

    code: int
    session_id: int
    partitions: Listed[FetchedPartition]
    throttle_time_ms: int = 0


class ListOffsetsPartition(msgspec.Struct, frozen=True, array_like=True):
    """One partition of ListOffsets."""

    topic: str
    partition: int
    timestamp_us: int  #: LATEST, EARLIEST, or a time: the first batch with a record at or after it
    leader_epoch: int = -1


class ListOffsets(Message, frozen=True, tag="list_offsets"):
    """A request for the earliest or latest offset of partitions, or for the offset of a time."""

    isolation: int
    partitions: Entries[ListOffsetsPartition]


class ListedOffset(msgspec.Struct, frozen=True, array_like=True):
    """One result of ListOffsets.

    The offset for a time is the base offset of the first batch with a record at or after that time. ``offset`` is -1 if
    there is no such record.
    """

    code: int
    offset: int
    timestamp_us: int
    leader_epoch: int
    detail: str = ""


class ListOffsetsReply(Message, frozen=True, tag="list_offsets_reply"):
    """The reply to ListOffsets: one result per partition, in order."""

    results: Listed[ListedOffset]


class InitProducerId(Message, frozen=True, tag="init_producer_id"):
    """A request for a producer id."""

    transactional_id: str | None = None


class InitProducerIdReply(Message, frozen=True, tag="init_producer_id_reply"):
    """The reply to InitProducerId."""

    producer_id: int
    producer_epoch: int
