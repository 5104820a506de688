"""Decoding of the records of a large batch with numpy and Arrow: it reads one field of all records at a time.

First, a loop over the records finds their ends. It skips consecutive records of equal size. No other code loops over
the records: the decoder reads each varint of all records at once. To get all keys, or all values, it creates an Arrow
array over the received bytes without a copy. In this array, a value and the bytes up to the next value alternate, and
the decoder takes every second element.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.errors import ErrorCode
from sparklog.kafka.records.decode_few import MOST_HEADERS, header_places, record_ends, refuse_records
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.record.arrays import array_of
from sparklog.record.small_batch_encoder import BinaryParts, nulls_only

Integers = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

#: The number of records that are read one by one before the decoder again searches for a run of records of equal size.
_CHUNK = 256
#: The minimum length of a run of records of equal size. A shorter run is not faster than the loop.
_SHORTEST_RUN = 16
#: Headers are read in rounds, one header of each record in a round, while at least this number of records have another
#: header.
_FEWEST_AT_ONCE = 32
#: The maximum number of headers of a batch is ``_LEAST_LIMIT``, and one more for each ``_BYTES_PER_HEADER`` bytes of
#: records. The limit is needed because a header of two bytes takes more than forty bytes of memory here. A batch with
#: one header in each record never exceeds the limit.
_LEAST_LIMIT, _BYTES_PER_HEADER = 16 * 1024, 8
_U32 = 2**32 - 1
_MOST_U32_BYTES, _MOST_U64_BYTES = 5, 10


class Binary:
    """The positions of all keys, or of all values, in the bytes of a batch. A length of -1 means null."""

    __slots__ = ("_at", "_data", "lengths")

    def __init__(self, data: memoryview, at: Integers, lengths: Integers) -> None:
        self._data = data
        self._at = at
        self.lengths = lengths

    @property
    def null_count(self) -> int:
        return int(np.count_nonzero(self.lengths < 0))

    def array(self) -> pa.Array:
        return _binary_array(self._data, self._at, self.lengths, pa.binary())

    def parts(self) -> BinaryParts:
        """Return the column as parts of a batch of the log. The values are views of the batch's bytes."""
        count, nulls = len(self.lengths), self.null_count
        if nulls == count:
            return nulls_only(count)
        used, validity = self.lengths, b""
        if nulls:
            used, validity = np.maximum(used, 0), np.packbits(used >= 0, bitorder="little").tobytes()
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(used, out=offsets[1:])
        data = self._data
        borders = zip(self._at.tolist(), (self._at + used).tolist(), strict=True)
        pieces = [data[start:end] for start, end in borders]
        return BinaryParts(nulls, validity, offsets.tobytes(), pieces, int(offsets[-1]))


class Columns:
    """The decoded columns of a batch. ``deltas_ms`` are the records' timestamps minus the batch's base timestamp."""

    __slots__ = ("deltas_ms", "headers", "keys", "values")

    def __init__(self, keys: Binary, values: Binary, headers: pa.Array | None, deltas_ms: Integers) -> None:
        self.keys = keys
        self.values = values
        self.headers = headers  #: None: no record has any
        self.deltas_ms = deltas_ms


class _Fault(Exception):
    """The error for an invalid field of any record. ``refuse_records`` then finds the record and the reason."""


def decode_many(data: memoryview, count: int, header_type: pa.DataType) -> Columns:
    """Return the columns of the ``count`` records in ``data``.

    Raises:
        InvalidRecords: INVALID_RECORD if a record is invalid, or if the batch has too many headers. If a record is
            invalid, the error names the first such record.
    """
    try:
        return _Decoder(data, count).columns(header_type)
    except _Fault:
        pass  # The error is raised after this, so that it does not keep the decoder's arrays.
    refuse_records(bytes(data), count)
    raise AssertionError("both decoders refuse the same records")


