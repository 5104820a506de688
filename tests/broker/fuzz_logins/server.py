"""Fuzzing of the server end, with logins by SCRAM and OAUTHBEARER."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import get_args

from sparklog.errors import ErrorCode
from sparklog.net.greeting import Credentials, Greeting
from sparklog.protocol.connection import MAX_LOGIN_BYTES, ImmediateAnswer, ServerEnd, hello
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import (
    ErrorReply,
    HelloReply,
    Prove,
    Request,
    RequestUnixSocket,
    SaslAuthenticate,
    SaslAuthenticateReply,
)
from sparklog.protocol.proof import SECRET_BYTES, Identity, KeyRing, Secret
from sparklog.protocol.sasl import OAUTHBEARER
from sparklog.protocol.senders import SenderKind
from tests.broker.fuzz_logins.correct_logins import SCRAM, Good
from tests.broker.fuzz_logins.mutations import maybe
from tests.broker.fuzz_logins.server_ends import MAX_REPLY, converse, frame
from tests.protocol.test_login import sample

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

        def check(event: ImmediateAnswer, admitted: bool) -> Iterator[str]:
            size = sum(len(part) for part in end.encode_answer(event.reply))
            assert size <= MAX_REPLY, f"reply of {size} bytes"
            if isinstance(event.reply, SaslAuthenticateReply) and event.reply.complete:
                assert lifetime_ms >= 0
            elif isinstance(event.reply, ErrorReply):
                yield ErrorCode(event.reply.code).name
                assert admitted or event.close or not end.admitted

        yield from converse(end, login, self._good, self._frames(dice), dice, check_reply=check)
