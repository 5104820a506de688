"""Tests of the controller core: the content, the order and the timing of updates of brokers."""

from __future__ import annotations

import gc
import time

import pytest

from sparklog.controller import outbox, partition_states
from sparklog.controller.effects import Effect, SendUpdate, WriteStates
from sparklog.controller.events import (
    BrokersRead,
    ControllerTicked,
    Event,
    StatesWritten,
    TopicRead,
    TopicSnapshot,
    UpdateLost,
    UpdateReplied,
)
from sparklog.controller.placement import MAX_NEW_PARTITIONS
from sparklog.controller.reassignments import moving_record
from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr, TopicPartition, VersionedState

from .support import World, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2))


# --- updates -----------------------------------------------------------------------------------------------------


def test_each_broker_has_one_update_in_flight_then_the_newest() -> None:
    world = World(THREE)
    world.hold_updates = True
    for isr in ((1, 2), (1, 2, 3), (1, 3)):
        world.leader_writes_isr(TP, *isr)
    assert [update.broker.broker_id for update in world.held_updates] == [2, 3], (
        "all brokers except the leader, which wrote it"
    )
    world.told.clear()
    world.answer_held()
    later = [update for broker_id, update in world.told if broker_id == 2][1:]
    assert [[d.state.isr for d in update.partitions] for update in later] == [[(1, 3)]]


def test_updates_are_paced_while_more_decisions_are_being_written() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    world.told.clear()
    for number in (0, 1, 2):  # results arrive slowly while one write is still in flight
        world.leader_writes_isr(TopicPartition("t", number), *world.state("t", number).isr[:2])
    assert world.told == []
    world.advance(10)
    assert [len(update.partitions) for _, update in world.told] == [2, 2], (
        "the partitions that the other leads, and those that broker 1 led"
    )
    world.told.clear()
    world.write_held()
    assert world.told != [], "the last update must be sent immediately"
    assert world.controller.settled()


def test_an_unreachable_broker_is_retried_with_growing_pauses() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    times = []
    for _ in range(8):
        update = next(u for u in world.held_updates if u.broker.broker_id == 3)
        world.held_updates.clear()
        world.feed(UpdateLost(3, update.update_id))
        deadline = world.controller.deadline_ms
        assert deadline is not None
        times.append(deadline - world.now_ms)
        world.advance(times[-1])
    assert times == [50, 100, 200, 400, 800, 1000, 1000, 1000]
    world.leader_writes_isr(TopicPartition("t", 1), 2, 3)  # it comes in addition and replaces nothing
    world.told.clear()
    world.answer_held()
    decisions = [d for broker_id, u in world.told if broker_id == 3 for d in u.partitions]
    assert {d.partition for d in decisions} == {0, 1}


def test_updates_are_numbered_so_that_late_ones_are_recognized() -> None:
    """An update whose response was lost and that was sent again may still arrive, and it names brokers that are dead
    by now."""
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    given_up = next(u for u in world.held_updates if u.broker.broker_id == 3)
    world.hold_updates = False
    world.feed(UpdateLost(3, given_up.update_id))
    world.lose(1)
    world.advance(100)
    sent = [update for broker_id, update in world.told if broker_id == 3]
    newest = next(update for update in reversed(sent) if update.brokers is not None)
    assert newest.brokers is not None
    assert [endpoint.broker_id for endpoint in newest.brokers] == [2, 3]
    assert newest.sequence > given_up.update.sequence
    sequences = [update.sequence for update in sent]
    assert sequences == sorted(set(sequences))
    assert given_up.update.sequence not in sequences, "a repeated update must have its own number"


def test_an_update_refused_by_another_incarnation_is_repeated_in_full() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    update = next(u for u in world.held_updates if u.broker.broker_id == 3)
    world.feed(UpdateReplied(3, update.update_id, int(ErrorCode.STALE_BROKER_EPOCH)))
    world.hold_updates = False
    world.told.clear()
    world.advance(100)
    assert [(broker_id, u.full, len(u.partitions)) for broker_id, u in world.told] == [(3, True, 3)]


