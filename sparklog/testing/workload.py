"""Clients that write and read while faults are injected into a cluster, and record a history.

Writers give every record a name (see ``history.record_value``). Readers record every batch. Now and then they seek back
and read a part again. After the faults, ``finish`` waits until all replicas are in sync, every write has ended, and
every reader has reached the end. Then it adds the final logs of all replicas to the history.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol

import pyarrow as pa

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.origin import origin
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.results import WriteResult
from sparklog.errors import BrokerError, ClusterError, ErrorCode, SparklogError
from sparklog.model import TopicPartition
from sparklog.testing.final_logs import high_watermarks, read_final_logs, wait_whole
from sparklog.testing.history import (
    ConsumerFailed,
    Finished,
    HistoryWriter,
    NotHealed,
    OperationEnded,
    Polled,
    Positioned,
    Rules,
    Sent,
    TopicUsed,
    record_name,
    record_value,
    runs_of,
)
from sparklog.testing.process_cluster import ProcessCluster, wait_until

#: The delivery timeout of writers. It is longer than any fault, so that few writes have an unknown outcome.
DELIVERY_TIMEOUT_S = 60.0
_IN_FLIGHT = 8
#: How long clients wait for a response of a broker, which may be paused.
_REQUEST_TIMEOUT_S = 3.0
_FORBIDDEN = frozenset({ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.CORRUPT_MESSAGE, ErrorCode.INCONSISTENT_TOPIC_ID})


class Topic(NamedTuple):
    """A topic of the workload. ``acks`` is "all", "1" or "0"."""

    name: str
    partitions: int = 2
    acks: str = "all"
    rules: Rules = "strict"

    def create(self, bootstrap: str, config: Mapping[str, str], *, replicas: int = 3) -> None:
        with Admin(bootstrap) as admin:
            admin.create_topic(self.name, partitions=self.partitions, replication_factor=replicas, config=config)


class _Client:
    """A thread that works until ``stopping`` is set.

    ``join`` raises the unexpected error of the thread, if there is one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self.stopping.set()
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise ClusterError(f"client {self.name} did not end within {timeout_s:g} s")

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        raise NotImplementedError


