"""Compaction of one log, against a dictionary of the last record of each key."""

from __future__ import annotations

import errno
import gc
import io
import weakref

import polars
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sparklog.errors import StorageError
from sparklog.storage.cleaning import CleanJob
from sparklog.storage.key_table import Rows, SpillFile
from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import append, marker, open_directory
from tests.storage.compacting import KEYED, Seen, clean, commit_and_seal, keyed, keyed_log, keyed_rules, seen

DAY_US = 86_400_000_000
NOW_US = 10_000_000
#: of appends, before all cleanings
WRITTEN_US = 1_000


def expected(records: list[Seen], cleaned_to: int, *, horizon: int = 0) -> list[Seen]:
    """What may be left of ``records``, by hand: below the cleaned point the newest of each key, no old tombstones."""
    newest = {record.key: record.offset for record in records if record.offset < cleaned_to}
    return [
        record
        for record in records
        if record.offset >= cleaned_to
        or record.key is None
        or (newest[record.key] == record.offset and (record.value is not None or record.offset >= horizon))
    ]


def write(log: Log, *records: tuple[bytes | None, int | None], **how: object) -> None:
    append(log, keyed(list(records), **how), now_us=WRITTEN_US)  # type: ignore[arg-type]


def rolled(log: Log) -> None:
    """All that was written so far is in sealed segments."""
    log.config = replace(log.config, segment_ms=1)
    append(log, keyed([(b"last", 0)]), now_us=WRITTEN_US + 2_000 * (1 + log.log_end_offset))
    log.config = replace(log.config, segment_ms=1 << 40)
    commit_and_seal(log)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def log(disk: SimDisk) -> Log:
    return keyed_log(open_directory(disk=disk))


def test_the_newest_record_of_each_key_stays_where_it_was(log: Log) -> None:
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


def test_small_batches_become_large_ones(log: Log) -> None:
    for number in range(300):
        write(log, (b"key %d" % number, number))
    rolled(log)
    headers = sum(segment.count for segment in log.segments)
    clean(log)
    assert sum(segment.count for segment in log.segments) < headers / 10


def test_a_log_that_was_cleaned_is_sealed_arrow_files(disk: SimDisk, log: Log) -> None:
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


def test_what_was_cleaned_opens_again_and_goes_on(disk: SimDisk, log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 7), number))
    rolled(log)
    clean(log)
    found = seen(log)
    log.durability.flush()
    log._state.services.checkpoint_now()
    for lost in (False, True):
        disk.restart(page_cache_lost=lost)
        again = open_directory(disk=disk, boot_id=f"boot {lost}").logs()[0]
        again.config = log.config
        again.set_high_watermark(again.log_end_offset)
        assert again.findings == ()
        assert seen(again) == found
        assert again.cleaning.state == log.cleaning.state


def test_tombstones_go_when_their_time_has_come(log: Log) -> None:
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


def test_nothing_young_active_or_undecided_is_cleaned(log: Log) -> None:
    for number in range(200):
        write(log, (b"key", number))
    assert clean(log) is None  # nothing is committed
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


def test_transactions_keep_what_they_showed(log: Log) -> None:
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
        # aborted records are gone, for whoever reads them
        assert [one for one in seen(log, committed=False) if one.offset < end] == [
            one for one in seen(log) if one.offset < end
        ]
    assert log.aborted_between(0, log.cleaning.state.end) == []
    assert not any(segment.headers()["flags"][0] & 8 for segment in log.segments[:-1])


def test_a_markers_records_lie_before_the_cleaned_end_and_it_behind(disk: SimDisk, log: Log) -> None:
    """The cleaned part of a transaction is plain; what its marker says then changes nothing, after a restart either."""
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
    log._state.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    again.set_high_watermark(again.log_end_offset)
    assert seen(again) == expected(before, log.cleaning.state.end)
    assert again.open_transactions() == {}


