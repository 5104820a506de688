"""Tests of idle active segments that are rolled so that their records can be deleted."""

from __future__ import annotations

import errno

import pytest
from msgspec.structs import replace

from sparklog.model import OffsetRange
from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    append,
    batch,
    commit_and_seal,
    create_log,
    follow,
    marker,
    open_directory,
    read_slices,
)
from tests.storage.compacting import clean, keyed, keyed_log, seen
from tests.storage.compacting import commit_and_seal as commit_and_seal_keyed

#: The newest time of the records, and the retention in ms.
NEWEST_US = 1_000_000
RETENTION_MS = 500
EXPIRED_US = NEWEST_US + RETENTION_MS * 1000 + 1000


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


def aged(disk: SimDisk, **overrides: int | str) -> Log:
    """Append two batches, both with ``NEWEST_US`` at most."""
    log = create_log(open_directory(disk=disk), retention_ms=RETENTION_MS, **overrides)
    append(log, batch(timestamp=NEWEST_US))
    append(log, batch(timestamp=NEWEST_US - 10))
    log.set_high_watermark(log.log_end_offset)
    return log


def roll(log: Log, now_us: int) -> None:
    log.append_as_leader([marker()], leader_epoch=1, now_us=now_us, roll=True)


def test_a_segment_with_only_expired_records_is_sealed_and_deleted(disk: SimDisk) -> None:
    log = aged(disk)
    assert not log.retention.roll_due(EXPIRED_US - 2000) and log.retention.roll_due(EXPIRED_US)
    due_us = log.retention.due_us()
    assert due_us is not None and log.retention.roll_due(due_us) and not log.retention.roll_due(due_us - 1)
    assert log.retention.apply(EXPIRED_US) == 0, "the segment is active"
    follower = create_log(open_directory(disk=SimDisk()), retention_ms=RETENTION_MS)
    follow(follower, log)
    roll(log, EXPIRED_US)
    follow(follower, log)
    assert [segment.base_offset for segment in log.segments] == [0, 6]
    for one in (log, follower):
        assert commit_and_seal(one) == 1
        assert one.retention.due_us() == due_us
    assert log.retention.apply(due_us - 1) == 0 and log.retention.apply(due_us) == 1
    follower.advance_log_start(log.log_start_offset)
    for one in (log, follower):
        assert (one.log_start_offset, one.log_end_offset, len(one.segments)) == (6, 7, 1)
    assert [found.headers for found in read_slices(log)] == [found.headers for found in read_slices(follower)]
    # the marker expires in its turn, which has no consequence
    assert (
        not log.retention.roll_due(2 * EXPIRED_US)
        and not log.retention.roll_due(2**50)
        and log.retention.due_us() is None
    )
    append(log, batch(timestamp=NEWEST_US))
    log.set_high_watermark(log.log_end_offset)
    assert log.retention.roll_due(2 * EXPIRED_US), "the segment was written to"


def test_the_rest_of_an_expired_log_opens_again(disk: SimDisk) -> None:
    log = aged(disk)
    roll(log, EXPIRED_US)
    commit_and_seal(log)
    log.retention.apply(EXPIRED_US)
    log.durability.flush()
    log._files.services.checkpoint_now()
    disk.restart(page_cache_lost=True)
    again = open_directory(disk=disk, boot_id="boot-2").logs()[0]
    assert (again.log_start_offset, again.log_end_offset, again.findings) == (6, 7, ())
    again.config = log.config
    again.set_high_watermark(7)
    assert not again.retention.roll_due(2**50)


def test_an_uncommitted_or_undecided_segment_is_not_rolled(disk: SimDisk) -> None:
    log = create_log(open_directory(disk=disk), retention_ms=RETENTION_MS)
    assert not log.retention.roll_due(EXPIRED_US), "the segment is empty"
    append(log, batch(timestamp=NEWEST_US, producer=4, sequence=0, transactional=True))
    assert not log.retention.roll_due(EXPIRED_US), "the segment is not committed"
    log.set_high_watermark(log.log_end_offset)
    assert not log.retention.roll_due(EXPIRED_US), "the transaction is not decided"
    append(log, marker(committed=(4,)), now_us=NEWEST_US)
    assert not log.retention.roll_due(EXPIRED_US)
    log.set_high_watermark(log.log_end_offset)
    assert log.retention.roll_due(EXPIRED_US)


