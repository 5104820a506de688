"""Tests of small batches that are validated without Arrow: every accepted batch is one that Arrow accepts."""

from __future__ import annotations

import struct
from itertools import accumulate

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.record import validate as validation
from sparklog.record.codec import EncodedBatch, encode_batch, header_times
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema, schema_message
from sparklog.record.small_batch_encoder import SmallBatchRecord, encode_small_batch
from sparklog.record.small_batch_validator import METADATA_BYTES, MOST_RECORDS, small_batch_times
from tests.record.batches import MAX_MESSAGE_BYTES, default_batch, encoded, resealed, validate
from tests.record.test_small_batch_encoder import RECORDS

ONE: list[SmallBatchRecord] = [(b"key", b"value", None, 5)]
WITHOUT_KEY: list[SmallBatchRecord] = [(None, b"value" * 20, None, 5)]
SEVERAL: list[SmallBatchRecord] = [(b"a", None, None, 3), (None, b"", None, -9), (b"", b"value", None, 2**63 - 1)]


def by_arrow(batch: EncodedBatch) -> BrokerError | None:
    """Return the result of the general validation of a batch."""
    try:
        validation._validate_by_arrow(
            batch.header, batch.body, DEFAULT_SCHEMA, max_message_bytes=MAX_MESSAGE_BYTES, event_time="timestamp"
        )
    except BrokerError as error:
        return error
    return None


@settings(max_examples=100, deadline=None)
@given(records=RECORDS)
def test_a_producers_small_batch_is_validated_without_arrow(records: list[SmallBatchRecord]) -> None:
    batch = encode_small_batch(records, schema_id=0, timed=True)
    times = [record[3] for record in records]
    assert small_batch_times(batch.body.to_pybytes(), len(records)) == (min(times), max(times))
    assert by_arrow(batch) is None
    validate(batch)


@pytest.mark.parametrize("records", [ONE, WITHOUT_KEY, SEVERAL])
def test_a_bit_flip_passes_only_where_arrow_accepts_it(records: list[SmallBatchRecord]) -> None:
    good = encode_small_batch(records, schema_id=0, timed=True)
    body = good.body.to_pybytes()
    taken = 0
    for place in range(8 * len(body)):
        turned = bytearray(body)
        turned[place // 8] ^= 1 << place % 8
        times = small_batch_times(bytes(turned), len(records))
        if times is None:
            continue
        assert place // 8 >= METADATA_BYTES
        taken += 1
        earliest, latest = header_times(*times)
        header = good.header._replace(min_timestamp=earliest, max_timestamp=latest)
        assert by_arrow(EncodedBatch(header, pa.py_buffer(bytes(turned)))) is None, place
    assert taken > 64  # at least in times and values


@settings(max_examples=300, deadline=None)
@given(records=RECORDS, data=st.data())
def test_overwritten_bytes_pass_only_where_arrow_accepts_them(
    records: list[SmallBatchRecord], data: st.DataObject
) -> None:
    good = encode_small_batch(records, schema_id=0, timed=True)
    body = bytearray(good.body.to_pybytes())
    at = data.draw(st.integers(METADATA_BYTES, len(body) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8))[: len(body) - at]
    body[at : at + len(patch)] = patch
    times = small_batch_times(bytes(body), len(records))
    if times is not None:
        earliest, latest = header_times(*times)
        header = good.header._replace(min_timestamp=earliest, max_timestamp=latest)
        assert by_arrow(EncodedBatch(header, pa.py_buffer(bytes(body)))) is None


def many_records(count: int) -> list[SmallBatchRecord]:
    """Generate keys, values and nulls of many lengths."""
    lengths = [(7 * number) % 23 for number in range(count)]
    keys = [None if number % 5 == 3 else bytes(length) for number, length in enumerate(lengths)]
    return [(key, b"v" * length, None, number) for number, (key, length) in enumerate(zip(keys, lengths, strict=True))]


@pytest.mark.parametrize("moved", [-1000, -1, 1, 1000])
def test_no_offset_of_a_batch_of_many_is_skipped(moved: int) -> None:
    records = many_records(MOST_RECORDS)
    good = encode_small_batch(records, schema_id=0, timed=True)
    body = good.body.to_pybytes()
    taken = 0
    offsets = struct.pack(f"<{len(records) + 1}i", *accumulate((len(r[1] or b"") for r in records), initial=0))
    first = body.index(offsets)
    for place in range(first, first + len(offsets), 4):
        turned = bytearray(body)
        turned[place : place + 4] = struct.pack("<i", struct.unpack_from("<i", body, place)[0] + moved)
        if small_batch_times(bytes(turned), len(records)) is not None:
            taken += 1
            assert by_arrow(EncodedBatch(good.header, pa.py_buffer(bytes(turned)))) is None, place
    # A change by one keeps the offsets in order if neighbors differ by as much. A much larger change rarely does.
    assert (taken > MOST_RECORDS // 2) == (abs(moved) == 1)
    assert small_batch_times(body, len(records)) == (0, MOST_RECORDS - 1)


def test_times_that_differ_from_the_header_are_refused() -> None:
    batch = encode_small_batch(ONE, schema_id=0, timed=True)
    with pytest.raises(BrokerError, match="timestamps 4 to 5"):
        validate(batch._replace(header=batch.header._replace(min_timestamp=4)))
    with pytest.raises(BrokerError, match="timestamps 5 to 5"):
        validate(batch, event_time=None)
    validate(encode_small_batch(ONE, schema_id=0, timed=False), event_time=None)


@pytest.mark.parametrize(
    "batch",
    [
        encoded(default_batch(10)),
        encoded(default_batch(2), "lz4"),
        encode_batch(default_batch(MOST_RECORDS + 1), schema_id=0, compression=None, event_time="timestamp"),
        encode_small_batch([(None, b"v", None, 1)] * (MOST_RECORDS + 1), schema_id=0, timed=True),
    ],
    ids=["headers", "compressed", "many", "many without headers"],
)
def test_unusual_batches_are_left_to_arrow(batch: EncodedBatch) -> None:
    assert small_batch_times(batch.body.to_pybytes(), batch.header.record_count) is None
    validate(batch)


def test_damaged_batches_get_arrows_error() -> None:
    """The offsets of a value decrease."""
    batch = encode_small_batch(SEVERAL, schema_id=0, timed=True)
    body = bytearray(batch.body.to_pybytes())
    at = body.index(b"value", METADATA_BYTES) - 8
    body[at : at + 4] = (-5).to_bytes(4, "little", signed=True)
    damaged = resealed(batch, bytes(body))
    with pytest.raises(BrokerError) as refused:
        validate(damaged)
    assert str(refused.value) == str(by_arrow(damaged))


def test_the_default_schema_is_a_single_object() -> None:
    assert parse_schema(schema_message(DEFAULT_SCHEMA)) is DEFAULT_SCHEMA
    longer = DEFAULT_SCHEMA.append(pa.field("more", pa.int32()))
    assert parse_schema(schema_message(longer)).equals(longer)
