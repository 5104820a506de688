"""Tests of truncations before their fsync: a power failure may undo them, so the fsynced end must not be above them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import HEADER_BYTES
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import (
    SMALL,
    TP,
    append,
    batch,
    commit_and_seal,
    create_log,
    fill,
    open_directory,
    read_numbers,
    refused,
)
from tests.tiers import marked_after

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
SEEDS = pytest.mark.parametrize("seed", marked_after(2, range(6), pytest.mark.extended))


def _log(disk: SimDisk, boot_id: str = "boot-1") -> tuple[LogDirectory, Log]:
    directory = open_directory(disk=disk, boot_id=boot_id)
    return directory, create_log(directory, segment_bytes=SMALL, flush_ms=1)


def _kill(disk: SimDisk) -> tuple[LogDirectory, Log]:
    """Return the log after a start with an intact page cache."""
    disk.restart(page_cache_lost=False)
    return _log(disk)


def _next_segment(log: Log) -> None:
    start = log.log_end_offset
    log.append_as_leader([batch(3, first=start)], leader_epoch=2, now_us=5_000_000, roll=True)


def _check(disk: SimDisk, end: int, *, start: int = 0) -> None:
    """Check that a power failure leaves the records up to ``end``."""
    disk.restart(page_cache_lost=True)
    log = open_directory(disk=disk, boot_id="another").get(TP)
    assert log is not None
    assert log.findings == () and log.log_end_offset == end
    assert read_numbers(log)[-(end - start) :] == list(range(start, end))


@SEEDS
@FLUSHES
def test_a_truncated_segment_is_fsynced_with_the_next_one(seed: int, flush: Flush) -> None:
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
def test_a_truncation_to_the_fsynced_end_survives_a_clean_stop(seed: int, in_place: bool) -> None:
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
def test_a_truncation_at_start_is_fsynced_with_the_next_segment(seed: int, flush: Flush) -> None:
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
def test_remains_of_a_refused_append_are_fsynced_with_the_next_segment(seed: int, flush: Flush) -> None:
    """The disk fills up during a request, when its first batches are written."""
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
def test_a_removed_segment_does_not_take_fsynced_records_along(seed: int, flush: Flush) -> None:
    """No checkpoint contains the removal yet."""
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 2)
    _next_segment(log)
    log.set_high_watermark(6)
    log.advance_log_start(6)
    flush(directory, log)
    _check(disk, 9, start=6)


def test_a_flush_covers_files_that_a_checkpoint_closes_during_it() -> None:
    disk = SimDisk()
    directory, log = _log(disk)
    fill(log, 2)
    _next_segment(log)
    log.set_high_watermark(6)
    log.advance_log_start(6)
    job = log.durability.flush_due(10**15)
    assert job is not None
    directory.checkpoint()
    job.run()  # the files are deleted, which is not a fault of the disk
    log.durability.flush_finished(job)
    assert log.recovery_point == 0
    _by_time(directory, log)
    assert log.recovery_point == 9


@SEEDS
@FLUSHES
@pytest.mark.parametrize("in_place", [True, False])
def test_a_truncation_before_a_kill_is_fsynced_with_the_next_segment(seed: int, flush: Flush, in_place: bool) -> None:
    """The truncated segment ends at the recovery point: no file shows that it is not fsynced."""
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 3)
    log.durability.flush()
    directory.checkpoint()
    if not in_place:
        log.set_high_watermark(9)
    log.truncate(6)
    directory, log = _kill(disk)
    assert log.findings == () and log.log_end_offset == log.recovery_point == 6
    _next_segment(log)
    flush(directory, log)
    _check(disk, 9)


@pytest.mark.parametrize("seed", marked_after(4, range(12), pytest.mark.extended))
def test_a_truncation_after_a_kill_removes_nothing_fsynced(seed: int) -> None:
    """The recovery point at the start is older than the flush."""
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 1)
    directory.checkpoint()
    fill(log, 2)
    log.durability.flush()
    fill(log, 1)
    directory, log = _kill(disk)
    log.truncate(9)
    disk.restart(page_cache_lost=True)
    found = open_directory(disk=disk, boot_id="another").get(TP)
    assert found is not None and found.log_end_offset >= 9
    assert read_numbers(found)[:9] == list(range(9))


@pytest.mark.parametrize("seed", marked_after(4, range(12), pytest.mark.extended))
def test_an_unsynced_seal_of_a_killed_process_is_fsynced_later(seed: int) -> None:
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 3)
    log.durability.flush()
    directory.checkpoint()
    log.truncate(6)
    _next_segment(log)
    log.set_high_watermark(9)
    (job,) = log.durability.seals_due()
    disk.die_after(1)  # the footer
    with pytest.raises(ProcessDied):
        job.run()
    directory, log = _kill(disk)
    assert log.recovery_point == 6 and log.segments[0].sealed and not log.segments[1].sealed
    _next_segment(log)
    assert commit_and_seal(log) == 1
    assert log.recovery_point == 9
    directory.checkpoint()
    disk.restart(page_cache_lost=True)
    found = open_directory(disk=disk, boot_id="another").get(TP)
    assert found is not None and found.log_end_offset >= 9
    assert read_numbers(found)[:9] == list(range(9))


class CountingDisk(SimDisk):
    syncs = 0

    def sync(self, handle: int) -> None:
        self.syncs += 1
        super().sync(handle)


def test_seals_make_truncations_durable_for_a_cheap_stop() -> None:
    disk = CountingDisk()
    directory, log = _log(disk)
    fill(log, 3)
    log.truncate(6)
    fill(log, 80, leader_epoch=2)
    assert commit_and_seal(log) == len(log.segments) - 1 > 15
    before = disk.syncs
    directory.write_clean_marker()
    assert disk.syncs - before < 15


def test_a_checkpoint_that_closes_no_file_keeps_the_running_flush() -> None:
    disk = SimDisk()
    _, log = _log(disk)
    fill(log, 2)
    job = log.durability.flush_due(10**15)
    assert job is not None
    log.retention.delete_retired(0)
    job.run()
    log.durability.flush_finished(job)
    assert log.recovery_point == 6


class _Life:
    """A log with random events, and the offset up to which it was reported as fsynced."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = SimDisk(seed=seed)
        self.directory, self.log = _log(self.disk)
        self.epoch = 1
        self.promised = 0

    def append(self, *, roll: bool = False) -> None:
        start = self.log.log_end_offset
        self.log.append_as_leader([batch(3, first=start)], leader_epoch=self.epoch, now_us=5_000_000, roll=roll)

    def roll(self) -> None:
        self.append(roll=True)

    def append_on_a_full_disk(self) -> None:
        start = self.log.log_end_offset
        self.disk.capacity_bytes = self.disk.used_bytes + self.random.randrange(1500)
        try:
            batches = [batch(3, first=start + at) for at in (0, 3, 6)]
            self.log.append_as_leader(batches, leader_epoch=self.epoch, now_us=5_000_000)
        except BrokerError as error:
            assert error.code == ErrorCode.KAFKA_STORAGE_ERROR
        self.disk.capacity_bytes = None

    def cut(self) -> None:
        """Truncate no committed record, and not the whole log."""
        start, end = max(self.log.first_segment_offset + 3, self.log.high_watermark), self.log.log_end_offset
        if start < end:
            self.log.truncate(self.random.randrange(start, end))
            self.promised = min(self.promised, self.log.log_end_offset)
            self.epoch += 1

    def cut_by_a_copy(self) -> None:
        """Truncate with a copy. Another event of the follower's log comes between, which the copy does not survive
        or does not concern."""
        start, end = max(self.log.first_segment_offset + 3, self.log.high_watermark), self.log.log_end_offset
        if start >= end:
            return
        offset = self.random.randrange(start, end)
        log, job = self.log, self.log.truncation.begin(offset)
        if job is not None:
            job.run()
        others = [self.seal, self.flush, self.flush_by_time, self.checkpoint, self.advance_start, self.kill]
        self.random.choice(others)()
        if log is self.log and log.log_end_offset > offset:
            log.truncate(offset, job)
            self.promised = min(self.promised, log.log_end_offset)
            self.epoch += 1

    def flush(self) -> None:
        self.log.durability.flush()
        self.promised = self.log.log_end_offset

    def flush_by_time(self) -> None:
        job = self.log.durability.flush_due(10**15)
        if job is None:
            return
        if self.random.random() < 0.5:
            self.cut()
            job.run()
            self.log.durability.flush_finished(job)
        else:
            job.run()
            self.log.durability.flush_finished(job)
            self.promised = self.log.recovery_point

    def commit(self) -> None:
        self.log.set_high_watermark(self.random.randint(self.log.high_watermark, self.log.log_end_offset))

    def seal(self) -> None:
        for job in self.log.durability.seals_due():
            job.run()
            self.log.durability.seal_finished(job)
        self.promised = max(self.promised, self.log.recovery_point)

    def seal_and_die(self) -> None:
        """Die anywhere in the job, most often between footer and fsync."""
        jobs = self.log.durability.seals_due()
        if jobs:
            self.disk.die_after(self.random.choice([1, 1, 1, 2, 3, 4]))
            with suppress(ProcessDied):
                for job in jobs:
                    job.run()
                    self.log.durability.seal_finished(job)
            self.kill()

    def cut_to_what_is_sealed(self) -> None:
        sealed = [segment.end_offset for segment in self.log.segments if segment.sealed]
        if sealed and self.log.high_watermark <= sealed[-1] < self.log.log_end_offset:
            self.log.truncate(sealed[-1])
            self.promised = min(self.promised, sealed[-1])
            self.epoch += 1

    def check_what_is_sealed(self) -> None:
        """Check that sealed segments are durable: the recovery point is above them, and no later fsync covers them."""
        for segment in self.log.segments:
            if segment.sealed:
                size = segment.count * HEADER_BYTES
                for path, length in ((segment.data_path, segment.data_size), (segment.index_path, size)):
                    file = self.disk._files[path]
                    assert file.durable[:length] == bytes(file.content[:length]), segment
                    assert not [at for at, _ in file.pending if at < length], segment

    def advance_start(self) -> None:
        self.log.advance_log_start(self.random.randint(0, self.log.high_watermark))

    def checkpoint(self) -> None:
        self.directory.checkpoint()

    def kill(self) -> None:
        if self.log.on_disk:
            self.directory, self.log = _kill(self.disk)
            assert self.log.findings == ()


