"""Kafka's Java producer for the rows: the program ``kafka-producer-perf-test`` (``ProducerPerformance``).

It writes values of random capital letters. The generator has a fixed seed, so every run writes the same values.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.measure import Lost
from sparklog import Consumer
from sparklog.cluster.embedded_zookeeper import find_java

if TYPE_CHECKING:
    from bench.sides import Side

_CLASS = "org.apache.kafka.tools.ProducerPerformance"
_TIMEOUT_S = 300
_TOTAL = re.compile(r"^(\d+) records sent, ([\d.]+) records/sec .* 99th", re.MULTILINE)
_FIRST, _LAST = b"AZ"


def produce_java(jars: Path, bootstrap: str, topic: str, count: int, size: int) -> float:
    """Produce ``count`` values with acks=all and otherwise default settings. Return the program's records/s.

    Raises:
        RuntimeError: the program failed, or it did not send all records.
    """
    command = [find_java(), "-Xmx512m", "-cp", f"{jars}/*", _CLASS, "--topic", topic, "--num-records", str(count)]
    command += ["--record-size", str(size), "--throughput", "-1"]
    command += ["--producer-props", f"bootstrap.servers={bootstrap}", "acks=all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    totals = _TOTAL.findall(done.stdout)
    if done.returncode or not totals or int(totals[-1][0]) != count:
        raise RuntimeError(f"ProducerPerformance ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return float(totals[-1][1])


def digest(values: bytes, count: int, size: int) -> int:
    """Return a number that is the same for the same values in any order. ``size`` is a multiple of 4.

    Raises:
        Lost: there are not ``count`` values of ``size`` bytes, or the values are not capital letters.
    """
    if len(values) != count * size:
        raise Lost(f"{len(values) / size:,.10g} values of {size} bytes found, {count:,} expected")
    octets = np.frombuffer(values, np.uint8)
    if octets.min() < _FIRST or octets.max() > _LAST:
        raise Lost("a value has other characters than capital letters")
    words = octets.reshape(count, size).view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) | np.uint64(1)
    mixed = (words * weights).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    return int((mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))


def read_digest(side: Side, topic: str, count: int, size: int) -> int:
    """Read a whole topic of one of the two systems, and return the digest of its values. Raises Lost."""
    if side.name == "kafka":
        from bench.kafka_clients import consume_confluent

        found = consume_confluent(side.bootstrap, topic, count)[1]
    else:
        with Consumer(side.bootstrap, topic, columns=["value"]) as consumer:
            found = consumer.to_table()["value"].to_pylist()
    if any(len(value) != size for value in found):
        raise Lost(f"a value has not {size} bytes")
    return digest(b"".join(found), count, size)
