"""The produce requests of one producer that are in flight, by broker, with their timeouts.

A leader that hangs sends no response. So the client requests metadata when a request is old. The client closes the
connection if the partition has a new leader, or if the request has timed out. The result of each batch is reported
with the broker's error code, or with a code for a network error. This module does not decide about retries.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Sequence

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.quota_waits import QuotaWaits
from sparklog.client.cluster.routing_core import PATIENCE_S
from sparklog.client.producer.delivery import DeliveryReports
from sparklog.client.producer.partition_queues import BatchState, ProducerBatch
from sparklog.client.producer.send_loop import SendLoop
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.async_client import AsyncConnection, ReplyAndBody
from sparklog.protocol.connection import PreparedRequest
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import Produce, ProducePartition, ProduceReply, ProduceResult, Reply
from sparklog.record.header import HEADER_BYTES

_MAX_REQUESTS_PER_BROKER = 5
#: The fraction of a request's timeout that the broker may use, so that its error response arrives before the timeout.
_BROKERS_SHARE = 0.9
#: The age of a request at which the client requests metadata, because its leader may hang.
_SUSPECT_AFTER_S = PATIENCE_S
_CHECK_AGAIN_S = 0.2
#: A quota's wait counts as ended this number of milliseconds early, because the event loop rounds its timers to
#: milliseconds.
_EARLY_MS = 2.0
#: The weight of the newest round trip in the moving average.
_SMOOTHING = 1 / 8


class SentRequest:
    """A produce request in flight: its connection, its batches, and the time at which it times out."""

    __slots__ = ("batches", "check_at_ms", "connection", "deadline_ms", "sent_ms", "suspected")

    def __init__(
        self, connection: AsyncConnection, batches: list[ProducerBatch], now_ms: float, deadline_ms: float
    ) -> None:
        self.connection = connection
        self.batches = batches
        self.deadline_ms = deadline_ms
        self.sent_ms = now_ms
        #: The time at which to check whether the leader hangs.
        check_at_ms = now_ms + _SUSPECT_AFTER_S * 1000
        self.check_at_ms = check_at_ms if check_at_ms < deadline_ms else deadline_ms
        #: True if the request is so old that its leader may hang. Then metadata with another leader ends the request.
        self.suspected = False


class InflightRequests:
    """A tracker of the produce requests in flight: it sends them, watches their timeouts, and reports their results.

    Not thread-safe: use it only on the producer's event loop. When a request ends, ``reports`` receives the result of
    each of its batches that is still in flight. With acks=0 a broker sends no response: a batch that was sent gets the
    code NONE and the offset -1. After each response, ``sender`` runs, because there may be room for more requests.
    """

    def __init__(
        self,
        sender: SendLoop,
        cluster: LoopCluster,
        reports: DeliveryReports,
        settings: SenderSettings,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sender = sender
        self._cluster = cluster
        self._reports = reports
        self._loop = loop
        cluster.on_throttled = self.on_other_throttled
        self._acks = settings.acks
        self._transaction = settings.transaction
        self._request_timeout_s = settings.request_timeout_s
        self.delivery_timeout_ms = settings.delivery_timeout_s * 1000
        #: The timeout of a new request, in milliseconds, if its batches were accepted just now.
        self.first_timeout_ms = max(1.0, min(settings.request_timeout_s, settings.delivery_timeout_s) * 1000)
        self._counts: dict[AsyncConnection, int] = {}
        #: Requests without a response, the oldest first. Other objects only check whether this mapping is empty.
        self.in_flight: dict[SentRequest, None] = {}
        #: One timer for all requests, because most get their response long before they need a check.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = math.inf
        self._draining: set[AsyncConnection] = set()
        #: The connections on which nothing is sent because a quota is exceeded, with the time at which the wait ends.
        self.throttled: dict[AsyncConnection, float] = {}
        self.quota_waits = QuotaWaits()
        self._suspected: dict[SentRequest, None] = {}
        self._suspected_version = -1
        #: The smoothed time from request to response; 0 before the first response.
        self._round_trip_ms = 0.0

    def effective_linger_ms(self, now_ms: float) -> float:
        """Return how long records should wait for more records while earlier ones are in flight.

        The time is half of the current round trip, so that two requests are in flight at a time. More frequent, smaller
        requests would cost brokers and clients more than they save. The time is infinite before the first response, and
        while no request is in flight.
        """
        if not self.in_flight or not self._round_trip_ms:
            return math.inf
        oldest = next(iter(self.in_flight))
        return max(self._round_trip_ms, now_ms - oldest.sent_ms) / 2

    def can_accept(self, broker_id: int) -> bool:
        """Return whether the broker has an open connection with room for a request, and no quota delays the request.

        If the result is False, the sender runs again when the broker can accept a request.
        """
        connection = self._cluster.connection(broker_id)
        if connection is None or self._counts.get(connection, 0) >= _MAX_REQUESTS_PER_BROKER:
            return False
        if connection in self.throttled:
            return False
        if self._acks == 0 and not connection.writable:  # responses do not limit the requests in flight
            if connection not in self._draining:
                self._draining.add(connection)
                self._cluster.start(self._drain(connection))
            return False
        return True

    async def _drain(self, connection: AsyncConnection) -> None:
        await connection.drained()
        self._draining.discard(connection)
        self._sender.run_once()

    def send(self, broker_id: int, batches: list[ProducerBatch]) -> None:
        """Send batches to a broker for which ``can_accept`` is true, and watch the request until its response."""
        connection = self._cluster.connection(broker_id)
        assert connection is not None, "drain asked can_accept"
        now = _now_ms()
        latest = batches[0].deadline_ms if len(batches) == 1 else min(batch.deadline_ms for batch in batches)
        timeout_s = max(0.001, min(self._request_timeout_s, (latest - now) / 1000))
        request, body = self._request(batches, int(timeout_s * 1000 * _BROKERS_SHARE) or 1)
        if self._acks == 0:
            self._send_unacknowledged(connection, request, body, batches)
            return
        sent = self.begin(connection, batches, now, now + timeout_s * 1000)
        connection.ask(request, body, functools.partial(self.on_response, sent))

    def begin(
        self, connection: AsyncConnection, batches: list[ProducerBatch], now_ms: float, deadline_ms: float
    ) -> SentRequest:
        """Register a request that is being sent, and watch its timeout until ``on_response``."""
        self._counts[connection] = self._counts.get(connection, 0) + 1
        sent = SentRequest(connection, batches, now_ms, deadline_ms)
        self.in_flight[sent] = None
        if sent.check_at_ms < self._timer_at_ms:
            self._check_by(sent.check_at_ms)
        return sent

    def prepared(self, tp: TopicPartition, topic_id: str, length: int) -> PreparedRequest:
        """Return a reusable request for one batch with a body of ``length`` bytes. The caller adds header and body."""
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
            self._report_all(batches, error.code, error.detail)
        else:
            self._report_all(batches, ErrorCode.NONE)

    def only_connection(self) -> AsyncConnection | None:
        """Return the one connection that all requests in flight use, or None if the caller cannot read from it.

        Return None if there is no such connection or it is closed, or if bytes of the requests are not sent yet. Also
        return None if only the event loop can read the connection.
        """
        if len(self._counts) != 1:
            return None
        (connection,) = self._counts
        return None if connection.closed or connection.unsent_bytes or not connection.is_direct else connection

    # --- requests that take long ---

    def _check_by(self, at_ms: float) -> None:
        if at_ms < self._timer_at_ms:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_ms = at_ms
            delay_s = max(0.0, at_ms - _now_ms()) / 1000
            self._timer = self._loop.call_later(delay_s, self._check)

    def _check(self) -> None:
        """Check the old requests. Close a connection if its request has timed out or its leader was replaced."""
        self._timer, self._timer_at_ms = None, math.inf
        now = _now_ms()
        for sent in [sent for sent in self.in_flight if sent.check_at_ms <= now]:
            self._suspect(sent, now)
        self._check_by(min((sent.check_at_ms for sent in self.in_flight), default=math.inf))

    def _suspect(self, sent: SentRequest, now: float) -> None:
        if now >= sent.deadline_ms or self._deposed(sent):
            sent.check_at_ms = math.inf
            sent.connection.abort()  # its requests fail, and their batches go to the new leader with the same sequences
            return
        if not sent.suspected:
            sent.suspected = True
            self._suspected[sent] = None
        self._cluster.request_metadata({batch.tp.topic for batch in sent.batches})
        sent.check_at_ms = min(now + _CHECK_AGAIN_S * 1000, sent.deadline_ms)

    def _deposed(self, sent: SentRequest) -> bool:
        leaders = ((batch, self._cluster.metadata.leader(batch.tp)) for batch in sent.batches)
        return any(leader is not None and leader.broker_id != batch.broker_id for batch, leader in leaders)

    def end_deposed(self) -> None:
        """Close the connection of each old request whose partition has another leader in newer metadata."""
        if self._suspected and self._suspected_version != self._cluster.version:
            self._suspected_version = self._cluster.version
            for sent in [sent for sent in self._suspected if self._deposed(sent)]:
                self._loop.call_soon(sent.connection.abort)

    # --- responses ---

    def on_response(self, sent: SentRequest, answer: ReplyAndBody | BrokerError) -> None:
        """Report the result of each batch of a request that has a response or an error."""
        self.ended(sent, on_response=not isinstance(answer, BrokerError))
        if isinstance(answer, BrokerError):
            self._report_all(sent.batches, answer.code, answer.detail)
        else:
            reply = answer[0]
            if isinstance(reply, ProduceReply) and reply.throttle_time_ms:
                self._throttle(sent, reply.throttle_time_ms)
            self._report_results(sent.batches, reply)
        self._sender.run_once()

    def ended(self, sent: SentRequest, *, on_response: bool) -> None:
        """Remove a request that has ended. If ``on_response`` is true, measure its round trip."""
        del self.in_flight[sent]
        if self._suspected:
            self._suspected.pop(sent, None)
        left = self._counts.pop(sent.connection) - 1
        if left:
            self._counts[sent.connection] = left
        if on_response:
            taken_ms = _now_ms() - sent.sent_ms
            self._round_trip_ms += (taken_ms - self._round_trip_ms) * (_SMOOTHING if self._round_trip_ms else 1)

    def _throttle(self, answered: SentRequest, throttle_time_ms: int) -> None:
        """Send nothing to the broker for this time. Earlier requests wait in the broker, so extend their timeouts."""
        now_ms, connection = _now_ms(), answered.connection
        wait_ms = self.quota_waits.add(f"broker {answered.batches[0].broker_id}", throttle_time_ms, now_ms / 1000)
        until_ms = self._hold(connection, wait_ms, now_ms)
        connection.throttled_until_s = self._loop.time() + wait_ms / 1000  # for metadata and transactions
        for sent in self.in_flight:
            if sent.connection is connection and sent.check_at_ms < math.inf:
                last_ms = min(batch.deadline_ms for batch in sent.batches)
                sent.deadline_ms = max(sent.deadline_ms, min(last_ms, until_ms + self._request_timeout_s * 1000))
                sent.check_at_ms = min(sent.deadline_ms, max(sent.check_at_ms, until_ms + _SUSPECT_AFTER_S * 1000))

    def on_other_throttled(self, connection: AsyncConnection, throttle_time_ms: int) -> None:
        """Pause produce requests on a connection, because the reply to another request demands a wait."""
        now_ms = _now_ms()
        self._hold(connection, self.quota_waits.add(connection.address, throttle_time_ms, now_ms / 1000), now_ms)

    def _hold(self, connection: AsyncConnection, wait_ms: float, now_ms: float) -> float:
        """Send no batches on this connection for this time. Return the end of the wait in milliseconds."""
        until_ms = self.throttled[connection] = max(now_ms + wait_ms, self.throttled.get(connection, 0.0))
        self._loop.call_later(wait_ms / 1000, self._end_wait, connection)
        return until_ms

    def _end_wait(self, connection: AsyncConnection) -> None:
        if self.throttled.get(connection, math.inf) <= _now_ms() + _EARLY_MS:
            del self.throttled[connection]
            self._sender.run_once()

    def _report_results(self, batches: list[ProducerBatch], reply: Reply) -> None:
        results: Sequence[ProduceResult] = reply.results if isinstance(reply, ProduceReply) else ()
        for batch, result in zip(batches, results, strict=False):
            self._report(batch, result)
        if len(results) < len(batches):
            self._report_all(batches[len(results) :], ErrorCode.INVALID_REQUEST, f"no result in {type(reply).__name__}")

    def _report_all(self, batches: Sequence[ProducerBatch], code: ErrorCode, detail: str = "") -> None:
        for batch in batches:
            self._report(batch, ProduceResult(code, -1, -1, -1, detail))

    def _report(self, batch: ProducerBatch, result: ProduceResult) -> None:
        if batch.state is BatchState.IN_FLIGHT:  # otherwise the transaction or the producer was aborted in the meantime
            self._reports.on_result(batch, result)


def _now_ms() -> float:
    return time.monotonic() * 1000
