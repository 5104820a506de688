"""Batches of a few records of the default schema, written by hand: making Arrow arrays of one record each, and having
Arrow write them, costs more than everything else a producer does for it.

Only records without headers. Columns and buffers are those that ``encode_batch`` would write, byte for byte; a test
holds the two against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, cast

import pyarrow as pa

from sparklog.model import NO_PRODUCER
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch, header_times
from sparklog.record.header import BatchHeader
from sparklog.record.message import ALIGNMENT

#: Key, value, no headers, timestamp in microseconds; text is stored as UTF-8.
FewRecord: TypeAlias = "tuple[bytes | str | None, bytes | str | None, Any, int]"

_ZEROS = bytes(ALIGNMENT)
#: What is inside a headers column that has none: structs, their keys, their values, no one of each. Columns of variable
#: length hold an offset even when they hold nothing.
_INSIDE_NO_HEADERS = ((0, 0), (0, 0), (0, 0))
_BUFFERS_INSIDE_NO_HEADERS = (b"", b"", bytes(4), b"", b"", bytes(4), b"")


def encode_few_records(records: Sequence[FewRecord], *, schema_id: int, timed: bool) -> EncodedBatch:
    """As ``encode_batch`` without compression; ``timed``: the timestamp is the topic's event time.

    Raises:
        OverflowError: a timestamp of more than 64 bits.
    """
    count = len(records)
    keys, values, _, times = zip(*records, strict=True)
    earliest, latest = header_times(min(times), max(times)) if timed else (NO_TIMESTAMP, NO_TIMESTAMP)
    key_nulls, key_buffers = _binary(keys)
    value_nulls, value_buffers = _binary(values)
    encoded = _message(
        count,
        nodes=((count, key_nulls), (count, value_nulls), (count, count), *_INSIDE_NO_HEADERS, (count, 0)),
        buffers=(
            *key_buffers,
            *value_buffers,
            bytes(-(-count // 8)),
            bytes(4 * (count + 1)),
            *_BUFFERS_INSIDE_NO_HEADERS,
            b"",
            b"".join([time.to_bytes(8, "little", signed=True) for time in times]),
        ),
    )
    return EncodedBatch(
        BatchHeader(
            base_offset=0,
            position=0,
            max_timestamp=latest,
            running_max=0,
            append_time=0,
            producer_id=NO_PRODUCER,
            min_timestamp=earliest,
            offset_span=count,
            record_count=count,
            length=len(encoded),
            body_crc=crc32c(encoded),
            leader_epoch=-1,
            schema_id=schema_id,
            first_sequence=-1,
            offset_array_length=0,
            producer_epoch=-1,
            flags=0,
        ),
        pa.py_buffer(encoded),
    )


def _message(rows: int, *, nodes: Sequence[tuple[int, int]], buffers: Iterable[bytes]) -> bytes:
    parts: list[bytes] = []
    places: list[tuple[int, int]] = []
    end = 0
    for buffer in buffers:
        length = len(buffer)
        places.append((end, length))
        if length:
            padding = -length % ALIGNMENT
            parts += (buffer, _ZEROS[:padding])
            end += length + padding
    return b"".join((record_batch_metadata(rows, nodes=nodes, buffers=places, body_length=end), *parts))


def _binary(values: Sequence[bytes | str | None]) -> tuple[int, tuple[bytes, bytes, bytes]]:
    """How many values of a column of type binary are null; its validity, offsets and bytes."""
    found = [value.encode() if isinstance(value, str) else value for value in values]
    nulls = found.count(None)
    content = [value or b"" for value in found] if nulls else cast("list[bytes]", found)
    ends = accumulate(map(len, content), initial=0)
    offsets = struct.pack(f"<{len(found) + 1}i", *ends)
    return nulls, (_validity(found) if nulls else b"", offsets, b"".join(content))


def _validity(values: Sequence[bytes | None]) -> bytes:
    """One bit for each value, from the lowest bit of the first byte on: 0 where it is null."""
    bits = sum(1 << place for place, value in enumerate(values) if value is not None)
    return bits.to_bytes(-(-len(values) // 8), "little")