def test_the_last_sequence_of_each_producer_is_in_the_log(disk: SimDisk, log: Log) -> None:
    for number in range(100):
        write(log, (b"key", number), (b"key", number), producer=number % 4, sequence=number // 4 * 2)
    rolled(log)
    clean(log)
    clean(log, NOW_US + 2 * DAY_US)
    # a follower that has nothing but what the leader sends
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower)
    for producer in range(4):
        (found,) = follower._state.producers.get(producer).batches  # type: ignore[union-attr]
        assert (found.first_sequence, found.last_sequence) == (48, 49)
        before = follower.log_end_offset
        write(follower, (b"key", 7), (b"key", 8), producer=producer, sequence=48)
        assert follower.log_end_offset == before
        write(follower, (b"key", 9), producer=producer, sequence=50)


def copy(leader: Log, follower: Log, *, max_bytes: int = 1 << 30, until: int | None = None) -> None:
    """The follower gets what the leader has, as a fetcher brings it."""
    end = leader.log_end_offset if until is None else until
    if follower.log_end_offset < leader.first_segment_offset:
        follower.restart_at(leader.first_segment_offset)
    while follower.log_end_offset < end:
        found = leader.read(follower.log_end_offset, max_bytes=max_bytes, end_offset=end, for_follower=True)
        if not found.batch_count:
            break
        follower.append_as_follower(found.headers, memoryview(b"".join(bytes(one) for one in found.bodies)))
    follower.set_high_watermark(min(leader.high_watermark, follower.log_end_offset))


@pytest.mark.parametrize("buffer_keys", [1, 40, 400])
def test_more_keys_than_memory_holds_are_spilled(disk: SimDisk, log: Log, buffer_keys: int) -> None:
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
    assert clean(log, buffer_bytes=96 * buffer_keys) is None, "all that was dirty is clean"


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 7])
def test_without_room_to_spill_a_cleaning_goes_as_far_as_its_memory(disk: SimDisk, log: Log, after: int) -> None:
    """And the next one goes on, until all is clean."""
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


def test_keys_that_leave_no_room_for_segments_are_not_spilled_again(disk: SimDisk, log: Log) -> None:
    """Else the disk would never be freed. A file without name takes its room while it is mapped."""
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


def test_what_a_cleaning_has_held_is_given_back_at_once(log: Log) -> None:
    """Its table, and the room of the file that is mapped: not when the collector of cycles comes by."""
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
    """A pace that cancels the job when it has spilled."""

    def __init__(self, job: CleanJob) -> None:
        self._job = job

    def spend(self, count: int) -> None:
        if self._job._keys.spilled_bytes and not self._job.cancelled:
            self._job.cancel()

    def stop(self) -> None:
        pass


def test_a_cleaning_that_is_cancelled_while_it_spills_ends(disk: SimDisk, log: Log) -> None:
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
    assert all(id(file) in named for file in disk._handles.values()), "the file of keys is closed"
    assert clean(log) is not None and seen(log) == expected(before, log.cleaning.state.end)


def test_records_without_key_are_left_alone(log: Log) -> None:
    for number in range(100):
        write(log, (None, number), (b"key", number))
    rolled(log)
    before = seen(log)
    clean(log)
    assert seen(log) == expected(before, log.cleaning.state.end)


def test_damage_is_not_written_anew(disk: SimDisk, log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % number, number))
    rolled(log)
    segment = log.segments[1]
    position = int(segment.headers()["position"][2])
    disk.flip_bit(segment.data_path, position + int(segment.headers()["length"][2]) - 20)
    with pytest.raises(Exception, match="CRC32C"):
        clean(log)


def test_a_read_of_an_old_segment_outlives_it(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 3), number))
    rolled(log)
    early = log.read(0, max_bytes=1 << 30, end_offset=log.high_watermark)
    kept = [bytes(body) for body in early.bodies]
    clean(log)
    assert [bytes(body) for body in early.bodies] == kept
    again = log.read(0, max_bytes=1 << 30, end_offset=log.high_watermark)
    assert again.headers != early.headers


