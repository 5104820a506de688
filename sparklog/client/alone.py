"""One record on its own, of a producer with nothing else to do: from ``send`` straight into a request, and from its
answer straight to who waits.

What such a record would meet on the usual way is asked once for its partition and remembered (``_Way``), as long as no
news of the cluster comes. Its batch is the accumulator's like any other, and so it is with whatever goes wrong: an
answer that is no acknowledgement is dealt with where all others are. Where there is anything else to do, the record
goes the usual way.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable

from sparklog.client.accumulator import Accumulator, BatchState, ProducerBatch
from sparklog.client.async_link import AsyncLink
from sparklog.client.batch_outcomes import Ticket
from sparklog.client.collector import Record
from sparklog.client.loop_lease import LoopLease
from sparklog.client.partitioning import ProducerTopic, partition_alone
from sparklog.client.produce_requests import ProduceRequests, SentRequest
from sparklog.client.results import BatchOutcome, Completion, Ending, RecordFuture, RecordMetadata, tell
from sparklog.client.stand_in import StandIn
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.net.async_client import Answer, AsyncConnection
from sparklog.protocol.connection import PreparedRequest
from sparklog.protocol.messages import ProduceReply
from sparklog.record.codec import EncodedBatch
from sparklog.record.few_records import alone_body, alone_header

#: A larger one is encoded as all others are: there, room for it is waited for.
_MOST_BYTES = 64 * 1024
#: Requests of a partition that are kept prepared.
_MOST_PREPARED = 64


class LoneRecord:
    """What became of a record that is a batch of its own: what a ``RecordChunk`` is to many. Told in the thread that
    acts for the producer's, asked in any."""

    def __init__(self, owner: SendAlone, topic: str, partition: int, time_us: int) -> None:
        self.lock = threading.Lock()
        self.finished = Ending()
        self._owner = owner
        self._topic = topic
        self._partition = partition
        self._time_us = time_us
        self._outcome: RecordMetadata | BaseException | None = None
        self._listeners: list[Callable[[RecordMetadata | BaseException], None]] = []
        self._error_seen = False

    # --- what its future asks ---

    def outcome(self, index: int) -> RecordMetadata | BaseException | None:
        return self._outcome

    def attend(self, index: int) -> RecordMetadata | BaseException | None:
        if self._outcome is None:
            self._owner.stand_in.attend(self._known)
        return self._outcome

    def _known(self) -> bool:
        return self._outcome is not None

    def hurry(self) -> None:
        self._owner.lease.recall()

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None:
        """As a chunk's. Looked at behind that, as the outcome is there before listeners are told: one of both is
        seen."""
        self._listeners.append(resolve)
        outcome = self._outcome
        if outcome is not None:
            resolve(outcome)

    def error_seen(self) -> None:
        self._error_seen = True

    # --- what the producer asks and tells ---

    @property
    def failed(self) -> bool:
        return isinstance(self._outcome, BaseException)

    @property
    def error(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def take_failure(self) -> BaseException | None:
        if self._error_seen:
            return None
        self._error_seen = True
        return self.error

    def acknowledged(self, offset: int) -> None:
        """It is in the log; ``tell`` follows."""
        if self._outcome is None:
            self._outcome = RecordMetadata(self._topic, self._partition, offset, self._time_us)

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        if outcome.error is None:
            self.acknowledged(outcome.base_offset)
            self.tell()
        else:
            self.fail(outcome.error)

    def fail(self, error: BaseException) -> None:
        """Nothing more comes of it. Once is enough, and more is the same."""
        if self._outcome is None:
            self._outcome = error
        self.tell()

    def tell(self) -> None:
        """Tell whoever waits, and then who would see to it that they are told. More than once is the same: an interrupt
        may come in the middle of it."""
        if self._listeners:
            self._tell_listeners()
        self.finished.end()
        self._owner.ended(self)

    def _tell_listeners(self) -> None:
        outcome = self._outcome
        assert outcome is not None
        waiting = tuple(self._listeners)
        for resolve in waiting:
            tell(resolve, outcome)
        del self._listeners[: len(waiting)]


class _Way:
    """Where records of a partition go by what is known of the cluster, and is as long as the link's version."""

    __slots__ = ("broker_id", "connection", "requests", "topic", "tp", "version")

    def __init__(
        self, tp: TopicPartition, topic: ProducerTopic, version: int, broker_id: int, connection: AsyncConnection
    ) -> None:
        self.tp = tp
        self.topic = topic
        self.version = version
        self.broker_id = broker_id
        self.connection = connection
        #: By the length of their batch.
        self.requests: dict[int, PreparedRequest] = {}


class SendAlone:
    """Owner: the ``Sender``. ``send`` is for any thread."""

    def __init__(
        self,
        link: AsyncLink,
        accumulator: Accumulator,
        requests: ProduceRequests,
        lease: LoopLease,
        stand_in: StandIn,
        *,
        opened: Callable[[Completion], None],
        ended: Callable[[Completion], None],
        follows: Callable[[ProducerTopic], bool],
        may_send: Callable[[float], bool],
        at_rest: Callable[[], bool],
        acknowledged: deque[tuple[Completion, int, BatchOutcome]],
        changed: Callable[[], None],
        delivery_timeout_s: float,
    ) -> None:
        """``opened`` and ``ended`` are told of every record that goes on its own, ``ended`` perhaps more than once. The
        rest is asked and told by who acts for the loop.
        ``follows``: whether a topic is as it is by the newest metadata. ``may_send``: whether there is nothing else to
        do now, in monotonic milliseconds. ``at_rest``: whether nothing is left to do; if there is, who is to be told is
        left in ``acknowledged``, and ``changed`` is called.
        """
        self._link = link
        self._accumulator = accumulator
        self._requests = requests
        self.lease = lease
        self.stand_in = stand_in
        self._opened = opened
        self.ended = ended
        self._follows = follows
        self._may_send = may_send
        self._at_rest = at_rest
        self._acknowledged = acknowledged
        self._changed = changed
        self._delivery_timeout_ms = delivery_timeout_s * 1000
        self._ways: dict[tuple[str, int], _Way] = {}

    def send(self, topic: ProducerTopic, partition: int | None, record: Record, size: int) -> RecordFuture | None:
        """The future of the record, which is on its way; None: it is to go the usual way."""
        if not self.lease.lent or self._requests.under_way:
            return None
        key, value, headers, time_us = record
        if size > _MOST_BYTES or size > topic.hand_written_bytes or not topic.hand_written or headers:
            return None
        if partition is None:
            partition = partition_alone(topic, key)
            if partition < 0:
                return None
        # Before this thread acts for the other: what a signal's handler raises here is the caller's, and harms nobody.
        try:
            body = alone_body(key, value, time_us)
        except OverflowError:  # the usual way tells so
            return None
        if len(body) > topic.max_message_bytes:
            return None
        sent: list[LoneRecord] = []
        self.stand_in.act(self._send, topic, partition, body, time_us, sent)
        return RecordFuture(sent[0], 0) if sent else None

    def _send(self, topic: ProducerTopic, partition: int, body: bytes, time_us: int, sent: list[LoneRecord]) -> None:
        now_ms = time.monotonic() * 1000
        if not self._may_send(now_ms):
            return
        way = self._ways.get((topic.name, partition))
        if way is None or way.version != self._link.version or way.topic is not topic or way.connection.closed:
            way = self._find(topic, partition)
            if way is None:
                return
        number = self._accumulator.next_number(way.tp)
        if number is None:
            return
        record = LoneRecord(self, topic.name, partition, time_us)
        self._opened(record)
        sent.append(record)
        header = alone_header(body, time_us, topic.schema_id, topic.event_time is not None, number)
        batch = ProducerBatch(
            way.tp,
            EncodedBatch(header, body),
            topic_id=topic.topic_id,
            deadline_ms=now_ms + self._delivery_timeout_ms,
            handle=Ticket(record, 0, 0),
        )
        self._accumulator.start(batch, way.broker_id)
        request = way.requests.get(len(body)) or self._prepare(way, len(body))
        begun = self._requests.begin(way.connection, [batch], now_ms, now_ms + self._requests.first_timeout_ms)
        told = functools.partial(self._answered, record, begun)
        way.connection.ask_prepared(request, header.pack(), body, told)

    def _find(self, topic: ProducerTopic, partition: int) -> _Way | None:
        """Ask for the way anew, and remember it."""
        tp = TopicPartition(topic.name, partition)
        version = self._link.version
        if any(way.version != version for way in self._ways.values()):
            self._ways.clear()  # no more than the partitions that are there
        leader = self._link.metadata.leader(tp)
        if leader is None or not self._follows(topic) or not self._requests.can_take(leader.broker_id):
            return None
        connection = self._link.connection(leader.broker_id)
        assert connection is not None, "it can take requests"
        way = self._ways[topic.name, partition] = _Way(tp, topic, version, leader.broker_id, connection)
        return way

    def _prepare(self, way: _Way, length: int) -> PreparedRequest:
        if len(way.requests) >= _MOST_PREPARED:
            way.requests.clear()
        request = way.requests[length] = self._requests.prepared(way.tp, way.topic.topic_id, length)
        return request

    def _answered(self, record: LoneRecord, sent: SentRequest, answer: Answer | BrokerError) -> None:
        (batch,) = sent.batches
        offset = -1
        if not isinstance(answer, BrokerError):
            reply = answer[0]
            if isinstance(reply, ProduceReply) and len(reply.results) == 1 and not reply.results[0].code:
                offset = reply.results[0].base_offset
        if offset < 0 or batch.state is not BatchState.IN_FLIGHT:
            self._requests.answered(sent, answer)
            return
        self._requests.ended(sent, answered=True)
        self._accumulator.succeeded(batch)
        self._link.progress()
        record.acknowledged(offset)
        if self._at_rest():
            record.tell()
        else:
            self._acknowledged.append((record, 0, BatchOutcome(batch.tp.partition, offset, 1)))
            self._changed()
