"""Tests of replicas that refuse to truncate committed records that their leader lacks: which one leads, and when
none does."""

from __future__ import annotations

from sparklog.controller.effects import ControllerReport
from sparklog.controller.events import UNCLEAN, LogEndsRead, RefusalsRead, TruncationRefused
from sparklog.model import NO_LOSS, UNKNOWN_LOSS, LeaderAndIsr, TopicPartition, VersionedState
from tests.controller.support import SESSION_TIMEOUT_MS, World, topic

TP = TopicPartition("t", 0)
THREE = topic("t", (1, 2, 3))


def refuse(world: World, *refusals: tuple[int, int], epoch: int | None = None, incarnation: int = 1) -> None:
    """Let these brokers, each with its high watermark, refuse the truncation that the present leader requires."""
    present = world.state().leader_epoch if epoch is None else epoch
    told = [TruncationRefused(TP, "id-t", broker, incarnation, present, 10, mark) for broker, mark in refusals]
    world.feed(RefusalsRead(tuple(told)))


def words(world: World) -> list[str]:
    return [e.detail for e in world.effects if isinstance(e, ControllerReport) and e.kind == "controller.cuts.refused"]


def test_the_replica_that_has_the_records_leads() -> None:
    world = World(THREE)
    assert world.state().lossy_epoch == NO_LOSS
    refuse(world, (2, 30))
    assert world.trace() == ["2/1[2]"]
    assert world.state().lossy_epoch == NO_LOSS, "no record may be lost"
    assert words(world) == [
        "t-0: broker 1 leads and lacks committed records from offset 10 to 30, which broker 2 holds and does not "
        "truncate: broker 2 leads now"
    ]
    world.feed(RefusalsRead(()))
    assert world.trace() == ["2/1[2]"]


def test_the_refuser_with_the_highest_mark_leads_even_if_late() -> None:
    world = World(THREE)
    refuse(world, (2, 20), (3, 30))
    assert world.trace() == ["3/1[3]"]
    world = World(THREE)
    refuse(world, (2, 20))
    refuse(world, (3, 30))
    assert world.trace() == ["3/2[3]"]


def test_contradictory_copies_elect_no_leader() -> None:
    """The deposed leader has committed other records meanwhile. No replica leads before an operator has decided."""
    world = World(THREE)
    refuse(world, (2, 30))
    refuse(world, (1, 30))
    assert world.trace() == ["-1/2[2]"]
    assert world.state().disputed
    assert words(world)[-1].endswith(
        "the partition is offline until you stop the brokers whose copies you give up and run "
        "'sparklog topics elect-leaders t:0 --unclean'"
    )
    world.feed(RefusalsRead(()))
    world.lose(2)
    world.register(2, 2)
    world.take_over(2)
    assert world.trace() == ["-1/2[2]"], "for any returning broker and any controller"
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    world.ask_election("request", UNCLEAN, TP)
    assert world.trace() == ["2/3[2]"]
    assert not world.state().disputed and world.state().lossy_epoch == 3


def test_a_replica_with_a_doubtful_log_does_not_lead() -> None:
    world = World(THREE)
    world.register(2, 2, trusted=False)
    refuse(world, (2, 30), incarnation=2)
    assert world.trace() == ["-1/1[1, 2, 3]"] and world.state().disputed


def test_refusals_about_an_earlier_leader_or_process_are_ignored() -> None:
    world = World(THREE)
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert world.trace() == ["2/1[1, 2, 3]"]
    refuse(world, (3, 30), epoch=0)
    refuse(world, (3, 30), incarnation=7)
    world.feed(RefusalsRead((TruncationRefused(TP, "another", 3, 1, 1, 10, 30),)))
    world.feed(RefusalsRead((TruncationRefused(TopicPartition("gone", 3), "id-t", 3, 1, 1, 10, 30),)))
    assert world.trace() == ["2/1[1, 2, 3]"]


def test_a_new_controller_finds_the_refusals() -> None:
    world = World(THREE)
    world.refusals = (TruncationRefused(TP, "id-t", 2, 1, 0, 10, 30),)
    world.take_over(2)
    assert world.trace() == ["2/1[2]"]


def test_the_state_keeps_the_epoch_of_the_last_lossy_election() -> None:
    """Clean elections and ISR changes keep the epoch. An election among members that all lost their tails sets it."""
    world = World(topic("t", (1, 2), unclean_leader_election_enable="false"), brokers=2)
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert world.trace() == ["2/1[1, 2]"] and world.state().lossy_epoch == NO_LOSS
    world.lose(2)
    for broker_id in (1, 2):
        world.register(broker_id, 2, trusted=False)
    for broker_id in (1, 2):
        world.feed(LogEndsRead(broker_id, 2, {TP: (0, 60 + broker_id)}))
    assert world.trace() == ["2/3[2]"] and world.state().lossy_epoch == 3


def test_an_epoch_omitted_by_an_earlier_release_counts_as_lossy() -> None:
    """Such a leader writes the node without the epoch. Until the next election no follower refuses a truncation."""
    world = World(THREE)
    node = world.nodes[TP]
    known = LeaderAndIsr(1, 0, (1, 2, 3), 1)
    assert known.lossy_epoch == UNKNOWN_LOSS
    world.nodes[TP] = VersionedState(known, node.version, node.leader_incarnation)
    world.take_over(2)
    world.lose(1)
    world.advance(2 * SESSION_TIMEOUT_MS)
    assert world.trace() == ["2/1[1, 2, 3]"] and world.state().lossy_epoch == 1
