"""The producer's I/O thread: takes chunks and batches, sends them to the leaders, tells what became of them.

One function, ``_pump``, looks at everything and starts what can be started. It runs when something was handed over,
when an answer or a connection came, when metadata changed, and when the earliest delay ends; it never waits. All
decisions about order, retries and sequences are the accumulator's; requests under way are ``produce_requests``'.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sparklog.client.accumulator import Accumulator, BatchState, ProducerBatch, ProducerIdentity
from sparklog.client.async_link import AsyncLink
from sparklog.client.collector import Attendant, Collector, RecordChunk
from sparklog.client.errors import ClientTimeout, ProducerClosed, closed_for, transaction_error
from sparklog.client.loop_lease import LoopLease
from sparklog.client.partitioning import EncodedPart, ProducerTopic, Rows, encode_few, encode_parts, under_newest_schema
from sparklog.client.produce_requests import ProduceRequests
from sparklog.client.results import BatchOutcome, Completion
from sparklog.client.sender_transactions import SenderTransactions
from sparklog.client.topic_board import UNKNOWN_TOPIC_GRACE_S, TopicBoard, TopicWish
from sparklog.errors import TRAITS, BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.async_client import AsyncConnection
from sparklog.net.loop import new_event_loop
from sparklog.protocol.messages import (
    InitProducerId,
    InitProducerIdReply,
    ProduceResult,
)
from sparklog.record.codec import EncodedBatch

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
#: Who has waited for so many records one after the other will wait for the next one as well.
_WAITS_IN_TURN = 4
#: An answer that takes longer is waited for by the I/O thread: it has other things to look after as well.
_ANSWER_S = 0.005
#: As fine as uvloop's timers are: for less than half of it they would not wait at all.
_TICK_MS = 1.0


class SenderSettings(NamedTuple):
    """What the producer was made with, in this thread's terms."""

    bootstrap: str
    client_id: str
    acks: int
    idempotent: bool
    batch_bytes: int
    compression: str | None
    request_timeout_s: float
    delivery_timeout_s: float
    max_request_bytes: int
    metadata_max_age_s: float
    #: Key of this producer's transactions; empty: it writes without.
    transaction: str = ""


class Ticket(NamedTuple):
    """What a batch carries through the accumulator: whom to tell, and the room to give back."""

    completion: Completion
    number: int
    reserved: int


