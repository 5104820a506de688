"""Transactions over the wire, message by message, and the views of readers of both isolation levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    ACKS_ALL,
    CONSUMER,
    Ack,
    AddToTransaction,
    BeginTransaction,
    BeginTransactionReply,
    EndTransaction,
    EndTransactionReply,
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    Produce,
    ProducePartition,
    ProduceReply,
    ProduceResult,
    Reply,
    Request,
)
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.record.codec import EncodedBatch, decode_batch, encode_batch
from sparklog.record.header import HEADER_BYTES, Flag, unpack_headers
from sparklog.record.marker import Marker, decode_marker
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.security.request_rules import sender_of
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import rows
from tests.broker.topics import PATIENCE_S, leader, running

_R = TypeVar("_R", bound=Reply)


def ask(cluster: ProcessCluster, broker_id: int, request: Request, kind: type[_R]) -> _R:
    """Return the broker's response. Requests that only brokers may send are sent as another broker."""
    other = Identity(SenderKind.BROKER, 1 if broker_id != 1 else 2, 1)
    with cluster.connect(broker_id, identity=other if sender_of(request) is SenderKind.BROKER else None) as connection:
        reply, _ = connection.request(request)
    assert isinstance(reply, kind), reply
    return reply


def find_coordinator(cluster: ProcessCluster, kind: str, key: str) -> int:
    """Return the broker that coordinates the key, once there is one."""
    found = retried(cluster, lambda: running(cluster)[0], FindCoordinator(0, kind, key), FindCoordinatorReply)
    return found.broker.broker_id


def retried(cluster: ProcessCluster, where: Callable[[], int], request: Request, kind: type[_R]) -> _R:
    """Ask the broker that ``where()`` returns until its response is not retriable."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = _answer(cluster, where, request, kind)
        if not isinstance(answer, BrokerError):
            return answer
        if not answer.retriable or time.monotonic() > deadline:
            raise answer
        time.sleep(0.02)


def _answer(cluster: ProcessCluster, where: Callable[[], int], request: Request, kind: type[_R]) -> _R | BrokerError:
    try:
        return ask(cluster, where(), request, kind)
    except BrokerError as error:
        return error


class Client:
    """One run of one key: it begins, registers, produces, ends."""

    def __init__(self, cluster: ProcessCluster, key: str, run_id: str = "run", version: int = -1) -> None:
        self._cluster = cluster
        self.key = key
        self.run_id = run_id
        self.version = version
        self.producer_id = -1
        self._coordinator = -1
        self._turn = -1
        self._sequences: dict[tuple[str, int], int] = {}

    @property
    def turn(self) -> int:
        """Return the transaction's number in the run; 0 for a sink."""
        return max(self._turn, 0)

    def coordinator(self) -> int:
        return find_coordinator(self._cluster, "transaction", self.key)

    def ask(self, request: Request, kind: type[_R]) -> _R:
        """Ask the cached coordinator, or the present one if that has changed."""
        if self._coordinator in running(self._cluster):
            found = _answer(self._cluster, lambda: self._coordinator, request, kind)
            if not isinstance(found, BrokerError):
                return found
            if not found.retriable:
                raise found
        self._coordinator = self.coordinator()
        return retried(self._cluster, self.coordinator, request, kind)

    def begin(self, *, timeout_ms: int = 60_000) -> BeginTransactionReply:
        self._turn += self.version < 0
        request = BeginTransaction(0, self.key, self.run_id, self.version, timeout_ms, self.turn)
        reply = self.ask(request, BeginTransactionReply)
        self.producer_id = reply.producer_id
        self._sequences.clear()
        return reply

    def add(self, *partitions: tuple[str, int], group: str = "", offsets: tuple[GroupOffset, ...] = ()) -> None:
        named = (partitions, group, offsets, self.version, self.turn)
        self.ask(AddToTransaction(0, self.key, self.run_id, self.producer_id, 0, *named), Ack)

    def batch(self, topic: str, partition: int, count: int, prefix: str) -> EncodedBatch:
        """Return the producer's next batch for the partition."""
        sequence = self._sequences.get((topic, partition), 0)
        self._sequences[topic, partition] = sequence + count
        return encode_batch(
            rows(count, prefix),
            schema_id=0,
            compression=None,
            event_time="timestamp",
            producer_id=self.producer_id,
            producer_epoch=0,
            first_sequence=sequence,
            transactional=True,
        )

    def request(self, topic: str, partition: int, *batches: EncodedBatch, acks: int = ACKS_ALL,
                timeout_ms: int = 10_000) -> tuple[Produce, list[bytes]]:  # fmt: skip
        bodies = [bytes(body) for _, body in batches]
        wanted = ProducePartition(topic, partition, "", len(batches), sum(map(len, bodies)))
        return Produce(0, acks, timeout_ms, (wanted,), self.key), [*(header.pack() for header, _ in batches), *bodies]

    def send(self, topic: str, partition: int, *batches: EncodedBatch, **options: int) -> ProduceResult:
        """Produce to the leader, once."""
        with self._cluster.connect(leader(self._cluster, topic, partition)) as connection:
            reply, _ = connection.request(*self.request(topic, partition, *batches, **options))
        assert isinstance(reply, ProduceReply)
        return reply.results[0]

    def produce(self, topic: str, partition: int, count: int, prefix: str) -> ProduceResult:
        """Produce until the batch is acknowledged, or permanently refused."""
        batch = self.batch(topic, partition, count, prefix)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                result = self.send(topic, partition, batch, timeout_ms=3000)
                if result.code == 0 or not BrokerError(result.code).retriable or time.monotonic() > deadline:
                    return result
            except BrokerError as error:
                if not error.retriable or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def write(self, topic: str, partition: int, count: int, prefix: str) -> None:
        """Register the partition, then produce."""
        self.add((topic, partition))
        result = self.produce(topic, partition, count, prefix)
        assert result.code == ErrorCode.NONE, result

    def end(
        self, *, commit: bool, winners: Sequence[int] | None = None, timeout_ms: int = 10_000
    ) -> EndTransactionReply:
        chosen = tuple(winners) if winners is not None else (self.producer_id,) if commit else ()
        request = EndTransaction(0, self.key, self.run_id, self.version, commit, chosen, timeout_ms, self.turn)
        return self.ask(request, EndTransactionReply)


