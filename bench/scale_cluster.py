"""The cost of many partitions for three brokers, in several pieces of work on one cluster.

Three broker processes, the controller and ZooKeeper in separate processes, replication factor 3: every broker hosts
all partitions and leads a third. ``measure`` starts a cluster, runs all pieces on it in order, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pyarrow as pa

from bench.failover import Options, Scene, controlled_stop, interval_s
from bench.machine import CpuTime, Others
from bench.steady_stream import StreamProcess
from sparklog import Admin, Producer
from sparklog.errors import BrokerError
from sparklog.protocol.messages import Metadata, MetadataReply
from sparklog.testing.process_cluster import ProcessCluster, wait_until

#: Longer than any measurement here. Slower work has no figure.
_TIMEOUT_S = 180.0
_TOPIC, _FEW = "many", "few"
_VALUE = b"x" * 100
#: A batch of the comparison between many partitions and few: 10 kB.
_BATCH_ROWS = 100
_FEW_PARTITIONS = 6
_BARE_PART = 10
_ROUNDS = 3
_POLL_S = 0.1
#: By then all work that records cause later is done: the check of lagging replicas after ten seconds, and retention
#: checks after at most thirty.
_SETTLE_S = 40.0
_IDLE_S = 60.0

Figures = dict[str, float]


class Scale:
    """A cluster with one topic of many partitions. Owner: ``measure``, which calls the methods in their order."""

    def __init__(self, cluster: ProcessCluster, partitions: int, *, patience: float, batches: int) -> None:
        """Create the scale; ``patience`` is the share of the usual time for which idle brokers are watched."""
        self.cluster = cluster
        self.partitions = partitions
        self._patience = patience
        self._batches = batches

    def create(self) -> Figures:
        """Create the topic, and wait until every broker leads its share and sees all replicas in sync."""
        config = {"min.insync.replicas": 2}
        began = time.monotonic()
        with Admin(self.cluster.bootstrap, timeout_s=_TIMEOUT_S) as admin:
            admin.create_topic(_TOPIC, partitions=self.partitions, replication_factor=3, config=config)
        answered = time.monotonic()
        slots = self.cluster.slots.values()
        _wait(lambda: sum(int(slot.command("status")["leading"]) for slot in slots) >= self.partitions, "leaders")
        _wait(lambda: all(self._in_sync(broker) == self.partitions for broker in self.cluster.slots), "in-sync sets")
        return {"created_s": time.monotonic() - began, "create_answered_s": answered - began}

    def one_record_each(self) -> Figures:
        """Send one record with acks=all to each partition, all at the same time.

        ``bare_files_s`` is the time in which a program creates the same directories and files in sequence.
        """
        bare_s = _bare_files(self.cluster.base_dir / "bare", self.partitions * len(self.cluster.slots))
        with Producer(self.cluster.bootstrap, delivery_timeout_s=_TIMEOUT_S) as producer:
            began = time.monotonic()
            sent = [producer.send(_TOPIC, _VALUE, partition=number) for number in range(self.partitions)]
            for future in sent:
                future.result(_TIMEOUT_S)
            return {"one_each_s": time.monotonic() - began, "bare_files_s": bare_s}

    def idle(self) -> Figures:
        """Measure the idle brokers, and return the figures of the busiest one.

        ``settling_cpu_s`` is the processor time of the remaining work for earlier records, without that of the constant
        work.
        """
        settle_s, idle_s = _SETTLE_S * self._patience, _IDLE_S * self._patience
        settling, idle = self._taken(settle_s), self._taken(idle_s)
        pids = [self.cluster.pid(broker) for broker in self.cluster.slots]
        once = [all_of_it - always / idle_s * settle_s for all_of_it, always in zip(settling, idle, strict=True)]
        return {
            "settling_cpu_s": max(0.0, *once),
            "idle_percent": max(idle) / idle_s * 100,
            "resident_mb": max(_resident_bytes(pid) for pid in pids) / 1e6,
            "open_files": max(_open_files(pid) for pid in pids),
        }

    def _taken(self, seconds: float) -> list[float]:
        """Return the processor time of each broker during an idle wait of ``seconds``."""
        with contextlib.ExitStack() as stack:
            times = [stack.enter_context(CpuTime([self.cluster.pid(broker)])) for broker in self.cluster.slots]
            time.sleep(seconds)
        return [cpu.seconds for cpu in times]

    def spread(self) -> Figures:
        """Write batches of 10 kB over all partitions and over six, in turns; return the brokers' processor time and
        the elapsed time of a batch."""
        with Admin(self.cluster.bootstrap, timeout_s=_TIMEOUT_S) as admin:
            admin.create_topic(
                _FEW, partitions=_FEW_PARTITIONS, replication_factor=3, config={"min.insync.replicas": 2}
            )
        many: list[tuple[float, float]] = []
        few: list[tuple[float, float]] = []
        with Producer(self.cluster.bootstrap, delivery_timeout_s=_TIMEOUT_S) as producer:
            for number in range(1 + _ROUNDS):
                counted = number > 0  # the first round makes connections and files
                many += [self._write(producer, _TOPIC, self.partitions)][:counted]
                few += [self._write(producer, _FEW, _FEW_PARTITIONS)][:counted]
        return {
            "batch_cpu_us": _median(many, 0) * 1e6,
            "few_batch_cpu_us": _median(few, 0) * 1e6,
            "batch_us": _median(many, 1) * 1e6,
            "few_batch_us": _median(few, 1) * 1e6,
            "spread_cpu_ratio": _median(many, 0) / _median(few, 0),
            "spread_ratio": _median(many, 1) / _median(few, 1),
        }

    def _write(self, producer: Producer, topic: str, partitions: int) -> tuple[float, float]:
        """Write one batch; return the brokers' processor time and the elapsed time, in seconds."""
        table = pa.table({"value": pa.array([_VALUE] * _BATCH_ROWS, pa.binary())})
        began = time.perf_counter()
        with CpuTime([self.cluster.pid(broker) for broker in self.cluster.slots]) as cpu:
            for number in range(self._batches):
                producer.write(topic, table, partition=number % partitions)
            producer.flush(_TIMEOUT_S)
        return cpu.seconds / self._batches, (time.perf_counter() - began) / self._batches

    def stop(self) -> Figures:
        """Stop a broker by SIGTERM under a steady stream to all partitions, then start it again.

        The stop ends when the process has exited and every partition is writable again.
        """
        interval = interval_s(self.partitions)
        with StreamProcess(
            self.cluster.bootstrap, _TOPIC, partitions=self.partitions, interval_s=interval, consume=False
        ) as stream:
            scene = Scene(self.cluster, _TOPIC, self.partitions, stream)
            report, took_s = controlled_stop(scene, Options(0.0, 0.0, 0.0))
        restarted_s = self._start_again()
        gaps = {"stop_s": took_s, "stop_gap_ms": max(report.gaps_ms), "stop_failed": report.failed}
        return {**gaps, "stop_restart_s": restarted_s}

    def kill(self) -> Figures:
        """Kill a broker, wait for new leaders, start the broker again, and wait until all ISRs are full."""
        victim = min(self.cluster.slots)
        began = time.monotonic()
        self.cluster.kill(victim)
        other = max(self.cluster.slots)
        _wait(lambda: self._in_sync(other, members=2) == self.partitions, "the others to go on")
        return {"kill_healed_s": time.monotonic() - began, "restart_s": self._start_again()}

    def _start_again(self) -> float:
        """Start the stopped broker; return the seconds until every partition has all three replicas in sync."""
        began = time.monotonic()
        other = next(slot.broker_id for slot in self.cluster.slots.values() if slot.running)
        self.cluster.start_brokers()
        _wait(lambda: self._in_sync(other) == self.partitions, "full in-sync sets")
        return time.monotonic() - began

    def _in_sync(self, broker: int, members: int = 3) -> int:
        """Return the number of partitions with ``members`` replicas in sync, as this broker knows."""
        try:
            with self.cluster.connect(broker) as connection:
                reply, _ = connection.request(Metadata(0, (_TOPIC,), schemas=False))
        except BrokerError:
            return 0  # the broker is too busy to respond: the caller asks again
        assert isinstance(reply, MetadataReply)
        return sum(len(part.isr) == members for part in reply.topics[0].partitions)


