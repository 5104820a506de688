"""A process that feeds random and mutated bytes to everything that sparklog parses before a login.

Run as ``python -m tests.broker.fuzz_logins <target> <seed> <seconds> [<cases>]``. The targets:

- ``server``: the server end, with logins by SCRAM and OAUTHBEARER;
- ``kafka``: the end of a listener for Kafka clients, with the same logins;
- ``mechanisms``: the server's side of each mechanism, and the validator of tokens;
- ``client``: the client's side of a login and the client end, with a hostile server;
- ``connections``: the client connections of both kinds, with a hostile server on a socket;
- ``tls``: a listener with TLS on a socket.

The process prints the counts of the outcomes as JSON. It ends with an error that names the seed and the case if a case
breaks a rule; ``<seed>:<case>`` in place of the seed replays this case alone.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import json
import math
import random
import resource
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jwt

from sparklog.broker.kafka.kafka_protocol import KafkaProtocol
from sparklog.broker.security.jwt_validator import JwtRules, JwtValidator
from sparklog.errors import BrokerError, ErrorCode, ProtocolError
from sparklog.kafka.connection import KafkaRequest, KafkaServerEnd
from sparklog.kafka.wire import (
    API_VERSIONS,
    PARSED_VERSIONS,
    ApiKey,
    RequestHeader,
    decode_response,
    decode_response_header,
    request_frame,
)
from sparklog.kafka.wire.fields import REQUESTS as KAFKA_REQUESTS
from sparklog.kafka.wire.metadata import ApiVersionsRequest
from sparklog.kafka.wire.security import SaslAuthenticateRequest, SaslHandshakeRequest
from sparklog.model import USER, Principal
from sparklog.net.async_client import AsyncConnection
from sparklog.net.authentication import LoginPeer
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_login import advance, log_in
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials, Greeting
from sparklog.protocol.connection import (
    MAX_LOGIN_BYTES,
    ClientEnd,
    EncodedReply,
    ImmediateAnswer,
    ServerEnd,
    encode_reply,
    hello,
)
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import (
    Ack,
    ErrorReply,
    HelloReply,
    Metadata,
    Prove,
    Reply,
    Request,
    RequestUnixSocket,
    SaslAuthenticate,
    SaslAuthenticateReply,
    encode_message,
)
from sparklog.protocol.oauthbearer import OAuthBearerClient, OAuthBearerServer
from sparklog.protocol.proof import SECRET_BYTES, Identity, KeyRing, Secret
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256, SCRAM_SHA_512, SaslServer
from sparklog.protocol.scram import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    SaltedPasswords,
    ScramClient,
    ScramCredential,
    ScramServer,
    TokenCredential,
)
from sparklog.protocol.senders import SenderKind
from tests.broker.test_jwt_validator import AUDIENCE, ISSUER, NAMES, OTHERS, SIGNERS, claims, jwk, token, write_keys
from tests.net.certificates import Certificates
from tests.net.test_client_logins import ScramLogins
from tests.net.test_tls import secure
from tests.protocol.test_login import sample
from tests.waiting import wait_until

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
#: The largest reply to a peer that has not logged in.
MAX_REPLY = 8192
#: The largest buffer that such a peer makes the server keep.
MAX_BUFFER = 256 * 1024
#: The memory that a process may add after its first cases.
MAX_GROWTH_KIB = 96 * 1024
#: Texts that have a meaning in the messages.
WORDS = (
    *(b"n,,", b"y,,", b"p=tls-unique,,", b",", b"=", b"=2C", b"=3D", b"a=anna", b"n=bert", b"m=x"),
    *(b"tokenauth=true", b"r=", b"auth=Bearer "),
    *(b"s=", b"i=", b"p=", b"v=", b"e=other-error", b"c=biws", b"c=eSws", b"\x00", b"\x01", b"\xff", b"\xc2\xad"),
    *(b"999999", b"1000001", b"99999999999999999999", b"-1", b"\xd9\xa3", b"none", b"null", b"1e999", b"[" * 2000),
    *(b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x92" * 500, b"\xcf" + b"\xff" * 8, b"A" * 40_000),
)  # fmt: skip


def mutated(good: bytes, dice: random.Random) -> bytes:
    """Return the bytes with one to four changes."""
    found = bytearray(good)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(found) + 1)
        end = min(len(found), at + dice.choice((1, 1, 2, 4, 16, 64)))
        kind = dice.randrange(8)
        if kind <= 1 and at < len(found):
            found[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            found[at:end] = dice.randbytes(end - at)
        elif kind == 3:
            found[at:at] = dice.choice(WORDS)
        elif kind == 4:
            found[at:end] = dice.choice(WORDS)
        elif kind == 5:
            del found[at:end]
        elif kind == 6:
            found[at:at] = found[at:end] * dice.choice((1, 1, 3, 50))
        elif dice.random() < 0.3:
            del found[at:]
    return bytes(found)


def maybe(good: bytes, dice: random.Random, often: float = 0.3) -> bytes:
    return mutated(good, dice) if dice.random() < often else good


def frame(message: Request, body: bytes = b"") -> bytes:
    return b"".join(map(bytes, encode_frame(encode_message(message), [body] if body else [])))


def pieces(data: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield the bytes, split at random places."""
    whole = dice.random() < 0.4
    while data:
        count = len(data) if whole else dice.choice((1, 2, 7, 8, 9, 100, 5000, 100_000))
        yield data[:count]
        data = data[count:]


