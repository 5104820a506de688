"""How much of one turn of the event loop requests may use, all connections of a server together.

A client may have many requests on their way, and thousands of clients may send one at the same time. Each request alone
is short; handled one after the other, within one turn of the loop, they would keep it from turning. So requests that
take long are added up, and beyond the bound every connection waits for the next turn. Requests that take less than
``_NOTED_S`` are not counted: most turns have no other.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: Of requests in one turn, to within one request.
_TURN_S = 0.03
#: A request that takes less than this is not counted.
NOTED_S = 0.001


class Waiting(Protocol):
    """A connection with requests that wait for the next turn."""

    def go_on(self) -> None: ...


class Turn:
    """Owner: the server, on its event loop."""

    def __init__(self) -> None:
        #: No further request is handled in this turn.
        self.is_spent = False
        self._spent_s = 0.0
        #: In the order in which they began to wait.
        self._waiting: dict[Waiting, None] = {}

    def use(self, seconds: float) -> None:
        """A request has taken so long, ``NOTED_S`` or more."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
        self._spent_s += seconds
        self.is_spent = self._spent_s >= _TURN_S

    def wait(self, connection: Waiting) -> None:
        """Have the connection go on in the next turn, or in a later one."""
        self._waiting[connection] = None

    def leave(self, connection: Waiting) -> None:
        self._waiting.pop(connection, None)

    def _next(self) -> None:
        self._spent_s, self.is_spent = 0.0, False
        for connection in list(self._waiting):
            if self.is_spent:
                break
            if connection in self._waiting:  # it has not left meanwhile
                del self._waiting[connection]
                connection.go_on()
        if self._waiting and not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
