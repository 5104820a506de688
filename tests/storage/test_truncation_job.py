"""Tests of removed records: truncation, restart, retention, on a disk in memory."""

from __future__ import annotations

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import EpochEnd, OffsetRange
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    SMALL,
    TP,
    append,
    batch,
    commit_and_seal,
    config,
    create_log,
    fill,
    follow,
    open_directory,
    read_numbers,
    read_slices,
    refused,
)


def test_truncate_ends_at_a_batch_boundary(log: Log) -> None:
    fill(log, 10)
    fill(log, 2, leader_epoch=3)
    assert len(log.segments) > 2
    assert log.truncate(99) == 36
    assert log.truncate(32) == 30
    assert log.last_epoch == 1
    assert log.truncate(14) == 12
    assert (log.log_end_offset, read_numbers(log)) == (12, list(range(12)))
    fill(log, 3, leader_epoch=4)
    assert read_numbers(log) == list(range(21))
    assert log.end_of_epoch(3) == EpochEnd(1, 12)
    assert log.truncate(2) == 0
    assert (log.log_start_offset, log.log_end_offset, log.last_epoch, log.segments) == (0, 0, -1, ())
    fill(log, 1, leader_epoch=5)
    assert read_numbers(log) == [0, 1, 2]


def test_truncate_at_a_segments_first_batch_removes_the_segment(log: Log) -> None:
    fill(log, 10)
    base = log.segments[2].base_offset
    assert log.truncate(base) == base
    assert len(log.segments) == 2
    fill(log, 1, leader_epoch=2)
    assert read_numbers(log) == list(range(base + 3))


@pytest.mark.parametrize("at_boundary", [False, True])
def test_truncate_below_the_high_watermark_spares_mapped_readers(disk: SimDisk, log: Log, at_boundary: bool) -> None:
    """SimDisk raises if a file shrinks under a live map."""
    fill(log, 10)
    commit_and_seal(log)
    log._tail.hot.clear()
    views = [(found, b"".join(found.bodies)) for found in read_slices(log)]
    target = log.segments[1].base_offset + (0 if at_boundary else 3)
    assert log.truncate(target) == target
    for found, content in views:
        assert b"".join(found.bodies) == content
    assert log.high_watermark == target
    fill(log, 5, leader_epoch=2)
    assert read_numbers(log) == list(range(target + 15))
    assert log.recovery_point <= target


@pytest.mark.parametrize(("cut_at", "survives"), [(3, True), (6, True), (9, False)])
def test_a_memory_map_of_committed_records_survives_a_truncation(
    disk: SimDisk, log: Log, cut_at: int, survives: bool
) -> None:
    """Readers on the same host map committed records, sealed or not. They may not map later ones."""
    fill(log, 4)
    log.set_high_watermark(9)
    segment = log.segments[0]
    handle = disk.open(segment.data_path)
    view = disk.map(handle, segment.position_of(3 if survives else 4))
    content = bytes(view)
    if survives:
        assert log.truncate(cut_at) == cut_at
        fill(log, 3, leader_epoch=2)
    else:
        with pytest.raises(AssertionError, match="SIGBUS"):
            log.truncate(cut_at)
    assert bytes(view) == content


def test_truncate_above_the_high_watermark_is_in_place(disk: SimDisk, log: Log) -> None:
    fill(log, 3)
    log.set_high_watermark(3)
    handle = disk.open(log.segments[0].data_path)
    log.truncate(3)
    assert disk.size(handle) == log.segments[0].data_size
    log.set_high_watermark(3)
    fill(log, 1)
    log.truncate(3)
    log.set_high_watermark(0)
    log.truncate(0)
    assert log.log_end_offset == 0


def test_restart_at_removes_everything(disk: SimDisk, log: Log) -> None:
    fill(log, 10)
    commit_and_seal(log)
    log.restart_at(500)
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark, log.recovery_point) == (500, 500, 500, 0)
    assert disk.names(log.directory) == ["partition.json"]
    assert append(log, batch()) == OffsetRange(500, 503)


def test_a_follower_continues_in_a_sealed_segment_like_its_leader(log: Log) -> None:
    """The old leader rolled and sealed. The new one never saw the roll and continues in the same segment."""
    new_leader = create_log(open_directory(disk=SimDisk()), segment_bytes=1 << 20)
    fill(log, 8)
    base = log.segments[1].base_offset
    while new_leader.log_end_offset < base:
        found = log.read(new_leader.log_end_offset, max_bytes=1, end_offset=base)
        new_leader.append_as_follower(found.headers, memoryview(b"".join(found.bodies)))
    commit_and_seal(log, base)
    assert log.segments[0].sealed
    log.truncate(base)
    assert log.segments[-1].sealed and log.recovery_point == base
    fill(new_leader, 2, leader_epoch=2)
    follow(log, new_leader)
    assert not log.segments[0].sealed and log.recovery_point == base
    assert read_numbers(log) == read_numbers(new_leader) == list(range(base + 6))


