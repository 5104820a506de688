"""A server on a separate loop, and the two kinds of connections to it, for tests of the Unix socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from sparklog.net.async_client import AsyncConnection
from sparklog.net.blocking import BlockingConnection
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, FetchReply, HelloReply, Produce, Request

MAX_FRAME = 4_000_000


class Handler:
    """A handler that echoes the bodies of produces and acknowledges all other requests."""

    def __init__(self, connection: ServerConnection, done: list[str]) -> None:
        self.connection = connection
        self.done = done

    def request_received(self, request: Request, body: memoryview) -> None:
        if isinstance(request, Produce):
            self.connection.reply(FetchReply(request.cid, 0, 0, ()), [body])
            self.done.append("answered")
        else:
            self.connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        pass


class Served:
    """A server on a separate loop. ``peers`` has the connected peers, in order."""

    def __init__(
        self, kind: str, host: str = "127.0.0.1", port: int = 0, *, within_host: bool = True, **said: Any
    ) -> None:
        library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
        self.loop: asyncio.AbstractEventLoop = library.new_event_loop()
        self.peers: list[str] = []
        self.done: list[str] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._max_connections = int(said.pop("max_connections", 1000))
        self.incarnation = 3
        #: If true, the server registers again before each greeting.
        self.registers = False
        self.said = said
        self.server = asyncio.run_coroutine_threadsafe(self._serve(host, port, within_host), self.loop).result(10)

    async def _serve(self, host: str, port: int, within_host: bool) -> Server:
        def make(connection: ServerConnection) -> Handler:
            self.peers.append(connection.peer)
            return Handler(connection, self.done)

        return await serve(
            make,
            host=host,
            port=port,
            describe=self._describe,
            max_frame_bytes=MAX_FRAME,
            max_in_flight=10,
            queued_max_bytes=2 * MAX_FRAME,
            max_connections=self._max_connections,
            within_host=within_host,
        )

    def _describe(self, cid: int, version: int) -> HelloReply:
        self.incarnation += self.registers
        return HelloReply(cid, version, 7, self.incarnation, "cluster-a", MAX_FRAME, **self.said)

    def open_connections(self) -> int:
        found: Future[int] = Future()
        self.loop.call_soon_threadsafe(lambda: found.set_result(self.server.connections))
        return found.result(10)

    def close_all(self) -> None:
        """Close the connections, as the end of the process does."""

        async def close() -> None:
            for connection in list(self.server._limits.places.connections):
                connection.close()
            while self.server.connections:  # noqa: ASYNC110 - no event reports their end
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(close(), self.loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def served(kind: str, *args: Any, **options: Any) -> Iterator[Served]:
    server = Served(kind, *args, **options)
    try:
        yield server
    finally:
        server.close()


class Blocking:
    """A ``BlockingConnection`` with the interface that the tests use."""

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
    """An ``AsyncConnection`` on the server's own loop, with the interface that the tests use."""

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
