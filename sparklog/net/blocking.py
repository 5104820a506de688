"""A client connection on a blocking socket for Spark workers and the command line, without an event loop or threads."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from sparklog.errors import BrokerError, ConfigError, ErrorCode, ProtocolError
from sparklog.model import host_and_port
from sparklog.net import unix_socket
from sparklog.net.client_login import advance, log_in, must_log_in
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials, Greeting
from sparklog.net.tls import client_context, connect_failure
from sparklog.protocol.connection import (
    DEFAULT_MAX_FRAME_BYTES,
    MAX_GREETING_REPLY_BYTES,
    ClientEnd,
    raise_for_error,
)
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import HelloReply, Prove, Reply, Request, RequestUnixSocket, UnixSocketReply
from sparklog.protocol.received import ReceivedReply
from sparklog.security.listeners import SecurityProtocol

_IOV_MAX = 512
#: The size up to which the buffers of a frame are joined before they are encrypted.
_JOINED_BYTES = 64 * 1024
_PLAINTEXT = ClientSecurity()


class BlockingConnection:
    """A client's connection to a broker on a blocking socket.

    Not thread-safe: use it in one thread. An error NETWORK_EXCEPTION closes the connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        cluster_id: str = "",
        connect_timeout_s: float = 5.0,
        timeout_s: float = 30.0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        credentials: Credentials | None = None,
        security: ClientSecurity = _PLAINTEXT,
    ) -> None:
        """Connect, log in and agree on a version. ``timeout_s`` limits every later wait for bytes.

        With ``credentials``, prove that this process is a broker or the controller, and require the same of the broker.
        The connection logs in again with the first request after most of its session has passed.

        Raises:
          BrokerError: NETWORK_EXCEPTION, UNSUPPORTED_VERSION or INVALID_REQUEST (another cluster, or no TLS);
            CLUSTER_AUTHORIZATION_FAILED if credentials are given and the broker does not know their secret, or if the
            broker's certificate is not accepted; SASL_AUTHENTICATION_FAILED or ILLEGAL_SASL_STATE if the login failed.
        """
        self._security = security
        #: The monotonic time after which the next request logs in again; 0 for never.
        self._login_at_s = 0.0
        self._prove: Prove | None = None
        self.address = host_and_port(host, port)
        self._end = ClientEnd(max_frame_bytes, MAX_GREETING_REPLY_BYTES)
        self._received: deque[ReceivedReply] = deque()
        self.closed = False
        #: The monotonic time before which the broker handles no request, because a quota is exceeded; 0 for none.
        self._throttled_until_s = 0.0
        #: True if the connection was closed because the broker did not send its reply in time.
        self.timed_out = False
        self._timeout_s = timeout_s
        try:
            context = client_context(security)
            self._socket = socket.create_connection((host, port), timeout=connect_timeout_s)
            if context is not None:
                self._socket = _with_tls(self._socket, context, host)
        # UnicodeError means that the host name is invalid.
        except (OSError, UnicodeError, ConfigError) as error:
            self.closed = True
            raise connect_failure(self.address, error) from None
        greeting = Greeting(client_id, cluster_id, credentials=credentials, proof_required=credentials is not None)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.hello = self._greet(greeting)
            if security.protocol is SecurityProtocol.PLAINTEXT:
                by_unix = unix_socket.connect(self.hello, self._socket.getpeername())
                if by_unix is not None:
                    by_unix.settimeout(unix_socket.greeting_s(connect_timeout_s))
                    self._change_to(by_unix, greeting, ClientEnd(max_frame_bytes, MAX_GREETING_REPLY_BYTES))
            if must_log_in(self.hello, security, has_proof=self._prove is not None):
                self._log_in()
            self._prove_itself()
            if security.protocol is not SecurityProtocol.PLAINTEXT:
                self._change_with_token(client_id, cluster_id, connect_timeout_s, max_frame_bytes)
            self._end.end_greeting()
            self._socket.settimeout(timeout_s)
        except OSError as error:  # For a connection that was reset meanwhile, not even the peer's address is available.
            raise self._fail(error) from None
        except BaseException:
            self.close()
            raise

    def _greet(self, greeting: Greeting) -> HelloReply:
        hello = greeting.hello()
        reply, _ = self.request(hello)
        assert isinstance(reply, HelloReply)
        certificate = self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None
        self._prove = greeting.prove(hello, reply, certificate)
        return reply

    def _prove_itself(self) -> None:
        if self._prove is not None:
            self.request(self._prove)

    def _change_with_token(
        self, client_id: str, cluster_id: str, connect_timeout_s: float, max_frame_bytes: int
    ) -> None:
        """Continue on the broker's Unix socket with a token, if the broker is on this host and gives one."""
        if not unix_socket.is_within_host(self._socket.getsockname(), self._socket.getpeername()):
            return
        cid = self._send(RequestUnixSocket(0))
        given = self._next_of(cid).reply
        if not isinstance(given, UnixSocketReply):
            return  # The broker is an older one, or it refuses.
        by_unix = unix_socket.connect(given, self._socket.getpeername())
        if by_unix is not None:
            by_unix.settimeout(unix_socket.greeting_s(connect_timeout_s))
            token = Greeting.with_token(client_id, cluster_id, given.secret)
            self._change_to(by_unix, token, ClientEnd(max_frame_bytes, MAX_GREETING_REPLY_BYTES))

    def _change_to(self, by_unix: socket.socket, greeting: Greeting, end: ClientEnd) -> None:
        """Continue on the Unix socket, unless the broker refuses that (for example, no connection slot is free)."""
        before, prove = (self._socket, self._end), self._prove
        self._socket, self._end = by_unix, end
        try:
            again = self._greet(greeting)
            if greeting.has_token:
                self._prove_itself()
        except BrokerError:
            changed = False
        except BaseException:
            before[0].close()
            raise
        else:
            changed = greeting.has_token or unix_socket.is_same(self.hello, again)
        if changed:
            self.hello = again
            before[0].close()
        else:
            by_unix.close()
            (self._socket, self._end), self._prove = before, prove
            self._received.clear()
            self.closed = False

    def request(
        self, message: Request, body: Sequence[Buffer] = (), *, at_most_s: float | None = None
    ) -> tuple[Reply, memoryview]:
        """Send one request and wait for its reply. No other request may be in flight.

        ``at_most_s`` limits each wait for bytes of this reply, in addition to the connection's own limit. If the
        previous reply demands a wait because of a quota, wait before sending, for at most the shorter of both limits.

        Raises:
          BrokerError: the broker's error, or NETWORK_EXCEPTION.
        """
        if self._throttled_until_s:
            self._wait_for_quota(self._timeout_s if at_most_s is None else min(at_most_s, self._timeout_s))
        if at_most_s is None or at_most_s >= self._timeout_s or self.closed:
            return self._request(message, body)
        self._socket.settimeout(at_most_s)
        try:
            return self._request(message, body)
        finally:
            if not self.closed:
                self._socket.settimeout(self._timeout_s)

    def _request(self, message: Request, body: Sequence[Buffer]) -> tuple[Reply, memoryview]:
        cid = self.send(message, body)
        while True:
            received = self._next()
            if received.reply.cid in {cid, -1}:
                self._note_throttle_time(received.reply)
                raise_for_error(received.reply)
                return received.reply, received.body

    def _note_throttle_time(self, reply: Reply) -> None:
        """Record the wait that a reply demands because of a quota. The next ``request`` waits; ``send`` does not."""
        if throttle_time_ms := getattr(reply, "throttle_time_ms", 0):
            self._throttled_until_s = time.monotonic() + throttle_time_ms / 1000

    def _wait_for_quota(self, at_most_s: float) -> None:
        """Wait until the broker handles the next request. Otherwise the delay would count towards its timeout."""
        wait_s, self._throttled_until_s = self._throttled_until_s - time.monotonic(), 0.0
        if wait_s > 0 and not self.closed:
            time.sleep(min(wait_s, at_most_s))

    def send(self, message: Request, body: Sequence[Buffer] = ()) -> int:
        """Send a request without waiting for its reply. Return the correlation id of the request and its reply.

        ``receive`` returns the reply.
        """
        if self._login_at_s and time.monotonic() >= self._login_at_s and not self.closed:
            self._log_in()
        return self._send(message, body)

    def _send(self, message: Request, body: Sequence[Buffer] = ()) -> int:
        if self.closed:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{self.address}: connection is closed")
        cid, buffers = self._end.encode(message, body)
        try:
            self._send_all(buffers)
        except OSError as error:
            raise self._fail(error) from None
        return cid

    def receive(self) -> tuple[Reply, memoryview]:
        """Wait for the next reply in the order of arrival, and return it with its body.

        Raises:
          BrokerError: the broker's error, or NETWORK_EXCEPTION.
        """
        received = self._next()
        self._note_throttle_time(received.reply)
        raise_for_error(received.reply)
        return received.reply, received.body

    def _log_in(self) -> None:
        """Log in. Replies to earlier requests that arrive meanwhile are kept for ``receive``. Raises BrokerError."""
        self._login_at_s = 0.0
        login = log_in(self._security)
        try:
            step = advance(login, None)
            while not isinstance(step, float):
                cid = self._send(step)
                received = self._next_of(cid)
                raise_for_error(received.reply)
                step = advance(login, received.reply)
        except BrokerError:
            self.close()
            raise
        if step:
            self._login_at_s = time.monotonic() + step

    def _next_of(self, cid: int) -> ReceivedReply:
        others: list[ReceivedReply] = []
        while True:
            received = self._next()
            if received.reply.cid in {cid, -1}:
                self._received.extendleft(reversed(others))
                return received
            others.append(received)

    def fileno(self) -> int:
        """Return the file descriptor for ``select``. It becomes readable when a reply starts to arrive.

        The descriptor does not show bytes that the connection has already read; see ``has_received``.
        """
        return self._socket.fileno()

    @property
    def has_received(self) -> bool:
        """Return whether the connection has already read bytes of a reply that ``receive`` has not returned yet."""
        return bool(self._received) or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.close()

    def __enter__(self) -> BlockingConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> ReceivedReply:
        try:
            while not self._received:
                count = self._socket.recv_into(self._end.get_buffer())
                if not count:
                    raise ConnectionResetError("closed by the broker")
                self._received.extend(self._end.buffer_updated(count))
        except (OSError, ProtocolError) as error:
            raise self._fail(error) from None
        return self._received.popleft()

    def _send_all(self, buffers: Sequence[Buffer]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            if sum(memoryview(buffer).nbytes for buffer in buffers) <= _JOINED_BYTES:
                buffers = [b"".join(buffers)]
            for buffer in buffers:
                self._socket.sendall(buffer)
            return
        views = deque(memoryview(buffer).cast("B") for buffer in buffers)
        while views:
            sent = self._socket.sendmsg([views[i] for i in range(min(len(views), _IOV_MAX))])
            while views and sent >= len(views[0]):
                sent -= len(views.popleft())
            if sent:
                views[0] = views[0][sent:]

    def _fail(self, error: Exception) -> BrokerError:
        self.close()
        if isinstance(error, ssl.SSLError):
            return connect_failure(self.address, error)
        self.timed_out = isinstance(error, TimeoutError)
        reason = "no response in time" if self.timed_out else str(error)
        return BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{self.address}: {reason}")


def _with_tls(plain: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
