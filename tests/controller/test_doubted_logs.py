"""Tests of a broker that has lost some of its logs: its claims to these partitions are void, and no others."""

from __future__ import annotations

from sparklog.controller.effects import RequestLogEnds, TrustBroker
from sparklog.controller.events import UNCLEAN, BrokersRead, LogEndsRead, TopicGone
from sparklog.model import BrokerRegistration, TopicPartition
from tests.controller.support import SESSION_TIMEOUT_MS, World, topic

LOST, SOUND, UNLED = (TopicPartition("t", number) for number in range(3))
THREE = topic("t", (1, 2, 3), (1, 2, 3), (2, 3, 1))


def register(world: World, broker_id: int, incarnation: int, *doubted: TopicPartition) -> None:
    world.brokers[broker_id] = BrokerRegistration(
        broker_id, f"h{broker_id}", 9092, "boot", "c", not doubted, None, incarnation, doubted=doubted
    )
    world.feed(BrokersRead(tuple(world.brokers.values()), frozenset(world.retired)))


def trusted(world: World) -> list[TrustBroker]:
    return [effect for effect in world.effects if isinstance(effect, TrustBroker)]


def told_to_leave(world: World, leader: int, tp: TopicPartition) -> tuple[int, ...]:
    """Return the replicas that the partition's leader must remove from the ISR, according to its last update."""
    last: tuple[int, ...] = ()
    for broker_id, update in world.told:
        for decision in update.partitions:
            if broker_id == leader and (decision.topic, decision.partition) == tp:
                last = decision.leaving
    return last


def test_a_lost_log_does_not_lead_and_a_sound_one_does() -> None:
    world = World(THREE)
    register(world, 1, 2, LOST)
    assert world.trace() == ["2/1[1, 2, 3]", "1/1[1, 2, 3]", "2/0[2, 3, 1]"]
    assert world.counters["controller.replicas.doubted"] == 1
    assert world.sees(2) == [1, 2, 3], "the broker must not be reported as dead"
    assert told_to_leave(world, 2, LOST) == (1,)
    assert told_to_leave(world, 1, SOUND) == told_to_leave(world, 2, UNLED) == ()


def test_a_standing_leader_is_ordered_to_remove_the_lost_replica() -> None:
    world = World(THREE)
    register(world, 1, 2, UNLED)
    assert world.trace()[2] == "2/0[2, 3, 1]", "no election"
    assert told_to_leave(world, 2, UNLED) == (1,)
    assert trusted(world) == []
    world.leader_writes_isr(UNLED, 2, 3)
    assert told_to_leave(world, 2, UNLED) == (), "the replica may rejoin after it has copied the log"
    assert trusted(world) == [TrustBroker(1, 2)]
    world.leader_writes_isr(UNLED, 2, 3, 1)
    world.lose(2)
    assert world.trace()[2] == "3/1[2, 3, 1]"


def test_an_order_overtaken_by_the_leaders_write_is_repeated() -> None:
    world = World(THREE)
    register(world, 1, 2, UNLED)
    before = len(world.told)
    world.leader_writes_isr(UNLED, 2, 1)  # broker 3 died, and the order was for the version before
    later = [update for broker_id, update in world.told[before:] if broker_id == 2]
    assert [decision.leaving for update in later for decision in update.partitions] == [(1,)]


def test_lost_logs_of_deleted_topics_cost_no_trust() -> None:
    world = World(THREE)
    register(world, 1, 2, TopicPartition("gone", 0))
    assert trusted(world) == [TrustBroker(1, 2)]
    assert world.trace() == ["1/1[1, 2, 3]", "1/1[1, 2, 3]", "2/0[2, 3, 1]"]


def test_a_new_term_continues_where_the_last_one_stopped() -> None:
    world = World(THREE)
    register(world, 1, 2, LOST)
    world.take_over(2)
    assert told_to_leave(world, 2, LOST) == (1,)
    world.leader_writes_isr(LOST, 2, 3)
    assert trusted(world)[-1] == TrustBroker(1, 2)
    assert told_to_leave(world, 2, LOST) == ()


def test_a_lost_replica_that_leaves_again_needs_no_order() -> None:
    world = World(THREE)
    register(world, 1, 2, LOST)
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert told_to_leave(world, 2, LOST) == ()
    register(world, 1, 3, LOST)
    assert told_to_leave(world, 2, LOST) == (1,)


def test_replicas_outside_the_isr_are_asked_if_all_members_lost_logs() -> None:
    """The only member has lost everything. A replica outside the ISR has all records except the last."""
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(LOST, 1)
    register(world, 1, 2, LOST)
    assert {question.broker.broker_id for question in world.asked} == {1, 2, 3}
    assert all(isinstance(question, RequestLogEnds) for question in world.asked)
    world.feed(LogEndsRead(1, 2, {LOST: (-1, 0)}))
    world.feed(LogEndsRead(2, 1, {LOST: (0, 90)}))
    assert world.trace() == ["1/0[1]"], "one replica has not responded yet"
    world.feed(LogEndsRead(3, 1, {LOST: (0, 80)}))
    assert world.trace() == ["2/1[2]"]


def test_no_order_is_sent_for_lost_logs_of_deleted_topics() -> None:
    world = World(THREE)
    register(world, 1, 2, UNLED)
    before = len(world.told)
    world.delete("t")
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert [update.partitions for _, update in world.told[before:] if update.partitions] == []


def test_a_lost_log_does_not_lead_while_an_absent_one_may() -> None:
    """All brokers restart, and the only member, which has lost the log, comes first."""
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(LOST, 1)
    world.lose(1, 2, 3)
    register(world, 1, 2, LOST)
    assert world.trace() == ["1/0[1]"], "no election"
    assert world.counters["controller.partitions.waiting"] == 1
    register(world, 2, 2)
    assert world.trace() == ["1/0[1]"]
    register(world, 3, 2)
    world.feed(LogEndsRead(1, 2, {LOST: (-1, 0)}))
    world.feed(LogEndsRead(2, 2, {LOST: (0, 90)}))
    world.feed(LogEndsRead(3, 2, {LOST: (0, 80)}))
    assert world.trace() == ["2/1[2]"]


def test_an_operator_ends_the_wait_for_an_absent_replica() -> None:
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(LOST, 1)
    world.lose(1, 2, 3)
    register(world, 1, 2, LOST)
    assert world.trace() == ["1/0[1]"], "the partition must wait"
    world.ask_election("now", UNCLEAN, LOST)
    world.feed(LogEndsRead(1, 2, {LOST: (-1, 0)}))
    assert world.trace() == ["1/1[1]"]


def test_a_recreated_topic_survives_the_late_deletion_of_its_predecessor() -> None:
    world = World(topic("t", (1, 2, 3)))
    world.feed(TopicGone("t", True, "an earlier id"))
    world.lose(1)
    assert world.trace() == ["2/1[1, 2, 3]"], "the controller still elects"
