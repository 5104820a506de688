"""Tests of leaderships that return to preferred leaders, automatically and on request, and of unclean elections on
request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparklog.controller.effects import DropElection, WriteStates
from sparklog.controller.events import (
    PREFERRED,
    UNCLEAN,
    Disconnected,
    ElectionRequested,
    ElectionsRead,
    Reconnected,
    StatesRead,
    StatesUnknown,
    TopicGone,
    UpdateReplied,
)
from sparklog.controller.leader_rebalance import MAX_MOVED
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition

from .support import SESSION_TIMEOUT_MS, World, topic

TP = TopicPartition("t", 0)
INTERVAL_MS = 30_000


def all_write(world: World, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    for tp, node in list(world.nodes.items()):
        world.leader_writes_isr(tp, *change(node.state.isr), notify=False)
    world.feed(StatesRead(dict(world.nodes)))


def wandered(*assignment: tuple[int, ...], interval_ms: int = 0) -> World:
    """Return a world in which broker 1 was away and is in sync again, so others lead its partitions."""
    world = World(topic("t", *(assignment or ((1, 2, 3),))), preferred_leader_rebalance_interval_ms=interval_ms)
    world.lose(1)
    all_write(world, lambda isr: tuple(m for m in isr if m != 1))
    world.register(1, 2)
    all_write(world, lambda isr: tuple(dict.fromkeys((*isr, 1))))
    return world


# --- automatic ---------------------------------------------------------------------------------------------------


def test_leaderships_return_after_an_interval() -> None:
    world = wandered((1, 2, 3), (2, 1, 3), interval_ms=INTERVAL_MS)
    assert world.trace() == ["2/1[2, 3, 1]", "2/0[2, 3, 1]"]
    world.advance(INTERVAL_MS)
    assert world.trace() == ["1/2[2, 3, 1]", "2/0[2, 3, 1]"]
    before = world.trace()
    world.advance(5 * INTERVAL_MS)
    assert world.trace() == before


def test_a_deposed_leader_gets_its_update_without_delay() -> None:
    """A deposed leader responds to acks=1 immediately, and records that it accepts after the election are truncated."""
    world = wandered()
    world.hold_updates = True
    world.ask_election("asked", PREFERRED, TP)
    assert world.trace() == ["1/2[2, 3, 1]"]
    told = [update.broker.broker_id for update in world.held_updates if update.update.partitions]
    assert sorted(told) == [1, 2, 3]


def test_leaderships_do_not_return_if_that_is_off() -> None:
    world = wandered()
    world.advance(10 * INTERVAL_MS)
    assert world.trace() == ["2/1[2, 3, 1]"]
    assert world.controller.deadline_ms is None


def test_a_preferred_leader_that_stops_is_not_elected() -> None:
    world = wandered(interval_ms=INTERVAL_MS)
    world.ask_to_stop(1)
    world.advance(INTERVAL_MS)
    assert world.state().leader == 2


def test_a_preferred_leader_with_an_offline_log_is_not_elected() -> None:
    world = wandered(interval_ms=INTERVAL_MS)
    world.hold_updates = True
    world.leader_writes_isr(TP, 2, 1)
    [order] = [update for update in world.held_updates if update.broker.broker_id == 1]
    failure = ("t", 0, int(ErrorCode.KAFKA_STORAGE_ERROR), "disk")
    world.feed(UpdateReplied(1, order.update_id, 0, (failure,)))
    world.advance(INTERVAL_MS)
    assert world.state().leader == 2


def test_a_doubted_preferred_leader_is_not_elected() -> None:
    world = wandered(interval_ms=INTERVAL_MS)
    world.register(1, 3, trusted=False)
    world.advance(INTERVAL_MS)
    assert world.state().leader == 2


def test_an_unavailable_preferred_leader_is_waited_for() -> None:
    world = wandered(interval_ms=INTERVAL_MS)
    world.leader_writes_isr(TP, 2, 3)
    world.advance(INTERVAL_MS)
    assert world.state().leader == 2
    world.leader_writes_isr(TP, 2, 3, 1)
    world.lose(1)
    world.advance(INTERVAL_MS)
    assert world.state().leader == 2
    world.register(1, 3)
    world.advance(INTERVAL_MS)
    assert world.state().leader == 1


def test_a_round_moves_a_bounded_number_and_the_next_follows_soon() -> None:
    world = wandered(*[(1, 2, 3)] * (MAX_MOVED + 20), interval_ms=INTERVAL_MS)
    assert sum(node.state.leader == 2 for node in world.nodes.values()) == MAX_MOVED + 20
    world.advance(INTERVAL_MS)
    assert sum(node.state.leader == 1 for node in world.nodes.values()) == MAX_MOVED
    world.advance(1000)
    assert sum(node.state.leader == 1 for node in world.nodes.values()) == MAX_MOVED + 20


def test_a_round_skips_partitions_with_a_pending_write_or_read() -> None:
    world = wandered((1, 2, 3), (1, 3, 2), interval_ms=INTERVAL_MS)
    world.hold_reads = True
    world.feed(StatesUnknown((TP,)))
    world.advance(INTERVAL_MS)
    assert [line[0] for line in world.trace()] == ["2", "1"]


# --- on request ---------------------------------------------------------------------------------------------------


def test_a_request_is_dropped_once_its_elections_are_written() -> None:
    world = wandered((1, 2, 3), (1, 3, 2))
    world.hold_writes = True
    assert DropElection("n_1") not in world.ask_election("n_1", PREFERRED, TP)
    assert [write.tp for write in world.held_writes] == [TP]
    world.write_held()
    assert world.effects.count(DropElection("n_1")) == 1
    assert [line[0] for line in world.trace()] == ["1", "3"], "the other partition was not requested"
    world.ask_election("n_2", PREFERRED)
    assert [line[0] for line in world.trace()] == ["1", "1"]
    assert world.elections == {}
    assert world.controller.settled()


def test_a_needless_or_impossible_request_is_dropped_at_once() -> None:
    world = World(topic("t", (1, 2, 3)))
    effects = world.ask_election("n_1", PREFERRED, TP, TopicPartition("t", 7), TopicPartition("none", 0))
    assert effects == [DropElection("n_1")]
    assert world.ask_election("n_2", UNCLEAN) == [DropElection("n_2")]
    assert world.ask_election("n_3", "of no known kind", TP) == [DropElection("n_3")]


def test_a_request_is_performed_once_although_its_deletion_is_unseen() -> None:
    world = wandered()
    world.ask_election("n_1", PREFERRED)
    asked = {"n_1": ElectionRequested(PREFERRED)}
    assert world.feed(ElectionsRead(asked)) == []
    world.feed(ElectionsRead({}))
    world.elections = asked
    assert world.feed(ElectionsRead(asked)) == [DropElection("n_1")], "another request of the same name"


def test_an_election_waits_for_the_partitions_pending_write() -> None:
    world = wandered()
    world.hold_reads = True
    world.feed(StatesUnknown((TP,)))
    assert world.ask_election("n_1", PREFERRED) == []
    world.hold_reads = False
    world.feed(Disconnected())
    world.feed(Reconnected())
    assert world.state().leader == 1
    assert world.elections == {}


def test_a_refused_election_is_retried() -> None:
    world = wandered()
    world.hold_writes = True
    world.ask_election("n_1", PREFERRED)
    world.leader_writes_isr(TP, 2, 1, notify=False)
    world.write_held()
    assert world.trace() == ["1/2[2, 1]"]
    assert world.elections == {}


def test_a_request_survives_its_controller_but_not_its_topic() -> None:
    world = wandered()
    world.hold_writes = True
    world.ask_election("n_1", PREFERRED)
    world.hold_writes = False
    world.take_over(2)
    assert world.state().leader == 1
    assert world.elections == {}

    world = wandered()
    world.hold_writes = True
    world.ask_election("n_1", PREFERRED)
    world.feed(TopicGone("t"))
    assert world.elections == {}


def test_a_withdrawn_request_is_dropped() -> None:
    world = wandered()
    world.hold_reads = True
    world.feed(StatesUnknown((TP,)))
    world.ask_election("n_1", PREFERRED)
    world.elections.clear()
    world.feed(ElectionsRead({}))
    world.hold_reads = False
    world.feed(Disconnected())
    world.feed(Reconnected())
    assert world.state().leader == 2


@pytest.mark.parametrize("kind", [PREFERRED, UNCLEAN])
def test_a_clean_election_is_never_counted_as_unclean(kind: str) -> None:
    world = World(topic("t", (1, 2, 3)))
    world.ask_election("n_1", kind)
    assert world.trace() == ["1/0[1, 2, 3]"]


def test_a_requested_unclean_election_happens_once_and_is_reported() -> None:
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    assert world.trace() == ["-1/1[1]"]
    world.ask_election("n_1", PREFERRED)
    assert world.trace() == ["-1/1[1]"]
    world.ask_election("n_2", UNCLEAN, TP)
    assert world.trace() == ["2/2[2]"]
    assert world.counters["controller.partitions.unclean"] == 1
    assert world.elections == {}
    world.retire(2)
    assert world.trace() == ["-1/3[2]"], "the request is for one election"


def test_a_request_for_a_deleted_topic_does_not_concern_the_recreated_one() -> None:
    world = World(topic("t", (1, 2, 3)))
    world.leader_writes_isr(TP, 1)
    world.lose(1)
    current = world.topics["t"].topic_id
    assert world.ask_election("n_1", UNCLEAN, TP, topic_ids={"t": "the id before"}) == [DropElection("n_1")]
    assert world.trace() == ["-1/1[1]"]
    world.ask_election("n_2", UNCLEAN, TP, topic_ids={"t": current})
    assert world.trace() == ["2/2[2]"]


def test_an_unclean_election_waits_for_the_fate_of_the_leader() -> None:
    world = World(topic("t", (1, 2, 3)), brokers=5)
    world.leader_writes_isr(TP, 1)
    world.lose(1, 4, 5)
    assert world.ask_election("n_1", PREFERRED) == [DropElection("n_1")], (
        "no member can return, so there is nothing to wait for"
    )
    assert world.ask_election("n_2", UNCLEAN) == []
    assert world.trace() == ["1/0[1]"]
    world.advance(SESSION_TIMEOUT_MS)
    assert world.trace() == ["2/1[2]"]
    assert world.elections == {}


def test_an_unclean_election_is_dropped_when_the_leader_returns() -> None:
    world = World(topic("t", (1, 2, 3)), brokers=5)
    world.leader_writes_isr(TP, 1)
    world.lose(1, 4, 5)
    world.ask_election("n_1", UNCLEAN, TP)
    world.register(1, 2)
    assert world.trace() == ["1/1[1]"]
    assert world.elections == {}


def test_a_preferred_election_of_many_partitions_is_one_order() -> None:
    world = wandered(*[(1, 2, 3)] * 700)
    effects = world.ask_election("n_1", PREFERRED)
    [order] = [effect for effect in effects if isinstance(effect, WriteStates)]
    assert len(order.writes) == 700
    assert DropElection("n_1") in effects


# --- order -------------------------------------------------------------------------------------------------------


def test_elections_are_written_in_partition_order() -> None:
    """An order by the objects' addresses would differ when a term is replayed."""
    partitions = 40
    asked = wandered(*[(1, 2, 3)] * partitions)
    by_itself = wandered(*[(1, 2, 3)] * partitions, interval_ms=INTERVAL_MS)
    asked.hold_writes = by_itself.hold_writes = True
    asked.ask_election("n_1", PREFERRED)
    by_itself.advance(INTERVAL_MS)
    for world in (asked, by_itself):
        assert [write.tp.partition for write in world.held_writes] == list(range(partitions))
