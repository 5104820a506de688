"""Appending, reading, rolling, looking up and cutting, on a disk in memory."""

from __future__ import annotations

import errno

import pytest

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import Flag, unpack_headers
from sparklog.storage.log import Log
from sparklog.storage.log_set import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    LOG_DIR,
    SCHEMAS,
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
)

SMALL = 1280  #: segment.bytes for four batches of ``fill``


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def directory(disk: SimDisk) -> LogDirectory:
    return open_directory(disk=disk)


@pytest.fixture
def log(directory: LogDirectory) -> Log:
    return create_log(directory, segment_bytes=SMALL)


def refused(code: ErrorCode):  # type: ignore[no-untyped-def]
    return pytest.raises(BrokerError, match=f"^{code.name}: ")


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
def test_reads_are_the_same_from_memory_and_from_files(disk: SimDisk, hot_bytes: int) -> None:
    log = create_log(open_directory(disk=disk, hot_bytes=hot_bytes), segment_bytes=SMALL)
    fill(log, 30)
    assert len(log.segments) > 5
    for sealed in (False, True):
        for start in range(log.log_end_offset):
            assert read_numbers(log, start) == list(range(start - start % 3, 90))
        if not sealed:
            assert commit_and_seal(log) == len(log.segments) - 1


@pytest.mark.parametrize("hot_bytes", range(1000, 6000, 250))
def test_memory_after_a_truncation_holds_the_new_batches(disk: SimDisk, hot_bytes: int) -> None:
    """Batches cut and appended anew leave memory in the order they came, with other boundaries than before."""
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


def test_a_batch_larger_than_a_segment_gets_its_own(log: Log) -> None:
    append(log, batch(1, text="y" * 5000))
    append(log, batch(1, text="z" * 5000))
    assert [segment.count for segment in log.segments] == [1, 1]


def test_leader_epochs(log: Log) -> None:
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


def test_timestamps_that_are_not_ordered(log: Log) -> None:
    stamps = [10, 50, 20, 40, 60, 5, 70, 30]
    for stamp in stamps:
        append(log, batch(1, timestamp=stamp))
    assert len(log.segments) > 1
    for wanted in range(80):
        expected = next(((at, stamp) for at, stamp in enumerate(stamps) if stamp >= wanted), None)
        assert log.offset_for_time(wanted, end_offset=8) == expected
    assert log.offset_for_time(60, end_offset=4) is None
    assert log.offset_for_time(60, end_offset=5) == (4, 60)


def test_timestamps_above_the_log_start(directory: LogDirectory) -> None:
    log = create_log(directory)
    for stamp in (100, 10, 20, 30):
        append(log, batch(1, timestamp=stamp))
    log.set_high_watermark(4)
    assert log.advance_log_start(1) == 1
    assert log.offset_for_time(15, end_offset=4) == (2, 20)
    assert log.offset_for_time(50, end_offset=4) is None


def test_append_time_counts_where_there_is_no_event_time(directory: LogDirectory) -> None:
    log = create_log(directory)
    append(log, batch(timestamp=NO_TIMESTAMP), now_us=777)
    append(log, batch(timestamp=-5), now_us=778)
    log.config = config(message_timestamp_type="LogAppendTime")
    append(log, batch(timestamp=12), now_us=779)
    headers = unpack_headers(log.read(0, max_bytes=1 << 20, end_offset=9).headers)
    assert [(header.min_timestamp, header.max_timestamp) for header in headers] == [(777, 777), (-5, -5), (779, 779)]


def test_the_last_microsecond_of_1969_is_no_missing_event_time(directory: LogDirectory) -> None:
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


def test_follower_refuses_what_does_not_continue_its_log(log: Log) -> None:
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
    # all or nothing: a good batch in front of a bad one is not kept
    refuses(second.headers + header.pack(), memoryview(bytes(second_body) * 2), "base offset 3 found, 6 expected")
    assert log.append_as_follower(second.headers, second_body) == 6


def test_follower_starts_at_the_leaders_first_segment(log: Log) -> None:
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


# --- cutting ----------------------------------------------------------------------------------------------------


