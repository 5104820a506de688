"""The speed at which a broker compacts a log: one partition of 100 B values, of which the cleaner keeps a tenth.

The log is written first, and compacted once, after its topic's policy is changed. The time is the duration of the
leader's cleaner, which has no other work: sparklog measures this duration, and Kafka writes it to a log file. For
comparison, the row has the time in which the machine copies the log's bytes (read, write, fsync).
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.kafka import wait_for
from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.sides import Bench, Kafka, Sparklog
from bench.values import DIGITS, tables
from sparklog import Consumer, Producer

_SIZE = 100
_RECORDS = 4_000_000
#: The average number of records of one key. Keys are 13 bytes.
_OF_A_KEY = 10
_KEY = b"key %09d"
_SEGMENTS = 8
_TIMEOUT_S = 180.0
_FULL = {"cleanup.policy": "delete", "retention.ms": "-1", "min.insync.replicas": "1"}
_COMPACT = {"cleanup.policy": "compact"}
Keys = npt.NDArray[np.int64]


class Cleaned(NamedTuple):
    """The work of a cleaner: the records and bytes that it processed, and its duration."""

    records: int
    stored_bytes: int
    seconds: float

    def figures(self) -> Figures:
        return {
            "mb": self.records * (_SIZE + len(_KEY % 0)) / self.seconds / 1e6,
            "stored_mb": self.stored_bytes / self.seconds / 1e6,
        }


class Work(NamedTuple):
    """The records to write. ``keys`` has the key of each record, by the number in its value."""

    bench: Bench
    keys: Keys

    @property
    def segment_bytes(self) -> str:
        """Return the segment size. Kafka accepts no less than a MiB."""
        return str(max(1 << 20 if self.bench.kafka else 1 << 16, len(self.keys) * _SIZE // _SEGMENTS))

    def check(self, found: Iterator[tuple[Keys, Keys]]) -> None:
        """Check the keys and the values' numbers ``found`` in the log, in their order. Raises Lost."""
        newest, left = np.full(len(self.keys), -1), 0
        for keys, numbers in found:
            newest[keys] = numbers
            left += len(keys)
        expected = np.full(len(self.keys), -1)
        expected[self.keys] = np.arange(len(self.keys))
        if not np.array_equal(newest, expected):
            raise Lost(f"{int((newest != expected).sum()):,} keys have another value than their last one")
        if left > len(self.keys) // 2:
            raise Lost(f"{left:,} of {len(self.keys):,} records are left: the log was not compacted")


# --- sparklog ---


