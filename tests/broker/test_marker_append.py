"""Tests of markers at the leader, without a process: a marker that cannot be written does not affect others."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.transactions import fenced_producers
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import PartitionResult, TransactionMarker, WriteMarkers, WriteMarkersReply
from sparklog.record.marker import Marker, decode_marker
from sparklog.storage.transactions import OpenTransaction
from tests.broker.staged import TOPIC_ID, TP, Hosted, Stage, until


def marker(number: int, producer_id: int = 7, *, topic_id: str = "") -> TransactionMarker:
    return TransactionMarker("t", number, ((producer_id, 0),), (), topic_id)


def three_partitions() -> tuple[Stage, list[Hosted]]:
    stage = Stage()
    found = [stage.hosted, Hosted(TopicPartition("t", 1)), Hosted(TopicPartition("t", 2))]
    for hosted in found:
        hosted.log.open[7] = OpenTransaction(0, 3)
        stage.partitions[hosted.tp] = hosted
    return stage, found


def ended(hosted: Hosted) -> list[Marker]:
    """Return the appended markers."""
    return [decode_marker(header, body) for pending in hosted.appended for header, body in pending.batches]


def test_one_failing_marker_does_not_stop_the_others() -> None:
    async def story() -> None:
        stage, (_, broken, _) = three_partitions()
        broken.fails = RuntimeError("a bug")
        replies: list[Any] = []
        nothing = lambda: None  # noqa: E731
        connection = cast(Any, SimpleNamespace(reply=replies.append, pause_requests=nothing, resume_requests=nothing))
        request = WriteMarkers(3, tuple(marker(number) for number in range(3)))
        stage.handle(connection, request)
        await until(lambda: replies)
        (reply,) = replies
        assert isinstance(reply, WriteMarkersReply)
        codes = [result.code for result in reply.results]
        assert codes == [ErrorCode.NONE, ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.NONE]
        assert stage.broker.fences.has(broken.tp, 7), "its producer must be fenced nevertheless"

    asyncio.run(story())


@pytest.mark.alone
def test_a_broker_drops_the_oldest_fenced_producers_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fenced_producers, "_FENCED_KEPT", 40_000)
    found = fenced_producers.FencedProducers()

    def fence(first: int, count: int) -> float:
        began_s = time.thread_time()
        for producer_id in range(first, first + count):
            found.add(TP, producer_id)
        return time.thread_time() - began_s

    fence(0, 40_000)
    took_s = fence(40_000, 40_000)
    assert not found.has(TP, 39_999)
    assert found.has(TP, 40_000) and found.has(TP, 79_999)
    # A search for the oldest of all removed producers takes about 10 us for each: 0.4 s.
    assert took_s < 0.15


def test_a_response_that_fails_is_not_sent_twice() -> None:
    async def story() -> None:
        stage, _ = three_partitions()
        told: list[PartitionResult] = []

        def answered(result: PartitionResult) -> None:
            told.append(result)
            raise RuntimeError("the connection is gone")

        stage.broker.markers.write(marker(0), answered)
        assert [result.code for result in told] == [ErrorCode.NONE]

    asyncio.run(story())


def test_a_marker_for_an_earlier_topic_of_that_name_is_refused() -> None:
    async def story() -> None:
        stage, (hosted, *_) = three_partitions()
        told: list[PartitionResult] = []
        stage.broker.markers.write(marker(0, topic_id="an earlier one"), told.append)
        assert told[0].code == ErrorCode.INCONSISTENT_TOPIC_ID and not hosted.appended
        assert not stage.broker.fences.has(TP, 7)
        stage.broker.markers.write(marker(0, topic_id=TOPIC_ID), told.append)
        assert told[1].code == ErrorCode.NONE and len(hosted.appended) == 1

    asyncio.run(story())


def test_only_a_commit_proves_that_no_transaction_is_open() -> None:
    """A deposed leader that does not know its successor yet finds no open transaction in its log either."""

    async def story() -> None:
        stage, (hosted, *_) = three_partitions()
        hosted.log.open.clear()
        hosted.fails = BrokerError(ErrorCode.REQUEST_TIMED_OUT, "no follower has fetched the marker")
        told: list[PartitionResult] = []
        stage.broker.markers.write(marker(0), told.append)
        assert [result.code for result in told] == [ErrorCode.REQUEST_TIMED_OUT]

    asyncio.run(story())


def test_a_repeated_marker_does_not_end_the_next_transaction() -> None:
    async def story() -> None:
        stage, (hosted, *_) = three_partitions()
        told: list[PartitionResult] = []
        fences = stage.broker.fences
        first = TransactionMarker("t", 0, ((7, 1),), (), decision=4)
        stage.broker.markers.write(first, told.append)
        assert len(hosted.appended) == 1 and fences.has(TP, 7)
        fences.begin(TP, 7, 4)  # the coordinator has confirmed the next transaction
        assert not fences.has(TP, 7)
        stage.broker.markers.write(first, told.append)
        assert ended(hosted) == [Marker(((7, 1),)), Marker()] and not fences.has(TP, 7)
        stage.broker.markers.write(TransactionMarker("t", 0, (), ((7, 1),), decision=5), told.append)
        assert ended(hosted)[2:] == [Marker((), ((7, 1),))] and fences.has(TP, 7)
        assert [result.code for result in told] == [ErrorCode.NONE] * 3

    asyncio.run(story())
