"""Tests in which the process or the machine dies in each operation of a cleaning: the log has the old or the new
segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.storage.log import Log
from sparklog.storage.offset_map import BYTES_PER_KEY
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import append, open_directory
from tests.storage.compacting import Seen, clean, commit_and_seal, keyed, keyed_log, keyed_rules, seen
from tests.tiers import marked_after

NOW_US = 10_000_000
RECORDS = 22
#: The number of keys that a cleaning holds in memory: it spills the others.
BUFFER_BYTES = 2 * BYTES_PER_KEY


def prepared(seed: int) -> tuple[SimDisk, Log, list[Seen]]:
    """Write a durable log of several sealed segments. Return it and its records."""
    disk = SimDisk(seed=seed)
    directory = open_directory(disk=disk)
    log = keyed_log(directory, segment_bytes=2048)
    for number in range(RECORDS):
        append(log, keyed([(b"key %d" % (number % 5), number)], producer=3, sequence=number), now_us=NOW_US)
    log.config = keyed_log(directory, segment_bytes=6000).config
    commit_and_seal(log)
    log.durability.flush()
    directory.checkpoint()
    assert len(log.segments) > 3
    return disk, log, seen(log)


def cleaning(log: Log) -> None:
    job = clean(log, buffer_bytes=BUFFER_BYTES)
    assert job is not None and job.tally.bytes_spilled
    append(log, keyed([(b"key 1", 1000)]), now_us=NOW_US)
    log.set_high_watermark(log.log_end_offset)


def operations() -> int:
    disk, log, _ = prepared(0)
    before = disk.changes
    cleaning(log)
    return disk.changes - before


TOTAL = operations()


def died_at(operation: int, seed: int) -> tuple[SimDisk, list[Seen]]:
    disk, log, before = prepared(seed)
    disk.die_after(operation)
    with pytest.raises(ProcessDied):
        cleaning(log)
    return disk, before


def check(disk: SimDisk, before: list[Seen], *, boot_id: str) -> None:
    directory = open_directory(disk=disk, boot_id=boot_id)
    log = directory.logs()[0]
    log.config = keyed_log(directory, segment_bytes=6000).config
    assert log.findings == ()
    log.set_high_watermark(RECORDS)
    found = [one for one in seen(log) if one.offset < RECORDS]
    assert set(found) <= set(before)
    # the newest record of every key, in the order of the writes
    assert {one.key: one for one in found} == {one.key: one for one in before}
    assert not any(name.endswith((".swap", ".cleaned", ".deleted", ".tmp")) for name in disk.names(log.directory))
    # and it can be cleaned again
    log.set_high_watermark(log.log_end_offset)
    commit_and_seal(log)
    clean(log)
    assert {one.key: one for one in seen(log) if one.offset < RECORDS} == {one.key: one for one in before}
    assert log._tail.producers.get(3).batches[-1].last_sequence == RECORDS - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("operation", range(TOTAL))
def test_a_process_crash_at_any_step_of_a_cleaning_loses_nothing(operation: int) -> None:
    disk, before = died_at(operation, operation)
    disk.restart(page_cache_lost=False)
    check(disk, before, boot_id="boot-1")


@pytest.mark.parametrize("seed", marked_after(1, range(2), pytest.mark.extended))
@pytest.mark.parametrize("operation", range(TOTAL))
def test_a_power_failure_at_any_step_of_a_cleaning_loses_nothing(operation: int, seed: int) -> None:
    disk, before = died_at(operation, 1000 * seed + operation)
    disk.restart(page_cache_lost=True)
    check(disk, before, boot_id="boot-2")


@pytest.mark.parametrize("code", [5, 28])
@pytest.mark.parametrize("skipped", range(12))
def test_a_full_disk_keeps_the_log_and_a_failure_is_reported(code: int, skipped: int) -> None:
    disk, log, before = prepared(0)
    calls = 0
    write = disk.write

    def failing(handle: int, buffers: object, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == skipped + 1:
            raise OSError(code, "injected")
        return write(handle, buffers, at)  # type: ignore[arg-type]

    disk.write = failing  # type: ignore[method-assign]
    try:
        clean(log, buffer_bytes=BUFFER_BYTES)
    except OSError as error:
        assert error.errno == code
    disk.write = write  # type: ignore[method-assign]
    assert {one.key: one for one in seen(log)} == {one.key: one for one in before}


def test_a_truncation_during_a_cleaning_stops_it() -> None:
    for steps in range(3):
        disk, log, before = prepared(0)
        job = log.cleaning.begin(keyed_rules(log), NOW_US, at_once=True)
        assert job is not None
        job.read_keys()
        fresh = job.rewrite(job.groups()[0])
        assert fresh is not None
        if steps:
            assert log.cleaning.replace_segments(job, fresh)
        if steps == 2:
            job.settle()
        log.truncate(10)
        assert job.cancelled and not log.cleaning.replace_segments(job, fresh) and job.finish(1) is None
        assert not any(name.endswith((".swap", ".cleaned", ".deleted")) for name in disk.names(log.directory))
        log.set_high_watermark(log.log_end_offset)
        found, end = seen(log), log.log_end_offset
        assert set(found) <= set(before)
        log._files.services.checkpoint_now()
        disk.restart(page_cache_lost=False)
        again = open_directory(disk=disk).logs()[0]
        again.set_high_watermark(again.log_end_offset)
        assert seen(again) == found and again.log_end_offset == end


def test_a_decision_without_its_segment_deletes_nothing() -> None:
    """No crash leaves such a directory. A user who deletes files may."""
    disk, log, before = prepared(0)
    job = log.cleaning.begin(keyed_rules(log), NOW_US, at_once=True)
    assert job is not None
    job.read_keys()
    assert job.rewrite(job.groups()[0]) is not None
    for name in disk.names(log.directory):
        if name.endswith(".cleaned"):
            disk.remove(log.directory / name)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    again.set_high_watermark(again.log_end_offset)
    assert seen(again) == before and again.findings == ()


@pytest.mark.parametrize("code", [5, 28])
@pytest.mark.parametrize("skipped", range(2))
def test_a_half_written_decision_is_undone(code: int, skipped: int) -> None:
    """The decision's name existed when the sync of the directory failed. The log continues and is truncated, and
    then it restarts."""
    disk, log, _ = prepared(0)
    job = log.cleaning.begin(keyed_rules(log), NOW_US, at_once=True)
    assert job is not None
    job.read_keys()
    sync, calls = disk.sync_directory, 0

    def failing(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == skipped + 1:
            raise OSError(code, "injected")
        sync(path)

    disk.sync_directory = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="injected"):
        job.rewrite(job.groups()[0])
    disk.sync_directory = sync  # type: ignore[method-assign]
    log.cleaning.finished(job, None)
    assert not any(name.endswith((".swap", ".cleaned")) for name in disk.names(log.directory))
    log.truncate(3)
    log._files.services.checkpoint_now()
    log.set_high_watermark(log.log_end_offset)
    found = seen(log)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    again.set_high_watermark(again.log_end_offset)
    assert seen(again) == found


@pytest.mark.parametrize("seed", (9, 18, 21, 22, 24))
def test_a_finished_swap_survives_the_next_ones_interruption(seed: int) -> None:
    """The process dies with renamed files, the next start completes the swap, and the machine dies during the next
    cleaning. If the old decision returned, it would put an unfinished file in place of the segment."""
    disk, log, before = prepared(seed)
    job = log.cleaning.begin(keyed_rules(log), NOW_US, at_once=True)
    assert job is not None
    job.read_keys()
    fresh = job.rewrite(job.groups()[0])
    assert fresh is not None and log.cleaning.replace_segments(job, fresh)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    again = directory.logs()[0]
    again.config = keyed_log(directory, segment_bytes=6000).config
    again.set_high_watermark(again.log_end_offset)
    disk.die_after(3 + seed % 5)
    with pytest.raises(ProcessDied):
        clean(again)
    disk.restart(page_cache_lost=True)
    check(disk, before, boot_id="boot-2")