def clean_ours(work: Work) -> Figures:
    side = work.bench.ours
    config = {**_FULL, "segment.bytes": work.segment_bytes}
    with work.bench.topic(side, partitions=1, replication_factor=1, config=config) as topic:
        # There are several segments: a single one would be active and never cleaned.
        _write_ours(side.bootstrap, topic, work.keys, batch_bytes=min(1 << 20, int(work.segment_bytes) // 4))
        before = _counted(side)
        side.admin.alter_topic(topic, _COMPACT)
        # The cleaner takes all segments except the active one, in one run, or on a busy machine in several, as they are
        # sealed.
        dirty = before["cleaner.records"] + len(work.keys) * (_SEGMENTS - 2) // _SEGMENTS
        wait_for(lambda: _counted(side)["cleaner.records"] >= dirty, _TIMEOUT_S, f"{topic} to be cleaned")
        after = _counted(side)
        work.check(_read_ours(side.bootstrap, topic))
    counted = {name: after[name] - before[name] for name in after}
    return Cleaned(counted["cleaner.records"], counted["cleaner.bytes.before"], counted["cleaner.ms"] / 1e3).figures()


def _write_ours(bootstrap: str, topic: str, keys: Keys, *, batch_bytes: int) -> None:
    with Producer(bootstrap, batch_bytes=batch_bytes) as producer:
        at = 0
        for table in tables(len(keys), _SIZE):
            some = pa.array([_KEY % key for key in keys[at : at + len(table)].tolist()], pa.binary())
            producer.write(topic, table.add_column(0, "key", some))
            at += len(table)


def _counted(side: Sparklog) -> dict[str, int]:
    """Return the sum of all brokers' counters. Only one broker has a log to clean."""
    names = ("cleaner.records", "cleaner.bytes.before", "cleaner.ms")
    found = [broker.counters for broker in side.admin.describe_brokers()]
    return {name: sum(counters.get(name, 0) for counters in found) for name in names}


def _read_ours(bootstrap: str, topic: str) -> Iterator[tuple[Keys, Keys]]:
    with Consumer(bootstrap, topic, columns=["key", "value"]) as consumer:
        for batch in consumer.to_table().to_batches():
            yield _keys_of(batch["key"].to_pylist()), _numbers_of(batch["value"].to_pylist())


def _keys_of(keys: list[bytes]) -> Keys:
    return np.array([int(key[-9:]) for key in keys], np.int64)


def _numbers_of(values: list[bytes]) -> Keys:
    return np.array([int(value[:DIGITS]) for value in values], np.int64)


# --- Kafka ---

_SAID = re.compile(
    r"cleaned log (?P<log>\S+) .*?([\d.,]+) MB of log processed in (?P<s>[\d.,]+) seconds.*?"
    r"Start size: (?P<mb>[\d.,]+) MB \((?P<records>[\d,]+) messages\)",
    re.DOTALL,
)


def clean_kafka(work: Work) -> Figures:
    from bench.kafka_clients import confluent_producer

    side = work.bench.kafka
    assert side is not None
    config = {**_FULL, "segment.bytes": work.segment_bytes}
    with work.bench.topic(side, partitions=1, replication_factor=1, config=config) as topic:
        producer = confluent_producer(side.bootstrap, **{"linger.ms": 5})
        for table in tables(len(work.keys), _SIZE):
            for value in table["value"].to_pylist():
                producer.produce(topic, value, _KEY % work.keys[int(value[:DIGITS])])
            producer.flush(_TIMEOUT_S)
        side.alter(topic, _COMPACT)
        told: list[Cleaned] = []

        def cleaned() -> bool:
            told[:] = _told(side.cluster.words(), f"{topic}-0")
            return bool(told)

        wait_for(cleaned, _TIMEOUT_S, f"Kafka to clean {topic}", every_s=0.5)
        work.check(_read_kafka(side, topic))
    return told[0].figures()


def _told(text: str, log: str) -> list[Cleaned]:
    return [
        Cleaned(
            int(found["records"].replace(",", "")),
            int(float(found["mb"].replace(",", "")) * (1 << 20)),
            max(0.05, float(found["s"].replace(",", ""))),
        )
        for found in _SAID.finditer(text)
        if found["log"] == log
    ]


def _read_kafka(side: Kafka, topic: str) -> Iterator[tuple[Keys, Keys]]:
    from confluent_kafka import TopicPartition

    from bench.kafka_clients import confluent_consumer

    consumer = confluent_consumer(side.bootstrap, topic)
    try:
        end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1]
        at, heard = 0, time.monotonic()
        while at < end and time.monotonic() - heard < _TIMEOUT_S:
            found = consumer.consume(500, 1.0)
            if found:
                at, heard = found[-1].offset() + 1, time.monotonic()
                yield _keys_of([one.key() for one in found]), _numbers_of([one.value() for one in found])
    finally:
        consumer.close()


# --- the bound ---


def copy(scratch: Path, size: int) -> Figures:
    """Read a file in the page cache, and write its bytes durably to another file."""
    source, target = scratch / "source", scratch / "target"
    if not source.exists():
        source.write_bytes(os.urandom(1 << 20) * (size >> 20 or 1))
    began = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(1 << 22):
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    took = time.perf_counter() - began
    target.unlink()
    return {"stored_mb": source.stat().st_size / took / 1e6}


@contextmanager
def open_compaction(bench: Bench) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS, 20_000)
    work = Work(bench, np.random.default_rng(1).integers(0, count // _OF_A_KEY, count))
    contestants: list[tuple[str, Callable[[], Figures]]] = [("sparklog", functools.partial(clean_ours, work))]
    if bench.kafka is not None:
        contestants.append(("kafka", functools.partial(clean_kafka, work)))
    contestants.append(("copy", functools.partial(copy, bench.scratch(), count * _SIZE)))
    yield [Contestant(name, run) for name, run in contestants]


ROWS = (
    Row(
        "compaction",
        (
            Ratio(
                "a log of 100 B values compacted, keys and values, MB/s",
                "MB/s",
                ("sparklog", "mb"),
                (("kafka", "mb"),),
                goal=1.0,
            ),
            Ratio(
                "the same, bytes of the log, of what the machine copies",
                "MB/s",
                ("sparklog", "stored_mb"),
                (("copy", "stored_mb"),),
            ),
        ),
        open_compaction,
        at_most=3,
    ),
)
