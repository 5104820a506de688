"""The produce requests of one producer that are under way: how many a broker has, and when one is given up.

A leader that hangs says nothing. So a request that is open for long makes the link ask who leads now, and ends, by its
connection, when that is somebody else or its time is up. What happened is told batch by batch, in the broker's words or
in words like a broker's; what follows from it is not decided here.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.producer.partition_queues import BatchState, ProducerBatch
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.async_client import Answer, AsyncConnection
from sparklog.protocol.connection import PreparedRequest
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import Produce, ProducePartition, ProduceReply, ProduceResult, Reply
from sparklog.record.header import HEADER_BYTES

_MAX_REQUESTS_PER_BROKER = 5
#: What a broker may use of a request's time: it says why it could not do it, which its silence would not.
_BROKERS_SHARE = 0.9
#: A request open for so long makes the thread ask who leads now: a leader that hangs does not say so itself.
_SUSPECT_AFTER_S = 1.0
_LOOK_AGAIN_S = 0.2
#: How much the last round trip counts for.
_SMOOTHING = 1 / 8


class SentRequest:
    """A produce request under way."""

    __slots__ = ("batches", "connection", "deadline_ms", "look_at_ms", "sent_ms", "suspected")

    def __init__(
        self, connection: AsyncConnection, batches: list[ProducerBatch], now_ms: float, deadline_ms: float
    ) -> None:
        self.connection = connection
        self.batches = batches
        self.deadline_ms = deadline_ms
        self.sent_ms = now_ms
        #: When to look whether it waits for somebody who hangs.
        look_at_ms = now_ms + _SUSPECT_AFTER_S * 1000
        self.look_at_ms = look_at_ms if look_at_ms < deadline_ms else deadline_ms
        #: Open for so long that its leader may hang: news of another leader ends it.
        self.suspected = False


class InflightRequests:
    """Owner: the producer's I/O thread.

    ``told`` gets what became of each batch that is still in flight then, code NONE and offset -1 where nobody tells;
    ``changed`` is called when there may be room for more, after that.
    """

    def __init__(
        self,
        link: LoopCluster,
        *,
        loop: asyncio.AbstractEventLoop,
        acks: int,
        transaction: str,
        request_timeout_s: float,
        delivery_timeout_s: float,
        told: Callable[[ProducerBatch, ProduceResult], None],
        changed: Callable[[], None],
    ) -> None:
        self._link = link
        self._loop = loop
        self._acks = acks
        self._transaction = transaction
        self._request_timeout_s = request_timeout_s
        #: Of a request with a batch that was handed over just now.
        self.first_timeout_ms = max(1.0, min(request_timeout_s, delivery_timeout_s) * 1000)
        self._told = told
        self._changed = changed
        self._in_flight: dict[AsyncConnection, int] = {}
        #: Requests that are not answered yet, the oldest first. For others to see whether there are any.
        self.under_way: dict[SentRequest, None] = {}
        #: One for all: most requests are answered long before anybody has to look at them.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = math.inf
        self._draining: set[AsyncConnection] = set()
        self._suspected: dict[SentRequest, None] = {}
        self._suspected_version = -1
        #: From request to answer, smoothed; 0 while none has come.
        self._round_trip_ms = 0.0

    def patience_ms(self, now_ms: float) -> float:
        """How long records should wait for company behind others that are under way: half as long as a round trip
        takes now, so that two requests follow each other half-way. Of more and smaller ones both brokers and clients
        have more work than is won by them. Without a bound while nobody can tell."""
        if not self.under_way or not self._round_trip_ms:
            return math.inf
        oldest = next(iter(self.under_way))
        return max(self._round_trip_ms, now_ms - oldest.sent_ms) / 2

    def can_take(self, broker_id: int) -> bool:
        """A connection is there and has room for one request more; if not, ``changed`` is called when it has."""
        connection = self._link.connection(broker_id)
        if connection is None or self._in_flight.get(connection, 0) >= _MAX_REQUESTS_PER_BROKER:
            return False
        if self._acks == 0 and not connection.writable:  # no answers that would hold us back
            if connection not in self._draining:
                self._draining.add(connection)
                self._link.start(self._drain(connection))
            return False
        return True

    async def _drain(self, connection: AsyncConnection) -> None:
        await connection.drained()
        self._draining.discard(connection)
        self._changed()

    def send(self, broker_id: int, batches: list[ProducerBatch]) -> None:
        """Send batches to a broker that ``can_take`` them, and look after the request until it is answered."""
        connection = self._link.connection(broker_id)
        assert connection is not None, "drain asked can_take"
        now = _now_ms()
        latest = batches[0].deadline_ms if len(batches) == 1 else min(batch.deadline_ms for batch in batches)
        timeout_s = max(0.001, min(self._request_timeout_s, (latest - now) / 1000))
        request, body = self._request(batches, int(timeout_s * 1000 * _BROKERS_SHARE) or 1)
        if self._acks == 0:
            self._send_unacknowledged(connection, request, body, batches)
            return
        sent = self.begin(connection, batches, now, now + timeout_s * 1000)
        connection.ask(request, body, functools.partial(self.answered, sent))

    def begin(
        self, connection: AsyncConnection, batches: list[ProducerBatch], now_ms: float, deadline_ms: float
    ) -> SentRequest:
        """A request is sent: look after it, until it is ``answered``."""
        self._in_flight[connection] = self._in_flight.get(connection, 0) + 1
        sent = SentRequest(connection, batches, now_ms, deadline_ms)
        self.under_way[sent] = None
        if sent.look_at_ms < self._timer_at_ms:
            self._look_by(sent.look_at_ms)
        return sent

    def prepared(self, tp: TopicPartition, topic_id: str, length: int) -> PreparedRequest:
        """The request for a new batch of so many bytes, without its header and them."""
        part = ProducePartition(tp.topic, tp.partition, topic_id, 1, length)
        timeout_ms = int(self.first_timeout_ms * _BROKERS_SHARE) or 1
        return PreparedRequest(Produce(0, self._acks, timeout_ms, (part,), self._transaction), HEADER_BYTES + length)

    def _request(self, batches: Sequence[ProducerBatch], broker_timeout_ms: int) -> tuple[Produce, list[Buffer]]:
        partitions = []
        body: list[Buffer] = []
        for batch in batches:
            header, encoded = batch.encoded
            partitions.append(
                ProducePartition(batch.tp.topic, batch.tp.partition, batch.topic_id, 1, header.stored_bytes)
            )
            body += (header.pack(), memoryview(encoded))
        return Produce(0, self._acks, broker_timeout_ms, tuple(partitions), self._transaction), body

    def _send_unacknowledged(
        self, connection: AsyncConnection, request: Produce, body: Sequence[Buffer], batches: list[ProducerBatch]
    ) -> None:
        try:
            connection.send_only(request, body)
        except BrokerError as error:
            self._tell_all(batches, error.code, error.detail)
        else:
            self._tell_all(batches, ErrorCode.NONE)

    def only_connection(self) -> AsyncConnection | None:
        """Where all requests under way are, if all of them have left this process for one broker."""
        if len(self._in_flight) != 1:
            return None
        (connection,) = self._in_flight
        return None if connection.closed or connection.unsent_bytes else connection

    # --- requests that take long ---

    def _look_by(self, at_ms: float) -> None:
        if at_ms < self._timer_at_ms:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_ms = at_ms
            delay_s = max(0.0, at_ms - _now_ms()) / 1000
            self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        """Look after the requests under way: at their end of time, and before that whether they wait for somebody
        deposed."""
        self._timer, self._timer_at_ms = None, math.inf
        now = _now_ms()
        for sent in [sent for sent in self.under_way if sent.look_at_ms <= now]:
            self._suspect(sent, now)
        self._look_by(min((sent.look_at_ms for sent in self.under_way), default=math.inf))

    def _suspect(self, sent: SentRequest, now: float) -> None:
        if now >= sent.deadline_ms or self._deposed(sent):
            sent.look_at_ms = math.inf
            sent.connection.abort()  # fails what is in flight on it; the same sequences go to the new leader
            return
        if not sent.suspected:
            sent.suspected = True
            self._suspected[sent] = None
        self._link.want_metadata({batch.tp.topic for batch in sent.batches})
        sent.look_at_ms = min(now + _LOOK_AGAIN_S * 1000, sent.deadline_ms)

    def _deposed(self, sent: SentRequest) -> bool:
        leaders = ((batch, self._link.metadata.leader(batch.tp)) for batch in sent.batches)
        return any(leader is not None and leader.broker_id != batch.broker_id for batch, leader in leaders)

    def end_deposed(self) -> None:
        """New metadata: give up the requests that wait for somebody who hangs and leads no more."""
        if self._suspected and self._suspected_version != self._link.version:
            self._suspected_version = self._link.version
            for sent in [sent for sent in self._suspected if self._deposed(sent)]:
                self._loop.call_soon(sent.connection.abort)

    # --- answers ---

    def answered(self, sent: SentRequest, answer: Answer | BrokerError) -> None:
        """What came of a request: told of each of its batches."""
        self.ended(sent, answered=not isinstance(answer, BrokerError))
        if isinstance(answer, BrokerError):
            self._tell_all(sent.batches, answer.code, answer.detail)
        else:
            self._take_results(sent.batches, answer[0])
        self._changed()

    def ended(self, sent: SentRequest, *, answered: bool) -> None:
        """A request is under way no more."""
        del self.under_way[sent]
        if self._suspected:
            self._suspected.pop(sent, None)
        left = self._in_flight.pop(sent.connection) - 1
        if left:
            self._in_flight[sent.connection] = left
        if answered:
            taken_ms = _now_ms() - sent.sent_ms
            self._round_trip_ms += (taken_ms - self._round_trip_ms) * (_SMOOTHING if self._round_trip_ms else 1)

    def _take_results(self, batches: list[ProducerBatch], reply: Reply) -> None:
        results: Sequence[ProduceResult] = reply.results if isinstance(reply, ProduceReply) else ()
        for batch, result in zip(batches, results, strict=False):
            self._tell(batch, result)
        if len(results) < len(batches):
            self._tell_all(batches[len(results) :], ErrorCode.INVALID_REQUEST, f"no result in {type(reply).__name__}")

    def _tell_all(self, batches: Sequence[ProducerBatch], code: ErrorCode, detail: str = "") -> None:
        for batch in batches:
            self._tell(batch, ProduceResult(code, -1, -1, -1, detail))

    def _tell(self, batch: ProducerBatch, result: ProduceResult) -> None:
        if batch.state is BatchState.IN_FLIGHT:  # else its transaction, or the producer, was given up meanwhile
            self._told(batch, result)


def _now_ms() -> float:
    return time.monotonic() * 1000
