"""A test that requests which take long share the turns of the server's loop: each turn handles a few, however many
wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sparklog.net import server_connection, turn
from sparklog.net.server import serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import ClientEnd, hello
from sparklog.protocol.messages import Ack, HelloReply, Metadata, Request

CONNECTIONS, REQUESTS = 5, 20


@pytest.fixture(autouse=True)
def one_request_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "TURN_S", 0.0)
    monkeypatch.setattr(server_connection, "NOTED_S", 0.0)


class Handler:
    def __init__(self, connection: ServerConnection, noted: list[int], turns: Callable[[], int]) -> None:
        self._connection = connection
        self._noted = noted
        self._turns = turns

    def request_received(self, request: Request, body: memoryview) -> None:
        self._noted.append(self._turns())
        self._connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        pass


def test_one_turn_handles_requests_of_all_connections() -> None:
    handled: list[int] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        turns = 0
        all_handled = asyncio.Event()

        def count() -> None:
            nonlocal turns
            turns += 1
            if len(handled) < CONNECTIONS * REQUESTS:
                loop.call_soon(count)
            else:
                all_handled.set()

        server = await serve(
            lambda connection: Handler(connection, handled, lambda: turns),
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, 7, 3, "c", 1 << 20),
            max_frame_bytes=1 << 20,
            max_in_flight=1000,
            queued_max_bytes=1 << 20,
        )
        count()
        opened = []
        for number in range(CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            end = ClientEnd()
            frames = [end.encode(hello(f"client {number}")), *(end.encode(Metadata(0, ())) for _ in range(REQUESTS))]
            writer.write(b"".join(bytes(part) for _, parts in frames for part in parts))
            opened.append((reader, writer))
        await all_handled.wait()
        for _, writer in opened:
            writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(test(), 60))
    busiest = max(handled.count(one) for one in set(handled))
    assert busiest <= 2, "one turn handles one request, and those that the turn before left"
