"""The conversion of column values to JSON, to text for people, and to cells of CSV files, without loss.

JSON lacks most of Arrow's types, so the column's type decides how a value is written; ``docs/values.md`` has the table.
A time outside the range of Python's ``datetime`` is written as a number with a unit, ``"9223372036854775807 us"``.
``parse_values.py`` has the reverse conversion.

Times are converted from the integers that Arrow stores, so that range and unit are those of the column, not Python's.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import types

from sparklog.record.exact_values import UNIT_NS
from sparklog.record.layout import children_of, is_list

#: A function that converts one value, which is not null.
_Convert: TypeAlias = "Callable[[Any], Any]"

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_MICROSECOND = dt.timedelta(microseconds=1)
_FIRST_US = (dt.datetime.min.replace(tzinfo=dt.timezone.utc) - _EPOCH) // _MICROSECOND
_LAST_US = (dt.datetime.max.replace(tzinfo=dt.timezone.utc) - _EPOCH) // _MICROSECOND
_DAY_NS = UNIT_NS["D"]


def json_values(array: pa.Array) -> list[Any]:
    """Return the values of ``array`` as types that ``json`` can write: None, numbers, text, lists and dicts."""
    convert = _to_json(array.type)
    values = _stored(array).to_pylist()
    return values if convert is None else [None if value is None else convert(value) for value in values]


def text_values(array: pa.Array) -> list[bytes | None]:
    """Return the values of ``array`` as text for people: times with their zone, nested values as JSON."""
    kind = array.type
    if types.is_nested(kind):
        return [None if value is None else as_json(value) for value in json_values(array)]
    values: list[Any] = _stored(array).to_pylist()
    if is_bytes(kind):
        return values
    convert: _Convert = str
    if has_time(kind):
        convert = partial(_timestamp_text, kind, "+00:00") if types.is_timestamp(kind) else _leaf_to_json(kind) or str
    return [None if value is None else str(convert(value)).encode() for value in values]


def csv_values(array: pa.Array) -> list[bytes | None]:
    """Return the values of ``array`` as the cells of a CSV file, without quotes."""
    cells: list[bytes | None] = []
    if is_bytes(array.type):
        cells += array.to_pylist()
        return cells
    for value in json_values(array):
        if value is None or isinstance(value, str):
            cells.append(None if value is None else value.encode())
        else:
            cells.append(as_json(value))
    return cells


def as_json(value: Any) -> bytes:
    """Encode one value from ``json_values`` as a JSON document."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _stored(array: pa.Array) -> pa.Array:
    """Return ``array`` with times replaced by the integers that Arrow stores."""
    return array.cast(stored_type(array.type)) if has_time(array.type) else array


@lru_cache(maxsize=1024)
def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with integer types in place of time types, as Arrow stores times."""
    if is_time(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if types.is_struct(kind):
        return pa.struct([_stored_field(child) for child in children_of(kind)])
    if types.is_map(kind):
        return pa.map_(_stored_field(kind.key_field), _stored_field(kind.item_field), kind.keys_sorted)
    if types.is_large_list(kind):
        return pa.large_list(_stored_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_stored_field(kind.value_field), kind.list_size)
    return pa.list_(_stored_field(kind.value_field)) if is_list(kind) else kind


def _stored_field(field: pa.Field) -> pa.Field:
    return field.with_type(stored_type(field.type))


def is_time(kind: pa.DataType) -> bool:
    """Return whether values of this type are dates, times or durations."""
    return bool(types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind))


def has_time(kind: pa.DataType) -> bool:
    """Return whether values of this type are or contain times."""
    return is_time(kind) or any(has_time(child.type) for child in children_of(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values of this type are bytes."""
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


