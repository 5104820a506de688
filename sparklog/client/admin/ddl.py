"""The parser of column lists: ``"carrier string, dep_delay double, tags array<string> not null"``.

This module is pure. The types have Spark SQL's names; Arrow's names are accepted too. A column is nullable unless it
has ``not null``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pyarrow as pa

from sparklog.errors import ConfigError

_SIMPLE: dict[str, Callable[[], pa.DataType]] = {
    "boolean": pa.bool_,
    "bool": pa.bool_,
    "tinyint": pa.int8,
    "byte": pa.int8,
    "int8": pa.int8,
    "smallint": pa.int16,
    "short": pa.int16,
    "int16": pa.int16,
    "int": pa.int32,
    "integer": pa.int32,
    "int32": pa.int32,
    "bigint": pa.int64,
    "long": pa.int64,
    "int64": pa.int64,
    "uint8": pa.uint8,
    "uint16": pa.uint16,
    "uint32": pa.uint32,
    "uint64": pa.uint64,
    "float": pa.float32,
    "real": pa.float32,
    "double": pa.float64,
    "string": pa.string,
    "varchar": pa.string,
    "text": pa.string,
    "binary": pa.binary,
    "date": pa.date32,
    "timestamp": lambda: pa.timestamp("us", "UTC"),
    "timestamp_ntz": lambda: pa.timestamp("us"),
    "interval": lambda: pa.duration("us"),
}

_TOKEN = re.compile(r"\s*(`[^`]*`|[A-Za-z_][A-Za-z0-9_.-]*|\d+|[<>(),:])")


def parse_columns(text: str) -> pa.Schema:
    """Return the schema that ``text``, a list of columns, describes.

    Raises:
        ConfigError: ``text`` is invalid. The message has the invalid part, its position, and what was expected.
    """
    parser = _Parser(text)
    fields = parser.fields(closing="")
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"schema: column {twice[0]!r} appears twice")
    return pa.schema(fields)


class _Parser:
    """A recursive descent parser. The recursion handles nested types."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        self._next = 0
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ConfigError(f"schema: {text[at:].strip()[:20]!r} at character {at + 1} is not valid")
            self._tokens.append((match[1], match.start(1)))
            at = match.end()

    def fields(self, *, closing: str) -> list[pa.Field]:
        found = [self._field()]
        while self._peek() == ",":
            self._next_token()
            found.append(self._field())
        if closing:
            self._expect(closing)
        elif self._peek():
            raise self._error("',' or the end")
        return found

    def _field(self) -> pa.Field:
        name = self._next_token()
        if not name or name in "<>(),:":
            raise self._error("a column name", back=1)
        if self._peek() == ":":
            self._next_token()
        kind = self._type()
        nullable = True
        if self._peek().lower() == "not":
            self._next_token()
            self._expect("null")
            nullable = False
        elif self._peek().lower() == "null":
            self._next_token()
        return pa.field(name.strip("`"), kind, nullable=nullable)

    def _type(self) -> pa.DataType:
        name = self._next_token().lower()
        if name == "array":
            self._expect("<")
            item = self._type()
            self._expect(">")
            return pa.list_(item)
        if name == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return pa.map_(key, value)
        if name == "struct":
            self._expect("<")
            return pa.struct(self.fields(closing=">"))
        if name in {"decimal", "numeric", "dec"}:
            return self._decimal()
        if name not in _SIMPLE:
            near = difflib.get_close_matches(name, [*_SIMPLE, "array", "map", "struct", "decimal"], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise self._error(f"a type{hint}", back=1)
        return _SIMPLE[name]()

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._peek() == "(":
            self._next_token()
            precision = self._number()
            if self._peek() == ",":
                self._next_token()
                scale = self._number()
            self._expect(")")
        try:
            return pa.decimal128(precision, scale)
        except (ValueError, pa.ArrowInvalid) as error:
            raise ConfigError(f"schema: decimal({precision},{scale}): {error}") from None

    def _number(self) -> int:
        token = self._next_token()
        if not token.isdigit():
            raise self._error("a number", back=1)
        return int(token)

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _next_token(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next_token().lower() != token:
            raise self._error(repr(token), back=1)

    def _error(self, expected: str, *, back: int = 0) -> ConfigError:
        at = self._next - back
        if at < len(self._tokens):
            token, position = self._tokens[at]
            return ConfigError(f"schema: {token!r} at character {position + 1} found; expected {expected}")
        return ConfigError(f"schema: the end of {self._text!r} found; expected {expected}")
