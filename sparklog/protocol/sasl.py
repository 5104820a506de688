"""The interface of SASL mechanisms: the client's side and the server's side of a login.

This module is pure. ``protocol.scram`` and ``protocol.oauthbearer`` implement it. The messages of a login are opaque
bytes here. Source: RFC 4422.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sparklog.model import Principal

SCRAM_SHA_256 = "SCRAM-SHA-256"
SCRAM_SHA_512 = "SCRAM-SHA-512"
OAUTHBEARER = "OAUTHBEARER"
#: The names of the mechanisms with a password or a delegation token.
SCRAM_MECHANISMS = (SCRAM_SHA_256, SCRAM_SHA_512)
#: The names of all mechanisms, the preferred one first.
MECHANISMS = (SCRAM_SHA_512, SCRAM_SHA_256, OAUTHBEARER)

#: The maximum length of one message of a login. The longest messages are those with a token of OAUTHBEARER.
MAX_SASL_BYTES = 32 * 1024


class ServerStep(NamedTuple):
    """The server's reply to one message of a client. The login is complete if ``principal`` is not None."""

    data: bytes
    principal: Principal | None = None
    #: The time at which the credential of the login expires, in milliseconds since the Unix epoch; None for never.
    expires_at_ms: int | None = None
    #: The id of the delegation token of the login, or an empty string.
    token_id: str = ""


class SaslServer(Protocol):
    """The interface of a mechanism for the server's side of one login."""

    mechanism: str
    #: The name that the client claims; empty before its first message. The name may be false until the login is
    #: complete.
    username: str

    def step(self, data: bytes) -> ServerStep:
        """Return the reply to the client's next message.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the login failed; ILLEGAL_SASL_STATE, the login has ended. The
                server may send the error's detail to the client: it is the same for an unknown user and for a wrong
                password.
        """


class SaslClient(Protocol):
    """The interface of a mechanism for the client's side of one login.

    Its methods may block for tens of milliseconds of processor time.
    """

    mechanism: str
    #: Whether the server has proved everything that the mechanism requires. Until then the client must not trust the
    #: server, even if the server reports success.
    complete: bool

    def first(self) -> bytes:
        """Return the first message of the login."""

    def step(self, data: bytes) -> bytes:
        """Return the reply to the server's message. The reply is empty if the login is complete.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the server refused the login, or its proof is wrong;
                ILLEGAL_SASL_STATE, the login has ended.
        """
