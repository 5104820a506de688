"""The time of one turn of the event loop that the requests of all connections of a server may use.

A client may have many requests in flight, and thousands of clients may send one at the same time. Each request alone is
short. Handled one after the other, within one turn of the loop, they would block the loop. So the times of long
requests are added up, and beyond the bound every connection waits for the next turn. Requests that take less than
``NOTED_S`` are not counted: most turns have no others.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: The time for requests in one turn; the last request may exceed it.
_TURN_S = 0.03
#: A request that takes less than this is not counted.
NOTED_S = 0.001


class TurnWaiter(Protocol):
    """A connection with requests that wait for the next turn."""

    def resume(self) -> None: ...


class Turn:
    """The turn of a server, on its event loop."""

    def __init__(self) -> None:
        #: Whether no further request is handled in this turn.
        self.is_spent = False
        self._spent_s = 0.0
        #: The waiting connections in the order in which they began to wait.
        self._waiting: dict[TurnWaiter, None] = {}

    def use(self, seconds: float) -> None:
        """Add the time of a request, which is at least ``NOTED_S``."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
        self._spent_s += seconds
        self.is_spent = self._spent_s >= _TURN_S

    def wait(self, connection: TurnWaiter) -> None:
        """Let the connection continue in the next turn, or in a later one."""
        self._waiting[connection] = None

    def leave(self, connection: TurnWaiter) -> None:
        self._waiting.pop(connection, None)

    def _next(self) -> None:
        self._spent_s, self.is_spent = 0.0, False
        for connection in list(self._waiting):
            if self.is_spent:
                break
            if connection in self._waiting:  # The connection has not left meanwhile.
                del self._waiting[connection]
                connection.resume()
        if self._waiting and not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
