"""The first messages of a connection: the hello, and the mutual proof if a broker or the controller opens it.

In a cluster whose brokers have TLS certificates, the certificates are the proof of both sides.

``protocol.proof`` computes the proofs. This module adds the nonces, which must be random and new for each hello, and
the secrets and the identity of this process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol import connection, proof
from sparklog.protocol.messages import Hello, HelloReply, Prove
from sparklog.protocol.proof import Identity, IdentityClaim, KeyRing, Secret
from sparklog.protocol.senders import SenderKind
from sparklog.security.peer_certificates import Certificate, PeerCertificates


class Credentials:
    """The credentials of one broker or controller process: its identity, and the secrets or certificates that prove it.

    ``identity`` is a function, because a broker's incarnation changes when the broker registers again. With
    ``certificates`` the process authenticates by TLS certificates and not by the secrets.
    """

    def __init__(
        self, keys: KeyRing, identity: Callable[[], Identity], certificates: PeerCertificates | None = None
    ) -> None:
        self.keys = keys if certificates is None else KeyRing()
        self.identity = identity
        self.certificates = certificates

    @property
    def required(self) -> bool:
        """Return whether peers must prove their identity."""
        return bool(self.keys) or self.certificates is not None

    def roles(self, certificate: Certificate | None) -> frozenset[SenderKind] | None:
        """Return the roles that a certificate gives a peer, or None if certificates give no roles in this cluster."""
        return None if self.certificates is None else self.certificates.roles(certificate)

    def answer(self, hello: Hello, reply: HelloReply) -> tuple[HelloReply, IdentityClaim | None]:
        """Add this broker's proof to ``reply``. Return the reply, and the identity that the peer must prove.

        If ``hello`` offers no proof for a known secret, return the unchanged reply and None.

        Raises:
          BrokerError: INVALID_REQUEST, the offer names neither a broker nor a controller, or names this broker itself.
        """
        if not hello.key_ids:
            return reply, None
        return proof.answer(hello, reply, self.keys, secrets.token_bytes(proof.NONCE_BYTES))


class Greeting:
    """A component that creates the hello of a new connection and checks the broker's reply to it.

    A client that continues on the Unix socket sends another hello there, with another nonce.
    """

    def __init__(
        self,
        client_id: str,
        cluster_id: str,
        *,
        credentials: Credentials | None = None,
        broker_id: int | None = None,
        proof_required: bool = False,
    ) -> None:
        """Store the credentials of this process and the requirements for the broker.

        ``broker_id`` is the id of the broker that should reply; None means any broker. With ``proof_required`` the
        broker must prove that it knows the cluster's secret. Otherwise ``prove`` accepts a broker without a proof.
        Credentials with certificates always require the certificate of a broker.
        """
        self._plain = connection.hello(client_id, cluster_id)
        self._credentials = credentials
        self._broker_id = broker_id
        # A process without a secret cannot check a proof.
        self._proof_required = proof_required and credentials is not None and bool(credentials.keys)

    @property
    def has_token(self) -> bool:
        """Return whether this process proves that it has a token for a Unix socket, instead of proving its identity."""
        return self._credentials is not None and self._credentials.identity().role is SenderKind.CLIENT

    @classmethod
    def with_token(cls, client_id: str, cluster_id: str, token: bytes) -> Greeting:
        """Return the greeting for a Unix socket. ``token`` is the secret of a token for this socket.

        Raises ConfigError if ``token`` has the wrong length.
        """
        token_keys = KeyRing((Secret(token),))
        credentials = Credentials(token_keys, lambda: Identity(SenderKind.CLIENT, -1, 0))
        return cls(client_id, cluster_id, credentials=credentials, proof_required=True)

    def hello(self) -> Hello:
        if self._credentials is None:
            return self._plain
        if self._credentials.certificates is not None:
            return proof.claim(self._plain, self._credentials.identity())
        nonce = secrets.token_bytes(proof.NONCE_BYTES)
        return proof.offer(self._plain, self._credentials.keys, self._credentials.identity(), nonce)

    def prove(self, hello: Hello, reply: HelloReply, certificate: Certificate | None = None) -> Prove | None:
        """Check the broker's reply and its TLS certificate.

        Return the message with this process's proof, or None if no proof is needed.

        Raises:
          BrokerError: INVALID_REQUEST, the broker belongs to another cluster; CLUSTER_AUTHORIZATION_FAILED, its
            certificate is not that of a broker, or its proof is missing or wrong; BROKER_NOT_AVAILABLE, a broker other
            than the expected one replied.
        """
        if self._credentials is None:
            return None
        if hello.cluster_id and reply.cluster_id != hello.cluster_id:
            detail = f"cluster {hello.cluster_id!r} expected, broker {reply.broker_id} is of {reply.cluster_id!r}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        roles = self._credentials.roles(certificate)
        if roles is not None:
            proof.check_broker(reply, expected=self._broker_id)
            if SenderKind.BROKER not in roles:
                detail = f"broker {reply.broker_id} has no TLS certificate of a broker of this cluster"
                raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
            return None
        own = proof.check(hello, reply, self._credentials.keys, expected=self._broker_id, required=self._proof_required)
        return Prove(0, own) if own else None
