"""The logins of clients on one listener. The broker starts them here and reports their results to the audit log.

The server delays the replies to failed logins (``net.authentication``). A login of an unknown user takes the same steps
and the same time as one with a wrong password (``protocol.scram``).
"""

from __future__ import annotations

import base64
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from sparklog.broker.security.tokens import Tokens
from sparklog.broker.security.users import Users
from sparklog.config import BrokerConfig
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.extras import require_jwt
from sparklog.model import USER, Principal
from sparklog.net.authentication import LoginPeer
from sparklog.protocol.oauthbearer import OAuthBearerServer, ValidToken
from sparklog.protocol.sasl import MECHANISMS, OAUTHBEARER, SaslServer, ServerStep
from sparklog.protocol.scram import ScramServer

_NONCE_BYTES = 24
#: A function that checks the token of an OAUTHBEARER login, and raises BrokerError if the token is not valid.
ValidateToken = Callable[[str], ValidToken]


class OnLogin(Protocol):
    """The callback that receives the results of logins, such as ``audit_log.Audit.login``."""

    def __call__(
        self, principal: Principal | str, host: str, mechanism: str, ok: bool, reason: str = "", *, listener: str = ""
    ) -> None: ...


def sasl_mechanisms(text: str) -> tuple[str, ...]:
    """Return the mechanisms in the setting ``sasl.enabled.mechanisms``, in the same order.

    Raises:
        ConfigError: the setting is empty or names an unknown mechanism.
    """
    found = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",") if part.strip()))
    unknown = [name for name in found if name not in MECHANISMS]
    if unknown or not found:
        raise ConfigError(f"sasl.enabled.mechanisms={text!r}: expected a list of {', '.join(MECHANISMS)}")
    return found


def token_validator(config: BrokerConfig) -> ValidateToken | None:
    """Return a function that checks OAUTHBEARER tokens, or None if this mechanism is not enabled.

    Raises:
        ConfigError: a setting of OAUTHBEARER or a package is missing, or the file of keys cannot be used.
    """
    if OAUTHBEARER not in sasl_mechanisms(config.sasl_enabled_mechanisms):
        return None
    require_jwt(f"sasl.enabled.mechanisms={OAUTHBEARER}")
    # Only here, because the package is optional.
    from sparklog.broker.security.jwt_validator import JwtValidator, jwt_rules

    return JwtValidator(jwt_rules(config)).validate


class Logins:
    """The component that starts the logins on one listener and reports their results.

    ``mechanisms`` are the enabled SASL mechanisms, the preferred one first. A client must log in again after
    ``max_reauth_ms``; 0 means never. ``wall_ms`` returns the time in milliseconds since the Unix epoch. OAUTHBEARER
    needs ``validate_token``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        mechanisms: tuple[str, ...],
        users: Users,
        tokens: Tokens,
        *,
        max_reauth_ms: int,
        wall_ms: Callable[[], int],
        on_login: OnLogin,
        validate_token: ValidateToken | None = None,
    ) -> None:
        self._mechanisms = mechanisms
        self._users = users
        self._tokens = tokens
        self._max_reauth_ms = max_reauth_ms
        self._wall_ms = wall_ms
        self._on_login = on_login
        self._validate_token = validate_token
        #: The last login that each connection started. The audit log needs the user name of this login.
        self._begun: weakref.WeakKeyDictionary[LoginPeer, ScramServer | OAuthBearerServer] = weakref.WeakKeyDictionary()

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Return the enabled mechanisms, the preferred one first."""
        return self._mechanisms

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        """Return the server's side of a new login.

        Raises:
            BrokerError: UNSUPPORTED_SASL_MECHANISM; BROKER_NOT_AVAILABLE, the broker has not read the users yet.
        """
        if mechanism not in self._mechanisms:
            detail = f"mechanism {mechanism[:64]!r}: this listener has {', '.join(self._mechanisms)}"
            raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, detail)
        server = self._server(mechanism)
        self._begun[connection] = server
        return server

    def _server(self, mechanism: str) -> ScramServer | OAuthBearerServer:
        if mechanism == OAUTHBEARER:
            assert self._validate_token is not None, "the settings were checked at the start"
            return OAuthBearerServer(self._validate_token)
        if not (self._users.follower.is_loaded and self._tokens.follower.is_loaded):
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker has not read the users yet")
        return ScramServer(
            mechanism,
            lambda name: self._users.credential(mechanism, name),
            base64.b64encode(os.urandom(_NONCE_BYTES)).decode(),
            self._users.unknown_users_key,
            tokens=lambda token_id: self._tokens.credential(mechanism, token_id),
            forms=self._users.forms(mechanism),
        )

    def session_lifetime_ms(self, step: ServerStep) -> int:
        """Return the time in milliseconds until the client must log in again.

        0 means that it need not log in again. A negative result means that the credential has expired.
        """
        if step.expires_at_ms is None:
            return self._max_reauth_ms
        left_ms = step.expires_at_ms - self._wall_ms()
        if left_ms <= 0:
            return -1
        return min(left_ms, self._max_reauth_ms) if self._max_reauth_ms else left_ms

    def succeeded(self, connection: LoginPeer, mechanism: str) -> None:
        """Report that the login on this connection has succeeded."""
        self._begun.pop(connection, None)
        self._on_login(connection.principal, connection.peer_host, mechanism, ok=True, listener=connection.listener)

    def failed(self, connection: LoginPeer, mechanism: str, error: BrokerError) -> None:
        """Report that a login has failed, with the name that the client claimed."""
        begun = self._begun.pop(connection, None)
        claimed = Principal(USER, begun.username) if begun is not None and begun.username else ""
        self._on_login(
            claimed, connection.peer_host, mechanism, ok=False, reason=str(error), listener=connection.listener
        )
