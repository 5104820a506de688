"""What a broker says of partitions it does not host, and when it wakes those it does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sparklog.broker.partition import Partition
from sparklog.broker.partitions import Partitions
from sparklog.broker.state import BrokerState
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.replica.events import Event
from sparklog.storage.log_set import LogDirectory


def test_a_broker_that_was_told_nothing_yet_calls_no_topic_unknown(tmp_path: Path) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    try:
        broker = BrokerState(
            1,
            "cluster",
            log_dir=str(tmp_path),
            config=broker_config({}),
            on_log_failed=lambda *_: None,
            restart=lambda: None,
        )
        partitions = Partitions(broker, directory)
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        broker.cache.controller_epoch = 1
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    finally:
        directory.close()


class Waiting:
    """A partition that wants to be woken at ``deadline_ms``, and then not for long."""

    def __init__(self, partitions: Partitions, deadline_ms: int) -> None:
        self.replica = SimpleNamespace(deadline_ms=deadline_ms)
        self.timer_ms: int | None = None
        self.stopped = False
        self.woken = asyncio.Event()
        self._partitions = partitions

    def step(self, event: Event) -> None:
        self.woken.set()
        self.replica.deadline_ms += 1_000_000
        self._partitions.deadline_moved(cast(Partition, self))


def test_who_is_woken_and_waits_for_long_again_delays_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand followers are lost within two milliseconds: their leaders shrink the ISRs within two, not when the
    first of them wants to be woken again."""
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    broker = BrokerState(
        1,
        "cluster",
        log_dir=str(tmp_path),
        config=broker_config({}),
        on_log_failed=lambda *_: None,
        restart=lambda: None,
    )
    clock_ms = 1000
    monkeypatch.setattr(broker, "now_ms", lambda: clock_ms)

    async def scenario() -> None:
        nonlocal clock_ms
        partitions = Partitions(broker, directory)
        first, second = Waiting(partitions, 1001), Waiting(partitions, 1002)
        for partition in (first, second):
            partitions.deadline_moved(cast(Partition, partition))
        clock_ms = 1001
        await first.woken.wait()
        assert not second.woken.is_set()
        clock_ms = 1002
        await second.woken.wait()
        partitions.stop_timer()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        directory.close()
