"""Tests of replicas of a broker that stays away: after a configured time they are rebuilt on other brokers."""

from __future__ import annotations

import pytest

from sparklog.controller.broker_replacement import MAX_MOVING
from sparklog.controller.effects import WriteTopic
from sparklog.controller.events import Disconnected, Reconnected, StatesRead
from sparklog.controller.reassignments import moving_record
from sparklog.model import TopicPartition, TopicRecord

from .support import SESSION_TIMEOUT_MS, World, topic

TP = TopicPartition("t", 0)
AFTER_MS = 60_000


def world_of(*records: TopicRecord, brokers: int = 4, after_ms: int = AFTER_MS) -> World:
    return World(*(records or (topic("t", (1, 2, 3)),)), brokers=brokers, broker_replace_after_ms=after_ms)


def targets(world: World, name: str = "t") -> dict[int, tuple[int, ...]]:
    return {number: move.target for number, move in world.topics[name].reassigning.items()}


def assignment(world: World) -> tuple[tuple[int, ...], ...]:
    return world.topics["t"].assignment


def test_a_lost_broker_is_replaced_in_its_position() -> None:
    world = world_of()
    world.lose(1)
    world.advance(AFTER_MS - 1)
    assert targets(world) == {}
    world.advance(1)
    assert targets(world) == {0: (4, 2, 3)}
    assert assignment(world) == ((4, 2, 3, 1),)
    world.leader_writes_isr(TP, 2, 3)
    world.leader_writes_isr(TP, 2, 3, 4)
    assert assignment(world) == ((4, 2, 3),)
    assert world.counters["controller.replicas.replaced"] == 1
    assert world.controller.deadline_ms is None, "nothing of the move may remain"


def test_a_broker_is_not_replaced_if_disabled_or_if_it_returns() -> None:
    world = world_of(after_ms=-1)
    world.lose(1)
    world.advance(10 * AFTER_MS)
    assert targets(world) == {}
    world = world_of()
    for incarnation in (2, 3, 4):
        world.lose(1)
        world.advance(AFTER_MS - 1)
        world.register(1, incarnation)
    assert targets(world) == {}


def test_a_broker_that_returns_during_its_replacement_changes_nothing() -> None:
    world = world_of()
    world.lose(1)
    world.advance(AFTER_MS)
    world.register(1, 2)
    world.advance(AFTER_MS)
    assert targets(world) == {0: (4, 2, 3)}
    world.leader_writes_isr(TP, 2, 3, 4)
    assert assignment(world) == ((4, 2, 3),)


def test_the_replacement_clock_restarts_with_terms_and_reconnections() -> None:
    world = world_of()
    world.lose(1)
    world.advance(AFTER_MS - 1)
    world.take_over(2)
    world.advance(AFTER_MS - 1)
    assert targets(world) == {}
    world.feed(Disconnected())
    world.advance(10 * AFTER_MS)
    world.feed(Reconnected())
    world.advance(AFTER_MS - 1)
    assert targets(world) == {}
    world.advance(1)
    assert targets(world) == {0: (4, 2, 3)}


def test_a_held_brokers_clock_starts_when_it_is_failed() -> None:
    world = world_of(topic("t", (1, 2, 3)), brokers=4)
    world.lose(1, 2, 3)
    world.register(2, 2)
    world.register(3, 2)
    world.advance(AFTER_MS)
    assert targets(world) == {}
    world.advance(SESSION_TIMEOUT_MS)
    assert targets(world) == {0: (4, 2, 3)}


def test_the_lack_of_another_broker_is_reported_once() -> None:
    world = world_of(brokers=3)
    world.lose(1)
    world.advance(20 * AFTER_MS)
    assert targets(world) == {}
    assert world.counters["controller.replicas.irreplaceable"] == 1
    world.register(5, 1)
    world.advance(20_000)
    assert targets(world) == {0: (5, 2, 3)}


def test_a_partition_without_a_leader_waits_for_its_last_isr_member() -> None:
    world = world_of()
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    world.advance(10 * AFTER_MS)
    assert (world.state().leader, targets(world)) == (-1, {})


