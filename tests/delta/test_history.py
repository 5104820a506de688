"""Tests of history with a real Spark with Delta: archived by the job, read as DataFrame, as view and as stream."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import sparklog
from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.job import run_archives
from sparklog.delta.table import table_path
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.read_history import HISTORY_SETTING, Located
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import archived, asked, ends
from tests.delta.history_tables import Archive
from tests.spark.queries import drained
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

_NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.timezone.utc)
_TYPED = "customer string, price double, at timestamp, tags array<string>"


def write(brokers: ProcessCluster, topic: str, numbers: range, partition: int, *, day: int = 0) -> None:
    """Write one row a minute, from noon on."""
    begin = _NOON + dt.timedelta(days=day)
    data = pa.table(
        {
            "customer": [f"c{number % 3}" for number in numbers],
            "price": [float(number) for number in numbers],
            "at": pa.array(
                [begin + dt.timedelta(minutes=place) for place in range(len(numbers))], pa.timestamp("us", "UTC")
            ),
            "tags": [[str(number)] for number in numbers],
        }
    )
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, data, partition=partition).result()


@pytest.fixture
def archive(spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, lake: str) -> Archive:
    """Create a topic and its archive.

    Partition 0 has 30 records of three days, and partition 1 has 10. The archive has 20 and 10 of them. The log starts
    below the end of the archive.
    """
    admin.create_topic(
        topic, partitions=2, replication_factor=1, schema=_TYPED, event_time="at", config={"retention.ms": -1}
    )
    write(brokers, topic, range(15), 0)
    write(brokers, topic, range(100, 110), 1, day=1)
    archive = Archive(brokers.bootstrap, topic, lake)
    archive.archive({0: 10, 1: 5})
    write(brokers, topic, range(15, 20), 0, day=1)
    archive.archive()
    write(brokers, topic, range(20, 30), 0, day=2)
    admin.delete_records({TopicPartition(topic, 0): 18, TopicPartition(topic, 1): 10})
    spark.conf.set(HISTORY_SETTING, lake)
    return archive


@pytest.fixture
def orders(archive: Archive) -> str:
    """Return the topic's name."""
    return Path(archive.path).name


def prices(frame: DataFrame) -> list[float]:
    return sorted(row["price"] for row in frame.select("price").collect())


def places(rows: list[Row]) -> list[tuple[int, int]]:
    return sorted((row["_partition"], row["_offset"]) for row in rows)


_ALL = [*(float(number) for number in range(30)), *(float(number) for number in range(100, 110))]


