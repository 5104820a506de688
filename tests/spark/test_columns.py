"""Tests of the conversion from stored batches to the batches that Spark expects, without Spark."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.record.header import BatchHeader
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.columns import offset_run, plan_columns
from sparklog.spark.reader import project
from sparklog.spark.schema import TopicShape, topic_columns

TP = TopicPartition("flights", 3)
APPENDED = dt.datetime(2024, 5, 1, tzinfo=dt.timezone.utc)
CREATED = dt.datetime(2024, 4, 30, tzinfo=dt.timezone.utc)
#: The leader writes such a header if no record has an event time: the append time is the batch's timestamp.
HEADER = BatchHeader(*([0] * 17))._replace(max_timestamp=int(APPENDED.timestamp() * 1e6))


def assemble(shape: TopicShape, batch: pa.RecordBatch, declared: StructType | None = None) -> pa.RecordBatch:
    declared = declared or topic_columns(shape, include_headers=True)
    plan = plan_columns(declared, shape)
    assert set(plan.stored_columns) <= set(shape.schema.names)
    made = plan.assemble(HEADER, batch, partition=TP, offsets=offset_run(70, batch.num_rows))
    made.validate(full=True)
    assert made.schema.equals(to_arrow_schema(declared, timezone="UTC"))
    return made


def default_batch() -> pa.RecordBatch:
    rows = [
        {"key": b"k", "value": b"v", "headers": [{"key": "h", "value": b"1"}], "timestamp": CREATED},
        {"key": None, "value": None, "headers": None, "timestamp": None},
    ]
    return pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA)


def test_a_default_topic_shows_all_its_columns() -> None:
    made = assemble(TopicShape(DEFAULT_SCHEMA, "timestamp"), default_batch()).to_pylist()
    common = {"topic": "flights", "partition": 3, "timestampType": 0}
    assert made[0] == common | {
        "key": b"k",
        "value": b"v",
        "offset": 70,
        "timestamp": CREATED,
        "headers": [{"key": "h", "value": b"1"}],
    }
    assert made[1] == common | {"key": None, "value": None, "offset": 71, "timestamp": APPENDED, "headers": None}


def test_missing_headers_are_null_in_every_encoding() -> None:
    rows = [{"headers": []}, {"headers": [{"key": "h", "value": None}]}, {"headers": None}]
    batch = pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA)
    made = assemble(TopicShape(DEFAULT_SCHEMA, "timestamp"), batch)
    assert made.column("headers").to_pylist() == [None, [{"key": "h", "value": None}], None]


def test_a_topic_stamped_by_the_log_shows_the_append_time() -> None:
    shape = TopicShape(DEFAULT_SCHEMA, "timestamp", stamped_by_log=True)
    assert plan_columns(topic_columns(shape), shape).stored_columns == ("key", "value")
    made = assemble(shape, default_batch())
    assert made.column("timestamp").to_pylist() == [APPENDED, APPENDED]
    assert made.column("timestampType").to_pylist() == [1, 1]


def test_a_typed_topic_converts_types_spark_lacks() -> None:
    schema = pa.schema([("small", pa.uint8()), ("at", pa.timestamp("ns")), ("tags", pa.large_list(pa.large_string()))])
    at = dt.datetime(2024, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 - a timestamp without zone
    batch = pa.RecordBatch.from_pylist([{"small": 200, "at": at, "tags": ["a", None]}], schema=schema)
    (row,) = assemble(TopicShape(schema), batch).to_pylist()
    assert row == {
        "small": 200,
        "at": at,
        "tags": ["a", None],
        "_topic": "flights",
        "_partition": 3,
        "_offset": 70,
        "_timestamp": APPENDED,
    }


def test_the_event_time_column_gives_the_timestamp() -> None:
    schema = pa.schema([("x", pa.int32()), ("day", pa.date32())])
    shape = TopicShape(schema, "day")
    batch = pa.RecordBatch.from_pylist([{"x": 1, "day": CREATED.date()}, {"x": 2, "day": None}], schema=schema)
    declared = StructType([topic_columns(shape)["_timestamp"]])
    assert plan_columns(declared, shape).stored_columns == ("day",)
    assert assemble(shape, batch, declared).to_pydict() == {"_timestamp": [CREATED, APPENDED]}


def test_offsets_alone_need_no_stored_column() -> None:
    shape = TopicShape(pa.schema([("x", pa.int32())]))
    declared = StructType([topic_columns(shape)["_offset"]])
    assert plan_columns(declared, shape).stored_columns == ()


def test_a_column_added_later_is_null_in_older_batches() -> None:
    shape = TopicShape(pa.schema([("x", pa.int32()), ("added", pa.uint16())]))
    older = pa.RecordBatch.from_pydict({"x": pa.array([1, 2], pa.int32())})
    assert assemble(shape, older).select(["x", "added"]).to_pydict() == {"x": [1, 2], "added": [None, None]}


def test_a_null_that_was_declared_impossible_raises() -> None:
    shape = TopicShape(pa.schema([("x", pa.int32())]))
    declared = StructType([StructField("x", topic_columns(shape)["x"].dataType, nullable=False)])
    batch = pa.RecordBatch.from_pydict({"x": pa.array([1, None], pa.int32())})
    with pytest.raises(BrokerError, match="flights-3: column x is NOT NULL, but has 1 nulls"):
        plan_columns(declared, shape).assemble(HEADER, batch, partition=TP, offsets=offset_run(0, 2))


def test_uncastable_values_are_null_if_their_errors_are_read() -> None:
    shape = TopicShape(pa.schema([("x", pa.int32()), ("at", pa.timestamp("s")), ("l", pa.list_(pa.timestamp("s")))]))
    beyond = 2**60
    batch = pa.record_batch(
        {
            "x": pa.array([1, 2, 3], pa.int32()),
            "at": pa.array([0, beyond, None], pa.timestamp("s")),
            "l": pa.array([[beyond], [5], None], pa.list_(pa.timestamp("s"))),
        }
    )
    with pytest.raises(BrokerError, match="SCHEMA_MISMATCH"):
        assemble(shape, batch)
    found = assemble(shape, batch, topic_columns(shape, include_cast_errors=True))
    assert found["x"].to_pylist() == [1, 2, 3]
    assert found["at"].cast(pa.int64()).to_pylist() == [0, None, None]
    assert found["l"].is_null().to_pylist() == [True, False, True]
    told = found["_cast_error"].to_pylist()
    assert told[0].startswith("l: ") and told[1].startswith("at: ") and str(beyond) in told[1] and told[2] is None
    offered = topic_columns(shape, include_cast_errors=True)
    chosen = assemble(shape, batch, StructType([offered["_cast_error"], offered["x"], offered["at"]]))
    assert [text and text.partition(":")[0] for text in chosen["_cast_error"].to_pylist()] == [None, "at", None]
    assert chosen["at"].null_count == 2


def test_a_column_that_may_show_null_is_nullable() -> None:
    """Spark does not check a column that is declared NOT NULL for nulls, and would use the bytes in their place as
    values."""
    own = pa.schema([pa.field("at", pa.timestamp("s"), nullable=False), pa.field("x", pa.int32(), nullable=False)])
    shape = TopicShape(own)
    batch = pa.RecordBatch.from_arrays([pa.array([2**60], own.types[0]), pa.array([1], pa.int32())], schema=own)
    found = assemble(shape, batch, topic_columns(shape, include_cast_errors=True))
    assert found["at"].null_count == 1 and found.schema.field("at").nullable
    strict = topic_columns(shape)
    assert not strict["at"].nullable and not strict["x"].nullable
    project("t", shape, strict)
    with pytest.raises(BrokerError, match="at: declared NOT NULL, but with includeCastErrors any"):
        project("t", shape, StructType([strict["at"], StructField("_cast_error", StringType())]))


def test_a_topic_column_named_like_the_cast_errors_is_plain() -> None:
    shape = TopicShape(pa.schema([("at", pa.timestamp("s")), ("_cast_error", pa.string())]))
    batch = pa.record_batch({"at": pa.array([2**60], pa.timestamp("s")), "_cast_error": pa.array(["own"])})
    with pytest.raises(BrokerError, match="SCHEMA_MISMATCH"):
        assemble(shape, batch, StructType([topic_columns(shape)[name] for name in ("at", "_cast_error")]))


def test_reads_of_cast_errors_lose_no_column() -> None:
    shape = TopicShape(pa.schema([("x", pa.int32())]), schema_id=0)
    batch = pa.record_batch({"x": pa.array([1], pa.int32())})
    wider = HEADER._replace(schema_id=1)
    for errors in (False, True):
        plan = plan_columns(topic_columns(shape, include_cast_errors=errors), shape)
        assert plan.assemble(HEADER, batch, partition=TP, offsets=offset_run(0, 1)).num_rows == 1
        if not errors:
            assert plan.assemble(wider, batch, partition=TP, offsets=offset_run(0, 1)).num_rows == 1
            continue
        with pytest.raises(BrokerError, match=r"SCHEMA_OUTDATED.*a batch has schema 1, newer than the read's 0"):
            plan.assemble(wider, batch, partition=TP, offsets=offset_run(0, 1))
