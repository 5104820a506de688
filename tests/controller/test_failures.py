"""Tests of the controller core: brokers that fail or stop, and the next leaders."""

from __future__ import annotations

import pytest

from sparklog.controller import outbox
from sparklog.controller.events import (
    StoppingRead,
    TopicRead,
    TopicSnapshot,
    UpdateLost,
    UpdateReplied,
)
from sparklog.errors import ErrorCode
from sparklog.model import NO_LOSS, LeaderAndIsr, TopicPartition

from .support import SESSION_TIMEOUT_MS, World, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3), (2, 3, 1), (3, 1, 2))


# --- failures ---------------------------------------------------------------------------------------------------


def test_a_dead_leaders_partitions_go_to_the_first_live_isr_member() -> None:
    world = World(THREE)
    world.leader_writes_isr(TP, 1, 3)  # broker 2 leaves the ISR
    world.lose(1)
    assert world.trace() == ["3/1[1, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"], "only the leader removes dead members"
    assert world.knows(2)[TP] == world.state()
    brokers = [update.brokers for broker_id, update in world.told if broker_id == 2 and update.brokers]
    assert [endpoint.broker_id for endpoint in brokers[-1]] == [2, 3]


def test_a_dead_successor_does_not_void_other_members_claims() -> None:
    """The controller elects broker 2 before it knows that broker 2 is dead. If the election removed broker 1 from
    the ISR, only broker 2's log with its lost tail would count, although broker 1 has every record."""
    world = World(topic("t", (1, 2)), brokers=2)
    world.lose(1)
    assert world.trace() == ["2/1[1, 2]"]
    world.now_ms += 2 * SESSION_TIMEOUT_MS
    world.register(2, 2, trusted=False)
    assert world.trace() == ["-1/2[1, 2]"]
    world.register(1, 2)
    assert world.trace() == ["1/3[1, 2]"]
    assert world.sees(1) == [1], "so broker 1 must learn that it can remove the member"


def test_last_isr_member_offline_must_keep_its_claim() -> None:
    world = World(topic("t", (1, 2)))
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    assert world.state() == LeaderAndIsr(-1, 1, (1,), 1, lossy_epoch=NO_LOSS)
    world.register(2, 2)
    assert world.state().leader == -1, "broker 2 does not have all records that broker 1 acknowledged"
    world.register(1, 2)
    assert world.state() == LeaderAndIsr(1, 2, (1,), 1, lossy_epoch=NO_LOSS)


def test_unclean_elections_need_the_topics_permission() -> None:
    allowed = topic("u", (1, 2), unclean_leader_election_enable="true")
    world = World(topic("t", (1, 2)), allowed)
    world.leader_writes_isr(TP, 1)
    world.leader_writes_isr(TopicPartition("u", 0), 1)
    world.lose(1)
    assert world.trace("t") == ["-1/1[1]"]
    assert world.trace("u") == ["2/1[2]"]
    assert world.counters["controller.partitions.unclean"] == 1


def test_a_later_permission_of_unclean_elections_elects_a_leader() -> None:
    world = World(topic("t", (1, 2)))
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    changed = topic("t", (1, 2), unclean_leader_election_enable="true")
    world.topics["t"] = changed
    world.feed(TopicRead(TopicSnapshot(changed, {})))
    assert world.trace() == ["2/2[2]"]


@pytest.mark.parametrize("returns", [True, False])
def test_no_unclean_election_happens_while_a_member_may_return(returns: bool) -> None:
    """One member is known to be dead. The other disappeared with it and is held: it may have all committed records."""
    world = World(topic("t", (1, 2, 3), unclean_leader_election_enable="true"))
    world.leader_writes_isr(TP, 1, 2)
    world.lose(1, 2)
    world.retire(1)
    assert world.trace() == ["-1/1[1, 2]"]
    if returns:
        world.register(2, 2)
    world.advance(SESSION_TIMEOUT_MS)
    assert world.trace() == (["2/2[1, 2]"] if returns else ["3/2[3]"])


def test_an_unknown_setting_never_allows_unclean_elections() -> None:
    world = World(topic("t", (1, 2), unclean_leader_election_enable="true", future_setting="x"))
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    assert world.trace() == ["-1/1[1]"]


