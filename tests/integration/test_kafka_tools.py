"""Tests of Kafka's own command-line tools (4.1.1) on real brokers.

Kafka's jars are fetched once from Maven Central (``bench.kafka_jars``). If they cannot be fetched, pytest skips these
tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kafka_jars import broker_jars
from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.errors import ClusterError
from sparklog.testing.process_cluster import ProcessCluster
from tests.kafka_tools import KafkaTools
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]


@pytest.fixture(scope="module")
def tools() -> Iterator[KafkaTools]:
    try:
        jars = broker_jars(fetch=True)
    except ClusterError as error:
        pytest.skip(str(error))
    with KafkaTools(jars) as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture
def server(cluster: ProcessCluster) -> tuple[str, str]:
    """Return the arguments that name the cluster."""
    return "--bootstrap-server", cluster.kafka_bootstrap


@pytest.fixture
def own(cluster: ProcessCluster) -> Iterator[Admin]:
    """Return sparklog's own admin client, to see what a tool has done."""
    with Admin(cluster.bootstrap) as found:
        yield found


def write(cluster: ProcessCluster, topic: str, count: int) -> None:
    with Producer(cluster.bootstrap) as producer:
        for number in range(count):
            producer.send(topic, value=b"%d" % number, partition=0)
        producer.flush()


def test_topics_are_created_described_extended_and_deleted(
    tools: KafkaTools, server: tuple[str, str], own: Admin
) -> None:
    create = ("--create", "--topic", "orders", "--partitions", "2", "--replication-factor", "3")
    tools.run("kafka-topics", *server, *create, "--config", "retention.ms=3600000")
    assert "TopicExistsException" in tools.fail("kafka-topics", *server, *create)
    tools.run("kafka-topics", *server, *create, "--if-not-exists")
    assert "orders" in tools.run("kafka-topics", *server, "--list").split()
    described = tools.run("kafka-topics", *server, "--describe", "--topic", "orders")
    assert "PartitionCount: 2\tReplicationFactor: 3" in described
    assert "retention.ms=3600000" in described
    assert len(re.findall(r"Partition: \d\tLeader: \d\tReplicas: \d,\d,\d\tIsr: \d,\d,\d", described)) == 2
    tools.run("kafka-topics", *server, "--alter", "--topic", "orders", "--partitions", "5")
    assert len(own.describe_topic("orders").partitions) == 5
    assert tools.run("kafka-topics", *server, "--describe", "--under-replicated-partitions").strip() == ""
    tools.run("kafka-topics", *server, "--delete", "--topic", "orders")
    assert "orders" not in own.list_topics()
    tools.fail("kafka-topics", *server, "--delete", "--topic", "orders")


def test_topics_are_described_in_pages(tools: KafkaTools, server: tuple[str, str]) -> None:
    for name, partitions in (("paged-a", 3), ("paged-b", 4)):
        tools.run("kafka-topics", *server, "--create", "--topic", name, "--partitions", str(partitions))
    limit = ("--partition-size-limit-per-response", "2")
    described = tools.run("kafka-topics", *server, "--describe", "--topic", "paged-.*", *limit)
    found = re.findall(r"Topic: (paged-.)\tPartition: (\d)", described)
    assert sorted(found) == [("paged-a", str(n)) for n in range(3)] + [("paged-b", str(n)) for n in range(4)]


def test_settings_of_topics_are_changed_and_shown(tools: KafkaTools, server: tuple[str, str], own: Admin) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "settings")
    entity = ("--entity-type", "topics", "--entity-name", "settings")
    alter = ("kafka-configs", *server, *entity, "--alter")
    tools.run(*alter, "--add-config", "retention.ms=1000,cleanup.policy=[compact,delete],max.message.bytes=2000000")
    config = {"retention.ms": "1000", "cleanup.policy": "compact,delete", "max.message.bytes": "2000000"}
    assert own.describe_topic("settings").config == config
    described = tools.run("kafka-configs", *server, *entity, "--describe")
    assert "retention.ms=1000 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:retention.ms=1000" in described
    tools.run(*alter, "--delete-config", "retention.ms,cleanup.policy")
    assert own.describe_topic("settings").config == {"max.message.bytes": "2000000"}
    assert "unknown" in tools.fail(*alter, "--add-config", "retention.hours=1").lower()
    every = tools.run("kafka-configs", *server, *entity, "--describe", "--all")
    assert "flush.ms=9223372036854775807 sensitive=false synonyms={DEFAULT_CONFIG:" in every


def test_settings_of_brokers_are_shown(tools: KafkaTools, server: tuple[str, str]) -> None:
    entity = ("--entity-type", "brokers", "--entity-name", "1")
    every = tools.run("kafka-configs", *server, *entity, "--describe", "--all")
    assert "broker.id=1 sensitive=false" in every and "log.retention.ms=-1" in every
    tools.run("kafka-configs", *server, *entity, "--describe")
    tools.run("kafka-configs", *server, "--entity-type", "brokers", "--entity-default", "--describe")
    alter = ("--alter", "--add-config", "num.partitions=3")
    assert "dynamically" in tools.fail("kafka-configs", *server, *entity, *alter)


