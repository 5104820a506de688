"""Tests of the values of partition columns that Delta keeps unchanged."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.archive_table import ArchiveTable
from sparklog.delta.table import table_path
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.archives import archived, bad_rows, places, rows

pytestmark = pytest.mark.integration


@pytest.mark.extended
def test_text_that_cannot_name_a_directory_is_quarantined(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1, schema=pa.schema([("name", pa.string())]))
    longest = ["z" * 250, "\u00e9" * 125, ":" * 83 + "z"]  # with "name=" in 255 bytes
    names = [*longest, *(f"{name}z" for name in longest), "a\0b", "", "__HIVE_DEFAULT_PARTITION__"]
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, pa.table({"name": names})).result()
    archived(spark, brokers, topic, lake, partition_by=("name",))
    assert rows(lake, topic)["name"].to_pylist() == longest
    bad = bad_rows(lake, topic)
    assert pc.struct_field(bad["record"], "name").to_pylist() == names[3:]
    assert ["cannot name a directory" in reason for reason in bad["reason"].to_pylist()] == [True] * 4 + [False] * 2

    ArchiveTable(spark, table_path(lake, topic)).set_properties({"delta.randomizeFilePrefixes": "true"})
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, pa.table({"name": names[3:]})).result()
    archived(spark, brokers, topic, lake)
    assert rows(lake, topic)["name"].to_pylist() == names[:7]
    assert places(bad_rows(lake, topic))[-2:] == [(0, 13), (0, 14)] and len(bad_rows(lake, topic)) == 8


@pytest.mark.extended
def test_a_table_can_be_partitioned_by_bytes(
    spark: SparkSession, admin: Admin, brokers: ProcessCluster, topic: str, lake: str
) -> None:
    """Keys that are text are kept unchanged. Delta would change others."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    table = spark.createDataFrame([], "key binary, value binary")
    table.write.format("delta").partitionBy("key").save(table_path(lake, topic))
    bad = [b"", b"__HIVE_DEFAULT_PARTITION__", b"a\xff", b"\xed\xa0\x80", b"z" * 252]
    keys = [b"k", "\u00e9:\u20ac".encode(), None, b"z" * 251, *bad]
    with Producer(brokers.bootstrap) as producer:
        for key in keys:
            producer.send(topic, b"v", key=key, partition=0)
    archived(spark, brokers, topic, lake)
    frame = spark.read.format("delta").load(table_path(lake, topic)).orderBy("_offset")
    assert [None if row["key"] is None else bytes(row["key"]) for row in frame.collect()] == keys[:4]
    found = bad_rows(lake, topic)
    assert pc.struct_field(found["record"], "key").to_pylist() == bad
    assert found["reason"].to_pylist()[2].endswith("which are not valid UTF-8: 61FF")
