"""A session with the simulated ZooKeeper, from its client's side: pings, requests, and the news that it is over.

As kazoo's: requests and answers keep their order on one connection; a request whose answer does not come has an
unknown fate; a session that was not heard of for its time-out is ended by the server, and the client hears of it when
it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_zk import SESSION_MS, SimZk

#: kazoo pings after a third of the time-out
PING_MS = SESSION_MS // 3
ANSWER_MS = 120

_T = TypeVar("_T")


class SimSession:
    """Owner: one process of a broker or controller; replaced by a new one when it is over."""

    def __init__(
        self,
        owner: SimProcess,
        zk: SimZk,
        *,
        on_over: Callable[[], None],
        on_moved: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """``on_moved`` hears whether the server can be reached."""
        self.session_id = zk.next_session()
        self.connected = True
        self.over = False
        self._owner = owner
        self._zk = zk
        self._on_over = on_over
        self._on_moved = on_moved
        self._heard_ms = owner.now_ms
        self._ping()

    def ask(
        self,
        execute: Callable[[], _T],
        answered: Callable[[_T], None],
        lost: Callable[[], None],
    ) -> None:
        """One request: exactly one of ``answered`` and ``lost`` follows while the process lives."""
        owner, zk = self._owner, self._zk
        process = owner.process
        waiting = [True]

        def settle(action: Callable[[], None]) -> None:
            if waiting:
                waiting.clear()
                action()

        def heard(result: _T) -> None:
            self._heard()
            settle(lambda: answered(result))

        def refused() -> None:
            self._end()
            settle(lost)

        def arrive() -> None:
            if not zk.touch(self.session_id):
                zk.world.send(zk.name, owner.name, lambda: owner.run(process, refused), ordered=True)
                return
            result = execute()
            zk.world.send(zk.name, owner.name, lambda: owner.run(process, lambda: heard(result)), ordered=True)

        owner.send(zk, arrive, ordered=True)
        owner.later(ANSWER_MS, lambda: settle(lost))

    def close(self) -> None:
        """In an orderly way: the server ends it when it hears of it."""
        self.over = True
        session_id, zk = self.session_id, self._zk
        self._owner.send(zk, lambda: zk.end_session(session_id), ordered=True)

    def _ping(self) -> None:
        if self.over:
            return
        owner, zk = self._owner, self._zk
        if self.connected and owner.now_ms - self._heard_ms > SESSION_MS // 2:
            self.connected = False
            self._on_moved(False)
        process = owner.process

        def arrive() -> None:
            pong = self._heard if zk.touch(self.session_id) else self._end
            zk.world.send(zk.name, owner.name, partial(owner.run, process, pong), ordered=True)

        owner.send(zk, arrive, ordered=True)
        owner.later(PING_MS, self._ping)

    def _heard(self) -> None:
        self._heard_ms = self._owner.now_ms
        if not self.connected and not self.over:
            self.connected = True
            self._on_moved(True)

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._on_over()
