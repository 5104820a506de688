"""Kafka clients of the workload: writers and readers that use librdkafka and the brokers' Kafka listener.

They record the same history as the clients of ``workload``, so the same checker checks it. The module needs the package
``confluent-kafka``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sparklog.model import TopicPartition
from sparklog.testing.history import (
    ConsumerFailed,
    HistoryWriter,
    OperationEnded,
    Polled,
    Sent,
    record_name,
    record_value,
    runs_of,
)
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.workload import DELIVERY_TIMEOUT_S, ReaderClient, Topic, WriterClient

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

_AT_ONCE = 500
#: The setting that keeps librdkafka from logging the faults of a run.
_SILENT = {"log_level": 0}
#: The maximum time after which librdkafka connects to a broker again.
_RECONNECT_MS = 1_000


def kafka_producer(bootstrap: str, acks: str) -> Producer:
    """Return a producer. With acks=all it is idempotent; with other acks it never retries a batch.

    Without idempotence a retry could write a batch twice, also in Kafka.
    """
    from confluent_kafka import Producer

    once = {"retries": 0, "max.in.flight.requests.per.connection": 1}
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": acks,
            "linger.ms": 0,
            "message.timeout.ms": int(DELIVERY_TIMEOUT_S * 1000),
            "socket.timeout.ms": 3_000,
            "reconnect.backoff.max.ms": _RECONNECT_MS,
            **({"enable.idempotence": True} if acks == "all" else once),
            **_SILENT,
        }
    )


def kafka_consumer(bootstrap: str, name: str) -> Consumer:
    """Return a consumer without a group. It reports an offset out of range as an error."""
    from confluent_kafka import Consumer

    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": name,
            "client.id": name,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 100,
            "socket.timeout.ms": 3_000,
            "reconnect.backoff.max.ms": _RECONNECT_MS,
            **_SILENT,
        }
    )


class KafkaWriterClient(WriterClient):
    """A writer that sends bursts of a few named records with librdkafka, and records the outcome of each record."""

    def open(self, bootstrap: str, acks: str) -> None:
        self._kafka = kafka_producer(bootstrap, acks)
        #: The records that have no outcome yet, by burst. The key is the burst's first number.
        self._open: dict[int, int] = {}

    def run(self) -> None:
        while not self.stopping.is_set():
            self._kafka.poll(0.05)
            if self._room.acquire(timeout=0):
                self._write()
                self.stopping.wait(self._random.uniform(0, 2 * self._pause_s))
        until = time.monotonic() + DELIVERY_TIMEOUT_S
        while self._open and time.monotonic() < until:
            self._kafka.poll(0.1)

    def close(self, timeout_s: float) -> None:
        self._kafka.flush(timeout_s)

    def _write(self) -> None:
        topic = self._random.choice(self._topics)
        partition = self._random.randrange(topic.partitions)
        first, count = self._next, self._random.randint(1, 20)
        self._next += count
        self._open[first] = count
        padding = self._random.choice((0, 20, 200))
        for number in range(first, first + count):
            self._history.write(Sent(producer=self.name, topic=topic.name, partition=partition, first=number, count=1))
            self._kafka.produce(
                topic.name,
                record_value(self.name, number, padding),
                partition=partition,
                on_delivery=partial(self._delivered, first, number),
            )

    def _delivered(self, burst: int, number: int, error: Any, message: Message) -> None:
        if error is not None:
            self._history.write(OperationEnded(producer=self.name, first=number, outcome="unknown", error=str(error)))
        else:
            self.acknowledged += 1
            offset = message.offset()
            base = offset if offset is not None and offset >= 0 else -1
            self._history.write(
                OperationEnded(producer=self.name, first=number, outcome="acknowledged", base_offset=base)
            )
        self._open[burst] -= 1
        if not self._open[burst]:
            del self._open[burst]
            self._room.release()


class KafkaReaderClient(ReaderClient):
    """A reader that fetches with librdkafka."""

    def _read(self) -> None:
        from confluent_kafka import KafkaError
        from confluent_kafka import TopicPartition as Assigned

        out_of_range = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET}
        consumer = kafka_consumer(self._bootstrap, self.name)
        try:
            consumer.assign([Assigned(tp.topic, tp.partition, at) for tp, at in self.positions.items()])
            until = time.monotonic() + self._random.uniform(2, 10)
            while not self.stopping.is_set() and time.monotonic() < until:
                read = []
                for message in consumer.consume(_AT_ONCE, 0.3):
                    error = message.error()
                    if error is None:
                        read.append(message)
                    elif error.code() in out_of_range or error.code() == KafkaError._BAD_MSG:
                        self._history.write(ConsumerFailed(consumer=self.name, error=str(error), forbidden=True))
                        self.stopping.set()
                self._note_messages(read)
        finally:
            consumer.close()
        self._seek_back()

    def _note_messages(self, messages: Sequence[Message]) -> None:
        """Record the messages of each partition as one batch."""
        by_partition = sorted(
            messages, key=lambda one: (one.topic(), one.partition())
        )  # stable: offsets keep their order
        for (topic, partition), found in groupby(by_partition, key=lambda one: (one.topic(), one.partition())):
            named = [(one.offset(), *record_name(one.value())) for one in found]
            end = named[-1][0] + 1
            self._history.write(
                Polled(
                    consumer=self.name,
                    topic=topic,
                    partition=partition,
                    start=named[0][0],
                    end=end,
                    runs=runs_of(named),
                )
            )
            self.positions[TopicPartition(topic, partition)] = end


def kafka_clients(
    cluster: ProcessCluster, topics: Sequence[Topic], history: HistoryWriter, *, seed: int, pause_s: float
) -> tuple[list[WriterClient], list[ReaderClient]]:
    """Return one writer for each kind of acks, and one reader of all topics.

    They use only topics that the run does not recreate, because a Kafka client may end with a fatal error if its topic
    is recreated.
    """
    bootstrap = cluster.kafka_bootstrap
    lasting = [topic for topic in topics if topic.rules != "remade"]
    writers: list[WriterClient] = [
        KafkaWriterClient(
            f"kafka-writer-{acks}",
            bootstrap,
            [topic for topic in lasting if topic.acks == acks],
            history,
            seed=seed,
            pause_s=pause_s,
        )
        for acks in sorted({topic.acks for topic in lasting})
    ]
    return writers, [KafkaReaderClient("kafka-reader", bootstrap, lasting, history, seed=seed)]
