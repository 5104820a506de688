"""An encoder, without Arrow, for batches of a few records of the default schema.

Creating and serializing Arrow arrays of one record takes longer than all other work of a producer for this record. Up
to some hundreds of records this encoder is faster than Arrow. It supports only records without headers. Its columns and
buffers are equal to those of ``encode_batch``, byte for byte; a test compares the output of both. For a single record,
the bytes around key, value and timestamp depend only on the lengths of key and value, so they are cached.
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
from sparklog.record.checksum import Buffer, crc32c
from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch, header_times
from sparklog.record.header import BatchHeader
from sparklog.record.message import ALIGNMENT

#: Key, value, headers (not used: there must be none), and timestamp in microseconds. Text is stored as UTF-8.
SmallBatchRecord: TypeAlias = "tuple[bytes | str | None, bytes | str | None, Any, int]"

_ZEROS = bytes(ALIGNMENT)
_TIME = struct.Struct("<q")


def encode_small_batch(records: Sequence[SmallBatchRecord], *, schema_id: int, timed: bool) -> EncodedBatch:
    """Encode records to the same batch as ``encode_batch`` without compression, but without Arrow.

    ``timed`` means that the timestamp column is the topic's event-time column.

    Raises:
        OverflowError: a timestamp has more than 64 bits.
    """
    if len(records) == 1:
        key, value, _, time = records[0]
        encoded = single_record_body(key, value, time)
        header = single_record_header(encoded, time, schema_id, timed, (NO_PRODUCER, -1, -1))
        return EncodedBatch(header, pa.py_buffer(encoded))
    encoded = _several_records_body(records)
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


# --- several records ---


def _several_records_body(records: Sequence[SmallBatchRecord]) -> bytes:
    keys, values, _, times = zip(*records, strict=True)
    return several_records_body(keys, values, times)


def several_records_body(
    keys: Sequence[bytes | str | None], values: Sequence[bytes | str | None], times: Sequence[int]
) -> bytes:
    """Return the body of a batch of records without headers, from their keys, values and timestamps.

    Raises:
        OverflowError: a timestamp has more than 64 bits.
    """
    count = len(times)
    try:
        packed_times = struct.pack(f"<{count}q", *times)
    except struct.error as error:
        raise OverflowError(f"a timestamp of more than 64 bits: {error}") from None
    return body_of_columns(count, _binary(keys), _binary(values), packed_times)


class BinaryParts(NamedTuple):
    """A column of keys or values as parts of a batch: its number of nulls, and its buffers.

    ``pieces`` are the consecutive bytes of the values, ``length`` bytes in total.
    """

    nulls: int
    validity: bytes
    offsets: bytes
    pieces: Sequence[Buffer]
    length: int


def body_of_columns(count: int, key: BinaryParts, value: BinaryParts, times: bytes) -> bytes:
    """Return the body of a batch of ``count`` records without headers.

    The function copies keys and values only once. ``times`` are the timestamps as they are stored: 64 bits each,
    little-endian.
    """
    sizes = small_batch_buffer_sizes(count, (key.nulls, value.nulls), (key.length, value.length))
    parts: list[Buffer] = [small_batch_metadata(count, (key.nulls, value.nulls), sizes)]
    for column in (key, value):
        parts += (*_padded((column.validity, column.offsets)), *column.pieces, _ZEROS[: -column.length % ALIGNMENT])
    parts += _padded((bytes(-(-count // 8)), bytes(4 * (count + 1)), *_INSIDE_NO_HEADERS, b"", times))
    return b"".join(parts)


#: The buffers of the nested columns of a headers column without headers: of the structs, of the keys and of the values.
#: All values are absent, but an offsets buffer has one offset even if there are no values.
_INSIDE_NO_HEADERS = (b"", b"", bytes(4), b"", b"", bytes(4), b"")


def _padded(buffers: Iterable[bytes]) -> Iterable[bytes]:
    for buffer in buffers:
        yield buffer
        yield _ZEROS[: -len(buffer) % ALIGNMENT]


def _content(found: bytes | str | None) -> bytes | None:
    return found.encode() if isinstance(found, str) else found


def _binary(values: Sequence[bytes | str | None]) -> BinaryParts:
    nulls = values.count(None)
    if nulls == len(values):
        return nulls_only(nulls)
    given = [b"" if value is None else value for value in values] if nulls else values
    content = cast("Sequence[bytes]", given)
    try:
        joined = b"".join(content)
    except TypeError:  # Some values are text.
        content = [_content(value) or b"" for value in given]
        joined = b"".join(content)
    offsets = struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, content), initial=0))
    return BinaryParts(nulls, _validity(values) if nulls else b"", offsets, (joined,), len(joined))


def nulls_only(count: int) -> BinaryParts:
    """Return a binary column of ``count`` nulls."""
    return BinaryParts(count, bytes(-(-count // 8)), bytes(4 * (count + 1)), (), 0)


def _validity(values: Sequence[object]) -> bytes:
    """Return a validity bitmap, with one bit for each value: 0 for a null. It begins with the lowest bit."""
    bits = sum(1 << place for place, value in enumerate(values) if value is not None)
    return bits.to_bytes(-(-len(values) // 8), "little")


# --- a single record ---


class _Frame(NamedTuple):
    """The bytes before the key, before the value and before the timestamp of a batch of one record."""

    before_key: bytes
    before_value: bytes
    before_time: bytes


def single_record_body(key: bytes | str | None, value: bytes | str | None, time_us: int) -> bytes:
    """Return the body of a batch of one record without headers.

    Raises:
        OverflowError: the timestamp has more than 64 bits.
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


