"""The SASL login of a client: on a new connection, and again before the session ends.

``log_in`` produces the messages of one login and does no I/O. The asynchronous and the blocking connection send them.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Generator

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.messages import HelloReply, Reply, SaslAuthenticate, SaslAuthenticateReply
from sparklog.protocol.oauthbearer import OAuthBearerClient
from sparklog.protocol.sasl import OAUTHBEARER, SaslClient
from sparklog.protocol.scram import SaltedPasswords, ScramClient

#: A generator of the messages of one login. The caller sends it each reply. It returns the seconds until the next
#: login, or 0 if no other login is needed.
Login = Generator[SaslAuthenticate, Reply, float]

_NONCE_BYTES = 24
#: The part of a session's lifetime after which the client logs in again. Source: KIP-368.
_EARLIEST, _LATEST = 0.85, 0.95
#: The minimum time in seconds between two logins on one connection.
_SHORTEST_S = 0.1
_salted = SaltedPasswords()


def must_log_in(reply: HelloReply, security: ClientSecurity, *, has_proof: bool) -> bool:
    """Return whether the client must log in, according to the broker's reply to the hello.

    ``has_proof`` means that this process proves that it is a broker or the controller, and so needs no login.

    Raises:
        BrokerError: ILLEGAL_SASL_STATE, only one of the two sides expects a login; UNSUPPORTED_SASL_MECHANISM, the
            listener does not offer the mechanism in the settings.
    """
    offered = reply.sasl_mechanisms
    if has_proof:
        return False
    if not security.protocol.uses_sasl:
        if offered:
            detail = f"the listener requires a login by {' or '.join(offered)}: set security.protocol to SASL_SSL"
            raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, detail)
        return False
    if not offered:
        detail = f"the listener has no logins, and security.protocol is {security.protocol.value}"
        raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, detail)
    if security.mechanism not in offered:
        detail = f"{security.mechanism} found, the listener offers {', '.join(offered)}"
        raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, detail)
    return True


def log_in(security: ClientSecurity) -> Login:
    """Create a generator for one login: it yields the client's messages, and receives the broker's replies.

    The generator returns the seconds until the client must log in again, or 0 if it need not. Each step may take tens
    of milliseconds of processor time. The first step reads the files to which the settings refer.

    Raises:
        BrokerError: SASL_AUTHENTICATION_FAILED, ILLEGAL_SASL_STATE or INVALID_REQUEST, the login failed.
    """
    try:
        client = _sasl_client(security)
        data = client.first()
    except ConfigError as error:
        raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, str(error)) from None
    while True:
        reply = yield SaslAuthenticate(0, client.mechanism, data)
        if not isinstance(reply, SaslAuthenticateReply):
            detail = f"the broker responded to SaslAuthenticate with {type(reply).__name__}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        if reply.complete and client.complete:
            break
        data = client.step(reply.data)
        if reply.complete:
            if not client.complete:
                raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, "the broker has not proved its identity")
            break
    if reply.session_lifetime_ms <= 0:
        return 0.0
    # A server that gives very short sessions must not make the client log in all the time.
    return max(_SHORTEST_S, random.uniform(_EARLIEST, _LATEST) * reply.session_lifetime_ms / 1000)


def advance(login: Login, reply: Reply | None) -> SaslAuthenticate | float:
    """Continue a login from ``log_in`` with the broker's reply. ``reply`` is None at the start.

    Return the next message to send. If the login is complete, return the seconds until the next login, or 0 for none.

    Raises:
        BrokerError: the login failed.
    """
    try:
        return next(login) if reply is None else login.send(reply)
    except StopIteration as done:
        again_s: float = done.value
        return again_s


def _sasl_client(security: ClientSecurity) -> SaslClient:
    """Return the client side of a new login for the mechanism in the settings. Raises ConfigError."""
    if security.mechanism == OAUTHBEARER:
        return OAuthBearerClient(security.password.reveal())
    return ScramClient(
        security.mechanism,
        security.username,
        security.password.reveal(),
        secrets.token_urlsafe(_NONCE_BYTES),
        token=security.is_token,
        salted=_salted,
    )
