"""Tests of brokers with several listeners: which addresses clients get, and which way brokers take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.model import BrokerRegistration
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Metadata, MetadataReply
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = pytest.mark.integration

SETTINGS = {
    "listeners": "CLIENT://127.0.0.1:0,BROKER://127.0.0.1:0",
    "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:PLAINTEXT",
    "advertised.listeners": "BROKER://localhost:0",
    "inter.broker.listener.name": "BROKER",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(2, settings=SETTINGS) as running:
        yield running


def registrations(cluster: ProcessCluster) -> dict[int, BrokerRegistration]:
    found = cluster.ask_zookeeper(lambda store: store.live_brokers())
    return {broker.broker_id: broker for broker in found}


def addresses(connection: BlockingConnection) -> dict[int, tuple[str, int]]:
    reply, _ = connection.request(Metadata(0, ()))
    assert isinstance(reply, MetadataReply)
    return {broker.broker_id: (broker.host, broker.port) for broker in reply.brokers}


def test_the_registration_has_every_listener(cluster: ProcessCluster) -> None:
    for broker_id, broker in registrations(cluster).items():
        client, between = broker.endpoints
        assert (client.name, client.protocol, client.host) == ("CLIENT", "PLAINTEXT", "127.0.0.1")
        assert (between.name, between.protocol, between.host) == ("BROKER", "PLAINTEXT", "localhost")
        assert (broker.host, broker.port) == (client.host, client.port) == ("127.0.0.1", cluster.slots[broker_id].port)
        assert between.port not in {0, client.port}


def test_replies_name_the_listener_that_the_client_uses(cluster: ProcessCluster) -> None:
    brokers = registrations(cluster)
    for index in (0, 1):
        shown = {
            number: (broker.endpoints[index].host, broker.endpoints[index].port) for number, broker in brokers.items()
        }
        with BlockingConnection(*shown[0], client_id="test") as connection:
            assert addresses(connection) == shown
            reply, _ = connection.request(FindCoordinator(0, "group", "g"))
            assert isinstance(reply, FindCoordinatorReply)
            assert (reply.broker.host, reply.broker.port) == shown[reply.broker.broker_id]


def test_records_are_replicated_and_a_broker_returns(cluster: ProcessCluster) -> None:
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("t", partitions=2, replication_factor=2)
        producer.send("t", b"before", partition=0).result(30)
        before = registrations(cluster)[1].endpoints[1].port
        cluster.restart(1)
        assert registrations(cluster)[1].endpoints[1].port != 0 != before
        producer.send("t", b"after", partition=0).result(30)
        wait_until(lambda: not any(p.under_replicated for p in admin.describe_topic("t").partitions), 30, "full ISRs")
