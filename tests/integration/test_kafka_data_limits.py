"""ACLs, quotas and large requests of Kafka's data APIs on real brokers."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.data import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from sparklog.protocol import messages as m
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.test_acls import PASSWORD, as_peer, create_users
from tests.integration.kafka_calls import SECURED_BROKER, KafkaCalls
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, write_batch, write_record

pytestmark = pytest.mark.integration

GZIP = 1
TIME_MS = 1_700_000_000_000
REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


def produce_request(records: dict[str, bytes]) -> ProduceRequest:
    topics = [
        TopicProduceData(name=name, partition_data=[PartitionProduceData(index=0, records=data)])
        for name, data in records.items()
    ]
    return ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=topics)


def fetch_request(*topics: str, max_bytes: int = 1 << 20) -> FetchRequest:
    wanted = [FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=max_bytes)]
    return FetchRequest(
        max_wait_ms=1000,
        min_bytes=1,
        max_bytes=max_bytes,
        topics=[FetchTopic(topic=one, partitions=wanted) for one in topics],
    )


def plain_batch(*values: bytes) -> bytes:
    return write_batch(produced([Record(b"key", value, (), TIME_MS) for value in values]))


# --- ACLs ---


@pytest.fixture(scope="module")
def secured() -> Iterator[ProcessCluster]:
    """Return one broker with an authorizer, where anna may read the topic orders and write the topic entries."""
    with ProcessCluster(1, settings=SECURED_BROKER) as running:
        create_users(running, "admin", "anna")
        for name in ("orders", "entries", "hidden"):
            assert isinstance(as_peer(running, m.CreateTopic(0, name, 1, 1, 30_000)), m.CreateTopicReply)
        for operation, topic in (("Read", "orders"), ("Write", "entries")):
            entry = m.AclEntry("Topic", topic, "Literal", "User:anna", "*", operation, "Allow")
            assert isinstance(as_peer(running, m.CreateAcls(0, (entry,))), m.Ack)
        yield running


@pytest.fixture
def anna(secured: ProcessCluster) -> Iterator[KafkaCalls]:
    with KafkaCalls(secured.slots[0].kafka_address) as calls:
        assert calls.log_in("anna", PASSWORD) == 0
        yield calls


def test_only_the_allowed_topics_of_a_request_are_written(anna: KafkaCalls) -> None:
    request = produce_request({"entries": plain_batch(b"a"), "orders": plain_batch(b"b"), "hidden": plain_batch(b"c")})
    found = anna.ask(ApiKey.PRODUCE, 9, request).responses
    codes = {topic.name: topic.partition_responses[0].error_code for topic in found}
    assert codes == {"entries": 0, "orders": REFUSED, "hidden": REFUSED}


def test_only_the_allowed_topics_of_a_request_are_read(anna: KafkaCalls) -> None:
    found = anna.ask(ApiKey.FETCH, 12, fetch_request("entries", "orders", "hidden", "absent")).responses
    codes = {topic.topic: topic.partitions[0].error_code for topic in found}
    assert codes == {"entries": REFUSED, "orders": 0, "hidden": REFUSED, "absent": REFUSED}


def test_offsets_are_listed_for_whom_may_describe_the_topic(anna: KafkaCalls) -> None:
    topics = [
        ListOffsetsTopic(name=name, partitions=[ListOffsetsPartition(partition_index=0, timestamp=-2)])
        for name in ("entries", "orders", "hidden")
    ]
    found = anna.ask(ApiKey.LIST_OFFSETS, 7, ListOffsetsRequest(replica_id=-1, topics=topics)).topics
    assert [topic.partitions[0].error_code for topic in found] == [0, 0, REFUSED]
    epochs = [
        OffsetForLeaderTopic(topic=name, partitions=[OffsetForLeaderPartition(partition=0, leader_epoch=0)])
        for name in ("orders", "hidden")
    ]
    ends = anna.ask(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, OffsetForLeaderEpochRequest(topics=epochs)).topics
    assert [topic.partitions[0].error_code for topic in ends] == [0, REFUSED]


# --- quotas and large requests ---


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {"quota.window.size.seconds": "1"}
    with ProcessCluster(1, settings=settings, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("limited", partitions=1, replication_factor=1)
            config = {"max.message.bytes": str(64 << 20)}
            admin.create_topic("large", partitions=1, replication_factor=1, config=config)
            admin.alter_quotas({"producer_byte_rate": 100_000}, client_id="slow producer")
            admin.alter_quotas({"consumer_byte_rate": 100_000}, client_id="slow consumer")
        yield running


def test_a_producer_above_its_quota_waits(cluster: ProcessCluster) -> None:
    with KafkaCalls(cluster.slots[0].kafka_address, client_id="slow producer") as calls:
        request = produce_request({"limited": plain_batch(bytes(100_000))})
        throttled = []
        for _ in range(3):
            response = calls.ask(ApiKey.PRODUCE, 9, request)
            assert response.responses[0].partition_responses[0].error_code == 0
            throttled.append(response.throttle_time_ms)
        began_s = time.monotonic()
        calls.ask(ApiKey.PRODUCE, 9, request)
    assert throttled[-1] > 0
    assert time.monotonic() - began_s > throttled[-1] / 1000 * 0.5


def test_a_consumer_above_its_quota_waits(cluster: ProcessCluster) -> None:
    with KafkaCalls(cluster.slots[0].kafka_address) as writer:
        writer.ask(ApiKey.PRODUCE, 9, produce_request({"limited": plain_batch(*[bytes(1000)] * 150)}))
    with KafkaCalls(cluster.slots[0].kafka_address, client_id="slow consumer") as calls:
        responses = [calls.ask(ApiKey.FETCH, 12, fetch_request("limited")) for _ in range(3)]
    assert all(one.responses[0].partitions[0].error_code == 0 for one in responses)
    assert responses[-1].throttle_time_ms > 0


def large_batch(sequence: int, count: int) -> bytes:
    """Return a batch of some megabytes that has tens of megabytes after decompression."""
    record = Record(b"key", bytes(1_000_000), (), TIME_MS)
    batch = produced([record] * count, attributes=GZIP, producer_id=7, producer_epoch=0, base_sequence=sequence)
    records = b"".join(write_record(record, time_delta=0, offset_delta=number) for number in range(count))
    return write_batch(batch, gzip.compress(records, 1))


def test_requests_of_a_connection_keep_their_order_after_a_large_one(cluster: ProcessCluster) -> None:
    """The large batch is decoded in a thread, and the small ones must not overtake it."""
    requests = [produce_request({"large": large_batch(0, 30)})]
    for sequence in range(30, 34):
        records = [Record(b"key", b"value", (), TIME_MS)]
        batch = produced(records, producer_id=7, producer_epoch=0, base_sequence=sequence)
        requests.append(produce_request({"large": write_batch(batch)}))
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        for request in requests:
            calls.send(ApiKey.PRODUCE, 9, request)
        calls.sent -= len(requests)
        found = []
        for _ in requests:
            calls.sent += 1
            found.append(calls.receive(ApiKey.PRODUCE, 9).responses[0].partition_responses[0])
    assert [(one.error_code, one.base_offset) for one in found] == [(0, 0), (0, 30), (0, 31), (0, 32), (0, 33)]
