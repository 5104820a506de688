"""Tests of the ranges that readers of mapped files and readers of headers receive, and that no truncation changes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import HEADER_BYTES, unpack_headers
from sparklog.storage.disk import RealDisk
from sparklog.storage.log import Log
from tests.storage.batches import SCHEMA, SMALL, WIDER, create_log, fill, open_directory


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = create_log(open_directory(tmp_path, disk=RealDisk()), segment_bytes=SMALL)
    fill(log, 10)  # three records each
    return log


def test_a_local_read_gets_whole_batches_of_one_segment(log: Log) -> None:
    first, second, *_ = log.segments
    assert first.end_offset == 12 and second.end_offset == 24
    for offset in (0, 4, 11):
        found = log.hand_out(offset, end_offset=30)
        assert found is not None
        assert (found.data_path, found.index_path) == (first.data_path, first.index_path)
        assert (found.first, found.last, found.next_offset) == (offset // 3, 4, 12)
        assert found.data_bytes == first.data_size
    # the end is inside a batch, which is not returned
    found = log.hand_out(13, end_offset=20)
    assert found is not None
    assert (found.first, found.last, found.next_offset) == (0, 2, 18)
    last = unpack_headers(found.index_path.read_bytes()[HEADER_BYTES : 2 * HEADER_BYTES])[0]
    assert found.data_bytes == last.position + last.stored_bytes
    for offset, end in ((15, 15), (15, 17), (30, 30)):
        assert log.hand_out(offset, end_offset=end) is None
    with pytest.raises(BrokerError) as caught:
        log.hand_out(31, end_offset=31)
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize("handed_out", [True, False])
def test_a_range_lent_to_a_reader_is_not_truncated_in_place(log: Log, handed_out: bool) -> None:
    found = log.hand_out(27, end_offset=30)
    assert found is not None
    with found.data_path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), found.data_bytes, access=mmap.ACCESS_READ)
    before = found.data_path.read_bytes()
    inode = found.data_path.stat().st_ino
    if not handed_out:
        log.offsets.served_end = 0
    log.truncate(27)
    assert (found.data_path.stat().st_ino != inode) == handed_out
    if handed_out:  # otherwise the process would die here
        assert bytes(mapped) == before
    mapped.close()


def test_headers_can_be_read_alone(log: Log) -> None:
    found = log.read_headers(4, max_batches=100, end_offset=30)
    assert (found.batch_count, found.next_offset, found.bodies) == (3, 12, [])
    whole = log.read(4, max_bytes=1 << 20, end_offset=30)
    assert (found.headers, found.body_bytes) == (whole.headers, whole.body_bytes)
    assert log.read_headers(4, max_batches=2, end_offset=30).next_offset == 9
    assert log.read_headers(13, max_batches=9, end_offset=17).batch_count == 1
    assert log.read_headers(30, max_batches=9, end_offset=30).batch_count == 0
    assert log.read_headers(15, max_batches=9, end_offset=17).next_offset == 15


def test_schemas_are_returned_by_id(log: Log) -> None:
    assert log.schema(0) == SCHEMA and log.schema(1) == WIDER
    with pytest.raises(BrokerError) as caught:
        log.schema(2)
    assert caught.value.code is ErrorCode.SCHEMA_OUTDATED
