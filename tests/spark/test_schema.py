"""Tests of Spark's and Arrow's types and columns, in both directions, without a Spark session."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VariantType,
    YearMonthIntervalType,
)

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.schema import (
    LOG_COLUMNS,
    TopicShape,
    arrow_schema,
    check_projection,
    one_shape,
    spark_type,
    topic_columns,
)

ALL_TYPES: list[DataType] = [
    BooleanType(),
    ByteType(),
    ShortType(),
    IntegerType(),
    LongType(),
    FloatType(),
    DoubleType(),
    DecimalType(38, 10),
    StringType(),
    BinaryType(),
    DateType(),
    TimeType(),
    TimestampType(),
    TimestampNTZType(),
    DayTimeIntervalType(),
    ArrayType(IntegerType(), containsNull=False),
    MapType(StringType(), ArrayType(DoubleType()), valueContainsNull=False),
    StructType(
        [StructField("a", LongType(), nullable=False), StructField("b", StructType([StructField("c", DateType())]))]
    ),
]


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.simpleString())
def test_every_type_survives_the_round_trip(kind: DataType) -> None:
    for nullable in (True, False):
        struct = StructType([StructField("x", kind, nullable)])
        back = topic_columns(TopicShape(arrow_schema(struct)))
        assert StructType(back.fields[:1]) == struct
        assert back.fields[1:] == LOG_COLUMNS.fields


@pytest.mark.parametrize(
    "kind",
    [
        YearMonthIntervalType(),
        CalendarIntervalType(),
        ArrayType(YearMonthIntervalType()),
        VariantType(),
        StructType([StructField("v", VariantType())]),
        MapType(StringType(), VariantType()),
    ],
    ids=lambda kind: kind.simpleString(),
)
def test_types_a_topic_cannot_hold_are_refused_by_name(kind: DataType) -> None:
    with pytest.raises(BrokerError, match=r"a topic does not support the type of column bad \(") as caught:
        arrow_schema(StructType([StructField("good", LongType()), StructField("bad", kind)]))
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH


def test_a_column_of_only_null_is_refused_by_name() -> None:
    with pytest.raises(BrokerError, match=r"column 'bad' \(null\): this type is not stored"):
        arrow_schema(StructType([StructField("bad", NullType())]))


@pytest.mark.parametrize(
    ("arrow", "expected"),
    [
        (pa.uint8(), ShortType()),
        (pa.uint16(), IntegerType()),
        (pa.uint32(), LongType()),
        (pa.uint64(), DecimalType(20, 0)),
        (pa.float16(), FloatType()),
        (pa.large_string(), StringType()),
        (pa.large_binary(), BinaryType()),
        (pa.binary(4), BinaryType()),
        (pa.date64(), DateType()),
        (pa.time32("ms"), TimeType()),
        (pa.timestamp("ns"), TimestampNTZType()),
        (pa.timestamp("s", "Europe/Berlin"), TimestampType()),
        (pa.duration("ns"), DayTimeIntervalType()),
        (pa.decimal256(30, 2), DecimalType(30, 2)),
        (pa.decimal256(50, 2), None),
        (pa.month_day_nano_interval(), None),
        (pa.list_(pa.uint8(), 3), ArrayType(ShortType())),
        (pa.large_list(pa.struct([("a", pa.uint64())])), ArrayType(StructType([StructField("a", DecimalType(20, 0))]))),
        (pa.map_(pa.string(), pa.uint16()), MapType(StringType(), IntegerType())),
    ],
    ids=str,
)
def test_arrow_types_unknown_to_spark_get_a_wider_type(arrow: pa.DataType, expected: DataType | None) -> None:
    assert spark_type(arrow) == expected


def test_a_column_spark_cannot_hold_is_named() -> None:
    schema = pa.schema([("fine", pa.int8()), ("wide", pa.decimal256(60, 2))])
    with pytest.raises(BrokerError, match=r"Spark has no type for column wide \(decimal256\(60, 2\)\)"):
        topic_columns(TopicShape(schema))


def test_default_topics_look_like_the_kafka_source() -> None:
    ddl = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
    shape = TopicShape(DEFAULT_SCHEMA, "timestamp")
    assert topic_columns(shape).simpleString() == f"struct<{ddl.replace(', ', ',').replace(' ', ':')}>"
    headers = topic_columns(shape, include_headers=True).fields[-1]
    assert headers.simpleString() == "headers:array<struct<key:string,value:binary>>"


def test_a_column_of_the_topic_hides_the_sources_own() -> None:
    shape = TopicShape(pa.schema([("_offset", pa.string()), ("x", pa.int32())]))
    assert topic_columns(shape).fieldNames() == ["_offset", "x", "_topic", "_partition", "_timestamp"]
    assert topic_columns(shape)["_offset"].dataType == StringType()


OFFERED = topic_columns(
    TopicShape(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string()),
                pa.field("tags", pa.list_(pa.string())),
                pa.field("pause", pa.duration("us")),
            ]
        )
    )
)


def test_projections_keep_order_and_types() -> None:
    check_projection(StructType().add("_offset", LongType()).add("id", LongType(), nullable=False), OFFERED)
    check_projection(StructType().add("tags", ArrayType(StringType())).add("id", LongType()), OFFERED)
    check_projection(StructType().add("pause", DayTimeIntervalType(0, 1)), OFFERED)
    check_projection(OFFERED, OFFERED)


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        (StructType(), "at least one"),
        (StructType().add("nme", StringType()), r"nme: not a column of the topic \(columns: id, name"),
        (StructType().add("id", IntegerType()), "id: declared as int, but bigint in the topic"),
        (StructType().add("name", StringType(), nullable=False), "name: declared NOT NULL, but the topic allows nulls"),
        (StructType().add("tags", ArrayType(StringType(), containsNull=False)), "tags: declared NOT NULL"),
    ],
)
def test_impossible_projections_are_refused(declared: StructType, complaint: str) -> None:
    with pytest.raises(BrokerError, match=complaint):
        check_projection(declared, OFFERED)


def test_topics_of_one_read_share_their_columns() -> None:
    wide, narrow = TopicShape(pa.schema([("x", pa.int64())])), TopicShape(pa.schema([("x", pa.int32())]))
    assert one_shape({"a": wide, "b": wide}) == wide
    with pytest.raises(BrokerError, match="topics a and b have different columns"):
        one_shape({"a": wide, "b": narrow})