def single_record_header(
    body: bytes, time_us: int, schema_id: int, timed: bool, number: tuple[int, int, int]
) -> BatchHeader:
    """Return the header for a body from ``single_record_body``.

    ``number`` is (producer id, producer epoch, sequence).
    """
    earliest = latest = time_us if timed else NO_TIMESTAMP
    if timed and time_us == NO_TIMESTAMP:
        earliest, latest = header_times(time_us, time_us)
    producer_id, epoch, sequence = number
    size, crc = len(body), crc32c(body)
    fields = 0, 0, latest, 0, 0, producer_id, earliest, 1, 1, size, crc, -1, schema_id, sequence, 0, epoch, 0
    return tuple.__new__(BatchHeader, fields)  # as the class does it, but without a Python call


@lru_cache(maxsize=256)
def _frame(key_length: int | None, value_length: int | None) -> _Frame:
    """Return the bytes around the values of a record with these lengths, by encoding such a record."""
    key = None if key_length is None else bytes(key_length)
    value = None if value_length is None else bytes(value_length)
    message = _several_records_body([(key, value, None, 0)])
    sizes = small_batch_buffer_sizes(1, (int(key is None), int(value is None)), (key_length or 0, value_length or 0))
    at = [small_batch_metadata_bytes() + place for place, _ in buffer_positions(sizes)]
    key_end, value_end = at[2] + sizes[2], at[5] + sizes[5]
    return _Frame(message[: at[2]], message[key_end : at[5]], message[value_end : at[16]])


# --- the layout ---


def small_batch_buffer_sizes(rows: int, nulls: tuple[int, int], lengths: tuple[int, int]) -> tuple[int, ...]:
    """Return the size of each buffer of a batch of records without headers, in the order of the columns.

    ``nulls`` are the numbers of null keys and of null values. ``lengths`` are the total lengths of the keys and of the
    values.
    """
    bitmap, offsets = -(-rows // 8), 4 * (rows + 1)
    key, value = ((bitmap if found else 0, offsets, length) for found, length in zip(nulls, lengths, strict=True))
    return *key, *value, bitmap, offsets, *map(len, _INSIDE_NO_HEADERS), 0, _TIME.size * rows


@lru_cache(maxsize=256)
def small_batch_metadata(rows: int, nulls: tuple[int, int], sizes: tuple[int, ...]) -> bytes:
    """Return the metadata of a batch whose buffers have these sizes. No record has headers."""
    places = buffer_positions(sizes)
    return record_batch_metadata(
        rows,
        nodes=((rows, nulls[0]), (rows, nulls[1]), (rows, rows), (0, 0), (0, 0), (0, 0), (rows, 0)),
        buffers=places,
        body_length=places[-1][0] + _TIME.size * rows,
    )


@lru_cache(maxsize=1)
def small_batch_metadata_bytes() -> int:
    """Return the size of a batch's metadata, which is the same for all batches of this encoder."""
    return len(small_batch_metadata(1, (1, 1), small_batch_buffer_sizes(1, (1, 1), (0, 0))))


def buffer_positions(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return offset and length of each buffer. A buffer begins at the first multiple of 8 after the previous one."""
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places
