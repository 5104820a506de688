"""The time until a broker is in sync again after SIGKILL, with all of its data and with none: 0.5 GB in six partitions.

The time begins with the start of the process and ends when the broker is in sync for all partitions. No client writes
meanwhile. Before the start, the leaders have removed the broker from the ISRs: ``bench/failover`` measures how long
that takes.
"""

from __future__ import annotations

import functools
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from bench.kafka import BROKERS, wait_for
from bench.measure import Contestant, Figures, Ratio, Row
from bench.rows.produce import PARTITIONS, write_tables
from bench.sides import Bench, Kafka, Sparklog
from bench.values import check_topic, objects, tables

_SIZE = 1000
_RECORDS = 500_000
_TIMEOUT_S = 120.0


def restart_ours(side: Sparklog, topic: str, *, empty: bool) -> float:
    """Restart a broker; with ``empty``, delete its data first. Return the time in seconds until it is in sync."""
    broker_id = max(side.cluster.slots)
    if empty:
        side.cluster.stop_broker(broker_id)
        shutil.rmtree(side.cluster.slots[broker_id].log_dir)
    else:
        side.cluster.kill(broker_id, signal.SIGKILL)
    wait_for(lambda: _in_sync(side, topic, 2), _TIMEOUT_S, "the in-sync sets to shrink")
    began = time.perf_counter()
    side.cluster.start_broker(broker_id)
    wait_for(lambda: _in_sync(side, topic, 3), _TIMEOUT_S, f"broker {broker_id} to be in sync", every_s=0.02)
    return time.perf_counter() - began


def _in_sync(side: Sparklog, topic: str, replicas: int) -> bool:
    return all(len(part.isr) == replicas for part in side.cluster.metadata(0, topic).topics[0].partitions)


def restart_kafka(side: Kafka, topic: str, *, empty: bool) -> float:
    """Restart a broker; with ``empty``, delete its data first. Return the time in seconds until it is in sync."""
    node = BROKERS[-1]
    if empty:
        side.cluster.stop_broker(node)
        shutil.rmtree(side.cluster.data(node))
        side.cluster.format(node)
    else:
        side.cluster.kill(node)
    wait_for(lambda: side.in_sync(topic, 2), _TIMEOUT_S, "Kafka's in-sync sets to shrink")
    began = time.perf_counter()
    side.cluster.launch_broker(node)
    wait_for(lambda: side.in_sync(topic, 3), _TIMEOUT_S, f"Kafka's broker {node} to be in sync", every_s=0.02)
    return time.perf_counter() - began


def one_run(restart: Callable[[], float], check: Callable[[], None], volume: int) -> Figures:
    took = restart()
    check()
    return {"seconds": took, "mb": volume / took / 1e6}


@contextmanager
def open_recovery(bench: Bench, *, empty: bool) -> Iterator[list[Contestant]]:
    count = bench.count(_RECORDS, 5_000)
    with ExitStack() as ends:
        sides: list[tuple[Sparklog | Kafka, str, Callable[[], float]]] = []
        topic = ends.enter_context(bench.topic(bench.ours, partitions=PARTITIONS))
        write_tables(bench.ours.bootstrap, topic, tables(count, _SIZE))
        sides.append((bench.ours, topic, functools.partial(restart_ours, bench.ours, topic, empty=empty)))
        if bench.kafka is not None:
            from bench.kafka_clients import produce_confluent

            topic = ends.enter_context(bench.topic(bench.kafka, partitions=PARTITIONS))
            produce_confluent(bench.kafka.bootstrap, topic, objects(count, _SIZE))
            sides.append((bench.kafka, topic, functools.partial(restart_kafka, bench.kafka, topic, empty=empty)))
        yield [
            Contestant(
                side.name,
                functools.partial(
                    one_run, restart, functools.partial(check_topic, side, name, count, _SIZE), count * _SIZE
                ),
            )
            for side, name, restart in sides
        ]


def _row(name: str, title: str, goal: float, *, empty: bool) -> Row:
    return Row(
        name,
        (Ratio(title, "MB/s", ("sparklog", "mb"), (("kafka", "mb"),), goal),),
        functools.partial(open_recovery, empty=empty),
        warm_up=False,
    )


ROWS = (
    _row("recovery", "half a GB after kill -9, from start to in sync", 1.0, empty=False),
    _row("catch-up", "half a GB copied to an empty follower, from start to in sync", 2.0, empty=True),
)
