"""Tests of the logins of both kinds of connections by SCRAM: success, failures, sessions and requests in flight."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net import client_login
from sparklog.net.async_client import AsyncConnection
from sparklog.net.authentication import ListenerSecurity, LoginPeer
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, DescribeBroker, HelloReply, Metadata, Reply, Request
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512, SaslServer, ServerStep
from sparklog.protocol.scram import ScramCredential, ScramServer

MECHANISMS = (SCRAM_SHA_512, SCRAM_SHA_256)
PASSWORD = "a-secret"


class ScramLogins:
    """The ``Authentication`` of a listener with the user "anna"."""

    mechanisms = MECHANISMS

    def __init__(self, lifetime_ms: int) -> None:
        self.lifetime_ms = lifetime_ms
        self.successes = 0
        self.failures = 0
        self.password = PASSWORD

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        credential = ScramCredential.derive(mechanism, self.password, b"0123456789abcdef", 4096)
        return ScramServer(mechanism, lambda name: credential if name == "anna" else None, "server-nonce", b"d" * 32)

    def session_lifetime_ms(self, step: ServerStep) -> int:
        return self.lifetime_ms

    def succeeded(self, connection: LoginPeer, mechanism: str) -> None:
        self.successes += 1

    def failed(self, connection: LoginPeer, mechanism: str, error: BrokerError) -> None:
        self.failures += 1


class Handler:
    """A handler that delays DescribeBroker until ``release``, and acknowledges all other requests."""

    def __init__(self, connection: ServerConnection, held: list[Callable[[], None]]) -> None:
        self._connection = connection
        self._held = held

    def request_received(self, request: Request, body: memoryview) -> None:
        def answer() -> None:
            self._connection.reply(Ack(request.cid))

        if isinstance(request, DescribeBroker):
            self._held.append(answer)
        else:
            answer()

    def connection_lost(self) -> None:
        pass


class Protected:
    """A server in a thread whose listener requires a login, unless ``logins`` is None."""

    def __init__(self, kind: str, logins: ScramLogins | None) -> None:
        library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
        self.loop: asyncio.AbstractEventLoop = library.new_event_loop()
        self.logins = logins
        self.held: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server: Server = self.run(self._serve())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def _serve(self) -> Server:
        return await serve(
            lambda connection: Handler(connection, self.held),
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, 7, 3, "c", 1 << 20),
            max_frame_bytes=1 << 20,
            max_in_flight=10,
            queued_max_bytes=1 << 22,
            within_host=True,
            security=ListenerSecurity("SECURE", self.logins),
        )

    def release(self) -> None:
        self.run(self._release())

    async def _release(self) -> None:
        while not self.held:  # noqa: ASYNC110 - the request is on its way
            await asyncio.sleep(0.001)
        while self.held:
            self.held.pop()()

    def close(self) -> None:
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def protected(kind: str, logins: ScramLogins | None) -> Iterator[Protected]:
    server = Protected(kind, logins)
    try:
        yield server
    finally:
        server.close()


class Blocking:
    """A ``BlockingConnection`` with the interface that the tests use."""

    def __init__(self, server: Protected, security: ClientSecurity) -> None:
        self._server = server
        self._connection = BlockingConnection(
            "127.0.0.1", server.server.port, client_id="test", timeout_s=10, security=security
        )

    def request(self, request: Request) -> Reply:
        return self._connection.request(request)[0]

    def request_around(self, middle: Callable[[], None], request: Request) -> Reply:
        """Send a request, call ``middle``, and return the reply."""
        self._connection.send(request)
        middle()
        self._server.release()
        return self._connection.receive()[0]

    def close(self) -> None:
        self._connection.close()


class Async:
    """An ``AsyncConnection`` on the server's own loop, with the interface that the tests use."""

    def __init__(self, server: Protected, security: ClientSecurity) -> None:
        self._server = server
        opening = AsyncConnection.open("127.0.0.1", server.server.port, client_id="test", security=security)
        self._connection: AsyncConnection = server.run(opening)

    def request(self, request: Request) -> Reply:
        async def ask() -> Reply:
            return (await self._connection.request(request))[0]

        reply: Reply = self._server.run(ask())
        return reply

    def request_around(self, middle: Callable[[], None], request: Request) -> Reply:
        done: Future[Reply] = asyncio.run_coroutine_threadsafe(self._ask(request), self._server.loop)
        middle()
        self._server.release()
        return done.result(10)

    async def _ask(self, request: Request) -> Reply:
        return (await self._connection.request(request))[0]

    def close(self) -> None:
        self._server.loop.call_soon_threadsafe(self._connection.close)


