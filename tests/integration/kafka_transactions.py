"""Transactional producers of Kafka's clients with one interface, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tests.integration.kafka_records import PATIENCE_S
from tests.kafka_tools import KafkaTools

Positions = Mapping[tuple[str, int], int]


class TransactionalProducer(ABC):
    """A transactional producer of one client library. ``send`` does not wait for the broker."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send(self, topic: str, partition: int, value: str) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def send_offsets(self, positions: Positions, group: str) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class ConfluentProducer(TransactionalProducer):
    """The producer of confluent-kafka, which keeps its epoch over its transactions."""

    def __init__(self, bootstrap: str, transactional_id: str, **options: Any) -> None:
        import confluent_kafka

        self._library = confluent_kafka
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "retry.backoff.ms": 20, **options}
        )
        self._producer.init_transactions(PATIENCE_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, value: str) -> None:
        self._producer.produce(topic, value.encode(), partition=partition)

    def flush(self) -> None:
        assert self._producer.flush(PATIENCE_S) == 0

    def send_offsets(self, positions: Positions, group: str) -> None:
        places = [
            self._library.TopicPartition(topic, partition, offset)
            for (topic, partition), offset in sorted(positions.items())
        ]
        member = self._library.Consumer({"bootstrap.servers": "localhost:1", "group.id": group})
        try:
            self._producer.send_offsets_to_transaction(places, member.consumer_group_metadata(), PATIENCE_S)
        finally:
            member.close()

    def commit(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not self._commits(may_repeat=time.monotonic() < end_s):
            pass

    def _commits(self, *, may_repeat: bool) -> bool:
        """Commit, and return False if the commit is to be repeated."""
        try:
            self._producer.commit_transaction(PATIENCE_S)
        except self._library.KafkaException as error:
            if not error.args[0].retriable() or not may_repeat:
                raise
            return False
        return True

    def abort(self) -> None:
        self._producer.abort_transaction(PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(self._library.KafkaException):  # a fenced producer
            self._producer.flush(1)


class AioKafkaProducer(TransactionalProducer):
    """The producer of aiokafka, on an event loop of its own."""

    def __init__(self, bootstrap: str, transactional_id: str, **options: Any) -> None:
        import aiokafka

        self._library = aiokafka
        self._loop = asyncio.new_event_loop()
        self._sent: list[Any] = []

        async def start() -> Any:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=bootstrap, transactional_id=transactional_id, **options
            )
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            return producer

        self._producer = self._run(start())

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def begin(self) -> None:
        self._run(self._producer.begin_transaction())

    def send(self, topic: str, partition: int, value: str) -> None:
        self._sent.append(self._run(self._producer.send(topic, value.encode(), partition=partition)))

    def flush(self) -> None:
        self._run(self._producer.flush())

    def send_offsets(self, positions: Positions, group: str) -> None:
        places = {self._library.TopicPartition(*place): offset for place, offset in positions.items()}
        self._run(self._producer.send_offsets_to_transaction(places, group))

    def commit(self) -> None:
        self._run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._run(self._producer.abort_transaction())

    def close(self) -> None:
        self._run(self._producer.stop())
        self._loop.close()


class KafkaPythonProducer(TransactionalProducer):
    """The producer of kafka-python."""

    def __init__(self, bootstrap: str, transactional_id: str, **options: Any) -> None:
        import kafka

        from tests.integration.kafka_python_sockets import DIRECT

        self._library = kafka
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap.split(","), proxy_url=DIRECT, transactional_id=transactional_id, **options
        )
        try:
            self._producer.init_transactions()
        except BaseException:
            self._producer.close(timeout=5)
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, value: str) -> None:
        self._producer.send(topic, value.encode(), partition=partition)

    def flush(self) -> None:
        self._producer.flush(PATIENCE_S)

    def send_offsets(self, positions: Positions, group: str) -> None:
        places = {
            self._library.TopicPartition(*place): self._library.OffsetAndMetadata(offset, "", -1)
            for place, offset in positions.items()
        }
        self._producer.send_offsets_to_transaction(places, group)

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()

    def close(self) -> None:
        self._producer.close(timeout=5)


class JavaProducer(TransactionalProducer):
    """The producer of Kafka 4.1 in Java, which uses transaction.version 2."""

    def __init__(self, tools: KafkaTools, bootstrap: str, transactional_id: str, **options: str) -> None:
        self._tools = tools
        serializer = "org.apache.kafka.common.serialization.StringSerializer"
        values = {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "key.serializer": serializer,
            "value.serializer": serializer,
            "max.block.ms": str(int(PATIENCE_S * 1000)),
        }
        properties = tools.properties({**values, **{name.replace("_", "."): value for name, value in options.items()}})
        self._producer = tools.jvm.org.apache.kafka.clients.producer.KafkaProducer(properties)
        self._producer.initTransactions()

    def begin(self) -> None:
        self._producer.beginTransaction()

    def send(self, topic: str, partition: int, value: str) -> None:
        self._producer.send(
            self._tools.jvm.org.apache.kafka.clients.producer.ProducerRecord(topic, partition, None, value)
        )

    def flush(self) -> None:
        self._producer.flush()

    def send_offsets(self, positions: Positions, group: str) -> None:
        jvm = self._tools.jvm
        places = jvm.java.util.HashMap()
        for place, offset in positions.items():
            places.put(
                jvm.org.apache.kafka.common.TopicPartition(*place),
                jvm.org.apache.kafka.clients.consumer.OffsetAndMetadata(offset),
            )
        member = jvm.org.apache.kafka.clients.consumer.ConsumerGroupMetadata(group)
        self._producer.sendOffsetsToTransaction(places, member)

    def commit(self) -> None:
        self._producer.commitTransaction()

    def abort(self) -> None:
        self._producer.abortTransaction()

    def close(self) -> None:
        self._producer.close()


#: The producers of Python's clients, by the name of their module.
PYTHON: dict[str, Callable[..., TransactionalProducer]] = {
    "confluent_kafka": ConfluentProducer,
    "aiokafka": AioKafkaProducer,
    "kafka": KafkaPythonProducer,
}
