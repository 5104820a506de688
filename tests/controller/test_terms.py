"""Tests of the controller core beside other writers: leaders that write the same nodes, other controllers, a lost
ZooKeeper."""

from __future__ import annotations

from sparklog.controller.effects import Effect, ReadStates, WriteStates
from sparklog.controller.events import (
    BrokersRead,
    Disconnected,
    Fenced,
    Reconnected,
    StatesRead,
    StatesReported,
    StatesUnknown,
    TopicRead,
    TopicSnapshot,
    UpdateReplied,
)
from sparklog.errors import ErrorCode
from sparklog.model import NO_LOSS, LeaderAndIsr, TopicPartition, TopicStates, VersionedState

from .support import SESSION_TIMEOUT_MS, World, registration, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2))


# --- conflicts --------------------------------------------------------------------------------------------------


def test_a_lost_compare_and_set_is_decided_again() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    world.leader_writes_isr(TP, 1, 3, notify=False)  # the old leader's last write
    world.write_held()
    assert world.trace()[0] == "3/1[1, 3]", "not broker 2, which had left the ISR"
    assert world.counters["controller.writes.refused"] == 1


def test_version_not_equal_loop_after_a_lost_cas_reply() -> None:
    """The write succeeded and its response was lost. A retry would fail forever with another version."""
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    [write] = [write for write in world.held_writes if write.tp == TP]
    world.nodes[TP] = VersionedState(write.state, 1, write.leader_incarnation)
    effects = world.feed(StatesUnknown((TP,)))
    assert [effect for effect in effects if isinstance(effect, (ReadStates, WriteStates))] == [ReadStates((TP,))]
    assert world.knows(2)[TP] == LeaderAndIsr(2, 1, (1, 2, 3), 1, lossy_epoch=NO_LOSS)


def test_a_write_that_never_left_is_decided_again() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    world.hold_writes = False
    world.feed(StatesUnknown((TP,)))
    assert world.trace()[0] == "2/1[1, 2, 3]"


def test_a_broker_that_dies_during_its_election_is_skipped() -> None:
    world = World(THREE, brokers=3)
    world.hold_writes = True
    world.lose(1)
    world.now_ms += 2 * SESSION_TIMEOUT_MS  # not together, or the broker would be held
    world.lose(2)
    world.write_held()
    assert world.trace()[0] == "3/2[1, 2, 3]"


def test_isr_changes_reach_all_brokers_but_their_writer() -> None:
    world = World(THREE)
    world.told.clear()
    world.leader_writes_isr(TP, 1, 2)
    assert [broker_id for broker_id, _ in world.told] == [2, 3]
    assert all(world.knows(broker_id)[TP].isr == (1, 2) for broker_id in (2, 3))


def test_a_leader_of_another_incarnation_learns_of_its_own_write() -> None:
    """The broker receives no leader while the epoch belongs to its earlier incarnation. Its own write makes the
    epoch its own."""
    world = World(THREE)
    node = world.nodes[TP]
    world.hold_writes = True
    world.register(1, 2)
    world.told.clear()
    shrunk = LeaderAndIsr(1, node.state.leader_epoch, (1, 2), node.state.controller_epoch)
    world.nodes[TP] = VersionedState(shrunk, node.version + 1, 2)
    world.feed(StatesReported((TopicStates(TP.topic, THREE.topic_id, {TP.partition: world.nodes[TP]}),)))
    world.advance(10)
    assert world.knows(1)[TP] == shrunk


def test_a_leaders_report_counts_only_if_newer_and_of_this_topic() -> None:
    world = World(THREE)
    node = world.nodes[TP]
    shrunk = LeaderAndIsr(node.state.leader, node.state.leader_epoch, (1, 2), node.state.controller_epoch)

    def tell(version: int, *, topic_id: str = "", partition: int = 0) -> list[Effect]:
        states = {partition: VersionedState(shrunk, version, node.leader_incarnation)}
        world.told.clear()
        return world.feed(StatesReported((TopicStates(TP.topic, topic_id or THREE.topic_id, states),)))

    assert tell(node.version) == []
    assert tell(node.version + 1, topic_id="of a topic that was deleted") == []
    assert tell(node.version + 1, partition=99) == []
    assert world.knows(3).get(TP) is None, "no update was sent"
    world.nodes[TP] = VersionedState(shrunk, node.version + 1, node.leader_incarnation)
    assert tell(node.version + 1)
    assert world.knows(3)[TP].isr == (1, 2)
    assert tell(node.version + 1) == [], "the update must be sent again"


