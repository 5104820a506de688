"""The columns ``_topic``, ``_partition`` and ``_offset``, which a consumer can add to its batches.

This module is pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparklog.client.consumer.origin import Origin

LOG_COLUMNS = [
    pa.field("_topic", pa.string(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
]


def with_log_columns(batch: pa.RecordBatch, place: Origin, offsets: np.ndarray | None) -> pa.RecordBatch:
    """Return the batch with ``_topic``, ``_partition`` and ``_offset`` after its own columns."""
    count = batch.num_rows
    if offsets is None:
        offsets = np.arange(place.offset, place.offset + count, dtype=np.int64)
    values = [
        pa.repeat(place.topic, count),
        pa.repeat(pa.scalar(place.partition, pa.int32()), count),
        pa.array(offsets, pa.int64()),
    ]
    schema = pa.schema([*batch.schema, *LOG_COLUMNS])
    return pa.RecordBatch.from_arrays([*batch.columns, *values], schema=schema)
