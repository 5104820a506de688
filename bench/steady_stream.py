"""A steady stream of small records to every partition of a topic, and the longest pause of each partition.

It is a separate program, so that its cost is not a broker's or the controller's. Lines on its standard input control
it: ``mark`` starts a measurement, ``report`` prints it as JSON, ``watch`` and then ``silent`` print the partitions
without an acknowledgement since ``watch``, and the end of input ends it. At most one record of a partition is in
flight. After a wait the next record keeps its original time: otherwise all partitions that waited together would be
due together afterwards, and no record would detect the next wait.
"""

from __future__ import annotations

import functools
import heapq
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

from sparklog import Consumer, Producer
from sparklog.client.producer.results import RecordMetadata
from sparklog.errors import SparklogError

_VALUE = b"x" * 100
_READY_TIMEOUT_S = 60.0
#: The number of groups of partitions: the records that are due within a hundredth of the interval are written together.
#: Sent one by one, two thousand records every few seconds used half of two cores, which the recovering brokers need.
_GROUPS = 100
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.005


class Report(NamedTuple):
    """One measurement: the gaps in milliseconds, by partition.

    A gap is the longest time between two successive acknowledgements, less the interval of the stream.
    """

    gaps_ms: list[float]
    #: The time at which each partition's gap ended, in milliseconds since ``mark``.
    ended_ms: list[float]
    interval_ms: float
    acked: int
    failed: int
    first_failure: str
    consumed: int
    fetch_failures: int
    longest_fetch_gap_ms: float
    seconds: float


