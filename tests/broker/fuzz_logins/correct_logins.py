"""The messages of correct logins, which the targets change, and the credentials that these logins prove."""

from __future__ import annotations

import time
from pathlib import Path

from sparklog.broker.security.jwt_validator import JwtRules, JwtValidator
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.oauthbearer import OAuthBearerClient, OAuthBearerServer
from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256, SCRAM_SHA_512, SaslServer
from sparklog.protocol.scram import (
    MIN_ITERATIONS,
    SaltedPasswords,
    ScramClient,
    ScramCredential,
    ScramServer,
    TokenCredential,
)
from tests.broker.test_jwt_validator import AUDIENCE, ISSUER, NAMES, OTHERS, SIGNERS, jwk, token, write_keys

SCRAM = (SCRAM_SHA_256, SCRAM_SHA_512)
SALT, DUMMY, SERVER_NONCE, CLIENT_NONCE = b"salt of this user", b"d" * 32, "server-nonce", "client-nonce"
PASSWORDS = {"anna": "a-secret", "bert": "b-secret", "a-token": "t-secret"}
CREDENTIALS = {
    (mechanism, name): ScramCredential.derive(mechanism, password, SALT, MIN_ITERATIONS)
    for mechanism in SCRAM
    for name, password in PASSWORDS.items()
}
#: The owner of the delegation token.
OWNER = Principal(USER, "olga")


ANNA = {"security.protocol": "SASL_PLAINTEXT", "sasl.username": "anna", "sasl.password": PASSWORDS["anna"]}


def scram_server(mechanism: str, passwords: dict[tuple[str, str], ScramCredential] = CREDENTIALS) -> ScramServer:
    def lookup(name: str) -> ScramCredential | None:
        return passwords.get((mechanism, name)) if name != "a-token" else None

    def tokens(name: str) -> TokenCredential | None:
        return TokenCredential(passwords[mechanism, name], OWNER, 2**60) if name == "a-token" else None

    return ScramServer(mechanism, lookup, SERVER_NONCE, DUMMY, tokens=tokens)


class Good:
    """The messages of correct logins. The nonces are constants, so that the messages are."""

    def __init__(self, directory: Path) -> None:
        keys = write_keys(directory / "jwks.json", *(jwk(name, SIGNERS[name], name) for name in NAMES))
        self.validator = JwtValidator(JwtRules(keys, ISSUER, (AUDIENCE, "other")))
        late = int(time.time()) + 100_000
        self.tokens = [token(name, exp=late) for name in NAMES]
        self.forged = [token(name, OTHERS[name], exp=late, sub="bert") for name in NAMES]
        #: The messages of each login: the mechanism, the principal, the messages, and the proof.
        self.logins: list[tuple[str, Principal, list[bytes], bytes]] = []
        salted = SaltedPasswords()
        for mechanism in SCRAM:
            for name, password in PASSWORDS.items():
                is_token = name == "a-token"
                client = ScramClient(mechanism, name, password, CLIENT_NONCE, token=is_token, salted=salted)
                server = scram_server(mechanism)
                first = client.first()
                final = client.step(server.step(first).data)
                principal = OWNER if is_token else Principal(USER, name)
                assert server.step(final).principal == principal
                self.logins.append((mechanism, principal, [first, final], final.rpartition(b"p=")[2]))
        for text in self.tokens:
            first = OAuthBearerClient(text).first()
            # The last characters of a signature may have bits that no decoder uses.
            proof = text.rpartition(".")[2][:-2].encode()
            self.logins.append((OAUTHBEARER, Principal(USER, "anna"), [first], proof))
        #: The messages of logins with a wrong password, an unknown name, or a forged token.
        self.wrong: list[tuple[str, list[bytes]]] = [
            (OAUTHBEARER, [OAuthBearerClient(one).first()]) for one in self.forged
        ]
        for name, password in (("anna", "b-secret"), ("carl", "a-secret"), ("bert", "")):
            client = ScramClient(SCRAM_SHA_256, name, password or "-", CLIENT_NONCE, salted=salted)
            first = client.first()
            self.wrong.append((SCRAM_SHA_256, [first, client.step(scram_server(SCRAM_SHA_256).step(first).data)]))

    def begin(self, mechanism: str) -> SaslServer:
        if mechanism in SCRAM:
            return scram_server(mechanism)
        if mechanism == OAUTHBEARER:
            return OAuthBearerServer(self.validator.validate)
        raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"mechanism {mechanism!r} is not enabled")

    def check_proved(self, principal: Principal, sent: bytes) -> None:
        """Check that the peer has sent the proof of this principal."""
        assert any(principal == owner and proof in sent for _, owner, _, proof in self.logins), principal
