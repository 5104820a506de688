"""Reads of six partitions into Arrow from Python: over sockets, and from the files of a replica on this host.

librdkafka, by far the fastest of Kafka's clients for Python, returns Python objects. The time to convert these objects
to Arrow columns is not counted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Ratio, Row
from bench.rows.produce import PARTITIONS, write_tables
from bench.sides import Bench, Kafka
from bench.values import check_arrow, check_objects, objects, tables
from sparklog import Consumer, TopicPartition
from sparklog.client.consumer.partition_reader import PartitionReader

_RECORDS = {100: 5_000_000, 1000: 1_000_000}
_POLL_S = 10.0


def by_socket(bench: Bench, topic: str, count: int, size: int) -> Figures:
    with Consumer(bench.ours.bootstrap, topic) as consumer, CpuTime(bench.ours.pids()) as cpu:
        found: list[pa.RecordBatch] = []
        rows = 0
        began = time.perf_counter()
        while rows < count:
            batches = consumer.poll(_POLL_S)
            if not batches:
                break  # the check reports missing records
            found += batches
            rows += sum(batch.num_rows for batch in batches)
        took = time.perf_counter() - began
    check_arrow(found, count, size)
    return {"rate": count / took, "cpu_per_gb": cpu.seconds / (count * size) * 1e9}


def by_files(bench: Bench, topic: str, count: int, size: int) -> Figures:
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    ends = bench.ours.admin.list_offsets(partitions)
    found: list[pa.RecordBatch] = []
    began = time.perf_counter()
    for tp in partitions:
        with PartitionReader(bench.ours.bootstrap, tp, 0, ends[tp], local="require") as reader:
            found += [batch for _, batch in reader]
    took = time.perf_counter() - began
    check_arrow(found, count, size)
    return {"rate": count / took}


def by_librdkafka(kafka: Kafka, topic: str, count: int, size: int) -> Figures:
    from bench.kafka_clients import consume_confluent

    with CpuTime(kafka.pids()) as cpu:
        took, found = consume_confluent(kafka.bootstrap, topic, count)
    check_objects(found, count, size)
    return {"rate": count / took, "cpu_per_gb": cpu.seconds / (count * size) * 1e9}


@contextmanager
def open_consume(bench: Bench, *, size: int) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS[size], 20_000)
    with bench.topic(bench.ours, partitions=PARTITIONS) as topic:
        write_tables(bench.ours.bootstrap, topic, tables(count, size))
        contestants = [
            Contestant("socket", functools.partial(by_socket, bench, topic, count, size), bench.ours),
            Contestant("files", functools.partial(by_files, bench, topic, count, size), bench.ours),
        ]
        if bench.kafka is None:
            yield contestants
            return
        from bench.kafka_clients import produce_confluent

        with bench.topic(bench.kafka, partitions=PARTITIONS) as theirs:
            produce_confluent(bench.kafka.bootstrap, theirs, objects(count, size))
            run_theirs = functools.partial(by_librdkafka, bench.kafka, theirs, count, size)
            yield [*contestants, Contestant("confluent-kafka", run_theirs, bench.kafka)]


def _row(size: int, *, socket: float, files: float) -> Row:
    theirs = (("confluent-kafka", "rate"),)
    return Row(
        f"consume-{size}",
        (
            Ratio(f"Python into Arrow by socket, {size} B", "records/s", ("socket", "rate"), theirs, socket),
            Ratio(f"Python into Arrow from local files, {size} B", "records/s", ("files", "rate"), theirs, files),
            Ratio(
                f"Python into Arrow by socket, {size} B: broker CPU",
                "s/GB",
                ("socket", "cpu_per_gb"),
                (("confluent-kafka", "cpu_per_gb"),),
                lower=True,
            ),
        ),
        functools.partial(open_consume, size=size),
    )


ROWS = (_row(100, socket=4.0, files=5.0), _row(1000, socket=1.5, files=2.5))
