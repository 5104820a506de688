"""Conversion of rows, given as mappings of Python values, to the columns of a topic.

A value is stored exactly or refused. A value is never converted to another kind of value: a number is not a time, a
bool is not a number, and text is not a list. The rules of ``fit_table`` for the columns of a table also apply to Python
values. ``None``, ``pandas.NA`` and every ``NaT`` are null. A datetime without a time zone is in UTC.

``pyarrow.array`` alone does not suffice: it drops fractions, nanoseconds and time zones, and ignores unknown fields of
structs. So this module first checks the types of a column's values. It passes the column to pyarrow only if pyarrow
stores or refuses values of all these types exactly. It converts the values of any other column one by one
(``exact_values.py``).
"""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyarrow import types

from sparklog.record.exact_values import ValueRefusedError, exact
from sparklog.record.layout import children_of, is_list, layout_of
from sparklog.record.required_columns import misplaced_null

#: A function that returns the array of the values, or None if pyarrow may not store one of their types exactly. It may
#: raise any error.
_Builder: TypeAlias = "Callable[[Sequence[Any]], pa.Array | None]"

_NONE = type(None)


class RowColumns:
    """A converter from rows to the columns of one schema. It is immutable, and any thread may use it."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns = [(field.name, itemgetter(field.name), ColumnOfValues(field.type)) for field in schema]
        self._required = layout_of(schema).required

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        """Return ``rows`` as a batch. If a row does not have a column, the column's value is null.

        Raises:
            ValueRefusedError: a value does not fit; the error names the column, the row and the value.
        """
        name = ""
        columns = []
        try:
            for name, take, column in self._columns:
                columns.append(column.array(_values_of(rows, name, take)))
        except ValueRefusedError as error:
            raise error.inside(name) from None
        for index in self._required:
            field = self._schema.field(index)
            if path := misplaced_null(columns[index], field):
                raise _null_refused(columns[index], field, path)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _values_of(rows: Sequence[Mapping[str, Any]], name: str, take: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
    try:
        return list(map(take, rows))
    except KeyError:
        return [row.get(name) for row in rows]


def _null_refused(array: pa.Array, field: pa.Field, path: str) -> ValueRefusedError:
    row = next(row for row in range(len(array)) if misplaced_null(array.slice(row, 1), field))
    return ValueRefusedError("it cannot be null", None, path=path, row=row)


class ColumnOfValues:
    """A converter from Python values to one column. It is immutable, and any thread may use it."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._build = _builder_of(kind)

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Return ``values`` as an array of the column's type.

        Raises:
            ValueRefusedError: a value does not fit; the error names the row, the value, and the path to the value.
        """
        try:
            array = self._build(values)
        except Exception:
            array = None
        return self._one_by_one(values) if array is None else array

    def _one_by_one(self, values: Sequence[Any]) -> pa.Array:
        value = None
        stored: list[Any] = []
        try:
            for value in values:
                stored.append(exact(value, self.kind))
        except ValueRefusedError as error:
            error.row = len(stored)
            raise
        except Exception as error:  # A method of the value may fail.
            raise ValueRefusedError(_reason(error), value, row=len(stored)) from error
        return pa.array(stored, self.kind)


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


# --- whole columns ---


def _builder_of(kind: pa.DataType) -> _Builder:
    if types.is_struct(kind):
        return _builder_of_structs(kind)
    if types.is_map(kind):
        return _builder_of_maps(kind)
    if is_list(kind):
        return _builder_of_lists(kind)
    if types.is_time64(kind):
        return partial(_build_times, kind)
    if types.is_timestamp(kind) and kind.unit in {"us", "ns"}:
        return partial(_build_timestamps, kind)
    allowed = frozenset({_NONE, *_exact_types(kind)})
    if types.is_floating(kind) and kind.bit_width < 64:
        return partial(_build_narrow, kind, allowed)
    make = pa.array

    def build(values: Sequence[Any]) -> pa.Array | None:
        # One comparison of two sets is faster than a look-up of each value's type.
        return make(values, kind) if set(map(type, values)) <= allowed else None

    return build


def _exact_types(kind: pa.DataType) -> set[type]:
    """Return the Python types whose values pyarrow either stores exactly in a column of ``kind``, or refuses."""
    if types.is_boolean(kind):
        return {bool}
    if types.is_integer(kind):
        return {int}
    if types.is_floating(kind):
        return {float, int}
    if types.is_decimal(kind):
        return {decimal.Decimal, int}
    if types.is_string(kind) or types.is_large_string(kind):
        return {str, bytes}
    if types.is_binary(kind) or types.is_large_binary(kind):
        return {bytes, str, bytearray}
    if types.is_fixed_size_binary(kind):
        return {bytes}
    if types.is_date(kind):
        return {dt.date}
    if types.is_duration(kind) and kind.unit in {"us", "ns"}:
        return {dt.timedelta}
    return set()


_TIMES = frozenset({_NONE, dt.time})
_DATETIMES = frozenset({_NONE, dt.datetime})
#: The types of time zones whose offsets are always whole seconds.
_WHOLE_ZONES = frozenset({_NONE, ZoneInfo})
_NO_OFFSET = dt.timedelta()
_SEQUENCES = frozenset({_NONE, list, tuple})
_MAPPINGS = frozenset({_NONE, dict})


def _build_narrow(kind: pa.DataType, allowed: frozenset[type], values: Sequence[Any]) -> pa.Array | None:
    """Build an array of floats that are narrower than Python's. Return None if a value would change."""
    if not set(map(type, values)) <= allowed:
        return None
    array = pa.array(values, kind)
    return array if array.cast(pa.float64()).equals(pa.array(values, pa.float64())) else None


