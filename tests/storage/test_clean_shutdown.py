"""Tests of a clean shutdown: what it makes durable, and what in advance, and what remains after a power failure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from sparklog.errors import BrokerError, StorageError
from sparklog.model import TopicPartition
from sparklog.record.header import Flag, unpack_headers
from sparklog.storage import clean_shutdown
from sparklog.storage.disk import read_file
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import directory_name
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    SCHEMAS,
    TOPIC_ID,
    append,
    batch,
    config,
    create_log,
    fill,
    open_directory,
)


def found_after_power_cut(disk: SimDisk, tps: list[TopicPartition]) -> list[int]:
    """Return the ends of these logs, all of which the clean shutdown has stored."""
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk)
    assert directory.trust.clean and directory.trusted
    found = {log.tp: log for log in directory.logs()}
    assert not any(log.findings for log in found.values())
    assert all(log.recovery_point == log.log_end_offset for log in found.values())
    assert all(log.durability.is_clean for log in found.values())
    return [found[tp].log_end_offset for tp in tps]


@pytest.mark.parametrize("few_batches", [0, 256], ids=["with state files", "without"])
def test_many_logs_are_made_durable_together(disk: SimDisk, monkeypatch: pytest.MonkeyPatch, few_batches: int) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 3)
    monkeypatch.setattr("sparklog.storage.log_durability._FEW_BATCHES", few_batches)
    directory = open_directory(disk=disk)
    tps = [TopicPartition("many", number) for number in range(4)]
    for number, tp in enumerate(tps):
        log = directory.create(tp, TOPIC_ID, schemas=SCHEMAS, config=config())
        fill(log, 2 + number)
        log.set_high_watermark(log.log_end_offset)
    changes = disk.changes
    directory.write_clean_marker()
    assert disk.changes - changes < (30 if few_batches else 60), "there must be no flush of each file"
    assert found_after_power_cut(disk, tps) == [6, 9, 12, 15]


def test_a_failed_file_system_sync_prevents_a_clean_marker(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)
    disk.fail_next("sync_file_system", errno.EIO)
    with pytest.raises(StorageError):
        directory.write_clean_marker()
    disk.restart(page_cache_lost=False)
    assert not open_directory(disk=disk).trust.clean


def sync_ahead(directory: LogDirectory, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    ahead = directory.sync_ahead()
    assert ahead is not None
    meanwhile()
    ahead.run()
    ahead.finished()


def test_a_few_logs_are_not_made_durable_ahead_of_a_stop(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)
    assert directory.sync_ahead() is None


def test_a_stop_does_not_sync_again_what_was_synced_ahead(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs that were written or truncated since the round began are synced again: the round proves nothing about
    them."""
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    directory = open_directory(disk=disk)
    tps = [TopicPartition("many", number) for number in range(4)]
    resting, before, after, cut = (directory.create(tp, TOPIC_ID, schemas=SCHEMAS, config=config()) for tp in tps)
    for log in (resting, before, after, cut):
        fill(log, 4)
    sync_ahead(directory, meanwhile=lambda: fill(before, 1))
    fill(after, 1)
    cut.truncate(6)
    fill(cut, 2)
    assert [log.durability.is_clean for log in (resting, before, after, cut)] == [True, False, False, False]
    assert [log.recovery_point for log in (resting, before)] == [12, 0]
    directory.write_clean_marker()
    assert found_after_power_cut(disk, tps) == [12, 15, 15, 12]


def test_a_log_with_uncounted_files_is_not_synced_ahead(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    monkeypatch.setattr("sparklog.storage.log_durability._FEW_BATCHES", 0)
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    sync_ahead(directory)
    assert not log.durability.is_clean


def test_a_log_deleted_while_all_become_durable_stays_deleted(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    sync_ahead(directory, meanwhile=lambda: directory.delete(log.tp))
    directory.write_clean_marker()
    disk.restart(page_cache_lost=True)
    assert not open_directory(disk=disk).logs()


def test_a_disk_error_ahead_of_a_stop_prevents_a_clean_stop(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported once: the flush of the stop itself would succeed."""
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)
    disk.fail_next("sync_file_system", errno.EIO)
    sync_ahead(directory)
    with pytest.raises(BrokerError, match="offline"):
        directory.write_clean_marker()
    disk.restart(page_cache_lost=False)
    assert not open_directory(disk=disk).trust.clean


def test_a_batch_without_records_ends_a_clean_state(disk: SimDisk) -> None:
    log = create_log(open_directory(disk=disk))
    leader = create_log(open_directory(disk=SimDisk()))
    fill(leader, 2)
    found = leader.read(0, max_bytes=1 << 20, end_offset=leader.log_end_offset)
    first, second = unpack_headers(found.headers)
    log.append_as_follower(first.pack(), memoryview(found.bodies[0]))
    log.durability.prepare_clean_stop()
    assert log.durability.is_clean
    cleaned = second._replace(record_count=0, flags=int(second.flags | Flag.CLEANED))
    log.append_as_follower(cleaned.pack(), memoryview(found.bodies[1]))
    assert log.log_end_offset == leader.log_end_offset and not log.durability.is_clean


def test_many_logs_are_synced_file_by_file_where_needed(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 2)
    monkeypatch.setattr("sparklog.storage.log_durability._FEW_BATCHES", 0)
    monkeypatch.setattr(disk, "can_sync_file_system", lambda handle: False)
    directory = open_directory(disk=disk)
    tps = [TopicPartition("many", number) for number in range(3)]
    for tp in tps:
        log = directory.create(tp, TOPIC_ID, schemas=SCHEMAS, config=config())
        append(log, batch(producer=7, sequence=0))
    directory.write_clean_marker()
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk)
    assert directory.trust.clean and len(directory.logs()) == 3
    for tp in tps:
        names = disk.names(directory.path / directory_name(tp))
        [snapshot] = [name for name in names if name.endswith(".producers")]
        assert read_file(disk, directory.path / directory_name(tp) / snapshot), (
            "all files must be fsynced before the marker"
        )


def test_the_file_system_is_synced_with_a_handle_from_before_writes(
    disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle reports the failed writes since it was opened. Another handle may not report them."""
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)
    opened: list[int | None] = []
    synced: list[int | None] = []
    lock, sync = disk.lock, disk.sync_file_system

    def locked(path: Path) -> int | None:
        opened.append(lock(path))
        return opened[-1]

    def synchronised(handle: int) -> None:
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(disk, "lock", locked)
    monkeypatch.setattr(disk, "sync_file_system", synchronised)
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)
    directory.write_clean_marker()
    assert synced == opened and len(opened) == 1
