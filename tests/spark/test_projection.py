"""Tests of a schema as a projection: batches and streams fetch only the columns of the reader's schema."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as sf

import sparklog
from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from tests.spark.queries import drained

pytestmark = pytest.mark.integration

NAMES = [f"c{i}" for i in range(20)]
ROWS = 400


@pytest.fixture(scope="module")
def wide(brokers: ProcessCluster, admin: Admin) -> pa.Table:
    dice = random.Random(3)
    table = pa.table({name: [dice.randbytes(100) for _ in range(ROWS)] for name in NAMES})
    admin.create_topic("wide", partitions=1, schema=pa.schema([(name, pa.binary()) for name in NAMES]))
    with Producer(brokers.bootstrap) as producer:
        producer.write("wide", table).result(30)
    return table


def counted(brokers: ProcessCluster) -> tuple[int, int]:
    """Return the stored and the sent bytes of projected batches, for all brokers together."""
    counters = [brokers.describe(broker_id).counters for broker_id in brokers.slots]
    names = ("fetch.projected.stored.bytes", "fetch.projected.sent.bytes")
    stored, sent = (sum(found.get(name, 0) for found in counters) for name in names)
    return stored, sent


def test_batches_and_streams_fetch_the_columns_of_their_schema(
    spark: SparkSession, brokers: ProcessCluster, wide: pa.Table, tmp_path: Path
) -> None:
    before = counted(brokers)
    reader = spark.read.format("sparklog").option("subscribe", "wide").option("localReads", "never")
    frame = reader.schema("c4 binary, _offset bigint").load()
    rows = sorted((row._offset, bytes(row.c4)) for row in frame.collect())
    assert rows == list(enumerate(wide.column("c4").to_pylist()))
    after = counted(brokers)
    stored, sent = after[0] - before[0], after[1] - before[1]
    assert stored > 2000 * ROWS and sent < 0.08 * stored
    # headers contain offsets and partitions
    places = reader.schema("_partition int, _offset bigint, _topic string").load().collect()
    assert sorted(place._offset for place in places) == list(range(ROWS))
    headers = counted(brokers)
    assert headers[0] - after[0] == stored and headers[1] == after[1]
    stream = spark.readStream.format("sparklog").option("subscribe", "wide").option("startingOffsets", "earliest")
    stream = stream.option("localReads", "never")
    writer = (
        stream.schema("c4 binary")
        .load()
        .writeStream.format("memory")
        .queryName("wide_c4")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )
    drained(writer.start)
    assert spark.table("wide_c4").count() == ROWS
    streamed = counted(brokers)
    assert (streamed[0] - headers[0], streamed[1] - headers[1]) == (stored, sent)


def test_offsets_and_timestamps_alone_fetch_only_the_timestamp_column(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    """The topic may also have no schema: the brokers send the headers and the timestamp column."""
    admin.create_topic(topic, partitions=1)
    with Producer(brokers.bootstrap) as producer:
        for number in range(ROWS):
            producer.send(topic, random.Random(number).randbytes(2000), timestamp=number)
    before = counted(brokers)
    frame = sparklog.read(spark, topic, columns=["partition", "offset", "timestamp"], localReads="never")
    found = frame.select("partition", "offset", sf.unix_micros("timestamp").alias("us")).collect()
    assert sorted(found) == [Row(partition=0, offset=number, us=number) for number in range(ROWS)]
    after = counted(brokers)
    stored, sent = after[0] - before[0], after[1] - before[1]
    assert stored > 2000 * ROWS and 8 * ROWS <= sent < 0.03 * stored


def test_tasks_map_the_files_of_a_replica_on_their_host(
    spark: SparkSession, brokers: ProcessCluster, wide: pa.Table
) -> None:
    def local_segments() -> int:
        return sum(brokers.describe(broker_id).counters.get("local.segments", 0) for broker_id in brokers.slots)

    before = (local_segments(), counted(brokers))
    for mode in ("auto", "require"):
        reader = spark.read.format("sparklog").option("subscribe", "wide").option("localReads", mode)
        rows = reader.schema("_offset bigint, c4 binary").load().collect()
        assert sorted((row._offset, bytes(row.c4)) for row in rows) == list(enumerate(wide.column("c4").to_pylist()))
    assert local_segments() == before[0] + 2 and counted(brokers) == before[1]
