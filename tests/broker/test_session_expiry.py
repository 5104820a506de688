"""Tests of ZooKeeper sessions that expire: a broker's, the controller's, and both: no process exits, and no record
is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from sparklog.broker.lifecycle.ending import EXIT_CANNOT_START
from sparklog.testing.network import CONTROLLER, ZOOKEEPER, broker_party
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.proxies import ProxyNetwork
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNoNode
from sparklog.zk.ops import Create, Delete
from tests.broker.support import encoded, read_all
from tests.broker.topics import PATIENCE_S, Writer, create_topic, leader, new_producer_id, wait_equal, wait_isr

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
ALL = {0, 1, 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {"zookeeper.session.timeout.ms": "1500"}
    with ProcessCluster(3, settings=settings, network=ProxyNetwork(), controller_processes=True) as running:
        yield running


def registered(cluster: ProcessCluster) -> dict[int, int]:
    """Return the brokers with a live session, and their incarnations."""

    async def read(store: ClusterStore) -> dict[int, int]:
        return {found.broker_id: found.incarnation for found in await store.live_brokers()}

    return cluster.ask_zookeeper(read)


def controller_epoch(cluster: ProcessCluster) -> int | None:
    """Return the epoch of the controller with a live session."""

    async def read(store: ClusterStore) -> int | None:
        try:
            node = await store.session.get(paths.CONTROLLER)
        except ZkNoNode:
            return None
        return codecs.decode(paths.CONTROLLER, node.data, codecs.ControllerNode).controller_epoch

    return cluster.ask_zookeeper(read)


@pytest.mark.parametrize("whose", ["broker", "controller", "both"])
def test_expired_sessions_cost_no_process_and_no_record(cluster: ProcessCluster, whose: str) -> None:
    network, topic = cluster.network, f"expiry-{whose}"
    assert network is not None
    create_topic(cluster, topic)
    pids = {broker_id: cluster.pid(broker_id) for broker_id in ALL}
    epoch, victim = controller_epoch(cluster), leader(cluster, topic)
    incarnation = registered(cluster)[victim]
    assert epoch is not None
    producer_id, written = new_producer_id(cluster), 0
    with Writer(cluster, topic) as writer:

        def write(batches: int) -> bool:
            nonlocal written
            for _ in range(batches):
                batch = encoded(1, f"{written}-", producer=(producer_id, 0, written))
                assert writer.write(batch) == written
                written += 1
            return True

        write(5)
        if whose != "controller":
            network.cut(broker_party(victim), ZOOKEEPER)
        if whose != "broker":
            network.cut(CONTROLLER, ZOOKEEPER)
        try:
            if whose != "controller":
                wait_until(lambda: write(1) and victim not in registered(cluster), PATIENCE_S, "the broker's expiry")
            if whose != "broker":
                wait_until(lambda: write(1) and controller_epoch(cluster) is None, PATIENCE_S, "the controller's")
            if whose == "broker":
                wait_until(lambda: leader(cluster, topic) != victim, PATIENCE_S, "another leader")
            write(5)
        finally:
            network.heal()
        wait_until(lambda: set(registered(cluster)) == ALL, PATIENCE_S, "all brokers to be registered")
        wait_until(lambda: controller_epoch(cluster), PATIENCE_S, "a controller")
        wait_isr(cluster, topic, ALL)
        write(5)
    wait_equal(cluster, topic, written)
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, topic) == [b"%d-0" % number for number in range(written)]
    assert {broker_id: cluster.pid(broker_id) for broker_id in ALL} == pids, "the processes must be the same"
    assert (registered(cluster)[victim] > incarnation) == (whose != "controller")
    found = controller_epoch(cluster)
    assert found is not None and (found > epoch) == (whose != "broker")
    create_topic(cluster, f"{topic}-afterwards")


def test_a_broker_whose_id_is_taken_exits_with_an_error(cluster: ProcessCluster) -> None:
    """If it continued to try, it would serve old metadata to clients, without any update."""
    slot = cluster.slots[1]
    process = slot.process
    assert process is not None

    async def take(store: ClusterStore) -> int:
        path = paths.broker(1)
        found = codecs.decode_broker(path, (await store.session.get(path)).data, 1)
        other = msgspec.structs.replace(found, host="elsewhere", boot_id="another")
        await store.session.multi([Delete(path), Create(path, codecs.encode_broker(other), ephemeral=True)])
        return await asyncio.to_thread(process.wait, PATIENCE_S)

    assert cluster.ask_zookeeper(take) == EXIT_CANNOT_START
    assert "broker 1 ends: broker id 1 is registered by elsewhere:" in slot.log_file.read_text()
    cluster.start_broker(1)
    wait_until(lambda: set(registered(cluster)) == ALL, PATIENCE_S, "all brokers to be registered")
