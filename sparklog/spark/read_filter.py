"""The parser of ``where``, a text with conditions on partition, offset and time that limits a batch read.

    partition = 1                       partition in (0, 2)
    offset >= 5 and offset < 10         offset between 5 and 9
    timestamp >= '2024-05-01T00:00:00Z' and timestamp < 1714608000000

Conditions are joined by ``and``. The column names of typed topics (``_offset``) are accepted as well. Times are ISO
8601 with a time zone, or milliseconds since 1970. Any other condition is an error: use ``DataFrame.filter`` for it.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from sparklog.errors import ConfigError
from sparklog.model import Span

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d+)|(?P<text>'[^']*')|(?P<sign>[<>]=?|\S))")
_COLUMNS = ("partition", "offset", "timestamp")
_EXPECTED = "conditions on partition, offset and timestamp (=, <, <=, >, >=, between, in), joined by and"
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


_ALL = Span()


@dataclass(frozen=True, slots=True)
class Bounds:
    """The partitions, offsets and timestamps (us) to which a read is limited.

    If ``listed`` is not None, only these partitions are read.
    """

    partition: Span = _ALL
    offset: Span = _ALL
    timestamp: Span = _ALL
    listed: frozenset[int] | None = None

    @property
    def by_time(self) -> bool:
        return self.timestamp != _ALL

    def takes(self, partition: int) -> bool:
        return self.partition.low <= partition < self.partition.high and (
            self.listed is None or partition in self.listed
        )

    def __and__(self, other: Bounds) -> Bounds:
        lists = [found for found in (self.listed, other.listed) if found is not None]
        return Bounds(
            self.partition & other.partition,
            self.offset & other.offset,
            self.timestamp & other.timestamp,
            frozenset.intersection(*lists) if lists else None,
        )


def parse_where(text: str) -> Bounds:
    """Parse the conditions of ``where``. Raises ConfigError with the position of the first error."""
    return _FilterParser(text).parse()


def read_time(text: str) -> dt.datetime:
    """Parse a time in ISO 8601. Raises ValueError."""
    return dt.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))


class _FilterParser:
    """A recursive descent parser of tokens (kind, text, position)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def parse(self) -> Bounds:
        found = self._condition()
        while self._at < len(self._tokens):
            self._consume("and")
            found = found & self._condition()
        return found

    def _condition(self) -> Bounds:
        kind, name, _ = self._peek()
        column = name.lower().removeprefix("_")
        if kind != "name" or column not in _COLUMNS:
            self._fail(_EXPECTED)
        self._at += 1
        read = self._time if column == "timestamp" else self._number
        operator = self._peek()[1].lower()
        if operator == "in" and column == "partition":
            self._at += 1
            return Bounds(listed=self._list())
        span = self._span(operator, read)
        match column:
            case "partition":
                return Bounds(partition=span)
            case "offset":
                return Bounds(offset=span)
            case _:
                return Bounds(timestamp=span)

    def _span(self, operator: str, read: Callable[[], int]) -> Span:
        if operator not in {"=", "<", "<=", ">", ">=", "between"}:
            self._fail("=, <, <=, >, >= or between")
        self._at += 1
        value = read()
        match operator:
            case "between":
                self._consume("and")
                return Span(value, read() + 1)
            case "=":
                return Span(value, value + 1)
            case "<":
                return Span(high=value)
            case "<=":
                return Span(high=value + 1)
            case ">":
                return Span(low=value + 1)
            case _:
                return Span(low=value)

    def _list(self) -> frozenset[int]:
        self._consume("(")
        found = {self._number()}
        while self._peek()[1] == ",":
            self._at += 1
            found.add(self._number())
        self._consume(")")
        return frozenset(found)

    def _number(self) -> int:
        kind, text, _ = self._peek()
        if kind != "number" or abs(int(text)) >= 2**62:
            self._fail("a whole number")
        self._at += 1
        return int(text)

    def _time(self) -> int:
        kind, text, _ = self._peek()
        if kind == "number" and abs(int(text)) < 2**52:
            self._at += 1
            return int(text) * 1000
        if kind != "text":
            self._fail("a time ('2024-05-01T00:00:00Z', or milliseconds since 1970)")
        try:
            when = read_time(text[1:-1])
        except ValueError:
            self._fail("a time such as '2024-05-01T00:00:00Z'")
        if when.tzinfo is None:
            self._fail("a time with a time zone, such as '2024-05-01T00:00:00Z' or '2024-05-01T00:00:00+02:00'")
        self._at += 1
        return (when - _EPOCH) // dt.timedelta(microseconds=1)

    def _consume(self, token: str) -> None:
        if self._peek()[1].lower() != token:
            self._fail(token)
        self._at += 1

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "", len(self._text))

    def _fail(self, expected: str) -> NoReturn:
        kind, text, at = self._peek()
        found = "the end" if kind == "end" else f"{text} at {at}"
        raise ConfigError(f"where {self._text!r}: expected {expected}, found {found}")


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while match := _TOKEN.match(text, at):
        kind = str(match.lastgroup)
        yield kind, match[kind], match.start(kind)
        at = match.end()
