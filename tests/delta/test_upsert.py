"""Tests of topics as tables of their current state, compared with a dictionary that gets the same records."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_table import ArchiveFenced, ArchiveRefused, ArchiveTable
from sparklog.delta.casting import TOMBSTONE
from sparklog.delta.table import META_COLUMNS, table_path
from sparklog.delta.upsert import PROPERTIES, newest, upsert
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import archive, archived, bad_rows, ends, progress_of_commits, rows

pytestmark = pytest.mark.integration

UTC = dt.timezone.utc
DAY = dt.datetime(2024, 5, 1, tzinfo=UTC)
COMPACTED = {"cleanup.policy": "compact"}
ROWS = StructType(
    [
        StructField("k", StringType()),
        StructField("odd.name", LongType()),
        *META_COLUMNS.fields[:3],
        StructField(TOMBSTONE, BooleanType()),
    ]
)


def state(lake: str, topic: str, *columns: str) -> list[dict[str, Any]]:
    """Return the rows in order of partition and offset."""
    return list(rows(lake, topic).select(list(columns)).to_pylist())


def put(brokers: ProcessCluster, topic: str, **values: bytes | None) -> None:
    with Producer(brokers.bootstrap) as producer:
        for key, value in values.items():
            producer.send(topic, value, key=key.encode(), partition=0, timestamp=DAY)


def test_an_upsert_archive_holds_the_newest_values(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1, config=COMPACTED)
    put(brokers, topic, a=b"1", b=b"1", c=b"1")
    put(brokers, topic, a=b"2", c=None)
    archived(spark, brokers, topic, lake, mode="upsert")
    assert state(lake, topic, "key", "value", "_offset") == [
        {"key": b"b", "value": b"1", "_offset": 1},
        {"key": b"a", "value": b"2", "_offset": 3},
    ]
    put(brokers, topic, c=b"3", d=b"3", e=None)
    put(brokers, topic, a=None, d=b"4")
    archived(spark, brokers, topic, lake, mode="upsert")
    expected = [
        {"key": b"b", "value": b"1", "_offset": 1},
        {"key": b"c", "value": b"3", "_offset": 5},
        {"key": b"d", "value": b"4", "_offset": 9},
    ]
    assert state(lake, topic, "key", "value", "_offset") == expected
    # Only tombstones: no row changes, and the table's progress contains them.
    put(brokers, topic, x=None)
    archived(spark, brokers, topic, lake, mode="upsert")
    assert ends(lake, topic) == {0: 11}
    assert state(lake, topic, "key", "value", "_offset") == expected
    assert [(progress.batch, progress.mode) for progress in progress_of_commits(lake, topic)] == [
        (0, "upsert"),
        (1, "upsert"),
        (2, "upsert"),
    ]
    found = DeltaTable(table_path(lake, topic))
    assert found.metadata().partition_columns == []
    changes = pa.table(found.load_cdf(starting_version=0).read_all()).to_pylist()
    assert sorted((row["_change_type"], row["key"], row["value"]) for row in changes if row["_offset"] < 5) == [
        ("delete", b"a", b"2"),
        ("insert", b"a", b"2"),
        ("insert", b"b", b"1"),
    ]
    _, error = archive(spark, brokers, topic, lake)
    assert isinstance(error, ArchiveRefused)
    assert "was archived in mode upsert, but mode append is requested" in str(error)


@pytest.mark.extended
def test_a_typed_topic_with_two_keys_and_a_new_column(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    columns = [("n", pa.int64()), ("text", pa.string()), ("at", pa.timestamp("us", "UTC"))]
    admin.create_topic(
        topic, partitions=2, replication_factor=1, schema=pa.schema([("b", pa.binary()), *columns]), key=("n", "b")
    )

    def write(*found: dict[str, Any]) -> None:
        with Producer(brokers.bootstrap) as producer:
            producer.write(topic, pa.Table.from_pylist(list(found), admin.describe_topic(topic).schema)).result()

    write({"n": 1, "b": b"x", "text": "first"}, {"n": 1, "b": None, "text": "second"}, {"n": 2, "b": b"x", "text": ""})
    write({"n": None, "b": None, "text": "without a key"}, {"n": 3, "b": b"x", "at": DAY})
    archived(spark, brokers, topic, lake, mode="upsert")
    admin.add_columns(topic, pa.schema([("note", pa.string())]))
    write({"n": 1, "b": None, "text": "third", "note": "new"}, {"n": 2, "b": b"x"}, {"n": 3, "b": b"x", "note": "only"})
    archived(spark, brokers, topic, lake, mode="upsert")
    found = sorted(state(lake, topic, "n", "b", "text", "at", "note"), key=lambda row: (row["n"], row["b"] or b""))
    assert found == [
        {"n": 1, "b": None, "text": "third", "at": None, "note": "new"},
        {"n": 1, "b": b"x", "text": "first", "at": None, "note": None},
        {"n": 3, "b": b"x", "text": None, "at": None, "note": "only"},
    ]
    (bad,) = bad_rows(lake, topic).to_pylist()
    assert bad["reason"] == "the record has no key"


def test_a_topic_without_keys_is_refused(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    admin.create_topic(topic, replication_factor=1, schema="n bigint")
    _, error = archive(spark, brokers, topic, lake, mode="upsert")
    assert f"topic {topic} has no key columns" in str(error)
    admin.create_topic(f"{topic}-b", replication_factor=1, schema="n bigint, _change_type string", key="n")
    _, error = archive(spark, brokers, f"{topic}-b", lake, mode="upsert")
    assert "column _change_type cannot be archived in mode upsert" in str(error)


def frame(spark: SparkSession, records: list[tuple[Any, ...]]) -> DataFrame:
    kinds = [pa.string(), pa.int64(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.bool_()]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*records, strict=True), kinds, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(columns, ROWS.names))


def empty(spark: SparkSession, path: str) -> ArchiveTable:
    table = ArchiveTable(spark, path)
    columns = StructType([field for field in ROWS.fields if field.name != TOMBSTONE])
    table.create(columns, partition_by=(), properties=PROPERTIES)
    return table


def numbered(topic: str, number: int, ends: dict[int, int]) -> ArchiveProgress:
    return ArchiveProgress(topic=topic, topic_id="id", batch=number, ends=ends, mode="upsert", attempt="a")


def latest(records: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the record of each key that counts in a batch: the last one of a partition, and the youngest of
    several."""
    last: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for record in sorted(records, key=lambda record: record[3]):
        last[record[0], record[2]] = record
    found: dict[Any, tuple[Any, ...]] = {}
    for record in sorted(last.values(), key=lambda record: (record[4], record[2])):
        found[record[0]] = record
    return list(found.values())


