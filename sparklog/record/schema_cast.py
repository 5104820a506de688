"""The cast of a producer's columns to a topic's schema: order, types, missing nullable columns.

The columns of a data frame have the types of its library: categoricals, views, large strings, nanoseconds. The columns
are cast to the topic's types if no value changes. Otherwise the table is refused, and the error names every column that
does not fit. A value is never converted to another kind of value: text is not parsed into numbers, and numbers are not
times. Timestamps without a time zone are in UTC.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from pyarrow import types

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.layout import is_list
from sparklog.record.required_columns import misplaced_null

#: A larger array is cast in parts, because a ``large_string`` array can have more than 2 GB, but a ``string`` array
#: cannot.
_CAST_AT_ONCE_BYTES = 1 << 30
_MAX_NAMED = 20


class _DoesNotFitError(Exception):
    """The error for a column that cannot be cast to the topic's type. The text is the reason."""


#: Arrow may also raise ValueError, OverflowError and TypeError, for values that its error message cannot show.
_DOES_NOT_FIT = (_DoesNotFitError, pa.ArrowException, ValueError, OverflowError, TypeError)


def fit_table(table: pa.Table | pa.RecordBatch, schema: pa.Schema) -> pa.Table | pa.RecordBatch:
    """Return ``table`` with exactly the columns of ``schema``. The result for a batch is a batch.

    Columns are found by name. Missing nullable columns are filled with nulls. Columns that already fit are not copied.

    Raises:
        BrokerError: SCHEMA_MISMATCH with each column that is missing, unknown, duplicated or of another type, or has
            values or nulls that the topic's column cannot have.
    """
    problems = _name_problems(table.schema, schema)
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        try:
            columns.append(_missing(field, table) if index < 0 else _fit_column(table.column(index), field))
        except _DOES_NOT_FIT as error:
            reason = str(error).partition("\n")[0][:300]
            found = f" ({table.schema.field(index).type})" if index >= 0 else ""
            problems.append(f"column {field.name!r}{found} does not fit {field.type}: {reason}")
    if problems:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, "; ".join(problems[:_MAX_NAMED]))
    make = pa.Table.from_arrays if isinstance(table, pa.Table) else pa.RecordBatch.from_arrays
    return make(columns, schema=schema)


def _name_problems(found: pa.Schema, expected: pa.Schema) -> list[str]:
    names = set(found.names)
    twice = [
        f"column {name!r} occurs {found.names.count(name)} times"
        for name in sorted(names)
        if found.names.count(name) > 1
    ]
    unknown = [
        f"column {field.name!r} ({field.type}) is not among the topic's columns {expected.names}"
        for field in found
        if expected.get_field_index(field.name) < 0
    ]
    return twice + unknown


def _missing(field: pa.Field, table: pa.Table | pa.RecordBatch) -> pa.Array | pa.ChunkedArray:
    if not field.nullable:
        raise _DoesNotFitError("it is missing and cannot be null")
    nulls = _nulls(table.num_rows, field.type)
    return pa.chunked_array([nulls]) if isinstance(table, pa.Table) else nulls


