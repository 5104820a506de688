"""Tests of a partition's moves: records, states and ISRs are the input, writes and updates of brokers the output."""

from __future__ import annotations

import msgspec
import pytest

from sparklog.controller.effects import ReadTopic, SendUpdate, WriteTopic
from sparklog.controller.events import (
    Disconnected,
    Reconnected,
    StatesRead,
    TopicGone,
    TopicNotWritten,
    TopicRead,
    TopicSnapshot,
    UpdateReplied,
)
from sparklog.controller.reassignments import MAX_FINISHED, moving_record
from sparklog.errors import ErrorCode
from sparklog.model import Reassignment, TopicPartition, VersionedState
from sparklog.protocol.messages import PartitionDecision

from .support import World, topic

TP = TopicPartition("t", 0)


def world_of(*assignment: tuple[int, ...], brokers: int = 6) -> World:
    return World(topic("t", *(assignment or ((1, 2, 3),))), brokers=brokers)


def told(world: World, broker_id: int, tp: TopicPartition = TP) -> PartitionDecision:
    """Return the last decision on the partition that this broker received."""
    return [d for b, u in world.told if b == broker_id for d in u.partitions if (d.topic, d.partition) == tp][-1]


def assignment(world: World) -> tuple[tuple[int, ...], ...]:
    return world.topics["t"].assignment


def moves(world: World) -> dict[int, Reassignment]:
    return world.topics["t"].reassigning


def copied(world: World, *isr: int) -> None:
    world.leader_writes_isr(TP, *isr)


def ending() -> tuple[World, WriteTopic]:
    """Return a world with a finished move from 1, 2, 3 to 4, 5, 1 whose final write is held back."""
    world = world_of()
    world.reassign(4, 5, 1)
    copied(world, 1, 2, 3, 4, 5)
    world.hold_topic_writes = True
    copied(world, 1, 4, 5)
    [order] = world.held_topic_writes
    return world, order


# --- the phases of a move ---------------------------------------------------------------------------------------


def test_a_move_grows_the_set_then_moves_leadership_then_shrinks() -> None:
    world = world_of()
    world.reassign(4, 5, 1)
    assert assignment(world) == ((4, 5, 1, 2, 3),)
    assert world.trace() == ["1/0[1, 2, 3]"], "the state must not change"
    for broker_id in (1, 4, 6):
        decision = told(world, broker_id)
        assert decision.replicas == (4, 5, 1, 2, 3)
        assert (decision.target, decision.original, decision.leaving) == ((4, 5, 1), (1, 2, 3), ())

    copied(world, 1, 2, 3, 4)
    assert told(world, 1).leaving == (), "5 does not have all records yet"
    copied(world, 1, 2, 3, 4, 5)
    assert told(world, 1).leaving == (2, 3)
    assert world.trace() == ["1/0[1, 2, 3, 4, 5]"], "1 stays and may continue to lead"
    copied(world, 1, 4, 5)
    assert world.trace() == ["1/1[1, 4, 5]"]
    assert (assignment(world), moves(world)) == (((4, 5, 1),), {})
    for broker_id in (1, 2, 6):
        decision = told(world, broker_id)
        assert (decision.replicas, decision.target, decision.leaving) == ((4, 5, 1), (), ())
        assert decision.state == world.state()
    assert world.counters["controller.reassignments.finished"] == 1
    assert world.controller.settled()


def test_leadership_moves_into_the_target_before_the_old_leader_leaves() -> None:
    world = world_of((1, 2, 3))
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 4, 5, 6)
    assert world.trace() == ["4/1[1, 2, 3, 4, 5, 6]"]
    assert told(world, 4).leaving == (1, 2, 3)
    copied(world, 4, 5, 6)
    assert world.trace() == ["4/2[4, 5, 6]"]
    assert moves(world) == {}