def test_a_leaders_report_does_not_end_the_wait_for_a_read() -> None:
    """The write's outcome is unknown: the node may have changed since the leader wrote."""
    world = World(THREE)
    world.hold_writes = world.hold_reads = True
    world.lose(1)
    world.feed(StatesUnknown((TP,)))
    node = world.nodes[TP]
    grown = VersionedState(node.state, node.version + 1, node.leader_incarnation)
    world.nodes[TP] = grown
    effects = world.feed(StatesReported((TopicStates(TP.topic, THREE.topic_id, {TP.partition: grown}),)))
    assert not [effect for effect in effects if isinstance(effect, WriteStates)]
    world.feed(StatesRead({TP: grown}))
    assert [write.expected_version for write in world.held_writes if write.tp == TP][-1] == grown.version


def test_an_old_state_read_late_changes_nothing() -> None:
    world = World(THREE)
    old = world.nodes[TP]
    world.lose(1)
    world.told.clear()
    world.leader_writes_isr(TopicPartition("t", 1), 2, 3)
    before = dict(world.nodes)
    world.controller.step(BrokersRead(tuple(world.brokers.values())), world.now_ms)
    assert world.feed(StatesUnknown(())) == []
    world.nodes[TP] = old  # the response of a lagging server
    world.controller.step(TopicRead(TopicSnapshot(THREE, {0: old})), world.now_ms)
    world.nodes = before
    assert world.knows(2).get(TP) is None, "no update may repeat the state"


# --- the controller itself ---------------------------------------------------------------------------------------


def test_two_leaders_after_a_full_restart() -> None:
    """Brokers return one by one. No broker leads with an old epoch, and none is failed before its time."""
    world = World(THREE)
    world.brokers = {}
    world.take_over(2)
    assert world.trace() == ["1/0[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"], (
        "all brokers are missing at once, so the controller waits"
    )
    for broker_id in (1, 2, 3):
        world.now_ms += 100
        world.register(broker_id, 2)
    assert world.trace() == ["1/1[1, 2, 3]", "2/1[2, 3, 1]", "3/1[3, 1, 2]"]
    for tp, node in world.nodes.items():
        leaders = {known[tp].leader for known in map(world.knows, (1, 2, 3))}
        assert leaders == {node.state.leader}


def test_a_slow_cluster_start_restores_its_leaders() -> None:
    """Brokers need longer than a session timeout to start, and the first one must not lead everything."""
    world = World(THREE)
    world.brokers = {}
    world.take_over(2)
    world.advance(10 * SESSION_TIMEOUT_MS)
    assert world.controller.deadline_ms is None, "there is no broker to elect"
    world.register(2, 2)
    assert world.trace() == ["1/0[1, 2, 3]", "2/1[2, 3, 1]", "3/0[3, 1, 2]"]
    world.advance(SESSION_TIMEOUT_MS - 1)
    world.register(3, 2)
    assert world.trace() == ["1/0[1, 2, 3]", "2/1[2, 3, 1]", "3/1[3, 1, 2]"]
    assert not world.counters["controller.brokers.held"] + world.counters["controller.brokers.failed"], (
        "the assigned leader must lead"
    )
    world.advance(1)
    assert world.trace() == ["2/1[1, 2, 3]", "2/1[2, 3, 1]", "3/1[3, 1, 2]"], "broker 1 did not return"


def told_to(world: World, broker_id: int) -> list[tuple[int, int]]:
    """Return the controller epoch and the incarnation of each update."""
    return [(update.controller_epoch, update.incarnation) for told_id, update in world.told if told_id == broker_id]


