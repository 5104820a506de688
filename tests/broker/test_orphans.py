"""Tests of real brokers without a supervisor, in a cluster with a controller: which of them exit, and which
continue."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.generation import REPORT, Directive, GenerationReport, Phase
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded
from tests.broker.topics import Writer, create_topic, wait_equal, wait_isr

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """Start a separate cluster: brokers that have seen a driver depend on supervisors from then on."""
    with ProcessCluster(3, settings={"broker.orphan.timeout.ms": "1000"}) as cluster:
        yield cluster


def test_an_orphan_exits_only_while_its_driver_lives_without_it(
    cluster: ProcessCluster,
) -> None:
    create_topic(cluster, "orphaned")
    driver = DriverRegistration.take(cluster.zookeeper, keys=cluster.keys)
    with ExitStack() as supervisors:
        try:
            _begin_generation(cluster, driver)
            for broker_id in (0, 1):
                supervisors.enter_context(_supervised(cluster, broker_id, driver.epoch))
            with _supervised(cluster, 2, driver.epoch):
                pass
            wait_until(lambda: not cluster.slots[2].running, PATIENCE_S, "the broker that is left out to stop")
            wait_isr(cluster, "orphaned", {0, 1})
            cluster.start_brokers()
            supervisors.enter_context(_supervised(cluster, 2, driver.epoch))
            wait_isr(cluster, "orphaned", {0, 1, 2})
        finally:
            driver.close()  # the driver and its tasks are dead; the controller lives, as a standby does
    pids = {broker_id: cluster.pid(broker_id) for broker_id in cluster.slots}
    before = {broker_id: _looks(cluster, broker_id) for broker_id in cluster.slots}
    # At the first check the orphan asks for relief, or no broker does. At the second one it exits if no broker counts
    # on it.
    wait_until(
        lambda: all(_looks(cluster, broker_id) >= before[broker_id] + 2 for broker_id in cluster.slots),
        PATIENCE_S,
        "every broker to have seen twice that it is alone",
    )

    async def leaving(store: ClusterStore) -> tuple[str, ...]:
        return await store.session.children(paths.STOPPING)

    assert cluster.ask_zookeeper(leaving) == ()
    with Writer(cluster, "orphaned") as writer:
        writer.write(encoded(10))
    wait_equal(cluster, "orphaned", 10)
    assert {broker_id: cluster.pid(broker_id) for broker_id in cluster.slots} == pids


def _begin_generation(cluster: ProcessCluster, driver: DriverRegistration) -> None:
    """Report a generation, as a driver's tasks do once their brokers serve."""
    driver.direct(Directive(driver.epoch, 1, Phase.RUN))

    async def report(store: ClusterStore) -> None:
        await store.session.create(REPORT, codecs.encode(GenerationReport(driver.epoch, 1, (), ())))

    cluster.ask_zookeeper(report)


@contextmanager
def _supervised(cluster: ProcessCluster, broker_id: int, driver_epoch: int) -> Iterator[None]:
    """Hold the connection of a supervisor. Its end is the supervisor's end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(cluster.slots[broker_id].control_socket))
        hello = {"op": "hello", "driver_epoch": driver_epoch, "generation": 1}
        connection.sendall(msgspec.json.encode(hello) + b"\n")
        with connection.makefile("rb") as lines:
            assert msgspec.json.decode(lines.readline())["ok"]
            yield


def _looks(cluster: ProcessCluster, broker_id: int) -> int:
    return cluster.describe(broker_id).counters.get("orphan.looks", 0)
