"""A client connection on an asyncio event loop, which replica fetchers, the controller and producers use."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from sparklog.errors import BrokerError, ConfigError, ErrorCode, ProtocolError
from sparklog.model import host_and_port
from sparklog.net import unix_socket
from sparklog.net.client_login import Login, advance, log_in, must_log_in
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials, Greeting
from sparklog.net.loop import tune
from sparklog.net.tls import client_context, connect_failure
from sparklog.protocol.connection import (
    DEFAULT_MAX_FRAME_BYTES,
    MAX_GREETING_REPLY_BYTES,
    ClientEnd,
    PreparedRequest,
    error_of_reply,
)
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import (
    ErrorReply,
    HelloReply,
    Prove,
    Reply,
    Request,
    RequestUnixSocket,
    SaslAuthenticate,
    UnixSocketReply,
)
from sparklog.protocol.received import ReceivedReply
from sparklog.security.listeners import SecurityProtocol

_PLAINTEXT = ClientSecurity()
#: The maximum wait in seconds for the end of TLS, and the number of iterations of the event loop that an abort takes.
_SHUTDOWN_S = 0.5
_TURNS_TO_ABORT = 3
ReplyAndBody = tuple[Reply, memoryview]
#: A function that is called with the outcome of one request: the reply, or the error.
OnOutcome = Callable[[ReplyAndBody | BrokerError], None]


class AsyncConnection(asyncio.BufferedProtocol):
    """A client's connection to a broker. Create it with ``open``.

    Not thread-safe: call every method on the event loop of the connection.

    Several requests may be in flight, and their replies may arrive in any order. ``request`` returns a future for the
    reply. ``ask`` has a lower latency: the connection calls a function as soon as it has read the reply.
    """

    def __init__(self, address: str, max_frame_bytes: int, security: ClientSecurity = _PLAINTEXT) -> None:
        self.address = address
        self._security = security
        #: Whether ``wait_readable`` and ``read_now`` can be used: the socket carries frames and not TLS.
        self.is_direct = True
        #: The timer and the task of the next login, or None.
        self._login_timer: asyncio.TimerHandle | None = None
        self._login_task: asyncio.Task[None] | None = None
        self._tls_error: ssl.SSLError | None = None
        self._is_lost = False
        self._lost_waiter: asyncio.Future[None] | None = None
        self.closed = False
        self.hello: HelloReply | None = None
        self._prove: Prove | None = None
        self.on_lost: Callable[[], None] | None = None
        #: The event loop's time before which the broker handles no further request, because a quota is exceeded.
        self.throttled_until_s = 0.0
        self._end = ClientEnd(max_frame_bytes, MAX_GREETING_REPLY_BYTES)
        self._waiting: dict[int, OnOutcome] = {}
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reason = "closed"
        self._poll: select.poll | None = None
        self._socket_number = -1
        #: Whether a callback is running with a reply. If the callback is interrupted, the reply is lost.
        self.delivering = False
        #: The monotonic time at which the peer's last bytes arrived, or at which a request was sent while no other
        #: request was in flight.
        self._last_bytes_s = 0.0

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        client_id: str,
        cluster_id: str = "",
        connect_timeout_s: float = 5.0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        credentials: Credentials | None = None,
        broker_id: int | None = None,
        proof_required: bool = False,
        security: ClientSecurity = _PLAINTEXT,
    ) -> AsyncConnection:
        """Connect, agree on a version, and log in. Return the connection.

        With ``credentials``, both sides prove their identity (see ``Greeting``). The connection logs in again before
        its session ends.

        Raises:
          BrokerError: NETWORK_EXCEPTION if no reply arrives in time; UNSUPPORTED_VERSION. INVALID_REQUEST if the broker
            belongs to another cluster, or does not use TLS. CLUSTER_AUTHORIZATION_FAILED if the broker has not proved
            that it knows the secret, or its certificate is not accepted. BROKER_NOT_AVAILABLE if a broker other than
            ``broker_id`` replies. SASL_AUTHENTICATION_FAILED or ILLEGAL_SASL_STATE if the login failed.
        """
        address = host_and_port(host, port)
        loop = asyncio.get_running_loop()
        greeting = Greeting(
            client_id, cluster_id, credentials=credentials, broker_id=broker_id, proof_required=proof_required
        )
        made: list[AsyncConnection] = []

        def make() -> AsyncConnection:
            made.append(cls(address, max_frame_bytes, security))
            return made[-1]

        async def greet() -> AsyncConnection:
            chosen = await choose()
            if must_log_in(cast(HelloReply, chosen.hello), security, has_proof=chosen._prove is not None):
                await chosen._log_in()
            elif chosen._prove is not None:
                await chosen.request(chosen._prove)
            if security.protocol is not SecurityProtocol.PLAINTEXT and chosen._is_within_host():
                return await change(chosen)
            return chosen

        async def change(connection: AsyncConnection) -> AsyncConnection:
            """Return a connection on the broker's Unix socket, or ``connection`` if the broker gives no token."""
            try:
                given, _ = await connection.request(RequestUnixSocket(0))
                by_unix = unix_socket.connect(cast(UnixSocketReply, given), connection.peer)
                if by_unix is None:
                    return connection
                nearer = make()
                await _finish(loop.create_unix_connection(lambda: nearer, sock=by_unix), nearer.abort)
                token = Greeting.with_token(client_id, cluster_id, cast(UnixSocketReply, given).secret)
                await asyncio.wait_for(nearer._prove_token(token), unix_socket.greeting_s(connect_timeout_s))
            # The broker may have no free connection slot, or it may have ended.
            except (OSError, asyncio.TimeoutError, BrokerError):
                if connection.closed:
                    raise
                return connection
            nearer._take_login_of(connection)
            return nearer

        async def choose() -> AsyncConnection:
            context = client_context(security)
            if context is None:
                _, connection = await loop.create_connection(make, host, port)
            else:
                _, connection = await loop.create_connection(
                    make, host, port, ssl=context, server_hostname=host, ssl_handshake_timeout=connect_timeout_s
                )
            greeted = await connection._greet(greeting)
            if security.protocol is not SecurityProtocol.PLAINTEXT:
                return connection
            by_unix = unix_socket.connect(greeted, connection.peer)
            if by_unix is None:
                return connection
            nearer = make()
            try:
                await _finish(loop.create_unix_connection(lambda: nearer, sock=by_unix), nearer.abort)
                again = await asyncio.wait_for(nearer._greet(greeting), unix_socket.greeting_s(connect_timeout_s))
                if unix_socket.is_same(greeted, again):
                    return nearer
            # The broker may have no free connection slot, or it may have ended.
            except (OSError, asyncio.TimeoutError, BrokerError):
                if connection.closed:
                    raise
            return connection

        # This is a list with at most one element instead of a variable that may be None, because of the compiler of the
        # compiled modules.
        chosen: list[AsyncConnection] = []
        try:
            chosen.append(await asyncio.wait_for(greet(), connect_timeout_s))
            chosen[0]._end.end_greeting()
        except (ssl.SSLError, ConfigError) as error:
            raise connect_failure(address, error) from None
        # UnicodeError means that the host name is invalid.
        except (OSError, UnicodeError, asyncio.TimeoutError) as error:
            detail = f"{address}: {str(error) or 'no response'} (within {connect_timeout_s} s)"
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, detail) from None
        finally:
            for connection in made:
                if connection not in chosen and connection.is_direct:
                    connection.close()
                elif connection not in chosen:
                    connection.abort()  # The end of TLS would take a round trip, and the loop may be closed before.
        return chosen[0]

    @property
    def peer(self) -> object:
        """Return the socket address of the broker, or None if the connection has no transport yet."""
        return None if self._transport is None else self._transport.get_extra_info("peername")

    async def _greet(self, greeting: Greeting) -> HelloReply:
        hello = greeting.hello()
        reply, _ = await self.request(hello)
        self.hello = cast(HelloReply, reply)
        certificate = None if self._transport is None else self._transport.get_extra_info("peercert")
        self._prove = greeting.prove(hello, self.hello, certificate)
        return self.hello

    async def _prove_token(self, greeting: Greeting) -> None:
        await self._greet(greeting)
        assert self._prove is not None  # a greeting with a token requires the broker's proof
        await self.request(self._prove)

    def _is_within_host(self) -> bool:
        assert self._transport is not None
        return unix_socket.is_within_host(self._transport.get_extra_info("sockname"), self.peer)

    def _take_login_of(self, connection: AsyncConnection) -> None:
        """Log in on this connection at the time at which ``connection`` would have logged in again."""
        if connection._login_timer is not None:
            self._login_timer = self._loop.call_at(connection._login_timer.when(), self._start_login)

    async def _log_in(self) -> None:
        """Log in now, and schedule the next login before the session ends. Raises BrokerError."""
        login = log_in(self._security)
        step = await self._advance(login, None)
        while not isinstance(step, float):
            reply, _ = await self.request(step)
            step = await self._advance(login, reply)
        if step:
            self._login_timer = self._loop.call_later(step, self._start_login)

    async def _advance(self, login: Login, reply: Reply | None) -> SaslAuthenticate | float:
        """Perform one step of a login in another thread, because it may take long."""
        try:
            computing = self._loop.run_in_executor(None, advance, login, reply)
        except RuntimeError:  # Python is exiting and starts no more threads.
            return advance(login, reply)
        return await computing

    def _start_login(self) -> None:
        self._login_task = self._loop.create_task(self._log_in_again())

    async def _log_in_again(self) -> None:
        try:
            await self._log_in()
        except BrokerError as error:
            if not self.closed:
                self._reason = str(error)
                self.abort()

    def _end_login(self) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
        if self._login_task is not None:
            self._login_task.cancel()
        self._login_timer = self._login_task = None

    def request(self, message: Request, body: Sequence[Buffer] = ()) -> asyncio.Future[ReplyAndBody]:
        """Send a request. Return a future whose result is (reply, body).

        The future fails with BrokerError: the error that the broker returned, or NETWORK_EXCEPTION if the connection
        ends before the reply.
        """
        future: asyncio.Future[ReplyAndBody] = self._loop.create_future()

        def on_outcome(answer: ReplyAndBody | BrokerError) -> None:
            if future.done():
                return
            if isinstance(answer, BrokerError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self.ask(message, body, on_outcome)
        return future

    def ask(self, message: Request, body: Sequence[Buffer], on_outcome: OnOutcome) -> None:
        """Send a request. ``on_outcome`` is called once, with (reply, body) or a BrokerError.

        The connection calls ``on_outcome`` as soon as it has read the reply, or when the connection is lost. It never
        calls ``on_outcome`` before this method returns.
        """
        if self.closed:
            self._loop.call_soon(on_outcome, self._lost_error())
            return
        if not self._waiting:
            self._last_bytes_s = time.monotonic()
        self._waiting[self._write(message, body)] = on_outcome

    def ask_prepared(self, request: PreparedRequest, first: bytes, second: bytes, on_outcome: OnOutcome) -> None:
        """Send a prepared request with a body of two parts. The connection must be open.

        ``on_outcome`` is called as in ``ask``.
        """
        assert self._transport is not None
        if not self._waiting:
            self._last_bytes_s = time.monotonic()
        cid, frame = self._end.encode_prepared(request, first, second)
        self._transport.write(frame)
        self._waiting[cid] = on_outcome

    def send_only(self, message: Request, body: Sequence[Buffer] = ()) -> None:
        """Send a request that gets no reply (acks=0). Raises BrokerError if the connection is closed."""
        if self.closed:
            raise self._lost_error()
        self._write(message, body)

    @property
    def silent_s(self) -> float:
        """Return the seconds since bytes last arrived if a request waits for its reply, otherwise 0."""
        return time.monotonic() - self._last_bytes_s if self._waiting else 0.0

    @property
    def writable(self) -> bool:
        """Return whether more bytes may be written.

        The result is False while too many bytes are unsent, because the broker does not read fast enough.
        """
        return self._writable.is_set()

    async def drained(self) -> None:
        """Wait until ``writable`` is true. Return at once if the connection is closed."""
        await self._writable.wait()

    @property
    def unsent_bytes(self) -> int:
        """Return the number of written bytes that are not sent yet. They are sent only while the event loop runs."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    # --- for a thread that reads while the event loop does not run --------------------------------------------------

    def wait_readable(self, timeout_s: float, awake_s: float = 0.0) -> bool:
        """Wait until bytes can be read or the connection has ended, while the event loop does not run.

        Return False if neither happens within ``timeout_s``. For the first ``awake_s`` seconds the thread polls
        repeatedly and does not sleep. Call this only if ``is_direct`` is set.
        """
        if self._poll is None:
            poll = select.poll()
            poll.register(self._socket_number, select.POLLIN)
            self._poll = poll  # Assign this last, because an interrupt may come at any time.
        if awake_s > 0:
            awake_s = min(awake_s, timeout_s)
            until = time.monotonic() + awake_s
            while time.monotonic() < until:
                if self._poll.poll(0):
                    return True
            timeout_s -= awake_s
        return bool(self._poll.poll(timeout_s * 1000))

    def read_now(self) -> bool:
        """Read and handle the available bytes while the event loop does not run.

        Return False if no bytes were read. The event loop must then run, so that it detects the cause.
        """
        if not self.is_direct:
            return False
        try:
            count = os.readv(self._socket_number, [self._end.get_buffer()])
        except OSError:
            return False
        if count:
            self.buffer_updated(count)
        return count > 0

    # --- the end ---

    def note_throttle_time(self, reply: Reply) -> int:
        """Record and return the wait in ms that a reply demands because of a quota.

        The caller of ``request`` decides how to wait.
        """
        throttle_time_ms: int = getattr(reply, "throttle_time_ms", 0)
        if throttle_time_ms:
            self.throttled_until_s = self._loop.time() + throttle_time_ms / 1000
        return throttle_time_ms

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()
        self._fail_waiting()

    async def ended(self) -> None:
        """Wait until the socket of a closed connection is closed, at most ``_SHUTDOWN_S`` seconds.

        Call this after ``close``, before the event loop is closed. It waits only for a TLS connection, because both
        sides of TLS exchange messages when it ends.
        """
        if self.is_direct or self._is_lost:
            return
        self._lost_waiter = self._loop.create_future()
        try:
            await asyncio.wait_for(self._lost_waiter, _SHUTDOWN_S)
        except asyncio.TimeoutError:
            self.abort()
            for _ in range(_TURNS_TO_ABORT):
                await asyncio.sleep(0)

    def abort(self) -> None:
        """Close the connection without sending buffered bytes."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        self._fail_waiting()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport)
        self._socket_number = transport.get_extra_info("socket").fileno()
        self.is_direct = transport.get_extra_info("ssl_object") is None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._end.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._last_bytes_s = time.monotonic()
        try:
            received = self._end.decode_single(nbytes)
            several = self._end.buffer_updated(nbytes) if received is None else ()
        except ProtocolError as error:
            self._reason = str(error)
            self.abort()
            return
        if received is not None:
            self._deliver(received)
        for received in several:
            self._deliver(received)

    def _deliver(self, received: ReceivedReply) -> None:
        reply = received.reply
        answer: ReplyAndBody | BrokerError = (reply, received.body)
        if isinstance(reply, ErrorReply):
            self.note_throttle_time(reply)
            answer = error_of_reply(reply)
            if reply.cid == -1:
                self._reason = reply.detail
        self.delivering = True
        on_outcome = self._waiting.pop(reply.cid, None)
        if on_outcome is not None:
            try:
                on_outcome(answer)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and not self._loop.is_running():
                    raise  # The interrupt is meant for this thread, which reads while the event loop does not run.
                # The error is in the caller's function and must not end the connection. The event loop reports it
                # later.
                self._loop.call_soon(_raise, error)
        self.delivering = False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        was_closed, self.closed = self.closed, True
        self._is_lost = True
        if self._lost_waiter is not None and not self._lost_waiter.done():
            self._lost_waiter.set_result(None)
        if exc is not None:
            self._reason = str(exc)
            if isinstance(exc, ssl.SSLError):
                self._tls_error = exc
            # On a Unix socket the first write after the peer has closed fails, although the peer's last replies can
            # still be read. If a caller did not get the reply to a request that was carried out, it would send the
            # request again.
            while not was_closed and self.read_now():
                pass
        self._writable.set()
        self._fail_waiting()
        if self.on_lost is not None:
            self.on_lost()

    def _write(self, message: Request, body: Sequence[Buffer]) -> int:
        assert self._transport is not None
        cid, buffers = self._end.encode(message, body)
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)
        return cid

    def _fail_waiting(self) -> None:
        self._end_login()
        waiting, self._waiting = self._waiting, {}
        for on_outcome in waiting.values():
            # The caller of ``close`` may be in the middle of a change, so the callbacks run later.
            self._loop.call_soon(on_outcome, self._lost_error())

    def _lost_error(self) -> BrokerError:
        if self._tls_error is not None:
            return connect_failure(self.address, self._tls_error)
        return BrokerError(ErrorCode.NETWORK_EXCEPTION, f"connection to {self.address}: {self._reason}")


async def _finish(connecting: Coroutine[Any, Any, Any], abort: Callable[[], None]) -> None:
    """Wait for ``connecting``, which creates a transport on a socket.

    If this wait is cancelled, the transport is still created, and then ``abort`` is called.

    uvloop takes over the socket only at the end of ``connecting``. If the transport is closed before, both the
    transport and the socket object close the same descriptor. The second close may then close another file that got
    this number.
    """
    made = asyncio.ensure_future(connecting)

    def give_up(ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            abort()

    try:
        await asyncio.shield(made)
    except asyncio.CancelledError:
        made.add_done_callback(give_up)
        raise


def _raise(error: BaseException) -> None:
    raise error
