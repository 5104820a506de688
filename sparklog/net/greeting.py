"""The beginning of a connection: hello, and the mutual proof where a broker or the controller opens it.

The proofs themselves are values (``protocol.proof``). This module adds the nonces, which have to be random and new for
each hello, and what a process knows: its secrets and who it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol import connection, proof
from sparklog.protocol.messages import Hello, HelloReply, Prove
from sparklog.protocol.proof import Claim, Identity, KeyRing


class Credentials:
    """What one broker or controller proves itself with. Owner: that process, for as long as it lives; ``identity``
    gives what it is at the moment, as a broker's incarnation changes."""

    def __init__(self, keys: KeyRing, identity: Callable[[], Identity]) -> None:
        self.keys = keys
        self.identity = identity

    def answer(self, hello: Hello, reply: HelloReply) -> tuple[HelloReply, Claim | None]:
        """Return the reply of this broker with its proof, see ``proof.answer``, which says what is raised."""
        if not hello.key_ids:
            return reply, None
        return proof.answer(hello, reply, self.keys, secrets.token_bytes(proof.NONCE_BYTES))


class Greeting:
    """What the opener of one connection says first, and what it makes of the answer. A connection that goes on over
    another socket greets there again, with another nonce."""

    def __init__(
        self,
        client_id: str,
        cluster_id: str,
        *,
        credentials: Credentials | None = None,
        broker_id: int | None = None,
        proof_required: bool = False,
    ) -> None:
        """``broker_id``: the broker that is to answer; None: any. ``proof_required``: it has to prove that it knows the
        cluster's secret; otherwise a broker that does not is taken as it is."""
        self._plain = connection.hello(client_id, cluster_id)
        self._credentials = credentials
        self._broker_id = broker_id
        # A process that knows no secret can ask for no proof.
        self._proof_required = proof_required and credentials is not None and bool(credentials.keys)

    def hello(self) -> Hello:
        if self._credentials is None:
            return self._plain
        nonce = secrets.token_bytes(proof.NONCE_BYTES)
        return proof.offer(self._plain, self._credentials.keys, self._credentials.identity(), nonce)

    def prove(self, hello: Hello, reply: HelloReply) -> Prove | None:
        """Return what is to be sent next, None for nothing. Raises BrokerError as ``proof.check``, and INVALID_REQUEST
        when the broker is of another cluster."""
        if self._credentials is None:
            return None
        if hello.cluster_id and reply.cluster_id != hello.cluster_id:
            detail = f"cluster {hello.cluster_id!r} expected, broker {reply.broker_id} is of {reply.cluster_id!r}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        own = proof.check(hello, reply, self._credentials.keys, expected=self._broker_id, required=self._proof_required)
        return Prove(0, own) if own else None
