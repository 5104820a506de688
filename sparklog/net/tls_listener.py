"""The listening sockets of a TLS listener. Each connection gets a slot as soon as the server accepts it.

asyncio's own servers report a connection only after the handshake. Connections in a handshake would then have no slot,
and peers could open any number of them. So this module accepts the connections itself. A connection counts as an
unknown connection until its handshake and its login are complete. It uses the TLS context that is current when its
first bytes arrive. A peer that does not use TLS gets an error reply in plain bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

from sparklog.errors import ErrorCode
from sparklog.model import host_and_port
from sparklog.net.connection_slots import ConnectionSlots, ConnectionStanding
from sparklog.net.refusal_log import RefusalLog
from sparklog.net.tls import ServerTls, unsent_alert
from sparklog.net.unix_socket import ip_address
from sparklog.protocol.connection import MAX_HELLO_BYTES, encode_reply
from sparklog.protocol.messages import ErrorReply

_log = logging.getLogger(__name__)

#: The first byte of every TLS connection: a record with a handshake.
_HANDSHAKE = 0x16
#: The delay before the next accept after a failed one, for example without free descriptors.
_ACCEPT_AGAIN_S = 1.0
_AT_ONCE = 64
#: OpenSSL's reason code when the listener requires a certificate and the client has none.
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"
_CLOSE_S = 1.0
_PLAIN_BYTES = "this listener uses TLS, and plain bytes arrived: set security.protocol to SSL or SASL_SSL"


class TlsOptions:
    """The timeouts of TLS connections. ``arguments`` has them as keyword arguments for asyncio."""

    def __init__(self, handshake_s: float) -> None:
        self.arguments: dict[str, Any] = {"ssl_handshake_timeout": handshake_s}
        if sys.version_info >= (3, 11):
            self.arguments["ssl_shutdown_timeout"] = min(handshake_s, 5.0)


class Handshake:
    """An accepted connection whose TLS handshake is not complete. It already has a connection slot."""

    standing = ConnectionStanding.UNKNOWN
    awaits_replies = False

    def __init__(self, accepted: socket.socket, address: tuple[str, int], on_end: Callable[[Handshake], None]) -> None:
        self.accepted = accepted
        self.peer = host_and_port(*address)
        self.peer_host = address[0]
        #: The monotonic time of the accept.
        self.used_s = time.monotonic()
        #: Whether an asyncio transport has the socket.
        self.has_transport = False
        self._on_end = on_end

    def abort(self) -> None:
        self._on_end(self)

    def close(self) -> None:
        self._on_end(self)


class TlsListener:
    """A listener that accepts TLS connections, performs their handshakes, and limits their number.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        tls: ServerTls,
        *,
        make: Callable[[Handshake], asyncio.BaseProtocol],
        places: ConnectionSlots,
        handshake_s: float,
        on_refused: Callable[[Handshake, str], None],
        refuses_aloud: bool = True,
    ) -> None:
        """Start to accept connections. ``make`` returns the protocol of a connection, which gets the handshake's slot.

        With ``refuses_aloud`` a peer that does not use TLS gets an error reply of sparklog's own protocol.
        ``on_refused`` is called with the reason if a client's certificate is missing or not accepted.
        """
        self._on_refused = on_refused
        self.sockets = sockets
        self._tls = tls
        self._make = make
        self._places = places
        self._options = TlsOptions(handshake_s).arguments
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = RefusalLog()
        self._refuses_aloud = refuses_aloud
        for listening in sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        """Close the listening sockets."""
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self.sockets = []

    async def closed(self) -> None:
        """Wait until the tasks of all handshakes have ended, for at most ``_CLOSE_S`` seconds.

        The caller must have closed the connections of these handshakes before.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    # --- the first bytes ---

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again, listening)
                return
            accepted.setblocking(False)
            handshake = Handshake(accepted, ip_address(address), self._end)
            if self._places.accept(handshake):
                self._loop.add_reader(accepted.fileno(), self._first_bytes, handshake)
            else:
                limit = self._places.limit
                self._failed(handshake, f"{limit} connections are open, at most {limit} accepted")
                accepted.close()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _end(self, handshake: Handshake) -> None:
        self._places.leave(handshake)
        if handshake.has_transport:
            # The transport owns the socket. It closes it after it has read the end.
            with contextlib.suppress(OSError):
                handshake.accepted.shutdown(socket.SHUT_RDWR)
        elif handshake.accepted.fileno() >= 0:
            self._loop.remove_reader(handshake.accepted.fileno())
            handshake.accepted.close()

    def _first_bytes(self, handshake: Handshake) -> None:
        accepted = handshake.accepted
        try:
            first = accepted.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._end(handshake)
        elif first[0] != _HANDSHAKE:
            self._refuse_plain(handshake)
        else:
            self._loop.remove_reader(accepted.fileno())
            handshake.has_transport = True
            task = self._loop.create_task(self._shake_hands(handshake))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refuse_plain(self, handshake: Handshake) -> None:
        self._failed(handshake, "plain bytes found")
        with contextlib.suppress(OSError):
            # If bytes were left unread, the close would reset the connection, and the peer might lose the reply.
            handshake.accepted.recv(MAX_HELLO_BYTES)
            if self._refuses_aloud:
                reply = ErrorReply(-1, ErrorCode.INVALID_REQUEST, _PLAIN_BYTES)
                handshake.accepted.send(b"".join(encode_reply(reply)))
        self._end(handshake)

    # --- the handshake ---

    async def _shake_hands(self, handshake: Handshake) -> None:
        # A failed handshake closes the socket before its alert is sent, and a duplicate stays open for the alert.
        with handshake.accepted.dup() as duplicate:
            try:
                await self._loop.connect_accepted_socket(
                    lambda: self._make(handshake), handshake.accepted, ssl=self._tls.context(), **self._options
                )
            except (OSError, asyncio.TimeoutError) as error:
                # The frames of the traceback refer to the error. The collector would free them and the buffers late.
                error.__traceback__ = None
                reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
                self._failed(handshake, reason or type(error).__name__)
                if isinstance(error, ssl.SSLCertVerificationError):
                    self._on_refused(handshake, error.verify_message or reason)
                elif reason == _NO_CERTIFICATE:
                    self._on_refused(handshake, "the client has no certificate")
                await self._send_alert(duplicate, unsent_alert(error))
            finally:
                self._places.leave(handshake)

    async def _send_alert(self, duplicate: socket.socket, alert: bytes) -> None:
        """Send the alert, and then read what the peer still sends.

        If the socket were closed with unread bytes, the system would reset the connection, and the peer might lose the
        alert.
        """
        if not alert:
            return
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            duplicate.setblocking(False)
            duplicate.send(alert)
            duplicate.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(self._drain(duplicate), _CLOSE_S)

    async def _drain(self, duplicate: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not await self._loop.sock_recv(duplicate, MAX_HELLO_BYTES):
                return

    def _failed(self, handshake: Handshake, reason: str) -> None:
        self._refusals.warn(f"the TLS handshake of {handshake.peer} failed: {reason}")


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of ``host``. An empty host means every address. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listening = socket.socket(family, kind, protocol)
            except OSError:  # The system has no sockets of this family.
                continue
            undo.callback(listening.close)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not port and bound:
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            listening.bind(address)
            listening.setblocking(False)
            listening.listen(backlog)
            bound.append(listening)
        if not bound:
            raise OSError(f"{host}: no address to listen on")
        undo.pop_all()
    return bound
