"""Tests of connections within a host: a client that reached a server directly continues on its Unix socket, and no
other does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net import unix_socket
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.server import serve
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import Ack, HelloReply, Metadata, Produce, encode_message
from sparklog.testing.proxies import ProxyNetwork
from tests.net.served import MAX_FRAME, Async, Blocking, Handler, Served, served
from tests.waiting import wait_until

SOMEBODY_ELSE = f"sparklog-test-{os.getpid()}"


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Client = Callable[[Served, str, int], "Blocking | Async"]


@pytest.fixture(params=[Blocking, Async])
def client(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def test_a_direct_client_switches_to_the_unix_socket(kind: str, client: Client) -> None:
    with served(kind) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_UNIX
        # an operator identifies the client by its TCP address
        assert connection.address == f"127.0.0.1:{server.server.port}"
        assert server.peers[0].startswith("127.0.0.1:") and server.peers[1:] == [f"local:{os.getpid()}"]
        for size in (0, 1, 40_000, MAX_FRAME - 100):
            body = bytes(i % 251 for i in range(size))
            assert connection.request(Produce(0, -1, 1000, ()), body)[1] == body
        wait_until(lambda: server.open_connections() == 1)  # the first connection is closed
        connection.close()
        wait_until(lambda: server.open_connections() == 0)


def test_a_broker_registered_between_its_greetings_is_accepted(kind: str, client: Client) -> None:
    """A controller connects as soon as the broker's registration exists, before the broker itself may know of it."""
    with served(kind) as server:
        server.registers = True
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_UNIX
        hello = connection._connection.hello
        assert hello is not None and hello.incarnation == server.incarnation == 5
        connection.close()


def test_the_unix_socket_exists_before_the_port_is_open() -> None:
    """In the other order a client that connects in between would stay on TCP permanently."""
    order: list[str] = []

    class Loop(asyncio.SelectorEventLoop):
        async def create_server(self, *args: Any, **options: Any) -> Any:
            order.append("TCP")
            return await super().create_server(*args, **options)

        async def create_unix_server(self, *args: Any, **options: Any) -> Any:
            order.append("Unix")
            return await super().create_unix_server(*args, **options)

    async def listen() -> None:
        server = await serve(
            lambda connection: Handler(connection, []),
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, 7, 3, "cluster-a", MAX_FRAME),
            max_frame_bytes=MAX_FRAME,
            max_in_flight=10,
            queued_max_bytes=MAX_FRAME,
            within_host=True,
        )
        await server.close()

    loop = Loop()
    try:
        loop.run_until_complete(listen())
    finally:
        loop.close()
    assert order == ["Unix", "TCP"]


def test_an_address_in_use_leaves_nothing_open(kind: str) -> None:
    with served(kind) as server:
        before = _descriptors()
        with pytest.raises(OSError, match="in use"):
            asyncio.run_coroutine_threadsafe(server._serve("127.0.0.1", server.server.port, True), server.loop).result(
                10
            )
        wait_until(lambda: _descriptors() <= before)


def test_a_client_of_a_proxy_stays_on_tcp(kind: str, client: Client) -> None:
    """The proxy has the broker's port and another address. The proxy could not disconnect a client that bypasses it."""
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


def test_an_unknown_socket_name_changes_nothing(kind: str, client: Client) -> None:
    """The name is unknown in another network namespace than the broker's."""
    with served(kind, within_host=False) as server:
        server.said.update(unix_socket=f"sparklog-test-{os.getpid()}", reached_at=("127.0.0.1", server.server.port))
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


def test_the_last_slots_are_for_tcp_clients(kind: str, client: Client) -> None:
    """The server must not refuse a client for which it has a slot, while other clients have two."""
    with served(kind, max_connections=102) as server:
        connections = [client(server, "127.0.0.1", server.server.port) for _ in range(2)]
        wait_until(lambda: server.open_connections() == 2)
        assert [connection.family for connection in connections] == [socket.AF_UNIX, socket.AF_INET]
        assert all(isinstance(connection.request(Metadata(0))[0], Ack) for connection in connections)
        connections += [client(server, "127.0.0.1", server.server.port) for _ in range(100)]
        with pytest.raises(BrokerError, match="at most 102 accepted"):
            client(server, "127.0.0.1", server.server.port)
        for connection in connections:
            connection.close()


