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
    """A latch that opens once. Threads can wait for the latch, and callbacks run when it opens.

    A latch is cheaper than a Future. A latch has no lock, because a forked child could inherit a lock that stays
    locked forever. No lock is necessary, because an append to a list is atomic.
    """

    __slots__ = ("_callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self._callbacks: list[Callable[[], None]] = []

    def then(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at least once: now if the latch is open, or else in the thread that calls ``end``."""
        if not self.done:
            self._callbacks.append(callback)
        if self.done:
            callback()

    def end(self) -> None:
        """Open the latch and run the callbacks.

        The method is idempotent, because the caller repeats the call after an interrupt. The callbacks run in reverse
        order, so that the first callback runs last. That callback removes the write from ``OpenWrites``. Until then,
        ``end`` can be called again after an interrupt.
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
    """The interface of one write: a chunk of records, or a table. A write ends when all its batches have ended."""

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
        """Fail the parts of the write that have no outcome yet. The other parts keep their outcome.

        The producer calls this method if the write cannot be encoded, or if the producer ends.
        """

    def abandon(self, error: BaseException) -> None:
        """End every open wait with ``error``, without calling any callback.

        A forked child calls this method. The parent's threads do not run in the child, and may have held locks at the
        fork.
        """

    def consume_failure(self) -> BaseException | None:
        """Return the first error, unless a future or an earlier call has reported it. Otherwise return None."""


def notify(resolve: Callable[[T], None], outcome: T) -> None:
    """Call ``resolve``, which resolves a future, and suppress the errors of the future's callbacks.

    A future itself suppresses only an ``Exception`` of a callback. Any other error, such as SystemExit, would end the
    whole producer. A KeyboardInterrupt in the main thread is raised again, because it must reach the caller that does
    the I/O in the main thread.
    """
    try:
        resolve(outcome)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a future's callback failed")


def end_in_child(future: Future[Any], error: BaseException) -> None:
    """End a future of the parent process in a forked child, without calling its callbacks.

    A thread of the parent may have held the future's lock at the moment of the fork, so the future gets a new lock.
    """
    future._condition = threading.Condition()
    future._done_callbacks.clear()  # type: ignore[attr-defined]
    resolve(future, error)


def resolve(future: Future[T], outcome: T | BaseException) -> None:
    """Set the result or the exception of a future. Do nothing if the future has one already."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
