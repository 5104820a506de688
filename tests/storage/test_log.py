"""Tests of appends, reads, rolls and lookups, on a disk in memory."""

from __future__ import annotations

import pytest

from sparklog.errors import ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import Flag, unpack_headers
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    LOG_DIR,
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
    refused,
)


def test_an_empty_log_has_no_files(disk: SimDisk, log: Log) -> None:
    assert (log.log_start_offset, log.log_end_offset, log.last_epoch, log.size_bytes) == (0, 0, -1, 0)
    assert log.end_of_epoch(5) == EpochEnd(-1, 0)
    assert log.read(0, max_bytes=1, end_offset=0).batch_count == 0
    assert not disk.exists(log.directory)
    fill(log, 1)
    assert disk.names(log.directory) == [f"{0:020d}.arrow", f"{0:020d}.index", "partition.json"]


def test_append_assigns_offsets_and_read_returns_them(log: Log) -> None:
    assert append(log, batch(3), batch(2, first=3)) == OffsetRange(0, 5)
    assert append(log, batch(4, first=5)) == OffsetRange(5, 9)
    assert read_numbers(log) == list(range(9))
    headers = unpack_headers(log.read(0, max_bytes=1 << 20, end_offset=9).headers)
    assert [header.base_offset for header in headers] == [0, 3, 5]
    assert [bool(header.flags & Flag.FIRST_OF_SEGMENT) for header in headers] == [True, False, False]
    assert {header.leader_epoch for header in headers} == {1}


@pytest.mark.parametrize("hot_bytes", [0, 3000, 1 << 20])
def test_reads_from_memory_and_from_files_are_equal(disk: SimDisk, hot_bytes: int) -> None:
    log = create_log(open_directory(disk=disk, hot_bytes=hot_bytes), segment_bytes=SMALL)
    fill(log, 30)
    assert len(log.segments) > 5
    for sealed in (False, True):
        for start in range(log.log_end_offset):
            assert read_numbers(log, start) == list(range(start - start % 3, 90))
        if not sealed:
            assert commit_and_seal(log) == len(log.segments) - 1


