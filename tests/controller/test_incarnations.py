"""Tests of the controller core: a restarted broker is another incarnation, and may have fewer records than the last
one."""

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
    """A leader that restarts within its session is elected again, with a new epoch, although it never seemed dead."""
    world = World(THREE)
    world.register(1, 2)
    assert world.trace() == ["1/1[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert world.nodes[TP].leader_incarnation == 2


def test_bounced_broker_resumes_its_old_epoch_with_a_shorter_log() -> None:
    """Until its new epoch is durable, the new incarnation receives no leader."""
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
    """The new controller never saw the old incarnation. The node names the incarnation that the epoch belongs to."""
    world = World(THREE)
    world.brokers[1] = registration(1, 2)
    world.take_over(2)
    assert world.trace()[0] == "1/1[1, 2, 3]"
    assert world.state().controller_epoch == 2


def test_leader_not_in_its_own_isr() -> None:
    """If a node names such a leader, the ISR is right and the leader is wrong."""
    world = World()
    world.topics["t"] = THREE
    world.nodes = {}
    broken = VersionedState(LeaderAndIsr(1, 4, (2, 3), 1), 9, 1)
    effects = world.controller.step(TopicRead(TopicSnapshot(THREE, {0: broken})), world.now_ms)
    [writes] = [effect.writes for effect in effects if isinstance(effect, WriteStates)]
    [fixed] = [write for write in writes if write.tp == TP]
    assert (fixed.state, fixed.expected_version) == (LeaderAndIsr(2, 5, (2, 3), 1, lossy_epoch=5), 9)


def test_empty_isr() -> None:
    """The controller never writes one, in any order of failures and stops (the world checks that after each step).
    An empty ISR in a node is no claim of any replica, so no replica is elected."""
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


def test_an_untrusted_broker_counts_as_alive_without_its_claims() -> None:
    world = World(THREE)
    world.lose(1)
    world.leader_writes_isr(TP, 2, 3)
    world.leader_writes_isr(TopicPartition("t", 1), 2, 3)
    effects = world.register(1, 2, trusted=False)
    assert world.trace() == ["2/1[2, 3]", "2/0[2, 3]", "3/0[3, 1, 2]"]
    assert not any(isinstance(effect, TrustBroker) for effect in effects)
    assert world.sees(3) == [2, 3], "so broker 3 must remove it from its ISR"
    world.leader_writes_isr(TopicPartition("t", 2), 3, 2)
    assert [effect for effect in world.effects if isinstance(effect, TrustBroker)] == [TrustBroker(1, 2)]
    assert world.sees(3) == [1, 2, 3], "and may add it again"
    world.leader_writes_isr(TopicPartition("t", 2), 3, 2, 1)  # after an honest catch-up
    world.lose(3)
    assert world.trace()[2] == "1/1[3, 2, 1]"


def test_an_untrusted_leader_yields_to_a_trusted_member() -> None:
    world = World(THREE)
    world.register(1, 2, trusted=False)
    assert world.trace() == ["2/1[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert world.sees(2) == world.sees(3) == [2, 3]
    world.lose(2)
    assert world.trace() == ["3/2[1, 2, 3]", "3/1[2, 3, 1]", "3/0[3, 1, 2]"], "while there is another member"


def test_a_claim_unknown_to_the_controller_is_void_as_well() -> None:
    """The leader added the broker just before the broker lost its page cache, and the notification is still in
    flight."""
    world = World(topic("t", (2, 1)), brokers=2)
    world.leader_writes_isr(TP, 2)
    world.leader_writes_isr(TP, 2, 1, notify=False)
    world.hold_reads = True
    effects = world.register(1, 2, trusted=False)
    assert ReadStates((TP,)) in effects
    assert world.sees(2) == [2], "until the controller knows the claim"
    world.feed(StatesRead({TP: world.nodes[TP]}))
    assert world.sees(2) == [2]
    world.leader_writes_isr(TP, 2)
    assert world.sees(2) == [1, 2]


def test_a_new_controller_does_not_void_a_later_claim() -> None:
    """The mark outlived its controller. The next one finds broker 1 in an ISR that it joined honestly. The leader is
    dead, which no node shows, and has lost the end of its log."""
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
    """After a power failure each leads its recovered partitions and adds the other. The next controller finds both
    marks, learns of the additions after its start, and moves each leadership to the member that it trusts there."""
    world = World(topic("t", (1, 2), (2, 1)), brokers=2)
    tps = [TopicPartition("t", number) for number in (0, 1)]
    for broker_id, tp in enumerate(tps, 1):
        world.nodes[tp] = VersionedState(LeaderAndIsr(broker_id, 2, (broker_id,), 1), 4, 2)
        world.brokers[broker_id] = registration(broker_id, 2, trusted=False)
    world.take_over(2)
    world.leader_writes_isr(tps[0], 1, 2)
    world.leader_writes_isr(tps[1], 2, 1)
    assert world.trace() == ["2/3[1, 2]", "1/3[2, 1]"]
    assert (world.sees(1), world.sees(2)) == ([1], [2]), "a leader accepts only tables that contain it"
    world.leader_writes_isr(tps[0], 2)
    world.leader_writes_isr(tps[1], 1)
    assert world.sees(1) == world.sees(2) == [1, 2]
    trusted = [effect for effect in world.effects if isinstance(effect, TrustBroker)]
    assert sorted(effect.broker_id for effect in trusted) == [1, 2]


def test_unremovable_claims_do_not_exclude_an_untrusted_broker() -> None:
    world = World(topic("t", (1, 2), (3, 1)))
    world.leader_writes_isr(TopicPartition("t", 1), 3)
    world.lose(2)
    world.leader_writes_isr(TP, 1, 2)
    world.now_ms += 2 * SESSION_TIMEOUT_MS
    world.register(1, 2, trusted=False)
    assert world.trace() == ["-1/1[1, 2]", "3/0[3]"], "broker 2 may hold every acknowledged record of the first"
    assert world.sees(3) == [1, 3], "broker 1 is the better leader of the second"


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
    assert world.sees(2) == [2], "so it must remove broker 1"


def test_among_untrusted_members_the_longest_log_leads() -> None:
    """After a power failure of the only host every log may have lost its tail. The longest one is kept."""
    world = World(topic("t", (1, 2, 3)))
    world.brokers = {i: registration(i, 2, trusted=False) for i in (1, 2, 3)}
    world.take_over(2)
    assert {ask.broker.broker_id for ask in world.asked} == {1, 2, 3}
    world.feed(LogEndsRead(1, 2, {TP: (5, 100)}))
    world.feed(LogEndsRead(2, 2, {TP: (6, 90)}))
    assert world.state().leader_epoch == 0, "one member has not responded yet"
    world.feed(LogEndsRead(3, 2, {TP: (6, 80)}))
    assert world.trace() == ["2/1[2]"]
    assert world.counters["controller.partitions.recovered"] == 1
    assert {e.broker_id for e in world.effects if isinstance(e, TrustBroker)} == {1, 2, 3}


def test_an_election_among_untrusted_members_ends_after_a_timeout() -> None:
    world = World(topic("t", (1, 2)), brokers=2)
    world.brokers = {i: registration(i, 2, trusted=False) for i in (1, 2)}
    world.take_over(2)
    world.feed(LogEndsRead(1, 2, {TP: (5, 100)}))
    world.feed(LogEndsRead(2, 1, {TP: (9, 900)}))  # a response of an earlier incarnation does not count
    world.advance(9_000)
    assert world.state().leader_epoch == 0
    assert len(world.asked) > 4, "the member must be asked again meanwhile"
    world.advance(2_000)
    assert world.trace() == ["1/1[1]"]
