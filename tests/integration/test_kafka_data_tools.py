"""Kafka's own programs in Java (4.1.1) write and read records on real brokers, also while all brokers restart.

Kafka's jars are fetched once from Maven Central (``bench.kafka_jars``). If they cannot be fetched, pytest skips these
tests.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.testing.final_logs import wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_records import PATIENCE_S, read_confluent, read_sparklog
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]

PARTITIONS = 3
RECORDS = 30_000
_JVM = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {"zookeeper.session.timeout.ms": "1000", "replica.lag.time.max.ms": "1500", "min.insync.replicas": "2"}
    with ProcessCluster(3, settings=settings, kafka=True) as running:
        yield running


def create(cluster: ProcessCluster, topic: str) -> None:
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=PARTITIONS, replication_factor=3)


class Tool:
    """A program of Kafka in a JVM of its own, which prints one JSON object a line for each event."""

    def __init__(self, jars: Path, name: str, *arguments: str) -> None:
        command = ["java", *_JVM, "-cp", f"{jars}/*", f"org.apache.kafka.tools.{name}", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.events: list[dict[str, Any]] = []
        self._other: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))
            else:
                self._other.append(line)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["name"] == name]

    def finish(self) -> None:
        """Wait for the end of the program, which must succeed."""
        try:
            code = self._process.wait(3 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert code == 0, "".join(self._other[-20:])


def restart_all(cluster: ProcessCluster, topic: str) -> None:
    for broker in range(3):
        cluster.restart(broker)
        wait_in_sync(cluster, [topic], PATIENCE_S)


@pytest.mark.parametrize("disturbed", [False, True])
def test_kafkas_verifiable_producer_and_consumer_agree(
    cluster: ProcessCluster, jars: Path, tmp_path: Path, disturbed: bool
) -> None:
    topic = f"verified-{disturbed}".lower()
    create(cluster, topic)
    server = ("--bootstrap-server", cluster.kafka_bootstrap, "--topic", topic, "--max-messages", str(RECORDS))
    config = tmp_path / "producer.properties"
    config.write_text("retries=2147483647\nenable.idempotence=true\n")  # the program's own defaults are 0 and false
    rate = "3000" if disturbed else "-1"
    options = ("--throughput", rate, "--acks", "-1", "--producer.config", str(config))
    producer = Tool(jars, "VerifiableProducer", *server, *options)
    if disturbed:
        wait_until(lambda: len(producer.named("producer_send_success")) > 1000)
        restart_all(cluster, topic)
    producer.finish()
    assert not producer.named("producer_send_error")[:3]
    acked = {(event["partition"], event["offset"]): event["value"] for event in producer.named("producer_send_success")}
    assert len(acked) == RECORDS
    consumer = Tool(jars, "VerifiableConsumer", *server, "--group-id", topic, "--reset-policy", "earliest", "--verbose")
    consumer.finish()
    read = {(event["partition"], event["offset"]): event["value"] for event in consumer.named("record_data")}
    assert read == acked
    for found in (
        read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS),
        read_sparklog(cluster.bootstrap, topic),
    ):
        assert {place: (record.value or b"").decode() for place, record in found.items()} == acked


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_kafkas_java_producer_writes_with_all_codecs(cluster: ProcessCluster, jars: Path, codec: str) -> None:
    topic = f"codec-{codec}"
    create(cluster, topic)
    properties = (f"bootstrap.servers={cluster.kafka_bootstrap}", f"compression.type={codec}")
    arguments = ["--topic", topic, "--num-records", "5000", "--record-size", "200", "--throughput", "-1"]
    command = ["java", *_JVM, "-cp", f"{jars}/*", "org.apache.kafka.tools.ProducerPerformance", *arguments]
    done = subprocess.run(
        [*command, "--producer-props", *properties], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "5000 records sent" in done.stdout
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    assert len(found) == 5000
    assert {len(record.value or b"") for record in found.values()} == {200}
    assert read_sparklog(cluster.bootstrap, topic) == found
