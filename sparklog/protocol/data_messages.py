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

    The other fields are for a broker or controller that offers to prove its identity (see ``protocol.proof``). They are
    its role, its number (the broker id), its incarnation (for a controller, the controller epoch), and the ids of the
    cluster secrets that it knows.
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

    ``local_socket`` is the path of the Unix socket for local reads (see ``local_reads``), or empty if the broker has no
    such socket. From this socket, processes on the host with this ``boot_id`` can get a segment's open files.

    ``unix_socket`` is the abstract name, without the leading zero byte, of a Unix socket for all requests (see
    ``net/unix_socket``). It is empty if the broker has no such socket. ``reached_at`` is the local address of the TCP
    connection at the broker. A client on the same host may continue on the Unix socket. There, the HelloReply has the
    same ``unix_socket``, which proves that the same broker process has replied.

    ``proof`` is the broker's proof that it knows the secret with the id ``key_id``. ``proof`` is empty if Hello offered
    no proof, or the broker knows none of the offered secrets.

    If ``sasl_mechanisms`` is not empty, the client must log in by one of them before any other request. The names of
    the sockets are then empty.
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
    """The proof of the process that opened the connection. It sends this after a ``HelloReply`` with a proof.

    The reply is an Ack. It means that the broker accepts the identity (of a broker or controller) in Hello.
    """

    proof: Token


class ErrorReply(Message, frozen=True, tag="error_reply"):
    """The reply to a request that has failed as a whole.

    ``cid`` is -1 if the request's correlation id could not be decoded.
    """

    code: int
    detail: str
    throttle_time_ms: int = 0


# --- metadata ---------------------------------------------------------------------------------------------------------


class Metadata(Message, frozen=True, tag="metadata"):
    """A request for the cluster's metadata: its brokers, topics and partitions.

    If ``topics`` is None, the request is for all topics, but for internal topics only if ``internal`` is true. If
    ``schemas`` is false, the reply omits the topics' schemas. If a reply was incomplete, its ``next`` is the ``start``
    of the next request.
    """

    topics: Plain[str] | None = None
    schemas: bool = True
    internal: bool = False
    start: tuple[str, int] | None = None


class PartitionMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The metadata of one partition: its leader, replicas and ISR."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: Replicas[int]
    isr: Replicas[int]


class TopicMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The metadata of one topic, in a MetadataReply.

    If ``code`` is not 0, the topic is unknown or its name is invalid, and only ``name`` and ``detail`` have a meaning.
    Of two topics with the same name and different ids, the newer one has the greater ``order``. The order of a topic
    may increase; 0 means that it is unknown.
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

    A reply with a higher ``controller_epoch`` is usually newer. For one partition, only the leader epochs show which of
    two replies is newer.

    A broker limits the size of a reply, so that it does not block its event loop for long. If the reply is incomplete,
    ``next`` is the topic and partition at which the next reply must start. The last topic of the reply may then be
    incomplete too, and continues in the next reply. Source: KIP-966, the cursor of DescribeTopicPartitions.
    """

    cluster_id: str
    controller_epoch: int
    brokers: Listed[BrokerEndpoint]
    topics: Listed[TopicMetadata]
    next: tuple[str, int] | None = None
    throttle_time_ms: int = 0


# --- data plane -------------------------------------------------------------------------------------------------------


class ProducePartition(msgspec.Struct, frozen=True, array_like=True):
    """The header fields for one partition of a Produce request.

    If ``topic_id`` is empty, the broker does not check it.
    """

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int


class Produce(Message, frozen=True, tag="produce"):
    """A request to append batches.

    ``acks`` is 0, 1 or ACKS_ALL. With 0 the broker sends no reply, not even for an error. If the batches are
    transactional, ``transaction`` is the transactional key (see BeginTransaction). Before the leader accepts the first
    batch of a producer id, it asks the transaction's coordinator whether the transaction is open.
    """

    acks: int
    timeout_ms: int
    partitions: Entries[ProducePartition]
    transaction: Name = ""


class ProduceResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of Produce for one partition.

    ``base_offset`` is the offset of the first batch, or -1 after an error. The other batches follow without gaps.

    With NOT_LEADER_OR_FOLLOWER, ``leader`` and ``leader_epoch`` are the newest ones that the broker knows. Source:
    KIP-951.
    """

    code: int
    base_offset: int
    append_time_us: int
    log_start_offset: int
    detail: str = ""
    leader: int = NO_LEADER
    leader_epoch: int = NO_EPOCH


