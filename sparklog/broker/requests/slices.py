"""Work in slices, for requests that would block the event loop for too long.

The broker has one thread for all clients, and a watchdog ends the process if the event loop hangs. So a function that
visits many entries of a request is a generator: it calls ``over`` between two entries, and yields if ``over`` returns
true. All such work of one broker shares ``_TURN_S`` in each iteration of the event loop. If there is a lot of such work
at the same time, it only takes longer, and the event loop stays responsive. Until the work is done, its connection
reads no further request, so that no later request overtakes it.

A generator may also yield the future of work in a thread. The generator continues when the future is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ErrorReply, Reply, Request

_log = logging.getLogger(__name__)

#: The time for all work on large requests in one iteration of the event loop; one entry may exceed it.
_TURN_S = 0.03

_T = TypeVar("_T")
Steps = Generator["asyncio.Future[Any] | None", None, None]


class Pausable(Protocol):
    """The part of a connection that ``Slices`` uses: it stops reading requests while its work is done in slices."""

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
        self._waiting: deque[_Work] = deque()
        #: The monotonic time at which the current slice ends.
        self._ends_s = 0.0
        self._slicing = False
        self._scheduled = False
        self._closed = False
        #: Called with a connection and the seconds that each slice of its work has taken, or None.
        self.used: Callable[[Pausable, float], None] | None = None

    def over(self) -> bool:
        """Return whether the time of the current slice is over, so that the current work must yield."""
        return time.monotonic() >= self._ends_s

    async def result(self, work: Generator[asyncio.Future[Any] | None, None, _T]) -> _T:
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
        """Do the work in slices, as ``run`` does, but without a connection that waits for it."""
        self.run(_NothingPaused(), steps, failed)

    def run(self, connection: Pausable, steps: Steps, failed: Callable[[Exception], None]) -> None:
        """Do the work in slices. Until it is done, ``connection`` reads no further request.

        The first slice is done at once if no other work waits. If the work raises an error, ``failed`` is called with
        it.
        """
        work = _Work(connection, steps, failed)
        if not (self._slicing or self._waiting):
            self._ends_s = time.monotonic() + _TURN_S
            if self._advance(work):
                return
        else:
            self._waiting.append(work)
            self._schedule()
        connection.pause_requests()

    def close(self) -> None:
        """Drop all work that is not done yet."""
        self._closed = True
        self._waiting.clear()

    def _advance(self, work: _Work) -> bool:
        """Do one slice of the work, and return whether the work is done."""
        self._slicing = True
        began_s = time.monotonic()
        try:
            waited = next(work.steps)
        except StopIteration:
            return True
        except Exception as error:
            work.failed(error)
            return True
        finally:
            self._slicing = False
            if self.used is not None:
                self.used(work.connection, time.monotonic() - began_s)
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
        self._ends_s = time.monotonic() + _TURN_S
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            work = self._waiting.popleft()
            if self._advance(work):
                # The connection reads its next request only later, because that request may be as large.
                asyncio.get_running_loop().call_soon(work.connection.resume_requests)
            if self.over():
                break
        if self._waiting:
            self._schedule()


def answer_in_slices(
    slices: Slices,
    connection: ServerConnection,
    request: Request,
    work: Generator[asyncio.Future[Any] | None, None, Reply],
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
