"""Tests of the clients with real broker processes: acknowledged records exist once, whichever broker dies meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.origin import origin
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.results import RecordMetadata
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import create_topic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3) as running:
        yield running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    for slot in cluster.slots.values():
        if not slot.running:
            cluster.start_broker(slot.broker_id)
    cluster.wait_ready()
    with Admin(cluster.bootstrap) as client:
        yield client


def in_sync(admin: Admin, topic: str) -> None:
    wait_until(
        lambda: (
            not any(part.under_replicated or part.leader is None for part in admin.describe_topic(topic).partitions)
        ),
        30,
        f"the replicas of {topic}",
    )


def values_of(cluster: ProcessCluster, topic: str) -> list[bytes]:
    with Consumer(cluster.bootstrap, topic) as consumer:
        values: list[bytes] = consumer.to_table(timeout_s=30).column("value").to_pylist()
        return values


class Writer:
    """A producer that sends numbered records one after the other, each after the last acknowledgement, until it is
    stopped."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.places: list[RecordMetadata] = []
        self.slowest_s = 0.0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(producer, topic))
        self._thread.start()

    def _run(self, producer: Producer, topic: str) -> None:
        try:
            while not self._stop.is_set():
                number = len(self.places)
                started = time.monotonic()
                self.places.append(producer.send(topic, b"%d" % number, key=b"%d" % (number % 20)).result(60))
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        except BaseException as error:
            self.error = error

    def goes_on(self, records: int) -> None:
        """Wait until this number of further records is acknowledged."""
        wanted = len(self.places) + records
        wait_until(lambda: self.error or len(self.places) >= wanted, 60, f"{records} more acknowledgements")

    def stop(self) -> list[RecordMetadata]:
        self._stop.set()
        self._thread.join(90)
        if self.error is not None:
            raise self.error
        return self.places


def check_log(cluster: ProcessCluster, topic: str, places: list[RecordMetadata]) -> None:
    """Check that every acknowledged record is at its reported offset, once, and that there are no other records."""
    found: dict[tuple[int, int], bytes] = {}
    with Consumer(cluster.bootstrap, topic, log_columns=True) as consumer:
        table = consumer.to_table(timeout_s=30)
    for row in table.select(["value", "_partition", "_offset"]).to_pylist():
        found[row["_partition"], row["_offset"]] = row["value"]
    assert len(found) == table.num_rows
    assert found == {(place.partition, place.offset): b"%d" % number for number, place in enumerate(places)}


def test_frames_are_written_and_tables_read(cluster: ProcessCluster, admin: Admin) -> None:
    topic = admin.create_topic("frames", partitions=3, schema="carrier string, delay double", key="carrier")
    assert topic.replication_factor == 3
    frame = pd.DataFrame({"carrier": ["UA", "AA", "UA"], "delay": [1.0, 2.0, None]})
    with Producer(cluster.bootstrap, compression="zstd") as producer:
        producer.write("frames", frame).result(20)
        producer.write("frames", pl.from_pandas(frame)).result(20)
        producer.write("frames", pa.Table.from_pandas(frame)).result(20)
        producer.send("frames", {"carrier": "B6", "delay": 0.5}).result(20)
    with Consumer(cluster.bootstrap, "frames") as consumer:
        table = consumer.to_table()
        carriers = Counter(table.column("carrier").to_pylist())
        assert carriers == {"UA": 6, "AA": 3, "B6": 1}
        partitions: dict[str, set[int]] = {}
        for tp in consumer.assignment:
            consumer.seek(tp, 0)
        while sum(consumer.positions().values()) < 10:
            for batch in consumer.poll(1.0):
                for carrier in batch.column("carrier").to_pylist():
                    partitions.setdefault(carrier, set()).add(origin(batch).partition)
        assert all(len(found) == 1 for found in partitions.values()), "a key has one partition"


