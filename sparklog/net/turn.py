"""A limit for the time that requests of all connections may use in one iteration of the event loop (a turn).

A client may have many requests in flight, and thousands of clients may each send a request at the same time. Each
request alone is short, but all of them in the same turn would block the event loop. So the times of long requests are
added up. When the limit is reached, every connection waits for the next turn. Requests that take less than ``NOTED_S``
are not counted. Most turns have only such requests, and so need no count.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: The time for requests in one turn. The last request may exceed it. Work on large requests has a
#: separate limit of the same length in each turn (``broker.requests.slices``).
TURN_S = 0.03
#: A request that takes less than this is not counted.
NOTED_S = 0.001


class TurnWaiter(Protocol):
    """A connection whose requests wait for the next iteration of the event loop. ``Turn`` calls ``resume`` then."""

    def resume(self) -> None: ...


class Turn:
    """A limiter of the time that requests use in one turn (iteration) of the server's event loop.

    The limiter keeps the connections that wait for the next turn.
    """

    def __init__(self) -> None:
        #: Whether no further request is handled in this turn.
        self.is_spent = False
        self._spent_s = 0.0
        #: The waiting connections in the order in which they began to wait.
        self._waiting: dict[TurnWaiter, None] = {}

    def use(self, seconds: float) -> None:
        """Count the time of a request in this iteration of the event loop. ``seconds`` must be at least ``NOTED_S``."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
        self._spent_s += seconds
        self.is_spent = self._spent_s >= TURN_S

    def wait(self, connection: TurnWaiter) -> None:
        """Call ``resume`` of the connection in the next iteration of the event loop, or later.

        It is called later if requests of other connections use up the time of that iteration.
        """
        self._waiting[connection] = None

    def leave(self, connection: TurnWaiter) -> None:
        self._waiting.pop(connection, None)

    def _next(self) -> None:
        self._spent_s, self.is_spent = 0.0, False
        for connection in list(self._waiting):
            if self.is_spent:
                break
            if connection in self._waiting:  # The connection may have left meanwhile.
                del self._waiting[connection]
                connection.resume()
        if self._waiting and not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next)
