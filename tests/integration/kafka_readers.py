"""Members of Kafka groups that read in threads, with the real clients, and note which record each of them has read."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from sparklog.client.consumer.consumer import Consumer
from sparklog.model import TopicPartition

if TYPE_CHECKING:
    from tests.kafka_tools import KafkaTools

Partition = tuple[str, int]


class Readings:
    """The records that the members of one group have read, and the number of times for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[bytes] = Counter()
        #: The errors of members.
        self.errors: list[BaseException] = []

    def add(self, values: list[bytes]) -> None:
        with self._lock:
            self.counts.update(values)

    def wait_for(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until ``count`` different records have been read."""
        until = time.monotonic() + timeout_s
        while len(self.counts) < count:
            assert not self.errors, self.errors
            assert time.monotonic() < until, f"{len(self.counts)} of {count} records read in {timeout_s} s"
            time.sleep(0.05)


class Reader(ABC):
    """A member of a group, in a thread of its own. ``stop`` lets it leave the group after a last commit."""

    def __init__(self, bootstrap: str, group: str, topic: str, readings: Readings) -> None:
        self.bootstrap, self.group, self.topic, self.readings = bootstrap, group, topic, readings
        self.owned: set[int] = set()
        self.assignments = 0
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def start(self) -> Reader:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the reader does not end"
        if self.error is not None:
            raise self.error

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error
            self.readings.errors.append(error)

    @abstractmethod
    def run(self) -> None:
        """Read until ``stop`` is called."""


class ConfluentReader(Reader):
    """A member with confluent-kafka. ``settings`` are those of librdkafka."""

    def __init__(
        self, bootstrap: str, group: str, topic: str, readings: Readings, settings: dict[str, Any] | None = None
    ) -> None:
        super().__init__(bootstrap, group, topic, readings)
        self.settings = settings or {}

    def run(self) -> None:
        from confluent_kafka import Consumer, KafkaError, KafkaException

        named = {"group.id": self.group, "bootstrap.servers": self.bootstrap, "auto.offset.reset": "earliest"}
        consumer = Consumer({**named, "enable.auto.commit": False, **self.settings})

        def commit() -> None:
            try:
                consumer.commit(asynchronous=False)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._NO_OFFSET:
                    raise

        def assigned(_: Any, partitions: list[Any]) -> None:
            self.owned |= {one.partition for one in partitions}
            self.assignments += 1

        def revoked(_: Any, partitions: list[Any]) -> None:
            commit()
            self.owned -= {one.partition for one in partitions}

        consumer.subscribe([self.topic], on_assign=assigned, on_revoke=revoked)
        try:
            while not self._ends.is_set():
                messages = consumer.consume(500, timeout=0.1)
                failed = [found.error() for found in messages if found.error() is not None]
                assert all(error.retriable() or not error.fatal() for error in failed), failed
                self.readings.add([found.value() for found in messages if found.error() is None])
            commit()
        finally:
            consumer.close()


class KafkaPythonReader(Reader):
    """A member with kafka-python."""

    def run(self) -> None:
        from kafka import AsyncConsumerRebalanceListener, KafkaConsumer

        from tests.integration.kafka_python_sockets import DIRECT

        reader = self
        consumer = KafkaConsumer(
            bootstrap_servers=self.bootstrap.split(","),
            proxy_url=DIRECT,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=300,
        )

        class Listener(AsyncConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_assigned(self, assigned: Any) -> None:
                reader.owned = {one.partition for one in assigned}
                reader.assignments += 1

            async def on_partitions_revoked(self, revoked: Any) -> None:
                if revoked:
                    await consumer.commit_async()
                reader.owned = set()

        consumer.subscribe([self.topic], listener=Listener())
        try:
            while not self._ends.is_set():
                found = consumer.poll(timeout_ms=100, max_records=500)
                self.readings.add([record.value for records in found.values() for record in records])
            consumer.commit()
        finally:
            consumer.close()


class AiokafkaReader(Reader):
    """A member with aiokafka."""

    def run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

        reader = self
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=300,
        )

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_assigned(self, assigned: Any) -> None:
                reader.owned = {one.partition for one in assigned}
                reader.assignments += 1

            async def on_partitions_revoked(self, revoked: Any) -> None:
                if revoked:
                    await consumer.commit()
                reader.owned = set()

        consumer.subscribe([self.topic], listener=Listener())
        await consumer.start()
        try:
            while not self._ends.is_set():
                found = await consumer.getmany(timeout_ms=100, max_records=500)
                self.readings.add([record.value for records in found.values() for record in records])
            if consumer.assignment():
                await consumer.commit()
        finally:
            await consumer.stop()


class SparklogReader(Reader):
    """A member with sparklog's own consumer. ``bootstrap`` has the addresses of sparklog's protocol."""

    def run(self) -> None:
        consumer: Consumer

        def assigned(partitions: Iterable[TopicPartition]) -> None:
            self.owned |= {tp.partition for tp in partitions}

        def revoked(partitions: Iterable[TopicPartition]) -> None:
            consumer.commit()
            self.owned -= {tp.partition for tp in partitions}

        with Consumer(
            self.bootstrap, [self.topic], group=self.group, on_assign=assigned, on_revoke=revoked
        ) as consumer:
            while not self._ends.is_set():
                for batch in consumer.poll(0.1):
                    self.readings.add(batch.column("value").to_pylist())
            consumer.commit()


class JavaReader(Reader):
    """A member with Kafka's Java client, in the JVM of ``tools``. ``settings`` are those of the client.

    It commits automatically, as ``poll`` does before a rebalance. With a cooperative assignor this is not enough: the
    client continues to read while it waits in JoinGroup, when it cannot commit, and then gives partitions up without
    another automatic commit. ``commits_on_changes`` lets the member commit in a rebalance listener. There the client
    can commit again, and still has these partitions.
    """

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        readings: Readings,
        *,
        tools: KafkaTools,
        settings: dict[str, str],
        commits_on_changes: bool = False,
    ) -> None:
        super().__init__(bootstrap, group, topic, readings)
        self.tools, self.settings, self.commits_on_changes = tools, settings, commits_on_changes

    def run(self) -> None:
        jvm = self.tools.jvm
        named = {
            "bootstrap.servers": self.bootstrap,
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": "200",
            "key.deserializer": "org.apache.kafka.common.serialization.StringDeserializer",
            "value.deserializer": "org.apache.kafka.common.serialization.StringDeserializer",
            **self.settings,
        }
        consumer = jvm.org.apache.kafka.clients.consumer.KafkaConsumer(self.tools.properties(named))
        topics = jvm.java.util.List.of(self.topic)
        if self.commits_on_changes:
            consumer.subscribe(topics, self.tools.committing_listener(consumer))
        else:
            consumer.subscribe(topics)
        wait = jvm.java.time.Duration.ofMillis(100)
        try:
            while not self._ends.is_set() or not self._committed(consumer):
                found = consumer.poll(wait)
                lists = [found.records(partition) for partition in found.partitions()]
                self.readings.add([record.value().encode() for records in lists for record in records])
                owned = {partition.partition() for partition in consumer.assignment()}
                self.assignments += owned != self.owned
                self.owned = owned
        finally:
            consumer.close()

    def _committed(self, consumer: Any) -> bool:
        """Commit what has been read. Return False if a rebalance prevents it: it ends in ``poll``."""
        try:
            consumer.commitSync()
        except Py4JJavaError as error:
            if error.java_exception.getClass().getSimpleName() == "RebalanceInProgressException":
                return False
            raise
        return True


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
