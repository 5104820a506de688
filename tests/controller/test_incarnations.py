"""The controller core: a broker that is back is not the one that went, nor has it always what that one had."""

from __future__ import annotations

from sparklog.controller.effects import ReadStates, TrustBroker, WriteStates
from sparklog.controller.events import (
    LogEndsRead,
    StatesRead,
    TopicRead,
    TopicSnapshot,
)
from sparklog.model import NO_LOSS, LeaderAndIsr, TopicPartition, VersionedState

from .support import SESSION_TIMEOUT_MS, World, registration, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2))


def test_an_epoch_belongs_to_one_incarnation() -> None:
    """A leader that bounced within its session is elected anew, under a new epoch, though it never seemed dead."""
    world = World(THREE)
    world.register(1, 2)
    assert world.trace() == ["1/1[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert world.nodes[TP].leader_incarnation == 2


def test_bounced_broker_resumes_its_old_epoch_with_a_shorter_log() -> None:
    """It must not: until its new epoch is durable, the new incarnation is told of no leader."""
    world = World(THREE)
    world.told.clear()
    world.hold_writes = True
    world.register(1, 2)
    [first] = [update for broker_id, update in world.told if broker_id == 1]
    assert first.full
    led = {decision.partition: decision.state.leader for decision in first.partitions}
    assert led == {0: -1, 1: 2, 2: 3}
    world.write_held()
    assert world.knows(1)[TP] == LeaderAndIsr(1, 1, (1, 2, 3), 1, lossy_epoch=NO_LOSS)


def test_a_restarted_leader_gets_a_new_epoch_from_a_new_controller() -> None:
    """The new controller never saw the old incarnation; the node says whose epoch it is."""
    world = World(THREE)
    world.brokers[1] = registration(1, 2)
    world.take_over(2)
    assert world.trace()[0] == "1/1[1, 2, 3]"
    assert world.state().controller_epoch == 2


def test_leader_not_in_its_own_isr() -> None:
    """Should a node say so, the ISR is right and the leader is not."""
    world = World()
    world.topics["t"] = THREE
    world.nodes = {}
    broken = VersionedState(LeaderAndIsr(1, 4, (2, 3), 1), 9, 1)
    effects = world.controller.step(TopicRead(TopicSnapshot(THREE, {0: broken})), world.now_ms)
    [writes] = [effect.writes for effect in effects if isinstance(effect, WriteStates)]
    [fixed] = [write for write in writes if write.tp == TP]
    assert (fixed.state, fixed.expected_version) == (LeaderAndIsr(2, 5, (2, 3), 1, lossy_epoch=5), 9)


def test_empty_isr() -> None:
    """It is never written, whoever fails or stops in whatever order (the world checks that after each step); found
    in a node it elects nobody: no claim is no claim."""
    world = World(topic("t", (1, 2, 3)))
    world.ask_to_stop(1)
    world.ask_to_stop(2)
    world.lose(3)
    world.lose(1, 2)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert world.state().leader == -1
    assert world.state().isr != ()
    empty = VersionedState(LeaderAndIsr(-1, 4, (), 1), 9, -1)
    fresh = World()
    effects = fresh.controller.step(TopicRead(TopicSnapshot(topic("t", (1, 2)), {0: empty})), fresh.now_ms)
    assert not any(isinstance(effect, WriteStates) for effect in effects)


def test_an_untrusted_broker_counts_as_alive_without_its_void_claims() -> None:
    world = World(THREE)
    world.lose(1)
    world.leader_writes_isr(TP, 2, 3)
    world.leader_writes_isr(TopicPartition("t", 1), 2, 3)
    effects = world.register(1, 2, trusted=False)
    assert world.trace() == ["2/1[2, 3]", "2/0[2, 3]", "3/0[3, 1, 2]"]
    assert not any(isinstance(effect, TrustBroker) for effect in effects)
    assert world.sees(3) == [2, 3], "so that broker 3 takes it out of its ISR"
    world.leader_writes_isr(TopicPartition("t", 2), 3, 2)
    assert [effect for effect in world.effects if isinstance(effect, TrustBroker)] == [TrustBroker(1, 2)]
    assert world.sees(3) == [1, 2, 3], "and may take it in again"
    world.leader_writes_isr(TopicPartition("t", 2), 3, 2, 1)  # caught up honestly
    world.lose(3)
    assert world.trace()[2] == "1/1[3, 2, 1]"


def test_an_untrusted_leader_yields_to_a_trusted_member() -> None:
    world = World(THREE)
    world.register(1, 2, trusted=False)
    assert world.trace() == ["2/1[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert world.sees(2) == world.sees(3) == [2, 3]
    world.lose(2)
    assert world.trace() == ["3/2[1, 2, 3]", "3/1[2, 3, 1]", "3/0[3, 1, 2]"], "as long as there is another"


def test_a_claim_unknown_to_the_controller_is_void_too() -> None:
    """The leader added the broker just before it lost its page cache; the notification is still under way."""
    world = World(topic("t", (2, 1)), brokers=2)
    world.leader_writes_isr(TP, 2)
    world.leader_writes_isr(TP, 2, 1, notify=False)
    world.hold_reads = True
    effects = world.register(1, 2, trusted=False)
    assert ReadStates((TP,)) in effects
    assert world.sees(2) == [2], "until it is known"
    world.feed(StatesRead({TP: world.nodes[TP]}))
    assert world.sees(2) == [2]
    world.leader_writes_isr(TP, 2)
    assert world.sees(2) == [1, 2]


def test_a_new_controller_does_not_void_a_claim_made_later() -> None:
    """The mark outlived its controller. The next one finds broker 1 in an ISR where it has been added honestly, and
    its leader, which is dead though nobody knows, with the end of its log lost."""
    world = World(topic("t", (2, 1)), brokers=2)
    world.brokers[1] = registration(1, 2, trusted=False)
    world.take_over(2)
    assert world.trace() == ["2/0[2, 1]"]
    world.lose(2)
    assert world.trace() == ["-1/1[2, 1]"]
    world.register(2, 2, trusted=False)
    world.feed(LogEndsRead(1, 2, {TP: (0, 100)}))
    world.feed(LogEndsRead(2, 2, {TP: (0, 60)}))
    assert world.trace() == ["1/2[1]"]


def test_two_untrusted_leaders_remove_each_other() -> None:
    """After a power cut each leads what it was recovered for, and adds the other. The next controller, which finds
    both marks, hears of the additions after it has begun, and moves each lead to the member that it does not suspect
    there."""
    world = World(topic("t", (1, 2), (2, 1)), brokers=2)
    tps = [TopicPartition("t", number) for number in (0, 1)]
    for broker_id, tp in enumerate(tps, 1):
        world.nodes[tp] = VersionedState(LeaderAndIsr(broker_id, 2, (broker_id,), 1), 4, 2)
        world.brokers[broker_id] = registration(broker_id, 2, trusted=False)
    world.take_over(2)
    world.leader_writes_isr(tps[0], 1, 2)
    world.leader_writes_isr(tps[1], 2, 1)
    assert world.trace() == ["2/3[1, 2]", "1/3[2, 1]"]
    assert (world.sees(1), world.sees(2)) == ([1], [2]), "a leader believes only tables that it is in itself"
    world.leader_writes_isr(tps[0], 2)
    world.leader_writes_isr(tps[1], 1)
    assert world.sees(1) == world.sees(2) == [1, 2]
    trusted = [effect for effect in world.effects if isinstance(effect, TrustBroker)]
    assert sorted(effect.broker_id for effect in trusted) == [1, 2]


def test_unremovable_claims_do_not_keep_an_untrusted_broker_out() -> None:
    world = World(topic("t", (1, 2), (3, 1)))
    world.leader_writes_isr(TopicPartition("t", 1), 3)
    world.lose(2)
    world.leader_writes_isr(TP, 1, 2)
    world.now_ms += 2 * SESSION_TIMEOUT_MS
    world.register(1, 2, trusted=False)
    assert world.trace() == ["-1/1[1, 2]", "3/0[3]"], "broker 2 may hold every acknowledged record of the first"
    assert world.sees(3) == [1, 3], "the second is better off with broker 1"


def test_an_untrusted_member_waits_for_an_absent_whole_one() -> None:
    world = World(topic("t", (1, 2)), brokers=2)
    world.lose(1, 2)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert world.trace() == ["-1/1[1, 2]"]
    world.register(1, 2, trusted=False)
    world.advance(60_000)
    assert world.trace() == ["-1/1[1, 2]"], "broker 2 may hold every acknowledged record"
    world.register(2, 2)
    assert world.trace() == ["2/2[1, 2]"]
    assert world.sees(2) == [2], "so that it takes broker 1 out"


def test_all_untrusted_elects_the_greatest_log_end() -> None:
    """A power cut on the one host of all: every tail may be lost, the longest is kept."""
    world = World(topic("t", (1, 2, 3)))
    world.brokers = {i: registration(i, 2, trusted=False) for i in (1, 2, 3)}
    world.take_over(2)
    assert {ask.broker.broker_id for ask in world.asked} == {1, 2, 3}
    world.feed(LogEndsRead(1, 2, {TP: (5, 100)}))
    world.feed(LogEndsRead(2, 2, {TP: (6, 90)}))
    assert world.state().leader_epoch == 0, "one is still to answer"
    world.feed(LogEndsRead(3, 2, {TP: (6, 80)}))
    assert world.trace() == ["2/1[2]"]
    assert world.counters["controller.partitions.recovered"] == 1
    assert {e.broker_id for e in world.effects if isinstance(e, TrustBroker)} == {1, 2, 3}


def test_an_election_among_untrusted_members_is_decided_after_a_timeout() -> None:
    world = World(topic("t", (1, 2)), brokers=2)
    world.brokers = {i: registration(i, 2, trusted=False) for i in (1, 2)}
    world.take_over(2)
    world.feed(LogEndsRead(1, 2, {TP: (5, 100)}))
    world.feed(LogEndsRead(2, 1, {TP: (9, 900)}))  # an earlier incarnation's answer counts for nothing
    world.advance(9_000)
    assert world.state().leader_epoch == 0
    assert len(world.asked) > 4, "asked again meanwhile"
    world.advance(2_000)
    assert world.trace() == ["1/1[1]"]