def test_a_replica_that_cannot_be_opened_does_not_lead() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.register(4, 1)
    update = next(u for u in world.held_updates if u.broker.broker_id == 1)
    failed = (("t", 0, int(ErrorCode.KAFKA_STORAGE_ERROR), "disk offline"),)
    world.feed(UpdateReplied(1, update.update_id, 0, failed))
    assert world.trace()[0] == "2/1[2, 3]"
    assert world.counters["controller.replicas.failed"] == 1


def test_a_failed_write_is_retried_with_growing_pauses() -> None:
    world = World(THREE)
    world.hold_updates = True
    world.leader_writes_isr(TP, 1, 2)
    failed = (("t", 0, int(ErrorCode.UNKNOWN_TOPIC_ID), "its topic is missing"), ("gone", 0, 3, ""))
    pauses = []
    for _ in range(3):
        update = next(u for u in world.held_updates if u.broker.broker_id == 3)
        assert [decision.partition for decision in update.update.partitions] == [0]
        world.held_updates.clear()
        world.feed(UpdateReplied(3, update.update_id, 0, failed))
        deadline = world.controller.deadline_ms
        assert deadline is not None
        pauses.append(deadline - world.now_ms)
        world.advance(pauses[-1])
    assert pauses == [50, 100, 200]
    assert [change.name for change in world.held_updates[-1].update.topics] == ["t"], "the retry ends with its topic"


# --- controlled shutdown -----------------------------------------------------------------------------------------


def test_a_controlled_shutdown_moves_leaderships_and_keeps_the_isrs() -> None:
    world = World(THREE)
    world.told.clear()
    world.ask_to_stop(1)
    assert world.trace() == ["2/1[1, 2, 3]", "2/0[2, 3, 1]", "3/0[3, 1, 2]"]
    assert all(state.leader != 1 for state in world.knows(1).values()), "now the broker may stop"
    [update] = [update for broker_id, update in world.told if broker_id == 2]
    assert [decision.state.leader for decision in update.partitions] == [2]
    assert update.brokers is not None
    assert [endpoint.broker_id for endpoint in update.brokers] == [2, 3], (
        "so the new leader can remove broker 1 immediately"
    )


def test_fenced_or_stopping_broker_rejoins_isr() -> None:
    """The broker leads nothing, and leaders send it no more updates, so no leader may add it."""
    world = World(THREE)
    world.ask_to_stop(1)
    for broker_id in (2, 3):
        brokers = [update.brokers for told_id, update in world.told if told_id == broker_id and update.brokers]
        assert [endpoint.broker_id for endpoint in brokers[-1]] == [2, 3]


def test_a_stopping_broker_is_relieved_before_others_learn_of_isrs() -> None:
    """With thousands of partitions a shutdown would otherwise wait for updates to brokers that do not need them yet."""
    world = World(THREE)
    world.ask_to_stop(1)
    world.told.clear()
    second, third = TopicPartition("t", 1), TopicPartition("t", 2)
    world.leader_writes_isr(TP, 2, 3)
    world.leader_writes_isr(second, 2, 3)
    assert world.told == [], "the leader knows its own write, the others can wait, and broker 3 still counts on it"
    assert not world.controller.settled()
    world.leader_writes_isr(third, 3, 2)
    assert [(broker_id, update.relieved, update.partitions) for broker_id, update in world.told] == [(1, True, ())]
    world.told.clear()
    world.lose(1)
    world.advance(outbox._CLOSING_MS - 1)
    assert not any(update.partitions for _, update in world.told), "the broker still has to close its logs"
    world.advance(1)
    assert world.knows(2)[third].isr == (3, 2) and world.knows(3)[second].isr == (2, 3)
    assert world.controller.settled()


def test_isr_changes_during_a_relief_are_sent_at_its_end() -> None:
    world = World(THREE)
    world.ask_to_stop(1)
    world.told.clear()
    world.leader_writes_isr(TP, 2, 3)
    world.advance(1_999)
    assert world.told == []
    world.advance(1)
    assert {broker_id: len(update.partitions) for broker_id, update in world.told} == {1: 1, 3: 1}
    assert world.controller.settled()


