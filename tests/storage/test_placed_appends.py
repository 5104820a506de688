"""Tests of a log that a restore fills: batches keep their offsets and times on every replica."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparklog.errors import ErrorCode
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.header import unpack_headers
from sparklog.record.restored_batch import place_batch, place_nothing
from sparklog.storage.disk import read_file
from sparklog.storage.log import Log
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    SCHEMA,
    SMALL,
    TP,
    Batch,
    append,
    batch,
    commit_and_seal,
    config,
    create_log,
    follow,
    open_directory,
    read_numbers,
    read_slices,
    refused,
)


def placed(begin: int, end: int, *offsets: int, times: tuple[int, int] = (500, 900)) -> Batch:
    """Return records whose number is their offset."""
    columns = [pa.array(offsets, pa.int64()), pa.array(["x"] * len(offsets))]
    header, body = place_batch(
        pa.record_batch(columns, SCHEMA),
        np.array(offsets, dtype=np.int64),
        begin=begin,
        end=end,
        times=times,
        schema_id=0,
        compression=None,
    )
    return header, memoryview(body)


def restore(log: Log, *batches: Batch, now_us: int = 5_000_000) -> None:
    log.append_as_leader(batches, leader_epoch=1, now_us=now_us, placed=True)


def nothing(begin: int, end: int) -> list[Batch]:
    return [(header, memoryview(body)) for header, body in place_nothing(SCHEMA, begin=begin, end=end, schema_id=0)]


def offsets(log: Log) -> list[int]:
    """Return the time of every record, from headers and offset arrays."""
    found: list[int] = []
    for part in read_slices(log):
        bodies, at = memoryview(b"".join(part.bodies)), 0
        for header in unpack_headers(part.headers):
            found += offsets_of(header, bodies[at : at + header.stored_bytes]).tolist()
            at += header.stored_bytes
    return found


EXPECTED = [10, 12, 13, *range(20, 60), 70]


def fill(log: Log) -> None:
    """Fill the log from offset 10 on, with gaps before, between and after the records. It ends at 90."""
    restore(log, *nothing(0, 10))
    restore(log, placed(10, 15, 10, 12, 13), placed(15, 21, 20))
    for at in range(21, 60, 3):
        restore(log, placed(at, at + 3, at, at + 1, at + 2))
    restore(log, placed(60, 80, 70), *nothing(80, 90))


def test_restored_records_keep_their_offsets_and_log_ends(log: Log) -> None:
    fill(log)
    assert (log.log_start_offset, log.log_end_offset) == (0, 90)
    assert offsets(log) == read_numbers(log) == EXPECTED
    log.set_high_watermark(90)
    assert log.advance_log_start(10) == 10
    assert offsets(log) == EXPECTED


@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_restored_batches_keep_their_times(log: Log, kind: str) -> None:
    log.config = config(segment_bytes=1 << 20, message_timestamp_type=kind)
    restore(log, *nothing(0, 3), placed(3, 5, 3, 4, times=(500, 900)), placed(5, 6, 5, times=(700, 700)))
    headers = unpack_headers(log.read(0, max_bytes=1 << 20, end_offset=6).headers)
    assert [header.max_timestamp for header in headers] == [-1, 900, 700]
    assert [header.running_max for header in headers] == [-1, 900, 900]
    assert log.offset_for_time(701, end_offset=6) == (3, 900)


def test_a_batch_that_starts_before_the_end_changes_nothing(log: Log) -> None:
    fill(log)
    for at in (0, 60, 89, 91, 1000):
        with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
            restore(log, placed(at, at + 1, at))
    with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
        restore(log, placed(90, 92, 90), placed(93, 94, 93))
    assert (log.log_end_offset, offsets(log)) == (90, EXPECTED)
    append(log, batch(2, first=90))
    assert offsets(log) == [*EXPECTED, 90, 91]


def test_followers_are_byte_identical_and_survive_a_restart(disk: SimDisk, log: Log) -> None:
    fill(log)
    other = open_directory(Path("/other"), disk=disk)
    follower = create_log(other, segment_bytes=SMALL)
    follow(follower, log, max_bytes=1)
    assert commit_and_seal(log) == commit_and_seal(follower) == len(log.segments) - 1 > 2
    for segment in log.segments:
        for path in (segment.data_path, segment.index_path):
            assert read_file(disk, path) == read_file(disk, follower.directory / path.name)
    log.durability.flush()
    for boot_id, power_cut in (("boot-1", False), ("boot-2", True)):
        disk.restart(page_cache_lost=power_cut)
        found = open_directory(disk=disk, boot_id=boot_id).get(TP)
        assert found is not None and not found.findings
        assert (found.log_end_offset, offsets(found)) == (90, EXPECTED)


def test_retention_waits_for_the_end_of_a_restore(disk: SimDisk) -> None:
    """The restored records may be older than the topic's retention time."""
    log = create_log(open_directory(disk=disk), segment_bytes=SMALL, retention_ms=1)
    log.config = config(segment_bytes=SMALL, retention_ms=1, restoring="true")
    fill(log)
    commit_and_seal(log)
    now_us = 10**15
    assert log.retention.apply(now_us) == 0
    log.config = config(segment_bytes=SMALL, retention_ms=1)
    assert log.retention.apply(now_us) > 0
