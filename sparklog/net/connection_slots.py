"""The connection slots of a server: their number by kind of peer, and the time for which a connection may be silent.

A connection is *unknown* until its hello, and until the proof that its hello offers. Then it is a client's or a peer's.
A peer is a broker of the cluster or its controller. Clients leave some slots free for peers. If all are taken, the
unknown connection that has waited longest loses its slot to the next one. Unknown connections are closed after a short
time, and a client's idle connection after a long one, unless it waits for a reply.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

_log = logging.getLogger(__name__)


class ConnectionStanding(Enum):
    """The kind of a connection, as far as is known.

    ``UNKNOWN``: its hello, or the proof that it offers, has not arrived.
    """

    UNKNOWN = "unknown"
    CLIENT = "client"
    PEER = "peer"


class Connected(Protocol):
    """A connection with a slot."""

    #: The time of its acceptance, then of its last request; monotonic time.
    used_s: float

    @property
    def standing(self) -> ConnectionStanding: ...

    @property
    def awaits_replies(self) -> bool: ...

    def abort(self) -> None:
        """Close the connection at once, without an error reply."""

    def close(self) -> None: ...


class ConnectionSlots:
    """The slots of a server, on its event loop."""

    def __init__(self, limit: int, *, kept: int = 0, hello_s: float = 10.0, idle_s: float = 600.0) -> None:
        """Keep the ``limit`` of all connections; ``kept`` of them are for peers."""
        self.limit = limit
        self.client_limit = limit - kept
        self._hello_s = hello_s
        self._idle_s = idle_s
        self.connections: set[Connected] = set()
        #: The unknown connections, the oldest first.
        self._unknown: dict[Connected, None] = {}
        self._clients: set[Connected] = set()
        #: The time between two checks.
        self.interval_s = max(0.05, min(5.0, hello_s / 4, idle_s / 4))

    def __len__(self) -> int:
        return len(self.connections)

    def accept(self, connection: Connected, *, spare: int = 0) -> bool:
        """Give the connection a slot, if necessary that of the unknown one that has been silent for longest.

        ``spare`` slots must stay free.
        """
        while len(self.connections) >= self.limit - spare and self._unknown and not spare:
            oldest = next(iter(self._unknown))
            self.leave(oldest)
            oldest.abort()
        if len(self.connections) >= self.limit - spare:
            return False
        self.connections.add(connection)
        self._unknown[connection] = None
        return True

    def greeted(self, connection: Connected) -> bool:
        """Record the kind of the connection; called after its hello, and again after its proof.

        Return whether there is a slot for this kind.
        """
        match connection.standing:
            case ConnectionStanding.UNKNOWN:
                return True
            case ConnectionStanding.PEER:
                self._unknown.pop(connection, None)
                return True
            case ConnectionStanding.CLIENT:
                self._unknown.pop(connection, None)
                self._clients.add(connection)
                return len(self._clients) <= self.client_limit

    def leave(self, connection: Connected) -> None:
        self.connections.discard(connection)
        self._unknown.pop(connection, None)
        self._clients.discard(connection)

    def close_silent(self, now_s: float) -> None:
        """Close connections that have been silent for too long."""
        silent = [one for one in self._unknown if now_s - one.used_s >= self._hello_s]
        for connection in silent:
            self.leave(connection)
            connection.abort()
        if silent:
            _log.warning("closed %d connections without a hello or proof within %g s", len(silent), self._hello_s)
        idle = list(self._idle(self._clients, now_s))
        for connection in idle:
            connection.close()
        if idle:
            _log.info("closed %d connections that were idle for %g s", len(idle), self._idle_s)

    def _idle(self, connections: Iterable[Connected], now_s: float) -> Iterable[Connected]:
        for connection in connections:
            if connection.awaits_replies:
                connection.used_s = now_s
            elif now_s - connection.used_s >= self._idle_s:
                yield connection
