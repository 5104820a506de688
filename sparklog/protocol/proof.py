"""The mutual authentication of two processes of one cluster: each proves to the other that it knows the secret.

This module is pure.

A broker or controller that opens a connection names itself in ``Hello``, and adds a nonce and the ids of the secrets
that it knows. A broker that knows one of these secrets replies with another nonce and its proof. The opener first
checks this proof, and then sends its own proof in ``Prove``. Each proof is an HMAC over both nonces, both identities
(role, number, incarnation), the cluster's id and the name of the broker's Unix socket, with a label for each direction.
So a proof is valid for one connection and one direction. It can be neither replayed nor reflected.

The secret itself is never sent. The proofs do not encrypt the connection, and a man in the middle could relay them
between two processes that know the secret. Only TLS prevents such a relay. Source: RFC 2104 (HMAC); ISO/IEC 9798-4,
mutual three-pass authentication.

In a cluster whose brokers use TLS certificates, the certificate takes the place of the secret: ``Hello`` claims the
identity, and the certificate must permit its role.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import Hello, HelloReply
from sparklog.protocol.senders import SenderKind

SECRET_BYTES = 32
NONCE_BYTES = 32
_SERVER, _CLIENT = b"sparklog hello, server\0", b"sparklog hello, client\0"


class Secret:
    """A secret that the processes of one cluster share: ``SECRET_BYTES`` random bytes.

    Its ``repr`` shows only the secret's id, so that a log line, an error or a dump cannot reveal the secret.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Create a secret with this key. Raises ConfigError if ``key`` has the wrong length."""
        if len(key) != SECRET_BYTES:
            raise ConfigError(f"a cluster secret has {SECRET_BYTES} bytes, {len(key)} found")
        self._key = key

    def derive(self, purpose: str) -> bytes:
        """Derive a key for one purpose. This key reveals neither the key for another purpose nor the secret."""
        return hmac.digest(self._key, f"sparklog {purpose}".encode(), "sha256")

    @property
    def key_id(self) -> str:
        """Return an id by which processes can name the secret without revealing it."""
        return self.derive("key id")[:8].hex()

    def hex(self) -> str:
        """Return the secret as hexadecimal digits, as in a secret file."""
        return self._key.hex()

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Parse the hexadecimal digits of a secret. Raises ConfigError, which does not quote the text."""
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
    """A list of the cluster secrets that one process knows, the newest first, at most two.

    A process knows two secrets while a driver that has lost the secret distributes a new one. A broker that has the new
    secret and a broker that does not have it yet can then still authenticate each other with the old one.
    """

    _KEPT = 2

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        self.secrets = tuple(secrets)[: self._KEPT]

    def add(self, secret: Secret) -> None:
        """Add ``secret`` as the newest secret. If there are too many secrets, drop the oldest."""
        self.secrets = (secret, *(known for known in self.secrets if known != secret))[: self._KEPT]

    def find(self, key_ids: Iterable[str]) -> Secret | None:
        """Return the secret with the first of these ids that this process knows, or None if it knows none of them."""
        known = {secret.key_id: secret for secret in self.secrets}
        return next((known[key_id] for key_id in key_ids if key_id in known), None)

    def __bool__(self) -> bool:
        return bool(self.secrets)


class Identity(NamedTuple):
    """The identity of the broker or controller process that opened a connection.

    For a broker, ``number`` is the broker id, and ``incarnation`` is the number of its registration in ZooKeeper. For a
    controller, ``number`` is -1 and ``incarnation`` is the controller epoch.
    """

    role: SenderKind
    number: int
    incarnation: int


class IdentityClaim(NamedTuple):
    """A peer's claim to an ``identity``. The broker accepts the claim when the peer has sent this ``proof``.

    A peer with a token for the Unix socket claims a ``session`` and no identity. This module does not interpret the
    session.
    """

    identity: Identity | None
    proof: bytes
    session: object = None


class Authenticator(Protocol):
    """The mutual authentication of a broker and its peers, as ``ServerEnd`` uses it.

    If brokers authenticate by TLS certificates, ``keys`` is empty.
    """

    keys: KeyRing

    @property
    def required(self) -> bool:
        """Return whether peers must prove their identity."""

    def roles(self, certificate: Mapping[str, Any] | None) -> frozenset[SenderKind] | None:
        """Return the roles that a certificate gives a peer, or None if certificates give no roles in this cluster."""

    def answer(self, hello: Hello, reply: HelloReply) -> tuple[HelloReply, IdentityClaim | None]:
        """Add the broker's proof to ``reply``. Return the reply, and the identity that the peer must prove.

        The identity is None if ``hello`` does not offer a proof. Raises BrokerError.
        """


def offer(hello: Hello, keys: KeyRing, identity: Identity, nonce: bytes) -> Hello:
    """Return ``hello`` with an offer to prove ``identity``. If ``keys`` is empty, return ``hello`` unchanged."""
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
    """Add the broker's proof to ``reply``. Return the reply, and the identity that the peer must prove.

    If ``hello`` offers no proof for a secret that this broker knows, return the unchanged reply and None.

    Raises:
      BrokerError: INVALID_REQUEST, the offer names neither a broker nor a controller, or names this broker itself.
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
    reply, expected = _proved(hello, reply, secret, nonce)
    return reply, IdentityClaim(identity, expected)


