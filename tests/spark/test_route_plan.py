"""Tests of the columns of a DataFrame against the columns of a topic."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, StructType

from sparklog.errors import BrokerError, ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.route import TopicRoute, find_topic_column, rows_by_value
from sparklog.spark.route_plan import plan_route, with_topic_names
from sparklog.spark.schema import TopicShape, topic_columns

DEFAULT = TopicShape(DEFAULT_SCHEMA, "timestamp")
TYPED = TopicShape(
    pa.schema(
        [
            pa.field("carrier", pa.string(), nullable=False),
            pa.field("delay", pa.float64()),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("offset", pa.int64()),
        ]
    )
)


def struct(**columns: str) -> StructType:
    made = StructType()
    for name, kind in columns.items():
        made.add(name, kind)
    return made


def test_a_default_topic_accepts_text_and_bytes() -> None:
    assert plan_route("t", DEFAULT, struct(value="string")) == TopicRoute("t", ("value",), None)
    route = plan_route("t", DEFAULT, struct(key="binary", value="string", partition="integer", timestamp="timestamp"))
    assert route == TopicRoute("t", ("key", "value", "timestamp"), "partition")


@pytest.mark.parametrize("shape", [DEFAULT, TYPED], ids=["default", "typed"])
def test_rows_that_were_read_can_be_written_back(shape: TopicShape) -> None:
    columns = topic_columns(shape, include_headers=True)
    assert sorted(plan_route("t", shape, columns).payload) == sorted(shape.schema.names)


def test_a_column_of_the_topic_is_data_under_any_name() -> None:
    columns = struct(carrier="string", offset="long", _offset="long", _partition="integer", topic="string")
    assert plan_route("t", TYPED, columns) == TopicRoute("t", ("carrier", "offset"), "_partition")


@pytest.mark.parametrize(
    ("shape", "columns", "complaints"),
    [
        (DEFAULT, struct(key="string"), ["column 'value' is missing"]),
        (DEFAULT, struct(topic="string", partition="integer"), ["none of the topic's columns ['key', 'value'"]),
        (DEFAULT, struct(value="integer"), ["'value'", "int32"]),
        (DEFAULT, struct(value="string", colour="string"), ["'colour'"]),
        (DEFAULT, struct(value="string", partition="string"), ["column 'partition' has type string, expected int"]),
        (TYPED, struct(delay="double", carier="string"), ["'carier'", "'carrier'"]),
        (TYPED, struct(carrier="string", delay="string"), ["'delay'"]),
        (TYPED, struct(carrier="string", at="timestamp_ntz"), ["'at' has type timestamp_ntz, expected timestamp"]),
    ],
)
def test_columns_that_do_not_fit_are_named(shape: TopicShape, columns: StructType, complaints: list[str]) -> None:
    with pytest.raises(BrokerError) as caught:
        plan_route("flights", shape, columns)
    assert "SCHEMA_MISMATCH: topic flights: " in str(caught.value)
    for complaint in complaints:
        assert complaint in str(caught.value)


def test_types_a_topic_cannot_hold_are_named() -> None:
    columns = StructType().add("carrier", "string").add("delay", _interval())
    with pytest.raises(BrokerError, match=r"delay \(interval year to month\)"):
        plan_route("flights", TYPED, columns)


def _interval() -> DataType:
    from pyspark.sql.types import YearMonthIntervalType

    return YearMonthIntervalType()


def test_a_column_of_nulls_fits_everywhere() -> None:
    assert plan_route("t", TYPED, struct(carrier="string", delay="void")).payload == ("carrier", "delay")


def test_rows_go_to_the_partition_in_their_column() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"value": ["a", "b", "c", "d"], "partition": pa.array([1, None, 0, 1], pa.int32())}
    )
    parts = {
        partition: part.to_pydict()["value"]
        for partition, part in TopicRoute("t", ("value",), "partition").split(batch)
    }
    assert parts == {1: ["a", "d"], None: ["b"], 0: ["c"]}
    with pytest.raises(BrokerError, match="column partition is -1 in a row for t,"):
        list(TopicRoute("t", ("value",), "partition").split(batch.set_column(1, "partition", pa.array([-1] * 4))))


def test_rows_grouped_by_value_keep_one_group_whole() -> None:
    rows = pa.RecordBatch.from_pydict({"x": [1, 2]})
    assert [(value, part is rows) for value, part in rows_by_value(rows, pa.array(["t", "t"]))] == [("t", True)]


def test_the_topic_column_routes_rows() -> None:
    assert find_topic_column(struct(topic="string", value="string")) == "topic"
    assert find_topic_column(struct(topic="integer", _topic="string")) == "_topic"
    with pytest.raises(ConfigError, match="set the option topic"):
        find_topic_column(struct(value="string"))
    with pytest.raises(ConfigError, match="column topic has type int, expected string"):
        find_topic_column(struct(topic="integer"))


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        (["Name"], ["name"], ["Name"]),
        (["Name", "name"], ["name"], ["name"]),
        (["Name", "name"], ["NAME"], ["NAME"]),
        (["Name"], ["name", "NAME"], ["name", "NAME"]),
        (["Name"], ["Name", "name"], ["Name", "name"]),
        (["Partition"], ["partition"], ["partition"]),
    ],
    ids=str,
)
def test_a_name_in_another_case_matches_a_unique_column(own: list[str], given: list[str], expected: list[str]) -> None:
    assert with_topic_names(own, struct(**dict.fromkeys(given, "string"))).fieldNames() == expected
