"""Records by a template, with kcat's words: ``%t [%p] at %o: %k = %s\\n``.

    %t topic           %k key              %T timestamp, milliseconds since 1970
    %p partition       %K its length       %h headers, as name=value,...
    %o offset          %s value            %{name} any column of the topic
                       %S its length       %% a percent sign; \\n \\r \\t \\xHH as in C

A null has the length -1 and no text. Of a typed topic, which has columns of its own, %s is the record as JSON.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from sparklog.client.feed_cuts import LOG_COLUMNS
from sparklog.errors import ConfigError

_PARTS = re.compile(rb"%\{([^}]*)\}|%(.)|\\x([0-9a-fA-F]{2})|\\(.)|([^%\\]+)|(.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\", b"0": b"\0"}
_WORDS = frozenset(b"tpokKsSTh")
_PLACES = {field.name for field in LOG_COLUMNS}


class Template:
    """Parsed once, rendered for every record. Raises ConfigError for what it does not know."""

    def __init__(self, text: str) -> None:
        #: Literal bytes, or the name of a column, or one of the words.
        self._parts: list[tuple[str, bytes]] = []
        for column, word, code, escape, literal, stray in _PARTS.findall(text.encode()):
            if column:
                self._parts.append(("column", column))
            elif word and word != b"%":
                if word[0] not in _WORDS:
                    known = "%t %p %o %k %K %s %S %T %h %{column} %%"
                    raise ConfigError(f"--template: %{word.decode(errors='replace')} found, expected one of {known}")
                self._parts.append(("word", word))
            elif escape and escape not in _ESCAPES:
                raise ConfigError(
                    f"--template: \\{escape.decode(errors='replace')} found, expected \\n \\r \\t \\\\ \\xHH"
                )
            else:
                plain = word or literal or stray
                self._parts.append(("text", bytes([int(code, 16)]) if code else _ESCAPES.get(escape, plain)))

    def render(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """One text a record of a batch with log columns. Raises ConfigError for a column that is not there."""
        for kind, name in self._parts:
            if kind == "column" and name.decode() not in batch.schema.names:
                raise ConfigError(f"--template: no column {name.decode()!r}, there are {', '.join(batch.schema.names)}")
        for row in batch.to_pylist():
            yield b"".join(_part(kind, part, row) for kind, part in self._parts)


def _part(kind: str, part: bytes, row: dict[str, Any]) -> bytes:
    if kind == "text":
        return part
    return _text(row[part.decode()]) if kind == "column" else _word(part, row)


def _word(word: bytes, row: dict[str, Any]) -> bytes:
    match word:
        case b"t":
            return _text(row["_topic"])
        case b"p":
            return b"%d" % row["_partition"]
        case b"o":
            return b"%d" % row["_offset"]
        case b"k":
            return _text(row.get("key"))
        case b"K":
            return _length(row.get("key"))
        case b"s":
            return _text(_value(row))
        case b"S":
            return _length(_value(row))
        case b"T":
            at = row.get("timestamp")
            return b"%d" % (at.timestamp() * 1000) if isinstance(at, dt.datetime) else b"-1"
        case _:
            return b",".join(
                _text(header["key"]) + b"=" + _text(header["value"]) for header in row.get("headers") or ()
            )


def _value(row: dict[str, Any]) -> Any:
    if "value" in row and "headers" in row:
        return row["value"]
    columns = {name: value for name, value in row.items() if name not in _PLACES}
    return msgspec.json.encode(columns, enc_hook=str)


def _length(value: Any) -> bytes:
    return b"-1" if value is None else b"%d" % len(_text(value))


def _text(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dt.datetime):
        return value.isoformat().encode()
    return str(value).encode()
