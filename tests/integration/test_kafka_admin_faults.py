"""Tests of Kafka's administrative requests while a broker is dead, and after its return."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire import admin as wire
from sparklog.kafka.wire.metadata import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponsePartition,
    TopicRequest,
)
from sparklog.testing.process_cluster import ProcessCluster
from tests.integration.kafka_calls import KafkaCalls
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

DEAD = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """Return a cluster that elects preferred leaders only on request."""
    with ProcessCluster(3, kafka=True, settings={"preferred.leader.rebalance": "false"}) as running:
        yield running


@pytest.fixture
def calls(cluster: ProcessCluster) -> Iterator[KafkaCalls]:
    with KafkaCalls(cluster.slots[0].kafka_address) as found:
        yield found


def create(calls: KafkaCalls, name: str, *replicas: int) -> int:
    assigned = wire.CreatableReplicaAssignment(partition_index=0, broker_ids=list(replicas))
    new = wire.CreatableTopic(name=name, num_partitions=-1, replication_factor=-1, assignments=[assigned])
    request = wire.CreateTopicsRequest(topics=[new], timeout_ms=30_000)
    return int(calls.ask(ApiKey.CREATE_TOPICS, 7, request).topics[0].error_code)


def described(calls: KafkaCalls, name: str) -> DescribeTopicPartitionsResponsePartition:
    request = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=name)])
    (topic,) = calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request).topics
    found: DescribeTopicPartitionsResponsePartition = topic.partitions[0]
    return found


def elect(calls: KafkaCalls, name: str) -> int:
    topics = [wire.TopicPartitions(topic=name, partitions=[0])]
    request = wire.ElectLeadersRequest(election_type=0, topic_partitions=topics, timeout_ms=30_000)
    (topic,) = calls.ask(ApiKey.ELECT_LEADERS, 2, request).replica_election_results
    return int(topic.partition_result[0].error_code)


def test_a_dead_broker_is_seen_and_gets_its_leaders_back(cluster: ProcessCluster, calls: KafkaCalls) -> None:
    assert create(calls, "led", DEAD, 0, 1) == 0
    assert create(calls, "lonely", DEAD) == 0
    assert (described(calls, "led").leader_id, described(calls, "led").offline_replicas) == (DEAD, [])
    cluster.kill(DEAD)
    wait_until(lambda: described(calls, "led").leader_id in {0, 1})
    wait_until(lambda: DEAD not in described(calls, "led").isr_nodes)
    assert described(calls, "led").offline_replicas == [DEAD]
    wait_until(lambda: described(calls, "lonely").error_code == ErrorCode.LEADER_NOT_AVAILABLE)
    assert (described(calls, "lonely").leader_id, described(calls, "lonely").offline_replicas) == (-1, [DEAD])
    assert elect(calls, "led") == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert create(calls, "on-the-dead", DEAD, 0) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert create(calls, "on-the-living", 0, 1) == 0

    cluster.start_broker(DEAD)
    wait_until(lambda: DEAD in described(calls, "led").isr_nodes)
    assert described(calls, "led").leader_id != DEAD
    assert elect(calls, "led") == 0
    assert described(calls, "led").leader_id == DEAD
    assert elect(calls, "led") == ErrorCode.ELECTION_NOT_NEEDED
    wait_until(lambda: described(calls, "lonely").leader_id == DEAD)
