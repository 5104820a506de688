"""The server side of connections: it accepts connections and decodes requests, within limits.

If a limit is reached, the server stops reading, so that clients have to wait. It stops reading a connection with
``max_in_flight`` requests without a reply, and a connection whose client does not read its replies. While
``queued_max_bytes`` of requests are in progress, it handles no further requests with a body. Requests without a body
continue, because the writes in progress may wait for fetches of followers. ``receiving`` limits frames that have not
arrived completely.

Connections beyond ``max_connections`` get an error reply and are closed. Each connection needs a file descriptor, and a
broker without free descriptors would lose its log directory. ``connection_slots`` assigns the slots and closes silent
connections.

A listener may require a login (``authentication``). It serves a connection only after the login. The reply to a failed
login comes after a delay, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from msgspec.structs import replace

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal, host_and_port
from sparklog.net import unix_socket
from sparklog.net.authentication import CERTIFICATE, CertificatePeer, ListenerSecurity, LoginDelays
from sparklog.net.connection_slots import ConnectionSlots, ConnectionStanding
from sparklog.net.greeting import Credentials
from sparklog.net.loop import tune
from sparklog.net.receiving import Receiving
from sparklog.net.tls import ServerTls
from sparklog.net.tls_listener import Handshake, TlsListener
from sparklog.net.tls_listener import bind as bind_tls
from sparklog.net.turn import NOTED_S, Turn
from sparklog.net.unix_socket import ip_address, peer_process
from sparklog.net.unix_tokens import TokenAuthenticator, UnixSession, UnixTokens
from sparklog.protocol.connection import ImmediateAnswer, ServerEnd, encode_reply
from sparklog.protocol.frames import Buffer
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import (
    ErrorReply,
    HelloReply,
    Reply,
    Request,
    SaslAuthenticateReply,
    UnixSocketReply,
)
from sparklog.protocol.proof import Authenticator, Identity, Secret
from sparklog.protocol.received import ReceivedRequest
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.principals import ANONYMOUS

_log = logging.getLogger(__name__)

#: The iterations of the event loop after which a socket that was just accepted has called ``connection_made`` and was
#: closed.
_TURNS_TO_CLOSE = 2
_BACKLOG = 1024
#: The longest time from a close to the end of a TLS connection.
_TLS_CLOSE_S = 5.0
#: The slots that Unix sockets leave free for TCP connections. A client that continues on the Unix socket uses two slots
#: until it closes the TCP connection.
_SPARE = 100
#: The host of a peer on the Unix socket, as ACLs and quotas see it.
_WITHIN_HOST = "127.0.0.1"
#: The prefixes of the client ids of brokers and controllers.
_PEERS = ("broker ", "replica-", "controller-")
#: The errors of a failed login.
_LOGIN_ERRORS = frozenset({ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.UNSUPPORTED_SASL_MECHANISM})


class Handler(Protocol):
    """The part of the broker that handles the requests of one connection."""

    def request_received(self, request: Request, body: memoryview) -> None:
        """Handle a request.

        The handler must end every request with one call of ``connection.reply`` or ``connection.done``, at once or
        later.
        """

    def connection_lost(self) -> None:
        """Handle the end of the connection. The connection discards later replies."""


_PLAIN = ListenerSecurity()
HandlerFactory = Callable[["ServerConnection"], Handler]


class _Budget:
    """A limiter of the bytes of requests in progress in one server, with the connections that wait for room."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: The highest value of ``used`` so far.
        self.peak = 0
        self.exhausted = limit <= 0
        self.waiting: set[ServerConnection] = set()

    def take(self, size: int) -> None:
        used = self.used = self.used + size
        if used > self.peak:  # noqa: PLR1730 - hot
            self.peak = used
        self.exhausted = used >= self.limit

    def release(self, size: int) -> None:
        used = self.used = self.used - size
        self.exhausted = used >= self.limit
        if self.waiting and not self.exhausted:
            waiting, self.waiting = self.waiting, set()
            for connection in waiting:
                connection.resume()


