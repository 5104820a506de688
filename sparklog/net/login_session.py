"""The logins of one connection, and the session that they give.

A listener may require a login. It serves a connection only after the login. The client must log in again before its
session ends.

After a failed login the server waits, sends the error, and closes the connection. After failed logins from an address,
the reply to a complete login from this address waits as well. So a fast reply does not show that a password was right.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net.authentication import ListenerSecurity, LoginDelays, LoginPeer
from sparklog.net.unix_tokens import UnixSession
from sparklog.protocol.login import ServerLogin
from sparklog.security.principals import ANONYMOUS

#: The errors of a failed login.
LOGIN_ERRORS = frozenset({ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.UNSUPPORTED_SASL_MECHANISM})
#: The reply to a login whose result the address must not learn yet. The client may try again.
_THROTTLED = BrokerError(
    ErrorCode.THROTTLING_QUOTA_EXCEEDED, "too many logins of this address have failed: this one was not checked"
)


class SessionPeer(LoginPeer, Protocol):
    """The part of a connection that ``LoginSession`` uses: its address, its principal and the end of its session."""

    #: The delegation token of the last complete login, or an empty string.
    token_id: str

    def session_expired(self) -> None:
        """Record that the login session has expired: serve no requests until the client logs in again."""


class LoginSession:
    """The logins of one connection by the rules of its listener, and the session of the last complete login.

    The session sets ``principal`` and ``token_id`` of the connection. Do not use it after ``end``. Not thread-safe: use
    it only on the server's event loop.
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
        #: Whether the reply to the complete login has already waited for the delay of its address.
        self._has_waited = False

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
        """Yield the principal and the token id of each complete login, also of a login whose reply still waits."""
        yield self._connection.principal, self._connection.token_id
        if self.login is not None and self.login.principal is not None:
            yield self.login.principal, self.login.token_id

    def waits(self, pause: Callable[[], None], resume: Callable[[], None]) -> bool:
        """Return whether the reply to a complete login must wait.

        The first call that returns True starts the wait and calls ``pause``. The session calls ``resume`` after the
        wait.
        """
        if self._has_waited or self._is_known:
            return False
        if self._timer is not None:
            return True
        wait_s = self._delays.wait_s(self._connection.peer_host, time.monotonic(), self._claimed)
        if wait_s in {0.0, math.inf}:
            return False

        def waited() -> None:
            self._timer, self._has_waited = None, True
            resume()

        pause()
        self._timer = asyncio.get_running_loop().call_later(wait_s, waited)
        return True

    @property
    def is_throttled(self) -> bool:
        """Return whether a complete login must be refused, because too many logins from the same address failed."""
        if self._has_waited or self._is_known:
            return False
        return self._delays.wait_s(self._connection.peer_host, time.monotonic(), self._claimed) == math.inf

    @property
    def _is_known(self) -> bool:
        """Return whether the connection has logged in before, so that the present login is a further one."""
        return self._connection.principal != ANONYMOUS

    @property
    def _claimed(self) -> str:
        """Return the name that the client claims in its last login."""
        return self.login.claimed if self.login is not None else ""

    def logged_in(self, session_lifetime_ms: int) -> None:
        """Begin the session of a complete login. A lifetime of 0 means no limit."""
        login, authentication = self.login, self._security.authentication
        assert login is not None and login.principal is not None and authentication is not None
        self._delays.succeeded(self._connection.peer_host, time.monotonic(), login.claimed)
        self._has_waited = False
        self._connection.principal, self._connection.token_id = login.principal, login.token_id
        self._expire_at(time.monotonic() + session_lifetime_ms / 1000 if session_lifetime_ms else None)
        authentication.succeeded(self._connection, login.mechanism)

    def continue_with(self, session: UnixSession) -> None:
        """Continue the session of the peer's TCP connection. A token has proved that the peer owns the session."""
        self._connection.principal, self._connection.token_id = session.principal, session.token_id
        self._security = session.security
        login = self.login = self._new_login()
        if login is not None:
            login.principal, login.token_id = session.principal, session.token_id
        self._expire_at(session.expires_s)

    def fail(self, error: BrokerError, reply: Callable[[BrokerError], None]) -> None:
        """Report a failed login. Call ``reply`` with ``error`` after the delay that ``LoginDelays`` returns.

        If too many logins from the peer's address have failed, call ``reply`` with a general error instead, which does
        not say whether the password was right.
        """
        delay_s = self._delays.failed(self._connection.peer_host, time.monotonic(), self._claimed)
        if delay_s == math.inf:
            self.refuse(reply)
        else:
            self._report(error)
            self._reply_later(delay_s, error, reply)

    def refuse(self, reply: Callable[[BrokerError], None]) -> None:
        """Refuse a login without revealing its result: report it, and call ``reply`` with a general error."""
        self._report(_THROTTLED)
        self._reply_later(0.0, _THROTTLED, reply)

    def _reply_later(self, delay_s: float, error: BrokerError, reply: Callable[[BrokerError], None]) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, reply, error)

    def _report(self, error: BrokerError) -> None:
        if self._security.authentication is not None:
            mechanism = self.login.mechanism if self.login is not None else ""
            self._security.authentication.failed(self._connection, mechanism, error)

    def end(self, *, report: bool) -> None:
        """End the session, because the connection has ended.

        With ``report``, report a login that the peer has not completed as failed. Without this report, a peer could
        hide a failed login by closing the connection early.
        """
        if report and self.login is not None and self.login.in_progress:
            self._delays.failed(self._connection.peer_host, time.monotonic(), self._claimed)
            detail = "the connection ended before the login was complete"
            self._report(BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail))
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
