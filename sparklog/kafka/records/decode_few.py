"""Decoding of the records of a small batch, one after the other.

Up to some hundreds of records this is faster than the calls of numpy and Arrow in ``decode_many``. A test compares the
results of both modules. This module may be compiled.

A record has these fields, where varints are in zigzag with the lowest seven bits first::

    varint  length of the fields below
    i8      attributes
    varint  timestamp delta
    varint  offset delta
    varint  length of the key, or -1 for null; then the key
    varint  length of the value, or -1 for null; then the value
    varint  number of headers; then each header, a key and a value in the same form
"""

from __future__ import annotations

from typing import TypeAlias

from sparklog.errors import ErrorCode
from sparklog.kafka.records.invalid import InvalidRecords, RecordError

#: The headers of one record: keys and values.
Headers: TypeAlias = "list[tuple[str, bytes | None]]"

_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF


#: The maximum number of headers of one record. Kafka has no limit. A header of two bytes can take a hundred
#: bytes of memory here.
MOST_HEADERS = 4096
#: With more headers than this in a batch, ``decode_many`` is several times faster.
_FEW_HEADERS = 8192
#: The records that a search for an invalid one keeps in memory.
_SEARCHED = 16


class ManyHeaders(Exception):
    """The error of ``decode_few`` for a batch that ``decode_many`` must decode, because of its many headers."""


def decode_few(
    data: bytes, count: int, base_timestamp_ms: int
) -> tuple[list[bytes | None], list[bytes | None], list[Headers | None] | None, list[int]]:
    """Return keys, values, headers and timestamps in ms of the ``count`` records in ``data``.

    The headers are None if no record has any.

    Raises:
        InvalidRecords: INVALID_RECORD, with the first invalid record.
        ManyHeaders: the records have more than ``_FEW_HEADERS`` headers.
    """
    keys, values, headers, times, at = _decode(data, 0, 0, count, base_timestamp_ms, most_headers=_FEW_HEADERS)
    _check_end(data, at, count)
    return keys, values, headers, times


def refuse_records(data: bytes, count: int) -> None:
    """Check the records of a large batch, and raise the error of ``decode_few`` if one is invalid.

    The function keeps at most ``_SEARCHED`` decoded records in memory.
    """
    at = 0
    for first in range(0, count, _SEARCHED):
        searched = min(_SEARCHED, count - first)
        at = _decode(data, at, first, searched, 0, most_headers=searched * MOST_HEADERS)[4]
    _check_end(data, at, count)


def _check_end(data: bytes, at: int, count: int) -> None:
    if at != len(data):
        raise InvalidRecords(
            ErrorCode.INVALID_RECORD, f"{count} records of {at} bytes found in {len(data)} bytes of records"
        )


def _decode(
    data: bytes, at: int, first: int, count: int, base_timestamp_ms: int, *, most_headers: int
) -> tuple[list[bytes | None], list[bytes | None], list[Headers | None] | None, list[int], int]:
    """Decode ``count`` records from ``at`` on. Return their fields, and the position after them.

    ``first`` is the number of the first record, for error messages. The function raises ManyHeaders for more than
    ``most_headers`` headers of these records.
    """
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    times: list[int] = []
    headers: list[Headers | None] | None = None
    header_count = 0
    number = first
    try:
        for number in range(first, first + count):
            # The usual varints have one or two bytes. They are read without a call.
            raw = data[at]
            at += 1
            if raw > 127:
                byte = data[at]
                if byte < 128:
                    raw = raw & 127 | byte << 7
                    at += 1
                else:
                    raw, at = _varint(data, at - 1, number)
            end = at + (raw >> 1)
            if raw & 1:
                raise _invalid(number, "its length is negative")
            at += 1  # attributes: none are defined

            raw = data[at]
            at += 1
            if raw > 127:
                byte = data[at]
                if byte < 128:
                    raw = raw & 127 | byte << 7
                    at += 1
                else:
                    raw, at = _varint(data, at - 1, number, 10)
            times.append(base_timestamp_ms + ((raw >> 1) ^ -(raw & 1)))

            raw = data[at]
            at += 1
            if raw > 127:
                byte = data[at]
                if byte < 128:
                    raw = raw & 127 | byte << 7
                    at += 1
                else:
                    raw, at = _varint(data, at - 1, number)
            if raw != 2 * number:
                raise _invalid(number, f"its offset delta is {(raw >> 1) ^ -(raw & 1)}, {number} expected")

            raw = data[at]
            at += 1
            if raw == 1:
                keys.append(None)
            else:
                if raw > 127:
                    raw, at = _varint(data, at - 1, number)
                if raw & 1:
                    raise _invalid(number, "the length of its key is below -1")
                stop = at + (raw >> 1)
                keys.append(data[at:stop])
                at = stop

            raw = data[at]
            at += 1
            if raw == 1:
                values.append(None)
            else:
                if raw > 127:
                    byte = data[at]
                    if byte < 128:
                        raw = raw & 127 | byte << 7
                        at += 1
                    else:
                        raw, at = _varint(data, at - 1, number)
                if raw & 1:
                    raise _invalid(number, "the length of its value is below -1")
                stop = at + (raw >> 1)
                values.append(data[at:stop])
                at = stop

            if data[at]:
                if headers is None:
                    headers = [None] * count
                found, at = _headers(data, at, end, number)
                headers[number - first] = found
                header_count += len(found)
                if header_count > most_headers:
                    raise ManyHeaders
            else:
                at += 1
            if at != end:
                raise _invalid(number, f"its fields end at byte {at} of the records, its length says {end}")
    except IndexError:
        raise _invalid(number, "it is truncated") from None
    return keys, values, headers, times, at


