"""Tests of the batch encoding: one message, zero copy, times, and refusal of a body that does not match its header."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP, decode_batch, encode_batch, event_time_range, header_times
from sparklog.record.header import Flag
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.record.batches import NESTED_SCHEMA, default_batch, encoded, nested_batch

COMPRESSIONS = [None, "none", "lz4", "zstd"]

ROWS = st.fixed_dictionaries(
    {
        "key": st.none() | st.binary(max_size=20),
        "value": st.none() | st.binary(max_size=50),
        "headers": st.none()
        | st.lists(
            st.none() | st.fixed_dictionaries({"key": st.none() | st.text(max_size=5), "value": st.binary(max_size=5)}),
            max_size=3,
        ),
        "timestamp": st.none() | st.integers(-(2**62), 2**62),
    }
)


@given(st.lists(ROWS, min_size=1, max_size=20), st.sampled_from(COMPRESSIONS), st.data())
@settings(max_examples=150)
def test_any_records_survive_encoding(rows: list[dict[str, Any]], compression: str | None, data: st.DataObject) -> None:
    whole = pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA)
    start = data.draw(st.integers(0, len(rows) - 1))
    batch = whole.slice(start)
    header, body = encoded(batch, compression)
    decoded = decode_batch(header, memoryview(body), DEFAULT_SCHEMA)
    assert decoded.equals(batch)
    assert decoded.schema.equals(DEFAULT_SCHEMA)
    assert body.size == header.length and body.size % 8 == 0
    assert header.record_count == header.offset_span == len(batch)
    times = [row["timestamp"] for row in rows[start:] if row["timestamp"] is not None]
    expected = header_times(min(times), max(times)) if times else (NO_TIMESTAMP, NO_TIMESTAMP)
    assert (header.min_timestamp, header.max_timestamp) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_nested_types_survive_encoding(compression: str | None) -> None:
    batch = nested_batch(50).slice(3, 40)
    header, body = encoded(batch, compression)
    assert decode_batch(header, body, NESTED_SCHEMA).equals(batch)


def test_the_header_has_the_fields_that_the_producer_knows() -> None:
    header, body = encode_batch(
        default_batch(7),
        schema_id=4,
        compression="zstd",
        event_time="timestamp",
        producer_id=12,
        producer_epoch=3,
        first_sequence=99,
        transactional=True,
    )
    assert (header.schema_id, header.producer_id, header.producer_epoch, header.first_sequence) == (4, 12, 3, 99)
    assert header.flags == Flag.ZSTD | Flag.TRANSACTIONAL
    assert header.body_crc == crc32c(body)
    assert (header.base_offset, header.position, header.append_time, header.leader_epoch) == (0, 0, 0, -1)


def test_uncompressed_columns_share_the_received_memory() -> None:
    header, body = encoded()
    received = np.frombuffer(b"12345678" + body.to_pybytes(), np.uint8)
    begin = received.ctypes.data
    before = pa.total_allocated_bytes()
    decoded = decode_batch(header, received.data[8:], DEFAULT_SCHEMA)
    assert pa.total_allocated_bytes() == before
    for column in decoded.columns:
        for buffer in column.buffers():
            assert buffer is None or begin <= buffer.address < begin + len(received)


def test_a_body_at_an_odd_address_is_readable() -> None:
    header, body = encoded()
    received = b"123" + body.to_pybytes()
    decoded = decode_batch(header, memoryview(received)[3:], DEFAULT_SCHEMA)
    assert decoded.equals(default_batch())
    assert decoded.column("timestamp").buffers()[1].address % 8 == 0


def test_length_and_crc_cover_the_offset_array_after_the_body() -> None:
    header, body = encoded()
    deltas = np.arange(10, dtype="<u4").tobytes()
    stored = body.to_pybytes() + deltas
    header = header._replace(offset_array_length=len(deltas), body_crc=crc32c(stored))
    assert decode_batch(header, stored, DEFAULT_SCHEMA).equals(default_batch())
    with pytest.raises(BrokerError, match="bytes found"):
        decode_batch(header, body, DEFAULT_SCHEMA)


def test_a_body_that_differs_from_its_header_is_corrupt() -> None:
    header, body = encoded()
    damaged = bytearray(body.to_pybytes())
    damaged[-1] ^= 1
    for broken_header, broken_body, reason in (
        (header, body.slice(0, body.size - 8), "bytes found"),
        (header, damaged, "computed"),
        (header._replace(record_count=11), body, "10 records found, 11 expected"),
    ):
        with pytest.raises(BrokerError, match=reason) as caught:
            decode_batch(broken_header, broken_body, DEFAULT_SCHEMA)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
    assert decode_batch(header, damaged, DEFAULT_SCHEMA, verify_crc=False).num_rows == 10


def test_bytes_that_are_not_a_message_are_corrupt() -> None:
    header, _ = encoded()
    junk = bytes(64)
    with pytest.raises(BrokerError) as caught:
        decode_batch(header._replace(length=64, body_crc=crc32c(junk)), junk, DEFAULT_SCHEMA)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.timestamp("s"), [5, None, -2], (-2_000_000, 5_000_000)),
        (pa.timestamp("ms", "Europe/Berlin"), [5], (5_000, 5_000)),
        (pa.timestamp("ns"), [-1, 1_999], (-1, 1)),
        (pa.date32(), [datetime.date(1970, 1, 2)], (86_400_000_000, 86_400_000_000)),
        (pa.date64(), [datetime.date(1970, 1, 2)], (86_400_000_000, 86_400_000_000)),
        (pa.timestamp("us"), [None], (NO_TIMESTAMP, NO_TIMESTAMP)),
        # This time is valid although its number also stands for a missing time.
        (pa.timestamp("us"), [-1, None, -1], (-2, -1)),
        (pa.timestamp("us"), [-5, -1], (-5, -1)),
        (pa.timestamp("us"), [-1, 5], (-1, 5)),
    ],
    ids=str,
)
def test_event_times_are_stored_in_microseconds(
    kind: pa.DataType, values: list[object], expected: tuple[int, int]
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], ["t"])
    assert event_time_range(batch, "t") == expected
    assert event_time_range(batch, None) == (NO_TIMESTAMP, NO_TIMESTAMP)


def test_unusable_event_times_are_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([2**62], pa.timestamp("s")), pa.array([1])], ["far", "number"])
    for column, reason in (("far", "exceed 64 bits"), ("number", "expected a timestamp"), ("absent", "None")):
        with pytest.raises(BrokerError, match=reason) as caught:
            event_time_range(batch, column)
        assert caught.value.code is ErrorCode.INVALID_RECORD


def test_an_empty_batch_and_unknown_compressions_are_refused() -> None:
    with pytest.raises(BrokerError, match="a batch of 0 records") as caught:
        encoded(default_batch(0))
    assert caught.value.code is ErrorCode.INVALID_RECORD
    with pytest.raises(BrokerError, match="'snappy', expected none, lz4, zstd") as caught:
        encoded(compression="snappy")
    assert caught.value.code is ErrorCode.INVALID_CONFIG


@given(st.binary(max_size=300), st.integers(0, 300))
def test_the_crc_of_views_is_that_of_their_bytes(data: bytes, start: int) -> None:
    assert crc32c(memoryview(data)[start:]) == crc32c(data[start:]) == crc32c(bytearray(data[start:]))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_only_the_rows_of_a_slice_are_written(compression: str | None) -> None:
    """The slice has the last rows of a large table, none of which has a list."""
    lists = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
    column = pa.array([[{"key": "k", "value": b"v"}]] * 20_000 + [None, [], None], lists)
    batch = pa.record_batch([column], ["headers"]).slice(20_000)
    header, body = encode_batch(batch, schema_id=0, compression=compression, event_time=None)
    assert header.length < 5000
    assert decode_batch(header, body, batch.schema).to_pylist() == batch.to_pylist()