@pytest.mark.parametrize("hot_bytes", [0, 3000])
def test_a_mapped_read_is_equal_and_survives_a_truncation(disk: SimDisk, hot_bytes: int) -> None:
    """SimDisk raises if a file shrinks under a live map."""
    log = create_log(open_directory(disk=disk, hot_bytes=hot_bytes))
    fill(log, 10)
    for start in range(log.log_end_offset):
        copied, mapped = (log.read(start, max_bytes=2000, end_offset=30, mapped=view) for view in (False, True))
        assert copied.batch_count == min(7, 10 - start // 3)
        assert [b"".join(copied.bodies), *copied[2:]] == [b"".join(mapped.bodies), *mapped[2:]]
        assert copied.headers == mapped.headers
    whole = log.read(0, max_bytes=100_000, end_offset=30, mapped=True)
    before = b"".join(whole.bodies)
    log.truncate(3)
    assert b"".join(whole.bodies) == before
    assert read_numbers(log) == [0, 1, 2]


def test_a_mapped_read_of_a_truncated_file_raises_an_error(disk: SimDisk) -> None:
    directory = open_directory(disk=disk, hot_bytes=0)
    log = create_log(directory)
    fill(log, 3)
    segment = log.segments[0]
    disk.truncate(disk.open(segment.data_path), segment.data_size - 8)
    assert log.read(0, max_bytes=1, end_offset=9, mapped=True).batch_count == 1
    with pytest.raises(StorageError, match="another process truncated the file"):
        log.read(6, max_bytes=1, end_offset=9, mapped=True)
    assert directory.offline is not None


@pytest.mark.parametrize("hot_bytes", range(1000, 6000, 250))
def test_memory_after_a_truncation_holds_the_new_batches(disk: SimDisk, hot_bytes: int) -> None:
    """Batches that are truncated and appended again leave memory in the order of the appends, with other boundaries
    than before."""
    log = create_log(open_directory(disk=disk, hot_bytes=hot_bytes))
    fill(log, 4)
    log.truncate(3)
    for size in (1, 2, 2, 1, 3, 1):
        append(log, batch(size, first=log.log_end_offset), leader_epoch=2)
        for start in range(log.log_end_offset):
            assert read_numbers(log, start)[-1] == log.log_end_offset - 1


def test_read_is_bounded_by_bytes_and_end(log: Log) -> None:
    fill(log, 3)
    stored = unpack_headers(log.read(0, max_bytes=1, end_offset=9).headers)[0].stored_bytes
    for max_bytes, batches in ((0, 1), (1, 1), (2 * stored - 1, 1), (2 * stored, 2), (3 * stored, 3)):
        assert log.read(0, max_bytes=max_bytes, end_offset=9).batch_count == batches
    for end_offset, batches in ((0, 0), (2, 0), (3, 1), (5, 1), (6, 2), (8, 2), (9, 3), (99, 3)):
        found = log.read(0, max_bytes=1 << 20, end_offset=end_offset)
        assert (found.batch_count, found.next_offset) == (batches, 3 * batches)
    assert log.read(4, max_bytes=1 << 20, end_offset=5) == (b"", [], 0, 0, 4)
    assert log.read(9, max_bytes=1, end_offset=99).batch_count == 0
    for offset in (-1, 10):
        with refused(ErrorCode.OFFSET_OUT_OF_RANGE) as caught:
            log.read(offset, max_bytes=1, end_offset=9)
        assert f"{offset} found, 0 to 9 expected" in str(caught.value)


def test_segments_roll_by_size_age_and_schema(directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL, segment_ms=1000)
    fill(log, 5)
    assert all(segment.data_size <= SMALL for segment in log.segments)
    by_size = len(log.segments)
    assert by_size > 1
    append(log, batch(), now_us=5_000_000 + 1_000_001)
    assert len(log.segments) == by_size + 1
    append(log, batch(), now_us=5_000_000 + 1_000_002)
    assert len(log.segments) == by_size + 1
    append(log, batch(schema_id=1), now_us=5_000_000 + 1_000_003)
    assert len(log.segments) == by_size + 2
    assert [segment.schema_id for segment in log.segments][-2:] == [0, 1]
    for earlier, later in zip(log.segments, log.segments[1:], strict=False):
        assert earlier.end_offset == later.base_offset


def test_a_batch_larger_than_a_segment_gets_its_own_segment(log: Log) -> None:
    append(log, batch(1, text="y" * 5000))
    append(log, batch(1, text="z" * 5000))
    assert [segment.count for segment in log.segments] == [1, 1]


def test_leader_epochs_have_start_offsets(log: Log) -> None:
    fill(log, 2, leader_epoch=2)
    fill(log, 1, leader_epoch=5)
    assert log.last_epoch == 5
    assert [log.end_of_epoch(epoch) for epoch in (1, 2, 4, 5, 9)] == [
        EpochEnd(-1, 0),
        EpochEnd(2, 6),
        EpochEnd(2, 6),
        EpochEnd(5, 9),
        EpochEnd(5, 9),
    ]
    with refused(ErrorCode.FENCED_LEADER_EPOCH):
        fill(log, 1, leader_epoch=4)
    assert log.log_end_offset == 9


def test_unordered_timestamps_are_searchable(log: Log) -> None:
    stamps = [10, 50, 20, 40, 60, 5, 70, 30]
    for stamp in stamps:
        append(log, batch(1, timestamp=stamp))
    assert len(log.segments) > 1
    for wanted in range(80):
        expected = next(((at, stamp) for at, stamp in enumerate(stamps) if stamp >= wanted), None)
        assert log.offset_for_time(wanted, end_offset=8) == expected
    assert log.offset_for_time(60, end_offset=4) is None
    assert log.offset_for_time(60, end_offset=5) == (4, 60)


def test_a_search_by_time_continues_after_a_batch(log: Log) -> None:
    for stamp in (10, 50, 20, 60):
        append(log, batch(1, timestamp=stamp))
    assert log.offset_for_time(20, end_offset=4, start_offset=2) == (2, 20)
    assert log.offset_for_time(21, end_offset=4, start_offset=2) == (3, 60)
    assert log.offset_for_time(70, end_offset=4, start_offset=1) is None


def test_the_batch_with_the_greatest_timestamp_is_the_first_of_equals(log: Log) -> None:
    assert log.greatest_time(end_offset=0) is None
    for stamp in (10, 60, 20, 60, 70, 5):
        append(log, batch(2, timestamp=stamp))
    assert len(log.segments) > 1
    expected = ((0, None), (2, (0, 10)), (3, (0, 10)), (4, (2, 60)), (8, (2, 60)), (10, (8, 70)), (12, (8, 70)))
    for end_offset, found in expected:
        assert log.greatest_time(end_offset=end_offset) == found
    assert log.greatest_time(end_offset=12, below_us=70) == (2, 60)
    assert log.greatest_time(end_offset=12, below_us=5) is None
    log.set_high_watermark(12)
    log.advance_log_start(9)
    assert log.greatest_time(end_offset=12) == (9, 70)


def test_timestamps_are_searched_above_the_log_start(directory: LogDirectory) -> None:
    log = create_log(directory)
    for stamp in (100, 10, 20, 30):
        append(log, batch(1, timestamp=stamp))
    log.set_high_watermark(4)
    assert log.advance_log_start(1) == 1
    assert log.offset_for_time(15, end_offset=4) == (2, 20)
    assert log.offset_for_time(50, end_offset=4) is None


def test_append_time_counts_without_an_event_time(directory: LogDirectory) -> None:
    log = create_log(directory)
    append(log, batch(timestamp=NO_TIMESTAMP), now_us=777)
    append(log, batch(timestamp=-5), now_us=778)
    log.config = config(message_timestamp_type="LogAppendTime")
    append(log, batch(timestamp=12), now_us=779)
    headers = unpack_headers(log.read(0, max_bytes=1 << 20, end_offset=9).headers)
    assert [(header.min_timestamp, header.max_timestamp) for header in headers] == [(777, 777), (-5, -5), (779, 779)]


def test_the_last_microsecond_of_1969_is_a_valid_event_time(directory: LogDirectory) -> None:
    log = create_log(directory)
    for earliest in (-5, -2):
        header, body = batch(timestamp=-1)
        append(log, (header._replace(min_timestamp=earliest), body), now_us=777)
    headers = unpack_headers(log.read(0, max_bytes=1 << 20, end_offset=9).headers)
    assert [(header.min_timestamp, header.max_timestamp) for header in headers] == [(-5, -1), (-2, -1)]


def test_follower_files_equal_the_leaders(directory: LogDirectory, disk: SimDisk, log: Log) -> None:
    other = SimDisk()
    follower = create_log(open_directory(disk=other), segment_bytes=1 << 20)
    for round_number in range(4):
        fill(log, 5, leader_epoch=round_number)
        append(log, batch(2, schema_id=round_number % 2, compression="zstd"), leader_epoch=round_number)
        follow(follower, log, max_bytes=700)
    for each in (log, follower):
        commit_and_seal(each)
    names = [name for name in disk.names(log.directory) if name.endswith((".arrow", ".index"))]
    assert len(names) > 8
    for name in names:
        assert other.read(other.open(log.directory / name), 1 << 20, 0) == disk.read(
            disk.open(log.directory / name), 1 << 20, 0
        )
    assert follower.end_of_epoch(2) == log.end_of_epoch(2)


def test_a_follower_refuses_batches_that_do_not_follow_its_log(log: Log) -> None:
    leader = create_log(open_directory(disk=SimDisk()), segment_bytes=SMALL)
    fill(leader, 6)
    first, second = (leader.read(offset, max_bytes=1, end_offset=18) for offset in (0, 3))
    body, second_body = (memoryview(found.bodies[0]) for found in (first, second))

    def refuses(headers: bytes, bodies: memoryview, words: str) -> None:
        before = (log.log_end_offset, log.last_epoch, log.size_bytes)
        with refused(ErrorCode.CORRUPT_MESSAGE) as caught:
            log.append_as_follower(headers, bodies)
        assert words in str(caught.value)
        assert (log.log_end_offset, log.last_epoch, log.size_bytes) == before

    refuses(second.headers, second_body, "base offset 3 found, 0 expected")
    log.append_as_follower(first.headers, body)
    refuses(first.headers, body, "base offset 0 found, 3 expected")
    refuses(second.headers, second_body[:-8], "bytes of body")
    refuses(second.headers, memoryview(bytes(second_body) + bytes(8)), "bytes of bodies")
    refuses(second.headers[:-1], second_body, "multiple of 96")
    flipped = bytearray(second_body)
    flipped[100] ^= 1
    refuses(second.headers, memoryview(flipped), "CRC32C")
    refuses(second.headers[:40] + b"\1" + second.headers[41:], second_body, "CRC32C")
    header = unpack_headers(second.headers)[0]
    refuses(header._replace(position=header.position + 8).pack(), second_body, "position")
    refuses(header._replace(leader_epoch=0).pack(), second_body, "leader epoch 0 found, 1 or later")
    refuses(header._replace(running_max=0).pack(), second_body, "running maximum")
    # all batches or none: a good batch before a bad one is not kept
    refuses(second.headers + header.pack(), memoryview(bytes(second_body) * 2), "base offset 3 found, 6 expected")
    assert log.append_as_follower(second.headers, second_body) == 6


def test_a_follower_starts_at_the_leaders_first_segment(log: Log) -> None:
    leader = create_log(open_directory(disk=SimDisk()))
    leader.restart_at(100)
    fill(leader, 4)
    leader.set_high_watermark(112)
    leader.advance_log_start(107)
    assert (leader.log_start_offset, leader.first_segment_offset) == (107, 100)
    log.restart_at(107)
    found = leader.read(107, max_bytes=1, end_offset=112)
    with refused(ErrorCode.CORRUPT_MESSAGE):
        log.append_as_follower(found.headers, memoryview(found.bodies[0]))
    log.restart_at(100)
    with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
        leader.read(100, max_bytes=1, end_offset=112)
    found = leader.read(100, max_bytes=1, end_offset=112, for_follower=True)
    assert log.append_as_follower(found.headers, memoryview(found.bodies[0])) == 103
    with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
        leader.read(99, max_bytes=1, end_offset=112, for_follower=True)


def test_an_unknown_schema_id_is_refused(log: Log) -> None:
    header, body = batch()
    with refused(ErrorCode.SCHEMA_OUTDATED):
        append(log, (header._replace(schema_id=7), body))
    assert log.log_end_offset == 0


def test_the_number_of_open_files_is_bounded(disk: SimDisk) -> None:
    directory = open_directory(disk=disk, hot_bytes=0, max_open_segments=3)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 30)
    before = len(disk._handles)
    for start in (0, 40, 80, 7, 50):
        assert read_numbers(log, start)[-1] == 89
    assert len(disk._handles) <= before + 6
    fill(log, 1)
    assert read_numbers(log) == list(range(93))
    assert disk.exists(LOG_DIR / str(TP))


def test_a_closed_log_raises_an_error(log: Log) -> None:
    fill(log, 1)
    log.close()
    for use in (lambda: log.read(0, max_bytes=1, end_offset=3), lambda: fill(log, 1), lambda: log.truncate(0)):
        with refused(ErrorCode.KAFKA_STORAGE_ERROR):
            use()