@pytest.mark.parametrize("at", [1, 37, 100, 150, 199])
def test_a_follower_in_the_middle_goes_on_with_what_the_leader_cleaned(log: Log, at: int) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 30), number), (b"only %d" % number, number))
    rolled(log)
    follower, untouched = (keyed_log(open_directory(disk=SimDisk())) for _ in range(2))
    copy(log, untouched)
    copy(log, follower, max_bytes=1, until=2 * at)
    assert follower.log_end_offset == 2 * at
    before = seen(log)
    clean(log)
    copy(log, follower, max_bytes=2000)
    assert follower.log_end_offset == log.log_end_offset
    end = log.cleaning.state.end
    assert [one for one in seen(follower) if one.offset >= 2 * at] == [one for one in seen(log) if one.offset >= 2 * at]
    commit_and_seal(follower)
    clean(follower)
    assert follower.cleaning.state.end >= end or follower.cleaning.state.end == follower.segments[-1].base_offset
    shown = {one.key: one for one in seen(follower)}
    assert shown == {one.key: one for one in before}
    # as a leader it rolls, and is copied byte by byte from there on
    first = follower.log_end_offset
    write(follower, (b"new", 1))
    copy(follower, untouched)
    assert (
        untouched.read(first, max_bytes=1 << 20, end_offset=first + 1).headers
        == follower.read(first, max_bytes=1 << 20, end_offset=first + 1).headers
    )
    third = keyed_log(open_directory(disk=SimDisk()))
    copy(follower, third)
    assert seen(third) == seen(follower)
    assert (
        third.read(first, max_bytes=1 << 20, end_offset=first + 1).headers
        == follower.read(first, max_bytes=1 << 20, end_offset=first + 1).headers
    )


def test_a_replica_that_leads_from_the_middle_of_what_was_cleaned_rolls(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 30), number))
    rolled(log)
    follower, untouched = (keyed_log(open_directory(disk=SimDisk())) for _ in range(2))
    copy(log, untouched)
    copy(log, follower, until=20, max_bytes=1)
    clean(log)
    while follower.log_end_offset < 100:
        copy(log, follower, until=follower.log_end_offset + 1, max_bytes=1)
        if follower.log_end_offset < 100:
            found = log.read(follower.log_end_offset, max_bytes=1, end_offset=200, for_follower=True)
            follower.append_as_follower(found.headers, memoryview(b"".join(bytes(one) for one in found.bodies)))
    untouched.truncate(follower.log_end_offset)
    assert untouched.log_end_offset == follower.log_end_offset < log.log_end_offset
    for number in range(3):
        append(follower, keyed([(b"new", number)]), leader_epoch=2, now_us=WRITTEN_US)
    follower.set_high_watermark(follower.log_end_offset)
    copy(follower, untouched)
    assert untouched.log_end_offset == follower.log_end_offset
    assert [one.value for one in seen(untouched) if one.key == b"new"] == [0, 1, 2]
    both = dict(zip([one.offset for one in seen(untouched)], seen(untouched), strict=True))
    assert all(both[one.offset] == one for one in seen(follower))


def test_a_follower_of_a_cleaned_leader_then_of_one_that_did_not_clean(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 30), number))
    rolled(log)
    other, follower = (keyed_log(open_directory(disk=SimDisk())) for _ in range(2))
    copy(log, other)
    copy(log, follower, until=50, max_bytes=1)
    clean(log)
    copy(log, follower, until=120, max_bytes=1)
    assert 50 < follower.log_end_offset < 200
    copy(other, follower, max_bytes=700)
    assert follower.log_end_offset == other.log_end_offset
    assert {one.key: one for one in seen(follower)} == {one.key: one for one in seen(other)}


@pytest.mark.parametrize("ended", ["committed", "aborted"])
def test_a_follower_that_has_the_beginning_of_a_transaction_gets_its_marker(log: Log, ended: str) -> None:
    write(log, (b"begun", 1), producer=9, sequence=0, transactional=True)
    for number in range(100):
        write(log, (b"filler %d" % (number % 9), number))
    append(log, marker(committed=(9,)) if ended == "committed" else marker(aborted=(9,)), now_us=WRITTEN_US)
    for number in range(100):
        write(log, (b"filler %d" % (number % 9), number))
    rolled(log)
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower, until=50, max_bytes=1)
    assert follower.open_transactions()
    clean(log)
    copy(log, follower, max_bytes=1000)
    assert not follower.open_transactions()
    assert [one for one in seen(follower) if one.offset == 0] == [one for one in seen(log) if one.offset == 0]
    assert any(one.offset == 0 for one in seen(follower)) == (ended == "committed")