def test_reordered_replicas_change_only_the_preferred_leader() -> None:
    world = world_of((1, 2, 3))
    world.reassign(3, 2, 1)
    assert world.trace() == ["1/0[1, 2, 3]"]
    assert (assignment(world), moves(world)) == (((3, 2, 1),), {})
    assert told(world, 2).replicas == (3, 2, 1)
    world.lose(1)
    assert world.trace() == ["3/1[1, 2, 3]"]


def test_a_reordering_needs_no_live_replica() -> None:
    world = World(topic("t", (1, 2)), brokers=3)
    world.lose(1)
    copied(world, 2)
    world.lose(2)
    world.reassign(2, 1)
    assert assignment(world) == ((2, 1),)


def test_a_move_may_add_or_remove_replicas() -> None:
    world = world_of((1,))
    world.reassign(1, 2, 3)
    copied(world, 1, 2)
    assert moves(world)
    copied(world, 1, 2, 3)
    assert (world.trace(), assignment(world)) == (["1/1[1, 2, 3]"], ((1, 2, 3),))
    world.reassign(2)
    assert world.trace() == ["2/2[1, 2, 3]"]
    copied(world, 2)
    assert (world.trace(), assignment(world)) == (["2/3[2]"], ((2,),))


def test_a_thousand_finished_moves_take_few_writes() -> None:
    count = 2 * MAX_FINISHED + 100
    world = World(topic("t", *[(1, 2)] * count), brokers=3)
    world.change(moving_record(world.topics["t"], dict.fromkeys(range(count), (2, 3))), tell=False)
    for partition in range(count):
        world.leader_writes_isr(TopicPartition("t", partition), 1, 2, 3, notify=False)
    world.take_over(2)
    assert {state.state.leader for state in world.nodes.values()} == {2}
    for partition in range(count):
        world.leader_writes_isr(TopicPartition("t", partition), 2, 3, notify=False)
    world.effects.clear()
    world.take_over(3)
    writes = [effect for effect in world.effects if isinstance(effect, WriteTopic)]
    assert [len(write.writes) for write in writes] == [MAX_FINISHED, MAX_FINISHED, 100]
    assert moves(world) == {}
    assert world.controller.settled()


def test_added_partitions_get_leaders_while_others_move() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    record = world.topics["t"]
    world.change(msgspec.structs.replace(record, assignment=(*record.assignment, (2, 3, 1), (5, 6, 4))))
    assert world.trace()[1:] == ["2/0[2, 3, 1]", "5/0[5, 6, 4]"]
    assert told(world, 1, TopicPartition("t", 2)).replicas == (5, 6, 4)
    copied(world, 1, 2, 3, 4, 5, 6)
    copied(world, 4, 5, 6)
    assert assignment(world) == ((4, 5, 6), (2, 3, 1), (5, 6, 4))


# --- cancellation in each phase ---------------------------------------------------------------------------------


def test_a_cancelled_move_before_the_copy_changes_nothing() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    world.cancel()
    assert (assignment(world), moves(world)) == (((1, 2, 3),), {})
    assert world.trace() == ["1/1[1, 2, 3]"], "the new epoch informs replicas that had begun to copy"
    assert told(world, 4).replicas == (1, 2, 3)


def test_a_cancel_during_the_copy_removes_the_added_replicas_first() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 4)
    world.cancel()
    assert assignment(world) == ((1, 2, 3, 4, 5, 6),)
    assert told(world, 1).leaving == (4, 5, 6)
    copied(world, 1, 2, 3)
    assert (world.trace(), assignment(world)) == (["1/1[1, 2, 3]"], ((1, 2, 3),))


def test_a_cancel_after_a_leadership_move_moves_it_back() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 4, 5, 6)
    copied(world, 2, 4, 5, 6)
    world.cancel()
    assert world.trace() == ["4/1[2, 4, 5, 6]"], "one in-sync replica is not enough: min.insync.replicas is 2"
    copied(world, 2, 4, 5, 6, 3)
    assert world.trace() == ["2/2[2, 4, 5, 6, 3]"]
    copied(world, 2, 3)
    assert (world.trace(), assignment(world)) == (["2/3[2, 3]"], ((1, 2, 3),))


