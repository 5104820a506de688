"""Tests of followers of leaders that clean their logs: their old records, the records that they receive, and when
they restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import append, marker, open_directory
from tests.storage.compacting import (
    NOW_US,
    WRITTEN_US,
    clean,
    commit_and_seal,
    copy,
    keyed,
    keyed_log,
    rolled,
    seen,
    write,
)
from tests.tiers import marked_after


@pytest.fixture
def log(disk: SimDisk) -> Log:
    return keyed_log(open_directory(disk=disk))


@pytest.mark.parametrize("at", marked_after(2, [100, 1, 37, 150, 199], pytest.mark.extended))
def test_a_follower_continues_with_the_leaders_cleaned_segments(log: Log, at: int) -> None:
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
    # as a leader it rolls, and from there on it is copied byte by byte
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


def test_a_replica_leading_from_within_a_cleaned_part_rolls(log: Log) -> None:
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


def test_a_follower_of_a_cleaned_leader_then_of_an_uncleaned_one(log: Log) -> None:
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
def test_a_follower_with_a_transactions_start_gets_its_marker(log: Log, ended: str) -> None:
    write(log, (b"begun", 1), producer=9, sequence=0, transactional=True)
    for number in range(100):
        write(log, (b"filler %d" % (number % 9), number))
    append(log, marker(committed=(9,)) if ended == "committed" else marker(aborted=(9,)), now_us=WRITTEN_US)
    for number in range(100):
        write(log, (b"filler %d" % (number % 9), number))
    rolled(log)
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower, until=50, max_bytes=1)
    assert follower.transactions.open()
    clean(log)
    copy(log, follower, max_bytes=1000)
    assert not follower.transactions.open()
    assert [one for one in seen(follower) if one.offset == 0] == [one for one in seen(log) if one.offset == 0]
    assert any(one.offset == 0 for one in seen(follower)) == (ended == "committed")


def test_a_replica_that_was_absent_too_long_starts_again(log: Log) -> None:
    for number in range(200):
        write(log, (b"key %d" % (number % 30), number))
    rolled(log)
    follower = keyed_log(open_directory(disk=SimDisk()))
    copy(log, follower, max_bytes=1, until=20)
    before = log.read(20, max_bytes=1, end_offset=200).headers
    clean(log)
    after = log.read(20, max_bytes=1, end_offset=200).headers
    follower.config = replace(follower.config, delete_retention_ms=60_000)
    now_us = follower._tail.tombstone_window.last_progress_us
    assert not follower.is_outdated_for(after, now_us + 59_000_000)
    assert follower.is_outdated_for(after, now_us + 61_000_000)
    assert not follower.is_outdated_for(before, now_us + 61_000_000)  # no record was cleaned, so none is missing
    empty = keyed_log(open_directory(disk=SimDisk()))
    assert not empty.is_outdated_for(after, now_us + 61_000_000)
    assert not follower.is_outdated_for(b"too short", now_us + 61_000_000)  # the append reports the error


def test_absence_counts_across_a_segment_without_dirty_records(log: Log) -> None:
    """The leader's tombstone is removed. Between it and the replica's end is a segment that no cleaning has changed."""
    log.config = replace(log.config, delete_retention_ms=1000)
    write(log, (b"gone", 1))
    follower = keyed_log(open_directory(disk=SimDisk()), delete_retention_ms=1000)
    copy(log, follower)
    log.config = replace(log.config, segment_bytes=1024, segment_ms=1)  # two segments are never merged
    append(log, keyed([(b"only %d" % number, number) for number in range(20)]), now_us=NOW_US)
    log.config = replace(log.config, segment_ms=1 << 40)
    for number in range(100):
        write(log, (b"gone", None), (b"other", number))
    rolled(log)
    clean(log, NOW_US)
    clean(log, NOW_US + 2_000_000)
    assert not any(record.key == b"gone" for record in seen(log))
    later_us = follower._tail.tombstone_window.last_progress_us + 11_000_000
    first = log.read(follower.log_end_offset, max_bytes=1, end_offset=log.high_watermark)
    assert not follower.is_outdated_for(first.headers, later_us)
    follower.append_as_follower(first.headers, memoryview(b"".join(first.bodies)))
    follower.caught_up(log.high_watermark)
    behind = log.read(follower.log_end_offset, max_bytes=1, end_offset=log.high_watermark)
    assert follower.is_outdated_for(behind.headers, follower._tail.tombstone_window.last_progress_us)
    follower.caught_up(follower.log_end_offset)
    assert not follower.is_outdated_for(behind.headers, follower._tail.tombstone_window.last_progress_us)
