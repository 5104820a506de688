"""Tests of columns that are added to a topic while producers and readers do not know them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.broker.requests.add_columns import with_columns
from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicRecord, TopicSchema
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema, schema_message
from sparklog.testing.process_cluster import ProcessCluster

OLD = pa.schema([pa.field("x", pa.int64(), nullable=False)])
NOTE = pa.field("note", pa.string())


def record(schema: pa.Schema) -> TopicRecord:
    return TopicRecord("t", "id", ((0,),), (TopicSchema(0, schema_message(schema)),))


def test_added_columns_are_appended_once_after_the_existing_ones() -> None:
    once = with_columns(record(OLD), pa.schema([NOTE]))
    assert parse_schema(once.latest_schema.message) == pa.schema([*OLD, NOTE])
    assert [schema.schema_id for schema in once.schemas] == [0, 1]
    assert with_columns(once, pa.schema([NOTE, OLD.field(0)])) is once
    both = with_columns(once, pa.schema([("more", pa.float64()), NOTE]))
    assert parse_schema(both.latest_schema.message).names == ["x", "note", "more"]


@pytest.mark.parametrize(
    ("schema", "added", "complaint"),
    [
        (OLD, pa.schema([("x", pa.string())]), "column 'x' is int64, string found"),
        (OLD, pa.schema([pa.field("y", pa.int8(), nullable=False)]), "expected it to be nullable"),
        (DEFAULT_SCHEMA, pa.schema([NOTE]), "columns of Kafka's records"),
    ],
)
def test_invalid_added_columns_are_refused(schema: pa.Schema, added: pa.Schema, complaint: str) -> None:
    with pytest.raises(BrokerError, match=complaint):
        with_columns(record(schema), added)


@pytest.mark.integration
def test_old_producers_still_write_and_old_rows_read_as_null(cluster: ProcessCluster) -> None:
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as old:
        admin.create_topic("grows", partitions=1, replication_factor=3, schema=OLD)
        old.write("grows", pa.table({"x": [1, 2]})).result(30)
        assert admin.add_columns("grows", pa.schema([NOTE])).schema == pa.schema([*OLD, NOTE])
        assert admin.add_columns("grows", pa.schema([NOTE])).schema_id == 1
        old.write("grows", pa.table({"x": [3]})).result(30)  # the producer learns of the column from a refusal
        with Producer(cluster.bootstrap) as new:
            new.write("grows", pa.table({"x": [4], "note": ["four"]})).result(30)
        with pytest.raises(BrokerError) as caught:
            admin.add_columns("grows", pa.schema([("note", pa.int8())]))
        assert caught.value.code == ErrorCode.SCHEMA_MISMATCH
    with PartitionReader(cluster.bootstrap, TopicPartition("grows", 0), 0, 4, columns=["note"]) as reader:
        chosen = [batch for _, batch in reader]
    assert [batch.column("note").to_pylist() for batch in chosen] == [[None, None], [None], ["four"]]
    assert [batch.num_rows for batch in chosen] == [2, 1, 1]
    expected = [(1, None), (2, None), (3, None), (4, "four")]
    with Consumer(cluster.bootstrap, "grows") as consumer:
        assert [(row["x"], row["note"]) for row in consumer.to_table().to_pylist()] == expected


@pytest.mark.integration
def test_an_older_consumer_reads_rows_with_new_columns(cluster: ProcessCluster) -> None:
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("widens", partitions=1, schema=OLD)
        producer.write("widens", pa.table({"x": [1]})).result(30)
        with Consumer(cluster.bootstrap, "widens") as consumer:
            assert consumer.to_table().to_pylist() == [{"x": 1}]
            admin.add_columns("widens", "note string")
            with Producer(cluster.bootstrap) as new:
                new.write("widens", pa.table({"x": [2], "note": ["two"]})).result(30)
            assert consumer.to_table().to_pylist() == [{"x": 2, "note": "two"}]
