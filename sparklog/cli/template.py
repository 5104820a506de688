"""Format strings for records, as in kcat: ``%t [%p] at %o: %k = %s\\n``.

    %t topic           %k key              %T timestamp, milliseconds since 1970
    %p partition       %K its length       %h headers, as name=value,...
    %o offset          %s value            %{name} any column of the topic
                       %S its length       %% a percent sign; \\n \\r \\t \\xHH as in C

A null has the length -1 and no text. In a typed topic, whose schema has other columns, %s is the record as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyarrow import types

from sparklog.client.consumer.log_columns import LOG_COLUMNS
from sparklog.errors import ConfigError
from sparklog.record.exact_values import UNIT_NS
from sparklog.record.format_values import as_json, json_values, text_values
from sparklog.record.schema import DEFAULT_SCHEMA

_PARTS = re.compile(rb"%\{([^}]*)\}|%(.)|\\x([0-9a-fA-F]{2})|\\(.)|([^%\\]+)|(.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\", b"0": b"\0"}
_WORDS = frozenset(b"tpokKsSTh")
#: The type of a function that makes a record's value printable.
Show = Callable[[bytes], bytes]
_PLACES = {field.name for field in LOG_COLUMNS}


class Template:
    """A parsed format string. The constructor raises ConfigError for an unknown format sequence."""

    def __init__(self, text: str) -> None:
        #: The parts of the format string: literal bytes, the name of a column, or a format letter.
        self._parts: list[tuple[str, bytes]] = []
        for column, word, code, escape, literal, stray in _PARTS.findall(text.encode()):
            if column:
                self._parts.append(("column", column))
            elif word and word != b"%":
                if word[0] not in _WORDS:
                    known = "%t %p %o %k %K %s %S %T %h %{column} %%"
                    raise ConfigError(f"--template: expected one of {known}, found %{word.decode(errors='replace')}")
                self._parts.append(("word", word))
            elif escape and escape not in _ESCAPES:
                raise ConfigError(
                    f"--template: expected \\n \\r \\t \\\\ \\xHH, found \\{escape.decode(errors='replace')}"
                )
            else:
                plain = word or literal or stray
                self._parts.append(("text", bytes([int(code, 16)]) if code else _ESCAPES.get(escape, plain)))

    def render(self, batch: pa.RecordBatch, *, show: Show = bytes) -> Iterator[bytes]:
        """Return the text of each record of ``batch``.

        The batch must also have the columns with the position of each record (``LOG_COLUMNS``). ``show`` makes values
        printable. Raises ConfigError for an unknown column.
        """
        for kind, name in self._parts:
            if kind == "column" and name.decode() not in batch.schema.names:
                raise ConfigError(f"--template: no column {name.decode()!r}; columns: {', '.join(batch.schema.names)}")
        parts = [
            [part] * batch.num_rows if kind == "text" else [*map(show, _part(kind, part, batch))]
            for kind, part in self._parts
        ]
        for row in range(batch.num_rows):
            yield b"".join(part[row] for part in parts)


def _part(kind: str, part: bytes, batch: pa.RecordBatch) -> Sequence[bytes]:
    """Return the text of one part for each record: of a column or a format letter."""
    return _shown(text_values(batch.column(part.decode()))) if kind == "column" else _word(part, batch)


def _word(word: bytes, batch: pa.RecordBatch) -> Sequence[bytes]:
    match word:
        case b"t":
            return _shown(_texts(batch, "_topic"))
        case b"p":
            return _shown(_texts(batch, "_partition"))
        case b"o":
            return _shown(_texts(batch, "_offset"))
        case b"k":
            return _shown(_texts(batch, "key"))
        case b"K":
            return _lengths(_texts(batch, "key"))
        case b"s":
            return _shown(_values(batch))
        case b"S":
            return _lengths(_values(batch))
        case b"T":
            return _milliseconds(batch)
        case _:
            return _headers(batch)


def _texts(batch: pa.RecordBatch, name: str) -> Sequence[bytes | None]:
    """Return the text of a column for each record; None for each if the column does not exist."""
    return text_values(batch.column(name)) if name in batch.schema.names else [None] * batch.num_rows


def _values(batch: pa.RecordBatch) -> Sequence[bytes | None]:
    if {"value", "headers"}.issubset(batch.schema.names):
        return text_values(batch.column("value"))
    names = [name for name in batch.schema.names if name not in _PLACES]
    columns = [json_values(batch.column(name)) for name in names]
    return [as_json(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _milliseconds(batch: pa.RecordBatch) -> Sequence[bytes]:
    index = batch.schema.get_field_index("timestamp")
    if index < 0 or not types.is_timestamp(batch.schema.field(index).type):
        return [b"-1"] * batch.num_rows
    column = batch.column(index)
    ticks = column.cast(pa.int64()).to_pylist()
    unit_ns = UNIT_NS[column.type.unit]
    return [b"-1" if at is None else b"%d" % (at * unit_ns // 1_000_000) for at in ticks]


def _headers(batch: pa.RecordBatch) -> Sequence[bytes]:
    index = batch.schema.get_field_index("headers")
    if index < 0:
        return [b""] * batch.num_rows
    if not batch.schema.field(index).type.equals(DEFAULT_SCHEMA.field("headers").type):
        return _shown(text_values(batch.column(index)))
    return [
        b",".join((header["key"] or "").encode() + b"=" + (header["value"] or b"") for header in found or ())
        for found in batch.column(index).to_pylist()
    ]


def _shown(texts: Sequence[bytes | None]) -> Sequence[bytes]:
    return [text or b"" for text in texts]


def _lengths(texts: Sequence[bytes | None]) -> Sequence[bytes]:
    return [b"-1" if text is None else b"%d" % len(text) for text in texts]
