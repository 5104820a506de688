"""The encoding of the keys of typed topics as bytes, for the partitioner (murmur2) and for the cleaner.

A key of one column is encoded by its type:

- text and bytes: unchanged, which equals the output of Kafka's StringSerializer and ByteArraySerializer;
- numbers, dates, times, decimals: big-endian, with the width of the type, in two's complement or IEEE 754, which equals
  the output of Kafka's Short-, Integer-, Long-, Float- and DoubleSerializer; but -0.0 becomes 0.0, and all NaNs become
  the same NaN;
- booleans: one byte, 0 or 1.

A key of several columns has for each column, in order, its length as a big-endian i32 and its bytes, or the length -1
for a null. A key is null if all its columns are null. The encoding must never change, because a change would move keys
to other partitions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.layout import is_variable_binary
from sparklog.record.partitioner import NO_PARTITION, partitions_for_keys
from sparklog.record.schema import DEFAULT_SCHEMA

_NULL_LENGTH = (-1).to_bytes(4, "big", signed=True)


def partitions_of(batch: pa.RecordBatch, key_columns: Sequence[str], n: int) -> npt.NDArray[np.int32]:
    """Return the partition of each record, from 0 to ``n`` - 1, or NO_PARTITION for a record without a key.

    Raises:
        BrokerError: SCHEMA_MISMATCH if a key column is missing or nested.
    """
    if not key_columns:
        return np.full(batch.num_rows, NO_PARTITION, np.int32)
    return partitions_for_keys(encode_keys(batch, key_columns), n)


def encode_keys(batch: pa.RecordBatch, key_columns: Sequence[str]) -> pa.Array:
    """Return the key of each record, as binary or large binary. A null key is null.

    Raises:
        BrokerError: SCHEMA_MISMATCH if a key column is missing or nested.
    """
    columns = [_column_bytes(batch, name) for name in key_columns]
    if len(columns) == 1:
        return columns[0]
    parts = []
    for column in columns:
        parts += [_lengths(column), pc.fill_null(column, b"")]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    absent = columns[0].is_null()
    for column in columns[1:]:
        absent = pc.and_(absent, column.is_null())
    return pc.if_else(absent, pa.scalar(None, joined.type), joined)


def absent_keys(batch: pa.RecordBatch, key_columns: Sequence[str]) -> int:
    """Return the number of records that have no key, that is, nulls in all key columns."""
    nulls = [batch.column(name).null_count for name in key_columns]
    if not nulls or 0 in nulls:
        return 0 if nulls else batch.num_rows
    absent = batch.column(key_columns[0]).is_null()
    for name in key_columns[1:]:
        absent = pc.and_(absent, batch.column(name).is_null())
    return int(pc.sum(absent).as_py() or 0)


def tombstones(batch: pa.RecordBatch, key_columns: Sequence[str]) -> npt.NDArray[np.bool_] | None:
    """Return for each record whether it is a tombstone. Return None if no record is a tombstone.

    In a default topic a record without a value is a tombstone. In a typed topic it is a record with nulls in all
    columns that are not key columns. A topic with only key columns has no tombstones.
    """
    others = [name for name in batch.schema.names if name not in key_columns]
    if batch.schema.equals(DEFAULT_SCHEMA):
        others = ["value"]
    if not others or 0 in [batch.column(name).null_count for name in others]:
        return None
    found = np.ones(batch.num_rows, np.bool_)
    for name in others:
        found &= batch.column(name).is_null().to_numpy(zero_copy_only=False)
    return found


def _column_bytes(batch: pa.RecordBatch, name: str) -> pa.Array:
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"key column {name!r} is not among {batch.schema.names}")
    column = batch.column(index)
    kind = column.type
    if is_variable_binary(kind) or types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    if types.is_nested(kind) or types.is_dictionary(kind):
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"key column {name!r} is {kind}, expected a type that is not nested"
        )
    return _big_endian(column)


def _big_endian(column: pa.Array) -> pa.Array:
    if types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif types.is_floating(column.type):
        column = _canonical(column)
    width = column.type.bit_width // 8
    values = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
    turned = np.ascontiguousarray(values.reshape(-1, width)[:, ::-1])
    fixed = pa.Array.from_buffers(pa.binary(width), len(column), [None, pa.py_buffer(turned)]).cast(pa.large_binary())
    return pc.if_else(column.is_null(), pa.scalar(None, pa.large_binary()), fixed) if column.null_count else fixed


def _canonical(column: pa.Array) -> pa.Array:
    values = np.array(pc.fill_null(column, 0).to_numpy(zero_copy_only=False))
    values += 0.0  # -0.0 + 0.0 is 0.0
    values[np.isnan(values)] = np.nan
    return pa.array(values, column.type, mask=column.is_null().to_numpy(zero_copy_only=False))


def _lengths(column: pa.Array) -> pa.Array:
    counts = np.asarray(pc.fill_null(pc.binary_length(column), -1).to_numpy(zero_copy_only=False)).astype(">i4")
    assert not column.null_count or counts.tobytes().count(_NULL_LENGTH)
    return pa.Array.from_buffers(pa.binary(4), len(counts), [None, pa.py_buffer(counts.tobytes())]).cast(
        pa.large_binary()
    )
