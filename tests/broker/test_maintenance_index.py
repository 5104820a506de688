"""Tests of background work: it examines partitions that have changed or are due, and no idle one, for any number of
them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from sparklog.broker.internal_topics import TRANSACTIONS
from sparklog.broker.replication.cleaner import Cleaner
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import Answer, Partition, PendingProduce
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.hanging_transactions import HangingTransactions
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.marker_append import MarkerAppend
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ControlUpdate, PartitionDecision, TopicChange
from sparklog.record.codec import encode_batch
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.replica.purgatory import NEVER
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from tests.broker.staged import until
from tests.broker.support import LocalReplicas, broker_context, log_maintenance, rows

_MANY = 300
_INTERVALS = {
    "log.checkpoint.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.cleaner.backoff.ms": "100",
}


class _Around:
    """A host that reports roles and committed records."""

    def __init__(self, broker: LocalReplicas, log_maintenance: LogMaintenance) -> None:
        self.now_ms = broker.context.now_ms
        self.role_changed = broker.partitions.role_changed
        self.high_watermark_moved = log_maintenance.committed

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_: None


class _Watched:
    """A log that records its calls."""

    def __init__(self, log: Log, looks: Counter[TopicPartition]) -> None:
        self._log = log
        self._looks = looks

    def __getattr__(self, name: str) -> Any:
        self._looks[self._log.tp] += 1
        return getattr(self._log, name)


class _Stage:
    """Broker 1, which leads its partitions alone; the maintenance and the cleaner run. Created and used in a running
    loop."""

    def __init__(self, directory: LogDirectory, path: Path) -> None:
        self.context = broker_context(settings=_INTERVALS)
        self.context.incarnation = 1
        self.broker = LocalReplicas(self.context, directory, self._around)
        self.partitions = self.broker.partitions
        self.hanging = HangingTransactions(
            self.context,
            self.partitions,
            epochs=CoordinatorEpochs(self.context.cache),
            markers=cast(MarkerAppend, None),
            transactions=HostedCoordinators(self.context, TRANSACTIONS),
        )
        self.cleaner = Cleaner(self.context, self.partitions, lambda partition, error: None)
        self._told = 0

    def _around(self, broker: LocalReplicas) -> _Around:
        self.log_maintenance = log_maintenance(
            self.context,
            broker.partitions,
            broker.partitions.directory,
            log_start_moved=broker.fetches.log_start_moved,
        )
        return _Around(broker, self.log_maintenance)

    async def tell(self, count: int, config: dict[str, str], *, leader: int = 1, with_schema: bool = True) -> None:
        """Apply the controller's update of topic t."""
        self._told += 1
        schemas = (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),) if with_schema else ()
        topic = TopicChange("t", "id", schemas, ("key",), "timestamp", {"min.insync.replicas": "1", **config})
        live = tuple(BrokerEndpoint(number, "host", 9092, 1) for number in (1, 2))
        state = LeaderAndIsr(leader, self._told, (leader,), 1)
        known = tuple(PartitionDecision("t", "id", number, state, self._told, (1, 2)) for number in range(count))
        update = ControlUpdate(0, "c", 1, 1, False, live, (topic,), known, sequence=self._told)
        answers: list[Any] = []
        connection = cast(ServerConnection, SimpleNamespace(reply=answers.append))
        self.broker.update(connection, update)
        await until(lambda: answers)
        assert not answers[0].failed

    def hosted(self, number: int = 0) -> Partition:
        return self.partitions.require(TopicPartition("t", number))

    async def looked_after(self, times: int = 3) -> None:
        """Wait until all periodic work has run this number of times more."""
        counters = self.context.counters
        ends = {name: counters[name] + times for name in ("checkpoints", "retentions", "cleaner.looks")}
        await until(lambda: all(counters[name] >= end for name, end in ends.items()))
        list(self.hanging._open())