PIECES = ("create", "one_record_each", "idle", "spread", "stop", "kill")


def measure(partitions: int, *, pieces: Collection[str] = PIECES, directory: Path, quick: bool = False) -> Figures:
    """Measure the ``pieces`` of work. The first two of ``PIECES`` are always measured.

    ``others`` are the cores that unrelated programs used in the most disturbed piece. The brokers' files stay in
    ``directory`` until the last measurement: ext4 without a journal visits all recently deleted files when it creates
    one.
    """
    figures: Figures = {"others": 0.0}
    with _a_cluster(directory) as cluster:
        scale = Scale(cluster, partitions, patience=0.02 if quick else 1.0, batches=60 if quick else 5_000)
        for name in PIECES:
            if name not in (*pieces, *PIECES[:2]):
                continue
            piece: Callable[[], Figures] = getattr(scale, name)
            os.sync()  # without the sync, the disk is still busy with the writes of the last piece
            began = time.monotonic()
            with Others() as others:
                found = piece()
            figures.update(found, others=max(figures["others"], others.cores))
            shown = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
            took = time.monotonic() - began
            print(f"  {partitions} partitions: {shown}; others {others.cores:.2f} cores; {took:.0f} s", flush=True)
    return figures


@contextlib.contextmanager
def _a_cluster(directory: Path) -> Iterator[ProcessCluster]:
    base = Path(tempfile.mkdtemp(dir=directory))
    with ProcessCluster(3, base_dir=base, controller_processes=True) as cluster:
        yield cluster


def _bare_files(directory: Path, replicas: int) -> float:
    """Return the seconds for this number of directories with three small files each, extrapolated from a part."""
    some = -(-replicas // _BARE_PART)
    directory.mkdir()
    began = time.monotonic()
    for number in range(some):
        path = directory / str(number)
        path.mkdir()
        for name in ("partition.json", "0.arrow", "0.index"):
            (path / name).write_bytes(_VALUE)
    return (time.monotonic() - began) * replicas / some


def _wait(true: Callable[[], bool], what: str) -> None:
    """Wait as ``wait_until`` does, with pauses that keep the load on the brokers low."""

    def looked() -> bool:
        found = true()
        if not found:
            time.sleep(_POLL_S)
        return found

    wait_until(looked, _TIMEOUT_S, what)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _median(runs: list[tuple[float, float]], field: int) -> float:
    return statistics.median(run[field] for run in runs)