@pytest.mark.extended
def test_one_dataframe_over_archive_and_log(
    spark: SparkSession, brokers: ProcessCluster, archive: Archive, orders: str, lake: str
) -> None:
    history = sparklog.read_history(spark, orders)
    assert history.columns == sparklog.read(spark, orders).columns
    rows = {(row["_partition"], row["_offset"]): row for row in history.collect()}
    assert sorted(row["price"] for row in rows.values()) == _ALL
    assert len(rows) == 40
    logged = sparklog.read(spark, orders).collect()
    assert {(0, 18), (0, 29)} <= {(row["_partition"], row["_offset"]) for row in logged}
    told = rows[0, 7].asDict()
    assert told.pop("at") == told.pop("_timestamp") == rows[0, 7]["at"]
    assert told == {"customer": "c1", "price": 7.0, "tags": ["7"], "_topic": orders, "_partition": 0, "_offset": 7}
    assert rows[0, 7]["at"].timestamp() == (_NOON + dt.timedelta(minutes=7)).timestamp()
    # The DataFrame's ranges are fixed: later records, moved records and deleted records do not change its result.
    write(brokers, orders, range(30, 35), 0)
    archive.archive()
    archive.compact()
    assert prices(history) == _ALL
    assert prices(sparklog.read_history(spark, orders)) == sorted([*_ALL, 30.0, 31.0, 32.0, 33.0, 34.0])
    # A user deletes rows, by deletion vector.
    spark.sql(
        f"ALTER TABLE delta.`{table_path(lake, orders)}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    spark.sql(f"DELETE FROM delta.`{table_path(lake, orders)}` WHERE price in (3, 104)")
    left = [price for price in [*_ALL, 30.0, 31.0, 32.0, 33.0, 34.0] if price not in (3, 104)]
    assert prices(sparklog.read_history(spark, orders)) == sorted(left)
    by_source = spark.read.format("sparklog").option("subscribe", orders).option("history", lake).load()
    assert prices(by_source) == sorted(left)


def test_arguments_and_filters_prune_files(spark: SparkSession, orders: str, lake: str) -> None:
    def read(**arguments: Any) -> list[float]:
        return prices(sparklog.read_history(spark, orders, **arguments))

    assert read(start={0: 12, 1: 8}, end={0: 22}) == [*(float(n) for n in range(12, 22)), 108.0, 109.0]
    assert read(start={0: 25, 1: 10}) == [25.0, 26.0, 27.0, 28.0, 29.0]
    assert read(end=_NOON + dt.timedelta(minutes=3)) == [0.0, 1.0, 2.0]
    assert read(start="2024-05-02T12:02:00Z", end="2024-05-03T12:01:00Z") == [
        *(float(n) for n in range(17, 21)),
        *(float(n) for n in range(102, 110)),
    ]
    assert read(where="partition = 1 and offset >= 4") == [float(n) for n in range(104, 110)]
    assert read(where="timestamp >= '2024-05-02T12:04:00Z'") == [
        *(float(n) for n in range(19, 30)),
        *(float(n) for n in range(104, 110)),
    ]
    assert read(start={0: 30, 1: 10}) == []
    few = sparklog.read_history(spark, orders, columns=["_offset", "customer"], where="offset < 2")
    assert few.columns == ["_offset", "customer"]
    assert sorted(map(tuple, few.collect())) == [(0, "c0"), (0, "c1"), (1, "c1"), (1, "c2")]
    # Spark's own filters skip files and row groups of the archive.
    plan = _plan(sparklog.read_history(spark, orders).where("price > 105 and _timestamp > '2024-05-02'"))
    assert "PushedFilters: [" in plan
    assert "GreaterThan(price,105.0)" in plan
    table = spark.read.format("delta").load(table_path(lake, orders))
    assert len(sparklog.read_history(spark, orders, end={0: 3, 1: 0}).inputFiles()) < len(table.inputFiles())


def _plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_a_moment_is_located_in_archive_or_log(spark: SparkSession, orders: str, lake: str) -> None:
    version = DeltaTable(table_path(lake, orders)).version()
    assert sparklog.locate_moment(spark, orders, "2024-05-02T12:04:00Z") == {
        0: Located("archive", 19, version),
        1: Located("archive", 4, version),
    }
    assert sparklog.locate_moment(spark, orders, _NOON + dt.timedelta(days=2, minutes=5)) == {
        0: Located("log", 25, version),
        1: Located("ahead", 10, version),
    }


def test_read_history_refuses_bad_arguments(spark: SparkSession, orders: str) -> None:
    spark.conf.unset(HISTORY_SETTING)
    for arguments, message in (
        ({}, "no archive given: pass history="),
        ({"history": "/nowhere"}, "there is no Delta table at /nowhere"),
        ({"history": "x", "startingOffsets": "earliest"}, "pass start= and end="),
        ({"history": "x", "start": _NOON.replace(tzinfo=None)}, "with a time zone"),
        ({"history": "x", "start": "yesterday"}, "with a time zone"),
    ):
        with pytest.raises(ConfigError, match=message):
            sparklog.read_history(spark, orders, **arguments)


def test_sql_views_read_the_history(spark: SparkSession, orders: str, lake: str) -> None:
    options = f"OPTIONS (subscribe '{orders}', history '{lake}'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW whole USING sparklog {options})")
    assert spark.sql("SELECT count(*), sum(price) FROM whole").first() == (40, sum(_ALL))
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW part USING sparklog {options}, where 'offset between 17 and 20')")
    assert places(spark.sql("SELECT * FROM part").collect()) == [(0, 17), (0, 18), (0, 19), (0, 20)]
    sparklog.read_history(spark, orders).createOrReplaceTempView("by_delta")
    assert spark.sql("SELECT count(*) FROM by_delta WHERE price < 5").first() == (5,)


