"""Tests of a broker that has no update from a controller, and of one with an outdated update: clients ask the
others."""

from __future__ import annotations

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Metadata, MetadataReply, PartitionMetadata, Request, TopicMetadata
from tests.client.fake_cluster import FakeBroker, FakeCluster

#: The broker that a client asks first is random.
CLIENTS = 6


@pytest.fixture
def half_told(fake: FakeCluster) -> FakeCluster:
    """Start a cluster in which broker 0 has no update, and broker 1 leads partition 1 of topic ``t``."""

    def know_nothing(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Metadata):
            return False
        unknown = tuple(TopicMetadata(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), name) for name in request.topics or ())
        connection.reply(MetadataReply(request.cid, "fake", -1, (), unknown))
        return True

    fake.create("t", partitions=2)
    fake.fault(0, know_nothing)
    return fake


def test_a_producer_survives_a_broker_without_an_update(half_told: FakeCluster) -> None:
    for number in range(CLIENTS):
        with Producer(half_told.bootstrap) as producer:
            assert producer.send("t", b"v", partition=1).result(30).offset == number


def test_consumers_and_admins_survive_a_broker_without_an_update(half_told: FakeCluster) -> None:
    for _ in range(CLIENTS):
        with Consumer(half_told.bootstrap, "t") as consumer, Admin(half_told.bootstrap) as admin:
            assert len(consumer.assignment) == 2
            assert len(admin.describe_topic("t").partitions) == 2


@pytest.fixture
def out_of_date(fake: FakeCluster) -> str:
    """Return the address of broker 0, which believes that it leads a partition that broker 1 now leads."""

    def as_it_was(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Metadata):
            return False
        parts = (PartitionMetadata(0, 0, 0, (0,), (0,)),)
        topic = fake.topics["t"]
        told = TopicMetadata(0, "t", topic.topic_id, parts, tuple(topic.schemas), topic.key, topic.event_time)
        brokers = tuple(broker.metadata_broker() for broker in fake.brokers)
        connection.reply(MetadataReply(request.cid, "fake", 1, brokers, (told,)))
        return True

    fake.create("t", partitions=1)
    fake.move(TopicPartition("t", 0), 1)
    fake.fault(0, as_it_was)
    return fake.bootstrap.split(",")[0]


def test_a_producer_with_an_outdated_broker_asks_another(out_of_date: str) -> None:
    with Producer(out_of_date) as producer:
        assert producer.send("t", b"v").result(30).offset == 0


def test_a_consumer_with_an_outdated_broker_asks_another(out_of_date: str) -> None:
    with Consumer(out_of_date, "t", timeout_s=30) as consumer:
        assert consumer.end_offsets() == {TopicPartition("t", 0): 0}


def test_a_polling_consumer_with_an_outdated_broker_asks_another(out_of_date: str, fake: FakeCluster) -> None:
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(30)
    with Consumer(out_of_date, "t", start={TopicPartition("t", 0): 0}, timeout_s=10) as consumer:
        assert sum(batch.num_rows for batch in consumer.poll(10.0)) == 1