class ServerConnection(asyncio.BufferedProtocol):
    """The server's side of one connection: it receives requests, passes them to the handler, and sends replies.

    Not thread-safe: call every method on the server's event loop.
    """

    def __init__(
        self,
        factory: HandlerFactory,
        describe: Callable[[int, int], HelloReply],
        *,
        limits: Limits,
        budget: _Budget,
        security: ListenerSecurity,
        handshake: Handshake | None = None,
        of_unix_socket: bool = False,
    ) -> None:
        self._factory = factory
        self._security = security
        self._handshake = handshake
        if of_unix_socket:
            self._end = ServerEnd(
                describe,
                limits.max_frame_bytes,
                TokenAuthenticator(limits.unix_tokens, limits.authenticator if security.is_plain else None),
                only_proved=not security.is_plain,
            )
        else:
            self._end = ServerEnd(describe, limits.max_frame_bytes, limits.authenticator, self._new_login())
        self._limits = limits
        self._max_in_flight = limits.max_in_flight
        self._budget = budget
        self._turn = limits.turn
        self._queue: deque[ReceivedRequest | ImmediateAnswer] = deque()
        self._in_hand: dict[int, int] = {}
        self._writable = True
        self._reading = True
        self._handling = False
        #: The number of reasons why no further request is handled.
        self._pauses = 0
        #: Whether a large frame is being received or waits for room, and the bytes that had arrived at the last check.
        self._receives = False
        self._seen_bytes = 0
        self.used_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._handler: Handler | None = None
        self.peer = ""
        #: The address of the client, without the port.
        self.peer_host = ""
        #: The name of the listener that accepted this connection.
        self.listener = security.name
        #: The principal that the peer has logged in as.
        self.principal: Principal = ANONYMOUS
        #: The delegation token that the peer has logged in with, or an empty string.
        self.token_id = ""
        #: The timer of the end of the session or of the reply to a failed login, or None.
        self._timer: asyncio.TimerHandle | None = None
        #: Whether the limits of clients' connections have counted this one.
        self._admitted = False
        #: The monotonic time of the end of the session, or None.
        self._expires_s: float | None = None
        #: The unused token with which the peer may continue on the Unix socket.
        self._token: Secret | None = None
        #: Returns the reply to a request for the Unix socket; None if this connection cannot continue there.
        self._issue: Callable[[int], UnixSocketReply] | None = None
        #: Whether this connection uses the Unix socket.
        self.within_host = False
        self.closed = False

    @property
    def client_id(self) -> str:
        return self._end.client_id

    @property
    def standing(self) -> ConnectionStanding:
        """Return the kind of the connection: a client's, a broker's or the controller's, or unknown."""
        end = self._end
        if not end.admitted or end.may_prove:
            return ConnectionStanding.UNKNOWN
        # If brokers prove nothing, only the client id shows the kind.
        by_name = not self._limits.asks_for_proof and end.client_id.startswith(_PEERS)
        return ConnectionStanding.PEER if by_name or end.identity is not None else ConnectionStanding.CLIENT

    @property
    def awaits_replies(self) -> bool:
        """Return whether the client waits for replies: requests are in progress, being received or paused."""
        return bool(self._in_hand or self._queue or self._receives or self._pauses)

    @property
    def identity(self) -> Identity | None:
        """Return the identity that the peer has proved, which is a broker or the controller. None for other peers."""
        return self._end.identity

    def may_become(self, principal: Principal, token_id: str | None = None) -> bool:
        """Return whether the peer has logged in as this principal, or may do so without sending another login.

        The second case is possible while a login is in progress, or while a complete login or the proof of a token for
        the Unix socket waits in the queue. With ``token_id`` only logins by this delegation token count.
        """
        login, session = self._end.login, self._end.claimed_session
        if login is not None and login.in_progress:
            return True
        known = [(self.principal, self.token_id)]
        if login is not None and login.principal is not None:
            known.append((login.principal, login.token_id))
        if isinstance(session, UnixSession):
            known.append((session.principal, session.token_id))
        return any(found == principal and token_id in {None, by_token} for found, by_token in known)

    @property
    def writable(self) -> bool:
        """Return False while the peer does not read its replies fast enough. Further replies then stay in memory."""
        return self._writable

    @property
    def server_queue(self) -> tuple[int, int]:
        """Return the bytes of all requests in progress in the whole server, and the highest number so far."""
        return self._budget.used, self._budget.peak

    @property
    def certificates_expire_in_s(self) -> int | None:
        """Return the seconds until the first certificate of any of the listeners expires, or None without TLS."""
        known = [at_s for tls in self._limits.tls if (at_s := tls.expires_at_s()) is not None]
        return int(min(known) - time.time()) if known else None

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport)
        accepted = transport.get_extra_info("socket")
        self.within_host = accepted.family == socket.AF_UNIX
        # If the client has reset the connection meanwhile, the system does not report its address.
        host, port = ip_address(transport.get_extra_info("peername"))
        self.peer = f"local:{peer_process(accepted)[0]}" if self.within_host else host_and_port(host, port)
        self.peer_host = _WITHIN_HOST if self.within_host else host
        reached_at = ip_address(transport.get_extra_info("sockname"))
        if not self._security.is_plain:
            if self.within_host:
                self._end.describe = partial(_without_sockets, self._end.describe)
            elif self._limits.unix_socket:
                self._issue = partial(self._issue_token, reached_at)
        elif self._limits.unix_listener == self.listener and (self.within_host or reached_at[0]):
            self._end.describe = partial(_described, self._end.describe, self._limits.unix_socket, reached_at)
        if self._limits.authenticator is not None:
            self._end.roles = self._limits.authenticator.roles(transport.get_extra_info("peercert"))
        self.used_s = time.monotonic()
        if self._handshake is not None and not self._secured(self._handshake):
            return
        if self._limits.closing:
            self._transport.close()
            return
        if not self._limits.places.accept(self, spare=_SPARE if self.within_host else 0):
            self._refuse(-1, _too_many(self._limits.places.limit))
            return
        self._handler = self._factory(self)

    def _secured(self, handshake: Handshake) -> bool:
        """Take over the slot of the TLS handshake, and return whether the peer's certificate is accepted."""
        assert self._transport is not None and self._security.tls is not None
        self._handshake = None
        self._limits.places.leave(handshake)
        self.used_s = handshake.used_s
        if self._end.login is None:
            self._end.describe = partial(_without_sockets, self._end.describe)
            reports, certificate = self._security.reports, self._transport.get_extra_info("peercert")
            try:
                self.principal = self._security.tls.principal(certificate)
                if reports is not None and certificate:
                    reports.succeeded(self, CERTIFICATE)
            except BrokerError as error:
                _log.warning("refused a connection of %s: %s", self.peer, error.detail)
                if reports is not None:
                    reports.failed(self, CERTIFICATE, error)
                self._transport.writelines(encode_reply(ErrorReply(-1, error.code, error.detail)))
                self.close()
                return False
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._end.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        event = self._end.decode_single(nbytes)
        if event is None:
            began_s = time.monotonic()
            self._queue.extend(self._end.buffer_updated(nbytes))
            took_s = time.monotonic() - began_s
            if took_s >= NOTED_S:
                self._turn.use(took_s)
            self._check_large()
        elif self._queue or type(event) is not ReceivedRequest or not self._may_handle(event):
            self._queue.append(event)
        else:
            self._handle(event)
            if self._reading and not (self._budget.exhausted or self._is_full()):
                return  # There is nothing to continue with.
        self.resume()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._limits.places.leave(self)
        if self._limits.connection_limits is not None:
            self._limits.connection_limits.leave(self)
        if self._receives:
            self._limits.receiving.end(self)
        self._budget.waiting.discard(self)
        self._turn.leave(self)
        self._queue.clear()
        in_hand, self._in_hand = self._in_hand, {}
        self._note_abandoned_login()
        self._end_handler()
        # The login and its timer refer to this connection.
        self._end.login = self._issue = None
        if self._token is not None:
            self._limits.unix_tokens.drop(self._token)
        self._cancel_timer()
        self._budget.release(sum(in_hand.values()))

    def _end_handler(self) -> None:
        """Handle no further request."""
        if self._handler is not None:
            self._handler.connection_lost()
            # The handler refers to this connection. Without this, the receive buffer would stay until the next garbage
            # collection.
            self._handler = None

    def _check_large(self) -> None:
        """Check whether a large frame has started or has arrived completely. Frames of brokers always have room."""
        total, _ = self._end.receiving
        if bool(total) is not self._receives:
            self._receives, self._seen_bytes = bool(total), 0
            if not total:
                self._limits.receiving.end(self)
            elif self._end.identity is None:
                self._limits.receiving.begin(self, total)

    def received_since_last_check(self) -> int:
        """Return the number of bytes of the large frame that have arrived since the last call.

        Return a negative number while the server does not read the connection.
        """
        _, come = self._end.receiving
        before, self._seen_bytes = self._seen_bytes, come
        return come - before if self._reading else -1

    def give_up(self, reason: str) -> None:
        _log.warning("closed the connection of %s: %s", self.peer, reason)
        self.abort()

    def _refuse(self, cid: int, detail: str) -> None:
        if not self.within_host:  # The client of a Unix socket also has a TCP connection, and continues there.
            _log.warning("refused a connection of %s: %s", self.peer, detail)
        reply = ErrorReply(cid, ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)
        assert self._transport is not None
        self._transport.writelines(encode_reply(reply))
        self.close()

    # --- the broker's side -----------------------------------------------------------------------------------------

    def reply(self, message: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> None:
        """Send the reply to the request with the message's ``cid``.

        The buffers of the body must not change until they are sent. ``body_bytes`` is their total size, if it is known.
        """
        transport = self._transport
        if self.closed or transport is None:
            return
        buffers = encode_reply(message, body, body_bytes)
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        self.done(message.cid)

    def done(self, cid: int) -> None:
        """Record that a request has ended. ``reply`` calls this itself.

        The handler calls it for a request without a reply (acks=0).
        """
        size = self._in_hand.pop(cid, 0)
        if size:
            self._budget.release(size)
        # If a request gets its reply at once, ``resume`` is already running and continues with the next request. A call
        # of ``resume`` here would nest once for each queued request.
        if not self._handling and (self._queue or not self._reading):
            self.resume()

    def pause_requests(self) -> None:
        """Stop handling requests of this connection until ``resume_requests`` is called.

        This keeps later requests from overtaking a request that is handled in several slices. It also delays a client
        that has exceeded a quota. Each caller must call ``resume_requests`` once.
        """
        self._pauses += 1

    def resume_requests(self) -> None:
        self._pauses -= 1
        if not self._handling:
            self.resume()

    def close(self) -> None:
        """Close the connection after all written bytes are sent."""
        if self._transport is not None:
            self._transport.close()
            if self._security.tls is not None:
                # A peer could delay the end of TLS.
                asyncio.get_running_loop().call_later(_TLS_CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        """Close the connection at once, and discard its queued requests."""
        self._queue.clear()
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        """Handle queued requests until a limit is reached. Then start or stop reading the socket."""
        if self._transport is None or self._handler is None:
            return
        queue, turn = self._queue, self._turn
        while queue and not self.closed:
            if turn.is_spent:
                turn.wait(self)
                break
            event = queue[0]
            if isinstance(event, ReceivedRequest):
                if not self._may_handle(event):
                    break  # Stop until there is budget; ``_may_read`` adds this connection to those that wait for it.
                queue.popleft()
                self._handle(event)
            else:
                # A hello needs no budget, so that a client that must wait knows that the broker is alive.
                if not self._writable:
                    break
                queue.popleft()
                self._send_immediate(event)
        if not self.closed and self._may_read() is not self._reading:
            self._set_reading(not self._reading)

    def _send_immediate(self, event: ImmediateAnswer) -> None:
        assert self._transport is not None
        if not event.close and not isinstance(event.reply, ErrorReply) and not self._limits.places.greeted(self):
            self._queue.clear()
            self._refuse(event.reply.cid, _too_many(self._limits.places.client_limit))
            return
        if isinstance(event.reply, SaslAuthenticateReply):
            if event.reply.complete:
                self._logged_in(event.reply.session_lifetime_ms)
        elif isinstance(event.reply, ErrorReply) and event.reply.code in _LOGIN_ERRORS:
            self._login_failed(event.reply)
            return
        elif isinstance(event.reply, UnixSocketReply) and self._issue is not None:
            event = ImmediateAnswer(self._issue(event.reply.cid), close=False)
        elif isinstance(self._end.session, UnixSession):
            session, self._end.session = self._end.session, None
            self._continue(session)
        if not self._admitted and not event.close and (refusal := self._admit()):
            self._queue.clear()
            self._refuse(event.reply.cid, refusal)
            return
        self._transport.writelines(encode_reply(event.reply))
        if event.close:
            self._queue.clear()
            self.close()

    def _admit(self) -> str:
        """Count a client's connection once. Return why it is refused, or the empty text."""
        if self.standing is not ConnectionStanding.CLIENT:
            return ""
        self._admitted = True
        limits = self._limits.connection_limits
        if limits is None:
            return ""
        return limits.admit(
            self,
            address=self.peer_host,
            principal=self.principal,
            within_host=self.within_host,
            now_s=time.monotonic(),
        )

    # --- logins ---

    def _new_login(self) -> ServerLogin | None:
        authentication = self._security.authentication
        if authentication is None:
            return None
        return ServerLogin(
            authentication.mechanisms,
            lambda mechanism: authentication.begin(mechanism, self),
            authentication.session_lifetime_ms,
        )

    def _logged_in(self, session_lifetime_ms: int) -> None:
        login, authentication = self._end.login, self._security.authentication
        assert login is not None and login.principal is not None and authentication is not None
        self.principal, self.token_id = login.principal, login.token_id
        self._expires_s = time.monotonic() + session_lifetime_ms / 1000 if session_lifetime_ms else None
        self._await_expiry()
        authentication.succeeded(self, login.mechanism)

    def _await_expiry(self) -> None:
        self._cancel_timer()
        if self._expires_s is not None:
            delay_s = max(0.0, self._expires_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end.session_expired)

    def _issue_token(self, reached_at: tuple[str, int], cid: int) -> UnixSocketReply:
        """Issue a token for this connection, and return the reply with it. An earlier token becomes invalid."""
        tokens = self._limits.unix_tokens
        if self._token is not None:
            tokens.drop(self._token)
        session = UnixSession(
            self.principal, self._end.identity, self.peer_host, self._security, self._expires_s, self.token_id
        )
        self._token = tokens.issue(session)
        return UnixSocketReply(cid, self._limits.unix_socket, reached_at, bytes.fromhex(self._token.hex()))

    def _continue(self, session: UnixSession) -> None:
        """Continue the session of the peer's TCP connection, which the peer has proved by its token."""
        self.principal, self.peer_host = session.principal, session.peer_host
        self.token_id = session.token_id
        self._end.identity = session.identity
        self._security, self.listener = session.security, session.security.name
        login = self._end.login = self._new_login()
        if login is not None:
            login.principal, login.token_id = session.principal, session.token_id
        self._expires_s = session.expires_s
        self._await_expiry()

    def _login_failed(self, reply: ErrorReply) -> None:
        """Send the reply to a failed login after a delay, and close the connection."""
        login, authentication = self._end.login, self._security.authentication
        mechanism = login.mechanism if login is not None else ""
        self._queue.clear()
        self._end_handler()
        self._cancel_timer()
        self._set_reading(False)
        delay_s = self._limits.login_delays.failed(self.peer_host, time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_failed_login, reply)
        if authentication is not None:
            authentication.failed(self, mechanism, BrokerError(ErrorCode(reply.code), reply.detail))

    def _note_abandoned_login(self) -> None:
        """Report a login that the peer has not completed. Otherwise a peer could avoid the report of a failed login."""
        login, authentication = self._end.login, self._security.authentication
        if self._handler is None or login is None or authentication is None or not login.in_progress:
            return
        self._limits.login_delays.failed(self.peer_host, time.monotonic())
        detail = "the connection ended before the login was complete"
        authentication.failed(self, login.mechanism, BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail))

    def _end_failed_login(self, reply: ErrorReply) -> None:
        if self._transport is not None and not self.closed:
            self._transport.writelines(encode_reply(reply))
            self.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle(self, event: ReceivedRequest) -> None:
        handler, request, size = self._handler, event.request, event.frame_bytes
        cid = request.cid
        if cid in self._in_hand:
            assert self._transport is not None
            # Two requests with the same id would count as one, so the limits would not hold any more.
            detail = f"correlation id {cid} found, its earlier request is not answered yet"
            self._transport.writelines(encode_reply(ErrorReply(cid, ErrorCode.INVALID_REQUEST, detail)))
            return
        assert handler is not None
        self._in_hand[cid] = size
        self._budget.take(size)
        self._handling = True
        self.used_s = began_s = time.monotonic()
        try:
            handler.request_received(request, event.body)
        finally:
            self._handling = False
            took_s = time.monotonic() - began_s
            if took_s >= NOTED_S:
                self._turn.use(took_s)

    def _may_handle(self, event: ReceivedRequest) -> bool:
        return not (
            self._turn.is_spent or self._is_full() or self._handler is None or (event.body and self._budget.exhausted)
        )

    def _may_read(self) -> bool:
        """Return whether the socket may be read.

        While the budget is exhausted, do not read a connection with queued requests or a partly received body.
        """
        if self._budget.exhausted and (self._queue or self._end.is_body_in_progress):
            self._budget.waiting.add(self)
            return False
        if self._receives and not self._limits.receiving.may_receive(self):
            return False
        # Requests that wait because of the ``Turn`` are handled before more is read.
        return not (self._is_full() or (self._queue and self._turn.is_spent))

    def _is_full(self) -> bool:
        return not self._writable or self._pauses > 0 or len(self._in_hand) >= self._max_in_flight

    def _set_reading(self, reading: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()


def _described(
    describe: Callable[[int, int], HelloReply], name: str, reached_at: tuple[str, int], cid: int, version: int
) -> HelloReply:
    return replace(describe(cid, version), unix_socket=name, reached_at=reached_at)


def _too_many(limit: int) -> str:
    return f"{limit} connections are open, at most {limit} accepted"


def _certificate_refused(security: ListenerSecurity, handshake: Handshake, reason: str) -> None:
    if security.reports is not None:
        error = BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, reason)
        security.reports.failed(CertificatePeer(handshake.peer_host, security.name), CERTIFICATE, error)


def _without_sockets(describe: Callable[[int, int], HelloReply], cid: int, version: int) -> HelloReply:
    return replace(describe(cid, version), boot_id="", local_socket="")


class Limits:
    """The limits of one server, and the other state that its connections share, such as tokens and login delays."""

    def __init__(
        self, *, max_frame_bytes: int, max_in_flight: int, places: ConnectionSlots, receiving: Receiving
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.max_in_flight = max_in_flight
        self.places = places
        self.receiving = receiving
        #: The time that requests have used in the current iteration of the event loop.
        self.turn = Turn()
        #: Whether the server is closing. A connection that was accepted just before is then closed at once.
        self.closing = False
        #: The name of the Unix socket, which is in the reply to each hello; empty if there is no Unix socket.
        self.unix_socket = ""
        #: The listener whose connections continue on the Unix socket; empty if there is no Unix socket.
        self.unix_listener = ""
        #: The limits of clients by address and user, or None.
        self.connection_limits: ConnectionLimits | None = None
        #: The TLS of the listeners that have it.
        self.tls: list[ServerTls] = []
        #: The tokens with which connections of listeners with TLS or logins continue on the Unix socket.
        self.unix_tokens = UnixTokens()
        #: The delays of the replies to failed logins.
        self.login_delays = LoginDelays()
        #: Adds the broker's proof to the reply to a hello; None if the broker has no credentials.
        self.authenticator: Authenticator | None = None

    @property
    def asks_for_proof(self) -> bool:
        """Return whether brokers and the controller must prove their identity on connections to this server."""
        return self.authenticator is not None and self.authenticator.required


class Server:
    """A server that accepts connections on one or more listeners. Create it with ``serve``."""

    def __init__(
        self,
        factory: HandlerFactory,
        describe: Callable[[int, int], HelloReply],
        *,
        limits: Limits,
        budget: _Budget,
    ) -> None:
        self._factory = factory
        self._describe = describe
        self._servers: list[asyncio.Server | TlsListener] = []
        self._limits = limits
        self._budget = budget
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

    @property
    def unix_socket(self) -> str:
        """Return the name of the Unix socket that clients get, or an empty string if there is no Unix socket."""
        return self._limits.unix_socket

    @property
    def queued_bytes(self) -> int:
        return self._budget.used

    async def listen(self, host: str, port: int, security: ListenerSecurity) -> int:
        """Add a listener on ``host:port``, and return its port. All listeners share the limits of the server.

        Port 0 means any free port. Raises OSError if the address is in use.
        """
        server: asyncio.Server | TlsListener
        if security.tls is None:
            server = await asyncio.get_running_loop().create_server(
                lambda: self._make(security), host, port, backlog=_BACKLOG, reuse_address=True
            )
        else:
            server = TlsListener(
                await bind_tls(host, port, _BACKLOG),
                security.tls,
                make=partial(self._make, security),
                places=self._limits.places,
                handshake_s=self._limits.places.hello_s,
                on_refused=partial(_certificate_refused, security),
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
                        lambda: self._make(security, of_unix_socket=True), sock=listening, backlog=_BACKLOG
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
        self, security: ListenerSecurity, handshake: Handshake | None = None, *, of_unix_socket: bool = False
    ) -> ServerConnection:
        return ServerConnection(
            self._factory,
            self._describe,
            limits=self._limits,
            budget=self._budget,
            security=security,
            handshake=handshake,
            of_unix_socket=of_unix_socket,
        )

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
    describe: Callable[[int, int], HelloReply],
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
        places=ConnectionSlots(max_connections, kept=kept_connections, hello_s=hello_s, idle_s=idle_s),
        receiving=Receiving(queued_max_bytes),
    )
    if credentials is not None:
        limits.authenticator = credentials
    limits.connection_limits = connection_limits
    server = Server(factory, describe, limits=limits, budget=_Budget(queued_max_bytes))
    # The Unix socket is bound first, because its name must be in the reply to the first hello on TCP.
    if within_host:
        await server.listen_within_host(security)
    try:
        await server.listen(host, port, security)
    except BaseException:
        await server.close()
        raise
    return server
