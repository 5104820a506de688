"""Encoding of rows of the log as a batch that Kafka's consumers read."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.kafka.records.batch_view import (
    CRC_FROM,
    HEADER,
    HEADER_BYTES,
    LENGTH_END,
    LOG_APPEND_TIME,
    MAGIC,
    TRANSACTIONAL,
)
from sparklog.kafka.records.column_memory import lengths_of, valid_of
from sparklog.kafka.records.decode_few import Headers
from sparklog.kafka.records.encode_few import encode_few
from sparklog.kafka.records.encode_many import encode_many
from sparklog.record.checksum import crc32c, crc32c_extended

Buffer: TypeAlias = "bytes | memoryview"
Integers = npt.NDArray[np.int64]

#: With more records than this, numpy and Arrow are faster than a loop. The first number is for the plain Python loop,
#: and the second for the compiled one. ``bench/kafka_records.py`` measures both.
FEW_RECORDS = 400 if hasattr(encode_few, "__code__") else 800
_NO_TIME_MS = -1
#: The maximum number of bytes of a record in addition to key, value and headers: six varints and the attributes.
_MOST_RECORD_BYTES = 5 + 1 + 10 + 5 + 5 + 5 + 5
#: The maximum number of bytes of a header in addition to key and value.
_MOST_HEADER_BYTES = 10


def encode_batch(
    rows: pa.RecordBatch,
    *,
    base_offset: int,
    leader_epoch: int,
    offsets: Integers | None = None,
    last_offset: int | None = None,
    append_time_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> list[Buffer]:
    """Encode ``rows``, which are at least one row of ``DEFAULT_SCHEMA``, as a batch without compression.

    ``offsets`` are the offsets of the rows, ascending and at least ``base_offset``. None means consecutive offsets from
    ``base_offset`` on. ``last_offset`` is the last offset that the batch covers, if it is later than the last row's.
    With ``append_time_ms`` the batch has timestamp type LogAppendTime and this time for all records. Otherwise the
    timestamp column has the records' times, which are rounded down to ms; a null becomes -1.

    Return the batch as consecutive buffers.
    """
    count = rows.num_rows
    assert count > 0, "a batch without records is a control batch"
    encode = _encoded_few if count <= FEW_RECORDS else _encoded_many
    found, base_time, latest = encode(rows, None if offsets is None else offsets - base_offset, append_time_ms)
    attributes = (TRANSACTIONAL if transactional else 0) | (0 if append_time_ms is None else LOG_APPEND_TIME)
    if last_offset is None:
        last_offset = base_offset + count - 1 if offsets is None else int(offsets[-1])
    head = batch_head(
        found,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        attributes=attributes,
        last_offset_delta=last_offset - base_offset,
        base_timestamp_ms=base_time,
        max_timestamp_ms=latest,
        producer=(producer_id, producer_epoch, base_sequence),
        count=count,
    )
    return [head, found]


def _encoded_few(
    rows: pa.RecordBatch, offset_deltas: Integers | None, append_time_ms: int | None
) -> tuple[bytes, int, int]:
    """Encode few rows without numpy. Return the records, the base timestamp and the greatest timestamp."""
    keys, values, headers, times = rows.columns
    count = len(times)
    if append_time_ms is None:
        times_ms = _times_of_few(times)
        base_time, latest = times_ms[0], max(times_ms)
        time_deltas = [time - base_time for time in times_ms]
    else:
        base_time = latest = append_time_ms
        time_deltas = [0] * count
    deltas = range(count) if offset_deltas is None else offset_deltas.tolist()
    found = encode_few(_binary_values(keys), _binary_values(values), _header_values(headers), time_deltas, deltas)
    return found, base_time, latest


def _encoded_many(
    rows: pa.RecordBatch, offset_deltas: Integers | None, append_time_ms: int | None
) -> tuple[memoryview, int, int]:
    """Encode many rows with numpy. Return the records, the base timestamp and the greatest timestamp."""
    keys, values, headers, times = rows.columns
    count = len(times)
    if append_time_ms is None:
        times_ms = _times_ms(times)
        base_time, latest = int(times_ms[0]), int(times_ms.max())
        time_deltas = times_ms - base_time
    else:
        base_time = latest = append_time_ms
        time_deltas = np.zeros(count, np.int64)
    deltas = np.arange(count, dtype=np.int64) if offset_deltas is None else offset_deltas
    has_headers = headers.null_count < count and bool(len(headers.flatten()))
    found = encode_many(keys, values, headers if has_headers else None, time_deltas, deltas)
    return memoryview(found), base_time, latest


def batch_head(
    records: Buffer,
    *,
    base_offset: int,
    leader_epoch: int,
    attributes: int,
    last_offset_delta: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    producer: tuple[int, int, int],
    count: int,
) -> bytes:
    """Return the header of a batch with ``records``. ``producer`` is producer id, producer epoch and base sequence."""
    length = HEADER_BYTES - LENGTH_END + len(records)
    rest = attributes, last_offset_delta, base_timestamp_ms, max_timestamp_ms, *producer, count
    unsigned = HEADER.pack(base_offset, length, leader_epoch, MAGIC, 0, *rest)
    crc = crc32c_extended(crc32c(unsigned[CRC_FROM:]), records)
    return HEADER.pack(base_offset, length, leader_epoch, MAGIC, crc, *rest)


def rows_that_fit(rows: pa.RecordBatch, max_bytes: int) -> int:
    """Return how many of the first rows fit into an encoded batch of ``max_bytes``, and at least 1.

    The function overestimates the sizes, so a few more rows might fit.
    """
    keys, values, headers = rows.column(0), rows.column(1), rows.column(2)
    used = lengths_of(keys) + lengths_of(values)
    pairs = headers.flatten() if headers.null_count < len(headers) else headers
    if headers.null_count < len(headers) and len(pairs):
        parts = pairs.flatten()
        ends = np.zeros(len(pairs) + 1, np.int64)
        np.cumsum(lengths_of(parts[0]) + lengths_of(parts[1]) + _MOST_HEADER_BYTES, out=ends[1:])
        numbers = np.where(valid_of(headers), lengths_of(headers), 0)
        last = np.cumsum(numbers)
        used = used + ends[last] - ends[last - numbers]
    sizes = np.cumsum(used + _MOST_RECORD_BYTES)
    return max(int(np.searchsorted(sizes, max_bytes - HEADER_BYTES, side="right")), 1)


def _times_ms(column: pa.Array) -> Integers:
    """Return the timestamps in ms, rounded down. A null becomes -1."""
    times = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column)] // 1000
    if column.null_count:
        times[~valid_of(column)] = _NO_TIME_MS
    return times


def _times_of_few(column: pa.Array) -> list[int]:
    """Return the result of ``_times_ms`` as a list, for few rows."""
    first, count = column.offset, len(column)
    times: list[int] = memoryview(column.buffers()[1]).cast("q")[first : first + count].tolist()
    times = [time // 1000 for time in times]
    if column.null_count:
        for index in np.flatnonzero(~valid_of(column)).tolist():
            times[index] = _NO_TIME_MS
    return times


def _binary_values(column: pa.Array) -> list[bytes | None]:
    """Return the values of a column of binary. This is faster than ``to_pylist``."""
    count, nulls = len(column), column.null_count
    if nulls == count:
        return [None] * count
    _, borders_buffer, data = column.buffers()
    borders = memoryview(borders_buffer).cast("i")[column.offset : column.offset + count + 1].tolist()
    first = borders[0]
    whole = b"" if data is None else data.slice(first, borders[-1] - first).to_pybytes()
    if first:
        borders = [border - first for border in borders]
    found: list[bytes | None] = [whole[start:end] for start, end in pairwise(borders)]
    if nulls:
        for index in np.flatnonzero(~valid_of(column)).tolist():
            found[index] = None
    return found


def _header_values(column: pa.Array) -> list[Headers | None] | None:
    if column.null_count == len(column):
        return None
    return [
        None if pairs is None else [(pair["key"] or "", pair["value"]) if pair else ("", None) for pair in pairs]
        for pairs in column.to_pylist()
    ]