def received(end: ServerEnd | KafkaServerEnd, piece: bytes) -> Iterator[ReceivedRequest | ImmediateAnswer]:
    """Give the end some bytes, and yield its events until one closes the connection."""
    while piece:
        buffer = end.get_buffer()
        count = min(len(buffer), len(piece))
        buffer[:count] = piece[:count]
        piece = piece[count:]
        event = end.decode_single(count)
        for one in end.buffer_updated(count) if event is None else [event]:
            yield one
            if isinstance(one, ImmediateAnswer) and one.close:
                return


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


# --- the server end ---------------------------------------------------------------------------------------------------

REQUESTS = [frame(sample(kind)) for kind in get_args(Request)]


class ServerTarget:
    """The server end. Only a proof admits a peer, and only as the principal whose proof it is."""

    def __init__(self, good: Good) -> None:
        self._good = good
        keys = KeyRing((Secret(b"s" * SECRET_BYTES),))
        self._credentials = Credentials(keys, lambda: Identity(SenderKind.BROKER, 1, 1))
        other = Credentials(keys, lambda: Identity(SenderKind.BROKER, 2, 1))
        self._greeting = Greeting("broker 2", "c", credentials=other, broker_id=1)

    def _frames(self, dice: random.Random) -> Iterator[bytes]:
        if dice.random() < 0.9:
            said = self._greeting.hello() if dice.random() < 0.2 else hello("fuzz", dice.choice(("", "c")))
            yield maybe(frame(said), dice, 0.1)
        for _ in range(dice.randrange(6)):
            kind = dice.randrange(10)
            if kind <= 4:
                mechanism, _, messages, _ = dice.choice(self._good.logins)
                yield from self._login(mechanism, messages, dice)
            elif kind == 5:
                yield from self._login(*dice.choice(self._good.wrong), dice)
            elif kind == 6:
                yield maybe(frame(Prove(dice.randrange(9), dice.randbytes(32))), dice)
            elif kind == 7:
                yield maybe(dice.choice((frame(RequestUnixSocket(3)), dice.choice(REQUESTS))), dice)
            elif kind == 8:
                size = dice.choice((4096, MAX_LOGIN_BYTES, 2**20, 2**28, 2**32 - 1))
                yield struct.pack("<II", size, dice.choice((8, size & 2**16 - 1, size, 0))) + dice.randbytes(40)
            else:
                yield dice.randbytes(dice.choice((1, 8, 64, 5000)))

    def _login(self, mechanism: str, messages: list[bytes], dice: random.Random) -> Iterator[bytes]:
        for data in messages:
            if dice.random() < 0.05:
                yield dice.choice(REQUESTS)
            said = SaslAuthenticate(dice.randrange(100), mechanism, maybe(data, dice, 0.1)[:32_000])
            yield maybe(frame(said), dice, 0.05)

    def case(self, dice: random.Random) -> Iterator[str]:
        authenticator = self._credentials if dice.random() < 0.5 else None
        lifetime_ms = dice.choice((0, 1000, -1)) if dice.random() < 0.2 else 0
        login = ServerLogin((*SCRAM, OAUTHBEARER), self._good.begin, lambda step: lifetime_ms)
        only_proved = dice.random() < 0.1
        end = ServerEnd(
            lambda cid, version: HelloReply(cid, version, 1, 1, "c", 2**20, "boot", "/local", "unix"),
            2**20,
            authenticator,
            None if only_proved else login,
            only_proved=only_proved,
        )
        sent = b""
        admitted = has_logged_in = False
        for said in self._frames(dice):
            if admitted and dice.random() < 0.1:
                end.session_expired()
                admitted = False
                yield "expired"
            for piece in pieces(said, dice):
                sent += piece
                for event in received(end, piece):
                    if isinstance(event, ReceivedRequest):
                        assert admitted, f"{event.request} is served before the login"
                        yield "served"
                        continue
                    size = sum(len(part) for part in end.encode_answer(event.reply))
                    assert size <= MAX_REPLY, f"reply of {size} bytes"
                    if isinstance(event.reply, SaslAuthenticateReply) and event.reply.complete:
                        assert login.principal is not None and lifetime_ms >= 0
                        self._good.check_proved(login.principal, sent)
                        admitted = has_logged_in = True
                        yield "logged in"
                    elif isinstance(event.reply, ErrorReply):
                        yield ErrorCode(event.reply.code).name
                        assert admitted or event.close or not end.admitted
                    if event.close:
                        return
                assert end.admitted == admitted and end.identity is None and end.session is None
                assert has_logged_in or (not end.is_body_in_progress and len(end.get_buffer()) <= MAX_BUFFER)


