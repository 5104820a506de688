"""Encoding of the records of a large batch with numpy and Arrow: it encodes one field of all records at a time.

Between two values of a record there are only varints. The encoder writes these varints of all records into a table with
a row for each record, and cuts each row to the bytes in use. Arrow then joins these pieces with the keys and values,
row by row. The memory of the joined array is the encoded records.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.kafka.records.column_memory import lengths_of, valid_of
from sparklog.record.arrays import binary_of

Integers = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

_NOTHING = pa.py_buffer(b"")
_EMPTY, _NO_HEADERS = (binary_of([value])[0] for value in (b"", b"\0"))
_EMPTY_TEXT = binary_of([b""], pa.string())[0]


def encode_many(
    keys: pa.Array, values: pa.Array, headers: pa.Array | None, time_deltas: Integers, offset_deltas: Integers
) -> pa.Buffer:
    """Return the encoded records with these fields. ``headers`` is None if no record has headers.

    Keys and values are arrays of binary. The headers have the type of the column in ``DEFAULT_SCHEMA``.
    """
    count = len(time_deltas)
    attributes = np.zeros((count, 1), np.uint8), np.ones(count, np.int64)
    time, offset = _varints(time_deltas), _varints(offset_deltas)
    key_head, key_bytes = _lengths(keys)
    value_head, value_bytes = _lengths(values)
    size = 1 + time[1] + offset[1] + key_head[1] + key_bytes + value_head[1] + value_bytes
    tail = None if headers is None else _headers(headers)
    size += 1 if tail is None else lengths_of(tail)
    front = [_varints(size), attributes, time, offset, key_head]
    pieces: list[pa.Array] = []
    if keys.null_count == count:
        pieces.append(_piece([*front, value_head]))
    else:
        pieces += [_piece(front), keys, _piece([value_head])]
    pieces.append(values)
    # Without headers each record ends with the number 0.
    pieces.append(_NO_HEADERS if tail is None else tail)
    joined = pc.binary_join_element_wise(*pieces, _EMPTY, null_handling="replace")
    return joined.buffers()[2].slice(0, int(size.sum() + front[0][1].sum()))


def _varints(numbers: Integers) -> tuple[Octets, Integers]:
    """Return the varints of ``numbers`` as rows of a table, and the number of bytes that each row uses."""
    raw: npt.NDArray[np.uint64] = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    greatest = int(raw.max()) if len(raw) else 0
    columns = max(-(-greatest.bit_length() // 7), 1)
    table = np.empty((len(raw), columns), np.uint8)
    width = np.ones(len(raw), np.int64)
    for column in range(columns):
        table[:, column] = raw >> np.uint64(7 * column) & np.uint64(127)
        if column:
            longer = raw >= np.uint64(1 << 7 * column)
            width += longer
            table[:, column - 1] |= longer.view(np.uint8) << 7
    return table, width


def _lengths(array: pa.Array) -> tuple[tuple[Octets, Integers], Integers]:
    """Return the varints of the lengths of ``array``, and the lengths themselves.

    The length of a null is -1 in the varints, and 0 in the lengths.
    """
    lengths = lengths_of(array)
    if not array.null_count:
        return _varints(lengths), lengths
    valid = valid_of(array)
    return _varints(np.where(valid, lengths, -1)), np.where(valid, lengths, 0)


def _piece(fields: list[tuple[Octets, Integers]]) -> pa.Array:
    """Return an array of binary that has the consecutive bytes of these fields for each row."""
    tables = np.hstack([table for table, _ in fields])
    used = np.hstack([np.arange(table.shape[1]) < width[:, None] for table, width in fields])
    widths = np.sum([width for _, width in fields], axis=0)
    borders = np.zeros(len(widths) + 1, np.int32)
    np.cumsum(widths, out=borders[1:])
    return _binary(borders, tables[used])


def _binary(borders: npt.NDArray[np.int32], data: Octets | pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(borders) - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])


def _headers(headers: pa.Array) -> pa.Array:
    """Return the encoded headers of each row: their number, then their keys and values."""
    valid = valid_of(headers)
    numbers = np.where(valid, lengths_of(headers), 0)
    pairs = headers.flatten()  # without the values that null lists may refer to
    keys, values = pairs.flatten()
    if keys.null_count:
        keys = pc.fill_null(keys, _EMPTY_TEXT)  # Kafka has no header without a key
    keys = keys.view(pa.binary())
    (key_head, _), (value_head, _) = _lengths(keys), _lengths(values)
    encoded = pc.binary_join_element_wise(
        _piece([key_head]), keys, _piece([value_head]), values, _EMPTY, null_handling="replace"
    )
    ends = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, out=ends[1:])
    borders = np.frombuffer(encoded.buffers()[1], np.int32)[ends] if len(encoded) else np.zeros(len(ends), np.int32)
    of_rows = _binary(borders, encoded.buffers()[2] or _NOTHING)
    return pc.binary_join_element_wise(_piece([_varints(numbers)]), of_rows, _EMPTY)
