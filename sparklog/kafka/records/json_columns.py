"""The conversion of JSON documents to columns, and of columns to JSON documents, one column at a time.

``docs/values.md`` describes the form of each type. ``record/parse_values`` and ``record/format_values`` define the form
for single values. This module uses Arrow's JSON reader and casts where their result is the same. It reads documents one
by one if Arrow cannot read them, so that the error names the record and the field. A test compares both ways.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from sparklog.errors import ErrorCode
from sparklog.kafka.records.invalid import MOST_RECORD_ERRORS, InvalidRecords, RecordError
from sparklog.record.arrays import binary_of
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.format_values import as_json, is_bytes, is_time, json_values
from sparklog.record.layout import children_of, is_list
from sparklog.record.parse_values import from_json, parse_json, plain_texts
from sparklog.record.required_columns import misplaced_null

#: Documents are read and written one by one if there are fewer than this, because the calls of Arrow take longer.
FEW_DOCUMENTS = 64
_NEWLINE, _NOTHING = binary_of([b"\n", b""])
#: For each float type, by its bits: the number below which the type has all whole numbers exactly. A larger number is
#: read from its text.
_EXACT_WHOLE = {64: 2.0**53, 32: 2.0**24}
_BLOCK_BYTES = 1 << 16


def columns_from_json(documents: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """Return ``documents``, an array of binary without nulls, as a batch of ``schema``.

    Raises:
        InvalidRecords: INVALID_RECORD. It names the records that do not fit, and each message names the field.
    """
    rows = None if len(documents) < FEW_DOCUMENTS else _in_bulk(documents, schema)
    if rows is None:
        rows = _one_by_one(documents, schema)
    _check_nulls(rows)
    return rows


# --- reading in bulk ---


def _in_bulk(documents: pa.Array, schema: pa.Schema) -> pa.RecordBatch | None:
    """Read the documents with Arrow. Return None if Arrow cannot read them, or might give another result."""
    carriers = _carriers(schema)
    if carriers is None or not _one_on_a_line(documents):
        return None
    lines = pc.binary_join_element_wise(documents, _NEWLINE, _NOTHING).buffers()[2]
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(lines),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(lines.size + 1, _BLOCK_BYTES)),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=carriers, newlines_in_values=False, unexpected_field_behavior="error"
            ),
        )
        if table.num_rows != len(documents):
            return None
        columns = [_carried(_whole(found), field.type) for found, field in zip(table.columns, schema, strict=True)]
    except (pa.ArrowException, ValueRefusedError, ValueError, OverflowError):
        return None
    if None in columns:
        return None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _one_on_a_line(documents: pa.Array) -> bool:
    """Return whether each document is text in braces without line breaks.

    Arrow's reader only counts braces. If this function returns true, the reader finds one row for each document or
    fails. Without the braces it might crash (a document ``null``), or read the end of one document and the beginning of
    the next as one row.
    """
    if not len(documents):
        return False
    borders = np.frombuffer(documents.buffers()[1], np.int32)[documents.offset : documents.offset + len(documents) + 1]
    if np.diff(borders).min() < 2:
        return False
    octets = np.frombuffer(documents.buffers()[2], np.uint8)
    if np.any(octets[borders[:-1]] != ord("{")) or np.any(octets[borders[1:] - 1] != ord("}")):
        return False
    used = octets[borders[0] : borders[-1]].tobytes()
    if b"\n" in used or b"\r" in used:
        return False
    try:
        used.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=256)
def _carriers(schema: pa.Schema) -> pa.Schema | None:
    """Return the schema that Arrow reads, or None if it cannot read a column exactly.

    Arrow reads a type as text if its values are text in JSON.
    """
    found = []
    for field in schema:
        kind = field.type
        if types.is_decimal(kind) or is_time(kind):
            carrier = pa.string()
        elif is_bytes(kind):
            carrier = pa.binary()
        elif types.is_floating(kind):
            carrier = pa.float64()
        else:
            carrier = kind
        if not _is_read_exactly(kind, top=True):
            return None
        found.append(pa.field(field.name, carrier))
    return pa.schema(found) if len({field.name for field in schema}) == len(found) else None


def _is_read_exactly(kind: pa.DataType, *, top: bool) -> bool:
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind):
        return True
    if types.is_list(kind) or types.is_struct(kind):
        return all(child.nullable and _is_read_exactly(child.type, top=False) for child in children_of(kind))
    if not top or is_list(kind):
        return False
    return bool(
        types.is_decimal(kind) or is_time(kind) or is_bytes(kind) or types.is_float64(kind) or types.is_float32(kind)
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _carried(column: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Convert a column that Arrow has read to ``kind``. Return None if this needs the text of a value."""
    if types.is_floating(kind):
        return _floats(column, kind)
    if is_time(kind):
        plain = plain_texts(column, kind)
        return from_json(column.to_pylist(), kind) if plain is None else plain
    if types.is_decimal(kind):
        return from_json(column.to_pylist(), kind)
    return column if column.type.equals(kind) else column.cast(kind)


