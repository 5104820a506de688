"""Tests of batch reads with limits on offsets, times, columns and ``where``, with a real Spark and real brokers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import sparklog
from sparklog.client.admin.admin import Admin
from sparklog.client.consumer import partition_reader as client_reader
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.read_options import parse_read_options
from sparklog.spark.reader import BatchReader, plan_read
from sparklog.spark.topics import SourceTopic
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.history_tables import Archive

pytestmark = pytest.mark.integration

UTC = dt.timezone.utc
DAY = dt.datetime(2024, 5, 1, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)


def at(minute: int) -> dt.datetime:
    return DAY + dt.timedelta(minutes=minute)


@pytest.fixture(scope="module")
def events(brokers: ProcessCluster, admin: Admin) -> str:
    """Create a default topic with two partitions: minutes 0 to 39 in order in each, ten records a batch, then a late
    record."""
    admin.create_topic("read-events", partitions=2)
    with Producer(brokers.bootstrap) as producer:
        for partition in range(2):
            for first in range(0, 40, 10):
                for minute in range(first, first + 10):
                    producer.send("read-events", b"%d" % minute, timestamp=at(minute), partition=partition)
                producer.flush()
            producer.send("read-events", b"late", timestamp=at(5), partition=partition).result(30)
    return "read-events"


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


def load(spark: SparkSession, topic: str, **options: str) -> DataFrame:
    return spark.read.format("sparklog").options(subscribe=topic, **options).load()


def test_timestamps_limit_a_read_to_the_record(
    spark: SparkSession, events: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    minute = {number: str(DAY_MS + number * 60_000) for number in (0, 13, 27, 100)}
    both = load(spark, events, startingTimestamp=minute[13], endingTimestamp=minute[27])
    # The read starts at the first record that is not older, not at the start of that record's batch.
    assert places(both) == [(p, offset) for p in (0, 1) for offset in range(13, 27)]
    by_partition = f'{{"{events}": {{"0": {minute[27]}, "1": {minute[100]}}}}}'
    late = load(spark, events, startingOffsetsByTimestamp=by_partition, startingOffsetsByTimestampStrategy="latest")
    assert places(late) == [(0, offset) for offset in range(27, 41)]
    missing = load(spark, events, startingOffsetsByTimestamp=by_partition)
    assert f"{events}-1 has no record at or after {minute[100]} ms" in fails(missing.count)
    split = load(spark, events, maxRecordsPerPartition="10", startingTimestamp=minute[13])
    assert split.rdd.getNumPartitions() == 6
    assert split.count() == 56


def test_a_read_of_missing_offsets_fails_or_clips(
    spark: SparkSession, events: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    beyond = {
        "startingOffsets": f'{{"{events}": {{"0": 39, "1": 41}}}}',
        "endingOffsets": f'{{"{events}": {{"0": 99, "1": -1}}}}',
    }
    assert "endingOffsets: offset 99 of" in fails(load(spark, events, **beyond).count)
    assert places(load(spark, events, failOnDataLoss="false", **beyond)) == [(0, 39), (0, 40)]


def test_where_limits_partitions_offsets_and_times(spark: SparkSession, events: str) -> None:
    assert places(sparklog.read(spark, events, where="partition = 1 and offset between 38 and 99")) == [
        (1, 38),
        (1, 39),
        (1, 40),
    ]
    text = f"timestamp >= '{at(4).isoformat()}' and timestamp < '{at(6).isoformat()}'"
    found = sparklog.read(spark, events, columns=["offset", "value"], where=text)
    assert found.columns == ["offset", "value"]
    # The late record is in the result: an upper bound of the time does not end the read of the log.
    assert sorted(found.collect()) == sorted(
        [Row(offset=offset, value=value) for offset, value in ((4, b"4"), (5, b"5"), (40, b"late"))] * 2
    )
    spark.sql(f'create or replace temporary view w using sparklog options (subscribe "{events}", where "offset < 3")')
    assert spark.sql("select count(*) n from w").first() == Row(n=6)


def test_every_query_reads_again_and_nothing_is_pushed_down(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str
) -> None:
    admin.create_topic(topic, partitions=2, schema="x bigint")

    def add(first: int) -> None:
        with Producer(brokers.bootstrap) as producer:
            for partition in range(2):
                table = pa.table({"x": pa.array(range(first + partition, first + 20, 2), pa.int64())})
                producer.write(topic, table, partition=partition)

    add(0)
    frame = sparklog.read(spark, topic, where="partition in (0, 1)")
    few = frame.filter("x < 4")
    assert (few.count(), frame.count(), few.count()) == (4, 20, 4)
    assert few.union(frame).count() == 24
    assert frame.join(few, "x").count() == 4
    frame.createOrReplaceTempView("pushed")
    assert spark.sql("select count(*) n from pushed where x = 1").first() == Row(n=1)
    assert spark.sql("select count(*) n from pushed").first() == Row(n=20)
    add(20)
    assert frame.count() == 20
    assert sparklog.read(spark, topic).count() == 40


def test_read_refuses_bad_arguments(spark: SparkSession, events: str) -> None:
    with pytest.raises(ConfigError, match="'ofset' is not a column of the topic; did you mean 'offset'"):
        sparklog.read(spark, events, columns=["ofset"])  # codespell:ignore ofset
    with pytest.raises(ConfigError, match="expected a list of names"):
        sparklog.read(spark, events, columns="offset")
    with pytest.raises(ConfigError, match="found value at 0"):
        sparklog.read(spark, events, where="value = 1")


def test_filters_limit_which_columns_and_batches_are_fetched(
    brokers: ProcessCluster, spark: SparkSession, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan as Spark does, but read in this process, so that the test sees the readers' counters."""
    readers: list[PartitionReader] = []
    schema = load(spark, events).schema

    def seen(*arguments: Any, **keywords: Any) -> PartitionReader:
        readers.append(PartitionReader(*arguments, **keywords))
        return readers[-1]

    monkeypatch.setattr(client_reader, "PartitionReader", seen)

    def rows(where: str) -> int:
        readers.clear()
        given = {"subscribe": events, "where": where, "localReads": "never"}
        options = parse_read_options(given, {"bootstrap.servers": brokers.bootstrap})
        with SourceTopic(brokers.bootstrap) as view:
            reader = BatchReader(plan_read(view, options, schema=schema))
        return sum(batch.num_rows for wanted in reader.partitions() for batch in reader.read(wanted))

    assert rows("partition = 0") == 41
    everything = readers[0].counters
    assert everything.decoded_batches == everything.fetched_batches == 5
    # Minute 33 is in the fourth batch: the earlier batches are not fetched, and the later one is not decoded.
    assert rows(f"partition = 0 and timestamp between {DAY_MS + 33 * 60_000} and {DAY_MS + 33 * 60_000}") == 1
    narrowed = readers[0].counters
    assert (narrowed.fetched_batches, narrowed.decoded_batches) == (2, 1)
    assert narrowed.fetched_bytes < everything.fetched_bytes / 2
    assert rows("partition = 0 and timestamp >= '2024-05-02T00:00:00Z'") == 0
    assert readers == []


def test_a_table_and_a_view_over_archive_and_log(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    """Each query reads the current state of both; the session has no Delta settings."""
    admin.create_topic(topic, partitions=1)
    archive = Archive(brokers.bootstrap, topic, str(tmp_path))
    name = topic.replace("-", "_")

    def write(*values: bytes) -> None:
        with Producer(brokers.bootstrap) as producer:
            for value in values:
                producer.send(topic, value, partition=0, timestamp=DAY)

    write(b"a", b"b", b"c")
    archive.archive({0: 2})
    try:
        spark.sql(f"create table {name} using sparklog options (subscribe '{topic}', history '{tmp_path}')")
        spark.sql(f"create view {name}_values as select cast(value as string) v, offset from {name}")
        for expected, end in (("abc", 4), ("abcde", 6)):
            admin.delete_records({TopicPartition(topic, 0): end - 2})
            rows = spark.sql(f"select v from {name}_values order by offset").collect()
            assert [row["v"] for row in rows] == list(expected)
            write(b"d", b"e")
            archive.archive({0: end})
    finally:
        spark.sql(f"drop view if exists {name}_values")
        spark.sql(f"drop table if exists {name}")
