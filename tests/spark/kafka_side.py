"""A real Kafka broker, and one interface to the topics of Kafka and sparklog, for ``test_same_as_kafka``.

The jars come from the folder that the environment variable ``SPARKLOG_KAFKA_JARS`` names. It has two folders:

    broker/  Kafka's broker and its dependencies: org.apache.kafka:kafka_2.13 and kafka-tools (tested: 4.1.1), and
             org.apache.logging.log4j:log4j-slf4j-impl, all with their dependencies
             (mvn dependency:copy-dependencies)
    spark/   Spark's connector, and only the dependencies that Spark itself does not have: org.apache.spark:
             spark-sql-kafka-0-10_2.13 of pyspark's version, org.apache.kafka:kafka-clients (3.9.2),
             org.apache.commons:commons-pool2 (2.12.1), and org.apache.spark:spark-token-provider-kafka-0-10_2.13

Spark's JVM must start with the connector; ``tests/conftest.py`` adds it. The tests create and fill Kafka's topics
with Kafka's own Java client in that JVM, because Kafka's sink in Spark sets no timestamps.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.cluster.embedded_zookeeper import find_java
from sparklog.testing.reserved_ports import ReservedPorts
from tests.waiting import wait_until

_HOST = "127.0.0.1"
_UP_TIMEOUT_S = 60.0
_DOWN_TIMEOUT_S = 20.0
_BYTES = "org.apache.kafka.common.serialization.ByteArraySerializer"


class Record(NamedTuple):
    partition: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Side(Protocol):
    """One of the two systems that the tests compare."""

    #: The argument of ``format``.
    name: str

    @property
    def bootstrap(self) -> str: ...

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] = ...) -> None: ...

    def create_partitions(self, topic: str, count: int) -> None: ...

    def delete_topic(self, topic: str) -> None:
        """Delete the topic, and return when the system no longer lists it."""

    def send(self, topic: str, records: Sequence[Record]) -> None:
        """Send the records, and return when all are acknowledged. More than a few records make several batches."""

    def start_is_settled(self, checkpoint: Path) -> bool:
        """Return whether a new query has stored its start offsets."""


def jars_folder() -> Path | None:
    text = os.environ.get("SPARKLOG_KAFKA_JARS")
    return Path(text) if text else None


class KafkaBroker:
    """One Kafka process that is both broker and controller, in its own process group. Owner: one test thread."""

    def __init__(self, jars: Path, directory: Path) -> None:
        self._class_path = str(jars / "broker" / "*")
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.bootstrap = ""
        self._ports = ReservedPorts()

    def __enter__(self) -> KafkaBroker:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        port, controller_port = self._ports.reserve(), self._ports.reserve()
        self.bootstrap = f"{_HOST}:{port}"
        settings = {
            "node.id": "1",
            "process.roles": "broker,controller",
            "controller.quorum.voters": f"1@{_HOST}:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{_HOST}:{controller_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._directory / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
        }
        self._directory.mkdir(parents=True, exist_ok=True)
        config = self._directory / "server.properties"
        config.write_text("".join(f"{name}={text}\n" for name, text in settings.items()))
        java = [find_java(), "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", self._class_path]
        cluster_id = "c3Bhcmtsb2ctY29tcGFyZQ"  # any 16 bytes
        with (self._directory / "log").open("ab") as output:
            form = [*java, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(config)]
            subprocess.run(form, check=True, stdout=output, stderr=subprocess.STDOUT, timeout=_UP_TIMEOUT_S)
            self._process = subprocess.Popen(
                [*java, "kafka.Kafka", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._await_port(port)

    def _await_port(self, port: int) -> None:
        deadline = time.monotonic() + _UP_TIMEOUT_S
        while True:
            assert self._process is not None
            words = (self._directory / "log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, f"Kafka exited: {words}"
            assert time.monotonic() < deadline, f"Kafka did not start: {words}"
            try:
                socket.create_connection((_HOST, port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        self._ports.close()
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_DOWN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._process = None


class KafkaSide:
    """Topics of a Kafka broker, through the Java client in Spark's JVM."""

    name = "kafka"

    def __init__(self, spark: SparkSession, bootstrap: str) -> None:
        gateway: Any = spark.sparkContext._gateway
        self._java = gateway.jvm
        self.bootstrap = bootstrap
        kafka = self._java.org.apache.kafka.clients
        self._admin = kafka.admin.AdminClient.create({"bootstrap.servers": bootstrap})
        settings = {"bootstrap.servers": bootstrap, "acks": "all", "key.serializer": _BYTES, "value.serializer": _BYTES}
        self._producer = kafka.producer.KafkaProducer(settings)

    def close(self) -> None:
        self._producer.close()
        self._admin.close()

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] = {}) -> None:
        new = self._java.org.apache.kafka.clients.admin.NewTopic(topic, partitions, 1)
        self._admin.createTopics([new.configs(dict(config))]).all().get()
        self._await_partitions(topic, partitions)

    def create_partitions(self, topic: str, count: int) -> None:
        more = self._java.org.apache.kafka.clients.admin.NewPartitions.increaseTo(count)
        self._admin.createPartitions({topic: more}).all().get()
        self._await_partitions(topic, count)

    def delete_topic(self, topic: str) -> None:
        self._admin.deleteTopics([topic]).all().get()
        wait_until(lambda: topic not in set(self._admin.listTopics().names().get()))

    def _await_partitions(self, topic: str, count: int) -> None:
        """Wait until the broker knows the partitions. It learns of them a little later than the controller."""
        self._producer.partitionsFor(topic)  # waits until the broker knows the topic
        wait_until(lambda: len(self._described(topic).partitions()) == count)

    def _described(self, topic: str) -> Any:
        return self._admin.describeTopics([topic]).allTopicNames().get()[topic]

    def send(self, topic: str, records: Sequence[Record]) -> None:
        header = self._java.org.apache.kafka.common.header.internals.RecordHeader
        record = self._java.org.apache.kafka.clients.producer.ProducerRecord
        for row in records:
            headers = [header(name, value) for name, value in row.headers]
            new = record(topic, row.partition, row.timestamp_ms, row.key, row.value, headers)
            self._producer.send(new).get()

    def start_is_settled(self, checkpoint: Path) -> bool:
        return (checkpoint / "sources" / "0" / "0").exists()


class SparklogSide:
    """Topics of sparklog."""

    name = "sparklog"

    def __init__(self, admin: Admin, bootstrap: str) -> None:
        self._admin = admin
        self.bootstrap = bootstrap

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] = {}) -> None:
        self._admin.create_topic(topic, partitions=partitions, config=config)

    def create_partitions(self, topic: str, count: int) -> None:
        self._admin.create_partitions(topic, count)

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topic(topic)

    def send(self, topic: str, records: Sequence[Record]) -> None:
        with Producer(self.bootstrap) as producer:
            for number, row in enumerate(records):
                producer.send(
                    topic,
                    row.value,
                    key=row.key,
                    headers=row.headers,
                    timestamp=row.timestamp_ms * 1000,
                    partition=row.partition,
                )
                if number % 7 == 6:
                    producer.flush()

    def start_is_settled(self, checkpoint: Path) -> bool:
        return (checkpoint / "offsets" / "0").exists()