_STEPS = (
    (_Life.append, 4),
    (_Life.roll, 1),
    (_Life.append_on_a_full_disk, 1),
    (_Life.cut, 3),
    (_Life.cut_by_a_copy, 2),
    (_Life.flush, 1),
    (_Life.flush_by_time, 2),
    (_Life.commit, 2),
    (_Life.seal, 1),
    (_Life.advance_start, 1),
    (_Life.checkpoint, 2),
    (_Life.kill, 1),
)
#: the seeds with many seals
_SEALING = (
    *_STEPS,
    (_Life.roll, 3),
    (_Life.seal, 3),
    (_Life.seal_and_die, 2),
    (_Life.cut_to_what_is_sealed, 2),
)


@pytest.mark.parametrize("seeds", marked_after(4, range(0, 1000, 50), pytest.mark.extended))
def test_a_power_failure_keeps_fsynced_records_in_random_histories(seeds: int) -> None:
    for seed in range(seeds, seeds + 50):
        life = _Life(seed)
        steps, weights = zip(*(_SEALING if seed % 2 else _STEPS), strict=True)
        for step in life.random.choices(steps, weights, k=life.random.randrange(5, 40)):
            step(life)
            life.check_what_is_sealed()
        log = life.log
        batches = _batches(log)
        life.disk.restart(page_cache_lost=True)
        found = open_directory(disk=life.disk, boot_id="another").get(TP)
        if found is None:
            assert not life.promised, seed
            continue
        assert found.log_end_offset >= life.promised, (seed, found.findings)
        lost = {at for at in batches if found.log_start_offset <= at[0] < life.promised} - _batches(found)
        assert not lost, (seed, lost)
        read_numbers(found)


