"""Tests of real processes under real faults: every pairing of fault and role that is possible with one broken broker at
a time.

One cluster lives through all of them while clients write and read, and the last test judges their history.
``tests/broker`` tests the effects of a fault on single partitions and connections. Here no record may be lost,
repeated, reordered or shown too early, for any sequence of faults.

Alone: SIGKILL, SIGSTOP for longer than the session, and SIGTERM, each of leader, follower, controller and ZooKeeper.
Two at a time (``PAIRS``): with f=1 a broker, a controller process and ZooKeeper may be broken together, but not two
brokers. Each fault of a broker meets a broken controller or ZooKeeper, each of their faults meets a broken broker, the
leader's death meets all of ZooKeeper's faults, and controller and ZooKeeper break together. These belong to the second
tier of tests, and the rest of all 45 pairings to the third.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.origin import origin
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.testing.checker import check
from sparklog.testing.faults import Fault, Faults, Method
from sparklog.testing.final_logs import high_watermarks, metadata_of, wait_in_sync
from sparklog.testing.history import HistoryWriter, RecordedFault, read_history
from sparklog.testing.network import ZOOKEEPER, broker_party
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.proxies import ProxyNetwork
from sparklog.testing.workload import Topic, Workload
from tests.broker.support import encoded, produce

pytestmark = pytest.mark.integration
SESSION_S = 1.0
PATIENCE_S = 60.0
SETTINGS = {
    "zookeeper.session.timeout.ms": str(int(SESSION_S * 1000)),
    "replica.lag.time.max.ms": "1500",
    "log.checkpoint.interval.ms": "300",
    "segment.bytes": "65536",
}
TOPIC = "strict"
ROLES = ("leader", "follower", "controller", "zookeeper")


class Hurt:
    """A cluster, its clients and their history. Owner: the tests of this module, one after the other."""

    def __init__(self, cluster: ProcessCluster, workload: Workload, history: HistoryWriter) -> None:
        self.cluster = cluster
        self.workload = workload
        self.history = history
        self.faults = Faults(cluster, [TOPIC], session_s=SESSION_S)
        self.finished = False

    def fault(self, method: Method, role: str) -> Fault:
        if role == "controller":
            return self.faults.controller(method)
        if role == "zookeeper":
            return self.faults.zookeeper(method)
        return self.faults.broker(method, self.broker(role), role)

    def broker(self, role: str) -> int:
        partition = metadata_of(self.cluster, TOPIC)[0]
        return partition.leader if role == "leader" else next(r for r in partition.replicas if r != partition.leader)

    def survive(self, fault: Fault, *, beyond_s: float = 0.0) -> None:
        """Inject a fault, check that every writer continues, keep the fault for at least ``beyond_s``, repair it,
        and wait until all replicas are in sync."""
        self.history.write(RecordedFault(text=fault.text))
        began = time.monotonic()
        with fault.broken():
            self.workload.wait_progress(PATIENCE_S)
            time.sleep(max(0.0, began + beyond_s - time.monotonic()))
        self.heal()

    def heal(self) -> None:
        wait_in_sync(self.cluster, [TOPIC, "leader-only"], PATIENCE_S)
        self.workload.wait_progress(PATIENCE_S)


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hurt]:
    directory: Path = tmp_path_factory.mktemp("faults")
    topics = (Topic(TOPIC, partitions=3), Topic("leader-only", acks="1", rules="loose"))
    with (
        HistoryWriter(directory / "history.jsonl", seed=0, brokers=3, settings=SETTINGS) as history,
        ProcessCluster(
            3, base_dir=directory / "cluster", settings=SETTINGS, network=ProxyNetwork(), controller_processes=True
        ) as cluster,
        Workload(cluster, history, topics, pause_s=0.06) as workload,
    ):
        workload.wait_progress(PATIENCE_S)
        yield Hurt(cluster, workload, history)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method", ["kill", "pause", "stop"])
def test_writes_continue_through_a_fault(hurt: Hurt, method: Method, role: str) -> None:
    """The faults are SIGKILL, noticed at the session's end; SIGSTOP for longer than the session; and SIGTERM."""
    hurt.survive(hurt.fault(method, role), beyond_s=1.4 * SESSION_S if method == "pause" else 0.0)


Role = Literal["leader", "follower", "controller", "zookeeper"]
PAIRS: list[tuple[Method, Role, Method, Role]] = [
    ("kill", "leader", "kill", "controller"),
    ("pause", "leader", "stop", "controller"),
    ("stop", "leader", "pause", "controller"),
    ("kill", "follower", "pause", "controller"),
    ("pause", "follower", "kill", "zookeeper"),
    ("stop", "follower", "stop", "zookeeper"),
    ("kill", "leader", "kill", "zookeeper"),
    ("kill", "leader", "pause", "zookeeper"),
    ("kill", "leader", "stop", "zookeeper"),
    ("kill", "controller", "pause", "zookeeper"),
]
_METHODS: tuple[Method, ...] = ("kill", "pause", "stop")
_TOGETHER: list[tuple[Role, Role]] = [
    ("leader", "controller"),
    ("leader", "zookeeper"),
    ("follower", "controller"),
    ("follower", "zookeeper"),
    ("controller", "zookeeper"),
]
EVERY_PAIR = [
    (method, role, other_method, other_role)
    for role, other_role in _TOGETHER
    for method in _METHODS
    for other_method in _METHODS
]


