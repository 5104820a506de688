"""The logins of one connection, and the session that they give.

A listener may require a login. It serves a connection only after the login. The client must log in again before its
session ends. The reply to a failed login comes after a delay, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net.authentication import ListenerSecurity, LoginDelays, LoginPeer
from sparklog.net.unix_tokens import UnixSession
from sparklog.protocol.login import ServerLogin

#: The errors of a failed login.
LOGIN_ERRORS = frozenset({ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.UNSUPPORTED_SASL_MECHANISM})


class SessionPeer(LoginPeer, Protocol):
    """The part of a connection that ``LoginSession`` uses: who has logged in."""

    #: The delegation token of the last complete login, or an empty string.
    token_id: str

    def session_expired(self) -> None:
        """Serve no further request before the next login."""


class LoginSession:
    """The logins of one connection by the rules of its listener, and the session of the last complete login.

    It sets ``principal`` and ``token_id`` of the connection. Not thread-safe: use it only on the server's event loop,
    until ``end``.
    """

    def __init__(self, connection: SessionPeer, security: ListenerSecurity, delays: LoginDelays) -> None:
        self._connection = connection
        self._delays = delays
        self._security = security
        #: The state of the logins; None if the listener requires none, and after the end of the connection.
        self.login = self._new_login()
        #: The monotonic time of the end of the session, or None.
        self.expires_s: float | None = None
        #: The timer of the end of the session or of the reply to a failed login, or None.
        self._timer: asyncio.TimerHandle | None = None

    def _new_login(self) -> ServerLogin | None:
        authentication = self._security.authentication
        if authentication is None:
            return None
        return ServerLogin(
            authentication.mechanisms,
            lambda mechanism: authentication.begin(mechanism, self._connection),
            authentication.session_lifetime_ms,
        )

    def known(self) -> Iterator[tuple[Principal, str]]:
        """Return the principals and tokens of the logins that are complete, even if they are not in effect yet."""
        yield self._connection.principal, self._connection.token_id
        if self.login is not None and self.login.principal is not None:
            yield self.login.principal, self.login.token_id

    def logged_in(self, session_lifetime_ms: int) -> None:
        """Begin the session of a complete login. A lifetime of 0 means no limit."""
        login, authentication = self.login, self._security.authentication
        assert login is not None and login.principal is not None and authentication is not None
        self._connection.principal, self._connection.token_id = login.principal, login.token_id
        self._expire_at(time.monotonic() + session_lifetime_ms / 1000 if session_lifetime_ms else None)
        authentication.succeeded(self._connection, login.mechanism)

    def continue_with(self, session: UnixSession) -> None:
        """Continue the session of the peer's TCP connection, which the peer has proved by its token."""
        self._connection.principal, self._connection.token_id = session.principal, session.token_id
        self._security = session.security
        login = self.login = self._new_login()
        if login is not None:
            login.principal, login.token_id = session.principal, session.token_id
        self._expire_at(session.expires_s)

    def fail(self, error: BrokerError, reply: Callable[[], None]) -> None:
        """Report a failed login, and call ``reply`` after the delay of its address."""
        login, authentication = self.login, self._security.authentication
        mechanism = login.mechanism if login is not None else ""
        self._cancel_timer()
        delay_s = self._delays.failed(self._connection.peer_host, time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, reply)
        if authentication is not None:
            authentication.failed(self._connection, mechanism, error)

    def end(self, *, report: bool) -> None:
        """End the session, because the connection has ended.

        With ``report``, report a login that the peer has not completed. Otherwise a peer could avoid the report of a
        failed login.
        """
        login, authentication = self.login, self._security.authentication
        if report and login is not None and authentication is not None and login.in_progress:
            self._delays.failed(self._connection.peer_host, time.monotonic())
            detail = "the connection ended before the login was complete"
            error = BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
            authentication.failed(self._connection, login.mechanism, error)
        self._cancel_timer()
        # The connection and its session refer to each other. Without this, the receive buffer would stay until the next
        # garbage collection.
        self.login = None
        del self._connection

    def _expire_at(self, expires_s: float | None) -> None:
        self._cancel_timer()
        self.expires_s = expires_s
        if expires_s is not None:
            delay_s = max(0.0, expires_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._connection.session_expired)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
