"""Reads and writes of both systems, compared with the limits of this machine.

The limits are one core's rates for loopback TCP, copies in memory, writes to the page cache, and checksums.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import google_crc32c
import numpy as np

from bench.measure import Contestant, Figures, Ratio, Row
from bench.rows.consume import by_files, by_librdkafka, by_socket
from bench.rows.produce import PARTITIONS, write_tables
from bench.sides import Bench
from bench.values import objects, tables

_SIZE = 1000
_RECORDS = 1_000_000
_PIECE = 1 << 20
_PIECES = 2000
_spawn = mp.get_context("spawn")


def loopback(pieces: int) -> Figures:
    """Return the GB/s from one process to another over TCP, a MiB at a time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = _spawn.Process(target=_send, args=(server.getsockname(), pieces), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            buffer = memoryview(bytearray(_PIECE))
            received = connection.recv_into(buffer)  # the first bytes show that the other process has started
            began = time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            took = time.perf_counter() - began
        sender.join()
    return {"gb": received / took / 1e9}


def _send(address: Any, pieces: int) -> None:
    piece = bytes(_PIECE)
    with socket.create_connection(address) as connection:
        for _ in range(pieces):
            connection.sendall(piece)


def copy(pieces: int) -> Figures:
    """Return the GB/s from memory to memory, with too much data for any cache."""
    source = np.ones(256 * _PIECE, dtype=np.uint8)
    target = np.zeros_like(source)
    rounds = max(1, pieces // 256)
    began = time.perf_counter()
    for _ in range(rounds):
        np.copyto(target, source)
    return {"gb": rounds * source.nbytes / (time.perf_counter() - began) / 1e9}


def page_cache(bench: Bench, pieces: int) -> Figures:
    """Return the GB/s from uncached memory to the page cache of a new file, on the brokers' disk."""
    source = memoryview(b"\1" * (256 * _PIECE))
    with tempfile.TemporaryFile(dir=bench.scratch()) as file:
        began = time.perf_counter()
        for number in range(pieces):
            at = number % 256 * _PIECE
            os.pwrite(file.fileno(), source[at : at + _PIECE], number * _PIECE)
        return {"gb": pieces * _PIECE / (time.perf_counter() - began) / 1e9}


def checksum(pieces: int) -> Figures:
    """Return the GB/s of CRC-32C over cached data."""
    piece = bytes(_PIECE)
    began = time.perf_counter()
    for _ in range(pieces):
        google_crc32c.value(piece)
    return {"gb": pieces * _PIECE / (time.perf_counter() - began) / 1e9}


def writing(bench: Bench, pieces: list[Any], volume: int) -> Figures:
    """Return the GB/s that brokers write to the page cache. Each byte counts three times, once for each replica."""
    with bench.topic(bench.ours, partitions=PARTITIONS) as topic:
        return {"gb": 3 * volume / write_tables(bench.ours.bootstrap, topic, pieces) / 1e9}


@contextmanager
def open_kafka(bench: Bench, count: int) -> Iterator[list[Contestant]]:
    """Open the contestants of Kafka's fastest client for Python. Without Kafka there are no contestants."""
    if bench.kafka is None:
        yield []
        return
    from bench.kafka_clients import produce_confluent

    kafka, values, volume = bench.kafka, objects(count, _SIZE), count * _SIZE

    def reading(topic: str) -> Figures:
        return {"gb": by_librdkafka(kafka, topic, count, _SIZE)["rate"] * _SIZE / 1e9}

    def writing() -> Figures:
        with bench.topic(kafka, partitions=PARTITIONS) as topic:
            return {"gb": 3 * volume / produce_confluent(kafka.bootstrap, topic, values) / 1e9}

    with bench.topic(kafka, partitions=PARTITIONS) as topic:
        produce_confluent(kafka.bootstrap, topic, values)
        yield [
            Contestant("Kafka's socket", functools.partial(reading, topic), kafka),
            Contestant("Kafka's writing", writing, kafka),
        ]


@contextmanager
def open_limits(bench: Bench) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS, 20_000)
    pieces = 50 if bench.quick else _PIECES
    data = tables(count, _SIZE)
    with bench.topic(bench.ours, partitions=PARTITIONS) as topic, open_kafka(bench, count) as kafkas:
        write_tables(bench.ours.bootstrap, topic, data)

        def gb(read: Any) -> Figures:
            return {"gb": read(bench, topic, count, _SIZE)["rate"] * _SIZE / 1e9}

        # The machine's own limits run as contestants too, so that the same processes exist meanwhile.
        yield [
            Contestant("loopback", functools.partial(loopback, pieces), bench.ours),
            Contestant("copy", functools.partial(copy, pieces), bench.ours),
            Contestant("page cache", functools.partial(page_cache, bench, pieces), bench.ours),
            Contestant("CRC-32C", functools.partial(checksum, pieces), bench.ours),
            Contestant("socket", functools.partial(gb, by_socket), bench.ours),
            Contestant("files", functools.partial(gb, by_files), bench.ours),
            Contestant("writing", functools.partial(writing, bench, data, count * _SIZE), bench.ours),
            *kafkas,
        ]


def _of(words: str, whose: str, limit: str, limits: str) -> Ratio:
    return Ratio(f"{words}, of a core's {limits}", "GB/s", (whose, "gb"), ((limit, "gb"),))


ROWS = (
    Row(
        "limits",
        (
            _of("reading 1 kB records by socket", "socket", "loopback", "loopback"),
            _of("Kafka: reading 1 kB records", "Kafka's socket", "loopback", "loopback"),
            _of("reading them from files", "files", "CRC-32C", "checksums"),
            _of("writing them to three brokers", "writing", "loopback", "loopback"),
            _of("Kafka: writing them to three brokers", "Kafka's writing", "loopback", "loopback"),
            _of("writing them to three brokers", "writing", "page cache", "copies to the page cache"),
            _of("Kafka: writing them to three brokers", "Kafka's writing", "page cache", "copies to the page cache"),
            Ratio("a core's copy", "GB/s", ("copy", "gb")),
        ),
        open_limits,
    ),
)