def _staged(tmp_path: Path, story: Callable[[_Stage], Coroutine[Any, Any, None]]) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)

    async def go() -> None:
        stage = _Stage(directory, tmp_path)
        stage.log_maintenance.start()
        stage.cleaner.start()
        try:
            await story(stage)
        finally:
            stage.cleaner.close()
            stage.log_maintenance.close()
            stage.partitions.stop_timer()
            await stage.context.end_tasks()

    try:
        asyncio.run(asyncio.wait_for(go(), 60))
    finally:
        directory.close()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    retain = LogMaintenance._retain

    async def counted(self: LogMaintenance) -> None:
        await retain(self)
        self._context.counters["retentions"] += 1

    dirtiest = Cleaner._dirtiest

    async def looked(self: Cleaner) -> Partition | None:
        found = await dirtiest(self)
        self._context.counters["cleaner.looks"] += 1
        return found

    monkeypatch.setattr(LogMaintenance, "_retain", counted)
    monkeypatch.setattr(Cleaner, "_dirtiest", looked)


def _produce(partition: Partition, *, producer: int = -1, now_us: int | None = None) -> None:
    """Append one record with the present time or the given one."""
    written_us = time.time_ns() // 1000 if now_us is None else now_us
    times = pa.array([written_us], DEFAULT_SCHEMA.field("timestamp").type)
    batch = encode_batch(
        rows(1).set_column(3, DEFAULT_SCHEMA.field("timestamp"), times),
        schema_id=0,
        compression=None,
        event_time="timestamp",
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        first_sequence=0 if producer >= 0 else -1,
        transactional=producer >= 0,
    )
    _append(partition, batch.header, memoryview(batch.body))


def _append(partition: Partition, header: Any, body: memoryview, *, own: bool = False) -> None:
    answers: list[Answer] = []
    partition.produce(PendingProduce([(header, body)], answers.append, own=own), acks=1, deadline_ms=NEVER)
    assert [answer.code for answer in answers] == [ErrorCode.NONE], answers


_COMPACTED = {"cleanup.policy": "compact"}


@pytest.mark.parametrize(
    "config",
    [{}, {"flush.ms": "1"}, {"retention.ms": "-1"}, _COMPACTED],
    ids=["as is", "flushed", "kept", "compacted"],
)
def test_no_idle_partition_is_examined(tmp_path: Path, config: dict[str, str]) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(_MANY, config)
        for number in range(_MANY):
            _produce(stage.hosted(number))
        if config.get("flush.ms"):
            await until(lambda: all(partition.log.recovery_point == 1 for partition in stage.partitions))
        await stage.looked_after()
        looks: Counter[TopicPartition] = Counter()
        for partition in stage.partitions:
            partition.log = cast(Log, _Watched(partition.log, looks))
        await stage.looked_after()
        assert not looks
        _produce(stage.hosted(7))
        looks.clear()
        await stage.looked_after()
        assert set(looks) == {TopicPartition("t", 7)}, "this is the only partition that is not idle"
        looks.clear()
        await stage.looked_after()
        assert not looks

    _staged(tmp_path, story)


def test_unwanted_flushes_do_not_wake_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()
    flush = LogMaintenance._flush

    def counted(self: LogMaintenance) -> None:
        looks["flush"] += 1
        flush(self)

    monkeypatch.setattr(LogMaintenance, "_flush", counted)

    async def story(stage: _Stage) -> None:
        await stage.tell(1, {})
        _produce(stage.hosted())
        await stage.looked_after(5)
        assert not looks
        await stage.tell(1, {"flush.ms": "1"})  # existing records have to become durable as well
        await until(lambda: stage.hosted().log.recovery_point == 1)
        await stage.looked_after(5)
        found = looks["flush"]
        assert found
        await stage.looked_after(5)
        assert looks["flush"] == found
        _produce(stage.hosted())
        await until(lambda: stage.hosted().log.recovery_point == 2)

    _staged(tmp_path, story)


