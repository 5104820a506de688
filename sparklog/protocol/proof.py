"""The mutual proof of two processes of one cluster that they know its secret: the values in hello.

Pure.

A broker or controller that opens a connection names itself in ``Hello`` and adds a nonce and the ids of the secrets
that it knows. A broker that knows one of them replies with another nonce and its proof. The opener checks that proof
first, and only then sends ``Prove`` with its own. Each proof is an HMAC over both nonces, both identities (role,
number, incarnation), the cluster's id and the name of the broker's Unix socket, with a label for each direction. So a
proof is valid for one connection and one direction: it can be neither replayed nor reflected.

The secret itself is never sent. The proofs do not encrypt the connection: only TLS prevents a relay between two
processes that both know the secret. Source: RFC 2104 (HMAC); ISO/IEC 9798-4, mutual three-pass authentication.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import Hello, HelloReply
from sparklog.protocol.senders import SenderKind

SECRET_BYTES = 32
NONCE_BYTES = 32
_SERVER, _CLIENT = b"sparklog hello, server\0", b"sparklog hello, client\0"


class Secret:
    """The secret of one cluster: ``SECRET_BYTES`` random bytes.

    Its ``repr`` shows only its id, so that no log line, error or dump of a value that holds it can leak it.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Keep the key. Raises ConfigError if ``key`` has another length."""
        if len(key) != SECRET_BYTES:
            raise ConfigError(f"a cluster secret has {SECRET_BYTES} bytes, {len(key)} found")
        self._key = key

    def derive(self, purpose: str) -> bytes:
        """Return the key for one purpose. It reveals neither another purpose's key nor the secret."""
        return hmac.digest(self._key, f"sparklog {purpose}".encode(), "sha256")

    @property
    def key_id(self) -> str:
        """Return a name for the secret that reveals nothing of it."""
        return self.derive("key id")[:8].hex()

    def hex(self) -> str:
        """Return the secret in the form of a secret file."""
        return self._key.hex()

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Return the secret from the form of a secret file. Raises ConfigError, which does not quote the text."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(f"a cluster secret has {2 * SECRET_BYTES} hexadecimal digits, found others") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.key_id)

    def __repr__(self) -> str:
        return f"Secret({self.key_id})"


class KeyRing:
    """The secrets that one process knows, the newest first, at most ``_KEPT``; owned by that process.

    There are two while a driver that has lost the secret distributes a new one. A broker with the new one and a broker
    without it can then still prove themselves to each other by the old one.
    """

    _KEPT = 2

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        self.secrets = tuple(secrets)[: self._KEPT]

    def add(self, secret: Secret) -> None:
        """Make ``secret`` the newest."""
        self.secrets = (secret, *(known for known in self.secrets if known != secret))[: self._KEPT]

    def find(self, key_ids: Iterable[str]) -> Secret | None:
        """Return the first of the named secrets that is known here."""
        known = {secret.key_id: secret for secret in self.secrets}
        return next((known[key_id] for key_id in key_ids if key_id in known), None)

    def __bool__(self) -> bool:
        return bool(self.secrets)


class Identity(NamedTuple):
    """The identity of the opener of a connection: a broker's id and incarnation, or the controller of an epoch.

    A controller's ``number`` is -1, and its ``incarnation`` is the controller epoch.
    """

    role: SenderKind
    number: int
    incarnation: int


class IdentityClaim(NamedTuple):
    """An identity that counts as proved after the peer has sent ``proof``."""

    identity: Identity
    proof: bytes


class Authenticator(Protocol):
    """A broker's means of authentication: its secrets, and ``answer`` with a new nonce for each hello."""

    keys: KeyRing

    def answer(self, hello: Hello, reply: HelloReply) -> tuple[HelloReply, IdentityClaim | None]:
        """Return the reply with the broker's proof, and the claim that the peer has to prove. Raises BrokerError."""


def offer(hello: Hello, keys: KeyRing, identity: Identity, nonce: bytes) -> Hello:
    """Return ``hello`` with an offer to prove ``identity``, or unchanged without a secret."""
    if not keys:
        return hello
    return msgspec.structs.replace(
        hello,
        nonce=nonce,
        role=identity.role.value,
        number=identity.number,
        incarnation=identity.incarnation,
        key_ids=tuple(secret.key_id for secret in keys.secrets),
    )


def answer(hello: Hello, reply: HelloReply, keys: KeyRing, nonce: bytes) -> tuple[HelloReply, IdentityClaim | None]:
    """Return the broker's reply with its proof, and the claim that the peer has to prove.

    Without an offer that this broker can check, the reply is unchanged.

    Raises:
      BrokerError: INVALID_REQUEST, the offer names no role that can be proved, or this very broker.
    """
    secret = keys.find(hello.key_ids) if len(hello.nonce) == NONCE_BYTES else None
    if secret is None:
        return reply, None
    if hello.role not in {SenderKind.BROKER.value, SenderKind.CONTROLLER.value}:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"role {hello.role!r} found, broker or controller expected")
    identity = Identity(SenderKind(hello.role), hello.number, hello.incarnation)
    if identity.role is SenderKind.BROKER and identity.number == reply.broker_id:
        detail = f"broker {reply.broker_id} opens no connection to itself: this is a reflection"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    reply = msgspec.structs.replace(reply, nonce=nonce, key_id=secret.key_id)
    said = _said(hello, reply)
    proved = msgspec.structs.replace(reply, proof=_proof(secret, _SERVER, said))
    return proved, IdentityClaim(identity, _proof(secret, _CLIENT, said))


def check(hello: Hello, reply: HelloReply, keys: KeyRing, *, expected: int | None, required: bool) -> bytes:
    """Check the broker's proof; return the proof to send in ``Prove``, which is empty if the broker has none.

    ``expected`` is the id of the broker that should reply. ``required`` refuses a broker that proves nothing.

    Raises:
      BrokerError: CLUSTER_AUTHORIZATION_FAILED, the broker's proof is missing or wrong; BROKER_NOT_AVAILABLE, another
        broker replied.
    """
    if expected is not None and reply.broker_id != expected:
        detail = f"broker {expected} expected, broker {reply.broker_id} replied"
        raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, detail)
    secret = keys.find((reply.key_id,)) if reply.key_id in hello.key_ids else None
    if secret is None or not reply.proof:
        if required:
            detail = f"broker {reply.broker_id} has not proved that it knows the cluster's secret"
            raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
        return b""
    said = _said(hello, reply)
    if len(reply.nonce) != NONCE_BYTES or not hmac.compare_digest(reply.proof, _proof(secret, _SERVER, said)):
        detail = f"broker {reply.broker_id}: its proof of the cluster's secret {reply.key_id} is wrong"
        raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
    return _proof(secret, _CLIENT, said)


def _said(hello: Hello, reply: HelloReply) -> bytes:
    """Return the values of both messages that both proofs cover.

    They are only fields that all releases have: the other side does not know a field that a later release adds.
    """
    return msgspec.msgpack.encode(
        (
            (hello.min_version, hello.max_version, hello.cluster_id, hello.client_id),
            (hello.role, hello.number, hello.incarnation, hello.key_ids, hello.nonce),
            (reply.version, reply.cluster_id, reply.broker_id, reply.incarnation),
            (reply.unix_socket, reply.reached_at, reply.local_socket, reply.key_id, reply.nonce),
        )
    )


def _proof(secret: Secret, label: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.derive("hello"), label + said, "sha256")
