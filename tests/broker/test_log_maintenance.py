"""Tests of a broker whose checkpoints cannot be written, and of flushes on a slow disk."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication import log_maintenance
from sparklog.broker.replication.log_maintenance import LogMaintenance
from sparklog.broker.replication.partition import Partition
from sparklog.config import broker_config
from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import RESERVE_FILE
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import read_partition_file
from sparklog.testing.sim_disk import SimDisk
from tests.broker.support import log_maintenance as log_maintenance_of
from tests.storage.batches import (
    LOG_DIR,
    SCHEMAS,
    TOPIC_ID,
    TP,
    append,
    batch,
    config,
    create_log,
    fill,
    open_directory,
)


class _Partitions(list[Partition]):
    """A stand-in that hosts all partitions."""

    def get(self, tp: TopicPartition) -> Partition | None:
        return next((partition for partition in self if partition.tp == tp), None)


class _SlowDisk(SimDisk):
    """A disk on which an fsync waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.syncing = threading.Event()
        self.go_on = threading.Event()

    def sync(self, handle: int) -> None:
        if self.slow:
            self.syncing.set()
            assert self.go_on.wait(60)
        super().sync(handle)


class _Broker:
    """The parts of a broker that maintenance needs."""

    def __init__(self) -> None:
        self.config = broker_config({"log.checkpoint.interval.ms": "100"})
        self.counters: Counter[str] = Counter()
        self.partitions = _Partitions()
        self.failures: list[Exception] = []
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work, name=name))

    def log_failed(self, partition: Partition | None, error: Exception) -> None:
        assert partition is None
        self.failures.append(error)


def maintenance(broker: _Broker, directory: LogDirectory) -> LogMaintenance:
    context = cast(BrokerContext, broker)
    return log_maintenance_of(context, broker.partitions, directory, log_failed=broker.log_failed)


def _name(directory: LogDirectory) -> None:
    """Write a checkpoint with all logs' names, so that later ones are not written for that."""
    directory.checkpoint()
    directory.consume_named()


def _keep_up(directory: LogDirectory, until: Callable[[_Broker], object], *hosted: Partition) -> _Broker:
    async def met(broker: _Broker) -> None:
        while not until(broker):  # noqa: ASYNC110 - the disk sends no event
            await asyncio.sleep(0.01)

    async def run() -> _Broker:
        broker = _Broker()
        broker.partitions.extend(hosted)
        log_maintenance = maintenance(broker, directory)
        log_maintenance.start()
        try:
            await asyncio.wait_for(met(broker), 60)
        finally:
            for task in broker.tasks:
                task.cancel()
            await asyncio.gather(*broker.tasks, return_exceptions=True)
            log_maintenance.close()
        return broker

    return asyncio.run(run())


def test_a_disk_that_refuses_the_checkpoint_ends_the_broker() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    fill(create_log(directory), 1)
    disk.fail_next("sync", errno.EIO)
    broker = _keep_up(directory, lambda broker: broker.failures)
    assert "checkpoint" in str(broker.failures[0]) and directory.offline is not None


def test_a_full_disk_does_not_end_the_broker() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 1)
    _name(directory)
    log.set_high_watermark(1)  # there is something to write, and no reserved space for it
    disk.remove(LOG_DIR / RESERVE_FILE)
    disk.capacity_bytes = disk.used_bytes
    broker = _keep_up(directory, lambda broker: broker.counters["checkpoint.failed"] > 1)
    assert not broker.failures and directory.offline is None
    disk.capacity_bytes = None
    assert _keep_up(directory, lambda broker: broker.counters["checkpoints"]).counters["checkpoint.failed"] == 0


