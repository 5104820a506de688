"""The futures of a producer and their results.

There is one future per record, and most are never read, so a record's future must cost next to nothing. It holds only
its chunk and its index there. It becomes a full ``concurrent.futures.Future`` when a caller first waits for it, adds a
callback, or passes it to ``wait``, ``as_completed`` or ``asyncio.wrap_future``.
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
    """The position of a record.

    ``offset`` is -1 if the broker does not return it (acks=0, or a duplicate found late).
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int


class WrittenRange(NamedTuple):
    """Offsets ``[start, end)`` of one partition. Both are -1 if the broker does not return them."""

    partition: int
    offsets: OffsetRange


class WriteResult(NamedTuple):
    """The positions of a table's rows.

    A partition may have several ranges, with records of other producers between them.
    """

    topic: str
    record_count: int
    ranges: tuple[WrittenRange, ...]


class BatchOutcome(NamedTuple):
    """The outcome of one batch: its offsets or its error."""

    partition: int
    base_offset: int
    record_count: int
    error: BaseException | None = None


class CompletionLatch:
    """A latch that completes once, with waits and callbacks. It costs less than a Future.

    It has no lock, which a forked child might inherit locked forever: appending to a list is atomic.
    """

    __slots__ = ("_callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self._callbacks: list[Callable[[], None]] = []

    def then(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at least once: now, or in the thread that calls ``end``."""
        if not self.done:
            self._callbacks.append(callback)
        if self.done:
            callback()

    def end(self) -> None:
        """Complete the latch. Idempotent: after an interrupt inside it, ``end`` is called again.

        The callbacks run in reverse order: waiting threads come before the first callback, which drops this object from
        the open writes, so that an interrupted ``end`` can be repeated.
        """
        self.done = True
        if self._callbacks:  # callers that come from now on see ``done``
            for callback in reversed(tuple(self._callbacks)):
                callback()
            self._callbacks.clear()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the completion. Return False if it does not come within ``timeout_s``."""
        ended = threading.Event()
        self.then(ended.set)
        try:
            return ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):  # the latch completed in the meantime
                self._callbacks.remove(ended.set)


class Completion(Protocol):
    """A unit of work that a caller passed to a producer and that ends as one: a chunk of records, or a table."""

    #: The latch that completes when no batch of it is in flight.
    finished: CompletionLatch

    @property
    def failed(self) -> bool:
        """Return whether a part of it failed."""

    @property
    def error(self) -> BaseException | None:
        """Return the error of the first part that failed."""

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        """Handle the end of batch number ``index``. The I/O thread calls it once per batch."""

    def fail(self, error: BaseException) -> None:
        """Fail all open parts: the work could not be encoded, or the producer ends.

        Completed parts keep their outcome.
        """

    def abandon(self, error: BaseException) -> None:
        """End every open wait with ``error``, without calling any callback.

        Used in a forked child, where the parent's threads do not run, and may have held locks at the fork.
        """

    def consume_failure(self) -> BaseException | None:
        """Return the first error, unless a future has reported it already. Later calls return None."""


def notify(resolve: Callable[[T], None], outcome: T) -> None:
    """Resolve a future in the I/O thread, and contain the errors of its callbacks.

    A callback that raises more than an ``Exception``, which futures do not contain, would end the whole producer. But a
    KeyboardInterrupt in a caller's thread that acts for the I/O thread belongs to that caller, and is raised.
    """
    try:
        resolve(outcome)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a future's callback")


def end_in_child(future: Future[Any], error: BaseException) -> None:
    """End a future of the parent process in a forked child, without its callbacks.

    A thread of the parent may have held the future's lock at the moment of the fork, so the future gets a new lock.
    """
    future._condition = threading.Condition()
    future._done_callbacks.clear()  # type: ignore[attr-defined]
    resolve(future, error)


def resolve(future: Future[T], outcome: T | BaseException) -> None:
    """Set the outcome of a future. Idempotent."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class RecordOutcomes(Protocol):
    """The interface of a chunk to the futures of its records."""

    lock: threading.Lock

    def wait_helping(self, index: int) -> RecordMetadata | BaseException | None:
        """Help to complete the record while the calling thread waits for it; return the outcome, or None so far."""

    def recall_loop(self) -> None:
        """Return a lent loop to the I/O thread, because a caller waits in a way that does not drive it."""

    def outcome(self, index: int) -> RecordMetadata | BaseException | None: ...

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None: ...

    def error_seen(self) -> None: ...


#: The attributes that ``Future.__init__`` sets. The first access to one of them makes a record's future a full one.
_FULL = frozenset({"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"})


class RecordFuture(Future[RecordMetadata]):
    """The future of one record; see the module. It cannot be cancelled, because the record is in flight."""

    def __init__(self, chunk: RecordOutcomes, index: int) -> None:
        # Future.__init__ costs ten times as much as these two lines, so __getattr__ calls it when it is needed.
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
            outcome = self._chunk.wait_helping(self._index) or self._wait()
        else:
            outcome = self._chunk.outcome(self._index)
        if isinstance(outcome, RecordMetadata):
            return outcome
        if outcome is not None:
            resolve(self, outcome)  # no thread resolves it in a forked child
        try:
            return super().result(timeout)
        finally:
            self._saw_error()

    def _wait(self) -> RecordMetadata | BaseException | None:
        """Wait for the outcome with a bare lock, which takes a third of the time of a full future's condition."""
        has_outcome = threading.Lock()
        has_outcome.acquire()

        def on_outcome(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # a second call, perhaps in parallel
                has_outcome.release()

        self._chunk.listen(self._index, on_outcome)
        has_outcome.acquire()
        return self._chunk.outcome(self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = self._chunk.outcome(self._index)
        if isinstance(outcome, RecordMetadata):
            return None
        if outcome is not None:
            resolve(self, outcome)  # no thread resolves it in a forked child
        error = super().exception(timeout)
        self._saw_error()
        return error

    def abandon(self, error: BaseException) -> None:
        """End the future in a forked child if it is a full one. Otherwise its chunk has the outcome."""
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
            self._chunk.recall_loop()
            self._chunk.listen(self._index, self._resolve)
        except BaseException:
            self._chunk.listen(self._index, self._resolve)  # an interrupt: other threads wait for this future too
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
    """The future of a table. It records whether a caller has seen its error. It cannot be cancelled."""

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
    """The completion of one ``write``. The writer adds batches while it splits the table, and then seals it."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.future = WriteFuture()
        self.finished = CompletionLatch()
        self._lock = threading.Lock()
        self._open = 1  # the writer itself, until it seals the table
        self._ended = False
        self._outcomes: dict[int, BatchOutcome] = {}
        self._error: BaseException | None = None
        self._count = 0

    def add_batch(self) -> int:
        """Return the number of the next batch."""
        with self._lock:
            self._open += 1
            self._count += 1
            return self._count - 1

    def seal(self, error: BaseException | None = None) -> None:
        """End the list of batches. ``error`` means that the writer could not continue."""
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

    def consume_failure(self) -> BaseException | None:
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
        self._notify()

    def _notify(self) -> None:
        """Notify the future and the latch.

        Runs again at the producer's end, because an interrupt may have stopped it.
        """
        outcome = self._error if self._error is not None else self._result()
        notify(functools.partial(resolve, self.future), outcome)
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
    """Return the ranges by partition and offset, with adjacent ones joined."""
    joined: list[WrittenRange] = []
    for found in sorted(set(ranges)):
        if joined and joined[-1].partition == found.partition and joined[-1].offsets.end == found.offsets.start >= 0:
            found = WrittenRange(found.partition, OffsetRange(joined.pop().offsets.start, found.offsets.end))
        joined.append(found)
    return joined
