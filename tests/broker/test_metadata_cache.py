"""Tests of the broker's metadata of the cluster: ordered by node versions, served to clients."""

from __future__ import annotations

import msgspec
import pytest

from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import ConfigError, ErrorCode
from sparklog.model import NO_LEADER, BrokerEndpoint, LeaderAndIsr, ListenerEndpoint, TopicPartition, TopicSchema
from sparklog.protocol.messages import ControlUpdate, PartitionDecision, TopicChange

BROKERS = tuple(BrokerEndpoint(number, "host", 9092 + number, 1) for number in range(3))


LISTENERS = (
    ListenerEndpoint("CLIENT", "SASL_SSL", "host.example", 443),
    ListenerEndpoint("BROKER", "SSL", "10.0.0.7", 1),
)


def topic(name: str = "t", topic_id: str = "id-1", config: dict[str, str] | None = None) -> TopicChange:
    return TopicChange(name, topic_id, (TopicSchema(0, b"schema"),), ("key",), None, config or {})


def decision(version: int, *, leader: int = 0, partition: int = 0, topic_id: str = "id-1") -> PartitionDecision:
    state = LeaderAndIsr(leader, version, (0, 1, 2), 1)
    return PartitionDecision("t", topic_id, partition, state, version, (0, 1, 2))


def update(
    *partitions: PartitionDecision,
    topics: tuple[TopicChange, ...] = (),
    full: bool = False,
    epoch: int = 1,
    deleted: tuple[tuple[str, str], ...] = (),
    brokers: tuple[BrokerEndpoint, ...] = BROKERS,
    sequence: int = 0,
) -> ControlUpdate:
    return ControlUpdate(0, "c", epoch, 1, full, brokers, topics, partitions, deleted=deleted, sequence=sequence)


@pytest.fixture
def cache() -> MetadataCache:
    subject = MetadataCache("cluster", {"min.insync.replicas": "1"})
    subject.apply(update(decision(3), topics=(topic(),)))
    return subject


def leader(cache: MetadataCache) -> int:
    known = cache.partition(TopicPartition("t", 0))
    assert known is not None
    return known.state.leader


def test_an_older_version_of_a_partition_changes_nothing(cache: MetadataCache) -> None:
    cache.apply(update(decision(5, leader=1)))
    cache.apply(update(decision(4, leader=2), epoch=2))
    assert leader(cache) == 1
    tp = TopicPartition("t", 0)
    cache.state_written(tp, LeaderAndIsr(2, 4, (2,), 1), version=4, topic_id="id-1")
    cache.state_written(tp, LeaderAndIsr(2, 9, (2,), 1), version=9, topic_id="of another topic")
    assert leader(cache) == 1
    cache.state_written(tp, LeaderAndIsr(1, 5, (1,), 1), version=6, topic_id="id-1")
    assert cache.metadata(0, ("t",), schemas=True).topics[0].partitions[0].isr == (1,)


def test_a_leader_that_registered_again_stays_the_leader(cache: MetadataCache) -> None:
    """The broker receives no leader where its earlier incarnation led in the same epoch."""
    cache.apply(update(decision(3, leader=NO_LEADER), topics=(topic(),), full=True))
    assert leader(cache) == 0
    assert cache.metadata(0, ("t",), schemas=False).topics[0].partitions[0].leader == 0
    shrunk = PartitionDecision("t", "id-1", 0, LeaderAndIsr(NO_LEADER, 3, (0, 1), 1), 4, (0, 1, 2))
    cache.apply(update(shrunk, sequence=1))
    known = cache.partition(TopicPartition("t", 0))
    assert known is not None
    assert (known.version, known.state) == (4, LeaderAndIsr(0, 3, (0, 1), 1)), "only the ISR may change, not the leader"
    cache.apply(update(decision(5, leader=NO_LEADER), sequence=2))
    assert leader(cache) == NO_LEADER, "a partition without a leader must be in a new epoch"


def test_a_new_process_knows_no_leader_until_the_next_epoch() -> None:
    fresh = MetadataCache("cluster", {})
    fresh.apply(update(decision(3, leader=NO_LEADER), topics=(topic(),), full=True))
    assert leader(fresh) == NO_LEADER
    fresh.apply(update(decision(4, leader=1)))
    assert leader(fresh) == 1