def test_a_cancel_does_not_wait_for_a_replica_that_was_absent() -> None:
    world = world_of()
    world.lose(3)
    copied(world, 1, 2)
    world.reassign(1, 2, 4)
    world.cancel()
    assert (world.trace(), assignment(world)) == (["1/1[1, 2]"], ((1, 2, 3),))


def test_a_cancel_during_the_final_write_comes_too_late() -> None:
    world, _ = ending()
    world.cancel()  # before the final write, which therefore fails
    world.write_topics_held()
    assert world.trace() == ["1/0[1, 4, 5]"]
    copied(world, 1, 4, 5, 2)
    assert told(world, 1).leaving == (4, 5)
    copied(world, 1, 2)
    assert (world.trace(), assignment(world)) == (["1/1[1, 2]"], ((1, 2, 3),))


# --- failures in each phase -------------------------------------------------------------------------------------


def test_a_leader_that_dies_during_the_copy_yields_to_original_replicas() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    world.lose(1)
    assert world.trace() == ["2/1[1, 2, 3]"]
    copied(world, 2, 3, 4, 5, 6)
    assert world.trace() == ["4/2[2, 3, 4, 5, 6]"]


def test_a_leader_that_dies_before_the_shrink_yields_to_the_target() -> None:
    world = world_of()
    world.reassign(4, 5, 1)
    copied(world, 1, 2, 3, 4, 5)
    world.lose(1)
    assert world.trace() == ["4/1[1, 2, 3, 4, 5]"]
    assert told(world, 4).leaving == (2, 3)
    copied(world, 2, 3, 4, 5)  # the new leader learns first that broker 1 is dead
    assert told(world, 4).leaving == (), "not all of the target is in sync any more"
    world.register(1, 2)
    copied(world, 2, 3, 4, 5, 1)
    copied(world, 4, 5, 1)
    assert assignment(world) == ((4, 5, 1),)


def test_a_leader_that_dies_after_all_others_left_is_replaced() -> None:
    world = world_of()
    world.reassign(4, 5, 1)
    copied(world, 1, 2, 3, 4, 5)
    world.brokers.pop(1)
    copied(world, 1, 4, 5)  # the leader wrote it before it died; the controller learns of its death later
    assert world.trace() == ["1/1[1, 4, 5]"], "a move may end under a leader that seems alive"
    world.lose()
    assert world.trace() == ["4/2[1, 4, 5]"]


def test_a_move_does_not_end_while_its_leaders_fate_is_open() -> None:
    world = world_of()
    world.reassign(1, 2, 4)
    copied(world, 1, 2, 3, 4)
    world.lose(1, 3, 5, 6)  # both at once, so they are held
    copied(world, 1, 2, 4)
    assert world.trace() == ["1/0[1, 2, 4]"]
    world.register(1, 1)
    assert (world.trace(), moves(world)) == (["1/1[1, 2, 4]"], {})


def test_a_dead_target_member_stops_the_move_until_it_returns() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 4, 5)
    world.lose(6)
    world.advance(60_000)
    assert world.trace() == ["1/0[1, 2, 3, 4, 5]"]
    world.register(6, 2)
    copied(world, 1, 2, 3, 4, 5, 6)
    assert world.trace() == ["4/1[1, 2, 3, 4, 5, 6]"]


def test_a_dead_in_sync_target_keeps_its_claim_until_removed() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    world.lose(4)
    copied(world, 1, 2, 3, 5, 6)
    world.register(4, 2)
    world.hold_updates = True
    world.brokers.pop(4)
    copied(world, 1, 2, 3, 4, 5, 6)
    world.answer_held()
    world.lose()
    assert world.trace() == ["5/2[1, 2, 3, 4, 5, 6]"], "the next member of the target must lead"
    copied(world, 1, 2, 3, 5, 6)
    assert told(world, 5).leaving == ()