def test_an_election_is_sent_at_once_along_with_delayed_updates() -> None:
    world = World(THREE)
    world.ask_to_stop(1)
    world.leader_writes_isr(TP, 2, 3)
    world.told.clear()
    world.retire(2)
    assert world.knows(3)[TP].leader == 3
    assert world.controller.settled()


def test_a_broker_that_cancels_its_shutdown_is_not_relieved() -> None:
    world = _relieved()
    world.stopping.clear()
    world.feed(StoppingRead({}))
    assert not [update.relieved for broker_id, update in world.told if broker_id == 1][-1]


def test_a_broker_is_relieved_after_all_leaders_know_it_stops() -> None:
    """A leader that does not know may add the broker again, and its writes would wait for a broker that has exited."""
    world = World(THREE)
    world.leader_writes_isr(TopicPartition("t", 1), 2, 3)
    world.leader_writes_isr(TopicPartition("t", 2), 3, 2)
    world.told.clear()
    world.hold_updates = True
    world.ask_to_stop(1)
    world.leader_writes_isr(TP, 2, 3)  # since it found broker 1 silent
    assert not any(held.update.relieved for held in world.held_updates)
    world.answer_held()
    said = [(broker_id, update.relieved) for broker_id, update in world.told if update.relieved or update.brokers]
    assert said[:3] == [(1, False), (2, False), (3, False)]
    # The broker learns last of the partitions that it led, in the same update.
    assert said[3:] == [(1, True), (1, True)]


def test_a_broker_without_shared_leadership_does_not_delay_a_relief() -> None:
    """Such a broker may be frozen, and it cannot add a broker that has no replica of its partitions."""
    world = World(topic("t", (1, 2), (2, 1)), topic("u", (3, 4)), brokers=4)
    world.told.clear()
    world.hold_updates = True
    world.ask_to_stop(1)
    world.answer_held_but(3)
    world.leader_writes_isr(TP, 2)
    world.answer_held_but(3)
    assert not any(update.relieved for _, update in world.told), "the other partition's leader counts on the broker"
    world.leader_writes_isr(TopicPartition("t", 1), 2)
    world.answer_held_but(3)
    assert [broker_id for broker_id, update in world.told if update.relieved] == [1]
    assert {held.broker.broker_id for held in world.held_updates} == {3}


def test_a_relieved_broker_added_to_an_isr_is_relieved_again() -> None:
    """The leader's write was in flight when it learned that the broker stops."""
    world = _relieved()
    world.told.clear()
    world.leader_writes_isr(TP, 2, 3, 1)
    world.leader_writes_isr(TP, 2, 3)
    assert [(broker_id, update.relieved) for broker_id, update in world.told] == [(1, False), (1, True)]


def test_the_end_of_a_relief_is_sent_until_acknowledged() -> None:
    world = _relieved()
    world.hold_updates = True
    world.leader_writes_isr(TP, 2, 3, 1)
    (lost,) = world.held_updates
    assert lost.broker.broker_id == 1 and not lost.update.relieved
    world.hold_updates, world.held_updates = False, []
    world.told.clear()
    world.feed(UpdateLost(1, lost.update_id))
    world.advance(100)
    assert [(broker_id, update.relieved) for broker_id, update in world.told] == [(1, False)]


def _relieved() -> World:
    """Return a world in which broker 1 stops and has learned that no leader counts on it."""
    world = World(THREE)
    world.ask_to_stop(1)
    for number, isr in enumerate(((2, 3), (2, 3), (3, 2))):
        world.leader_writes_isr(TopicPartition("t", number), *isr)
    assert [update.relieved for broker_id, update in world.told if broker_id == 1][-1]
    return world


def test_a_stopping_broker_keeps_partitions_without_a_successor() -> None:
    world = World(topic("t", (1, 2), (1,)))
    world.leader_writes_isr(TP, 1)
    world.ask_to_stop(1)
    assert world.trace() == ["1/0[1]", "1/0[1]"]
    world.stopping.clear()
    world.lose(1)
    world.feed(StoppingRead({}))
    assert world.trace() == ["-1/1[1]", "-1/1[1]"], "its claim must stay"


def test_a_stop_request_of_an_earlier_incarnation_is_ignored() -> None:
    world = World(THREE)
    world.stopping[1] = 1
    world.register(1, 2)
    before = world.trace()
    world.feed(StoppingRead({1: 1}))
    assert world.trace() == before
