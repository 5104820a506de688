"""Tests that a truncation with a copy made in advance leaves the same files as one without, after any events in
between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sparklog.storage import truncation_job
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.truncation_job import TruncationJob
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import SMALL, commit_and_seal, create_log, fill, open_directory, read_numbers
from tests.tiers import marked_after


class CountingDisk(SimDisk):
    copies = 0

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        self.copies += 1
        super().copy(source, target, length, start=start)


def _log(disk: SimDisk, *, batches: int = 10) -> tuple[LogDirectory, Log]:
    """Return a log after a start, when readers may have mapped all of it."""
    fill(create_log(open_directory(disk=disk), segment_bytes=SMALL), batches)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    return directory, create_log(directory, segment_bytes=SMALL)


def _begun(log: Log, offset: int) -> TruncationJob:
    log.set_high_watermark(min(log.high_watermark, offset))
    job = log.truncation.begin(offset)
    assert job is not None
    return job


def _content(disk: SimDisk, log: Log) -> dict[str, bytes]:
    return {name: bytes(disk._files[log.directory / name].content) for name in disk.names(log.directory)}


@pytest.mark.parametrize("seed", marked_after(50, range(200), pytest.mark.extended))
def test_a_prepared_truncation_equals_a_direct_one(seed: int) -> None:
    """``changed`` is what happens to the log while a thread works."""
    found = []
    for with_job in (False, True):
        chance = random.Random(seed)
        disk = CountingDisk()
        _, log = _log(disk, batches=chance.randrange(2, 12))
        mark = chance.randrange(0, log.log_end_offset, 3)
        if chance.random() < 0.5:
            commit_and_seal(log, mark)
        offset = chance.randrange(log.log_end_offset)  # committed records may be truncated as well
        log.set_high_watermark(min(log.high_watermark, offset))
        job = log.truncation.begin(offset) if with_job else None
        changed = chance.choice(["nothing", "sealed", "log start", "ran late"])
        if job is not None and changed != "ran late":
            job.run()
        if changed == "sealed":
            commit_and_seal(log, log.high_watermark)
        elif changed == "log start":
            log.advance_log_start(log.high_watermark)
        if job is not None and changed == "ran late":
            job.run()
        disk.copies = 0
        end = log.truncate(offset, job)
        if with_job:
            assert not disk.copies, "the copy is made while all others wait"
        fill(log, chance.randrange(3), leader_epoch=2)
        found.append((end, _content(disk, log), log.checkpoint(), log.segments[-1:] and log.segments[-1].count))
        assert read_numbers(log)[: max(0, end - log.log_start_offset)] == list(range(log.log_start_offset, end))
    assert found[0] == found[1]


def test_a_truncation_without_a_copy_starts_no_job() -> None:
    disk = SimDisk()
    _, log = _log(disk)
    first, second = log.segments[0].end_offset, log.segments[1].end_offset
    assert log.truncation.begin(log.log_end_offset) is None
    assert log.truncation.begin(0) is None, "all records are truncated"
    log.truncate(second)  # by copy, because the segment was not sealed
    assert log.truncation.begin(second - 3) is not None
    log.truncate(second - 3)
    fill(log, 1, leader_epoch=2)
    assert log.truncation.begin(log.log_end_offset - 3) is None, (
        "the truncation is in place: no reader has mapped the records"
    )
    commit_and_seal(log, first)
    assert log.segments[0].sealed
    assert log.truncation.begin(first) is None, "at the end of a sealed segment"


def test_a_second_truncation_discards_the_copy_of_the_first() -> None:
    disk = SimDisk()
    _, log = _log(disk)
    job = _begun(log, 15)
    job.run()
    again = _begun(log, 9)
    assert not any(name.endswith(".copy") for name in disk.names(log.directory))
    again.run()
    assert log.truncate(9, job) == 9, "the truncation makes its own copy: neither one fits"
    assert not any(name.endswith(".copy") for name in disk.names(log.directory))
    assert read_numbers(log) == list(range(9))


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_a_copy_is_made_in_pieces(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation_job, "_PIECE_BYTES", piece_bytes)
    disk = CountingDisk()
    _, log = _log(disk)
    log.durability.flush()
    job = _begun(log, 9)
    lengths = [length for _, length in job.segment.files_truncated_to(job.count)]
    job.run()
    assert job.done and disk.copies == sum(-(-length // piece_bytes) for length in lengths)
    assert log.truncate(9, job) == 9
    disk.sync_directory(log.directory)
    disk.restart(page_cache_lost=True)
    log = create_log(open_directory(disk=disk, boot_id="boot-2"), segment_bytes=SMALL)
    assert read_numbers(log) == list(range(9))


class LettingGoDisk(CountingDisk):
    """A disk on which another caller cancels the truncation in the ``at``-th piece that is copied or fsynced."""

    job: TruncationJob | None = None
    operation, at = "", 0

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        super().copy(source, target, length, start=start)
        self._let_go("copy")

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self._let_go("sync")

    def _let_go(self, operation: str) -> None:
        if self.job is not None and operation == self.operation and self.copies == self.at:
            assert not self.job.cancel(), "no part of it may count"


@pytest.mark.parametrize("operation", ["copy", "sync"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_cancelled_copy_ends_with_its_current_piece(operation: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping broker would otherwise wait until gigabytes are copied and fsynced, or be killed for the delay."""
    monkeypatch.setattr(truncation_job, "_PIECE_BYTES", 100)
    disk = LettingGoDisk()
    _, log = _log(disk)
    disk.job = job = _begun(log, 9)
    disk.operation, disk.at = operation, at
    job.run()
    assert not job.done and disk.copies == at
    assert not any(name.endswith(".copy") for name in disk.names(log.directory))


@pytest.mark.parametrize("how", ["restart", "close", "delete"])
@pytest.mark.parametrize("ran", [False, True])
def test_an_abandoned_truncation_leaves_nothing(how: str, ran: bool) -> None:
    disk = SimDisk()
    directory, log = _log(disk)
    job = _begun(log, 15)
    if ran:
        job.run()
    if how == "restart":
        log.restart_at(30)
    elif how == "close":
        log.close()
    else:
        directory.delete(log.tp)
    if not ran:
        job.run()
    assert not job.done or ran
    assert not [path for path in disk._files if path.name.endswith(".copy")]


def test_a_copy_without_disk_space_leaves_no_file() -> None:
    """The truncation removes segments before it needs space: no other caller may ever free any."""
    disk = SimDisk()
    _, log = _log(disk)
    job = _begun(log, 15)
    disk.capacity_bytes = disk.used_bytes
    job.run()
    assert not (job.done or job.awaits_room)
    assert not any(name.endswith(".copy") for name in disk.names(log.directory))
    assert log.truncate(15, job) == 15
    assert read_numbers(log) == list(range(15))


def test_a_truncation_that_frees_no_space_waits_for_space() -> None:
    disk = CountingDisk()
    _, log = _log(disk)
    end = log.log_end_offset
    job = _begun(log, end - 3)
    disk.capacity_bytes = disk.used_bytes + sum(length for _, length in job.segment.files_truncated_to(job.count)) - 1
    for _ in range(2):
        job.run()
        assert job.awaits_room and not job.done
        assert not any(name.endswith(".copy") for name in disk.names(log.directory))
        job = _begun(log, end - 3)
    disk.capacity_bytes = None
    job.run()
    assert job.done and not job.awaits_room
    disk.copies = 0
    assert log.truncate(end - 3, job) == end - 3
    assert not disk.copies
    assert read_numbers(log) == list(range(end - 3))
