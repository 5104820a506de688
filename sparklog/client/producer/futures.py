"""What a producer's futures give, and the futures themselves.

A record's future must cost next to nothing, since there is one per record and most are never looked at: it holds its
chunk and its place in it, and becomes a full ``concurrent.futures.Future`` when somebody first waits on it, adds a
callback or hands it to ``wait``, ``as_completed`` or ``asyncio.wrap_future``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, Protocol, TypeVar

from sparklog.model import OffsetRange

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RecordMetadata(NamedTuple):
    """Where a record is. ``offset`` is -1 when the broker does not tell it (acks=0, or a duplicate found late)."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int


class WrittenRange(NamedTuple):
    """Offsets ``[start, end)`` of one partition; -1 both when the broker does not tell them."""

    partition: int
    offsets: OffsetRange


class WriteResult(NamedTuple):
    """Where the rows of a table are. A partition may have several ranges, others' records between them."""

    topic: str
    record_count: int
    ranges: tuple[WrittenRange, ...]


class BatchOutcome(NamedTuple):
    """What became of one batch: its offsets, or why not."""

    partition: int
    base_offset: int
    record_count: int
    error: BaseException | None = None


class CompletionLatch:
    """That something has ended, to be waited for or told: what a future is for, without what most of them cost.

    Without a lock, which a forked child might find held for ever: appending to a list is one step.
    """

    __slots__ = ("_told", "done")

    def __init__(self) -> None:
        self.done = False
        self._told: list[Callable[[], None]] = []

    def then(self, told: Callable[[], None]) -> None:
        """Call ``told``, at least once: now, or in the thread that calls ``end``."""
        if not self.done:
            self._told.append(told)
        if self.done:
            told()

    def end(self) -> None:
        """It has ended. Once is enough, and more is the same: where an interrupt came in the middle of it, ``end`` is
        called again. Those who wait come before the others, who take it off the list of what may be ended again."""
        self.done = True
        if self._told:  # who comes from now on sees that it has ended
            for tell_one in reversed(tuple(self._told)):
                tell_one()
            self._told.clear()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended. False: it has not within ``timeout_s``."""
        ended = threading.Event()
        self.then(ended.set)
        try:
            return ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                self._told.remove(ended.set)


class Completion(Protocol):
    """What was handed to a producer in one go and ends as one: a chunk of records, or a table."""

    #: No batch of it is under way any more.
    finished: CompletionLatch

    @property
    def failed(self) -> bool:
        """True when a part of it failed."""

    @property
    def error(self) -> BaseException | None:
        """Of the first part that failed."""

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        """Batch number ``index`` has come to its end; called once each, from the I/O thread."""

    def fail(self, error: BaseException) -> None:
        """Nothing more comes of it: it could not be encoded, or the producer ends. No error where it has ended."""

    def abandon(self, error: BaseException) -> None:
        """Let every wait for an outcome that is still open end with ``error``, without calling any callback. Called in
        a forked child, where the threads that would end it do not run and may have held its locks."""

    def take_failure(self) -> BaseException | None:
        """The first error, unless somebody has had it from a future already; then and afterwards None."""


def tell(resolve: Callable[[T], None], outcome: T) -> None:
    """Resolve a future in the I/O thread. Its callbacks are others' code: one that means to end its thread would end
    all of the producer, as futures hold back no more than an ``Exception``. But where a caller's thread acts for the
    I/O thread, an interrupt is that thread's own."""
    try:
        resolve(outcome)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a future's callback")


def end_in_child(future: Future[Any], error: BaseException) -> None:
    """End a future of the parent process in a forked child, without its callbacks. A thread of the parent may have held
    its lock in the moment of the fork, so the future gets another one."""
    future._condition = threading.Condition()
    future._done_callbacks.clear()  # type: ignore[attr-defined]
    resolve(future, error)


def resolve(future: Future[T], outcome: T | BaseException) -> None:
    """Once is enough, and more is the same."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class RecordOutcomes(Protocol):
    """What a record's future asks its chunk."""

    lock: threading.Lock

    def attend(self, index: int) -> RecordMetadata | BaseException | None:
        """Help to complete the record while the calling thread waits for it; return the outcome, or None so far."""

    def hurry(self) -> None:
        """Somebody waits for it in another way."""

    def outcome(self, index: int) -> RecordMetadata | BaseException | None: ...

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None: ...

    def error_seen(self) -> None: ...


#: What ``Future.__init__`` sets: asking for one of these is what makes a record's future a full one.
_FULL = frozenset({"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"})


