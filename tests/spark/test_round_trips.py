"""Tests that rows written to topics are read back equal, with a real Spark and real brokers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.spark.schema import arrow_schema
from sparklog.testing.process_cluster import ProcessCluster

pytestmark = pytest.mark.integration

UTC = dt.timezone.utc

ALL_TYPES = """
    flag boolean, tiny tinyint, small smallint, number int, big bigint, single float, real double, money decimal(38,10),
    text string, bytes binary, day date, clock time, at timestamp, local timestamp_ntz, pause interval day to second,
    list array<int>, map map<string, array<double>>, struct struct<a: bigint, b: struct<c: date, d: timestamp>>
"""


def read(spark: SparkSession, topic: str, **options: str) -> DataFrame:
    return spark.read.format("sparklog").options(subscribe=topic, **options).load()


def append(frame: DataFrame, topic: str | None = None) -> None:
    writer = frame.write.format("sparklog").mode("append")
    (writer.option("topic", topic) if topic else writer).save()


def test_a_default_topic_returns_written_rows(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=3)
    rows = spark.range(5000).select(
        sf.concat(sf.lit("k"), sf.col("id") % 100).alias("key"), sf.col("id").cast("string").alias("value")
    )
    append(rows, topic)
    found = read(spark, topic)
    assert found.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert {row.value for row in found.collect()} == {str(number).encode() for number in range(5000)}
    facts = found.agg(
        sf.count("*").alias("rows"),
        sf.countDistinct("partition", "offset").alias("places"),
        sf.countDistinct("partition").alias("partitions"),
        sf.max("timestampType").alias("kind"),
        sf.min("topic").alias("topic"),
    ).first()
    assert facts == Row(rows=5000, places=5000, partitions=3, kind=0, topic=topic)
    spread = found.groupBy("key").agg(sf.countDistinct("partition").alias("n")).agg(sf.max("n").alias("n")).first()
    assert spread == Row(n=1)  # a key stays in its partition


def test_headers_timestamps_and_nulls_survive(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    at = dt.datetime(2024, 7, 1, 12, 30, 0, 123456, UTC)
    with Producer(brokers.bootstrap) as producer:
        producer.send(topic, b"v", key=b"k", headers={"a": b"1", "b": None}, timestamp=at)
    append(read(spark, topic, includeHeaders="true").withColumn("key", sf.lit(None).cast("binary")), topic)
    first, second = read(spark, topic, includeHeaders="true").orderBy("offset").collect()
    assert (first.key, first.value, first.offset) == (b"k", b"v", 0)
    assert first.headers == [Row(key="a", value=b"1"), Row(key="b", value=None)]
    assert first.timestamp.astimezone(UTC) == at
    assert second == Row(**{**first.asDict(), "key": None, "offset": 1})


def test_all_types_survive(spark: SparkSession, admin: Admin, topic: str) -> None:
    schema = StructType.fromDDL(ALL_TYPES)
    assert isinstance(schema, StructType)
    admin.create_topic(topic, partitions=1, schema=arrow_schema(schema))
    at = dt.datetime(2024, 3, 10, 2, 30, 59, 999999)  # noqa: DTZ001  does not exist in New York: the clocks went forward
    real = at.replace(tzinfo=UTC)
    full = (
        *(True, -128, 32767, -1, 2**63 - 1, 1.5, -0.1, Decimal("123456789.0123456789")),
        *(
            "grüße",
            b"\x00\xff",
            dt.date(1582, 10, 15),
            dt.time(23, 59, 59, 1),
            real,
            at,
            dt.timedelta(days=-1, microseconds=1),
        ),
        *([1, None, 3], {"a": [0.5], "b": None}, Row(a=1, b=Row(c=dt.date(9999, 12, 31), d=real))),
    )
    source = spark.createDataFrame([full, (None,) * len(full)], schema)
    append(source.coalesce(1), topic)
    found = read(spark, topic)
    assert found.schema.fields[: len(full)] == schema.fields
    assert found.columns[len(full) :] == ["_topic", "_partition", "_offset", "_timestamp"]
    own = found.orderBy("_offset").select(*schema.fieldNames())
    assert own.collect() == source.collect()
    assert own.select(sf.unix_micros("at")).first() == source.select(sf.unix_micros("at")).first()


def test_a_projection_returns_only_its_columns(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, schema="id bigint, name string, tags array<string>", key="id")
    append(spark.sql("select id, concat('n', id) name, array('x', null) tags from range(100)"), topic)
    chosen = StructType.fromDDL("tags array<string>, _offset bigint, id bigint")
    assert isinstance(chosen, StructType)
    frame = spark.read.format("sparklog").schema(chosen).option("subscribe", topic).load()
    assert frame.schema == chosen
    assert frame.agg(sf.sum("id").alias("sum"), sf.count("tags").alias("n")).first() == Row(sum=4950, n=100)
    assert all(row.tags == ["x", None] for row in frame.collect())
    offsets = spark.read.format("sparklog").schema("_offset bigint").option("subscribe", topic).load()
    assert offsets.count() == 100


def test_a_reused_frame_a_union_and_a_view_stay_complete(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, schema="p int, x bigint")
    append(spark.sql("select cast(id % 5 as int) p, id x from range(50)"), topic)
    frame = read(spark, topic)
    assert frame.filter("p = 1").count() == 10
    assert frame.count() == 50
    assert frame.filter("p = 2").union(frame).count() == 60
    assert frame.join(frame.filter("p = 3").select("x"), "x").count() == 10
    frame.createOrReplaceTempView("seen")
    assert spark.sql("select count(*) n from seen where p = 4").first() == Row(n=10)
    assert spark.sql("select count(*) n from seen").first() == Row(n=50)


def test_a_view_reads_and_inserts(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, schema="x bigint")
    append(spark.range(3).select(sf.col("id").alias("x"), sf.lit(1).alias("partition")), topic)
    options = f"subscribe '{topic}', topic '{topic}'"
    spark.sql(f"create or replace temporary view t using sparklog options ({options})")
    assert spark.sql("select sum(x) s, max(_offset) o from t").first() == Row(s=3, o=2)
    spark.sql("insert into t select x + 100, _topic, 0, _offset, _timestamp from t")
    assert sorted(read(spark, topic).select("x", "_partition").collect()) == [
        *((x, 1) for x in range(3)),
        *((x, 0) for x in range(100, 103)),
    ]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_every_compression_returns_equal_rows(spark: SparkSession, admin: Admin, topic: str, compression: str) -> None:
    description = admin.create_topic(topic, partitions=1, schema="x bigint, text string")
    rows = spark.range(20_000).select(sf.col("id").alias("x"), sf.lit("the same text").alias("text"))
    rows.coalesce(1).write.format("sparklog").options(topic=topic, compression=compression).mode("append").save()
    totals = read(spark, topic).agg(sf.sum("x").alias("x"), sf.countDistinct("text").alias("texts")).first()
    assert totals == Row(x=20_000 * 19_999 // 2, texts=1)
    sizes = {
        replica.size_bytes
        for broker in admin.describe_brokers()
        for replica in broker.replicas
        if replica.topic == description.name
    }
    assert max(sizes) < 20_000 * 13  # the text alone is larger without compression


def test_one_write_and_one_read_take_many_topics(spark: SparkSession, admin: Admin, topic: str) -> None:
    names = [f"{topic}-{suffix}" for suffix in "ab"]
    for name in names:
        admin.create_topic(name, partitions=2)
    rows = [Row(topic=names[number % 2], partition=number % 3 % 2, value=str(number)) for number in range(60)]
    append(spark.createDataFrame(rows))
    found = read(spark, ",".join(names)).select("topic", "partition", sf.col("value").cast("string").alias("value"))
    assert sorted(found.collect()) == sorted(rows)
    by_pattern = spark.read.format("sparklog").option("subscribePattern", f"{topic}-.*").load()
    assert by_pattern.count() == 60
    one = spark.read.format("sparklog").option("assign", f'{{"{names[0]}": [1]}}').load()
    assert {(row.topic, row.partition) for row in one.collect()} == {(names[0], 1)}


def test_offsets_limit_a_read(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, schema="x bigint")
    append(spark.range(0, 40).select(sf.col("id").alias("x"), (sf.col("id") % 2).cast("int").alias("partition")), topic)

    def places(**options: str) -> list[tuple[int, int]]:
        return sorted((row._partition, row._offset) for row in read(spark, topic, **options).collect())

    start = f'{{"{topic}": {{"0": 5, "1": -2}}}}'
    end = f'{{"{topic}": {{"0": -1, "1": 3}}}}'
    expected = [(0, offset) for offset in range(5, 20)] + [(1, offset) for offset in range(3)]
    assert places(startingOffsets=start, endingOffsets=end) == expected
    split = read(spark, topic, startingOffsets=start, endingOffsets=end, minPartitions="7")
    assert split.rdd.getNumPartitions() == 7
    assert sorted((row._partition, row._offset) for row in split.collect()) == expected
    assert places(startingOffsets="earliest", endingOffsets=f'{{"{topic}": {{"0": 0, "1": 0}}}}') == []


def test_latest_is_resolved_once_for_a_frame(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, schema="x bigint")
    rows = spark.range(10).select(sf.col("id").alias("x"))
    append(rows, topic)
    frame = read(spark, topic)
    assert frame.count() == 10
    append(rows, topic)
    assert frame.count() == 10
    assert read(spark, topic).count() == 20


def test_a_cached_frame_of_a_recreated_topic_raises(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1, schema="x bigint")
    append(spark.range(10).select(sf.col("id").alias("x")), topic)
    frame = read(spark, topic)
    assert frame.count() == 10
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1, schema="x bigint")
    append(spark.range(20).select(sf.col("id").alias("x")), topic)
    assert "INCONSISTENT_TOPIC_ID" in fails(frame.count)


def test_types_spark_lacks_are_converted(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str
) -> None:
    schema = pa.schema([("u", pa.uint64()), ("s", pa.large_string()), ("t", pa.timestamp("ns", "Europe/Berlin"))])
    admin.create_topic(topic, partitions=1, schema=schema)
    table = pa.table({"u": [2**64 - 1], "s": ["x"], "t": [1_700_000_000_123_456_789]}, schema=schema)
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, table).result(30)
    row = read(spark, topic).select("u", "s", sf.unix_micros("t").alias("t")).first()
    assert row == Row(u=Decimal(2**64 - 1), s="x", t=1_700_000_000_123_456)
    back = spark.createDataFrame(
        [(Decimal(7), "y", dt.datetime(2024, 1, 1, tzinfo=UTC))], "u decimal(20,0), s string, t timestamp"
    )
    append(back, topic)
    assert read(spark, topic).count() == 2


def test_an_empty_topic_and_an_empty_write_work(spark: SparkSession, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, schema="x bigint")
    append(spark.range(0).select(sf.col("id").alias("x")), topic)
    assert read(spark, topic).count() == 0
