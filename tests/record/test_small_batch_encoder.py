"""Tests that the encoder of small batches writes the same bytes as Arrow."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.record.codec import NO_TIMESTAMP, decode_batch, encode_batch
from sparklog.record.header import BatchHeader
from sparklog.record.message import read_batch_message
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.record.small_batch_encoder import (
    SmallBatchRecord,
    encode_small_batch,
    single_record_body,
    single_record_header,
)
from tests.record.batches import validate

BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=10)
RECORDS = st.lists(st.tuples(BYTES, BYTES, st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=20)


def by_arrow(records: list[SmallBatchRecord]) -> pa.RecordBatch:
    columns = [
        pa.array(found, field.type) for found, field in zip(zip(*records, strict=True), DEFAULT_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)


@settings(max_examples=200, deadline=None)
@given(records=RECORDS, timed=st.booleans())
def test_the_small_batch_body_equals_arrows(records: list[SmallBatchRecord], timed: bool) -> None:
    assert_as_arrow(records, timed)


@pytest.mark.parametrize("kind", ["bytes", "text", "both", "nulls", "all null"])
@pytest.mark.parametrize("count", [2, 33, 255, 256])
def test_many_records_of_a_kind_equal_arrows_encoding(count: int, kind: str) -> None:
    values: dict[str, Callable[[int], bytes | str | None]] = {
        "bytes": lambda number: b"%d" % number,
        "text": lambda number: f"\u00e9{number}",
        "both": lambda number: b"%d" % number if number % 2 else str(number),
        "nulls": lambda number: None if number % 3 == 1 else b"%d" % number,
        "all null": lambda _: None,
    }
    found = [values[kind](number) for number in range(count)]
    assert_as_arrow(
        [(key, value, None, number) for number, (key, value) in enumerate(zip(found, found[::-1], strict=True))], True
    )


def assert_as_arrow(records: list[SmallBatchRecord], timed: bool) -> None:
    header, encoded = encode_small_batch(records, schema_id=3, timed=timed)
    body = encoded.to_pybytes()
    event_time = "timestamp" if timed else None
    expected = encode_batch(by_arrow(records), schema_id=3, compression=None, event_time=event_time)
    found, wanted = read_batch_message(body), read_batch_message(memoryview(expected.body))
    assert found._replace(metadata_length=0) == wanted._replace(metadata_length=0)
    assert body[found.metadata_length :] == bytes(expected.body)[wanted.metadata_length :]
    assert header._replace(length=0, body_crc=0) == expected.header._replace(length=0, body_crc=0)


@settings(max_examples=50, deadline=None)
@given(records=RECORDS)
def test_a_leader_accepts_small_batches_and_readers_read_them(records: list[SmallBatchRecord]) -> None:
    few = encode_small_batch(records, schema_id=0, timed=True)
    validate(few)
    assert decode_batch(few.header, few.body, DEFAULT_SCHEMA).equals(by_arrow(records))


def test_without_an_event_time_the_header_has_no_timestamps() -> None:
    header = encode_small_batch([(None, b"v", None, 5)], schema_id=0, timed=False).header
    assert (header.min_timestamp, header.max_timestamp) == (NO_TIMESTAMP, NO_TIMESTAMP)


def test_the_last_microsecond_of_1969_is_a_time() -> None:
    few = encode_small_batch([(None, b"v", None, -1), (None, b"w", None, -1)], schema_id=0, timed=True)
    assert (few.header.min_timestamp, few.header.max_timestamp) == (-2, -1)
    validate(few)


@given(
    key=st.none() | st.binary(max_size=40) | st.text(max_size=40),
    value=st.none() | st.binary(max_size=400) | st.text(max_size=40),
    time_us=st.integers(-(2**63), 2**63 - 1) | st.just(-1),
    timed=st.booleans(),
    number=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1)),
)
def test_early_and_late_sequence_numbers_give_the_same_bytes(
    key: bytes | str | None, value: bytes | str | None, time_us: int, timed: bool, number: tuple[int, int, int]
) -> None:
    producer_id, epoch, sequence = number
    usual = encode_small_batch([(key, value, None, time_us)], schema_id=3, timed=timed)
    header = usual.header._replace(producer_id=producer_id, producer_epoch=epoch, first_sequence=sequence)
    body = single_record_body(key, value, time_us)
    alone = single_record_header(body, time_us, 3, timed, number)
    assert (alone.pack(), body) == (header.pack(), usual.body.to_pybytes())
    assert type(alone) is BatchHeader


def test_a_time_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_small_batch([(None, b"v", None, 2**63)], schema_id=0, timed=True)
