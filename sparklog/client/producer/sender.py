"""The producer's I/O thread, which sends batches to the leaders and completes futures with the results.

One function, ``_pump``, examines all state and starts every action that is possible. It runs after a caller submits
work, after a response or a new connection, after a change of metadata, and when the earliest delay ends. It never
waits. ``PartitionQueues`` decides about order, retries and sequences. ``InflightRequests`` owns the requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.errors import ClientTimeout, ProducerClosed, closed_for
from sparklog.client.producer.batch_revalidation import BatchRevalidation
from sparklog.client.producer.caller_io import CallerIo
from sparklog.client.producer.chunk_encoder import ChunkEncoder
from sparklog.client.producer.delivery import DeliveryHandle, DeliveryReports, delivery_handles
from sparklog.client.producer.direct_send import DirectSender
from sparklog.client.producer.inflight_requests import InflightRequests
from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerBatch
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.producer_id import ProducerIdRequest
from sparklog.client.producer.producer_metadata import ProducerMetadata, TopicRequest
from sparklog.client.producer.record_buffer import RecordBuffer
from sparklog.client.producer.record_chunk import IoThread, RecordChunk
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.client.producer.sender_transactions import SenderTransactions
from sparklog.model import TopicPartition
from sparklog.net.loop import new_event_loop
from sparklog.record.codec import EncodedBatch

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
#: The precision of uvloop's timers: with a delay below half of it a timer fires at once.
_TICK_MS = 1.0
#: The interval at which an unreferenced producer checks whether all accepted work has ended.
_RETIRE_POLL_S = 0.05


def _do_nothing() -> None:
    """Stand in for a callback that is not set."""


class Sender:
    """Owner of the I/O thread. Any thread may call ``submit``, ``topic``, ``wake`` and ``stop``."""

    def __init__(
        self,
        settings: SenderSettings,
        buffer: Callable[[IoThread], RecordBuffer],
        writes: OpenWrites,
    ) -> None:
        """Start the thread.

        ``buffer`` creates the record buffer. The sender calls it because the buffer's chunks refer to the sender.
        ``writes`` keeps each record that is sent directly, and fails all open writes when the thread ends.

        Raises:
            ConfigError: the bootstrap servers are not addresses.
        """
        self._settings = settings
        self._loop = new_event_loop()
        try:
            self._cluster = LoopCluster(
                settings.bootstrap,
                client_id=settings.client_id,
                changed=self._pump,
                request_timeout_s=settings.request_timeout_s,
                loop=self._loop,
            )
        except BaseException:
            self._loop.close()
            raise
        self._handoff = LoopHandoff(self._loop)
        self.buffer = buffer(self)
        self._metadata = ProducerMetadata(self._cluster)
        self._queues = PartitionQueues(idempotent=settings.idempotent, transactional=bool(settings.transaction))
        self.transactions = self._transactions() if settings.transaction else None
        self._encoder = ChunkEncoder(compression=settings.compression, batch_bytes=settings.batch_bytes)
        self._incoming: deque[ProducerBatch] = deque()
        self._reports = DeliveryReports(
            self._cluster,
            self._queues,
            release=self.buffer.release,
            retried=self._retried,
            transaction=f"transaction {settings.transaction!r}" if settings.transaction else "",
            delivery_timeout_s=settings.delivery_timeout_s,
        )
        self._revalidation = BatchRevalidation(self._metadata, self._queues, fail=self._reports.fail)
        self._requests = InflightRequests(
            self._cluster,
            loop=self._loop,
            acks=settings.acks,
            transaction=settings.transaction,
            request_timeout_s=settings.request_timeout_s,
            delivery_timeout_s=settings.delivery_timeout_s,
            on_result=self._reports.on_result,
            changed=self._pump,
        )
        self._producer_id = ProducerIdRequest(self._cluster, self._queues, changed=self._pump)
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_ms = 0.0
        self._metadata_max_age_ms = settings.metadata_max_age_s * 1000
        self._woken = False
        #: The number of runs that found work, and its value when a run last found the producer idle.
        self._runs = 0
        self._runs_when_idle = -1
        self._broken: BaseException | None = None
        self._closed_error = ProducerClosed("the producer is closed")
        self._writes = writes
        #: A callback that the I/O thread calls once, when it ends.
        self.on_end: Callable[[], None] = _do_nothing
        self._retiring = False
        self._ended = False
        self._ending = threading.Lock()
        self._io_thread = threading.Thread(target=self._run, name="sparklog-producer", daemon=True)
        self._caller_io = CallerIo(
            self._handoff, self._requests, loop_needed=self._needs_loop, broken=self._break, wake=self.wake
        )
        #: The direct path for single records. None if the settings exclude it: all records go through the buffer.
        self.direct_sender: DirectSender | None = None
        if settings.acks != 0 and settings.compression is None and not settings.transaction:
            self.direct_sender = DirectSender(
                self._cluster,
                self._queues,
                self._requests,
                self._handoff,
                self._caller_io,
                opened=writes.open.add,
                ended=writes.ended,
                is_current=self._is_current,
                may_send=self._may_send,
                is_idle=self._is_still_idle,
                acknowledged=self._reports.acknowledged,
                changed=self._pump,
                delivery_timeout_s=settings.delivery_timeout_s,
            )
        self._io_thread.start()

    # --- from any thread ---

    def wake(self) -> None:
        """Make the I/O thread run ``_pump`` soon."""
        if not self._woken:
            self._woken = True
            try:
                self._handoff.post(self._pump)
            except RuntimeError:
                if self._broken is None:  # only an ended thread's loop is closed
                    raise
            except BaseException:
                self._handoff.post(self._pump)  # an interrupt may have prevented the post, and a second one is harmless
                raise

    def on_chunk_opened(self) -> None:
        """Start to send a new chunk: at once in this thread if the loop is lent, else in the I/O thread."""
        if not self._handoff.lent or not self._caller_io.act(self._pump):
            self.wake()

    def recall_loop(self) -> None:
        """Return a lent loop to the I/O thread, because a caller waits in a way that does not drive the loop."""
        self._handoff.recall()

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        """Drive the loop in the calling thread, which waits until ``finished``. May return before that."""
        self._caller_io.wait_helping(finished)

    def _needs_loop(self) -> bool:
        """Return whether there is work that only a running loop can do."""
        return (
            self._broken is not None
            or self.transactions is not None
            or self._timer is not None
            or bool(self._cluster.tasks)
            or bool(self._queues.sendable)
        )

    @property
    def topics(self) -> Mapping[str, ProducerTopic]:
        """Return the topics with known metadata, by name."""
        return self._metadata.topics

    def submit(self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, handle: DeliveryHandle) -> None:
        """Queue one encoded batch. The caller has reserved its room in the buffer."""
        self._incoming.append(self._batch(topic, partition, encoded, handle))
        self.wake()
        if self._broken is not None:  # the thread will not run again
            self._fail_incoming(self._closed_error)

    def topic(self, name: str, timeout_s: float) -> ProducerTopic:
        """Return the topic, after waiting for its metadata if it is unknown.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            ClientTimeout: no broker returned the metadata in time.
        """
        known = self._metadata.topics.get(name)
        if known is not None:
            return known
        request = TopicRequest.of(name, timeout_s)
        if self.on_io_thread():
            raise ClientTimeout(f"metadata of topic {name!r} cannot be waited for in a future's callback")
        self._hand_over(self._request_topic, request)
        return request.future.result()

    def _hand_over(self, work: Callable[..., None], *arguments: Any) -> None:
        """Post ``work`` to the I/O thread, which will call it if this function returns. Raises ProducerClosed."""
        with self._ending:
            if self._ended:
                raise closed_for(self._closed_error)
            self._handoff.post(work, *arguments)

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the I/O thread and wait for its result.

        Raises:
            ProducerClosed: the thread has ended, or ends before the coroutine does.
        """
        self.refuse_own_thread("a transaction")
        done: Future[T] = Future()

        async def run() -> None:
            try:
                done.set_result(await work())
            except asyncio.CancelledError:
                done.set_exception(self._closed_error)
            except BaseException as error:
                done.set_exception(error)

        def start() -> None:
            if self._broken is None:
                self._cluster.start(run())
            else:
                done.set_exception(self._closed_error)

        self._hand_over(start)
        return done.result()

    def refresh_topic(self, name: str) -> None:
        """Request the newest metadata of a topic from a broker once. Do nothing in the I/O thread, which cannot wait.

        Raises:
            BrokerError: no broker responded.
            ProducerClosed: the thread has ended, or ends before the response.
        """
        if self.on_io_thread():
            return

        async def refresh() -> None:
            await self._cluster.refresh_once(name)

        self.call(refresh)

    def refuse_own_thread(self, what: str) -> None:
        """Raise RuntimeError in a future's callback: the I/O thread would wait for itself."""
        if self.on_io_thread():
            raise RuntimeError(f"{what} cannot be waited for in a future's callback")

    def stop(self, reason: BaseException) -> None:
        """End the thread. Unfinished work fails with ``reason``."""
        with contextlib.suppress(ProducerClosed):  # the thread has ended already
            self._hand_over(self._break, reason)
        self._io_thread.join(_STOP_TIMEOUT_S)

    def retire(self) -> None:
        """End the thread after all accepted work has ended. Take no lock; see ``ProducerLifetime``."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._handoff.post(self._begin_to_retire)

    def on_io_thread(self) -> bool:
        """Return whether the calling thread is the one that drives the loop."""
        return threading.get_ident() == self._handoff.thread

    @property
    def sequence_resets(self) -> int:
        return self._queues.sequence_resets

    # --- the thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._unforeseen)
        try:
            self._run_until_stopped()
            self._cluster.close()
            self._loop.run_until_complete(self._cluster.closed())
        finally:
            self._fail_all()
            self.on_end()
            with self._ending:
                self._ended = True
            # One more turn completes the callers that posted work just before, and lets transports close their sockets.
            self._loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            self._loop.close()

    def _run_until_stopped(self) -> None:
        try:
            self._handoff.run()
        except BaseException as error:
            _log.exception("a producer's thread")
            self._break(error)
            self._loop.run_forever()  # one turn: the loop is already stopped

    def _unforeseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no code caught.

        An error in a callback or task of the producer means that some work was not done and may never be, so the
        producer ends with this error. Any other error comes from a connection, and ends only that connection.
        """
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._break(error)

    def _pump(self) -> None:
        self._woken = False
        try:
            if self._broken is None:
                self._run_once()
        finally:
            # Last, because now this thread waits. A caller that is woken earlier would only wait for the interpreter
            # lock.
            self._reports.deliver_acknowledged()

    def _run_once(self) -> None:
        try:
            if self._retiring:
                self._retire()
            if self._is_idle():
                return
            self._runs += 1
            now = time.monotonic() * 1000
            for topic in self._metadata.update():
                self._revalidation.revalidate_topic(topic)
            self._metadata.complete_requests(now)
            while self._incoming:
                batch = self._incoming.popleft()
                self._queues.add(batch)
                self._revalidation.revalidate(batch)
            if not self.buffer.empty:
                effective_linger_ms = self._requests.effective_linger_ms(now)
                for chunk in self.buffer.consume_due(now + _TICK_MS / 2, self._queues.topic_busy, effective_linger_ms):
                    self._encode_chunk(chunk)
            for name, error in self._metadata.unknown_topics(now):
                self._revalidation.fail_topic(name, error)
            for batch in self._queues.expire(now):
                self._reports.expired(batch)
            self._requests.end_deposed()
            if self.transactions is not None:
                self.transactions.run_once()
            self._send_all(now)
            self._request_missing(now)
            self._set_timer(now)
        except Exception as error:  # our bug: it must not leave futures open forever
            self._break(error)
            raise

    def _is_idle(self) -> bool:
        """Return whether nothing is queued, in flight or awaited, as after the response to a single record."""
        return (
            not self._queues.busy
            and self.buffer.empty
            and not self._incoming
            and not self._requests.in_flight
            and self._metadata.settled
            and self._timer is None
            and self.transactions is None
        )

    def _is_still_idle(self) -> bool:
        """Return whether the producer is still idle, with a shortcut if it was idle before.

        Any thread that adds work wakes the I/O thread. The buffer is checked too: another thread may have put a record
        into a chunk without having woken the I/O thread so far, and no later record may overtake it.
        """
        if self._runs != self._runs_when_idle or self._woken or not self.buffer.empty:
            if not self._is_idle():
                return False
            self._runs_when_idle = self._runs
        return True

    def _may_send(self, now_ms: float) -> bool:
        """Return whether the producer is idle and needs no metadata refresh."""
        return (
            self._broken is None and now_ms - self._refreshed_ms <= self._metadata_max_age_ms and self._is_still_idle()
        )

    def _is_current(self, topic: ProducerTopic) -> bool:
        """Return whether ``topic`` matches the newest metadata."""
        return self._metadata.settled and self._metadata.topics.get(topic.name) is topic

    def _send_all(self, now: float) -> None:
        self._queues.leaderless.clear()
        while self._queues.sendable:
            requests = self._queues.drain(
                now,
                self._destination,
                can_accept=self._requests.can_accept,
                max_request_bytes=self._settings.max_request_bytes,
            )
            if not requests:
                return
            for broker_id, batches in requests.items():
                self._requests.send(broker_id, batches)

    def _destination(self, tp: TopicPartition) -> int | None:
        """Return the broker for a partition's batches.

        In a transaction, return None until the partition is registered.
        """
        if self.transactions is not None and not self.transactions.may_send(tp):
            return None
        leader = self._cluster.metadata.leader(tp)
        return leader.broker_id if leader else None

    # --- the end ---

    def _begin_to_retire(self) -> None:
        self._retiring = True
        self.buffer.seal()
        self._pump()

    def _retire(self) -> None:
        """End the producer if all work has ended, else check again soon.

        The timer is necessary because a direct send ends without a call of ``_pump``.
        """
        if self.transactions is not None or (self._is_idle() and not self._writes.open):
            # The coordinator aborts an open transaction after its timeout.
            self._break(ProducerClosed("no code refers to the producer any more"))
        else:
            self._loop.call_later(_RETIRE_POLL_S, self._pump)

    def _break(self, reason: BaseException) -> None:
        """End the producer, on purpose or after an error. All open work fails with ``reason``."""
        if self._broken is not None:
            return
        self._broken = reason
        self._closed_error = reason if isinstance(reason, ProducerClosed) else closed_for(reason)
        try:
            self._fail_all()
        finally:
            self._handoff.stop()

    def _fail_all(self) -> None:
        """Fail all open work.

        Idempotent: the I/O thread repeats it at its end, because another thread may have been interrupted.
        """
        closed = self._closed_error
        self._reports.deliver_acknowledged()
        for chunk in self.buffer.close(closed):
            chunk.fail(closed)
        self._fail_incoming(closed)
        self._revalidation.fail_all(closed)
        self._metadata.fail_all(closed)
        self._writes.fail_all(closed)

    def _discard(self, error: BaseException) -> None:
        """Fail every record that is not acknowledged. Batches in flight may still reach the log."""
        for chunk in self.buffer.consume_due(math.inf, lambda _: False, 0.0):
            self.buffer.release(chunk.size)
            chunk.fail(error)
        self._fail_incoming(error)
        self._revalidation.discard_all(error)

    def _fail_incoming(self, error: BaseException) -> None:
        """Fail the submitted batches that the I/O thread has not queued.

        Other threads call it after that thread's end.
        """
        while True:
            try:
                batch = self._incoming.popleft()
            except IndexError:
                return
            self._reports.fail(batch, error)

    # --- chunks to batches ---

    def _batch(
        self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, handle: DeliveryHandle
    ) -> ProducerBatch:
        return ProducerBatch(
            TopicPartition(topic.name, partition),
            encoded,
            topic_id=topic.topic_id,
            deadline_ms=time.monotonic() * 1000 + self._settings.delivery_timeout_s * 1000,
            handle=handle,
        )

    def _encode_chunk(self, chunk: RecordChunk) -> None:
        topic = self._metadata.topics.get(chunk.topic.name, chunk.topic)
        parts = self._encoder.parts(topic, chunk)
        if not parts:
            assert chunk.error is not None, "every record was refused"
            self.buffer.release(chunk.size)
            chunk.fail(chunk.error)
            return
        rows = [part.rows for part in parts]
        chunk.assign_batches(rows)
        for part, handle in zip(parts, delivery_handles(chunk, rows), strict=True):
            self._queues.add(self._batch(topic, part.partition, part.encoded, handle))

    # --- metadata and identity ---

    def _transactions(self) -> SenderTransactions:
        return SenderTransactions(
            self._cluster,
            self._queues,
            self._settings.transaction,
            request_timeout_s=self._settings.request_timeout_s,
            discard=self._discard,
            changed=self._pump,
        )

    def _request_topic(self, request: TopicRequest) -> None:
        self._metadata.request(request)
        if self._broken is not None:
            self._metadata.fail_all(self._closed_error)
        self._pump()

    def _retried(self, batch: ProducerBatch) -> None:
        self._revalidation.revalidate(batch)

    def _request_missing(self, now: float) -> None:
        if self._queues.leaderless:
            self._cluster.request_metadata(self._queues.leaderless)
        elif self._metadata.topics and now - self._refreshed_ms > self._metadata_max_age_ms:
            self._refreshed_ms = now
            self._cluster.request_metadata(self._metadata.topics)
        if self._queues.identity_wanted and self.transactions is None:
            self._producer_id.begin()

    def _set_timer(self, now: float) -> None:
        quiet = self._timer is None and not self._queues.sendable
        if quiet and self.buffer.empty and self._metadata.settled:
            return
        times = self._metadata.next_times_ms(now)
        for at in (self._queues.next_time_ms(now), self.buffer.next_due_ms(self._requests.effective_linger_ms(now))):
            if at is not None:
                times.append(at)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            self._timer = self._loop.call_later(max(_TICK_MS, min(times) - now) / 1000, self._pump)
