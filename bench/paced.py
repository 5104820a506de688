"""A steady stream of small records and readers that follow it, each a separate process, for both systems.

A record has its number and the time of its ``send``, both 8 bytes, and filler. The clock is the host's monotonic one,
which all processes share.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.measure import Lost
from sparklog import Consumer, Producer

SIZE = 100
_HEAD = struct.Struct("<qq")
_FILLER = b"x" * (SIZE - _HEAD.size)
_TICK_S = 0.001
_SILENT_S = 30.0
_STOP_TIMEOUT_S = 60.0
#: The longest wait for the results of a process, after which the process counts as dead.
_RESULT_TIMEOUT_S = 120.0
Times = npt.NDArray[np.int64]
_spawn = mp.get_context("spawn")


class Place(NamedTuple):
    """A topic of one of the two systems, in a form to pass to other processes."""

    #: The name of the system, a value of ``Side.name``.
    side: str
    bootstrap: str
    topic: str


class Reader:
    """A process that reads a topic from its start and records when each record arrives.

    Call ``wait_ready``, start the stream, then call ``latencies``.
    """

    def __init__(self, place: Place) -> None:
        self._ready = _spawn.Event()
        self._results: Any = _spawn.Queue()
        self._expected: Any = _spawn.Value("q", -1)
        self._process = _spawn.Process(
            target=_read, args=(place, self._ready, self._expected, self._results), daemon=True
        )
        self._process.start()

    def wait_ready(self) -> None:
        if not self._ready.wait(_SILENT_S):
            raise TimeoutError("a reader did not become ready in time")

    def latencies(self, count: int) -> npt.NDArray[np.float64]:
        """Wait until ``count`` records have arrived; return the latencies in milliseconds, by record number.

        Raises Lost.
        """
        self._expected.value = count
        numbers, sent, seen = self._results.get(timeout=_RESULT_TIMEOUT_S)
        self._process.join(_STOP_TIMEOUT_S)
        if len(numbers) != count or not np.array_equal(np.sort(numbers), np.arange(count)):
            raise Lost(f"{len(np.unique(numbers)):,} different records of {count:,} came, {len(numbers):,} in all")
        found = np.empty(count)
        found[numbers] = (seen - sent) / 1e6
        return found

    def end(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_STOP_TIMEOUT_S)


@contextmanager
def readers(place: Place, number: int) -> Iterator[list[Reader]]:
    """Start ``number`` readers, and yield them when they are ready."""
    found = [Reader(place) for _ in range(number)]
    try:
        for reader in found:
            reader.wait_ready()
        yield found
    finally:
        for reader in found:
            reader.end()


class Stream:
    """A process that sends ``rate`` records/s for ``seconds``. Call ``wait`` to wait for its end."""

    def __init__(self, place: Place, *, rate: int, seconds: float, linger_ms: float) -> None:
        self.count = round(rate * seconds)
        self._seconds = seconds
        self._results: Any = _spawn.Queue()
        self._process = _spawn.Process(
            target=_send_all, args=(place, rate, self.count, linger_ms, self._results), daemon=True
        )
        self._process.start()

    def wait(self) -> float:
        """Wait for the end; return the largest delay of a ``send`` in ms.

        If this delay is large, the sender was slower than the rate, and the latencies mean nothing.
        """
        late: float = self._results.get(timeout=self._seconds + _RESULT_TIMEOUT_S)
        self._process.join(_STOP_TIMEOUT_S)
        return late


def _send_all(place: Place, rate: int, count: int, linger_ms: float, results: Any) -> None:
    with _sender(place, linger_ms) as (send, serve):
        began = time.monotonic()
        sent, late = 0, 0.0
        while sent < count:
            now = time.monotonic()
            due = min(count, round((now - began) * rate))
            late = max(late, (due - sent) / rate)
            while sent < due:
                send(_HEAD.pack(sent, time.monotonic_ns()) + _FILLER)
                sent += 1
            serve()
            time.sleep(max(0.0, now + _TICK_S - time.monotonic()))
    results.put(late * 1000)


@contextmanager
def _sender(place: Place, linger_ms: float) -> Iterator[tuple[Callable[[bytes], object], Callable[[], object]]]:
    """Yield a function that sends a record, and one to call now and then."""
    if place.side != "kafka":
        with Producer(place.bootstrap, linger_ms=linger_ms) as producer:
            yield lambda value: producer.send(place.topic, value), lambda: None
        return
    from bench.kafka_clients import confluent_producer

    theirs = confluent_producer(place.bootstrap, **{"linger.ms": linger_ms})
    yield lambda value: theirs.produce(place.topic, value), lambda: theirs.poll(0)
    if theirs.flush(_SILENT_S):
        raise TimeoutError("confluent-kafka: not everything was acknowledged")


def _read(place: Place, ready: Any, expected: Any, results: Any) -> None:
    read = _read_kafka if place.side == "kafka" else _read_ours
    came: list[tuple[bytes | memoryview, int, int]] = []
    rows, heard = 0, time.monotonic()
    for values, number in read(place.bootstrap, place.topic, ready):
        now = time.monotonic_ns()
        if number:
            came.append((values, number, now))
            rows += number
            heard = time.monotonic()
        if 0 <= expected.value <= rows or (expected.value >= 0 and time.monotonic() - heard > _SILENT_S):
            break
    heads = [
        np.frombuffer(values, dtype=np.uint8).reshape(number, SIZE)[:, : _HEAD.size].copy().view(np.int64)
        for values, number, _ in came
    ]
    both = np.concatenate(heads) if heads else np.empty((0, 2), dtype=np.int64)
    seen = np.repeat([now for _, _, now in came], [number for _, number, _ in came]).astype(np.int64)
    results.put((both[:, 0], both[:, 1], seen))


def _read_ours(bootstrap: str, topic: str, ready: Any) -> Iterator[tuple[bytes | memoryview, int]]:
    """Yield each value with the number of records so far."""
    with Consumer(bootstrap, topic) as consumer:
        ready.set()
        while True:
            batches = consumer.poll(0.1)
            for batch in batches:
                column = batch.column("value")
                _, offsets, values = column.buffers()
                at = np.frombuffer(offsets, dtype=np.int32)
                first, last = at[column.offset], at[column.offset + len(column)]
                yield memoryview(values)[first:last], len(column)
            if not batches:
                yield b"", 0


def _read_kafka(bootstrap: str, topic: str, ready: Any) -> Iterator[tuple[bytes | memoryview, int]]:
    """Yield one message a call, without a delay. The partitions are assigned, so no group has to form first."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    found = consumer.list_topics(topic, timeout=_SILENT_S).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in found])
    ready.set()
    while True:
        message = consumer.poll(0.1)
        if message is None:
            yield b"", 0
        elif message.error() is not None:
            raise RuntimeError(f"confluent-kafka: {message.error()}")
        else:
            yield message.value(), 1