def test_an_old_snapshot_does_not_open_a_transaction_whose_marker_is_gone(disk: SimDisk, log: Log) -> None:
    log.config = replace(log.config, delete_retention_ms=1000)
    write(log, (b"key", 1), producer=9, sequence=0, transactional=True)
    rolled(log)  # a snapshot in which it is open
    append(log, marker(committed=(9,)), now_us=WRITTEN_US)
    rolled(log)
    clean(log, NOW_US)
    clean(log, NOW_US + 2_000_000)
    assert log.cleaning.state.deletes == 0
    log.durability.flush()
    log._state.services.checkpoint_now()
    newest = sorted(name for name in disk.names(log.directory) if name.endswith(".producers"))[-1]
    disk.flip_bit(log.directory / newest, 3)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    assert again.open_transactions() == {}


def test_what_was_cut_is_not_taken_for_cleaned_when_it_is_written_again(disk: SimDisk, log: Log) -> None:
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
    log._state.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    assert again.cleaning.state.end <= end
    again.config = log.config
    rolled(again)
    before = seen(again)
    clean(again)
    assert seen(again) == expected(before, again.cleaning.state.end)


def test_a_replica_that_was_away_for_too_long_begins_anew(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 30), number))
    rolled(log)
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower, max_bytes=1, until=20)
    before = log.read(20, max_bytes=1, end_offset=200).headers
    clean(log)
    after = log.read(20, max_bytes=1, end_offset=200).headers
    follower.config = replace(follower.config, delete_retention_ms=60_000)
    now_us = follower._state.absence.last_progress_us
    assert not follower.is_outdated_for(after, now_us + 59_000_000)
    assert follower.is_outdated_for(after, now_us + 61_000_000)
    assert not follower.is_outdated_for(before, now_us + 61_000_000)  # nothing was cleaned: nothing is missing
    empty = keyed_log(open_directory(disk=SimDisk()))
    assert not empty.is_outdated_for(after, now_us + 61_000_000)
    assert not follower.is_outdated_for(b"too short", now_us + 61_000_000)  # the append says what is wrong


def test_an_absence_counts_behind_a_segment_in_which_nothing_was_to_be_cleaned(log: Log) -> None:
    """The leader's tombstone is gone; between it and the end of the replica lies a segment as it always was."""
    log.config = replace(log.config, delete_retention_ms=1000)
    write(log, (b"gone", 1))
    follower = keyed_log(open_directory(disk=SimDisk()), delete_retention_ms=1000)
    copy(log, follower)
    log.config = replace(log.config, segment_bytes=1024, segment_ms=1)  # two are never put together
    append(log, keyed([(b"only %d" % number, number) for number in range(20)]), now_us=NOW_US)
    log.config = replace(log.config, segment_ms=1 << 40)
    for number in range(100):
        write(log, (b"gone", None), (b"other", number))
    rolled(log)
    clean(log, NOW_US)
    clean(log, NOW_US + 2_000_000)
    assert not any(record.key == b"gone" for record in seen(log))
    later_us = follower._state.absence.last_progress_us + 11_000_000
    first = log.read(follower.log_end_offset, max_bytes=1, end_offset=log.high_watermark)
    assert not follower.is_outdated_for(first.headers, later_us)
    follower.append_as_follower(first.headers, memoryview(b"".join(first.bodies)))
    follower.caught_up(log.high_watermark)
    behind = log.read(follower.log_end_offset, max_bytes=1, end_offset=log.high_watermark)
    assert follower.is_outdated_for(behind.headers, follower._state.absence.last_progress_us)
    follower.caught_up(follower.log_end_offset)
    assert not follower.is_outdated_for(behind.headers, follower._state.absence.last_progress_us)


