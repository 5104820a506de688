"""Tests of the cluster under dozens of seeds of faults: no record is lost, every run settles, and every fault
occurs."""

from __future__ import annotations

from collections import Counter

import pytest

from sparklog.testing.sim_case import Case
from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_mutants import KAFKA
from sparklog.testing.sim_schedule import FAULTS, OPERATIONS

SEEDS = 60

#: kinds of actions that are counted by their effects
_BY_OUTCOME = {
    "cut link": ("one-way partition", "two-way partition"),
    "cut zookeeper": ("session expired",),
    "isolate": ("isolation", "message lost in a partition"),
    "clock rate": ("fast clock", "slow clock"),
    "pause": ("pause", "pause beyond the session"),
    "crash": ("crash", "crash with lost page cache", "retired by the supervisor"),
    "expire session": (
        "session of a broker ended",
        "session of the controller ended",
        "sessions of broker and controller ended",
    ),
    "full disk": ("append on a full disk",),
    "torn write": ("torn write", "death after a write"),
    "reassign": (
        "reassign",
        "change reassignment",
        "controller.reassignments.finished",
        "replica deleted",
        "copy held back",
    ),
    "delete topic": ("delete topic", "topic deleted while a broker was away"),
    "elect preferred": ("elect preferred", "controller.partitions.moved"),
    "elect uncleanly": ("elect uncleanly", "unclean election"),
    "power cut": ("power cut", "controller.partitions.recovered"),
    "resign": ("resign", "controller change"),
}
#: faults of the network and the clients themselves
_BESIDES = (
    "message lost",
    "message late",
    "message overtaken",
    "message doubled",
    "append refused",
    "duplicate recognised",
    "write sent again",
    "leader changed",
    "update refused",
    "update overtaken",
    "two controllers at once",
    "cut in a thread",
    "cut forgotten",
    "cut without room",
)
#: what happens to Kafka's producers
_OF_KAFKA = (
    "kafka commits",
    "kafka aborts",
    "kafka batch given up",
    "kafka batch: INVALID_PRODUCER_EPOCH",
    "kafka batch: INVALID_TXN_STATE",
    "kafka end before its markers",
    "kafka epoch of an idempotent producer",
    "kafka producer forgotten",
    "duplicate after its marker",
    "marker of an earlier transaction",
    "marker sent again",
    "question repeated",
)


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Run all seeds and return the events. A failure raises with the seed and the end of its trace."""
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = SimCluster(seed, page_cache_loss=0.9 if seed % 2 else 0.3)
        cluster.run()
        total += cluster.world.happened
        for checker in cluster.checkers.values():
            total["acknowledged"] += len(checker.acked)
            total["epochs"] += len(checker.leaders)
    return total


def test_nothing_acknowledged_is_lost_and_everything_settles(happened: Counter[str]) -> None:
    assert happened["acknowledged"] > 100 * SEEDS, "too few writes for the schedules to prove anything"
    assert happened["epochs"] > 4 * SEEDS, "too few leader changes for the schedules to prove anything"


@pytest.mark.parametrize("kind", [kind for kind, weight in {**FAULTS, **OPERATIONS}.items() if weight > 0])
def test_every_kind_of_action_has_an_effect(kind: str, happened: Counter[str]) -> None:
    missing = [outcome for outcome in _BY_OUTCOME.get(kind, (kind,)) if not happened[outcome]]
    assert not missing


def test_the_network_and_the_clients_have_faults(happened: Counter[str]) -> None:
    assert not [kind for kind in _BESIDES if not happened[kind]]


def test_kafka_producers_meet_the_faults_that_their_promises_are_about() -> None:
    """They are fenced, repeat themselves after markers, are forgotten, and lose leaders and coordinators."""
    total: Counter[str] = Counter()
    for seed in range(8, 20):
        found, happened = Case(seed, mutant=KAFKA.name, partitions=2).play_counted()
        assert found is None, (seed, found)
        total += happened
    assert not [kind for kind in _OF_KAFKA if not total[kind]], total


def test_many_partitions_on_five_brokers_settle() -> None:
    for seed in range(3):
        SimCluster(seed, brokers=5, partitions=4, min_isr=3).run(fault_ms=3000)


def test_a_seed_replays_exactly() -> None:
    traces = []
    for _ in range(2):
        cluster = SimCluster(7)
        cluster.run()
        traces.append((cluster.world.events, list(cluster.world.trace)))
    assert traces[0] == traces[1]
    assert traces[0][0] > 1000


def test_another_network_leaves_the_schedule_unchanged() -> None:
    one, other = SimCluster(7), SimCluster(7, salt=1)
    assert one.schedule(6000) == other.schedule(6000)
    one.run(fault_ms=1000)
    other.run(fault_ms=1000)
    assert one.world.events != other.world.events
