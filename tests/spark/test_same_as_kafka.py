"""Tests that the same pipelines on ``format("kafka")`` and ``format("sparklog")`` give equal DataFrames and
micro-batches.

``format("kafka")`` uses a real Kafka first, and then, in the same tests, the Kafka listener of sparklog's brokers.
Spark's Kafka connector and Kafka's broker are not part of the project: ``kafka_side`` describes the folder that the
environment variable ``SPARKLOG_KAFKA_JARS`` names. ``tests/run --all`` sets it and fetches the jars; without it pytest
skips all of these tests. docs/spark.md lists the intended differences; the tests do not compare these, or their
docstrings name them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.admin.admin import Admin
from sparklog.testing.process_cluster import ProcessCluster
from tests.spark.kafka_side import KafkaBroker, KafkaSide, Record, Side, SparklogSide, jars_folder
from tests.spark.queries import drained
from tests.waiting import wait_until

_JARS = jars_folder()

pytestmark = [
    pytest.mark.integration,
    pytest.mark.extended,
    pytest.mark.skipif(_JARS is None, reason="SPARKLOG_KAFKA_JARS does not name a folder with Kafka's jars"),
]

#: The records are from a day long past, so Kafka's default retention would soon delete them.
KEPT = {"retention.ms": "-1"}
DAY_MS = 1_714_521_600_000
MINUTE_MS = 60_000
A, B, LOG_TIME = "same-a", "same-b", "same-log-time"

Sides = tuple[Side, Side]


def at(minute: int) -> int:
    return DAY_MS + minute * MINUTE_MS


def numbered(partition: int, first: int, count: int) -> list[Record]:
    """Return records whose minutes are not in order, some without keys and values, with headers of all kinds."""
    kinds: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
        (),
        (("h", b"1"),),
        (("h", b"1"), ("h", b""), ("other", None)),
    )
    return [
        Record(
            partition,
            at(number + (3 if number % 5 == 0 else 0)),
            None if number % 4 == 0 else b"k%d" % (number % 3),
            None if number % 7 == 0 else b"v%d" % number,
            kinds[number % 3],
        )
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="module", params=["Kafka", "Kafka listener"])
def kafka(
    request: pytest.FixtureRequest, plain_spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaSide]:
    """Yield the system that ``format("kafka")`` uses: Kafka, or another cluster of sparklog."""
    assert _JARS is not None
    directory = tmp_path_factory.mktemp("kafka")
    with ExitStack() as ends:
        if request.param == "Kafka":
            bootstrap = ends.enter_context(KafkaBroker(_JARS, directory)).bootstrap
        else:
            cluster = ends.enter_context(ProcessCluster(base_dir=directory / "data", kafka=True))
            bootstrap = cluster.kafka_bootstrap
        side = KafkaSide(plain_spark, bootstrap)
        ends.callback(side.close)
        yield side


@pytest.fixture(scope="module")
def sides(kafka: KafkaSide, admin: Admin, brokers: ProcessCluster) -> Sides:
    both: Sides = (kafka, SparklogSide(admin, brokers.bootstrap))
    for name in {A, B, LOG_TIME} & set(admin.list_topics()):  # of the other Kafka
        admin.delete_topic(name)
    for side in both:
        side.create_topic(A, 2, KEPT)
        side.create_topic(B, 1, KEPT)
        side.create_topic(LOG_TIME, 1, {"message.timestamp.type": "LogAppendTime"})
        side.send(A, numbered(0, 0, 30) + numbered(1, 0, 11))
        side.send(B, numbered(0, 10, 5))
        side.send(LOG_TIME, numbered(0, 0, 3))
    return both


def options_of(side: Side, options: dict[str, str]) -> dict[str, str]:
    return {"kafka.bootstrap.servers": side.bootstrap, **options}


def load(spark: SparkSession, side: Side, **options: str) -> DataFrame:
    return spark.read.format(side.name).options(**options_of(side, options)).load()


def stream(spark: SparkSession, side: Side, **options: str) -> DataFrame:
    return spark.readStream.format(side.name).options(**options_of(side, options)).load()


def rows(frame: DataFrame, *columns: str) -> list[Row]:
    chosen = frame.select(*columns) if columns else frame
    return sorted(chosen.collect(), key=lambda row: (row.topic, row.partition, row.offset))


def by_partition(values: dict[str, list[int]]) -> str:
    return json.dumps({topic: dict(enumerate(numbers)) for topic, numbers in values.items()})


EVERYTHING = by_partition({A: [-2, -2]}), by_partition({A: [-1, -1]})

BATCHES: dict[str, tuple[int, dict[str, str]]] = {
    "default": (41, {"subscribe": A}),
    "names": (41, {"subscribe": A, "startingOffsets": "earliest", "endingOffsets": "latest"}),
    "headers": (46, {"subscribe": f"{A},{B}", "includeHeaders": "true"}),
    "offsets": (
        10,
        {
            "subscribe": A,
            "startingOffsets": by_partition({A: [7, 3]}),
            "endingOffsets": by_partition({A: [12, 8]}),
        },
    ),
    "relative": (41, {"subscribe": A, "startingOffsets": EVERYTHING[0], "endingOffsets": EVERYTHING[1]}),
    "nothing": (0, {"subscribe": A, "startingOffsets": by_partition({A: [30, 11]})}),
    "pattern": (46, {"subscribePattern": "same-[ab]"}),
    "assign": (16, {"assign": json.dumps({A: [1], B: [0]})}),
    "from a time": (31, {"subscribe": A, "startingTimestamp": str(at(6))}),
    "between times": (8, {"subscribe": A, "startingTimestamp": str(at(4) + 1), "endingTimestamp": str(at(9))}),
    "until a late time": (41, {"subscribe": A, "endingTimestamp": str(at(500))}),
    "times": (
        15,
        {
            "subscribe": A,
            "startingOffsetsByTimestamp": by_partition({A: [at(13), at(2)]}),
            "endingOffsetsByTimestamp": by_partition({A: [at(21), at(8)]}),
        },
    ),
    "times over offsets": (
        5,
        {
            "subscribe": A,
            "startingOffsets": EVERYTHING[0],
            "startingOffsetsByTimestamp": by_partition({A: [at(27), at(500)]}),
            "startingOffsetsByTimestampStrategy": "latest",
        },
    ),
    "one time over times": (
        31,
        {
            "subscribe": A,
            "startingTimestamp": str(at(6)),
            "startingOffsetsByTimestamp": by_partition({A: [at(27), at(8)]}),
        },
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_reads_are_equal(spark: SparkSession, sides: Sides, name: str) -> None:
    count, options = BATCHES[name]
    theirs, ours = (load(spark, side, **options) for side in sides)
    assert ours.schema == theirs.schema
    found = rows(ours)
    assert found == rows(theirs)
    assert len(found) == count


def test_timestamps_of_the_log_are_equal(spark: SparkSession, sides: Sides) -> None:
    columns = ["key", "value", "topic", "partition", "offset", "timestampType"]
    theirs, ours = (rows(load(spark, side, subscribe=LOG_TIME), *columns) for side in sides)
    assert ours == theirs
    assert [row.timestampType for row in ours] == [1, 1, 1]


@pytest.mark.parametrize(
    "options", [{"minPartitions": "8"}, {"minPartitions": "3", "maxRecordsPerPartition": "7"}], ids=str
)
def test_batch_reads_have_equal_tasks(spark: SparkSession, sides: Sides, options: dict[str, str]) -> None:
    def tasks(side: Side) -> list[tuple[int, int, int]]:
        frame = load(spark, side, subscribe=A, **options).groupBy(sf.spark_partition_id().alias("task"), "partition")
        found = frame.agg(sf.min("offset").alias("low"), sf.max("offset").alias("high")).collect()
        return sorted((row.partition, row.low, row.high) for row in found)

    theirs, ours = (tasks(side) for side in sides)
    assert ours == theirs


REFUSED: dict[str, dict[str, str]] = {
    "from latest": {"subscribe": A, "startingOffsets": "latest"},
    "until earliest": {"subscribe": A, "endingOffsets": "earliest"},
    "one partition missing": {"subscribe": A, "startingOffsets": by_partition({A: [0]})},
    "one too many": {"subscribe": A, "startingOffsets": by_partition({A: [0, 0, 0]})},
    "two selections": {"subscribe": A, "assign": json.dumps({A: [0]})},
    "no selection": {},
    "no record that late": {"subscribe": A, "startingTimestamp": str(at(500))},
    "above the log": {"subscribe": A, "startingOffsets": by_partition({A: [99, 11]})},
    "start after end": {
        "subscribe": A,
        "startingOffsets": by_partition({A: [9, 11]}),
        "endingOffsets": by_partition({A: [5, -1]}),
    },
    "no topic": {"subscribe": "same-nowhere"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_queries_that_both_sources_refuse(spark: SparkSession, sides: Sides, name: str) -> None:
    for side in sides:
        with pytest.raises((PySparkException, Py4JJavaError)):
            load(spark, side, **REFUSED[name]).collect()


class Sink:
    """Rows of each micro-batch, through foreachBatch."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.batches: dict[int, list[Row]] = {}

    def start(self, frame: DataFrame, *, available_now: bool = False) -> StreamingQuery:
        def keep(batch: DataFrame, number: int) -> None:
            self.batches[number] = rows(batch)

        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def drain(self, frame: DataFrame) -> None:
        drained(lambda: self.start(frame, available_now=True))

    @property
    def filled(self) -> list[list[Row]]:
        """Return the batches with rows, in order.

        Kafka's source stores the start offsets before the first batch, so its query at ``latest`` may have an empty
        first batch. sparklog stores them with the first batch.
        """
        return [found for _, found in sorted(self.batches.items()) if found]

    @property
    def rows(self) -> list[Row]:
        everything = itertools.chain.from_iterable(self.batches.values())
        return sorted(everything, key=lambda row: (row.topic, row.partition, row.offset))