@contextmanager
def somebody_else(kind: str, does: Callable[[socket.socket], object]) -> Iterator[Served]:
    """Run a server that advertises a foreign Unix socket. A client that connects there meets ``does``."""
    with socket.socket(socket.AF_UNIX) as listener, served(kind, within_host=False) as server:
        listener.bind(f"\0{SOMEBODY_ELSE}")
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                does(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        server.said.update(unix_socket=SOMEBODY_ELSE, reached_at=("127.0.0.1", server.server.port))
        yield server
        thread.join(10)


def _greets(connection: socket.socket, name: str, broker_id: int = 7, cluster_id: str = "cluster-a") -> None:
    connection.recv(1000)
    reply = HelloReply(1, 1, broker_id, 3, cluster_id, MAX_FRAME, unix_socket=name)
    connection.sendall(b"".join(encode_frame(encode_message(reply))))
    connection.recv(1000)  # until the client has disconnected


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda connection: None, id="ends at once"),
        pytest.param(lambda connection: connection.recv(1000), id="ends after the hello"),
        pytest.param(lambda connection: (connection.recv(1000), connection.recv(1000)), id="is silent"),
        pytest.param(lambda connection: _greets(connection, "another"), id="is in another life"),
        pytest.param(lambda connection: _greets(connection, ""), id="does not say which life it is in"),
        pytest.param(lambda connection: _greets(connection, SOMEBODY_ELSE, broker_id=8), id="is another broker"),
        pytest.param(lambda connection: _greets(connection, SOMEBODY_ELSE, cluster_id="b"), id="is of another cluster"),
    ],
)
def test_a_server_with_another_greeting_is_not_used(
    kind: str, client: Client, does: Callable[[socket.socket], object]
) -> None:
    with somebody_else(kind, does) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_INET and isinstance(connection.request(Metadata(0))[0], Ack)
        connection.close()


def test_a_unix_socket_with_the_brokers_greeting_is_used(kind: str, client: Client) -> None:
    """The same server as above, but with the right greeting."""
    with somebody_else(kind, lambda connection: _greets(connection, SOMEBODY_ELSE)) as server:
        connection = client(server, "127.0.0.1", server.server.port)
        assert connection.family == socket.AF_UNIX
        connection.close()


def test_a_broker_that_exits_between_greetings_is_not_reached(kind: str) -> None:
    """A client that believed the greeting would wait for the end of a connection that has already ended."""
    ended = threading.Event()

    def end(connection: socket.socket) -> None:
        connection.recv(1000)
        for greeted in list(server.server._limits.places.connections):
            server.loop.call_soon_threadsafe(greeted.close)
        ended.wait(10)

    with somebody_else(kind, end) as server:

        async def connect() -> None:
            opened = asyncio.ensure_future(AsyncConnection.open("127.0.0.1", server.server.port, client_id="test"))
            while server.server.connections or not server.peers:  # noqa: ASYNC110 - no event reports their end
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)  # the client notices in the same turn, or in the next ones
            ended.set()
            with pytest.raises(BrokerError):
                await opened

        asyncio.run_coroutine_threadsafe(connect(), server.loop).result(10)


def test_a_broker_that_exits_after_its_greeting_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets the same error as for any unreachable broker, and tries the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet_and_reset() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                reply = HelloReply(1, 1, 7, 3, "cluster-a", MAX_FRAME, unix_socket="x", reached_at=("127.0.0.1", 1))
                connection.sendall(b"".join(encode_frame(encode_message(reply))))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=greet_and_reset)
        greet = BlockingConnection._greet

        def greeted(self: BlockingConnection, *args: Any) -> HelloReply:
            reply = greet(self, *args)
            thread.join(10)
            return reply

        monkeypatch.setattr(BlockingConnection, "_greet", greeted)
        thread.start()
        with pytest.raises(BrokerError) as caught:
            BlockingConnection("127.0.0.1", listener.getsockname()[1], client_id="test")
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


@pytest.mark.parametrize("turns", range(12))
def test_a_client_that_gives_up_during_the_switch_leaves_nothing_open(kind: str, turns: int) -> None:
    with served(kind) as server:
        before = _descriptors()

        async def give_up() -> None:
            opened = asyncio.ensure_future(AsyncConnection.open("127.0.0.1", server.server.port, client_id="test"))
            while not server.peers:  # noqa: ASYNC110 - it is connected by TCP then
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            opened.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opened).close()

        asyncio.run_coroutine_threadsafe(give_up(), server.loop).result(10)
        wait_until(lambda: server.open_connections() == 0)
        wait_until(lambda: _descriptors() <= before)


