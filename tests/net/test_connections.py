"""Tests of both kinds of clients against the real server on loopback: responses, errors, limits and back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.loop import new_event_loop
from sparklog.net.native_protocol import HandlerFactory
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import (
    Ack,
    DeleteTopic,
    DescribeBroker,
    ErrorReply,
    Fetch,
    FetchReply,
    HelloReply,
    Metadata,
    Produce,
    Request,
    encode_message,
)
from tests.waiting import wait_until

T = TypeVar("T")

MAX_FRAME = 1 << 20
MAX_IN_FLIGHT = 4
QUEUED = 2 << 20
MAX_CONNECTIONS = 20


class EchoHandler:
    """A handler that echoes a produce in a FetchReply, delays DescribeBroker until ``answer_held``, and fails
    DeleteTopic."""

    def __init__(self, connection: ServerConnection, received: list[Request]) -> None:
        self.connection = connection
        self.received = received
        self.held: list[int] = []
        self.lost = 0

    def answer_held(self) -> None:
        """Respond to the delayed requests, as a broker does at the latest when a request's timeout has passed."""
        for cid in self.held:
            self.connection.reply(Ack(cid))
        self.held.clear()

    def request_received(self, request: Request, body: memoryview) -> None:
        self.received.append(request)
        match request:
            case Produce(acks=0):
                self.connection.done(request.cid)
            case Produce():
                self.connection.reply(FetchReply(request.cid, 0, 0, ()), [body])
            case DeleteTopic():
                self.connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic"))
            case Fetch(max_bytes=size):
                self.connection.reply(FetchReply(request.cid, 0, 0, ()), [bytes(size)])
            case DescribeBroker():
                self.held.append(request.cid)
            case _:
                self.connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        self.lost += 1


async def _served(make: HandlerFactory) -> Server:
    return await serve(
        make,
        host="127.0.0.1",
        port=0,
        describe=lambda cid, version: HelloReply(cid, version, 7, 3, "cluster-a", MAX_FRAME),
        max_frame_bytes=MAX_FRAME,
        max_in_flight=MAX_IN_FLIGHT,
        queued_max_bytes=QUEUED,
        max_connections=MAX_CONNECTIONS,
    )


