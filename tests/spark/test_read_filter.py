"""Tests of the text of ``where``: parsed or refused."""

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
def test_supported_where_expressions_are_parsed(text: str, expected: Bounds) -> None:
    assert parse_where(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected conditions on partition, offset and timestamp.*, found the end"),
        ("value = 1", "expected conditions on.*, found value at 0"),
        ("offset", "expected =, <.*, found the end"),
        ("offset != 5", "expected =, <.*, found ! at 7"),
        ("offset in (1, 2)", "found in at 7"),
        ("offset >= 'x'", "expected a whole number.*, found 'x' at 10"),
        ("offset >= 1.5", r"expected and.*, found \. at 11"),
        ("offset >= 99999999999999999999", "expected a whole number"),
        ("offset >= 1 or offset < 0", "expected and.*, found or at 12"),
        ("offset >= 1 and", "expected conditions on.*, found the end"),
        ("offset between 1 or 5", "expected and.*, found or at 17"),
        ("partition in 1", r"expected \(.*, found 1 at 13"),
        ("partition in ()", r"expected a whole number.*, found \) at 14"),
        ("timestamp > '2024-05-01'", "a time with a time zone"),
        ("timestamp > 'May'", "expected a time such as.*, found 'May' at 12"),
        ("timestamp > now", "expected a time.*, found now at 12"),
    ],
)
def test_unsupported_where_expressions_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_where(text)


def test_a_where_expression_selects_partitions() -> None:
    bounds = parse_where("partition >= 1 and partition in (0, 1, 2)")
    assert [number for number in range(4) if bounds.takes(number)] == [1, 2]
    assert Bounds().takes(5)
    assert not Bounds().by_time
