"""Tests of a produce request for many partitions: the broker's loop handles it in several turns.

Other requests get responses in between, and the next request of the same connection does not overtake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from sparklog.broker.requests import slices
from sparklog.broker.requests.dispatch import ConnectionHandler
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.async_client import AsyncConnection
from sparklog.net.server import serve
from sparklog.protocol.messages import (
    ACKS_ALL,
    HelloReply,
    Metadata,
    MetadataReply,
    Produce,
    ProducePartition,
    ProduceReply,
)
from sparklog.record.codec import encode_batch
from tests.broker.staged import TOPIC_ID, Hosted, Stage
from tests.broker.support import rows

COUNT = 40
Open = Callable[[], Any]


class Scene(NamedTuple):
    stage: Stage
    hosted: list[Hosted]
    connect: Open


@pytest.fixture(autouse=True)
def one_partition_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)


@asynccontextmanager
async def served() -> AsyncIterator[Scene]:
    stage = Stage()
    hosted = [Hosted(TopicPartition("t", number)) for number in range(COUNT)]
    stage.partitions.clear()
    stage.partitions.update({one.tp: one for one in hosted})
    on_lost = stage.broker.fetches.connection_lost
    server = await serve(
        lambda connection: ConnectionHandler(stage.handlers, stage.context.counters, connection, on_lost),
        host="127.0.0.1",
        port=0,
        describe=lambda cid, version: HelloReply(cid, version, 0, 1, "c", 1 << 20),
        max_frame_bytes=1 << 20,
        max_in_flight=10,
        queued_max_bytes=1 << 24,
    )
    opened = []

    async def connect() -> AsyncConnection:
        connection = await AsyncConnection.open("127.0.0.1", server.port, client_id="test", connect_timeout_s=30)
        opened.append(connection)
        return connection

    try:
        yield Scene(stage, hosted, connect)
    finally:
        for connection in opened:
            connection.close()
        await server.close()
        await stage.context.end_tasks()


def request(count: int) -> tuple[Produce, list[bytes]]:
    """Return a batch of ``count`` records for each partition."""
    batch = encode_batch(rows(count), schema_id=0, compression=None, event_time="timestamp")
    named = tuple(ProducePartition("t", number, TOPIC_ID, 1, len(batch.body)) for number in range(COUNT))
    return Produce(0, ACKS_ALL, 30_000, named), [batch.header.pack() + bytes(batch.body)] * COUNT


def counts(hosted: Hosted) -> list[int]:
    return [header.record_count for pending in hosted.appended for header, _ in pending.batches]


def test_others_get_responses_between_turns_and_the_next_request_waits() -> None:
    async def test() -> None:
        async with served() as scene:
            writer, other = await scene.connect(), await scene.connect()
            order: list[str] = []
            asked = [writer.request(*request(3)), writer.request(*request(5)), writer.request(Metadata(0, ()))]
            for name, answer in zip(("first", "second", "third"), asked, strict=True):
                answer.add_done_callback(lambda _, name=name: order.append(name))
            await until_turned(lambda: scene.hosted[0].appended)
            (reply, _) = await other.request(Metadata(0, ()))
            assert isinstance(reply, MetadataReply)
            assert not scene.hosted[-1].appended, "the request must need more turns"
            replies = [reply for reply, _ in await asyncio.gather(*asked)]
            assert order == ["first", "second", "third"]
            for found in replies[:2]:
                assert isinstance(found, ProduceReply)
                assert [result.code for result in found.results] == [0] * COUNT
            assert [counts(hosted) for hosted in scene.hosted] == [[3, 5]] * COUNT

    asyncio.run(test())


async def until_turned(true: Callable[[], object]) -> None:
    """Wait as ``until`` does, on the present loop."""
    for _ in range(1_000_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not hold in time")


def test_a_failure_in_a_later_turn_has_one_response() -> None:
    async def test() -> None:
        async with served() as scene:
            scene.hosted[COUNT // 2].fails = RuntimeError("an unexpected error")
            writer = await scene.connect()
            failed, following = writer.request(*request(3)), writer.request(Metadata(0, ()))
            with pytest.raises(BrokerError, match="an unexpected error") as caught:
                await failed
            assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
            await following
            assert [len(hosted.appended) for hosted in scene.hosted] == [1] * (COUNT // 2) + [0] * (COUNT - COUNT // 2)

    asyncio.run(test())


def test_a_stopping_cluster_accepts_no_more_of_a_request() -> None:
    async def test() -> None:
        async with served() as scene:
            writer = await scene.connect()
            answer = writer.request(*request(3))
            await until_turned(lambda: scene.hosted[0].appended)
            scene.stage.context.quiesced = True
            reply, _ = await answer
            assert isinstance(reply, ProduceReply)
            codes = [result.code for result in reply.results]
            taken = codes.count(ErrorCode.NONE)
            assert 0 < taken < COUNT
            assert codes == [ErrorCode.NONE] * taken + [ErrorCode.BROKER_STOPPING] * (COUNT - taken)
            assert [len(hosted.appended) for hosted in scene.hosted] == [1] * taken + [0] * (COUNT - taken)

    asyncio.run(test())
