"""The server: it accepts connections on one or more listeners, which share its limits.

Connections beyond ``max_connections`` get an error reply and are closed. Each connection needs a file descriptor, and a
broker without free descriptors would lose its log directory. ``connection_slots`` assigns the slots and closes silent
connections. ``server_connection`` has the server's side of each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import Any, cast

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net import unix_socket
from sparklog.net.authentication import CERTIFICATE, CertificatePeer, ListenerSecurity
from sparklog.net.connection_slots import ConnectionSlots
from sparklog.net.greeting import Credentials
from sparklog.net.native_protocol import Describe, HandlerFactory, NativeProtocol
from sparklog.net.server_connection import ListenerProtocol, ServerConnection
from sparklog.net.server_limits import Limits
from sparklog.net.tls_listener import Handshake, TlsListener
from sparklog.net.tls_listener import bind as bind_tls
from sparklog.security.connection_limits import ConnectionLimits

_log = logging.getLogger(__name__)

#: The number of iterations of the event loop that a closing server waits. In these iterations, asyncio calls
#: ``connection_made`` for a socket that was just accepted, and the connection is closed.
_TURNS_TO_CLOSE = 2
_BACKLOG = 1024

_PLAIN = ListenerSecurity()


class Server:
    """A server that accepts connections on one or more listeners. Create it with ``serve``."""

    def __init__(self, factory: HandlerFactory, describe: Describe, limits: Limits) -> None:
        """Create a server without listeners. ``factory`` and ``describe`` are for sparklog's own protocol."""
        self._native = NativeProtocol(factory, describe, limits)
        self._of_unix_socket = NativeProtocol(factory, describe, limits, of_unix_socket=True)
        self._servers: list[asyncio.Server | TlsListener] = []
        self._limits = limits
        self._checked_s = time.monotonic()
        self._check_timer = asyncio.get_running_loop().call_later(limits.places.interval_s, self._check)
        #: The port of the first listener.
        self.port = -1

    @property
    def connections(self) -> int:
        return len(self._limits.places)

    @property
    def receiving_bytes(self) -> int:
        """Return the total size in bytes of the large frames that are being received."""
        return self._limits.receiving.used

    def offer_to_kafka_clients(self, addresses: str) -> None:
        """Name these addresses in the log when a Kafka client connects to a listener of sparklog's own protocol."""
        self._limits.kafka_addresses = addresses

    @property
    def unix_socket(self) -> str:
        """Return the name of the Unix socket that clients get, or an empty string if there is no Unix socket."""
        return self._limits.unix_socket

    @property
    def queued_bytes(self) -> int:
        return self._limits.budget.used

    async def listen(
        self, host: str, port: int, security: ListenerSecurity, protocol: ListenerProtocol | None = None
    ) -> int:
        """Add a listener on ``host:port``, and return its port. All listeners share the limits of the server.

        Port 0 means any free port. If ``protocol`` is None, the listener uses sparklog's own protocol. Raises OSError
        if the address is in use.
        """
        protocol = self._native if protocol is None else protocol
        server: asyncio.Server | TlsListener
        if security.tls is None:
            server = await asyncio.get_running_loop().create_server(
                lambda: self._make(protocol, security), host, port, backlog=_BACKLOG, reuse_address=True
            )
        else:
            server = TlsListener(
                await bind_tls(host, port, _BACKLOG),
                security.tls,
                make=partial(self._make, protocol, security),
                places=self._limits.places,
                handshake_s=self._limits.places.hello_s,
                on_refused=partial(_certificate_refused, security),
                refuses_aloud=protocol is self._native,
            )
            self._limits.tls.append(security.tls)
        self._servers.append(server)
        # asyncio's servers have a tuple of sockets, uvloop's a list.
        bound: int = cast(Any, server).sockets[0].getsockname()[1]
        if self.port < 0:
            self.port = bound
        return bound

    async def listen_within_host(self, security: ListenerSecurity) -> None:
        """Listen on a Unix socket for clients on the same host, if the system supports that.

        ``security`` has the rules of one TCP listener. If it requires neither TLS nor a login, the clients of this
        listener need no token for the Unix socket. Clients of listeners with TLS or logins need one.
        """
        try:
            name, listening = unix_socket.bind()
            if listening is not None:
                with contextlib.ExitStack() as undo:
                    undo.callback(listening.close)
                    server = await asyncio.get_running_loop().create_unix_server(
                        lambda: self._make(self._of_unix_socket, security), sock=listening, backlog=_BACKLOG
                    )
                    undo.pop_all()
                self._servers.append(server)
                self._limits.unix_socket, self._limits.unix_listener = name, security.name
        except OSError as error:
            _log.warning("Unix sockets are not available: %s", error)

    def close_connections(self, principal: Principal, *, token_id: str | None = None) -> int:
        """Close the connections that have logged in as ``principal``. Return the number of closed connections.

        With ``token_id``, close only connections that have logged in by this delegation token. Also close connections
        whose login is in progress, because they may log in as this principal.
        """
        ended = [
            connection
            for connection in self._limits.places.connections
            if isinstance(connection, ServerConnection) and connection.may_become(principal, token_id)
        ]
        for connection in ended:
            connection.abort()
        self._limits.unix_tokens.end(principal, token_id=token_id)
        return len(ended)

    def _make(
        self, protocol: ListenerProtocol, security: ListenerSecurity, handshake: Handshake | None = None
    ) -> ServerConnection:
        return ServerConnection(protocol, limits=self._limits, security=security, handshake=handshake)

    def _check(self) -> None:
        now_s = time.monotonic()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        self._limits.places.close_silent(now_s)
        self._limits.receiving.close_slow(passed_s)
        self._check_timer = asyncio.get_running_loop().call_later(self._limits.places.interval_s, self._check)

    def stop_accepting(self) -> None:
        """Stop accepting connections. The listening sockets stay open."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            for listening in cast(Any, server).sockets:  # uvloop's servers have a list
                loop.remove_reader(listening.fileno())

    async def close(self) -> None:
        """Stop listening, and close every connection after its written replies are sent."""
        self._limits.closing = True
        self._check_timer.cancel()
        # asyncio accepts a socket in one iteration of the event loop and creates the connection in the next one, which
        # would fail if the server were closed in between.
        self.stop_accepting()
        for connection in list(self._limits.places.connections):
            connection.close()
        await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)
        for server in self._servers:
            if isinstance(server, TlsListener):
                await server.closed()


async def serve(
    factory: HandlerFactory,
    *,
    host: str,
    port: int,
    describe: Describe,
    max_frame_bytes: int,
    max_in_flight: int,
    queued_max_bytes: int,
    max_connections: int = 10_000,
    within_host: bool = False,
    credentials: Credentials | None = None,
    kept_connections: int = 0,
    idle_s: float = 600.0,
    hello_s: float = 10.0,
    security: ListenerSecurity = _PLAIN,
    connection_limits: ConnectionLimits | None = None,
) -> Server:
    """Listen on ``host:port`` and, with ``within_host``, on a Unix socket for clients on the same host.

    Return the server. Port 0 means any free port. With ``credentials`` the broker proves its identity. Of
    ``max_connections``, ``kept_connections`` are reserved for brokers and the controller. The server closes a client's
    connection after ``idle_s`` seconds without requests. It closes a new connection after ``hello_s`` seconds if the
    hello, or the login that the listener requires, is not complete. Raises OSError if the address is in use.
    """
    limits = Limits(
        max_frame_bytes=max_frame_bytes,
        max_in_flight=max_in_flight,
        queued_max_bytes=queued_max_bytes,
        places=ConnectionSlots(max_connections, kept=kept_connections, hello_s=hello_s, idle_s=idle_s),
        connection_limits=connection_limits,
        authenticator=credentials,
    )
    server = Server(factory, describe, limits)
    # The Unix socket is bound first, because its name must be in the reply to the first hello on TCP.
    if within_host:
        await server.listen_within_host(security)
    try:
        await server.listen(host, port, security)
    except BaseException:
        await server.close()
        raise
    return server


def _certificate_refused(security: ListenerSecurity, handshake: Handshake, reason: str) -> None:
    if security.reports is not None:
        error = BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, reason)
        security.reports.failed(CertificatePeer(handshake.peer_host, security.name), CERTIFICATE, error)