def test_no_segment_after_a_retained_one_is_rolled(disk: SimDisk) -> None:
    log = create_log(open_directory(disk=disk), retention_ms=RETENTION_MS, segment_ms=1)
    append(log, batch(timestamp=EXPIRED_US), now_us=1)
    append(log, batch(timestamp=NEWEST_US), now_us=EXPIRED_US)
    log.set_high_watermark(log.log_end_offset)
    assert len(log.segments) == 2 and not log.retention.roll_due(EXPIRED_US)
    assert log.retention.roll_due(EXPIRED_US + RETENTION_MS * 1000 + 1)


def test_idle_logs_are_checked_without_their_files(disk: SimDisk) -> None:
    log = aged(disk)
    roll(log, EXPIRED_US)
    commit_and_seal(log)
    log.retention.apply(EXPIRED_US)
    log._files.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    again.config = log.config
    again.set_high_watermark(again.log_end_offset)
    again.close()
    disk.fail_next("open", errno.EIO)
    assert not again.retention.roll_due(2**50)


def test_a_retry_is_recognized_after_its_segment_was_deleted(disk: SimDisk) -> None:
    log = create_log(open_directory(disk=disk), retention_ms=RETENTION_MS)
    sent = batch(timestamp=NEWEST_US, producer=4, sequence=0)
    assert append(log, sent, now_us=NEWEST_US) == OffsetRange(0, 3)
    log.set_high_watermark(log.log_end_offset)
    roll(log, EXPIRED_US)
    commit_and_seal(log)
    assert log.retention.apply(EXPIRED_US) == 1
    assert append(log, sent, now_us=EXPIRED_US) == OffsetRange(0, 3)
    log._files.services.checkpoint_now()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).logs()[0]
    assert (again.log_start_offset, again.log_end_offset) == (3, 4)
    assert append(again, sent, now_us=EXPIRED_US) == OffsetRange(0, 3)


@pytest.mark.parametrize(
    "settings",
    [{"retention_ms": -1}, {"cleanup_policy": "compact"}, {"restoring": True}],
    ids=["-1", "compact", "restoring"],
)
def test_without_retention_by_age_no_segment_is_rolled(disk: SimDisk, settings: dict[str, int | str | bool]) -> None:
    log = aged(disk)
    log.config = replace(log.config, **settings)
    assert not log.retention.roll_due(2**50)


def test_a_compaction_lag_rolls_the_active_segment_for_the_cleaner(disk: SimDisk) -> None:
    log = keyed_log(open_directory(disk=disk), max_compaction_lag_ms=1000)
    for number in range(6):
        append(log, keyed([(b"key %d" % (number % 2), number)]), now_us=5_000_000 + number)
    log.set_high_watermark(log.log_end_offset)
    assert clean(log) is None and not log.retention.roll_due(6_000_000) and log.retention.roll_due(6_000_001)
    roll(log, 6_000_001)
    commit_and_seal_keyed(log)
    assert log.cleaning.dirty_ratio(6_000_001) is not None
    assert clean(log, 6_000_001) is not None
    assert [one.offset for one in seen(log)] == [4, 5]
    assert not log.retention.roll_due(2**50)


def test_a_compacted_log_in_use_rolls_without_a_marker(disk: SimDisk) -> None:
    log = keyed_log(open_directory(disk=disk), max_compaction_lag_ms=1000)
    for now_us in (5_000_000, 5_900_000):
        append(log, keyed([(b"key", now_us)]), now_us=now_us)
    log.set_high_watermark(log.log_end_offset)
    assert not log.retention.roll_due(6_100_000), "the next batch may come soon"
    assert append(log, keyed([(b"key", 1)]), now_us=6_100_000) == OffsetRange(2, 3)
    assert [segment.base_offset for segment in log.segments] == [0, 2]
    log.set_high_watermark(log.log_end_offset)
    due_us = log.retention.due_us()
    assert due_us == 7_100_001 and log.retention.roll_due(due_us), "no further batch has come"