def _build_times(kind: pa.DataType, values: Sequence[Any]) -> pa.Array | None:
    if not set(map(type, values)) <= _TIMES or any(value is not None and value.tzinfo for value in values):
        return None
    return pa.array(values, kind)


def _build_timestamps(kind: pa.DataType, values: Sequence[Any]) -> pa.Array | None:
    """Build an array of timestamps. Return None if an offset has microseconds, which pyarrow would drop."""
    if not set(map(type, values)) <= _DATETIMES:
        return None
    # Of the zones only their types can be collected: those of dateutil have no hash.
    if not {type(value.tzinfo) for value in values if value is not None} <= _WHOLE_ZONES:
        others = [value for value in values if value is not None and value.tzinfo is not dt.timezone.utc]
        if any((value.utcoffset() or _NO_OFFSET).microseconds for value in others):
            return None
    return pa.array(values, kind)


def _builder_of_structs(kind: pa.DataType) -> _Builder:
    fields = children_of(kind)
    builders = [_builder_of(field.type) for field in fields]
    names = frozenset(field.name for field in fields)
    takes = [itemgetter(field.name) for field in fields]

    def build(values: Sequence[Any]) -> pa.Array | None:
        kinds = set(map(type, values))
        if not kinds <= _MAPPINGS:
            return None
        given = _with_empty(values, kinds, {})
        try:
            inner = [list(map(take, given)) for take in takes]
            known = set(map(len, given)) <= {len(names)}  # each value has every field and no other field
        except KeyError:
            inner = [[value.get(field.name) for value in given] for field in fields]
            known = False
        if not known and not names.issuperset(chain.from_iterable(given)):
            return None
        children = []
        for build_child, found in zip(builders, inner, strict=True):
            child = build_child(found)
            if child is None:
                return None
            children.append(child)
        return pa.Array.from_buffers(kind, len(values), [_validity(values, given)], children=children)

    return build


def _builder_of_lists(kind: pa.DataType) -> _Builder:
    build_items = _builder_of(kind.value_type)

    def build(values: Sequence[Any]) -> pa.Array | None:
        kinds = set(map(type, values))
        if not kinds <= _SEQUENCES:
            return None
        given = _with_empty(values, kinds, ())
        items = build_items(list(chain.from_iterable(given)))
        if items is None:
            return None
        buffers = [_validity(values, given), _offsets(given, large=types.is_large_list(kind))]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[items])

    return build


def _builder_of_maps(kind: pa.DataType) -> _Builder:
    build_keys, build_items = _builder_of(kind.key_type), _builder_of(kind.item_type)
    entries = pa.struct([kind.key_field, kind.item_field])

    def build(values: Sequence[Any]) -> pa.Array | None:
        kinds = set(map(type, values))
        given = _with_empty(values, kinds, {})
        if kinds <= _MAPPINGS:
            keys = list(chain.from_iterable(given))
            items = list(chain.from_iterable(map(dict.values, given)))
        elif kinds <= _MAPPINGS | _SEQUENCES:
            pairs = [pair for value in given for pair in (value.items() if type(value) is dict else value)]
            if not set(map(type, pairs)) <= {tuple}:
                return None
            keys = [key for key, _ in pairs]
            items = [item for _, item in pairs]
        else:
            return None
        key_array, item_array = build_keys(keys), build_items(items)
        if key_array is None or item_array is None or key_array.null_count:
            return None
        inner = pa.Array.from_buffers(entries, len(keys), [None], children=[key_array, item_array])
        buffers = [_validity(values, given), _offsets(given, large=False)]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[inner])

    return build


def _with_empty(values: Sequence[Any], kinds: set[type], empty: Any) -> Sequence[Any]:
    """Return ``values`` with ``empty`` in place of None.

    ``kinds`` are the types of the values. Return ``values`` itself if it has no None.
    """
    return [empty if value is None else value for value in values] if _NONE in kinds else values


def _validity(values: Sequence[Any], given: Sequence[Any]) -> pa.Buffer | None:
    return None if given is values else pa.array([value is not None for value in values]).buffers()[1]


def _offsets(given: Sequence[Any], *, large: bool) -> pa.Buffer:
    count = len(given) + 1
    return pa.py_buffer(struct.pack(f"<{count}{'q' if large else 'i'}", *accumulate(map(len, given), initial=0)))