def test_other_hosts_come_first_then_the_lightest_broker() -> None:
    world = world_of(topic("t", (1, 2, 3)), topic("u", (5, 6), (5, 6)), brokers=7)
    world.ask_to_stop(7)
    world.ask_to_stop(4)
    world.lose(1)
    world.advance(AFTER_MS)
    assert targets(world)[0][0] in {5, 6}


def test_many_replacements_in_a_topic_start_in_one_write() -> None:
    world = world_of(topic("t", *[(1, 2, 3)] * 60), brokers=6)
    world.lose(1)
    world.effects.clear()
    world.advance(AFTER_MS)
    assert sum(isinstance(effect, WriteTopic) for effect in world.effects) == 1
    chosen = [target[0] for target in targets(world).values()]
    assert {broker_id: chosen.count(broker_id) for broker_id in (4, 5, 6)} == {4: 20, 5: 20, 6: 20}


def test_the_number_of_moves_at_a_time_is_bounded() -> None:
    world = world_of(topic("t", *[(1, 2)] * (MAX_MOVING + 10)), brokers=4)
    world.lose(1)
    world.advance(AFTER_MS + 60_000)
    assert len(targets(world)) == MAX_MOVING
    for number, (added, _) in targets(world).items():
        world.leader_writes_isr(TopicPartition("t", number), 2, added, notify=False)
    world.feed(StatesRead(dict(world.nodes)))
    world.advance(20_000)
    assert len(targets(world)) == 10


def test_a_lost_target_of_a_move_is_replaced_in_that_move() -> None:
    world = world_of(topic("t", (1, 2, 3)), brokers=6)
    world.reassign(4, 5, 1)
    world.lose(4)
    world.advance(AFTER_MS)
    move = world.topics["t"].reassigning[0]
    assert (move.target, move.original) == ((2, 5, 1), (1, 2, 3)), "2 already has all records"
    assert assignment(world) == ((2, 5, 1, 4, 3),)
    world.leader_writes_isr(TP, 1, 2, 3, 5)
    world.leader_writes_isr(TP, 1, 2, 5)
    assert assignment(world) == ((2, 5, 1),)


def test_moves_to_a_lost_target_are_redirected() -> None:
    count = MAX_MOVING + 1
    world = world_of(topic("t", *[(1, 2)] * count), brokers=5)
    wanted = moving_record(world.topics["t"], dict.fromkeys(range(count), (4, 2)))
    world.change(wanted)
    world.lose(4)
    world.advance(AFTER_MS)
    assert {first for first, *_ in assignment(world)} == {1, 3, 5}
    assert set(targets(world).values()) == {(3, 2), (5, 2)}, "a partition that 1 keeps needs no move"


def test_a_lost_broker_that_leaves_anyway_is_not_replaced() -> None:
    world = world_of(topic("t", (1, 2, 3)), brokers=6)
    world.reassign(4, 5, 1)
    world.lose(3)
    world.advance(2 * AFTER_MS)
    assert targets(world) == {0: (4, 5, 1)}


@pytest.mark.parametrize("lost_both", [False, True])
def test_two_lost_brokers_of_one_partition_are_replaced(lost_both: bool) -> None:
    world = world_of(topic("t", (1, 2, 3)), brokers=6)
    world.retire(2)
    if lost_both:
        world.retire(3)
    world.advance(AFTER_MS)
    expected = 2 if lost_both else 1
    assert len(set(targets(world)[0]) - {1, 2, 3}) == expected
    assert targets(world)[0][0] == 1


def test_a_record_changed_concurrently_is_read_before_the_retry() -> None:
    world = world_of()
    world.lose(1)
    world.change(topic("t", (1, 2, 3), (2, 3, 4)), tell=False)
    world.advance(AFTER_MS)
    world.advance(20_000)
    assert targets(world) == {0: (4, 2, 3)}
    assert world.trace()[1] == "2/0[2, 3, 4]"
