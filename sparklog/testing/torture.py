"""The torture test: it injects random faults into a real cluster for a given time, and checks the history.

    python -m sparklog.testing.torture --minutes 5 [--seed 7] [--brokers 3] [--history FILE]
        [--beyond] [--secure] [--kafka]
    python -m sparklog.testing.torture --check FILE

Processes, sockets and disks are real: ZooKeeper, an active and a standby controller, brokers. The seed decides the
faults, but not the timing of threads and packets. At most one broker, one controller and ZooKeeper are broken at the
same time. ``--beyond`` also kills all brokers at once now and then. With ``--secure``, clients log in over TLS, and
brokers and controllers have certificates. With ``--kafka``, Kafka clients use the same topics through the Kafka
listener. The exit code is 1 if a guarantee was violated.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sparklog.client.admin.admin import Admin
from sparklog.cluster.stop_request import exit_on_first
from sparklog.errors import ClusterError, SparklogError
from sparklog.model import TopicPartition
from sparklog.net.client_security import CLIENT_CONFIG
from sparklog.testing.checker import CheckReport, check
from sparklog.testing.faults import Fault, Faults, kill_all
from sparklog.testing.final_logs import wait_in_sync
from sparklog.testing.history import HistoryWriter, NotHealed, RecordedFault, read_history
from sparklog.testing.kafka_workload import kafka_clients
from sparklog.testing.namespaces import NamespaceNetwork
from sparklog.testing.network import Network
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.proxies import ProxyNetwork
from sparklog.testing.workload import Topic, Workload

SESSION_S = 1.5
SETTINGS = {
    "zookeeper.session.timeout.ms": str(int(SESSION_S * 1000)),
    "log.checkpoint.interval.ms": "500",
    "replica.lag.time.max.ms": "2000",
    "unclean.recovery.timeout.ms": "10000",
    "preferred.leader.rebalance.interval.ms": "3000",
    "segment.bytes": "262144",
    "group.initial.rebalance.delay.ms": "100",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.session.timeout.ms": "6000",
}
TOPICS = (
    Topic("strict", partitions=3),
    Topic("other", partitions=2),
    Topic("leader-only", partitions=2, acks="1", rules="loose"),
    Topic("fire-and-forget", partitions=1, acks="0", rules="loose"),
    Topic("remade", partitions=1, rules="remade"),
)
#: The topics of coordinators, which Kafka clients use.
_INTERNAL = ("__transaction_state", "__consumer_offsets")
_HEAL_TIMEOUT_S = 60.0
_SECOND_FAULT = 0.25
_OPERATION = 0.3
_BEYOND = 0.1
_MOST_PARTITIONS = 8


class Torture:
    """A torture test on a started cluster.

    One thread causes the faults and ends them. The clients have their own threads.
    """

    def __init__(
        self, cluster: ProcessCluster, history: HistoryWriter, *, seed: int, beyond: bool, kafka: bool = False
    ) -> None:
        self.cluster = cluster
        self.history = history
        self._random = random.Random(seed)
        self._beyond = beyond
        self._kafka = kafka
        self._lasting = [topic.name for topic in TOPICS if topic.rules != "remade"]
        #: The topics that must be in sync before the next fault.
        self._whole = [*self._lasting, *(_INTERNAL if kafka else ())]
        self.faults = Faults(cluster, self._lasting, session_s=SESSION_S, seed=seed)
        self._operations: list[Callable[[], str]] = [
            self._remake,
            self._come_and_go,
            self._add_partitions,
            self._move,
            self._move,
            self._take_moves_back,
            self._elect,
        ]

    def run(self, minutes: float) -> None:
        """Inject and end one fault after the other, until the time is up or the cluster does not heal."""
        workload = Workload(
            self.cluster,
            self.history,
            TOPICS,
            seed=self._random.randrange(2**32),
            readers=2,
            pause_s=0.05,
            more_clients=kafka_clients if self._kafka else None,
        )
        with workload:
            workload.wait_progress()
            until = time.monotonic() + minutes * 60
            while time.monotonic() < until and self._one_round():
                pass
            workload.finish(timeout_s=_HEAL_TIMEOUT_S)

    def _one_round(self) -> bool:
        """Inject a fault, perform an operator's action, or both; then wait until all replicas are in sync.

        Return whether they are.
        """
        try:
            if self._beyond and self._random.random() < _BEYOND:
                self._break(kill_all(self.cluster))
            elif self._random.random() < _OPERATION:
                self._operate([*self._operations, self._rolling_restart])
            else:
                self._break(self.faults.any_fault())
            wait_in_sync(self.cluster, self._whole, _HEAL_TIMEOUT_S)
            self._wait_moved()
            self._make_again()
        except SparklogError as error:
            self._say(f"not healed: {error}")
            self.history.write(NotHealed(text=str(error)))
            return False
        time.sleep(self._random.uniform(0, 1))
        return True

    def _break(self, fault: Fault) -> None:
        lasts_s = self._random.uniform(*fault.lasts_s)
        self._say(f"{fault.text}, for {lasts_s:.1f} s")
        with fault.broken():
            time.sleep(lasts_s / 2)
            chance = self._random.random()
            if chance < _SECOND_FAULT:
                self._break_something_else(fault)
            elif chance < 2 * _SECOND_FAULT:
                self._operate(self._operations)
            time.sleep(lasts_s / 2)
        self._say(f"healed: {fault.text}")

    def _break_something_else(self, first: Fault) -> None:
        """Break a second group during the first fault, and heal it first.

        A broker cannot start again without ZooKeeper.
        """
        if first.group == "zookeeper":
            return  # without ZooKeeper, the active controller is unknown
        second = self.faults.any_fault(("zookeeper",) if first.group == "controller" else ("controller", "zookeeper"))
        if second.text.startswith("cut") and first.text.startswith("cut"):
            return  # the end of one fault would also end the other
        lasts_s = self._random.uniform(*second.lasts_s)
        self._say(f"at the same time: {second.text}, for {lasts_s:.1f} s")
        with second.broken():
            time.sleep(lasts_s)
        self._say(f"healed: {second.text}")

    # --- actions of operators ---

    def _operate(self, operations: Sequence[Callable[[], str]]) -> None:
        """Perform one random operation. The operation may fail during a fault, but only with a SparklogError."""
        try:
            self._say(self._random.choice(operations)())
        except SparklogError as error:
            self._say("an operation failed", str(error))

    def _admin(self) -> Admin:
        return Admin(self.cluster.bootstrap, timeout_s=15.0)

    def _remake(self) -> str:
        with self._admin() as admin:
            admin.delete_topic("remade")
        self._make_again()
        return "topic remade was deleted and made again"

    def _make_again(self) -> None:
        """Create the topic again if it is missing, for instance after a fault in the middle of its recreation."""
        with self._admin() as admin:
            if "remade" not in admin.list_topics():
                admin.create_topic("remade", partitions=1, replication_factor=3)

    def _come_and_go(self) -> str:
        name = f"passing-{self._random.randrange(10**6)}"
        with self._admin() as admin:
            admin.create_topic(name, partitions=4, replication_factor=3)
            admin.delete_topic(name)
        return f"topic {name} was made and deleted"

    def _add_partitions(self) -> str:
        with self._admin() as admin:
            count = len(admin.describe_topic("other").partitions) + 1
            if count > _MOST_PARTITIONS:
                return "no more partitions"
            admin.create_partitions("other", count)
        return f"topic other has {count} partitions"

    def _move(self) -> str:
        """Move a random partition to other brokers. If there are no other brokers, change the order of its replicas."""
        topic = self._random.choice(self._lasting)
        brokers = sorted(self.cluster.slots)
        with self._admin() as admin:
            partition = self._random.choice(admin.describe_topic(topic).partitions)
            target = self._random.sample(brokers, len(partition.replicas))
            admin.reassign({TopicPartition(topic, partition.partition): target})
        return f"{topic}-{partition.partition} moves from {list(partition.replicas)} to {target}"

    def _take_moves_back(self) -> str:
        with self._admin() as admin:
            moving = [TopicPartition(move.topic, move.partition) for move in admin.reassignments()]
            taken = admin.cancel_reassignment(may_have_ended=moving)
        return f"moves taken back: {len(taken)}"

    def _elect(self) -> str:
        with self._admin() as admin:
            admin.elect_leaders()
        return "preferred leaders were elected"

    def _wait_moved(self) -> None:
        with self._admin() as admin:
            wait_until(lambda: not admin.reassignments(), _HEAL_TIMEOUT_S, "moves of replicas to end")

    def _rolling_restart(self) -> str:
        for broker_id in self.cluster.slots:
            wait_in_sync(self.cluster, self._whole, _HEAL_TIMEOUT_S)
            self.cluster.restart(broker_id)
        return "all brokers were restarted, one after the other"

    def _say(self, text: str, error: str = "") -> None:
        self.history.write(RecordedFault(text=text, error=error))
        _print(f"{self.history.elapsed_s:7.1f} s  {text}{error and f': {error}'}")


def judge(path: Path) -> CheckReport:
    """Check a history file, and return the report.

    Raises:
        ConfigError: the file is not a history.
    """
    return check(read_history(path))


def torture(
    path: Path,
    *,
    minutes: float,
    seed: int,
    brokers: int,
    beyond: bool,
    secure: bool = False,
    kafka: bool = False,
) -> CheckReport:
    """Run the torture test and check its history.

    If a guarantee was violated, keep the cluster's directory and print its name.
    """
    directory = Path(tempfile.mkdtemp(prefix="sparklog-torture-"))
    settings = {**SETTINGS, "minutes": f"{minutes:g}", "beyond": str(beyond)}
    kind, network = (_secure_cluster(), NamespaceNetwork()) if secure else (ProcessCluster, _network(kafka=kafka))
    hurt = kind(brokers, base_dir=directory, settings=SETTINGS, network=network, controller_processes=True, kafka=kafka)
    with HistoryWriter(path, seed=seed, brokers=brokers, settings=settings) as history, hurt as cluster:
        if secure:
            os.environ[CLIENT_CONFIG] = str(directory / "client.conf")
        Torture(cluster, history, seed=seed, beyond=beyond, kafka=kafka).run(minutes)
    report = judge(path)
    if report.violations:
        _print(f"logs of brokers and controllers: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return report


def _secure_cluster() -> type[ProcessCluster]:
    """Return the class of secure clusters, which needs the library ``cryptography``."""
    from sparklog.testing.secure_cluster import SecureCluster

    return SecureCluster


def _network(*, kafka: bool) -> Network:
    if kafka:  # Kafka listeners are on loopback, which a network namespace would hide
        return ProxyNetwork()
    try:
        network = NamespaceNetwork()
    except ClusterError as reason:
        _print(f"the network is made of proxies: {reason}")
        return ProxyNetwork()
    _print("the network is made of namespaces")
    return network


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  this is a command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparklog.testing.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="which faults come; by default any, printed")
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument(
        "--history", type=Path, help="file for the history; default: a new file, whose name is printed at the end"
    )
    parser.add_argument("--beyond", action="store_true", help="also kill all brokers at once now and then")
    parser.add_argument("--secure", action="store_true", help="use TLS, logins and certificates; needs namespaces")
    parser.add_argument("--kafka", action="store_true", help="also use clients of Kafka; needs confluent-kafka")
    parser.add_argument("--check", type=Path, metavar="FILE", help="only check an existing history")
    options = parser.parse_args(arguments)
    try:
        if options.check is not None:
            report = judge(options.check)
        else:
            exit_on_first(signal.SIGTERM)  # so that SIGTERM also stops the cluster
            # Clients would log warnings about the faults of this run.
            logging.getLogger("sparklog").setLevel(logging.CRITICAL)
            seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
            path = options.history or Path(tempfile.mkstemp(prefix="sparklog-history-", suffix=".jsonl")[1])
            _print(f"seed {seed}, history in {path}")
            report = torture(
                path,
                minutes=options.minutes,
                seed=seed,
                brokers=options.brokers,
                beyond=options.beyond,
                secure=options.secure,
                kafka=options.kafka,
            )
    except (SparklogError, OSError) as error:
        _print(f"error: {error}")
        return 2
    for line in report.lines():
        _print(line)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
