"""Writes from Python: whole tables, and record by record. Six partitions, acks=all."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Ratio, Row
from bench.sides import Bench, Side
from bench.values import check_topic, objects, tables
from sparklog import Producer

PARTITIONS = 6
_SEND_ROWS, _SEND_SIZE = 300_000, 100
_TABLES = {100: 2_000_000, 1000: 500_000}


def write_tables(bootstrap: str, topic: str, pieces: Sequence[Any]) -> float:
    """Write the tables. Return the seconds until all rows are acknowledged."""
    with Producer(bootstrap) as producer:
        began = time.perf_counter()
        for piece in pieces:
            producer.write(topic, piece)
        producer.flush()
        return time.perf_counter() - began


def send_each(bootstrap: str, topic: str, values: Sequence[bytes]) -> float:
    with Producer(bootstrap) as producer:
        began = time.perf_counter()
        for value in values:
            producer.send(topic, value)
        producer.flush()
        return time.perf_counter() - began


def one_write(
    bench: Bench, side: Side, work: Callable[[str, str, Any], float], data: Any, *, count: int, size: int
) -> Figures:
    """Write to a new topic, then read and compare the values."""
    with bench.topic(side, partitions=PARTITIONS) as topic:
        with CpuTime(side.pids()) as cpu:
            took = work(side.bootstrap, topic, data)
        stored = side.disk_bytes(topic)
        check_topic(side, topic, count, size)
    volume = count * size
    return {"rate": count / took, "cpu_per_gb": cpu.seconds / volume * 1e9, "disk": stored / volume}


@contextmanager
def open_tables(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    count = bench.count(_TABLES[size], 20_000)
    run = functools.partial(one_write, bench, count=count, size=size)
    run_ours = functools.partial(run, bench.ours, write_tables, tables(count, size))
    contestants = [Contestant("sparklog", run_ours, bench.ours)]
    if bench.kafka is not None:
        from bench.kafka_clients import produce_confluent

        values = objects(count, size)
        run_theirs = functools.partial(run, bench.kafka, produce_confluent, values)
        contestants.append(Contestant("confluent-kafka", run_theirs, bench.kafka))
    yield contestants


@contextmanager
def open_send(bench: Bench) -> Iterator[list[Contestant]]:
    count = bench.count(_SEND_ROWS, 5_000)
    values = objects(count, _SEND_SIZE)
    run = functools.partial(one_write, bench, data=values, count=count, size=_SEND_SIZE)
    contestants = [Contestant("sparklog", functools.partial(run, bench.ours, send_each), bench.ours)]
    if bench.kafka is not None:
        from bench.kafka_clients import produce_aiokafka, produce_confluent

        tuned = functools.partial(produce_aiokafka, linger_ms=5, max_batch_size=262_144)
        contestants += [
            Contestant("aiokafka", functools.partial(run, bench.kafka, tuned), bench.kafka),
            Contestant("confluent-kafka", functools.partial(run, bench.kafka, produce_confluent), bench.kafka),
        ]
    yield contestants


def _tables(size: int, goal: float) -> Row:
    def against(figure: str) -> dict[str, Any]:
        return {"ours": ("sparklog", figure), "against": (("confluent-kafka", figure),)}

    words = f"Python, tables of {size} B values"
    return Row(
        f"tables-{size}",
        (
            Ratio(f"{words}", "records/s", goal=goal, **against("rate")),
            Ratio(f"{words}: broker CPU", "s/GB", lower=True, **against("cpu_per_gb")),
            Ratio(f"{words}: bytes on disk, three replicas", "B/B", lower=True, **against("disk")),
        ),
        functools.partial(open_tables, size=size),
    )


ROWS = (
    _tables(100, 5.0),
    _tables(1000, 3.0),
    Row(
        "send",
        (
            Ratio(
                "send() of 100 B records, one by one", "records/s", ("sparklog", "rate"), (("aiokafka", "rate"),), 3.0
            ),
            Ratio(
                "the same, against librdkafka", "records/s", ("sparklog", "rate"), (("confluent-kafka", "rate"),), 0.5
            ),
        ),
        open_send,
    ),
)
