"""Tests of the compaction of one log, against a dictionary of the last record of each key."""

from __future__ import annotations

import errno
import gc
import io
import weakref

import polars
import pyarrow as pa
import pytest
from msgspec.structs import replace

from sparklog.errors import StorageError
from sparklog.storage.cleaning import CleanJob
from sparklog.storage.key_table import Rows, SpillFile
from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import append, marker, open_directory
from tests.storage.compacting import (
    DAY_US,
    KEYED,
    NOW_US,
    WRITTEN_US,
    clean,
    commit_and_seal,
    copy,
    expected,
    keyed_log,
    keyed_rules,
    rolled,
    seen,
    write,
)
from tests.tiers import marked_after


@pytest.fixture
def log(disk: SimDisk) -> Log:
    return keyed_log(open_directory(disk=disk))


def test_the_newest_record_of_each_key_keeps_its_offset(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 7), number), (b"other %d" % number, number))
    rolled(log)
    before = seen(log)
    job = clean(log)
    assert job is not None and job.tally.records == 400 and job.tally.kept == 207
    cleaned_to = log.cleaning.state.end
    assert cleaned_to == log.segments[-1].base_offset > 0
    assert seen(log) == expected(before, cleaned_to)
    assert seen(log, max_bytes=1) == seen(log)
    for start in range(0, log.log_end_offset, 13):
        assert seen(log, start) == [record for record in seen(log) if record.offset >= start]
    assert clean(log) is None or seen(log) == expected(before, cleaned_to)


def test_small_batches_are_merged_into_large_ones(log: Log) -> None:
    for number in range(300):
        write(log, (b"key %d" % number, number))
    rolled(log)
    headers = sum(segment.count for segment in log.segments)
    clean(log)
    assert sum(segment.count for segment in log.segments) < headers / 10


def test_a_cleaned_log_consists_of_sealed_arrow_files(disk: SimDisk, log: Log) -> None:
    for number in range(300):
        write(log, (b"key %d" % (number % 50), number), compression=("lz4", "zstd", None)[number % 3])
    rolled(log)
    clean(log)
    for segment in log.segments[:-1]:
        assert segment.sealed
        content = bytes(disk._files[segment.data_path].content)
        table = pa.ipc.open_file(content).read_all()
        table.validate(full=True)
        assert table.schema.equals(KEYED)
        assert polars.read_ipc(io.BytesIO(content))["value"].to_list() == table["value"].to_pylist()
        inside = [one.value for one in seen(log) if segment.base_offset <= one.offset < segment.end_offset]
        assert table["value"].to_pylist() == inside


def test_a_cleaned_log_opens_again_and_accepts_appends(disk: SimDisk, log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 7), number))
    rolled(log)
    clean(log)
    found = seen(log)
    log.durability.flush()
    log._files.services.checkpoint_now()
    for lost in (False, True):
        disk.restart(page_cache_lost=lost)
        again = open_directory(disk=disk, boot_id=f"boot {lost}").logs()[0]
        again.config = log.config
        again.set_high_watermark(again.log_end_offset)
        assert again.findings == ()
        assert seen(again) == found
        assert again.cleaning.state == log.cleaning.state


def test_tombstones_are_removed_when_they_are_old_enough(log: Log) -> None:
    log.config = replace(log.config, delete_retention_ms=1000)
    for number in range(100):
        write(log, (b"key %d" % number, number))
    write(log, *((b"key %d" % number, None) for number in range(50)))
    rolled(log)
    before = seen(log)
    clean(log, NOW_US)
    assert seen(log) == expected(before, log.cleaning.state.end)
    assert sum(record.value is None for record in seen(log)) == 50
    assert clean(log, NOW_US + 999_000) is None
    job = clean(log, NOW_US + 1_000_000)
    assert job is not None and job.tally.deletes == 0
    assert seen(log) == expected(before, log.cleaning.state.end, horizon=log.cleaning.state.end)
    assert not any(record.value is None for record in seen(log))
    assert clean(log, NOW_US + 100_000_000) is None


