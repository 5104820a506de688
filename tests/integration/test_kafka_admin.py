"""Tests of the administrative requests of Kafka clients on real brokers, with confluent-kafka's AdminClient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import ElectionType, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from confluent_kafka.error import KafkaError

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin

pytestmark = pytest.mark.integration

TIMEOUT_S = 30
NEVER = str(2**63 - 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})


@pytest.fixture
def own(cluster: ProcessCluster) -> Iterator[Admin]:
    """Return sparklog's own admin client, to see what a Kafka client has done."""
    with SettledAdmin(cluster.bootstrap) as found:
        yield found


def results(futures: dict[Any, Any]) -> dict[Any, Any]:
    """Wait for a client's futures, and return their results."""
    return {key: future.result(TIMEOUT_S) for key, future in futures.items()}


def error(future: Any) -> Any:
    """Return the error of a client's future."""
    with pytest.raises(KafkaException) as caught:
        future.result(TIMEOUT_S)
    return caught.value.args[0]


def create(admin: AdminClient, name: str, partitions: int = 2, factor: int = 3, **config: str) -> None:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    results(admin.create_topics([NewTopic(name, partitions, factor, config=settings)]))


def configs(admin: AdminClient, name: str, kind: Any = ResourceType.TOPIC) -> dict[str, ConfigEntry]:
    (found,) = results(admin.describe_configs([ConfigResource(kind, name)])).values()
    return found  # type: ignore[no-any-return]


# --- topics ---


def test_a_topic_is_created_with_its_settings(admin: AdminClient, own: Admin) -> None:
    create(admin, "created", 4, 2, retention_ms="3600000", flush_ms=NEVER, compression_type="lz4")
    topic = own.describe_topic("created")
    assert [len(partition.replicas) for partition in topic.partitions] == [2] * 4
    assert topic.config == {"retention.ms": "3600000", "flush.ms": "0"}
    assert topic.schema.names == ["key", "value", "headers", "timestamp"]


def test_the_brokers_defaults_apply_to_minus_one(admin: AdminClient, own: Admin) -> None:
    create(admin, "defaults", -1, -1)
    assert [len(partition.replicas) for partition in own.describe_topic("defaults").partitions] == [3]


def test_a_topic_gets_the_assignment_that_the_client_chooses(admin: AdminClient, own: Admin) -> None:
    new = NewTopic("assigned", num_partitions=2, replica_assignment=[[2, 0], [1, 2]])
    results(admin.create_topics([new]))
    assert [partition.replicas for partition in own.describe_topic("assigned").partitions] == [(2, 0), (1, 2)]


def test_a_validated_topic_is_not_created(admin: AdminClient, own: Admin) -> None:
    results(admin.create_topics([NewTopic("validated", 2, 3)], validate_only=True))
    assert "validated" not in own.list_topics()
    futures = admin.create_topics([NewTopic("validated", 2, 9)], validate_only=True)
    assert error(futures["validated"]).code() == KafkaError.INVALID_REPLICATION_FACTOR