def test_a_leader_rolls_after_a_sealed_segment(log: Log) -> None:
    fill(log, 8)
    base = log.segments[1].base_offset
    commit_and_seal(log, base)
    log.truncate(base)
    fill(log, 1, leader_epoch=2)
    assert log.segments[0].sealed and log.segments[1].base_offset == base


def test_advance_log_start_deletes_whole_segments(disk: SimDisk, directory: LogDirectory, log: Log) -> None:
    fill(log, 10)
    end, second = log.log_end_offset, log.segments[1].base_offset
    assert log.advance_log_start(second + 1) == 0
    commit_and_seal(log)
    before = log.size_bytes
    assert log.advance_log_start(second + 1) == second + 1
    assert (log.first_segment_offset, log.log_end_offset) == (second, end)
    assert log.size_bytes < before
    assert disk.exists(log.directory / f"{0:020d}.arrow")
    directory.checkpoint_job()()
    assert disk.exists(log.directory / f"{0:020d}.arrow")
    directory.checkpoint_job()
    assert not disk.exists(log.directory / f"{0:020d}.arrow")
    assert not [name for name in disk.names(log.directory) if name.endswith(".deleted")]
    with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
        log.read(second, max_bytes=1, end_offset=end)
    assert read_numbers(log)[0] == second
    assert log.advance_log_start(end) == end
    assert len(log.segments) == 1 and log.last_epoch == 1
    fill(log, 1)
    assert read_numbers(log, end) == [end, end + 1, end + 2]


def test_retention_deletes_only_sealed_segments(directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL, retention_ms=1)
    fill(log, 20)
    assert log.retention.apply(10**15) == 0
    sealed = commit_and_seal(log, log.segments[3].base_offset)
    assert sealed == 3
    assert log.retention.apply(1_000) == 0
    assert log.retention.apply(10**15) == 3
    assert log.log_start_offset == log.segments[0].base_offset == log.recovery_point
    commit_and_seal(log)
    log.config = config(retention_bytes=log.segments[-1].size_bytes + log.segments[-2].size_bytes, retention_ms=-1)
    log.retention.apply(10**15)
    assert len(log.segments) == 2


def test_retention_frees_a_full_disk(disk: SimDisk, directory: LogDirectory) -> None:
    """Segments are deleted only after a checkpoint, and a checkpoint needs space, which is reserved."""
    log = create_log(directory, segment_bytes=SMALL, retention_ms=1)
    fill(log, 20)
    commit_and_seal(log, log.segments[3].base_offset)
    directory.checkpoint()
    disk.capacity_bytes = disk.used_bytes
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        fill(log, 1)
    assert log.retention.apply(10**15) == 3
    directory.checkpoint()
    assert disk.used_bytes < disk.capacity_bytes - 3 * SMALL
    start, end = log.log_start_offset, log.log_end_offset
    fill(log, 1)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None
    assert (again.log_start_offset, again.log_end_offset) == (start, end + 3)
    assert start > 0


def test_a_log_start_that_needs_space_on_a_full_disk_waits(disk: SimDisk, directory: LogDirectory) -> None:
    """A follower's segments may not be sealed when its leader deletes them, so their producers are in no snapshot
    yet. The disk is full and not broken."""
    log = create_log(directory, segment_bytes=SMALL)
    for sequence in range(0, 60, 3):
        append(log, batch(3, first=sequence, producer=7, sequence=sequence))
    log.set_high_watermark(log.log_end_offset)
    start = log.segments[3].base_offset
    directory.checkpoint()
    disk.capacity_bytes = disk.used_bytes
    assert log.advance_log_start(start) == 0
    assert directory.offline is None and read_numbers(log) == list(range(60))
    disk.capacity_bytes = None
    assert log.advance_log_start(start) == start
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None and again.log_start_offset == start
    assert append(again, batch(3, first=57, producer=7, sequence=57)) == OffsetRange(57, 60), (
        "the producer must be known as before"
    )


def test_retention_on_a_full_disk_counts_only_deleted_segments(disk: SimDisk, directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL, retention_ms=1)
    for sequence in range(0, 60, 3):
        append(log, batch(3, first=sequence, producer=7, sequence=sequence))
    sealed = log.segments[3].base_offset
    commit_and_seal(log, sealed)
    for name in disk.names(log.directory):
        if name.endswith(".producers"):
            disk.remove(log.directory / name)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    found = directory.get(TP)
    assert found is not None
    found.config = config(retention_ms=1)
    disk.capacity_bytes = disk.used_bytes
    assert found.retention.apply(10**15) == 0
    assert (found.log_start_offset, directory.offline) == (0, None)
    disk.capacity_bytes = None
    assert found.retention.apply(10**15) == 3