def test_young_active_and_undecided_segments_are_not_cleaned(log: Log) -> None:
    for number in range(200):
        write(log, (b"key", number))
    assert clean(log) is None  # no record is committed
    write(log, (b"open", 1), producer=5, sequence=0, transactional=True)
    for number in range(200):
        write(log, (b"key", number))
    rolled(log)
    before = seen(log, committed=False)
    clean(log)
    assert 0 < log.cleaning.state.end <= 200
    assert seen(log, committed=False) == expected(before, log.cleaning.state.end)
    append(log, marker(committed=(5,)), now_us=WRITTEN_US)
    rolled(log)
    log.config = replace(log.config, min_compaction_lag_ms=DAY_US // 1000)
    assert clean(log) is None
    job = clean(log, NOW_US + DAY_US)
    assert job is not None and log.cleaning.state.end > 400


def test_transactions_look_the_same_after_a_cleaning(log: Log) -> None:
    for number in range(60):
        producer = 100 + number
        write(log, (b"a %d" % (number % 5), number), producer=producer, sequence=0, transactional=True)
        write(log, (b"b", number))
        write(log, (b"a %d" % (number % 5), 1000 + number), producer=producer, sequence=1, transactional=True)
        ended = marker(committed=(producer,)) if number % 3 else marker(aborted=(producer,))
        append(log, ended, now_us=WRITTEN_US)
    rolled(log)
    before = seen(log)
    log.config = replace(log.config, delete_retention_ms=1000)
    for now_us in (NOW_US, NOW_US + 2_000_000):
        clean(log, now_us)
        end = log.cleaning.state.end
        assert seen(log) == expected(before, end)
        # aborted records are removed, for any reader
        assert [one for one in seen(log, committed=False) if one.offset < end] == [
            one for one in seen(log) if one.offset < end
        ]
    assert log.transactions.aborted_between(0, log.cleaning.state.end) == []
    assert not any(segment.headers()["flags"][0] & 8 for segment in log.segments[:-1])


def test_a_transaction_is_read_correctly_across_the_cleaned_end(disk: SimDisk, log: Log) -> None:
    """The cleaned records of a transaction are ordinary. Its marker changes nothing then, even after a restart."""
    write(log, (b"key", 1), producer=9, sequence=0, transactional=True)
    for number in range(200):
        write(log, (b"filler %d" % number, number))
    rolled(log)
    write(log, (b"key", 2), producer=9, sequence=1, transactional=True)
    append(log, marker(aborted=(9,)), now_us=WRITTEN_US)
    commit_and_seal(log)
    before = seen(log)
    assert not any(record.key == b"key" for record in before)
    clean(log)
    assert seen(log) == expected(before, log.cleaning.state.end)
    log.durability.flush()
    log._files.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    again.set_high_watermark(again.log_end_offset)
    assert seen(again) == expected(before, log.cleaning.state.end)
    assert again.transactions.open() == {}


def test_the_last_sequence_of_each_producer_is_in_the_log(disk: SimDisk, log: Log) -> None:
    for number in range(100):
        write(log, (b"key", number), (b"key", number), producer=number % 4, sequence=number // 4 * 2)
    rolled(log)
    clean(log)
    clean(log, NOW_US + 2 * DAY_US)
    # a follower that has only the leader's records
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower)
    for producer in range(4):
        (found,) = follower._tail.producers.get(producer).batches  # type: ignore[union-attr]
        assert (found.first_sequence, found.last_sequence) == (48, 49)
        before = follower.log_end_offset
        write(follower, (b"key", 7), (b"key", 8), producer=producer, sequence=48)
        assert follower.log_end_offset == before
        write(follower, (b"key", 9), producer=producer, sequence=50)


@pytest.mark.parametrize("commit", [True, False])
def test_the_last_sequence_of_a_kafka_producers_transactions_is_in_the_log(
    disk: SimDisk, log: Log, commit: bool
) -> None:
    for number in range(50):
        write(log, (b"key", number), producer=9, epoch=1, sequence=number, transactional=True)
        if number % 5 == 4:
            ended = marker(committed=(9,), epoch=1) if commit else marker(aborted=(9,), epoch=1)
            append(log, ended, now_us=WRITTEN_US)
    rolled(log)
    before = seen(log)
    clean(log)
    clean(log, NOW_US + DAY_US // 2)
    assert seen(log) == expected(before, log.cleaning.state.end)
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower)
    (found,) = follower._tail.producers.get(9).batches  # type: ignore[union-attr]
    assert (found.first_sequence, found.last_sequence) == (49, 49)
    assert follower.transactions.open() == {}
    end = follower.log_end_offset
    write(follower, (b"key", 7), producer=9, epoch=1, sequence=49, transactional=True)
    assert follower.log_end_offset == end, "a retry is still a duplicate"


@pytest.mark.parametrize("buffer_keys", marked_after(1, [40, 1, 400], pytest.mark.extended))
def test_keys_beyond_the_memory_are_spilled(disk: SimDisk, log: Log, buffer_keys: int) -> None:
    other = keyed_log(open_directory(disk=SimDisk()))
    for number in range(1000):
        write(log, (b"key %d" % (number * 7919 % 500), number))
        write(other, (b"key %d" % (number * 7919 % 500), number))
    for one in (log, other):
        rolled(one)
    before = seen(log)
    job, unlimited = clean(log, buffer_bytes=96 * buffer_keys), clean(other)
    assert job is not None and unlimited is not None
    assert job.tally.bytes_spilled > 0 == unlimited.tally.bytes_spilled
    assert (job.tally.keys, job.tally.kept) == (unlimited.tally.keys, unlimited.tally.kept)
    assert log.cleaning.state == other.cleaning.state and log.cleaning.state.end == log.segments[-1].base_offset
    assert seen(log) == seen(other) == expected(before, log.cleaning.state.end)
    assert not any(name.endswith(".tmp") for name in disk.names(log.directory))
    assert clean(log, buffer_bytes=96 * buffer_keys) is None, "all dirty records must be clean"


@pytest.mark.parametrize("after", marked_after(2, [1, 5, 0, 2, 3, 7], pytest.mark.extended))
def test_a_cleaning_without_spill_space_is_bounded_by_its_memory(disk: SimDisk, log: Log, after: int) -> None:
    """The next cleanings continue until all records are clean."""
    for number in range(600):
        write(log, (b"key %d" % (number % 300), number))
    rolled(log)
    before = seen(log)
    spills, write_to = 0, SpillFile.append

    def full(file: SpillFile, rows: Rows) -> None:
        nonlocal spills
        spills += 1
        if spills > after:
            raise OSError(errno.ENOSPC, "injected")
        write_to(file, rows)

    ends = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpillFile, "append", full)
        while clean(log, buffer_bytes=96 * 50) is not None:
            ends.append(log.cleaning.state.end)
            assert ends[-1] > ends[-2] and len(ends) < 20
            assert seen(log) == expected(before, ends[-1])
    assert len(ends) > 2 and ends[-1] == log.segments[-1].base_offset


