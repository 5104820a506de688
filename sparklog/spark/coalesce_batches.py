"""The combination of a task's small Arrow batches into larger ones.

Each batch costs Spark's JVM or the log a fixed time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

#: A batch with this number of rows is large enough, regardless of its bytes.
_ENOUGH_ROWS = 1 << 18


def gathered(batches: Iterator[pa.RecordBatch], enough_bytes: int) -> Iterator[pa.RecordBatch]:
    """Combine batches into larger ones. Yield the same rows in the same order.

    A batch is yielded once it has at least ``enough_bytes`` bytes, or enough rows. Only the last batch may be smaller.
    No batch is split or empty, and a batch that is large enough is not copied.
    """
    held: list[pa.RecordBatch] = []
    held_bytes = held_rows = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        held_bytes += batch.nbytes
        held_rows += batch.num_rows
        # A batch without columns has only a number of rows, and concatenation would lose it.
        if held_bytes >= enough_bytes or held_rows >= _ENOUGH_ROWS or not batch.num_columns:
            yield _one(held)
            held, held_bytes, held_rows = [], 0, 0
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)
