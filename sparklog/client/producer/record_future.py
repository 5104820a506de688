"""The future of one record.

There is one future per record, and most are never read, so a record's future must cost next to nothing. It holds only
its chunk and its index there. It becomes a full ``concurrent.futures.Future`` when a caller first waits for it, adds a
callback, or passes it to ``wait``, ``as_completed`` or ``asyncio.wrap_future``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from sparklog.client.producer.completion import end_in_child, resolve
from sparklog.client.producer.results import RecordMetadata


class RecordOutcomes(Protocol):
    """The interface of a chunk to the futures of its records."""

    lock: threading.Lock

    def wait_helping(self, index: int) -> RecordMetadata | BaseException | None:
        """Help to complete the record while the calling thread waits for it; return the outcome, or None so far."""

    def recall_loop(self) -> None:
        """Make the I/O thread run a lent loop again, because the calling thread will wait without driving it."""

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