def _batches(log: Log) -> set[tuple[int, int]]:
    """Return the base offset and the leader epoch of each batch."""
    headers = [header for segment in log.segments for header in segment.headers()]
    return {(int(header["base_offset"]), int(header["leader_epoch"])) for header in headers}


@pytest.mark.parametrize("seed", marked_after(4, range(12), pytest.mark.extended))
def test_interrupted_seals_report_only_durable_records(seed: int) -> None:
    disk = SimDisk(seed=seed)
    directory, log = _log(disk)
    fill(log, 3)
    log.durability.flush()
    directory.checkpoint()
    log.truncate(6)  # the first segment ends at the recovery point
    for _ in range(2):
        _next_segment(log)
        log.set_high_watermark(log.log_end_offset)
        job, *_ = log.durability.seals_due()
        disk.die_after(1)  # after the footer
        with pytest.raises(ProcessDied):
            job.run()
        directory, log = _kill(disk)
    _next_segment(log)
    log.set_high_watermark(log.log_end_offset)
    job, *_ = log.durability.seals_due()
    disk.capacity_bytes = disk.used_bytes
    job.run()
    assert not job.done
    log.durability.seal_finished(job)
    promised = log.recovery_point
    disk.capacity_bytes = None
    directory.checkpoint()
    disk.restart(page_cache_lost=True)
    found = open_directory(disk=disk, boot_id="another").get(TP)
    assert found is not None
    assert found.log_end_offset >= promised