class Seen:
    """The result of one read: values by offset, markers, and the last response."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.markers: list[Marker] = []
        self.last: FetchedPartition | None = None


def read(cluster: ProcessCluster, topic: str, partition: int = 0, *, isolation: int, broker_id: int | None = None,
         ) -> Seen:  # fmt: skip
    """Return all records that a reader from the beginning sees, without aborted batches, which clients skip by their
    headers."""
    seen = Seen()
    at = leader(cluster, topic, partition) if broker_id is None else broker_id
    offset = 0
    with cluster.connect(at) as connection:
        while True:
            wanted = FetchPartition(topic, partition, "", -1, offset, 1 << 20)
            reply, body = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 1 << 20, isolation, 0, -1, (wanted,)))
            assert isinstance(reply, FetchReply)
            seen.last = reply.partitions[0]
            assert seen.last.code == 0, seen.last
            if not seen.last.batch_count:
                return seen
            offset = _take(seen, seen.last, body)


def _take(seen: Seen, fetched: FetchedPartition, body: memoryview) -> int:
    headers = unpack_headers(body[: fetched.batch_count * HEADER_BYTES])
    at = fetched.batch_count * HEADER_BYTES
    for header in headers:
        bytes_here = body[at : at + header.stored_bytes]
        at += header.stored_bytes
        if header.flags & Flag.CONTROL:
            seen.markers.append(decode_marker(header, bytes_here))
            continue
        aborted = any(
            header.producer_id == gone.producer_id and gone.first_offset <= header.base_offset <= gone.last_offset
            for gone in fetched.aborted
        )
        if not (aborted and header.flags & Flag.TRANSACTIONAL):
            batch: pa.RecordBatch = decode_batch(header, bytes_here, DEFAULT_SCHEMA)
            seen.values += batch.column("value").to_pylist()
    return int(headers[-1].next_offset)


def last_stable_offset(cluster: ProcessCluster, topic: str, partition: int = 0) -> int:
    """Return the leader's value, or -1 while there is no leader."""
    at = leader(cluster, topic, partition)
    with cluster.connect(at) as connection:
        wanted = FetchPartition(topic, partition, "", -1, 0, 1)
        reply, _ = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 1, 1, 0, -1, (wanted,)))
    assert isinstance(reply, FetchReply)
    return reply.partitions[0].last_stable_offset
