"""Tests of the controller core: created, changed and deleted topics."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sparklog.controller.effects import DeleteTopicNodes
from sparklog.controller.events import (
    DeletionsRead,
    TopicDeleted,
    TopicGone,
    TopicRead,
    TopicSnapshot,
)
from sparklog.model import NO_LOSS, LeaderAndIsr, TopicPartition

from .support import World, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2))


def test_a_new_topic_gets_live_replicas_in_one_update() -> None:
    world = World()
    world.told.clear()
    world.create(THREE)
    assert world.trace() == ["1/0[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert [broker_id for broker_id, _ in world.told] == [1, 2, 3]
    for _, update in world.told:
        assert [change.name for change in update.topics] == ["t"]
        assert [decision.partition for decision in update.partitions] == [0, 1, 2]
    assert world.controller.settled()


def test_a_new_topic_omits_dead_and_stopping_replicas() -> None:
    world = World(topic("o", (1,)))
    world.lose(3)
    world.ask_to_stop(2)
    world.create(THREE)
    assert world.trace() == ["1/0[1]", "1/0[1]", "1/0[1]"]


def test_a_partition_without_a_live_replica_waits_for_one() -> None:
    world = World(brokers=1)
    world.create(topic("t", (1,), (2,)))
    assert world.trace() == ["1/0[1]"]
    assert set(world.knows(1)) == {TP, TopicPartition("t", 1)}, (
        "its existence must be known, so that producers see the right number of partitions"
    )
    world.register(2, 1)
    assert world.trace() == ["1/0[1]", "2/0[2]"]


def test_added_partitions_and_changed_settings_are_adopted() -> None:
    world = World(THREE)
    wider = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 3, 2), segment_bytes="4096")
    world.topics["t"] = wider
    world.told.clear()
    world.feed(TopicRead(TopicSnapshot(wider, {})))
    assert world.trace()[3] == "1/0[1, 3, 2]"
    assert world.told[0][1].topics[0].config == {"segment.bytes": "4096"}
    assert world.knows(2)[TopicPartition("t", 3)].leader == 1


def test_a_deleted_topic_leaves_zookeeper_before_the_disks() -> None:
    world = World(THREE)
    world.told.clear()
    world.delete("t")
    assert world.nodes == {}
    assert [(broker_id, update.deleted) for broker_id, update in world.told] == [
        (broker_id, (("t", "id-t"),)) for broker_id in (1, 2, 3)
    ]
    assert world.controller.settled()


def test_delete_and_re_create_a_topic_of_the_same_name_while_a_broker_is_away() -> None:
    world = World(THREE)
    world.lose(3)
    world.delete("t")
    again = topic("t", (1, 2, 3), topic_id="id-2")
    world.create(again)
    world.register(3, 2)
    [update] = [update for broker_id, update in world.told if broker_id == 3 and update.incarnation == 2]
    assert update.full, "the update does not name its logs of the first topic, so the broker does not host them"
    assert {decision.topic_id for decision in update.partitions} == {"id-2"}
    assert world.knows(3)[TP] == LeaderAndIsr(1, 0, (1, 2), 1, lossy_epoch=NO_LOSS)


def test_a_recreated_topic_is_sent_after_its_predecessors_deletion() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)  # an update is in flight
    world.delete("t")
    world.create(topic("t", (1, 2), topic_id="id-2"))
    world.told.clear()
    world.answer_held()
    for broker_id in (1, 2, 3):
        updates = [update for told_id, update in world.told if told_id == broker_id]
        deleted = next(i for i, update in enumerate(updates) if ("t", "id-t") in update.deleted)
        created = next(i for i, u in enumerate(updates) if any(c.topic_id == "id-2" for c in u.topics))
        assert deleted < created
        assert not any(decision.topic_id == "id-2" for decision in updates[deleted].partitions)


def test_the_later_of_two_same_named_topics_has_the_greater_order() -> None:
    """Clients compare the order: a slow broker's view of the first topic must not replace the second."""
    world = World(THREE)

    def order() -> int:
        world.told.clear()
        world.change(replace(world.topics["t"], config={"retention.ms": str(world.topic_versions["t"] + 5000)}))
        [*_, (_, update)] = world.told
        return update.topics[-1].order

    orders = [order(), order()]
    assert orders[0] == orders[1] > 0
    world.delete("t")
    world.create(topic("t", (1, 2), topic_id="id-2"))
    orders.append(order())
    world.take_over(2)
    orders.append(order())
    assert orders[1] < orders[2] < orders[3]


def test_a_deletion_request_for_an_earlier_topic_is_dropped() -> None:
    world = World()
    world.deletions["t"] = "id-old"
    world.take_over(2)
    effects = world.create(THREE)
    assert world.deletions == {}
    assert not any(isinstance(effect, DeleteTopicNodes) for effect in effects)
    assert world.trace()[0] == "1/0[1, 2, 3]"


def test_a_deletion_request_survives_the_predecessors_deletion() -> None:
    """The response to the first deletion comes last, because it was lost and requested again."""
    core = World(THREE).controller
    assert DeleteTopicNodes("t", "id-t") in core.step(DeletionsRead({"t": "id-t"}), 0)
    core.step(DeletionsRead({"t": "id-2"}), 0)
    core.step(TopicDeleted("t", "id-t"), 0)
    recreated = TopicSnapshot(topic("t", (1, 2), topic_id="id-2"), {})
    assert DeleteTopicNodes("t", "id-2") in core.step(TopicRead(recreated), 0)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_missing_topic_is_named_deleted_only_if_zookeeper_agrees(deleted: bool) -> None:
    """A user removed its nodes by hand: brokers learn that they have no replica of it, and keep its logs."""
    world = World(THREE, topic("kept", (1, 2), topic_id="id-kept"))
    world.nodes = {tp: node for tp, node in world.nodes.items() if tp.topic != "t"}
    del world.topics["t"]
    world.told.clear()
    world.feed(TopicGone("t", deleted))
    assert len(world.told) == 3
    for _, update in world.told:
        assert update.deleted == ((("t", "id-t"),) if deleted else ())
        assert update.full is not deleted
        assert {decision.topic for decision in update.partitions} == (set() if deleted else {"kept"})
    assert world.lose(1) != []


def test_a_topic_found_under_another_id_is_not_named_deleted() -> None:
    world = World(THREE)
    world.told.clear()
    world.nodes.clear()
    world.create(topic("t", (1, 2), topic_id="id-2"))
    assert not any(update.deleted for _, update in world.told)
    assert all(update.full for _, update in world.told[:3])