def test_offsets_are_listed_and_reads_bounded(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("ranges", partitions=1)
    tp = TopicPartition("ranges", 0)
    with Producer(cluster.bootstrap, batch_bytes=1000) as producer:
        producer.write("ranges", pa.table({"value": [b"%d" % number for number in range(1000)]})).result(20)
    assert admin.list_offsets([tp]) == {tp: 1000}
    with PartitionReader(cluster.bootstrap, tp, 17, 991, max_bytes=2000) as reader:
        seen = [value for _, batch in reader for value in batch.column("value").to_pylist()]
    assert seen == [b"%d" % number for number in range(17, 991)]
    with PartitionReader(cluster.bootstrap, tp, 2000, 2001) as reader, pytest.raises(BrokerError) as caught:
        list(reader)
    assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_refusals_are_typed_and_the_connection_stays_usable(cluster: ProcessCluster, admin: Admin) -> None:
    refused: list[tuple[Callable[[], object], ErrorCode]] = [
        (lambda: admin.create_topic("a" * 250), ErrorCode.INVALID_TOPIC_EXCEPTION),
        (lambda: admin.create_topic("x", replication_factor=4), ErrorCode.INVALID_REPLICATION_FACTOR),
        (lambda: admin.create_topic("x", partitions=0), ErrorCode.INVALID_PARTITIONS),
        (lambda: admin.create_topic("x", config={"retention": 1}), ErrorCode.INVALID_CONFIG),
        (lambda: admin.create_topic("x", schema="a string", key="b"), ErrorCode.SCHEMA_MISMATCH),
        (lambda: admin.delete_topic("nowhere"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    for call, code in refused:
        with pytest.raises(BrokerError) as caught:
            call()
        assert caught.value.code == code, caught.value
    assert "x" not in admin.list_topics()
    admin.create_topic("small", partitions=1, config={"max.message.bytes": 2048})
    with Producer(cluster.bootstrap) as producer:
        assert isinstance(producer.send("small", b"x" * 4096).exception(20), BrokerError)
        assert producer.send("small", b"fits").result(20).offset == 0


def test_topics_are_deleted_and_recreated(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("again", partitions=2)
    with Producer(cluster.bootstrap) as producer:
        producer.send("again", b"old", partition=0).result(20)
        admin.delete_topic("again")
        assert "again" not in admin.list_topics()
        admin.create_topic("again", partitions=1)
    with Producer(cluster.bootstrap) as producer:
        assert producer.send("again", b"new").result(20).offset == 0
    assert values_of(cluster, "again") == [b"new"]


def test_delete_and_re_create_a_topic_of_the_same_name_while_a_broker_is_away(
    cluster: ProcessCluster, admin: Admin
) -> None:
    """The topic is recreated while a producer continues to write to the name, and does not stall. Records for the
    old topic fail with its name or are in it. Records sent after the new topic is known are in the new one."""
    admin.create_topic("replaced", partitions=2)
    old_id = admin.describe_topic("replaced").topic_id
    away = next(broker for broker in cluster.slots if broker != admin.describe_topic("replaced").partitions[0].leader)
    outcomes: list[tuple[float, int, BaseException | None]] = []
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            try:
                producer.send("replaced", b"%d" % number).result(30)
                outcomes.append((time.monotonic(), number, None))
            except BrokerError as error:
                outcomes.append((time.monotonic(), number, error))
            number += 1

    def goes_on(since: int) -> None:
        wait_until(lambda: sum(error is None for _, _, error in outcomes[since:]) > 50, 15, "50 acknowledgements")

    with Producer(cluster.bootstrap) as producer, Consumer(cluster.bootstrap, "replaced") as consumer:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            goes_on(0)
            cluster.kill(away)
            goes_on(len(outcomes))
            admin.delete_topic("replaced")
            admin.create_topic("replaced", partitions=2, replication_factor=2)
            recreated = time.monotonic()
            goes_on(len(outcomes))
            cluster.start_broker(away)
            in_sync(admin, "replaced")
            goes_on(len(outcomes))
        finally:
            stop.set()
            thread.join(60)
        assert admin.describe_topic("replaced").topic_id != old_id
        with pytest.raises(BrokerError) as caught:
            while True:
                consumer.poll(1.0)
        assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID
    codes = {error.code for _, _, error in outcomes if isinstance(error, BrokerError)}
    assert codes <= {ErrorCode.INCONSISTENT_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    healed = next(at for at, _, error in outcomes if at > recreated and error is None)
    assert healed - recreated < 10, f"stalled for {healed - recreated:.1f} s"
    acknowledged = [number for _, number, error in outcomes if error is None]
    found = sorted(int(value) for value in values_of(cluster, "replaced"))
    assert found == acknowledged[-len(found) :], "the new topic must have the records acknowledged since, and no others"


def test_an_unclean_election_is_a_topics_choice_and_reported(cluster: ProcessCluster, admin: Admin) -> None:
    """Both brokers of two topics die, one after the other, and the first one to return lacks the records in between.
    The topic with unclean elections continues without them. The other one waits for its last in-sync member."""
    config = {"min.insync.replicas": "1"}
    create_topic(cluster, "dirty", assignment=((0, 1),), config={**config, "unclean.leader.election.enable": "true"})
    create_topic(cluster, "clean", assignment=((0, 1),), config=config)
    with Producer(cluster.bootstrap) as producer, Consumer(cluster.bootstrap, "dirty") as consumer:
        both = ("dirty", "clean")
        for topic in both:
            producer.send(topic, b"kept").result(20)
        cluster.kill(1)
        for topic in both:
            for number in range(3):
                producer.send(topic, b"%d" % number).result(20)
        seen: list[bytes] = []
        while len(seen) < 4:
            seen += [value for batch in consumer.poll(5.0) for value in batch.column("value").to_pylist()]
        cluster.kill(0)
        cluster.start_broker(1)
        wait_until(lambda: admin.describe_topic("dirty").partitions[0].leader == 1, 20, "an unclean election")
        assert admin.describe_topic("clean").partitions[0].leader is None
        for number in range(5):
            producer.send("dirty", b"other-%d" % number).result(20)
        with pytest.raises(LogTruncated, match="read up to offset 4, the log diverges at offset 1"):
            consumer.poll(10.0)
        cluster.start_broker(0)
        in_sync(admin, "dirty")
        in_sync(admin, "clean")
    assert values_of(cluster, "dirty") == [b"kept", *(b"other-%d" % number for number in range(5))]
    assert values_of(cluster, "clean") == [b"kept", b"0", b"1", b"2"]


def test_a_killed_leader_loses_and_duplicates_no_record(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("killed", partitions=3)
    with Producer(cluster.bootstrap) as producer:
        writer = Writer(producer, "killed")
        try:
            writer.goes_on(50)
            victim = admin.describe_topic("killed").partitions[0].leader
            assert victim is not None
            cluster.kill(victim)
            writer.goes_on(200)
            assert all(part.leader not in {None, victim} for part in admin.describe_topic("killed").partitions)
            cluster.start_broker(victim)
            in_sync(admin, "killed")
            writer.goes_on(50)
        finally:
            places = writer.stop()
    check_log(cluster, "killed", places)


def test_tables_survive_a_killed_leader(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("tables", partitions=3, schema="n bigint, text string")
    table = pa.table({"n": range(300_000), "text": ["some text that takes room"] * 300_000})
    with Producer(cluster.bootstrap, batch_bytes=50_000, buffer_bytes=2_000_000) as producer:
        done = threading.Event()
        result: list[int] = []

        def write() -> None:
            result.append(producer.write("tables", table).result(90).record_count)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        tp = TopicPartition("tables", 0)
        wait_until(lambda: admin.list_offsets([tp])[tp] > 5_000, 30, "the first records")
        victim = admin.describe_topic("tables").partitions[0].leader
        assert victim is not None
        assert not done.is_set(), "the kill must hit a write in flight"
        cluster.kill(victim)
        thread.join(100)
        assert result == [300_000]
    with Consumer(cluster.bootstrap, "tables") as consumer:
        numbers = consumer.to_table(timeout_s=30).column("n")
    assert sorted(numbers.to_pylist()) == list(range(300_000))
    cluster.start_broker(victim)


def test_leaders_can_be_elected_by_the_order_just_requested(cluster: ProcessCluster, admin: Admin) -> None:
    tp = TopicPartition("reordered", 0)
    admin.create_topic("reordered", partitions=1, replication_factor=2)
    admin.wait_until_in_sync(["reordered"], timeout_s=30)
    first, second = admin.describe_topic("reordered").partitions[0].replicas
    for order in ((second, first), (first, second)) * 3:
        admin.reassign({tp: order})
        assert admin.elect_leaders([tp]) == {}
        assert admin.describe_topic("reordered").partitions[0].leader == order[0]


@pytest.mark.alone
def test_a_controlled_shutdown_fails_no_request(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("planned", partitions=3)
    with Producer(cluster.bootstrap) as producer, Consumer(cluster.bootstrap, "planned") as consumer:
        writer = Writer(producer, "planned")
        try:
            writer.goes_on(50)
            leader = admin.describe_topic("planned").partitions[1].leader
            assert leader is not None
            assert cluster.stop_broker(leader) == 0
            writer.goes_on(50)
            cluster.start_broker(leader)
            in_sync(admin, "planned")
        finally:
            places = writer.stop()
        seen = 0
        while seen < len(places):
            batches = consumer.poll(5.0)
            assert batches, f"{seen} of {len(places)} records"
            seen += sum(batch.num_rows for batch in batches)
        assert writer.slowest_s < 5
    check_log(cluster, "planned", places)


def test_too_few_in_sync_replicas_are_reported_in_the_end(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("few", partitions=1, config={"min.insync.replicas": 3})
    victim = next(broker for broker in cluster.slots if broker != admin.describe_topic("few").partitions[0].leader)
    cluster.kill(victim)
    try:
        # Before that a record is appended, and waits for the victim until the producer's timeout.
        wait_until(lambda: victim not in admin.describe_topic("few").partitions[0].isr, 20, "the ISR to shrink")
        producer = Producer(cluster.bootstrap, delivery_timeout_s=4)
        with producer, pytest.raises(ClientTimeout, match="last: NOT_ENOUGH_REPLICAS"):
            for _ in range(1000):
                producer.send("few", b"v").result(20)
    finally:
        cluster.start_broker(victim)