@lru_cache(maxsize=1024)
def _to_json(kind: pa.DataType) -> _Convert | None:
    """Return the function that converts a stored value to JSON; None if no conversion is needed."""
    if types.is_struct(kind):
        inner = {field.name: found for field in children_of(kind) if (found := _to_json(field.type))}
        return partial(_struct_to_json, inner) if inner else None
    if types.is_map(kind):
        same: _Convert = _same
        return partial(_map_to_json, _to_json(kind.key_type) or same, _to_json(kind.item_type) or same)
    if is_list(kind) or types.is_fixed_size_list(kind):
        items = _to_json(kind.value_type)
        return partial(_list_to_json, items) if items else None
    return _leaf_to_json(kind)


def _leaf_to_json(kind: pa.DataType) -> _Convert | None:
    if types.is_floating(kind):
        return _float_to_json
    if types.is_decimal(kind):
        return str
    if is_bytes(kind):
        return _bytes_to_json
    if types.is_timestamp(kind):
        return partial(_timestamp_text, kind, "Z")
    if types.is_date(kind):
        return partial(_date_text, kind)
    if types.is_time(kind):
        return partial(_time_text, kind.unit)
    if types.is_duration(kind):
        return partial(_duration_text, kind.unit)
    return None


def _same(value: Any) -> Any:
    return value


def _struct_to_json(inner: dict[str, _Convert], value: dict[str, Any]) -> dict[str, Any]:
    for name, convert in inner.items():
        if value[name] is not None:
            value[name] = convert(value[name])
    return value


def _list_to_json(convert: _Convert, value: list[Any]) -> list[Any]:
    return [None if item is None else convert(item) for item in value]


def _map_to_json(keys: _Convert, items: _Convert, value: list[tuple[Any, Any]]) -> list[list[Any]]:
    return [[keys(key), None if item is None else items(item)] for key, item in value]


def _float_to_json(value: Any) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _bytes_to_json(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _timestamp_text(kind: pa.DataType, utc: str, ticks: int) -> str:
    us, ns = divmod(ticks * UNIT_NS[kind.unit], 1000)
    if not _FIRST_US <= us <= _LAST_US:
        return f"{ticks} {kind.unit}"
    text = (_EPOCH + dt.timedelta(microseconds=us)).replace(tzinfo=None).isoformat()
    return _with_ns(text, us, ns) + (utc if kind.tz else "")


def _with_ns(text: str, us: int, ns: int) -> str:
    """Return ``text`` with nanoseconds appended if there are any.

    ``text`` ends with the fraction of the second in ``us``, if there is one.
    """
    if not ns:
        return text
    return f"{text}{ns:03}" if us % 1_000_000 else f"{text}.000000{ns:03}"


def _date_text(kind: pa.DataType, ticks: int) -> str:
    days, rest = (ticks, 0) if types.is_date32(kind) else divmod(ticks, 86_400_000)
    try:
        if not rest:
            return dt.date.fromordinal(dt.date(1970, 1, 1).toordinal() + days).isoformat()
    except (ValueError, OverflowError):
        pass  # the year is not between 1 and 9999
    return f"{ticks} {'d' if types.is_date32(kind) else 'ms'}"


def _time_text(unit: str, ticks: int) -> str:
    us, ns = divmod(ticks * UNIT_NS[unit], 1000)
    if not 0 <= us < _DAY_NS // 1000:
        return f"{ticks} {unit}"
    text = (_EPOCH + dt.timedelta(microseconds=us)).time().isoformat()
    return _with_ns(text, us, ns)


def _duration_text(unit: str, ticks: int) -> str:
    """Return a duration in ISO 8601, in days and seconds.

    If it is not a whole number of microseconds, return a number with its unit.
    """
    us, ns = divmod(abs(ticks) * UNIT_NS[unit], 1000)
    if ns:
        return f"{ticks} {unit}"
    seconds, fraction = divmod(us, 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    text = f"{seconds}.{fraction:06}".rstrip("0") if fraction else str(seconds)
    clock = f"T{text}S" if seconds or fraction or not days else ""
    return f"{'-' if ticks < 0 else ''}P{f'{days}D' if days else ''}{clock}"