def test_an_idle_partition_is_sealed_and_deleted_in_time(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(2, {"retention.ms": "1500"})
        for number in range(2):
            _produce(stage.hosted(number))
        _produce(stage.hosted(1), now_us=time.time_ns() // 1000 + 3_600_000_000)
        await stage.looked_after()
        assert stage.hosted().log.log_start_offset == 0
        await until(lambda: stage.hosted().log.log_start_offset == 1)
        assert stage.hosted(1).log.log_start_offset == 0

    _staged(tmp_path, story)


def test_new_settings_and_a_new_role_apply_at_once(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        old_us = time.time_ns() // 1000 - 60_000_000
        await stage.tell(1, {"retention.ms": "-1"})
        _produce(stage.hosted(), now_us=old_us)
        await stage.looked_after()
        await stage.tell(1, {"retention.ms": "1000"}, leader=2)
        await stage.looked_after()
        assert stage.partitions.maintenance_index.due(2**62) == [], "only the leader may end the segment"
        await stage.tell(1, {"retention.ms": "1000"})
        await until(lambda: stage.hosted().log.log_start_offset == 1)

    _staged(tmp_path, story)


_OLD = {"retention.ms": "1000", "retention.bytes": "-1"}
_LARGE = {"retention.ms": "-1", "retention.bytes": "4000", "segment.bytes": "1024"}


@pytest.mark.parametrize(("config", "committed"), [(_OLD, 1), (_LARGE, 20)], ids=["old", "large"])
def test_committed_records_expire_without_new_ones(tmp_path: Path, config: dict[str, str], committed: int) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(1, {**config, "retention.ms": "-1", "retention.bytes": "-1"})
        for _ in range(committed):
            _produce(stage.hosted())
        await until(lambda: stage.hosted().log.high_watermark == committed)  # after the new log has its name
        await stage.tell(1, {**config, "min.insync.replicas": "2"})
        await stage.looked_after()
        if config is _LARGE:
            for _ in range(40):
                _produce(stage.hosted())
        log = stage.hosted().log
        ends = [segment.end_offset for segment in log.segments if segment.end_offset <= committed]
        # a segment of committed records is deleted as a whole, or was deleted before
        last = max(ends, default=committed)
        await until(lambda: log.log_start_offset == last)
        assert log.high_watermark == committed

    _staged(tmp_path, story)


def test_a_compacted_log_is_checked_when_its_segments_are_old_enough(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        lag = {"min.compaction.lag.ms": "1500", "segment.bytes": "1024"}
        await stage.tell(1, {**_COMPACTED, **lag})
        log, work = stage.hosted().log, stage.partitions.maintenance_index
        for _ in range(20):
            _produce(stage.hosted())
        await until(lambda: len(log.segments) > 1 and not log.durability.is_behind)
        sealed_us = log.segments[-2].last_append_us
        await stage.looked_after()
        now_us = time.time_ns() // 1000
        # otherwise a slow machine has reached this line too late
        if now_us < log.segments[0].last_append_us + 1_500_000:
            assert log.cleaning.state.end == 0
            assert work.to_clean(now_us) == []
            assert work.to_clean(sealed_us + 1_500_000) == [stage.hosted()]
        await until(lambda: log.cleaning.state.end == log.segments[-1].base_offset)
        await stage.looked_after()
        assert work.to_clean(2**62) == [], "no record is left to clean at any time"

    _staged(tmp_path, story)


def test_settings_apply_although_their_schema_is_refused(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(1, {"retention.ms": "-1"})
        _produce(stage.hosted(), now_us=time.time_ns() // 1000 - 60_000_000)
        await stage.looked_after()
        await stage.tell(0, {"retention.ms": "1000"}, with_schema=False)
        await until(lambda: stage.hosted().log.log_start_offset == 1)

    _staged(tmp_path, story)


def test_a_dropped_partition_leaves_the_index(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(2, {})
        for number in range(2):
            _produce(stage.hosted(number), producer=7)
        work = stage.partitions.maintenance_index
        assert set(work.due(2**62)) == set(work.in_transaction()) == set(stage.partitions)
        gone, stays = stage.hosted(0), stage.hosted(1)
        _produce(gone)
        stage.broker.replicas.drop(gone)
        assert work.due(2**62) == work.in_transaction() == [stays] and gone not in work._changed

    _staged(tmp_path, story)


def test_open_transactions_are_known_from_append_to_end(tmp_path: Path) -> None:
    async def story(stage: _Stage) -> None:
        await stage.tell(3, {})
        work, partition = stage.partitions.maintenance_index, stage.hosted(1)
        assert work.in_transaction() == []
        _produce(partition, producer=7)
        assert work.in_transaction() == [partition]
        await stage.looked_after()
        assert work.in_transaction() == [partition]
        header, body = encode_marker(Marker((), ((7, 0),)), DEFAULT_SCHEMA, schema_id=0)
        _append(partition, header, memoryview(body), own=True)
        assert work.in_transaction() == []

    _staged(tmp_path, story)
