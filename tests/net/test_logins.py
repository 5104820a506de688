"""Tests of a server whose listener requires a login: silent and failed logins, sessions, and the end of a principal's
connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import Principal
from sparklog.net.authentication import ListenerSecurity, LoginDelays
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import ClientEnd, hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import (
    Ack,
    DescribeBroker,
    ErrorReply,
    HelloReply,
    Metadata,
    Reply,
    Request,
    RequestUnixSocket,
    SaslAuthenticate,
    SaslAuthenticateReply,
    UnixSocketReply,
    encode_message,
)
from sparklog.protocol.proof import Secret
from sparklog.protocol.received import ReceivedReply
from sparklog.security.connection_limits import ConnectionLimits
from tests.net.test_connection_slots import NEVER_S, Scene, closed, served, until
from tests.net.two_step_login import MECHANISM, TwoStepLogins

PASSWORDS = {"anna": b"a-secret", "bert": b"b-secret"}


class Client:
    """A client that sends one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._end = ClientEnd()
        self._received: list[ReceivedReply] = []

    def send(self, message: Request) -> None:
        self.writer.write(b"".join(map(bytes, encode_frame(encode_message(message)))))

    async def reply(self) -> Reply:
        while not self._received:
            part = await asyncio.wait_for(self.reader.read(65536), 60)
            if not part:
                raise ConnectionResetError("closed by the broker")
            self._end.get_buffer()[: len(part)] = part
            self._received += self._end.buffer_updated(len(part))
        return self._received.pop(0).reply

    async def ask(self, message: Request) -> Reply:
        self.send(message)
        return await self.reply()

    async def log_in(self, user: str, password: bytes | None = None) -> Reply:
        reply = await self.ask(SaslAuthenticate(1, MECHANISM, user.encode()))
        assert reply == SaslAuthenticateReply(1, b"password?", False)
        return await self.ask(SaslAuthenticate(2, MECHANISM, password or PASSWORDS[user]))


async def greeted(scene: Scene) -> Client:
    client = Client(*await scene.silent())
    reply = await client.ask(hello("test"))
    assert isinstance(reply, HelloReply) and reply.sasl_mechanisms == (MECHANISM,)
    return client


async def logged_in(scene: Scene, user: str = "anna") -> Client:
    client = await greeted(scene)
    reply = await client.log_in(user)
    assert isinstance(reply, SaslAuthenticateReply) and reply.complete
    return client


@asynccontextmanager
async def protected(logins: TwoStepLogins | None = None, **options: object) -> AsyncIterator[Scene]:
    security = ListenerSecurity("SECURE", logins or TwoStepLogins())
    async with served(security=security, **options) as scene:
        yield scene


def connections(scene: Scene) -> list[ServerConnection]:
    return [one for one in scene.server._limits.places.connections if isinstance(one, ServerConnection)]


def test_a_connection_has_its_principal_host_and_listener() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            client = await greeted(scene)
            (connection,) = connections(scene)
            assert (str(connection.principal), connection.peer_host) == ("User:ANONYMOUS", "127.0.0.1")
            await client.log_in("anna")
            assert (str(connection.principal), connection.listener) == ("User:anna", "SECURE")
            assert isinstance(await client.ask(Metadata(3)), Ack)
            assert logins.events == [f"User:anna by {MECHANISM} from 127.0.0.1"]

    asyncio.run(test())


def test_a_request_before_the_login_is_refused_and_closes() -> None:
    async def test() -> None:
        async with protected() as scene:
            client = await greeted(scene)
            refused = await client.ask(Metadata(3))
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.ILLEGAL_SASL_STATE
            assert await closed(client.reader) == b""

    asyncio.run(test())


