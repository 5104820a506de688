"""Tests of streaming queries with a real Spark and real brokers."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import create_topic, hosted, leader
from tests.spark.queries import drained

pytestmark = pytest.mark.integration

UTC = dt.timezone.utc
DAY = dt.datetime(2024, 5, 1, tzinfo=UTC)
ROOT = Path(__file__).parent.parent.parent


def at(minute: float) -> dt.datetime:
    return DAY + dt.timedelta(minutes=minute)


def produce(brokers: ProcessCluster, topic: str, *values: str, partition: int = 0, minute: float = 0) -> None:
    with Producer(brokers.bootstrap) as producer:
        for value in values:
            producer.send(topic, value.encode(), key=value.encode(), partition=partition, timestamp=at(minute))


def hosted_end(brokers: ProcessCluster, broker_id: int, topic: str) -> int:
    found = hosted(brokers, broker_id, topic)
    return found.log_end_offset if found is not None else -1


def stream(spark: SparkSession, **options: str) -> DataFrame:
    return spark.readStream.format("sparklog").options(**options).load()


class Sink:
    """Values of each micro-batch by its id, through foreachBatch."""

    def __init__(self, checkpoint: Path) -> None:
        self.batches: dict[int, list[str]] = {}
        self._checkpoint = str(checkpoint)

    def start(self, frame: DataFrame, *, available_now: bool = False) -> StreamingQuery:
        def keep(batch: DataFrame, batch_id: int) -> None:
            values = batch.select(sf.col("value").cast("string").alias("value")).collect()
            self.batches[batch_id] = sorted(row.value for row in values)

        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", self._checkpoint)
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def drain(self, frame: DataFrame) -> StreamingQuery:
        return drained(lambda: self.start(frame, available_now=True))

    @property
    def values(self) -> list[str]:
        return sorted(value for values in self.batches.values() for value in values)


def wait_for(what: Callable[[], bool], query: StreamingQuery, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s; {query.lastProgress}"
        time.sleep(0.05)


def test_available_now_obeys_limits_and_reports_lag(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    admin.create_topic(topic, partitions=2)
    produce(brokers, topic, *(f"a{number}" for number in range(9)))
    produce(brokers, topic, *(f"b{number}" for number in range(3)), partition=1)
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "4", "groupId": topic}
    sink = Sink(tmp_path)
    query = sink.drain(stream(spark, **options))
    assert sink.batches == {
        0: ["a0", "a1", "a2", "b0"],
        1: ["a3", "a4", "a5", "b1"],
        2: ["a6", "a7", "a8", "b2"],
    }
    assert admin.group_offsets(topic) == {TopicPartition(topic, 0): 9, TopicPartition(topic, 1): 3}
    source = json.loads(query.recentProgress[0].json)["sources"][0]
    assert json.loads(json.dumps(source["endOffset"]))["topics"][topic]["offsets"] == {"0": 3, "1": 1}
    assert source["latestOffset"]["topics"][topic]["offsets"] == {"0": 9, "1": 3}
    produce(brokers, topic, "a9")
    sink.drain(stream(spark, **options))
    assert sink.batches[3] == ["a9"]
    assert sorted(sink.batches) == [0, 1, 2, 3]


def test_a_query_finds_new_partitions_before_and_after_a_restart(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, "old")
    frame = stream(spark, subscribePattern=f"{topic}.*")
    sink = Sink(tmp_path)
    query = sink.start(frame)
    try:
        wait_for(lambda: 0 in sink.batches, query)
        produce(brokers, topic, "new")
        admin.create_partitions(topic, 2)
        produce(brokers, topic, "partition", partition=1)
        admin.create_topic(f"{topic}-more", partitions=1)
        produce(brokers, f"{topic}-more", "topic")
        wait_for(lambda: len(sink.values) == 3, query)
    finally:
        query.stop()
    assert sink.values == ["new", "partition", "topic"]
    produce(brokers, f"{topic}-more", "while it was down")
    sink.drain(frame)
    assert sink.values == ["new", "partition", "topic", "while it was down"]


@pytest.mark.extended
def test_data_loss_fails_a_query_until_it_is_allowed(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    admin.create_topic(topic, partitions=1)
    admin.create_topic(f"{topic}-more", partitions=1)
    produce(brokers, topic, "old")
    options = {"subscribe": f"{topic},{topic}-more", "startingOffsets": "earliest"}
    sink = Sink(tmp_path)
    sink.drain(stream(spark, **options))
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, "again")
    with pytest.raises(StreamingQueryException, match=r"deleted and created again.*failOnDataLoss=false"):
        sink.drain(stream(spark, **options))
    sink.drain(stream(spark, **options, failOnDataLoss="false"))
    assert sink.values == ["again", "old"]
    frame = stream(spark, **options)  # Spark resolves its columns while both topics exist
    admin.delete_topic(f"{topic}-more")
    with pytest.raises(StreamingQueryException, match=f"{topic}-more-0 was deleted"):
        sink.drain(frame)


@pytest.mark.extended
def test_a_query_notices_an_unclean_truncation(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    """The query has read records that only the old leader had. The new log is first shorter than that, then longer,
    with another history."""
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    create_topic(brokers, topic, assignment=((0, 1),), config=config)
    produce(brokers, topic, "both")
    wait_until(lambda: hosted_end(brokers, 1, topic) == 1, 180, "the follower to be level")
    brokers.kill(1)
    produce(brokers, topic, "cut-1", "cut-2")
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    sink = Sink(tmp_path)
    sink.drain(stream(spark, **options))
    assert sink.values == ["both", "cut-1", "cut-2"]
    brokers.kill(0)
    brokers.start_broker(1)
    assert leader(brokers, topic) == 1
    with pytest.raises(StreamingQueryException, match="the log was truncated to 1, but was read up to offset 3"):
        sink.drain(stream(spark, **options))
    produce(brokers, topic, "new-1", "new-2", "new-3")
    with pytest.raises(StreamingQueryException, match=r"DataLoss: offsets 3 to 4 .*failOnDataLoss=false"):
        sink.drain(stream(spark, **options))
    sink.drain(stream(spark, **options, failOnDataLoss="false"))
    assert sink.values == ["both", "cut-1", "cut-2", "new-3"]
    brokers.start_broker(0)
    brokers.wait_ready()


def test_a_stream_skips_aborted_transactions_and_waits_for_open_ones(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    admin.create_topic(topic, partitions=1)
    frame = stream(spark, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="3")
    with Producer(brokers.bootstrap, transactional_id=topic) as producer:
        for value, is_kept in (("a", True), ("b", False), ("c", False), ("d", True)):
            producer.begin()
            for number in range(4):
                producer.send(topic, f"{value}{number}".encode())
            producer.flush()  # an abort before the send would leave no gap
            producer.flush()  # the aborted records are in the log
            producer.commit() if is_kept else producer.abort()
        producer.begin()
        producer.send(topic, b"e0").result(30)
        produce(brokers, topic, "after it")
        sink = Sink(tmp_path)
        sink.drain(frame)
        kept = [f"{value}{number}" for value in "ad" for number in range(4)]
        assert sink.values == kept
        # Twenty offsets in batches of three; five of the offsets are markers, so some batches have no rows.
        assert len(sink.batches) == 7 and [] in sink.batches.values()
        batch = spark.read.format("sparklog").option("subscribe", topic)
        assert sorted(row.offset for row in batch.load().collect()) == [0, 1, 2, 3, 15, 16, 17, 18]
        from_gap = batch.option("startingOffsets", f'{{"{topic}": {{"0": 6}}}}').load()
        assert from_gap.count() == 4
        producer.commit()
    sink.drain(frame)
    assert sink.values == sorted([*kept, "e0", "after it"])


def test_windows_and_a_join_of_two_topics_work(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    orders, payments = f"{topic}-orders", f"{topic}-payments"
    for name in (orders, payments):
        admin.create_topic(name, partitions=1)
    for minute in (0, 4, 11):
        produce(brokers, orders, f"o{minute}", minute=minute)
    produce(brokers, payments, "o4", minute=6)
    produce(brokers, payments, "o11", minute=40)
    both = stream(spark, subscribe=f"{orders},{payments}", startingOffsets="earliest")
    counts = both.withWatermark("timestamp", "1 minute").groupBy(sf.window("timestamp", "10 minutes"), "topic").count()
    sinks = [counts.select("topic", sf.col("window.start").alias("start"), "count").writeStream.outputMode("complete")]

    left, right = (
        stream(spark, subscribe=name, startingOffsets="earliest")
        .select(sf.col("key").cast("string").alias(f"{kind}_key"), sf.col("timestamp").alias(f"{kind}_at"))
        .withWatermark(f"{kind}_at", "1 minute")
        for name, kind in ((orders, "order"), (payments, "payment"))
    )
    within = sf.expr("order_key = payment_key and payment_at between order_at and order_at + interval 10 minutes")
    sinks.append(left.join(right, within).writeStream.outputMode("append"))
    for sink, name in zip(sinks, ("counted", "joined"), strict=True):
        writer = sink.format("memory").queryName(name).option("checkpointLocation", str(tmp_path / name))
        drained(writer.trigger(availableNow=True).start)
    found = spark.sql("select topic, unix_micros(start) start, count from counted").collect()
    starts = {minute: int(at(minute).timestamp() * 1e6) for minute in (0, 10, 40)}
    assert sorted(found) == [
        Row(topic=orders, start=starts[0], count=2),
        Row(topic=orders, start=starts[10], count=1),
        Row(topic=payments, start=starts[0], count=1),
        Row(topic=payments, start=starts[40], count=1),
    ]
    assert spark.sql("select order_key from joined").collect() == [Row(order_key="o4")]


@pytest.mark.extended
def test_a_driver_killed_in_its_first_batch_keeps_its_start(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, *, tmp_path: Path
) -> None:
    """A query decides its start once. If the next run decided it again, "latest" would skip the records that came in
    between, and so would a time that no record had reached."""
    admin.create_topic(topic, partitions=2)
    produce(brokers, topic, "before")
    by_time = {
        "startingTimestamp": str(int(at(30).timestamp() * 1000)),
        "startingOffsetsByTimestampStrategy": "latest",
    }
    starts = {"latest": {"startingOffsets": "latest"}, "time": by_time}
    queries = {name: {"subscribe": topic, **options} for name, options in starts.items()}
    arguments = json.dumps([[str(tmp_path / name), options] for name, options in queries.items()])
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.killed_query", brokers.bootstrap, arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "in their first batches\n"
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(30)
        driver.stdout.close()  # type: ignore[union-attr]
    produce(brokers, topic, "while it was down", minute=5)
    produce(brokers, topic, "young", minute=35, partition=1)
    for name, options in queries.items():
        sink = Sink(tmp_path / name)
        sink.drain(stream(spark, **options))
        assert sink.values == ["while it was down", "young"], name
