"""Functions that make Arrow arrays without ``pa.array``, ``pa.scalar`` and ``Schema.empty_table``.

Those pyarrow functions, and ``Array.to_numpy``, load pandas, to recognize pandas' objects. That takes a fifth of a
second for the first table of a process, and 60 MB in a broker that would otherwise not load pandas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def array_of(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return ``values`` as an Arrow array of type ``kind``. The array has no nulls.

    The values must have the width of the type. If they are contiguous in memory, they are not copied.
    """
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def scalar_of(value: int, kind: pa.DataType) -> pa.Scalar:
    """Return ``value`` as an Arrow scalar of type ``kind``, which must have 64 bits.

    If the type is a time, ``value`` is in the unit of the type.
    """
    return array_of(np.array([value], np.int64), kind)[0]


def binary_of(values: Sequence[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """Return ``values`` as an array of ``kind``, which is a binary or string type. None means ``pa.binary()``.

    The values must have less than 2 GiB in total.
    """
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value or b"") for value in values], out=ends[1:])
    assert ends[-1] < 2**31
    there = None
    if None in values:
        there = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    buffers = [there, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(value or b"" for value in values))]
    return pa.Array.from_buffers(kind or pa.binary(), len(values), buffers)


def null_of(kind: pa.DataType) -> pa.Scalar:
    return pa.nulls(1, kind)[0]


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
