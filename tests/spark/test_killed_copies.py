"""Streaming queries between Spark's own Kafka connector, sparklog and Kafka clients, whose drivers and brokers die.

Each query copies a topic that an idempotent Kafka producer fills meanwhile. Spark's Kafka sink writes each record at
least once, and sparklog's sink exactly once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.model import TopicPartition
from sparklog.testing.final_logs import wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from tests.integration.kafka_records import PATIENCE_S, read_confluent, read_sparklog
from tests.spark.kafka_side import jars_folder
from tests.spark.killed_copies import SOURCE
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parent.parent.parent
PARTITIONS = 3
SETTINGS = {"zookeeper.session.timeout.ms": "1500", "replica.lag.time.max.ms": "2000", "min.insync.replicas": "2"}
#: The time for the start of a driver and its queries on a busy machine.
_START_S = 240.0
#: The records that each query copies between two faults.
_STEP = 60


class Filling:
    """A thread that writes numbered records to the topic ``source`` with an idempotent Kafka producer."""

    def __init__(self, bootstrap: str) -> None:
        import confluent_kafka

        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "message.timeout.ms": 5 * PATIENCE_S * 1000}
        )
        self.sent = 0
        self.errors: list[Any] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Filling:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join(6 * PATIENCE_S)
        assert not self._thread.is_alive()
        assert not self.errors, self.errors[:3]

    def _run(self) -> None:
        while not self._ends.wait(0.05):
            for number in range(self.sent, self.sent + 12):
                self._producer.produce(
                    SOURCE, b"%d" % number, b"key %d" % number, number % PARTITIONS, on_delivery=self._delivered
                )
            self.sent += 12
            self._producer.poll(0)
        if left := self._producer.flush(5 * PATIENCE_S):
            self.errors.append(f"{left} records were not sent")

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self.errors.append(error)


class Tailing:
    """A thread that reads a topic with a Kafka consumer of committed records while the topic is written."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        import confluent_kafka

        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "tailing",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
            }
        )
        self._consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        self.numbers: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Tailing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_S)
        self._consumer.close()

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers.values()))

    def _run(self) -> None:
        while not self._ends.is_set():
            for message in self._consumer.consume(1000, 0.2):
                if message.error() is None:
                    self.numbers[message.partition()].append(int(message.value()))


class Copying:
    """A cluster, and Spark applications as processes that copy its topic ``source``."""

    def __init__(self, cluster: ProcessCluster, directory: Path, names: Sequence[str]) -> None:
        self.cluster = cluster
        self.directory = directory
        self.names = names
        with Admin(cluster.bootstrap) as admin:
            for name in (SOURCE, *names):
                admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)

    @contextmanager
    def driver(self, mode: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a Spark application. At the end SIGKILL ends its JVM and its Python processes."""
        words = (self.cluster.bootstrap, self.cluster.kafka_bootstrap, self.directory, mode, *self.names)
        with (self.directory / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.killed_copies", *map(str, words)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "SPARK_CONF_DIR": str(ROOT / "conf")},
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)

    def last_words(self) -> str:
        return (self.directory / "output").read_text(errors="replace")[-5000:]

    def written(self) -> dict[str, int]:
        """Return the number of committed offsets of each target."""
        places = [TopicPartition(name, number) for name in self.names for number in range(PARTITIONS)]
        with Admin(self.cluster.bootstrap, timeout_s=PATIENCE_S) as admin:
            ends = admin.list_offsets(places, isolation="read_committed")
        return {name: sum(end for place, end in ends.items() if place.topic == name) for name in self.names}

    def wait_for_progress(self, process: subprocess.Popen[bytes], *, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Wait until each query has written more records."""
        before = self.written()

        def moved() -> bool:
            assert process.poll() is None, self.last_words()
            return all(count >= before[name] + _STEP for name, count in self.written().items())

        wait_until(moved, "each query writes", timeout_s=timeout_s)

    def wait_in_sync(self) -> None:
        wait_in_sync(self.cluster, [SOURCE, *self.names], PATIENCE_S)

    def run(self) -> int:
        """Copy records while brokers and drivers are killed and all brokers restart. Return the number of records."""
        with Filling(self.cluster.kafka_bootstrap) as filling:
            with self.driver("continuous") as process:
                self.wait_for_progress(process, timeout_s=_START_S)
                for broker in range(2):
                    self.cluster.kill(broker, retire=bool(broker))
                    self.wait_for_progress(process)
                    self.cluster.start_broker(broker)
                    self.wait_in_sync()
                self.wait_for_progress(process)
                self.cluster.kill(2)
            # The driver was killed while it worked, and with it a broker.
            self.cluster.start_broker(2)
            self.wait_in_sync()
            with self.driver("continuous") as process:
                self.wait_for_progress(process, timeout_s=_START_S)
                for broker in range(3):
                    self.cluster.restart(broker)
                    self.wait_in_sync()
                self.wait_for_progress(process)
        with self.driver("once") as process:
            try:
                code = process.wait(2 * _START_S)
            except subprocess.TimeoutExpired:
                code = -1
            assert code == 0, self.last_words()
        return filling.sent

    def copied(self, name: str) -> dict[int, list[int]]:
        """Return the numbers of each partition of a target, after a comparison of what two clients read."""
        found = read_confluent(self.cluster.kafka_bootstrap, name, PARTITIONS)
        own = read_sparklog(self.cluster.bootstrap, name)
        assert {place: record[:3] for place, record in own.items()} == {p: record[:3] for p, record in found.items()}
        assert all(record.key == b"key " + (record.value or b"") for record in found.values())
        numbers: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        for (partition, _), record in sorted(found.items()):
            numbers[partition].append(int(record.value or b"-1"))
        return numbers


def expected(count: int) -> dict[int, list[int]]:
    return {partition: list(range(partition, count, PARTITIONS)) for partition in range(PARTITIONS)}


def first_appearances(numbers: dict[int, list[int]]) -> dict[int, list[int]]:
    return {partition: list(dict.fromkeys(found)) for partition, found in numbers.items()}


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    pytest.importorskip("confluent_kafka")
    with ProcessCluster(3, settings=SETTINGS, kafka=True) as running:
        yield running


@pytest.mark.skipif(jars_folder() is None, reason="SPARKLOG_KAFKA_JARS does not name a folder with Kafka's jars")
def test_sparks_kafka_source_and_sink_lose_nothing_under_kills(cluster: ProcessCluster, tmp_path: Path) -> None:
    copying = Copying(cluster, tmp_path, ["kafka-kafka", "kafka-sparklog", "sparklog-kafka"])
    count = copying.run()
    for name in ("kafka-kafka", "sparklog-kafka"):
        assert first_appearances(copying.copied(name)) == expected(count), name
    assert copying.copied("kafka-sparklog") == expected(count), "sparklog's sink writes exactly once"


def test_kafka_consumers_read_each_row_of_spark_once_under_kills(cluster: ProcessCluster, tmp_path: Path) -> None:
    name = "sparklog-sparklog"
    copying = Copying(cluster, tmp_path, [name])
    with Tailing(cluster.kafka_bootstrap, name) as tailing:
        count = copying.run()
        wait_until(lambda: tailing.count >= count, "the consumer reads all rows")
    assert tailing.numbers == expected(count)
    assert copying.copied(name) == expected(count)
