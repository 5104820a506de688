"""The server's side of one connection: it receives requests within limits, and sends the replies.

At a limit the server stops reading, so that clients have to wait. It stops reading a connection with ``max_in_flight``
requests without a reply, and a connection whose client does not read its replies. While ``queued_max_bytes`` of
requests are in progress, the server handles no further requests with a body. It still handles requests without a body,
because the writes in progress may wait for fetches of followers. ``receiving`` limits the bytes of frames that have not
arrived completely.

A listener may require a login (``login_session``). It serves a connection only after the login.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal, host_and_port
from sparklog.net.authentication import CERTIFICATE, ListenerSecurity
from sparklog.net.connection_end import ConnectionEnd, Handler
from sparklog.net.connection_slots import ConnectionStanding
from sparklog.net.login_session import LOGIN_ERRORS, LoginSession
from sparklog.net.loop import tune
from sparklog.net.server_limits import Limits
from sparklog.net.tls_listener import Handshake
from sparklog.net.turn import NOTED_S
from sparklog.net.unix_socket import ip_address, peer_process
from sparklog.net.unix_tokens import TokenIssuer, UnixSession
from sparklog.protocol.connection import ImmediateAnswer, encode_reply, with_throttle_time
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import ErrorReply, Reply, SaslAuthenticateReply, UnixSocketReply
from sparklog.protocol.proof import Identity
from sparklog.protocol.received import ReceivedRequest
from sparklog.security.principals import ANONYMOUS

_log = logging.getLogger(__name__)

#: The maximum time from a close to the end of a TLS connection.
_TLS_CLOSE_S = 5.0
#: The number of slots that connections on the Unix socket leave free for TCP connections. A client that continues on
#: the Unix socket uses two slots until it closes the TCP connection.
_SPARE = 100
#: The host of a peer on the Unix socket, as ACLs and quotas see it.
_WITHIN_HOST = "127.0.0.1"
#: The prefixes of the client ids of brokers and controllers.
_PEERS = ("broker ", "replica-", "controller-")


class ListenerProtocol(Protocol):
    """The wire protocol of one listener: it creates the parts of a connection that depend on the protocol."""

    @property
    def has_peers(self) -> bool:
        """Return whether brokers and the controller connect with this protocol."""

    @property
    def answers_in_order(self) -> bool:
        """Return whether the replies must have the order of the requests.

        The connection's ``ConnectionEnd`` itself replies to some requests, such as logins. If the order matters, the
        connection sends such a reply only while no other request is in progress.
        """

    def new_end(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> ConnectionEnd:
        """Create the decoder and encoder (``ConnectionEnd``) for a connection that was just accepted."""

    def new_handler(self, connection: ServerConnection) -> Handler:
        """Return the handler of the requests of a connection that was just accepted."""

    def token_issuer(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> TokenIssuer | None:
        """Return the source of tokens for the Unix socket; None if the connection cannot continue there."""


class ServerConnection(asyncio.BufferedProtocol):
    """The server's side of one connection: it receives requests, passes them to the handler, and sends replies.

    ``protocol`` creates the parts that decode and handle the bytes of the listener's protocol. Not thread-safe: call
    every method on the server's event loop.
    """

    def __init__(
        self,
        protocol: ListenerProtocol,
        *,
        limits: Limits,
        security: ListenerSecurity,
        handshake: Handshake | None = None,
    ) -> None:
        self._protocol = protocol
        #: The security rules of the listener.
        self.security = security
        self._handshake = handshake
        self._limits = limits
        self._budget = limits.budget
        self._turn = limits.turn
        self._queue: deque[ReceivedRequest | ImmediateAnswer] = deque()
        self._in_hand: dict[int, int] = {}
        self._writable = True
        self._reading = True
        self._handling = False
        #: The number of pauses that have not ended (``pause_requests``). Above 0, no request is handled.
        self._pauses = 0
        #: The number of requests that may be in progress now. It is 0 during a pause, and while the peer does not read
        #: its replies.
        self._most_in_hand = limits.max_in_flight
        #: Whether a large frame is being received or waits for room, and its bytes that had arrived at the last check.
        self._receives = False
        self._seen_bytes = 0
        self.used_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._handler: Handler | None = None
        #: The timer that aborts the connection if the peer delays the end of TLS, or None.
        self._close_timer: asyncio.TimerHandle | None = None
        self.peer = ""
        #: The address of the client, without the port.
        self.peer_host = ""
        #: The name of the listener that accepted this connection.
        self.listener = security.name
        #: The principal that the peer has logged in as.
        self.principal: Principal = ANONYMOUS
        #: The delegation token that the peer has logged in with, or an empty string.
        self.token_id = ""
        #: Whether ``ConnectionLimits`` has counted this connection.
        self._admitted = False
        #: Whether this connection uses the Unix socket.
        self.within_host = False
        #: A function that returns the time in ms that the next request must wait because of a quota. None if no quota
        #: is set.
        self.throttle_ms: Callable[[], int] | None = None
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
        by_name = self._protocol.has_peers and not self._limits.asks_for_proof and end.client_id.startswith(_PEERS)
        return ConnectionStanding.PEER if by_name or end.identity is not None else ConnectionStanding.CLIENT

    @property
    def awaits_replies(self) -> bool:
        """Return whether the client waits for replies, because requests are in progress, being received or paused."""
        return bool(self._in_hand or self._queue or self._receives or self._pauses)

    @property
    def identity(self) -> Identity | None:
        """Return the peer's identity if it has proved to be a broker or the controller, otherwise None."""
        return self._end.identity

    def may_become(self, principal: Principal, token_id: str | None = None) -> bool:
        """Return whether the peer has logged in as this principal, or may do so without sending another login.

        The peer may do so while its login is in progress, or while a complete login or the proof of a token for the
        Unix socket waits in the queue. With ``token_id`` only logins by this delegation token count.
        """
        login, session = self._end.login, self._end.claimed_session
        if login is not None and login.in_progress:
            return True
        known = list(self.session.known())
        if isinstance(session, UnixSession):
            known.append((session.principal, session.token_id))
        return any(found == principal and token_id in {None, by_token} for found, by_token in known)

    @property
    def writable(self) -> bool:
        """Return whether the peer reads its replies fast enough. If not, further replies stay in memory."""
        return self._writable

    @property
    def server_queue(self) -> tuple[int, int]:
        """Return the total size, in bytes, of the server's requests in progress, and its maximum so far."""
        return self._budget.used, self._budget.peak

    @property
    def certificates_expire_in_s(self) -> int | None:
        """Return the seconds until the first of the listeners' certificates expires, or None without TLS."""
        known = [at_s for tls in self._limits.tls if (at_s := tls.expires_at_s()) is not None]
        return int(min(known) - time.time()) if known else None

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        #: The logins and the session of the peer. It refers to this connection until ``connection_lost``.
        self.session = LoginSession(self, self.security, self._limits.login_delays)
        tune(transport)
        accepted = transport.get_extra_info("socket")
        self.within_host = accepted.family == socket.AF_UNIX
        # If the client has reset the connection meanwhile, the system does not report its address.
        host, port = ip_address(transport.get_extra_info("peername"))
        self.peer = f"local:{peer_process(accepted)[0]}" if self.within_host else host_and_port(host, port)
        self.peer_host = _WITHIN_HOST if self.within_host else host
        self._end = self._protocol.new_end(self, transport)
        #: The source of tokens with which the client continues on the Unix socket; None if it cannot.
        self._tokens = self._protocol.token_issuer(self, transport)
        self.used_s = time.monotonic()
        if self._handshake is not None and not self._secured(self._handshake):
            return
        if self._limits.closing:
            self._transport.close()
            return
        if not self._limits.places.accept(self, spare=_SPARE if self.within_host else 0):
            self._refuse(-1, _too_many(self._limits.places.limit))
            return
        self._handler = self._protocol.new_handler(self)

    def _secured(self, handshake: Handshake) -> bool:
        """Release the slot of the TLS handshake, and take the principal from the certificate if no login gives it.

        Return False if the certificate is not accepted. The connection is then closed.
        """
        assert self._transport is not None and self.security.tls is not None
        self._handshake = None
        self._limits.places.leave(handshake)
        self.used_s = handshake.used_s
        if self._end.login is None:
            reports, certificate = self.security.reports, self._transport.get_extra_info("peercert")
            try:
                self.principal = self.security.tls.principal(certificate)
                if reports is not None and certificate:
                    reports.succeeded(self, CERTIFICATE)
            except BrokerError as error:
                _log.warning("refused a connection of %s: %s", self.peer, error.detail)
                if reports is not None:
                    reports.failed(self, CERTIFICATE, error)
                if buffers := self._end.encode_answer(ErrorReply(-1, error.code, error.detail)):
                    self._transport.writelines(buffers)
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
            if self._reading and len(self._in_hand) < self._most_in_hand and not self._budget.exhausted:
                return  # The queue is empty, and the socket is being read.
        self.resume()

    def pause_writing(self) -> None:
        self._writable = False
        self._limit_in_hand()

    def resume_writing(self) -> None:
        self._writable = True
        self._limit_in_hand()
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
        self.session.end(report=self._handler is not None)
        self._end_handler()
        self._end.login = None
        if self._tokens is not None:
            self._tokens.drop()
        self._budget.release(sum(in_hand.values()))
        if self._close_timer is not None:
            self._close_timer.cancel()
        # TLS keeps references to this connection. Without this, its buffers of 256 KiB would stay until the collector
        # visits them, and a peer that opens connections without a login could fill the memory.
        self._transport = self._close_timer = None

    def _end_handler(self) -> None:
        """End the handler, so that the connection handles no further request."""
        if self._handler is not None:
            self._handler.connection_lost()
            # The handler refers to this connection. Without this, the receive buffer would stay until the next garbage
            # collection.
            self._handler = None

    def _check_large(self) -> None:
        """Notify ``receiving`` if a large frame has started or has arrived completely.

        Frames of brokers and the controller do not count, so they never wait for room.
        """
        total, _ = self._end.receiving
        if bool(total) is not self._receives:
            self._receives, self._seen_bytes = bool(total), 0
            if not total:
                self._limits.receiving.end(self)
            elif self._end.identity is None:
                self._limits.receiving.begin(self, total)

    def received_since_last_check(self) -> int:
        """Return the number of bytes of the incoming large frame that have arrived since the last call.

        The number is negative while the server does not read from the connection.
        """
        _, come = self._end.receiving
        before, self._seen_bytes = self._seen_bytes, come
        return come - before if self._reading else -1

    def give_up(self, reason: str) -> None:
        """Close the connection at once, and log ``reason``."""
        self._limits.refusals.warn(f"closed the connection of {self.peer}: {reason}")
        self.abort()

    def _refuse(self, cid: int, detail: str) -> None:
        if not self.within_host:  # The client of a Unix socket also has a TCP connection, and continues there.
            _log.warning("refused a connection of %s: %s", self.peer, detail)
        reply = ErrorReply(cid, ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)
        assert self._transport is not None
        if buffers := self._end.encode_answer(reply):
            self._transport.writelines(buffers)
        self.close()

    # --- the broker's side ---

    def reply(self, message: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> None:
        """Send a reply of sparklog's own protocol. The message's ``cid`` names the request.

        The buffers of the body must not change until they are sent. ``body_bytes`` is their total size, if it is known.
        """
        transport = self._transport
        if self.closed or transport is None:
            return
        if self.throttle_ms is not None:
            message = with_throttle_time(message, self.throttle_ms())
        buffers = encode_reply(message, body, body_bytes)
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        self.done(message.cid)

    def send(self, cid: int, buffers: Sequence[Buffer]) -> None:
        """Send the encoded reply to the request with this number. The buffers must not change until they are sent."""
        transport = self._transport
        if self.closed or transport is None:
            return
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        self.done(cid)

    def done(self, cid: int) -> None:
        """Record that a request has ended.

        ``reply`` and ``send`` call this method. The handler calls it only for a request without a reply (acks=0).
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

        A pause keeps later requests from overtaking a request that is handled in several slices. It also delays a
        client that has exceeded a quota. Each caller must call ``resume_requests`` once.
        """
        self._pauses += 1
        self._limit_in_hand()

    def resume_requests(self) -> None:
        self._pauses -= 1
        self._limit_in_hand()
        if not self._handling:
            self.resume()

    def close(self) -> None:
        """Close the connection after all written bytes are sent."""
        # A second close would let asyncio's TLS of Python 3.11 forget the connection, and then it could not be aborted.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            if self.security.tls is not None:
                # A peer could delay the end of TLS.
                loop = asyncio.get_running_loop()
                self._close_timer = loop.call_later(_TLS_CLOSE_S, self._transport.abort)

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
                if not self._writable or (self._in_hand and self._protocol.answers_in_order):
                    break
                if _completes_login(event) and self.session.waits(self.pause_requests, self.resume_requests):
                    break
                queue.popleft()
                self._send_immediate(event)
        if not self.closed and self._may_read() is not self._reading:
            self._set_reading(not self._reading)

    def _send_immediate(self, event: ImmediateAnswer) -> None:
        assert self._transport is not None
        if _completes_login(event) and self.session.is_throttled:
            self._end_login(self.session.refuse, event.reply.cid)
            return
        if not event.close and not isinstance(event.reply, ErrorReply) and not self._limits.places.greeted(self):
            self._queue.clear()
            self._refuse(event.reply.cid, _too_many(self._limits.places.client_limit))
            return
        if isinstance(event.reply, SaslAuthenticateReply):
            if event.reply.complete:
                self.session.logged_in(event.reply.session_lifetime_ms)
        elif isinstance(event.reply, ErrorReply) and event.reply.code in LOGIN_ERRORS:
            error = BrokerError(ErrorCode(event.reply.code), event.reply.detail)
            self._end_login(partial(self.session.fail, error), event.reply.cid)
            return
        elif isinstance(event.reply, UnixSocketReply) and self._tokens is not None:
            event = ImmediateAnswer(self._tokens.issue(event.reply.cid, self._this_session()), close=False)
        elif isinstance(self._end.session, UnixSession):
            session, self._end.session = self._end.session, None
            self._continue(session)
        if not self._admitted and not event.close and (refusal := self._admit()):
            self._queue.clear()
            self._refuse(event.reply.cid, refusal)
            return
        buffers = self._end.encode_answer(event.reply)
        if buffers:
            self._transport.writelines(buffers)
        if event.close:
            if not buffers and isinstance(event.reply, ErrorReply):  # The reason is only in the log.
                self._limits.refusals.warn(f"closed the connection of {self.peer}: {event.reply.detail}")
            self._queue.clear()
            self.close()

    def _admit(self) -> str:
        """Count a client's connection in the limits of connections.

        Return the reason if a limit refuses the connection, or an empty string.
        """
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

    def session_expired(self) -> None:
        """Serve no requests until the client logs in again."""
        self._end.session_expired()

    def _continue(self, session: UnixSession) -> None:
        """Continue the session of the peer's TCP connection. A token has proved that the peer owns the session."""
        self.peer_host = session.peer_host
        self._end.identity = session.identity
        self.security, self.listener = session.security, session.security.name
        self.session.continue_with(session)
        self._end.login = self.session.login

    def _this_session(self) -> UnixSession:
        """Return the session of this connection, which another connection on the Unix socket may continue."""
        return UnixSession(
            self.principal,
            self._end.identity,
            self.peer_host,
            self.security,
            self.session.expires_s,
            self.token_id,
        )

    def _end_login(self, fail: Callable[[Callable[[BrokerError], None]], None], cid: int) -> None:
        """End a failed login. ``fail`` calls its argument with the error for the client, at once or later."""
        self._queue.clear()
        self._end_handler()
        self._set_reading(False)
        fail(lambda error: self._end_failed_login(ErrorReply(cid, error.code, error.detail)))

    def _end_failed_login(self, reply: ErrorReply) -> None:
        if self._transport is not None and not self.closed:
            self._transport.writelines(self._end.encode_answer(reply))
            self.close()

    # --- the requests ---

    def _handle(self, event: ReceivedRequest) -> None:
        handler, request, size = self._handler, event.request, event.frame_bytes
        cid, in_hand = request.cid, self._in_hand
        if cid in in_hand:
            assert self._transport is not None
            # Two requests with the same id would count as one, so the limits would not hold any more.
            detail = f"correlation id {cid} found, but an earlier request with this id has no reply yet"
            self._transport.writelines(self._end.encode_answer(ErrorReply(cid, ErrorCode.INVALID_REQUEST, detail)))
            return
        assert handler is not None
        in_hand[cid] = size
        self._budget.take(size)
        self._handling = True
        self.used_s = began_s = time.monotonic()
        try:
            handler.request_received(request, event.body)
        finally:
            self._handling = False
            if (took_s := time.monotonic() - began_s) >= NOTED_S:
                self._turn.use(took_s)

    def _may_handle(self, event: ReceivedRequest) -> bool:
        if len(self._in_hand) >= self._most_in_hand or self._turn.is_spent or self._handler is None:
            return False
        return not (self._budget.exhausted and event.body)

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
        return len(self._in_hand) < self._most_in_hand and not (self._queue and self._turn.is_spent)

    def _limit_in_hand(self) -> None:
        self._most_in_hand = self._limits.max_in_flight if self._writable and not self._pauses else 0

    def _set_reading(self, reading: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()


def _completes_login(answer: ImmediateAnswer) -> bool:
    return isinstance(answer.reply, SaslAuthenticateReply) and answer.reply.complete


def _too_many(limit: int) -> str:
    return f"{limit} connections are open, at most {limit} accepted"
