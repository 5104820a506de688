"""The client side of a session with the simulated ZooKeeper: pings, requests, and the expiry.

It behaves like kazoo. Requests and responses keep their order on one connection. The outcome of a request without a
response is unknown. The server ends a session if no message arrives within the session timeout. The client learns that
when it reconnects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_zk import SESSION_MS, SimZk

#: The interval of pings: kazoo sends a ping when it has sent nothing for a third of the timeout.
PING_MS = SESSION_MS // 3
ANSWER_MS = 120

_T = TypeVar("_T")


class SimSession:
    """A session of a simulated process with the simulated ZooKeeper.

    After the session has expired, the process opens a new session.
    """

    def __init__(
        self,
        owner: SimProcess,
        zk: SimZk,
        *,
        on_over: Callable[[], None],
        on_moved: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """Open the session; ``on_moved`` is called with the new state of the connection."""
        self.session_id = zk.next_session()
        self.connected = True
        self.over = False
        self.owner = owner
        self.zk = zk
        self._on_over = on_over
        self._on_moved = on_moved
        self._heard_ms = owner.now_ms
        self._sent_ms = -PING_MS
        self._ping()

    def ask(
        self,
        execute: Callable[[], _T],
        answered: Callable[[_T], None],
        lost: Callable[[], None],
    ) -> None:
        """Send one request. Then exactly one of ``answered`` and ``lost`` is called, unless the process ends first."""
        owner = self.owner
        self._sent_ms = owner.now_ms
        request = _Request(self, owner.process, execute, answered=answered, lost=lost)
        owner.send(self.zk, request.arrive, ordered=True)
        owner.later(ANSWER_MS, request.give_up)

    def close(self) -> None:
        """Close the session. The server ends the session when it receives this message."""
        self.over = True
        session_id, zk = self.session_id, self.zk
        self.owner.send(zk, lambda: zk.end_session(session_id), ordered=True)

    def _ping(self) -> None:
        if self.over:
            return
        owner, now_ms = self.owner, self.owner.now_ms
        if self.connected and now_ms - self._heard_ms > SESSION_MS // 2:
            self.connected = False
            self._on_moved(False)
        wait_ms = self._sent_ms + PING_MS - now_ms
        if wait_ms <= 0:
            self._sent_ms, wait_ms = now_ms, PING_MS
            owner.send(self.zk, partial(self._pinged, owner.process), ordered=True)
        owner.later(wait_ms, self._ping)

    def _pinged(self, process: int) -> None:
        zk = self.zk
        pong = self.heard if zk.touch(self.session_id) else self.ended
        zk.reply(self.owner, process, pong, ordered=True)

    def heard(self) -> None:
        self._heard_ms = self.owner.now_ms
        if not self.connected and not self.over:
            self.connected = True
            self._on_moved(True)

    def ended(self) -> None:
        if not self.over:
            self.over = True
            self._on_over()


class _Request(Generic[_T]):
    """One request in flight. It counts as lost if no response or error arrives in time."""

    __slots__ = ("_answered", "_execute", "_lost", "_process", "_session", "_waiting")

    def __init__(
        self,
        session: SimSession,
        process: int,
        execute: Callable[[], _T],
        *,
        answered: Callable[[_T], None],
        lost: Callable[[], None],
    ) -> None:
        self._session = session
        self._process = process
        self._execute = execute
        self._answered = answered
        self._lost = lost
        self._waiting = True

    def arrive(self) -> None:
        session = self._session
        zk = session.zk
        came_of_it = partial(self._heard, self._execute()) if zk.touch(session.session_id) else self._refused
        zk.reply(session.owner, self._process, came_of_it, ordered=True)

    def _heard(self, result: _T) -> None:
        self._session.heard()
        if self._waiting:
            self._waiting = False
            self._answered(result)

    def _refused(self) -> None:
        self._session.ended()
        self.give_up()

    def give_up(self) -> None:
        if self._waiting:
            self._waiting = False
            self._lost()
