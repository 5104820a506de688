"""Continuous writes and reads while a test injects faults, and the proof that no record was lost or changed.

Each partition has one writer with its own producer, which sends numbered records one after the other with acks=all, so
a stalled partition delays no other. One consumer reads all records from the beginning.
"""

from __future__ import annotations

import threading
import time

import sparklog

#: Longer than any fault of a test. A longer outage counts as permanent.
HEALED_S = 60.0


class Writer:
    """A writer of one partition.

    It runs from its creation until ``end``. ``acknowledged`` records are numbered from 0.
    """

    def __init__(self, bootstrap: str, topic: str, partition: int = 0, *, pause_s: float = 0.01) -> None:
        self._address = bootstrap
        self._topic = topic
        self._partition = partition
        self._pause_s = pause_s
        self._enough = threading.Event()
        self._began = time.monotonic()
        self.acknowledged = 0
        self.slowest_s = 0.0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with sparklog.Producer(self._address, linger_ms=0) as producer:
                while not self._enough.is_set():
                    self._began = time.monotonic()
                    value = str(self.acknowledged).encode()
                    producer.send(self._topic, value=value, partition=self._partition).result(HEALED_S)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - self._began)
                    self.acknowledged += 1
                    self._enough.wait(self._pause_s)
        except BaseException as error:
            self.error = error

    def wait_for(self, count: int) -> None:
        """Wait for ``count`` acknowledged records. Raises AssertionError if they do not come in time."""
        deadline = time.monotonic() + HEALED_S
        while self.acknowledged < count:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, f"{self.acknowledged} of {count} records within {HEALED_S} s"
            time.sleep(0.01)

    def end(self) -> int:
        self._enough.set()
        self._thread.join(HEALED_S + 10)
        assert self.error is None, self.error
        return self.acknowledged


class Traffic:
    """Writers to all partitions of a topic, and a reader. They run from their creation, and ``end`` checks the
    records."""

    def __init__(self, bootstrap: str, topic: str, *, partitions: int) -> None:
        self.writers = [Writer(bootstrap, topic, partition) for partition in range(partitions)]
        self._read: dict[int, list[tuple[int, int]]] = {partition: [] for partition in range(partitions)}
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._reader = threading.Thread(target=self._consume, args=(bootstrap, topic), daemon=True)
        self._reader.start()

    def _consume(self, bootstrap: str, topic: str) -> None:
        try:
            with sparklog.Consumer(
                bootstrap, topic, columns=["value"], log_columns=True, timeout_s=HEALED_S
            ) as consumer:
                while not (self._ended.is_set() and self._has_all()):
                    for batch in consumer.poll(0.2):
                        columns = (batch.column(name).to_pylist() for name in ("_partition", "_offset", "value"))
                        for partition, offset, value in zip(*columns, strict=True):
                            self._read[partition].append((offset, int(value)))
        except BaseException as error:
            self._error = error

    def _has_all(self) -> bool:
        return all(len(self._read[k]) >= writer.acknowledged for k, writer in enumerate(self.writers))

    def goes_on(self, records: int = 10) -> None:
        """Return when every partition has accepted ``records`` more, and the reader has read them."""
        self._raise()
        wanted = [writer.acknowledged + records for writer in self.writers]
        for writer, count in zip(self.writers, wanted, strict=True):
            writer.wait_for(count)
        deadline = time.monotonic() + HEALED_S
        while any(len(self._read[k]) < count for k, count in enumerate(wanted)):
            self._raise()
            assert time.monotonic() < deadline, "the reader does not advance"
            time.sleep(0.01)

    def slowest_s(self) -> float:
        """Return the duration of the longest write since the last call, and restart the measurement."""
        slowest = max(writer.slowest_s for writer in self.writers)
        for writer in self.writers:
            writer.slowest_s = 0.0
        return slowest

    def end(self) -> int:
        """Stop, and check that each partition has exactly the acknowledged records, once and in order, and that the
        reader saw them so. Return the number of records."""
        counts = [writer.end() for writer in self.writers]
        self._ended.set()
        self._reader.join(HEALED_S)
        self._raise()
        for partition, count in enumerate(counts):
            assert self._read[partition] == [(number, number) for number in range(count)], f"partition {partition}"
        return sum(counts)

    def _raise(self) -> None:
        assert self._error is None, self._error
