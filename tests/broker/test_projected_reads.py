"""Tests of reads of some columns of a topic: they equal a full read, and the counters show the sent bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import CONSUMER, Fetch, FetchedPartition, FetchPartition, FetchReply
from sparklog.record.header import HEADER_BYTES, Flag, unpack_headers
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.topics import leader

pytestmark = pytest.mark.integration

NAMES = [f"c{i}" for i in range(20)]
ROWS = 2000
TP = TopicPartition("wide", 0)


@pytest.fixture(scope="module")
def wide(running_cluster: ProcessCluster) -> pa.Table:
    """Create a topic with twenty columns of 100 bytes: two batches without compression and two of each codec."""
    dice = random.Random(5)
    table = pa.table({name: [dice.randbytes(100) for _ in range(ROWS)] for name in NAMES})
    with Admin(running_cluster.bootstrap) as admin:
        schema = pa.schema([pa.field(name, pa.binary()) for name in NAMES])
        admin.create_topic(TP.topic, partitions=1, replication_factor=3, schema=schema)
    pieces = iter(range(0, ROWS, 350))
    for compression in ("none", "lz4", "zstd"):
        with Producer(running_cluster.bootstrap, compression=compression) as producer:
            for start in (next(pieces), next(pieces)):
                producer.write(TP.topic, table.slice(start, 350)).result(30)
    return table.slice(0, 6 * 350)


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


def read(cluster: ProcessCluster, columns: list[str] | None, start: int, end: int) -> tuple[pa.Table, PartitionReader]:
    with PartitionReader(cluster.bootstrap, TP, start, end, columns=columns, local="never") as reader:
        batches = [batch for _, batch in reader]
    return pa.Table.from_batches(batches), reader


def broker_counters(cluster: ProcessCluster, topic: str) -> dict[str, int]:
    return dict(cluster.describe(leader(cluster, topic)).counters)


def test_only_the_bytes_of_the_columns_are_sent(cluster: ProcessCluster, wide: pa.Table) -> None:
    whole, full = read(cluster, None, 0, wide.num_rows)
    assert whole.equals(wide)
    assert full.counters.projected_batches == 0 and full.counters.stored_bytes == full.counters.fetched_bytes
    before = broker_counters(cluster, TP.topic)
    found, one = read(cluster, ["c7"], 0, wide.num_rows)
    after = broker_counters(cluster, TP.topic)
    assert found.equals(wide.select(["c7"]))
    assert one.counters.fetched_bytes < 0.08 * full.counters.fetched_bytes
    assert one.counters.stored_bytes == full.counters.fetched_bytes
    assert one.counters.projected_batches == one.counters.fetched_batches == full.counters.fetched_batches
    grown = {name: after[name] - before.get(name, 0) for name in after if name.startswith("fetch.projected")}
    assert grown == {
        "fetch.projected.batches": one.counters.projected_batches,
        "fetch.projected.stored.bytes": one.counters.stored_bytes,
        "fetch.projected.sent.bytes": one.counters.fetched_bytes,
    }
    # in another order and from within a batch; and all columns, which are sent as stored
    few, _ = read(cluster, ["c19", "c0"], 17, 1444)
    assert few.equals(wide.select(["c19", "c0"]).slice(17, 1444 - 17))
    turned, everything = read(cluster, NAMES[::-1], 0, wide.num_rows)
    assert turned.equals(wide.select(NAMES[::-1])) and everything.counters.projected_batches == 0


def test_headers_alone_can_be_fetched(cluster: ProcessCluster, wide: pa.Table) -> None:
    with PartitionReader(cluster.bootstrap, TP, 5, wide.num_rows - 5, columns=[], local="never") as reader:
        found = [(one.first_offset, one.batch.num_rows, one.batch.num_columns) for one in reader.fetched()]
    assert found[0] == (5, found[0][1], 0)
    assert sum(rows for _, rows, _ in found) == wide.num_rows - 10
    assert (reader.counters.fetched_bytes, reader.counters.fetches) == (0, 1)
    assert reader.counters.stored_bytes > 2000 * wide.num_rows


def test_a_consumer_reads_some_columns(cluster: ProcessCluster, wide: pa.Table) -> None:
    with Consumer(cluster.bootstrap, TP.topic, columns=["c3", "c2"], log_columns=True) as consumer:
        table = consumer.to_table()
        assert consumer.counters.fetched_bytes < 0.15 * consumer.counters.stored_bytes
    assert table.select(["c3", "c2"]).equals(wide.select(["c3", "c2"]))
    assert table.column("_offset").to_pylist() == list(range(wide.num_rows))
    with pytest.raises(BrokerError) as caught:
        Consumer(cluster.bootstrap, TP.topic, columns=["c3", "c20"])
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH and "'c20'" in caught.value.detail


def test_columns_that_were_added_later_can_be_read(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("later", partitions=1, replication_factor=3, schema="x int, y string")
    tp = TopicPartition("later", 0)
    with Producer(cluster.bootstrap) as producer:
        producer.write("later", pa.table({"x": pa.array([1], pa.int32()), "y": ["one"]})).result(30)
        early = PartitionReader(cluster.bootstrap, tp, 0, 2, columns=["note", "x"], timeout_s=20, local="never")
        with Consumer(cluster.bootstrap, "later", columns=["y"]) as consumer:
            admin.add_columns("later", pa.schema([("note", pa.string())]))
            new = pa.table({"x": pa.array([2], pa.int32()), "y": ["two"], "note": ["new"]})
            with Producer(cluster.bootstrap) as informed:
                informed.write("later", new).result(30)
            with early:
                rows = [row for _, batch in early for row in batch.to_pylist()]
            assert rows == [{"note": None, "x": 1}, {"note": "new", "x": 2}]
            assert consumer.to_table().to_pylist() == [{"y": "one"}, {"y": "two"}]
    with PartitionReader(cluster.bootstrap, tp, 0, 2, columns=["note"]) as reader:
        assert [row for _, batch in reader for row in batch.to_pylist()] == [{"note": None}, {"note": "new"}]
    with (
        PartitionReader(cluster.bootstrap, tp, 0, 2, columns=["x", "z"]) as reader,
        pytest.raises(BrokerError, match="'z'") as caught,
    ):
        list(reader)
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH


def test_transactions_are_filtered_in_projected_reads(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("torn", partitions=1, replication_factor=3, schema="x int, y string")
    tp = TopicPartition("torn", 0)
    with Producer(cluster.bootstrap, transactional_id="torn") as producer:
        for number in range(4):
            producer.begin()
            producer.write("torn", pa.table({"x": pa.array([number], pa.int32()), "y": ["y"]}))
            producer.flush()
            producer.commit() if number % 2 else producer.abort()
    end = 8  # a record and a marker each
    for columns in (["x"], []):
        with PartitionReader(cluster.bootstrap, tp, 0, end, columns=columns, local="never") as reader:
            found = [(one.first_offset, one.batch) for one in reader.fetched()]
        assert [offset for offset, _ in found] == [2, 6]
        assert [batch.to_pylist() for _, batch in found] == ([[{"x": 1}], [{"x": 3}]] if columns else [[{}], [{}]])
    with PartitionReader(
        cluster.bootstrap, tp, 0, end, columns=["x"], isolation="read_uncommitted", local="never"
    ) as reader:
        assert [batch.to_pylist() for _, batch in reader] == [[{"x": number}] for number in range(4)]


def ask(
    connection: BlockingConnection,
    columns: tuple[str, ...] | None,
    *,
    replica_id: int = CONSUMER,
    incarnation: int = -1,
    max_bytes: int = 1 << 19,
    max_wait_ms: int = 0,
) -> tuple[FetchedPartition, memoryview]:
    wanted = FetchPartition(TP.topic, 0, "", -1, 0, max_bytes, columns=columns)
    reply, body = connection.request(Fetch(0, replica_id, incarnation, max_wait_ms, 1, max_bytes, 0, 0, -1, (wanted,)))
    assert isinstance(reply, FetchReply)
    return reply.partitions[0], body


def test_a_broker_responds_to_valid_and_invalid_projected_reads(cluster: ProcessCluster, wide: pa.Table) -> None:
    leads = leader(cluster, TP.topic)
    with cluster.connect(leads) as connection:
        refused, body = ask(connection, ("c1", "nonsense"))
        assert (refused.code, len(body)) == (ErrorCode.SCHEMA_OUTDATED, 0)
        assert "'nonsense'" in refused.detail
        # a replica gets whole batches or none
        follower = next(broker_id for broker_id in cluster.slots if broker_id != leads)
        with cluster.connect(leads, identity=cluster.as_broker(follower)) as of_follower:
            refused, body = ask(of_follower, ("c1",), replica_id=follower)
        assert refused.code == ErrorCode.INVALID_REQUEST and not body
        # at least one batch for the smallest limit, and only a few if they are small
        one, body = ask(connection, ("c1",), max_bytes=1)
        (header,) = unpack_headers(body[:HEADER_BYTES])
        assert (one.batch_count, header.flags & Flag.PROJECTED) == (1, Flag.PROJECTED)
        assert one.stored_bytes > 15 * one.body_bytes
