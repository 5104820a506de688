"""The time for which partitions cannot be written when a broker or ZooKeeper fails: ``bench/failover --help``.

Three brokers, replication factor 3, min.insync.replicas 2, acks=all, idempotent. A steady stream of small records goes
to every partition of one topic. A partition's gap is the longest time between two successive acknowledgements after the
fault, less the stream's interval. It covers all partitions, whether the failed broker led or followed them. The column
"partitions" is the number of partitions on each broker: with three brokers and three replicas, every broker hosts all
partitions and leads a third of them.

Brokers, ZooKeeper, the controller and the load share this machine; what else runs on it is printed with the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.ending import end_in_order
from bench.machine import Others
from bench.steady_stream import Report, StreamProcess
from sparklog import Admin, ClusterError
from sparklog.testing.process_cluster import ProcessCluster, wait_until

#: The most records a second over all partitions, as each is a separate batch and the sender shares the machine with
#: the brokers; and the shortest interval.
_RATE = 500
_SHORTEST_INTERVAL_S = 0.02
_HEAL_TIMEOUT_S = 120.0


class Row(NamedTuple):
    """One measurement, as the bench prints it."""

    case: str
    partitions: int
    #: The partitions to which the gaps belong: "all", or "followed" (only those that the failed broker did not lead).
    of: str
    interval_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    acked: int
    failed: int
    #: The duration of the fault itself; for a stop, the time until the process had ended.
    took_s: float
    #: Cores that unrelated programs used during the measurement.
    others: float
    note: str = ""


class Options(NamedTuple):
    """The options of a case, in seconds."""

    session_s: float
    zk_outage_s: float
    #: The time before the fault, in which every partition gets at least two acknowledgements.
    settle_s: float


class Scene:
    """One topic with a stream on it, and the broker that fails. Owner: one measurement."""

    def __init__(self, cluster: ProcessCluster, topic: str, partitions: int, stream: StreamProcess) -> None:
        self.cluster = cluster
        self.topic = topic
        self.partitions = partitions
        self.stream = stream
        leaders = [part.leader for part in cluster.metadata(0, topic).topics[0].partitions]
        self.victim = max(cluster.slots, key=leaders.count)
        self.led = {number for number, leader in enumerate(leaders) if leader == self.victim}

    def live(self) -> list[int]:
        """Return the ids of the brokers that are registered in ZooKeeper."""
        return [found.broker_id for found in self.cluster.ask_zookeeper(lambda store: store.live_brokers())]

    def incarnations(self) -> dict[int, int]:
        return {broker_id: self.cluster.describe(broker_id).incarnation for broker_id in self.cluster.slots}

    def fully_in_sync(self) -> bool:
        running = [slot.broker_id for slot in self.cluster.slots.values() if slot.running]
        found = self.cluster.metadata(running[0], self.topic).topics
        return bool(found) and all(len(part.isr) == 3 for part in found[0].partitions)


Case = Callable[[Scene, Options], tuple[Report, float]]


def controlled_stop(scene: Scene, options: Options) -> tuple[Report, float]:
    """Send SIGTERM under load: leaderships move first."""
    scene.stream.mark()
    begun = time.monotonic()
    code = scene.cluster.stop_broker(scene.victim)
    took_s = time.monotonic() - begun
    assert code == 0, f"the broker ended with {code}: {scene.cluster.slots[scene.victim].last_words()}"
    scene.stream.wait_all_acked(_HEAL_TIMEOUT_S)
    return scene.stream.report(), took_s


def crash(scene: Scene, options: Options) -> tuple[Report, float]:
    """Send SIGKILL; the supervisor retires the broker."""
    scene.stream.mark()
    begun = time.monotonic()
    scene.cluster.kill(scene.victim)
    took_s = time.monotonic() - begun
    scene.stream.wait_all_acked(_HEAL_TIMEOUT_S)
    return scene.stream.report(), took_s


def lost_host(scene: Scene, options: Options) -> tuple[Report, float]:
    """Send SIGSTOP: the broker's connections stay open and silent, and no supervisor retires the broker."""
    scene.stream.mark()
    scene.cluster.kill(scene.victim, signal.SIGSTOP)
    scene.stream.wait_all_acked(_HEAL_TIMEOUT_S)
    report = scene.stream.report()
    scene.cluster.kill(scene.victim, signal.SIGKILL)
    return report, options.session_s


def no_controller(scene: Scene, options: Options) -> tuple[Report, float]:
    """Kill a broker without a controller and without a supervisor: leaders shrink the ISRs by themselves.

    The partitions that the dead broker led wait for a controller, and do not count.
    """
    scene.cluster.stop_controller()
    scene.stream.mark()
    scene.cluster.kill(scene.victim, retire=False)
    scene.stream.wait_all_acked(_HEAL_TIMEOUT_S, but=scene.led)
    report = scene.stream.report()
    scene.cluster.start_controller()
    followed = [number for number in range(scene.partitions) if number not in scene.led]
    return report._replace(
        gaps_ms=[report.gaps_ms[number] for number in followed],
        ended_ms=[report.ended_ms[number] for number in followed],
    ), 0.0


def zookeeper_killed(scene: Scene, options: Options) -> tuple[Report, float]:
    """Kill ZooKeeper, wait, and start it again on its data."""
    scene.stream.mark()
    scene.cluster.signal_zookeeper(signal.SIGKILL)
    time.sleep(options.zk_outage_s)
    scene.cluster.start_zookeeper()
    time.sleep(2 * options.session_s)  # by then all sessions that were not resumed have expired
    return _after_outage(scene, options)