def test_a_response_to_an_earlier_incarnations_update_is_ignored() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    old = next(u for u in world.held_updates if u.broker.broker_id == 3)
    world.register(3, 2)
    assert world.feed(UpdateReplied(3, old.update_id, int(ErrorCode.STALE_BROKER_EPOCH))) == []
    assert world.feed(UpdateLost(3, old.update_id)) == []


# --- many brokers, many partitions -----------------------------------------------------------------------------------


def test_full_updates_go_to_a_few_brokers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_MAX_STATES_IN_FLIGHT", 6)
    world = World(THREE, brokers=5)
    world.hold_updates = True
    world.take_over(2)
    assert [held.broker.broker_id for held in world.held_updates] == [1, 2], "three partitions each"
    world.leader_writes_isr(TP, 1, 2)
    assert len(world.held_updates) == 2
    world.told.clear()
    world.answer_held()
    assert sorted(broker_id for broker_id, update in world.told if update.full) == [1, 2, 3, 4, 5]
    assert all(world.knows(broker_id)[TP].isr == (1, 2) for broker_id in range(2, 6))
    assert world.controller.settled()


def test_a_broker_that_does_not_respond_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_MAX_STATES_IN_FLIGHT", 6)
    world = World(THREE, brokers=5)
    world.hold_updates = True
    world.take_over(2)
    told = [len(world.held_updates)]
    for _ in range(2):
        world.advance(2_001)
        told.append(len(world.held_updates))
    assert told == [2, 4, 5]


def test_waiting_for_others_full_updates_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's pause after a failure is over, but the broker has to wait for its turn."""
    monkeypatch.setattr(outbox, "_MAX_STATES_IN_FLIGHT", 3)
    world = World(THREE)
    world.hold_updates = True
    world.take_over(2)
    [first] = world.held_updates
    world.feed(UpdateReplied(first.broker.broker_id, first.update_id, int(ErrorCode.STALE_BROKER_EPOCH)))
    assert len(world.held_updates) == 2, "now it is the next broker's turn"
    world.advance(100)
    assert len(world.held_updates) == 2
    deadline_ms = world.controller.deadline_ms
    assert deadline_ms is not None and deadline_ms > world.now_ms
    world.advance(2_000)
    assert len(world.held_updates) > 2


def test_all_brokers_share_one_value_of_a_partition() -> None:
    """Without sharing, a hundred brokers and a hundred thousand partitions make ten million values."""
    world = World(THREE)
    world.told.clear()
    world.leader_writes_isr(TP, 1, 2)
    first = [decision for _, update in world.told for decision in update.partitions]
    assert len(first) == 2 and all(decision is first[0] for decision in first)
    world.told.clear()
    world.leader_writes_isr(TP, 1, 2, 3)
    assert [d.state.isr for _, update in world.told for d in update.partitions] == [(1, 2, 3)] * 2
    world.told.clear()
    world.reassign(1, 2, 4)
    moved = [decision for _, update in world.told for decision in update.partitions]
    assert moved[-1].target == (1, 2, 4)


# --- speed -------------------------------------------------------------------------------------------------------


def steps(world: World, event: Event) -> tuple[list[Effect], float]:
    """Give the core an event, let it examine all affected partitions, and return its orders and the processor time
    of its longest step."""
    effects: list[Effect] = []
    longest_s = 0.0
    while True:
        began_s = time.thread_time()
        effects += world.controller.step(event, world.now_ms)
        longest_s = max(longest_s, time.thread_time() - began_s)
        deadline_ms = world.controller.deadline_ms
        if deadline_ms is None or deadline_ms > world.now_ms:
            return effects, longest_s
        event = ControllerTicked()


def written(effects: list[Effect]) -> StatesWritten:
    writes = [write for effect in effects if isinstance(effect, WriteStates) for write in effect.writes]
    return StatesWritten({write.tp: write.expected_version + 1 for write in writes})


