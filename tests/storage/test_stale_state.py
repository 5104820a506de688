"""Tests of files beside the segments that contain more than a start finds: they must not count when the log is as
long again."""

from __future__ import annotations

import pytest

from sparklog.record.header import HEADER_BYTES
from sparklog.storage.epochs import EPOCHS_FILE
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.rebuild_state import load_producers
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import SMALL, TP, append, batch, commit_and_seal, create_log, fill, open_directory
from tests.tiers import marked_after

SEEDS = pytest.mark.parametrize("seed", marked_after(4, range(12), pytest.mark.extended))


def _killed_and_cut(disk: SimDisk, log: Log) -> tuple[LogDirectory, Log]:
    """Write a log whose last segment lacks headers. A start finds half of it."""
    path = log.segments[-1].index_path
    disk.restart(page_cache_lost=False)
    handle = disk.open(path)
    disk.truncate(handle, 2 * HEADER_BYTES)
    disk.close(handle)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    assert log.log_end_offset == 18
    return directory, log


def _after_a_power_cut(disk: SimDisk) -> Log:
    disk.restart(page_cache_lost=True)
    log = open_directory(disk=disk, boot_id="another").get(TP)
    assert log is not None
    return log


@SEEDS
@pytest.mark.parametrize("flushed", [True, False])
def test_leader_epochs_of_a_longer_log_are_ignored(seed: int, flushed: bool) -> None:
    disk = SimDisk(seed=seed)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 8)
    append(log, batch(3, first=24))
    commit_and_seal(log, 24)
    directory.checkpoint()
    log.truncate(24)
    directory.write_clean_marker()
    directory, log = _killed_and_cut(disk, log)
    assert not disk.exists(log.directory / EPOCHS_FILE)
    fill(log, 2 + seed % 3, leader_epoch=2)
    if flushed:
        log.durability.flush()
        directory.checkpoint()
    log = _after_a_power_cut(disk)
    if flushed:
        assert log.log_end_offset == 24 + seed % 3 * 3
    true = {
        int(header["base_offset"]): int(header["leader_epoch"]) for each in log.segments for header in each.headers()
    }
    assert true == {offset: log._tail.epochs.epoch_at(offset) for offset in true}


@pytest.mark.parametrize("seeds", marked_after(1, range(0, 400, 50), pytest.mark.extended))
def test_producers_of_a_longer_log_are_ignored(seeds: int) -> None:
    """Power may fail before anything else is durable."""
    for seed in range(seeds, seeds + 50):
        disk = SimDisk(seed=seed)
        directory = open_directory(disk=disk)
        log = create_log(directory, segment_bytes=SMALL)
        for first in range(0, 24, 3):
            append(log, batch(3, first=first, producer=7, sequence=first))
        directory.write_clean_marker()
        directory.close()
        _, log = _killed_and_cut(disk, log)
        for at in range(0, 12, 3):
            append(log, batch(3, first=18 + at, producer=9, sequence=at), leader_epoch=2)
        log = _after_a_power_cut(disk)
        true, _ = load_producers(disk, log.directory, list(log.segments), snapshots=())
        assert log._tail.producers.state() == true.state()


@pytest.mark.parametrize("seeds", marked_after(1, range(0, 400, 50), pytest.mark.extended))
def test_a_stale_copy_of_a_truncated_segment_is_not_reused(seeds: int) -> None:
    """The log has grown to the copy's base offset. As the next segment the copy would prevent a start."""
    for seed in range(seeds, seeds + 50):
        disk = SimDisk(seed=seed)
        directory = open_directory(disk=disk)
        log = create_log(directory, segment_bytes=SMALL)
        fill(log, 8)
        log.durability.flush()
        directory.checkpoint()
        log.truncate(9)
        fill(log, 1, leader_epoch=2)
        log = _after_a_power_cut(disk)
        assert log.log_end_offset in (9, 12, 24)
        epochs = [int(header["leader_epoch"]) for each in log.segments for header in each.headers()]
        assert epochs == sorted(epochs)
