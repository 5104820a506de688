"""Fuzzing of the end of a listener for Kafka clients, with logins by SCRAM and OAUTHBEARER."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

from sparklog.broker.kafka.kafka_protocol import KafkaProtocol
from sparklog.errors import ErrorCode
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
from sparklog.protocol.connection import MAX_LOGIN_BYTES, ImmediateAnswer
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import ErrorReply, SaslAuthenticateReply
from sparklog.protocol.sasl import OAUTHBEARER
from tests.broker.fuzz_logins.correct_logins import SCRAM, Good
from tests.broker.fuzz_logins.mutations import maybe
from tests.broker.fuzz_logins.server_ends import MAX_REPLY, converse


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

        def check(event: ImmediateAnswer, admitted: bool) -> Iterator[str]:
            if isinstance(event.reply, SaslAuthenticateReply) and event.reply.complete:
                assert lifetime_ms >= 0
            elif isinstance(event.reply, ErrorReply):
                assert event.close
                yield ErrorCode(event.reply.code).name
            yield from self._check_response(b"".join(map(bytes, end.encode_answer(event.reply))))

        def check_end() -> None:
            assert len(end.client_id) <= 255 and len(end.software) <= 511

        yield from converse(
            end,
            login,
            self._good,
            self._frames(dice),
            dice,
            check_reply=check,
            check_end=check_end,
            requests=KafkaRequest,
        )

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