class WriterClient(_Client):
    """A client that writes batches of a few named records to the partitions of some topics with the same acks."""

    def __init__(
        self, name: str, bootstrap: str, topics: Sequence[Topic], history: HistoryWriter, *, seed: int, pause_s: float
    ) -> None:
        super().__init__(name)
        self._topics = topics
        self._history = history
        self._random = random.Random(f"{seed} {name}")
        self._pause_s = pause_s
        self._room = threading.Semaphore(_IN_FLIGHT)
        self._next = 0
        self.acknowledged = 0
        self.open(bootstrap, topics[0].acks)

    def open(self, bootstrap: str, acks: str) -> None:
        """Create the producer."""
        self._producer = Producer(
            bootstrap,
            acks=acks,
            linger_ms=0,
            request_timeout_s=_REQUEST_TIMEOUT_S,
            delivery_timeout_s=DELIVERY_TIMEOUT_S,
            client_id=self.name,
        )

    def close(self, timeout_s: float) -> None:
        with contextlib.suppress(SparklogError):  # the future of every write has recorded its outcome already
            self._producer.close(timeout_s)

    def run(self) -> None:
        while not self.stopping.is_set():
            if self._room.acquire(timeout=0.2):
                self._write()
                self.stopping.wait(self._random.uniform(0, 2 * self._pause_s))

    def join(self, timeout_s: float) -> None:
        super().join(timeout_s)
        self.close(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every write has ended; return False after a timeout. Call this after the client's last write."""
        deadline = time.monotonic() + timeout_s
        taken = 0
        while taken < _IN_FLIGHT and self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            taken += 1
        for _ in range(taken):
            self._room.release()
        return taken == _IN_FLIGHT

    def _write(self) -> None:
        topic = self._random.choice(self._topics)
        partition = self._random.randrange(topic.partitions)
        first, count = self._next, self._random.randint(1, 20)
        self._next += count
        padding = self._random.choice((0, 20, 200))
        values = [record_value(self.name, number, padding) for number in range(first, first + count)]
        self._history.write(Sent(producer=self.name, topic=topic.name, partition=partition, first=first, count=count))
        try:
            future = self._producer.write(topic.name, pa.table({"value": values}), partition=partition)
        except SparklogError as error:
            # The topic is being recreated, so nothing was sent.
            self._history.write(OperationEnded(producer=self.name, first=first, outcome="refused", error=str(error)))
            self._room.release()
            return
        future.add_done_callback(partial(self._ended, first))

    def _ended(self, first: int, future: Future[WriteResult]) -> None:
        error = future.exception()
        if error is not None:
            self._history.write(OperationEnded(producer=self.name, first=first, outcome="unknown", error=str(error)))
        else:
            self.acknowledged += 1
            ranges = future.result().ranges
            base = ranges[0].offsets.start if ranges else -1
            self._history.write(
                OperationEnded(producer=self.name, first=first, outcome="acknowledged", base_offset=base)
            )
        self._room.release()


class ReaderClient(_Client):
    """A client that reads all partitions of some topics and records every batch. Now and then it seeks back."""

    def __init__(
        self, name: str, bootstrap: str, topics: Sequence[Topic], history: HistoryWriter, *, seed: int
    ) -> None:
        super().__init__(name)
        self._bootstrap = bootstrap
        self._history = history
        self._random = random.Random(f"{seed} {name}")
        self.positions = {TopicPartition(topic.name, p): 0 for topic in topics for p in range(topic.partitions)}

    def run(self) -> None:
        while not self.stopping.is_set():
            self._read_and_note_failures()

    def _read_and_note_failures(self) -> None:
        try:
            self._read()
        except SparklogError as error:
            forbidden = isinstance(error, BrokerError) and error.code in _FORBIDDEN
            self._history.write(ConsumerFailed(consumer=self.name, error=str(error), forbidden=forbidden))
            if forbidden:
                self.stopping.set()
            self.stopping.wait(0.5)

    def _read(self) -> None:
        """Run one consumer for a few seconds, from the positions of the last consumer."""
        with Consumer(self._bootstrap, list(self.positions), start=self.positions, client_id=self.name) as consumer:
            until = time.monotonic() + self._random.uniform(2, 10)
            while not self.stopping.is_set() and time.monotonic() < until:
                for batch in consumer.poll(0.3):
                    self._note(batch)
        self._seek_back()

    def _seek_back(self) -> None:
        """Let the next consumer begin one partition at an earlier offset."""
        tp = self._random.choice(list(self.positions))
        back = max(0, self.positions[tp] - self._random.randint(0, 500))
        self._history.write(Positioned(consumer=self.name, topic=tp.topic, partition=tp.partition, offset=back))
        self.positions[tp] = back

    def _note(self, batch: pa.RecordBatch) -> None:
        place = origin(batch)
        names = [record_name(value) for value in batch.column("value").to_pylist()]
        end = place.offset + batch.num_rows
        self._history.write(
            Polled(
                consumer=self.name,
                topic=place.topic,
                partition=place.partition,
                start=place.offset,
                end=end,
                runs=runs_of((place.offset + row, *name) for row, name in enumerate(names)),
            )
        )
        self.positions[TopicPartition(place.topic, place.partition)] = end


class MoreClients(Protocol):
    """A function that returns writers and readers of another kind."""

    def __call__(
        self, cluster: ProcessCluster, topics: Sequence[Topic], history: HistoryWriter, *, seed: int, pause_s: float
    ) -> tuple[list[WriterClient], list[ReaderClient]]: ...


class Workload:
    """The writers and readers of a test. Use it only from the thread that injects the faults."""

    def __init__(
        self,
        cluster: ProcessCluster,
        history: HistoryWriter,
        topics: Sequence[Topic],
        *,
        seed: int = 0,
        writers: int = 2,
        readers: int = 1,
        pause_s: float = 0.01,
        config: Mapping[str, str] | None = None,
        more_clients: MoreClients | None = None,
    ) -> None:
        """Create the topics.

        ``writers`` is the number of writers for each kind of acks. ``pause_s`` is the mean pause between two batches of
        a writer. ``more_clients`` returns other writers and readers of the same topics.
        """
        self.cluster = cluster
        self.history = history
        self.topics = list(topics)
        for topic in topics:
            topic.create(cluster.bootstrap, config or {})
            acks = {"all": -1, "1": 1, "0": 0}[topic.acks]
            history.write(TopicUsed(topic=topic.name, rules=topic.rules, acks=acks))
        kinds = {(topic.acks, topic.rules): [t for t in topics if t[2:] == topic[2:]] for topic in topics}
        self.writers = [
            WriterClient(f"writer-{rules}-{acks}-{number}", cluster.bootstrap, own, history, seed=seed, pause_s=pause_s)
            for (acks, rules), own in kinds.items()
            for number in range(writers)
        ]
        lasting = [topic for topic in topics if topic.rules != "remade"]
        self.readers = [
            ReaderClient(f"reader-{number}", cluster.bootstrap, lasting, history, seed=seed)
            for number in range(readers)
        ]
        self._has_transactions = more_clients is not None
        if more_clients is not None:
            writing, reading = more_clients(cluster, topics, history, seed=seed, pause_s=pause_s)
            self.writers += writing
            self.readers += reading

    def __enter__(self) -> Workload:
        for client in (*self.writers, *self.readers):
            client.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the clients. If ``finish`` was not called, do not wait for their writes."""
        for client in (*self.writers, *self.readers):
            client.stopping.set()
        if error is not None:
            for client in (*self.writers, *self.readers):
                with contextlib.suppress(Exception):
                    client.join(1.0)

    @property
    def acknowledged(self) -> int:
        """Return the number of acknowledged batches so far."""
        return sum(writer.acknowledged for writer in self.writers)

    def wait_progress(self, timeout_s: float = 30.0) -> None:
        """Wait until every writer has received at least one more acknowledgement.

        Raises:
            ClusterError: timeout; the message names the writers without progress.
        """
        before = {writer: writer.acknowledged for writer in self.writers}
        behind = list(self.writers)

        def moved() -> bool:
            behind[:] = [writer for writer in behind if writer.acknowledged == before[writer]]
            return not behind

        try:
            wait_until(moved, timeout_s, "acknowledgements")
        except ClusterError as error:
            raise ClusterError(f"{error} of {[writer.name for writer in behind]}") from None

    def finish(self, *, timeout_s: float = 60.0) -> None:
        """Stop the writers, wait until all replicas are in sync and the readers are done, and record the final logs."""
        try:
            self._settle(timeout_s)
        except ClusterError as error:
            self.history.write(NotHealed(text=str(error)))
        for client in self.readers:
            client.join(timeout_s)
        for writer in self.writers:
            writer.join(timeout_s)
        for topic in self.topics:
            if topic.rules != "remade":
                for found in read_final_logs(self.cluster, topic.name):
                    self.history.write(found)
        self.history.write(Finished())

    def _end_partitions(self) -> None:
        """Write a last record to each partition, so that readers reach its end. Otherwise a marker may be there."""
        places = [(topic.name, p) for topic in self.topics if topic.rules == "strict" for p in range(topic.partitions)]
        with Producer(self.cluster.bootstrap, delivery_timeout_s=DELIVERY_TIMEOUT_S) as producer:
            for number, (topic, partition) in enumerate(places):
                self.history.write(Sent(producer="last", topic=topic, partition=partition, first=number, count=1))
                value = record_value("last", number)
                producer.write(topic, pa.table({"value": [value]}), partition=partition).result(DELIVERY_TIMEOUT_S)
                self.history.write(OperationEnded(producer="last", first=number, outcome="acknowledged"))

    def _settle(self, timeout_s: float) -> None:
        self.wait_progress(timeout_s)
        for writer in self.writers:
            writer.stopping.set()
        for writer in self.writers:
            if not writer.flush(DELIVERY_TIMEOUT_S + timeout_s):
                raise ClusterError(f"writes of {writer.name} did not end")
        if self._has_transactions:
            self._end_partitions()
        lasting = [topic.name for topic in self.topics if topic.rules != "remade"]
        wait_whole(self.cluster, lasting, timeout_s)
        ends = {
            TopicPartition(topic, number): end
            for topic in lasting
            for number, end in high_watermarks(self.cluster, topic).items()
        }
        behind: list[str] = []

        def read() -> bool:
            behind[:] = [
                f"{reader.name} at {at} of {ends[tp]} in {tp}"
                for reader in self.readers
                for tp, at in list(reader.positions.items())
                if at < ends[tp]
            ]
            return not behind

        try:
            wait_until(read, timeout_s, "readers")
        except ClusterError as error:
            raise ClusterError(f"{error}: {behind[:5]}") from None
