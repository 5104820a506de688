"""The completion of one ``Producer.write`` of a table, and its future."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future

from sparklog.client.producer.completion import CompletionLatch, end_in_child, notify, resolve
from sparklog.client.producer.results import BatchOutcome, WriteResult, WrittenRange
from sparklog.model import OffsetRange


class WriteFuture(Future[WriteResult]):
    """The future of one ``write`` of a table, which stores whether a caller has seen its error.

    A caller cannot cancel the future.
    """

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
    """One ``write`` of a table: the outcomes of its batches, and its future.

    The writing thread adds batches while it splits the table, and then calls ``seal``.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.future = WriteFuture()
        self.finished = CompletionLatch()
        self._lock = threading.Lock()
        self._open = 1  # the writing thread counts as open until ``seal``
        self._ended = False
        self._outcomes: dict[int, BatchOutcome] = {}
        self._error: BaseException | None = None
        self._count = 0

    def add_batch(self) -> int:
        """Count one more batch of this write, and return its number."""
        with self._lock:
            self._open += 1
            self._count += 1
            return self._count - 1

    def seal(self, error: BaseException | None = None) -> None:
        """Declare that no batch follows. ``error`` is the error that stopped the writing thread, or None."""
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

        This runs again when the producer ends, because an interrupt may have stopped it.
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
