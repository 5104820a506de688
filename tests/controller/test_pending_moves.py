"""Tests of the controller core: leaderships leave a stopping broker in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from sparklog.controller import handover_notifications, pending_moves
from sparklog.controller.cluster_state import ClusterPartition
from sparklog.controller.effects import Effect, WriteStates
from sparklog.controller.events import StoppingRead, UpdateLost, UpdateReplied
from sparklog.model import TopicPartition

from .support import World, topic

SIX = topic("t", *[(1, 2, 3)] * 6)


@pytest.fixture(autouse=True)
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_moves, "_AT_ONCE", 2)


def writes(orders: list[Effect]) -> Iterator[int]:
    return (len(order.writes) for order in orders if isinstance(order, WriteStates))


def led(world: World, broker_id: int) -> int:
    return sum(node.state.leader == broker_id for node in world.nodes.values())


def test_a_stopping_brokers_leaderships_move_in_acknowledged_batches() -> None:
    world = World(SIX)
    orders = world.ask_to_stop(1)
    assert list(writes(orders)) == [2, 2, 2]
    assert led(world, 1) == 0
    assert world.controller.settled()
    assert all(world.knows(broker)[TopicPartition("t", 5)].leader == 2 for broker in (1, 2, 3))


def test_the_next_moves_wait_for_acknowledgements_of_the_last() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    assert led(world, 1) == 4
    assert not world.controller.settled()
    world.answer_held()
    assert led(world, 1) == 0
    assert world.controller.settled()


class Moved:
    """Return all orders about a partition."""

    pending = None


def test_more_moves_start_once_half_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_moves, "_AT_ONCE", 4)
    moves = pending_moves.PendingMoves()
    partitions = [cast(ClusterPartition, Moved()) for _ in range(9)]
    assert [moves.begin(partition, 0) for partition in partitions] == [True] * 4 + [False] * 5
    told: set[ClusterPartition] = set()
    assert moves.next_ready(1, told.__contains__) == []
    told.add(partitions[0])
    assert moves.next_ready(2, told.__contains__) == []
    told.add(partitions[1])
    assert moves.next_ready(3, told.__contains__) == partitions[4:6]
    assert [moves.begin(partition, 3) for partition in partitions[4:6]] == [True, True]
    told.update(partitions[:6])
    assert moves.next_ready(4, told.__contains__) == partitions[6:]
    assert moves.idle


def test_a_silent_broker_does_not_block_a_shutdown() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    seen = [led(world, 1)]
    for _ in range(2):
        world.advance(500)
        seen.append(led(world, 1))
    assert seen == [4, 2, 0]


def test_only_as_many_moves_are_decided_as_may_start() -> None:
    """A decision about all of thousands took as long as some hundred writes, before the first write."""
    world = World(SIX)
    world.hold_writes = True
    world.ask_to_stop(1)
    assert len(world.held_writes) == 2
    assert not world.controller.settled()


def test_leaderships_of_an_ended_process_are_elected_at_once() -> None:
    """The process has ended, or another one has its id. Nothing moves then: every partition needs a leader."""
    world = World(SIX)
    world.retire(1)
    world.feed(StoppingRead({1: 1}))
    assert led(world, 1) == 0
    assert world.controller.settled()


def test_necessary_elections_do_not_wait() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.retire(1)
    assert led(world, 1) == 0


def test_a_topic_deleted_during_its_moves_is_dropped() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.delete("t")
    world.answer_held()
    assert world.controller.settled()


def told_of_moves(world: World) -> list[int]:
    return [update.broker.broker_id for update in world.held_updates if update.update.partitions]


def answer_next(world: World) -> None:
    """Accept the update in flight."""
    [update], world.held_updates = world.held_updates, []
    world.feed(UpdateReplied(update.broker.broker_id, update.update_id, 0))


def test_the_successor_is_notified_before_followers_and_the_old_leader() -> None:
    """A follower would ask a successor that does not know its role, in vain. An old leader would refuse records
    while no other broker accepts them."""
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    for broker_id in (2, 3, 1):
        assert told_of_moves(world) == [broker_id]
        assert {decision.state.leader for decision in world.held_updates[-1].update.partitions} == {2}
        answer_next(world)
    assert led(world, 1) == 2, "the next two moves"


def test_all_are_notified_although_the_successor_does_not_respond() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.advance(handover_notifications._PATIENCE_MS - 1)
    assert told_of_moves(world) == [2]
    world.advance(1)
    assert sorted(told_of_moves(world)) == [1, 2, 3]
    world.answer_held()
    assert world.controller.settled()


def test_the_old_leader_is_notified_although_a_follower_is_silent() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.advance(1)
    answer_next(world)
    world.advance(handover_notifications._PATIENCE_MS - 2)
    assert told_of_moves(world) == [3, 2], "and broker 2 learns of its next leader"
    world.advance(1)
    assert told_of_moves(world) == [3, 2, 1]
    assert [decision.partition for decision in world.held_updates[-1].update.partitions] == [0, 1]


def test_the_old_leader_does_not_wait_for_lagging_replicas() -> None:
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(TopicPartition("t", 0), 1, 2)
    world.hold_updates = True
    world.ask_to_stop(1)
    told: list[int] = []
    while 1 not in told:
        assert world.held_updates, "only broker 3 has a response to send"
        held, world.held_updates = world.held_updates, []
        for update in held:
            if update.update.partitions:
                told.append(update.broker.broker_id)
            if update.broker.broker_id != 3:  # broker 3 hangs
                world.feed(UpdateReplied(update.broker.broker_id, update.update_id, 0))
    assert told == [2, 1]


def test_a_successor_with_a_full_update_knows_of_the_move() -> None:
    """The successor's full update failed and is sent again. The others are notified after its response, and not
    after the timeout."""
    world = World(topic("t", (1, 2, 3), (1, 2, 3)))
    world.hold_updates = True
    world.register(2, 2)
    [full] = [update for update in world.held_updates if update.update.full]
    world.leader_writes_isr(TopicPartition("t", 0), 1, 2, 3)
    world.ask_to_stop(1)
    world.held_updates.remove(full)
    world.feed(UpdateLost(2, full.update_id))
    began_ms = world.now_ms
    while led(world, 1) or not world.controller.settled():
        assert world.now_ms - began_ms < handover_notifications._PATIENCE_MS / 2
        world.advance(1)
        world.hold_updates = True
        held, world.held_updates = world.held_updates, []
        for update in held:
            world.feed(UpdateReplied(update.broker.broker_id, update.update_id, 0))


def test_all_brokers_learn_of_the_next_successor_when_the_first_fails() -> None:
    """The first successor may have received its notification or not."""
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.retire(2)
    world.answer_held()
    for broker_id in (1, 3):
        assert all(world.knows(broker_id)[TopicPartition("t", number)].leader == 3 for number in range(6))
    assert world.controller.settled()


def test_a_failed_notification_of_a_successor_does_not_count() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    [lost], world.held_updates = world.held_updates, []
    world.feed(UpdateLost(2, lost.update_id))
    assert told_of_moves(world) == []
    world.advance(50)
    assert told_of_moves(world) == [2]


def test_a_topic_deleted_before_its_notifications_is_not_sent() -> None:
    world = World(SIX)
    world.hold_updates = True
    world.ask_to_stop(1)
    world.delete("t")
    world.advance(handover_notifications._PATIENCE_MS)
    assert told_of_moves(world) == [2]
