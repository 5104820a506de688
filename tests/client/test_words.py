"""Tests of user input: bootstrap addresses and columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.client.admin.ddl import parse_columns
from sparklog.client.cluster.bootstrap import Address, parse_bootstrap
from sparklog.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", [("a", 1)]),
        ("a", [("a", 9092)]),
        (" a:1 , b:2,", [("a", 1), ("b", 2)]),
        (["a:1", "b"], [("a", 1), ("b", 9092)]),
        ("[::1]:5,[fe80::1]", [("::1", 5), ("fe80::1", 9092)]),
    ],
)
def test_addresses_are_parsed(text: str | list[str], expected: list[tuple[str, int]]) -> None:
    assert parse_bootstrap(text) == tuple(Address(*one) for one in expected)


@pytest.mark.parametrize("text", ["", " , ", "a:b", "a:0", "a:70000", ":1", "a:1:2", "[::1", "[::1]x"])
def test_bad_addresses_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="bootstrap servers"):
        parse_bootstrap(text)


def test_an_address_prints_as_written() -> None:
    for text in ("a:1", "[::1]:5"):
        assert str(parse_bootstrap(text)[0]) == text


def test_columns_are_parsed() -> None:
    schema = parse_columns(
        "carrier string not null, dep_delay double, n BIGINT, at timestamp, tags array<string>, "
        "m map<string, int>, s struct<a: int, b: array<double>>, d decimal(12, 2), `odd name` date"
    )
    assert schema == pa.schema(
        [
            pa.field("carrier", pa.string(), nullable=False),
            ("dep_delay", pa.float64()),
            ("n", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("tags", pa.list_(pa.string())),
            ("m", pa.map_(pa.string(), pa.int32())),
            ("s", pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float64()))])),
            ("d", pa.decimal128(12, 2)),
            ("odd name", pa.date32()),
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a strng", "'strng' at character 3 found; expected a type (did you mean 'string'?)"),
        ("a", "the end of 'a' found; expected a type"),
        ("", "expected a column name"),
        ("a int b int", "'b' at character 7 found; expected ',' or the end"),
        ("a array<int", "expected '>'"),
        ("a int not nul", "expected 'null'"),
        ("a int, a int", "column 'a' appears twice"),
        ("a decimal(99, 2)", "decimal(99,2)"),
        ("a decimal(x)", "expected a number"),
        ("a int; b int", "is not valid"),
    ],
)
def test_bad_columns_name_found_and_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_columns(text)
    assert message in str(caught.value)
