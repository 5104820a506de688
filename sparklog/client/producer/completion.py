"""The completion of a producer's work: the latch that ends waits, and the calls that resolve futures.

An interrupt may stop any of these calls, so each of them may be repeated.
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