class _Decoder:
    """The decoding of one batch. ``at`` is the position in each record up to which its fields have been read."""

    def __init__(self, data: memoryview, count: int) -> None:
        self.data = data
        self.octets: Octets = np.frombuffer(data, np.uint8)
        self.count = count
        ends, self.at = _bounds(self.octets, data, count)
        self.ends = ends
        if ends[-1] != len(data):
            raise _Fault

    def columns(self, header_type: pa.DataType) -> Columns:
        self.at = self.at + 1  # attributes: none are defined
        deltas = _zigzag(self._varints(_MOST_U64_BYTES))
        offset_deltas = self._varints(_MOST_U32_BYTES)
        if not np.array_equal(offset_deltas, np.arange(0, 2 * self.count, 2)):
            raise _Fault
        keys = self._binary()
        values = self._binary()
        return Columns(keys, values, self._headers(header_type), deltas)

    def _varints(self, most_bytes: int) -> Integers:
        """Read the next varint of each record. Return the unsigned numbers, still in zigzag."""
        found, self.at = _varints_at(self.octets, self.at, self.ends, most_bytes)
        return found

    def _binary(self) -> Binary:
        """Read the next key or value of each record: its length, then its bytes. The length -1 means null."""
        lengths = _zigzag(self._varints(_MOST_U32_BYTES))
        found = Binary(self.data, self.at, lengths)
        self.at = _after(lengths, self.at, self.ends, least=-1)
        return found

    def _headers(self, kind: pa.DataType) -> pa.Array | None:
        if not np.any(self.octets[np.minimum(self.at, len(self.data) - 1)]):
            self.at = self.at + 1
            self._check_end()
            return None
        raw = self._varints(_MOST_U32_BYTES)
        numbers = raw >> 1
        if np.any(raw & 1) or np.any(2 * numbers > self.ends - self.at) or np.any(numbers > MOST_HEADERS):
            raise _Fault
        _check_total(int(numbers.sum()), len(self.data))
        if not np.any(numbers):
            self._check_end()
            return None
        places, self.at = _header_places(self.data, numbers, self.at, self.ends)
        self._check_end()
        return _header_array(self.data, numbers, places, kind)

    def _check_end(self) -> None:
        if not np.array_equal(self.at, self.ends):
            raise _Fault


# --- records ---


def _bounds(octets: Octets, data: memoryview, count: int) -> tuple[Integers, Integers]:
    """Return the end of each record, and the position after the varint of its length.

    If consecutive records have the same size, the bytes of their lengths repeat at a distance of one record. The
    converse is also true: if these bytes repeat at this distance, each record begins where the one before it ends.
    """
    pieces: list[Integers] = []
    copied = b""  # the loop needs bytes, and most batches do not need the loop
    at = done = 0
    while done < count:
        run, size = _run(octets, at, count - done)
        if run >= _SHORTEST_RUN:
            ends = at + size * np.arange(1, run + 1, dtype=np.int64)
        else:
            run = min(_CHUNK, count - done)
            copied = copied or bytes(data)
            try:
                ends = np.array(record_ends(copied, at, done, run), np.int64)
            except InvalidRecords:
                raise _Fault from None
        pieces.append(ends)
        at = int(ends[-1])
        done += run
    ends = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1]
    _, after = _varints_at(octets, starts, ends, _MOST_U32_BYTES)
    return ends, after


