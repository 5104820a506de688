"""Tests of the administrative requests of Kafka clients on real brokers, with kafka-python's admin client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

kafka: Any = pytest.importorskip("kafka")
kafka_admin: Any = pytest.importorskip("kafka.admin")
errors: Any = pytest.importorskip("kafka.errors")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Any]:
    from tests.integration.kafka_python_sockets import DIRECT

    client = kafka_admin.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","), proxy_url=DIRECT)
    yield client
    client.close()


@pytest.fixture
def own(cluster: ProcessCluster) -> Iterator[Admin]:
    with SettledAdmin(cluster.bootstrap) as found:
        yield found


def test_a_topic_from_its_creation_to_its_deletion(admin: Any, own: Admin) -> None:
    new = kafka_admin.NewTopic("events", 2, 3, topic_configs={"retention.ms": "1000"})
    (created,) = admin.create_topics([new])["topics"]
    assert created["topic_id"].replace("-", "") == own.describe_topic("events").topic_id
    assert created["configs"]["retention.ms"]["value"] == "1000"
    with pytest.raises(errors.TopicAlreadyExistsError):
        admin.create_topics([new])
    (described,) = admin.describe_topics(["events"])
    assert [len(part["isr_nodes"]) for part in described["partitions"]] == [3, 3]
    admin.create_partitions({"events": kafka_admin.NewPartitions(4)})
    assert len(own.describe_topic("events").partitions) == 4
    with pytest.raises(errors.InvalidPartitionsError):
        admin.create_partitions({"events": kafka_admin.NewPartitions(4)})
    admin.delete_topics(["events"])
    assert "events" not in admin.list_topics()


def test_settings_are_altered_and_reset(admin: Any, own: Admin) -> None:
    admin.create_topics([kafka_admin.NewTopic("settings", 1, 3)])
    topic = kafka_admin.ConfigResourceType.TOPIC
    admin.alter_configs([kafka_admin.ConfigResource(topic, "settings", {"flush.ms": "5", "segment.ms": "1000"})])
    assert own.describe_topic("settings").config == {"flush.ms": "5", "segment.ms": "1000"}
    described = admin.describe_configs([kafka_admin.ConfigResource(topic, "settings")])["topic"]["settings"]
    assert described["flush.ms"]["value"] == "5" and described["flush.ms"]["config_type"] == "LONG"
    admin.reset_configs([kafka_admin.ConfigResource(topic, "settings", ["flush.ms"])])
    assert own.describe_topic("settings").config == {"segment.ms": "1000"}


def test_records_are_deleted_and_log_directories_described(admin: Any, cluster: ProcessCluster) -> None:
    admin.create_topics([kafka_admin.NewTopic("sized", 1, 3)])
    with Producer(cluster.bootstrap) as producer:
        for _ in range(5):
            producer.send("sized", value=b"v", partition=0)
        producer.flush()
    (deleted,) = admin.delete_records({kafka.TopicPartition("sized", 0): 3}).values()
    assert (deleted["low_watermark"], deleted["error_code"]) == (3, 0)
    directories = {found["broker"]: found["log_dirs"] for found in admin.describe_log_dirs()}
    for broker_id, (directory,) in directories.items():
        assert directory["log_dir"] == str(cluster.slots[broker_id].log_dir)
        (sized,) = [topic for topic in directory["topics"] if topic["name"] == "sized"]
        assert sized["partitions"][0]["partition_size"] > 0


def test_replicas_move_and_leaders_are_elected(admin: Any, own: Admin) -> None:
    admin.create_topics([kafka_admin.NewTopic("moved", replica_assignments={0: [0, 1]})])
    partition = kafka.TopicPartition("moved", 0)
    admin.alter_partition_reassignments({partition: [2, 1]})
    wait_until(lambda: partition not in admin.list_partition_reassignments())
    assert own.describe_topic("moved").partitions[0].replicas == (2, 1)
    wait_until(lambda: _preferred_leader_leads(admin))


def _preferred_leader_leads(admin: Any) -> bool:
    elected = admin.elect_leaders(0, {"moved": [0]}, raise_errors=False)
    (result,) = elected.replica_election_results[0].partition_result
    return bool(result.error_code == errors.ElectionNotNeededError.errno)


def test_producers_users_and_transactions_are_described(admin: Any, cluster: ProcessCluster) -> None:
    admin.create_topics([kafka_admin.NewTopic("written", 1, 3)])
    with Producer(cluster.bootstrap) as producer:
        producer.send("written", value=b"v", partition=0)
        producer.flush()
        (state,) = admin.describe_producers([kafka.TopicPartition("written", 0)]).values()
    assert [one.last_sequence for one in state.active_producers] == [0]
    assert admin.find_hanging_transactions() == []
    upsertion = kafka_admin.UserScramCredentialUpsertion("anna", kafka_admin.ScramMechanism.SCRAM_SHA_512, "pw", 4096)
    admin.alter_user_scram_credentials([upsertion])
    described = admin.describe_user_scram_credentials(["anna"])["anna"]
    assert [info["iterations"] for info in described["credential_infos"]] == [4096]
    assert ("topic", "written") in {
        (kind, name) for kind, names in admin.list_config_resources().items() for name in names
    }
