"""Tests of projections with cached running CRCs: the sent checksum is that of the verified bytes, for any
projection."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record import projection
from sparklog.record.checksum import crc32c
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.message import read_metadata_length
from sparklog.record.projection import RunningCrcs, plan_projection, project_batch, projected_schema
from sparklog.record.schema import parse_schema, schema_message
from tests.record.test_projection import COMPRESSIONS, TYPES, long_batch, value_of


@contextmanager
def any_size() -> Iterator[None]:
    """Cache and use CRCs for batches of a few bytes, which replace long ones here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_KEPT_BYTES", "_COLUMN_BYTES", "RUN_BYTES"):
            patch.setattr(projection, name, 0)
        yield


def with_offsets(header: BatchHeader, body: bytes) -> tuple[BatchHeader, bytes]:
    """Return the batch with an offset array of 12 bytes after the message."""
    whole = body + bytes(range(12))
    header = header._replace(offset_array_length=12, flags=header.flags | Flag.OFFSET_ARRAY, body_crc=crc32c(whole))
    return header, whole + bytes(4)


def kept_of(header: BatchHeader, body: bytes | bytearray, schema: pa.Schema, column: str) -> RunningCrcs:
    found = project_batch(header, memoryview(body), plan_projection(schema, [column])).running
    assert found is not None
    return found


def checked(header: BatchHeader) -> int:
    return header.length + header.offset_array_length


@given(kinds=st.lists(TYPES, min_size=1, max_size=6), data=st.data())
def test_any_projection_may_use_another_ones_cached_crcs(kinds: list[pa.DataType], data: st.DataObject) -> None:
    schema = parse_schema(schema_message(pa.schema([pa.field(f"c{i}", kind) for i, kind in enumerate(kinds)])))
    dice = random.Random(data.draw(st.integers(0, 1000)))
    nulls = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    rows = data.draw(st.integers(1, 30))
    values = [{field.name: value_of(field.type, dice, nulls) for field in schema} for _ in range(rows)]
    batch = pa.RecordBatch.from_pylist(values, schema=schema)
    compression = data.draw(st.sampled_from(COMPRESSIONS))
    header, stored = encode_batch(batch, schema_id=0, compression=compression, event_time=None)
    body = stored.to_pybytes()
    if data.draw(st.booleans()):
        header, body = with_offsets(header, body)
    columns = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, unique=True))
    plan = plan_projection(schema, columns)
    with any_size():
        kept = kept_of(header, body, schema, data.draw(st.sampled_from(schema.names)))
        sent = project_batch(header, memoryview(body), plan, kept)
        assert sent.running is kept
        assert sent.header.body_crc == crc32c(sent.body[: checked(sent.header)])
        # The result equals that of the pass that verifies, and of a pass without a cache.
        first = project_batch(header, memoryview(body), plan)
        assert (first.header, first.body, first.running) == (sent.header, sent.body, kept)
    short = project_batch(header, memoryview(body), plan)
    assert (short.header, short.body, short.running) == (sent.header, sent.body, None)
    # bytes that were not verified are sent unchanged, for the reader to verify
    views = [piece for piece in sent.pieces if isinstance(piece, memoryview)]
    assert [bytes(view) for view in views] == [body[start : start + length] for start, length in sent.unread]
    found = decode_batch(sent.header, sent.body[: checked(sent.header)], projected_schema(schema, columns))
    found.validate(full=True)
    assert found.equals(batch.select([name for name in schema.names if name in columns]))

    # From here on the reader has to find the disk's damage: in the sent bytes, and only there.
    at = data.draw(st.integers(read_metadata_length(body), checked(header) - 1))
    rotten = bytearray(body)
    rotten[at] ^= 1 << data.draw(st.integers(0, 7))
    with any_size():
        damaged = project_batch(header, memoryview(rotten), plan, kept)
    assert damaged.header == sent.header
    if damaged.body == sent.body:
        return
    with pytest.raises(BrokerError, match="CRC32C") as caught:
        decode_batch(damaged.header, damaged.body[: checked(damaged.header)], projected_schema(schema, columns))
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


CHOICES = [["c1"], ["c1", "c2", "c3"], ["c0", "c2", "c4", "n"], ["n"], ["c0"], [f"c{i}" for i in range(7)]]


