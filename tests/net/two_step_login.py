"""A SASL mechanism for tests: the client sends a user name, the server replies "password?", the client sends it."""

from __future__ import annotations

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net.authentication import LoginPeer
from sparklog.protocol.sasl import SaslServer, ServerStep

MECHANISM = "TWO-STEPS"


class TwoStepServer:
    mechanism = MECHANISM

    def __init__(self, passwords: dict[bytes, bytes]) -> None:
        self._passwords = passwords
        self._user: bytes | None = None
        self.username = ""

    def step(self, data: bytes) -> ServerStep:
        if self._user is None:
            self._user, self.username = data, data.decode()
            return ServerStep(b"password?")
        if self._passwords.get(self._user) != data:
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, "wrong user or password")
        return ServerStep(b"welcome", Principal("User", self._user.decode()))


class TwoStepLogins:
    """The ``Authentication`` of a listener, with the users "anna" and "bert"."""

    mechanisms = (MECHANISM,)

    def __init__(self, lifetime_ms: int = 0) -> None:
        self.lifetime_ms = lifetime_ms
        self.events: list[str] = []

    def has_events(self, count: int) -> bool:
        return len(self.events) == count

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        if mechanism != MECHANISM:
            raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"{mechanism} found, {MECHANISM} expected")
        return TwoStepServer({b"anna": b"a-secret", b"bert": b"b-secret"})

    def session_lifetime_ms(self, step: ServerStep) -> int:
        return self.lifetime_ms

    def succeeded(self, connection: LoginPeer, mechanism: str) -> None:
        self.events.append(f"{connection.principal} by {mechanism} from {connection.peer_host}")

    def failed(self, connection: LoginPeer, mechanism: str, error: BrokerError) -> None:
        self.events.append(f"{error.code.name} by {mechanism} from {connection.peer_host}")
