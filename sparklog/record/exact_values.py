"""Conversion of single Python values to a form that pyarrow stores exactly. Other values are refused.

A value is never converted to another kind of value: a number is not a time, a bool is not a number, and text is not a
list. ``None``, ``pandas.NA`` and every ``NaT`` are null. A datetime without a time zone is in UTC.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from sparklog.record.layout import children_of, is_list

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_NAIVE_EPOCH = _EPOCH.replace(tzinfo=None)
_PLAIN_ZONES = (None, dt.timezone.utc)
_MICROSECOND = dt.timedelta(microseconds=1)
#: The number of nanoseconds in each unit of Arrow or numpy.
UNIT_NS = {
    "s": 10**9,
    "ms": 10**6,
    "us": 1000,
    "ns": 1,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "D": 86_400 * 10**9,
    "W": 7 * 86_400 * 10**9,
}
#: A number of digits that no numeric column can have.
_MOST_DIGITS = 400
_SHOWN_CHARACTERS = 100


class ValueRefusedError(Exception):
    """The error for a value that its column cannot store exactly.

    If the value is nested, ``path`` is the path from the column to it; otherwise ``path`` is empty. ``row`` is the row
    number, starting at 0.
    """

    def __init__(self, reason: str, value: Any, *, path: str = "", row: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.path = path
        self.row = row

    def inside(self, part: str) -> ValueRefusedError:
        """Return the same error with a path that begins at the enclosing value.

        ``part`` is the step from the enclosing value to the value of this error. The new path is this step and then the
        old path.
        """
        return ValueRefusedError(self.reason, self.value, path=part + self.path, row=self.row)

    def __str__(self) -> str:
        return f"{shown(self.value)}: {self.reason}"


def shown(value: Any) -> str:
    """Return ``value`` and its type as a text that is short enough for an error message."""
    try:
        text = repr(value)
    except Exception as error:  # The value's own ``__repr__`` may fail.
        text = f"<{error!r}>"
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    return f"{text} ({type(value).__name__})"


def is_missing(value: Any) -> bool:
    """Return whether ``value`` means no value: None, ``pandas.NA``, or a ``NaT`` of pandas or numpy."""
    if value is None:
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    kind = type(value)
    return kind.__name__ in {"NAType", "NaTType"} and kind.__module__.startswith("pandas.")


def exact(value: Any, kind: pa.DataType) -> Any:
    """Return ``value`` in a form that pyarrow stores exactly in ``kind``. Raises ValueRefusedError."""
    if is_missing(value):
        return None
    if types.is_struct(kind):
        return _exact_struct(value, kind)
    if types.is_map(kind):
        return _exact_map(value, kind)
    if is_list(kind) or types.is_fixed_size_list(kind):
        return _exact_list(value, kind)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    return _leaf_of(kind)(value, kind)


def _leaf_of(kind: pa.DataType) -> Callable[[Any, pa.DataType], Any]:
    if types.is_boolean(kind):
        return _exact_boolean
    if types.is_integer(kind):
        return _exact_integer
    if types.is_floating(kind):
        return _exact_float
    if types.is_decimal(kind):
        return _exact_decimal
    if types.is_string(kind) or types.is_large_string(kind):
        return _exact_text
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _exact_bytes
    if types.is_date(kind):
        return _exact_date
    if types.is_timestamp(kind):
        return _exact_timestamp
    if types.is_time(kind):
        return _exact_time
    if types.is_duration(kind):
        return _exact_duration
    raise AssertionError(f"topics do not allow the type {kind}")


def _no(value: Any, kind: pa.DataType, reason: str) -> ValueRefusedError:
    return ValueRefusedError(f"it does not fit {kind}: {reason}", value)


def _exact_boolean(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise _no(value, kind, "expected True or False")


def _exact_integer(value: Any, kind: pa.DataType) -> int:
    if _is_integer(value):
        number = int(value)
    elif isinstance(value, (float, np.floating)):
        # Not ``float.is_integer``: a number of numpy may have more digits than a float.
        if not np.isfinite(value) or value != np.trunc(value):
            raise _no(value, kind, "expected a whole number")
        number = int(value)
    elif isinstance(value, decimal.Decimal):
        if not value.is_finite() or value.adjusted() > _MOST_DIGITS or value != value.to_integral_value():
            raise _no(value, kind, "expected a whole number")
        number = int(value)
    else:
        raise _no(value, kind, "expected a whole number")
    low = 0 if types.is_unsigned_integer(kind) else -(1 << (kind.bit_width - 1))
    high = (1 << kind.bit_width) - 1 + low
    if not low <= number <= high:
        raise _no(value, kind, f"expected {low} to {high}")
    return number


def _exact_float(value: Any, kind: pa.DataType) -> float:
    narrow: Any = {16: np.float16, 32: np.float32}.get(kind.bit_width, np.float64)
    if isinstance(value, decimal.Decimal):
        with np.errstate(over="ignore"):
            nearest = narrow(float(value))
        # Accept the decimal number if it is the shortest text of the nearest value, or equals that value.
        exact = not value.is_finite() or (
            bool(np.isfinite(nearest)) and value in {decimal.Decimal(str(nearest)), float(nearest)}
        )
    elif _is_integer(value) or isinstance(value, (float, np.floating)):
        try:
            with np.errstate(over="ignore"):
                nearest = narrow(float(value))
        except OverflowError:
            raise _no(value, kind, "it is out of range") from None
        # Python compares an int and a float exactly. numpy does not.
        exact = bool(np.isnan(nearest)) or float(nearest) == (int(value) if _is_integer(value) else value)
    else:
        raise _no(value, kind, "expected a number")
    if exact:
        return float(nearest)
    if np.isinf(nearest):
        raise _no(value, kind, "it is out of range")
    hint = f"; send numpy.{narrow.__name__}(x) to store that" if kind.bit_width < 64 else ""
    raise _no(value, kind, f"the nearest value is {float(nearest)!r}{hint}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def _exact_decimal(value: Any, kind: pa.DataType) -> decimal.Decimal:
    if _is_integer(value):
        number = decimal.Decimal(int(value))
    elif isinstance(value, (float, np.float16)):
        number = decimal.Decimal(repr(float(value)))
    elif isinstance(value, np.floating):
        number = decimal.Decimal(str(value))  # the shortest text of its own type, as in a cast of Arrow
    elif isinstance(value, decimal.Decimal):
        number = value
    else:
        raise _no(value, kind, "expected a decimal number")
    if not number.is_finite():
        raise _no(value, kind, "expected a finite number")
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    whole = "".join(map(str, digits)).rstrip("0") or "0"
    exponent += len(digits) - len(whole) if any(digits) else 0
    if not any(digits):
        return decimal.Decimal(0)
    if -exponent > kind.scale:
        raise _no(value, kind, f"it has {-exponent} decimal places, at most {kind.scale} expected")
    if len(whole) + exponent > kind.precision - kind.scale:
        raise _no(value, kind, f"expected at most {kind.precision - kind.scale} digits before the point")
    # Give the number the column's scale, so that pyarrow does not infer a scale from other values.
    return decimal.Decimal((sign, (*map(int, whole), *(0,) * (exponent + kind.scale)), -kind.scale))


def _exact_text(value: Any, kind: pa.DataType) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _no(value, kind, f"no Unicode text, {error.reason} at {error.start}") from None
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise _no(value, kind, f"no UTF-8, {error.reason} at byte {error.start}") from None
    raise _no(value, kind, "expected text")


def _exact_bytes(value: Any, kind: pa.DataType) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        found = bytes(value)
    elif isinstance(value, str):
        found = _exact_text(value, kind).encode()
    else:
        raise _no(value, kind, "expected bytes")
    if types.is_fixed_size_binary(kind) and len(found) != kind.byte_width:
        raise _no(value, kind, f"it has {len(found)} bytes, {kind.byte_width} expected")
    return found


def _exact_date(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, np.datetime64) and np.datetime_data(value)[0] == "D":
        days = int(value.astype(np.int64)) * np.datetime_data(value)[1]
        ticks, bits = (days, 31) if types.is_date32(kind) else (days * 86_400_000, 63)
        if not -(2**bits) <= ticks < 2**bits:
            raise _no(value, kind, "it is out of range")
        return ticks
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return value
    raise _no(value, kind, "expected a date")


def _exact_timestamp(value: Any, kind: pa.DataType) -> int:
    if isinstance(value, dt.datetime):
        try:
            ns = datetime_ns(value)
        except ValueError as error:
            raise _no(value, kind, str(error)) from None
    elif isinstance(value, dt.date):
        ns = (dt.datetime(value.year, value.month, value.day, tzinfo=dt.timezone.utc) - _EPOCH) // _MICROSECOND * 1000
    elif isinstance(value, np.datetime64):
        if np.datetime_data(value)[0] in {"Y", "M"}:
            value = value.astype("datetime64[D]")
        ns = _numpy_ns(value, kind)
    else:
        raise _no(value, kind, "expected a datetime")
    return _in_unit(value, kind, ns)


def datetime_ns(value: dt.datetime) -> int:
    """Return the nanoseconds from 1970 to ``value``. A value without a time zone is in UTC.

    Raises:
        ValueError: ``value`` is ``pandas.NaT``.
    """
    if is_missing(value):
        raise ValueError(f"{value!r} found, expected a datetime")
    # Only a pandas timestamp has this attribute. Do not use its own arithmetic, which ends in the year 2262.
    nanosecond = int(getattr(value, "nanosecond", 0))
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime(warn=False)
    if value.utcoffset() is None:
        value = value.replace(tzinfo=dt.timezone.utc)
    return (value - _EPOCH) // _MICROSECOND * 1000 + nanosecond


def datetime_us(value: dt.datetime) -> int:
    """Return the microseconds from 1970 to ``value``. A value without a time zone is in UTC.

    Raises:
        ValueError: ``value`` has nanoseconds, or is ``pandas.NaT``.
    """
    if type(value) is dt.datetime and value.tzinfo in _PLAIN_ZONES:
        # This is the usual case. Only pandas' subclass of datetime can have nanoseconds.
        since = value - (_EPOCH if value.tzinfo is not None else _NAIVE_EPOCH)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    us, rest = divmod(datetime_ns(value), 1000)
    if rest:
        raise ValueError(f"{value!r}: it is finer than microseconds")
    return us


def _exact_time(value: Any, kind: pa.DataType) -> Any:
    if not isinstance(value, dt.time):
        raise _no(value, kind, "expected a time")
    if value.tzinfo is not None:
        raise _no(value, kind, "expected a time without a time zone")
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return _in_unit(value, kind, (seconds * 1_000_000 + value.microsecond) * 1000)


def _exact_duration(value: Any, kind: pa.DataType) -> int:
    if isinstance(value, dt.timedelta):
        ns = ((value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds) * 1000
        return _in_unit(value, kind, ns + int(getattr(value, "nanoseconds", 0)))
    if isinstance(value, np.timedelta64):
        return _in_unit(value, kind, _numpy_ns(value, kind))
    raise _no(value, kind, "expected a timedelta")


def _numpy_ns(value: Any, kind: pa.DataType) -> int:
    unit, count = np.datetime_data(value)
    if unit not in UNIT_NS:
        raise _no(value, kind, f"the unit {unit!r} found, expected one of {', '.join(UNIT_NS)}")
    return int(value.astype(np.int64)) * int(count) * UNIT_NS[unit]


def _in_unit(value: Any, kind: pa.DataType, ns: int) -> int:
    ticks, rest = divmod(ns, UNIT_NS[kind.unit])
    if rest:
        raise _no(value, kind, f"it is finer than {kind.unit}")
    if not -(2 ** (kind.bit_width - 1)) <= ticks < 2 ** (kind.bit_width - 1):
        raise _no(value, kind, "it is out of range")
    return ticks


def _exact_struct(value: Any, kind: pa.DataType) -> dict[str, Any]:
    fields = children_of(kind)
    if isinstance(value, tuple) and len(value) == len(fields) and not _is_pairs(value):
        value = dict(zip([field.name for field in fields], value, strict=True))  # by position, like Spark's rows
    elif not isinstance(value, Mapping):
        if not isinstance(value, (list, tuple)) or not _is_pairs(value):
            raise _no(value, kind, "expected a mapping of its fields")
        if len(dict(value)) != len(value):
            raise _no(value, kind, "a field is given twice")
        value = dict(value)
    if unknown := sorted(str(name) for name in value.keys() - {field.name for field in fields}):
        raise _no(value, kind, f"unknown fields {unknown}")
    return {field.name: _inside(value.get(field.name), field.type, f".{field.name}") for field in fields}


def _is_pairs(value: Sequence[Any]) -> bool:
    return all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)


def _exact_list(value: Any, kind: pa.DataType) -> list[Any]:
    if not _is_iterable(value):
        raise _no(value, kind, "expected a list")
    items = [_inside(item, kind.value_type, f"[{index}]") for index, item in enumerate(value)]
    if types.is_fixed_size_list(kind) and len(items) != kind.list_size:
        raise _no(value, kind, f"it has {len(items)} items, {kind.list_size} expected")
    return items


def _exact_map(value: Any, kind: pa.DataType) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping) and not _is_iterable(value):
        raise _no(value, kind, "expected a mapping or pairs")
    found = []
    for pair in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _no(value, kind, "expected a mapping or pairs of a key and a value")
        if is_missing(pair[0]):
            raise _no(value, kind, "a key of a map cannot be null")
        key = _inside(pair[0], kind.key_type, f"[{pair[0]!r:.30}]")
        found.append((key, _inside(pair[1], kind.item_type, f"[{pair[0]!r:.30}]")))
    return found


def _is_iterable(value: Any) -> bool:
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(value, Iterable):
        return False
    return hasattr(value, "__len__")


def _inside(value: Any, kind: pa.DataType, part: str) -> Any:
    try:
        return exact(value, kind)
    except ValueRefusedError as error:
        raise error.inside(part) from None
