"""ACLs on Kafka's requests about groups: a refused topic has its own error, and a refused group is not shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.model import TopicPartition
from sparklog.security.acls import binding
from sparklog.testing.secure_cluster import SecureCluster
from sparklog.testing.settled_admin import SettledAdmin

pytestmark = pytest.mark.integration
PASSWORDS = {"anna": "a-password-of-anna", "bert": "a-password-of-bert"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SecureCluster]:
    listeners = {"kafka.listeners": "SASL_SSL://127.0.0.1:0", "group.initial.rebalance.delay.ms": "0"}
    with SecureCluster(2, settings=listeners) as running:
        for name, password in PASSWORDS.items():
            running.user(name, password)
        with SettledAdmin(running.bootstrap, security=running.client_security) as admin:
            for topic in ("open", "closed", "seen"):
                admin.create_topic(topic, partitions=1, replication_factor=2)
            admin.create_acls(
                [
                    binding("topic", "open", "User:anna", "read"),
                    binding("topic", "seen", "User:anna", "describe"),
                    binding("group", "annas", "User:anna", "read"),
                    binding("group", "annas", "User:bert", "describe"),
                ]
            )
        yield running


def settings_of(cluster: SecureCluster, user: str, group: str, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.kafka_bootstrap,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": cluster.ca,
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": PASSWORDS[user],
        "group.id": group,
        **more,
    }


def code_of(error: Any) -> str:
    return str(error.name())


def test_a_refused_topic_has_an_error_of_its_own(cluster: SecureCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    consumer = confluent.Consumer(settings_of(cluster, "anna", "annas"))
    offsets = [confluent.TopicPartition(topic, 0, 3) for topic in ("open", "closed", "seen")]
    with pytest.raises(confluent.KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        consumer.commit(offsets=offsets, asynchronous=False)
    with SettledAdmin(cluster.bootstrap, security=cluster.client_security) as admin:
        assert admin.group_offsets("annas") == {TopicPartition("open", 0): 3}
    fetched = {one.topic: one for one in consumer.committed(offsets, timeout=30)}
    assert fetched["open"].offset == 3
    assert code_of(fetched["closed"].error) == "TOPIC_AUTHORIZATION_FAILED"
    assert fetched["seen"].error is None, "Describe is enough to read an offset"
    consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_needs_read_on_the_group(cluster: SecureCluster, protocol: str) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    settings = settings_of(cluster, "bert", "annas", **{"group.protocol": protocol})
    consumer = confluent.Consumer(settings)
    consumer.subscribe(["open"])
    found = next(filter(None, (consumer.poll(1) for _ in range(60))), None)
    consumer.close()
    assert found is not None
    assert "authorization failed" in found.error().str()
    with SettledAdmin(cluster.bootstrap, security=cluster.client_security) as admin:
        described = admin.describe_group("annas")
    assert described is None or not described.members


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_with_read_on_group_and_topic_joins(cluster: SecureCluster, protocol: str) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    consumer = confluent.Consumer(settings_of(cluster, "anna", "annas", **{"group.protocol": protocol}))
    assigned: list[int] = []
    consumer.subscribe(["open"], on_assign=lambda _, partitions: assigned.extend(one.partition for one in partitions))
    for _ in range(60):
        consumer.poll(0.5)
        if assigned:
            break
    consumer.close()
    assert assigned == [0]


def test_a_list_shows_only_groups_with_describe(cluster: SecureCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    admins = {user: confluent.AdminClient(settings_of(cluster, user, "x")) for user in PASSWORDS}
    with SettledAdmin(cluster.bootstrap, security=cluster.client_security) as own:
        for group in ("annas", "others"):
            own.commit_offsets(group, {TopicPartition("open", 0): 1})
    listed = {
        user: {one.group_id for one in admin.list_consumer_groups().result(30).valid} for user, admin in admins.items()
    }
    assert listed == {"anna": {"annas"}, "bert": {"annas"}}
    refused = admins["anna"].delete_consumer_groups(["annas"])["annas"].exception(30)
    assert code_of(refused.args[0]) == "GROUP_AUTHORIZATION_FAILED"
