"""Tests that partitions continue to accept writes when a broker, the controller or ZooKeeper fails.

These are the measurements of ``bench/failover`` on a dozen partitions, with margins for a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from bench.failover import CASES, Options, Scene
from bench.steady_stream import Report, StreamProcess
from sparklog import Admin
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.alone]

PARTITIONS = 12
SESSION_S = 4.0
#: Well below the session timeout: a recovery that only the session's end causes is detected.
LONGEST_GAP_MS = 2500.0
OPTIONS = Options(session_s=SESSION_S, zk_outage_s=SESSION_S + 1.0, settle_s=0.3)


class Stage(NamedTuple):
    cluster: ProcessCluster
    stream: StreamProcess


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ProcessCluster(3, settings={"zookeeper.session.timeout.ms": str(int(SESSION_S * 1000))}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", partitions=PARTITIONS, replication_factor=3, config={"min.insync.replicas": 2})
        with StreamProcess(cluster.bootstrap, "t", partitions=PARTITIONS, interval_s=0.05, consume=True) as stream:
            yield Stage(cluster, stream)


def play(stage: Stage, case: str) -> Report:
    """Measure one case. The cluster is healthy before and after it."""
    stage.cluster.start_controller()
    stage.cluster.start_brokers()
    scene = Scene(stage.cluster, "t", PARTITIONS, stage.stream)
    wait_until(scene.fully_in_sync, 30, "full in-sync sets")
    report, _ = CASES[case](scene, OPTIONS)
    return report


@pytest.mark.parametrize("case", ["stop", "crash", "no-controller"])
def test_clients_survive_the_failure_of_a_broker(stage: Stage, case: str) -> None:
    report = play(stage, case)
    assert report.failed == 0, report.first_failure
    assert max(report.gaps_ms) < LONGEST_GAP_MS, report


def test_zookeeper_is_away_for_longer_than_a_session_timeout(stage: Stage) -> None:
    report = play(stage, "zk-paused")
    assert (report.failed, report.fetch_failures) == (0, 0), report.first_failure
    assert max(report.gaps_ms) < LONGEST_GAP_MS, report
    assert report.longest_fetch_gap_ms < LONGEST_GAP_MS
    assert report.consumed > 0