@pytest.mark.alone
@pytest.mark.parametrize("partitions", [10_000])
def test_ten_thousand_elections_take_well_below_a_second(partitions: int) -> None:
    # The world's checks examine everything after every step. They are too slow here, so the test drives the core
    # itself.
    assignment = tuple(((1, 2, 3), (2, 3, 1), (3, 1, 2))[p % 3] for p in range(partitions))
    states = {p: VersionedState(LeaderAndIsr(a[0], 0, a, 1), 0, 1) for p, a in enumerate(assignment)}
    record = topic("t", *assignment)
    world = World(brokers=4)
    for effect in steps(world, TopicRead(TopicSnapshot(record, states)))[0]:
        assert isinstance(effect, SendUpdate)
        world.controller.step(UpdateReplied(effect.broker.broker_id, effect.update_id, 0), world.now_ms)
    survivors = tuple(world.brokers[i] for i in (2, 3, 4))
    begun = time.thread_time()
    effects, _ = steps(world, BrokersRead(survivors))
    took = time.thread_time() - begun
    writes = [write for effect in effects if isinstance(effect, WriteStates) for write in effect.writes]
    assert len(writes) == (partitions + 2) // 3
    assert any(isinstance(effect, SendUpdate) for effect in effects), "survivors must learn of the death immediately"
    assert took < 0.5


def longest_step_s(event: str, assignment: tuple[tuple[int, ...], ...]) -> float:
    """Return the processor time of the core's longest step when a topic is created, or all its partitions are moved."""
    world = World(brokers=4)
    record = topic("t", *assignment)
    effects, longest_s = steps(world, TopicRead(TopicSnapshot(record, {}, 0)))
    assert not [effect for effect in effects if isinstance(effect, SendUpdate)], (
        "brokers learn of the topic before it has states"
    )
    told, _ = steps(world, written(effects))
    updates = [effect for effect in told if isinstance(effect, SendUpdate)]
    assert {len(effect.update.partitions) for effect in updates} == {len(assignment)}, (
        "one update must contain all partitions"
    )
    if event == "created":
        return longest_s
    for effect in updates:
        steps(world, UpdateReplied(effect.broker.broker_id, effect.update_id, 0))
    moved = moving_record(record, dict.fromkeys(range(len(assignment)), (4, 2, 3)))
    return steps(world, TopicRead(TopicSnapshot(moved, {}, 1)))[1]


@pytest.mark.alone
@pytest.mark.parametrize("event", ["created", "moved"])
def test_partitions_of_one_request_are_examined_in_several_steps(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses the maximum number of one request. In one step they would take three to four times as long as
    the longest step."""
    assignment = tuple(((1, 2, 3), (2, 3, 1), (3, 1, 2))[p % 3] for p in range(MAX_NEW_PARTITIONS))
    gc.disable()  # the collector mostly examines objects of other tests
    try:
        in_steps_s = min(longest_step_s(event, assignment) for _ in range(3))
        monkeypatch.setattr(partition_states, "AT_ONCE", 1_000_000)
        at_a_stretch_s = min(longest_step_s(event, assignment) for _ in range(3))
    finally:
        gc.enable()
    assert in_steps_s < 0.7 * at_a_stretch_s


def test_one_step_examines_some_partitions_and_the_next_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_states, "AT_ONCE", 2)
    world = World(brokers=3)
    record = topic("t", *[(1, 2, 3)] * 5)
    found = []
    event: Event = TopicRead(TopicSnapshot(record, {}, 0))
    for _ in range(3):
        effects = world.controller.step(event, world.now_ms)
        found.append([len(effect.writes) for effect in effects if isinstance(effect, WriteStates)])
        event = ControllerTicked()
    assert found == [[2], [2], [1]]
    assert world.controller.deadline_ms is None or world.controller.deadline_ms > world.now_ms