class SteadyStream:
    """The stream. Owner: the main thread of its process. The producer's thread calls the acknowledgements."""

    def __init__(self, bootstrap: str, topic: str, *, partitions: int, interval_s: float) -> None:
        self._topic = topic
        self._interval_s = interval_s
        self._producer = Producer(bootstrap, linger_ms=2.0, delivery_timeout_s=300.0)
        self._lock = threading.Lock()
        self._acked_at = [0.0] * partitions
        self._due = [0.0] * partitions
        self._answered: deque[int] = deque()
        self._order: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self.all_acked = threading.Event()
        self.consumed = 0
        self.fetch_failures = 0
        self.first_failure = ""
        self._fetched_at = 0.0
        self._watched_from = 0.0
        self._mark()
        self._threads = [threading.Thread(target=self._send_all, daemon=True)]

    def consume(self, bootstrap: str) -> None:
        """Read the written records as well. Call this before ``start``."""
        self._threads.append(threading.Thread(target=self._read, args=(bootstrap,), daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def mark(self) -> None:
        with self._lock:
            self._mark()

    def _mark(self) -> None:
        count = len(self._acked_at)
        self._marked_at = time.monotonic()
        self._gaps, self._gap_ends = [0.0] * count, [0.0] * count
        self._acked = self._failed = self.consumed = self.fetch_failures = 0
        self._longest_fetch_gap = 0.0

    def report(self) -> Report:
        """Return the measurement since ``mark``. If a partition still waits, its wait until now counts."""
        with self._lock:
            now = time.monotonic()
            for partition, at in enumerate(self._acked_at):
                self._saw(partition, now - at, now)
            return Report(
                [gap * 1000 for gap in self._gaps],
                [(at - self._marked_at) * 1000 for at in self._gap_ends],
                self._interval_s * 1000,
                self._acked,
                self._failed,
                self.first_failure,
                self.consumed,
                self.fetch_failures,
                self._longest_fetch_gap * 1000,
                now - self._marked_at,
            )

    def watch(self) -> None:
        self._watched_from = time.monotonic()

    def silent(self) -> list[int]:
        """Return the partitions without an acknowledgement since ``watch``."""
        with self._lock:
            return [number for number, at in enumerate(self._acked_at) if at < self._watched_from]

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(5.0)

    # --- writing ---

    def _send_all(self) -> None:
        start = time.monotonic()
        count = len(self._due)
        groups = min(count, _GROUPS)
        for partition in range(count):
            self._due[partition] = start + self._interval_s * (partition * groups // count) / groups
            self._order.append((self._due[partition], partition))
        while not self._ended.is_set():
            now = time.monotonic()
            while self._answered:
                partition = self._answered.popleft()
                missed = max(0.0, now - self._due[partition]) // self._interval_s
                self._due[partition] += (missed + 1) * self._interval_s
                heapq.heappush(self._order, (self._due[partition], partition))
            while self._order and self._order[0][0] <= now:
                partition = heapq.heappop(self._order)[1]
                future = self._producer.send(self._topic, _VALUE, partition=partition)
                future.add_done_callback(functools.partial(self._done, partition))
            due_in_s = self._order[0][0] - time.monotonic() if self._order else _LONGEST_PAUSE_S
            time.sleep(min(max(due_in_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _done(self, partition: int, future: Future[RecordMetadata]) -> None:
        error = future.exception()
        now = time.monotonic()
        with self._lock:
            if error is not None:
                self._failed += 1
                self.first_failure = self.first_failure or str(error)
            else:
                self._acked += 1
                before, self._acked_at[partition] = self._acked_at[partition], now
                if before:
                    self._saw(partition, now - before, now)
        self._answered.append(partition)
        if not self.all_acked.is_set() and all(self._acked_at):
            self.all_acked.set()

    def _saw(self, partition: int, gap_s: float, now: float) -> None:
        gap_s = max(0.0, gap_s - self._interval_s)
        if gap_s > self._gaps[partition]:
            self._gaps[partition], self._gap_ends[partition] = gap_s, now

    # --- reading ---

    def _read(self, bootstrap: str) -> None:
        with Consumer(bootstrap, self._topic, start="earliest") as consumer:
            while not self._ended.is_set():
                try:
                    rows = sum(batch.num_rows for batch in consumer.poll(0.5))
                except SparklogError as error:
                    self.fetch_failures += 1
                    self.first_failure = self.first_failure or str(error)
                    continue
                now = time.monotonic()
                with self._lock:
                    if rows and self._fetched_at:
                        self._longest_fetch_gap = max(self._longest_fetch_gap, now - self._fetched_at)
                    self.consumed += rows
                if rows:
                    self._fetched_at = now


class StreamProcess:
    """A stream in a separate process. Owner: the measuring program, as a context manager."""

    def __init__(
        self, bootstrap: str, topic: str, *, partitions: int, interval_s: float, consume: bool = False
    ) -> None:
        """Start the process; return when every partition has one record."""
        arguments = [bootstrap, topic, str(partitions), str(interval_s), "consume" if consume else "-"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.steady_stream", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._line() != "ready":
            self.close()
            raise RuntimeError(f"the stream to {topic} did not begin")

    def __enter__(self) -> StreamProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mark(self) -> None:
        self._ask("mark")

    def report(self) -> Report:
        return Report(**json.loads(self._ask("report")))

    def wait_all_acked(self, timeout_s: float, *, but: Collection[int] = ()) -> None:
        """Wait until every partition, except those in ``but``, has a new acknowledgement, or until time is up.

        The gaps of the report show the partitions without one.
        """
        self._ask("watch")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and set(json.loads(self._ask("silent"))) - set(but):
            time.sleep(0.1)

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main(bootstrap: str, topic: str, partitions: str, interval_s: str, consume: str) -> None:
    stream = SteadyStream(bootstrap, topic, partitions=int(partitions), interval_s=float(interval_s))
    if consume == "consume":
        stream.consume(bootstrap)
    stream.start()
    _say("ready" if stream.all_acked.wait(_READY_TIMEOUT_S) else f"not ready: {stream.first_failure}")
    for line in sys.stdin:
        if line.strip() == "mark":
            stream.mark()
            _say("marked")
        elif line.strip() == "report":
            _say(json.dumps(stream.report()._asdict()))
        elif line.strip() == "watch":
            stream.watch()
            _say("watching")
        elif line.strip() == "silent":
            _say(json.dumps(stream.silent()))
    stream.close()


def _say(line: Any) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # the records in flight no longer matter
