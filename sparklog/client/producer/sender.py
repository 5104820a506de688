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
from sparklog.client.producer.delivery import DeliveryHandle, DeliveryReports, tickets
from sparklog.client.producer.direct_send import DirectSender
from sparklog.client.producer.inflight_requests import InflightRequests
from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerBatch
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.producer_id import ProducerIdRequest
from sparklog.client.producer.producer_metadata import ProducerMetadata, TopicRequest
from sparklog.client.producer.record_buffer import IoThread, RecordBuffer, RecordChunk
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
        collector: Callable[[IoThread], RecordBuffer],
        writes: OpenWrites,
    ) -> None:
        """Start the thread.

        ``collector`` creates the record buffer. The sender calls it because the buffer's chunks refer to the sender.
        ``writes`` keeps each record that is sent directly, and fails all open writes when the thread ends.

        Raises:
            ConfigError: the bootstrap servers are not addresses.
        """
        self._settings = settings
        self._loop = new_event_loop()
        try:
            self._link = LoopCluster(
                settings.bootstrap,
                client_id=settings.client_id,
                changed=self._pump,
                request_timeout_s=settings.request_timeout_s,
                loop=self._loop,
            )
        except BaseException:
            self._loop.close()
            raise
        self._lease = LoopHandoff(self._loop)
        self.collector = collector(self)
        self._board = ProducerMetadata(self._link)
        self._accumulator = PartitionQueues(idempotent=settings.idempotent, transactional=bool(settings.transaction))
        self.transactions = self._transactions() if settings.transaction else None
        self._encoder = ChunkEncoder(compression=settings.compression, batch_bytes=settings.batch_bytes)
        self._incoming: deque[ProducerBatch] = deque()
        self._outcomes = DeliveryReports(
            self._link,
            self._accumulator,
            release=self.collector.release,
            retried=self._retried,
            transaction=f"transaction {settings.transaction!r}" if settings.transaction else "",
            delivery_timeout_s=settings.delivery_timeout_s,
        )
        self._waiting = BatchRevalidation(self._board, self._accumulator, fail=self._outcomes.fail)
        self._requests = InflightRequests(
            self._link,
            loop=self._loop,
            acks=settings.acks,
            transaction=settings.transaction,
            request_timeout_s=settings.request_timeout_s,
            delivery_timeout_s=settings.delivery_timeout_s,
            told=self._outcomes.told,
            changed=self._pump,
        )
        self._producer_id = ProducerIdRequest(self._link, self._accumulator, changed=self._pump)
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_ms = 0.0
        self._metadata_max_age_ms = settings.metadata_max_age_s * 1000
        self._woken = False
        #: The number of runs that found work, and its value when a run last found the producer idle.
        self._looks = 0
        self._looks_until_rest = -1
        self._broken: BaseException | None = None
        self._closed_error = ProducerClosed("the producer is closed")
        self._writes = writes
        #: A callback that the I/O thread calls once, when it ends.
        self.on_end: Callable[[], None] = _do_nothing
        self._retiring = False
        self._ended = False
        self._ending = threading.Lock()
        self._io_thread = threading.Thread(target=self._run, name="sparklog-producer", daemon=True)
        self._stand_in = CallerIo(
            self._lease, self._requests, loop_needed=self._needs_loop, broken=self._break, wake=self.wake
        )
        #: The direct path for single records. None if the settings exclude it: all records go through the buffer.
        self.alone: DirectSender | None = None
        if settings.acks != 0 and settings.compression is None and not settings.transaction:
            self.alone = DirectSender(
                self._link,
                self._accumulator,
                self._requests,
                self._lease,
                self._stand_in,
                opened=writes.open.add,
                ended=writes.ended,
                follows=self._follows,
                may_send=self._may_send,
                at_rest=self._still_at_rest,
                acknowledged=self._outcomes.acknowledged,
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
                self._lease.post(self._pump)
            except RuntimeError:
                if self._broken is None:  # only an ended thread's loop is closed
                    raise
            except BaseException:
                self._lease.post(self._pump)  # an interrupt may have prevented the post, and a second one is harmless
                raise

    def begun(self) -> None:
        """Start to send a new chunk: at once in this thread if the loop is lent, else in the I/O thread."""
        if not self._lease.lent or not self._stand_in.act(self._pump):
            self.wake()

    def hurry(self) -> None:
        """Return a lent loop to the I/O thread, because a caller waits in a way that does not drive the loop."""
        self._lease.recall()

    def attend(self, finished: Callable[[], bool]) -> None:
        """Drive the loop in the calling thread, which waits until ``finished``. May return before that."""
        self._stand_in.attend(finished)

    def _needs_loop(self) -> bool:
        """Return whether there is work that only a running loop can do."""
        return (
            self._broken is not None
            or self.transactions is not None
            or self._timer is not None
            or bool(self._link.tasks)
            or bool(self._accumulator.sendable)
        )

    @property
    def topics(self) -> Mapping[str, ProducerTopic]:
        """The topics with known metadata, by name."""
        return self._board.topics

    def submit(self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, ticket: DeliveryHandle) -> None:
        """Queue one encoded batch. The caller has reserved its room in the buffer."""
        self._incoming.append(self._batch(topic, partition, encoded, ticket))
        self.wake()
        if self._broken is not None:  # the thread will not run again
            self._fail_incoming(self._closed_error)

    def topic(self, name: str, timeout_s: float) -> ProducerTopic:
        """Return the topic, after waiting for its metadata if it is unknown.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            ClientTimeout: no broker returned the metadata in time.
        """
        known = self._board.topics.get(name)
        if known is not None:
            return known
        wish = TopicRequest.of(name, timeout_s)
        if self.on_io_thread():
            raise ClientTimeout(f"metadata of topic {name!r} cannot be waited for in a future's callback")
        self._hand_over(self._wish, wish)
        return wish.future.result()

    def _hand_over(self, work: Callable[..., None], *arguments: Any) -> None:
        """Post ``work`` to the I/O thread, which will call it if this function returns. Raises ProducerClosed."""
        with self._ending:
            if self._ended:
                raise closed_for(self._closed_error)
            self._lease.post(work, *arguments)

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
                self._link.start(run())
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
            await self._link.refresh_once(name)

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
            self._lease.post(self._begin_to_retire)

    def on_io_thread(self) -> bool:
        """Return whether the calling thread is the one that drives the loop."""
        return threading.get_ident() == self._lease.thread

    @property
    def sequence_resets(self) -> int:
        return self._accumulator.sequence_resets

    # --- the thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._unforeseen)
        try:
            self._run_until_stopped()
            self._link.close()
            self._loop.run_until_complete(self._link.closed())
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
            self._lease.run()
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
                self._look()
        finally:
            # Last, because now this thread waits. A caller that is woken earlier would only wait for the interpreter
            # lock.
            self._outcomes.tell_acknowledged()

    def _look(self) -> None:
        try:
            if self._retiring:
                self._retire()
            if self._at_rest():
                return
            self._looks += 1
            now = time.monotonic() * 1000
            for topic in self._board.follow():
                self._waiting.follow_topic(topic)
            self._board.grant(now)
            while self._incoming:
                batch = self._incoming.popleft()
                self._accumulator.add(batch)
                self._waiting.follow(batch)
            if not self.collector.empty:
                patience_ms = self._requests.patience_ms(now)
                for chunk in self.collector.take_due(now + _TICK_MS / 2, self._accumulator.topic_busy, patience_ms):
                    self._encode_chunk(chunk)
            for name, error in self._board.gone(now):
                self._waiting.give_up(name, error)
            for batch in self._accumulator.expire(now):
                self._outcomes.expired(batch)
            self._requests.end_deposed()
            if self.transactions is not None:
                self.transactions.look()
            self._send_all(now)
            self._want_what_is_missing(now)
            self._set_timer(now)
        except Exception as error:  # our bug: it must not leave futures open forever
            self._break(error)
            raise

    def _at_rest(self) -> bool:
        """Return whether nothing is queued, in flight or awaited, as after the response to a single record."""
        return (
            not self._accumulator.busy
            and self.collector.empty
            and not self._incoming
            and not self._requests.under_way
            and self._board.settled
            and self._timer is None
            and self.transactions is None
        )

    def _still_at_rest(self) -> bool:
        """Return whether the producer is still idle, with a shortcut if it was idle before.

        Any thread that adds work wakes the I/O thread. The buffer is checked too: another thread may have put a record
        into a chunk without having woken the I/O thread so far, and no later record may overtake it.
        """
        if self._looks != self._looks_until_rest or self._woken or not self.collector.empty:
            if not self._at_rest():
                return False
            self._looks_until_rest = self._looks
        return True

    def _may_send(self, now_ms: float) -> bool:
        """Return whether the producer is idle and needs no metadata refresh."""
        return (
            self._broken is None and now_ms - self._refreshed_ms <= self._metadata_max_age_ms and self._still_at_rest()
        )

    def _follows(self, topic: ProducerTopic) -> bool:
        """Return whether ``topic`` matches the newest metadata."""
        return self._board.settled and self._board.topics.get(topic.name) is topic

    def _send_all(self, now: float) -> None:
        self._accumulator.leaderless.clear()
        while self._accumulator.sendable:
            requests = self._accumulator.drain(
                now,
                self._destination,
                can_take=self._requests.can_take,
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
        leader = self._link.metadata.leader(tp)
        return leader.broker_id if leader else None

    # --- the end ---

    def _begin_to_retire(self) -> None:
        self._retiring = True
        self.collector.seal()
        self._pump()

    def _retire(self) -> None:
        """End the producer if all work has ended, else check again soon.

        The timer is necessary because a direct send ends without a call of ``_pump``.
        """
        if self.transactions is not None or (self._at_rest() and not self._writes.open):
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
            self._lease.stop()

    def _fail_all(self) -> None:
        """Fail all open work.

        Idempotent: the I/O thread repeats it at its end, because another thread may have been interrupted.
        """
        closed = self._closed_error
        self._outcomes.tell_acknowledged()
        for chunk in self.collector.close(closed):
            chunk.fail(closed)
        self._fail_incoming(closed)
        self._waiting.forsake(closed)
        self._board.fail_all(closed)
        self._writes.fail_all(closed)

    def _discard(self, error: BaseException) -> None:
        """Fail every record that is not acknowledged. Batches in flight may still reach the log."""
        for chunk in self.collector.take_due(math.inf, lambda _: False, 0.0):
            self.collector.release(chunk.size)
            chunk.fail(error)
        self._fail_incoming(error)
        self._waiting.give_up_all(error)

    def _fail_incoming(self, error: BaseException) -> None:
        """Fail the submitted batches that the I/O thread has not queued.

        Other threads call it after that thread's end.
        """
        while True:
            try:
                batch = self._incoming.popleft()
            except IndexError:
                return
            self._outcomes.fail(batch, error)

    # --- chunks to batches ---

    def _batch(
        self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, ticket: DeliveryHandle
    ) -> ProducerBatch:
        return ProducerBatch(
            TopicPartition(topic.name, partition),
            encoded,
            topic_id=topic.topic_id,
            deadline_ms=time.monotonic() * 1000 + self._settings.delivery_timeout_s * 1000,
            handle=ticket,
        )

    def _encode_chunk(self, chunk: RecordChunk) -> None:
        topic = self._board.topics.get(chunk.topic.name, chunk.topic)
        parts = self._encoder.parts(topic, chunk)
        if not parts:
            assert chunk.error is not None, "every record was refused"
            self.collector.release(chunk.size)
            chunk.fail(chunk.error)
            return
        rows = [part.rows for part in parts]
        chunk.placed(rows)
        for part, ticket in zip(parts, tickets(chunk, rows), strict=True):
            self._accumulator.add(self._batch(topic, part.partition, part.encoded, ticket))

    # --- metadata and identity ---

    def _transactions(self) -> SenderTransactions:
        return SenderTransactions(
            self._link,
            self._accumulator,
            self._settings.transaction,
            request_timeout_s=self._settings.request_timeout_s,
            discard=self._discard,
            changed=self._pump,
        )

    def _wish(self, wish: TopicRequest) -> None:
        self._board.wish(wish)
        if self._broken is not None:
            self._board.fail_all(self._closed_error)
        self._pump()

    def _retried(self, batch: ProducerBatch) -> None:
        self._waiting.follow(batch)

    def _want_what_is_missing(self, now: float) -> None:
        if self._accumulator.leaderless:
            self._link.want_metadata(self._accumulator.leaderless)
        elif self._board.topics and now - self._refreshed_ms > self._metadata_max_age_ms:
            self._refreshed_ms = now
            self._link.want_metadata(self._board.topics)
        if self._accumulator.identity_wanted and self.transactions is None:
            self._producer_id.begin()

    def _set_timer(self, now: float) -> None:
        quiet = self._timer is None and not self._accumulator.sendable
        if quiet and self.collector.empty and self._board.settled:
            return
        times = self._board.next_times_ms(now)
        for at in (self._accumulator.next_time_ms(now), self.collector.next_due_ms(self._requests.patience_ms(now))):
            if at is not None:
                times.append(at)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            self._timer = self._loop.call_later(max(_TICK_MS, min(times) - now) / 1000, self._pump)
