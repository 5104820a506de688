"""Common parts of the broker's tests: a broker without a process, batches to send, and short forms of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.groups.retention_holds import RetentionHolds
from sparklog.broker.internal_topics import OFFSETS
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.leader_and_isr import ControlUpdates
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import OnLogFailed, Partition, PartitionHost
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.replication.replica_hosting import ReplicaHosting
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.config import broker_config
from sparklog.net.blocking import BlockingConnection
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    ACKS_ALL,
    CONSUMER,
    ControlUpdate,
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    ListedOffset,
    ListOffsets,
    ListOffsetsPartition,
    ListOffsetsReply,
    Produce,
    ProducePartition,
    ProduceReply,
    ProduceResult,
)
from sparklog.record.codec import EncodedBatch, decode_batch, encode_batch
from sparklog.record.header import HEADER_BYTES, BatchHeader, unpack_headers
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.replica.fetch_session import SessionCache
from sparklog.storage.log_directory import LogDirectory


def broker_context(
    broker_id: int = 1, kind: type[BrokerContext] = BrokerContext, *, settings: Mapping[str, str] | None = None
) -> BrokerContext:
    """Return the context of a broker without metadata."""
    return kind(broker_id, "cluster", log_dir="", config=broker_config(settings or {}))


class LocalReplicas:
    """The replicas of one broker without its process: its partitions, its fetches, and updates of the controller.

    ``effects`` returns the object that performs the effects of the replicas.
    """

    def __init__(
        self, context: BrokerContext, directory: LogDirectory, effects: Callable[[LocalReplicas], object]
    ) -> None:
        self.context = context
        self.partitions = Partitions(context, directory)
        self.access = Access(context.credentials, context.cache, context.counters, context.audit)
        self.fetches = Fetches(context, self.access, self.partitions, SessionCache(slots=10))
        self.replicas = ReplicaHosting(
            context,
            self.partitions,
            effects=cast(PartitionHost, effects(self)),
            on_log_set_aside=lambda: None,
            log_failed=lambda partition, error: None,
        )
        self.control = control_updates(context, self.partitions, self.replicas)

    def update(self, connection: object, update: ControlUpdate) -> None:
        self.control.handle(cast(ServerConnection, connection), update, memoryview(b""))


def control_updates(context: BrokerContext, partitions: object, hosting: object) -> ControlUpdates:
    """Return the object that applies updates to these replicas, in a broker whose registration is trusted."""
    return ControlUpdates(
        context,
        Access(context.credentials, context.cache, context.counters, context.audit),
        cast(Partitions, partitions),
        hosting=cast(ReplicaHosting, hosting),
        registry=cast(ZkRegistration, SimpleNamespace(mark_trusted=lambda: None)),
        on_update=lambda update: None,
    )


def log_maintenance(
    context: BrokerContext,
    partitions: object,
    directory: LogDirectory,
    *,
    log_failed: OnLogFailed = lambda partition, error: None,
    log_start_moved: Callable[[Partition], None] = lambda partition: None,
) -> LogMaintenance:
    """Return the maintenance of these partitions' logs, in a broker without groups."""
    groups: HostedCoordinators[GroupHost] = HostedCoordinators(context, OFFSETS)
    return LogMaintenance(
        context,
        cast(Partitions, partitions),
        directory=directory,
        holds=RetentionHolds(context, groups),
        log_start_moved=log_start_moved,
        log_failed=log_failed,
    )


def rows(count: int, prefix: str = "v") -> pa.RecordBatch:
    """Return ``count`` rows of the default schema, with values ``<prefix><i>``."""
    return pa.RecordBatch.from_pydict(
        {
            "key": [b"k%d" % i for i in range(count)],
            "value": [f"{prefix}{i}".encode() for i in range(count)],
            "headers": [None] * count,
            "timestamp": [None] * count,
        },
        schema=DEFAULT_SCHEMA,
    )


def encoded(count: int, prefix: str = "v", *, producer: tuple[int, int, int] = (-1, -1, -1)) -> EncodedBatch:
    """Return one encoded batch. ``producer`` is (id, epoch, first sequence)."""
    producer_id, producer_epoch, first_sequence = producer
    return encode_batch(
        rows(count, prefix),
        schema_id=0,
        compression=None,
        event_time="timestamp",
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        first_sequence=first_sequence,
    )


def produce_request(
    topic: str,
    batches: Sequence[tuple[BatchHeader, bytes | pa.Buffer]],
    *,
    partition: int = 0,
    acks: int = ACKS_ALL,
    topic_id: str = "",
    timeout_ms: int = 10_000,
) -> tuple[Produce, list[bytes]]:
    bodies = [bytes(body) for _, body in batches]
    wanted = ProducePartition(topic, partition, topic_id, len(batches), sum(map(len, bodies)))
    return Produce(0, acks, timeout_ms, (wanted,)), [*(header.pack() for header, _ in batches), *bodies]


def produce(
    connection: BlockingConnection, topic: str, *batches: tuple[BatchHeader, bytes | pa.Buffer], **options: object
) -> ProduceResult:
    """Produce to one partition and return its result."""
    reply, _ = connection.request(*produce_request(topic, batches, **options))  # type: ignore[arg-type]
    assert isinstance(reply, ProduceReply)
    return reply.results[0]


def fetch(
    connection: BlockingConnection,
    topic: str,
    offset: int,
    *,
    partition: int = 0,
    max_wait_ms: int = 0,
    max_bytes: int = 1 << 20,
    leader_epoch: int = -1,
    topic_id: str = "",
) -> tuple[FetchedPartition, memoryview]:
    """Send one consumer fetch without a session."""
    wanted = FetchPartition(topic, partition, topic_id, leader_epoch, offset, max_bytes)
    reply, body = connection.request(Fetch(0, CONSUMER, -1, max_wait_ms, 1, max_bytes, 0, 0, -1, (wanted,)))
    assert isinstance(reply, FetchReply)
    return reply.partitions[0], body


def decoded(fetched: FetchedPartition, body: memoryview) -> list[tuple[int, bytes]]:
    """Return the (offset, value) of every row in a fetch response."""
    headers = unpack_headers(body[: fetched.batch_count * HEADER_BYTES])
    at = fetched.batch_count * HEADER_BYTES
    found: list[tuple[int, bytes]] = []
    for header in headers:
        batch = decode_batch(header, body[at : at + header.length], DEFAULT_SCHEMA)
        found.extend(enumerate(batch.column("value").to_pylist(), header.base_offset))
        at += header.stored_bytes
    return found


def read_all(connection: BlockingConnection, topic: str, *, partition: int = 0, end: int | None = None) -> list[bytes]:
    """Return all values below ``end``, or below the high watermark."""
    values: list[bytes] = []
    while end is None or len(values) < end:
        fetched, body = fetch(connection, topic, len(values), partition=partition, max_wait_ms=200)
        assert fetched.code == 0, fetched
        found = decoded(fetched, body)
        if not found and end is None:
            break
        assert [offset for offset, _ in found] == list(range(len(values), len(values) + len(found)))
        values.extend(value for _, value in found)
    return values


def list_offset(connection: BlockingConnection, topic: str, timestamp_us: int, *, partition: int = 0) -> ListedOffset:
    request = ListOffsets(0, 0, (ListOffsetsPartition(topic, partition, timestamp_us),))
    reply, _ = connection.request(request)
    assert isinstance(reply, ListOffsetsReply)
    return reply.results[0]