def _run(octets: Octets, at: int, most: int) -> tuple[int, int]:
    """Return the number of records of equal size from ``at`` on, and their size including the length field.

    The number is at most ``most``.
    """
    raw = 0
    head = octets[at : at + 3].tolist()
    for width, byte in enumerate(head, 1):
        raw |= (byte & 127) << 7 * (width - 1)
        if byte < 128:
            break
    else:
        return 0, 0
    if raw & 1:
        return 0, 0
    size = width + (raw >> 1)
    run = min(most, (len(octets) - at) // size)
    for place in range(width):
        if run < _SHORTEST_RUN:
            return 0, 0
        differs = octets[at + place : at + size * run : size] != head[place]
        first = int(differs.argmax())
        if differs[first]:
            run = first
    return run, size


# --- fields ---


def _zigzag(raw: Integers) -> Integers:
    """Decode zigzag: return the signed numbers 0, -1, 1, -2 for 0, 1, 2, 3."""
    half: Integers = (raw.view(np.uint64) >> np.uint64(1)).view(np.int64)
    return half ^ -(raw & 1)


def _varints_at(octets: Octets, at: Integers, ends: Integers, most_bytes: int) -> tuple[Integers, Integers]:
    """Return the varint at each position, still in zigzag, and the position after it.

    A varint of 64 bits is an unsigned number in the bits of an int64.
    """
    if np.any(at >= ends):
        raise _Fault
    found = octets[at].astype(np.int64)
    if not np.any(found >= 128):
        return found, at + 1
    after = at + 1
    longer = np.flatnonzero(found >= 128)
    found[longer] &= 127
    for place in range(1, most_bytes + 1):
        where = after[longer]
        if place == most_bytes or np.any(where >= ends[longer]):
            raise _Fault
        byte = octets[where]
        if place == _MOST_U64_BYTES - 1 and np.any(byte > 1):
            raise _Fault
        found[longer] |= (byte & 127).astype(np.int64) << 7 * place
        after[longer] += 1
        longer = longer[byte >= 128]
        if not len(longer):
            break
    if most_bytes == _MOST_U32_BYTES and np.any(found > _U32):
        raise _Fault
    return found, after


def _after(lengths: Integers, at: Integers, ends: Integers, *, least: int) -> Integers:
    """Return the position after each value. The length -1 means null. ``least`` is the least allowed length."""
    found = int(lengths.min())
    if found < least:
        raise _Fault
    after = at + (np.maximum(lengths, 0) if found < 0 else lengths)
    if np.any(after > ends):
        raise _Fault
    return after


def _binary_array(data: memoryview, at: Integers, lengths: Integers, kind: pa.DataType) -> pa.Array:
    """Return the value at each position as an array. The length -1 means null."""
    least, greatest, count = int(lengths.min()), int(lengths.max()), len(lengths)
    if greatest <= 0 and least == greatest:
        validity = pa.py_buffer(bytes(-(-count // 8))) if least < 0 else None
        return pa.Array.from_buffers(kind, count, [validity, pa.py_buffer(bytes(4 * (count + 1))), _EMPTY])
    after = at + (np.maximum(lengths, 0) if least < 0 else lengths)
    # Element 2 i is the value of record i, and element 2 i + 1 is what follows it up to the next value.
    borders = np.empty(2 * count, np.int32)
    borders[0::2] = at
    borders[1::2] = after
    parts = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])
    array = parts.take(array_of(np.arange(0, 2 * count, 2, dtype=np.int32), pa.int32()))
    if least < 0:
        validity = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little"))
        array = pa.Array.from_buffers(kind, count, [validity, *array.buffers()[1:]])
    return array


_EMPTY = pa.py_buffer(b"")


# --- headers ---


def _check_total(headers: int, size_bytes: int) -> None:
    """Refuse a batch with too many headers in ``size_bytes`` of records."""
    most = _LEAST_LIMIT + size_bytes // _BYTES_PER_HEADER
    if headers > most:
        raise InvalidRecords(
            ErrorCode.INVALID_RECORD,
            f"{headers} headers found in {size_bytes} bytes of records, at most {most} expected",
        )


class _Places:
    """The positions and lengths of the keys and values of all headers, in the order of the records."""

    __slots__ = ("key_at", "key_length", "value_at", "value_length")

    def __init__(self, total: int) -> None:
        self.key_at = np.empty(total, np.int64)
        self.key_length = np.empty(total, np.int64)
        self.value_at = np.empty(total, np.int64)
        self.value_length = np.empty(total, np.int64)

    def set(self, headers: slice, found: list[int]) -> None:
        """Store the positions of consecutive headers. ``found`` has four numbers for each header."""
        fields = self.key_at, self.key_length, self.value_at, self.value_length
        for number, field in enumerate(fields):
            field[headers] = found[number::4]


def _header_places(data: memoryview, numbers: Integers, at: Integers, ends: Integers) -> tuple[_Places, Integers]:
    """Find all headers. Return their places, and the position after the headers of each record.

    ``numbers`` has the number of headers of each record.
    """
    octets = np.frombuffer(data, np.uint8)
    places = _Places(int(numbers.sum()))
    first = np.cumsum(numbers) - numbers
    at = at.copy()
    records = np.flatnonzero(numbers)
    done = 0
    while len(records) >= _FEWEST_AT_ONCE:
        header = first[records] + done
        at[records] = _read_headers(octets, places, header, at[records], ends[records])
        done += 1
        records = records[numbers[records] > done]
    copied = bytes(data) if len(records) else b""
    for record in records.tolist():
        try:
            found, at[record] = header_places(
                copied, int(at[record]), int(ends[record]), int(numbers[record]) - done, record
            )
        except (IndexError, InvalidRecords):
            raise _Fault from None
        places.set(slice(int(first[record]) + done, int(first[record] + numbers[record])), found)
    return places, at


def _read_headers(octets: Octets, places: _Places, header: Integers, at: Integers, ends: Integers) -> Integers:
    """Find one header of each of some records, and return the positions after them."""
    raw, at = _varints_at(octets, at, ends, _MOST_U32_BYTES)
    length = _zigzag(raw)
    places.key_at[header], places.key_length[header] = at, length
    at = at + length
    if np.any(length < 0) or np.any(at > ends):
        raise _Fault
    raw, at = _varints_at(octets, at, ends, _MOST_U32_BYTES)
    length = _zigzag(raw)
    places.value_at[header], places.value_length[header] = at, length
    at = at + np.maximum(length, 0)
    if np.any(length < -1) or np.any(at > ends):
        raise _Fault
    return at


def _header_array(data: memoryview, numbers: Integers, places: _Places, kind: pa.DataType) -> pa.Array:
    """Return the headers of each record as a list. A record without headers has a null."""
    no_limit = np.full(len(places.key_at), len(data), np.int64)
    _after(places.key_length, places.key_at, no_limit, least=0)
    keys = _binary_array(data, places.key_at, places.key_length, pa.string())
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        raise _Fault from None
    _after(places.value_length, places.value_at, no_limit, least=-1)
    values = _binary_array(data, places.value_at, places.value_length, pa.binary())
    pairs = pa.Array.from_buffers(kind.value_type, len(keys), [None], children=[keys, values])
    borders = np.zeros(len(numbers) + 1, np.int32)
    np.cumsum(numbers, out=borders[1:])
    validity = pa.py_buffer(np.packbits(numbers > 0, bitorder="little"))
    return pa.Array.from_buffers(kind, len(numbers), [validity, pa.py_buffer(borders)], children=[pairs])
