"""Tests of groups' offsets that are set from outside, for topics that the coordinator does not know yet."""

from __future__ import annotations

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import CommitOffsets, CommitOffsetsReply, PartitionResult, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import times


class Refuse:
    """Refuse one topic's offsets."""

    def __init__(self, topic: str, code: ErrorCode) -> None:
        self._topic = topic
        self._code = code
        self.asked = 0

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        assert isinstance(request, CommitOffsets)
        self.asked += 1
        results = tuple(
            PartitionResult(one.topic, one.partition, self._code if one.topic == self._topic else ErrorCode.NONE)
            for one in request.offsets
        )
        connection.reply(CommitOffsetsReply(request.cid, results))
        return True


def test_an_offset_for_a_topic_unknown_to_the_coordinator_is_retried(fake: FakeCluster) -> None:
    refuse = Refuse("new", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(2, CommitOffsets, refuse))
    with Admin(fake.bootstrap) as admin:
        admin.commit_offsets("g", {TopicPartition("new", 0): 5, TopicPartition("other", 0): 7})
    assert fake.do(lambda: dict(fake.groups.offsets)) == {("g", "new", 0): 5, ("g", "other", 0): 7}
    assert refuse.asked >= 2


@pytest.mark.parametrize(
    ("code", "is_asked_again"),
    [(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, True), (ErrorCode.INVALID_REQUEST, False)],
)
def test_a_permanent_or_lasting_refusal_is_reported(fake: FakeCluster, code: ErrorCode, is_asked_again: bool) -> None:
    refuse = Refuse("gone", code)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(10_000, CommitOffsets, refuse))
    with Admin(fake.bootstrap) as admin, pytest.raises(BrokerError) as refused:
        admin.commit_offsets("g", {TopicPartition("other", 0): 7, TopicPartition("gone", 0): 5})
    assert refused.value.code == code
    assert (refuse.asked > 1) == is_asked_again
