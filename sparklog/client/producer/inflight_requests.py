"""The produce requests of one producer that are in flight, by broker, with their timeouts.

A leader that hangs sends no response. So an old request makes the client request metadata. The client closes the
connection if the partition has another leader or the request's time is over. The result of each batch is reported with
the broker's error code, or with a code for a network error. This module does not decide about retries.
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
#: The part of a request's time that the broker may use, so that its error response arrives before the timeout.
_BROKERS_SHARE = 0.9
#: The age of a request at which the client asks for the current leader: a leader that hangs does not report it.
_SUSPECT_AFTER_S = 1.0
_LOOK_AGAIN_S = 0.2
#: The weight of the latest round trip in the average.
_SMOOTHING = 1 / 8


class SentRequest:
    """A produce request in flight."""

    __slots__ = ("batches", "connection", "deadline_ms", "look_at_ms", "sent_ms", "suspected")

    def __init__(
        self, connection: AsyncConnection, batches: list[ProducerBatch], now_ms: float, deadline_ms: float
    ) -> None:
        self.connection = connection
        self.batches = batches
        self.deadline_ms = deadline_ms
        self.sent_ms = now_ms
        #: When to check whether the leader hangs.
        look_at_ms = now_ms + _SUSPECT_AFTER_S * 1000
        self.look_at_ms = look_at_ms if look_at_ms < deadline_ms else deadline_ms
        #: True if the request is so old that its leader may hang. Metadata with another leader ends it.
        self.suspected = False


class InflightRequests:
    """The requests in flight. Owner: the producer's I/O thread.

    ``told`` receives the result of each batch that is still in flight then. The code is NONE and the offset -1 if no
    response is expected. After that, ``changed`` is called, because there may be room for more requests.
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
        #: The timeout of a request with a batch that was just accepted.
        self.first_timeout_ms = max(1.0, min(request_timeout_s, delivery_timeout_s) * 1000)
        self._told = told
        self._changed = changed
        self._in_flight: dict[AsyncConnection, int] = {}
        #: Requests without a response, the oldest first. Other objects only check whether it is empty.
        self.under_way: dict[SentRequest, None] = {}
        #: One timer for all requests: most get their response long before they need a check.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = math.inf
        self._draining: set[AsyncConnection] = set()
        self._suspected: dict[SentRequest, None] = {}
        self._suspected_version = -1
        #: The smoothed time from request to response; 0 before the first response.
        self._round_trip_ms = 0.0

    def patience_ms(self, now_ms: float) -> float:
        """Return how long records should wait for more records while earlier ones are in flight.

        The time is half of the current round trip, so that two requests are in flight in alternation. Smaller, more
        frequent requests cost brokers and clients more than they save. The time is infinite before the first response.
        """
        if not self.under_way or not self._round_trip_ms:
            return math.inf
        oldest = next(iter(self.under_way))
        return max(self._round_trip_ms, now_ms - oldest.sent_ms) / 2

    def can_take(self, broker_id: int) -> bool:
        """Return whether there is a connection with room for another request. If not, ``changed`` is called later."""
        connection = self._link.connection(broker_id)
        if connection is None or self._in_flight.get(connection, 0) >= _MAX_REQUESTS_PER_BROKER:
            return False
        if self._acks == 0 and not connection.writable:  # no responses that would limit the requests
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
        """Send batches to a broker that ``can_take`` them, and watch the request until its response."""
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
        """Watch a request that is being sent, until ``answered``."""
        self._in_flight[connection] = self._in_flight.get(connection, 0) + 1
        sent = SentRequest(connection, batches, now_ms, deadline_ms)
        self.under_way[sent] = None
        if sent.look_at_ms < self._timer_at_ms:
            self._look_by(sent.look_at_ms)
        return sent

    def prepared(self, tp: TopicPartition, topic_id: str, length: int) -> PreparedRequest:
        """Return the request for a batch of ``length`` bytes, without the batch's header and body."""
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
        """Return the connection of all requests in flight, if they are all sent to one broker completely."""
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
        """Check the old requests: close those past their deadline, or whose leader was deposed."""
        self._timer, self._timer_at_ms = None, math.inf
        now = _now_ms()
        for sent in [sent for sent in self.under_way if sent.look_at_ms <= now]:
            self._suspect(sent, now)
        self._look_by(min((sent.look_at_ms for sent in self.under_way), default=math.inf))

    def _suspect(self, sent: SentRequest, now: float) -> None:
        if now >= sent.deadline_ms or self._deposed(sent):
            sent.look_at_ms = math.inf
            sent.connection.abort()  # fails the requests in flight there; the same sequences go to the new leader
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
        """Close the connections of old requests whose partition has another leader by new metadata."""
        if self._suspected and self._suspected_version != self._link.version:
            self._suspected_version = self._link.version
            for sent in [sent for sent in self._suspected if self._deposed(sent)]:
                self._loop.call_soon(sent.connection.abort)

    # --- answers ---

    def answered(self, sent: SentRequest, answer: Answer | BrokerError) -> None:
        """Handle the response or error of a request: report the result of each of its batches."""
        self.ended(sent, answered=not isinstance(answer, BrokerError))
        if isinstance(answer, BrokerError):
            self._tell_all(sent.batches, answer.code, answer.detail)
        else:
            self._take_results(sent.batches, answer[0])
        self._changed()

    def ended(self, sent: SentRequest, *, answered: bool) -> None:
        """Remove a request that has ended."""
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
        if batch.state is BatchState.IN_FLIGHT:  # otherwise the transaction or the producer was aborted in the meantime
            self._told(batch, result)


def _now_ms() -> float:
    return time.monotonic() * 1000