class ProduceReply(Message, frozen=True, tag="produce_reply"):
    """The reply to Produce: one result per partition, in the order of the request."""

    results: Listed[ProduceResult]
    throttle_time_ms: int = 0


class FetchPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition of a Fetch request.

    - ``leader_epoch``: the current leader epoch, as the fetcher knows it. With -1 the broker does not check it.
    - ``last_epoch``: the leader epoch of the fetcher's last batch. With -1 the broker does not check for divergence.
    - ``columns``: the broker sends only these columns of the topic's newest schema, if a batch has them. An empty tuple
      requests only headers. None requests the batches as they are stored, which followers need.
    - ``verify``: the fetcher has received data of these columns with a wrong checksum, so the broker must verify the
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
    """A request of a consumer or a follower for batches.

    ``replica_id`` is CONSUMER for a client. A follower sends its broker id and its incarnation.

    Fetch sessions work as in KIP-227. With ``session_epoch`` -1 there is no session. With 0 the request begins a new
    session of ``partitions``. In each later request of the session, the epoch is one higher, ``partitions`` has only
    the changed partitions, and the partitions in ``forgotten`` leave the session. A consumer may request at most
    ``MAX_ENTRIES`` partitions.
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
    """The range of an aborted transaction in a partition.

    The range has the batches of ``producer_id`` from ``first_offset`` to the abort marker at ``last_offset``.
    """

    producer_id: int
    first_offset: int
    last_offset: int


class FetchedPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of Fetch for one partition.

    ``diverging`` (leader epoch, end offset) is set if the fetcher's last records are not in the leader's log. A
    follower must truncate its log to this end offset or to its own end of that epoch, whichever is lower. For a
    consumer it usually means that the records at and above this end offset, which it has read, are no longer in the
    log.

    ``stored_bytes`` is 0 if the batches were sent as they are stored. If only some columns were sent, it is the size of
    these batches in the log. The header of a batch with only some columns has a flag.
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
    """The reply to Fetch. In a fetch session, it omits unchanged partitions. ``code`` is an error of the session."""

    code: int
    session_id: int
    partitions: Listed[FetchedPartition]
    throttle_time_ms: int = 0


class ListOffsetsPartition(msgspec.Struct, frozen=True, array_like=True):
    """One partition of a ListOffsets request. ``timestamp_us`` is LATEST, EARLIEST or a time."""

    topic: str
    partition: int
    timestamp_us: int  #: LATEST, EARLIEST, or a time: the first batch with a record at or after it
    leader_epoch: int = -1


class ListOffsets(Message, frozen=True, tag="list_offsets"):
    """A request for the earliest or latest offset of partitions, or for the first batch at or after a time."""

    isolation: int
    partitions: Entries[ListOffsetsPartition]


class ListedOffset(msgspec.Struct, frozen=True, array_like=True):
    """The result of ListOffsets for one partition.

    If the request has a time, ``offset`` is the base offset of the first batch with a record at or after that time. It
    is -1 if there is no such record.
    """

    code: int
    offset: int
    timestamp_us: int
    leader_epoch: int
    detail: str = ""


class ListOffsetsReply(Message, frozen=True, tag="list_offsets_reply"):
    """The reply to ListOffsets: one result per partition, in the order of the request."""

    results: Listed[ListedOffset]
    throttle_time_ms: int = 0


class InitProducerId(Message, frozen=True, tag="init_producer_id"):
    """A request of an idempotent producer for a new producer id."""

    transactional_id: str | None = None


class InitProducerIdReply(Message, frozen=True, tag="init_producer_id_reply"):
    """The reply to InitProducerId: the producer id and its epoch."""

    producer_id: int
    producer_epoch: int
    throttle_time_ms: int = 0
