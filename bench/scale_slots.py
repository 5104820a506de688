"""The throughput of two broker slots of a host, compared with one: K slots should do K times the work of one.

A broker is one process with one event loop and uses one core; a client uses another. On a machine with few cores the
kernel limits each broker to a share of a core (by its own control group, which needs root), so that two of them and
their client fit: two slots must do twice the work of one slot with the same share. With replication factor 1 and acks=1
nothing is replicated, and the brokers are independent.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from bench.machine import CpuTime, Others
from sparklog import Admin, Producer
from sparklog.testing.process_cluster import ProcessCluster

_VALUE = b"x" * 1000
_ROWS = 1_000
_PARTITIONS = 6
_PERIOD_US = 20_000
_ROUNDS = 3


class Slots(NamedTuple):
    """The medians of the throughput (megabytes of values per second), and of a broker's core seconds per gigabyte."""

    share: float
    one: float
    two: float
    one_cpu: float
    two_cpu: float
    others: float


class _NoGroups(Exception):
    """A refusal of the kernel to let this process create control groups."""


def measure(share: float, megabytes: int) -> Slots | None:
    """Measure with a ``share`` of a core for each broker. Return None if this machine cannot limit brokers."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        clusters = {slots: stack.enter_context(ProcessCluster(slots)) for slots in rates}
        pids = [cluster.pid(broker) for cluster in clusters.values() for broker in cluster.slots]
        try:
            stack.enter_context(_all_limited(pids, share))
        except _NoGroups:
            return None
        others = stack.enter_context(Others())
        for number in range(1 + _ROUNDS):
            for slots, cluster in clusters.items():
                rate, seconds = _write(cluster, f"t{number}", _PARTITIONS * slots, megabytes * slots)
                if number > 0:  # the first round makes connections
                    rates[slots].append(rate)
                    cpu[slots].append(seconds)
    one, two, one_cpu, two_cpu = (statistics.median(runs) for runs in (rates[1], rates[2], cpu[1], cpu[2]))
    return Slots(share, one, two, one_cpu, two_cpu, others.cores)


def text(slots: Slots | None) -> str:
    if slots is None:
        return "broker slots: not measured, control groups for processor time take root"
    rows = (
        ("one slot", f"{slots.one:.0f} MB/s", f"{slots.one_cpu:.2f} s"),
        ("two slots", f"{slots.two:.0f} MB/s", f"{slots.two_cpu:.2f} s"),
        ("two against one", f"{slots.two / slots.one:.2f}x", f"{slots.two_cpu / slots.one_cpu:.2f}x"),
    )
    head = f"| each slot {slots.share:g} of a core; others {slots.others:.2f} cores | written | processor for a GB |"
    return "\n".join([head, "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _write(cluster: ProcessCluster, topic: str, partitions: int, megabytes: int) -> tuple[float, float]:
    """Write values; return MB/s, and the seconds of the brokers' processors for a GB."""
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=partitions, replication_factor=1, config={"min.insync.replicas": 1})
    table = pa.table({"value": pa.array([_VALUE] * _ROWS, pa.binary())})
    with Producer(cluster.bootstrap, acks=1) as producer:
        began = time.perf_counter()
        with CpuTime([cluster.pid(broker) for broker in cluster.slots]) as cpu:
            for number in range(megabytes):
                producer.write(topic, table, partition=number % partitions)
            producer.flush(120.0)
        took = time.perf_counter() - began
    return megabytes / took, cpu.seconds / megabytes * 1000


@contextlib.contextmanager
def _all_limited(pids: Sequence[int], share: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for pid in pids:
            stack.enter_context(_limited(pid, share))
        yield


@contextlib.contextmanager
def _limited(pid: int, share: float) -> Iterator[None]:
    """Put a process and its threads into their own control group. Source: cgroups(7)."""
    quota_us = round(share * _PERIOD_US)
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    root, settings = (
        (first, {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us}"})
        if first.exists()
        else (second, {"cpu.max": f"{quota_us} {_PERIOD_US}"})
    )
    group = root / f"sparklog-bench-{os.getpid()}-{pid}"
    try:
        group.mkdir()
        for name, value in settings.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise _NoGroups from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()
