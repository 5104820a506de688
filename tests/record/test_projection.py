"""Tests of projected batches: the chosen columns and no others, for every type that a topic may have."""

from __future__ import annotations

import decimal
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.checksum import crc32c
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.projection import header_alone, plan_projection, project_batch, projected_schema
from sparklog.record.schema import parse_schema, schema_message
from tests.record.batches import NESTED_SCHEMA, encoded, nested_batch, resealed, validate

COMPRESSIONS = (None, "lz4", "zstd")

PLAIN = [
    pa.int8(),
    pa.uint64(),
    pa.float32(),
    pa.bool_(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(3),
    pa.decimal128(20, 3),
    pa.date32(),
    pa.time64("us"),
    pa.timestamp("us", tz="UTC"),
    pa.duration("ms"),
]


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        fields.map(lambda kinds: pa.struct([pa.field(f"f{i}", kind) for i, kind in enumerate(kinds)])),
    )


TYPES = st.recursive(st.sampled_from(PLAIN), _nested, max_leaves=5)


def value_of(kind: pa.DataType, dice: random.Random, nulls: float) -> Any:
    """Generate a value of ``kind``, or null."""
    if dice.random() < nulls:
        return None
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type, dice, nulls) for field in kind}
    if pa.types.is_map(kind):
        return [(f"k{i}", value_of(kind.item_type, dice, nulls)) for i in range(dice.randrange(3))]
    if pa.types.is_fixed_size_list(kind):
        return [value_of(kind.value_type, dice, nulls) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [value_of(kind.value_type, dice, nulls) for _ in range(dice.randrange(4))]
    if pa.types.is_boolean(kind):
        return dice.random() < 0.5
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "ä" * dice.randrange(20)
    if pa.types.is_fixed_size_binary(kind):
        return dice.randbytes(3)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return dice.randbytes(dice.randrange(40))
    number = dice.randrange(100)
    return decimal.Decimal(number) / 4 if pa.types.is_decimal(kind) else number


def projected(batch: pa.RecordBatch, header: BatchHeader, body: pa.Buffer, columns: list[str]) -> pa.RecordBatch:
    """Return the batch that a reader decodes, after all checks."""
    sent = project_batch(header, memoryview(body), plan_projection(batch.schema, columns))
    assert sent.header.flags == header.flags | Flag.PROJECTED
    assert len(sent.body) == sent.header.stored_bytes and len(sent.body) % 8 == 0
    found = decode_batch(sent.header, sent.body, projected_schema(batch.schema, columns))
    found.validate(full=True)
    return found


@given(kinds=st.lists(TYPES, min_size=1, max_size=6), data=st.data())
def test_any_columns_of_any_schema_can_be_chosen(kinds: list[pa.DataType], data: st.DataObject) -> None:
    schema = pa.schema([pa.field(f"c{i}", kind) for i, kind in enumerate(kinds)])
    schema = parse_schema(schema_message(schema))
    dice = random.Random(data.draw(st.integers(0, 1000)))
    rows = data.draw(st.integers(1, 30))
    nulls = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    values = [{field.name: value_of(field.type, dice, nulls) for field in schema} for _ in range(rows)]
    batch = pa.RecordBatch.from_pylist(values, schema=schema)
    columns = [name for name in schema.names if data.draw(st.booleans())]
    compression = data.draw(st.sampled_from(COMPRESSIONS))
    header, body = encode_batch(batch, schema_id=0, compression=compression, event_time=None)
    found = projected(batch, header, body, columns)
    assert found.equals(batch.select(columns)) and found.num_rows == rows


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_projection_sends_only_the_bytes_of_its_columns(compression: str | None) -> None:
    dice = random.Random(1)
    names = [f"c{i}" for i in range(20)]
    columns = {name: [dice.randbytes(100) for _ in range(500)] for name in names}
    batch = pa.RecordBatch.from_pydict(columns)
    header, body = encode_batch(batch, schema_id=0, compression=compression, event_time=None)
    for name in names:
        sent = project_batch(header, memoryview(body), plan_projection(batch.schema, [name]))
        assert sent.header.length < 0.055 * header.length
    whole = project_batch(header, memoryview(body), plan_projection(batch.schema, names))
    assert abs(whole.header.length - header.length) < 300


def test_no_columns_need_no_bytes() -> None:
    batch = nested_batch(7)
    header, body = encoded(batch)
    for sent in (project_batch(header, memoryview(body), plan_projection(batch.schema, [])), header_alone(header)):
        assert (sent.header.length, sent.body, sent.header.record_count) == (0, b"", 7)
        found = decode_batch(sent.header, sent.body, pa.schema([]))
        assert (found.num_rows, found.num_columns) == (7, 0)
    # a stored batch without bytes is damaged, for any projection
    with pytest.raises(BrokerError):
        decode_batch(header_alone(header).header._replace(flags=0), b"", pa.schema([]))


def test_a_projection_keeps_the_offset_array() -> None:
    batch = nested_batch(3)
    header, body = encoded(batch)
    offsets = b"\0\0\0\0\2\0\0\0\5\0\0\0"
    stored = resealed(encoded(batch), body.to_pybytes() + offsets).header
    stored = stored._replace(length=header.length, offset_array_length=12, flags=Flag.OFFSET_ARRAY)
    whole = memoryview(body.to_pybytes() + offsets + bytes(4))
    for columns in ([], ["id"], NESTED_SCHEMA.names):
        sent = project_batch(stored, whole, plan_projection(batch.schema, columns))
        assert sent.body[sent.header.length : sent.header.length + 12] == offsets
        assert len(sent.body) == sent.header.stored_bytes
        found = decode_batch(sent.header, sent.body[:-4], projected_schema(batch.schema, columns))
        assert found.equals(batch.select(columns))


def long_batch() -> pa.RecordBatch:
    """Return columns of 8 kB, and of 400 kB, which are read once for both checksums."""
    dice = random.Random(3)
    columns = {f"c{i}": [dice.randbytes(400 if i % 3 else 0) for _ in range(1000)] for i in range(7)}
    return pa.RecordBatch.from_pydict({**columns, "n": list(range(1000))})


@pytest.mark.parametrize(
    "columns", [["c1"], ["c1", "c2", "c3"], ["c0", "c2", "c4", "n"], ["n"], [f"c{i}" for i in range(7)]]
)
def test_long_columns_carry_their_own_checksum(columns: list[str]) -> None:
    batch = long_batch()
    header, body = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    assert projected(batch, header, body, columns).equals(batch.select(columns))  # decoding compares it


def test_long_columns_may_have_an_offset_array() -> None:
    batch = long_batch()
    plain, body = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    whole = body.to_pybytes() + bytes(range(12)) + bytes(4)
    header = plain._replace(offset_array_length=12, flags=Flag.OFFSET_ARRAY, body_crc=crc32c(whole[:-4]))
    sent = project_batch(header, memoryview(whole), plan_projection(batch.schema, ["c1", "c4"]))
    assert sent.header.body_crc == crc32c(sent.body[:-4]) and sent.body[-16:-4] == bytes(range(12))


def test_damage_anywhere_around_long_columns_is_found() -> None:
    batch = long_batch()
    header, body = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    damaged = bytearray(body)
    plan = plan_projection(batch.schema, ["c1", "c4"])
    places = [*range(0, 3000, 61), *range(3000, len(damaged), 100_003), len(damaged) - 1]
    for place in places:
        damaged[place] ^= 4
        with pytest.raises(BrokerError, match="CRC32C") as caught:
            project_batch(header, memoryview(damaged), plan)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
        damaged[place] ^= 4
    project_batch(header, memoryview(damaged), plan)


def test_damage_is_found_before_a_new_checksum_is_added() -> None:
    header, body = encoded(nested_batch(20))
    damaged = bytearray(body)
    damaged[-9] ^= 1  # in the last column
    with pytest.raises(BrokerError) as caught:
        project_batch(header, memoryview(damaged), plan_projection(NESTED_SCHEMA, ["id"]))
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
    sent = project_batch(header, memoryview(body), plan_projection(NESTED_SCHEMA, ["id"]))
    changed = bytearray(sent.body)
    changed[-1] ^= 1
    with pytest.raises(BrokerError):
        decode_batch(sent.header, changed, projected_schema(NESTED_SCHEMA, ["id"]))


def test_a_batch_of_another_schema_is_refused() -> None:
    header, body = encoded(nested_batch(5))
    other = pa.schema([pa.field("id", pa.int64())])
    with pytest.raises(BrokerError) as caught:
        project_batch(header, memoryview(body), plan_projection(other, ["id"]))
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_projected_markers_are_headers() -> None:
    header, body = encode_marker(Marker(committed=((1, 0),)), NESTED_SCHEMA, schema_id=0)
    sent = project_batch(header, memoryview(body), plan_projection(NESTED_SCHEMA, ["id"]))
    assert sent.body == b"" and sent.header.flags == Flag.CONTROL | Flag.PROJECTED


def test_equal_batches_have_equal_bytes() -> None:
    header, body = encoded(nested_batch(4), "zstd")
    plan = plan_projection(NESTED_SCHEMA, ["id", "tags"])
    assert project_batch(header, memoryview(body), plan) == project_batch(header, memoryview(bytes(body)), plan)


def test_a_producer_cannot_send_a_projected_batch() -> None:
    batch = encoded(nested_batch(4))
    with pytest.raises(BrokerError) as caught:
        validate(batch._replace(header=batch.header._replace(flags=Flag.PROJECTED)), NESTED_SCHEMA)
    assert caught.value.code is ErrorCode.INVALID_RECORD


def test_metadata_may_be_longer_than_a_long_column() -> None:
    column = pa.array([1, 2], pa.int8())
    batch = pa.RecordBatch.from_arrays([column] * 6000, [f"c{i}" for i in range(6000)])
    header, body = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    names = batch.schema.names[:-1]
    sent = project_batch(header, memoryview(body), plan_projection(batch.schema, names))
    assert len(sent.pieces[0]) > 256 * 1024
    assert decode_batch(sent.header, sent.body, projected_schema(batch.schema, names)).equals(batch.select(names))
