"""Tests of the metadata cache: responses that overtake each other never make it older."""

from __future__ import annotations

from sparklog.client.cluster.metadata import ClientMetadata, Leader, topic_error
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition, TopicSchema
from sparklog.protocol.messages import MetadataReply, PartitionMetadata, TopicMetadata

TP = TopicPartition("t", 0)


def broker(broker_id: int, incarnation: int = 1, port: int = 9092) -> BrokerEndpoint:
    return BrokerEndpoint(broker_id, "h", port, incarnation)


def topic(
    leader: int, epoch: int, *, topic_id: str = "a", partitions: int = 1, schemas: int = 1, order: int = 0
) -> TopicMetadata:
    parts = tuple(PartitionMetadata(index, leader, epoch, (0, 1), (leader,)) for index in range(partitions))
    kept = tuple(TopicSchema(i, b"%d" % i) for i in range(schemas))
    return TopicMetadata(0, "t", topic_id, parts, kept, order=order)


def reply(
    *topics: TopicMetadata, epoch: int = 1, brokers: tuple[BrokerEndpoint, ...] = (broker(0), broker(1))
) -> MetadataReply:
    return MetadataReply(0, "c", epoch, brokers, topics)


def test_the_largest_leader_epoch_wins() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 5)))
    cache.update(reply(topic(1, 4)))
    assert cache.leader(TP) == Leader(0, 5)
    cache.update(reply(topic(1, 6)))
    assert cache.leader(TP) == Leader(1, 6)


def test_a_deposed_leader_names_its_successor() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 5)))
    assert not cache.merge_leader(TP, 1, 5), "the metadata must be unchanged"
    assert not cache.merge_leader(TP, 7, 6), "broker 7 has no known address"
    assert not cache.merge_leader(TopicPartition("u", 0), 1, 6)
    assert cache.leader(TP) == Leader(0, 5)
    assert cache.merge_leader(TP, 1, 6)
    assert cache.leader(TP) == Leader(1, 6)
    cache.update(reply(topic(0, 5)))
    assert cache.leader(TP) == Leader(1, 6)


def test_a_leader_without_an_address_is_unknown() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(7, 1)))
    assert cache.leader(TP) is None
    assert cache.partition(TP) is not None


def test_a_partition_may_have_no_leader() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(-1, 3)))
    assert cache.leader(TP) is None


def test_a_leader_is_not_lost_within_its_epoch() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 5)))
    cache.update(reply(topic(-1, 5)))
    assert cache.leader(TP) == Leader(0, 5), "that broker does not know the leader"
    cache.update(reply(topic(-1, 6)))
    assert cache.leader(TP) is None
    cache.update(reply(topic(1, 6)))
    assert cache.leader(TP) == Leader(1, 6), "another broker names the leader"


def test_a_recreated_topic_starts_its_epochs_again() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 9, partitions=3)))
    cache.update(reply(topic(1, 0, topic_id="b")))
    assert cache.leader(TP) == Leader(1, 0)
    assert cache.partitions("t") == [TP]


def test_older_metadata_do_not_restore_a_deleted_topic() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(1, 0, topic_id="b"), epoch=2))
    cache.update(reply(topic(0, 9, topic_id="a"), epoch=1))
    found = cache.topic("t")
    assert found is not None
    assert found.topic_id == "b"


def test_a_lagging_broker_does_not_restore_a_deleted_topic() -> None:
    cache = ClientMetadata()

    def topic_id() -> str:
        found = cache.topic("t")
        return found.topic_id if found else ""

    old, new = topic(0, 9, topic_id="a", order=7), topic(1, 0, topic_id="b", order=8)
    cache.update(reply(old))
    cache.update(reply(new))
    cache.update(reply(old))
    assert topic_id() == "b"
    cache.drop("t")
    cache.update(reply(old))
    assert topic_id() == "", "nor a topic that was dropped since"
    cache.update(reply(topic(1, 0, topic_id="b", order=20), epoch=2))
    cache.update(reply(topic(0, 0, topic_id="c", order=9)))
    assert topic_id() == "b", "a new controller continues the numbers"
    cache.update(reply(new, epoch=2))
    cache.update(reply(topic(0, 0, topic_id="c", order=9), epoch=2))
    assert topic_id() == "b", "the largest order of the topic counts"
    cache.update(reply(topic(0, 0, topic_id="c", order=21), epoch=1))
    assert topic_id() == "c"