Client = Callable[[Protected, ClientSecurity], "Blocking | Async"]


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[Blocking, Async])
def client(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def anna(password: str = PASSWORD, mechanism: str = SCRAM_SHA_256) -> ClientSecurity:
    return ClientSecurity.parse(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": "anna",
            "sasl.password": password,
        }
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_client_logs_in_by_scram(kind: str, client: Client, mechanism: str) -> None:
    logins = ScramLogins(0)
    with protected(kind, logins) as server:
        connection = client(server, anna(mechanism=mechanism))
        assert isinstance(connection.request(Metadata(0)), Ack)
        assert (logins.successes, logins.failures) == (1, 0)
        connection.close()


def failure(client: Client, server: Protected, security: ClientSecurity) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        client(server, security)
    return caught.value


def test_a_wrong_password_is_refused(kind: str, client: Client) -> None:
    with protected(kind, ScramLogins(0)) as server:
        error = failure(client, server, anna("not-it"))
        assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED and not error.retriable
        assert "not-it" not in str(error)


def test_a_broker_that_does_not_know_the_password_is_refused(kind: str, client: Client) -> None:
    """The reply of the last step proves that the broker has the credential."""

    class Forger(ScramLogins):
        def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
            genuine = super().begin(mechanism, connection)

            class Forged:
                def __init__(self) -> None:
                    self.mechanism, self.username = mechanism, ""

                def step(self, data: bytes) -> ServerStep:
                    step = genuine.step(data)
                    return step._replace(data=b"v=" + b"A" * 43 + b"=") if step.principal else step

            return Forged()

    with protected(kind, Forger(0)) as server:
        assert failure(client, server, anna()).code is ErrorCode.SASL_AUTHENTICATION_FAILED


def test_a_client_without_a_login_learns_what_the_listener_offers(kind: str, client: Client) -> None:
    with protected(kind, ScramLogins(0)) as server:
        error = failure(client, server, ClientSecurity())
        assert error.code is ErrorCode.ILLEGAL_SASL_STATE and SCRAM_SHA_512 in error.detail


def test_a_client_with_a_login_refuses_a_listener_without(kind: str, client: Client) -> None:
    with protected(kind, None) as server:
        assert failure(client, server, anna()).code is ErrorCode.ILLEGAL_SASL_STATE


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients log in again long before the end of a short session, because the machine may be slow."""
    monkeypatch.setattr(client_login, "_EARLIEST", 0.2)
    monkeypatch.setattr(client_login, "_LATEST", 0.3)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_client_logs_in_again_before_its_session_ends(kind: str, client: Client, in_flight: bool) -> None:
    logins = ScramLogins(1500)
    with protected(kind, logins) as server:
        connection = client(server, anna())

        def stay() -> None:
            end_s = time.monotonic() + 1.3
            while time.monotonic() < end_s:
                assert isinstance(connection.request(Metadata(0)), Ack)
                time.sleep(0.01)

        if in_flight and isinstance(connection, Blocking):
            # A blocking connection logs in when it sends the next request.
            connection._connection.send(DescribeBroker(0))
            time.sleep(0.5)
            connection._connection.send(Metadata(0))
            assert logins.successes == 2
            server.release()
            assert len({connection._connection.receive()[0].cid for _ in range(2)}) == 2
        elif in_flight:
            assert isinstance(connection.request_around(lambda: time.sleep(1.3), DescribeBroker(0)), Ack)
            assert logins.successes >= 3
        else:
            stay()
            assert logins.successes >= 3
        assert logins.failures == 0
        connection.close()


def test_a_changed_password_ends_the_session(kind: str, client: Client) -> None:
    logins = ScramLogins(1000)
    with protected(kind, logins) as server:
        connection = client(server, anna())
        logins.password = "changed"
        with pytest.raises(BrokerError) as caught:
            for _ in range(600):
                connection.request(Metadata(0))
                time.sleep(0.01)
        assert caught.value.code in {ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.NETWORK_EXCEPTION}
        with pytest.raises(BrokerError, match="SASL_AUTHENTICATION_FAILED"):
            client(server, anna())
        # On a busy machine the session may have expired before the first connection tried to log in again.
        assert logins.successes == 1 and logins.failures >= 1
        connection.close()
