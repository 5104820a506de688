"""What was cut may be back after a power cut, until that is fsynced: what counts as fsynced must not lie behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparklog.errors import ErrorCode
from sparklog.storage.log import Log
from sparklog.storage.log_set import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    SMALL,
    TP,
    append,
    batch,
    create_log,
    fill,
    open_directory,
    read_numbers,
    refused,
)

Flush = Callable[[LogDirectory, Log], None]


def _at_once(directory: LogDirectory, log: Log) -> None:
    log.durability.flush()


def _by_time(directory: LogDirectory, log: Log) -> None:
    job = log.durability.flush_due(10**15)
    assert job is not None
    job.run()
    log.durability.flush_finished(job)


def _while_one_by_time_is_at_work(directory: LogDirectory, log: Log) -> None:
    assert log.durability.flush_due(10**15) is not None
    log.durability.flush()


def _clean_stop(directory: LogDirectory, log: Log) -> None:
    directory.write_clean_marker()


FLUSHES = pytest.mark.parametrize("flush", [_at_once, _by_time, _while_one_by_time_is_at_work, _clean_stop])
SEEDS = pytest.mark.parametrize("seed", range(6))


def _log(disk: SimDisk, boot_id: str = "boot-1") -> tuple[LogDirectory, Log]:
    directory = open_directory(disk=disk, boot_id=boot_id)
    return directory, create_log(directory, segment_bytes=SMALL, flush_ms=1)


def _next_segment(log: Log) -> None:
    start = log.log_end_offset
    log.append_as_leader([batch(3, first=start)], leader_epoch=2, now_us=5_000_000, roll=True)


def _check(disk: SimDisk, end: int, *, start: int = 0) -> None:
    """A power cut leaves what there was up to ``end``."""
    disk.restart(page_cache_lost=True)
    log = open_directory(disk=disk, boot_id="another").get(TP)
    assert log is not None
    assert log.findings == () and log.log_end_offset == end
    assert read_numbers(log)[-(end - start) :] == list(range(start, end))


@SEEDS
@FLUSHES
def test_a_segment_that_was_cut_is_fsynced_with_what_comes_in_the_next(seed: int, flush: Flush) -> None:
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 2)
    log.durability.flush()
    fill(log, 1)
    log.truncate(6)
    _next_segment(log)
    flush(directory, log)
    _check(disk, 9)


@SEEDS
@pytest.mark.parametrize("in_place", [True, False])
def test_a_cut_to_what_is_fsynced_is_durable_with_a_clean_stop(seed: int, in_place: bool) -> None:
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 2)
    log.durability.flush()
    fill(log, 1)
    if not in_place:
        log.set_high_watermark(9)
    log.truncate(6)
    directory.write_clean_marker()
    _check(disk, 6)


@SEEDS
@FLUSHES
def test_what_a_start_cuts_is_fsynced_with_what_comes_in_the_next_segment(seed: int, flush: Flush) -> None:
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 2)
    log.durability.flush()
    directory.checkpoint()
    fill(log, 1)
    path = log.segments[0].data_path
    position = log.segments[0].position_of(2)
    disk.restart(page_cache_lost=False)
    disk.flip_bit(path, position + 200)
    directory, log = _log(disk)
    assert log.log_end_offset == 6
    _next_segment(log)
    flush(directory, log)
    _check(disk, 9)


@SEEDS
@FLUSHES
def test_what_a_refused_append_left_is_fsynced_with_what_comes_in_the_next_segment(seed: int, flush: Flush) -> None:
    """The disk is full in the middle of a request, when its first batches are written."""
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 3)
    log.durability.flush()
    disk.capacity_bytes = disk.used_bytes + 600
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        append(log, batch(3, first=9), batch(3, first=12), batch(3, first=15))
    disk.capacity_bytes = None
    _next_segment(log)
    flush(directory, log)
    _check(disk, 12)


@SEEDS
@pytest.mark.parametrize("flush", [_at_once, _by_time])
def test_a_segment_that_has_left_the_log_does_not_take_along_what_is_fsynced(seed: int, flush: Flush) -> None:
    """No checkpoint says yet that it has."""
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 2)
    _next_segment(log)
    log.set_high_watermark(6)
    log.advance_log_start(6)
    flush(directory, log)
    _check(disk, 9, start=6)


def test_a_flush_misses_no_file_that_a_checkpoint_lets_go_meanwhile() -> None:
    disk = SimDisk()
    directory, log = _log(disk)
    fill(log, 2)
    _next_segment(log)
    log.set_high_watermark(6)
    log.advance_log_start(6)
    job = log.durability.flush_due(10**15)
    assert job is not None
    directory.checkpoint()
    job.run()  # files are gone: no fault of the disk
    log.durability.flush_finished(job)
    assert log.recovery_point == 0
    _by_time(directory, log)
    assert log.recovery_point == 9
