"""Replica cores under a few hundred seeds of faults, and that a seed replays exactly."""

from __future__ import annotations

import pytest

from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_controller_core import CoreController

SEEDS = 160
CHUNK = 20


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_acknowledged_is_lost_and_everything_settles(first: int) -> None:
    """Raises with the seed and the end of its trace. After the faults every ISR is full and all logs are equal."""
    acked = epochs = 0
    for seed in range(first, first + CHUNK):
        cluster = SimCluster(seed)
        cluster.run()
        for checker in cluster.checkers.values():
            acked += len(checker.acked)
            epochs += len(checker.leaders)
    assert acked > 30 * CHUNK, "hardly anything was written: the schedules prove nothing"
    assert epochs > 3 * CHUNK, "hardly any leader changed: the schedules prove nothing"


def test_many_partitions_over_five_brokers() -> None:
    for seed in range(4):
        SimCluster(seed, brokers=5, partitions=4, min_isr=3).run(fault_ms=3000)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_production_controller_core_over_the_same_faults(first: int) -> None:
    for seed in range(first, first + CHUNK):
        SimCluster(seed, controller_type=CoreController, page_cache_loss=0.9 if seed % 2 else 0.3).run()


def test_a_seed_replays_exactly() -> None:
    traces = []
    for _ in range(2):
        cluster = SimCluster(7)
        cluster.run()
        traces.append((cluster.world.events, list(cluster.world.trace)))
    assert traces[0] == traces[1]
    assert traces[0][0] > 1000
