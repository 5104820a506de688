"""Tests of the life of records on a real cluster: compaction during reads, writes and kills, changed settings,
deleted records, and retention that waits for groups."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.replica_selector import LocalReadMode
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.fetched_batches import decode_partition, split_partitions
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded
from tests.broker.topics import PATIENCE_S, Writer, leader, replica, running, wait_isr
from tests.spark.test_stream_reader import Query

pytestmark = pytest.mark.integration

#: Long enough for a killed replica to return before tombstones are removed.
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": "8192",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "600000",
}
Table = dict[bytes, bytes]
#: offset, key, value
Row = tuple[int, bytes, bytes | None]


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, timeout_s=PATIENCE_S) as client:
        yield client


def counter(cluster: ProcessCluster, broker_id: int, name: str) -> int:
    return cluster.describe(broker_id).counters.get(name, 0)


def applied(rows: list[Row]) -> Table:
    """Return the table that the records give, applied in order."""
    table: Table = {}
    for _, key, value in rows:
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return table


def wait_for_cleaning(cluster: ProcessCluster, broker_id: int, *, more_than: int) -> None:
    wait_until(
        lambda: counter(cluster, broker_id, "cleaner.segments.replaced") > more_than,
        PATIENCE_S,
        f"broker {broker_id} to compact",
    )


def wait_for_table(cluster: ProcessCluster, broker_id: int, topic: str, truth: Table) -> None:
    wait_until(
        lambda: applied(rows_of(cluster, broker_id, topic)) == truth, PATIENCE_S, f"the table on broker {broker_id}"
    )


def rows_of(cluster: ProcessCluster, broker_id: int, topic: str) -> list[Row]:
    """Return the committed records of one replica: offset, key, value."""
    found: list[Row] = []
    facts = replica(cluster, broker_id, topic)
    at = facts.log_start_offset
    with cluster.connect(broker_id) as connection:
        while at < facts.high_watermark:
            wanted = FetchPartition(topic, 0, "", -1, at, 1 << 20)
            reply, body = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 1 << 18, 1, 0, -1, (wanted,)))
            assert isinstance(reply, FetchReply) and not reply.partitions[0].code, reply
            (piece,) = split_partitions(reply.partitions, body)
            if not piece.headers:
                break
            for batch in decode_partition(piece, lambda _: DEFAULT_SCHEMA, start=at):
                count = batch.batch.num_rows
                offsets = (
                    batch.offsets.tolist()
                    if batch.offsets is not None
                    else range(batch.first_offset, batch.first_offset + count)
                )
                rows = zip(offsets, batch.batch["key"].to_pylist(), batch.batch["value"].to_pylist(), strict=True)
                found += rows
            at = piece.next_offset
    return found


class Readers:
    """A reader that repeatedly reads a topic from its start, over the network and from the files, while it is
    cleaned."""

    def __init__(self, cluster: ProcessCluster, topic: str) -> None:
        self.problems: list[str] = []
        self.passes = {"never": 0, "auto": 0}
        self.from_files = {"never": 0, "auto": 0}
        self._cluster, self._topic = cluster, topic
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(local,)) for local in ("never", "auto")]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _read(self, local: LocalReadMode) -> None:
        tp = TopicPartition(self._topic, 0)
        with Admin(self._cluster.bootstrap, timeout_s=PATIENCE_S) as admin:
            while not self._over.is_set():
                try:
                    end = admin.list_offsets([tp])[tp]
                    with PartitionReader(self._cluster.bootstrap, tp, 0, end, local=local, max_bytes=4096) as reader:
                        self._read_all(reader, local)
                    self.passes[local] += end > 0
                except SparklogError:  # noqa: PERF203
                    continue  # the test has killed a broker
                except Exception as error:
                    self.problems.append(f"{local}: {''.join(traceback.format_exception(error))}")
                    return

    def _read_all(self, reader: PartitionReader, local: str) -> None:
        last = -1
        for found in reader.fetched():
            if found.first_offset <= last:
                self.problems.append(f"{local}: offset {found.first_offset} after {last}")
            count = found.batch.num_rows
            last = found.first_offset + count - 1 if found.offsets is None else int(found.offsets[-1])
            self.from_files[local] += reader.counters.local_batches > 0


def test_a_compacted_topic_survives_writers_readers_and_kills(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("table", partitions=1, replication_factor=3, config=COMPACTED)
    dice = random.Random(3)
    truth: Table = {}
    began = {broker_id: counter(cluster, broker_id, "cleaner.segments.replaced") for broker_id in running(cluster)}

    def write(producer: Producer, changes: Table | dict[bytes, bytes | None]) -> None:
        for key, value in changes.items():
            producer.send("table", value, key=key)

    def some() -> dict[bytes, bytes | None]:
        return {
            b"key %d" % dice.randrange(60): None if dice.random() < 0.2 else dice.randbytes(dice.randrange(1, 200))
            for _ in range(30)
        }

    with Readers(cluster, "table") as readers:
        for turn in range(24):
            changes = some()
            if turn % 3:
                with Producer(cluster.bootstrap) as producer:
                    write(producer, changes)
            else:
                with Producer(cluster.bootstrap, transactional_id=f"tables-{turn}") as producer:
                    producer.begin()
                    write(producer, some())
                    producer.abort()
                    producer.begin()
                    write(producer, changes)
                    producer.commit()
            truth.update({key: value for key, value in changes.items() if value is not None})
            for key in [key for key, value in changes.items() if value is None]:
                truth.pop(key, None)
            if turn in {8, 16}:
                victim = leader(cluster, "table")
                cluster.kill(victim)
                with Producer(cluster.bootstrap) as producer:
                    write(producer, {b"key 1": b"%d" % turn})
                truth[b"key 1"] = b"%d" % turn
                cluster.start_broker(victim)
                began[victim] = 0
    assert not readers.problems
    assert all(readers.passes.values()), readers.passes
    assert readers.from_files["auto"] and not readers.from_files["never"]
    wait_isr(cluster, "table", {0, 1, 2})
    for broker_id in running(cluster):
        wait_for_cleaning(cluster, broker_id, more_than=began[broker_id])
        wait_for_table(cluster, broker_id, "table", truth)
        assert counter(cluster, broker_id, "cleaner.uncleanable") == 0
    with Consumer(cluster.bootstrap, "table", log_columns=True) as consumer:
        shown = consumer.to_table()
    offsets = shown["_offset"].to_pylist()
    rows = list(zip(offsets, shown["key"].to_pylist(), shown["value"].to_pylist(), strict=True))
    assert applied(rows) == truth and offsets == sorted(set(offsets))
    end = admin.list_offsets([TopicPartition("table", 0)])[TopicPartition("table", 0)]
    assert len(rows) < end
    left = what_is_left(cluster, "table", rows)
    for broker_id in running(cluster):
        wait_for_rows(cluster, broker_id, "table", left)
    every_reader_sees(cluster, "table", left, end)


def wait_for_rows(cluster: ProcessCluster, broker_id: int, topic: str, rows: list[Row]) -> None:
    wait_until(
        lambda: rows_of(cluster, broker_id, topic) == rows,
        PATIENCE_S,
        f"broker {broker_id} to have cleaned all that can be",
    )


def what_is_left(cluster: ProcessCluster, topic: str, rows: list[Row]) -> list[Row]:
    """Wait until everything below the active segment is cleaned."""
    directory = Path(replica(cluster, leader(cluster, topic), topic).directory)
    active = max(int(path.stem) for path in directory.glob("*.arrow"))
    newest = {key: offset for offset, key, _ in rows if offset < active}
    return [row for row in rows if row[0] >= active or newest[row[1]] == row[0]]


def every_reader_sees(cluster: ProcessCluster, topic: str, rows: list[Row], end: int) -> None:
    """Read over the network and from files, all columns, one or none, and with Spark's readers."""
    tp = TopicPartition(topic, 0)
    for local in ("never", "require"):
        for columns in (None, ["value"], []):
            with PartitionReader(cluster.bootstrap, tp, 0, end, local=local, columns=columns) as reader:
                found = list(reader.fetched())
            dense = [one for one in found if one.offsets is None]
            assert len(dense) < len(found)
            offsets = [
                offset
                for one in found
                for offset in (
                    range(one.first_offset, one.first_offset + one.batch.num_rows)
                    if one.offsets is None
                    else one.offsets.tolist()
                )
            ]
            assert offsets == [offset for offset, _, _ in rows], (local, columns)
            if columns:
                values = [value for one in found for value in one.batch["value"].to_pylist()]
                assert values == [value for _, _, value in rows]
    for start in (0, 1, end // 3, end - 2):
        with PartitionReader(cluster.bootstrap, tp, start, end - 1) as reader:
            count = sum(one.batch.num_rows for one in reader.fetched())
        assert count == sum(start <= offset < end - 1 for offset, _, _ in rows)
    query = Query(cluster.bootstrap, subscribe=topic, startingOffsets="earliest")
    try:
        found_rows = query.rows(query.plan(ReadAllAvailable()))
        assert [(offset, value) for _, _, offset, value in found_rows] == [(offset, value) for offset, _, value in rows]
    finally:
        query.reader.stop()


def test_a_new_replica_copies_cleaned_segments(cluster: ProcessCluster, admin: Admin) -> None:
    """A broker that starts with an empty directory copies cleaned segments, and may lead with them."""
    admin.create_topic("moved-table", partitions=1, replication_factor=2, config=COMPACTED)
    tp = TopicPartition("moved-table", 0)
    with Producer(cluster.bootstrap, batch_bytes=1024) as producer:
        for number in range(600):
            producer.send("moved-table", b"%d" % number * 20, key=b"key %d" % (number % 40))
    first = admin.describe_topic("moved-table").partitions[0].replicas
    wait_until(lambda: len(rows_of(cluster, first[0], "moved-table")) < 300, PATIENCE_S, "the leader to compact")
    (third,) = {0, 1, 2} - set(first)
    moved = admin.reassign({tp: (third, first[0])})
    admin.wait_until_moved(moved.targets, timeout_s=PATIENCE_S)
    expected = {b"key %d" % (number % 40): b"%d" % number * 20 for number in range(600)}
    assert applied(rows_of(cluster, third, "moved-table")) == expected
    wait_until(lambda: leader(cluster, "moved-table") == third or not admin.elect_leaders([tp]), PATIENCE_S, "a leader")
    with Producer(cluster.bootstrap) as producer:
        producer.send("moved-table", b"new", key=b"key 1").result(30)
    wait_isr(cluster, "moved-table", {third, first[0]})
    for broker_id in (third, first[0]):
        wait_for_table(cluster, broker_id, "moved-table", expected | {b"key 1": b"new"})


def test_settings_change_at_runtime_and_are_validated_at_once(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic(
        "tuned", partitions=1, replication_factor=3, config={"segment.bytes": "4096", "segment.ms": "9999"}
    )
    for settings, unset, said in (
        ({"retention.ms": -2}, (), "-1 to"),
        ({"min.cleanable.dirty.ratio": 1.5}, (), "0 to 1"),
        ({"cleanup.policy": "archive"}, (), "delete, compact"),
        ({"retention.msec": 1}, (), "did you mean 'retention.ms'"),
        ({}, ("retention.msec",), "did you mean 'retention.ms'"),
    ):
        with pytest.raises(BrokerError, match=said) as caught:
            admin.alter_topic("tuned", settings, unset=unset)
        assert caught.value.code == ErrorCode.INVALID_CONFIG
    admin.create_topic("no-key", partitions=1, replication_factor=3, schema="a int, b int")
    with pytest.raises(BrokerError, match="needs key columns"):
        admin.alter_topic("no-key", {"cleanup.policy": "compact"})
    with pytest.raises(BrokerError) as caught:
        admin.alter_topic("not-there", {"retention.ms": 1})
    assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    with Producer(cluster.bootstrap, batch_bytes=1024) as producer:
        for number in range(200):
            producer.send("tuned", b"x" * 100, key=b"key %d" % (number % 5))
        producer.send("tuned", b"without key").result(30)
    altered = admin.alter_topic("tuned", {**COMPACTED, "retention.ms": 5000}, unset=["segment.ms"])
    assert "segment.ms" not in altered.config and altered.config["cleanup.policy"] == "compact"
    wait_until(
        lambda: all(len(rows_of(cluster, broker_id, "tuned")) < 150 for broker_id in (0, 1, 2)),
        PATIENCE_S,
        "what was written before to be compacted",
    )
    with Producer(cluster.bootstrap) as producer, pytest.raises(BrokerError, match="without key") as caught:
        producer.send("tuned", b"no key").result(30)
    assert caught.value.code == ErrorCode.INVALID_RECORD
    assert (
        admin.alter_topic("tuned", unset=["cleanup.policy", "retention.ms"])
        .config.keys()
        .isdisjoint({"cleanup.policy", "retention.ms"})
    )
    at = ["-b", cluster.bootstrap]
    assert run(["topics", "alter", "tuned", "-c", "retention.ms=7000", "-u", "segment.bytes", *at]) == 0
    wait_until(  # the command and this client may ask different brokers
        lambda: admin.describe_topic("tuned").config.get("retention.ms") == "7000", PATIENCE_S, "the new setting"
    )
    assert run(["topics", "alter", "tuned", "-c", "retention.ms=-7", *at]) == 1
    assert run(["topics", "alter", "tuned", *at]) == 2
    # min.insync.replicas applies to the next write
    admin.alter_topic("tuned", {"min.insync.replicas": 3})
    follower = next(one for one in (0, 1, 2) if one != leader(cluster, "tuned"))
    cluster.kill(follower)
    try:
        wait_isr(cluster, "tuned", {0, 1, 2} - {follower})
        with Producer(cluster.bootstrap, max_block_s=5, delivery_timeout_s=2) as producer:
            with pytest.raises(SparklogError):
                producer.send("tuned", b"x", key=b"y").result(30)
            admin.alter_topic("tuned", {"min.insync.replicas": 2})
        with Producer(cluster.bootstrap) as producer:
            producer.send("tuned", b"x", key=b"y").result(30)
    finally:
        cluster.start_broker(follower)


def test_records_are_deleted_on_request(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("shortened", partitions=1, replication_factor=3, config={"segment.bytes": "4096"})
    tp = TopicPartition("shortened", 0)
    with Producer(cluster.bootstrap, batch_bytes=1024) as producer:
        for number in range(300):
            producer.send("shortened", b"%d" % number * 30)
    directory = Path(replica(cluster, leader(cluster, "shortened"), "shortened").directory)
    segments = len(list(directory.glob("*.arrow")))
    with pytest.raises(BrokerError, match="301 found, 0 to the high watermark 300") as caught:
        admin.delete_records({tp: 301})
    assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert admin.delete_records({tp: 250}) == {tp: 250}
    assert admin.delete_records({tp: 100}) == {tp: 250}
    assert admin.list_offsets([tp], at="earliest") == {tp: 250}
    with Consumer(cluster.bootstrap, "shortened") as consumer:
        assert consumer.to_table().num_rows == 50
    wait_until(lambda: len(list(directory.glob("*.arrow"))) < segments / 2, PATIENCE_S, "the disk to be freed")

    def starts() -> set[int]:
        return {replica(cluster, one, "shortened").log_start_offset for one in (0, 1, 2)}

    wait_until(lambda: starts() == {250}, PATIENCE_S, "followers to hear of it")
    assert run(["topics", "delete-records", "shortened", "--before", "0=260", "-y", "-b", cluster.bootstrap]) == 0
    assert admin.list_offsets([tp], at="earliest") == {tp: 260}
    assert admin.delete_records({tp: None}) == {tp: 300}
    admin.create_topic("never-shortened", partitions=1, replication_factor=3, config=COMPACTED)
    with pytest.raises(BrokerError, match="policy=compact"):
        admin.delete_records({TopicPartition("never-shortened", 0): None})


def test_the_last_records_expire_even_without_new_writes(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("quiet", partitions=1, replication_factor=3, config={"retention.ms": 500})
    with Writer(cluster, "quiet") as writer:
        writer.write(encoded(5))
    first = [Path(replica(cluster, one, "quiet").directory) / f"{0:020d}.arrow" for one in running(cluster)]

    def facts() -> set[tuple[int, int]]:
        found = [replica(cluster, one, "quiet") for one in running(cluster)]
        return {(one.log_start_offset, one.log_end_offset) for one in found}

    # one additional offset for the marker that ended the segment
    wait_until(lambda: facts() == {(5, 6)}, PATIENCE_S, "the records to be deleted")
    wait_until(lambda: not any(path.exists() for path in first), PATIENCE_S, "their files to go")
    assert sum(counter(cluster, one, "segments.rolled") for one in running(cluster)) >= 1
    admin.alter_topic("quiet", {"retention.ms": -1})
    with Producer(cluster.bootstrap) as producer:
        assert producer.send("quiet", b"new").result(PATIENCE_S).offset == 6
    with Consumer(cluster.bootstrap, "quiet", log_columns=True) as consumer:
        shown = consumer.to_table()
    assert (shown["_offset"].to_pylist(), shown["value"].to_pylist()) == ([6], [b"new"])


def test_retention_waits_for_groups_up_to_its_hard_limit(cluster: ProcessCluster, admin: Admin) -> None:
    tp = TopicPartition("awaited", 0)
    config = {"segment.bytes": "4096", "retention.bytes": "4096", "retention.wait.for.groups": "archive, slow"}
    admin.create_topic("awaited", partitions=1, replication_factor=3, config=config)
    with Producer(cluster.bootstrap, batch_bytes=1024) as producer:
        for number in range(300):
            producer.send("awaited", b"%d" % number * 30)
    admin.commit_offsets("archive", {tp: 300})
    looks = counter(cluster, leader(cluster, "awaited"), "checkpoints")
    wait_until(lambda: counter(cluster, leader(cluster, "awaited"), "checkpoints") > looks + 2, PATIENCE_S, "a while")
    assert admin.list_offsets([tp], at="earliest") == {tp: 0}
    admin.commit_offsets("slow", {tp: 150})

    def start() -> int:
        return admin.list_offsets([tp], at="earliest")[tp]

    wait_until(lambda: start() > 100, PATIENCE_S, "what both have read to go")
    assert start() <= 150
    admin.alter_topic("awaited", {"retention.hard.ms": 1})
    wait_until(lambda: start() > 200, PATIENCE_S, "the hard ceiling")