def test_the_loop_keeps_running_while_a_flush_waits() -> None:
    disk = _SlowDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory, flush_ms=1)
    fill(log, 1)
    _name(directory)
    disk.slow = True
    partition = cast(Partition, SimpleNamespace(log=log, offline=None, tp=log.tp))
    turns = 0

    def flushed(broker: _Broker) -> bool:
        """Check repeatedly that the loop turns."""
        nonlocal turns
        if disk.syncing.is_set():
            turns += 1
            if turns == 1:
                fill(log, 1)
            if turns == 5:
                assert log.recovery_point == 0, "records without the disk's confirmation must not be durable"
                disk.slow = False
                disk.go_on.set()
        return log.recovery_point == 6

    broker = _keep_up(directory, flushed, partition)
    assert turns > 5 and not broker.failures


def test_a_new_schema_is_stored_outside_the_event_loop() -> None:
    """The log may have no segment to seal, because it begins with the new schema."""
    disk = _SlowDisk()
    directory = open_directory(disk=disk)
    log = directory.create(TP, TOPIC_ID, schemas=SCHEMAS[:1], config=config())
    fill(log, 1)
    log.restart_at(0)
    log.add_schema(SCHEMAS[1])
    append(log, batch(schema_id=1))
    disk.slow = True
    partition = cast(Partition, SimpleNamespace(log=log, offline=None, tp=log.tp))

    async def run() -> None:
        broker = _Broker()
        log_maintenance = maintenance(broker, directory)
        log_maintenance.committed(partition)
        log_maintenance.committed(partition)
        (work,) = broker.tasks
        assert await asyncio.to_thread(disk.syncing.wait, 60)
        append(log, batch(schema_id=1))  # the loop continues
        disk.go_on.set()
        await asyncio.wait_for(work, 60)
        log_maintenance.committed(partition)
        assert len(broker.tasks) == 1 and not broker.failures
        log_maintenance.close()

    asyncio.run(run())
    assert [schema.schema_id for schema in read_partition_file(disk, log.directory).schemas] == [0, 1]


def test_long_lived_objects_are_frozen_for_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_maintenance, "_SPARED_AT_ONCE", 10)
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda generation: done.append(f"collect {generation}"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    directory = open_directory(tmp_path)
    broker = _Broker()
    subject = maintenance(broker, directory)

    def look(partitions: int, on_disk: int) -> list[str]:
        broker.partitions[:] = [cast(Partition, None)] * partitions
        directory._checkpoints.on_disk = on_disk
        done.clear()
        subject._freeze_objects()
        return list(done)

    try:
        assert look(9, 0) == []
        assert look(10, 0) == ["collect 1", "freeze"], "present garbage must not be frozen"
        assert look(10, 9) == []
        assert look(10, 10) == ["collect 1", "freeze"], "the first records must create files, and more objects"
        assert look(6, 5) == []
        assert look(5, 5) == ["unfreeze"]
        assert look(5, 4) == []
        assert look(5, 5) == ["collect 1", "freeze"], "the new objects count again"
    finally:
        subject.close()
        directory.close()


@pytest.mark.parametrize("broken", [True, False])
def test_the_failure_of_an_abandoned_flush_is_reported_at_the_end(broken: bool) -> None:
    """A disk reports a failure once: the flush of a clean stop would succeed."""
    disk = _SlowDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory, flush_ms=1)
    fill(log, 1)
    _name(directory)
    disk.slow = True
    partition = cast(Partition, SimpleNamespace(log=log, offline=None, tp=log.tp))

    async def run() -> LogMaintenance:
        broker = _Broker()
        broker.config = broker_config({"log.checkpoint.interval.ms": "600000"})
        broker.partitions.append(partition)
        log_maintenance = maintenance(broker, directory)
        log_maintenance.start()
        assert await asyncio.to_thread(disk.syncing.wait, 60)
        log_maintenance.close()
        for task in broker.tasks:
            task.cancel()
        await asyncio.gather(*broker.tasks, return_exceptions=True)
        assert not broker.failures
        return log_maintenance

    log_maintenance = asyncio.run(run())
    disk.slow = False
    if broken:
        disk.fail_next("sync", errno.EIO)
    disk.go_on.set()
    if broken:
        with pytest.raises(StorageError, match="Input/output"):
            log_maintenance.ended()
    else:
        log_maintenance.ended()