class Echo:
    """A server on a loop in a thread."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self.received: list[Request] = []
        self.handlers: list[EchoHandler] = []
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server: Server = self.run(self._serve())
        self.port = self.server.port

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def answer_held(self) -> None:
        def answer() -> None:
            for handler in self.handlers:
                handler.answer_held()

        self.loop.call_soon_threadsafe(answer)

    def on_loop(self, function: Callable[[], int]) -> int:
        future: Future[int] = Future()
        self.loop.call_soon_threadsafe(lambda: future.set_result(function()))
        return future.result(10)

    async def _serve(self) -> Server:
        def make(connection: ServerConnection) -> EchoHandler:
            self.handlers.append(EchoHandler(connection, self.received))
            return self.handlers[-1]

        return await _served(make)

    def close(self) -> None:
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def connect(echo: Echo, cluster_id: str = "") -> BlockingConnection:
    return BlockingConnection("127.0.0.1", echo.port, client_id="test", cluster_id=cluster_id, timeout_s=10)


def produce(acks: int = -1) -> Produce:
    return Produce(0, acks, 1000, ())


@pytest.mark.parametrize("size", [0, 1, 40_000, MAX_FRAME - 100])
def test_bodies_survive_the_round_trip(echo: Echo, size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    with connect(echo) as connection:
        assert connection.hello == HelloReply(1, 1, 7, 3, "cluster-a", MAX_FRAME)
        for _ in range(3):
            reply, returned = connection.request(produce(), [body[: size // 2], body[size // 2 :]])
            assert isinstance(reply, FetchReply)
            assert bytes(returned) == body


def test_requests_beyond_the_in_flight_limit_all_get_responses(echo: Echo) -> None:
    with connect(echo) as connection:
        cids = [connection.send(produce(), [bytes([n])]) for n in range(50)]
        answers = [connection.receive() for _ in cids]
        assert [reply.cid for reply, _ in answers] == cids
        assert [bytes(body) for _, body in answers] == [bytes([n]) for n in range(50)]


def test_an_error_response_is_typed_and_the_connection_stays_usable(echo: Echo) -> None:
    with connect(echo) as connection:
        with pytest.raises(BrokerError, match="no such topic") as caught:
            connection.request(DeleteTopic(0, "t", 1))
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert caught.value.refresh_metadata
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def test_only_an_oversized_frame_itself_is_refused(echo: Echo) -> None:
    with connect(echo) as connection:
        with pytest.raises(BrokerError, match=f"at most {MAX_FRAME} accepted") as caught:
            connection.request(produce(), [bytes(3 * MAX_FRAME)])
        assert caught.value.code == ErrorCode.FRAME_TOO_LARGE
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def raw(echo: Echo, *chunks: bytes) -> bytes:
    """Send bytes unchanged. Return all that arrives until the server closes or is silent for half a second."""
    with socket.create_connection(("127.0.0.1", echo.port), timeout=10) as sock:
        for chunk in chunks:
            sock.sendall(chunk)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        return answer


def test_bytes_that_are_not_a_frame_get_a_typed_error(echo: Echo) -> None:
    answer = raw(echo, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"not a sparklog frame" in answer
    with connect(echo) as connection:
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def test_an_unknown_api_is_named_and_the_connection_stays_usable(echo: Echo) -> None:
    with connect(echo) as connection:
        for buffer in encode_frame(b"\x92\xa6wobble\x07"):
            connection._socket.sendall(buffer)
        received = connection._next()
        assert isinstance(received.reply, ErrorReply)
        assert received.reply.code == ErrorCode.UNKNOWN_API
        assert "wobble" in received.reply.detail
        assert received.reply.cid == 7
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def test_a_malformed_header_is_refused_and_the_connection_stays_usable(echo: Echo) -> None:
    with connect(echo) as connection:
        connection._socket.sendall(b"".join(encode_frame(b"\xc1\xc1\xc1")))
        received = connection._next()
        assert isinstance(received.reply, ErrorReply)
        assert received.reply.code == ErrorCode.MALFORMED_FRAME
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def test_hello_must_come_first(echo: Echo) -> None:
    answer = raw(echo, b"".join(encode_frame(b"\x92\xafdescribe_broker\x05")))
    assert b"Hello expected first" in answer


def test_a_client_without_a_common_version_is_refused(echo: Echo) -> None:
    hello = b"\x96\xa5hello\x05\x63\x64\xa1x\xa0"
    answer = raw(echo, b"".join(encode_frame(hello)))
    assert b"versions 99 to 100" in answer


def test_another_cluster_is_refused(echo: Echo) -> None:
    with pytest.raises(BrokerError, match="'cluster-b' expected, this broker is of 'cluster-a'"):
        connect(echo, "cluster-b")


def test_a_second_hello_is_refused_and_the_connection_stays_usable(echo: Echo) -> None:
    with connect(echo) as connection, pytest.raises(BrokerError, match="agreed on version 1 before") as caught:
        connection.request(hello("again"))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_correlation_id_in_use_is_refused(echo: Echo) -> None:
    """With such ids a client could make the server hold requests that neither bound counts."""
    echo.received.clear()
    with connect(echo) as connection:
        connection._socket.sendall(b"".join(encode_frame(encode_message(DescribeBroker(5)))) * 3)
        for _ in range(2):
            received = connection._next()
            assert isinstance(received.reply, ErrorReply) and "correlation id 5" in received.reply.detail
        echo.answer_held()
        assert connection._next().reply == Ack(5)
    assert len(echo.received) == 1


def test_connections_above_the_limit_get_an_error(echo: Echo) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(BrokerError) as caught:
        for _ in range(MAX_CONNECTIONS + 1):
            stack.enter_context(connect(echo))
    assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert f"at most {MAX_CONNECTIONS}" in caught.value.detail
    wait_until(lambda: echo.on_loop(lambda: echo.server.connections) == 0)
    with connect(echo) as connection:
        assert isinstance(connection.request(Metadata(0))[0], Ack)


def test_unanswered_requests_stop_the_server_from_reading(echo: Echo) -> None:
    echo.received.clear()
    with connect(echo) as connection:
        for _ in range(MAX_IN_FLIGHT):
            connection.send(DescribeBroker(0))
        connection.send(produce(), [b"x"])
        connection._socket.settimeout(0.3)
        with pytest.raises(BrokerError, match="no response in time"):
            connection.receive()
    assert [type(r) for r in echo.received] == [DescribeBroker] * MAX_IN_FLIGHT
    echo.answer_held()


@contextlib.contextmanager
def used_up(echo: Echo) -> Iterator[None]:
    """Wait until delayed requests use the server's whole byte budget."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            hog = stack.enter_context(connect(echo))
            hog.send(DescribeBroker(0), [bytes(MAX_FRAME - 100)])
        wait_until(lambda: echo.on_loop(lambda: echo.server.queued_bytes) >= QUEUED)
        yield


