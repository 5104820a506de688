"""Connections within a host: whoever has reached a server directly goes on over its Unix socket, and nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparklog.errors import BrokerError
from sparklog.net import unix_socket
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.server import Server, ServerConnection, serve
from sparklog.protocol.messages import Ack, FetchReply, HelloReply, Metadata, Produce, Request
from sparklog.testing.proxies import ProxyNetwork
from tests.waiting import wait_until

MAX_FRAME = 4_000_000


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Handler:
    """Sends back the bodies of produces, acknowledges the rest."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection

    def request_received(self, request: Request, body: memoryview) -> None:
        if isinstance(request, Produce):
            self.connection.reply(FetchReply(request.cid, 0, 0, ()), [body])
        else:
            self.connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        pass


class Served:
    """A server on a loop of its own. ``peers``: who has connected, in order."""

    def __init__(
        self, kind: str, host: str = "127.0.0.1", port: int = 0, *, within_host: bool = True, **said: Any
    ) -> None:
        library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
        self.loop: asyncio.AbstractEventLoop = library.new_event_loop()
        self.peers: list[str] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._max_connections = int(said.pop("max_connections", 1000))
        self.said = said
        self.server = asyncio.run_coroutine_threadsafe(self._serve(host, port, within_host), self.loop).result(10)

    async def _serve(self, host: str, port: int, within_host: bool) -> Server:
        def make(connection: ServerConnection) -> Handler:
            self.peers.append(connection.peer)
            return Handler(connection)

        return await serve(
            make,
            host=host,
            port=port,
            describe=lambda cid, version: HelloReply(cid, version, 7, 3, "cluster-a", MAX_FRAME, **self.said),
            max_frame_bytes=MAX_FRAME,
            max_in_flight=10,
            queued_max_bytes=2 * MAX_FRAME,
            max_connections=self._max_connections,
            within_host=within_host,
        )

    def open_connections(self) -> int:
        found: Future[int] = Future()
        self.loop.call_soon_threadsafe(lambda: found.set_result(self.server.connections))
        return found.result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def served(kind: str, *args: Any, **options: Any) -> Iterator[Served]:
    server = Served(kind, *args, **options)
    try:
        yield server
    finally:
        server.close()


class Blocking:
    """A ``BlockingConnection``, as the tests need it."""

    def __init__(self, server: Served, host: str, port: int) -> None:
        self._connection = BlockingConnection(host, port, client_id="test", timeout_s=10)
        self.family = self._connection._socket.family
        self.address = self._connection.address

    def request(self, request: Request, body: bytes = b"") -> tuple[Any, bytes]:
        reply, returned = self._connection.request(request, [body])
        return reply, bytes(returned)

    def close(self) -> None:
        self._connection.close()


class Async:
    """An ``AsyncConnection`` on the server's own loop, as the tests need it."""

    def __init__(self, server: Served, host: str, port: int) -> None:
        self._loop = server.loop
        self._connection: AsyncConnection = self._run(AsyncConnection.open(host, port, client_id="test"))
        assert self._connection._transport is not None
        self.family = self._connection._transport.get_extra_info("socket").family
        self.address = self._connection.address

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def request(self, request: Request, body: bytes = b"") -> tuple[Any, bytes]:
        async def ask() -> tuple[Any, bytes]:
            reply, returned = await self._connection.request(request, [body])
            return reply, bytes(returned)

        answer: tuple[Any, bytes] = self._run(ask())
        return answer

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._connection.close)


Client = Callable[[Served, str, int], "Blocking | Async"]