# --- the end of a listener for Kafka clients -----------------------------------------------------------------------


class KafkaTarget:
    """The end of a Kafka listener. Only a proof admits a client, and only as the principal whose proof it is.

    Each answer of the end is a response that a client can read, to a request that the client has sent.
    """

    def __init__(self, good: Good) -> None:
        self._good = good
        protocol: Any = KafkaProtocol
        protocol = protocol(
            dict.fromkeys(API_VERSIONS),
            None,
            max_frame_bytes=2**20,
            counters={},
            on_lost=None,
            quotas=None,
            slices=None,
        )
        self._api_versions = protocol._api_versions
        self._others = sorted(set(API_VERSIONS) - {ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
        #: The headers of the requests without a mutation, by correlation id.
        self._sent: dict[int, RequestHeader] = {}

    def _frame(self, key: int, request: Any, dice: random.Random, often: float = 0.1, version: int = -1) -> bytes:
        first, last = PARSED_VERSIONS[ApiKey(key)]
        header = RequestHeader(
            key,
            dice.randint(first, last) if version < 0 else version,
            dice.randrange(2**31),
            dice.choice((None, "", "fuzz", "x" * 300)),
        )
        whole = b"".join(map(bytes, request_frame(header, request)))
        said = maybe(whole[4:], dice, often)
        if said == whole[4:]:
            self._sent[header.correlation_id] = header
        length = (
            len(said) if dice.random() < 0.97 else dice.choice((0, 2**31, 2**32 - 1, len(said) // 2, 2**20, 40_000))
        )
        return struct.pack(">I", length) + said

    def _versions(self, dice: random.Random) -> bytes:
        name = dice.choice(("", "librdkafka", "x" * 400, "\x00 -"))
        said = ApiVersionsRequest(client_software_name=name, client_software_version=dice.choice(("", "4.1.1", name)))
        return self._frame(ApiKey.API_VERSIONS, said, dice)

    def _login(self, mechanism: str, messages: list[bytes], dice: random.Random) -> Iterator[bytes]:
        if dice.random() < 0.95:
            said = mechanism if dice.random() < 0.95 else dice.choice((*SCRAM, OAUTHBEARER, "PLAIN", "", "x" * 200))
            version = 0 if dice.random() < 0.03 else 1
            yield self._frame(ApiKey.SASL_HANDSHAKE, SaslHandshakeRequest(mechanism=said), dice, 0.05, version)
        for data in messages:
            if dice.random() < 0.05:
                yield self._other(dice)
            token = SaslAuthenticateRequest(auth_bytes=maybe(data, dice, 0.1))
            yield self._frame(ApiKey.SASL_AUTHENTICATE, token, dice, 0.05)

    def _other(self, dice: random.Random) -> bytes:
        key = dice.choice(self._others)
        return self._frame(key, KAFKA_REQUESTS[ApiKey(key)].declared(), dice)

    def _frames(self, dice: random.Random) -> Iterator[bytes]:
        if dice.random() < 0.8:
            yield self._versions(dice)
        for _ in range(dice.randrange(1, 6)):
            kind = dice.randrange(10)
            if kind <= 4:
                mechanism, _, messages, _ = dice.choice(self._good.logins)
                yield from self._login(mechanism, messages, dice)
            elif kind == 5:
                yield from self._login(*dice.choice(self._good.wrong), dice)
            elif kind == 6:
                yield self._versions(dice)
            elif kind == 7:
                yield self._other(dice)
            elif kind == 8:  # Headers of unknown APIs and versions, of a known correlation id or of none.
                yield struct.pack(">IhhI", 8 + 40, dice.choice((18, 17, 36, 3, -1, 99, 2**15 - 1)),
                                  dice.choice((0, 1, 4, 5, 99, -1, 2**15 - 1)), 7) + dice.randbytes(40)  # fmt: skip
            else:
                size = dice.choice(
                    (0, 1, 64, 40_000, MAX_LOGIN_BYTES, MAX_LOGIN_BYTES + 1, 2**20, 2**31 - 1, 2**32 - 1)
                )
                yield struct.pack(">I", size) + dice.randbytes(dice.choice((0, 1, 8, 64, 5000)))

    def case(self, dice: random.Random) -> Iterator[str]:
        self._sent.clear()
        lifetime_ms = dice.choice((0, 1000, -1)) if dice.random() < 0.2 else 0
        login = ServerLogin((*SCRAM, OAUTHBEARER), self._good.begin, lambda step: lifetime_ms)
        end = KafkaServerEnd(self._api_versions, 2**20, login, served=API_VERSIONS)
        sent = b""
        admitted = has_logged_in = False
        for said in self._frames(dice):
            if admitted and dice.random() < 0.1:
                end.session_expired()
                admitted = False
                yield "expired"
            for piece in pieces(said, dice):
                sent += piece
                for event in received(end, piece):
                    if isinstance(event, ReceivedRequest):
                        assert admitted, f"{event.request} is served before the login"
                        assert isinstance(event.request, KafkaRequest)
                        yield "served"
                        continue
                    reply = event.reply
                    if isinstance(reply, SaslAuthenticateReply) and reply.complete:
                        assert login.principal is not None and lifetime_ms >= 0
                        self._good.check_proved(login.principal, sent)
                        admitted = has_logged_in = True
                        yield "logged in"
                    elif isinstance(reply, ErrorReply):
                        assert event.close
                        yield ErrorCode(reply.code).name
                    yield from self._check_response(b"".join(map(bytes, end.encode_answer(reply))))
                    if event.close:
                        return
                assert end.admitted == admitted and end.identity is None and end.session is None
                assert len(end.client_id) <= 255 and len(end.software) <= 511
                assert has_logged_in or (not end.is_body_in_progress and len(end.get_buffer()) <= MAX_BUFFER)

    def _check_response(self, whole: bytes) -> Iterator[str]:
        """Check a response of the end, as a client reads it."""
        if not whole:
            return
        assert len(whole) <= MAX_REPLY and int.from_bytes(whole[:4], "big") == len(whole) - 4
        header = self._sent.get(int.from_bytes(whole[4:8], "big"))
        if header is not None:
            _, message = decode_response_header(header.api_key, header.api_version, memoryview(whole)[4:])
            decode_response(header.api_key, header.api_version, message)
            yield f"{ApiKey(header.api_key).name} answered"


# --- the mechanisms ---------------------------------------------------------------------------------------------------


def _signed(header: bytes, payload: bytes, algorithm: str, key: Any) -> str:
    said = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, payload))
    signature = jwt.get_algorithm_by_name(algorithm).sign(said, key)
    return f"{said.decode()}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


#: Values that a claim or a header of a token may have.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**400, 1e308, math.inf, -math.inf, math.nan, "", "0", "anna", "\x00"),
    *("a" * 300, "\ud800"),
    *([], {}, [AUDIENCE], ["x", AUDIENCE], [None], {"a": []}, [[[]]], "none", "HS256", "ES256", ISSUER, AUDIENCE),
)  # fmt: skip


class MechanismTarget:
    """The mechanisms and the validator. They raise only BrokerError, and only proofs and valid tokens log in."""

    def __init__(self, good: Good) -> None:
        self._good = good

    def case(self, dice: random.Random) -> Iterator[str]:
        yield self._exchange(dice) if dice.random() < 0.5 else self._token(dice)

    def _exchange(self, dice: random.Random) -> str:
        mechanism, _, messages, _ = dice.choice(self._good.logins)
        server = self._good.begin(mechanism)
        sent = b""
        try:
            for data in [*messages, b"\x01"][: dice.choice((1, 2, 3))]:
                said = maybe(data, dice, 0.5)
                sent += said
                step = server.step(said)
                assert len(step.data) <= 4096
                if step.principal is not None:
                    self._good.check_proved(step.principal, sent)
                    return f"{mechanism} logged in"
        except BrokerError as error:
            return f"{mechanism} {error.code.name}"
        return "not complete"

    def _token(self, dice: random.Random) -> str:
        kind = dice.randrange(4)
        if kind == 0:
            text = mutated(dice.choice(self._good.tokens).encode(), dice).decode("latin-1")
            return self._judge(text, "anna")
        if kind == 1:
            return self._judge(maybe(dice.choice(self._good.forged).encode(), dice).decode("latin-1"), None)
        algorithm = dice.choice(("ES256", "EdDSA"))
        header: dict[str, Any] = {"alg": algorithm, "typ": "JWT", "kid": algorithm}
        payload = claims()
        for _ in range(dice.choice((0, 1, 1, 2))):
            payload[dice.choice(("iss", "aud", "sub", "exp", "iat", "nbf", "jti", "x"))] = dice.choice(VALUES)
        if dice.random() < 0.3:
            header[dice.choice(("alg", "kid", "typ", "crit", "b64", "x"))] = dice.choice(VALUES)
        data = json.dumps(payload).encode()
        if kind == 2:
            text = _signed(maybe(json.dumps(header).encode(), dice, 0.1), data, algorithm, SIGNERS[algorithm])
            return self._judge(text, payload.get("sub"), payload)
        broken = mutated(data, dice)
        return self._judge(_signed(json.dumps(header).encode(), broken, algorithm, SIGNERS[algorithm]), ...)

    def _judge(self, text: str, name: Any, payload: dict[str, Any] | None = None) -> str:
        """Validate a token, which may give ``name`` only; None for no name, and ... for any."""
        try:
            valid = self._good.validator.validate(text)
        except BrokerError as error:
            assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED and len(str(error)) < 300
            return "token refused"
        assert name is ... or (isinstance(name, str) and valid.principal == Principal(USER, name)), (valid, name)
        if payload is not None:
            assert payload["iss"] == ISSUER
            assert payload["aud"] == AUDIENCE or AUDIENCE in payload["aud"]
            assert payload["exp"] > time.time() - 40
        return "token accepted"


# --- the client -------------------------------------------------------------------------------------------------------

ANNA = {"security.protocol": "SASL_PLAINTEXT", "sasl.username": "anna", "sasl.password": PASSWORDS["anna"]}


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


class Hostile:
    """A server that answers like a broker, and changes some of its replies."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        #: Whether it has sent its proof.
        self.has_proved = False
        wrong = {key: ScramCredential.derive(key[0], "other", SALT, MIN_ITERATIONS) for key in CREDENTIALS}
        self._credentials = dice.choice((CREDENTIALS, CREDENTIALS, wrong))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dice = self._dice
        login = ServerLogin(SCRAM, lambda name: scram_server(name, self._credentials), lambda step: 0)
        end = ServerEnd(lambda cid, version: HelloReply(cid, version, 1, 1, "c", 2**20), 2**20, None, login)
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                end.get_buffer()[: len(data)] = data
                for event in end.buffer_updated(len(data)):
                    if isinstance(event, ReceivedRequest) or event.close:
                        writer.close()
                        return
                    assert not isinstance(event.reply, EncodedReply)
                    self._reply(event.reply, dice, writer)
        writer.close()

    def _reply(self, reply: Reply, dice: random.Random, writer: asyncio.StreamWriter) -> None:
        is_last = isinstance(reply, SaslAuthenticateReply) and reply.complete
        if isinstance(reply, SaslAuthenticateReply) and dice.random() < 0.3:
            complete = dice.choice((reply.complete, True, False))
            data = maybe(reply.data, dice, 0.8)
            is_last = is_last and complete and data.partition(b",")[0] == reply.data
            reply = SaslAuthenticateReply(reply.cid, data[:32_000], complete, dice.choice((0, -5, 2**63 - 1)))
        said = b"".join(map(bytes, encode_reply(reply)))
        changed = maybe(said, dice, 0.15)
        # A change elsewhere in the frame leaves the proof as it is.
        self.has_proved |= is_last and (reply.data if isinstance(reply, SaslAuthenticateReply) else b"") in changed
        writer.write(changed)
        if changed != said:
            writer.close()


class ConnectionTarget:
    """Both kinds of connections, with a hostile server. They raise only BrokerError."""

    def __init__(self, good: Good) -> None:
        self._security = {name: ClientSecurity.parse({**ANNA, "sasl.mechanism": name}) for name in SCRAM}
        self._loop = asyncio.new_event_loop()
        self._failures: list[str] = []
        self._loop.set_exception_handler(lambda loop, context: self._failures.append(repr(context)))

    def case(self, dice: random.Random) -> Iterator[str]:
        outcome = self._loop.run_until_complete(self._run(dice))
        assert not self._failures, self._failures
        yield outcome

    async def _run(self, dice: random.Random) -> str:
        hostile = Hostile(dice)
        server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        security = self._security[dice.choice(SCRAM)]
        try:
            if dice.random() < 0.7:
                kind = "async"
                one = await AsyncConnection.open(
                    "127.0.0.1", port, client_id="fuzz", connect_timeout_s=2.0, security=security
                )
                assert hostile.has_proved
                one.abort()
            else:
                kind = "blocking"
                await asyncio.to_thread(self._block, port, security)
                assert hostile.has_proved
        except BrokerError as error:
            return f"{kind} {error.code.name}"
        finally:
            server.close()
        return f"{kind} logged in"

    @staticmethod
    def _block(port: int, security: ClientSecurity) -> None:
        BlockingConnection("127.0.0.1", port, client_id="fuzz", timeout_s=2.0, security=security).close()


# --- TLS --------------------------------------------------------------------------------------------------------------


class Logins(ScramLogins):
    """Logins that refuse another mechanism, as a broker's do."""

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        if mechanism not in SCRAM:
            raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"mechanism {mechanism!r} is not enabled")
        return super().begin(mechanism, connection)


