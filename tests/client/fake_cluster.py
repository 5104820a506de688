"""A cluster in one thread: real sockets and frames, logs in lists, and faults on demand.

It keeps the promises that a client relies on (only leaders respond, the broker's own table checks sequences, batches
are complete) and breaks those that a test names. It has no replication: all brokers share one set of logs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pyarrow as pa

from sparklog.config import broker_config, in_force
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, BrokerEndpoint, TopicPartition
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    EARLIEST,
    LATEST,
    AbortedRange,
    AbortHanging,
    AbortTransaction,
    Ack,
    AddToTransaction,
    AlterReassignments,
    AlterReassignmentsReply,
    BeginTransaction,
    CommitOffsets,
    CreatePartitions,
    CreateTopic,
    CreateTopicReply,
    DeleteGroup,
    DeleteTopic,
    DescribeBroker,
    DescribeBrokerReply,
    DescribeGroup,
    EndTransaction,
    ErrorReply,
    Fetch,
    FetchedPartition,
    FetchOffsets,
    FetchReply,
    FindCoordinator,
    FindCoordinatorReply,
    FindHanging,
    HelloReply,
    InitProducerId,
    InitProducerIdReply,
    ListedOffset,
    ListGroups,
    ListOffsets,
    ListOffsetsReply,
    ListReassignments,
    ListReassignmentsReply,
    ListTransactions,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    PartitionResult,
    Produce,
    ProduceReply,
    ProduceResult,
    ReassignmentStatus,
    Request,
    TopicMetadata,
    TouchTransaction,
)
from sparklog.record.header import HEADER_BYTES, Flag, unpack_header
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema
from sparklog.record.validate import validate_batch
from tests.client.fake_coordinator import FakeCoordinator
from tests.client.fake_groups import FakeGroups
from tests.client.fake_log import FakeLog, FakeTopic

T = TypeVar("T")

#: A fault that a test applies to a request before the broker handles it. True means that the fault has handled it.
Fault = Callable[["FakeBroker", ServerConnection, Request], bool]


FAKE_CONFIG = broker_config({"min.insync.replicas": "1"})

#: The number of times that a response with some of the columns may exceed ``max_bytes`` of the log.
STRETCH = 8


class FakeBroker:
    """One broker: a port and its faults."""

    def __init__(self, cluster: FakeCluster, broker_id: int) -> None:
        self.cluster = cluster
        self.broker_id = broker_id
        self.port = 0
        self.server: Server | None = None
        self.faults: list[Fault] = []
        self.requests: list[Request] = []

    def metadata_broker(self) -> BrokerEndpoint:
        return BrokerEndpoint(self.broker_id, "127.0.0.1", self.port, 1)


class FakeCluster:
    """Start with ``with``. Every change from the test's thread goes through ``do``."""

    def __init__(self, brokers: int = 2, security: ListenerSecurity = ListenerSecurity()) -> None:  # noqa: B008
        self.security = security
        self.loop = asyncio.new_event_loop()
        self.brokers = [FakeBroker(self, broker_id) for broker_id in range(brokers)]
        self.topics: dict[str, FakeTopic] = {}
        #: Moves in progress, which never end without the test.
        self.moves: dict[tuple[str, int], tuple[int, ...]] = {}
        self.next_producer_id = 100
        self.topic_ids = 0
        self.coordinator = FakeCoordinator(self)
        self.groups = FakeGroups()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        for broker in self.brokers:
            self.start(broker.broker_id)
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self.brokers:
            self.stop(broker.broker_id)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers)

    # --- called by tests ---

    def do(self, change: Callable[[], T]) -> T:
        """Run ``change`` on the brokers' thread and return its result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(change())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(30)

    def create(
        self, name: str, *, partitions: int = 1, schema: pa.Schema = DEFAULT_SCHEMA, key: Any = None
    ) -> FakeTopic:
        def make() -> FakeTopic:
            self.topic_ids += 1
            keys = key if key is not None else ("key",) if schema.equals(DEFAULT_SCHEMA) else ()
            topic = self.topics[name] = FakeTopic(name, f"id{self.topic_ids}", partitions, schema, tuple(keys))
            for index, log in enumerate(topic.logs):
                log.leader = index % len(self.brokers)
            return topic

        return self.do(make)

    def fault(self, broker_id: int, fault: Fault) -> None:
        self.do(lambda: self.brokers[broker_id].faults.append(fault))

    def move(self, tp: TopicPartition, leader: int) -> None:
        def change() -> None:
            log = self.topics[tp.topic].logs[tp.partition]
            log.leader, log.epoch = leader, log.epoch + 1

        self.do(change)

    def start(self, broker_id: int) -> None:
        broker = self.brokers[broker_id]

        async def listen() -> None:
            broker.server = await serve(
                lambda connection: _Handler(broker, connection),
                host="127.0.0.1",
                port=broker.port,
                describe=lambda cid, version: HelloReply(cid, version, broker_id, 1, "fake", 1 << 27),
                max_frame_bytes=1 << 27,
                max_in_flight=64,
                queued_max_bytes=1 << 28,
                security=self.security,
            )
            broker.port = broker.server.port

        asyncio.run_coroutine_threadsafe(listen(), self.loop).result(30)

    def stop(self, broker_id: int) -> None:
        broker = self.brokers[broker_id]
        server = broker.server

        async def close() -> None:
            assert server is not None
            # asyncio leaves a socket open that is accepted in the turn before its server closes. So the server stops
            # accepting first, and accepted sockets become connections a few turns later.
            server.stop_accepting()
            for _ in range(3):
                await asyncio.sleep(0)
            await server.close()
            broker.server = None

        if server is not None:
            asyncio.run_coroutine_threadsafe(close(), self.loop).result(30)

    def records(self, topic: str) -> list[pa.RecordBatch]:
        """Return all records of a topic, partition by partition."""

        def read() -> list[pa.RecordBatch]:
            found = self.topics[topic]
            return [
                pa.ipc.read_record_batch(pa.py_buffer(body), parse_schema(found.schemas[header.schema_id].message))
                for log in found.logs
                for header, body in log.batches
            ]

        return self.do(read)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self.loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        self.loop.close()


class _Handler:
    """One connection of one broker."""

    def __init__(self, broker: FakeBroker, connection: ServerConnection) -> None:
        self.broker = broker
        self.cluster = broker.cluster
        self.connection = connection

    def connection_lost(self) -> None:
        pass

    def request_received(self, request: Request, body: memoryview) -> None:
        self.broker.requests.append(request)
        for fault in list(self.broker.faults):
            if fault(self.broker, self.connection, request):
                return
        self.answer(request, body)

    def answer(self, request: Request, body: memoryview) -> None:
        cid = request.cid
        match request:
            case Metadata():
                self.connection.reply(self._metadata(request))
            case Produce():
                reply = ProduceReply(cid, tuple(self._produce(request, body)))
                self.connection.done(cid) if request.acks == 0 else self.connection.reply(reply)
            case Fetch():
                self._fetch(request, time.monotonic() + request.max_wait_ms / 1000)
            case ListOffsets():
                found = tuple(self._listed(part, request.isolation) for part in request.partitions)
                self.connection.reply(ListOffsetsReply(cid, found))
            case InitProducerId():
                self.cluster.next_producer_id += 1
                self.connection.reply(InitProducerIdReply(cid, self.cluster.next_producer_id, 0))
            case FindCoordinator():
                coordinator = self.cluster.brokers[self.cluster.coordinator.broker_id]
                self.connection.reply(FindCoordinatorReply(cid, coordinator.metadata_broker(), 0))
            case (
                BeginTransaction()
                | AddToTransaction()
                | TouchTransaction()
                | EndTransaction()
                | AbortTransaction()
                | ListTransactions()
                | FindHanging()
                | AbortHanging()
            ):
                self.cluster.coordinator.handle(self.broker.broker_id, request, self.connection.reply)
            case ListGroups() | DescribeGroup() | CommitOffsets() | DeleteGroup() | FetchOffsets():
                self.connection.reply(self.cluster.groups.answer(request))
            case CreateTopic():
                self._create(request)
            case DeleteTopic():
                known = self.cluster.topics.pop(request.name, None)
                unknown = ErrorReply(cid, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.name!r}")
                self.connection.reply(Ack(cid) if known else unknown)
            case CreatePartitions():
                self._create_partitions(request)
            case AlterReassignments():
                self.connection.reply(self._moves(request))
            case ListReassignments():
                self.connection.reply(ListReassignmentsReply(cid, self._under_way()))
            case DescribeBroker():
                self.connection.reply(
                    DescribeBrokerReply(
                        cid, self.broker.broker_id, 1, 4242, "0", "/logs", "running", (), {}, in_force(FAKE_CONFIG)
                    )
                )
            case _:
                self.connection.reply(ErrorReply(cid, ErrorCode.UNKNOWN_API, str(request)))

    def _create(self, request: CreateTopic) -> None:
        cluster = self.cluster
        if request.name in cluster.topics:
            self.connection.reply(ErrorReply(request.cid, ErrorCode.TOPIC_ALREADY_EXISTS, request.name))
            return
        cluster.topic_ids += 1
        schema = parse_schema(request.schema) if request.schema else DEFAULT_SCHEMA
        count = max(1, request.partitions)
        topic = FakeTopic(request.name, f"id{cluster.topic_ids}", count, schema, request.key_columns)
        topic.config = request.config
        cluster.topics[request.name] = topic
        self.connection.reply(CreateTopicReply(request.cid, topic.topic_id))

    def _create_partitions(self, request: CreatePartitions) -> None:
        topic = self.cluster.topics.get(request.topic)
        if topic is None:
            error = ErrorReply(request.cid, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.topic!r}")
            self.connection.reply(error)
        elif request.partitions <= len(topic.logs):
            detail = f"it has {len(topic.logs)}"
            self.connection.reply(ErrorReply(request.cid, ErrorCode.INVALID_PARTITIONS, detail))
        else:
            topic.logs += [FakeLog() for _ in range(request.partitions - len(topic.logs))]
            self.connection.reply(CreateTopicReply(request.cid, topic.topic_id))

    def _moves(self, request: AlterReassignments) -> AlterReassignmentsReply:
        results = []
        for move in request.moves:
            tp = (move.topic, move.partition)
            code = ErrorCode.NONE
            if move.topic not in self.cluster.topics:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif move.target is not None:
                self.cluster.moves[tp] = move.target
            elif self.cluster.moves.pop(tp, None) is None:
                code = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
            results.append(PartitionResult(*tp, code))
        return AlterReassignmentsReply(request.cid, tuple(results))

    def _under_way(self) -> tuple[ReassignmentStatus, ...]:
        found = []
        for (topic, partition), target in self.cluster.moves.items():
            leader = self.cluster.topics[topic].logs[partition].leader
            held = (leader,)
            found.append(ReassignmentStatus(topic, partition, target, held, (*target, leader), held, leader, 0))
        return tuple(found)

    def _metadata(self, request: Metadata) -> MetadataReply:
        cluster = self.cluster
        names = sorted(cluster.topics) if request.topics is None else request.topics
        topics = []
        for name in names:
            topic = cluster.topics.get(name)
            if topic is None:
                topics.append(TopicMetadata(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name))
                continue
            parts = tuple(
                PartitionMetadata(index, log.leader, log.epoch, (log.leader,), (log.leader,))
                for index, log in enumerate(topic.logs)
            )
            topics.append(
                TopicMetadata(
                    0, name, topic.topic_id, parts, tuple(topic.schemas), topic.key, topic.event_time, topic.config
                )
            )
        alive = tuple(broker.metadata_broker() for broker in cluster.brokers if broker.server is not None)
        return MetadataReply(request.cid, "fake", 1, alive, tuple(topics))

    def _log(self, topic: str, partition: int, topic_id: str) -> FakeLog:
        known = self.cluster.topics.get(topic)
        if known is None or partition >= len(known.logs):
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{topic}-{partition}")
        if topic_id and known.topic_id != topic_id:
            raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, f"{topic_id} found, {known.topic_id} expected")
        log = known.logs[partition]
        if log.leader != self.broker.broker_id:
            raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{topic}-{partition} is led by {log.leader}")
        return log

    def _produce(self, request: Produce, body: memoryview) -> list[ProduceResult]:
        results = []
        at = 0
        for part in request.partitions:
            assert part.batch_count == 1
            header = unpack_header(body, at)
            content = bytes(body[at + HEADER_BYTES : at + HEADER_BYTES + part.body_bytes])
            at += HEADER_BYTES + part.body_bytes
            try:
                log = self._log(part.topic, part.partition, part.topic_id)
                topic = self.cluster.topics[part.topic]
                if header.flags & Flag.TRANSACTIONAL and header.producer_id not in log.producers.transactions:
                    self.cluster.coordinator.verify(
                        request.transaction, header, TopicPartition(part.topic, part.partition)
                    )
                latest = topic.schemas[-1]
                validate_batch(
                    header,
                    content,
                    schema=parse_schema(latest.message),
                    schema_id=latest.schema_id,
                    max_message_bytes=int(topic.config.get("max.message.bytes", 1 << 24)),
                    event_time=topic.event_time,
                )
                results.append(ProduceResult(0, log.append(header, content), 0, 0))
            except BrokerError as error:
                leader = self._leader_now(part.topic, part.partition, error.code)
                results.append(ProduceResult(int(error.code), -1, 0, 0, error.detail, *leader))
        assert at == len(body)
        return results

    def _leader_now(self, topic: str, partition: int, code: int) -> tuple[int, int]:
        """Return the leader and its epoch, as a broker that is no longer the leader names them."""
        if code != ErrorCode.NOT_LEADER_OR_FOLLOWER:
            return NO_LEADER, NO_EPOCH
        log = self.cluster.topics[topic].logs[partition]
        return log.leader, log.epoch

    def _listed(self, part: Any, isolation: int) -> ListedOffset:
        try:
            log = self._log(part.topic, part.partition, "")
        except BrokerError as error:
            return ListedOffset(int(error.code), -1, -1, -1, error.detail)
        if part.timestamp_us == LATEST:
            return ListedOffset(0, log.readable_end(isolation), -1, log.epoch)
        if part.timestamp_us == EARLIEST:
            return ListedOffset(0, log.start, -1, log.epoch)
        for header, _ in log.batches:
            if header.max_timestamp >= part.timestamp_us:
                return ListedOffset(0, header.base_offset, header.max_timestamp, log.epoch)
        return ListedOffset(0, -1, -1, log.epoch)

    def _fetch(self, request: Fetch, until: float) -> None:
        if self.connection.closed:
            return
        answers, body = [], b""
        for part in request.partitions:
            answer, content = self._fetched(part, request)
            answers.append(answer)
            body += content
        if not body and not any(answer.code for answer in answers) and time.monotonic() < until:
            self.cluster.loop.call_later(0.01, self._fetch, request, until)
            return
        self.connection.reply(FetchReply(request.cid, 0, 0, tuple(answers)), [body])

    def _fetched(self, part: Any, request: Fetch) -> tuple[FetchedPartition, bytes]:
        def failed(code: int, detail: str) -> tuple[FetchedPartition, bytes]:
            return FetchedPartition(part.topic, part.partition, code, -1, -1, -1, -1, detail=detail), b""

        try:
            log = self._log(part.topic, part.partition, part.topic_id)
        except BrokerError as error:
            return failed(int(error.code), error.detail)
        if not log.start <= part.fetch_offset <= log.end:
            return failed(ErrorCode.OFFSET_OUT_OF_RANGE, f"{part.fetch_offset} not in [{log.start}, {log.end}]")
        headers, bodies = b"", b""
        end = log.readable_end(request.isolation)
        # As a broker does: a response with batches that need no verification covers more of the log.
        most = part.max_bytes if part.columns is None or part.verify else STRETCH * part.max_bytes
        for header, content in log.batches:
            if (
                header.base_offset < end
                and header.next_offset > part.fetch_offset
                and (not bodies or len(bodies) < most)
            ):
                headers += header.pack()
                bodies += content
        count = len(headers) // HEADER_BYTES
        aborted = log.producers.transactions.aborted_between(part.fetch_offset, end) if request.isolation else ()
        answer = FetchedPartition(
            part.topic,
            part.partition,
            0,
            log.end,
            log.readable_end(1),
            log.start,
            log.end,
            count,
            len(bodies),
            aborted=tuple(AbortedRange(*over) for over in aborted),
        )
        return answer, headers + bodies
