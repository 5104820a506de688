"""The future of one record.

There is one future per record, and most are never read, so a future must be very cheap. A future holds only its chunk
and the record's index in the chunk. A future becomes a full ``concurrent.futures.Future`` when a caller first waits
with a timeout, adds a callback, or passes the future to ``wait``, ``as_completed`` or ``asyncio.wrap_future``.
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
    """The methods of a chunk that the futures of its records use."""

    lock: threading.Lock

    def wait_helping(self, index: int) -> RecordMetadata | BaseException | None:
        """Do the producer's I/O in the calling thread, which waits for the record.

        Return the record's outcome, or None if it has none yet and the thread must wait in another way.
        """

    def recall_loop(self) -> None:
        """Give the event loop back to the I/O thread, before the caller waits without running the loop."""

    def outcome(self, index: int) -> RecordMetadata | BaseException | None: ...

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None: ...

    def error_seen(self) -> None: ...


#: The attributes that ``Future.__init__`` sets. The first access to one of them makes a record's future a full future.
_FULL = frozenset({"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"})


class RecordFuture(Future[RecordMetadata]):
    """The future of one record, cheap to create. It cannot be cancelled, because its record may already be sent."""

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
            resolve(self, outcome)  # in a forked child no other thread resolves it
        try:
            return super().result(timeout)
        finally:
            self._saw_error()

    def _wait(self) -> RecordMetadata | BaseException | None:
        """Wait for the outcome with a bare lock, which takes a third of the time of a full future."""
        has_outcome = threading.Lock()
        has_outcome.acquire()

        def on_outcome(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # ``release`` was called twice, perhaps in parallel
                has_outcome.release()

        self._chunk.listen(self._index, on_outcome)
        has_outcome.acquire()
        return self._chunk.outcome(self._index)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = self._chunk.outcome(self._index)
        if isinstance(outcome, RecordMetadata):
            return None
        if outcome is not None:
            resolve(self, outcome)  # in a forked child no other thread resolves it
        error = super().exception(timeout)
        self._saw_error()
        return error

    def abandon(self, error: BaseException) -> None:
        """End this future in a forked child, if it has become a ``concurrent.futures.Future``.

        Otherwise the future reads the error from its chunk.
        """
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
            self._chunk.listen(self._index, self._resolve)  # interrupted; other threads may wait for this future
            raise

    def _resolve(self, outcome: RecordMetadata | BaseException) -> None:
        resolve(self, outcome)


def abandon_listener(listener: Callable[[RecordMetadata | BaseException], None], error: BaseException) -> None:
    """End the future to which ``listener`` belongs. A forked child calls this function.

    Any other listener belongs to a waiting thread of the parent, which does not run in the child.
    """
    future = getattr(listener, "__self__", None)
    if isinstance(future, RecordFuture):
        future.abandon(error)
