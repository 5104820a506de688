"""Tests of batches with an offset array: good ones pass the leader's checks and are read back, bad ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.record.checksum import crc32c
from sparklog.record.codec import EncodedBatch, decode_batch
from sparklog.record.compacted_batch import MAX_SPAN, offsets_of
from sparklog.record.header import Flag
from sparklog.record.restored_batch import place_batch, place_nothing
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.record.validate import validate_placed_batch
from tests.record.batches import MAX_MESSAGE_BYTES, default_batch, nested_batch

TIMES = (1_700_000_000_000_000, 1_700_000_000_000_009)


def check(batch: EncodedBatch, schema: pa.Schema = DEFAULT_SCHEMA, event_time: str | None = "timestamp") -> None:
    validate_placed_batch(
        batch.header,
        memoryview(batch.body),
        schema=schema,
        schema_id=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        event_time=event_time,
    )


def placed(offsets: list[int] | None = None, *, begin: int = 100, end: int = 150) -> EncodedBatch:
    """Return ten records of the default schema, by default with gaps everywhere."""
    chosen = np.array(offsets or [103, 104, 105, 110, 111, 120, 121, 122, 140, 141], dtype=np.int64)
    return place_batch(default_batch(10), chosen, begin=begin, end=end, times=TIMES, schema_id=0, compression=None)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    behind=st.integers(0, 5),
    begin=st.integers(0, 2**40),
    compression=st.sampled_from([None, "lz4", "zstd"]),
)
def test_offsets_and_records_survive_the_restore_encoding(
    gaps: list[int], behind: int, begin: int, compression: str | None
) -> None:
    offsets = begin + np.cumsum(np.array(gaps, dtype=np.int64)) + np.arange(len(gaps))
    records = nested_batch(len(gaps))
    end = int(offsets[-1]) + 1 + behind
    batch = place_batch(records, offsets, begin=begin, end=end, times=(5, 9), schema_id=0, compression=compression)
    check(batch, records.schema, None)
    assert (batch.header.base_offset, batch.header.next_offset) == (begin, end)
    assert bool(batch.header.flags & Flag.OFFSET_ARRAY) == (sum(gaps) > 0)
    stored = memoryview(batch.body)
    assert len(stored) == batch.header.stored_bytes
    assert offsets_of(batch.header, stored).tolist() == offsets.tolist()
    assert decode_batch(batch.header, stored, records.schema).equals(records)


@pytest.mark.parametrize("span", [1, MAX_SPAN - 1, MAX_SPAN, 2 * MAX_SPAN + 7])
def test_offsets_without_records_are_covered_by_adjacent_batches(span: int) -> None:
    batches = place_nothing(DEFAULT_SCHEMA, begin=5, end=5 + span, schema_id=0)
    at = 5
    for batch in batches:
        check(batch)
        assert batch.header.base_offset == at
        at = batch.header.next_offset
    assert at == 5 + span
    assert not place_nothing(DEFAULT_SCHEMA, begin=5, end=5, schema_id=0)


def test_a_record_without_a_time_has_its_batchs_largest() -> None:
    times = pa.array([None, TIMES[0] + 1], DEFAULT_SCHEMA.field("timestamp").type)
    records = default_batch(2).set_column(3, DEFAULT_SCHEMA.field(3), times)
    offsets = np.array([4, 9], dtype=np.int64)
    for times_said, is_fine in (((TIMES[0], TIMES[1]), True), ((TIMES[0], TIMES[0]), False)):
        batch = place_batch(records, offsets, begin=4, end=10, times=times_said, schema_id=0, compression=None)
        if is_fine:
            check(batch)
        else:
            with pytest.raises(BrokerError, match="INVALID_RECORD"):
                check(batch)


def with_array(change: Callable[[np.ndarray], None]) -> EncodedBatch:
    """Return a batch with a changed offset array and a matching checksum."""
    good = placed()
    body = bytearray(good.body)
    change(np.frombuffer(body, "<u4", 10, good.header.length))
    return EncodedBatch(good.header._replace(body_crc=crc32c(bytes(body))), pa.py_buffer(bytes(body)))


def fall(deltas: np.ndarray) -> None:
    deltas[4] = deltas[3]


def leave(deltas: np.ndarray) -> None:
    deltas[9] = 50


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (with_array(fall), "offset array does not fit"),
        (with_array(leave), "offset array does not fit"),
        (placed()._replace(header=placed().header._replace(offset_span=9)), "INVALID_RECORD"),
        (placed()._replace(header=placed().header._replace(offset_array_length=0)), "CORRUPT_MESSAGE"),
        (placed()._replace(header=placed().header._replace(producer_id=7)), "INVALID_RECORD"),
        (placed()._replace(header=placed().header._replace(flags=int(Flag.OFFSET_ARRAY | Flag.CLEANED))), "flags"),
        (placed()._replace(header=placed().header._replace(min_timestamp=-1, max_timestamp=-1)), "INVALID_RECORD"),
        (placed()._replace(header=placed().header._replace(schema_id=1)), "SCHEMA_OUTDATED"),
        (placed()._replace(body=pa.py_buffer(bytes(placed().body)[:-8])), "CORRUPT_MESSAGE"),
        (placed()._replace(body=pa.py_buffer(bytes(placed().body)[:-1] + b"\1")), "CRC32C"),
        (
            EncodedBatch(
                place_nothing(DEFAULT_SCHEMA, begin=0, end=3, schema_id=0)[0].header._replace(offset_span=0),
                place_nothing(DEFAULT_SCHEMA, begin=0, end=3, schema_id=0)[0].body,
            ),
            "INVALID_RECORD",
        ),
    ],
)
def test_a_contradictory_restored_batch_is_refused(bad: EncodedBatch, why: str) -> None:
    check(placed())
    with pytest.raises(BrokerError, match=why):
        check(bad)