def _floats(column: pa.Array, kind: pa.DataType) -> pa.Array | None:
    values = np.frombuffer(column.buffers()[1], np.float64)[column.offset : column.offset + len(column)]
    if column.null_count:
        values = pc.fill_null(column, 0.0).to_numpy()
    if not np.all(np.abs(values) < _EXACT_WHOLE[kind.bit_width]):  # not true for NaN either
        return None
    return column.cast(kind, safe=False) if kind.bit_width < 64 else column


# --- reading one by one ---


def _one_by_one(documents: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    names = set(schema.names)
    rows = [_object_or_error(index, document, names) for index, document in enumerate(documents.to_pylist())]
    if errors := [row for row in rows if isinstance(row, RecordError)]:
        raise _refused(errors)
    columns = [_column_or_error([row.get(field.name) for row in rows], field) for field in schema]
    if errors := [column for column in columns if isinstance(column, RecordError)]:
        raise _refused(sorted(errors))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _object_or_error(index: int, document: bytes, names: set[str]) -> Any:
    try:
        return _object(document, names)
    except (ValueError, RecursionError) as error:
        return RecordError(index, _reason(error))


def _column_or_error(values: Sequence[Any], field: pa.Field) -> pa.Array | RecordError:
    try:
        return from_json(values, field.type)
    except ValueRefusedError as error:
        return RecordError(error.row, f"field {field.name}{error.path}: {error}")


def _object(document: bytes, names: set[str]) -> dict[str, Any]:
    value = parse_json(document.decode())
    if not isinstance(value, dict):
        raise ValueError(f"{json.dumps(value, default=str)[:40]} found, expected a JSON object")
    if unknown := value.keys() - names:
        raise ValueError(f"unknown fields {sorted(unknown)[:10]}")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the value is not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, RecursionError):
        return "the value is nested too deeply"
    return str(error).partition("\n")[0][:200]


def _check_nulls(rows: pa.RecordBatch) -> None:
    errors = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if misplaced_null(column, field):
            index = next(index for index in range(len(column)) if misplaced_null(column.slice(index, 1), field))
            path = misplaced_null(column.slice(index, 1), field)
            errors.append(RecordError(index, f"field {path} cannot be null"))
    if errors:
        raise _refused(sorted(errors))


def _refused(errors: Sequence[RecordError]) -> InvalidRecords:
    first = errors[0]
    detail = f"record {first.batch_index}: {first.message}"
    return InvalidRecords(ErrorCode.INVALID_RECORD, detail, errors[:MOST_RECORD_ERRORS])


# --- writing ---


