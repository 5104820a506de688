"""Tests of the number and the lifetime of connections, and of the memory for frames that have not arrived
completely."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.net.connection_slots import ConnectionSlots, ConnectionStanding
from sparklog.net.greeting import Credentials
from sparklog.net.receiving import SLOWEST, Receiving
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import MAX_HELLO_BYTES, ClientEnd, hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import Ack, DescribeBroker, HelloReply, Metadata, Produce, Request, encode_message
from sparklog.protocol.proof import SECRET_BYTES, Identity, KeyRing, Secret
from sparklog.protocol.received import ReceivedReply
from sparklog.protocol.senders import SenderKind

MIB = 1024 * 1024
#: Longer than a test takes on any machine: an earlier event has another cause.
NEVER_S = 3600.0


class Handler:
    """A handler that delays DescribeBroker until the test responds, and acknowledges all other requests."""

    def __init__(self, connection: ServerConnection, held: list[tuple[ServerConnection, int]]) -> None:
        self._connection = connection
        self._held = held

    def request_received(self, request: Request, body: memoryview) -> None:
        if isinstance(request, DescribeBroker):
            self._held.append((self._connection, request.cid))
        else:
            self._connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        pass


class Scene:
    def __init__(self, server: Server, held: list[tuple[ServerConnection, int]]) -> None:
        self.server = server
        self.held = held
        self._opened: list[asyncio.StreamWriter | AsyncConnection] = []

    async def silent(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(address, 0))
        self._opened.append(writer)
        return reader, writer

    async def close(self) -> None:
        for one in self._opened:
            one.close()
        await until(lambda: self.server.connections == 0)
        await self.server.close()

    async def client(self, client_id: str = "client", credentials: Credentials | None = None) -> AsyncConnection:
        options: dict[str, Any] = {} if credentials is None else {"credentials": credentials}
        opened = await AsyncConnection.open("127.0.0.1", self.server.port, client_id=client_id, **options)
        self._opened.append(opened)
        return opened

    async def until(self, connections: int) -> None:
        await until(lambda: self.server.connections == connections)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Scene]:
    held: list[tuple[ServerConnection, int]] = []
    settings = {"max_connections": 100, "idle_s": NEVER_S, "hello_s": NEVER_S, "queued_max_bytes": 4 * MIB} | options
    server = await serve(
        lambda connection: Handler(connection, held),
        host="127.0.0.1",
        port=0,
        describe=lambda cid, version: HelloReply(cid, version, 7, 3, "c", 64 * MIB),
        max_frame_bytes=64 * MIB,
        max_in_flight=10,
        **settings,
    )
    scene = Scene(server, held)
    try:
        yield scene
    finally:
        await scene.close()


async def until(true: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not true():
        assert asyncio.get_running_loop().time() < end, "the expected event did not happen"
        await asyncio.sleep(0.005)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that arrived before the broker closed the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), 60):
            found += part
    return found


def frame(message: Request, body: bytes = b"") -> bytes:
    return b"".join(map(bytes, encode_frame(encode_message(message), [body] if body else [])))


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_connection_without_hello_is_closed() -> None:
    async def test() -> None:
        async with served(hello_s=0.2) as scene:
            greeted = await scene.client()
            silent, half = await scene.silent(), await scene.silent()
            half[1].write(frame(hello("slow"))[:-3])
            for reader, _ in (silent, half):
                assert await closed(reader) == b""
            await scene.until(1)
            assert isinstance((await greeted.request(Metadata(0)))[0], Ack)

    asyncio.run(test())


def test_an_idle_client_is_closed_and_a_waiting_one_is_not() -> None:
    async def test() -> None:
        async with served(idle_s=0.3) as scene:
            waiting = await scene.client()
            answer = waiting.request(DescribeBroker(0))
            idle = await scene.client()
            for name in ("replica-3", "broker 3 deliveries", "controller-4"):
                await scene.client(name)
            await scene.until(4)
            await until(lambda: idle.closed)
            assert not waiting.closed
            ((connection, cid),) = scene.held
            connection.reply(Ack(cid))
            assert isinstance((await answer)[0], Ack)
            await scene.until(3)
            await until(lambda: waiting.closed)

    asyncio.run(test())


# --- before hello -----------------------------------------------------------------------------------------------------


def test_the_first_frame_must_be_small() -> None:
    async def test() -> None:
        async with served() as scene:
            for size in (MAX_HELLO_BYTES + 1, 60 * MIB):
                reader, writer = await scene.silent()
                writer.write((size - 4).to_bytes(4, "little") + (10).to_bytes(4, "little"))
                assert str(MAX_HELLO_BYTES).encode() in await closed(reader), (
                    "the refusal must come before the rest of the frame"
                )
                writer.close()
            assert scene.server.receiving_bytes == 0

    asyncio.run(test())


def test_hello_and_a_large_request_may_be_sent_together() -> None:
    async def test() -> None:
        async with served() as scene:
            reader, writer = await scene.silent()
            writer.write(frame(hello("eager")) + frame(Produce(1, 1, 1, ()), bytes(MIB)) + frame(Metadata(2)))
            end, found = ClientEnd(), list[ReceivedReply]()
            while len(found) < 3:
                part = await asyncio.wait_for(reader.read(65536), 60)
                assert part
                end.get_buffer()[: len(part)] = part
                found += end.buffer_updated(len(part))
            assert [one.reply.cid for one in found] == [0, 1, 2]
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("sent", [frame(Metadata(5)), b"".join(map(bytes, encode_frame(b"\xc1")))])
def test_any_other_request_than_hello_ends_the_connection(sent: bytes) -> None:
    async def test() -> None:
        async with served() as scene:
            reader, writer = await scene.silent()
            writer.write(sent)
            assert b"error_reply" in await closed(reader)
            writer.close()
            await scene.until(0)

    asyncio.run(test())


# --- slots ------------------------------------------------------------------------------------------------------------


def credentials(role: SenderKind) -> Credentials:
    return Credentials(KeyRing((Secret(b"s" * SECRET_BYTES),)), lambda: Identity(role, 4, 1))


def test_clients_leave_slots_to_authenticated_peers() -> None:
    async def test() -> None:
        own = credentials(SenderKind.BROKER)
        async with served(max_connections=10, kept_connections=3, credentials=own) as scene:
            clients = [await scene.client() for _ in range(7)]
            for name in ("client", "replica-3"):
                with pytest.raises(BrokerError) as caught:
                    await scene.client(name)
                assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED and "7 accepted" in caught.value.detail
            await scene.until(7)
            peers = [
                await scene.client("peer", credentials(role)) for role in (SenderKind.BROKER, SenderKind.CONTROLLER)
            ]
            clients.pop().close()
            await scene.until(8)
            clients.append(await scene.client())
            for one in (*peers, *clients):
                assert isinstance((await one.request(Metadata(0)))[0], Ack)

    asyncio.run(test())


def test_silent_connections_do_not_use_up_the_slots() -> None:
    async def test() -> None:
        async with served(max_connections=10, kept_connections=3) as scene:
            silent = [await scene.silent() for _ in range(30)]
            await scene.until(10)
            clients = [await scene.client() for _ in range(7)]
            peers = [await scene.client("replica-2") for _ in range(3)]
            for reader, _ in silent:
                assert await closed(reader) == b""
            for one in (*peers, *clients):
                assert isinstance((await one.request(Metadata(0)))[0], Ack)

    asyncio.run(test())


def test_an_address_takes_slots_from_its_own_silent_connections() -> None:
    async def test() -> None:
        async with served(max_connections=10, kept_connections=1) as scene:
            other = await scene.silent()
            many = [await scene.silent("127.0.0.2") for _ in range(30)]
            for reader, _ in many[:21]:
                assert await closed(reader) == b""
            other[1].write(frame(hello("slow")))
            assert await asyncio.wait_for(other[0].read(65536), 60)

    asyncio.run(test())


class Connection:
    used_s = 0.0
    peer_host = "10.0.0.1"
    awaits_replies = False

    def __init__(self, standing: ConnectionStanding) -> None:
        self.standing = standing
        self.ended = ""

    def abort(self) -> None:
        self.ended = "aborted"

    def close(self) -> None:
        self.ended = "closed"


def test_an_unfinished_proof_keeps_no_slot() -> None:
    places = ConnectionSlots(10, kept=2, hello_s=10, idle_s=600)
    offers = Connection(ConnectionStanding.UNKNOWN)
    assert places.accept(offers) and places.greeted(offers)
    places.close_silent(9.9)
    assert len(places) == 1
    places.close_silent(10.0)
    assert (offers.ended, len(places)) == ("aborted", 0)


# --- incomplete frames ------------------------------------------------------------------------------------------------


def test_half_sent_frames_hold_at_most_one_budget() -> None:
    """Each client announces 32 MiB and sends half of them."""

    async def test() -> None:
        async with served() as scene:
            half = frame(Produce(1, 1, 1, ()), bytes(32 * MIB))[: 16 * MIB]
            peers = [await scene.silent() for _ in range(4)]
            for reader, writer in peers:
                writer.write(frame(hello("half")))
                await asyncio.wait_for(reader.read(65536), 60)
            first = peers[0][1]
            first.write(half)
            await first.drain()
            await until(lambda: scene.server.receiving_bytes > 0)
            for _, writer in peers[1:]:
                writer.write(half)
            other = await scene.client()
            assert isinstance((await other.request(Metadata(0)))[0], Ack)
            assert scene.server.receiving_bytes < 33 * MIB
            small = await asyncio.wait_for(other.request(Produce(0, 1, 1, ()), [bytes(1000)]), 60)
            assert isinstance(small[0], Ack)
            for _, writer in peers:
                writer.transport.abort()
            large = await asyncio.wait_for(other.request(Produce(0, 1, 1, ()), [bytes(MIB)]), 60)
            assert isinstance(large[0], Ack)

    asyncio.run(test())


class Receiver:
    def __init__(self) -> None:
        self.came = 0
        self.went_on = 0
        self.reason = ""

    def resume(self) -> None:
        self.went_on += 1

    def received_since_last_check(self) -> int:
        return self.came

    def give_up(self, reason: str) -> None:
        self.reason = reason


def test_memory_is_given_in_the_order_of_the_frames() -> None:
    receiving = Receiving(100)
    one, two, three, four = (Receiver() for _ in range(4))
    receiving.begin(one, 60)
    receiving.begin(two, 60)
    receiving.begin(three, 10)
    assert receiving.may_receive(one) and not receiving.may_receive(two) and not receiving.may_receive(three)
    receiving.end(one)
    assert (two.went_on, three.went_on, receiving.used) == (1, 1, 70)
    receiving.begin(four, 1000)
    receiving.end(two)
    assert not receiving.may_receive(four)
    receiving.end(three)
    assert receiving.may_receive(four) and receiving.used == 1000, "a single frame may be larger than the limit"
    receiving.end(four)
    receiving.end(four)
    assert receiving.used == 0


def test_a_slow_sender_yields_its_budget_when_others_wait() -> None:
    receiving = Receiving(100)
    slow, quick, held, other = (Receiver() for _ in range(4))
    slow.came, quick.came, held.came = SLOWEST - 1, SLOWEST, -1
    for one in (slow, quick, held):
        receiving.begin(one, 30)
    receiving.close_slow(1.0)
    assert not slow.reason
    receiving.begin(other, 30)
    receiving.close_slow(1.0)
    assert slow.reason and not quick.reason and not held.reason, "a peer that is not read cannot send"
