"""The fast path for one record of an idle producer.

``send`` puts the record straight into a request, and the response goes straight to the waiting caller. The checks of
the general path are made once per partition; their result (``_Route``) is valid until the metadata changes. The batch
is in the partition queues like every other batch. The general path handles every response that is not an
acknowledgement. The general path also sends the record if the producer has any other work.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.producer.completion import CompletionLatch, notify
from sparklog.client.producer.delivery import DeliveryHandle, DeliveryReports
from sparklog.client.producer.inflight_requests import InflightRequests, SentRequest
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import BatchState, PartitionQueues, ProducerBatch
from sparklog.client.producer.partitioning import ProducerTopic, partition_of_record
from sparklog.client.producer.producer_thread import ProducerThread
from sparklog.client.producer.record_chunk import IoThread, Record
from sparklog.client.producer.record_future import RecordFuture, abandon_listener
from sparklog.client.producer.results import BatchOutcome, RecordMetadata
from sparklog.client.producer.send_loop import SendLoop
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.net.async_client import AsyncConnection, ReplyAndBody
from sparklog.protocol.connection import PreparedRequest
from sparklog.protocol.messages import ProduceReply
from sparklog.record.codec import EncodedBatch
from sparklog.record.small_batch_encoder import single_record_body, single_record_header

#: The maximum size of a record on this path. A larger record takes the general path, which waits for room in the
#: buffer.
_MOST_BYTES = 64 * 1024
#: The maximum number of prepared requests of all partitions. Each request takes a few hundred bytes.
_MOST_PREPARED = 1024


class _Route:
    """The connection to the leader of one partition, and the prepared requests for direct sends to it."""

    __slots__ = ("broker_id", "connection", "requests", "topic", "tp")

    def __init__(self, tp: TopicPartition, topic: ProducerTopic, broker_id: int, connection: AsyncConnection) -> None:
        self.tp = tp
        self.topic = topic
        self.broker_id = broker_id
        self.connection = connection
        #: Prepared requests, keyed by the length of their batch.
        self.requests: dict[int, PreparedRequest] = {}


class DirectSender:
    """The fast path for single records: if the producer has no other work, the caller's thread sends its record.

    A part of the ``Sender``. Any thread may call ``try_send``.
    """

    def __init__(
        self,
        sender: SendLoop,
        thread: ProducerThread,
        *,
        cluster: LoopCluster,
        queues: PartitionQueues,
        requests: InflightRequests,
        reports: DeliveryReports,
        writes: OpenWrites,
    ) -> None:
        """Create the fast path of one sender.

        ``writes`` keeps every directly sent record until the record has an outcome. ``reports`` delivers the outcomes
        if the sender has other work at that time.
        """
        self._sender = sender
        self._may_send = sender.may_send
        self._is_idle = sender.is_idle
        self._io_thread = thread
        self._act = thread.caller_io.act
        self._handoff = thread.handoff
        self._cluster = cluster
        self._metadata = cluster.metadata
        self._queues = queues
        self._requests = requests
        self._reports = reports
        self._writes = writes
        self._open = writes.open
        self._routes: dict[tuple[str, int], _Route] = {}
        #: The version of the metadata from which all routes were made.
        self._version = -1
        #: The number of prepared requests. This number may be too high, but not too low.
        self._prepared = 0

    def try_send(self, topic: ProducerTopic, partition: int | None, record: Record, size: int) -> RecordFuture | None:
        """Send the record and return its future, or return None if the record must go through the buffer."""
        if not self._handoff.lent or self._requests.in_flight:
            return None
        key, value, headers, time_us = record
        if size > _MOST_BYTES or size > topic.small_batch_max_bytes or not topic.allows_small_batches or headers:
            return None
        if partition is None:
            partition = partition_of_record(topic, key)
            if partition < 0:
                return None
        # This thread does not run the loop yet, so an error that a signal handler raises here affects only the caller.
        try:
            body = single_record_body(key, value, time_us)
        except OverflowError:  # the general path raises the error
            return None
        if len(body) > topic.max_message_bytes:
            return None
        sent: list[SingleRecordCompletion] = []
        self._act(self._send, (topic, partition, body, time_us, sent))
        return RecordFuture(sent[0], 0) if sent else None

    def _send(
        self, topic: ProducerTopic, partition: int, body: bytes, time_us: int, sent: list[SingleRecordCompletion]
    ) -> None:
        now_ms = time.monotonic() * 1000
        if not self._may_send(now_ms) or self._requests.throttled:
            return
        if self._version != self._metadata.version:
            self._drop_routes()
        route = self._routes.get((topic.name, partition))
        if route is None or route.topic is not topic or route.connection.closed:
            route = self._find(topic, partition)
            if route is None:
                return
        number = self._queues.next_number(route.tp)
        if number is None:
            return
        record = SingleRecordCompletion(self._io_thread, self._writes, topic.name, partition, time_us)
        self._open.add(record)
        sent.append(record)
        requests = self._requests
        header = single_record_header(body, time_us, topic.schema_id, topic.event_time is not None, number)
        batch = ProducerBatch(
            route.tp,
            EncodedBatch(header, body),
            topic_id=topic.topic_id,
            deadline_ms=now_ms + requests.delivery_timeout_ms,
            handle=DeliveryHandle(record, 0, 0),
        )
        self._queues.start(batch, route.broker_id)
        length = len(body)
        request = route.requests.get(length) or self._prepare(route, length)
        started = requests.begin(route.connection, [batch], now_ms, now_ms + requests.first_timeout_ms)
        on_response = functools.partial(self._on_response, record, started)
        route.connection.ask_prepared(request, header.pack(), body, on_response)

    def _drop_routes(self) -> None:
        """Drop all routes after a change of metadata."""
        self._routes.clear()
        self._prepared = 0
        self._version = self._metadata.version  # last, so that an interrupted call is repeated

    def _find(self, topic: ProducerTopic, partition: int) -> _Route | None:
        """Create the route of a partition and store it. Return None if the general path must send."""
        tp = TopicPartition(topic.name, partition)
        leader = self._metadata.leader(tp)
        if leader is None or not self._sender.is_current(topic) or not self._requests.can_accept(leader.broker_id):
            return None
        connection = self._cluster.connection(leader.broker_id)
        assert connection is not None, "it can take requests"
        if not connection.is_direct:
            return None
        route = self._routes[topic.name, partition] = _Route(tp, topic, leader.broker_id, connection)
        return route

    def _prepare(self, route: _Route, length: int) -> PreparedRequest:
        if self._prepared >= _MOST_PREPARED:
            for each in self._routes.values():
                each.requests.clear()
            self._prepared = 0
        self._prepared += 1
        request = route.requests[length] = self._requests.prepared(route.tp, route.topic.topic_id, length)
        return request

    def _on_response(
        self, record: SingleRecordCompletion, sent: SentRequest, answer: ReplyAndBody | BrokerError
    ) -> None:
        (batch,) = sent.batches
        offset = -1
        if not isinstance(answer, BrokerError):
            reply = answer[0]
            if isinstance(reply, ProduceReply) and len(reply.results) == 1 and not reply.results[0].code:
                # The general path handles the wait after an exceeded quota.
                offset = -1 if reply.throttle_time_ms else reply.results[0].base_offset
        if offset < 0 or batch.state is not BatchState.IN_FLIGHT:
            self._requests.on_response(sent, answer)
            return
        self._requests.ended(sent, on_response=True)
        self._queues.succeeded(batch)
        self._cluster.on_progress()
        record.acknowledged(offset)
        if self._is_idle():
            record.notify()
        else:
            self._reports.acknowledged.append((record, 0, BatchOutcome(batch.tp.partition, offset, 1)))
            self._sender.run_once()


class SingleRecordCompletion:
    """The outcome of a record that was sent alone, and its waiting callers. ``RecordChunk`` has many such records.

    The thread that runs the loop sets the outcome. Any thread may read it.
    """

    def __init__(self, thread: IoThread, writes: OpenWrites, topic: str, partition: int, time_us: int) -> None:
        self.lock = threading.Lock()
        self.finished = CompletionLatch()
        self._io_thread = thread
        self._writes = writes
        self._topic = topic
        self._partition = partition
        self._time_us = time_us
        self._outcome: RecordMetadata | BaseException | None = None
        self._listeners: list[Callable[[RecordMetadata | BaseException], None]] = []
        self._error_seen = False

    # --- methods for the record's future ---

    def outcome(self, index: int) -> RecordMetadata | BaseException | None:
        return self._outcome

    def wait_helping(self, index: int) -> RecordMetadata | BaseException | None:
        if self._outcome is None:
            self._io_thread.wait_helping(self._known)
        return self._outcome

    def _known(self) -> bool:
        return self._outcome is not None

    def recall_loop(self) -> None:
        self._io_thread.recall_loop()

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None:
        """Call ``resolve`` at least once with the outcome: now, or when the outcome is known.

        Another thread sets the outcome and then notifies the listeners. So this method reads the outcome again after it
        has added the listener. This thread, the other thread, or both call ``resolve``, perhaps at the same time.
        """
        outcome = self._outcome
        if outcome is None:  # otherwise no append, which would leave a reference cycle
            self._listeners.append(resolve)
            outcome = self._outcome
        if outcome is not None:
            resolve(outcome)

    def error_seen(self) -> None:
        self._error_seen = True

    # --- the interface to the producer ---

    @property
    def failed(self) -> bool:
        return isinstance(self._outcome, BaseException)

    @property
    def error(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def consume_failure(self) -> BaseException | None:
        if self._error_seen:
            return None
        self._error_seen = True
        return self.error

    def acknowledged(self, offset: int) -> None:
        """Store the offset of the acknowledged record. The caller of this method must call ``notify`` next."""
        if self._outcome is None:
            self._outcome = RecordMetadata(self._topic, self._partition, offset, self._time_us)

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        if outcome.error is None:
            self.acknowledged(outcome.base_offset)
            self.notify()
        else:
            self.fail(outcome.error)

    def fail(self, error: BaseException) -> None:
        """Fail the record if it has no outcome, and notify the waiting callers. The method is idempotent."""
        if self._outcome is None:
            self._outcome = error
        self.notify()

    def abandon(self, error: BaseException) -> None:
        """End all waits for the record with ``error``, in a forked child; see ``Completion.abandon``."""
        self.lock = threading.Lock()
        if self._outcome is None:
            self._outcome = error
            for resolve in self._listeners:
                abandon_listener(resolve, error)

    def notify(self) -> None:
        """Notify the waiting callers, and then remove the record from the open writes.

        The method is idempotent, because an interrupt may stop a call.
        """
        if self._listeners:
            self._notify_listeners()
        self.finished.end()
        self._writes.ended(self)

    def _notify_listeners(self) -> None:
        outcome = self._outcome
        assert outcome is not None
        waiting = tuple(self._listeners)
        for resolve in waiting:
            notify(resolve, outcome)
        del self._listeners[: len(waiting)]