def documents_of(rows: pa.RecordBatch) -> pa.Array:
    """Return each row as a JSON document, in an array of binary."""
    if rows.num_rows < FEW_DOCUMENTS:
        values = zip(*(json_values(column) for column in rows.columns), strict=True)
        return binary_of([as_json(dict(zip(rows.schema.names, row, strict=True))) for row in values])
    pieces: list[Any] = []
    for number, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        before = ("," if number else "{").encode() + as_json(field.name) + b":"
        pieces += [binary_of([before], pa.string())[0], _json_texts(column)]
    ends = binary_of([b"}", b"", b"null"], pa.string())
    joined = pc.binary_join_element_wise(*pieces, ends[0], ends[1], null_handling="replace", null_replacement="null")
    return joined.view(pa.binary())


def _json_texts(column: pa.Array) -> pa.Array:
    """Return the JSON of each value as text, and null for a null."""
    fast = _fast_texts(column)
    if fast is not None:
        return fast
    return binary_of([None if value is None else as_json(value) for value in json_values(column)], pa.string())


def _fast_texts(column: pa.Array) -> pa.Array | None:
    kind = column.type
    if types.is_integer(kind) or types.is_boolean(kind):
        return column.cast(pa.string())
    if types.is_float64(kind) or types.is_float32(kind):
        return _float_texts(column.cast(pa.float64()))
    if types.is_string(kind):
        return _quoted(column)
    if types.is_date32(kind) or (types.is_timestamp(kind) and kind.unit == "us" and kind.tz in {None, "UTC"}):
        return _time_texts(column)
    return None


def _float_texts(column: pa.Array) -> pa.Array | None:
    """Return floats as JSON, or None if one is not finite."""
    values = np.frombuffer(column.buffers()[1], np.float64)[column.offset : column.offset + len(column)]
    if not np.all(np.isfinite(values)):  # the value in the place of a null may also be infinite
        return None
    texts = column.cast(pa.string())
    if np.any(values == np.trunc(values)):
        texts = pc.replace_substring_regex(texts, "^(-?[0-9]+)$", r"\1.0")  # Arrow writes 1.0 as 1
    return texts


def _quoted(texts: pa.Array) -> pa.Array | None:
    """Return texts as JSON, or None if one has a control character."""
    borders = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if texts.buffers()[2] is not None and len(borders):
        octets = np.frombuffer(texts.buffers()[2], np.uint8)[borders[0] : borders[-1]]
        if np.any(octets < 32):
            return None
        if np.any(octets == ord("\\")):
            texts = pc.replace_substring(texts, "\\", "\\\\")
        if np.any(octets == ord('"')):
            texts = pc.replace_substring(texts, '"', '\\"')
    quote = binary_of([b'"', b""], pa.string())
    return pc.binary_join_element_wise(quote[0], texts, quote[0], quote[1])


#: The first and the last day of the years 1000 to 9999, counted from 1970. Arrow writes these years with four digits.
_DAYS = (-354285, 2932896)
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


def _time_texts(column: pa.Array) -> pa.Array | None:
    """Return dates or timestamps as JSON, or None if one is outside the years that Arrow writes in the same way."""
    day = types.is_date32(column.type)
    ticks = column.view(pa.int32() if day else pa.int64())
    least, greatest = pc.min_max(ticks).values()
    first, last = _DAYS if day else _MICROSECONDS
    if least.is_valid and not first <= least.as_py() <= greatest.as_py() <= last:
        return None
    quote = binary_of([b'"', b""], pa.string())
    if day:
        return pc.binary_join_element_wise(quote[0], column.cast(pa.string()), quote[0], quote[1])
    utc = '"' if column.type.tz is None else 'Z"'
    texts = column.cast(pa.timestamp("us")).cast(pa.string())  # 2024-01-31 12:00:00.500000
    texts = pc.binary_replace_slice(texts, 10, 11, "T")
    texts = pc.replace_substring(texts, ".000000", "")
    return pc.binary_join_element_wise(quote[0], texts, binary_of([utc.encode()], pa.string())[0], quote[1])
