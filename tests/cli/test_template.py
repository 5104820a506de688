"""Tests of output by a template: kcat's placeholders, columns by name, escapes, and templates refused before the
first read."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from sparklog.cli.template import Template
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA

AT = dt.datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=dt.timezone.utc)
PLACE = {"_topic": ["t", "t"], "_partition": [3, 3], "_offset": [7, 9]}


def plain(**columns: list[Any]) -> pa.RecordBatch:
    given = {"key": [b"k", None], "value": [b"v\xff", None], "headers": [[{"key": "h", "value": b"w"}], None],
             "timestamp": [AT, AT], **columns}  # fmt: skip
    arrays = [pa.array(given[field.name], field.type) for field in DEFAULT_SCHEMA]
    places = [pa.array(values) for values in PLACE.values()]
    return pa.RecordBatch.from_arrays([*arrays, *places], [*DEFAULT_SCHEMA.names, *PLACE])


TYPED = pa.RecordBatch.from_pydict({"carrier": ["UA", None], "delay": [1.5, 2.0], **PLACE})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%t[%p]@%o;", b"t[3]@7;t[3]@9;"),  # the offset is the record's own: a compacted topic has gaps
        ("%k/%K %s/%S,", b"k/1 v\xff/2,/-1 /-1,"),
        ("%T\\n", b"1767225601500\n1767225601500\n"),
        ("%h|", b"h=w||"),
        ("%{key}-%{_offset} ", b"k-7 -9 "),
        ("100%%\\t\\x41\\\\ü\\0", "100%\tA\\ü\0".encode() * 2),
        ("%s%", b"v\xff%%"),
    ],
)
def test_kcats_placeholders_are_replaced(text: str, expected: bytes) -> None:
    assert b"".join(Template(text).render(plain())) == expected


def test_the_value_of_a_typed_topic_is_its_record() -> None:
    found = list(Template("%{carrier} %s %S").render(TYPED))
    assert found[0] == b'UA {"carrier":"UA","delay":1.5} 28'
    assert found[1].startswith(b' {"carrier":null')


@pytest.mark.parametrize(("text", "complaint"), [("%x", "expected one of %t.*, found %x"), ("\\q", r"found \\q")])
def test_an_unknown_placeholder_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Template(text)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ConfigError, match="no column 'speed'; columns: carrier, delay"):
        list(Template("%{speed}").render(TYPED))
