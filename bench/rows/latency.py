"""One record at a time from Python: each is sent after the acknowledgement of the previous one. 100 B, one
partition."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bench.measure import Contestant, Figures, Ratio, Row
from bench.sides import Bench, Side
from bench.values import check_topic, objects
from sparklog import Producer

_SIZE = 100
_RECORDS, _WARM_UP = 3_000, 200


def percentiles(seconds: list[float]) -> Figures:
    """Return the percentiles in milliseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1000, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def timed(values: list[bytes], write: Callable[[bytes], object]) -> Figures:
    taken = []
    for value in values:
        began = time.perf_counter()
        write(value)
        taken.append(time.perf_counter() - began)
    return percentiles(taken[_WARM_UP:])


def ours(bootstrap: str, topic: str, values: list[bytes], *, acks: str) -> Figures:
    with Producer(bootstrap, acks=acks) as producer:
        return timed(values, lambda value: producer.send(topic, value, partition=0).result())


def confluent(bootstrap: str, topic: str, values: list[bytes], *, acks: str) -> Figures:
    from bench.kafka_clients import confluent_producer

    producer = confluent_producer(bootstrap, acks=acks)

    def write(value: bytes) -> None:
        producer.produce(topic, value, partition=0)
        if producer.flush(30):  # it does not linger, regardless of linger.ms
            raise TimeoutError("confluent-kafka: a record was not acknowledged")

    return timed(values, write)


def one_run(bench: Bench, side: Side, work: Callable[..., Figures], *, acks: str, replication_factor: int) -> Figures:
    values = objects(bench.count(_RECORDS, 100) + _WARM_UP, _SIZE)
    with bench.topic(side, partitions=1, replication_factor=replication_factor) as topic:
        figures = work(side.bootstrap, topic, values, acks=acks)
        check_topic(side, topic, len(values), _SIZE)
    return figures


def one_write_at_a_time(bench: Bench, side: Side) -> Figures:
    """Write one record at a time with librdkafka to a side's Kafka protocol, acks=all."""
    values = objects(bench.count(_RECORDS, 100) + _WARM_UP, _SIZE)
    with bench.topic(side, partitions=1, replication_factor=3) as topic:
        figures = confluent(side.kafka_bootstrap, topic, values, acks="all")
        check_topic(side, topic, len(values), _SIZE)
    return figures


@contextmanager
def open_latency(bench: Bench, *, acks: str, replication_factor: int) -> Iterator[list[Contestant]]:
    run = functools.partial(one_run, bench, acks=acks, replication_factor=replication_factor)
    contestants = [Contestant("sparklog", functools.partial(run, bench.ours, ours), bench.ours)]
    if bench.kafka is not None:
        run_theirs = functools.partial(run, bench.kafka, confluent)
        contestants.append(Contestant("confluent-kafka", run_theirs, bench.kafka))
    yield contestants


def _ratio(title: str, figure: str, goal: float | None) -> Ratio:
    return Ratio(title, "ms", ("sparklog", figure), (("confluent-kafka", figure),), goal, lower=True)


ROWS = (
    Row(
        "latency-all",
        (
            _ratio("one record at a time, acks=all: p50", "p50", 0.7),
            _ratio("one record at a time, acks=all: p99", "p99", 1.0),
        ),
        functools.partial(open_latency, acks="all", replication_factor=3),
    ),
    Row(
        "latency-1",
        (
            _ratio("one record at a time, acks=1, one replica: p50", "p50", 1.0),
            _ratio("one record at a time, acks=1, one replica: p99", "p99", None),
        ),
        functools.partial(open_latency, acks="1", replication_factor=1),
    ),
)
