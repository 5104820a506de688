"""A task's Arrow batches brought together: each costs Spark's JVM, or the log, time, however few rows it has. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

#: Rows of narrow columns that are enough, however few bytes they take.
_ENOUGH_ROWS = 1 << 18


def gathered(batches: Iterator[pa.RecordBatch], enough_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, as batches of ``enough_bytes`` at least, or of as many rows that it does not
    matter, but for the last one. None is cut, none is empty, and one that is large enough is not copied."""
    held: list[pa.RecordBatch] = []
    held_bytes = held_rows = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        held_bytes += batch.nbytes
        held_rows += batch.num_rows
        # Without columns nothing but the number of rows would be left, which bringing together loses.
        if held_bytes >= enough_bytes or held_rows >= _ENOUGH_ROWS or not batch.num_columns:
            yield _one(held)
            held, held_bytes, held_rows = [], 0, 0
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)
