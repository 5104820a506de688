"""Kafka clients of the workload: writers and readers that use librdkafka and the brokers' Kafka listener.

There are idempotent and transactional writers, readers of assigned partitions, and groups of both protocols. They
record the same history as the clients of ``workload``, so the same checker checks it. The module needs the package
``confluent-kafka``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sparklog.model import TopicPartition
from sparklog.testing.history import (
    Assigned,
    Committed,
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
#: The time after which the coordinator aborts a transaction that its producer has abandoned.
_TRANSACTION_TIMEOUT_MS = 10_000
#: The time after which a crashed member of a classic group loses its partitions.
_SESSION_TIMEOUT_MS = 6_000
_MOST_MEMBERS = 3
_TRANSACTIONAL_WRITERS = 2
#: What a transactional writer does at the end of a transaction, with the probability of each.
_ENDINGS = {"commit": 0.7, "abort": 0.2, "crash": 0.1}
Outcome: TypeAlias = Literal["acknowledged", "unknown", "aborted"]
GroupEntry: TypeAlias = Polled | Assigned | Committed | ConsumerFailed
_CLASSIC = {"session.timeout.ms": _SESSION_TIMEOUT_MS, "heartbeat.interval.ms": 500}
#: The groups by name, with the settings of their protocols.
_PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {**_CLASSIC, "partition.assignment.strategy": "range"},
    "cooperative": {**_CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


def kafka_producer(bootstrap: str, acks: str) -> Producer:
    """Return a producer. With acks=all it is idempotent; with other acks it never retries a batch.

    Without idempotence a retry could write a batch twice, even in Kafka.
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


class KafkaTransactionClient(WriterClient):
    """A writer of transactions, each with records in several partitions.

    Some transactions are aborted. Sometimes the producer crashes in a transaction. The next producer has the same
    transactional id, or a new one. If it has a new one, only the timeout ends the open transaction.
    """

    def open(self, bootstrap: str, acks: str) -> None:
        self._bootstrap = bootstrap
        self._current: Producer | None = None
        #: The number of transactional ids that the client has used.
        self._ids = 0

    def close(self, timeout_s: float) -> None:
        self._current = None

    def run(self) -> None:
        while not self.stopping.is_set():
            if self._room.acquire(timeout=0.2):
                try:
                    self._write()
                finally:
                    self._room.release()
                self.stopping.wait(self._random.uniform(0, 2 * self._pause_s))

    def _write(self) -> None:
        from confluent_kafka import KafkaException

        first, count = self._next, self._random.randint(2, 40)
        ending = self._random.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
        outcome: Outcome = "aborted"
        error = ""
        offsets: dict[int, int] = {}
        try:
            producer = self._ready_producer()
            producer.begin_transaction()
            self._produce(producer, range(first, first + count), offsets)
            if ending == "commit":
                outcome = "unknown"
                self._commit(producer)
                outcome = "acknowledged"
            else:
                producer.flush(1.0)  # so that the log has records of the transaction
                self._abort_or_crash(producer, ending)
        except (KafkaException, BufferError) as failure:
            error = str(failure)
            outcome = self._after_failure(outcome, failure)
        for number in range(first, self._next):
            self._history.write(
                OperationEnded(
                    producer=self.name, first=number, outcome=outcome, base_offset=offsets.get(number, -1), error=error
                )
            )
        self.acknowledged += outcome == "acknowledged"

    def _ready_producer(self) -> Producer:
        """Return the producer, after the end of its predecessor's transaction."""
        from confluent_kafka import Producer

        if self._current is None:
            producer = Producer(
                {
                    "bootstrap.servers": self._bootstrap,
                    "transactional.id": f"{self.name}-{self._ids}",
                    "transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS,
                    "message.timeout.ms": _TRANSACTION_TIMEOUT_MS,
                    "linger.ms": 0,
                    "socket.timeout.ms": 3_000,
                    "reconnect.backoff.max.ms": _RECONNECT_MS,
                    **_SILENT,
                }
            )
            producer.init_transactions(DELIVERY_TIMEOUT_S)
            self._current = producer
        return self._current

    def _produce(self, producer: Producer, numbers: range, offsets: dict[int, int]) -> None:
        def delivered(number: int, error: Any, message: Message) -> None:
            offset = message.offset()
            if error is None and offset is not None:
                offsets[number] = offset

        for number in numbers:
            topic = self._random.choice(self._topics)
            partition = self._random.randrange(topic.partitions)
            value = record_value(self.name, number, self._random.choice((0, 20, 200)))
            self._next = number + 1
            self._history.write(
                Sent(
                    producer=self.name,
                    topic=topic.name,
                    partition=partition,
                    first=number,
                    count=1,
                    transaction=f"{self.name}-{numbers.start}",
                )
            )
            producer.produce(topic.name, value, partition=partition, on_delivery=partial(delivered, number))
            if self._random.random() < 0.1:
                producer.poll(0)

    def _commit(self, producer: Producer) -> None:
        until = time.monotonic() + DELIVERY_TIMEOUT_S
        while not self._has_committed(producer, may_repeat=time.monotonic() < until):
            pass

    @staticmethod
    def _has_committed(producer: Producer, *, may_repeat: bool) -> bool:
        """Commit, and return False if the commit is to be repeated."""
        from confluent_kafka import KafkaException

        try:
            producer.commit_transaction(DELIVERY_TIMEOUT_S)
        except KafkaException as failure:
            if not failure.args[0].retriable() or not may_repeat:
                raise
            return False
        return True

    def _abort_or_crash(self, producer: Producer, ending: str) -> None:
        if ending == "abort":
            producer.abort_transaction(DELIVERY_TIMEOUT_S)
        else:
            self._current = None
            self._ids += self._random.random() < 0.5

    def _after_failure(self, outcome: Outcome, failure: Exception) -> Outcome:
        """Return the outcome of a transaction after an error: without a request for a commit, it is never committed."""
        from confluent_kafka import KafkaException

        producer, self._current = self._current, None
        if producer is not None and isinstance(failure, KafkaException) and failure.args[0].txn_requires_abort():
            try:
                producer.abort_transaction(DELIVERY_TIMEOUT_S)
            except KafkaException:
                return outcome
            self._current = producer
            return "aborted"
        return outcome