def zookeeper_paused(scene: Scene, options: Options) -> tuple[Report, float]:
    """Pause ZooKeeper for longer than the session timeout. After the pause, all sessions may expire at once."""
    before = scene.incarnations()
    scene.stream.mark()
    scene.cluster.signal_zookeeper(signal.SIGSTOP)
    time.sleep(options.zk_outage_s)
    scene.cluster.signal_zookeeper(signal.SIGCONT)
    # ZooKeeper may read pings from its sockets before it checks the clock: then a session survives.
    with contextlib.suppress(ClusterError):
        wait_until(
            lambda: all(now > before[broker] for broker, now in scene.incarnations().items()),
            1.5 * options.session_s,
            "all brokers to be registered again",
        )
    return _after_outage(scene, options)


def _after_outage(scene: Scene, options: Options) -> tuple[Report, float]:
    wait_until(lambda: len(scene.live()) == 3, _HEAL_TIMEOUT_S, "all brokers to be registered")
    scene.stream.wait_all_acked(_HEAL_TIMEOUT_S)
    wait_until(scene.fully_in_sync, _HEAL_TIMEOUT_S, "full in-sync sets")
    return scene.stream.report(), options.zk_outage_s


CASES: dict[str, Case] = {
    "stop": controlled_stop,
    "crash": crash,
    "lost-host": lost_host,
    "no-controller": no_controller,
    "zk-killed": zookeeper_killed,
    "zk-paused": zookeeper_paused,
}
_READS_TOO = {"zk-killed", "zk-paused"}


def interval_s(partitions: int) -> float:
    return max(_SHORTEST_INTERVAL_S, partitions / _RATE)


def measure(cluster: ProcessCluster, case: str, partitions: int, options: Options) -> Row:
    """Measure one case on a new topic, and heal the cluster."""
    topic = f"{case}-{partitions}-{time.time_ns() // 1_000_000}"
    interval = interval_s(partitions)
    options = options._replace(settle_s=max(options.settle_s, 3 * interval))
    with Admin(cluster.bootstrap, timeout_s=120.0) as admin:
        admin.create_topic(topic, partitions=partitions, replication_factor=3, config={"min.insync.replicas": 2})
        with StreamProcess(
            cluster.bootstrap, topic, partitions=partitions, interval_s=interval, consume=case in _READS_TOO
        ) as stream:
            scene = Scene(cluster, topic, partitions, stream)
            wait_until(scene.fully_in_sync, _HEAL_TIMEOUT_S, "full in-sync sets")
            time.sleep(options.settle_s)
            with Others() as others:
                report, took_s = CASES[case](scene, options)
            cluster.start_brokers()
            wait_until(scene.fully_in_sync, _HEAL_TIMEOUT_S, "full in-sync sets")
            healed = stream.report()
        admin.delete_topic(topic)
    report = report._replace(failed=healed.failed, first_failure=healed.first_failure)
    return _row(case, partitions, report, took_s=took_s, others=others.cores)


def _row(case: str, partitions: int, report: Report, *, took_s: float, others: float) -> Row:
    gaps = sorted(report.gaps_ms)
    note = report.first_failure
    if report.consumed:
        note = f"{report.consumed} read, {report.fetch_failures} fetches failed, {note}"
    last = max(range(len(report.gaps_ms)), key=report.gaps_ms.__getitem__)
    note = f"longest ended {report.ended_ms[last] / 1000:.2f} s after; {note}".rstrip("; ,")
    return Row(
        case,
        partitions,
        "all" if len(gaps) == partitions else "followed",
        report.interval_ms,
        gaps[len(gaps) // 2],
        gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)],
        gaps[-1],
        report.acked,
        report.failed,
        took_s,
        others,
        note,
    )


@contextlib.contextmanager
def a_cluster(session_s: float, directory: Path | None) -> Iterator[ProcessCluster]:
    base = Path(tempfile.mkdtemp(prefix="failover-", dir=directory))
    settings = {"zookeeper.session.timeout.ms": str(int(session_s * 1000))}
    cluster = ProcessCluster(3, base_dir=base, settings=settings)
    try:
        with cluster:
            yield cluster
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _print(rows: Sequence[Row]) -> None:
    print(
        f"\n{'case':14}{'partitions':>11}{'of':>10}{'interval':>9}{'p50':>8}{'p99':>8}{'max':>8}"
        f"{'acked':>9}{'failed':>7}{'fault s':>8}{'others':>8}  note   (gaps and interval in ms)"
    )
    for row in rows:
        print(
            f"{row.case:14}{row.partitions:11}{row.of:>10}{row.interval_ms:9.0f}{row.p50_ms:8.0f}{row.p99_ms:8.0f}"
            f"{row.max_ms:8.0f}{row.acked:9}{row.failed:7}{row.took_s:8.2f}{row.others:8.2f}  {row.note}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--partitions", nargs="+", type=int, default=[12, 100, 1000, 2000], help="partitions that each broker hosts"
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--session-s", type=float, default=6.0, help="zookeeper.session.timeout.ms, in seconds")
    parser.add_argument("--zk-outage-s", type=float, default=60.0)
    parser.add_argument("--dir", type=Path, help="directory of the brokers' data during the run; default: the system's")
    arguments = parser.parse_args()
    end_in_order()
    options = Options(arguments.session_s, arguments.zk_outage_s, settle_s=2.0)
    load = os.getloadavg()
    print(
        f"{os.cpu_count()} cores, load before {load[0]:.2f}, ZooKeeper sessions of {options.session_s:g} s", flush=True
    )
    rows = []
    for partitions in arguments.partitions:
        with a_cluster(options.session_s, arguments.dir) as cluster:
            for case in arguments.cases:
                for _ in range(arguments.runs):
                    rows.append(measure(cluster, case, partitions, options))
                    _print(rows[-1:])
    _print(rows)
    print(f"load after {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
