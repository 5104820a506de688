"""Tests of the division of a produce body into batches, without decoding them."""

from __future__ import annotations

import pytest

from sparklog.broker.requests.produce import cut_batches
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.codec import encode_batch
from sparklog.record.header import Flag
from tests.broker.support import rows


def body(*sizes: int) -> tuple[memoryview, int]:
    batches = [encode_batch(rows(size), schema_id=0, compression=None, event_time="timestamp") for size in sizes]
    parts = [batch.header.pack() for batch in batches] + [bytes(batch.body) for batch in batches]
    return memoryview(b"".join(parts)), len(batches)


def test_batches_are_parsed_as_they_were_packed() -> None:
    packed, count = body(3, 5)
    batches = cut_batches(packed, count)
    assert [header.record_count for header, _ in batches] == [3, 5]
    assert [len(part) for _, part in batches] == [header.length for header, _ in batches]


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_body_that_is_too_short_is_reported(cut: int) -> None:
    packed, count = body(3)
    with pytest.raises(BrokerError) as caught:
        cut_batches(packed[:-cut], count)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
    assert "bytes" in caught.value.detail


def test_a_body_that_is_too_long_is_reported() -> None:
    packed, count = body(3)
    with pytest.raises(BrokerError) as caught:
        cut_batches(memoryview(bytes(packed) + bytes(8)), count)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_a_header_with_a_flipped_bit_is_corrupt() -> None:
    packed, count = body(3)
    flipped = bytearray(packed)
    flipped[60] ^= 1
    with pytest.raises(BrokerError) as caught:
        cut_batches(memoryview(flipped), count)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE and "CRC" in caught.value.detail


@pytest.mark.parametrize("flag", [Flag.CONTROL, Flag.FIRST_OF_SEGMENT, Flag.OFFSET_ARRAY])
def test_a_producer_cannot_send_a_flag_of_the_log(flag: Flag) -> None:
    batch = encode_batch(rows(1), schema_id=0, compression=None, event_time="timestamp")
    header = batch.header._replace(flags=batch.header.flags | flag)
    with pytest.raises(BrokerError) as caught:
        cut_batches(memoryview(header.pack() + bytes(batch.body)), 1)
    assert caught.value.code is ErrorCode.INVALID_RECORD


def test_a_body_without_batches_is_an_error() -> None:
    with pytest.raises(BrokerError) as caught:
        cut_batches(memoryview(b""), 0)
    assert caught.value.code is ErrorCode.INVALID_RECORD
