"""The connection slots of a server: limits by the kind of connection, and the closing of silent connections.

A new connection is *unknown*. Its hello shows that it belongs to a client, or offers a proof; after the proof it
belongs to a peer, which is a broker of the cluster or the controller. On a listener that requires a login, a client's
connection is unknown until the login is complete. Some slots are reserved for peers. If all slots are taken, a new
connection gets the slot of an unknown one, which ``unknown_connections`` chooses. Unknown connections are closed after
a short time. Idle connections of clients are closed after a longer time, unless they wait for a reply.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from sparklog.net.unknown_connections import UnknownConnections

_log = logging.getLogger(__name__)


class ConnectionStanding(Enum):
    """The kind of a connection: a client, a peer (a broker or the controller), or unknown.

    A connection is ``UNKNOWN`` until its hello arrives and, if the hello offers a proof, until the proof arrives. On a
    listener that requires a login, it is ``UNKNOWN`` until the login is complete.
    """

    UNKNOWN = "unknown"
    CLIENT = "client"
    PEER = "peer"


class Connected(Protocol):
    """The part of a connection that ``ConnectionSlots`` uses."""

    #: The monotonic time of the last request, or of the accept if there was no request yet.
    used_s: float

    @property
    def peer_host(self) -> str:
        """Return the address of the peer, without the port."""

    @property
    def standing(self) -> ConnectionStanding: ...

    @property
    def awaits_replies(self) -> bool: ...

    def abort(self) -> None:
        """Close the connection at once, without an error reply."""

    def close(self) -> None: ...


class ConnectionSlots:
    """An allocator of the connection slots of a server, which also closes silent connections.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(self, limit: int, *, kept: int = 0, hello_s: float = 10.0, idle_s: float = 600.0) -> None:
        """Create ``limit`` slots, of which ``kept`` are reserved for peers."""
        self.limit = limit
        self.client_limit = limit - kept
        self.hello_s = hello_s
        self._idle_s = idle_s
        self.connections: set[Connected] = set()
        self._unknown = UnknownConnections[Connected]()
        self._clients: set[Connected] = set()
        #: The time in seconds between two checks for silent connections.
        self.interval_s = max(0.05, min(5.0, hello_s / 4, idle_s / 4))

    def __len__(self) -> int:
        return len(self.connections)

    def accept(self, connection: Connected, *, spare: int = 0) -> bool:
        """Give a new connection a slot if possible. Return whether it got one.

        If all slots are taken, close an unknown connection and reuse its slot. With ``spare``, close no connection, and
        keep at least ``spare`` slots free.
        """
        while len(self.connections) >= self.limit - spare and not spare and (loser := self._unknown.loser) is not None:
            self.leave(loser)
            loser.abort()
        if len(self.connections) >= self.limit - spare:
            return False
        self.connections.add(connection)
        self._unknown.add(connection)
        return True

    def greeted(self, connection: Connected) -> bool:
        """Record the kind of the connection, which its hello, its proof or its login has shown.

        Return whether the limit for connections of this kind allows it.
        """
        match connection.standing:
            case ConnectionStanding.UNKNOWN:
                return True
            case ConnectionStanding.PEER:
                self._unknown.discard(connection)
                return True
            case ConnectionStanding.CLIENT:
                if connection in self._clients:
                    return True
                self._unknown.discard(connection)
                self._clients.add(connection)
                return len(self._clients) <= self.client_limit

    def leave(self, connection: Connected) -> None:
        self.connections.discard(connection)
        self._unknown.discard(connection)
        self._clients.discard(connection)

    def close_silent(self, now_s: float) -> None:
        """Close unknown connections and clients' connections that have been silent for too long.

        A client's connection that waits for a reply is not closed.
        """
        silent = [one for one in self._unknown if now_s - one.used_s >= self.hello_s]
        for connection in silent:
            self.leave(connection)
            connection.abort()
        if silent:
            _log.warning("closed %d connections without a hello, proof or login within %g s", len(silent), self.hello_s)
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
