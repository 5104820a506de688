"""One coordinator in a broker: it loads the partition's log, runs the state machine, and performs the effects.

A coordinator exists for one leader epoch of one partition of an internal topic. It serves requests once all records
that the log had at the start of the epoch are committed and loaded. Before that, its state may lack records that an
earlier coordinator has confirmed to clients. The state must agree with the log, so an append with an unknown result
ends the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import Answer as ProduceAnswer
from sparklog.broker.replication.partition import Batches, Partition, PendingProduce
from sparklog.config import MIB
from sparklog.coordinator.effects import Append, CoordinatorReport, Outcome, Refused, Respond, Rewritten
from sparklog.coordinator.events import Appended, AppendRefused, CoordinatorTicked, RewriteRequested
from sparklog.coordinator.log_records import Record
from sparklog.errors import BrokerError, ErrorCode, SparklogError, StorageError
from sparklog.protocol.messages import ACKS_ALL
from sparklog.record.arrays import binary_of
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.header import unpack_headers
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA
from sparklog.replica.purgatory import NEVER
from sparklog.storage.log import LogSlice

_log = logging.getLogger(__name__)

_READ_BYTES = MIB
#: The maximum number of bytes in one batch of an append; a single record may be larger.
_BATCH_BYTES = 4 * MIB
#: The live records are rewritten when the log has more than ``_REWRITE_RECORDS`` records, and also more than
#: ``_REWRITE_FACTOR`` times the number of live records.
_REWRITE_RECORDS, _REWRITE_FACTOR = 1000, 4

#: The errors of an append after which its records are not in the log, and never will be.
_NOT_APPENDED = {
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.MESSAGE_TOO_LARGE,
    ErrorCode.SCHEMA_OUTDATED,
    ErrorCode.SCHEMA_MISMATCH,
    ErrorCode.INVALID_RECORD,
    ErrorCode.CORRUPT_MESSAGE,
}


class Core(Protocol):
    """The part of a coordinator's state machine that ``CoordinatorRuntime`` uses.

    ``coordinator.transactions.Transactions`` and ``coordinator.groups.Groups`` implement it.
    """

    def load(self, records: Iterable[Record]) -> None: ...

    def start(self, now_ms: int) -> Sequence[object]: ...

    def step(self, event: Any, now_ms: int) -> Sequence[object]: ...

    @property
    def deadline_ms(self) -> int | None: ...

    @property
    def live_records(self) -> int: ...


class CoordinatorRuntime(ABC):
    """A coordinator that runs in this broker, for one partition of an internal topic and one leader epoch.

    A part of ``CoordinatorHosting``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partition: Partition,
        core: Core,
        *,
        log_start_moved: Callable[[Partition], None],
    ) -> None:
        self.context = context
        self.partition = partition
        self._log_start_moved = log_start_moved
        self.epoch = partition.replica.leader_epoch
        #: The offset up to which records must be committed and loaded before this coordinator serves.
        self._read_to = partition.log.log_end_offset
        #: Called after a failure, so that the owner can start a new coordinator.
        self.on_failed: Callable[[], None] = lambda: None
        #: Why this coordinator does not serve (``loading``, ``failed`` or ``ended``); empty if it serves.
        self.not_ready_reason = "loading"
        self._core = core
        self._settled = asyncio.Event()
        self._events: deque[object] = deque()
        self._stepping = False
        self._tickets = 0
        self._open: dict[int, Callable[[Outcome], None]] = {}
        #: The responses that wait for a confirmation, and whether a confirmation is being written.
        self._unconfirmed: list[tuple[Respond, Record]] = []
        self._confirming = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        #: The number of records in the log since the last rewrite, and the number of records above which the log is
        #: rewritten again.
        self._records = 0
        self._rewrite_above = _REWRITE_RECORDS
        self._rewrite_from: int | None = None

    @abstractmethod
    def perform(self, effect: Any) -> None:
        """Perform an effect that only this kind of coordinator has."""

    def confirmation(self, outcome: Outcome) -> Record | None:
        """Return a record to commit before this response is sent; None if the response needs no confirmation.

        The record changes nothing, but its commit proves that this broker is still the leader. A broker that was
        suspended may not know that another broker leads now and has changed the state. But the writes of such a broker
        fail.
        """
        return None

    @property
    def ended(self) -> bool:
        return self.not_ready_reason == "ended"

    def require_ready(self) -> None:
        """Raise an error unless this coordinator is ready to serve requests.

        Raises:
            BrokerError: NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE if its log cannot be
                read, BROKER_STOPPING.
        """
        tp = self.partition.tp
        if self.not_ready_reason == "loading":
            raise BrokerError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"{tp} is being loaded")
        if self.not_ready_reason == "failed":
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{tp} cannot be read; see the broker's log")
        if self.not_ready_reason:
            raise BrokerError(
                ErrorCode.NOT_COORDINATOR, f"broker {self.context.broker_id} is no longer the leader of {tp}"
            )
        if self.context.quiesced:
            raise BrokerError(
                ErrorCode.BROKER_STOPPING, f"broker {self.context.broker_id} is stopping and accepts no new writes"
            )

    def ask(self, event_of: Callable[[int], object], on_result: Callable[[Outcome], None]) -> None:
        """Pass a request to the state machine. ``on_result`` is called once, now or later.

        ``event_of`` gets a new number for the request and returns the event for the state machine.
        """
        self._tickets += 1
        self._open[self._tickets] = on_result
        self.step(event_of(self._tickets))

    def step(self, event: object) -> None:
        """Give the state machine one event, and perform all effects that result from it.

        The records that an effect appends may already be committed when this returns.
        """
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events and not self.not_ready_reason:
                self._perform_all(self._core.step(self._events.popleft(), self._now_ms()))
        except Exception:
            _log.exception("%s: coordinator failed", self.partition.tp)
            self._fail()
        finally:
            self._stepping = False
        self._arm()

    def committed(self) -> None:
        """Begin to load the log if the high watermark has risen far enough for that."""
        if self.not_ready_reason == "loading" and self.partition.replica.high_watermark >= self._read_to:
            self._settled.set()

    def end(self) -> None:
        """Stop coordinating, because this broker no longer leads the partition.

        Waiting requests get NOT_COORDINATOR, after which clients find the next coordinator.
        """
        if self.not_ready_reason != "ended":
            self.not_ready_reason = "ended"
            self._settled.set()
            self._release(ErrorCode.NOT_COORDINATOR, "is no longer led by this broker")

    # --- loading ---

    async def load(self) -> None:
        """Wait until the records of earlier leaders are committed, load the log, and then start to serve."""
        tp = self.partition.tp
        began = time.monotonic()
        self.committed()
        await self._settled.wait()
        try:
            await self._read_log()
            if self.ended:
                return
            self.not_ready_reason = ""
            self._rewrite_above = self._worth_rewriting()
            self._stepping = True
            try:
                self._perform_all(self._core.start(self._now_ms()))
            finally:
                self._stepping = False
        except Exception as error:
            if self.ended:
                return
            if isinstance(error, SparklogError):
                _log.error("%s: its coordinator cannot be loaded: %s", tp, error)
            else:
                _log.exception("%s: its coordinator cannot be loaded", tp)
            self._fail()
            return
        took_ms = (time.monotonic() - began) * 1000
        _log.info("%s: coordinator of epoch %d read %d records in %.0f ms", tp, self.epoch, self._records, took_ms)
        self.step(CoordinatorTicked())

    async def _read_log(self) -> None:
        partition, end = self.partition, self._read_to
        offset = partition.log.log_start_offset
        while offset < end and not self.ended:
            try:
                found = partition.log.read(offset, max_bytes=_READ_BYTES, end_offset=end)
            except StorageError as error:
                raise partition.storage_failed(error) from error
            if not found.batch_count:
                raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{partition.tp}: no batch found at offset {offset}")
            for records in _decoded(found):
                self._core.load(records)
                self._records += len(records)
            offset = found.next_offset
            await asyncio.sleep(0)

    def _fail(self) -> None:
        self.context.counters["coordinators.failed"] += 1
        if not self.ended:
            self.not_ready_reason = "failed"
            self.on_failed()
        self._release(ErrorCode.COORDINATOR_NOT_AVAILABLE, "has failed; the broker's log has the reason")

    def _release(self, code: ErrorCode, detail: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._open = self._open, {}
        for on_result in waiting.values():
            on_result(Refused(code, f"{self.partition.tp}: coordinator {detail}"))

    # --- effects ---

    def _perform_all(self, effects: Iterable[object]) -> None:
        for effect in effects:
            match effect:
                case Respond():
                    if confirmation := self.confirmation(effect.outcome):
                        self._unconfirmed.append((effect, confirmation))
                        self._confirm()
                    else:
                        self._answer(effect.ticket, effect.outcome)
                case Append():
                    self._append(effect)
                case Rewritten():
                    self._rewritten()
                case CoordinatorReport():
                    self.context.counters[effect.kind] += 1
                    _log.warning("%s", effect.detail)
                case _:
                    self.perform(effect)

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        on_result = self._open.pop(ticket, None)
        if on_result is not None:
            on_result(outcome)

    def _append(self, effect: Append) -> None:
        if not effect.records:
            self._events.append(Appended(effect.append))
            return
        self._write(effect.records, lambda answer: self._append_ended(effect, answer))

    def _write(self, records: Sequence[Record], ended: Callable[[ProduceAnswer], None]) -> None:
        self._records += len(records)
        pending = PendingProduce(_encoded(records, self.partition.rules.schema_id), ended)
        self.partition.produce(pending, acks=ACKS_ALL, deadline_ms=NEVER)
        if self._rewrite_from is None and self._records > self._rewrite_above:
            self._rewrite()

    def _append_ended(self, effect: Append, answer: ProduceAnswer) -> None:
        if self.ended:
            return
        if answer.code is ErrorCode.NONE:
            self.step(Appended(effect.append))
        elif self._was_refused(answer):
            self.step(AppendRefused(effect.append, answer.detail))

    def _was_refused(self, answer: ProduceAnswer) -> bool:
        """Return whether the records of a failed append can never be in the log; otherwise end this coordinator."""
        if answer.code in _NOT_APPENDED and self.partition.offline is None:
            self.context.counters["coordinators.appends.refused"] += 1
            _log.warning("%s: append refused: %s", self.partition.tp, answer.detail)
            return True
        if self.partition.replica.is_leader and self.partition.replica.leader_epoch == self.epoch:
            # The result of the append is unknown. The next coordinator reads the log, with or without these records.
            _log.error("%s: append ended in %s: %s", self.partition.tp, answer.code.name, answer.detail)
            self._fail()
        else:
            self.end()
        return False

    def _confirm(self) -> None:
        """Write the confirmations of all responses that were added during the last write, in one append.

        These responses are sent after the append is committed.
        """
        if self._confirming or not self._unconfirmed:
            return
        self._confirming = True
        waiting, self._unconfirmed = self._unconfirmed, []
        answers, records = zip(*waiting, strict=True)
        self._write(list(dict.fromkeys(records)), lambda answer: self._confirmed(answers, answer))

    def _confirmed(self, answers: Sequence[Respond], answer: ProduceAnswer) -> None:
        self._confirming = False
        try:
            if self.not_ready_reason:  # all open requests already have a response
                return
            if answer.code is ErrorCode.NONE:
                for found in answers:
                    self._answer(found.ticket, found.outcome)
            elif self._was_refused(answer):
                detail = f"{self.partition.tp}: the state cannot be confirmed: {answer.detail}"
                for found in answers:
                    self._answer(found.ticket, Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail))
            else:
                return
            self._confirm()
        except Exception:
            _log.exception("%s: coordinator failed", self.partition.tp)
            self._fail()

    # --- bounding the log ---

    def _worth_rewriting(self) -> int:
        return max(_REWRITE_RECORDS, _REWRITE_FACTOR * self._core.live_records)

    def _rewrite(self) -> None:
        self._rewrite_above = self._worth_rewriting()
        if self._records > self._rewrite_above:
            self._rewrite_from = self.partition.log.log_end_offset
            self._records = 0
            self.step(RewriteRequested())

    def _rewritten(self) -> None:
        """Delete the records before the rewrite.

        The rewrite has written all live records again, so no replica needs the older ones.
        """
        assert self._rewrite_from is not None
        self.context.counters["coordinators.rewrites"] += 1
        self.partition.advance_log_start(self._rewrite_from)
        self._log_start_moved(self.partition)
        self._rewrite_from = None

    # --- time ---

    def _now_ms(self) -> int:
        return self.context.wall_ms()

    def _arm(self) -> None:
        deadline_ms = self._core.deadline_ms if not self.not_ready_reason else None
        if deadline_ms is None or (self._timer is not None and self._timer_at_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = deadline_ms
        delay_s = max(deadline_ms - self._now_ms(), 1) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.context.quiesced:  # a stopping broker writes nothing new, so that its followers can catch up
            self._timer_at_ms = self._now_ms() + 1000
            self._timer = asyncio.get_running_loop().call_later(1.0, self._tick)
            return
        self.step(CoordinatorTicked())


def _encoded(records: Sequence[Record], schema_id: int) -> Batches:
    return [
        (header, memoryview(body))
        for header, body in (
            encode_batch(_rows(chunk), schema_id=schema_id, compression=None, event_time=DEFAULT_EVENT_TIME)
            for chunk in _chunks(records)
        )
    ]


def _chunks(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        key, value = record
        added = len(key) + len(value or b"")
        if chunk and size + added > _BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += added
    yield chunk


def _rows(records: Sequence[Record]) -> pa.RecordBatch:
    """Return the records as rows of the default schema.

    They have no timestamps, so readers see the time of the append.
    """
    keys, values = zip(*records, strict=True)
    columns = [binary_of(keys), binary_of(values)]
    columns += [pa.nulls(len(records), field.type) for field in list(DEFAULT_SCHEMA)[2:]]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)


def _decoded(found: LogSlice) -> Iterator[list[Record]]:
    headers = unpack_headers(found.headers)
    whole = memoryview(b"".join(bytes(body) for body in found.bodies)) if len(found.bodies) > 1 else found.bodies[0]
    at = 0
    for header in headers:
        batch = decode_batch(header, memoryview(whole)[at : at + header.stored_bytes], DEFAULT_SCHEMA)
        yield list(zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True))
        at += header.stored_bytes
