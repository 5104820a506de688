"""The rows that compare Kafka's clients on sparklog's Kafka listener with the same clients on Kafka.

Every contestant uses librdkafka (confluent-kafka) with the same settings, so a row compares only the brokers. Topics
have six partitions, and writers use acks=all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Ratio, Row
from bench.rows.latency import one_write_at_a_time
from bench.rows.produce import PARTITIONS
from bench.sides import Bench, Side
from bench.values import check_objects, check_topic, objects

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


def _ratio(title: str, unit: str, figure: str, goal: float | None, *, lower: bool = False) -> Ratio:
    return Ratio(title, unit, ("sparklog", figure), (("kafka", figure),), goal, lower=lower)


def _row(name: str, words: str, *, goal: float, cpu: float | None, opened: Any) -> Row:
    return Row(
        name,
        (
            _ratio(words, "records/s", "rate", goal),
            _ratio("the same: broker CPU for a record", "us", "cpu", cpu, lower=True),
        ),
        opened,
    )


def _writes(name: str, words: str, size: int, goal: float, **settings: Any) -> Row:
    opened = functools.partial(open_writes, size=size, settings=settings)
    return _row(name, words, goal=goal, cpu=0.6, opened=opened)


ROWS = (
    _writes("kafka-produce-100", "librdkafka writes 100 B values in large batches", 100, 1.5),
    _writes(
        "kafka-produce-small",
        f"librdkafka writes 100 B values, {_SMALL_BATCH} a batch",
        100,
        3.0,
        **{"batch.num.messages": _SMALL_BATCH},
    ),
    _writes("kafka-produce-1000", "librdkafka writes 1000 B values in large batches", 1000, 1.1),
    _row(
        "kafka-consume-100",
        "librdkafka reads 100 B values",
        goal=0.85,
        cpu=None,
        opened=functools.partial(open_reads, size=100),
    ),
    _row(
        "kafka-consume-1000",
        "librdkafka reads 1000 B values",
        goal=1.2,
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
