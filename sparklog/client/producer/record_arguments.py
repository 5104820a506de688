"""The validation of the arguments of ``Producer.send``."""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.record_chunk import Header
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.exact_values import datetime_us


def microseconds(timestamp: dt.datetime | int) -> int:
    """Return the microseconds from the Unix epoch to ``timestamp``. A datetime without a time zone is UTC.

    Raises:
        TypeError: ``timestamp`` is neither a datetime nor an int.
        ValueError: ``timestamp`` is ``pandas.NaT``, has nanoseconds, or does not fit into 64 bits.
    """
    if isinstance(timestamp, dt.datetime):
        return datetime_us(timestamp)
    try:
        time_us = operator.index(timestamp)
    except TypeError:
        expected = "a datetime or microseconds since 1970 as an int"
        raise TypeError(f"timestamp: {type(timestamp).__name__} found, expected {expected}") from None
    if not -(2**63) <= time_us < 2**63:
        raise ValueError(f"timestamp: {time_us} us found; expected at most 64 bits")
    return time_us


def as_bytes(what: str, found: Any) -> bytes:
    """Return ``found``, which is bytes or text, as bytes. Text becomes UTF-8. ``what`` names the value in errors.

    Raises:
        TypeError: ``found`` is neither bytes nor text.
        ValueError: the text is not valid Unicode.
    """
    if isinstance(found, str):
        return utf8(what, found)
    if isinstance(found, (bytes, bytearray, memoryview)):
        return bytes(found)
    raise TypeError(f"{what}: {type(found).__name__} found; expected bytes or text")


def header_list(headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]) -> list[Header]:
    """Return a record's headers as a list of dicts with ``key`` and ``value``, which Arrow accepts.

    Raises:
        TypeError: a name is not text, or a value is not bytes, text or None.
        ValueError: a text is not valid Unicode.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found: list[Header] = []
    for name, value in pairs:
        if not isinstance(name, str) or not (value is None or isinstance(value, (str, bytes))):
            raise TypeError(f"header {name!r}: {value!r}; expected text, and bytes, text or None")
        utf8("header", name)
        found.append({"key": name, "value": utf8(f"header {name!r}", value) if isinstance(value, str) else value})
    return found


def utf8(what: str, text: str) -> bytes:
    """Encode text as UTF-8. Raise a ValueError that names ``what`` for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: no Unicode text, {error.reason} at {error.start}") from None


def typed_row(topic: ProducerTopic, value: Any, key: Any, headers: Any) -> tuple[Mapping[str, Any], int]:
    """Check the column names of a record for a topic with its own columns. Return a copy and its approximate size.

    The size is in bytes. The values are validated later, when the record is encoded.

    Raises:
        TypeError: the value is not a mapping, or a key or headers are given.
        BrokerError: SCHEMA_MISMATCH for an unknown column.
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        raise TypeError(f"value: {type(value).__name__} found; topic {topic.name!r} expects {topic.schema.names}")
    if key is not None or headers is not None:
        raise TypeError(
            f"topic {topic.name!r} has columns of its own: pass the columns as the value, without key and headers"
        )
    if not topic.column_names.issuperset(value):
        unknown = value.keys() - topic.column_names
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH,
            f"columns {sorted(map(str, unknown))} found; topic {topic.name!r} has {topic.schema.names}",
        )
    # A copy, because the caller may change its mapping for the next record.
    return dict(value), sum(len(part) if isinstance(part, (str, bytes)) else 8 for part in value.values())
