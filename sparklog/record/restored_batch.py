"""Batches whose records already have offsets, to restore a topic from its archive.

This module is pure. A restored batch, like a compacted batch, may cover offsets without a record: the offsets of
markers, of aborted records, and of records that compaction removed. So there is no gap between batches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.record.arrays import empty_batch
from sparklog.record.checksum import crc32c
from sparklog.record.codec import EncodedBatch, batch_without_records, encode_batch, header_times
from sparklog.record.compacted_batch import MAX_SPAN, offset_array
from sparklog.record.header import Flag
from sparklog.record.message import ALIGNMENT


def place_batch(
    records: pa.RecordBatch,
    offsets: npt.NDArray[np.int64],
    *,
    begin: int,
    end: int,
    times: tuple[int, int],
    schema_id: int,
    compression: str | None,
) -> EncodedBatch:
    """Return a batch with ``records`` (at least one) at ``offsets``. The batch covers the offsets ``[begin, end)``.

    The ``offsets`` ascend and are inside this range. ``times`` are the smallest and the greatest time of the records,
    in microseconds. A record without an event time has the greatest time.

    Raises:
        BrokerError: the same errors as ``encode_batch``.
    """
    header, body = encode_batch(records, schema_id=schema_id, compression=compression, event_time=None)
    array = offset_array(offsets, begin)
    least, greatest = header_times(*times)
    whole = pa.py_buffer(b"".join([body, array])) if array else body
    placed = header._replace(
        base_offset=begin,
        offset_span=end - begin,
        min_timestamp=least,
        max_timestamp=greatest,
        body_crc=crc32c(whole),
        offset_array_length=len(array),
        flags=int(header.flags | (Flag.OFFSET_ARRAY if array else 0)),
    )
    return EncodedBatch(placed, whole)


def place_nothing(schema: pa.Schema, *, begin: int, end: int, schema_id: int) -> list[EncodedBatch]:
    """Return batches that cover the offsets ``[begin, end)`` but have no records.

    The list is empty if the range is empty.
    """
    if begin >= end:
        return []
    body = empty_batch(schema).serialize()
    assert body.size % ALIGNMENT == 0
    header, _ = batch_without_records(body, schema_id=schema_id, offset_span=0, flags=0)
    starts = range(begin, end, MAX_SPAN)
    return [
        EncodedBatch(header._replace(base_offset=start, offset_span=min(MAX_SPAN, end - start)), body)
        for start in starts
    ]
