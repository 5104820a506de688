"""Tests of clients whose topic changes: new columns, new partitions, deletion and creation with the same name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sparklog import Admin, Consumer, Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(1, settings={"default.replication.factor": "1", "min.insync.replicas": "1"}) as running:
        yield running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


@pytest.fixture
def producer(cluster: ProcessCluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap, metadata_max_age_ms=3_600_000) as client:
        yield client


def test_a_new_column_is_written_at_once(admin: Admin, producer: Producer) -> None:
    for topic in ("sent", "written"):
        admin.create_topic(topic, schema="a int", partitions=1)
        producer.send(topic, {"a": 1}).result(_TIMEOUT_S)
        admin.add_columns(topic, "b int")
    assert producer.send("sent", {"a": 2, "b": 3}).result(_TIMEOUT_S).offset == 1
    table = pa.table({"a": pa.array([2], pa.int32()), "b": pa.array([3], pa.int32())})
    assert producer.write("written", table).result(_TIMEOUT_S).record_count == 1


def test_a_new_partition_is_written_at_once(admin: Admin, producer: Producer) -> None:
    for topic in ("more-sent", "more-written"):
        admin.create_topic(topic, partitions=1)
        producer.send(topic, b"1").result(_TIMEOUT_S)
        admin.create_partitions(topic, 4)
    assert producer.send("more-sent", b"2", partition=3).result(_TIMEOUT_S).partition == 3
    result = producer.write("more-written", pa.table({"value": [b"2"]}), partition=3).result(_TIMEOUT_S)
    assert [written.partition for written in result.ranges] == [3]


def test_a_raised_size_limit_applies_at_once(admin: Admin, producer: Producer) -> None:
    for topic in ("sent-large", "written-large"):
        admin.create_topic(topic, partitions=1, config={"max.message.bytes": "2000"})
        producer.send(topic, b"small").result(_TIMEOUT_S)
        with pytest.raises(BrokerError, match=r"max\.message\.bytes is 2000"):
            producer.send(topic, b"x" * 5000).result(_TIMEOUT_S)
        admin.alter_topic(topic, {"max.message.bytes": "100000"})
    assert producer.send("sent-large", b"x" * 5000).result(_TIMEOUT_S).offset == 1
    table = pa.table({"value": [b"small", b"x" * 5000, b"small"]})
    assert producer.write("written-large", table).result(_TIMEOUT_S).record_count == 3
    with pytest.raises(BrokerError, match=r"max\.message\.bytes is 100000"):
        producer.write("written-large", pa.table({"value": [b"x" * 200_000]}))


@pytest.mark.parametrize("after", ["a int", None], ids=["typed", "default"])
def test_a_topic_recreated_with_or_without_columns_is_written(
    admin: Admin, producer: Producer, after: str | None
) -> None:
    topic = f"now-{'default' if after is None else 'typed'}"
    old: Any = {"a": 1} if after is None else b"1"
    new: Any = b"2" if after is None else {"a": 2}
    admin.create_topic(topic, partitions=1, schema="a int" if after is None else None)
    producer.send(topic, old).result(_TIMEOUT_S)
    admin.delete_topic(topic)
    wait_until(lambda: topic not in admin.list_topics(), _TIMEOUT_S, "the deletion")
    admin.create_topic(topic, partitions=1, schema=after)
    assert producer.send(topic, new).result(_TIMEOUT_S).offset == 0
    with pytest.raises(TypeError, match="found"):
        producer.send(topic, old)


def test_a_missing_column_or_partition_is_still_refused(admin: Admin, producer: Producer) -> None:
    admin.create_topic("fixed", schema="a int", partitions=1)
    with pytest.raises(BrokerError, match="'b'"):
        producer.send("fixed", {"a": 2, "b": 3})
    with pytest.raises(BrokerError, match="has 1 partitions"):
        producer.send("fixed", {"a": 2}, partition=1)
    with pytest.raises(BrokerError, match="'b'"):
        producer.write("fixed", pa.table({"b": [1]}))


def test_a_consumer_finds_new_partitions_within_its_metadata_age(
    cluster: ProcessCluster, admin: Admin, producer: Producer
) -> None:
    admin.create_topic("grown", partitions=1)
    with Consumer(cluster.bootstrap, "grown", metadata_max_age_ms=1000) as consumer:
        consumer.poll(0)
        admin.create_partitions("grown", 2)
        producer.send("grown", b"new", partition=1).result(_TIMEOUT_S)
        batches = consumer.poll(20)  # one long poll finds the new partition, which would take 45 s with the default age
        assert [batch["value"].to_pylist() for batch in batches] == [[b"new"]]


def test_any_metadata_refresh_shows_new_partitions(cluster: ProcessCluster, admin: Admin, producer: Producer) -> None:
    admin.create_topic("told", partitions=1)
    with Consumer(cluster.bootstrap, "told", metadata_max_age_ms=3_600_000) as consumer:
        consumer.poll(0)
        admin.create_partitions("told", 2)
        producer.send("told", b"new", partition=1).result(_TIMEOUT_S)
        consumer._cluster.refresh(["told"])
        wait_until(lambda: consumer.poll(0.1), _TIMEOUT_S, "the record of the new partition")


def test_a_producer_writes_to_a_recreated_topic(cluster: ProcessCluster, admin: Admin, producer: Producer) -> None:
    admin.create_topic("again", partitions=1)
    producer.send("again", b"1").result(_TIMEOUT_S)
    admin.delete_topic("again")
    wait_until(lambda: "again" not in admin.list_topics(), _TIMEOUT_S, "the deletion")
    admin.create_topic("again", partitions=1)
    written = []
    try:
        producer.send("again", b"2").result(_TIMEOUT_S)
        # A producer that lost a connection meanwhile has already read the new topic's metadata.
        written.append(b"2")
    except BrokerError as error:
        assert error.code == ErrorCode.INCONSISTENT_TOPIC_ID and "created again" in str(error)
    assert producer.send("again", b"3").result(_TIMEOUT_S).offset == len(written)
    with Consumer(cluster.bootstrap, "again") as consumer:
        assert consumer.to_table()["value"].to_pylist() == [*written, b"3"]
