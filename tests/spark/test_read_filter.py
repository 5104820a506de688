"""The text of ``where``, understood or refused."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.model import Span
from sparklog.spark.read_filter import Bounds, parse_where

DAY_US = 86_400_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("offset >= 5", Bounds(offset=Span(5))),
        ("_offset>5", Bounds(offset=Span(6))),
        ("offset < 9 AND Offset >= 5", Bounds(offset=Span(5, 9))),
        ("offset between 5 and 9 and offset <= 7", Bounds(offset=Span(5, 8))),
        ("partition = 1", Bounds(partition=Span(1, 2))),
        ("partition < 3", Bounds(partition=Span(high=3))),
        ("partition in (0, 2)", Bounds(listed=frozenset({0, 2}))),
        ("partition in (0, 2) and partition in (2,3)", Bounds(listed=frozenset({2}))),
        ("timestamp >= '1970-01-02T00:00:00Z'", Bounds(timestamp=Span(DAY_US))),
        ("timestamp > '1970-01-02 01:00:00+01:00'", Bounds(timestamp=Span(DAY_US + 1))),
        ("_timestamp < 86400000", Bounds(timestamp=Span(high=DAY_US))),
        ("timestamp <= 86400000", Bounds(timestamp=Span(high=DAY_US + 1))),
    ],
)
def test_what_is_understood(text: str, expected: Bounds) -> None:
    assert parse_where(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the end found, conditions on partition, offset and timestamp"),
        ("value = 1", "value at 0 found, conditions on"),
        ("offset", "the end found, =, <"),
        ("offset != 5", "! at 7 found, =, <"),
        ("offset in (1, 2)", "in at 7 found"),
        ("offset >= 'x'", "'x' at 10 found, a whole number expected"),
        ("offset >= 1.5", r"\. at 11 found, and expected"),
        ("offset >= 99999999999999999999", "a whole number expected"),
        ("offset >= 1 or offset < 0", "or at 12 found, and expected"),
        ("offset >= 1 and", "the end found, conditions on"),
        ("offset between 1 or 5", "or at 17 found, and expected"),
        ("partition in 1", r"1 at 13 found, \( expected"),
        ("partition in ()", r"\) at 14 found, a whole number"),
        ("timestamp > '2024-05-01'", "a time with its zone"),
        ("timestamp > 'May'", "'May' at 12 found, a time such as"),
        ("timestamp > now", "now at 12 found, a time "),
    ],
)
def test_what_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_where(text)


def test_partitions() -> None:
    bounds = parse_where("partition >= 1 and partition in (0, 1, 2)")
    assert [number for number in range(4) if bounds.takes(number)] == [1, 2]
    assert Bounds().takes(5)
    assert not Bounds().by_time
