"""Tests of users' mistakes: the errors have a type, names, the found and the expected values, and nothing is
written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from sparklog.client.admin.admin import Admin

pytestmark = pytest.mark.integration


def test_an_unknown_option_is_refused(spark: SparkSession, fails: Callable[[Callable[[], object]], str]) -> None:
    load = spark.read.format("sparklog").option("subscribe", "x").option("startingOffset", "earliest").load
    assert "unknown option 'startingoffset'; did you mean 'startingOffsets'?" in fails(load)


def test_a_read_without_brokers_is_refused(
    plain_spark: SparkSession, fails: Callable[[Callable[[], object]], str]
) -> None:
    load = plain_spark.newSession().read.format("sparklog").option("subscribe", "x").load
    assert "no brokers given: set option bootstrap.servers" in fails(load)


def test_an_unknown_topic_is_refused(spark: SparkSession, fails: Callable[[Callable[[], object]], str]) -> None:
    load = spark.read.format("sparklog").option("subscribe", "unknown-topic").load
    message = fails(load)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in message
    assert "unknown-topic" in message


def test_an_unknown_partition_is_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=2)
    load = spark.read.format("sparklog").option("assign", f'{{"{topic}": [1, 2]}}').load
    assert f"UNKNOWN_TOPIC_OR_PARTITION: option assign: {topic}-2" in fails(load)


def test_an_offset_outside_the_log_is_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1)
    reader = spark.read.format("sparklog").option("subscribe", topic)
    message = fails(reader.option("endingOffsets", f'{{"{topic}": {{"0": 7}}}}').load().count)
    assert f"OFFSET_OUT_OF_RANGE: endingOffsets: offset 7 of {topic}-0 is outside the log, which has 0 to 0" in message


def test_a_read_of_an_unknown_column_is_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1, schema="carrier string not null, delay double")
    reader = spark.read.format("sparklog").schema("delya double").option("subscribe", topic)
    assert "delya: not a column of the topic (columns: carrier, delay, _topic" in fails(reader.load().count)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("'AA' carrier, 'late' delay", ["'delay'"]),
        ("'AA' carier, 1.5D delay", ["'carier'", "'carrier'"]),
        ("'AA' carrier, interval '1' month delay", ["delay (interval month)"]),
    ],
)
def test_unfit_columns_are_named_and_nothing_is_written(
    spark: SparkSession,
    admin: Admin,
    topic: str,
    *,
    fails: Callable[[Callable[[], object]], str],
    columns: str,
    named: list[str],
) -> None:
    description = admin.create_topic(topic, partitions=1, schema="carrier string not null, delay double")
    writer = spark.sql(f"select {columns}").write.format("sparklog").option("topic", topic).mode("append")
    message = fails(writer.save)
    assert "SCHEMA_MISMATCH" in message
    for name in named:
        assert name in message
    assert set(admin.list_offsets(description.topic_partitions()).values()) == {0}


def test_a_null_in_a_required_column_is_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1, schema="carrier string not null, delay double")
    rows = spark.sql("select if(id = 1, null, 'AA') carrier, 1.5D delay from range(2)")
    message = fails(rows.write.format("sparklog").option("topic", topic).mode("append").save)
    assert "SCHEMA_MISMATCH" in message
    assert "'carrier'" in message


def test_overwrite_names_the_supported_mode(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=1)
    writer = spark.sql("select 'v' value").write.format("sparklog").option("topic", topic)
    assert 'only support .mode("append")' in fails(writer.mode("overwrite").save)


def test_a_write_without_a_topic_is_refused(spark: SparkSession, fails: Callable[[Callable[[], object]], str]) -> None:
    writer = spark.sql("select 'v' value").write.format("sparklog").mode("append")
    assert "no topic to write to: set the option topic" in fails(writer.save)


def test_a_write_to_an_unknown_partition_is_refused(
    spark: SparkSession, admin: Admin, topic: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    admin.create_topic(topic, partitions=2)
    rows = spark.range(1).select(sf.lit("v").alias("value"), sf.lit(2).alias("partition"))
    message = fails(rows.write.format("sparklog").option("topic", topic).mode("append").save)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in message
    assert "has 2 partitions" in message