def until(sink: Sink, query: StreamingQuery, count: int) -> None:
    def there() -> bool:
        assert query.isActive, query.exception()
        return len(sink.rows) >= count

    wait_until(there)


STREAMS: dict[str, tuple[list[int], dict[str, str]]] = {
    "all at once": ([46], {"subscribe": f"{A},{B}", "includeHeaders": "true"}),
    "limited": ([9] * 4 + [5], {"subscribe": A, "maxOffsetsPerTrigger": "10"}),
    "three partitions": ([], {"subscribePattern": "same-[ab]", "maxOffsetsPerTrigger": "7"}),
    "fewer than partitions": ([], {"assign": json.dumps({A: [1], B: [0]}), "maxOffsetsPerTrigger": "1"}),
    "offsets": (
        [],
        {"subscribe": A, "startingOffsets": by_partition({A: [7, -2]}), "maxOffsetsPerTrigger": "9"},
    ),
    "a time": ([], {"subscribe": A, "startingTimestamp": str(at(6)), "maxOffsetsPerTrigger": "15"}),
    "times": (
        [],
        {
            "subscribe": A,
            "startingOffsetsByTimestamp": by_partition({A: [at(27), at(500)]}),
            "startingOffsetsByTimestampStrategy": "latest",
        },
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_micro_batches_of_available_now_are_equal(spark: SparkSession, sides: Sides, name: str, tmp_path: Path) -> None:
    counts, options = STREAMS[name]
    sinks = [Sink(tmp_path / side.name) for side in sides]
    for side, sink in zip(sides, sinks, strict=True):
        frame = stream(spark, side, **{"startingOffsets": "earliest", **options})
        sink.drain(frame)
    theirs, ours = sinks
    assert ours.batches == theirs.batches
    assert ours.rows
    if counts:
        assert [len(found) for found in ours.filled] == counts


def test_micro_batches_have_equal_tasks(spark: SparkSession, sides: Sides, tmp_path: Path) -> None:
    tasks = []
    for side in sides:
        sink = Sink(tmp_path / side.name)
        frame = stream(spark, side, subscribe=A, startingOffsets="earliest", maxRecordsPerPartition="7")
        sink.drain(frame.withColumn("task", sf.spark_partition_id()))
        parts: dict[int, list[tuple[int, int]]] = {}
        for row in sink.rows:
            parts.setdefault(row.task, []).append((row.partition, row.offset))
        tasks.append(sorted(parts.values()))
    assert tasks[1] == tasks[0]
    assert len(tasks[1]) == 7


def test_limits_new_partitions_and_a_restart_are_equal(
    spark: SparkSession, sides: Sides, topic: str, tmp_path: Path
) -> None:
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "6"}
    steps: list[list[Any]] = []
    for side in sides:
        side.create_topic(topic, 1, KEPT)
        side.send(topic, numbered(0, 0, 14))
        sink, frame = Sink(tmp_path / side.name), stream(spark, side, **options)
        query = sink.start(frame)
        try:
            until(sink, query, 14)
            limited = dict(sink.batches)
            side.create_partitions(topic, 2)
            side.send(topic, numbered(1, 50, 4) + numbered(0, 14, 1))
            until(sink, query, 19)
            query.processAllAvailable()  # without this, the restart may begin with the last batch again
        finally:
            query.stop()
        before = sink.rows
        side.send(topic, numbered(0, 20, 9) + numbered(1, 60, 5))
        side.create_partitions(topic, 3)
        side.send(topic, numbered(2, 70, 2))
        again = Sink(sink.checkpoint)
        again.drain(stream(spark, side, **options))
        steps.append([limited, before, again.filled])
        assert [len(found) for found in limited.values()] == [6, 6, 2]
        assert (len(before), len(again.rows)) == (19, 16)
    assert steps[1] == steps[0]


def test_a_start_at_latest_and_a_restart_are_equal(
    spark: SparkSession, sides: Sides, topic: str, tmp_path: Path
) -> None:
    seen: list[list[list[Row]]] = []
    for side in sides:
        side.create_topic(topic, 2, KEPT)
        side.send(topic, numbered(0, 0, 5))
        sink, frame = Sink(tmp_path / side.name), stream(spark, side, subscribe=topic)
        query = sink.start(frame)
        try:
            wait_until(lambda side=side, sink=sink: side.start_is_settled(sink.checkpoint))  # type: ignore[misc]
            side.send(topic, numbered(0, 5, 1))
            until(sink, query, 1)
            side.send(topic, numbered(1, 5, 1))
            until(sink, query, 2)
            query.processAllAvailable()
        finally:
            query.stop()
        side.send(topic, numbered(0, 8, 2) + numbered(1, 8, 2))
        sink.drain(frame)
        seen.append(sink.filled)
    assert seen[1] == seen[0]
    assert [len(found) for found in seen[1]] == [1, 1, 4]


def test_waits_for_enough_records_or_time_are_equal(
    spark: SparkSession, sides: Sides, topic: str, tmp_path: Path
) -> None:
    """``minOffsetsPerTrigger`` makes a batch wait, and ``maxTriggerDelay`` ends the wait. The first batch of a run
    does not wait."""
    least = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": "9"}
    seen: list[list[list[Row]]] = []
    for side in sides:
        side.create_topic(topic, 1, KEPT)
        side.send(topic, numbered(0, 0, 2))
        sink = Sink(tmp_path / side.name)
        query = sink.start(stream(spark, side, **least, maxTriggerDelay="1h"))
        try:
            until(sink, query, 2)
            side.send(topic, numbered(0, 2, 3))
            query.processAllAvailable()  # the query has polled and found too few records
            assert len(sink.rows) == 2
            side.send(topic, numbered(0, 5, 6))  # one by one: only all of them with the 3 before are enough
            until(sink, query, 11)
            query.processAllAvailable()
        finally:
            query.stop()
        side.send(topic, numbered(0, 20, 1))
        query = sink.start(stream(spark, side, **least, maxTriggerDelay="3s"))
        try:
            until(sink, query, 12)
            began = time.monotonic()
            side.send(topic, numbered(0, 21, 2))
            until(sink, query, 14)
            assert time.monotonic() - began > 1, "the batch waits for the delay, not only for the next trigger"
        finally:
            query.stop()
        seen.append(sink.filled)
    assert seen[1] == seen[0]
    assert [len(found) for found in seen[1]] == [2, 9, 1, 2]


def test_the_deletion_of_a_topic_has_equal_effects(
    spark: SparkSession, sides: Sides, topic: str, tmp_path: Path
) -> None:
    """``failOnDataLoss`` decides whether a query continues without the deleted topic."""
    options = {"subscribePattern": f"{topic}-[xy]", "startingOffsets": "earliest"}
    seen: list[list[list[Row]]] = []
    for side in sides:
        for name in ("x", "y"):
            side.create_topic(f"{topic}-{name}", 1, KEPT)
            side.send(f"{topic}-{name}", numbered(0, 0, 4))
        sink = Sink(tmp_path / side.name)
        sink.drain(stream(spark, side, **options))
        side.delete_topic(f"{topic}-y")
        side.send(f"{topic}-x", numbered(0, 4, 3))
        with pytest.raises(StreamingQueryException):
            sink.drain(stream(spark, side, **options))
        sink.drain(stream(spark, side, **options, failOnDataLoss="false"))
        side.send(f"{topic}-x", numbered(0, 7, 1))
        sink.drain(stream(spark, side, **options))  # the checkpoint no longer contains the deleted topic
        seen.append(sink.filled)
    assert seen[1] == seen[0]
    assert [len(found) for found in seen[1]] == [8, 3, 1]


WRITTEN = "key binary, value string, headers array<struct<key: string, value: binary>>, partition int, topic string"
PLACED = ["key", "value", "headers", "topic", "partition", "offset", "timestampType"]


def test_both_sources_read_back_the_same_rows(spark: SparkSession, sides: Sides, topic: str, tmp_path: Path) -> None:
    """Partition columns route rows; rows without one follow the key, with the same hash. The test writes a batch,
    and a stream of text columns."""
    keys = spark.range(40).select(
        sf.concat(sf.lit("key"), "id").alias("key"), sf.col("id").cast("string").alias("value")
    )
    keys.coalesce(1).write.parquet(str(tmp_path / "keys"))
    arriving = spark.readStream.schema(keys.schema).parquet(str(tmp_path / "keys"))
    written = [
        (b"k", "1", [("h", b"x")], 2, f"{topic}-x"),
        (None, "2", [], 0, f"{topic}-x"),
        (b"k", None, None, 1, f"{topic}-y"),
        (b"k", "4", [("h", None), ("h", b"")], 2, f"{topic}-x"),
    ]
    found: list[list[Row]] = []
    for side in sides:
        for name in ("x", "y", "keys"):
            side.create_topic(f"{topic}-{name}", 3)
        own = options_of(side, {})
        frame = spark.createDataFrame(written, WRITTEN).coalesce(1)
        frame.write.format(side.name).options(**own).mode("append").save()
        query = arriving.writeStream.format(side.name).options(**own, topic=f"{topic}-keys")
        checkpoint = str(tmp_path / side.name)
        query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        drained(query.start)
        back = load(spark, side, subscribePattern=f"{topic}-.*", includeHeaders="true")
        found.append(rows(back, *PLACED))
    assert found[1] == found[0]
    assert len(found[1]) == 44


def test_how_reads_differ_from_kafkas_source(spark: SparkSession, sides: Sides) -> None:
    """In Kafka's source, ``maxRecordsPerPartition`` alone divides micro-batches, but not batches."""
    tasks = [load(spark, side, subscribe=A, maxRecordsPerPartition="7").rdd.getNumPartitions() for side in sides]
    assert tasks == [2, 7]


def test_how_finite_runs_differ_from_kafkas_source(
    spark: SparkSession, sides: Sides, topic: str, tmp_path: Path
) -> None:
    """In Kafka's source, AvailableNow leaves a rest below ``minOffsetsPerTrigger`` to the next run."""
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    limits = {"minOffsetsPerTrigger": "4", "maxOffsetsPerTrigger": "5"}
    sizes, read = [], []
    for side in sides:
        side.create_topic(topic, 1, KEPT)
        side.send(topic, numbered(0, 0, 11))
        sink = Sink(tmp_path / side.name)
        sink.drain(stream(spark, side, **options, **limits))
        sizes.append([len(found) for found in sink.filled])
        sink.drain(stream(spark, side, **options))
        read.append(sink.rows)
    assert sizes == [[5, 5], [5, 5, 1]]
    assert read[1] == read[0] and len(read[1]) == 11


def test_how_writes_differ_from_kafkas_sink(spark: SparkSession, sides: Sides, topic: str) -> None:
    """In sparklog, each write ends with a transaction's marker, which takes an offset, and timestamps are kept."""
    offsets, kept = [], []
    for side in sides:
        side.create_topic(topic, 1, KEPT)
        for _ in range(2):
            frame = (
                load(spark, side, subscribe=B).where("offset = 0").drop("partition").withColumn("topic", sf.lit(topic))
            )
            frame.write.format(side.name).options(**options_of(side, {})).mode("append").save()
        found = rows(load(spark, side, subscribe=topic).withColumn("ms", sf.unix_millis("timestamp")))
        offsets.append([row.offset for row in found])
        kept.append([row.ms == numbered(0, 10, 1)[0].timestamp_ms for row in found])
    assert offsets == [[0, 1], [0, 2]]
    assert kept == [[False, False], [True, True]]
