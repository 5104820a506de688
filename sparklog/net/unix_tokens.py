"""Tokens with which a client moves from a listener with TLS or logins to the broker's Unix socket.

After the login, the client requests a token over its TCP connection. The token is a secret. It is valid for ten seconds
and for one hello on the Unix socket of this broker process. Client and broker prove to each other that they know the
token (``protocol.proof``). So no other process of the host can pretend to be the client or the broker, not even a
process that has taken over the name of the socket. The new connection has the principal, the role and the session of
the TCP connection.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from sparklog.model import Principal
from sparklog.net.authentication import ListenerSecurity
from sparklog.protocol import proof
from sparklog.protocol.messages import Hello, HelloReply, UnixSocketReply
from sparklog.protocol.proof import Authenticator, Identity, IdentityClaim, KeyRing, Secret
from sparklog.protocol.senders import SenderKind
from sparklog.security.peer_certificates import Certificate

#: The time in seconds in which a token must be used.
LIFETIME_S = 10.0
#: The maximum number of unused tokens of a broker. Beyond it the oldest token becomes invalid.
_MOST = 10_000


class UnixSession(NamedTuple):
    """The session of a TCP connection, which a connection on the Unix socket continues."""

    principal: Principal
    #: The role of the peer, if it is a broker or the controller.
    identity: Identity | None
    peer_host: str
    security: ListenerSecurity
    #: The monotonic time by which the client must log in again, or None for no limit.
    expires_s: float | None
    #: The delegation token of the peer's login, or an empty string.
    token_id: str = ""


class UnixTokens:
    """A store of the unused tokens for the Unix socket of one broker.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(self, *, lifetime_s: float = LIFETIME_S, most: int = _MOST) -> None:
        self._lifetime_s, self._most = lifetime_s, most
        #: The secret, the session and the expiry time of each token, by the secret's id; the oldest token first.
        self._tokens: dict[str, tuple[Secret, UnixSession, float]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def issue(self, session: UnixSession) -> Secret:
        """Issue a new token, with which one connection on the Unix socket can continue ``session``.

        If there are too many unused tokens, drop the oldest.
        """
        self._end_expired()
        if len(self._tokens) >= self._most:
            del self._tokens[next(iter(self._tokens))]
        token = Secret(secrets.token_bytes(proof.SECRET_BYTES))
        self._tokens[token.key_id] = token, session, time.monotonic() + self._lifetime_s
        return token

    def take(self, key_ids: tuple[str, ...]) -> tuple[Secret, UnixSession] | None:
        """Remove a valid token that has one of these ids. Return it with its session, or None if there is none."""
        self._end_expired()
        for key_id in key_ids:
            found = self._tokens.pop(key_id, None)
            if found is not None:
                return found[0], found[1]
        return None

    def drop(self, token: Secret) -> None:
        """Make this token invalid. If it is already used or expired, do nothing."""
        self._tokens.pop(token.key_id, None)

    def end(self, principal: Principal, *, token_id: str | None = None) -> None:
        """Make all unused tokens of ``principal`` invalid.

        With ``token_id``, do so only for sessions that have logged in by this delegation token.
        """
        sessions = [(key_id, found[1]) for key_id, found in self._tokens.items()]
        for key_id, session in sessions:
            if session.principal == principal and token_id in {None, session.token_id}:
                del self._tokens[key_id]

    def _end_expired(self) -> None:
        now_s = time.monotonic()
        while self._tokens and self._tokens[first := next(iter(self._tokens))][2] <= now_s:
            del self._tokens[first]


class TokenIssuer:
    """The source of the tokens with which the client of one TCP connection may continue on the Unix socket ``name``.

    ``reached_at`` is the broker's address to which the client has connected.
    """

    def __init__(self, tokens: UnixTokens, name: str, reached_at: tuple[str, int]) -> None:
        self._tokens = tokens
        self._name = name
        self._reached_at = reached_at
        self._unused: Secret | None = None

    def issue(self, cid: int, session: UnixSession) -> UnixSocketReply:
        """Issue a token for ``session``, and return the reply with the token. An earlier token becomes invalid."""
        self.drop()
        token = self._unused = self._tokens.issue(session)
        return UnixSocketReply(cid, self._name, self._reached_at, bytes.fromhex(token.hex()))

    def drop(self) -> None:
        """Make the unused token invalid, because the connection ends."""
        if self._unused is not None:
            self._tokens.drop(self._unused)
            self._unused = None


class TokenAuthenticator:
    """The authenticator of the Unix socket: it checks tokens, and passes a hello without a token to ``other``.

    If ``other`` is None, every peer needs a token.
    """

    def __init__(self, tokens: UnixTokens, other: Authenticator | None) -> None:
        self._tokens = tokens
        self._other = other
        self.keys = other.keys if other is not None else KeyRing()

    @property
    def required(self) -> bool:
        """Return whether a peer without a token must prove its identity."""
        return self._other is None or self._other.required

    def roles(self, certificate: Certificate | None) -> frozenset[SenderKind] | None:
        """Return the roles that a certificate gives a peer, or None if certificates give no roles in this cluster."""
        return None if self._other is None else self._other.roles(certificate)

    def answer(self, hello: Hello, reply: HelloReply) -> tuple[HelloReply, IdentityClaim | None]:
        """Add the broker's proof to ``reply``. Return the reply, and what the peer claims and must still prove.

        With a token, the peer claims the session of the TCP connection for which the token was issued. Otherwise it
        claims an identity. The second result is None if ``hello`` offers no proof. Raises BrokerError.
        """
        found = self._tokens.take(hello.key_ids) if hello.key_ids else None
        if found is not None:
            token, session = found
            return proof.answer_token(hello, reply, token, secrets.token_bytes(proof.NONCE_BYTES), session)
        return (reply, None) if self._other is None else self._other.answer(hello, reply)
