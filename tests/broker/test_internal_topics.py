"""Tests of the internal topics: they are created only with enough brokers for their replicas, and some are
compacted."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sparklog.broker.internal_topics import OFFSETS, TRANSACTIONS
from sparklog.broker.transactions.coordinator_runtime import _decoded, _encoded
from sparklog.cluster.options import ClusterOptions
from sparklog.config import topic_config
from sparklog.coordinator.group_records import GroupKey, GroupValue
from sparklog.coordinator.groups import Groups
from sparklog.coordinator.log_records import Record
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicRecord
from sparklog.storage.cleaning import CleaningRules
from sparklog.storage.log import Log
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.broker.staged import Stage
from tests.coordinator.group_host import Chaos
from tests.storage.batches import follow, open_directory
from tests.storage.compacting import clean, commit_and_seal


class ZkRegistration:
    def __init__(self) -> None:
        self.made: list[TopicRecord] = []

    async def create_topic(self, record: TopicRecord) -> None:
        self.made.append(record)
        raise BrokerError(ErrorCode.NOT_CONTROLLER, "enough for this test")


def make(live: int, factor: str) -> tuple[BrokerError, list[TopicRecord]]:
    async def story() -> tuple[BrokerError, list[TopicRecord]]:
        stage, registry = Stage(settings={"internal.topic.replication.factor": factor}), ZkRegistration()
        stage.registry.answers = registry
        stage.context.cache.brokers = stage.context.cache.brokers[:live]
        with pytest.raises(BrokerError) as refused:
            await stage.broker.internal_topics.create(OFFSETS)
        return refused.value, registry.made

    return asyncio.run(story())


def test_too_few_brokers_create_no_internal_topic_with_fewer_replicas() -> None:
    error, made = make(2, "3")
    assert error.code is ErrorCode.COORDINATOR_NOT_AVAILABLE and error.retriable
    assert "2 brokers are live, 3 (internal.topic.replication.factor) needed" in error.detail
    assert not made


@pytest.mark.parametrize(("live", "factor"), [(3, "3"), (3, "2"), (1, "1")])
def test_enough_brokers_create_the_configured_number_of_replicas(live: int, factor: str) -> None:
    _, (made,) = make(live, factor)
    assert {len(replicas) for replicas in made.assignment} == {int(factor)}


@pytest.mark.parametrize(("brokers", "factor"), [(1, "1"), (2, "2"), (5, "3")])
def test_a_small_cluster_lowers_the_internal_replication_factor(brokers: int, factor: str, tmp_path: Any) -> None:
    options = ClusterOptions(data_dir=tmp_path, brokers=brokers)
    assert options.checked().settings["internal.topic.replication.factor"] == factor
    wanted = msgspec.structs.replace(options, settings={"internal.topic.replication.factor": "2"})
    assert wanted.checked().settings["internal.topic.replication.factor"] == "2"


def test_offsets_are_compacted_and_transactions_are_not() -> None:
    assert topic_config(made_record(OFFSETS).config).compacted
    assert not topic_config(made_record(TRANSACTIONS).config).compacted


@pytest.mark.parametrize("seed", range(3))
def test_a_compacted_log_loads_the_same_groups(seed: int) -> None:
    """Members join, leave and die, and commit, and groups are deleted. Tombstones are removed as well."""
    history = Chaos(seed)
    for turn in range(12):
        history.run(60)
        history.host.settle()
        for member in history.members:
            history.host.commit(member, dict.fromkeys(member.owned, turn))
    record = made_record(OFFSETS)
    overrides = {"segment.bytes": "8192", "delete.retention.ms": "0"}
    log = open_directory(disk=SimDisk()).create(
        TopicPartition(OFFSETS, 0), "id", schemas=record.schemas, config=topic_config({**record.config, **overrides})
    )
    written = history.host.log
    for at in range(0, len(written), 5):
        log.append_as_leader(_encoded(written[at : at + 5], 0), leader_epoch=1, now_us=5_000_000)
    commit_and_seal(log)
    for now_us in (10_000_000, 20_000_000):
        rules = CleaningRules(record.key_columns, record.event_time, log.config, 1 << 20, 2**40, seed)
        assert clean(log, now_us, rules=rules) is not None
    left = read(log)
    assert len(left) < 0.6 * len(written)
    assert loaded(left) == loaded(written) != {}


@pytest.mark.parametrize("operation", range(0, 40, 8))
@pytest.mark.parametrize("lost", [False, True], ids=["process", "machine"])
def test_groups_survive_their_coordinators_death_during_compaction(operation: int, lost: bool) -> None:
    """The next coordinator reads a replica with other compactions. The broker that died follows it, leads again, and
    its log is read."""
    history, record = Chaos(operation), made_record(OFFSETS)
    overrides = {"segment.bytes": "4096", "delete.retention.ms": "600000", "min.cleanable.dirty.ratio": "0"}
    config = topic_config({**record.config, **overrides})
    disk = SimDisk(seed=operation)
    directory = open_directory(disk=disk)
    first, second = (
        one.create(TopicPartition(OFFSETS, 0), "id", schemas=record.schemas, config=config)
        for one in (directory, open_directory(disk=SimDisk()))
    )
    written = history.host.log

    def write(log: Log, epoch: int) -> None:
        begun = turn = len(written)
        while len(written) < begun + 150:
            history.run(20)
            history.host.settle()
            for member in history.members:
                history.host.commit(member, dict.fromkeys(member.owned, turn))
            turn += 1
        for at in range(begun, len(written), 5):
            log.append_as_leader(_encoded(written[at : at + 5], 0), leader_epoch=epoch, now_us=5_000_000)

    def compact(log: Log) -> None:
        commit_and_seal(log)
        rules = CleaningRules(record.key_columns, record.event_time, log.config, 1 << 10, 2**40, operation)
        assert clean(log, 10_000_000, rules=rules) is not None

    write(first, 1)
    follow(second, first)
    compact(second)
    write(first, 1)
    follow(second, first)
    commit_and_seal(first)
    first.durability.flush()
    directory.checkpoint()
    disk.die_after(operation)
    with pytest.raises(ProcessDied):
        compact(first)
    assert loaded(read(second)) == loaded(written) != {}
    write(second, 2)
    compact(second)
    assert loaded(read(second)) == loaded(written)
    disk.restart(page_cache_lost=lost)
    again = open_directory(disk=disk, boot_id="another" if lost else "boot-1").logs()[0]
    again.config = config
    assert again.findings == ()
    follow(again, second)
    assert loaded(read(again)) == loaded(written)
    write(again, 3)
    compact(again)
    assert loaded(read(again)) == loaded(written)


def read(log: Log) -> list[Record]:
    """Read the log as a starting coordinator does."""
    log.set_high_watermark(log.log_end_offset)
    found: list[Record] = []
    at = log.log_start_offset
    while at < log.high_watermark:
        piece = log.read(at, max_bytes=1 << 20, end_offset=log.high_watermark)
        found += [one for records in _decoded(piece) for one in records]
        at = piece.next_offset
    return found


def made_record(topic: str) -> TopicRecord:
    async def story() -> TopicRecord:
        stage = Stage(settings={"internal.topic.replication.factor": "1"})
        return stage.broker.internal_topics._record(topic)

    return asyncio.run(story())


def loaded(records: list[Record]) -> dict[str, dict[GroupKey, GroupValue]]:
    core = Groups()
    core.load(records)
    return {name: dict(core._entries[name].state) for name in core.names()}