@pytest.fixture(params=[Blocking, Async])
def client(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def test_who_connects_directly_goes_on_over_the_unix_socket(kind: str, client: Client) -> None:
    with served(kind) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_UNIX
        assert connection.address == f"127.0.0.1:{server.server.port}"  # which is what an operator knows it by
        assert server.peers[0].startswith("127.0.0.1:") and server.peers[1:] == ["local"]
        for size in (0, 1, 40_000, MAX_FRAME - 100):
            body = bytes(i % 251 for i in range(size))
            assert connection.request(Produce(0, -1, 1000, ()), body)[1] == body
        wait_until(lambda: server.open_connections() == 1)  # the first one is gone
        connection.close()
        wait_until(lambda: server.open_connections() == 0)


def test_who_comes_through_a_proxy_stays_on_his_way(kind: str, client: Client) -> None:
    """It has the port of the broker, and another address; whoever goes round it would not be cut off by it."""
    network = ProxyNetwork()
    try:
        address = network.add_broker(0)
        with served(kind, address.bind_host, address.port) as server:
            through = client(server, address.host, address.port)
            assert through.family == socket.AF_INET and isinstance(through.request(Metadata(0))[0], Ack)
            directly = client(server, address.bind_host, address.port)
            assert directly.family == socket.AF_UNIX
            through.close()
            directly.close()
    finally:
        network.close()


def test_without_the_setting_there_is_no_unix_socket(kind: str, client: Client) -> None:
    with served(kind, within_host=False) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


def test_a_name_that_nobody_has_here_changes_nothing(kind: str, client: Client) -> None:
    """As in another network namespace than the broker's."""
    with served(kind, within_host=False) as server:
        server.said.update(unix_socket=f"sparklog-test-{os.getpid()}", reached_at=("127.0.0.1", server.server.port))
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


def test_a_broker_with_no_room_for_a_second_connection_keeps_the_first(kind: str, client: Client) -> None:
    with served(kind, max_connections=1) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        with pytest.raises(BrokerError, match="at most 1 accepted"):
            client(server, "127.0.0.1", server.server.port)
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


@pytest.mark.parametrize("ends", ["at once", "after the hello"])
def test_a_unix_socket_that_ends_the_connection_is_not_used(kind: str, client: Client, ends: str) -> None:
    name = f"sparklog-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, served(kind, within_host=False) as server:
        listener.bind(f"\0{name}")
        listener.listen()

        def turn_away() -> None:
            connection, _ = listener.accept()
            if ends == "after the hello":
                connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=turn_away)
        thread.start()
        server.said.update(unix_socket=name, reached_at=("127.0.0.1", server.server.port))
        connection = client(server, "127.0.0.1", server.server.port)
        thread.join(10)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


def test_nothing_stays_open(kind: str, client: Client) -> None:
    with served(kind) as server:
        client(server, "127.0.0.1", server.server.port).close()
        wait_until(lambda: server.open_connections() == 0)
        before = _descriptors()
        for _ in range(20):
            client(server, "127.0.0.1", server.server.port).close()
        wait_until(lambda: server.open_connections() == 0)
        wait_until(lambda: _descriptors() <= before)


def test_a_server_that_has_closed_listens_nowhere(kind: str) -> None:
    with served(kind) as server, BlockingConnection("127.0.0.1", server.server.port, client_id="test") as connection:
        assert connection.hello.unix_socket == ""  # whoever is there need not be told
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as tcp:
            greeted = HelloReply(0, 1, 7, 3, "", 0, unix_socket=server.server.unix_socket, reached_at=tcp.getpeername())
        found = unix_socket.connect(greeted, greeted.reached_at)
        assert found is not None
        found.close()
    assert unix_socket.connect(greeted, greeted.reached_at) is None


@pytest.mark.parametrize("peer", [None, "", b"", ("10.0.0.1", 9092), ("127.0.0.1", 9093), ("::1", 9092, 0, 0)])
def test_another_peer_than_was_reached_is_no_reason_to_connect(peer: object) -> None:
    name, listener = unix_socket.listen()
    assert listener is not None
    with listener:
        greeted = HelloReply(0, 1, 7, 3, "", 0, unix_socket=name, reached_at=("127.0.0.1", 9092))
        assert unix_socket.connect(greeted, peer) is None
        found = unix_socket.connect(greeted, ("127.0.0.1", 9092))
        assert found is not None
        found.close()