class KafkaGroupClient(ReaderClient):
    """The members of one group. They join, leave and crash, and one thread runs all of them.

    ``positions`` are the end offsets of the records that the group has read. ``settings`` are the settings of the
    group's protocol.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topics: Sequence[Topic],
        history: HistoryWriter,
        *,
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(name, bootstrap, topics, history, seed=seed)
        self._subscribed = [topic.name for topic in topics]
        self._settings = settings
        self._joined = 0

    def run(self) -> None:
        members = [self._join()]
        try:
            while not self.stopping.is_set():
                until = time.monotonic() + self._random.uniform(3, 10)
                while not self.stopping.is_set() and time.monotonic() < until:
                    for member in members:
                        member.read(_AT_ONCE)
                        if self._random.random() < 0.3:
                            member.commit()
                self._replace(members)
        finally:
            for member in members:
                member.leave()

    def _replace(self, members: list[_Member]) -> None:
        """Let members join, leave and crash. At least one remains."""
        members[:] = [member for member in members if not member.has_failed]
        if len(members) == _MOST_MEMBERS or (members and self._random.random() < 0.5):
            member = members.pop(self._random.randrange(len(members)))
            if self._random.random() < 0.5:
                member.leave()
            else:
                member.crash()
        if not members or (len(members) < _MOST_MEMBERS and self._random.random() < 0.7):
            members.append(self._join())

    def _join(self) -> _Member:
        self._joined += 1
        settings = {"bootstrap.servers": self._bootstrap, "group.id": self.name, **self._settings}
        return _Member(f"{self.name}-{self._joined}", self._subscribed, settings, self._note_entry)

    def _note_entry(self, entry: GroupEntry) -> None:
        self._history.write(entry)
        if isinstance(entry, Polled):
            tp = TopicPartition(entry.topic, entry.partition)
            self.positions[tp] = max(self.positions[tp], entry.end)
        elif isinstance(entry, ConsumerFailed) and entry.forbidden:
            self.stopping.set()


class _Member:
    """A member of a group. It reads each partition that it receives from the group's committed offset on."""

    def __init__(
        self, name: str, topics: list[str], settings: Mapping[str, Any], note: Callable[[GroupEntry], None]
    ) -> None:
        from confluent_kafka import Consumer

        self.has_failed = False
        self._name = name
        self._group: str = settings["group.id"]
        self._note = note
        self._owned: set[TopicPartition] = set()
        #: The records that are not in the history yet, as offset, producer and number.
        self._records: dict[TopicPartition, list[tuple[int, str, int]]] = {}
        #: The positions that are not committed.
        self._uncommitted: dict[TopicPartition, int] = {}
        self._consumer = Consumer(
            {
                "client.id": name,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,
                "socket.timeout.ms": 3_000,
                "reconnect.backoff.max.ms": _RECONNECT_MS,
                **_SILENT,
                **settings,
            }
        )
        self._consumer.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def read(self, count: int) -> None:
        """Read at most ``count`` records. A rebalance may happen meanwhile."""
        message = self._consumer.poll(0.1)
        while message is not None:
            self._take(message)
            count -= 1
            message = self._consumer.poll(0) if count else None
        self._note_records()

    def _take(self, message: Message) -> None:
        from confluent_kafka import KafkaError

        error = message.error()
        if error is not None:
            self.has_failed |= error.fatal()
            if error.code() in {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._BAD_MSG}:
                self._note(ConsumerFailed(consumer=self._name, error=str(error), forbidden=True))
            return
        tp = TopicPartition(message.topic(), message.partition())
        if tp in self._owned:
            self._records.setdefault(tp, []).append((message.offset(), *record_name(message.value())))
            self._uncommitted[tp] = message.offset() + 1

    def _note_records(self) -> None:
        for tp, records in self._records.items():
            self._note(
                Polled(
                    consumer=self._name,
                    group=self._group,
                    topic=tp.topic,
                    partition=tp.partition,
                    start=records[0][0],
                    end=records[-1][0] + 1,
                    runs=runs_of(records),
                )
            )
        self._records.clear()

    def commit(self) -> None:
        """Commit the positions of all records that have been read. A commit may fail during a rebalance or a fault."""
        from confluent_kafka import KafkaException
        from confluent_kafka import TopicPartition as Position

        self._note_records()
        positions = [Position(tp.topic, tp.partition, offset) for tp, offset in self._uncommitted.items()]
        self._uncommitted.clear()
        if not positions:
            return
        try:
            done = self._consumer.commit(offsets=positions, asynchronous=False)
        except KafkaException:
            return
        for one in done or ():
            if one.error is None:
                self._note(
                    Committed(
                        consumer=self._name,
                        group=self._group,
                        topic=one.topic,
                        partition=one.partition,
                        offset=one.offset,
                    )
                )

    def leave(self) -> None:
        """Commit, and leave the group."""
        self._consumer.close()  # calls _on_revoke
        self._note_records()

    def crash(self) -> None:
        """End the member without a commit. Without a call of ``close``, librdkafka does not leave the group."""
        del self._consumer

    def _on_assign(self, _: Consumer, partitions: Sequence[Any]) -> None:
        self._note_records()
        for one in partitions:
            self._owned.add(TopicPartition(one.topic, one.partition))
            self._note(Assigned(consumer=self._name, group=self._group, topic=one.topic, partition=one.partition))

    def _on_revoke(self, consumer: Consumer, partitions: Sequence[Any]) -> None:
        self.commit()
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: Consumer, partitions: Sequence[Any]) -> None:
        self._note_records()
        for one in partitions:
            tp = TopicPartition(one.topic, one.partition)
            self._owned.discard(tp)
            self._uncommitted.pop(tp, None)


def kafka_clients(
    cluster: ProcessCluster, topics: Sequence[Topic], history: HistoryWriter, *, seed: int, pause_s: float
) -> tuple[list[WriterClient], list[ReaderClient]]:
    """Return a writer for each kind of acks, two writers of transactions, a reader of all topics, and three groups.

    They use only topics that the run does not recreate, because a Kafka client may end with a fatal error if its topic
    is recreated. Transactions and groups use topics that lose no record.
    """
    bootstrap = cluster.kafka_bootstrap
    lasting = [topic for topic in topics if topic.rules != "remade"]
    strict = [topic for topic in lasting if topic.rules == "strict"]
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
    readers: list[ReaderClient] = [KafkaReaderClient("kafka-reader", bootstrap, lasting, history, seed=seed)]
    if strict:
        writers += [
            KafkaTransactionClient(
                f"kafka-transactions-{number}", bootstrap, strict, history, seed=seed, pause_s=pause_s
            )
            for number in range(_TRANSACTIONAL_WRITERS)
        ]
        readers += [
            KafkaGroupClient(f"kafka-group-{name}", bootstrap, strict, history, seed=seed, settings=settings)
            for name, settings in _PROTOCOLS.items()
        ]
    return writers, readers
