"""sparklog's own wire protocol on a listener.

This module adds the names of the Unix sockets to the reply to a hello. It also creates the ``ServerEnd`` of each
connection, which checks the proof of the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from sparklog.net.connection_end import Handler
from sparklog.net.server_connection import ServerConnection
from sparklog.net.server_limits import Limits
from sparklog.net.unix_socket import ip_address
from sparklog.net.unix_tokens import TokenAuthenticator, TokenIssuer
from sparklog.protocol.connection import ServerEnd
from sparklog.protocol.messages import HelloReply

HandlerFactory = Callable[[ServerConnection], Handler]
Describe = Callable[[int, int], HelloReply]


class NativeProtocol:
    """sparklog's own protocol, with the requests of clients, brokers and the controller.

    ``describe`` returns the reply to a hello for a correlation id and an agreed version.
    """

    has_peers = True
    answers_in_order = False

    def __init__(
        self, factory: HandlerFactory, describe: Describe, limits: Limits, *, of_unix_socket: bool = False
    ) -> None:
        """Create the protocol of the TCP listeners or, with ``of_unix_socket``, of the Unix socket."""
        self.new_handler = factory
        self._describe = describe
        self._limits = limits
        self._of_unix_socket = of_unix_socket

    def new_end(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> ServerEnd:
        limits, is_plain = self._limits, connection.security.is_plain
        describe = self._described(connection, transport)
        if self._of_unix_socket:
            authenticator = TokenAuthenticator(limits.unix_tokens, limits.authenticator if is_plain else None)
            end = ServerEnd(describe, limits.max_frame_bytes, authenticator, only_proved=not is_plain)
        else:
            end = ServerEnd(describe, limits.max_frame_bytes, limits.authenticator, connection.session.login)
        end.kafka_addresses = limits.kafka_addresses
        if limits.authenticator is not None:
            end.roles = limits.authenticator.roles(transport.get_extra_info("peercert"))
        return end

    def token_issuer(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> TokenIssuer | None:
        limits = self._limits
        if connection.security.is_plain or connection.within_host or not limits.unix_socket:
            return None
        return TokenIssuer(limits.unix_tokens, limits.unix_socket, _reached_at(transport))

    def _described(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> Describe:
        """Return the function that makes the reply to a hello, with the Unix sockets that this connection may use."""
        if not connection.security.is_plain:
            # ``ServerEnd`` itself removes the names of the sockets for a peer that must log in.
            shows = not connection.within_host and connection.session.login is not None
            return self._describe if shows else partial(_without_sockets, self._describe)
        limits, reached_at = self._limits, _reached_at(transport)
        if limits.unix_listener == connection.listener and (connection.within_host or reached_at[0]):
            return partial(_with_socket, self._describe, limits.unix_socket, reached_at)
        return self._describe


def _reached_at(transport: asyncio.BaseTransport) -> tuple[str, int]:
    """Return the broker's address to which the client has connected; ("", 0) if the system does not report it."""
    return ip_address(transport.get_extra_info("sockname"))


def _with_socket(describe: Describe, name: str, reached_at: tuple[str, int], cid: int, version: int) -> HelloReply:
    return replace(describe(cid, version), unix_socket=name, reached_at=reached_at)


def _without_sockets(describe: Describe, cid: int, version: int) -> HelloReply:
    return replace(describe(cid, version), boot_id="", local_socket="")
