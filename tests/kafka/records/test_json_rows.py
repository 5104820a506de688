"""Tests that Kafka's records with JSON values become rows of a typed topic, and rows become such records."""

from __future__ import annotations

import datetime as dt
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import ErrorCode
from sparklog.kafka.records import json_columns
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.kafka.records.json_rows import JsonTopic
from sparklog.kafka.records.key_columns import UndecodableKey, columns_from_keys
from sparklog.record.format_values import stored_type
from sparklog.record.keys import encode_keys
from sparklog.record.rows import ColumnOfValues
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.cli.test_round_trips import LEAVES, batches, stored

SCHEMA = pa.schema(
    [pa.field("id", pa.int32(), nullable=False), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))]
)
TOPIC = JsonTopic(SCHEMA, ("id",), "at")
NOON = dt.datetime(2024, 1, 31, 12, tzinfo=dt.timezone.utc)


def records(*pairs: tuple[bytes | None, bytes | None], headers: Any = None) -> pa.RecordBatch:
    rows = [{"key": key, "value": value, "headers": headers, "timestamp": None} for key, value in pairs]
    return pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA)


def refusal(topic: JsonTopic, *pairs: tuple[bytes | None, bytes | None], **more: Any) -> InvalidRecords:
    headers = more.pop("headers", None)
    with pytest.raises(InvalidRecords) as refused:
        topic.rows(records(*pairs, headers=headers), **more)
    assert refused.value.code is ErrorCode.INVALID_RECORD
    return refused.value


def test_columns_come_from_the_document_and_the_key() -> None:
    rows = TOPIC.rows(
        records((b"any", b'{"id":1,"name":"a"}'), (b"\0\0\0\2", b'{"name":"b"}'), (b"\0\0\0\3", b'{"id":4}'))
    )
    assert rows.schema.equals(SCHEMA)
    assert rows.column("id").to_pylist() == [1, 2, 4]
    assert rows.column("name").to_pylist() == ["a", "b", None]


def test_a_record_without_a_value_is_a_tombstone() -> None:
    rows = TOPIC.rows(records((b"\0\0\0\7", None), (None, b'{"id":8,"name":"x"}')))
    assert rows.to_pylist() == [{"id": 7, "name": None, "at": None}, {"id": 8, "name": "x", "at": None}]
    again = TOPIC.records(rows)
    assert again.column("key").to_pylist() == [b"\0\0\0\7", b"\0\0\0\x08"]
    assert again.column("value").to_pylist() == [None, b'{"id":8,"name":"x","at":null}']


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(None, b'{"name":"a"}')], "field id cannot be null"),
        ([(b"abc", b'{"name":"a"}')], "3 bytes, field id .int32. needs 4"),
        ([(None, None)], "neither a key nor a value"),
        ([(None, b'{"id":true}')], "field id"),
    ],
)
def test_a_record_that_does_not_fit_is_named(pairs: list[tuple[bytes | None, bytes | None]], message: str) -> None:
    error = refusal(TOPIC, (None, b'{"id":1}'), *pairs)
    assert [record.batch_index for record in error.record_errors] == [1]
    with pytest.raises(InvalidRecords, match=message):
        raise error


def test_headers_are_refused() -> None:
    error = refusal(TOPIC, (None, b'{"id":1}'), headers=[{"key": "trace", "value": b"1"}])
    assert "headers" in error.detail


def test_a_topic_without_key_columns_needs_values() -> None:
    topic = JsonTopic(pa.schema([("a", pa.int64())]), (), None)
    assert topic.rows(records((b"k", b'{"a":1}'))).to_pylist() == [{"a": 1}]
    assert "no key columns" in refusal(topic, (b"k", None)).detail
    assert topic.records(topic.rows(records((b"k", b'{"a":1}')))).to_pylist() == [
        {"key": None, "value": b'{"a":1}', "headers": None, "timestamp": None}
    ]


