"""How far reading and writing are from what this machine can do at all: one core's loopback, copy and checksum."""

from __future__ import annotations

import functools
import multiprocessing as mp
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import google_crc32c
import numpy as np

from bench.measure import Contestant, Figures, Ratio, Row
from bench.rows.consume import by_files, by_socket
from bench.rows.produce import PARTITIONS, write_tables
from bench.sides import Bench
from bench.values import tables

_SIZE = 1000
_RECORDS = 1_000_000
_PIECE = 1 << 20
_PIECES = 2000
_spawn = mp.get_context("spawn")


def loopback(pieces: int) -> Figures:
    """GB/s from one process to another over TCP, a MiB at a time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = _spawn.Process(target=_send, args=(server.getsockname(), pieces), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            buffer = memoryview(bytearray(_PIECE))
            received = connection.recv_into(buffer)  # the first bytes: the other process has started
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
    """GB/s from memory to memory, too much of it for any cache."""
    source = np.ones(256 * _PIECE, dtype=np.uint8)
    target = np.zeros_like(source)
    rounds = max(1, pieces // 256)
    began = time.perf_counter()
    for _ in range(rounds):
        np.copyto(target, source)
    return {"gb": rounds * source.nbytes / (time.perf_counter() - began) / 1e9}


def checksum(pieces: int) -> Figures:
    """GB/s of CRC-32C over what is in the cache."""
    piece = bytes(_PIECE)
    began = time.perf_counter()
    for _ in range(pieces):
        google_crc32c.value(piece)
    return {"gb": pieces * _PIECE / (time.perf_counter() - began) / 1e9}


def writing(bench: Bench, pieces: list[Any], volume: int) -> Figures:
    """GB/s that reach the disks' page caches: every byte is written three times."""
    with bench.topic(bench.ours, partitions=PARTITIONS) as topic:
        return {"gb": 3 * volume / write_tables(bench.ours.bootstrap, topic, pieces) / 1e9}


@contextmanager
def open_limits(bench: Bench) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS, 20_000)
    pieces = 50 if bench.quick else _PIECES
    data = tables(count, _SIZE)
    with bench.topic(bench.ours, partitions=PARTITIONS) as topic:
        write_tables(bench.ours.bootstrap, topic, data)

        def gb(read: Any) -> Figures:
            return {"gb": read(bench, topic, count, _SIZE)["rate"] * _SIZE / 1e9}

        # The machine's own as well: beside the same processes as what is compared with them.
        yield [
            Contestant("loopback", functools.partial(loopback, pieces), bench.ours),
            Contestant("copy", functools.partial(copy, pieces), bench.ours),
            Contestant("CRC-32C", functools.partial(checksum, pieces), bench.ours),
            Contestant("socket", functools.partial(gb, by_socket), bench.ours),
            Contestant("files", functools.partial(gb, by_files), bench.ours),
            Contestant("writing", functools.partial(writing, bench, data, count * _SIZE), bench.ours),
        ]


ROWS = (
    Row(
        "limits",
        (
            Ratio(
                "reading 1 kB records by socket, of a core's loopback", "GB/s", ("socket", "gb"), (("loopback", "gb"),)
            ),
            Ratio("reading them from files, of a core's checksums", "GB/s", ("files", "gb"), (("CRC-32C", "gb"),)),
            Ratio(
                "writing them to three brokers, of a core's loopback", "GB/s", ("writing", "gb"), (("loopback", "gb"),)
            ),
            Ratio("a core's copy", "GB/s", ("copy", "gb")),
        ),
        open_limits,
    ),
)
