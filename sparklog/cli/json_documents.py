"""A streaming parser of JSON objects in text: one per line, several per line, or one over several lines."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from itertools import chain
from typing import Any

import msgspec

from sparklog.record.parse_values import DECODER

#: The maximum size of a JSON object that spans several lines.
_MAX_JSON_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"


class JsonDocuments:
    """A parser of the JSON objects in one input. The caller passes blocks of lines, and takes complete objects."""

    def __init__(self) -> None:
        #: The number of lines before the current line.
        self._line = 0
        #: The lines of an incomplete object, their size in bytes, and the number of its open brackets.
        self._incomplete: list[bytes] = []
        self._incomplete_bytes = 0
        self._depth = 0
        self._found: list[dict[str, Any]] = []
        #: The numbers of the lines on which the complete objects begin.
        self._lines: list[int] = []

    def feed(self, block: bytes) -> None:
        """Parse a block of whole lines. Raises ValueError with the line number if a value is not a JSON object."""
        if not self._line and not self._incomplete:
            block = block.removeprefix(_BOM)
        if not self._incomplete and (rows := flat_objects(block)) is not None:
            self._found += rows
            self._lines += range(self._line + 1, self._line + 1 + len(rows))
            self._line += len(rows)
            return
        for line in block.removesuffix(b"\n").split(b"\n"):
            if self._incomplete:
                self._continue(line)
            else:
                self._parse_line(line)

    def close(self) -> None:
        """Mark the end of the input. Raises ValueError if an object is incomplete."""
        if self._incomplete:
            self._parse_incomplete()

    def pop_objects(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Remove and return the complete objects, and the number of the line on which each begins."""
        found, lines = self._found, self._lines
        self._found, self._lines = [], []
        return found, lines

    def _parse_line(self, line: bytes) -> None:
        if line and not line.isspace():
            try:
                value = DECODER.decode(line.decode())
            except ValueError:
                depth = _depth(line)
                if depth is None or depth <= 0:
                    self._parse(line)
                else:
                    self._incomplete, self._incomplete_bytes, self._depth = [line], len(line), depth
                    return
            else:
                self._append(value)
        self._line += 1

    def _continue(self, line: bytes) -> None:
        self._incomplete.append(line)
        self._incomplete_bytes += len(line) + 1
        depth = _depth(line)
        self._depth = 0 if depth is None else self._depth + depth
        if self._depth <= 0 or self._incomplete_bytes > _MAX_JSON_BYTES:
            self._parse_incomplete()

    def _parse_incomplete(self) -> None:
        lines, self._incomplete = self._incomplete, []
        self._parse(b"\n".join(lines))
        self._line += len(lines)

    def _parse(self, text: bytes) -> None:
        """Parse the objects of ``text`` one by one, because they are not one per line."""
        try:
            document = text.decode()
            at = _spaces_end(document, 0)
            while at < len(document):
                value, at = DECODER.raw_decode(document, at)
                self._append(value)
                at = _spaces_end(document, at)
        except _NoObjectError:
            raise
        except ValueError as error:
            raise ValueError(f"line {self._line + 1}: {error}") from None

    def _append(self, value: Any) -> None:
        if not isinstance(value, dict):
            found = json.dumps(value, default=str)[:40]
            raise _NoObjectError(f"line {self._line + 1}: {found} found, expected a JSON object")
        self._found.append(value)
        self._lines.append(self._line + 1)


#: This decoder is several times as fast as Python's. But if an object has a name twice, the decoder silently keeps
#: the last value.
_FAST_DECODER = msgspec.json.Decoder(float_hook=Decimal)


def flat_objects(block: bytes) -> list[dict[str, Any]] | None:
    """Return the objects of ``block`` if each line is one object without nested values; otherwise None.

    Also return None if an object has a name twice, because the parser keeps only one of the two values. To detect this,
    the function counts quotes: each name and each string value of the parsed objects accounts for two. If ``block`` has
    any other number of quotes, return None.
    """
    try:
        rows = _FAST_DECODER.decode_lines(block)
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError):
        return None
    # The check: there are as many lines as objects, and each line begins an object.
    if not len(rows) == block.count(b"\n") + (block[-1:] != b"\n") == block.count(b"\n{") + (block[:1] == b"{"):
        return None
    if set(map(type, rows)) != {dict}:
        return None
    kinds = list(map(type, chain.from_iterable(map(dict.values, rows))))
    if dict in kinds or list in kinds or block.count(b'"') != 2 * (len(kinds) + kinds.count(str)):
        return None
    return rows


class _NoObjectError(ValueError):
    """The error for a JSON value that is not an object. The message has its line number."""


_JSON_PARTS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[{}\[\]]')
_SPACES = re.compile(r"[ \t\r\n]*")


def _spaces_end(document: str, at: int) -> int:
    match = _SPACES.match(document, at)
    assert match is not None
    return match.end()


def _depth(line: bytes) -> int | None:
    """Return how many more brackets ``line`` opens than it closes; None if a quoted string does not end on the line."""
    depth = 0
    for part in _JSON_PARTS.findall(line):
        if part[:1] == b'"':
            if len(part) == 1 or part[-1:] != b'"':
                return None
        else:
            depth += 1 if part in b"{[" else -1
    return depth
