"""Kafka clients on the Kafka listener of real brokers: metadata, coordinators, TLS, logins, and hostile bytes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.testing.process_cluster import ProcessCluster

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        with Admin(running.bootstrap) as admin:
            admin.create_topic("flights", partitions=6, replication_factor=3)
        yield running


def addresses(cluster: ProcessCluster) -> set[str]:
    return set(cluster.kafka_bootstrap.split(","))


def test_kcat_lists_brokers_and_topics(cluster: ProcessCluster) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat is not installed")
    listed = subprocess.run(
        [kcat, "-b", cluster.kafka_bootstrap, "-L"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "3 brokers:" in listed
    assert all(address in listed for address in addresses(cluster))
    assert 'topic "flights" with 6 partitions' in listed


def test_confluent_kafka_lists_topics(cluster: ProcessCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    listed = confluent.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap}).list_topics(timeout=60)
    assert {f"{broker.host}:{broker.port}" for broker in listed.brokers.values()} == addresses(cluster)
    assert sorted(listed.topics["flights"].partitions) == list(range(6))
    assert all(len(found.replicas) == 3 for found in listed.topics["flights"].partitions.values())


def test_kafka_python_describes_the_cluster(cluster: ProcessCluster) -> None:
    kafka = pytest.importorskip("kafka")
    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","))
    try:
        described = admin.describe_cluster()
        assert described["cluster_id"] == cluster.cluster_id
        assert {f"{broker['host']}:{broker['port']}" for broker in described["brokers"]} == addresses(cluster)
        assert "flights" in admin.list_topics()
    finally:
        admin.close()