def test_a_compacted_topic_needs_keys() -> None:
    topic = JsonTopic(pa.schema([("a", pa.int64()), ("b", pa.string())]), ("a", "b"), None)
    error = refusal(topic, (None, b'{"a":1}'), (None, b"{}"), keyed=True)
    assert [record.batch_index for record in error.record_errors] == [1]


def test_times_are_the_event_times() -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1, "at": NOON}, {"id": 2}], schema=SCHEMA)
    assert TOPIC.records(rows).column("timestamp").to_pylist() == [NOON, None]
    second = dt.timedelta(seconds=1)
    found = TOPIC.records(rows, append_time_us=int((NOON - second).timestamp()) * 10**6)
    assert found.column("timestamp").to_pylist() == [NOON, NOON - second]
    days = JsonTopic(pa.schema([("day", pa.date32())]), (), "day")
    found = days.records(pa.RecordBatch.from_pylist([{"day": NOON.date()}], schema=days.schema))
    assert found.column("timestamp").to_pylist() == [NOON.replace(hour=0)]


@given(batches(), st.booleans(), st.data())
def test_records_give_back_the_rows(batch: pa.RecordBatch, few: bool, data: st.DataObject) -> None:
    flat = [field.name for field in batch.schema if not pa.types.is_nested(field.type)]
    keys = tuple(data.draw(st.lists(st.sampled_from(flat), unique=True))) if flat else ()
    topic = JsonTopic(batch.schema, keys, None)
    if not batch.num_rows or (set(keys) == set(flat) == set(batch.schema.names)):
        return
    with patch.object(json_columns, "FEW_DOCUMENTS", 10**9 if few else 0):
        found = topic.records(batch)
        if keys and None in found.column("key").to_pylist():
            return
        again = topic.rows(found)
    assert stored(pa.Table.from_batches([again])) == stored(pa.Table.from_batches([batch]))


@given(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3), st.data())
def test_key_columns_are_read_from_their_bytes(leaves: list[Any], data: st.DataObject) -> None:
    schema = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(leaves)])
    arrays = [
        ColumnOfValues(stored_type(kind))
        .array(data.draw(st.lists(st.none() | values, min_size=3, max_size=3)))
        .cast(kind)
        for kind, values in leaves
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    keys = encode_keys(batch, schema.names).cast(pa.binary())
    again = pa.RecordBatch.from_arrays(columns_from_keys(keys, list(schema)), schema=schema)
    again.validate(full=True)
    assert encode_keys(again, schema.names).cast(pa.binary()).equals(keys)


@given(
    st.lists(
        st.none() | st.binary(max_size=12) | st.sampled_from([b"\x7f" * 16, b"\x80" + bytes(31)]),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3),
)
def test_any_bytes_decode_to_a_key_or_are_refused(keys: list[bytes | None], leaves: list[Any]) -> None:
    fields = [pa.field(f"c{number}", kind) for number, (kind, _) in enumerate(leaves)]
    try:
        found = columns_from_keys(pa.array(keys, pa.binary()), fields)
    except UndecodableKey as error:
        assert keys[error.row] is not None
    else:
        for column in found:
            column.validate(full=True)


@pytest.mark.parametrize(
    ("kind", "key"),
    [(pa.time32("s"), 86_400), (pa.time32("ms"), -1), (pa.time64("us"), 86_400_000_000), (pa.time64("ns"), -1)],
    ids=str,
)
def test_a_key_that_is_no_time_of_a_day_is_refused(kind: pa.DataType, key: int) -> None:
    bad = key.to_bytes(kind.bit_width // 8, "big", signed=True)
    good = (86_399).to_bytes(kind.bit_width // 8, "big")
    with pytest.raises(UndecodableKey, match="no time of a day") as refused:
        columns_from_keys(pa.array([None, good, bad], pa.binary()), [pa.field("at", kind)])
    assert refused.value.row == 2
