"""Logins with a token of an identity provider: OAUTHBEARER.

This module is pure: ``broker.security.jwt_validator`` checks the tokens. The client sends the token itself, so the
listener must have TLS. If the server refuses the token, it sends a short error, the client acknowledges the error, and
the login fails. Source: RFC 7628; KIP-255 (Kafka's use).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import Principal
from sparklog.protocol.sasl import MAX_SASL_BYTES, OAUTHBEARER, ServerStep

_SEPARATOR = "\x01"
_KEY = re.compile(r"[A-Za-z]{1,64}\Z")
#: The syntax of a token. Source: RFC 6750, b64token.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*\Z")
_MAX_PAIRS = 32
#: The maximum length of a token. The rest of the message has at most 1024 bytes.
MAX_TOKEN = MAX_SASL_BYTES - 1024
_REFUSAL = b'{"status":"invalid_token"}'
#: The client's reply to a refusal.
_ACKNOWLEDGED = b"\x01"


class ValidToken(NamedTuple):
    """The principal that a valid token is for, and the token's expiry time in milliseconds since the Unix epoch."""

    principal: Principal
    expires_at_ms: int


class OAuthBearerServer:
    """The server's side of one OAUTHBEARER login.

    ``validate`` checks a token, and raises BrokerError if the token is not valid.
    """

    mechanism = OAUTHBEARER

    def __init__(self, validate: Callable[[str], ValidToken]) -> None:
        self._validate = validate
        self._has_begun = False
        self._refusal: BrokerError | None = None
        #: The user name, which is empty until the token has been checked.
        self.username = ""

    def step(self, data: bytes) -> ServerStep:
        """Return the reply to the client's next message. Raises the same errors as ``SaslServer.step``."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        if self._has_begun:
            raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, "the login has ended")
        self._has_begun = True
        authorization, token = _parsed(data)
        try:
            valid = self._validate(token)
            if authorization and authorization != valid.principal.name:
                detail = "the authorization id must be that of the token"
                raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
        except BrokerError as error:
            self._refusal = error
            return ServerStep(_REFUSAL)
        return ServerStep(b"", valid.principal, valid.expires_at_ms)


class OAuthBearerClient:
    """The client's side of one OAUTHBEARER login.

    The mechanism does not authenticate the server, so the client relies on TLS.
    """

    mechanism = OAUTHBEARER

    def __init__(self, token: str) -> None:
        """Prepare a login with the token. Raises ConfigError. The error does not quote the token."""
        if not _TOKEN.match(token) or len(token) > MAX_TOKEN:
            raise ConfigError(f"a token has letters, digits and -._~+/= only, and at most {MAX_TOKEN} of them")
        self._token = token
        self._refusal: BrokerError | None = None
        self.complete = False

    def __repr__(self) -> str:
        return f"OAuthBearerClient({self.mechanism})"

    def first(self) -> bytes:
        """Return the first message of the login, which contains the token."""
        return f"n,,{_SEPARATOR}auth=Bearer {self._token}{_SEPARATOR}{_SEPARATOR}".encode()

    def step(self, data: bytes) -> bytes:
        """Return the reply to the server's message. Raises the same errors as ``SaslClient.step``."""
        if self.complete:
            raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, "the login has ended")
        if self._refusal is not None:
            raise self._refusal
        if not data:
            self.complete = True
            return b""
        self._refusal = BrokerError(
            ErrorCode.SASL_AUTHENTICATION_FAILED, f"the server refused the token: {_status(data)!r}"
        )
        return _ACKNOWLEDGED


def _parsed(data: bytes) -> tuple[str, str]:
    """Return the authorization id, which may be empty, and the token of a client's first message."""
    if len(data) > MAX_SASL_BYTES:
        raise _malformed(f"{len(data)} bytes found, at most {MAX_SASL_BYTES} expected")
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        raise _malformed("the bytes are not UTF-8") from None
    header, *pairs = text.split(_SEPARATOR)
    flag, *rest = header.split(",")
    if flag not in {"n", "y"} or len(rest) != 2 or rest[1] or (rest[0] and not rest[0].startswith("a=")):
        raise _malformed("it does not begin with n,,")
    if len(pairs) > _MAX_PAIRS or len(pairs) < 3 or pairs[-2:] != ["", ""]:
        raise _malformed("the pairs of keys and values do not end correctly")
    found: dict[str, str] = {}
    for pair in pairs[:-2]:
        key, equals, value = pair.partition("=")
        if not equals or not _KEY.match(key) or key in found:
            raise _malformed("a pair of key and value is not correct")
        found[key] = value
    scheme, _, token = found.get("auth", "").partition(" ")
    token = token.strip(" ")
    if scheme.lower() != "bearer" or not _TOKEN.match(token):
        raise _malformed("there is no bearer token")
    return rest[0][2:].replace("=2C", ",").replace("=3D", "="), token


def _status(data: bytes) -> str:
    """Return the status in the server's refusal, cut to a maximum length."""
    try:
        found = json.loads(data[:MAX_SASL_BYTES])
    except (ValueError, RecursionError):
        return "unknown"
    return str(found.get("status", "unknown"))[:50] if isinstance(found, dict) else "unknown"


def _malformed(detail: str) -> BrokerError:
    return BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"the message of the login is malformed: {detail}")
