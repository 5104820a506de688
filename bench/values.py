"""The written records, and the check that every record was read: values of one size, each with its number.

A value is its number in 16 decimal digits, then ``x`` up to its size. So Spark creates the same values with two
functions, and a check of the columns finds missing, duplicate and damaged values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.measure import Lost
from sparklog import Consumer

if TYPE_CHECKING:
    from bench.sides import Side

DIGITS = 16
FILLER = b"x"
_BATCH_ROWS = 100_000
Matrix = npt.NDArray[np.uint8]


def matrix(count: int, size: int) -> Matrix:
    """Return the values 0 to ``count`` - 1, one per row."""
    values = np.full((count, size), FILLER[0], dtype=np.uint8)
    left = np.arange(count, dtype=np.int64)
    for digit in range(DIGITS - 1, -1, -1):
        left, values[:, digit] = left // 10, left % 10 + ord("0")
    return values


def tables(count: int, size: int) -> list[pa.Table]:
    """Return the values as tables with one column, ``value``, of 100,000 rows each."""
    whole = matrix(count, size)
    return [_table(whole[start : start + _BATCH_ROWS], size) for start in range(0, count, _BATCH_ROWS)]


def _table(values: Matrix, size: int) -> pa.Table:
    offsets = np.arange(0, (len(values) + 1) * size, size, dtype=np.int32)
    array = pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.reshape(-1))]
    )
    return pa.table({"value": array})


def objects(count: int, size: int) -> list[bytes]:
    """Return the values as Python's ``bytes``."""
    whole = matrix(count, size).tobytes()
    return [whole[start : start + size] for start in range(0, count * size, size)]


def check_arrow(batches: Iterable[pa.RecordBatch], count: int, size: int) -> None:
    """Raise Lost unless the column ``value`` has every number below ``count`` exactly once, in an undamaged value."""
    check([_bytes_of(batch.column("value"), size) for batch in batches], count, size)


def check_topic(side: Side, topic: str, count: int, size: int) -> None:
    """Read a whole topic of one of the two systems from Python, and check its values. Raises Lost."""
    if side.name == "kafka":
        from bench.kafka_clients import consume_confluent

        check_objects(consume_confluent(side.bootstrap, topic, count)[1], count, size)
    else:
        with Consumer(side.bootstrap, topic, columns=["value"]) as consumer:
            check_arrow(consumer.to_table().to_batches(), count, size)


def check_objects(found: Sequence[bytes], count: int, size: int) -> None:
    """Check that the values 0 to ``count`` were found once each. Raises Lost."""
    check([np.frombuffer(b"".join(found), dtype=np.uint8)], count, size)


def check(pieces: Sequence[npt.NDArray[np.uint8]], count: int, size: int) -> None:
    """Check that ``pieces`` together have each value below ``count`` once. Raises Lost."""
    length = sum(len(piece) for piece in pieces)
    if length != count * size:
        raise Lost(f"{length / size:,.10g} values of {size} bytes found, {count:,} expected")
    seen = np.zeros(count, dtype=bool)
    for piece in pieces:
        rows = piece.reshape(-1, size)
        numbers = np.zeros(len(rows), dtype=np.int64)
        for digit in range(DIGITS):
            numbers = numbers * 10 + (rows[:, digit].astype(np.int64) - ord("0"))
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
            raise Lost(f"a value with a number between {numbers.min()} and {numbers.max()}, 0 to {count - 1} expected")
        seen[numbers] = True
        if not (rows[:, DIGITS:] == FILLER[0]).all():
            raise Lost("a value is damaged")
    if not seen.all():
        raise Lost(f"{count - int(seen.sum()):,} of {count:,} values are missing, others are there twice")


def _bytes_of(column: pa.BinaryArray, size: int) -> npt.NDArray[np.uint8]:
    """Return the values' bytes without a copy. Raises Lost if a value has another size."""
    _, offsets, values = column.buffers()
    at = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    if column.null_count or not (np.diff(at) == size).all():
        raise Lost(f"a value has not {size} bytes")
    return np.frombuffer(values, dtype=np.uint8)[at[0] : at[-1]]
