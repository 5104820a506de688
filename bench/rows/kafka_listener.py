"""The rows that compare Kafka's clients on sparklog's Kafka listener with the same clients on Kafka.

Both contestants of a row use the same client with the same settings, so a row compares only the brokers. The client is
librdkafka (confluent-kafka) or Kafka's Java producer. Topics have six partitions, and writers use acks=all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.java_producer import produce_java, read_digest
from bench.kafka_jars import broker_jars
from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.rows.latency import one_write_at_a_time
from bench.rows.produce import PARTITIONS
from bench.sides import Bench, Side
from bench.values import check_objects, check_topic, objects
from sparklog.errors import ClusterError

_RECORDS = {100: 1_000_000, 1000: 300_000}
#: The records of a batch of 16 KiB, Kafka's default, with values of 100 B.
_SMALL_BATCH = 130


def written(bench: Bench, side: Side, values: list[bytes], *, size: int, settings: dict[str, Any]) -> Figures:
    """Measure the writing of the values to a new topic by librdkafka. Then read the values back and check them."""
    from bench.kafka_clients import produce_confluent

    count = len(values)
    with bench.topic(side, partitions=PARTITIONS) as topic:
        with CpuTime(side.pids()) as cpu:
            took = produce_confluent(side.kafka_bootstrap, topic, values, **settings)
        check_topic(side, topic, count, size)
    return {"rate": count / took, "cpu": cpu.seconds / count * 1e6}


def read(side: Side, topic: str, count: int, size: int) -> Figures:
    from bench.kafka_clients import consume_confluent

    with CpuTime(side.pids()) as cpu:
        took, found = consume_confluent(side.kafka_bootstrap, topic, count)
    check_objects(found, count, size)
    return {"rate": count / took, "cpu": cpu.seconds / count * 1e6}


@contextmanager
def open_writes(bench: Bench, *, size: int, settings: dict[str, Any]) -> Iterator[list[Contestant]]:
    values = objects(bench.count(_RECORDS[size], 5_000), size)
    yield [
        Contestant(side.name, functools.partial(written, bench, side, values, size=size, settings=settings), side)
        for side in bench.sides()
    ]


class JavaRuns:
    """The runs of Kafka's Java producer. All runs of a row must write the same values, on both sides."""

    def __init__(self, bench: Bench, size: int) -> None:
        self._bench = bench
        self._size = size
        self._count = bench.count(_RECORDS[size], 5_000)
        #: The digest of the values of the first run.
        self._digest: int | None = None

    def written(self, side: Side, jars: Path) -> Figures:
        """Measure the writing to a new topic. Then read the values back and check them. Raises Lost."""
        count, size = self._count, self._size
        with self._bench.topic(side, partitions=PARTITIONS) as topic:
            with CpuTime(side.pids()) as cpu:
                rate = produce_java(jars, side.kafka_bootstrap, topic, count, size)
            found = read_digest(side, topic, count, size)
        if self._digest is None:
            self._digest = found
        if found != self._digest:
            raise Lost(f"{topic} of {side.name} has other values than the first run")
        return {"rate": rate, "cpu": cpu.seconds / count * 1e6}


@contextmanager
def open_java(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    """Open the runs of the Java producer. Without Kafka's jars there are no runs."""
    sides, runs = list(bench.sides()), JavaRuns(bench, size)
    try:
        jars = broker_jars(fetch=False)
    except ClusterError as error:
        bench.missing = str(error)
        yield []
        return
    yield [Contestant(side.name, functools.partial(runs.written, side, jars), side) for side in sides]


@contextmanager
def open_reads(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    from bench.kafka_clients import produce_confluent

    count = bench.count(_RECORDS[size], 5_000)
    with ExitStack() as topics:
        contestants = []
        for side in bench.sides():
            topic = topics.enter_context(bench.topic(side, partitions=PARTITIONS))
            produce_confluent(side.kafka_bootstrap, topic, objects(count, size))
            contestants.append(Contestant(side.name, functools.partial(read, side, topic, count, size), side))
        yield contestants


@contextmanager
def open_latency(bench: Bench) -> Iterator[list[Contestant]]:
    yield [Contestant(side.name, functools.partial(one_write_at_a_time, bench, side), side) for side in bench.sides()]


def _ratio(
    title: str, unit: str, figure: str, goal: float | None, *, compiled: float | None = None, lower: bool = False
) -> Ratio:
    return Ratio(title, unit, ("sparklog", figure), (("kafka", figure),), goal, lower=lower, compiled_goal=compiled)


def _row(name: str, words: str, *, goal: float, compiled: float | None, cpu: float | None, opened: Any) -> Row:
    return Row(
        name,
        (
            _ratio(words, "records/s", "rate", goal, compiled=compiled),
            _ratio("the same: broker CPU for a record", "us", "cpu", cpu, lower=True),
        ),
        opened,
    )


def _writes(name: str, words: str, size: int, *, goal: float, compiled: float, **settings: Any) -> Row:
    opened = functools.partial(open_writes, size=size, settings=settings)
    return _row(name, words, goal=goal, compiled=compiled, cpu=0.6, opened=opened)


def _java_writes(size: int) -> Row:
    words = f"ProducerPerformance (Java) writes {size} B values"
    opened = functools.partial(open_java, size=size)
    return _row(f"kafka-java-produce-{size}", words, goal=1.0, compiled=None, cpu=0.6, opened=opened)


ROWS = (
    _writes("kafka-produce-100", "librdkafka writes 100 B values in large batches", 100, goal=1.5, compiled=2.0),
    _writes(
        "kafka-produce-small",
        f"librdkafka writes 100 B values, {_SMALL_BATCH} a batch",
        100,
        goal=3.0,
        compiled=4.0,
        **{"batch.num.messages": _SMALL_BATCH},
    ),
    _writes("kafka-produce-1000", "librdkafka writes 1000 B values in large batches", 1000, goal=1.1, compiled=1.5),
    _java_writes(100),
    _java_writes(1000),
    _row(
        "kafka-consume-100",
        "librdkafka reads 100 B values",
        goal=0.85,
        compiled=1.0,
        cpu=None,
        opened=functools.partial(open_reads, size=100),
    ),
    _row(
        "kafka-consume-1000",
        "librdkafka reads 1000 B values",
        goal=1.2,
        compiled=1.4,
        cpu=None,
        opened=functools.partial(open_reads, size=1000),
    ),
    Row(
        "kafka-latency",
        (
            _ratio("librdkafka, one record at a time, acks=all: p50", "ms", "p50", None, lower=True),
            _ratio("librdkafka, one record at a time, acks=all: p99", "ms", "p99", 0.5, lower=True),
        ),
        open_latency,
    ),
)
