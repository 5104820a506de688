"""The conversion of JSON values and of cells of CSV files to columns, the reverse of ``format_values.py``.

A value that the column cannot hold exactly raises an error with its row.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from sparklog.record.exact_values import UNIT_NS, ValueRefusedError
from sparklog.record.format_values import has_time, is_bytes, is_time, stored_type
from sparklog.record.layout import children_of, is_list
from sparklog.record.rows import ColumnOfValues

#: A function that converts one value, which is not null.
_Convert: TypeAlias = "Callable[[Any], Any]"

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_MICROSECOND = dt.timedelta(microseconds=1)
_DAY_NS = UNIT_NS["D"]

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_NO_NUMBER = re.compile(r"([+-]?)(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_TICKS = re.compile(r"([+-]?[0-9]+) ?(D|d|s|ms|us|ns)", re.ASCII)
_DATE = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_CLOCK = r"([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
_ZONE = r"(?: ?(?:([Zz])|([+-])([0-9]{2}):?([0-9]{2})?))?"
_ISO_DATE = re.compile(_DATE, re.ASCII)
_ISO_TIME = re.compile(_CLOCK, re.ASCII)
_ISO_TIMESTAMP = re.compile(f"{_DATE}(?:[Tt ]{_CLOCK}{_ZONE})?", re.ASCII)
_ISO_DURATION = re.compile(
    r"([+-]?)P(?:([0-9]+)D)?(?:T(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+)(?:\.([0-9]{1,9}))?S)?)?", re.ASCII
)


def from_json(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return parsed JSON values as an array of ``kind``. Numbers with a fraction must be Decimals.

    Raises:
        ValueRefusedError: the column cannot hold a value. The error names the row and the value.
    """
    kinds = set(map(type, values))
    if types.is_float64(kind) and kinds <= {Decimal, type(None)}:
        numbers = [None if value is None else float(value) for value in values]
        if math.inf not in numbers and -math.inf not in numbers:
            return pa.array(numbers, kind)
    if is_time(kind) and kinds <= {str, type(None)}:
        try:
            plain = plain_texts(pa.array(values, pa.string()), kind)
        except (pa.ArrowException, UnicodeEncodeError):
            plain = None  # the conversion below finds the value
        if plain is not None:
            return plain
    return _array(values, kind, _from_json(kind))


