"""The two sides of a SASL login: what the code that carries the messages needs of every mechanism.

Pure. A mechanism's own module has its state machines: ``protocol.scram`` and ``protocol.oauthbearer``. The messages of
a login are opaque bytes here. Source: RFC 4422.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sparklog.model import Principal

SCRAM_SHA_256 = "SCRAM-SHA-256"
SCRAM_SHA_512 = "SCRAM-SHA-512"
OAUTHBEARER = "OAUTHBEARER"
#: The names of all mechanisms, the preferred one first.
MECHANISMS = (SCRAM_SHA_512, SCRAM_SHA_256, OAUTHBEARER)

#: The maximum length of one message of a login. The longest messages are those with a token of OAUTHBEARER.
MAX_SASL_BYTES = 32 * 1024


class ServerStep(NamedTuple):
    """The server's reply to one message of a client. The login is complete if there is a ``principal``."""

    data: bytes
    principal: Principal | None = None
    #: The time at which the credential of the login expires, in milliseconds since 1970, or None if it does not.
    expires_at_ms: int | None = None
    #: The id of the delegation token of the login, or an empty string.
    token_id: str = ""


class SaslServer(Protocol):
    """The server's side of one login."""

    mechanism: str

    def step(self, data: bytes) -> ServerStep:
        """Return the reply to the client's next message.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the login failed; ILLEGAL_SASL_STATE, it has ended. The error's
                detail may be sent to the client. It does not tell an unknown user from a wrong password.
        """


class SaslClient(Protocol):
    """The client's side of one login. Its methods may block for tens of milliseconds of processor time."""

    mechanism: str
    #: Whether the server has proved what it must prove. A client must not believe in the success of a login before.
    complete: bool

    def first(self) -> bytes:
        """Return the first message of the login."""

    def step(self, data: bytes) -> bytes:
        """Return the reply to the server's message. It is empty if the login is complete.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the server refused the login, or its proof is wrong;
                ILLEGAL_SASL_STATE, the login has ended.
        """