@pytest.mark.parametrize("within_host", [True, False])
def test_received_responses_survive_the_end_of_the_connection(kind: str, within_host: bool) -> None:
    """A broker responds and exits while the client is about to send the next request. Over a Unix socket that send
    fails immediately. A client that did not see the response would write the acknowledged records again."""
    with served(kind, within_host=within_host) as server:
        library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
        loop = library.new_event_loop()

        async def ask() -> None:
            connection = await AsyncConnection.open("127.0.0.1", server.server.port, client_id="test")
            first = connection.request(Produce(0, -1, 1000, ()), [b"first"])
            await asyncio.sleep(0)
            # The loop reads nothing while it is blocked here: the response arrives, and then the end of the connection.
            wait_until(lambda: "answered" in server.done)
            server.close_all()
            second = connection.request(Produce(0, -1, 1000, ()), [b"second"])
            assert bytes((await first)[1]) == b"first"
            with pytest.raises(BrokerError):
                await second
            connection.close()

        try:
            loop.run_until_complete(asyncio.wait_for(ask(), 30))
        finally:
            loop.close()


def test_no_descriptor_stays_open(kind: str, client: Client) -> None:
    with served(kind) as server:
        client(server, "127.0.0.1", server.server.port).close()
        wait_until(lambda: server.open_connections() == 0)
        before = _descriptors()
        for _ in range(20):
            client(server, "127.0.0.1", server.server.port).close()
        wait_until(lambda: server.open_connections() == 0)
        wait_until(lambda: _descriptors() <= before)


def test_a_connection_reset_before_accept_does_no_harm(kind: str) -> None:
    """The system no longer knows the address of the peer."""
    with served(kind) as server:
        failed: list[object] = []
        server.loop.call_soon_threadsafe(
            server.loop.set_exception_handler, lambda loop, context: failed.append(context)
        )

        def reset() -> None:  # on the server's loop, which accepts it later
            with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        server.loop.call_soon_threadsafe(reset)
        wait_until(lambda: bool(server.peers or failed))
        wait_until(lambda: server.open_connections() == 0)
        assert not failed


def test_hundreds_switch_while_the_server_is_busy(kind: str) -> None:
    """A connection over a Unix socket succeeds immediately or not at all, so the listener's queue has a slot for
    each client that connects between two turns of the loop."""
    with served(kind) as server, socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as tcp:
        reached_at = tcp.getpeername()
        greeted = HelloReply(0, 1, 7, 3, "", 0, unix_socket=server.server.unix_socket, reached_at=reached_at)
        many = min(500, int(Path("/proc/sys/net/core/somaxconn").read_text()))
        came: Future[list[socket.socket | None]] = Future()
        server.loop.call_soon_threadsafe(  # the server accepts no connection meanwhile
            lambda: came.set_result([unix_socket.connect(greeted, reached_at) for _ in range(many)])
        )
        found = [connection for connection in came.result(10) if connection is not None]
        for connection in found:
            connection.close()
        assert len(found) == many
        wait_until(lambda: len(server.peers) == many + 1)


def test_a_closed_server_listens_on_no_socket(kind: str) -> None:
    with served(kind) as server, BlockingConnection("127.0.0.1", server.server.port, client_id="test") as connection:
        assert connection.hello.unix_socket == server.server.unix_socket  # the Unix socket also identifies the server
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as tcp:
            greeted = HelloReply(0, 1, 7, 3, "", 0, unix_socket=server.server.unix_socket, reached_at=tcp.getpeername())
        found = unix_socket.connect(greeted, greeted.reached_at)
        assert found is not None
        found.close()
    assert unix_socket.connect(greeted, greeted.reached_at) is None


@pytest.mark.parametrize("peer", [None, "", b"", ("10.0.0.1", 9092), ("127.0.0.1", 9093), ("::1", 9092, 0, 0)])
def test_another_peer_than_the_reached_one_is_not_used(peer: object) -> None:
    name, listener = unix_socket.bind()
    assert listener is not None
    with listener:
        listener.listen()
        greeted = HelloReply(0, 1, 7, 3, "", 0, unix_socket=name, reached_at=("127.0.0.1", 9092))
        assert unix_socket.connect(greeted, peer) is None
        found = unix_socket.connect(greeted, ("127.0.0.1", 9092))
        assert found is not None
        found.close()
