"""Tests of archives with a real Spark with Delta and real brokers."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.groups import group_offsets
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive import TopicArchive
from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_reader import open_archive
from sparklog.delta.archive_table import ArchiveFenced, ArchiveRefused, ArchiveTable
from sparklog.delta.micro_batch_archiver import BatchArchiver
from sparklog.delta.quarantine import Quarantine, QuarantineMoved
from sparklog.delta.restore import restore_topic
from sparklog.delta.table import quarantine_path, table_path
from sparklog.errors import BrokerError, ConfigError
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import (
    RunningArchives,
    archive,
    archived,
    asked,
    bad_rows,
    ends,
    places,
    progress_of_commits,
    rows,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

UTC = dt.timezone.utc
UTC_US = pa.timestamp("us", tz="UTC")
DAY = dt.datetime(2024, 5, 1, tzinfo=UTC)
LOCAL = DAY.replace(tzinfo=None)


def ddl(columns: str) -> StructType:
    found = StructType.fromDDL(columns)
    assert isinstance(found, StructType)
    return found


def produce(brokers: ProcessCluster, topic: str, *values: str, partition: int = 0, at: dt.datetime = DAY) -> None:
    with Producer(brokers.bootstrap) as producer:
        for value in values:
            producer.send(topic, value.encode(), key=b"k", partition=partition, timestamp=at)


def test_a_default_topic_is_archived_once(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    """The archive has every committed record once. Its end is after offsets without a row. It runs in small batches
    and twice."""
    admin.create_topic(topic, partitions=2, replication_factor=1)
    late = DAY + dt.timedelta(hours=23, minutes=30)  # another day in the session's zone
    with Producer(brokers.bootstrap) as producer:
        producer.send(topic, b"first", key=b"k", headers=[("h", b"x")], partition=0, timestamp=late)
        producer.send(topic, None, key=b"gone", partition=0, timestamp=DAY + dt.timedelta(days=1))
    with Producer(brokers.bootstrap, transactional_id=topic) as producer:
        for is_kept in (False, True, False):
            producer.begin()
            for number in range(3):
                producer.send(topic, f"{is_kept} {number}".encode(), partition=1, timestamp=DAY)
            producer.flush()
            producer.commit() if is_kept else producer.abort()
    archived(spark, brokers, topic, lake, max_offsets=6)
    found = rows(lake, topic)
    assert places(found) == [(0, 0), (0, 1), (1, 4), (1, 5), (1, 6)]
    assert found.column_names == ["key", "value", "headers", "_partition", "_offset", "_timestamp", "_date"]
    assert found["value"].to_pylist() == [b"first", None, b"True 0", b"True 1", b"True 2"]
    assert found["headers"].to_pylist()[:2] == [[{"key": "h", "value": b"x"}], None]
    assert found["_timestamp"].to_pylist()[0] == late
    assert found["_date"].to_pylist()[:2] == [dt.date(2024, 5, 1), dt.date(2024, 5, 2)]
    assert DeltaTable(table_path(lake, topic)).metadata().partition_columns == ["_date"]
    # Three aborted records, their marker, three committed records, their marker, three aborted records, their marker.
    assert ends(lake, topic) == {0: 2, 1: 12}
    assert len(progress_of_commits(lake, topic)) > 1
    assert admin.group_offsets(f"archive-{topic}") == {TopicPartition(topic, 0): 2, TopicPartition(topic, 1): 12}

    admin.create_partitions(topic, 3)
    # more days than one task writes at the same time
    days = [DAY + dt.timedelta(days=number % 6) for number in range(12)]
    with Producer(brokers.bootstrap) as producer:
        for day in days:
            producer.send(topic, b"new", partition=2, timestamp=day)
    # the group's offsets do not decide where an archive continues
    admin.commit_offsets(f"archive-{topic}", {TopicPartition(topic, 0): 0})
    archived(spark, brokers, topic, lake)
    found = rows(lake, topic)
    assert places(found) == [(0, 0), (0, 1), (1, 4), (1, 5), (1, 6), *((2, offset) for offset in range(12))]
    assert found["_timestamp"].to_pylist()[5:] == days
    assert found["_date"].to_pylist()[5:] == [day.date() for day in days]
    assert admin.group_offsets(f"archive-{topic}")[TopicPartition(topic, 0)] == 2
    assert [progress.batch for progress in progress_of_commits(lake, topic)] == list(
        range(len(progress_of_commits(lake, topic)))
    )


@pytest.mark.extended
def test_a_typed_topic_whose_schema_grows_during_the_archive(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    us = pa.timestamp("us", "UTC")
    nested = pa.list_(pa.struct([("x", pa.float64())]))
    schema = pa.schema(
        [
            ("a", pa.int32()),
            ("at", us),
            ("d", pa.decimal128(9, 2)),
            ("l", nested),
            ("n", pa.uint32()),
            ("s", pa.timestamp("s", "UTC")),
        ]
    )
    admin.create_topic(topic, partitions=1, replication_factor=1, schema=schema, event_time="at")
    beyond = 2**62

    def write(numbers: list[int], times: list[int], *, seconds: int = 0, **more: pa.Array) -> None:
        count = len(numbers)
        columns = {
            "a": pa.array(numbers, pa.int32()),
            "at": pa.array(times, us),
            "d": pa.array([None] * count, pa.decimal128(9, 2)),
            "l": pa.array([[{"x": 0.5}]] * count, nested),
            "n": pa.array([2**32 - 1] * count, pa.uint32()),
            "s": pa.array([seconds] * count, pa.timestamp("s", "UTC")),
        }
        with Producer(brokers.bootstrap) as producer:
            producer.write(topic, pa.table({**columns, **more}))

    write([1, 2, 3], [0, beyond, 86_400_000_000])
    write([0], [0], seconds=beyond)
    archived(spark, brokers, topic, lake)
    options = asked(brokers, topic, lake, interval="100 milliseconds")
    with RunningArchives(spark, options) as running:
        wait_until(lambda: any("no new records" in text for text in running.said), "the first batch", timeout_s=120)
        # A query that ends without an error does not end the archive, and neither does a commit of an earlier run.
        for query in spark.streams.active:
            if (query.name or "").startswith(f"archive-{topic}-"):
                query.stop()
        wait_until(
            lambda: any("was stopped from outside" in text for text in running.said), "another query", timeout_s=120
        )
        admin.add_columns(topic, pa.schema([("note", pa.string()), ("local", pa.timestamp("us"))]))
        write([4, 5], [5, beyond], note=pa.array(["new", "bad"]), local=pa.array([7, 8], pa.timestamp("us")))
        wait_until(lambda: ends(lake, topic) == {0: 6}, "the wider rows", timeout_s=120)
    assert running.failed == {}, running.said
    found = rows(lake, topic)
    assert places(found) == [(0, 0), (0, 2), (0, 4)]
    assert found.select(["a", "note"]).to_pylist() == [
        {"a": 1, "note": None},
        {"a": 3, "note": None},
        {"a": 4, "note": "new"},
    ]
    kinds = {name: found.schema.field(name).type for name in ("a", "d", "n", "local")}
    assert kinds == {"a": pa.int32(), "d": pa.decimal128(9, 2), "n": pa.int64(), "local": pa.timestamp("us")}
    assert found["l"].to_pylist()[0] == [{"x": 0.5}] and found["n"].to_pylist()[0] == 2**32 - 1
    bad = bad_rows(lake, topic)
    assert places(bad) == [(0, 1), (0, 3), (0, 5)]
    later = [pc.struct_field(bad["record"], name) for name in ("note", "local")]
    assert [values.to_pylist()[:2] for values in later] == [[None, None]] * 2
    assert later[0].to_pylist()[2] == "bad" and later[1].cast(pa.int64()).to_pylist()[2] == 8
    reasons = bad["reason"].to_pylist()
    assert reasons[1].startswith("s: ") and str(beyond) in reasons[1]
    assert reasons[0] == f"_timestamp: {beyond} us since 1970 is outside the years 1 to 9999; " + (
        f"at: {beyond} us since 1970 is outside the years 1 to 9999"
    )


@pytest.mark.extended
def test_names_that_delta_does_not_accept_are_archived(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    """The names are those of columns, of nested fields and of quarantined records, and one value cannot be a
    directory name."""
    inner = pa.struct([("a (b)", pa.int32()), ("local", pa.timestamp("us"))])
    schema = pa.schema([("the name", pa.string()), ("at", UTC_US), ("l", pa.list_(inner))])
    admin.create_topic(topic, partitions=1, replication_factor=1, schema=schema, event_time="at")
    names = ["x", "", None, "y", ":" * 300, "__HIVE_DEFAULT_PARTITION__", "a\0b"]
    nested = [[{"a (b)": number, "local": LOCAL}] for number in range(len(names))]
    data = {"the name": names, "at": [2**62 if name == "y" else 0 for name in names], "l": nested}
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, pa.table(data, schema=schema)).result()
    archived(spark, brokers, topic, lake, partition_by=("the name",))

    def read(path: str, *columns: str) -> list[tuple[Any, ...]]:
        frame = spark.read.format("delta").load(path).orderBy("_offset")
        return [tuple(row) for row in frame.selectExpr("_offset", *columns).collect()]

    # Delta maps columns with such names, and then directories are not named after values.
    found = read(table_path(lake, topic), "`the name`", "l[0].`a (b)`")
    assert found == [(number, names[number], number) for number in (0, 2, 4, 6)]
    found = read(quarantine_path(lake, topic), "record.`the name`", "record.l[0].`a (b)`", "left(reason, 9)")
    assert found == [
        (number, names[number], number, "_timestam" if number == 3 else "the name:") for number in (1, 3, 5)
    ]


class _DiesBeforeCommit(BatchArchiver):
    """An archiver whose driver ends between the two commits of a batch."""

    expects_bad_rows = True

    def commit(self, good: DataFrame, progress: ArchiveProgress) -> int:
        raise ArchiveRefused("interrupted")


@pytest.mark.extended
def test_json_values_and_invalid_ones_are_archived(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarantined record stays in the quarantine and only there, even if the next run could cast it."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    produce(brokers, topic, '{"a": 1, "b": "x"}', '{"a": 1.5}', "", "[]", '{"b": "y", "other": 1}')
    with Producer(brokers.bootstrap) as producer:
        producer.send(topic, None, key=b"k", partition=0, timestamp=DAY)
    place = TopicPartition(topic, 0)
    # the group committed these offsets for an archive at another path
    admin.commit_offsets(f"archive-{topic}", {place: 6})
    with monkeypatch.context() as patched:
        patched.setattr(TopicArchive, "batches", _DiesBeforeCommit)
        _, error = archive(spark, brokers, topic, lake, json=ddl("a int, b string"))
    assert str(error) == "interrupted"
    bad = bad_rows(lake, topic)
    assert places(bad) == [(0, 1), (0, 2), (0, 3)]
    assert bad["reason"].to_pylist()[0] == 'value is not a JSON object with these columns: {"a": 1.5}'
    assert [record["value"] for record in bad["record"].to_pylist()] == [b'{"a": 1.5}', b"", b"[]"]
    assert progress_of_commits(lake, topic) == [] and admin.group_offsets(f"archive-{topic}") == {place: 0}

    produce(brokers, topic, '{"a": 2.0}', '{"a": 2.5}')
    archived(spark, brokers, topic, lake, json=ddl("a double, b string"))
    found = rows(lake, topic)
    # The table keeps the column types that it was created with.
    assert found["a"].type == pa.int32() and found["a"].to_pylist() == [1, None, None, 2]
    assert places(found) == [(0, 0), (0, 4), (0, 5), (0, 6)]
    assert places(bad_rows(lake, topic)) == [(0, 1), (0, 2), (0, 3), (0, 7)]
    assert bad_rows(lake, topic)["reason"].to_pylist()[3] == "a: 2.5 is not a valid int"
    assert found.column_names[:4] == ["a", "b", "_key", "_headers"]
    assert ends(lake, topic) == {0: 8}


@pytest.mark.extended
def test_a_quarantine_survives_its_table_and_commits(plain_spark: SparkSession, lake: str, topic: str) -> None:
    columns = ddl("_partition int, _offset bigint, _timestamp timestamp, reason string, record struct<a: int>")
    path = quarantine_path(lake, topic)
    progress = ArchiveProgress(topic=topic, topic_id="first", batch=0, ends={0: 6}, mode="append", attempt="a")

    def bad(offset: int) -> DataFrame:
        return plain_spark.createDataFrame([(0, offset, DAY, "bad", (1,))], columns)

    def opened(columns: StructType = columns) -> Quarantine:
        quarantine = Quarantine(plain_spark, path, columns)
        quarantine.begin({})
        return quarantine

    before = opened()
    before.check_topic({"second"})  # the quarantine does not exist yet
    before.add(bad(5), progress)
    # Delta has deleted the log entry that names the topic: only commits of others remain.
    before.table.set_properties({"delta.checkpointInterval": "1"})
    for is_said in (True, False):
        now = opened()
        now.check_topic({"first", ""})
        with pytest.raises(ArchiveRefused, match="bad rows of an earlier topic"):
            now.check_topic({"second", ""})
        if is_said:
            for version in (0, 1):
                (Path(path) / "_delta_log" / f"{version:020d}.json").unlink()
    now.add(bad(6), progress)
    assert places(bad_rows(lake, topic)) == [(0, 5), (0, 6)]
    with pytest.raises(QuarantineMoved):
        before.check()

    # The topic has a new column with a name that Delta does not accept unchanged.
    place = "_partition int, _offset bigint, _timestamp timestamp, reason string"
    wider = ddl(f"{place}, record struct<a: int, `b c`: array<timestamp_ntz>>")
    late = [(0, 7, DAY, "bad", (1, [LOCAL]))]
    opened(wider).add(plain_spark.createDataFrame(late, wider), progress)
    left = plain_spark.read.format("delta").load(path).orderBy("_offset").select("record.`b c`").collect()
    assert [row[0] for row in left] == [None, None, [LOCAL]]


@pytest.mark.extended
def test_an_overtaken_archive_of_a_topic_ends_without_traces(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An overtaken archive notices it at any step, ends, and leaves no rows."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    produce(brokers, topic, "a")
    overtaken: list[str] = []

    def overtake() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(TopicArchive, "batches", BatchArchiver)
            overtaken.extend(archived(spark, brokers, topic, lake))

    class BeforeItsBatch(BatchArchiver):
        def archive(self, *arguments: Any) -> Any:
            overtake()
            return super().archive(*arguments)

    class BeforeItsCommit(BatchArchiver):
        def commit(self, good: DataFrame, progress: ArchiveProgress) -> int:
            overtake()
            return super().commit(good, progress)

    for number, slow in enumerate((BeforeItsBatch, BeforeItsCommit)):
        produce(brokers, topic, f"b{number}")
        with monkeypatch.context() as patched:
            patched.setattr(TopicArchive, "batches", slow)
            _, error = archive(spark, brokers, topic, lake)
        assert isinstance(error, ArchiveFenced), error
        assert len(overtaken) == number + 1
        assert places(rows(lake, topic)) == [(0, offset) for offset in range(number + 2)]
    assert [progress.batch for progress in progress_of_commits(lake, topic)] == [0, 1]


@pytest.mark.extended
def test_the_older_of_two_archives_continues(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first archive continues, although the later one is faster. An archive waits, and continues if its
    predecessor commits nothing more."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    # Each archive is treated as a process of another host.
    monkeypatch.setattr("sparklog.delta.archive.may_run", bool)
    monkeypatch.setattr("sparklog.delta.archive.longest_wait_s", lambda _: 300.0)
    first = RunningArchives(spark, asked(brokers, topic, lake, interval="2 seconds"))
    later = RunningArchives(spark, asked(brokers, topic, lake, interval="100 milliseconds"))

    def are_running(count: int) -> bool:
        return sum((query.name or "").startswith(f"archive-{topic}-") for query in spark.streams.active) == count

    with first:
        wait_until(lambda: any("batch 0" in text for text in first.said), "the first commit", timeout_s=120)
        with later:
            wait_until(lambda: are_running(2), "the second archive", timeout_s=120)
            produce(brokers, topic, "a")
            later.join()
        assert later.failed is not None, later.said
        error = later.failed[topic]
        assert isinstance(error, ArchiveFenced) and "found batch 1, expected batch 0" in str(error), later.said
        assert first.failed is None
    assert first.failed == {}, first.said
    produce(brokers, topic, "b")
    monkeypatch.setattr("sparklog.delta.archive.longest_wait_s", lambda every_s: every_s / 2)
    assert [text.partition(": ")[2] for text in archived(spark, brokers, topic, lake)] == [
        "waiting for 1 s: another run made the last commit, and may still be running; of two runs, the first one"
        " continues",
        "batch 2: 1 rows",
    ]
    assert places(rows(lake, topic)) == [(0, 0), (0, 1)]


def test_of_two_concurrent_commits_one_succeeds(spark: SparkSession, lake: str, topic: str) -> None:
    """Both begin before either commits, and Delta accepts only one."""
    path = table_path(lake, topic)
    ArchiveTable(spark, path).create(ddl("a int"), partition_by=(), properties={})
    met = threading.Barrier(2)
    errors: list[Exception] = []

    def commit(attempt: str) -> None:
        table = ArchiveTable(spark, path)
        table.refresh()
        progress = ArchiveProgress(topic=topic, topic_id="id", batch=0, ends={0: 1}, mode="append", attempt=attempt)
        try:
            met.wait(60)
            table.append(spark.range(1).selectExpr("cast(id as int) a"), progress)
        except ArchiveFenced as error:
            errors.append(error)

    threads = [threading.Thread(target=commit, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 1
    assert len(progress_of_commits(lake, topic)) == 1 and rows_of(spark, path) == 1


def rows_of(spark: SparkSession, path: str) -> int:
    return spark.read.format("delta").load(path).count()


def test_an_archive_refuses_topics_that_do_not_fit(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1)
    produce(brokers, topic, "a", "b")
    archived(spark, brokers, topic, lake, partition_by=())

    _, error = archive(spark, brokers, topic, lake, partition_by=("_date",))
    assert "is partitioned by nothing, but _date is requested" in str(error)
    _, error = archive(spark, brokers, topic, lake, mode="upsert")
    assert "was archived in mode append, but mode upsert is requested" in str(error)

    spark.range(3).write.format("delta").save(table_path(lake, f"{topic}-other"))
    admin.create_topic(f"{topic}-other", replication_factor=1)
    _, error = archive(spark, brokers, f"{topic}-other", lake)
    assert "has rows that were not written by an archive" in str(error)

    name = f"{topic}-keys"
    admin.create_topic(name, replication_factor=1)
    _, error = archive(spark, brokers, name, lake, partition_by=("key",))
    assert isinstance(error, ConfigError) and "cannot be partitioned by key, which is binary" in str(error)

    name = f"{topic}-case"
    with pytest.raises(BrokerError, match="differ in case only"):
        admin.create_topic(name, replication_factor=1, schema="n bigint, N string")
    admin.create_topic(name, replication_factor=1, schema="n bigint, _Offset bigint")
    said, error = archive(spark, brokers, name, lake)
    assert isinstance(error, ConfigError) and "Delta ignores case" in str(error), said
    assert len(said) == 1 and "JVM" not in said[0]


@pytest.mark.extended
def test_an_archive_reports_lost_records_and_another_topic_of_its_name(
    spark: SparkSession,
    admin: Admin,
    brokers: ProcessCluster,
    topic: str,
    lake: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1)
    produce(brokers, topic, "a", "b")
    archived(spark, brokers, topic, lake, partition_by=())
    produce(brokers, topic, "c", "d")
    place = TopicPartition(topic, 0)
    # the group committed these offsets for an archive at another path
    admin.commit_offsets(f"archive-{topic}", {place: 4})
    admin.delete_records({place: 3})
    _, error = archive(spark, brokers, topic, lake)
    assert admin.group_offsets(f"archive-{topic}") == {place: 2}, (
        "without this, retention would delete records that the table does not have"
    )
    assert f"offsets 2 to 3 of {topic}-0 were deleted" in str(error) and "--fail-on-data-loss false" in str(error)
    archived(spark, brokers, topic, lake, fail_on_data_loss=False)
    assert places(rows(lake, topic)) == [(0, 0), (0, 1), (0, 3)]
    assert progress_of_commits(lake, topic)[-1].lost == {0: (2, 3)}

    # The driver dies after the bad row of a batch is committed and before the good one is. Then the topic is lost.
    with Producer(brokers.bootstrap) as producer:
        for time_us in (1, 2**62):
            producer.write(topic, pa.table({"value": [b"x"], "timestamp": pa.array([time_us], UTC_US)})).result()
    with monkeypatch.context() as patched:
        patched.setattr(TopicArchive, "batches", _DiesBeforeCommit)
        assert str(archive(spark, brokers, topic, lake)[1]) == "interrupted"
    admin.delete_topic(topic)
    restore_topic(brokers.bootstrap, topic, open_archive(table_path(lake, topic)))
    produce(brokers, topic, "e")
    archived(spark, brokers, topic, lake)
    assert places(rows(lake, topic)) == [(0, 0), (0, 1), (0, 3), (0, 6)]
    assert places(bad_rows(lake, topic)) == [(0, 5)]

    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1, replication_factor=1)
    produce(brokers, topic, *"uvwxyz")
    for fail in (True, False):
        _, error = archive(spark, brokers, topic, lake, fail_on_data_loss=fail)
        assert "was deleted and created again" in str(error)
    # A late batch of the old topic has read nothing of the new topic. If it committed its offsets, brokers would delete
    # records of the new topic that are not archived.
    late, old = TopicArchive(spark, asked(brokers, topic, lake), print), progress_of_commits(lake, topic)[-1]
    late._store(old)
    late.close()
    with BlockingCluster(brokers.bootstrap) as link:
        found = group_offsets(link, f"archive-{topic}")
    assert found == ()
    admin.delete_topic(topic)
    _, error = archive(spark, brokers, topic, lake)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in str(error)
