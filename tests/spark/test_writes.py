"""Tests of writes with a real Spark: streams, foreachBatch, created and extended topics, tables and views."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.admin.admin import Admin
from tests.spark.queries import drained
from tests.spark.test_round_trips import ALL_TYPES, read

pytestmark = pytest.mark.integration


def write(frame: DataFrame, topic: str, **options: str) -> None:
    frame.write.format("sparklog").options(topic=topic, **options).mode("append").save()


def start(frame: DataFrame, topic: str, checkpoint: Path, **options: str) -> StreamingQuery:
    writer = frame.writeStream.format("sparklog").options(topic=topic, **options)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def test_a_named_write_creates_extends_and_writes_once(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    named = {"txnAppId": topic, "txnVersion": "0", "createTopic": "true", "partitions": "2", "keyColumns": "id"}
    first = spark.sql("select id, 'a' name from range(10)")
    write(first, topic, **named)
    write(first, topic, **named)
    made = admin.describe_topic(topic)
    assert (len(made.partitions), made.key, made.schema.names) == (2, ("id",), ["id", "name"])
    more = spark.sql("select id, 'b' name, 2 * id twice from range(10, 20)")
    message = fails(lambda: write(more, topic))
    assert "mergeSchema=true adds columns" in message
    assert "+ twice int64" in message
    wrong = more.withColumn("name", sf.lit(1))
    assert "- name string" in fails(lambda: write(wrong, topic, mergeSchema="true"))
    assert admin.describe_topic(topic).schema.names == ["id", "name"]  # the refused write has added no column
    write(more, topic, mergeSchema="true")
    write(first, topic)
    totals = read(spark, topic).agg(
        sf.count("*").alias("n"), sf.count("twice").alias("twice"), sf.sum("id").alias("ids")
    )
    assert totals.first() == Row(n=30, twice=10, ids=45 + 145 + 45)


def test_columns_match_in_any_case_and_near_duplicates_are_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, schema="Name string, Value int", partitions=1)
    write(spark.sql("select 'a' name, 1 VALUE"), topic)
    write(spark.sql("select 'b' Name, 2 value, 3 more"), topic, mergeSchema="true")
    assert admin.describe_topic(topic).schema.names == ["Name", "Value", "more"]
    assert {tuple(row) for row in read(spark, topic).select("Name", "Value", "more").collect()} == {
        ("a", 1, None),
        ("b", 2, 3),
    }
    both = spark.sql("select 'a' `n`, 1 `N`")
    assert "differ in case only" in fails(lambda: write(both, f"{topic}-both", createTopic="true"))


def test_kafka_like_columns_create_a_topic_with_kafkas_columns(spark: SparkSession, admin: Admin, topic: str) -> None:
    write(spark.sql("select 'k' key, 'v' value, 'x' topic"), topic, createTopic="true")
    assert read(spark, topic).select("key", "value").collect() == [Row(key=bytearray(b"k"), value=bytearray(b"v"))]


@pytest.mark.extended
def test_a_stream_creates_a_topic_with_all_types(spark: SparkSession, admin: Admin, topic: str, tmp_path: Path) -> None:
    """The test uses all types that streams support: Spark refuses TIME there. Timestamps are stored in UTC, although
    the session's zone is New York."""
    at = dt.datetime(2024, 7, 1, 12, 30, tzinfo=dt.timezone.utc)
    values = {"at": at, "pause": dt.timedelta(days=1, microseconds=1), "list": [1, None], "map": {"a": [0.5]}}
    source = spark.createDataFrame([values, {}], " ".join(ALL_TYPES.split())).drop("clock")
    write(source, topic, createTopic="true")
    stream = spark.readStream.format("sparklog").options(subscribe=topic, startingOffsets="earliest").load()
    copy = f"{topic}-copy"
    drained(lambda: start(stream.select(*source.columns), copy, tmp_path / "checkpoint", createTopic="true"))
    found = read(spark, copy).select(*source.columns)
    assert found.orderBy(sf.col("at").desc_nulls_last()).collect() == source.collect()
    assert str(admin.describe_topic(copy).schema.field("at").type) == "timestamp[us, tz=UTC]"
    assert admin.describe_topic(copy).schema == admin.describe_topic(topic).schema
    first = found.where("at is not null").select(sf.unix_micros("at").alias("us")).first()
    assert first == Row(us=int(at.timestamp() * 1_000_000))