def test_truncate_goes_to_the_batch_boundary_below(log: Log) -> None:
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
    """SimDisk raises when a file shrinks under a live map."""
    fill(log, 10)
    commit_and_seal(log)
    log._hot.clear()
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
def test_a_map_of_the_active_segment_below_the_high_watermark_survives(
    disk: SimDisk, log: Log, cut_at: int, survives: bool
) -> None:
    """Readers on the same host map what is committed, sealed or not; beyond that nobody may."""
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


def test_restart_at_throws_everything_away(disk: SimDisk, log: Log) -> None:
    fill(log, 10)
    commit_and_seal(log)
    log.restart_at(500)
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark, log.recovery_point) == (500, 500, 500, 0)
    assert disk.names(log.directory) == ["partition.json"]
    assert append(log, batch()) == OffsetRange(500, 503)


def test_a_follower_goes_on_in_a_sealed_segment_when_its_leader_does(log: Log) -> None:
    """The old leader rolled and sealed; the new one never saw the roll and goes on in the same segment."""
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


def test_retention_deletes_sealed_segments_only(directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=SMALL, retention_ms=1)
    fill(log, 20)
    assert log.apply_retention(10**15) == 0
    sealed = commit_and_seal(log, log.segments[3].base_offset)
    assert sealed == 3
    assert log.apply_retention(1_000) == 0
    assert log.apply_retention(10**15) == 3
    assert log.log_start_offset == log.segments[0].base_offset == log.recovery_point
    commit_and_seal(log)
    log.config = config(retention_bytes=log.segments[-1].size_bytes + log.segments[-2].size_bytes, retention_ms=-1)
    log.apply_retention(10**15)
    assert len(log.segments) == 2


def test_retention_frees_a_full_disk(disk: SimDisk, directory: LogDirectory) -> None:
    """Segments go only when a checkpoint says so, and a checkpoint takes room: that is kept in reserve."""
    log = create_log(directory, segment_bytes=SMALL, retention_ms=1)
    fill(log, 20)
    commit_and_seal(log, log.segments[3].base_offset)
    directory.checkpoint()
    disk.capacity_bytes = disk.used_bytes
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        fill(log, 1)
    assert log.apply_retention(10**15) == 3
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


def test_a_log_start_that_cannot_be_bridged_on_a_full_disk_waits(disk: SimDisk, directory: LogDirectory) -> None:
    """A follower's segments need not be sealed when its leader deletes them, so what they say of producers is in no
    snapshot yet. The disk is full, not broken."""
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
    assert append(again, batch(3, first=57, producer=7, sequence=57)) == OffsetRange(57, 60), "known, as it was before"


def test_retention_on_a_full_disk_counts_only_what_it_let_go(disk: SimDisk, directory: LogDirectory) -> None:
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
    assert found.apply_retention(10**15) == 0
    assert (found.log_start_offset, directory.offline) == (0, None)
    disk.capacity_bytes = None
    assert found.apply_retention(10**15) == 3


def test_a_schema_learned_on_a_full_disk_is_stored_before_the_first_batch_of_it(
    disk: SimDisk, directory: LogDirectory
) -> None:
    log = directory.create(TP, "t-1", schemas=SCHEMAS[:1], config=config(segment_bytes=SMALL))
    fill(log, 2)
    disk.capacity_bytes = disk.used_bytes
    log.add_schema(SCHEMAS[1])
    assert directory.offline is None
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        append(log, batch(3, first=6, schema_id=1))
    assert read_numbers(log) == list(range(6))
    disk.capacity_bytes = None
    append(log, batch(3, first=6, schema_id=1))
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None
    assert (again.schema_ids, again.log_end_offset, again.findings) == ((0, 1), 9, ())


# --- a bad disk -------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_the_append_and_leaves_the_log_as_it_was(disk: SimDisk, log: Log) -> None:
    fill(log, 2)
    for room in (0, 1, 90, 300, 350, 400):
        disk.capacity_bytes = disk.used_bytes + room
        used = disk.used_bytes
        with refused(ErrorCode.KAFKA_STORAGE_ERROR) as caught:
            append(log, batch(), batch(2, text="y" * 3000))
        assert "No space left" in str(caught.value)
        assert disk.used_bytes == used
        assert (log.log_end_offset, read_numbers(log)) == (6, list(range(6)))
    disk.capacity_bytes = None
    fill(log, 2)
    assert read_numbers(log) == list(range(12))


