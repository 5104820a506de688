"""Tests of a failed fsync: the written data may only be in the page cache, and the next process of the same boot
doubts it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import CHECKPOINT_FILE, read_checkpoint
from sparklog.storage.directory_trust import RUNNING_FILE
from sparklog.storage.disk import RealDisk
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    LOG_DIR,
    SCHEMAS,
    SMALL,
    TOPIC_ID,
    TP,
    append,
    batch,
    config,
    create_log,
    fill,
    open_directory,
    read_numbers,
)

Sync = Callable[[SimDisk, LogDirectory, Log], object]


def flush(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    disk.fail_next("sync", errno.EIO)
    log.durability.flush()


def flush_by_time(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    log.config = config(segment_bytes=SMALL, flush_ms=10)
    job = log.durability.flush_due(10**15)
    assert job is not None
    disk.fail_next("sync", errno.EIO)
    job.run()


def cancelled_flush(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    """Report the failure by a job whose outcome the broker no longer awaits."""
    log.config = config(segment_bytes=SMALL, flush_ms=10)
    job = log.durability.flush_due(10**15)
    assert job is not None
    log.durability.cancel_flush()
    disk.fail_next("sync", errno.EIO)
    job.run()


def seal(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    log.set_high_watermark(log.log_end_offset)
    disk.fail_next("sync", errno.EIO)
    log.durability.seals_due()[0].run()


def seal_without_room(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    """Seal on a thinly provisioned disk: space is missing when pages are written, not when an append reserves it."""
    log.set_high_watermark(log.log_end_offset)
    disk.fail_next("sync", errno.ENOSPC)
    log.durability.seals_due()[0].run()


def clean_stop(disk: SimDisk, directory: LogDirectory, _: Log) -> None:
    disk.fail_next("sync", errno.EIO)
    directory.write_clean_marker()


def clean_stop_of_many(disk: SimDisk, directory: LogDirectory, _: Log) -> None:
    for number in range(1, 70):
        other = directory.create(TopicPartition("other", number), "t-2", schemas=SCHEMAS, config=config())
        append(other, batch(1))
    disk.fail_next("sync_file_system", errno.EIO)
    directory.write_clean_marker()


def names(disk: SimDisk, _: LogDirectory, log: Log) -> None:
    disk.fail_next("sync_directory", errno.EIO)
    log.durability.flush()


SYNCS = [flush, flush_by_time, cancelled_flush, seal, seal_without_room, clean_stop, clean_stop_of_many, names]


def fail(disk: SimDisk, directory: LogDirectory, sync: Sync) -> Log:
    """Return a log of which some bytes were never written to the disk, as its broker finds out."""
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    # The broker does this with an error of a job.
    with pytest.raises(StorageError) as caught:
        sync(disk, directory, log)
    directory.trust.fail(str(caught.value))
    return log


@pytest.mark.parametrize("sync", SYNCS)
def test_a_restart_after_a_failed_fsync_distrusts_the_directory(disk: SimDisk, sync: Sync) -> None:
    directory = open_directory(disk=disk)
    assert directory.trusted
    fail(disk, directory, sync)
    for _ in range(2):  # the first of them may end before its registration
        disk.restart(page_cache_lost=False)
        again = open_directory(disk=disk)
        assert not again.trusted
    again.note_incarnation(1)
    disk.restart(page_cache_lost=False)
    assert open_directory(disk=disk).trusted, "its registration has reported the doubt"


def test_data_of_a_failed_fsync_are_not_trusted_from_page_cache(disk: SimDisk) -> None:
    """All data can still be read, and another fsync would succeed, although the disk has none of it."""
    fail(disk, open_directory(disk=disk), flush)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    log = directory.get(TP)
    end = 0 if log is None else log.log_end_offset
    assert end < 12, "the first segment must not be on the disk"
    log = directory.create(TP, TOPIC_ID, schemas=SCHEMAS, config=config(segment_bytes=SMALL))
    fill(log, 10, leader_epoch=2)
    log.durability.flush()
    written = read_numbers(log)
    directory.checkpoint()
    disk.restart(page_cache_lost=True)
    found = open_directory(disk=disk, boot_id="boot-2").get(TP)
    assert found is not None and read_numbers(found) == written


@pytest.mark.parametrize("name", ["seal", "checkpoint"])
def test_a_failed_fsync_is_recorded_before_its_thread_reports_it(disk: SimDisk, name: str) -> None:
    """The process may be killed before the event loop learns of the failure."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(log.log_end_offset)
    work = log.durability.seals_due()[0].run if name == "seal" else directory.checkpoint_job()
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError):
        work()
    disk.restart(page_cache_lost=False)
    assert not open_directory(disk=disk).trusted


def test_a_start_whose_fsync_fails_leaves_doubt(disk: SimDisk) -> None:
    """The start fsyncs what a killed process had sealed. The next start would find the same file without an error."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(log.log_end_offset)
    for job in log.durability.seals_due():
        job.run()
    disk.restart(page_cache_lost=False)
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        open_directory(disk=disk)
    disk.restart(page_cache_lost=False)
    assert not open_directory(disk=disk).trusted


def test_no_checkpoint_counts_an_fsync_after_a_failed_one(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    with pytest.raises(StorageError):
        flush(disk, directory, log)
    with contextlib.suppress(StorageError):
        log.durability.flush()  # the disk accepts it now
    log.set_high_watermark(9)
    directory.checkpoint()
    found = read_checkpoint(disk, LOG_DIR)[TP]
    assert (found.recovery_point, found.high_watermark) == (0, 9)


def test_a_registration_does_not_settle_a_later_disk_failure(disk: SimDisk) -> None:
    """A session may expire while the broker hands over its leaderships."""
    directory = open_directory(disk=disk)
    directory.note_incarnation(1)
    fail(disk, directory, flush)
    directory.note_incarnation(2)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk)
    assert (again.trusted, again.incarnation) == (False, 2)


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_doubt_is_stored_even_if_no_file_can_be_created(disk: SimDisk, operation: str) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    disk.fail_next("sync", errno.EIO)
    disk.fail_next(operation, errno.ENOSPC)
    with pytest.raises(StorageError):
        log.durability.flush()
    disk.restart(page_cache_lost=False)
    assert not open_directory(disk=disk).trusted


def test_a_doubt_that_cannot_be_written_is_logged(disk: SimDisk, caplog: pytest.LogCaptureFixture) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 1)
    disk.read_only = True
    with pytest.raises(StorageError):
        log.durability.flush()
    assert f"{LOG_DIR}: the next start must not trust this directory" in caplog.text


def test_a_full_disk_without_space_for_state_raises_no_doubt(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 1)
    for _ in range(2):  # the second checkpoint uses the reserved space
        disk.fail_next("sync", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        directory.checkpoint()
    directory.checkpoint()
    assert disk.exists(LOG_DIR / CHECKPOINT_FILE)
    disk.restart(page_cache_lost=False)
    assert open_directory(disk=disk).trusted


def test_a_real_disk_reports_failed_fsyncs(tmp_path: Path) -> None:
    """A pipe cannot be fsynced."""
    disk, told = RealDisk(), list[OSError]()
    disk.on_sync_failed = told.append
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        disk.sync(writing)
    os.close(reading)
    os.close(writing)
    assert [failure.errno for failure in told] == [errno.EINVAL]
    handle = disk.open(tmp_path / RUNNING_FILE, create=True)
    disk.write(handle, [b"abc"], 0)
    disk.sync(handle)
    disk.drop_cached(handle)
    assert disk.read(handle, 3, 0) == b"abc"
    disk.close(handle)
    assert len(told) == 1
