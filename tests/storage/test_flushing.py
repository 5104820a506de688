"""Tests of a full or broken disk under a log, and of the time at which data is durable."""

from __future__ import annotations

import errno

import pytest

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    SMALL,
    TP,
    append,
    batch,
    config,
    create_log,
    fill,
    open_directory,
    read_numbers,
    refused,
)


def test_a_full_disk_refuses_an_append_and_leaves_the_log_unchanged(disk: SimDisk, log: Log) -> None:
    fill(log, 2)
    for room in (0, 1, 90, 300, 350, 400):
        disk.capacity_bytes = disk.used_bytes + room
        used = disk.used_bytes
        with refused(ErrorCode.KAFKA_STORAGE_ERROR) as caught:
            append(log, batch(), batch(2, text="y" * 3000))
        assert "No space left" in str(caught.value)
        assert disk.used_bytes == used
        assert (log.log_end_offset, read_numbers(log)) == (6, list(range(6)))
    disk.capacity_bytes = None
    fill(log, 2)
    assert read_numbers(log) == list(range(12))


def test_a_full_disk_refuses_the_very_first_append(disk: SimDisk, log: Log) -> None:
    for room in range(0, 1600, 50):
        disk.capacity_bytes = disk.used_bytes + room
        try:
            fill(log, 1)
        except BrokerError as failure:
            assert failure.code == ErrorCode.KAFKA_STORAGE_ERROR
        else:
            break
        assert log.log_end_offset == 0 and log.segments == ()
    assert read_numbers(log) == [0, 1, 2]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_broken_disk_takes_the_directory_offline(disk: SimDisk, directory: LogDirectory, log: Log, code: int) -> None:
    fill(log, 2)
    disk.fail_next("write", code)
    with pytest.raises(StorageError):
        fill(log, 1)
    assert directory.offline is not None and str(TP) in directory.offline
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        create_log(directory)


def test_an_append_that_cannot_be_undone_takes_the_directory_offline(
    disk: SimDisk, directory: LogDirectory, log: Log
) -> None:
    fill(log, 2)
    disk.fail_next("write", errno.ENOSPC)
    disk.fail_next("truncate", errno.EIO)
    with pytest.raises(StorageError, match="could not be undone"):
        fill(log, 1)
    assert directory.offline is not None


def test_a_failed_read_takes_the_directory_offline(disk: SimDisk) -> None:
    directory = open_directory(disk=disk, hot_bytes=0)
    log = create_log(directory)
    fill(log, 2)
    disk.fail_next("read", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        log.read(0, max_bytes=1, end_offset=6)
    assert directory.offline is not None


def test_logs_are_flushed_by_count_and_by_time(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, flush_messages=6, flush_ms=10)
    fill(log, 1)
    assert log.recovery_point == 0
    fill(log, 1)
    assert log.recovery_point == 6
    log.config = config(flush_ms=10)
    assert not log.durability.flush_due(10**15)
    fill(log, 1)
    assert not log.durability.flush_due(5_000_000 + 9_999)
    job = log.durability.flush_due(5_000_000 + 10_000)
    assert job is not None
    fill(log, 1)  # after the creation of the job, which does not include it
    assert not log.durability.flush_due(10**15), "two flushes at a time"
    job.run()
    assert log.recovery_point == 6
    log.durability.flush_finished(job)
    assert log.recovery_point == 9
    again = log.durability.flush_due(10**15)
    assert again is not None and again.records == 3
    again.run()
    log.durability.flush_finished(again)
    assert log.recovery_point == 12
    disk.restart(page_cache_lost=True)
    [found] = open_directory(disk=disk).load()
    assert read_numbers(found) == list(range(12))


@pytest.mark.parametrize("by", ["time", "count"])
def test_records_a_crash_left_in_the_page_cache_count_for_flushes(disk: SimDisk, by: str) -> None:
    log = create_log(open_directory(disk=disk))
    fill(log, 2)
    disk.restart(page_cache_lost=False)
    [found] = open_directory(disk=disk).load()
    assert (found.recovery_point, found.log_end_offset) == (0, 6)
    if by == "time":
        found.config = config(flush_ms=10)
        assert found.durability.awaits_flush
        assert not found.durability.flush_due(5_000_000 + 9_999)
        job = found.durability.flush_due(5_000_000 + 10_000)
        assert job is not None
        job.run()
        found.durability.flush_finished(job)
        assert found.recovery_point == 6 and not found.durability.awaits_flush
    else:
        found.config = config(flush_messages=7)
        fill(found, 1)
        assert found.recovery_point == 9
    disk.restart(page_cache_lost=True)
    [found] = open_directory(disk=disk).load()
    assert read_numbers(found) == list(range(6 if by == "time" else 9))


def test_records_with_future_times_delay_no_flush(disk: SimDisk) -> None:
    """The leader's clock may have been ahead."""
    append(create_log(open_directory(disk=disk)), batch(), now_us=900_000_000)
    disk.restart(page_cache_lost=False)
    [found] = open_directory(disk=disk).load()
    found.config = config(flush_ms=10)
    append(found, batch(), now_us=5_000_000)
    assert not found.durability.flush_due(5_000_000 + 9_999)
    assert found.durability.flush_due(5_000_000 + 10_000) is not None


def test_a_clock_set_back_delays_no_flush(disk: SimDisk) -> None:
    log = create_log(open_directory(disk=disk), flush_ms=10)
    append(log, batch(), now_us=900_000_000)
    assert not log.durability.flush_due(5_000_000)
    assert not log.durability.flush_due(5_000_000 + 9_999)
    assert log.durability.flush_due(5_000_000 + 10_000) is not None


def test_a_log_that_was_stopped_cleanly_awaits_no_flush(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)
    directory.write_clean_marker()
    directory.close()
    disk.restart(page_cache_lost=False)
    [found] = open_directory(disk=disk).load()
    found.config = config(flush_ms=10)
    assert found.recovery_point == 6 and not found.durability.awaits_flush


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_flush_of_records_truncated_during_it_does_not_count(directory: LogDirectory, when: str) -> None:
    log = create_log(directory, segment_bytes=SMALL, flush_ms=10)
    fill(log, 30)
    job = log.durability.flush_due(10**15)
    assert job is not None
    if when == "while":
        job.run()
    log.truncate(6)
    fill(log, 10)
    if when == "before":
        job.run()  # the files are deleted, which is not a fault of the disk
    log.durability.flush_finished(job)
    assert log.recovery_point == 0
    again = log.durability.flush_due(10**15)
    assert again is not None, "the remaining records are not fsynced"
    again.run()
    log.durability.flush_finished(again)
    assert log.recovery_point == log.log_end_offset


def test_a_failed_flush_is_reported(disk: SimDisk, directory: LogDirectory) -> None:
    log = create_log(directory, flush_ms=10)
    fill(log, 1)
    job = log.durability.flush_due(10**15)
    assert job is not None
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        job.run()


def test_a_cancelled_flush_still_reports_a_broken_disk(disk: SimDisk, directory: LogDirectory) -> None:
    """The next fsync of the same files would succeed."""
    log = create_log(directory, flush_ms=10)
    fill(log, 3)
    job = log.durability.flush_due(10**15)
    assert job is not None
    log.truncate(6)
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        job.run()


def test_a_cancelled_seal_still_reports_a_broken_disk(
    disk: SimDisk, directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(log.log_end_offset)
    job = log.durability.seals_due()[0]

    def sync(handle: int) -> None:
        job.cancel()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "sync", sync)
    with pytest.raises(StorageError, match="Input/output"):
        job.run()
    assert not job.done