class Sender:
    """Owner of the I/O thread. ``submit``, ``topic``, ``wake`` and ``stop`` may be called from any thread."""

    def __init__(
        self,
        settings: SenderSettings,
        collector: Callable[[Attendant], Collector],
        *,
        forsake: Callable[[BaseException], None],
    ) -> None:
        """Starts the thread. ``collector`` is made here because its chunks need somebody who attends to them.
        ``forsake`` is called when the thread ends, to fail all that is open then.

        Raises:
            ConfigError: the bootstrap servers are no addresses.
        """
        self._settings = settings
        self._loop = new_event_loop()
        try:
            self._link = AsyncLink(
                settings.bootstrap,
                client_id=settings.client_id,
                changed=self._pump,
                request_timeout_s=settings.request_timeout_s,
            )
        except BaseException:
            self._loop.close()
            raise
        self._lease = LoopLease(self._loop)
        self.collector = collector(self)
        self._board = TopicBoard(self._link)
        self._accumulator = Accumulator(idempotent=settings.idempotent, transactional=bool(settings.transaction))
        self.transactions = self._transactions() if settings.transaction else None
        self._incoming: deque[ProducerBatch] = deque()
        #: What is in the log, and whom to tell so.
        self._acknowledged: deque[tuple[Completion, int, BatchOutcome]] = deque()
        self._requests = ProduceRequests(
            self._link,
            acks=settings.acks,
            transaction=settings.transaction,
            request_timeout_s=settings.request_timeout_s,
            told=self._told,
            changed=self._pump,
        )
        self._getting_identity = False
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_ms = 0.0
        self._woken = False
        self._broken: BaseException | None = None
        self._closed_error = ProducerClosed("the producer is closed")
        self._forsake = forsake
        self._ended = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sparklog-producer", daemon=True)
        self._waits = 0
        #: A thread that acts for this one only waits: nothing is lost where it is interrupted.
        self._resting = False
        self._waiting_thread = -1
        self._thread.start()

    # --- from any thread ---

    def wake(self) -> None:
        """Have the thread look again, soon."""
        if not self._woken:
            self._woken = True
            try:
                self._lease.post(self._pump)
            except RuntimeError:
                if self._broken is None:  # only an ended thread's loop is closed
                    raise

    def begun(self) -> None:
        """A chunk was begun that may perhaps be sent at once."""
        if not self._lease.lent or not self._act(self._pump):
            self.wake()

    def hurry(self) -> None:
        """Somebody waits in a way of his own for what is under way."""
        self._lease.recall()

    def attend(self, finished: Callable[[], bool]) -> None:
        """Called by a thread that will wait until something is ``finished``: the caller who does so for one record
        after the other may do the I/O meanwhile. Returns sooner or later."""
        if not self._lease.lent and self._waits_in_turn():
            try:
                self._lease.borrow(lambda: not self._needs_loop())
            except RuntimeError:
                return  # the thread has just ended, and all that was open with it
            if not self._lease.lent:
                self._waits = -_WAITS_IN_TURN  # something goes on that will take a moment
        if self._lease.lent:
            self._act(functools.partial(self._receive, finished))

    def _waits_in_turn(self) -> bool:
        """Whether it was always this thread that waited, the last few times."""
        thread = threading.get_ident()
        if thread != self._waiting_thread:
            self._waiting_thread, self._waits = thread, 0
        self._waits += 1
        return self._waits > _WAITS_IN_TURN

    def _act(self, work: Callable[[], None]) -> bool:
        """Do some of the thread's work in its place, if it has lent its loop. False: not done."""
        if self.on_io_thread():
            return False  # in a callback: it is doing some already
        try:
            return self._act_inside(work)
        except BaseException:
            self._lease.leave_interrupted()
            self.wake()  # perhaps nothing was done yet, and nobody else would say that there is something to do
            raise

    def _act_inside(self, work: Callable[[], None]) -> bool:
        if not self._lease.enter():
            return False
        try:
            work()
        except BaseException as error:
            if not self._resting:  # an interrupt, perhaps, in the middle of something: nothing is certain any more
                self._break(error)
            raise
        finally:
            self._resting = False
            needed = self._needs_loop()
            self._lease.leave()
            if needed:
                self._lease.recall()
        return True

    def _receive(self, finished: Callable[[], bool]) -> None:
        """Take answers as they come, for as long as they usually take."""
        until = time.monotonic() + _ANSWER_S
        while not finished():
            connection = self._requests.only_connection()
            left_s = until - time.monotonic()
            if connection is None or left_s <= 0 or not self._wait_readable(connection, left_s):
                self._lease.recall()
                return
            if not connection.read_now():
                self._lease.recall()
                return

    def _wait_readable(self, connection: AsyncConnection, timeout_s: float) -> bool:
        self._resting = True
        readable = connection.wait_readable(timeout_s)
        self._resting = False
        return readable

    def _needs_loop(self) -> bool:
        """Something is to be done that only a loop that turns can do."""
        return (
            self._broken is not None
            or self.transactions is not None
            or self._timer is not None
            or self._link.busy
            or self._accumulator.sendable
        )

    @property
    def topics(self) -> Mapping[str, ProducerTopic]:
        """The topics known now."""
        return self._board.topics

    def submit(self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, ticket: Ticket) -> None:
        """Queue one encoded batch; room for it has been reserved."""
        self._incoming.append(self._batch(topic, partition, encoded, ticket))
        self.wake()
        if self._broken is not None:  # the thread will not look again
            self._fail_incoming()

    def topic(self, name: str, timeout_s: float) -> ProducerTopic:
        """The topic, waiting for its metadata when it is not known yet.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            ClientTimeout: no broker said anything in time.
        """
        known = self._board.topics.get(name)
        if known is not None:
            return known
        now = time.monotonic() * 1000
        wish = TopicWish(name, now + timeout_s * 1000, now + UNKNOWN_TOPIC_GRACE_S * 1000, Future())
        if self.on_io_thread():
            raise ClientTimeout(f"metadata of topic {name!r} cannot be waited for in a future's callback")
        self._hand_over(self._wish, wish)
        return wish.future.result()

    def _hand_over(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the thread call ``work``, which it does if this returns. Raises ProducerClosed."""
        with self._ending:
            if self._ended:
                raise closed_for(self._closed_error)
            self._lease.post(work, *arguments)

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the thread and wait for its end.

        Raises:
            ProducerClosed: the thread has ended, or ends meanwhile.
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

    def refuse_own_thread(self, what: str) -> None:
        """Raises RuntimeError in a future's callback: waiting there would be waiting for itself."""
        if self.on_io_thread():
            raise RuntimeError(f"{what} cannot be waited for in a future's callback")

    def stop(self, reason: BaseException) -> None:
        """End the thread; what is not done yet fails with ``reason``."""
        with contextlib.suppress(ProducerClosed):  # it has ended already
            self._hand_over(self._break, reason)
        self._thread.join(_STOP_TIMEOUT_S)

    def on_io_thread(self) -> bool:
        """Whether this thread is the one that makes room, sends, and tells."""
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
            self._tell_acknowledged()  # answers that came after the last look
            with self._ending:
                self._ended = True
            # One more turn answers who came just before that, and lets the transports close their sockets.
            self._loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            self._loop.close()

    def _run_until_stopped(self) -> None:
        try:
            self._lease.run()
        except BaseException as error:
            _log.exception("a producer's thread")
            self._break(error)
            self._loop.run_forever()  # one turn: it has just been told to stop

    def _unforeseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody caught. If it came out of a call of ours (a task's end is one), what that was to do is not done,
        perhaps for ever: the producer ends, and says why. The rest comes out of connections, which it ends."""
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
            # Last, since this thread waits then: whoever it wakes would only wait for it to let go of the interpreter.
            self._tell_acknowledged()

    def _tell_acknowledged(self) -> None:
        while self._acknowledged:
            completion, number, outcome = self._acknowledged.popleft()
            completion.batch_done(number, outcome)

    def _look(self) -> None:
        try:
            now = _now_ms()
            for topic in self._board.follow():
                self._follow_topic(topic)
            self._board.grant(now)
            while self._incoming:
                batch = self._incoming.popleft()
                self._accumulator.add(batch)
                self._follow(batch)
            patience_ms = self._requests.patience_ms(now)
            for chunk in self.collector.take_due(now + _TICK_MS / 2, self._accumulator.topic_busy, patience_ms):
                self._encode_chunk(chunk)
            for name, error in self._board.gone(now):
                self._give_up_topic(name, error)
            for batch in self._accumulator.expire(now):
                self._expired(batch)
            self._requests.end_deposed()
            if self.transactions is not None:
                self.transactions.look()
            self._send_all(now)
            self._want_what_is_missing(now)
            self._set_timer(now)
        except Exception as error:  # a bug of ours must not leave futures open for ever
            self._break(error)
            raise

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
        """Where a batch may go: in a transaction nowhere before its partition is registered."""
        if self.transactions is not None and not self.transactions.may_send(tp):
            return None
        leader = self._link.metadata.leader(tp)
        return leader.broker_id if leader else None

    # --- outcomes ---

    def _told(self, batch: ProducerBatch, result: ProduceResult) -> None:
        """What became of a batch in flight."""
        if result.code == ErrorCode.NONE:
            self._succeeded(batch, result.base_offset)
        elif result.code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._succeeded(batch, -1)  # in the log, so long ago that the broker does not know where
        else:
            leader_known = self._link.metadata.leader_told(batch.tp, result.leader, result.leader_epoch)
            self._failed(batch, ErrorCode(result.code), result.detail, leader_known=leader_known)

    def _succeeded(self, batch: ProducerBatch, base_offset: int) -> None:
        self._accumulator.succeeded(batch)
        self._link.progress()
        ticket, outcome = self._concluded(batch, base_offset, None)
        self._acknowledged.append((ticket.completion, ticket.number, outcome))

    def _failed(self, batch: ProducerBatch, code: ErrorCode, detail: str, *, leader_known: bool) -> None:
        if TRAITS[code].refresh_metadata and not leader_known:
            self._link.want_metadata([batch.tp.topic])
        if not self._accumulator.failed(batch, code, now_ms=_now_ms(), roll=random.random(), detail=detail):
            error = BrokerError(code, detail or f"partition {batch.tp}")
            self._finish(batch, -1, transaction_error(error, str(self.transactions)) if self.transactions else error)
        else:  # the topic may have changed while it was in flight
            self._follow(batch)

    def _expired(self, batch: ProducerBatch) -> None:
        last = batch.last_error or self._link.last_problem or "it was never sent: no leader is known"
        if batch.last_refusal not in {"", batch.last_error}:
            last += f"; before that: {batch.last_refusal}"
        self._finish(
            batch,
            -1,
            ClientTimeout(
                f"writing {batch.encoded.header.record_count} records to {batch.tp}: not acknowledged within"
                f" {self._settings.delivery_timeout_s:g} s, last: {last}"
            ),
        )

    def _finish(self, batch: ProducerBatch, base_offset: int, error: BaseException | None) -> None:
        ticket, outcome = self._concluded(batch, base_offset, error)
        ticket.completion.batch_done(ticket.number, outcome)

    def _concluded(
        self, batch: ProducerBatch, base_offset: int, error: BaseException | None
    ) -> tuple[Ticket, BatchOutcome]:
        ticket = batch.handle
        assert isinstance(ticket, Ticket)
        self.collector.release(ticket.reserved)
        return ticket, BatchOutcome(batch.tp.partition, base_offset, batch.encoded.header.record_count, error)

    def _break(self, reason: BaseException) -> None:
        """The end, wanted or not: everything that is open fails with ``reason``."""
        if self._broken is not None:
            return
        self._tell_acknowledged()
        self._broken = reason
        closed = reason if isinstance(reason, ProducerClosed) else closed_for(reason)
        self._closed_error = closed
        self._tell_acknowledged()
        for chunk in self.collector.close(closed):
            chunk.fail(closed)
        self._fail_incoming()
        for batch in self._accumulator.batches():
            self._accumulator.give_up(batch)
            self._finish(batch, -1, closed)
        self._board.fail_all(closed)
        self._forsake(closed)
        self._lease.stop()

    def _discard(self, error: BaseException) -> None:
        """All that is not acknowledged fails; what is in flight may still get into the log."""
        for chunk in self.collector.take_due(math.inf, lambda _: False, 0.0):
            self.collector.release(chunk.size)
            chunk.fail(error)
        while self._incoming:
            self._finish(self._incoming.popleft(), -1, error)
        for batch in self._accumulator.batches():
            self._accumulator.give_up(batch)
            self._finish(batch, -1, error)

    def _fail_incoming(self) -> None:
        """Called by this thread when it ends, and by others afterwards."""
        while True:
            try:
                batch = self._incoming.popleft()
            except IndexError:
                return
            self._finish(batch, -1, self._closed_error)

    # --- chunks to batches ---

    def _batch(self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, ticket: Ticket) -> ProducerBatch:
        return ProducerBatch(
            TopicPartition(topic.name, partition),
            encoded,
            topic_id=topic.topic_id,
            deadline_ms=_now_ms() + self._settings.delivery_timeout_s * 1000,
            handle=ticket,
        )

    def _encode_chunk(self, chunk: RecordChunk) -> None:
        topic = self._board.topics.get(chunk.topic.name, chunk.topic)
        parts = self._few_parts(topic, chunk) or self._parts_by_halves(topic, chunk, np.arange(len(chunk)))
        if not parts:
            assert chunk.error is not None, "every record was refused"
            self.collector.release(chunk.size)
            chunk.fail(chunk.error)
            return
        chunk.placed([part.rows for part in parts])
        left, rows = chunk.size, sum(len(part.rows) for part in parts)
        for index, part in enumerate(parts):
            share = left if index == len(parts) - 1 else chunk.size * len(part.rows) // rows
            left -= share
            self._accumulator.add(self._batch(topic, part.partition, part.encoded, Ticket(chunk, index, share)))

    def _few_parts(self, topic: ProducerTopic, chunk: RecordChunk) -> list[EncodedPart] | None:
        if self._settings.compression is not None:
            return None
        batch_bytes = self._settings.batch_bytes
        try:
            return encode_few(topic, chunk.records, chunk.partition, size=chunk.size, batch_bytes=batch_bytes)
        except Exception:
            return None  # because of one of them; which one, is found in another way

    def _parts_by_halves(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Without the records that cannot be encoded, for whatever reason: others are none the worse for them."""
        try:
            return self._parts(topic, chunk, rows)
        except Exception as error:
            if len(rows) == 1:
                chunk.refuse(int(rows[0]), error if isinstance(error, BrokerError) else _not_encoded(topic, error))
                return []
        half = len(rows) // 2
        return [*self._parts_by_halves(topic, chunk, rows[:half]), *self._parts_by_halves(topic, chunk, rows[half:])]

    def _parts(self, topic: ProducerTopic, chunk: RecordChunk, rows: Rows) -> list[EncodedPart]:
        """Raises BrokerError when a record does not fit the topic's schema, or is too large."""
        parts = encode_parts(
            topic,
            chunk.to_batch(topic, rows),
            chunk.partition,
            compression=self._settings.compression,
            batch_bytes=self._settings.batch_bytes,
        )
        return [part._replace(rows=rows[part.rows]) for part in parts]

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

    def _wish(self, wish: TopicWish) -> None:
        self._board.wish(wish)
        if self._broken is not None:
            self._board.fail_all(self._closed_error)
        self._pump()

    def _follow_topic(self, topic: ProducerTopic) -> None:
        for batch in self._accumulator.batches(topic.name):
            if batch.state is not BatchState.IN_FLIGHT:
                self._follow(batch)

    def _follow(self, batch: ProducerBatch) -> None:
        """Fit a batch that waits to its topic as it is now, or give it up when that is another topic."""
        topic = self._board.topics.get(batch.tp.topic)
        if topic is None:
            return
        if batch.topic_id != topic.topic_id:
            self._accumulator.give_up(batch)
            detail = f"topic {topic.name!r} was deleted and created again since the records were handed over"
            self._finish(batch, -1, BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, detail))
        elif batch.encoded.header.schema_id < topic.schema_id:
            try:
                batch.encoded = under_newest_schema(batch.encoded, topic)
            except Exception as error:
                self._accumulator.give_up(batch)
                self._finish(batch, -1, error if isinstance(error, BrokerError) else _not_encoded(topic, error))

    def _give_up_topic(self, name: str, error: BrokerError) -> None:
        for batch in self._accumulator.batches(name) if self._accumulator.topic_busy(name) else ():
            if batch.state is not BatchState.IN_FLIGHT:
                self._accumulator.give_up(batch)
                self._finish(batch, -1, error)

    def _want_what_is_missing(self, now: float) -> None:
        if self._accumulator.leaderless:
            self._link.want_metadata(self._accumulator.leaderless)
        elif self._board.topics and now - self._refreshed_ms > self._settings.metadata_max_age_s * 1000:
            self._refreshed_ms = now
            self._link.want_metadata(self._board.topics)
        if self._accumulator.identity_wanted and self.transactions is None and not self._getting_identity:
            self._getting_identity = True
            self._link.start(self._get_identity())

    async def _get_identity(self) -> None:
        attempt = 0
        while self._broken is None and not self._accumulator.empty:
            try:
                reply = await self._link.ask_any(InitProducerId(0))
            except BrokerError as error:
                self._link.last_problem = str(error)
                await asyncio.sleep(min(1.0, 0.025 * 2**attempt) * random.uniform(0.8, 1.2))
                attempt = min(attempt + 1, 10)
                continue
            if isinstance(reply, InitProducerIdReply):
                self._accumulator.set_identity(ProducerIdentity(reply.producer_id, reply.producer_epoch))
            break
        self._getting_identity = False
        self._pump()

    def _set_timer(self, now: float) -> None:
        times = self._board.next_times_ms(now)
        for at in (self._accumulator.next_time_ms(now), self.collector.next_due_ms(self._requests.patience_ms(now))):
            if at is not None:
                times.append(at)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            self._timer = self._loop.call_later(max(_TICK_MS, min(times) - now) / 1000, self._pump)


def _not_encoded(topic: ProducerTopic, error: BaseException) -> BrokerError:
    refused = BrokerError(ErrorCode.INVALID_RECORD, f"a record of {topic.name!r} cannot be encoded: {error!r}")
    refused.__cause__ = error
    return refused


def _now_ms() -> float:
    return time.monotonic() * 1000
