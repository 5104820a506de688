"""Tests of sealed segments: ordinary Arrow files, equal on all replicas, durable; and of interrupted seals."""

from __future__ import annotations

import errno
import hashlib
import threading
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pytest

from sparklog.errors import StorageError
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import (
    SMALL,
    append,
    batch,
    commit_and_seal,
    config,
    create_log,
    fill,
    follow,
    open_directory,
    read_numbers,
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def numbers_of(path: Path) -> list[int]:
    with pa.memory_map(str(path)) as source:
        reader = pyarrow.ipc.open_file(source)
        table = reader.read_all()
    table.validate(full=True)
    numbers: list[int] = table.column("number").to_pylist()
    return numbers


def test_sealed_segments_are_arrow_files_for_other_tools(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    log = create_log(directory, segment_bytes=SMALL)
    for number in range(0, 60, 3):
        append(log, batch(3, first=number, compression=(None, "lz4", "zstd")[number % 3]))
    append(log, batch(3, first=60, schema_id=1))
    append(log, batch(3, first=63, schema_id=0))
    assert commit_and_seal(log) == len(log.segments) - 1
    found: list[int] = []
    for segment in log.segments[:-1]:
        numbers = numbers_of(segment.data_path)
        assert numbers == polars.read_ipc(segment.data_path)["number"].to_list()
        assert numbers == pa.feather.read_table(str(segment.data_path))["number"].to_pylist()
        found += numbers
    assert found == list(range(63))
    frame = pa.feather.read_table(str(log.segments[0].data_path))
    total = duckdb.sql("select sum(number) from frame")
    assert total is not None and total.fetchall() == [(sum(frame["number"].to_pylist()),)]
    directory.close()


def test_replicas_have_equal_files_after_any_history(tmp_path: Path) -> None:
    """With different fetch sizes, a restart, a truncation and a change of leader the bytes are equal at the end."""
    leader_dir, follower_dir = open_directory(tmp_path / "a"), open_directory(tmp_path / "b", hot_bytes=0)
    leader, follower = create_log(leader_dir, segment_bytes=SMALL), create_log(follower_dir)
    fill(leader, 10)
    follow(follower, leader, max_bytes=1)
    commit_and_seal(follower, 15)
    fill(follower, 2, leader_epoch=2)
    follower_dir.close()
    follower_dir = open_directory(tmp_path / "b")
    follower = create_log(follower_dir)
    follower.truncate(27)
    commit_and_seal(leader, 24)
    leader.truncate(27)
    fill(leader, 9, leader_epoch=3)
    follow(follower, leader)
    for log in (leader, follower):
        commit_and_seal(log)
        assert all(segment.sealed for segment in log.segments[:-1])
    paths = [path for segment in leader.segments for path in (segment.data_path, segment.index_path)]
    assert len(paths) > 6
    for path in paths:
        assert sha256(path) == sha256(follower.directory / path.name), path.name
    leader_dir.close()
    follower_dir.close()


@pytest.fixture
def log(directory: LogDirectory) -> Log:
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 12)
    return log


def test_a_segment_is_sealed_when_rolled_and_committed(log: Log) -> None:
    assert log.durability.seals_due() == []
    assert commit_and_seal(log, 11) == 0
    assert commit_and_seal(log, 12) == 1
    assert commit_and_seal(log, 36) == 1
    assert [segment.sealed for segment in log.segments] == [True, True, False]
    assert log.recovery_point == 24


def test_seal_jobs_are_issued_once_and_finish_in_any_order(log: Log) -> None:
    log.set_high_watermark(36)
    first, second = log.durability.seals_due()
    assert log.durability.seals_due() == []
    second.run()
    log.durability.seal_finished(second)
    assert log.recovery_point == 0
    first.run()
    log.durability.seal_finished(first)
    assert log.recovery_point == 24


def test_a_seal_on_a_full_disk_is_retried(disk: SimDisk, log: Log) -> None:
    log.set_high_watermark(12)
    (job,) = log.durability.seals_due()
    disk.capacity_bytes = disk.used_bytes + 50
    used = disk.used_bytes
    job.run()
    log.durability.seal_finished(job)
    assert not job.done and not log.segments[0].sealed and disk.used_bytes == used
    disk.capacity_bytes = None
    assert commit_and_seal(log, 12) == 1
    assert log.segments[0].sealed


def test_a_seal_on_a_broken_disk_raises(disk: SimDisk, log: Log) -> None:
    log.set_high_watermark(12)
    (job,) = log.durability.seals_due()
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        job.run()


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("cut_at", [0, 6, 12, 15, 24, 30])
@pytest.mark.parametrize("segment_bytes", [SMALL, SMALL + 256])
def test_a_truncation_during_a_seal_reopens_the_segment(
    disk: SimDisk, log: Log, ran: bool, cut_at: int, segment_bytes: int
) -> None:
    """With the larger segments the segment continues where the footer of its interrupted seal was."""
    log.set_high_watermark(36)
    jobs = log.durability.seals_due()
    if ran:
        for job in jobs:
            job.run()
    log.truncate(cut_at)
    for job in jobs:
        if not ran:
            job.run()
        log.durability.seal_finished(job)
    log.config = config(segment_bytes=segment_bytes)
    fill(log, 8, leader_epoch=2)
    assert read_numbers(log) == list(range(cut_at + 24))
    commit_and_seal(log)
    disk.restart(page_cache_lost=False)
    again = create_log(open_directory(disk=disk))
    assert again.findings == ()
    assert read_numbers(again) == list(range(cut_at + 24))
    assert [segment.sealed for segment in again.segments] == [True] * (len(log.segments) - 1) + [False]
    assert again.end_of_epoch(1).end_offset == cut_at


@pytest.mark.parametrize("changes", range(5))
@pytest.mark.parametrize("clean_stop", [False, True])
def test_segments_of_a_killed_process_are_fsynced_before_they_count(
    disk: SimDisk, log: Log, changes: int, clean_stop: bool
) -> None:
    """The process may have died with a complete footer and nothing fsynced. The next seal or a clean shutdown
    reports everything as fsynced."""
    log.set_high_watermark(12)
    (job,) = log.durability.seals_due()
    disk.die_after(changes)
    with pytest.raises(ProcessDied):
        job.run()
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    commit_and_seal(log, 24)
    if clean_stop:
        directory.write_clean_marker()
    directory.checkpoint()
    fsynced = log.recovery_point
    assert fsynced == (log.log_end_offset if clean_stop else 24)
    disk.restart(page_cache_lost=True)
    again = create_log(open_directory(disk=disk, boot_id="boot-2"))
    assert read_numbers(again)[:fsynced] == list(range(fsynced))


@pytest.mark.parametrize("step", range(8))
def test_a_deletion_during_a_seal_spares_the_next_log(disk: SimDisk, directory: LogDirectory, step: int) -> None:
    """The deletion may come before any operation of the job: the new log of the same name stays unchanged."""
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 5)
    log.set_high_watermark(15)
    (job,) = log.durability.seals_due()
    calls = 0
    original = disk.sync

    def sync_and_delete(handle: int) -> None:
        nonlocal calls
        calls += 1
        original(handle)
        # only where the job holds no lock, as another thread could
        if calls == step + 1 and not job._by_path.locked():
            replace()

    def replace() -> None:
        directory.delete(log.tp)
        fill(create_log(directory, segment_bytes=SMALL), 5)

    disk.sync = sync_and_delete  # type: ignore[method-assign]
    job.run()
    log.durability.seal_finished(job)
    if directory.get(log.tp) is log:
        replace()
    fresh = directory.get(log.tp)
    assert fresh is not None
    assert disk.names(fresh.directory) == [
        *(f"{base:020d}{suffix}" for base in (0, 12) for suffix in (".arrow", ".index")),
        "partition.json",
    ]
    assert read_numbers(fresh) == list(range(15))
    assert disk.size(disk.open(fresh.segments[0].data_path)) == fresh.segments[0].data_size


