"""Batches of a few records of the default schema, written by hand: making Arrow arrays of them, and having Arrow write
them, costs more than everything else a producer does for one record, and up to some hundreds more than this.

Only records without headers. Columns and buffers are those that ``encode_batch`` would write, byte for byte; a test
holds the two against each other. One record alone is put between bytes that all records of its sizes have around them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import pyarrow as pa

from sparklog.model import NO_PRODUCER
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch, header_times
from sparklog.record.header import BatchHeader
from sparklog.record.message import ALIGNMENT

#: Key, value, no headers, timestamp in microseconds; text is stored as UTF-8.
SmallBatchRecord: TypeAlias = "tuple[bytes | str | None, bytes | str | None, Any, int]"

_ZEROS = bytes(ALIGNMENT)
_TIME = struct.Struct("<q")


def encode_few_records(records: Sequence[SmallBatchRecord], *, schema_id: int, timed: bool) -> EncodedBatch:
    """As ``encode_batch`` without compression; ``timed``: the timestamp is the topic's event time.

    Raises:
        OverflowError: a timestamp of more than 64 bits.
    """
    if len(records) == 1:
        key, value, _, time = records[0]
        encoded = alone_body(key, value, time)
        header = alone_header(encoded, time, schema_id, timed, (NO_PRODUCER, -1, -1))
        return EncodedBatch(header, pa.py_buffer(encoded))
    encoded = _together(records)
    times = [record[3] for record in records]
    earliest, latest = header_times(min(times), max(times)) if timed else (NO_TIMESTAMP, NO_TIMESTAMP)
    count = len(records)
    header = BatchHeader(
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
    )
    return EncodedBatch(header, pa.py_buffer(encoded))


# --- several ---


def _together(records: Sequence[SmallBatchRecord]) -> bytes:
    keys, values, _, times = zip(*records, strict=True)
    count = len(records)
    try:
        packed_times = struct.pack(f"<{count}q", *times)
    except struct.error as error:
        raise OverflowError(f"a timestamp of more than 64 bits: {error}") from None
    key_nulls, key_buffers = _binary(keys)
    value_nulls, value_buffers = _binary(values)
    buffers = (
        *key_buffers,
        *value_buffers,
        bytes(-(-count // 8)),
        bytes(4 * (count + 1)),
        *_INSIDE_NO_HEADERS,
        b"",
        packed_times,
    )
    metadata = few_metadata(count, (key_nulls, value_nulls), tuple(map(len, buffers)))
    return b"".join((metadata, *_in_places(buffers)))


#: What is inside a headers column that has none: structs, their keys, their values, no one of each. Columns of variable
#: length hold an offset even when they hold nothing.
_INSIDE_NO_HEADERS = (b"", b"", bytes(4), b"", b"", bytes(4), b"")


def _in_places(buffers: Iterable[bytes]) -> Iterable[bytes]:
    for buffer in buffers:
        yield buffer
        yield _ZEROS[: -len(buffer) % ALIGNMENT]


def _content(found: bytes | str | None) -> bytes | None:
    return found.encode() if isinstance(found, str) else found


def _binary(values: Sequence[bytes | str | None]) -> tuple[int, tuple[bytes, bytes, bytes]]:
    """How many values of a column of type binary are null; its validity, offsets and bytes."""
    nulls = values.count(None)
    if nulls == len(values):
        return nulls, (bytes(-(-nulls // 8)), bytes(4 * (nulls + 1)), b"")
    given = [b"" if value is None else value for value in values] if nulls else values
    content = cast("Sequence[bytes]", given)
    try:
        joined = b"".join(content)
    except TypeError:  # there is text among them
        content = [_content(value) or b"" for value in given]
        joined = b"".join(content)
    offsets = struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, content), initial=0))
    return nulls, (_validity(values) if nulls else b"", offsets, joined)


def _validity(values: Sequence[object]) -> bytes:
    """One bit for each value, from the lowest bit of the first byte on: 0 where it is null."""
    bits = sum(1 << place for place, value in enumerate(values) if value is not None)
    return bits.to_bytes(-(-len(values) // 8), "little")


# --- one alone ---


class _Frame(NamedTuple):
    """What is around the key, the value and the time of one record."""

    before_key: bytes
    before_value: bytes
    before_time: bytes


def alone_body(key: bytes | str | None, value: bytes | str | None, time_us: int) -> bytes:
    """The body of a batch of one record without headers.

    Raises:
        OverflowError: a timestamp of more than 64 bits.
    """
    if isinstance(key, str):
        key = key.encode()
    if isinstance(value, str):
        value = value.encode()
    frame = _frame(None if key is None else len(key), None if value is None else len(value))
    return b"".join(
        (
            frame.before_key,
            key or b"",
            frame.before_value,
            value or b"",
            frame.before_time,
            time_us.to_bytes(8, "little", signed=True),
        )
    )


def alone_header(body: bytes, time_us: int, schema_id: int, timed: bool, number: tuple[int, int, int]) -> BatchHeader:
    """The header of an ``alone_body``; ``number``: producer id, its epoch, and the sequence."""
    earliest = latest = time_us if timed else NO_TIMESTAMP
    if timed and time_us == NO_TIMESTAMP:
        earliest, latest = header_times(time_us, time_us)
    producer_id, epoch, sequence = number
    size, crc = len(body), crc32c(body)
    fields = 0, 0, latest, 0, 0, producer_id, earliest, 1, 1, size, crc, -1, schema_id, sequence, 0, epoch, 0
    return tuple.__new__(BatchHeader, fields)  # what the class itself does, without a call of Python's own


@lru_cache(maxsize=256)
def _frame(key_length: int | None, value_length: int | None) -> _Frame:
    """Cut out of a message of one record of these sizes that is made like any other."""
    key = None if key_length is None else bytes(key_length)
    value = None if value_length is None else bytes(value_length)
    message = _together([(key, value, None, 0)])
    sizes = few_buffer_sizes(1, (int(key is None), int(value is None)), (key_length or 0, value_length or 0))
    at = [few_metadata_bytes() + place for place, _ in few_places(sizes)]
    key_end, value_end = at[2] + sizes[2], at[5] + sizes[5]
    return _Frame(message[: at[2]], message[key_end : at[5]], message[value_end : at[16]])


# --- the layout ---


def few_buffer_sizes(rows: int, nulls: tuple[int, int], lengths: tuple[int, int]) -> tuple[int, ...]:
    """Bytes of every buffer of a batch without headers: of key, value, headers, what is inside them, and timestamp.
    ``nulls`` and ``lengths``: of key and value."""
    bitmap, offsets = -(-rows // 8), 4 * (rows + 1)
    key, value = ((bitmap if found else 0, offsets, length) for found, length in zip(nulls, lengths, strict=True))
    return *key, *value, bitmap, offsets, *map(len, _INSIDE_NO_HEADERS), 0, _TIME.size * rows


@lru_cache(maxsize=256)
def few_metadata(rows: int, nulls: tuple[int, int], sizes: tuple[int, ...]) -> bytes:
    """The metadata of a batch whose buffers have these sizes. No headers: each row's are null."""
    places = few_places(sizes)
    return record_batch_metadata(
        rows,
        nodes=((rows, nulls[0]), (rows, nulls[1]), (rows, rows), (0, 0), (0, 0), (0, 0), (rows, 0)),
        buffers=places,
        body_length=places[-1][0] + _TIME.size * rows,
    )


@lru_cache(maxsize=1)
def few_metadata_bytes() -> int:
    """The same for all of them."""
    return len(few_metadata(1, (1, 1), few_buffer_sizes(1, (1, 1), (0, 0))))


def few_places(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Offset and length of every buffer: one behind the other, each from a multiple of 8 on."""
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places
