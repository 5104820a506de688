"""A producer's writes without an outcome, and the failures that no future has reported.

These objects do not refer to the producer, so that Python can garbage-collect an unused producer.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from sparklog.client.errors import ClientForked, ClientTimeout
from sparklog.client.producer.completion import Completion
from sparklog.client.producer.record_buffer import RecordBuffer
from sparklog.client.producer.record_chunk import RecordChunk

#: The maximum number of failures that are kept until ``flush``, which raises the first failure.
_MAX_FAILURES_KEPT = 100


class OpenWrites:
    """A registry of one producer's writes without an outcome, and of unreported failures. Thread-safe."""

    def __init__(self) -> None:
        #: The open writes. ``DirectSender`` adds its records here without the lock, and calls ``ended``.
        self.open: set[Completion] = set()
        #: A callback that gets the error of every failed write, because its transaction can then only be aborted.
        self.on_error: Callable[[BaseException], None] | None = None
        self._lock = threading.Lock()
        self._failed: list[Completion] = []

    def opened(self, completion: Completion | RecordChunk) -> None:
        """Add a write. The write is removed when it ends."""
        with self._lock:
            self.open.add(completion)
        completion.finished.then(functools.partial(self.ended, completion))

    def ended(self, completion: Completion) -> None:
        """Remove a write that has ended. Keep it for ``flush`` if it has failed. A second call does no harm."""
        with self._lock:
            self.open.discard(completion)
            if completion.failed and len(self._failed) < _MAX_FAILURES_KEPT:
                self._failed.append(completion)
            if self.on_error is not None and completion.error is not None:
                self.on_error(completion.error)

    def fail_all(self, error: BaseException) -> None:
        """Fail every open write when the I/O thread ends, so that no caller waits forever."""
        with self._lock:
            left = list(self.open)
        for completion in left:
            completion.fail(error)

    def flush(self, buffer: RecordBuffer, timeout_s: float | None) -> None:
        """Wait until all writes accepted so far have ended. Then raise the first failure that no future has reported.

        Raises:
            SparklogError: the first failure since the last flush that no future has reported.
            ClientTimeout: a write did not end within ``timeout_s``.
        """
        buffer.seal()
        with self._lock:
            waiting = list(self.open)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for completion in waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not completion.finished.wait(left):
                raise ClientTimeout(f"flush: some records were not acknowledged within {timeout_s:g} s")
        with self._lock:
            failed, self._failed = self._failed, []
        # A write that has ended just now may not be in ``failed`` yet.
        for completion in (*failed, *(completion for completion in waiting if completion.failed)):
            error = completion.consume_failure()
            if error is not None:
                raise error

    def settle(self, buffer: RecordBuffer) -> BaseException | None:
        """Wait until all writes accepted so far have ended. Return the first error among them, or None."""
        buffer.seal()
        with self._lock:
            waiting = list(self.open)
        for completion in waiting:
            completion.finished.wait()
        return next((completion.error for completion in waiting if completion.failed), None)

    def drop_failures(self) -> None:
        """Forget the failures, because their transaction was aborted. ``flush`` will not raise them."""
        with self._lock:
            self._failed.clear()

    def after_fork(self) -> None:
        """End every open write of the parent with ClientForked. A forked child calls this method."""
        self._lock = threading.Lock()
        for completion in list(self.open):
            completion.abandon(ClientForked("producer"))
        self.open.clear()