class TlsTarget:
    """A listener with TLS. It continues to serve others, and gives every slot back."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._certificates = Certificates(directory)
        self._logins = Logins(0)
        self._server = secure(kind, self._certificates.server(), self._logins, max_connections=100)
        self._good = ClientSecurity.parse({**ANNA, "security.protocol": "SASL_SSL", "sasl.mechanism": SCRAM_SHA_256,
                                           "ssl.ca.location": self._certificates.ca})  # fmt: skip
        self._context = ssl.create_default_context(cafile=self._certificates.ca)
        self._failures: list[str] = []
        self._cases = 0

    @contextmanager
    def running(self) -> Iterator[TlsTarget]:
        with self._server as served:
            self.served = served
            failed = self._failures
            served.loop.call_soon_threadsafe(
                served.loop.set_exception_handler, lambda loop, context: failed.append(repr(context))
            )
            # A user that has logged in before does not wait for the failed logins of others at its address.
            self.check()
            yield self
            self.check()

    def check(self) -> None:
        """Check that another client is served, and that no slot remains taken."""
        one = BlockingConnection("127.0.0.1", self.served.port, client_id="good", timeout_s=20, security=self._good)
        reply, _ = one.request(Metadata(0))
        assert isinstance(reply, Ack)
        one.close()
        wait_until(lambda: self.served.open_connections() == 0, "the slots are given back")
        self.served.connections.clear()
        assert not self._failures, self._failures

    def _client_hello(self, dice: random.Random) -> bytes:
        outgoing = ssl.MemoryBIO()
        context = ssl.create_default_context()
        if dice.random() < 0.5:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        one = context.wrap_bio(
            ssl.MemoryBIO(), outgoing, server_hostname=dice.choice(("localhost", f"{'x' * 60}.localhost"))
        )
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
        return outgoing.read()

    def case(self, dice: random.Random) -> Iterator[str]:
        self._cases += 1
        if self._cases % 200 == 0:
            self.check()
            yield "checked"
        with contextlib.closing(socket.create_connection(("127.0.0.1", self.served.port), 10)) as plain:
            plain.settimeout(10)
            kind = dice.choice(("random", "truncated", "mutated", "mutated", "records", "frames"))
            try:
                if kind == "frames":
                    with self._context.wrap_socket(plain, server_hostname="127.0.0.1") as inner:
                        first = frame(SaslAuthenticate(1, SCRAM_SHA_256, b"n,,n=eve,r=aaaaaaaaa"))
                        inner.sendall(frame(hello("fuzz")) + maybe(first, dice, 0.9))
                        if dice.random() < 0.5:
                            inner.settimeout(0.05)
                            inner.recv(1000)
                else:
                    self._send(plain, kind, dice)
            except (OSError, TimeoutError):
                yield f"{kind} closed"
            if dice.random() < 0.3:
                with contextlib.suppress(OSError):
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield kind

    def _send(self, plain: socket.socket, kind: str, dice: random.Random) -> None:
        if kind == "random":
            data = dice.choice((b"", b"\x16", b"\x16\x03\x01")) + dice.randbytes(dice.choice((0, 1, 5, 100, 20_000)))
        elif kind == "records":
            data = b"".join(
                struct.pack(
                    ">BHH", dice.choice((0x14, 0x15, 0x16, 0x17)), 0x0301, dice.choice((0, 1, 2**14, 2**16 - 1))
                )
                + dice.randbytes(dice.choice((0, 1, 100)))
                for _ in range(dice.choice((1, 3, 500)))
            )
        else:
            data = self._client_hello(dice)
            data = data[: dice.randrange(len(data))] if kind == "truncated" else mutated(data, dice)
        for piece in pieces(data, dice) if len(data) < 500 else [data]:
            plain.sendall(piece)
        if dice.random() < 0.3:
            plain.settimeout(0.02)
            plain.recv(1000)


# --- the process ------------------------------------------------------------------------------------------------------


@contextmanager
def target(name: str, seed: int) -> Iterator[Callable[[random.Random], Iterator[str]]]:
    """Yield the function that runs one case of a target."""
    with tempfile.TemporaryDirectory() as directory:
        if name == "tls":
            with TlsTarget(Path(directory), "uvloop" if seed % 2 else "asyncio").running() as tls:
                yield tls.case
        else:
            kinds: dict[str, Callable[[Good], Any]] = {
                "server": ServerTarget,
                "kafka": KafkaTarget,
                "mechanisms": MechanismTarget,
                "client": ClientTarget,
                "connections": ConnectionTarget,
            }
            yield kinds[name](Good(Path(directory))).case


def _rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def main(name: str, seeds: str, seconds: float, cases: int) -> None:
    seed, _, only = seeds.partition(":")
    tally: collections.Counter[str] = collections.Counter()
    until_s = time.monotonic() + seconds
    before_kib = 0
    with target(name, int(seed)) as case:
        for number in range(int(only or 0), int(only) + 1 if only else cases):
            if time.monotonic() > until_s:
                break
            try:
                tally.update(case(random.Random(f"{seed}:{number}")))
            except BaseException as error:
                raise AssertionError(f"target {name}, case {seed}:{number}") from error
            tally["cases"] += 1
            if number == 2000:
                before_kib = _rss_kib()
        if before_kib:
            tally["growth in KiB"] = _rss_kib() - before_kib
            assert tally["growth in KiB"] < MAX_GROWTH_KIB, tally
    print(json.dumps(tally))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else sys.maxsize)
