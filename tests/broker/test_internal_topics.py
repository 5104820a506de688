"""When the log's own topics are made: not before there are as many brokers as they are to have replicas."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from sparklog.broker.internal_topics import OFFSETS, make_topic
from sparklog.cluster.options import ClusterOptions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord
from tests.broker.staged import Stage


class Registry:
    def __init__(self) -> None:
        self.made: list[TopicRecord] = []

    async def create_topic(self, record: TopicRecord) -> None:
        self.made.append(record)
        raise BrokerError(ErrorCode.NOT_CONTROLLER, "enough for this test")


def make(live: int, factor: str) -> tuple[BrokerError, list[TopicRecord]]:
    async def story() -> tuple[BrokerError, list[TopicRecord]]:
        stage, registry = Stage(settings={"internal.topic.replication.factor": factor}), Registry()
        stage.broker.registry = cast(Any, registry)
        stage.broker.cache.brokers = stage.broker.cache.brokers[:live]
        with pytest.raises(BrokerError) as refused:
            await make_topic(stage.broker, OFFSETS)
        return refused.value, registry.made

    return asyncio.run(story())


def test_too_few_brokers_make_no_topic_with_fewer_replicas() -> None:
    error, made = make(2, "3")
    assert error.code is ErrorCode.COORDINATOR_NOT_AVAILABLE and error.retriable
    assert "2 brokers are alive, 3 (internal.topic.replication.factor) needed" in error.detail
    assert not made


@pytest.mark.parametrize(("live", "factor"), [(3, "3"), (3, "2"), (1, "1")])
def test_with_enough_brokers_it_has_as_many_replicas_as_said(live: int, factor: str) -> None:
    _, (made,) = make(live, factor)
    assert {len(replicas) for replicas in made.assignment} == {int(factor)}


@pytest.mark.parametrize(("brokers", "factor"), [(1, "1"), (2, "2"), (5, "3")])
def test_a_cluster_of_few_brokers_asks_for_as_many(brokers: int, factor: str, tmp_path: Any) -> None:
    options = ClusterOptions(data_dir=tmp_path, brokers=brokers)
    assert options.checked().settings["internal.topic.replication.factor"] == factor
    wanted = msgspec.structs.replace(options, settings={"internal.topic.replication.factor": "2"})
    assert wanted.checked().settings["internal.topic.replication.factor"] == "2"