@pytest.mark.extended
def test_a_killed_history_query_resumes_where_it_was(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, archive: Archive, tmp_path: Path
) -> None:
    """The driver dies in its first batch, which reads half of the archive. Before the next run the archive gets the
    rest of the log and is compacted, and the log is deleted."""
    orders = Path(archive.path).name
    options = {
        "subscribe": orders,
        "history": archive.path,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "16",
    }
    checkpoint = str(tmp_path / "checkpoint")
    command = [sys.executable, "-m", "tests.spark.killed_query", brokers.bootstrap, json.dumps([[checkpoint, options]])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "in their first batches\n"
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
    archive.archive()
    archive.compact()
    archive.vacuum()
    admin.delete_records({TopicPartition(orders, 0): None, TopicPartition(orders, 1): None})
    write(brokers, orders, range(30, 33), 0)
    batches: dict[int, list[Row]] = {}

    def take(frame: DataFrame, number: int) -> None:
        batches[number] = frame.collect()

    def start() -> StreamingQuery:
        frame = spark.readStream.format("sparklog").options(**options).load()
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        return writer.trigger(availableNow=True).start()

    drained(start)
    assert [len(rows) for _, rows in sorted(batches.items())] == [16, 15, 12]
    assert sorted(row["price"] for rows in batches.values() for row in rows) == sorted([*_ALL, 30.0, 31.0, 32.0])


@pytest.mark.extended
def test_readers_see_each_offset_once_during_archiving(
    spark: SparkSession, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    admin.create_topic(topic, partitions=2, replication_factor=1, schema=_TYPED, key="customer")
    write(brokers, topic, range(20), 0)
    archived(spark, brokers, topic, lake)
    stopping = threading.Event()
    live: list[tuple[int, int]] = []
    lock = threading.Lock()

    def take(frame: DataFrame, _: int) -> None:
        found = [(row["_partition"], row["_offset"]) for row in frame.collect()]
        with lock:
            live.extend(found)

    def produce() -> None:
        for number in itertools.count(1):
            write(brokers, topic, range(20), number % 2)
            if stopping.wait(0.2):
                return

    def keep() -> None:
        run_archives(spark, [asked(brokers, topic, lake, interval="1 seconds")], stopping=stopping, tell=print)

    def trim() -> None:
        """Delete archived records from the log immediately, as retention that waits for the archive does."""
        while not stopping.wait(0.3):
            admin.delete_records({TopicPartition(topic, number): end for number, end in ends(lake, topic).items()})

    stream = spark.readStream.format("sparklog").option("subscribe", topic).option("history", lake)
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 500)
    query = (
        stream.load().writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )
    threads = [threading.Thread(target=work, daemon=True) for work in (produce, keep, trim)]
    for thread in threads:
        thread.start()
    try:
        reads = 0
        first = DeltaTable(table_path(lake, topic)).version()
        while reads < 3 or DeltaTable(table_path(lake, topic)).version() < first + 3:
            history = sparklog.read_history(spark, topic, history=lake, columns=["_partition", "_offset"])
            assert_whole(places(history.collect()))
            reads += 1
    finally:
        stopping.set()
        for thread in threads:
            thread.join(60)
    latest = admin.list_offsets([TopicPartition(topic, 0), TopicPartition(topic, 1)])
    wait_until(lambda: len(live) >= sum(latest.values()), "the stream to reach the end")
    query.stop()
    assert_whole(sorted(live))
    assert len(live) == sum(latest.values())


def assert_whole(found: list[tuple[int, int]]) -> None:
    """Check that each partition has each offset once, without a gap."""
    for partition in {number for number, _ in found}:
        offsets = [offset for number, offset in found if number == partition]
        assert offsets == list(range(len(offsets)))
