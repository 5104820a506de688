"""Tests of metadata that come in pieces: a broker's loop and a frame are bounded, and a client sees one state."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from sparklog.broker import metadata_cache
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.metadata import MetadataPieces
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import DEFAULT_MAX_FRAME_BYTES
from sparklog.protocol.messages import (
    ControlUpdate,
    Metadata,
    MetadataReply,
    PartitionDecision,
    Request,
    TopicChange,
    decode_reply,
    encode_message,
)
from tests.client.fake_cluster import FakeBroker, FakeCluster

Asked = list[tuple[tuple[str, int] | None, int]]


def change(name: str, topic_id: str = "", schema_bytes: int = 100) -> TopicChange:
    return TopicChange(name, topic_id or f"id-{name}", (TopicSchema(0, b"s" * schema_bytes),), (), None, {})


def decisions(name: str, count: int, *, topic_id: str = "", brokers: int = 3) -> tuple[PartitionDecision, ...]:
    def one(number: int) -> PartitionDecision:
        replicas = tuple((number + place) % brokers for place in range(3))
        state = LeaderAndIsr(replicas[0], 7, replicas, 1)
        return PartitionDecision(name, topic_id or f"id-{name}", number, state, 9, replicas)

    return tuple(map(one, range(count)))


def told(topics: dict[str, int], *, brokers: int = 3) -> MetadataCache:
    """Return a broker's metadata of topics with this number of partitions each."""
    cache = MetadataCache("fake", {})
    endpoints = tuple(BrokerEndpoint(number, "127.0.0.1", 9092, 1) for number in range(brokers))
    partitions = tuple(part for name, count in topics.items() for part in decisions(name, count, brokers=brokers))
    cache.apply(ControlUpdate(0, "c", 1, 1, True, endpoints, tuple(map(change, topics)), partitions))
    return cache


def answer(cache: MetadataCache, request: Metadata) -> MetadataReply:
    """Send the response over the wire format, without a connection."""
    found = cache.metadata(
        request.cid, request.topics, schemas=request.schemas, internal=request.internal, start=request.start
    )
    reply = decode_reply(encode_message(found))
    assert isinstance(reply, MetadataReply)
    return reply


