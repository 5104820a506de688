"""Batches of a few records of the default schema, written by hand: making Arrow arrays of one record each, and having
Arrow write them, costs more than everything else a producer does for it.

Only records without headers. Columns and buffers are those that ``encode_batch`` would write, byte for byte; a test
holds the two against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import pyarrow as pa

from sparklog.model import NO_PRODUCER
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch
from sparklog.record.header import BatchHeader
from sparklog.record.message import ALIGNMENT

#: Key, value, no headers, timestamp in microseconds; text is stored as UTF-8.
FewRecord: TypeAlias = "tuple[bytes | str | None, bytes | str | None, Any, int]"

_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]
#: What is inside a headers column that has none: structs, their keys, their values, no one of each.
_INSIDE_NO_HEADERS = ((0, 0), (0, 0), (0, 0))
_FIRST_OFFSET = bytes(4)


def encode_few_records(records: Sequence[FewRecord], *, schema_id: int, timed: bool) -> EncodedBatch:
    """As ``encode_batch`` without compression; ``timed``: the timestamp is the topic's event time.

    Raises:
        OverflowError: a timestamp of more than 64 bits.
    """
    count = len(records)
    keys, values, _, times = zip(*records, strict=True)
    body = _Body()
    key_nulls = body.add_binary(keys)
    value_nulls = body.add_binary(values)
    body.add_no_headers(count)
    body.add(b"")  # no timestamp is null
    body.add(b"".join([time.to_bytes(8, "little", signed=True) for time in times]))
    metadata = record_batch_metadata(
        count,
        nodes=((count, key_nulls), (count, value_nulls), (count, count), *_INSIDE_NO_HEADERS, (count, 0)),
        buffers=body.buffers,
        body_length=body.end,
    )
    encoded = b"".join((metadata, *body.parts))
    return EncodedBatch(
        BatchHeader(
            base_offset=0,
            position=0,
            max_timestamp=max(times) if timed else NO_TIMESTAMP,
            running_max=0,
            append_time=0,
            producer_id=NO_PRODUCER,
            min_timestamp=min(times) if timed else NO_TIMESTAMP,
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


class _Body:
    """The body while it is put together."""

    __slots__ = ("buffers", "end", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        #: (offset, length) of every buffer so far
        self.buffers: list[tuple[int, int]] = []
        #: where the next buffer begins
        self.end = 0

    def add(self, buffer: bytes) -> None:
        length = len(buffer)
        self.buffers.append((self.end, length))
        padding = _PADDING[length % ALIGNMENT]
        self.parts += (buffer, padding)
        self.end += length + len(padding)

    def add_no_headers(self, count: int) -> None:
        """A column of ``count`` null lists of structs of two columns of variable length, which hold an offset even
        when they hold nothing."""
        self.add(bytes(-(-count // 8)))
        self.add(bytes(4 * (count + 1)))
        for buffer in (b"", b"", _FIRST_OFFSET, b"", b"", _FIRST_OFFSET, b""):
            self.add(buffer)

    def add_binary(self, values: Sequence[bytes | str | None]) -> int:
        """A column of type binary; returns how many values are null."""
        found = [value.encode() if isinstance(value, str) else value for value in values]
        nulls = found.count(None)
        self.add(_validity(found) if nulls else b"")
        content = [value or b"" for value in found]
        ends = accumulate(map(len, content), initial=0)
        self.add(struct.pack(f"<{len(found) + 1}i", *ends))
        self.add(b"".join(content))
        return nulls


def _validity(values: Sequence[bytes | None]) -> bytes:
    """One bit for each value, from the lowest bit of the first byte on: 0 where it is null."""
    bits = sum(1 << place for place, value in enumerate(values) if value is not None)
    return bits.to_bytes(-(-len(values) // 8), "little")
