"""Tests of batch headers: whole batches are found, other bytes are refused, and two fields are changed in place."""

from __future__ import annotations

import pickle

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.records.batch_view import placed_batch, read_batches, verify_crc
from sparklog.kafka.records.control import encode_control_batch
from sparklog.kafka.records.invalid import InvalidRecords, RecordError
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, read_batch, write_batch

BATCH = write_batch(produced([Record(b"k", b"v", (), 5)], producer_id=8, producer_epoch=1, base_sequence=3))


def test_batches_that_follow_each_other_are_found() -> None:
    first, second = read_batches(memoryview(BATCH + BATCH))
    assert bytes(first.data) == bytes(second.data) == BATCH
    assert (first.producer_id, first.producer_epoch, first.base_sequence, first.record_count) == (8, 1, 3, 1)
    verify_crc(first)


@pytest.mark.parametrize("cut", [1, 12, 17, 61, len(BATCH) - 1])
def test_an_incomplete_batch_is_refused(cut: int) -> None:
    with pytest.raises(InvalidRecords) as refused:
        read_batches(memoryview(BATCH + BATCH[:cut]))
    assert refused.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("length", [-1, 0, 48, 2**31 - 1])
def test_an_impossible_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidRecords) as refused:
        read_batches(memoryview(BATCH[:8] + length.to_bytes(4, "big", signed=True) + BATCH[12:]))
    assert refused.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("magic", [0, 1, 3, 255])
def test_other_format_versions_are_refused(magic: int) -> None:
    with pytest.raises(InvalidRecords, match=f"version {magic} found") as refused:
        read_batches(memoryview(BATCH[:16] + bytes([magic]) + BATCH[17:]))
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_a_changed_byte_breaks_the_crc() -> None:
    (view,) = read_batches(memoryview(BATCH[:-1] + b"\x01"))
    with pytest.raises(InvalidRecords) as refused:
        verify_crc(view)
    assert refused.value.code is ErrorCode.CORRUPT_MESSAGE


def test_a_batch_is_placed_without_a_new_crc() -> None:
    data = b"".join(placed_batch(memoryview(BATCH), base_offset=2**40, leader_epoch=6))
    found = read_batch(data)
    assert (found.base_offset, found.leader_epoch, found.offsets) == (2**40, 6, (2**40,))
    assert data[16:] == BATCH[16:]


@pytest.mark.parametrize(("committed", "kind"), [(True, 1), (False, 0)])
def test_a_control_batch_has_one_record_with_kafkas_key(committed: bool, kind: int) -> None:
    data = encode_control_batch(
        offset=9,
        leader_epoch=4,
        committed=committed,
        timestamp_ms=1000,
        producer_id=7,
        producer_epoch=2,
        coordinator_epoch=3,
    )
    found = read_batch(data)
    assert (found.base_offset, found.leader_epoch, found.attributes) == (9, 4, 0x30)
    assert (found.producer_id, found.producer_epoch, found.base_sequence) == (7, 2, -1)
    assert found.records == (Record(bytes([0, 0, 0, kind]), bytes([0, 0, 0, 0, 0, 3]), (), 1000),)


def test_a_filler_has_no_producer() -> None:
    found = read_batch(encode_control_batch(offset=9, leader_epoch=4, committed=True, timestamp_ms=-1))
    assert (found.producer_id, found.attributes, found.max_timestamp) == (-1, 0x20, -1)


def test_the_error_survives_pickling() -> None:
    error = InvalidRecords(ErrorCode.INVALID_RECORD, "one", [RecordError(3, "why")])
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.detail, again.record_errors) == (error.code, "one", (RecordError(3, "why"),))