def test_the_servers_byte_budget_holds_and_responses_release_it(echo: Echo) -> None:
    with used_up(echo):
        with connect(echo) as late:
            late.send(produce(), [b"x"])
            late._socket.settimeout(0.3)
            with pytest.raises(BrokerError, match="no response in time"):
                late.receive()
        assert echo.on_loop(lambda: echo.server.queued_bytes) < QUEUED + MAX_FRAME
    echo.answer_held()
    with connect(echo) as again:
        assert bytes(again.request(produce(), [b"y"])[1]) == b"y"
    wait_until(lambda: echo.on_loop(lambda: echo.server.queued_bytes) == 0)


def test_requests_without_a_body_ignore_a_full_budget(echo: Echo) -> None:
    """Followers' fetches have no body, and the requests that use the budget may be writes that wait for these
    followers."""
    with connect(echo) as connected, used_up(echo), connect(echo) as later:
        for connection in (connected, later):
            assert isinstance(connection.request(Metadata(0))[0], Ack)
            large = Metadata(0, ("x" * (MAX_FRAME // 2),))
            assert isinstance(connection.request(large)[0], Ack)
        connected.send(produce(), [bytes(MAX_FRAME // 2)])
        connected.send(Metadata(0))
        connected._socket.settimeout(0.3)
        with pytest.raises(BrokerError, match="no response in time"):
            connected.receive()
    echo.answer_held()
    wait_until(lambda: echo.on_loop(lambda: echo.server.queued_bytes) == 0)


def test_a_body_is_not_read_while_the_budget_is_full(echo: Echo) -> None:
    with connect(echo) as late, used_up(echo):
        frame = b"".join(late._end.encode(produce(), [bytes(MAX_FRAME - 100)])[1])
        half = len(frame) // 2
        late._socket.sendall(frame[:half])
        served = echo.handlers[-4].connection
        wait_until(lambda: not echo.on_loop(lambda: served._reading))
        late._socket.sendall(frame[half:])
        echo.answer_held()
        assert isinstance(late._next().reply, FetchReply)
    wait_until(lambda: echo.on_loop(lambda: echo.server.queued_bytes) == 0)


def test_the_server_stops_reading_from_a_client_that_never_reads(echo: Echo) -> None:
    echo.received.clear()
    with connect(echo) as connection:
        connection._socket.settimeout(0.5)
        fetch = Fetch(0, -1, 0, 0, 0, MAX_FRAME - 100, 0, 0, -1, ())
        frame = b"".join(connection._end.encode(fetch)[1])
        with pytest.raises(TimeoutError):
            while True:
                connection._socket.sendall(frame * 200)
        # The server has responded up to what the kernel's socket buffers hold. It does not read the other requests.
        assert len(echo.received) < 64


def test_pending_requests_fail_when_the_server_closes(echo: Echo) -> None:
    async def scenario() -> None:
        connection = await AsyncConnection.open("127.0.0.1", echo.port, client_id="test")
        lost: list[bool] = []
        connection.on_lost = lambda: lost.append(True)
        answers = await asyncio.gather(*(connection.request(produce(), [bytes([n])]) for n in range(20)))
        assert [bytes(body) for _, body in answers] == [bytes([n]) for n in range(20)]
        with pytest.raises(BrokerError, match="no such topic"):
            await connection.request(DeleteTopic(0, "t", 1))
        connection.send_only(produce(acks=0), [b"x"])
        waiting = connection.request(DescribeBroker(0))
        echo.loop.call_soon_threadsafe(echo.handlers[-1].connection.close)
        with pytest.raises(BrokerError) as caught:
            await asyncio.wait_for(waiting, 10)
        assert caught.value.code == ErrorCode.NETWORK_EXCEPTION
        assert lost == [True]
        assert connection.closed
        with pytest.raises(BrokerError):
            await connection.request(Metadata(0))

    loop = new_event_loop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_a_connection_to_a_closed_port_is_a_network_error() -> None:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        port = unbound.getsockname()[1]

        async def scenario() -> None:
            with pytest.raises(BrokerError, match=str(port)):
                await AsyncConnection.open("127.0.0.1", port, client_id="test")

        loop = new_event_loop()
        try:
            loop.run_until_complete(scenario())
        finally:
            loop.close()
        with pytest.raises(BrokerError, match=str(port)):
            BlockingConnection("127.0.0.1", port, client_id="test")


def test_a_response_that_is_not_a_frame_closes_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(struct.pack("<II", 5, 100) + b"xxxxx")

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(BrokerError, match="not a sparklog frame"):
            BlockingConnection("127.0.0.1", server.getsockname()[1], client_id="test")
        thread.join(10)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_closed_connection_is_freed_without_the_garbage_collector(kind: str) -> None:
    """Each connection has a receive buffer of 256 KiB, and a broker's garbage collector runs rarely."""
    peers: set[str] = set()
    # Compare the objects and not their addresses: garbage of other tests may have had the same addresses.
    made: set[int] = set()

    def make(connection: ServerConnection) -> EchoHandler:
        peers.add(connection.peer)
        made.add(id(connection))
        return EchoHandler(connection, [])

    async def come_and_go() -> None:
        server = await _served(make)
        for _ in range(5):
            connection = await AsyncConnection.open("127.0.0.1", server.port, client_id="test")
            answered = connection.request(produce(), [bytes(100)])
            waiting = connection.request(DescribeBroker(0))
            await answered
            connection.close()
            with pytest.raises(BrokerError):
                await waiting
        while server.connections:  # noqa: ASYNC110 - no event reports their end
            await asyncio.sleep(0.001)
        await server.close()

    library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
    loop: asyncio.AbstractEventLoop = library.new_event_loop()
    gc.disable()
    try:
        loop.run_until_complete(asyncio.wait_for(come_and_go(), 30))
        kept = {id(found) for found in gc.get_objects() if type(found) is ServerConnection}
    finally:
        gc.enable()
        loop.close()
    assert len(peers) == 5 and made.isdisjoint(kept)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(6))
def test_a_connection_accepted_during_a_close_is_closed(kind: str, turns: int) -> None:
    """The close may come at any stage of the connection. Otherwise the client would wait for responses until the
    process exits."""
    library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
    loop: asyncio.AbstractEventLoop = library.new_event_loop()
    server = loop.run_until_complete(_served(lambda connection: EchoHandler(connection, [])))

    async def close() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        await server.close()  # a second close changes nothing

    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
            loop.run_until_complete(close())
            with contextlib.suppress(ConnectionResetError):  # the server has not accepted the connection yet
                assert client.recv(1) == b""
    finally:
        loop.close()