def test_keys_that_leave_no_disk_space_are_not_spilled_again(disk: SimDisk, log: Log) -> None:
    """A second spill would keep the disk full: a file without a name uses its space while it is mapped."""
    for number in range(40):
        write(log, *[(b"key %d" % (number // 8 * 100 + one), number) for one in range(100)])
    rolled(log)
    before = seen(log)
    disk.capacity_bytes = disk.used_bytes + 8_000
    ends, full = [0], 0
    while len(ends) + full < 40:
        try:
            if clean(log, buffer_bytes=96 * 100) is None:
                break
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            full += 1
            continue
        ends.append(log.cleaning.state.end)
        assert seen(log) == expected(before, ends[-1])
    assert full and ends[-1] == log.segments[-1].base_offset


def test_a_cleaning_frees_its_table_and_file_at_once(log: Log) -> None:
    """Neither the table nor the space of the mapped file waits for the garbage collector."""
    for number in range(300):
        write(log, (b"key %d" % number, number))
    rolled(log)
    gc.disable()
    try:
        job = clean(log, buffer_bytes=96 * 100)
        assert job is not None and job.tally.bytes_spilled
        gone = weakref.ref(job)
        del job
        assert gone() is None
    finally:
        gc.enable()


class _Cancels:
    """A pace that cancels the job after it has spilled keys."""

    def __init__(self, job: CleanJob) -> None:
        self._job = job

    def spend(self, count: int) -> None:
        if self._job._keys.spilled_bytes and not self._job.cancelled:
            self._job.cancel()

    def stop(self) -> None:
        pass


def test_a_cancelled_cleaning_stops_during_a_spill(disk: SimDisk, log: Log) -> None:
    for number in range(600):
        write(log, (b"key %d" % number, number))
    rolled(log)
    before = seen(log)
    job = log.cleaning.begin(keyed_rules(log, buffer_bytes=96 * 50), NOW_US, at_once=True)
    assert job is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_pace", _Cancels(job))
        with pytest.raises(StorageError, match="cancelled"):
            job.read_keys()
    log.cleaning.finished(job, None)
    assert seen(log) == before
    named = {id(file) for file in disk._files.values()}
    assert all(id(file) in named for file in disk._handles.values()), "the file of keys must be closed"
    assert clean(log) is not None and seen(log) == expected(before, log.cleaning.state.end)


def test_records_without_key_are_left_alone(log: Log) -> None:
    for number in range(100):
        write(log, (None, number), (b"key", number))
    rolled(log)
    before = seen(log)
    clean(log)
    assert seen(log) == expected(before, log.cleaning.state.end)


def test_a_damaged_batch_is_not_rewritten(disk: SimDisk, log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % number, number))
    rolled(log)
    segment = log.segments[1]
    position = int(segment.headers()["position"][2])
    disk.flip_bit(segment.data_path, position + int(segment.headers()["length"][2]) - 20)
    with pytest.raises(Exception, match="CRC32C"):
        clean(log)


def test_a_read_of_an_old_segment_stays_valid_after_its_replacement(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 3), number))
    rolled(log)
    early = log.read(0, max_bytes=1 << 30, end_offset=log.high_watermark)
    kept = [bytes(body) for body in early.bodies]
    clean(log)
    assert [bytes(body) for body in early.bodies] == kept
    again = log.read(0, max_bytes=1 << 30, end_offset=log.high_watermark)
    assert again.headers != early.headers


def test_an_old_snapshot_opens_no_transaction_without_its_marker(disk: SimDisk, log: Log) -> None:
    log.config = replace(log.config, delete_retention_ms=1000)
    write(log, (b"key", 1), producer=9, sequence=0, transactional=True)
    rolled(log)  # a snapshot in which the transaction is open
    append(log, marker(committed=(9,)), now_us=WRITTEN_US)
    rolled(log)
    clean(log, NOW_US)
    clean(log, NOW_US + 2_000_000)
    assert log.cleaning.state.deletes == 0
    log.durability.flush()
    log._files.services.checkpoint_now()
    newest = sorted(name for name in disk.names(log.directory) if name.endswith(".producers"))[-1]
    disk.flip_bit(log.directory / newest, 3)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    assert again.transactions.open() == {}


def test_a_truncated_and_rewritten_range_is_cleaned_again(disk: SimDisk, log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 7), number))
    rolled(log)
    clean(log)
    assert log.cleaning.state.end > 100
    log.truncate(10)
    end = log.log_end_offset
    for number in range(200):
        write(log, (b"key %d" % (number % 7), 1000 + number))
    log.durability.flush()
    log._files.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    assert again.cleaning.state.end <= end
    again.config = log.config
    rolled(again)
    before = seen(again)
    clean(again)
    assert seen(again) == expected(before, again.cleaning.state.end)
