"""Decoding of a record's key into the key columns of a typed topic: the reverse of ``record/keys``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types

from sparklog.kafka.records.column_memory import lengths_of, valid_of
from sparklog.record.arrays import binary_of
from sparklog.record.layout import is_variable_binary

_LENGTH = struct.Struct(">i")


class UndecodableKey(Exception):
    """The error for a key that does not have the form of its columns. ``row`` is its position."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def columns_from_keys(keys: pa.Array, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Decode ``keys``, an array of binary in the form of ``record/keys``, into the key columns.

    Raises:
        UndecodableKey: a key is not in this form.
    """
    if len(fields) == 1:
        return [_column(keys, fields[0])]
    parts = [_parts(row, key, len(fields)) for row, key in enumerate(keys.to_pylist())]
    return [
        _column(binary_of([None if part is None else part[number] for part in parts]), field)
        for number, field in enumerate(fields)
    ]


def _parts(row: int, key: bytes | None, count: int) -> list[bytes | None] | None:
    """Split a key of several columns into the bytes of each column."""
    if key is None:
        return None
    found: list[bytes | None] = []
    at = 0
    for _ in range(count):
        if len(key) - at < _LENGTH.size:
            raise UndecodableKey(row, f"its key of {len(key)} bytes has no {count} columns")
        (length,) = _LENGTH.unpack_from(key, at)
        at += _LENGTH.size
        if not -1 <= length <= len(key) - at:
            raise UndecodableKey(row, f"a column of its key has {length} bytes")
        found.append(None if length < 0 else key[at : at + length])
        at += max(length, 0)
    if at != len(key):
        raise UndecodableKey(row, f"its key has {len(key) - at} bytes after its {count} columns")
    return found


def _column(keys: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    if types.is_string(kind) or types.is_large_string(kind):
        texts = keys.view(pa.string())
        for row, key in enumerate(keys):
            _check_text(row, key.as_py(), field.name)
        return texts.cast(kind)
    if is_variable_binary(kind):
        return keys.cast(kind)
    width = kind.byte_width if types.is_fixed_size_binary(kind) else max(kind.bit_width // 8, 1)
    valid = valid_of(keys)
    wrong = np.flatnonzero(valid & (lengths_of(keys) != width))
    if len(wrong):
        row = int(wrong[0])
        found = len(keys[row].as_py())
        raise UndecodableKey(row, f"its key has {found} bytes, field {field.name} ({kind}) needs {width}")
    table = np.zeros((len(keys), width), np.uint8)
    if valid.any():
        table[valid] = np.frombuffer(b"".join(key for key in keys.to_pylist() if key is not None), np.uint8).reshape(
            -1, width
        )
    validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if types.is_boolean(kind):
        return _booleans(table[:, 0], validity, field)
    if not types.is_fixed_size_binary(kind):
        table = table[:, ::-1]
    found = pa.Array.from_buffers(kind, len(keys), [validity, pa.py_buffer(np.ascontiguousarray(table))])
    row = 0
    try:
        for row in range(len(keys)) if types.is_decimal(kind) or types.is_time(kind) else ():
            found.slice(row, 1).validate(full=True)
    except pa.ArrowInvalid:
        fault = "has more digits than" if types.is_decimal(kind) else "is no time of a day, as needed by"
        raise UndecodableKey(row, f"its key {fault} field {field.name} ({kind})") from None
    return found


def _booleans(octets: np.ndarray, validity: pa.Buffer | None, field: pa.Field) -> pa.Array:
    wrong = np.flatnonzero(octets > 1)
    if len(wrong):
        raise UndecodableKey(int(wrong[0]), f"its key is neither 0 nor 1, as field {field.name} (bool) needs")
    bits = pa.py_buffer(np.packbits(octets, bitorder="little"))
    return pa.Array.from_buffers(field.type, len(octets), [validity, bits])


def _check_text(row: int, key: bytes | None, name: str) -> None:
    try:
        (key or b"").decode()
    except UnicodeDecodeError as error:
        raise UndecodableKey(row, f"its key is not UTF-8, as field {name} needs: {error.reason}") from None