class RecordFuture(Future[RecordMetadata]):
    """The future of one record; see the module. It cannot be cancelled: the record is on its way."""

    def __init__(self, chunk: RecordOutcomes, index: int) -> None:
        # Future.__init__ is left for __getattr__: it costs ten times as much as these two lines.
        self._chunk = chunk
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name not in _FULL:
            raise AttributeError(name)
        self._become_full()
        return self.__dict__[name]

    def done(self) -> bool:
        return self._chunk.outcome(self._index) is not None

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> RecordMetadata:
        if timeout is None and "_condition" not in self.__dict__:
            outcome = self._chunk.attend(self._index) or self._wait()
        else:
            outcome = self._chunk.outcome(self._index)
        if isinstance(outcome, RecordMetadata):
            return outcome
        if outcome is not None:
            resolve(self, outcome)  # in a forked child no thread does it
        try:
            return super().result(timeout)
        finally:
            self._saw_error()

    def _wait(self) -> RecordMetadata | BaseException | None:
        """The outcome: by a bare lock, which takes a third of the time of a full future's condition."""
        told = threading.Lock()
        told.acquire()

        def go_on(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the second time, perhaps of two at once
                told.release()

        self._chunk.listen(self._index, go_on)
        told.acquire()
        return self._chunk.outcome(self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = self._chunk.outcome(self._index)
        if isinstance(outcome, RecordMetadata):
            return None
        if outcome is not None:
            resolve(self, outcome)  # in a forked child no thread does it
        error = super().exception(timeout)
        self._saw_error()
        return error

    def abandon(self, error: BaseException) -> None:
        """End the future in a forked child, if it has become a full one; else it asks its chunk, which knows."""
        if "_condition" in self.__dict__:
            end_in_child(self, error)

    def _saw_error(self) -> None:
        if isinstance(self._chunk.outcome(self._index), BaseException):
            self._chunk.error_seen()

    def _become_full(self) -> None:
        try:
            with self._chunk.lock:
                if "_done_callbacks" in self.__dict__:
                    return  # another thread was faster
                super().__init__()
            self._chunk.hurry()
            self._chunk.listen(self._index, self._resolve)
        except BaseException:
            self._chunk.listen(self._index, self._resolve)  # an interrupt: others wait for this future, too
            raise

    def _resolve(self, outcome: RecordMetadata | BaseException) -> None:
        resolve(self, outcome)


def abandon_listener(listener: Callable[[RecordMetadata | BaseException], None], error: BaseException) -> None:
    """End the record's future that listens for an outcome, in a forked child.

    Other listeners are threads of the parent, which do not run there.
    """
    future = getattr(listener, "__self__", None)
    if isinstance(future, RecordFuture):
        future.abandon(error)


class WriteFuture(Future[WriteResult]):
    """The future of a table; remembers whether its error has been seen. It cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.error_seen = False

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> WriteResult:
        try:
            return super().result(timeout)
        finally:
            self.error_seen = self.error_seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.error_seen = True
        return error


class TableWrite:
    """The completion of one ``write``: batches are added while the table is cut, then it is sealed."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.future = WriteFuture()
        self.finished = CompletionLatch()
        self._lock = threading.Lock()
        self._open = 1  # the writer itself, until sealed
        self._ended = False
        self._outcomes: dict[int, BatchOutcome] = {}
        self._error: BaseException | None = None
        self._count = 0

    def add_batch(self) -> int:
        """The number of the next batch."""
        with self._lock:
            self._open += 1
            self._count += 1
            return self._count - 1

    def seal(self, error: BaseException | None = None) -> None:
        """No more batches; with an error the writer could not go on."""
        self._close_one(error)

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        self._outcomes[index] = outcome
        self._close_one(outcome.error)

    def fail(self, error: BaseException) -> None:
        self._close_one(error, last=True)

    def abandon(self, error: BaseException) -> None:
        self._lock = threading.Lock()
        self._ended = True
        self._error = error
        end_in_child(self.future, error)

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def take_failure(self) -> BaseException | None:
        if self.future.error_seen:
            return None
        self.future.error_seen = True
        return self._error

    def _close_one(self, error: BaseException | None, *, last: bool = False) -> None:
        with self._lock:
            if self._ended:
                if not last:
                    return
            else:
                self._error = self._error or error
                self._open -= 1
                self._ended = last or not self._open
                if not self._ended:
                    return
        self._tell()

    def _tell(self) -> None:
        """Also when the producer ends after this: an interrupt may have come in the middle of it."""
        outcome = self._error if self._error is not None else self._result()
        tell(functools.partial(resolve, self.future), outcome)
        self.finished.end()

    def _result(self) -> WriteResult:
        ranges: list[WrittenRange] = []
        total = 0
        for _, outcome in sorted(self._outcomes.items()):
            total += outcome.record_count
            if outcome.base_offset < 0:
                ranges.append(WrittenRange(outcome.partition, OffsetRange(-1, -1)))
            else:
                end = outcome.base_offset + outcome.record_count
                ranges.append(WrittenRange(outcome.partition, OffsetRange(outcome.base_offset, end)))
        return WriteResult(self.topic, total, tuple(_merged(ranges)))


def _merged(ranges: list[WrittenRange]) -> list[WrittenRange]:
    """Ranges by partition and offset, neighbours joined."""
    joined: list[WrittenRange] = []
    for found in sorted(set(ranges)):
        if joined and joined[-1].partition == found.partition and joined[-1].offsets.end == found.offsets.start >= 0:
            found = WrittenRange(found.partition, OffsetRange(joined.pop().offsets.start, found.offsets.end))
        joined.append(found)
    return joined