def test_an_update_that_arrives_out_of_order_changes_nothing(cache: MetadataCache) -> None:
    """The list of live brokers has no version of its own: a leader with a late one would wait for dead brokers."""
    cache.apply(update(decision(4, partition=1), brokers=BROKERS[:2], sequence=7))
    late = update(decision(9, leader=2), topics=(topic(config={"min.insync.replicas": "3"}),), full=True, sequence=6)
    assert cache.is_overtaken(late)
    cache.apply(late)
    assert set(cache.incarnations) == {0, 1}
    assert leader(cache) == 0
    assert cache.partition(TopicPartition("t", 1)) is not None, (
        "the topic is newer than the old full update, which does not name it"
    )
    known = cache.topic("t")
    assert known is not None and known.config.min_insync_replicas == 1
    cache.apply(update(brokers=BROKERS, sequence=8))
    assert set(cache.incarnations) == {0, 1, 2}


def test_sequences_begin_again_with_each_controller(cache: MetadataCache) -> None:
    cache.apply(update(brokers=BROKERS[:2], sequence=7))
    cache.apply(update(brokers=BROKERS[1:], epoch=2, sequence=1))
    assert set(cache.incarnations) == {1, 2}
    cache.apply(update(brokers=BROKERS, epoch=2))
    assert set(cache.incarnations) == {1, 2}


def test_a_refused_update_does_not_count_as_the_newest(cache: MetadataCache) -> None:
    with pytest.raises(ConfigError):
        cache.apply(update(topics=(topic(config={"no.such": "1"}),), sequence=7))
    cache.apply(update(brokers=BROKERS[:2], sequence=6))
    assert set(cache.incarnations) == {0, 1}


def test_a_topics_settings_take_precedence_over_the_clusters(cache: MetadataCache) -> None:
    known = cache.topic("t")
    assert known is not None and known.config.min_insync_replicas == 1
    cache.apply(update(topics=(topic(config={"min.insync.replicas": "3"}),)))
    known = cache.topic("t")
    assert known is not None and known.config.min_insync_replicas == 3
    assert known.partitions, "a change of settings keeps the partitions"


def test_an_update_with_an_unknown_setting_is_refused_whole(cache: MetadataCache) -> None:
    with pytest.raises(ConfigError):
        cache.apply(update(decision(9, leader=2), topics=(topic(config={"no.such": "1"}),)))
    assert leader(cache) == 0


def test_a_recreated_topic_has_none_of_the_old_partitions(cache: MetadataCache) -> None:
    cache.apply(update(topics=(topic(topic_id="id-2"),)))
    assert cache.partition(TopicPartition("t", 0)) is None
    cache.apply(update(decision(9)))
    assert cache.partition(TopicPartition("t", 0)) is None, "a decision on the old topic"
    cache.apply(update(decision(0, topic_id="id-2")))
    assert cache.partition(TopicPartition("t", 0)) is not None


def test_clients_learn_which_of_two_same_named_topics_is_newer(cache: MetadataCache) -> None:
    ordered = msgspec.structs.replace(topic(topic_id="id-2"), order=5)
    cache.apply(update(topics=(ordered,)))
    for schemas in (True, False):
        [told] = cache.metadata(0, ("t",), schemas=schemas).topics
        assert (told.topic_id, told.order, len(told.schemas)) == ("id-2", 5, int(schemas))


def test_a_deletion_of_the_old_topic_keeps_the_new_one(cache: MetadataCache) -> None:
    cache.apply(update(topics=(topic(topic_id="id-2"),), deleted=(("t", "id-1"),)))
    assert cache.topic("t") is not None
    cache.apply(update(deleted=(("t", "id-2"),)))
    assert cache.topic("t") is None


def test_a_full_update_drops_what_it_does_not_name(cache: MetadataCache) -> None:
    cache.apply(update(decision(1, partition=1), topics=(topic("other", "id-9"),)))
    cache.apply(update(decision(3), topics=(topic(),), full=True))
    assert cache.topic("other") is None
    assert cache.partition(TopicPartition("t", 1)) is None
    assert leader(cache) == 0


def test_metadata_names_the_error_of_a_topic(cache: MetadataCache) -> None:
    unknown, bad, good = cache.metadata(7, ("nope", "a/b", "t"), schemas=False).topics
    assert (unknown.code, unknown.name) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "nope")
    assert bad.code == ErrorCode.INVALID_TOPIC_EXCEPTION and "a/b" in bad.detail
    assert good.code == 0 and good.schemas == () and good.partitions[0].leader == 0
    everything = cache.metadata(7, None, schemas=True)
    assert [t.name for t in everything.topics] == ["t"] and everything.topics[0].schemas