def test_a_new_term_keeps_missing_brokers_until_they_are_failed() -> None:
    """All sessions ended at once, and the controller's returned first. The processes all work: a leader must not
    remove the others from its ISRs, and no client may lose a leader's address."""
    world = World(THREE)
    world.absent = {2: registration(2), 3: registration(3)}
    world.brokers = {1: registration(1, 2)}
    world.told.clear()
    world.take_over(2, cautious=True)
    assert world.sees(1) == world.sees(2) == world.sees(3) == [1, 2, 3]
    assert told_to(world, 2)[-1] == (2, 1), "with its last incarnation"
    world.register(2, 2)
    assert world.sees(1) == [1, 2, 3]
    assert told_to(world, 2)[-1] == (2, 2)
    assert world.trace() == ["1/1[1, 2, 3]", "2/1[2, 3, 1]", "3/0[3, 1, 2]"]
    world.advance(SESSION_TIMEOUT_MS)
    assert world.sees(1) == world.sees(2) == [1, 2], "broker 3 is dead"
    assert world.trace()[2] == "1/1[3, 1, 2]"
    told = told_to(world, 3)
    world.leader_writes_isr(TopicPartition("t", 2), 1, 2)
    assert told_to(world, 3) == told


def test_the_first_broker_to_return_does_not_remove_the_others() -> None:
    """If the first broker were alone in every ISR, its crash would leave the partitions without a leader, although
    others are complete."""
    world = World(THREE)
    world.absent, world.brokers = dict(world.brokers), {}
    world.take_over(2)
    world.register(1, 2)
    assert world.sees(1) == [1, 2, 3]
    world.advance(SESSION_TIMEOUT_MS)
    assert world.sees(1) == [1], "the time for their return has passed"


def test_a_new_term_hides_missing_brokers_without_a_witness() -> None:
    world = World(THREE)
    world.absent = {2: registration(2)}  # broker 3 still has its mark
    world.brokers = {1: registration(1, 2)}
    world.take_over(2, cautious=True)
    assert world.sees(1) == [1, 2]
    assert world.trace()[2] == "3/0[3, 1, 2]", "the brokers must be held nevertheless"


def test_a_mass_disappearance_is_waited_out() -> None:
    world = World(THREE)
    world.lose(1, 2)
    assert world.trace()[0] == "1/0[1, 2, 3]"
    assert world.controller.deadline_ms == world.now_ms + SESSION_TIMEOUT_MS
    world.register(1, 1)  # back with its session, as if it had never been away
    world.advance(SESSION_TIMEOUT_MS)
    assert world.trace() == ["1/0[1, 2, 3]", "3/1[2, 3, 1]", "3/0[3, 1, 2]"], "only broker 2 had exited"


def test_brokers_lost_one_after_another_count_as_a_mass_loss() -> None:
    world = World(THREE)
    world.lose(1)
    assert world.trace()[0] == "2/1[1, 2, 3]"
    world.now_ms += SESSION_TIMEOUT_MS // 2
    world.lose(2)
    assert world.trace()[0] == "2/1[1, 2, 3]", "held"
    world.advance(SESSION_TIMEOUT_MS)
    assert world.trace()[0] == "3/2[1, 2, 3]"


def test_brokers_that_were_seen_to_exit_are_never_held() -> None:
    world = World(THREE)
    world.retire(1)
    world.now_ms += SESSION_TIMEOUT_MS // 2
    world.retire(2)
    assert world.trace()[0] == "3/2[1, 2, 3]"
    assert world.controller.deadline_ms is None
    both = World(THREE)
    both.retire(1, 2)
    assert both.trace() == ["3/1[1, 2, 3]", "3/1[2, 3, 1]", "3/0[3, 1, 2]"]


def test_a_known_death_does_not_explain_the_next_missing_broker() -> None:
    world = World(THREE)
    world.retire(1)
    world.lose(2)
    assert world.trace()[0] == "3/2[1, 2, 3]", "a single death"