@pytest.mark.parametrize(
    ("method", "role", "other_method", "other_role"),
    [
        *(pytest.param(*pair, marks=pytest.mark.extended) for pair in PAIRS),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in EVERY_PAIR if pair not in PAIRS),
    ],
)
def test_writes_continue_after_two_faults_at_once(
    hurt: Hurt, method: Method, role: Role, other_method: Method, other_role: Role
) -> None:
    """The second fault is repaired first: then writes continue, while the first one remains."""
    first, second = hurt.fault(method, role), hurt.fault(other_method, other_role)
    hurt.history.write(RecordedFault(text=f"{first.text}, and {second.text}"))
    with first.broken():
        began = time.monotonic()
        with second.broken():
            if other_role != "zookeeper":
                hurt.workload.wait_progress(PATIENCE_S)  # the other controller moves the leaderships
            if "pause" in {method, other_method}:
                time.sleep(max(0.0, began + 1.4 * SESSION_S - time.monotonic()))
        hurt.workload.wait_progress(PATIENCE_S)
    hurt.heal()


@pytest.mark.extended
@pytest.mark.parametrize("role", ["leader", "controller"])
@pytest.mark.parametrize("method", ["stop", "crash"])
def test_five_restarts_in_a_row_of_the(hurt: Hurt, method: Method, role: str) -> None:
    """Clean and hard restarts, each of the present leader. Source: Kafka's replication_test.py."""
    for _ in range(5):
        fault = hurt.fault(method, role)
        hurt.history.write(RecordedFault(text=fault.text))
        with fault.broken():
            pass
        wait_in_sync(hurt.cluster, [TOPIC], PATIENCE_S)
    hurt.heal()


def test_a_leader_reachable_only_by_clients_commits_nothing(hurt: Hurt) -> None:
    cluster = hurt.cluster
    old = hurt.broker("leader")
    me = broker_party(old)
    epoch = metadata_of(cluster, TOPIC)[0].leader_epoch
    others = [broker_party(other) for other in cluster.slots if other != old]
    fault = hurt.faults.cut("a leader from ZooKeeper and followers", *((me, peer) for peer in (ZOOKEEPER, *others)))
    hurt.history.write(RecordedFault(text=fault.text))
    with cluster.connect(old, timeout_s=PATIENCE_S) as connection:
        with fault.broken():
            before = _leader_end(cluster, old)
            # The client writes directly to the old leader, as a client that does not know the new one.
            refused = produce(connection, "leader-only", encoded(1, "alone-"), acks=-1, timeout_ms=1500)
            assert refused.code != ErrorCode.NONE, "a leader that reaches no follower must not acknowledge"
            wait_until(lambda: metadata_of(cluster, TOPIC)[0].leader_epoch > epoch, PATIENCE_S, "a new leader")
            hurt.workload.wait_progress(PATIENCE_S)
            assert _leader_end(cluster, old) == before, "a deposed leader advanced its high watermark"
            _read_on_from_beyond_its_log(cluster, old)
        hurt.heal()


def _read_on_from_beyond_its_log(cluster: ProcessCluster, deposed: int) -> None:
    """Start a consumer whose first contact is this broker, with offsets that only a later leader's log has."""
    own_end = next(r.log_end_offset for r in cluster.describe(deposed).replicas if (r.topic, r.partition) == (TOPIC, 0))
    wait_until(lambda: high_watermarks(cluster, TOPIC)[0] > own_end, PATIENCE_S, "a log that is longer")
    start = {TopicPartition(TOPIC, 0): own_end + 1}
    slot = cluster.slots[deposed]
    with Consumer(f"{slot.host}:{slot.port}", list(start), start=start, timeout_s=PATIENCE_S) as consumer:
        found = consumer.poll(PATIENCE_S)
    assert origin(found[0]).offset == own_end + 1


def _leader_end(cluster: ProcessCluster, broker_id: int) -> int:
    """Return the high watermark of the first partition on this broker."""
    found = cluster.describe(broker_id).replicas
    return next(r.high_watermark for r in found if (r.topic, r.partition) == (TOPIC, 0))


def test_no_promise_was_broken(hurt: Hurt) -> None:
    """Judge the history of the tests above."""
    _judge(hurt)


@pytest.mark.long
def test_no_pair_of_faults_broke_a_promise(hurt: Hurt) -> None:
    """Judge the history of the pairs of the third tier."""
    _judge(hurt)


def _judge(hurt: Hurt) -> None:
    hurt.workload.finish(timeout_s=PATIENCE_S)
    report = check(read_history(hurt.history.path))
    assert not report.violations, "\n".join(report.lines())
    assert report.counts["replicas compared"] == 15
    assert report.counts["batches acknowledged"] > 100 and report.counts["records read"] > 500
    assert not report.counts.get("batches unknown"), "a fault of one broker must not make a producer give up a write"
    assert not report.counts.get("consumer failures")
    assert sum(high_watermarks(hurt.cluster, TOPIC).values()) > 500
