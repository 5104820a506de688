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
from confluent_kafka import Consumer, Message

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.test_acls import PASSWORD, create_users
from tests.integration.kafka_calls import SECURED_BROKER
from tests.kafka_tools import KafkaTools
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]


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
    with SettledAdmin(cluster.bootstrap) as found:
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


def test_the_cluster_reports_its_id_and_versions(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str]
) -> None:
    assert cluster.cluster_id in tools.run("kafka-cluster", "cluster-id", *server)
    versions = tools.run("kafka-broker-api-versions", *server)
    assert "CreateTopics(19): 2 to 7 [usable: 7]" in versions


def test_groups_are_listed_described_reset_and_deleted(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str]
) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "grouped", "--partitions", "1")
    write(cluster, "grouped", 10)
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "group.id": "readers",
            "client.id": "reader-1",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["grouped"])
    try:
        read: list[Message] = []
        while len(read) < 10:
            read += consumer.consume(10, timeout=1)
        consumer.commit(asynchronous=False)
        described = tools.run("kafka-consumer-groups", *server, "--describe", "--group", "readers")
        assert re.search(r"readers\s+grouped\s+0\s+10\s+10\s+0\s+reader-1", described), described
        members = tools.run("kafka-consumer-groups", *server, "--describe", "--group", "readers", "--members")
        assert "reader-1" in members
    finally:
        consumer.close()
    assert "readers" in tools.run("kafka-consumer-groups", *server, "--list").split()
    assert "readers" in tools.run("kafka-groups", *server, "--list")
    reset = ("--reset-offsets", "--group", "readers", "--topic", "grouped", "--to-offset", "4", "--execute")
    tools.run("kafka-consumer-groups", *server, *reset)
    described = tools.run("kafka-consumer-groups", *server, "--describe", "--group", "readers")
    assert re.search(r"readers\s+grouped\s+0\s+4\s+10\s+6", described), described
    tools.run("kafka-consumer-groups", *server, "--delete", "--group", "readers")
    assert "readers" not in tools.run("kafka-consumer-groups", *server, "--list").split()


def test_transactions_are_listed_and_described(
    tools: KafkaTools, cluster: ProcessCluster, server: tuple[str, str]
) -> None:
    tools.run("kafka-topics", *server, "--create", "--topic", "paid", "--partitions", "1")
    with Producer(cluster.bootstrap, transactional_id="payments") as producer:
        producer.begin()
        producer.send("paid", value=b"v", partition=0)
        producer.flush()
        listed = tools.run("kafka-transactions", *server, "list")
        assert re.search(r"payments\s+\d\s+\d+\s+Ongoing", listed), listed
        described = tools.run("kafka-transactions", *server, "describe", "--transactional-id", "payments")
        assert re.search(r"payments\s+\d+\s+\d+\s+Ongoing.*paid-0", described), described
        producers = tools.run(
            "kafka-transactions", *server, "describe-producers", "--topic", "paid", "--partition", "0"
        )
        assert re.search(r"\d+\s+\d+\s+-1\s+0\s+\d{13}\s+0", producers), producers
        producer.commit()


# --- a cluster with logins and ACLs ---


@pytest.fixture(scope="module")
def guarded() -> Iterator[ProcessCluster]:
    settings = {**SECURED_BROKER, "default.replication.factor": "1"}
    with ProcessCluster(1, settings=settings) as running:
        create_users(running, "admin", "anna")
        yield running


def as_user(guarded: ProcessCluster, tmp_path: Path, name: str, password: str, *, token: bool = False) -> list[str]:
    """Return the arguments of a tool that logs in as this user, or with this delegation token."""
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    file = tmp_path / f"{name}.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
        f'sasl.jaas.config={module} required username="{name}" password="{password}"'
        f"{' tokenauth=true' if token else ''};\n"
    )
    return ["--bootstrap-server", guarded.kafka_bootstrap, "--command-config", str(file)]


def test_acls_are_added_listed_and_removed(tools: KafkaTools, guarded: ProcessCluster, tmp_path: Path) -> None:
    admin = as_user(guarded, tmp_path, "admin", PASSWORD)
    anna = as_user(guarded, tmp_path, "anna", PASSWORD)
    tools.run("kafka-topics", *admin, "--create", "--topic", "orders")
    assert "orders" not in tools.run("kafka-topics", *anna, "--list").split()
    refused = tools.fail("kafka-topics", *anna, "--create", "--topic", "others")
    assert "TopicAuthorizationException" in refused
    added = ("--allow-principal", "User:anna", "--operation", "Describe", "--topic", "ord")
    tools.run("kafka-acls", *admin, "--add", *added, "--resource-pattern-type", "prefixed")
    assert "orders" in tools.run("kafka-topics", *anna, "--list").split()
    listed = tools.run("kafka-acls", *admin, "--list", "--topic", "orders", "--resource-pattern-type", "match")
    assert "name=ord, patternType=PREFIXED" in listed
    assert "(principal=User:anna, host=*, operation=DESCRIBE, permissionType=ALLOW)" in listed
    tools.run("kafka-acls", *admin, "--remove", *added, "--resource-pattern-type", "prefixed", "--force")
    assert "principal=User:anna" not in tools.run("kafka-acls", *admin, "--list")
    assert "ClusterAuthorizationException" in tools.call("kafka-acls", *anna, "--list").output


def test_delegation_tokens_are_created_used_and_expired(
    tools: KafkaTools, guarded: ProcessCluster, tmp_path: Path
) -> None:
    anna = as_user(guarded, tmp_path, "anna", PASSWORD)
    create = ("--create", "--max-life-time-period", "-1", "--renewer-principal", "User:bert")
    created = tools.run("kafka-delegation-tokens", *anna, *create)
    found = re.search(r"^(\S{22})\s+(\S+)\s+User:anna", created, re.MULTILINE)
    assert found is not None, created
    token_id, hmac = found.groups()
    holder = as_user(guarded, tmp_path, token_id, hmac, token=True)
    tools.run("kafka-topics", *holder, "--list")
    assert token_id in tools.run("kafka-delegation-tokens", *anna, "--describe")
    tools.run("kafka-delegation-tokens", *anna, "--renew", "--hmac", hmac, "--renew-time-period", "3600000")
    tools.run("kafka-delegation-tokens", *anna, "--expire", "--hmac", hmac, "--expiry-time-period", "-1")
    assert token_id not in tools.run("kafka-delegation-tokens", *anna, "--describe")
