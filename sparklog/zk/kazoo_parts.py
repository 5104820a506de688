"""Two parts of kazoo that are replaced: how it waits for sockets, and how long for a server's greeting."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler

#: How many silent connections in a row a session lives through: each attempt gets this share of its time.
_GREETINGS_IN_A_SESSION = 4


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads with a cheaper ``select``: kazoo asks before each read and each write, four times a request, and
    its own makes and closes an epoll descriptor every time, which was most of what a request cost."""

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As ``select.select``, for any descriptor number. No socket is asked for both, and trouble with one counts as
        readiness: the read or write that follows says what it is."""
        poll = select.poll()
        for waiting in readers:
            poll.register(waiting, select.POLLIN)
        for waiting in writers:
            poll.register(waiting, select.POLLOUT)
        ready = {number for number, _events in poll.poll(None if timeout is None else timeout * 1000)}
        return (
            [waiting for waiting in readers if waiting.fileno() in ready],
            [waiting for waiting in writers if waiting.fileno() in ready],
            [],
        )


class Connections(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connections, but one that does not answer a known session's greeting is given up while the session still
    has time for another. kazoo waits for as long as the session lasts: a server that had just started and had taken the
    connection before it could serve it cost the session."""

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        if self.client._session_id:
            timeout = min(timeout, self.client._session_timeout / 1000 / _GREETINGS_IN_A_SESSION)
        return super()._invoke(timeout, request, xid)