def _fit_column(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    in_parts = isinstance(column, pa.ChunkedArray)
    fitted: list[pa.Array] = []
    rows = 0
    for chunk in chunks:
        try:
            parts = _in_parts(chunk, field.type) if in_parts else [_convert(chunk, field.type)]
        except _DOES_NOT_FIT as error:
            raise _DoesNotFitError(_of_first_row(chunk, field.type, rows, error)) from None
        for part in parts:
            if path := misplaced_null(part, field):
                row = rows + _first_row(part, lambda found: misplaced_null(found, field) is not None)
                raise _DoesNotFitError(f"{path!r} holds nulls but is not nullable, first in row {row}")
            rows += len(part)
        fitted += parts
    return pa.chunked_array(fitted, type=field.type) if in_parts else fitted[0]


def _of_first_row(array: pa.Array, target: pa.DataType, rows_before: int, error: Exception) -> str:
    """Return why ``array`` cannot be cast to ``target``.

    If this depends on the values, the reason has the first row that does not fit.
    """

    def refusal(part: pa.Array) -> Exception | None:
        try:
            # Convert a copy, because a slice of lists still has the values of all lists.
            _convert(part.take(pa.array(np.arange(len(part)))), target)
        except _DOES_NOT_FIT as found:
            return found
        return None

    if refusal(array.slice(0, 0)) is not None:
        return str(error)  # The types do not fit, whatever the values are.
    row = _first_row(array, lambda part: refusal(part) is not None)
    return f"row {rows_before + row}, {_shown(array[row])}: {refusal(array.slice(row, 1)) or error}"


def _first_row(array: pa.Array, refused: Callable[[pa.Array], bool]) -> int:
    """Return the first row of ``array`` that is ``refused``. There must be such a row."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if refused(array.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def _shown(value: pa.Scalar) -> str:
    try:
        text = str(value.as_py())
    except (ValueError, OverflowError, pa.ArrowException):  # Python has no value for this time.
        text = str(pa.array([value], value.type)).replace("\n", "")
    return text if len(text) <= 100 else text[:100] + "..."


def _in_parts(array: pa.Array, target: pa.DataType) -> list[pa.Array]:
    if array.type == target or array.nbytes < _CAST_AT_ONCE_BYTES or len(array) < 2:
        return [_convert(array, target)]
    half = len(array) // 2
    return _in_parts(array.slice(0, half), target) + _in_parts(array.slice(half), target)


def _convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return ``array`` converted to ``target``, a type that a topic may have. Nested types are converted too."""
    source = array.type
    if source == target:
        return array
    if isinstance(source, pa.BaseExtensionType):
        if types.is_integer(source.storage_type):
            # The number stands for another kind of value, such as a boolean (bool8) or a period of pandas.
            raise _DoesNotFitError("the types are of different kinds")
        return _convert(array.storage, target)
    if types.is_dictionary(source):
        # Convert the values first: pyarrow cannot decode dictionaries of views, as in polars' categoricals.
        return _convert(array.dictionary, target).take(array.indices)
    if types.is_null(source):
        return _nulls(len(array), target)
    if types.is_struct(target):
        return _convert_struct(array, target)
    if types.is_map(target):
        return _convert_map(array, target)
    if is_list(target) or types.is_fixed_size_list(target):
        return _convert_list(array, target)
    return _convert_leaf(array, target)


def _convert_struct(array: pa.Array, target: pa.DataType) -> pa.Array:
    if not types.is_struct(array.type):
        raise _DoesNotFitError("it is not a struct")
    names = [array.type.field(index).name for index in range(array.type.num_fields)]
    fields = [target.field(index) for index in range(target.num_fields)]
    if unknown := sorted(set(names) - {field.name for field in fields}):
        raise _DoesNotFitError(f"unknown fields {unknown}")
    if len(set(names)) != len(names):
        raise _DoesNotFitError(f"fields named twice among {names}")
    children = []
    for field in fields:
        if field.name in names:
            children.append(_convert(array.field(names.index(field.name)), field.type))
        elif field.nullable:
            children.append(_nulls(len(array), field.type))
        else:
            raise _DoesNotFitError(f"field {field.name!r} is missing and cannot be null")
    return pa.StructArray.from_arrays(children, fields=fields, mask=_null_mask(array))


def _convert_map(array: pa.Array, target: pa.DataType) -> pa.Array:
    if not types.is_map(array.type):
        raise _DoesNotFitError("it is not a map")
    entries = pa.StructArray.from_arrays(
        [_convert(array.keys, target.key_type), _convert(array.items, target.item_type)],
        fields=[target.key_field, target.item_field],
    )
    return _with_children(array, target, entries)


def _convert_list(array: pa.Array, target: pa.DataType) -> pa.Array:
    source = array.type
    if types.is_list_view(source) or types.is_large_list_view(source):
        # The cast of pyarrow 26 from a list view may drop the last list, so build the lists from their sizes.
        array = _list_of_view(array)
    elif not (is_list(source) or types.is_fixed_size_list(source)):
        raise _DoesNotFitError("it is not a list")
    array = array.cast(_same_kind(target, array.type.value_field))
    return _with_children(array, target, _convert(array.values, target.value_type))


def _convert_leaf(array: pa.Array, target: pa.DataType) -> pa.Array:
    source = array.type
    if not _same_nature(source, target):
        raise _DoesNotFitError("the types are of different kinds")
    if types.is_integer(source) and types.is_decimal(target):
        # For a direct cast pyarrow would require enough precision for all values of the integer type.
        array = array.cast(pa.decimal128(20, 0))
        source = array.type
    elif types.is_floating(source) and types.is_decimal(target):
        # The shortest text of a float has the digits that its user means. Arrow's direct cast adds digits of the binary
        # number where the scale has room for them: 1.1 would become 1.10000000000000008882.
        wide = array.cast(pa.float32()).cast(pa.float64()) if _is_half_float(source) else array
        return wide.cast(pa.string()).cast(target)
    elif types.is_decimal(source) and _is_half_float(target):
        return _convert_leaf(_convert_leaf(array, pa.float64()), target)
    fitted = array.cast(target)
    if _may_round(source, target):
        back = fitted.cast(source)
        # Imported here, because this import takes longer than most programs that import this module run.
        import pyarrow.compute as pc

        changed = pc.not_equal(back, array)
        if types.is_floating(source):
            changed = pc.and_(changed, pc.invert(pc.is_nan(array)))
        if pc.any(changed).as_py():
            raise _DoesNotFitError("values would be rounded")
    return fitted


def _may_round(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether Arrow's cast between these types may round silently. Other casts fail if a value would change."""
    if types.is_floating(source):
        return bool(types.is_floating(target) and target.bit_width < source.bit_width)
    if types.is_integer(source):
        return _is_half_float(target)
    return bool(types.is_decimal(source) and types.is_floating(target))


def _is_half_float(kind: pa.DataType) -> bool:
    return bool(types.is_float16(kind))


def _same_nature(source: pa.DataType, target: pa.DataType) -> bool:
    if _is_bytes(source) or _is_bytes(target):
        return _is_bytes(source) and _is_bytes(target)
    if _is_number(target):
        return _is_number(source)
    if types.is_timestamp(target):
        return bool(types.is_timestamp(source) or types.is_date(source))
    natures = (types.is_boolean, types.is_date, types.is_time, types.is_duration)
    return any(nature(source) and nature(target) for nature in natures)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _same_kind(target: pa.DataType, value_field: pa.Field) -> pa.DataType:
    """Return the kind of list that ``target`` is, but with ``value_field`` as its value type."""
    if types.is_fixed_size_list(target):
        return pa.list_(value_field, target.list_size)
    return pa.large_list(value_field) if types.is_large_list(target) else pa.list_(value_field)


def _with_children(array: pa.Array, target: pa.DataType, child: pa.Array) -> pa.Array:
    """Return the lists or maps of ``array`` with ``child`` as their values."""
    own = array.buffers()[: 1 if types.is_fixed_size_list(target) else 2]
    return pa.Array.from_buffers(target, len(array), own, array.null_count, array.offset, [child])


def _list_of_view(array: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), array.flatten(), type=pa.large_list(array.type.value_field), mask=_null_mask(array)
    )


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _nulls(count: int, kind: pa.DataType) -> pa.Array:
    """Return an array of ``count`` nulls.

    ``pa.nulls`` would give a list column the bytes of ``count`` rows even though its values have no rows, and every
    slice of the column would be written with all these bytes. If ``count`` is 0, ``take`` is not used, because it loads
    ``pyarrow.compute``.
    """
    return pa.nulls(0, kind).take(pa.nulls(count, pa.int64())) if count else pa.nulls(0, kind)