def test_older_metadata_does_not_remove_a_topic() -> None:
    unknown = TopicMetadata(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), "t")
    cache = ClientMetadata()
    nothing = reply(unknown, epoch=-1, brokers=())
    assert cache.is_stale(nothing)  # a broker without an update from a controller so far
    cache.update(reply(topic(0, 9), epoch=2))
    for stale in (nothing, reply(unknown, epoch=1)):
        cache.update(stale)
        assert cache.is_stale(stale) and cache.leader(TP) == Leader(0, 9)
    cache.update(reply(unknown, epoch=2))
    assert cache.topic("t") is None


def test_a_dropped_topic_keeps_its_newest_epochs() -> None:
    """A broker with old metadata does not know the topic, and another one names an older leader."""
    cache = ClientMetadata()
    cache.update(reply(topic(0, 5)))
    assert cache.merge_leader(TP, 1, 6)
    cache.update(reply(TopicMetadata(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), "t")))
    assert cache.leader(TP) is None
    cache.update(reply(topic(0, 5)))
    assert cache.leader(TP) == Leader(1, 6)
    cache.drop("t")
    cache.update(reply(topic(0, 0, topic_id="b")))
    assert cache.leader(TP) == Leader(0, 0), "another topic with this name"


def test_partitions_and_schemas_are_never_removed() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 1, partitions=3, schemas=2)))
    cache.update(reply(topic(0, 1, partitions=2, schemas=1)))
    assert len(cache.partitions("t")) == 3
    assert cache.schema("t", 1) == TopicSchema(1, b"1")


def test_a_broker_keeps_its_newest_incarnation() -> None:
    cache = ClientMetadata()
    cache.update(reply(brokers=(broker(0, incarnation=3, port=2),)))
    cache.update(reply(brokers=(broker(0, incarnation=2, port=1),)))
    assert cache.brokers[0].port == 2


def test_older_metadata_removes_no_broker() -> None:
    cache = ClientMetadata()
    cache.update(reply(brokers=(broker(0), broker(1)), epoch=5))
    cache.update(reply(brokers=(broker(0),), epoch=4))
    assert set(cache.brokers) == {0, 1}
    cache.update(reply(brokers=(broker(0),), epoch=5))
    assert set(cache.brokers) == {0}


def test_a_leader_keeps_its_address_until_there_is_another() -> None:
    """A controller that misses a broker for a moment does not name it, although the broker still leads."""
    cache = ClientMetadata()
    cache.update(reply(topic(1, 5)))
    cache.update(reply(topic(1, 5), brokers=(broker(0),)))
    assert cache.leader(TP) == Leader(1, 5)
    assert set(cache.brokers) == {0}, "a request to all brokers must not wait for an unregistered one"
    assert cache.endpoint(1) == broker(1)
    cache.update(reply(brokers=(broker(0), broker(1, incarnation=2, port=9093))))
    assert cache.endpoint(1) == cache.brokers[1] == broker(1, incarnation=2, port=9093)
    cache.update(reply(topic(0, 6), brokers=(broker(0),)))
    assert cache.leader(TP) == Leader(0, 6)
    assert cache.endpoint(1) is None


def test_an_unknown_topic_is_dropped_and_its_error_reported() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 1)))
    unknown = TopicMetadata(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "t", detail="no such topic")
    cache.update(reply(unknown))
    assert cache.topic("t") is None
    assert cache.partition(TP) is None
    error = topic_error(unknown)
    assert error is not None
    assert str(error) == "UNKNOWN_TOPIC_OR_PARTITION: no such topic"


def test_partitions_are_grouped_by_the_broker_to_ask() -> None:
    cache = ClientMetadata()
    cache.update(reply(topic(0, 1, partitions=2)))
    missing = TopicPartition("t", 9)
    assert cache.group_by_leader([*cache.partitions("t"), missing]) == {0: cache.partitions("t"), None: [missing]}