def from_csv(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return cells of a CSV file, which are bytes, as an array of ``kind``.

    Raises:
        ValueRefusedError: the column cannot hold a cell. The error names the row and the cell.
    """
    try:
        plain = _plain_cells(cells, kind)
    except pa.ArrowException:
        plain = None  # the conversion below finds the cell
    return _from_cells(cells.to_pylist(), kind) if plain is None else plain


def _from_cells(cells: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    if types.is_nested(kind):
        return _array(cells, kind, partial(_nested_cell, _from_json(kind)))
    if is_bytes(kind):
        return ColumnOfValues(kind).array(cells)
    convert: _Convert | None = None
    if types.is_boolean(kind):
        convert = _cell_to_boolean
    elif types.is_integer(kind):
        convert = _cell_to_integer
    elif types.is_floating(kind):
        convert = partial(_cell_to_float, kind)
    elif types.is_decimal(kind) or is_time(kind):
        leaf = _from_json(kind)
        assert leaf is not None
        convert = partial(_stripped_cell, leaf)
    return _array(cells, kind, convert)


def _array(values: Sequence[Any], kind: pa.DataType, convert: _Convert | None) -> pa.Array:
    done = values if convert is None else _converted(values, convert)
    try:
        array = ColumnOfValues(stored_type(kind)).array(done)
    except ValueRefusedError as error:
        error.reason = error.reason.partition("; send numpy")[0]  # this advice is for programs
        if error.path == "" and convert is not None:
            value = values[error.row]
            error.value = _text_of(value) if isinstance(value, bytes) else value
        raise
    return array.cast(kind) if has_time(kind) else array


def _converted(values: Sequence[Any], convert: _Convert) -> list[Any]:
    done: list[Any] = []
    try:
        for value in values:
            done.append(None if value is None else convert(value))  # noqa: PERF401 - the error needs len(done)
    except ValueRefusedError as error:
        error.row = len(done)
        raise
    return done


@lru_cache(maxsize=1024)
def _from_json(kind: pa.DataType) -> _Convert | None:
    """Return the function that converts a JSON value to a stored value of the column; None if none is needed."""
    if types.is_struct(kind):
        inner = {field.name: found for field in children_of(kind) if (found := _from_json(field.type))}
        return partial(_struct_from_json, inner) if inner else None
    if types.is_map(kind):
        return partial(_map_from_json, _from_json(kind.key_type), _from_json(kind.item_type))
    if is_list(kind) or types.is_fixed_size_list(kind):
        items = _from_json(kind.value_type)
        return partial(_list_from_json, items) if items else None
    if types.is_floating(kind):
        return partial(_float_from_json, kind)
    if types.is_decimal(kind):
        return _decimal_from_json
    if is_bytes(kind):
        return _bytes_from_json
    if types.is_timestamp(kind):
        return partial(_time_from_text, kind, _timestamp_ns, "a time such as 2024-01-31T12:00:00Z")
    if types.is_date(kind):
        return partial(_time_from_text, kind, _date_ns, "a date such as 2024-01-31")
    if types.is_time(kind):
        return partial(_time_from_text, kind, _clock_ns, "a time such as 12:34:56.789")
    if types.is_duration(kind):
        return partial(_time_from_text, kind, _duration_ns, "a duration such as PT1.5S")
    return None


def _struct_from_json(inner: dict[str, _Convert], value: Any) -> Any:
    if not isinstance(value, dict):
        return value  # Arrow raises an error for it
    found = dict(value)
    for name, convert in inner.items():
        if found.get(name) is not None:
            found[name] = _inside(convert, found[name], f".{name}")
    return found


def _list_from_json(convert: _Convert, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [None if item is None else _inside(convert, item, f"[{at}]") for at, item in enumerate(value)]


def _map_from_json(keys: _Convert | None, items: _Convert | None, value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in pairs):
        raise ValueRefusedError("expected an object, or a list of pairs of key and value", value)
    found = []
    for key, item in pairs:
        part = f"[{key!r:.30}]"
        found.append((_inside(keys, key, part), _inside(items, item, part)))
    return found


def _inside(convert: _Convert | None, value: Any, part: str) -> Any:
    if convert is None or value is None:
        return value
    try:
        return convert(value)
    except ValueRefusedError as error:
        raise error.inside(part) from None


def _float_from_json(kind: pa.DataType, value: Any) -> Any:
    if isinstance(value, str) and (found := _no_number(value)) is not None:
        return found
    if isinstance(value, int) and not isinstance(value, bool):
        return _whole_number(value)
    return _nearest(kind, value) if isinstance(value, Decimal) else value


def _whole_number(value: int) -> int | Decimal:
    """Return a whole number for a column of floats.

    A large number is accepted if it is how a float is written, as JavaScript writes 2e19 with all digits.
    """
    return value if abs(value) <= 2**53 else Decimal(value)


def _no_number(text: str) -> float | None:
    match = _NO_NUMBER.fullmatch(text)
    return float(match[0]) if match else None


def _nearest(kind: pa.DataType, value: Decimal) -> float:
    """Return the value of the column's type that is nearest to the decimal ``value``."""
    found = float(value)
    if kind.bit_width < 64:
        with np.errstate(over="ignore"):
            found = float((np.float16 if kind.bit_width == 16 else np.float32)(found))
    if math.isinf(found):
        raise ValueRefusedError(f"it is out of the range of {kind}", value)
    return found


def _decimal_from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not _NUMBER.fullmatch(value):
        raise ValueRefusedError("expected a decimal number", value)
    return Decimal(value)


def _bytes_from_json(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueRefusedError(f"invalid base64: {error}", value) from None
    if isinstance(value, str):
        return value
    raise ValueRefusedError('expected text, or bytes as {"base64": "..."}', value)


def _time_from_text(kind: pa.DataType, parse: Callable[[str], int | None], expected: str, value: Any) -> int:
    if not isinstance(value, str):
        raise ValueRefusedError(f"expected {expected}", value)
    unit = "D" if types.is_date32(kind) else "ms" if types.is_date64(kind) else kind.unit
    if match := _TICKS.fullmatch(value):
        ns: int | None = int(match[1]) * UNIT_NS[match[2].replace("d", "D")]
    else:
        try:
            ns = parse(value)
        except (ValueError, OverflowError) as error:  # for example February 31
            raise ValueRefusedError(str(error), value) from None
    if ns is None:
        raise ValueRefusedError(f"expected {expected}, or a number with a unit, such as '5 {unit.lower()}'", value)
    ticks, rest = divmod(ns, UNIT_NS[unit])
    if rest:
        raise ValueRefusedError(f"it is more precise than the column's unit, {unit}", value)
    bits = 31 if kind.bit_width == 32 else 63
    if not -(2**bits) <= ticks < 2**bits:
        raise ValueRefusedError(f"it is out of the range of {kind}", value)
    return ticks


def _timestamp_ns(text: str) -> int | None:
    """Return the nanoseconds from 1970 to the time in ``text``, which is UTC unless it has a time zone."""
    match = _ISO_TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    fraction, _, sign, zone_hours, zone_minutes = match.groups()[6:]
    at = dt.datetime(year, month, day, hour, minute, second, tzinfo=dt.timezone.utc)
    ns = (at - _EPOCH) // _MICROSECOND * 1000 + _fraction_ns(fraction)
    if sign:
        offset = int(zone_hours) * 60 + int(zone_minutes or 0)
        if offset >= 24 * 60 or int(zone_minutes or 0) >= 60:
            raise ValueError(f"invalid time zone {sign}{zone_hours}:{zone_minutes or '00'}")
        ns -= (offset if sign == "+" else -offset) * 60 * 10**9
    return ns


def _date_ns(text: str) -> int | None:
    match = _ISO_DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day = map(int, match.groups())
    return (dt.date(year, month, day) - dt.date(1970, 1, 1)).days * _DAY_NS


def _clock_ns(text: str) -> int | None:
    match = _ISO_TIME.fullmatch(text)
    if match is None:
        return None
    at = dt.time(int(match[1]), int(match[2]), int(match[3] or 0))
    return ((at.hour * 60 + at.minute) * 60 + at.second) * 10**9 + _fraction_ns(match[4])


def _duration_ns(text: str) -> int | None:
    match = _ISO_DURATION.fullmatch(text)
    if match is None or not any(match.groups()[1:]) or text.endswith("T"):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[1:5])
    ns = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 10**9 + _fraction_ns(match[6])
    return -ns if match[1] == "-" else ns


def _fraction_ns(digits: str | None) -> int:
    return int(digits.ljust(9, "0")) if digits else 0


# --- whole columns ---

#: The texts for which Arrow's casts have the same result as this module's functions. The casts are more than ten times
#: as fast.
_PLAIN_INTEGER = r"^-?[0-9]{1,18}$"
_PLAIN_FLOAT = r"^-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,20})?$"
_PLAIN_DATE = r"^(?:[1-9][0-9]{3}|0[1-9][0-9]{2})-[0-9]{2}-[0-9]{2}$"
_PLAIN_TIMESTAMP = _PLAIN_DATE[:-1] + r"[T ](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"


def _plain_cells(cells: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return the cells as an array of ``kind`` if Arrow can cast all of them; otherwise None. Raises Arrow's errors."""
    if types.is_string(kind) or types.is_large_string(kind) or is_bytes(kind):
        return cells.cast(kind)
    return plain_texts(cells.cast(pa.string()), kind)


def plain_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return the texts as an array of ``kind``, or None if Arrow's cast might not convert all of them exactly.

    If the cast is used and a text has an invalid value, this function raises Arrow's error.
    """
    if types.is_integer(kind):
        return texts.cast(kind) if _all_match(texts, _PLAIN_INTEGER) else None
    if types.is_float64(kind):
        # Arrow keeps the sign of -0.
        return texts.cast(kind) if _all_match(texts, _PLAIN_FLOAT) else None
    if types.is_date32(kind):
        return texts.cast(kind) if _all_match(texts, _PLAIN_DATE) else None
    if types.is_timestamp(kind) and kind.unit in {"us", "ns"}:
        if _all_match(texts, f"{_PLAIN_TIMESTAMP}Z$"):
            texts = pc.utf8_slice_codeunits(texts, 0, -1)
        elif not _all_match(texts, f"{_PLAIN_TIMESTAMP}$"):
            return None
        return texts.cast(pa.timestamp(kind.unit)).cast(kind)  # UTC
    return None


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern)).as_py() is not False


# --- cells of CSV files ---


def _text_of(cell: bytes) -> str:
    try:
        return cell.decode().strip()
    except UnicodeDecodeError as error:
        raise ValueRefusedError(f"invalid UTF-8, {error.reason} at byte {error.start}", cell) from None


def _stripped_cell(convert: _Convert, cell: bytes) -> Any:
    text = _text_of(cell)
    try:
        return convert(text)
    except ValueRefusedError as error:
        raise ValueRefusedError(error.reason, text) from None


def _cell_to_boolean(cell: bytes) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(_text_of(cell).lower())
    if found is None:
        raise ValueRefusedError("expected true or false", _text_of(cell))
    return found


def _cell_to_integer(cell: bytes) -> int | Decimal:
    text = _text_of(cell)
    if not _NUMBER.fullmatch(text):
        raise ValueRefusedError("expected a whole number", text)
    return int(text) if text.lstrip("+-").isdigit() else Decimal(text)


def _cell_to_float(kind: pa.DataType, cell: bytes) -> float | Decimal:
    text = _text_of(cell)
    if (found := _no_number(text)) is not None:
        return found
    if not _NUMBER.fullmatch(text):
        raise ValueRefusedError("expected a number", text)
    if text.lstrip("+-").isdigit():
        return _whole_number(int(text)) or float(text)  # keeps the sign of -0
    return _nearest(kind, Decimal(text))


def _nested_cell(convert: _Convert | None, cell: bytes) -> Any:
    text = _text_of(cell)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueRefusedError(f"invalid JSON: {error}", text) from None
    return value if convert is None or value is None else convert(value)


# --- JSON documents ---


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has two values for {twice!r}")
    return found


#: The decoder of JSON. A number with a fraction or an exponent becomes a Decimal, so that no digit is lost.
DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=Decimal)
parse_json = DECODER.decode
