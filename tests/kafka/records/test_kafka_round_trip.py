"""Tests that record batches become rows, and rows become the batches that a plain writer makes, byte for byte."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.kafka.records import decode, encode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.records.decode import DecodedBatch, decode_batch
from sparklog.kafka.records.encode import encode_batch
from sparklog.record.codec import decode_batch as decode_stored
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA
from sparklog.record.validate import validate_batch
from tests.kafka.records.batches import produced, record_lists
from tests.kafka.records.reference import Record, read_batch, write_batch

MAX_BYTES = 16 << 20


def decoded(data: bytes) -> DecodedBatch:
    (view,) = read_batches(memoryview(data))
    return decode_batch(view, max_bytes=MAX_BYTES)


def records_of(rows: pa.RecordBatch) -> list[Record]:
    """Return the rows as records, converted one value at a time."""
    times = rows.column(3).cast(pa.int64()).to_pylist()
    return [
        Record(
            key,
            value,
            tuple((pair["key"], pair["value"]) for pair in headers or ()),
            -1 if time is None else time // 1000,
        )
        for key, value, headers, time in zip(
            rows.column(0).to_pylist(), rows.column(1).to_pylist(), rows.column(2).to_pylist(), times, strict=True
        )
    ]


@given(record_lists(), st.booleans(), st.integers(-5, 5))
def test_both_decoders_return_the_written_records(records: list[Record], few: bool, shift: int) -> None:
    batch = produced(records, base_timestamp=records[0].time_ms + shift)
    with patch.object(decode, "FEW_RECORDS", 10**9 if few else 0):
        rows = decoded(write_batch(batch)).rows
    rows.validate(full=True)
    assert rows.schema.equals(DEFAULT_SCHEMA)
    assert records_of(rows) == records


@given(record_lists(), st.booleans(), st.booleans(), st.sampled_from((None, "lz4", "zstd")))
def test_a_stored_batch_passes_the_leaders_checks(
    records: list[Record], few: bool, timed: bool, compression: str | None
) -> None:
    batch = produced(records, producer_id=7, producer_epoch=3, base_sequence=11, attributes=0x10)
    with patch.object(decode, "FEW_RECORDS", 10**9 if few else 0):
        found = decoded(write_batch(batch))
        header, body = found.stored(schema_id=4, timed=timed, compression=compression)
    validate_batch(
        header,
        memoryview(body),
        schema=DEFAULT_SCHEMA,
        schema_id=4,
        max_message_bytes=MAX_BYTES,
        event_time=DEFAULT_EVENT_TIME if timed else None,
    )
    assert header[5] == 7 and (header.producer_epoch, header.first_sequence) == (3, 11)
    assert records_of(decode_stored(header, memoryview(body), DEFAULT_SCHEMA)) == records


@given(record_lists(), st.booleans(), st.integers(0, 2**40), st.lists(st.integers(1, 5)), st.integers(0, 3))
def test_encoded_batches_equal_the_reference(
    records: list[Record], few: bool, base_offset: int, steps: list[int], gap: int
) -> None:
    rows = decoded(write_batch(produced(records))).rows
    distances = [0, *(steps[index % len(steps)] if steps else 1 for index in range(len(records) - 1))]
    offsets = base_offset + gap + np.cumsum(distances, dtype=np.int64)
    last = int(offsets[-1]) + gap
    expected = produced(
        records,
        base_offset=base_offset,
        leader_epoch=9,
        last_offset_delta=last - base_offset,
        producer_id=5,
        producer_epoch=2,
        base_sequence=1,
        attributes=0x10,
    )._replace(offsets=tuple(offsets.tolist()))
    with patch.object(encode, "FEW_RECORDS", 10**9 if few else 0):
        found = encode_batch(
            rows,
            base_offset=base_offset,
            leader_epoch=9,
            offsets=offsets,
            last_offset=last,
            producer_id=5,
            producer_epoch=2,
            base_sequence=1,
            transactional=True,
        )
    data = b"".join(found)
    assert data == write_batch(expected)
    assert read_batch(data) == expected


@pytest.mark.parametrize("count", [1, 3, 400])
@pytest.mark.parametrize("few", [True, False])
def test_slices_of_rows_are_encoded(count: int, few: bool) -> None:
    records = [
        Record(None if n % 3 == 0 else b"k%d" % n, b"v" * n, (("h", b"%d" % n),) * (n % 3), 1000 + n)
        for n in range(count + 5)
    ]
    rows = decoded(write_batch(produced(records))).rows.slice(2, count)
    with patch.object(encode, "FEW_RECORDS", 10**9 if few else 0):
        data = b"".join(encode_batch(rows, base_offset=42, leader_epoch=0))
    assert read_batch(data).records == tuple(records[2 : 2 + count])
    assert read_batch(data).offsets == tuple(range(42, 42 + count))
