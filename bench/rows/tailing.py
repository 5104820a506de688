"""What one more reader at the end of a topic costs the brokers: 1 kB records flow steadily, and 1 or 3 readers follow.

Each reader is a process of its own. The difference in processor time of all brokers, divided by the two readers more
and by what each of them was sent.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.paced import Place
from bench.sides import Bench, Side
from bench.values import objects, tables
from sparklog import Consumer, Producer

_SIZE = 1000
_RECORDS = 400_000
_MB_PER_S = 40
_FEW, _MANY = 1, 3
_SILENT_S = 30.0
_spawn = mp.get_context("spawn")


def brokers_with(bench: Bench, side: Side, readers: int, pieces: list[Any], count: int) -> float:
    """Seconds of processor time that the brokers take while ``pieces`` flow past so many readers."""
    with ExitStack() as ends:
        topic = ends.enter_context(bench.topic(side, partitions=6))
        ready: Any = _spawn.Semaphore(0)
        results: Any = _spawn.Queue()
        for _ in range(readers):
            process = _spawn.Process(
                target=_tail, args=(Place(side.name, side.bootstrap, topic), count, ready, results)
            )
            process.start()
            ends.callback(_end, process)
        for _ in range(readers):
            if not ready.acquire(timeout=_SILENT_S):
                raise TimeoutError("a reader has not become ready")
        with CpuTime(side.pids()) as cpu:
            _flow(side, topic, pieces)
            for found in (results.get(timeout=4 * _SILENT_S) for _ in range(readers)):
                if found != count:
                    raise Lost(f"{side.name}: a reader saw {found:,} records, {count:,} expected")
        return cpu.seconds


def _flow(side: Side, topic: str, pieces: list[Any]) -> None:
    """Write piece by piece at a steady pace; returns when all is acknowledged."""
    pause_s = len(pieces[0]) * _SIZE / (_MB_PER_S * 1e6)
    due = time.monotonic()
    if side.name == "kafka":
        from bench.kafka_clients import confluent_producer

        theirs = confluent_producer(side.bootstrap)
        for piece in pieces:
            for value in piece:
                theirs.produce(topic, value)
            theirs.poll(0)
            due += pause_s
            time.sleep(max(0.0, due - time.monotonic()))
        if theirs.flush(_SILENT_S):
            raise TimeoutError("confluent-kafka: not everything was acknowledged")
        return
    with Producer(side.bootstrap) as producer:
        for piece in pieces:
            producer.write(topic, piece)
            due += pause_s
            time.sleep(max(0.0, due - time.monotonic()))


def _tail(place: Place, count: int, ready: Any, results: Any) -> None:
    """In a process of its own: read until ``count`` records have come, or nothing comes any more."""
    rows, heard = 0, time.monotonic()
    if place.side == "kafka":
        from bench.kafka_clients import confluent_consumer

        consumer = confluent_consumer(place.bootstrap, place.topic)
        consumer.poll(3.0)  # the group forms meanwhile
        ready.release()
        while rows < count and time.monotonic() - heard < _SILENT_S:
            found = len(consumer.consume(500, 0.1))
            rows, heard = rows + found, time.monotonic() if found else heard
        consumer.close()
    else:
        with Consumer(place.bootstrap, place.topic) as ours:
            ready.release()
            while rows < count and time.monotonic() - heard < _SILENT_S:
                came = sum(batch.num_rows for batch in ours.poll(0.1))
                rows, heard = rows + came, time.monotonic() if came else heard
    results.put(rows)


def _end(process: Any) -> None:
    process.terminate()
    process.join(_SILENT_S)


def one_run(bench: Bench, side: Side, pieces: list[Any], count: int) -> Figures:
    few = brokers_with(bench, side, _FEW, pieces, count)
    many = brokers_with(bench, side, _MANY, pieces, count)
    volume = count * _SIZE
    more = (many - few) / (_MANY - _FEW)
    # A stream of 100 MB/s takes volume / 100 MB seconds.
    cores = more / (volume / 1e8)
    return {"cores": cores, "percent": 100 * more / few, "base_cores": few / (volume / 1e8)}


@contextmanager
def open_tailing(bench: Bench) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS, 10_000)
    step = 2_000
    ours = [piece for table in tables(count, _SIZE) for piece in _cut(table, step)]
    contestants = [Contestant("sparklog", functools.partial(one_run, bench, bench.ours, ours, count))]
    if bench.kafka is not None:
        values = objects(count, _SIZE)
        theirs = [values[start : start + step] for start in range(0, count, step)]
        contestants.append(Contestant("kafka", functools.partial(one_run, bench, bench.kafka, theirs, count)))
    yield contestants


def _cut(table: Any, rows: int) -> list[Any]:
    return [table.slice(start, rows) for start in range(0, table.num_rows, rows)]


ROWS = (
    Row(
        "tailing",
        (
            Ratio(
                "one more group at the end of a topic: broker CPU, of what writing takes",
                "%",
                ("sparklog", "percent"),
                goal=10.0,
                lower=True,
            ),
            Ratio(
                "one more group, broker CPU at 100 MB/s",
                "cores",
                ("sparklog", "cores"),
                (("kafka", "cores"),),
                lower=True,
            ),
        ),
        open_tailing,
    ),
)