def test_quotas_are_changed_and_shown(tools: KafkaTools, server: tuple[str, str]) -> None:
    for entity, quota in (
        (("--entity-type", "users", "--entity-name", "anna"), "producer_byte_rate=1024"),
        (("--entity-type", "clients", "--entity-default"), "request_percentage=50"),
        (("--entity-type", "ips", "--entity-name", "127.0.0.9"), "connection_creation_rate=7"),
    ):
        tools.run("kafka-configs", *server, *entity, "--alter", "--add-config", quota)
        name = quota.partition("=")[0]
        assert quota in tools.run("kafka-configs", *server, *entity, "--describe")
        tools.run("kafka-configs", *server, *entity, "--alter", "--delete-config", name)
        assert name not in tools.run("kafka-configs", *server, *entity, "--describe")


def test_users_are_changed_and_shown(tools: KafkaTools, server: tuple[str, str], own: Admin) -> None:
    entity = ("--entity-type", "users", "--entity-name", "anna")
    alter = ("kafka-configs", *server, *entity, "--alter")
    tools.run(*alter, "--add-config", "SCRAM-SHA-256=[iterations=8192,password=secret]")
    described = tools.run("kafka-configs", *server, *entity, "--describe")
    assert "SCRAM-SHA-256=iterations=8192" in described
    assert [user.name for user in own.list_users()] == ["anna"]
    tools.run(*alter, "--delete-config", "SCRAM-SHA-256")
    assert own.list_users() == []


def test_the_acls_of_a_cluster_without_an_authorizer_are_refused(tools: KafkaTools, server: tuple[str, str]) -> None:
    for action in (
        ("--list",),
        ("--add", "--allow-principal", "User:anna", "--operation", "read", "--topic", "orders"),
    ):
        found = tools.call("kafka-acls", *server, *action).output
        assert "SecurityDisabledException" in found, found


def test_offsets_are_shown_and_records_deleted(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str], tmp_path: Path
) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "records", "--partitions", "1")
    write(cluster, "records", 10)
    assert tools.run("kafka-get-offsets", *server, "--topic", "records").strip() == "records:0:10"
    wanted = tmp_path / "offsets.json"
    wanted.write_text(json.dumps({"partitions": [{"topic": "records", "partition": 0, "offset": 4}], "version": 1}))
    deleted = tools.run("kafka-delete-records", *server, "--offset-json-file", str(wanted))
    assert "partition: records-0\tlow_watermark: 4" in deleted
    earliest = tools.run("kafka-get-offsets", *server, "--topic", "records", "--time", "earliest")
    assert earliest.strip() == "records:0:4"


def test_log_directories_are_shown(tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str]) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "sized", "--partitions", "1")
    write(cluster, "sized", 100)
    output = tools.run("kafka-log-dirs", *server, "--describe", "--topic-list", "sized")
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    brokers = {broker["broker"]: broker["logDirs"] for broker in json.loads(line)["brokers"]}
    assert brokers.keys() == {0, 1, 2}
    for number, (directory,) in brokers.items():
        assert directory["logDir"] == str(cluster.slots[number].log_dir)
        assert directory["error"] is None
        (partition,) = directory["partitions"]
        assert partition["partition"] == "sized-0" and partition["size"] > 1000


def test_leaders_are_elected(tools: KafkaTools, server: tuple[str, str]) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "led", "--partitions", "1")
    one = ("--election-type", "preferred", "--topic", "led", "--partition", "0")
    assert "Valid replica already elected" in tools.run("kafka-leader-election", *server, *one)
    every = ("--election-type", "preferred", "--all-topic-partitions")
    tools.run("kafka-leader-election", *server, *every)


def test_replicas_are_moved(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str], own: Admin, tmp_path: Path
) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "moved", "--replica-assignment", "0:1")
    write(cluster, "moved", 100)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "partitions": [{"topic": "moved", "partition": 0, "replicas": [2, 0]}]}))
    file = ("--reassignment-json-file", str(plan))
    started = tools.run("kafka-reassign-partitions", *server, *file, "--execute")
    assert "Successfully started partition reassignment for moved-0" in started
    wait_until(lambda: "is completed" in tools.run("kafka-reassign-partitions", *server, *file, "--verify"))
    assert own.describe_topic("moved").partitions[0].replicas == (2, 0)
    assert "No partition reassignments found" in tools.run("kafka-reassign-partitions", *server, "--list")


def test_the_cluster_tells_its_id_and_versions(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str]
) -> None:
    assert cluster.cluster_id in tools.run("kafka-cluster", "cluster-id", *server)
    versions = tools.run("kafka-broker-api-versions", *server)
    assert "CreateTopics(19): 2 to 7 [usable: 7]" in versions