def test_replicas_and_moves_follow_the_controllers_last_update(cache: MetadataCache) -> None:
    tp = TopicPartition("t", 0)
    cache.state_written(tp, LeaderAndIsr(0, 3, (0,), 1), version=4, topic_id="id-1")
    moved = msgspec.structs.replace(decision(3), replicas=(5, 0, 1, 2), target=(5, 0), original=(0, 1, 2))
    cache.apply(update(moved))
    known = cache.partition(tp)
    assert known is not None
    assert (known.version, known.state.isr) == (4, (0,))
    assert (known.replicas, known.target) == ((5, 0, 1, 2), (5, 0))
    assert cache.moving == {tp: known}
    seen = cache.moves_seen
    cache.state_written(tp, LeaderAndIsr(0, 3, (0, 5), 1), version=5, topic_id="id-1")
    assert cache.moving[tp].state.isr == (0, 5)
    assert cache.moves_seen > seen
    assert cache.metadata(0, ("t",), schemas=True).topics[0].partitions[0].replicas == (5, 0, 1, 2)
    cache.apply(update(msgspec.structs.replace(decision(6), replicas=(5, 0))))
    assert cache.moving == {}


def test_moves_of_deleted_topics_are_dropped(cache: MetadataCache) -> None:
    moved = msgspec.structs.replace(decision(4), target=(2, 0), original=(0, 1, 2))
    for gone in (update(deleted=(("t", "id-1"),)), update(full=True), update(topics=(topic(topic_id="id-2"),))):
        cache.apply(update(topics=(topic(),)))
        cache.apply(update(moved))
        assert list(cache.moving) == [TopicPartition("t", 0)]
        cache.apply(gone)
        assert cache.moving == {}


def test_internal_topics_are_returned_on_request(cache: MetadataCache) -> None:
    cache.apply(update(topics=(topic("__internal", "id-9"),)))

    def names(asked: tuple[str, ...] | None, *, internal: bool = False) -> list[str]:
        return [found.name for found in cache.metadata(0, asked, schemas=False, internal=internal).topics]

    assert names(None) == ["t"]
    assert names(None, internal=True) == ["__internal", "t"]
    assert names(("__internal",)) == ["__internal"]


def test_deleted_topics_are_remembered_by_id(cache: MetadataCache) -> None:
    cache.apply(update(topics=(topic("u", "id-2"),)))
    cache.apply(update(topics=(topic("t", "id-3"),)))
    cache.apply(update(deleted=(("u", "of another"),)))
    assert list(cache.forgotten) == ["id-1"], "a recreated topic with the same name"
    cache.apply(update(deleted=(("u", "id-2"),)))
    cache.apply(update(full=True))
    assert list(cache.forgotten) == ["id-1", "id-2", "id-3"]


def test_topics_are_found_by_id(cache: MetadataCache) -> None:
    cache.apply(update(topics=(topic("u", "id-2"), topic("v", "id-4"))))
    cache.apply(update(topics=(topic("t", "id-3"),), deleted=(("v", "id-4"),)))
    names = {topic_id: cache.name_of(topic_id) for topic_id in ("id-1", "id-2", "id-3", "id-4")}
    assert names == {"id-1": None, "id-2": "u", "id-3": "t", "id-4": None}
    cache.apply(update(full=True))
    assert cache.name_of("id-2") is None


def test_a_client_gets_the_addresses_of_its_own_listener() -> None:
    cache = MetadataCache("cluster", {}, "BROKER")
    named = BrokerEndpoint(0, "main", 9092, 1, endpoints=LISTENERS)
    cache.apply(update(brokers=(named, BROKERS[1])))

    def addresses(listener: str) -> list[tuple[int, str, int]]:
        reply = cache.metadata(0, (), schemas=False, listener=listener)
        assert not any(broker.endpoints for broker in reply.brokers), "other listeners are not a client's business"
        return [(broker.broker_id, broker.host, broker.port) for broker in reply.brokers]

    assert addresses("CLIENT") == [(0, "host.example", 443)]
    assert addresses("PLAINTEXT") == [(1, "host", 9093)], "a broker of an earlier release has this listener alone"
    peer = cache.peer(0)
    assert peer is not None and (peer.host, peer.port, peer.incarnation) == ("10.0.0.7", 1, 1)
    assert cache.peer(1) is None
    assert cache.endpoint(0) == named
    cache.apply(update(sequence=1))
    assert addresses("CLIENT") == []
