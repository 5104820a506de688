"""The completion of a producer's writes: a latch that waiting threads use, and functions that resolve futures.

An interrupt (KeyboardInterrupt) may stop any of these functions, so each of them can be called again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

from sparklog.client.producer.results import BatchOutcome

T = TypeVar("T")

_log = logging.getLogger(__name__)


class CompletionLatch:
    """A latch that opens once. Threads can wait for it, and callbacks run when it opens. It is cheaper than a Future.

    It needs no lock, because an append to a list is atomic. A forked child could inherit a lock that is locked forever.
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
        """Open the latch. Idempotent, because after an interrupt it is called again.

        The callbacks run in reverse order. The first callback that was added removes this object from the open writes,
        so it must run last: until then, ``end`` can be repeated after an interrupt.
        """
        self.done = True
        if self._callbacks:  # later callers of ``then`` see ``done``
            for callback in reversed(tuple(self._callbacks)):
                callback()
            self._callbacks.clear()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch opens. Return False if it does not open within ``timeout_s``."""
        ended = threading.Event()
        self.then(ended.set)
        try:
            return ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):  # the latch has opened in the meantime
                self._callbacks.remove(ended.set)


class Completion(Protocol):
    """One write of a caller, which ends when all its batches have ended: a chunk of records, or a table."""

    #: The latch that opens when all batches of this write have ended.
    finished: CompletionLatch

    @property
    def failed(self) -> bool:
        """Return whether a part of this write has failed."""

    @property
    def error(self) -> BaseException | None:
        """Return the error of the first part that failed."""

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        """Store the outcome of batch number ``index``. The I/O thread calls this once per batch."""

    def fail(self, error: BaseException) -> None:
        """Fail all parts without an outcome, because the write could not be encoded or the producer ends.

        The other parts keep their outcome.
        """

    def abandon(self, error: BaseException) -> None:
        """End every open wait with ``error``, without calling any callback.

        Used in a forked child, where the parent's threads do not run, and may have held locks at the fork.
        """

    def consume_failure(self) -> BaseException | None:
        """Return the first error, unless a future has reported it already. Later calls return None."""


def notify(resolve: Callable[[T], None], outcome: T) -> None:
    """Resolve a future in the I/O thread, and suppress the errors of its callbacks.

    Futures suppress an ``Exception`` of a callback, but not for example SystemExit, which would end the whole producer.
    A KeyboardInterrupt is raised if a caller's thread runs the loop, because it is meant for that caller.
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