def fold(found: dict[str, tuple[Any, ...]], record: tuple[Any, ...]) -> None:
    """Apply a record to the state."""
    key, value, partition, offset, when, is_tombstone = record
    there = found.get(key)
    if there is not None:
        is_newer = there[3] < offset if there[2] == partition else there[4] <= when
        if not is_newer:
            return
    if is_tombstone:
        found.pop(key, None)
    else:
        found[key] = (key, value, partition, offset, when)


@pytest.mark.extended
def test_any_history_equals_a_dictionary(spark: SparkSession, lake: str, topic: str) -> None:
    """Most keys are in one partition, and times are often equal. Batches have random bounds, and some are repeated."""
    seed = random.randrange(2**32)
    chosen = random.Random(seed)
    path = table_path(lake, topic)
    table = empty(spark, path)
    expected: dict[str, tuple[Any, ...]] = {}
    next_offsets = [0, 0]
    for number in range(4):
        records = []
        for _ in range(chosen.randrange(1, 60)):
            key = chosen.randrange(12)
            partition = (key + (chosen.random() < 0.2)) % 2
            next_offsets[partition] += chosen.randrange(1, 3)
            when = DAY + dt.timedelta(seconds=chosen.randrange(5))
            is_tombstone = chosen.random() < 0.3
            value = None if is_tombstone else chosen.randrange(1000)
            records.append((f"k{key}", value, partition, next_offsets[partition], when, is_tombstone))
        for record in latest(records):
            fold(expected, record)
        chosen.shuffle(records)
        read = frame(spark, records)
        progress = numbered(topic, number, {partition: end + 1 for partition, end in enumerate(next_offsets)})
        upsert(table, read, progress, keys=("k",))
        if chosen.random() < 0.4:
            older = frame(spark, [("k1", -1, 1, 0, DAY, False)])
            if chosen.random() < 0.5:
                upsert(table, older, progress, keys=("k",))  # the table already has this batch number
            else:
                with pytest.raises(ArchiveFenced):
                    other = ArchiveProgress(
                        topic=topic, topic_id="id", batch=number, ends={}, mode="upsert", attempt="b"
                    )
                    upsert(table, older, other, keys=("k",))
        found = [tuple(row) for row in spark.read.format("delta").load(path).orderBy("k").collect()]
        in_utc = [(*row[:4], row[4].astimezone(UTC)) for row in found]
        assert in_utc == sorted(expected.values()), f"seed {seed}, batch {number}"


