"""A test of a leader that the kernel's network has cut off, if the machine permits namespaces. Otherwise proxies cut
it off."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.errors import ClusterError, ErrorCode
from sparklog.testing.namespaces import NamespaceNetwork
from sparklog.testing.network import ZOOKEEPER, broker_party
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, produce
from tests.broker.topics import PATIENCE_S, Writer, create_topic, leader, partition, wait_equal, wait_isr

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
SETTINGS = {"zookeeper.session.timeout.ms": "1500", "replica.lag.time.max.ms": "1500"}
ALL = {0, 1, 2}
A, B = broker_party(0), broker_party(1)


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    try:
        made = NamespaceNetwork()
    except ClusterError as reason:
        pytest.skip(f"{reason}; the same by proxies is in test_faults.py")
    link = Path("/sys/class/net") / made.link
    assert link.exists()
    yield made
    made.close()
    assert not link.exists()


def test_a_network_cut_is_silent_and_one_way(network: NamespaceNetwork) -> None:
    hosts = {party: network.add_broker(number).host for number, party in enumerate((A, B))}

    def bound(party: str) -> socket.socket:
        made = network.inside(party, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind((hosts[party], 0))
        made.settimeout(5)
        return made

    with bound(A) as a, bound(B) as b:

        def heard(sender: socket.socket, receiver: socket.socket) -> bool:
            """Return whether a sent packet arrives. On this network it does so immediately, so the test need not
            wait."""
            sender.sendto(b"hello", receiver.getsockname())
            receiver.settimeout(0.2)
            try:
                return receiver.recv(10) == b"hello"
            except TimeoutError:
                return False

        assert heard(a, b) and heard(b, a)
        network.cut(A, B, one_way=True)
        assert (heard(a, b), heard(b, a)) == (False, True)
        network.cut(A, B)
        assert (heard(a, b), heard(b, a)) == (False, False)
        network.heal()
        assert heard(a, b) and heard(b, a)


def test_a_leader_reachable_only_by_clients_commits_nothing(network: NamespaceNetwork, tmp_path: Path) -> None:
    with ProcessCluster(3, base_dir=tmp_path, settings=SETTINGS, network=network, controller_processes=True) as cluster:
        create_topic(cluster, "t")
        with Writer(cluster, "t") as writer:
            for _ in range(5):
                writer.write(encoded(1))
            old, epoch = leader(cluster, "t"), partition(cluster, "t").leader_epoch
            for party in (ZOOKEEPER, *map(broker_party, ALL - {old})):
                network.cut(broker_party(old), party)
            with cluster.connect(old, timeout_s=PATIENCE_S) as connection:
                refused = produce(connection, "t", encoded(1, "alone-"), acks=-1, timeout_ms=1500)
                assert refused.code != ErrorCode.NONE, "a leader that reaches no follower must not acknowledge"
            wait_until(lambda: partition(cluster, "t").leader_epoch > epoch, PATIENCE_S, "a new leader")
            for number in range(5, 10):
                assert writer.write(encoded(1)) == number
            network.heal()
            wait_isr(cluster, "t", ALL)
            wait_equal(cluster, "t", 10)