class _AskedFor:
    """A lock that records when another thread waits for it."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_the_log_start_moves_to_the_end_of_a_sealing_segment(disk: SimDisk, directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL)
    for number in range(10):
        append(log, batch(3, first=3 * number, producer=7, sequence=3 * number))
    log.set_high_watermark(log.log_end_offset)
    job, *others = log.durability.seals_due()
    job._by_path = asked = _AskedFor()  # type: ignore[assignment]
    writes, moved = threading.Event(), threading.Event()
    rename = disk.rename

    def wait_before(source: Path, target: Path) -> None:
        if threading.current_thread() is thread and target.suffix == ".producers":
            writes.set()
            while not (asked.waited_for.wait(0.01) or moved.is_set()):
                pass
        rename(source, target)

    disk.rename = wait_before  # type: ignore[method-assign]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            job.run()
        except BaseException as failure:
            failures.append(failure)
            writes.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert writes.wait(30)
    try:
        log.advance_log_start(12)
        assert log.log_start_offset == 12
    finally:
        moved.set()
        thread.join(30)
    log.durability.seal_finished(job)
    assert failures == []
    assert not thread.is_alive()
    assert [name for name in disk.names(log.directory) if name.endswith((".producers", ".tmp"))] == [
        f"{12:020d}.producers"
    ]
    for other in others:
        other.run()
        log.durability.seal_finished(other)
    assert [segment.sealed for segment in log.segments] == [True] * (len(log.segments) - 1) + [False]


def test_old_snapshots_are_removed(disk: SimDisk, directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL)
    for number in range(40):
        append(log, batch(3, first=3 * number, producer=7, sequence=3 * number))
        commit_and_seal(log)
    snapshots = [name for name in disk.names(log.directory) if name.endswith(".producers")]
    assert snapshots == [f"{base:020d}.producers" for base in (84, 96, 108)]
