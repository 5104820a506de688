"""An idempotent Kafka producer writes while brokers die and restart: no record is lost, repeated or reordered.

A consumer reads meanwhile, and sees each record once, in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparklog.testing.final_logs import metadata_of, wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_records import PATIENCE_S, read_confluent, read_sparklog

pytestmark = pytest.mark.integration

PARTITIONS = 3
SESSION_S = 1.0
SETTINGS = {
    "zookeeper.session.timeout.ms": str(int(SESSION_S * 1000)),
    "replica.lag.time.max.ms": "1500",
    "min.insync.replicas": "2",
}


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("strict", partitions=PARTITIONS, replication_factor=3)
        yield running


class Writer:
    """A thread that writes numbered records with an idempotent producer until it is stopped."""

    def __init__(self, bootstrap: str) -> None:
        import confluent_kafka as confluent

        self._producer = confluent.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": PATIENCE_S * 1000,
                "retry.backoff.ms": 20,
            }
        )
        self.acked: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        self.errors: list[Any] = []
        self.sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for _ in range(20):
                number = self.sent
                self._producer.produce(
                    "strict", str(number).encode(), partition=number % PARTITIONS, on_delivery=self._delivered
                )
                self.sent += 1
            self._producer.poll(0.005)
            while len(self._producer) > 20_000 and not self._stop.is_set():
                self._producer.poll(0.1)
        self.left = self._producer.flush(PATIENCE_S)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.acked[message.partition()].append(int(message.value()))

    def wait_progress(self) -> None:
        """Wait until every partition has acknowledged records that were sent after the call."""
        sent, end_s = self.sent, time.monotonic() + PATIENCE_S
        while not all(numbers and numbers[-1] > sent for numbers in self.acked.values()):
            assert not self.errors, self.errors[:3]
            assert time.monotonic() < end_s, "the producer does not continue"
            time.sleep(0.02)


class Reader:
    """A thread that reads all partitions from their beginning until it has read every record of a writer."""

    def __init__(self, bootstrap: str, writer: Writer) -> None:
        import confluent_kafka as confluent

        self._writer = writer
        self._consumer = confluent.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "none",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
                "isolation.level": "read_committed",
            }
        )
        self._consumer.assign([confluent.TopicPartition("strict", number, 0) for number in range(PARTITIONS)])
        self.numbers: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        self.errors: list[Any] = []
        self._ends_s = float("inf")
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends_s = time.monotonic() + PATIENCE_S
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while time.monotonic() < self._ends_s:
            if self._ends_s < float("inf") and sum(map(len, self.numbers.values())) >= self._writer.sent:
                return
            for message in self._consumer.consume(1000, 0.1):
                error = message.error()
                if error is None:
                    self.numbers[message.partition()].append(int(message.value()))
                elif not error.retriable() and error.name() not in _TRANSIENT:
                    self.errors.append(error)


#: Errors that librdkafka reports and then handles itself.
_TRANSIENT = {"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE"}


def check_records(cluster: ProcessCluster, writer: Writer, reader: Reader) -> None:
    assert not reader.errors, reader.errors[:3]
    for partition, numbers in reader.numbers.items():
        assert numbers == list(range(partition, writer.sent, PARTITIONS))
    assert not writer.errors, writer.errors[:3]
    assert writer.left == 0
    for found in (
        read_confluent(cluster.kafka_bootstrap, "strict", PARTITIONS),
        read_sparklog(cluster.bootstrap, "strict"),
    ):
        for partition in range(PARTITIONS):
            numbers = [int(found[place].value or b"") for place in sorted(found) if place[0] == partition]
            assert numbers == list(range(partition, writer.sent, PARTITIONS))
            assert numbers == writer.acked[partition]


def leader(cluster: ProcessCluster, partition: int) -> int:
    return metadata_of(cluster, "strict")[partition].leader


def kill_leaders(cluster: ProcessCluster, writer: Writer) -> None:
    for partition in range(PARTITIONS):
        broker = leader(cluster, partition)
        cluster.kill(broker)
        writer.wait_progress()
        cluster.start_broker(broker)
        wait_in_sync(cluster, ["strict"], PATIENCE_S)
        writer.wait_progress()


def restart_all(cluster: ProcessCluster, writer: Writer) -> None:
    for broker in range(3):
        cluster.stop_broker(broker)
        writer.wait_progress()
        cluster.start_broker(broker)
        wait_in_sync(cluster, ["strict"], PATIENCE_S)
        writer.wait_progress()


@pytest.mark.parametrize("disturb", [kill_leaders, pytest.param(restart_all, marks=pytest.mark.extended)])
def test_an_idempotent_producer_writes_each_record_once(
    cluster: ProcessCluster, disturb: Callable[[ProcessCluster, Writer], None]
) -> None:
    pytest.importorskip("confluent_kafka")
    writer = Writer(cluster.kafka_bootstrap)
    with Reader(cluster.kafka_bootstrap, writer) as reader, writer:
        writer.wait_progress()
        disturb(cluster, writer)
    check_records(cluster, writer, reader)