def test_a_full_disk_at_the_very_first_append(disk: SimDisk, log: Log) -> None:
    for room in range(0, 1600, 50):
        disk.capacity_bytes = disk.used_bytes + room
        try:
            fill(log, 1)
        except BrokerError as failure:
            assert failure.code == ErrorCode.KAFKA_STORAGE_ERROR
        else:
            break
        assert log.log_end_offset == 0 and log.segments == ()
    assert read_numbers(log) == [0, 1, 2]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_broken_disk_takes_the_directory_offline(disk: SimDisk, directory: LogDirectory, log: Log, code: int) -> None:
    fill(log, 2)
    disk.fail_next("write", code)
    with pytest.raises(StorageError):
        fill(log, 1)
    assert directory.offline is not None and str(TP) in directory.offline
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        create_log(directory)


def test_an_append_that_cannot_be_cut_back_takes_the_directory_offline(
    disk: SimDisk, directory: LogDirectory, log: Log
) -> None:
    fill(log, 2)
    disk.fail_next("write", errno.ENOSPC)
    disk.fail_next("truncate", errno.EIO)
    with pytest.raises(StorageError, match="could not be cut back"):
        fill(log, 1)
    assert directory.offline is not None


def test_a_failed_read_takes_the_directory_offline(disk: SimDisk) -> None:
    directory = open_directory(disk=disk, hot_bytes=0)
    log = create_log(directory)
    fill(log, 2)
    disk.fail_next("read", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        log.read(0, max_bytes=1, end_offset=6)
    assert directory.offline is not None


def test_flush_by_count_and_by_time(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, flush_messages=6, flush_ms=10)
    fill(log, 1)
    assert log.recovery_point == 0
    fill(log, 1)
    assert log.recovery_point == 6
    log.config = config(flush_ms=10)
    assert not log.flush_due(10**15)
    fill(log, 1)
    assert not log.flush_due(5_000_000 + 9_999)
    job = log.flush_due(5_000_000 + 10_000)
    assert job is not None
    fill(log, 1)  # after the job was made: not in it
    assert not log.flush_due(10**15), "two at a time"
    job.run()
    assert log.recovery_point == 6
    log.flush_finished(job)
    assert log.recovery_point == 9
    again = log.flush_due(10**15)
    assert again is not None and again.records == 3
    again.run()
    log.flush_finished(again)
    assert log.recovery_point == 12
    disk.restart(page_cache_lost=True)
    [found] = open_directory(disk=disk).load()
    assert read_numbers(found) == list(range(12))


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_flush_of_what_is_cut_meanwhile_counts_for_nothing(directory: LogDirectory, when: str) -> None:
    log = create_log(directory, segment_bytes=SMALL, flush_ms=10)
    fill(log, 30)
    job = log.flush_due(10**15)
    assert job is not None
    if when == "while":
        job.run()
    log.truncate(6)
    fill(log, 10)
    if when == "before":
        job.run()  # files are gone: no fault of the disk
    log.flush_finished(job)
    assert log.recovery_point == 0
    again = log.flush_due(10**15)
    assert again is not None, "what is left is not fsynced"
    again.run()
    log.flush_finished(again)
    assert log.recovery_point == log.log_end_offset


def test_a_flush_that_fails_says_so(disk: SimDisk, directory: LogDirectory) -> None:
    log = create_log(directory, flush_ms=10)
    fill(log, 1)
    job = log.flush_due(10**15)
    assert job is not None
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="Input/output"):
        job.run()


def test_open_files_are_bounded(disk: SimDisk) -> None:
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


def test_a_closed_log_says_so(log: Log) -> None:
    fill(log, 1)
    log.close()
    for use in (lambda: log.read(0, max_bytes=1, end_offset=3), lambda: fill(log, 1), lambda: log.truncate(0)):
        with refused(ErrorCode.KAFKA_STORAGE_ERROR):
            use()
