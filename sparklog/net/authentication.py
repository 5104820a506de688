"""The security rules of one listener: its name, its TLS settings and its logins.

A listener without ``authentication`` and TLS is Kafka's PLAINTEXT. After a failed login the server delays the results
of all logins of the same address, and the delay grows with the failures. That makes guessing passwords slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sparklog.errors import BrokerError
from sparklog.model import DEFAULT_LISTENER, Principal
from sparklog.net.tls import ServerTls
from sparklog.net.unknown_connections import origin_of
from sparklog.protocol.sasl import SaslServer, ServerStep
from sparklog.security.principals import ANONYMOUS

#: The mechanism that login reports use for a login by TLS certificate.
CERTIFICATE = "SSL"


class LoginPeer(Protocol):
    """The part of a client's connection that ``Authentication`` and ``LoginReports`` use."""

    #: The address of the client, without the port.
    peer_host: str
    #: The name of the listener.
    listener: str
    #: The principal of the last complete login; ANONYMOUS before.
    principal: Principal

    @property
    def client_id(self) -> str: ...


class LoginReports(Protocol):
    """A receiver of the result of each login, such as the audit log."""

    def succeeded(self, connection: LoginPeer, mechanism: str) -> None:
        """Report that a login has succeeded. ``connection.principal`` is the new principal."""

    def failed(self, connection: LoginPeer, mechanism: str, error: BrokerError) -> None:
        """Report that a login has failed."""


class Authentication(LoginReports, Protocol):
    """The part of the broker that a listener uses to start logins and to report their results."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Return the enabled SASL mechanisms, at least one. The preferred mechanism is the first."""

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        """Start a login, and return the server's side of it. Raises BrokerError UNSUPPORTED_SASL_MECHANISM."""

    def session_lifetime_ms(self, step: ServerStep) -> int:
        """Return the time in milliseconds within which the client must log in again; 0 means no limit.

        ``step`` is the step that completed the login. The result is negative if the credential has expired.
        """


@dataclass(eq=False)
class CertificatePeer:
    """A peer whose TLS handshake failed because of its certificate."""

    peer_host: str
    listener: str
    principal: Principal = ANONYMOUS
    client_id: str = ""


class ListenerSecurity(NamedTuple):
    """The security rules for the connections of one listener: whether they need TLS and a login."""

    name: str = DEFAULT_LISTENER
    #: The logins, or None if the listener requires none.
    authentication: Authentication | None = None
    #: The TLS settings, or None for plain bytes.
    tls: ServerTls | None = None
    #: The receiver of the results of logins by certificate (mechanism ``CERTIFICATE``), or None.
    reports: LoginReports | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether connections need neither a login nor TLS."""
        return self.authentication is None and self.tls is None


class LoginDelays:
    """A tracker of failed logins by address. It decides how long the broker delays the result of each login.

    Each failed login causes a delay. During this delay, the broker sends no other result of a login to the same
    address, whether the password is right or wrong. So an address can test only one password after the other, even if
    it has many connections or ends them early. A result for another address does not wait. The result for a user that
    has recently logged in from the same address does not wait either, until a login with the user's name fails. Not
    thread-safe: use it only on the server's event loop.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.1,
        longest_s: float = 3.0,
        memory_s: float = 60.0,
        longest_wait_s: float = 5.0,
        max_addresses: int = 10_000,
        user_memory_s: float = 3600.0,
    ) -> None:
        """Create the tracker. The first failed login of an address causes a delay of ``first_s`` seconds.

        Each further failed login within ``memory_s`` doubles the delay, up to ``longest_s``. A login that would wait
        for longer than ``longest_wait_s`` is refused without its result. The tracker stores at most ``max_addresses``
        addresses with failures, and the same number of users with their addresses. A new entry replaces the entry with
        the oldest failure or login.
        """
        self._first_s, self._longest_s, self._memory_s = first_s, longest_s, memory_s
        self._longest_wait_s = longest_wait_s
        self._user_memory_s = user_memory_s
        self._max_addresses = max_addresses
        #: The number of failures, the time of the last one, and the time from which the next result may be sent, by
        #: origin; the oldest last failure first.
        self._failures: dict[str, tuple[int, float, float]] = {}
        #: The time of the last login of users, by origin and name; the oldest first.
        self._users: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._failures) + len(self._users)

    def failed(self, address: str, now_s: float, name: str = "") -> float:
        """Count a failed login with this name. Return the time in seconds by which to delay the reply.

        If the delay would be too long, do not count the login, and return infinity. The caller must then refuse the
        login at once, with an error that does not say whether the password was right.
        """
        origin = origin_of(address)
        self._users.pop((origin, name), None)
        count, last_s, free_s = self._failures.get(origin, (0, now_s, now_s))
        if free_s - now_s > self._longest_wait_s:
            return math.inf
        if now_s - last_s > self._memory_s:
            count = 0
        free_s = max(now_s, free_s) + min(self._longest_s, self._first_s * 2.0 ** min(count, 30))
        self._failures.pop(origin, None)
        self._failures[origin] = count + 1, now_s, free_s
        if len(self._failures) > self._max_addresses:
            del self._failures[next(iter(self._failures))]
        return free_s - now_s

    def wait_s(self, address: str, now_s: float, name: str = "") -> float:
        """Return the time in seconds by which to delay the reply to a login with the right password.

        If the delay would be too long, return infinity. The caller must then refuse the login at once, with an error
        that does not say whether the password was right.
        """
        origin = origin_of(address)
        if now_s - self._users.get((origin, name), -math.inf) <= self._user_memory_s:
            return 0.0
        wait_s = self._failures[origin][2] - now_s if origin in self._failures else 0.0
        return math.inf if wait_s > self._longest_wait_s else max(0.0, wait_s)

    def succeeded(self, address: str, now_s: float, name: str) -> None:
        """Record that a user has logged in from this address."""
        key = origin_of(address), name
        self._users.pop(key, None)
        self._users[key] = now_s
        if len(self._users) > self._max_addresses:
            del self._users[next(iter(self._users))]
