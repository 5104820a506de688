"""Fuzzing of the client connections of both kinds, with a hostile server on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

from sparklog.errors import BrokerError
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.connection import EncodedReply, ServerEnd, encode_reply
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import HelloReply, Reply, SaslAuthenticateReply
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.scram import MIN_ITERATIONS, ScramCredential
from tests.broker.fuzz_logins.correct_logins import ANNA, CREDENTIALS, SALT, SCRAM, Good, scram_server
from tests.broker.fuzz_logins.mutations import maybe


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