def whole(cache: MetadataCache, request: Metadata, asked: Asked | None = None) -> MetadataReply:
    pieces = MetadataPieces(request)
    while pieces.request is not None:
        piece = answer(cache, pieces.request)
        if asked is not None:
            asked.append((pieces.request.start, sum(len(topic.partitions) for topic in piece.topics)))
        pieces.add(piece)
    return pieces.reply


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_cache, "_PIECE", 10)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("names", [None, ("big", "none", "a", "big"), ("none",), ()])
def test_pieces_add_up_to_a_response_too_large_for_one(
    names: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = told({"a": 3, "b": 9, "big": 35, "c": 1, "empty": 0})
    asked: Asked = []
    found = whole(cache, Metadata(0, names, schemas=names is None), asked)
    monkeypatch.setattr(metadata_cache, "_PIECE", 10**9)
    assert found == answer(cache, Metadata(0, names, schemas=names is None))
    assert all(count <= 10 for _, count in asked)
    assert (len(asked) > 3) == (names is None or "big" in names), "a small response comes in one piece"


@pytest.mark.usefixtures("small")
def test_schemas_count_towards_the_size_of_a_piece() -> None:
    cache = told({f"t{number}": 1 for number in range(6)})
    asked: Asked = []
    whole(cache, Metadata(0), asked)
    with_schemas = len(asked)
    whole(cache, Metadata(0, schemas=False), asked)
    assert (with_schemas, len(asked) - with_schemas) == (3, 2)


@pytest.mark.usefixtures("small")
def test_a_topic_deleted_between_two_pieces_is_missing() -> None:
    cache = told({"big": 35, "c": 1})
    for names in (None, ("big", "c")):
        cache.apply(ControlUpdate(0, "c", 1, 1, False, None, (change("big"),), decisions("big", 35)))
        pieces = MetadataPieces(Metadata(0, names))
        for _ in range(2):
            assert pieces.request is not None
            pieces.add(answer(cache, pieces.request))
        cache.apply(ControlUpdate(0, "c", 1, 1, False, None, (), (), deleted=(("big", "id-big"),)))
        assert pieces.request is not None
        pieces.add(answer(cache, pieces.request))
        assert pieces.request is None
        gone = [] if names is None else [("big", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0)]
        assert [(t.name, t.code, len(t.partitions)) for t in pieces.reply.topics] == [*gone, ("c", 0, 1)]


@pytest.mark.usefixtures("small")
def test_a_topic_replaced_between_two_pieces_is_requested_again() -> None:
    cache = told({"big": 35})
    pieces = MetadataPieces(Metadata(0))
    assert pieces.request is not None
    pieces.add(answer(cache, pieces.request))
    recreated = decisions("big", 35, topic_id="new")
    cache.apply(ControlUpdate(0, "c", 1, 1, False, None, (change("big", "new"),), recreated))
    with pytest.raises(BrokerError, match="recreated") as caught:
        pieces.add(answer(cache, pieces.request))
    assert caught.value.retriable


@pytest.mark.parametrize("start", [("other", 0), ("a", -1)])
def test_a_start_that_was_not_given_is_refused(start: tuple[str, int]) -> None:
    with pytest.raises(BrokerError, match="not requested") as caught:
        answer(told({"a": 1}), Metadata(0, ("a",), start=start))
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_a_broker_with_endless_pieces_is_given_up() -> None:
    pieces = MetadataPieces(Metadata(0))
    endless = MetadataReply(0, "c", 1, (), (), next=("t", 0))
    with pytest.raises(BrokerError, match="more than 1000 pieces"):
        while pieces.request is not None:
            pieces.add(endless)


@pytest.mark.usefixtures("small")
def test_the_oldest_piece_sets_the_replys_controller_epoch() -> None:
    cache = told({"a": 9, "b": 9})
    pieces = MetadataPieces(Metadata(0))
    assert pieces.request is not None
    pieces.add(answer(cache, pieces.request))
    cache.apply(ControlUpdate(0, "c", 5, 1, False, None, (), ()))
    pieces.add(answer(cache, pieces.request))
    assert pieces.reply.controller_epoch == 1


@pytest.mark.usefixtures("small")
def test_clients_ask_one_broker_for_all_pieces(fake: FakeCluster) -> None:
    cache = told({"a": 3, "big": 35})
    expected = {TopicPartition(name, number) for name, count in (("a", 3), ("big", 35)) for number in range(count)}
    asked: list[int] = []

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Metadata):
            return False
        asked.append(broker.broker_id)
        found = cache.metadata(
            request.cid, request.topics, schemas=request.schemas, internal=request.internal, start=request.start
        )
        alive = tuple(other.metadata_broker() for other in broker.cluster.brokers)
        connection.reply(msgspec.structs.replace(found, brokers=alive))
        return True

    for broker in fake.brokers:
        fake.fault(broker.broker_id, fault)
    with BlockingCluster(fake.bootstrap) as link:
        link.refresh(None)
        assert {*link.metadata.partitions("a"), *link.metadata.partitions("big")} == expected
        assert len(link.topic("big", refresh=True).partitions) == 35
        assert len(link.ask_metadata(Metadata(0, ("big",)), 1).topics[0].partitions) == 35
    assert len(asked) >= 4 + 4 + 4
    assert set(asked[-4:]) == {1}

    async def ask() -> None:
        arrived = asyncio.Event()
        link = LoopCluster(fake.bootstrap, client_id="test", changed=arrived.set, request_timeout_s=30.0)
        link.request_metadata(["big"])
        while len(link.metadata.partitions("big")) < 35:
            await asyncio.wait_for(arrived.wait(), 30)
            arrived.clear()
        link.close()
        await link.closed()

    before = len(asked)
    asyncio.run(ask())
    assert len(set(asked[before:])) == 1, "all pieces must be of one state"


@pytest.mark.extended
def test_a_response_about_many_partitions_stays_small_and_fast() -> None:
    """There are 100 brokers, and one topic has a quarter of the partitions."""
    cache = told({"large": 50_000} | {f"t{number}": 100 for number in range(1_500)}, brokers=100)
    pieces = MetadataPieces(Metadata(0))
    sizes, longest_s = [], 0.0
    while pieces.request is not None:
        began = time.thread_time()
        found = cache.metadata(0, None, schemas=True, start=pieces.request.start)
        encoded = encode_message(found)
        longest_s = max(longest_s, time.thread_time() - began)
        sizes.append(len(encoded))
        reply = decode_reply(encoded)
        assert isinstance(reply, MetadataReply)
        pieces.add(reply)
    assert sum(len(topic.partitions) for topic in pieces.reply.topics) == 200_000
    assert max(sizes) < 2_000_000 < sum(sizes) < DEFAULT_MAX_FRAME_BYTES
    assert longest_s < 2, "time of the broker's loop, with a margin for slow machines"
