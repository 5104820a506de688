"""Tests of a broker's responses for partitions that it does not host, and of the wake-ups of those that it hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ControlUpdate, ControlUpdateReply, PartitionDecision, TopicChange
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.replica.events import Event
from sparklog.replica.purgatory import NEVER
from sparklog.storage.log_directory import LogDirectory
from tests.broker.staged import until
from tests.broker.support import LocalReplicas, broker_context


def test_a_broker_without_metadata_calls_no_topic_unknown(tmp_path: Path) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    try:
        context = broker_context()
        partitions = Partitions(context, directory)
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        context.cache.controller_epoch = 1
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    finally:
        directory.close()


class Waiting:
    """A partition that wants to be woken at ``deadline_ms``, and then not for a long time."""

    def __init__(self, partitions: Partitions, deadline_ms: int) -> None:
        self._deadline_ms = deadline_ms
        self.replica = SimpleNamespace(deadline_ms=lambda: self._deadline_ms)
        self.timer_ms = NEVER
        self.stopped = False
        self.woken = asyncio.Event()
        self._partitions = partitions

    def step(self, event: Event) -> None:
        self.woken.set()
        self._deadline_ms += 1_000_000
        self._partitions.deadline_moved(cast(Partition, self))


def test_a_timer_that_waits_long_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand followers are lost within two milliseconds: their leaders shrink the ISRs within two as well, and
    not when the first of them is next woken."""
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    context = broker_context()
    clock_ms = 1000
    monkeypatch.setattr(context, "now_ms", lambda: clock_ms)

    async def scenario() -> None:
        nonlocal clock_ms
        partitions = Partitions(context, directory)
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


class Still:
    """A host that does nothing."""

    def now_ms(self) -> int:
        return 1000

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_: None


def told(leader: int, isr: tuple[int, ...], version: int) -> ControlUpdate:
    """Return an update with a partition on this broker, 1, and on broker 0."""
    topic = TopicChange("t", "id", (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),), ("key",), "timestamp", {})
    live = tuple(BrokerEndpoint(number, "host", 9092, 1) for number in (0, 1))
    known = PartitionDecision("t", "id", 0, LeaderAndIsr(leader, version, isr, 1), version, (0, 1))
    return ControlUpdate(0, "c", 1, 1, False, live, (topic,), (known,), sequence=version)


@pytest.mark.parametrize("broken", [False, True])
def test_a_stopping_replica_counts_until_the_controller_decides(tmp_path: Path, broken: bool) -> None:
    """An offline replica follows no decision: it would consider itself a member of the ISR forever."""
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    broker = LocalReplicas(broker_context(), directory, lambda _: Still())
    partitions = broker.partitions
    answers: list[ControlUpdateReply] = []
    connection = cast(ServerConnection, SimpleNamespace(reply=answers.append))

    async def scenario() -> None:
        broker.context.incarnation = 1
        broker.update(connection, told(0, (0, 1), 1))
        await until(lambda: len(answers) == 1)
        [partition] = partitions
        assert partition.replica.role == "follower" and partitions.counted_on(partition)
        if broken:
            partition.fail(StorageError("the disk is gone"))
        assert partitions.counted_on(partition)
        broker.update(connection, told(0, (0,), 2))
        await until(lambda: len(answers) == 2)
        assert [failure[2] for failure in answers[1].failed] == [ErrorCode.KAFKA_STORAGE_ERROR] * broken
        assert not partitions.counted_on(partition)
        await broker.context.end_tasks()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        directory.close()


def test_a_newly_compacted_topic_is_scheduled_for_cleaning_at_once(tmp_path: Path) -> None:
    """No periodic scan of all partitions is needed."""
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    broker = LocalReplicas(broker_context(), directory, lambda _: Still())
    partitions = broker.partitions
    connection = cast(ServerConnection, SimpleNamespace(reply=lambda _: None))

    def tell(policy: str, version: int) -> list[int]:
        update = told(0, (0, 1), version)
        topics = (msgspec.structs.replace(update.topics[0], config={"cleanup.policy": policy}),)
        update = msgspec.structs.replace(update, topics=topics)
        broker.update(connection, update)
        return [partition.tp.partition for partition in partitions.maintenance_index.to_clean(0)]

    try:
        broker.context.incarnation = 1
        assert [tell(policy, n) for n, policy in enumerate(("delete", "compact", "delete", "compact"), 1)] == [
            [],
            [0],
            [],
            [0],
        ]
        [partition] = partitions
        broker.replicas.drop(partition)
        assert partitions.maintenance_index.to_clean(2**62) == []
    finally:
        directory.close()