@pytest.mark.extended
def test_the_later_time_counts_between_partitions(spark: SparkSession) -> None:
    def chosen(*records: tuple[Any, ...]) -> list[Any]:
        found = newest(frame(spark, [("k", *record) for record in records]), ["k"])
        return [tuple(row) for row in found.select("_partition", "_offset", sf.col(TOMBSTONE)).collect()]

    early, late = DAY, DAY + dt.timedelta(seconds=1)
    # The newest record of partition 0 is older than that of partition 1, though an earlier one of partition 0 is not.
    assert chosen((1, 0, 5, late, False), (1, 0, 6, early, False), (1, 1, 2, late, True)) == [(1, 2, True)]
    assert chosen((1, 0, 5, late, False), (1, 1, 6, late, False)) == [(1, 6, False)]
    assert chosen((1, 0, 7, late, False), (1, 1, 9, early, False)) == [(0, 7, False)]


@pytest.mark.extended
def test_a_repeated_merge_changes_nothing(spark: SparkSession, lake: str, topic: str) -> None:
    """The table already has the batch number, so the content does not matter. The change feed has the changes of the
    first merge."""
    path = table_path(lake, topic)
    table = empty(spark, path)

    def merge(number: int, *records: tuple[Any, ...]) -> int:
        rows = [(key, value, 0, offset, DAY, value is None) for key, value, offset in records]
        return upsert(table, frame(spark, rows), numbered(topic, number, {0: 9}), keys=("k",))

    assert merge(0, ("a", 1, 0), ("b", 1, 1), ("c", None, 2)) == 2
    second = [("a", 2, 3), ("b", None, 4), ("d", 1, 5), ("e", None, 6)]
    assert merge(1, *second) == 3, "one changed, one deleted, one inserted"
    version = DeltaTable(path).version()
    for again in (second, [("a", 9, 10), ("z", 9, 11)]):
        assert merge(1, *again) == 3
    assert DeltaTable(path).version() == version
    assert state(lake, topic, "k", "_offset") == [{"k": "a", "_offset": 3}, {"k": "d", "_offset": 5}]
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", version).load(path)
    assert sorted(tuple(row) for row in feed.select("_change_type", "k", "`odd.name`").collect()) == [
        ("delete", "b", 1),
        ("insert", "d", 1),
        ("update_postimage", "a", 2),
        ("update_preimage", "a", 1),
    ]
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.extended
def test_a_merge_with_concurrent_deletes_is_retried(spark: SparkSession, lake: str, topic: str, tmp_path: Path) -> None:
    """During the merge another writer deletes rows from the table: once, and then more often than the merge is
    retried."""
    path = table_path(lake, topic)
    table = empty(spark, path)
    there = [(f"x{number}", 1, 0, number, DAY, False) for number in range(9)]
    upsert(table, frame(spark, there), numbered(topic, 0, {0: 9}), keys=("k",))

    def disturbed(times: int, *, offset: int) -> DataFrame:
        counted = tmp_path / f"deletes-{times}"
        counted.mkdir()

        def disturb(key: str) -> str:
            done = len(list(counted.iterdir()))
            if done < times:
                (counted / str(done)).touch()
                DeltaTable(path).delete(f"k = 'x{times + done}'")
            return key

        rows = frame(spark, [("a", times, 0, offset, DAY, False)])
        # Spark does not accept a function whose annotations are strings.
        return rows.withColumn("k", sf.udf(lambda key: disturb(key), "string")("k"))  # noqa: PLW0108

    assert upsert(table, disturbed(1, offset=9), numbered(topic, 1, {0: 10}), keys=("k",)) == 1
    kept = [f"x{number}" for number in range(9) if number != 1]
    assert [row["k"] for row in state(lake, topic, "k")] == [*kept, "a"]
    with pytest.raises(PySparkException, match="DELTA_CONCURRENT"):
        upsert(table, disturbed(3, offset=10), numbered(topic, 2, {0: 11}), keys=("k",))
    assert [progress.batch for progress in progress_of_commits(lake, topic)] == [0, 1]
    assert [row["k"] for row in state(lake, topic, "k")] == [
        *(key for key in kept if key not in ("x3", "x4", "x5")),
        "a",
    ]