def test_a_held_broker_is_failed_once_known_dead() -> None:
    world = World(THREE)
    world.lose(1, 2)
    assert world.trace()[0] == "1/0[1, 2, 3]", "held"
    world.retire(1)
    assert world.trace()[:2] == ["3/1[1, 2, 3]", "2/0[2, 3, 1]"], "broker 2 is still held"
    world.register(1, 2)
    assert world.trace()[0] == "3/1[1, 2, 3]"


def test_a_new_controller_does_not_wait_for_known_dead_brokers() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.retire(1, 2)
    world.hold_writes = False
    world.take_over(2, cautious=True)
    assert world.trace() == ["3/1[1, 2, 3]", "3/1[2, 3, 1]", "3/0[3, 1, 2]"]
    assert world.counters["controller.brokers.held"] == 0


def test_a_disconnected_controller_sends_nothing_and_fails_no_broker() -> None:
    world = World(THREE)
    world.feed(Disconnected())
    world.told.clear()
    assert world.lose(1) == []
    assert world.controller.deadline_ms is None
    world.feed(Reconnected())
    world.register(2, 2)
    assert world.trace()[0] == "1/0[1, 2, 3]", "broker 1 is missing only since the disconnection, so it is held"
    assert world.trace()[1] == "2/1[2, 3, 1]", "events of live brokers must take effect"
    world.advance(SESSION_TIMEOUT_MS)
    assert world.trace() == ["2/1[1, 2, 3]", "2/1[2, 3, 1]", "3/0[3, 1, 2]"]


def test_a_disconnected_controller_acts_on_events_after_reconnecting() -> None:
    """If it were deposed, its writes would be refused, but brokers would not recognize its updates as late."""
    world = World(THREE)
    world.feed(Disconnected())
    world.topics["u"], world.topic_versions["u"] = topic("u", (1, 2, 3)), 0
    assert world.feed(TopicRead(TopicSnapshot(world.topics["u"], {}))) == []
    orders = world.feed(Reconnected())
    assert {write.tp for order in orders if isinstance(order, WriteStates) for write in order.writes} == {
        TopicPartition("u", 0)
    }


def test_writes_pending_at_a_disconnection_are_read_after_it() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    world.feed(Disconnected())
    assert world.feed(StatesUnknown((TP,))) == []
    world.hold_writes = False
    assert ReadStates((TP,)) in world.feed(Reconnected())
    assert world.trace()[0] == "2/1[1, 2, 3]"


def test_a_deposed_controller_orders_nothing_more() -> None:
    world = World(THREE)
    world.feed(Fenced("controller epoch is 7"))
    assert world.resigned == "controller epoch is 7"
    assert world.lose(1) == []
    assert world.controller.deadline_ms is None


def test_a_broker_that_knows_a_newer_controller_ends_the_term() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    update = world.held_updates[0]
    code = int(ErrorCode.STALE_CONTROLLER_EPOCH)
    world.feed(UpdateReplied(update.broker.broker_id, update.update_id, code, (), "epoch 3 seen"))
    assert "epoch 3 seen" in world.resigned


def test_a_new_controller_finishes_what_the_last_one_left() -> None:
    world = World(THREE)
    world.hold_writes = True
    world.lose(1)
    world.create(topic("n", (2, 3)))
    world.deletions["t"] = "id-t"
    world.hold_writes = False
    world.take_over(2)
    assert world.trace("n") == ["2/0[2, 3]"]
    assert world.trace("t") == []
    assert world.state("n").controller_epoch == 2
    fulls = [(broker_id, u.full) for broker_id, u in world.told if u.controller_epoch == 2]
    assert fulls[:2] == [(2, True), (3, True)], "every broker gets everything from a new controller"


def test_a_partly_created_topic_is_not_deleted_after_fail_over() -> None:
    """A full update names all replicas: a broker deletes replicas that it omits."""
    world = World(THREE)
    del world.nodes[TopicPartition("t", 2)]
    world.hold_writes = True
    world.take_over(2)
    [update] = [update for broker_id, update in world.told if broker_id == 1 and update.controller_epoch == 2]
    assert update.full
    assert {decision.partition for decision in update.partitions if decision.version >= 0} == {0, 1}