def record_ends(data: bytes, at: int, first: int, count: int) -> list[int]:
    """Return the ends of ``count`` consecutive records from ``at`` on. ``first`` is the number of the first record.

    Raises:
        InvalidRecords: INVALID_RECORD if a record has no valid length.
    """
    ends = []
    size = len(data)
    number = first
    try:
        for number in range(first, first + count):
            raw = data[at]
            at += 1
            if raw > 127:
                byte = data[at]
                if byte < 128:
                    raw = raw & 127 | byte << 7
                    at += 1
                else:
                    raw, at = _varint(data, at - 1, number)
            if raw & 1:
                raise _invalid(number, "its length is negative")
            at += raw >> 1
            ends.append(at)
    except IndexError:
        raise _invalid(number, "it is truncated") from None
    if at > size:
        raise _invalid(number, "it is truncated")
    return ends


def header_places(data: bytes, at: int, end: int, count: int, number: int) -> tuple[list[int], int]:
    """Find ``count`` headers of record ``number``, which begin at ``at`` and end at ``end`` or before it.

    Return four numbers for each header: the position and the length of its key, and those of its value. A null value
    has the length -1. Return also the position after the headers.

    Raises:
        InvalidRecords: INVALID_RECORD if a length is not valid.
        IndexError: the bytes end before a length.
    """
    found = []
    for _ in range(count):
        raw, at = _varint(data, at, number)
        key_at, length = at, raw >> 1
        at += length
        if raw & 1 or at > end:
            raise _invalid(number, "the length of a header's key is not valid")
        found.append(key_at)
        found.append(length)
        raw, at = _varint(data, at, number)
        found.append(at)
        if raw == 1:
            found.append(-1)
            continue
        length = raw >> 1
        at += length
        if raw & 1 or at > end:
            raise _invalid(number, "the length of a header's value is not valid")
        found.append(length)
    return found, at


def _headers(data: bytes, at: int, end: int, number: int) -> tuple[Headers, int]:
    """Return the headers of a record, and the position after them. The varint of their number is at ``at``."""
    raw, at = _varint(data, at, number)
    count = raw >> 1
    if raw & 1 or 2 * count > end - at:
        raise _invalid(number, f"its number of headers is {count ^ -(raw & 1)}")
    if count > MOST_HEADERS:
        raise _invalid(number, f"it has {count} headers, at most {MOST_HEADERS} expected")
    places, at = header_places(data, at, end, count, number)
    found: Headers = []
    for place in range(0, 4 * count, 4):
        key_at, key_length, value_at, value_length = places[place : place + 4]
        try:
            key = data[key_at : key_at + key_length].decode()
        except UnicodeDecodeError as error:
            raise _invalid(number, f"the key of a header is not UTF-8: {error.reason}") from None
        found.append((key, None if value_length < 0 else data[value_at : value_at + value_length]))
    return found, at


def _varint(data: bytes, at: int, number: int, most_bytes: int = 5) -> tuple[int, int]:
    """Return the varint at ``at``, still in zigzag, and the position after it.

    ``most_bytes`` is 5 for a varint of at most 32 bits, and 10 for one of at most 64 bits.

    Raises:
        IndexError: the bytes end before the varint's end.
    """
    value = 0
    for place in range(most_bytes):
        byte = data[at]
        at += 1
        value |= (byte & 127) << 7 * place
        if byte < 128:
            if value > (_U32 if most_bytes == 5 else _U64):
                break
            return value, at
    raise _invalid(number, "a varint is too long")


def _invalid(number: int, detail: str) -> InvalidRecords:
    return InvalidRecords(ErrorCode.INVALID_RECORD, f"record {number}: {detail}", (RecordError(number, detail),))