records_of = st.lists(
    st.tuples(st.sampled_from([b"", b"a", b"b", b"cc", b"d" * 40]), st.one_of(st.none(), st.integers(0, 99))),
    min_size=1,
    max_size=4,
)
steps = st.lists(
    st.one_of(
        records_of,
        st.tuples(st.sampled_from(["begin", "commit", "abort"]), st.integers(1, 3), records_of),
        st.sampled_from(["clean", "roll", "restart", "follow", "wait"]),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, buffer_keys=st.sampled_from([2, 5, 1000]))
def test_any_history(steps: list[object], buffer_keys: int) -> None:
    """Readers of committed records see every key's newest record and every record above the cleaned point, whatever
    was cleaned when; so does a replica that follows and cleans at other times."""
    run = _Run(buffer_keys)
    for step in steps:
        run.step(step)
    run.end()


class _Run:
    def __init__(self, buffer_keys: int) -> None:
        self.disk = SimDisk()
        self.log = keyed_log(open_directory(disk=self.disk), segment_bytes=2048, delete_retention_ms=1000)
        self.follower = keyed_log(open_directory(disk=SimDisk()), segment_bytes=2048, delete_retention_ms=1000)
        self.buffer_bytes = 96 * buffer_keys
        self.now_us = NOW_US
        self.producers = iter(range(100, 10_000))
        self.open: dict[int, tuple[int, int, list[Seen]]] = {}
        #: committed records, by offset
        self.model: dict[int, Seen] = {}

    def step(self, step: object) -> None:
        if isinstance(step, list):
            self._write(step, None)
        elif isinstance(step, tuple):
            self._transaction(*step)
        else:
            getattr(self, str(step))()
        self.check(self.log)

    def _write(self, records: list[tuple[bytes, int | None]], slot: int | None) -> None:
        start = self.log.log_end_offset
        found = [Seen(start + at, *record) for at, record in enumerate(records)]
        if slot is None:
            write(self.log, *records)
            self.model.update((one.offset, one) for one in found)
        else:
            producer, sequence, earlier = self.open.get(slot) or (next(self.producers), 0, [])
            write(self.log, *records, producer=producer, sequence=sequence, transactional=True)
            self.open[slot] = (producer, sequence + len(records), earlier + found)

    def _transaction(self, what: str, slot: int, records: list[tuple[bytes, int | None]]) -> None:
        self._write(records, slot)
        if what == "begin":
            return
        producer, _, found = self.open.pop(slot)
        said = marker(committed=(producer,)) if what == "commit" else marker(aborted=(producer,))
        append(self.log, said, now_us=WRITTEN_US)
        if what == "commit":
            self.model.update((one.offset, one) for one in found)

    def roll(self) -> None:
        self.model[self.log.log_end_offset] = Seen(self.log.log_end_offset, b"last", 0)
        rolled(self.log)

    def clean(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        clean(self.log, self.now_us, buffer_bytes=self.buffer_bytes)

    def wait(self) -> None:
        self.now_us += 600_000

    def follow(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        if self.log.cleaning.state.deletes_end > self.follower.log_end_offset:
            # it was away for longer than tombstones are kept: see ``is_outdated_for``
            self.follower.restart_at(self.log.first_segment_offset)
        copy(self.log, self.follower, max_bytes=500)
        commit_and_seal(self.follower)
        clean(self.follower, self.now_us, buffer_bytes=self.buffer_bytes)
        self.check(self.follower)

    def restart(self) -> None:
        self.log.durability.flush()
        self.log._state.services.checkpoint_now()
        config = self.log.config
        self.disk.restart(page_cache_lost=False)
        self.log = open_directory(disk=self.disk).logs()[0] if self.log.log_end_offset else self.log
        if self.log.config != config:
            self.log.config = config
        assert self.log.findings == ()

    def check(self, log: Log) -> None:
        log.set_high_watermark(log.log_end_offset)
        stable = log.last_stable_offset(log.high_watermark)
        found = {one.offset: one for one in seen(log)}
        truth = {offset: one for offset, one in self.model.items() if offset < stable}
        assert found.items() <= truth.items()
        cleaned_to = log.cleaning.state.end
        newest = {one.key: one.offset for _, one in sorted(truth.items()) if one.offset < cleaned_to}
        for offset, one in truth.items():
            if offset >= cleaned_to or (newest[one.key] == offset and one.value is not None):
                assert offset in found, one
        # whoever applies what is there has the table that all records make
        assert _table(found) == _table(truth)

    def end(self) -> None:
        for slot in list(self.open):
            self._transaction("abort", slot, [(b"a", 1)])
        self.check(self.log)
        assert self.log.last_stable_offset(self.log.log_end_offset) == self.log.log_end_offset


def _table(records: dict[int, Seen]) -> dict[bytes | None, int]:
    table: dict[bytes | None, int | None] = {}
    for _, one in sorted(records.items()):
        table[one.key] = one.value
    return {key: value for key, value in table.items() if value is not None}
