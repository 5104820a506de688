"""A broker that was started while no controller was there knows of nothing; clients ask the others."""

from __future__ import annotations

import pytest

from sparklog.client.admin import Admin
from sparklog.client.consumer import Consumer
from sparklog.client.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Metadata, MetadataReply, Request, TopicMetadata
from tests.client.fake_cluster import FakeBroker, FakeCluster

#: Which broker a client asks first is drawn by lot.
CLIENTS = 6


@pytest.fixture
def half_told(fake: FakeCluster) -> FakeCluster:
    """Broker 0 has not been told anything; broker 1 leads partition 1 of topic ``t``."""

    def know_nothing(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Metadata):
            return False
        unknown = tuple(TopicMetadata(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), name) for name in request.topics or ())
        connection.reply(MetadataReply(request.cid, "fake", -1, (), unknown))
        return True

    fake.create("t", partitions=2)
    fake.fault(0, know_nothing)
    return fake


def test_producers(half_told: FakeCluster) -> None:
    for number in range(CLIENTS):
        with Producer(half_told.bootstrap) as producer:
            assert producer.send("t", b"v", partition=1).result(30).offset == number


def test_consumers_and_admins(half_told: FakeCluster) -> None:
    for _ in range(CLIENTS):
        with Consumer(half_told.bootstrap, "t") as consumer, Admin(half_told.bootstrap) as admin:
            assert len(consumer.assignment) == 2
            assert len(admin.describe_topic("t").partitions) == 2