def test_a_target_member_with_an_offline_log_does_not_lead() -> None:
    world = world_of()
    world.hold_updates = True
    world.reassign(4, 5, 1)
    [order] = [update for update in world.held_updates if update.broker.broker_id == 4]
    world.held_updates.remove(order)
    failure = ("t", 0, int(ErrorCode.KAFKA_STORAGE_ERROR), "disk")
    world.feed(UpdateReplied(4, order.update_id, 0, (failure,)))
    world.answer_held()
    world.lose(1)
    assert world.state().leader == 2


def test_a_new_controller_continues_in_each_phase_of_a_move() -> None:
    world = world_of()
    world.reassign(4, 5, 6, tell=False)
    world.take_over(2)
    assert told(world, 4).target == (4, 5, 6)
    world.leader_writes_isr(TP, 1, 2, 3, 4, 5, 6, notify=False)
    world.take_over(3)
    assert world.trace() == ["4/1[1, 2, 3, 4, 5, 6]"]
    world.leader_writes_isr(TP, 4, 5, 6, notify=False)
    world.take_over(4)
    assert (world.trace(), assignment(world)) == (["4/2[4, 5, 6]"], ((4, 5, 6),))
    world.take_over(5)
    assert world.trace() == ["4/2[4, 5, 6]"], "nothing may happen twice"


@pytest.mark.parametrize("written", [False, True])
def test_a_final_write_with_a_lost_response_is_read_first(written: bool) -> None:
    world, order = ending()
    world.held_topic_writes.clear()
    world.feed(Disconnected())
    if written:
        world.write_topic(order)
    world.feed(TopicNotWritten("t", "id-t", "connection lost"))
    assert world.effects[-1] != ReadTopic("t")
    world.hold_topic_writes = False
    world.feed(Reconnected())
    assert ReadTopic("t") in world.effects
    assert (world.trace(), assignment(world)) == (["1/1[1, 4, 5]"], ((4, 5, 1),))
    assert world.controller.settled()


def test_an_end_overtaken_by_a_record_is_decided_again() -> None:
    world = world_of()
    world.reassign(4, 5, 1)
    copied(world, 1, 2, 3, 4, 5)
    record = world.topics["t"]
    world.change(msgspec.structs.replace(record, assignment=(*record.assignment, (2, 3, 1))), tell=False)
    copied(world, 1, 4, 5)
    assert assignment(world) == ((4, 5, 1), (2, 3, 1))
    assert moves(world) == {}
    assert world.trace() == ["1/1[1, 4, 5]", "2/0[2, 3, 1]"]


def test_a_move_ends_although_its_record_changed_unseen_and_back() -> None:
    """Found by the simulator: the controller ignored an equal record with a newer version, and every final write
    expected the old version."""
    world = world_of()
    world.reassign(4, 5, 1)
    copied(world, 1, 2, 3, 4, 5)
    before = world.topics["t"]
    world.reassign(4, 5, tell=False)
    world.change(before)
    copied(world, 1, 4, 5)
    assert (moves(world), assignment(world)) == ({}, ((4, 5, 1),))
    assert world.controller.settled()
    assert not world.counters["controller.topics.refused"]


def test_an_end_overtaken_by_a_state_is_decided_again() -> None:
    world, _ = ending()
    world.leader_writes_isr(TP, 1, 4, notify=False)
    world.write_topics_held()
    assert moves(world), "5 has left the ISR"
    assert told(world, 1).leaving == ()
    copied(world, 1, 4, 5)
    assert world.trace() == ["1/1[1, 4, 5]"]


def test_a_record_seen_before_its_writes_response_changes_nothing() -> None:
    world, order = ending()
    world.hold_topic_writes = False
    before = TopicRead(TopicSnapshot(world.topics["t"], {}, world.topic_versions["t"]))
    answer = world.write_topic(order)
    world.feed(TopicRead(TopicSnapshot(world.topics["t"], {}, world.topic_versions["t"])))
    world.feed(answer)
    world.effects.clear()
    world.feed(before)  # a slow watch
    assert world.effects == []
    assert told(world, 2).replicas == (4, 5, 1)
    assert told(world, 2).state == world.state()
    assert world.controller.settled()