@pytest.mark.parametrize("array", [False, True])
def test_every_byte_of_a_column_counts_and_none_is_read_again(array: bool) -> None:
    """The batch is long enough without a reduced limit."""
    batch = long_batch()
    header, stored = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    body = stored.to_pybytes()
    if array:
        header, body = with_offsets(header, body)
    kept = kept_of(header, body, batch.schema, "c5")
    for columns in CHOICES:
        plan = plan_projection(batch.schema, columns)
        sent = project_batch(header, memoryview(body), plan, kept)
        first = project_batch(header, memoryview(body), plan)
        assert (first.header, first.body, first.unread) == (sent.header, sent.body, ())
        assert sent.running is kept and sent.unread
        assert sent.header.body_crc == crc32c(sent.body[: checked(sent.header)])
        nothing = bytearray(b"\xff" * len(body))
        length = read_metadata_length(body)
        nothing[:length] = body[:length]
        unread = project_batch(header, memoryview(nothing), plan, kept)
        assert unread.header == sent.header and unread.body != sent.body


def test_rotten_metadata_are_not_read() -> None:
    batch = long_batch()
    header, stored = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    kept = kept_of(header, stored.to_pybytes(), batch.schema, "c1")
    plan = plan_projection(batch.schema, ["c1"])
    rotten = bytearray(stored)
    for at in range(read_metadata_length(stored.to_pybytes())):
        rotten[at] ^= 16
        with pytest.raises(BrokerError, match="CRC32C") as caught:
            project_batch(header, memoryview(rotten), plan, kept)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
        rotten[at] ^= 16
    assert project_batch(header, memoryview(rotten), plan, kept).running is kept


def test_crcs_of_another_batch_are_not_used() -> None:
    """Cached CRCs may be of other positions or of another schema, so the batch is verified again."""
    batch = long_batch()
    header, stored = encode_batch(batch, schema_id=0, compression=None, event_time=None)
    plan = plan_projection(batch.schema, ["c1"])
    expected = project_batch(header, memoryview(stored), plan)
    longer = pa.RecordBatch.from_pydict({**batch.to_pydict(), "c1": [b"longer"] * batch.num_rows})
    more = batch.append_column("more", batch["n"])
    for other in (longer, more):
        another, body = encode_batch(other, schema_id=0, compression=None, event_time=None)
        kept = kept_of(another, body.to_pybytes(), other.schema, "c1")
        found = project_batch(header, memoryview(stored), plan, kept)
        assert found == expected and found.running == expected.running != kept


def test_small_columns_keep_no_cached_crcs() -> None:
    small = pa.RecordBatch.from_pydict({"a": [bytes(100)] * 2000})
    narrow = pa.RecordBatch.from_pydict({f"c{i}": [bytes(100)] * 50 for i in range(100)})
    comb = long_batch()
    many = [name for i, name in enumerate(narrow.schema.names) if i % 2]
    wide = pa.RecordBatch.from_pydict({f"c{i}": [bytes(500)] * 100 for i in range(40)})
    for batch, columns, keeps in [
        (small, ["a"], False),
        (narrow, ["c0"], False),
        (narrow, many, False),
        (wide, ["c0"], True),
        (wide, wide.schema.names[::2], False),  # verification takes less time than twenty runs
        (comb, ["c1"], True),
    ]:
        header, stored = encode_batch(batch, schema_id=0, compression=None, event_time=None)
        plan = plan_projection(batch.schema, columns)
        found = project_batch(header, memoryview(stored), plan)
        assert (found.running is not None) == keeps
        assert found.header.body_crc == crc32c(found.body)
    # the CRCs of one column do not help with twenty runs, whose bytes are verified then
    kept = kept_of(*encode_batch(wide, schema_id=0, compression=None, event_time=None), wide.schema, "c0")
    header, stored = encode_batch(wide, schema_id=0, compression=None, event_time=None)
    rotten = bytearray(stored)
    rotten[-1] ^= 1
    with pytest.raises(BrokerError, match="CRC32C"):
        project_batch(header, memoryview(rotten), plan_projection(wide.schema, wide.schema.names[::2]), kept)
