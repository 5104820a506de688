"""The security rules of one listener: its name, its TLS, and its logins.

A listener without ``authentication`` and TLS is Kafka's PLAINTEXT. The server delays the replies to failed logins. The
delay grows with the failures of the same address, which makes guessing passwords slow.
"""

from __future__ import annotations

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
    #: TLS, or None for plain bytes.
    tls: ServerTls | None = None
    #: The receiver of the results of logins by certificate (mechanism ``CERTIFICATE``), or None.
    reports: LoginReports | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether connections need neither a login nor TLS."""
        return self.authentication is None and self.tls is None


class LoginDelays:
    """A tracker of failed logins by address, from which the delay of the reply to a failed login follows.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(
        self, *, first_s: float = 0.1, longest_s: float = 3.0, memory_s: float = 60.0, max_addresses: int = 10_000
    ) -> None:
        """Set the delay after the first failure of an address. Each further failure within ``memory_s`` doubles it.

        At most ``max_addresses`` addresses are stored. A further address replaces the one with the oldest failure.
        """
        self._first_s, self._longest_s, self._memory_s = first_s, longest_s, memory_s
        self._max_addresses = max_addresses
        #: The number of failures and the time of the last one, by origin; the oldest last failure first.
        self._failures: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, address: str, now_s: float) -> float:
        """Count a failed login from this address. Return the time in seconds by which to delay the reply."""
        origin = origin_of(address)
        count, last_s = self._failures.pop(origin, (0, now_s))
        if now_s - last_s > self._memory_s:
            count = 0
        self._failures[origin] = count + 1, now_s
        if len(self._failures) > self._max_addresses:
            del self._failures[next(iter(self._failures))]
        return min(self._longest_s, self._first_s * 2.0 ** min(count, 30))