def test_a_topic_can_be_deleted_in_each_phase_of_a_move() -> None:
    for isr in ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 4, 5)):
        world = world_of()
        world.reassign(4, 5, 1)
        if isr != (1, 2, 3):
            world.hold_topic_writes = True
            copied(world, *isr)
        world.delete("t")
        world.write_topics_held()
        assert world.nodes == {}
        assert world.controller.state.moving == {}
        assert world.controller.settled()
    world = world_of()
    world.reassign(4, 5, 1)
    del world.topics["t"]
    world.nodes.clear()
    world.feed(TopicGone("t"))
    assert world.controller.settled()


def test_a_move_of_a_leaderless_partition_waits_for_a_leader() -> None:
    world = world_of((1, 2))
    world.lose(2)
    copied(world, 1)
    world.lose(1)
    assert world.state().leader == -1
    world.reassign(3, 4)
    assert moves(world)
    world.register(1, 2)
    assert world.trace() == ["1/2[1]"]
    copied(world, 1, 3, 4)
    assert world.state().leader == 3


def test_an_election_during_a_move_prefers_the_target() -> None:
    world = world_of()
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 5)
    world.lose(1)
    assert world.trace() == ["5/1[1, 2, 3, 5]"]


def test_an_unclean_election_during_a_move_prefers_an_original_replica() -> None:
    world = World(topic("t", (1, 2), unclean_leader_election_enable="true"), brokers=4)
    world.reassign(3, 4)
    copied(world, 1)
    world.lose(1)
    assert world.trace() == ["2/1[2]"], "not 3, which may have no records yet"


def test_unclean_elections_prefer_a_lost_tail_to_a_lost_log() -> None:
    world = World(topic("t", (1, 2), unclean_leader_election_enable="true"), brokers=4)
    world.reassign(3, 4)
    world.lose(1)
    world.register(1, 2, trusted=False)
    world.lose(2)
    assert world.trace() == ["1/2[1]"], "not 3, which may have no records yet"


def test_a_stopping_target_member_does_not_lead() -> None:
    world = world_of()
    world.ask_to_stop(4)
    world.reassign(4, 5, 6)
    copied(world, 1, 2, 3, 4, 5, 6)
    assert world.trace() == ["5/1[1, 2, 3, 4, 5, 6]"]


def test_a_dead_brokers_table_position_moves_with_the_partition() -> None:
    world = world_of()
    world.reassign(1, 2, 4)
    copied(world, 1, 2, 3, 4)
    copied(world, 1, 2, 4)
    controller = world.controller
    assert not list(controller.state.hosted(3))
    assert [p.tp for p in controller.state.hosted(4)] == [TP]
    version = world.nodes[TP].version
    world.register(3, 2, trusted=False)
    assert world.nodes[TP] == VersionedState(world.state(), version, 1)


def test_an_epoch_that_ends_a_move_is_sent_with_new_replicas() -> None:
    """The response to the final write of a move is lost, and the controller reads the state before the topic's
    record."""
    world, order = ending()
    world.held_topic_writes.clear()
    world.write_topic(order)
    step = world.controller.step
    for effect in step(TopicNotWritten("t", "id-t", "answer lost"), world.now_ms):
        if isinstance(effect, SendUpdate):
            step(UpdateReplied(effect.broker.broker_id, effect.update_id, ErrorCode.NONE, (), ""), world.now_ms)
    effects = step(StatesRead({TP: world.nodes[TP]}), world.now_ms)
    told = [one for effect in effects if isinstance(effect, SendUpdate) for one in effect.update.partitions]
    assert all(one.replicas == (4, 5, 1) for one in told if one.state.leader_epoch == 1), told
    assert ReadTopic("t") in effects
