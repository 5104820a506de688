"""Tests of Kafka's administrative requests in all their versions, on the Kafka listener of real brokers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.kafka.wire import API_VERSIONS, ZERO_UUID, ApiKey
from sparklog.kafka.wire import admin as wire
from sparklog.kafka.wire.metadata import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    TopicRequest,
)
from sparklog.kafka.wire.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from sparklog.kafka.wire.transactions import TopicRequest as ProducersTopic
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_calls import KafkaCalls
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

MANY = 30_000
TRANSACTIONAL_ID_NOT_FOUND = 105
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture
def calls(cluster: ProcessCluster) -> Iterator[KafkaCalls]:
    with calls_to(cluster, 0) as found:
        yield found


@pytest.fixture
def own(cluster: ProcessCluster) -> Iterator[Admin]:
    with SettledAdmin(cluster.bootstrap) as found:
        yield found


def calls_to(cluster: ProcessCluster, broker_id: int) -> KafkaCalls:
    return KafkaCalls(cluster.slots[broker_id].kafka_address)


def calls_to_leader(cluster: ProcessCluster, own: Admin, topic: str) -> KafkaCalls:
    leader = own.describe_topic(topic).partitions[0].leader
    assert leader is not None
    return calls_to(cluster, leader)


def versions(api_key: ApiKey) -> list[int]:
    low, high = API_VERSIONS[api_key]
    return list(range(low, high + 1))


def new_name() -> str:
    return f"topic-{next(_numbers)}"


def topic_id(own: Admin, name: str) -> bytes:
    return bytes.fromhex(own.describe_topic(name).topic_id)


def created(own: Admin, partitions: int = 1, factor: int = 3) -> str:
    name = new_name()
    own.create_topic(name, partitions=partitions, replication_factor=factor)
    return name


# --- topics ---


@pytest.mark.parametrize("version", versions(ApiKey.CREATE_TOPICS))
def test_topics_are_created_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = new_name()
    new = wire.CreatableTopic(
        name=name,
        num_partitions=2,
        replication_factor=3,
        configs=[wire.CreatableTopicConfig(name="retention.ms", value="1000")],
    )
    bad = wire.CreatableTopic(name="bad/name", num_partitions=1, replication_factor=1)
    request = wire.CreateTopicsRequest(topics=[new, bad], timeout_ms=MANY)
    found, refused = calls.ask(ApiKey.CREATE_TOPICS, version, request).topics
    assert (found.name, found.error_code, found.error_message) == (name, 0, None)
    assert refused.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION and refused.error_message
    assert own.describe_topic(name).config == {"retention.ms": "1000"}
    if version >= 5:
        assert (found.num_partitions, found.replication_factor) == (2, 3)
        assert ("retention.ms", "1000", 1) in {(one.name, one.value, one.config_source) for one in found.configs}
    if version >= 7:
        assert found.topic_id == topic_id(own, name)


def test_a_topic_named_twice_is_not_created(calls: KafkaCalls, own: Admin) -> None:
    name = new_name()
    new = wire.CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    request = wire.CreateTopicsRequest(topics=[new, new], timeout_ms=MANY)
    (found,) = calls.ask(ApiKey.CREATE_TOPICS, 7, request).topics
    assert found.error_code == ErrorCode.INVALID_REQUEST
    assert name not in own.list_topics()


def test_contradicting_assignments_are_refused(calls: KafkaCalls) -> None:
    first, third = (wire.CreatableReplicaAssignment(partition_index=number, broker_ids=[0]) for number in (0, 2))
    for factor, assignments, code in (
        (1, [first], ErrorCode.INVALID_REQUEST),
        (-1, [first, third], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (-1, [first, first], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ):
        new = wire.CreatableTopic(
            name=new_name(), num_partitions=-1, replication_factor=factor, assignments=assignments
        )
        (found,) = calls.ask(ApiKey.CREATE_TOPICS, 7, wire.CreateTopicsRequest(topics=[new])).topics
        assert found.error_code == code, found


@pytest.mark.parametrize("version", versions(ApiKey.DELETE_TOPICS))
def test_topics_are_deleted_by_name_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = created(own)
    if version >= 6:
        request = wire.DeleteTopicsRequest(topics=[wire.DeleteTopicState(name=name)], timeout_ms=MANY)
    else:
        request = wire.DeleteTopicsRequest(topic_names=[name], timeout_ms=MANY)
    (found,) = calls.ask(ApiKey.DELETE_TOPICS, version, request).responses
    assert (found.name, found.error_code) == (name, 0)
    assert name not in own.list_topics()


def test_topics_are_deleted_by_id(calls: KafkaCalls, own: Admin) -> None:
    name = created(own)
    wanted = topic_id(own, name)
    unknown = bytes(range(16))
    request = wire.DeleteTopicsRequest(
        topics=[wire.DeleteTopicState(topic_id=one) for one in (wanted, unknown)], timeout_ms=MANY
    )
    found, refused = calls.ask(ApiKey.DELETE_TOPICS, 6, request).responses
    assert (found.name, found.topic_id, found.error_code) == (name, wanted, 0)
    assert (refused.name, refused.topic_id, refused.error_code) == (None, unknown, ErrorCode.UNKNOWN_TOPIC_ID)
    assert name not in own.list_topics()


def test_a_topic_to_delete_has_either_a_name_or_an_id(calls: KafkaCalls, own: Admin) -> None:
    name = created(own)
    both = wire.DeleteTopicState(name=name, topic_id=topic_id(own, name))
    twice = wire.DeleteTopicState(name=name)
    request = wire.DeleteTopicsRequest(topics=[both, wire.DeleteTopicState(), twice, twice], timeout_ms=MANY)
    found = calls.ask(ApiKey.DELETE_TOPICS, 6, request).responses
    assert [one.error_code for one in found] == [ErrorCode.INVALID_REQUEST] * 3
    assert name in own.list_topics()


@pytest.mark.parametrize("version", versions(ApiKey.CREATE_PARTITIONS))
def test_topics_grow_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = created(own)
    wanted = [
        wire.CreatePartitionsTopic(name=name, count=2, assignments=None),
        wire.CreatePartitionsTopic(name="never-existed", count=2, assignments=None),
    ]
    request = wire.CreatePartitionsRequest(topics=wanted, timeout_ms=MANY)
    found = calls.ask(ApiKey.CREATE_PARTITIONS, version, request).results
    assert [one.error_code for one in found] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert len(own.describe_topic(name).partitions) == 2


@pytest.mark.parametrize("version", versions(ApiKey.DELETE_RECORDS))
def test_records_are_deleted_in_all_versions(cluster: ProcessCluster, own: Admin, version: int) -> None:
    name = created(own)
    with Producer(cluster.bootstrap) as producer:
        for _ in range(5):
            producer.send(name, value=b"v", partition=0)
        producer.flush()
    wanted = [
        wire.DeleteRecordsTopic(
            name=name, partitions=[wire.DeleteRecordsPartition(partition_index=number, offset=3) for number in (0, 9)]
        )
    ]
    with calls_to_leader(cluster, own, name) as calls:
        request = wire.DeleteRecordsRequest(topics=wanted, timeout_ms=MANY)
        (topic,) = calls.ask(ApiKey.DELETE_RECORDS, version, request).topics
    deleted, unknown = topic.partitions
    assert (topic.name, deleted.low_watermark, deleted.error_code) == (name, 3, 0)
    assert (unknown.low_watermark, unknown.error_code) == (-1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def test_topics_are_described_page_by_page(calls: KafkaCalls, own: Admin) -> None:
    names = sorted((created(own, 3), created(own, 1), created(own, 2)))
    expected = [(name, part.partition) for name in names for part in own.describe_topic(name).partitions]
    found: list[tuple[str, int]] = []
    cursor: Cursor | None = None
    for _ in range(10):
        request = DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name=name) for name in reversed(names)], response_partition_limit=2, cursor=cursor
        )
        page: DescribeTopicPartitionsResponse = calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)
        assert sum(len(topic.partitions) for topic in page.topics) <= 2
        found += [(str(topic.name), one.partition_index) for topic in page.topics for one in topic.partitions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == expected


def test_a_described_partition_has_its_replicas(calls: KafkaCalls, own: Admin) -> None:
    name = created(own, 2)
    request = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=name), TopicRequest(name="never-existed")])
    page = calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)
    unknown, topic = page.topics
    assert (unknown.name, unknown.error_code) == ("never-existed", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert topic.topic_id == topic_id(own, name)
    for found, part in zip(topic.partitions, own.describe_topic(name).partitions, strict=True):
        assert (found.leader_id, found.leader_epoch) == (part.leader, part.leader_epoch)
        assert (tuple(found.replica_nodes), set(found.isr_nodes)) == (part.replicas, set(part.isr))
        assert (found.error_code, found.offline_replicas, found.eligible_leader_replicas) == (0, [], [])


# --- settings and replicas ---


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_CONFIGS))
def test_settings_are_described_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = created(own)
    own.alter_topic(name, config={"retention.ms": "1000"})
    keys = ["retention.ms", "cleanup.policy", "never.existed"]
    wanted = wire.DescribeConfigsResource(resource_type=2, resource_name=name, configuration_keys=keys)
    other = wire.DescribeConfigsResource(resource_type=4, resource_name="1", configuration_keys=None)
    unknown = wire.DescribeConfigsResource(resource_type=16, resource_name="x", configuration_keys=None)
    request = wire.DescribeConfigsRequest(
        resources=[wanted, other, unknown], include_synonyms=True, include_documentation=True
    )
    topic, *refused = calls.ask(ApiKey.DESCRIBE_CONFIGS, version, request).results
    assert [one.error_code for one in refused] == [ErrorCode.INVALID_REQUEST] * 2
    found = {config.name: config for config in topic.configs}
    assert sorted(found) == ["cleanup.policy", "retention.ms"]
    retention = found["retention.ms"]
    assert (retention.value, retention.config_source, retention.read_only) == ("1000", 1, False)
    assert [(one.value, one.source) for one in retention.synonyms] == [("1000", 1), ("-1", 4), ("604800000", 5)]
    if version >= 3:
        assert (retention.config_type, found["cleanup.policy"].config_type) == (5, 7)
        assert "segments" in retention.documentation


@pytest.mark.parametrize("version", versions(ApiKey.INCREMENTAL_ALTER_CONFIGS))
def test_settings_are_altered_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = created(own)

    def resource(*operations: int) -> Any:
        changes = [
            wire.IncrementalAlterableConfig(name="flush.ms", config_operation=operation, value="9")
            for operation in operations
        ]
        return wire.IncrementalAlterConfigsResource(resource_type=2, resource_name=name, configs=changes)

    def codes(*resources: Any) -> list[int]:
        request = wire.IncrementalAlterConfigsRequest(resources=list(resources))
        found = calls.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, version, request).responses
        return [one.error_code for one in found]

    assert codes(resource(0)) == [0]
    assert own.describe_topic(name).config == {"flush.ms": "9"}
    assert codes(resource(0, 1)) == codes(resource(7)) == [ErrorCode.INVALID_REQUEST]
    assert codes(resource(1), resource(1)) == [ErrorCode.INVALID_REQUEST] * 2
    assert own.describe_topic(name).config == {"flush.ms": "9"}
    assert codes(resource(1)) == [0]
    assert own.describe_topic(name).config == {}


@pytest.mark.parametrize("version", versions(ApiKey.ALTER_CONFIGS))
def test_settings_are_replaced_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = created(own)
    own.alter_topic(name, config={"retention.ms": "1000"})
    for validate_only, expected in ((True, {"retention.ms": "1000"}), (False, {"flush.ms": "9"})):
        configs = [wire.AlterableConfig(name="flush.ms", value="9")]
        resource = wire.AlterConfigsResource(resource_type=2, resource_name=name, configs=configs)
        request = wire.AlterConfigsRequest(resources=[resource], validate_only=validate_only)
        (found,) = calls.ask(ApiKey.ALTER_CONFIGS, version, request).responses
        assert (found.error_code, found.resource_name) == (0, name)
        assert own.describe_topic(name).config == expected


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_LOG_DIRS))
def test_log_directories_are_described_in_all_versions(
    cluster: ProcessCluster, calls: KafkaCalls, own: Admin, version: int
) -> None:
    name = created(own, 2)
    wanted = [wire.DescribableLogDirTopic(topic=name, partitions=[1])]
    for topics in (wanted, None):
        response = calls.ask(ApiKey.DESCRIBE_LOG_DIRS, version, wire.DescribeLogDirsRequest(topics=topics))
        (directory,) = response.results
        assert directory.log_dir == str(cluster.slots[0].log_dir)
        found = {topic.name: [one.partition_index for one in topic.partitions] for topic in directory.topics}
        assert sorted(found[name]) == ([1] if topics else [0, 1])
        assert (len(found) == 1) == bool(topics)
        assert (directory.total_bytes >= directory.usable_bytes > 0) == (version >= 4)


@pytest.mark.parametrize("version", versions(ApiKey.ELECT_LEADERS))
def test_leaders_are_elected_in_all_versions(
    cluster: ProcessCluster, calls: KafkaCalls, own: Admin, version: int
) -> None:
    name = created(own)
    topics = [wire.TopicPartitions(topic=name, partitions=[0, 4])]
    request = wire.ElectLeadersRequest(election_type=0, topic_partitions=topics, timeout_ms=MANY)
    response = calls.ask(ApiKey.ELECT_LEADERS, version, request)
    (topic,) = response.replica_election_results
    codes = {one.partition_id: one.error_code for one in topic.partition_result}
    assert codes == {0: ErrorCode.ELECTION_NOT_NEEDED, 4: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    every = wire.ElectLeadersRequest(election_type=0, topic_partitions=None, timeout_ms=MANY)
    assert calls.ask(ApiKey.ELECT_LEADERS, version, every).replica_election_results == []
    if version >= 1:
        odd = wire.ElectLeadersRequest(election_type=5, topic_partitions=topics, timeout_ms=MANY)
        assert calls.ask(ApiKey.ELECT_LEADERS, version, odd).error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("version", versions(ApiKey.ALTER_PARTITION_REASSIGNMENTS))
def test_replicas_move_in_all_versions(calls: KafkaCalls, own: Admin, version: int) -> None:
    name = new_name()
    replicas = [wire.CreatableReplicaAssignment(partition_index=number, broker_ids=[0, 1]) for number in range(2)]
    new = wire.CreatableTopic(name=name, num_partitions=-1, replication_factor=-1, assignments=replicas)
    (made,) = calls.ask(ApiKey.CREATE_TOPICS, 7, wire.CreateTopicsRequest(topics=[new])).topics
    assert made.error_code == 0

    def alter(*moves: tuple[int, list[int] | None], may_grow: bool = True) -> dict[int, int]:
        partitions = [wire.ReassignablePartition(partition_index=one, replicas=target) for one, target in moves]
        request = wire.AlterPartitionReassignmentsRequest(
            topics=[wire.ReassignableTopic(name=name, partitions=partitions)],
            timeout_ms=MANY,
            allow_replication_factor_change=may_grow,
        )
        (topic,) = calls.ask(ApiKey.ALTER_PARTITION_REASSIGNMENTS, version, request).responses
        return {one.partition_index: one.error_code for one in topic.partitions}

    assert alter((0, [2, 1]), (1, [7]), (5, [0, 1])) == {
        0: 0,
        1: ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        5: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    own.wait_until_moved({TopicPartition(name, 0): (2, 1)}, timeout_s=30)
    assert own.describe_topic(name).partitions[0].replicas == (2, 1)
    assert alter((1, None)) == {1: ErrorCode.NO_REASSIGNMENT_IN_PROGRESS}
    if version >= 1:
        codes = alter((0, [2, 1, 0]), (1, [1, 0]), may_grow=False)
        assert codes == {0: ErrorCode.INVALID_REPLICATION_FACTOR, 1: 0}


def test_moves_are_listed_until_they_are_complete(calls: KafkaCalls, own: Admin) -> None:
    name = created(own, 1, 2)
    target = tuple(reversed(own.describe_topic(name).partitions[0].replicas))
    own.reassign({TopicPartition(name, 0): target})

    def listed(topics: Any) -> list[str]:
        request = wire.ListPartitionReassignmentsRequest(topics=topics)
        response = calls.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, request)
        assert (response.error_code, response.error_message) == (0, None)
        return [topic.name for topic in response.topics]

    wait_until(lambda: name not in listed(None))
    assert listed([wire.ListPartitionReassignmentsTopics(name=name, partition_indexes=[0])]) == []
    assert own.describe_topic(name).partitions[0].replicas == target


def test_resources_with_settings_are_listed(calls: KafkaCalls, own: Admin) -> None:
    name = created(own)
    every = calls.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, wire.ListConfigResourcesRequest()).config_resources
    listed = {(one.resource_type, one.resource_name) for one in every}
    assert listed >= {(2, name), (4, "0"), (4, "1"), (4, "2")}
    groups = calls.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, wire.ListConfigResourcesRequest(resource_types=[32]))
    assert (groups.error_code, groups.config_resources) == (0, [])
    odd = calls.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, wire.ListConfigResourcesRequest(resource_types=[3]))
    assert odd.error_code == ErrorCode.UNSUPPORTED_VERSION
    metrics = calls.ask(ApiKey.LIST_CONFIG_RESOURCES, 0, wire.ListConfigResourcesRequest())
    assert (metrics.error_code, metrics.config_resources) == (0, [])


# --- producers and transactions ---


def test_producers_of_a_partition_are_described(cluster: ProcessCluster, own: Admin) -> None:
    name = created(own)
    with Producer(cluster.bootstrap) as producer:
        for _ in range(3):
            producer.send(name, value=b"v", partition=0)
        producer.flush()
        with calls_to_leader(cluster, own, name) as calls:
            request = DescribeProducersRequest(topics=[ProducersTopic(name=name, partition_indexes=[0, 1])])
            (topic,) = calls.ask(ApiKey.DESCRIBE_PRODUCERS, 0, request).topics
    found, unknown = topic.partitions
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (one,) = found.active_producers
    assert one.producer_id >= 0 and one.last_sequence == 2 and one.last_timestamp > 1_600_000_000_000
    assert one.current_txn_start_offset == -1


def test_repeated_names_are_described_once(cluster: ProcessCluster, own: Admin, calls: KafkaCalls) -> None:
    name = created(own)
    topic = ProducersTopic(name=name, partition_indexes=[0] * 1000)
    (found,) = calls.ask(ApiKey.DESCRIBE_PRODUCERS, 0, DescribeProducersRequest(topics=[topic] * 100)).topics
    assert [one.partition_index for one in found.partitions] == [0]
    transactions = DescribeTransactionsRequest(transactional_ids=["any"] * 1000)
    assert len(calls.ask(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactions).transaction_states) == 1
    resource = wire.DescribeConfigsResource(resource_type=2, resource_name=name, configuration_keys=None)
    results = calls.ask(ApiKey.DESCRIBE_CONFIGS, 4, wire.DescribeConfigsRequest(resources=[resource] * 1000)).results
    assert [one.resource_name for one in results] == [name]


def test_an_open_transaction_is_described(cluster: ProcessCluster, own: Admin) -> None:
    name, transactional_id = created(own, 2), new_name()
    with Producer(cluster.bootstrap, transactional_id=transactional_id) as producer:
        producer.begin()
        producer.send(name, value=b"v", partition=1)
        producer.flush()
        described = [described_transaction(cluster, number, transactional_id) for number in cluster.slots]
        listed = [listed_transactions(cluster, number) for number in cluster.slots]
        with calls_to(cluster, own.describe_topic(name).partitions[1].leader or 0) as calls:
            request = DescribeProducersRequest(topics=[ProducersTopic(name=name, partition_indexes=[1])])
            (writer,) = calls.ask(ApiKey.DESCRIBE_PRODUCERS, 0, request).topics[0].partitions[0].active_producers
        producer.commit()
    (found,) = [one for one in described if not one.error_code]
    assert sorted(one.error_code for one in described) == [0, ErrorCode.NOT_COORDINATOR, ErrorCode.NOT_COORDINATOR]
    assert (found.transactional_id, found.transaction_state) == (transactional_id, "Ongoing")
    assert [(topic.topic, topic.partitions) for topic in found.topics] == [(name, [1])]
    assert found.transaction_timeout_ms > 0 and found.transaction_start_time_ms > 1_600_000_000_000
    assert (writer.producer_id, writer.current_txn_start_offset) == (found.producer_id, 0)
    assert (transactional_id, found.producer_id, "Ongoing") in {one for each in listed for one in each}


def described_transaction(cluster: ProcessCluster, broker_id: int, transactional_id: str) -> Any:
    with calls_to(cluster, broker_id) as calls:
        request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
        return calls.ask(ApiKey.DESCRIBE_TRANSACTIONS, 0, request).transaction_states[0]


def listed_transactions(cluster: ProcessCluster, broker_id: int, **filters: Any) -> list[tuple[str, int, str]]:
    with calls_to(cluster, broker_id) as calls:
        response = calls.ask(ApiKey.LIST_TRANSACTIONS, 2, ListTransactionsRequest(**filters))
        assert response.error_code == 0
        return [(one.transactional_id, one.producer_id, one.transaction_state) for one in response.transaction_states]


def test_transactions_are_listed_by_filters(cluster: ProcessCluster, own: Admin) -> None:
    name, transactional_id = created(own), f"filtered-{new_name()}"
    with Producer(cluster.bootstrap, transactional_id=transactional_id) as producer:
        producer.begin()
        producer.send(name, value=b"v", partition=0)
        producer.commit()

    def listed(**filters: Any) -> list[str]:
        return [one for number in cluster.slots for one, _, _ in listed_transactions(cluster, number, **filters)]

    assert transactional_id in listed()
    assert listed(transactional_id_pattern="filtered-.*") == [transactional_id]
    assert listed(transactional_id_pattern="filtered") == []
    assert transactional_id not in listed(state_filters=["Ongoing"])
    assert transactional_id in listed(state_filters=["Empty", "Odd"])
    assert listed(producer_id_filters=[17]) == listed(duration_filter=0, state_filters=["Empty"]) == []
    with calls_to(cluster, 0) as calls:
        odd = calls.ask(ApiKey.LIST_TRANSACTIONS, 2, ListTransactionsRequest(state_filters=["Odd"]))
        assert odd.unknown_state_filters == ["Odd"]
        invalid = calls.ask(ApiKey.LIST_TRANSACTIONS, 2, ListTransactionsRequest(transactional_id_pattern="("))
        assert invalid.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


def test_an_unknown_transactional_id_is_not_found(cluster: ProcessCluster) -> None:
    found = [described_transaction(cluster, number, "never-existed").error_code for number in cluster.slots]
    assert sorted(found) == [ErrorCode.NOT_COORDINATOR] * 2 + [TRANSACTIONAL_ID_NOT_FOUND]


def test_no_topic_has_the_id_zero(calls: KafkaCalls) -> None:
    request = wire.DeleteTopicsRequest(topics=[wire.DeleteTopicState(topic_id=ZERO_UUID)], timeout_ms=MANY)
    (found,) = calls.ask(ApiKey.DELETE_TOPICS, 6, request).responses
    assert found.error_code == ErrorCode.INVALID_REQUEST
