"""The state machine of the broker's side of SASL logins on one connection. It is the same for all mechanisms.

This module is pure.

On a listener with SASL the broker handles only Hello and Prove before the login. The client may log in again later with
the same principal, which extends its session (KIP-368). ``ServerEnd`` owns this state machine.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.protocol.sasl import SaslServer, ServerStep
from sparklog.protocol.security_messages import SaslAuthenticate, SaslAuthenticateReply

#: The maximum number of messages of one login. SCRAM has two.
_MAX_STEPS = 8


class ServerLogin:
    """The state machine that handles the logins on one server connection: the first login and later logins.

    ``begin`` starts a login with a mechanism, or raises BrokerError UNSUPPORTED_SASL_MECHANISM.
    ``session_lifetime_ms`` returns the lifetime of the session after the last step of a login; 0 means no limit.
    """

    def __init__(
        self,
        mechanisms: tuple[str, ...],
        begin: Callable[[str], SaslServer],
        session_lifetime_ms: Callable[[ServerStep], int],
    ) -> None:
        self.mechanisms = mechanisms
        #: The principal of the last complete login, or None before the first one.
        self.principal: Principal | None = None
        #: The delegation token of the last complete login, or an empty string.
        self.token_id = ""
        #: The mechanism of the last login that the client started.
        self.mechanism = ""
        #: The name that the client has claimed in its last login, or an empty string.
        self.claimed = ""
        self._begin = begin
        self._session_lifetime_ms = session_lifetime_ms
        self._exchange: SaslServer | None = None
        self._steps = 0

    @property
    def in_progress(self) -> bool:
        """Return whether the client has started a login that is not complete yet."""
        return self._exchange is not None

    def step(self, request: SaslAuthenticate) -> SaslAuthenticateReply:
        """Return the reply to a client's message.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the login failed; UNSUPPORTED_SASL_MECHANISM or
                ILLEGAL_SASL_STATE, the message is not allowed. The caller must then close the connection.
        """
        exchange = self._exchange
        if exchange is None:
            self.mechanism = request.mechanism[:64]
            self.claimed = ""
            exchange = self._exchange = self._begin(request.mechanism)
            self._steps = 0
        elif request.mechanism != exchange.mechanism:
            detail = f"mechanism {request.mechanism!r} found, a login by {exchange.mechanism} has begun"
            raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, detail)
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"a login has at most {_MAX_STEPS} messages")
        try:
            step = exchange.step(request.data)
        finally:
            self.claimed = exchange.username
        if step.principal is None:
            return SaslAuthenticateReply(request.cid, step.data, False)
        if self.principal not in {None, step.principal}:
            detail = f"principal {step.principal} found, this connection has logged in as {self.principal} before"
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
        lifetime_ms = self._session_lifetime_ms(step)
        if lifetime_ms < 0:
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, "the credential of the login has expired")
        self.principal, self.token_id, self._exchange = step.principal, step.token_id, None
        return SaslAuthenticateReply(request.cid, step.data, True, lifetime_ms)