def answer_token(
    hello: Hello, reply: HelloReply, token: Secret, nonce: bytes, session: object
) -> tuple[HelloReply, IdentityClaim]:
    """Add to ``reply``, which is for the Unix socket, the broker's proof that it knows ``token``.

    Return the reply, and the peer's claim to ``session``, for which the token was issued.

    Raises:
      BrokerError: INVALID_REQUEST, the hello has no nonce.
    """
    if len(hello.nonce) != NONCE_BYTES:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"a nonce of {len(hello.nonce)} bytes found")
    reply, expected = _proved(hello, reply, token, nonce)
    return reply, IdentityClaim(None, expected, session)


def _proved(hello: Hello, reply: HelloReply, secret: Secret, nonce: bytes) -> tuple[HelloReply, bytes]:
    """Add the broker's proof to the reply. Return the reply, and the proof that the peer must send."""
    reply = msgspec.structs.replace(reply, nonce=nonce, key_id=secret.key_id)
    said = _said(hello, reply)
    return msgspec.structs.replace(reply, proof=_proof(secret, _SERVER, said)), _proof(secret, _CLIENT, said)


def claim(hello: Hello, identity: Identity) -> Hello:
    """Return ``hello`` with a claim to ``identity``, which the TLS certificate of this process must permit."""
    return msgspec.structs.replace(
        hello, role=identity.role.value, number=identity.number, incarnation=identity.incarnation
    )


def certified(hello: Hello, roles: frozenset[SenderKind]) -> Identity | None:
    """Return the identity that ``hello`` claims, or None if it claims none.

    ``roles`` are the roles that the peer has by its TLS certificate.

    Raises:
      BrokerError: CLUSTER_AUTHORIZATION_FAILED, the certificate does not permit the role.
    """
    if hello.role in {"", SenderKind.CLIENT.value}:
        return None
    for role in roles:
        if role.value == hello.role:
            return Identity(role, hello.number, hello.incarnation)
    detail = f"role {hello.role!r} needs a TLS certificate of this cluster with this role"
    raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)


def check_broker(reply: HelloReply, *, expected: int | None) -> None:
    """Check that the expected broker has replied. Raises BrokerError BROKER_NOT_AVAILABLE if it is another one."""
    if expected is not None and reply.broker_id != expected:
        detail = f"broker {expected} expected, broker {reply.broker_id} replied"
        raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, detail)


def check(hello: Hello, reply: HelloReply, keys: KeyRing, *, expected: int | None, required: bool) -> bytes:
    """Check the broker's proof. Return the proof to send in ``Prove``, or empty bytes if the broker sent no proof.

    ``expected`` is the id of the broker that should reply; None means any broker. With ``required``, raise an error if
    the broker sent no proof.

    Raises:
      BrokerError: CLUSTER_AUTHORIZATION_FAILED, the broker's proof is missing or wrong; BROKER_NOT_AVAILABLE, another
        broker replied.
    """
    check_broker(reply, expected=expected)
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
    """Return the encoded values of both messages that the proofs cover.

    Only fields that all releases have may be included, because an older peer does not know later fields.
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