@pytest.mark.parametrize(
    ("new", "code"),
    [
        (NewTopic("bad/name", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("__reserved", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("many", 1, 4), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("none", 0, 1), KafkaError.INVALID_PARTITIONS),
        (NewTopic("odd", 1, 1, config={"retention.hours": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("low", 1, 1, config={"segment.bytes": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("tiered", 1, 1, config={"remote.storage.enable": "true"}), KafkaError.INVALID_CONFIG),
        (NewTopic("json", 1, 1, config={"kafka.value.format": "json"}), KafkaError.INVALID_CONFIG),
        (NewTopic("absent", 1, replica_assignment=[[7]]), KafkaError.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_a_refused_topic_has_kafkas_error(admin: AdminClient, new: NewTopic, code: int) -> None:
    futures = admin.create_topics([new, NewTopic("beside", 1, 1)], validate_only=True)
    found = error(futures[new.topic])
    assert found.code() == code, found
    futures["beside"].result(TIMEOUT_S)


def test_a_topic_is_not_created_twice(admin: AdminClient) -> None:
    create(admin, "twice")
    found = error(admin.create_topics([NewTopic("twice", 1, 1)])["twice"])
    assert found.code() == KafkaError.TOPIC_ALREADY_EXISTS


def test_topics_are_deleted(admin: AdminClient, own: Admin) -> None:
    create(admin, "deleted")
    futures = admin.delete_topics(["deleted", "never-existed"])
    futures["deleted"].result(TIMEOUT_S)
    assert error(futures["never-existed"]).code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert "deleted" not in own.list_topics()


def test_a_topic_gets_more_partitions(admin: AdminClient, own: Admin) -> None:
    create(admin, "grown", 1, 2)
    results(admin.create_partitions([NewPartitions("grown", 3)], validate_only=True))
    assert len(own.describe_topic("grown").partitions) == 1
    results(admin.create_partitions([NewPartitions("grown", 3, [[0, 1], [2, 0]])]))
    assert [partition.replicas for partition in own.describe_topic("grown").partitions][1:] == [(0, 1), (2, 0)]
    for count, validate_only in ((3, False), (2, True)):
        futures = admin.create_partitions([NewPartitions("grown", count)], validate_only=validate_only)
        assert error(futures["grown"]).code() == KafkaError.INVALID_PARTITIONS


def test_a_topic_is_described_with_its_partitions(admin: AdminClient, own: Admin) -> None:
    create(admin, "described", 3)
    (found,) = results(admin.describe_topics(TopicCollection(["described"]))).values()
    described = own.describe_topic("described")
    assert [partition.id for partition in found.partitions] == [0, 1, 2]
    assert [partition.leader.id for partition in found.partitions] == [one.leader for one in described.partitions]
    assert not found.is_internal


def test_records_are_deleted(admin: AdminClient, cluster: ProcessCluster) -> None:
    create(admin, "shortened", 1)
    with Producer(cluster.bootstrap) as producer:
        for number in range(10):
            producer.send("shortened", value=b"%d" % number, partition=0)
        producer.flush()
    (deleted,) = results(admin.delete_records([TopicPartition("shortened", 0, 7)])).values()
    assert deleted.low_watermark == 7
    (deleted,) = results(admin.delete_records([TopicPartition("shortened", 0, -1)])).values()
    assert deleted.low_watermark == 10
    (future,) = admin.delete_records([TopicPartition("shortened", 0, 11)]).values()
    assert error(future).code() == KafkaError.OFFSET_OUT_OF_RANGE


# --- settings ---


def test_the_settings_of_a_topic_name_their_source(admin: AdminClient) -> None:
    create(admin, "configured", min_insync_replicas="1")
    found = configs(admin, "configured")
    assert found["min.insync.replicas"].value == "1"
    assert found["min.insync.replicas"].source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert found["retention.ms"].value == "-1"
    assert found["retention.ms"].source == ConfigSource.STATIC_BROKER_CONFIG.value
    assert found["flush.ms"].value == NEVER
    assert found["flush.ms"].source == ConfigSource.DEFAULT_CONFIG.value and found["flush.ms"].is_default
    assert found["restoring"].is_read_only and not found["flush.ms"].is_read_only
    assert not any(entry.is_sensitive for entry in found.values())


def test_the_settings_of_a_broker_are_read_only(admin: AdminClient, cluster: ProcessCluster) -> None:
    found = configs(admin, "1", ResourceType.BROKER)
    assert all(entry.is_read_only for entry in found.values())
    assert found["broker.id"].value == "1"
    assert found["log.dirs"].value == str(cluster.slots[1].log_dir)
    assert found["log.retention.ms"].value == "-1"
    assert found["internal.topic.replication.factor"].value == "3"


def test_an_unknown_topic_has_no_settings(admin: AdminClient) -> None:
    (future,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, "never-existed")]).values()
    assert error(future).code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def change(name: str, kind: AlterConfigOpType, value: str | None = None) -> ConfigEntry:
    return ConfigEntry(name, value, incremental_operation=kind)


def test_settings_change_one_by_one(admin: AdminClient, own: Admin) -> None:
    create(admin, "altered", retention_ms="1000", segment_ms="1000")
    wanted = [
        change("retention.ms", AlterConfigOpType.DELETE),
        change("flush.messages", AlterConfigOpType.SET, "5"),
        change("cleanup.policy", AlterConfigOpType.APPEND, "compact"),
        change("compression.type", AlterConfigOpType.SET, "zstd"),
    ]
    resource = ConfigResource(ResourceType.TOPIC, "altered", incremental_configs=wanted)
    results(admin.incremental_alter_configs([resource], validate_only=True))
    assert own.describe_topic("altered").config == {"retention.ms": "1000", "segment.ms": "1000"}
    results(admin.incremental_alter_configs([resource]))
    altered = {"segment.ms": "1000", "flush.messages": "5", "cleanup.policy": "delete,compact"}
    assert own.describe_topic("altered").config == altered
    subtracted = [change("cleanup.policy", AlterConfigOpType.SUBTRACT, "delete")]
    results(
        admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, "altered", incremental_configs=subtracted)])
    )
    assert own.describe_topic("altered").config["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (change("retention.hours", AlterConfigOpType.SET, "1"), KafkaError.INVALID_CONFIG),
        (change("retention.hours", AlterConfigOpType.DELETE), KafkaError.INVALID_CONFIG),
        (change("segment.bytes", AlterConfigOpType.SET, "few"), KafkaError.INVALID_CONFIG),
        (change("segment.bytes", AlterConfigOpType.APPEND, "1"), KafkaError.INVALID_CONFIG),
        (change("restoring", AlterConfigOpType.SET, "true"), KafkaError.INVALID_CONFIG),
        (change("local.retention.ms", AlterConfigOpType.SET, "1"), KafkaError.INVALID_CONFIG),
    ],
)
@pytest.mark.parametrize("validate_only", [True, False])
def test_a_refused_setting_changes_nothing(
    admin: AdminClient, own: Admin, entry: ConfigEntry, code: int, validate_only: bool
) -> None:
    if "steady" not in own.list_topics():
        create(admin, "steady")
    entries = [entry, change("flush.ms", AlterConfigOpType.SET, "5")]
    resource = ConfigResource(ResourceType.TOPIC, "steady", incremental_configs=entries)
    (future,) = admin.incremental_alter_configs([resource], validate_only=validate_only).values()
    assert error(future).code() == code
    assert own.describe_topic("steady").config == {}


@pytest.mark.filterwarnings("ignore:alter_configs has been deprecated")
def test_alter_configs_replaces_all_settings(admin: AdminClient, own: Admin) -> None:
    create(admin, "replaced", retention_ms="1000", segment_ms="1000")
    resource = ConfigResource(ResourceType.TOPIC, "replaced", set_config={"segment.ms": "2000", "flush.ms": "7"})
    results(admin.alter_configs([resource]))
    assert own.describe_topic("replaced").config == {"segment.ms": "2000", "flush.ms": "7"}


def test_a_brokers_settings_cannot_be_changed(admin: AdminClient) -> None:
    entries = [change("num.partitions", AlterConfigOpType.SET, "5")]
    resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=entries)
    (future,) = admin.incremental_alter_configs([resource]).values()
    assert error(future).code() == KafkaError.INVALID_REQUEST


# --- leaders, ACLs and users ---


def test_the_preferred_leader_is_elected(admin: AdminClient, own: Admin) -> None:
    create(admin, "elected", 1)
    found = admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition("elected", 0)]).result(TIMEOUT_S)
    assert found[TopicPartition("elected", 0)].code() == KafkaError.ELECTION_NOT_NEEDED
    found = admin.elect_leaders(ElectionType.UNCLEAN, [TopicPartition("never-existed", 0)]).result(TIMEOUT_S)
    assert found[TopicPartition("never-existed", 0)].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_cluster_without_an_authorizer_has_no_acls(admin: AdminClient) -> None:
    pattern = ("orders", ResourcePatternType.LITERAL, "User:anna", "*", AclOperation.READ, AclPermissionType.ALLOW)
    (created,) = admin.create_acls([AclBinding(ResourceType.TOPIC, *pattern)]).values()
    (deleted,) = admin.delete_acls([AclBindingFilter(ResourceType.TOPIC, *pattern)]).values()
    for future in (created, deleted):
        assert error(future).code() == KafkaError.SECURITY_DISABLED