def test_a_repeated_foreach_batch_repeats_only_unnamed_writes(
    spark: SparkSession, admin: Admin, topic: str, tmp_path: Path
) -> None:
    """The test runs the batch twice, as after a driver's death: unnamed writes are repeated, named ones are not. One
    name is enough for several topics, whether an option or the rows name them."""
    names = [f"{topic}-{kind}" for kind in ("in", "plain", "named", "by-rows", "by-rows-too")]
    for name in names:
        admin.create_topic(name, partitions=1, schema="x bigint")
    write(spark.range(3).withColumnRenamed("id", "x"), names[0])

    def both(frame: DataFrame, batch: int) -> None:
        for _ in range(2):
            write(frame, names[1])
            write(frame, names[2], txnAppId=topic, txnVersion=str(batch))
            for name in names[3:]:
                rows = frame.withColumn("topic", sf.lit(name)).write.format("sparklog").mode("append")
                rows.options(txnAppId=topic, txnVersion=str(batch)).save()

    source = spark.readStream.format("sparklog").options(subscribe=names[0], startingOffsets="earliest").load()
    writer = (
        source.select("x").writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    drained(writer.trigger(availableNow=True).start)
    assert [read(spark, name).count() for name in names] == [3, 6, 3, 3, 3]


@pytest.mark.extended
def test_complete_mode_appends_the_whole_result_each_time(
    spark: SparkSession, admin: Admin, topic: str, tmp_path: Path
) -> None:
    target = f"{topic}-counts"
    admin.create_topic(topic, partitions=1, schema="x bigint")
    for _ in range(2):
        write(spark.range(4).withColumnRenamed("id", "x"), topic)
        stream = spark.readStream.format("sparklog").options(subscribe=topic, startingOffsets="earliest").load()
        counted = stream.groupBy((sf.col("x") % 2).alias("odd")).count()
        writer = counted.writeStream.format("sparklog").options(topic=target, createTopic="true").outputMode("complete")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        drained(writer.start)
    found = sorted(tuple(row) for row in read(spark, target).select("odd", "count").collect())
    assert found == [(0, 2), (0, 4), (1, 2), (1, 4)]


def test_a_table_reads_and_inserts_and_refuses_the_rest(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1, schema="x bigint, name string")
    table = topic.replace("-", "_")
    try:
        spark.sql(f"create table {table} using sparklog options (subscribe '{topic}')")
        spark.sql(f"insert into {table} with ('topic'='{topic}') (x, name) values (1, 'a'), (2, 'b')")
        one = spark.sql("select 3L x, 'c' name, null _topic, null _partition, null _offset, null _timestamp")
        one.writeTo(table).option("topic", topic).append()
        assert spark.sql(f"select sum(x) s, max(_offset) o from {table} where name <> 'a'").first() == Row(s=5, o=3)
        assert "INSERT INTO t WITH ('topic'='x')" in fails(
            lambda: spark.sql(f"insert into {table} (x, name) values (1, 'a')")
        )
        overwrite = (
            f"insert overwrite {table} with ('topic'='{topic}') select x, name, null, null, null, null from {table}"
        )
        assert "topics only support" in fails(lambda: spark.sql(overwrite))
        made = f"create table {table}_columns using sparklog options (topic '{topic}') as select 1L x"
        assert "CREATE TABLE ... AS SELECT does not pass options" in fails(lambda: spark.sql(made))
        assert "does not support UPDATE TABLE" in fails(lambda: spark.sql(f"update {table} set x = 1"))
        assert "does not support deletes" in fails(lambda: spark.sql(f"delete from {table} where x = 1"))
        assert "does not support truncates" in fails(lambda: spark.sql(f"truncate table {table}"))
        spark.sql(f"create table {table}_columns (x bigint) using sparklog options (subscribe '{topic}')")
        assert "create it without columns" in fails(spark.table(f"{table}_columns").collect)
    finally:
        for name in (table, f"{table}_columns"):
            spark.sql(f"drop table if exists {name}")


def test_bad_write_options_of_a_dataframe_are_refused(
    spark: SparkSession, fails: Callable[[Callable[[], object]], str]
) -> None:
    rows = spark.sql("select 1 x")
    assert "rows may then be lost" in fails(lambda: write(rows, "t", acks="1"))
    assert "did you mean 'createTopic'" in fails(lambda: write(rows, "t", createTopics="true"))
    assert "createTopic=true creates it" in fails(lambda: write(rows, "unknown-topic"))
