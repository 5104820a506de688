"""Tests that all engines see the same rows of a topic.

They compare the log through Spark, its table through Spark, deltalake, DuckDB and polars, and the log that was restored
from the table on another cluster.
"""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive_reader import open_archive
from sparklog.delta.job import run_archives
from sparklog.delta.restore import restore_topic
from sparklog.delta.table import table_path
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import asked, bad_rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

UTC_US = pa.timestamp("us", tz="UTC")
DAY = dt.datetime(2024, 5, 1, 23, 30, tzinfo=dt.timezone.utc)

TYPED = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("price", pa.float64()),
        pa.field("amount", pa.decimal128(9, 2)),
        pa.field("count", pa.uint32()),
        pa.field("at", UTC_US),
        pa.field("day", pa.date32()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([pa.field("x", pa.int16()), pa.field("label", pa.string())])),
    ]
)


def write_default(brokers: ProcessCluster, topic: str) -> None:
    """Produce records with gaps: aborted records and markers. One marker is the last offset of partition 0."""
    with Producer(brokers.bootstrap, transactional_id=topic) as producer:
        for number in range(6):
            producer.begin()
            for record in range(40):
                headers = [("n", b"%d" % record), ("e", None)] if record % 3 == 0 else None
                value = None if record % 7 == 0 else f"{number} {record}".encode()
                at = DAY + dt.timedelta(minutes=number * 10, microseconds=record)
                producer.send(topic, value, key=b"key %d" % (record % 5), headers=headers, partition=0, timestamp=at)
            producer.flush()
            producer.abort() if number % 2 else producer.commit()
    with Producer(brokers.bootstrap) as producer:
        for record in range(30):
            producer.send(topic, b"plain %d" % record, partition=1, timestamp=DAY)


def write_typed(brokers: ProcessCluster, topic: str) -> None:
    """Produce a batch with times, one without any, one with some, and one that no table accepts."""
    for start, times in ((0, "all"), (20, "none"), (40, "some"), (60, "odd")):
        rows = [
            {
                "name": None if at % 4 == 0 else f"nämé {at}",
                "price": at / 7,
                "amount": None if at % 3 == 0 else at,
                "count": 2**32 - 1 - at,
                "at": DAY + dt.timedelta(seconds=at) if times == "all" or (times == "some" and at % 2) else None,
                "day": dt.date(1970, 1, 1) + dt.timedelta(days=at - 5),
                "tags": ["a", None] * (at % 3),
                "place": None if at % 5 == 0 else {"x": -at, "label": "here"},
            }
            for at in range(start, start + 20)
        ]
        if times == "odd":
            rows[3]["at"] = dt.datetime(1, 1, 1, tzinfo=dt.timezone.utc)
        table = pa.Table.from_pylist(rows, schema=TYPED)
        if times == "odd":  # a year that no engine can show
            at = table.column("at").cast(pa.int64()).to_pylist()
            at[3] = 2**62
            table = table.set_column(4, TYPED.field("at"), pa.array(at, pa.int64()).cast(UTC_US))
        with Producer(brokers.bootstrap) as producer:
            producer.write(topic, table).result(60)


def log_rows(spark: SparkSession, bootstrap: str, topic: str, *, columns: list[str], names: list[str]) -> pa.Table:
    """Return the log from Spark's source, with the table's column names, by partition and offset.

    The data stays in Arrow: Python cannot represent one of the years.
    """
    options = {"bootstrap.servers": bootstrap, "subscribe": topic}
    if "headers" in columns:
        options["includeHeaders"] = "true"
    frame = spark.read.format("sparklog").options(**options).load()
    found = frame.select(*columns).toArrow().rename_columns(names)
    return by_place(found)


def by_place(table: pa.Table) -> pa.Table:
    """Return the rows in order of partition and offset, in the types of Spark's source."""
    ordered = table.sort_by([("_partition", "ascending"), ("_offset", "ascending")])
    return ordered.combine_chunks()


def plain(table: pa.Table, schema: pa.Schema) -> list[dict[str, Any]]:
    """Return the rows as Python values, for any of Arrow's string, list and time types that an engine prefers."""
    narrow = table.select(schema.names)
    times = [field.name for field in schema if pa.types.is_timestamp(field.type)]
    for name in times:
        at = narrow.column_names.index(name)
        narrow = narrow.set_column(at, name, narrow.column(name).cast(UTC_US).cast(pa.int64()))
    return list(narrow.to_pylist())


def seen_by_all(spark: SparkSession, table: str, schema: pa.Schema) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a table by engine."""
    dataset = DeltaTable(table).to_pyarrow_dataset()
    found = {
        "spark": spark.read.format("delta").load(table).toArrow(),
        "deltalake": dataset.to_table(),
        "duckdb": duckdb.from_arrow(dataset).to_arrow_table(),
        "polars": polars.read_delta(table).to_arrow(),
    }
    return {engine: plain(by_place(rows), schema) for engine, rows in found.items()}


@pytest.mark.extended
def test_every_engine_and_the_restored_log_have_the_same_rows(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    typed = f"{topic}-typed"
    admin.create_topic(topic, partitions=2, replication_factor=1, config={"retention.ms": "-1"})
    settings = {"retention.ms": "-1", "max.message.bytes": "1000000"}
    admin.create_topic(
        typed, partitions=1, replication_factor=1, schema=TYPED, key="name", event_time="at", config=settings
    )
    write_default(brokers, topic)
    write_typed(brokers, typed)
    both = [asked(brokers, name, lake) for name in (topic, typed)]
    said: list[str] = []
    assert not run_archives(spark, both, stopping=threading.Event(), tell=said.append), said

    place = ["_partition", "_offset", "_timestamp"]
    wanted = {
        topic: (["key", "value", "headers", "partition", "offset", "timestamp"], ["key", "value", "headers", *place]),
        typed: ([*TYPED.names, *place], [*TYPED.names, *place]),
    }
    logs = {}
    for name, (columns, names) in wanted.items():
        logs[name] = log_rows(spark, brokers.bootstrap, name, columns=columns, names=names)
        schema = logs[name].schema
        expected = plain(logs[name], schema)
        bad = set(bad_rows(lake, name)["_offset"].to_pylist()) if name == typed else set()
        good = [row for row in expected if row["_offset"] not in bad]
        # A record without an event time has the largest time of its batch, here one that no engine can show.
        assert bad == (set(range(60, 80)) if name == typed else set())
        assert len(good) == len(expected) - len(bad)
        for engine, rows in seen_by_all(spark, table_path(lake, name), schema).items():
            assert rows == good, engine

    with ProcessCluster(1) as other, Admin(other.bootstrap) as there:
        for name, (columns, names) in wanted.items():
            done = restore_topic(other.bootstrap, name, open_archive(table_path(lake, name)))
            assert done.compared == len(logs[name])
            again = log_rows(spark, other.bootstrap, name, columns=columns, names=names)
            assert plain(again, again.schema) == plain(logs[name], logs[name].schema)
            was, now = admin.describe_topic(name), there.describe_topic(name)
            assert (now.schema, now.key, now.event_time) == (was.schema, was.key, was.event_time)
            assert now.config == {**was.config, "restored.from": now.config["restored.from"]}
            assert there.list_offsets(now.topic_partitions()) == admin.list_offsets(was.topic_partitions())
        ends = there.list_offsets(there.describe_topic(topic).topic_partitions())
        assert logs[topic].column("_offset").to_pylist()[119] < 245 < ends[TopicPartition(topic, 0)] == 246