def test_connections_without_a_login_are_closed_in_time() -> None:
    async def test() -> None:
        async with protected(hello_s=1.5) as scene:
            user = await logged_in(scene)
            silent = Client(*await scene.silent())
            only_hello = await greeted(scene)
            half = await greeted(scene)
            await half.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            for one in (silent, only_hello, half):
                assert await closed(one.reader) == b""
            await scene.until(1)
            assert isinstance(await user.ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_connections_without_a_login_leave_their_slots_to_others() -> None:
    async def test() -> None:
        async with protected(max_connections=4) as scene:
            waiting = [await greeted(scene) for _ in range(4)]
            users = [await logged_in(scene) for _ in range(4)]
            for one in waiting:
                assert await closed(one.reader) == b""
            for user in users:
                assert isinstance(await user.ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_a_user_cannot_have_more_connections_than_its_limit() -> None:
    async def test() -> None:
        limits = ConnectionLimits(per_address=100, per_user=2, window_s=1)
        async with protected(connection_limits=limits) as scene:
            first, second = await logged_in(scene), await logged_in(scene)
            refused = await (await greeted(scene)).log_in("anna")
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
            assert refused.detail == "2 connections of User:anna are open, which is the maximum"
            await logged_in(scene, "bert")
            first.writer.close()
            await scene.until(2)
            assert isinstance(await (await logged_in(scene)).ask(Metadata(3)), Ack)
            assert isinstance(await second.ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_an_address_cannot_open_more_connections_than_its_limit() -> None:
    async def test() -> None:
        limits = ConnectionLimits(per_address=2, per_user=100, window_s=1)
        async with protected(connection_limits=limits) as scene:
            await logged_in(scene)
            await logged_in(scene, "bert")
            waiting = await greeted(scene)  # it does not count before its login
            refused = await waiting.log_in("bert")
            assert isinstance(refused, ErrorReply) and "address 127.0.0.1" in refused.detail
            assert await closed(waiting.reader) == b""

    asyncio.run(test())


def test_a_failed_login_gets_its_error_late_and_is_closed() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            delays_s = []
            for _ in range(3):
                client = await greeted(scene)
                began_s = time.monotonic()
                # A request after the wrong password must not show the failure earlier.
                await client.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
                client.send(SaslAuthenticate(2, MECHANISM, b"wrong"))
                client.send(Metadata(3))
                refused = await client.reply()
                delays_s.append(time.monotonic() - began_s)
                assert isinstance(refused, ErrorReply) and refused.cid == 2
                assert refused.code == ErrorCode.SASL_AUTHENTICATION_FAILED
                assert await closed(client.reader) == b""
            assert [delay_s >= least_s for delay_s, least_s in zip(delays_s, (0.1, 0.2, 0.4), strict=True)] == [
                True
            ] * 3
            assert logins.events == [f"SASL_AUTHENTICATION_FAILED by {MECHANISM} from 127.0.0.1"] * 3
            assert isinstance(await (await logged_in(scene)).ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_a_login_that_the_client_abandons_counts_as_failed() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            client = await greeted(scene)
            await client.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            client.writer.close()
            await scene.until(0)
            assert logins.events == [f"SASL_AUTHENTICATION_FAILED by {MECHANISM} from 127.0.0.1"]
            assert scene.server._limits.login_delays.failed("127.0.0.1", time.monotonic()) >= 0.2

    asyncio.run(test())


def test_an_unknown_mechanism_is_refused() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            refused = await (await greeted(scene)).ask(SaslAuthenticate(1, "PLAIN", b"\0anna\0a-secret"))
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
            assert logins.events == ["UNSUPPORTED_SASL_MECHANISM by PLAIN from 127.0.0.1"]

    asyncio.run(test())


@pytest.mark.parametrize("again", [False, True])
def test_a_session_ends_unless_the_client_logs_in_again(again: bool) -> None:
    async def test() -> None:
        async with protected(TwoStepLogins(lifetime_ms=300)) as scene:
            client = await greeted(scene)
            reply = await client.log_in("anna")
            assert isinstance(reply, SaslAuthenticateReply) and reply.session_lifetime_ms == 300
            for _ in range(4):
                await asyncio.sleep(0.1)
                if again:
                    await client.log_in("anna")
            if again:
                assert isinstance(await client.ask(Metadata(3)), Ack)
            else:
                refused = await client.ask(Metadata(3))
                assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.NETWORK_EXCEPTION
                assert await closed(client.reader) == b""

    asyncio.run(test())


def test_a_failed_second_login_ends_the_connection() -> None:
    async def test() -> None:
        async with protected() as scene:
            client = await logged_in(scene)
            client.send(DescribeBroker(8))
            await until(lambda: len(scene.held) == 1)
            client.send(SaslAuthenticate(9, MECHANISM, b"anna"))
            await client.reply()
            client.send(SaslAuthenticate(10, MECHANISM, b"wrong"))
            client.send(Metadata(11))
            refused = await client.reply()
            assert isinstance(refused, ErrorReply) and refused.cid == 10
            assert await closed(client.reader) == b""

    asyncio.run(test())


def test_the_connections_of_a_removed_user_are_closed() -> None:
    async def test() -> None:
        async with protected() as scene:
            anna, bert = await logged_in(scene, "anna"), await logged_in(scene, "bert")
            half = await greeted(scene)
            await half.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            assert scene.server.close_connections(Principal("User", "anna")) == 2
            for one in (anna, half):
                assert await closed(one.reader) == b""
            assert isinstance(await bert.ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_a_login_in_the_queue_ends_with_its_user() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            client = await greeted(scene)
            await client.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            (connection,) = connections(scene)
            connection.pause_writing()  # as if the client did not read
            client.send(SaslAuthenticate(2, MECHANISM, PASSWORDS["anna"]))
            await until(lambda: len(connection._queue) == 1)
            assert scene.server.close_connections(Principal("User", "anna")) == 1
            assert await closed(client.reader) == b""
            assert not logins.events

    asyncio.run(test())


def test_requests_that_wait_end_with_their_user() -> None:
    async def test() -> None:
        async with protected() as scene:
            client = await logged_in(scene)
            (connection,) = connections(scene)
            connection.pause_requests()
            client.send(DescribeBroker(8))
            await until(lambda: len(connection._queue) == 1)
            scene.server.close_connections(Principal("User", "anna"))
            connection.resume_requests()  # before the event loop reports the end of the connection
            assert not scene.held
            assert await closed(client.reader) == b""

    asyncio.run(test())


def test_a_token_belongs_to_the_login_just_before_it() -> None:
    async def test() -> None:
        async with protected(TwoStepLogins(lifetime_ms=60_000), within_host=True) as scene:
            client = await greeted(scene)
            await client.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            client.send(SaslAuthenticate(2, MECHANISM, PASSWORDS["anna"]))
            client.send(RequestUnixSocket(3))
            await client.reply()
            reply = await client.reply()
            assert isinstance(reply, UnixSocketReply)
            found = scene.server._limits.unix_tokens.take((Secret(reply.secret).key_id,))
            assert found is not None
            assert found[1].principal == Principal("User", "anna") and found[1].expires_s is not None

    asyncio.run(test())


def test_two_listeners_share_the_limits_of_one_server() -> None:
    async def test() -> None:
        async with served(max_connections=2) as scene:
            port = await scene.server.listen("127.0.0.1", 0, ListenerSecurity("SECURE", TwoStepLogins()))
            assert port != scene.server.port
            secure = Client(*await asyncio.open_connection("127.0.0.1", port))
            await secure.ask(hello("test"))
            await secure.log_in("anna")
            plain = await scene.client()
            assert isinstance((await plain.request(Metadata(0)))[0], Ack)
            third = Client(*await scene.silent())
            refused = await third.reply()
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
            assert {one.listener for one in connections(scene)} == {"SECURE", "PLAINTEXT"}
            secure.writer.close()

    asyncio.run(test())


def test_a_login_leaves_no_cycle_of_references() -> None:
    async def test() -> None:
        async with protected(TwoStepLogins(lifetime_ms=int(NEVER_S * 1000))) as scene:
            (await logged_in(scene)).writer.close()
            half = await greeted(scene)
            await half.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            half.writer.close()
            await scene.until(0)

    known = {id(one) for one in gc.get_objects() if type(one) is ServerConnection}
    gc.disable()
    try:
        asyncio.run(test())
        with contextlib.suppress(RuntimeError):
            left = [one for one in gc.get_objects() if type(one) is ServerConnection and id(one) not in known]
        assert not left
    finally:
        gc.enable()


def test_parallel_guesses_get_one_result_after_the_other() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            guesses = [await greeted(scene) for _ in range(5)]
            for guess in guesses:
                await guess.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
            began_s = time.monotonic()
            for number, guess in enumerate(guesses[:4], 1):
                guess.send(SaslAuthenticate(2, MECHANISM, b"wrong"))
                await until(partial(logins.has_events, number))
            guesses[4].send(SaslAuthenticate(2, MECHANISM, PASSWORDS["anna"]))
            replies = [await guess.reply() for guess in guesses]
            assert all(isinstance(reply, ErrorReply) for reply in replies[:4])
            assert isinstance(replies[4], SaslAuthenticateReply) and replies[4].complete
            assert time.monotonic() - began_s >= 0.1 + 0.2 + 0.4 + 0.8, "the right password waits for the wrong ones"

    asyncio.run(test())


def test_a_client_that_leaves_early_learns_no_result() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            for number in range(1, 4):
                guess = await greeted(scene)
                await guess.ask(SaslAuthenticate(1, MECHANISM, b"anna"))
                guess.send(SaslAuthenticate(2, MECHANISM, b"wrong"))
                await until(partial(logins.has_events, number))
                guess.writer.close()
            began_s = time.monotonic()
            right = await logged_in(scene)
            assert time.monotonic() - began_s >= 0.5
            assert isinstance(await right.ask(Metadata(3)), Ack)

    asyncio.run(test())


def test_beyond_the_limit_right_and_wrong_passwords_get_one_reply() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with protected(logins) as scene:
            delays = scene.server._limits.login_delays
            while delays.failed("127.0.0.1", time.monotonic()) < 60:
                pass
            replies = [await (await greeted(scene)).log_in("anna", password) for password in (None, b"wrong")]
            assert replies[0] == replies[1]
            refused = replies[0]
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
            assert logins.events == [f"THROTTLING_QUOTA_EXCEEDED by {MECHANISM} from 127.0.0.1"] * 2
            assert not connections(scene) or all(str(one.principal) == "User:ANONYMOUS" for one in connections(scene))

    asyncio.run(test())


def test_a_user_that_has_logged_in_lately_does_not_wait() -> None:
    async def test() -> None:
        async with protected() as scene:
            await logged_in(scene, "anna")
            delays = scene.server._limits.login_delays
            while delays.failed("127.0.0.1", time.monotonic(), "bert") < 60:
                pass
            await logged_in(scene, "anna")
            refused = await (await greeted(scene)).log_in("bert")
            assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.THROTTLING_QUOTA_EXCEEDED

    asyncio.run(test())


def test_a_connection_that_logs_in_again_does_not_wait() -> None:
    async def test() -> None:
        async with protected(TwoStepLogins(lifetime_ms=60_000)) as scene:
            client = await logged_in(scene)
            delays = scene.server._limits.login_delays
            while delays.failed("127.0.0.1", time.monotonic(), "anna") < 60:
                pass
            again = await client.log_in("anna")
            assert isinstance(again, SaslAuthenticateReply) and again.complete

    asyncio.run(test())


def test_delays_grow_by_address_and_are_forgotten() -> None:
    delays = LoginDelays(first_s=0.1, longest_s=3.0, memory_s=60.0, max_addresses=2)
    now_s, found = 1.0, []
    for _ in range(7):
        found.append(round(delays.failed("a", now_s), 3))
        now_s += found[-1]
    assert found == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
    assert delays.failed("b", now_s) == pytest.approx(0.1)
    assert delays.failed("a", now_s + 60.5) == pytest.approx(0.1)
    delays.failed("c", now_s + 62.0)
    assert delays.failed("a", now_s + 62.0) == pytest.approx(0.2)
    assert delays.failed("b", now_s + 62.0) == pytest.approx(0.1)


def test_an_address_learns_one_result_in_three_seconds() -> None:
    delays = LoginDelays()
    now_s, results = 0.0, 0
    while now_s < 600.0:  # A thousand guesses per second, of which only some get a result.
        results += delays.failed("a", now_s) != math.inf
        now_s += 0.001
    assert results <= 600 / 3 + 10
    assert delays.wait_s("a", now_s) == math.inf or delays.wait_s("a", now_s) > 1.0
    assert delays.wait_s("b", now_s) == 0.0, "another address does not wait"
    assert delays.wait_s("a", now_s + 9.0) == 0.0, "the address itself waits for some seconds at most"


def test_a_failed_guess_ends_the_priority_of_a_user() -> None:
    delays = LoginDelays(user_memory_s=10.0, max_addresses=2)
    delays.succeeded("a", 0.0, "anna")
    delays.failed("a", 1.0, "bert")
    assert delays.wait_s("a", 1.0, "anna") == 0.0
    assert delays.wait_s("a", 1.0, "bert") == pytest.approx(0.1)
    delays.failed("a", 1.0, "anna")
    assert delays.wait_s("a", 1.0, "anna") == pytest.approx(0.3)
    for name in ("one", "two", "three"):
        delays.succeeded("a", 1.0, name)
    assert [delays.wait_s("a", 1.0, name) > 0 for name in ("one", "two", "three")] == [True, False, False]
    delays.failed("a", 12.0)
    assert delays.wait_s("a", 12.0, "three") > 0, "the login of this user is too old"


def test_addresses_of_one_ipv6_network_share_their_failures() -> None:
    delays = LoginDelays(first_s=0.1)
    assert delays.failed("2001:db8:1:2::1", 1.0) == pytest.approx(0.1)
    assert delays.wait_s("2001:db8:1:2::ffff", 1.0) == pytest.approx(0.1)
    assert delays.wait_s("2001:db8:1:3::1", 1.0) == 0.0
