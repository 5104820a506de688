"""Tests of the sockets between clients, followers, the controller and brokers of one host, from the kernel's list."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import create_topic, leader

pytestmark = pytest.mark.integration

#: proc(5): the state of a TCP connection that is open in both directions.
_ESTABLISHED = "01"


def by_tcp(cluster: ProcessCluster) -> set[str]:
    """Return the brokers' ends of open TCP connections, as /proc/net/tcp writes them."""
    ports = {f"{slot.port:04X}" for slot in cluster.slots.values()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == _ESTABLISHED and row[1].rpartition(":")[2] in ports}


def write(cluster: ProcessCluster, producer: Producer, topic: str) -> None:
    for n in range(3):
        outcome = producer.send(topic, b"%d" % n).result(30)
        assert outcome.offset == n


def test_all_clients_of_a_host_use_unix_sockets(cluster: ProcessCluster) -> None:
    create_topic(cluster, "nearby", assignment=((0, 1, 2),))
    with Producer(cluster.bootstrap, acks="all") as producer:
        write(cluster, producer, "nearby")
        # Each connection begins with TCP, which it closes after the switch. A new one may just have begun.
        wait_until(lambda: not by_tcp(cluster), 30, "the end of TCP connections")


@pytest.mark.extended
def test_without_unix_sockets_clients_use_tcp(cluster: ProcessCluster) -> None:
    create_topic(cluster, "afar", assignment=((0, 1, 2),))
    cluster.settings["unix.sockets.enable"] = "false"
    try:
        cluster.restart(0)
        wait_until(lambda: leader(cluster, "afar") == 0, 30, "the preferred leader")
        with Producer(cluster.bootstrap, acks="all") as producer:
            write(cluster, producer, "afar")
            port = f"{cluster.slots[0].port:04X}"
            assert {address.rpartition(":")[2] for address in by_tcp(cluster)} == {port}
    finally:
        del cluster.settings["unix.sockets.enable"]
        cluster.restart(0)
