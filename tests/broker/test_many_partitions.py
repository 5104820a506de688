"""Tests of requests that create many partitions: the limit of a request, and the placement."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from sparklog.broker.requests.add_partitions import CreatePartitionsRequests
from sparklog.broker.requests.admin import TopicRequests
from sparklog.controller import placement
from sparklog.controller.assignment_spread import Spread
from sparklog.controller.placement import FEW_PARTITIONS, MAX_NEW_PARTITIONS
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord
from sparklog.protocol.messages import CreatePartitions, CreateTopic
from tests.broker.staged import Stage


class Registry:
    """A stand-in for ZooKeeper with one topic. It ends each request at its write."""

    def __init__(self, record: TopicRecord) -> None:
        self.record = record
        self.written: list[TopicRecord] = []

    async def create_topic(self, record: TopicRecord) -> None:
        self.written.append(record)
        raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, "written")

    async def change_topic(
        self, name: str, change: Callable[[TopicRecord], TopicRecord], *, in_thread: bool = False
    ) -> TopicRecord:
        if in_thread:
            self.written.append(await asyncio.get_running_loop().run_in_executor(None, change, self.record))
        else:
            self.written.append(change(self.record))
        raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, "written")


def outcome(request: CreateTopic | CreatePartitions, *, before: int = 1) -> tuple[BrokerError, int]:
    """Return the refusal, and the number of partitions that the topic would have."""

    async def test() -> tuple[BrokerError, int]:
        stage = Stage()
        registry = Registry(TopicRecord("t", "t-id", ((0, 1),) * before, (), config={}))
        stage.registry.answers = registry
        with pytest.raises(BrokerError) as caught:
            if isinstance(request, CreateTopic):
                await TopicRequests(stage.context, cast(Any, stage.registry))._create_topic(request)
            else:
                requests = CreatePartitionsRequests(stage.context, cast(Any, stage.registry))
                await requests._create_partitions(request)
        return caught.value, len(registry.written[0].assignment) if registry.written else 0

    return asyncio.run(test())


def test_a_topic_is_created_with_a_bounded_number_of_partitions() -> None:
    error, count = outcome(CreateTopic(1, "new", MAX_NEW_PARTITIONS, 1, 1000))
    assert (error.detail, count) == ("written", MAX_NEW_PARTITIONS)
    error, count = outcome(CreateTopic(1, "new", MAX_NEW_PARTITIONS + 1, 1, 1000))
    assert (error.code, count) == (ErrorCode.INVALID_PARTITIONS, 0)
    assert str(MAX_NEW_PARTITIONS) in error.detail


def test_a_topic_grows_by_a_bounded_number_of_partitions() -> None:
    before = MAX_NEW_PARTITIONS
    error, count = outcome(CreatePartitions(1, "t", 2 * MAX_NEW_PARTITIONS, 1000), before=before)
    assert (error.detail, count) == ("written", 2 * MAX_NEW_PARTITIONS)
    error, count = outcome(CreatePartitions(1, "t", 2 * MAX_NEW_PARTITIONS + 1, 1000), before=before)
    assert (error.code, count) == (ErrorCode.INVALID_PARTITIONS, 0)


@pytest.mark.parametrize("grows", [False, True])
def test_many_partitions_are_placed_in_a_thread(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    class Noting(Spread):
        def replicas(self, partitions: int, replication_factor: int) -> list[list[int]]:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().replicas(partitions, replication_factor)

    monkeypatch.setattr(placement, "Spread", Noting)
    for added in (FEW_PARTITIONS, FEW_PARTITIONS + 1):
        request = CreatePartitions(1, "t", 1 + added, 1000) if grows else CreateTopic(1, "new", added, 1, 1000)
        outcome(request)
    assert threads[0] is grows or threads[0], "a few partitions must be placed without a thread"
    assert threads == [True, False], "a few partitions must be placed without a thread"
