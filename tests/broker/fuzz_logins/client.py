"""Fuzzing of the client's side of a login, and of the client end, with a hostile server."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator

from sparklog.errors import BrokerError, ProtocolError
from sparklog.net.client_login import advance, log_in
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.connection import ClientEnd, encode_reply
from sparklog.protocol.messages import Ack, ErrorReply, HelloReply, Reply, SaslAuthenticateReply
from sparklog.protocol.oauthbearer import OAuthBearerClient
from sparklog.protocol.scram import MAX_ITERATIONS, MIN_ITERATIONS, SaltedPasswords, ScramClient
from tests.broker.fuzz_logins.correct_logins import (
    ANNA,
    CLIENT_NONCE,
    PASSWORDS,
    SALT,
    SCRAM,
    SERVER_NONCE,
    Good,
    scram_server,
)
from tests.broker.fuzz_logins.mutations import VALUES, maybe, mutated, pieces


class ClientTarget:
    """The client's side. A login is complete only after the server's proof, and has bounded iterations."""

    def __init__(self, good: Good) -> None:
        self._good = good
        self._salted = SaltedPasswords()
        self._security = {name: ClientSecurity.parse({**ANNA, "sasl.mechanism": name}) for name in SCRAM}

    def case(self, dice: random.Random) -> Iterator[str]:
        yield dice.choice((self._scram, self._scram, self._bearer, self._login, self._end))(dice)

    def _scram(self, dice: random.Random) -> str:
        mechanism = dice.choice(SCRAM)
        client = ScramClient(mechanism, "anna", PASSWORDS["anna"], CLIENT_NONCE, salted=self._salted)
        server = scram_server(mechanism)
        first = server.step(client.first()).data
        if dice.random() < 0.4:
            first = mutated(first, dice)
        try:
            said = client.step(first)
            assert MIN_ITERATIONS <= client._key[3] <= MAX_ITERATIONS
            proof = server.step(said).data
            given = maybe(proof, dice, 0.7)
            client.step(given)
        except BrokerError as error:
            assert not client.complete
            return f"scram {error.code.name}"
        assert client.complete and given.partition(b",")[0] == proof
        return "scram complete"

    def _bearer(self, dice: random.Random) -> str:
        client = OAuthBearerClient(dice.choice(self._good.tokens))
        data = dice.choice((b"", b'{"status":"invalid_token"}', json.dumps({"status": dice.choice(VALUES)}).encode()))
        if dice.random() < 0.5:
            data = mutated(data, dice)
        try:
            assert len(client.step(data)) <= 1
            assert client.complete == (not data)
            client.step(data)
        except BrokerError as error:
            assert client.complete == (not data) and len(error.detail) < 500
            return f"bearer {error.code.name}"
        raise AssertionError("a second step is accepted")

    def _login(self, dice: random.Random) -> str:
        """Run a login with a server that knows no credential, and says anything."""
        mechanism = dice.choice(SCRAM)
        login = log_in(self._security[mechanism])
        said = advance(login, None)
        try:
            for cid in range(20):
                if isinstance(said, float):
                    raise AssertionError("a login without the server's proof is complete")
                nonce = said.data.rpartition(b"r=")[2].decode()
                right = f"r={nonce}{SERVER_NONCE},s={base64.b64encode(SALT).decode()},i={MIN_ITERATIONS}".encode()
                data = dice.choice(
                    (right, b"", b"v=" + base64.b64encode(dice.randbytes(32)), b"e=no", dice.randbytes(9))
                )
                reply: Reply = SaslAuthenticateReply(cid, data, dice.random() < 0.5, dice.choice((0, -1, 2**62)))
                said = advance(login, Ack(cid) if dice.random() < 0.02 else reply)
        except BrokerError as error:
            return f"login {error.code.name}"
        raise AssertionError("a login does not end")

    def _end(self, dice: random.Random) -> str:
        replies: list[Reply] = [
            HelloReply(1, 1, 1, 1, "c", 2**20, sasl_mechanisms=SCRAM),
            SaslAuthenticateReply(2, dice.randbytes(99), True, 5),
            ErrorReply(3, 2**31, "detail"),
        ]
        end = ClientEnd()
        data = mutated(b"".join(bytes(part) for one in replies for part in encode_reply(one)), dice)
        try:
            for piece in pieces(data, dice):
                left = piece
                while left:
                    buffer = end.get_buffer()
                    count = min(len(buffer), len(left))
                    buffer[:count] = left[:count]
                    left = left[count:]
                    if end.decode_single(count) is None:
                        end.buffer_updated(count)
        except ProtocolError as error:
            return f"end {error.code.name}"
        return "end read"
