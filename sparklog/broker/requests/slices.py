"""Work in slices, for requests that would block the event loop for too long.

The broker has one thread for all clients, and a watchdog ends the process if the event loop hangs. So a function that
visits many entries of a request is a generator: it calls ``over`` between two entries, and yields if ``over`` returns
true. In each iteration of the event loop, all such work of one broker gets ``TURN_S`` seconds together. A lot of such
work at the same time takes longer, but the event loop stays responsive. Until the work on a request is done, the
connection of the request reads no further request, so that no later request overtakes the first one.

A generator may also yield the future of work in a thread. The generator continues when the future is done.

A coroutine calls ``pause`` between two entries. Coroutines and generators share the same time, and wait in the same
queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.net.turn import NOTED_S, TURN_S
from sparklog.protocol.messages import ErrorReply, Reply, Request

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: What a generator yields: the future for which it waits, or None to let other work run.
Waited: TypeAlias = "asyncio.Future[Any] | None"
Steps: TypeAlias = Generator[Waited, None, None]


class Pausable(Protocol):
    """The part of a connection that ``Slices`` uses.

    The connection reads no further request while the work on one of its requests is done in slices.
    """

    def pause_requests(self) -> None: ...

    def resume_requests(self) -> None: ...


class _NothingPaused:
    """The substitute for a connection, for work for which no connection waits."""

    def pause_requests(self) -> None:
        """Do nothing, because there is no connection to pause."""

    def resume_requests(self) -> None:
        """Do nothing, because no connection was paused."""


class _Work(NamedTuple):
    connection: Pausable
    steps: Steps
    failed: Callable[[Exception], None]


class Slices:
    """A scheduler that does one broker's work on large requests in slices.

    Not thread-safe: use it on the broker's event loop, until ``close``.
    """

    def __init__(self) -> None:
        #: Generators, and the futures on which coroutines wait.
        self._waiting: deque[_Work | asyncio.Future[None]] = deque()
        #: The monotonic time at which the slices of the current turn end.
        self._ends_s = 0.0
        self._slicing = False
        #: The connection of the slice in progress, or None, and the monotonic time at which the slice began or
        #: ``take_time`` was last called.
        self.connection: Pausable | None = None
        self._began_s = 0.0
        #: Whether a turn has begun in this iteration of the event loop. ``_turn`` begins the next one.
        self._scheduled = False
        self._closed = False
        #: Called after each slice with its connection and its duration in seconds; None if no quota limits this time.
        self.used: Callable[[Pausable, float], None] | None = None

    def over(self) -> bool:
        """Return whether the time of the current slice is over, so that the current work must yield."""
        return time.monotonic() >= self._ends_s

    async def result(self, work: Generator[Waited, None, _T]) -> _T:
        """Do the work in slices and return its result. If the work raises an error, raise this error."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def steps() -> Steps:
            found = yield from work
            if not done.done():
                done.set_result(found)

        def failed(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        self.start(steps(), failed)
        return await done

    def start(self, steps: Steps, failed: Callable[[Exception], None]) -> None:
        """Do the work in slices, without a connection that waits for the work.

        If the work raises an error, ``failed`` is called with the error.
        """
        self.run(_NothingPaused(), steps, failed)

    def run(self, connection: Pausable, steps: Steps, failed: Callable[[Exception], None]) -> None:
        """Do the work in slices. Until the work is done, ``connection`` reads no further request.

        The first slice is done at once if no other work waits. If the work raises an error, ``failed`` is called with
        the error.
        """
        work = _Work(connection, steps, failed)
        if self._has_time():
            if self._advance(work):
                return
        else:
            self._waiting.append(work)
            self._schedule()
        connection.pause_requests()

    async def pause(self) -> None:
        """Let other work of the event loop run if work on requests has used up its time in this iteration.

        A coroutine calls this between two entries of a request, where a generator would yield.
        """
        if self._has_time():
            self._schedule()
            return
        slice_begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slice_begins)
        self._schedule()
        try:
            await slice_begins
        finally:
            if not slice_begins.cancelled():
                # ``_turn`` has given its time to this coroutine, even if the coroutine was cancelled meanwhile.
                self._ends_s, self._scheduled = time.monotonic() + TURN_S, False
                self._schedule()

    def _has_time(self) -> bool:
        """Return whether work may take time in this iteration of the event loop."""
        if self._slicing or self._waiting:
            return False
        if self._scheduled:
            return not self.over()
        self._ends_s = time.monotonic() + TURN_S
        return True

    def take_time(self) -> float:
        """Return the seconds since the slice in progress began, or since the last call during this slice.

        When the slice sends a reply, the quota manager charges this time to the client, because the reply contains the
        throttle time. At the end of the slice, the callback ``used`` gets only the seconds since the last call.
        """
        began_s, self._began_s = self._began_s, time.monotonic()
        return self._began_s - began_s

    def close(self) -> None:
        """Drop all work that is not done yet."""
        self._closed = True
        self._waiting.clear()

    def _advance(self, work: _Work) -> bool:
        """Do one slice of the work, and return whether the work is done."""
        self._slicing = True
        self.connection = work.connection
        began_s = self._began_s = time.monotonic()
        try:
            waited = next(work.steps)
        except StopIteration:
            return True
        except Exception as error:
            work.failed(error)
            return True
        finally:
            self._slicing = False
            self.connection = None
            ended_s = time.monotonic()
            if ended_s - began_s >= NOTED_S:  # further work of this iteration has only the rest of the time
                self._schedule()
            if self.used is not None:
                self.used(work.connection, ended_s - self._began_s)
        if waited is None:
            self._wait(work)
        else:
            waited.add_done_callback(lambda _: self._wait(work))
        return False

    def _wait(self, work: _Work) -> None:
        if not self._closed:
            self._waiting.append(work)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._ends_s = time.monotonic() + TURN_S
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            work = self._waiting.popleft()
            if isinstance(work, asyncio.Future):
                if work.done():  # the coroutine was cancelled
                    continue
                # The coroutine continues in the next iteration, and begins the turn of that iteration.
                self._scheduled = True
                work.set_result(None)
                return
            if self._advance(work):
                # The connection reads its next request only later, because that request may be as large.
                asyncio.get_running_loop().call_soon(work.connection.resume_requests)
            if self.over():
                break
        if self._waiting:
            self._schedule()


def resumed(waited: Waited, steps: Steps) -> Steps:
    """Return a generator that yields ``waited`` again, and then the remaining items of ``steps``."""
    yield waited
    yield from steps


def answer_in_slices(
    slices: Slices,
    connection: ServerConnection,
    request: Request,
    work: Generator[Waited, None, Reply],
) -> None:
    """Do ``work`` in slices, and respond with its result or its error."""

    def steps() -> Steps:
        connection.reply((yield from work))

    slices.run(connection, steps(), lambda error: answer_failure(connection, request, error))


def answer_failure(connection: ServerConnection, request: Request, error: Exception) -> None:
    """Respond to the whole request with this error."""
    if isinstance(error, BrokerError):
        connection.reply(ErrorReply(request.cid, error.code, error.detail))
        return
    _log.error("%s from %s failed", type(request).__name__, connection.peer, exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