def test_users_get_scram_credentials(admin: AdminClient, own: Admin) -> None:
    sha_256, sha_512 = (
        ScramCredentialInfo(mechanism, 4096)
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
    )
    wanted = [
        UserScramCredentialUpsertion("anna", sha_256, b"secret"),
        UserScramCredentialUpsertion("anna", sha_512, b"secret"),
        UserScramCredentialUpsertion("otto", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 100), b"secret"),
    ]
    futures = admin.alter_user_scram_credentials(wanted)
    futures["anna"].result(TIMEOUT_S)
    assert error(futures["otto"]).code() == KafkaError.UNACCEPTABLE_CREDENTIAL
    described = results(admin.describe_user_scram_credentials(["anna"]))["anna"]
    assert [(info.mechanism, info.iterations) for info in described.scram_credential_infos] == [
        (ScramMechanism.SCRAM_SHA_256, 4096),
        (ScramMechanism.SCRAM_SHA_512, 4096),
    ]
    assert [user.name for user in own.list_users()] == ["anna"]
    results(admin.alter_user_scram_credentials([UserScramCredentialDeletion("anna", ScramMechanism.SCRAM_SHA_256)]))
    results(admin.alter_user_scram_credentials([UserScramCredentialDeletion("anna", ScramMechanism.SCRAM_SHA_512)]))
    futures = admin.describe_user_scram_credentials(["anna"])
    assert error(futures["anna"]).code() == KafkaError.RESOURCE_NOT_FOUND
