"""Tests of a replica whose partition moves: removals from the ISR, their time, and outdated orders."""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev

from .support import LIVE, Stage, decided, log_of, one, only

FIVE = (4, 1, 2, 3)
LIVE_FIVE = {**LIVE, 4: 14}
LEAVING = frozenset({2, 3})


def moving(version: int, isr: tuple[int, ...], *, epoch: int = 1, leader: int = 1, **changes: object) -> ev.Decided:
    """Return a leader whose partition moves from (1, 2, 3) to (4, 1)."""
    fields: dict[str, object] = {"replicas": FIVE, "incarnations": LIVE_FIVE, "factor": 2, **changes}
    return decided(leader, epoch, version, isr, **fields)


def in_sync(stage: Stage, *followers: int) -> None:
    for follower in followers:
        stage.send(ev.FollowerFetched(follower, LIVE_FIVE[follower], stage.replica.leader_epoch, 0, -1))


def test_added_replicas_join_and_leaving_ones_go_when_ordered() -> None:
    stage = Stage()
    stage.lead()
    stage.send(moving(1, (1, 2, 3)))  # only the assignment has changed, not the node
    in_sync(stage, 2, 3)
    stage.send(ev.FollowerFetched(4, 14, 1, 0, -1))
    assert stage.replica.isr_state is not None and stage.replica.isr_state.maximal == (1, 2, 3, 4)
    stage.send(ev.IsrWritten((1, 2, 3, 4), 2))
    [order] = only(stage.send(moving(2, (1, 2, 3, 4), leaving=LEAVING)), fx.WriteIsr)
    assert (order.isr, order.expected_version) == ((1, 4), 2)
    assert only(stage.written(order), fx.WriteIsr) == [], "although both have caught up"
    assert stage.replica.isr == (1, 4)
    assert only(stage.fetch(2, 0), fx.WriteIsr) == [], "it still fetches, and must not return"


def test_the_leader_itself_stays_although_it_is_leaving() -> None:
    stage = Stage()
    effects = stage.send(moving(1, (1, 2, 3, 4), replicas=(4, 2, 1, 3), leaving=frozenset({1, 3})))
    assert one(effects, fx.WriteIsr).isr == (1, 2, 4)


def test_no_replica_leaves_once_a_staying_one_has_fallen_out() -> None:
    stage = Stage()
    stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING, incarnations={1: 11, 2: 12, 3: 13}))
    # broker 4 is known dead: it is removed first and alone, and the order is void
    assert stage.replica.isr == (1, 2, 3, 4)
    effects = stage.send(ev.IsrWritten((1, 2, 3), 2))
    assert only(effects, fx.WriteIsr) == []
    assert 4 not in stage.replica.isr
    # even if the order comes again late, for the earlier version
    assert only(stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING)), fx.WriteIsr) == []


def test_a_renewed_order_to_leave_does_not_survive_a_removal() -> None:
    stage = Stage()
    stage.send(moving(1, (1, 2, 3, 4), incarnations={1: 11, 2: 12, 3: 13}))
    stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING))  # broker 4 is back, and its removal is in flight
    assert only(stage.send(ev.IsrWritten((1, 2, 3), 2)), fx.WriteIsr) == []


def test_an_order_to_leave_is_withdrawn_despite_an_overtaking_write() -> None:
    """The controller knows the version before the leader's write, and has no reason to send it again."""
    stage = Stage()
    [order] = only(stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING)), fx.WriteIsr)
    stage.written(order)
    stage.send(moving(1, (1, 2, 3, 4), leaving=frozenset({3}), replicas=(4, 1, 2, 3)))  # the target is (4, 1, 2) by now
    [back] = only(stage.fetch(2, 0), fx.WriteIsr)
    assert back.isr == (1, 4, 2)
    assert only(stage.written(back) + stage.fetch(3, 0), fx.WriteIsr) == [], "this replica still has to leave"


def test_an_overtaken_decision_removes_no_replica() -> None:
    """The write that overtook the decision may have removed a staying replica from the ISR."""
    stage = Stage()
    stage.send(moving(1, (1, 2, 3, 4), incarnations={1: 11, 2: 12, 4: 14}))  # broker 3 is dead
    stage.send(ev.IsrWritten((1, 2, 4), 2))
    assert only(stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING)), fx.WriteIsr) == []
    assert stage.replica.isr == (1, 2, 4)


def test_a_state_read_from_zookeeper_cancels_the_removal_order() -> None:
    stage = Stage()
    stage.send(moving(1, (1, 2, 3, 4), leaving=LEAVING))
    refused = ev.IsrRefused(LeaderAndIsr(1, 2, (1, 2, 3), 2), 2, 1)
    assert only(stage.send(refused), fx.WriteIsr) == [], "no broker knows that 4 is in sync"


def test_min_insync_counts_the_smaller_factor_during_a_move() -> None:
    stage = Stage()
    stage.send(decided(1, 1, 1, (1,), replicas=(1,)))
    stage.send(decided(1, 1, 1, (1,), factor=1))  # from 1 to (1, 2, 3): no records are copied yet
    ticket, effects = stage.produce()
    assert one(effects, fx.RespondToProduce) == fx.RespondToProduce(ticket, ErrorCode.NONE, 0)
    stage.send(decided(1, 2, 2, (1,)))  # the move has ended: of three replicas two must be in sync
    _, effects = stage.produce()
    assert one(effects, fx.RespondToProduce).code == ErrorCode.NOT_ENOUGH_REPLICAS


def test_a_removed_replica_goes_offline_even_at_an_equal_version() -> None:
    for version in (1, 2):
        stage = Stage(log_of(1))
        stage.send(decided(2, 1, 1, (2, 3)))
        effects = stage.send(decided(2, 1, version, (2, 3), replicas=(2, 3)))
        assert fx.StopFetching() in effects
        assert stage.replica.dismissed
        stage.send(decided(2, 2, 3, (2, 3)))
        assert stage.replica.role == "follower", "added again"


def test_an_old_decision_removes_no_replica_nor_an_isr_member() -> None:
    stage = Stage()
    stage.send(decided(2, 2, 5))
    stage.send(decided(2, 1, 4, (2, 3), replicas=(2, 3)))
    assert stage.replica.role == "follower"
    stage.send(decided(2, 3, 6, (2, 1), replicas=(2, 3)))
    assert (stage.replica.role, stage.replica.leader_epoch) == ("follower", 3)


def test_waiting_produces_survive_the_end_of_a_move() -> None:
    stage = Stage()
    stage.send(moving(1, (1, 4), leaving=LEAVING))
    ticket, _ = stage.produce()
    stage.send(decided(1, 2, 2, (1, 4), replicas=(4, 1), incarnations=LIVE_FIVE))
    effects = stage.send(ev.FollowerFetched(4, 14, 2, 1, 1))
    assert one(effects, fx.RespondToProduce).ticket == ticket
    refused = stage.send(ev.FollowerFetched(2, 12, 1, 1, 1))
    assert one(refused, fx.RefuseFetch).code == ErrorCode.FENCED_LEADER_EPOCH
    assert one(stage.fetch(3, 1), fx.RefuseFetch).code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_no_replica_joins_in_an_epoch_with_unknown_replicas() -> None:
    """The move ended in that epoch. A former replica would be written into the ISR of a partition that it no longer
    has."""
    stage = Stage()
    stage.lead(isr=(1, 2))
    assert only(stage.send(ev.IsrRefused(LeaderAndIsr(1, 2, (1, 2), 1), 2, 1)), fx.WriteIsr) == []
    caught_up = ev.FollowerFetched(3, 13, 2, 0, -1)
    assert only(stage.send(caught_up), fx.WriteIsr) == []
    assert only(stage.send(decided(1, 2, 2, (1, 2), replicas=(1, 2))), fx.WriteIsr) == []
    assert only(stage.send(caught_up), fx.WriteIsr) == []
    [order] = only(stage.send(decided(1, 2, 2, (1, 2))) + stage.send(caught_up), fx.WriteIsr)
    assert order.isr == (1, 2, 3)


def test_a_decision_overtaken_by_the_leaders_own_write_is_kept() -> None:
    """The controller does not repeat the decision to the leader that wrote the state: without it the ISR would stay
    small until the next change."""
    stage = Stage()
    stage.lead()
    [order] = only(stage.send(ev.BrokersChanged({1: 11, 2: 12})), fx.WriteIsr)  # broker 3 is removed as a move ends
    refused = ev.IsrRefused(LeaderAndIsr(1, 2, (1, 2, 3), 1), 2, order.expected_version)
    [order] = only(stage.send(refused), fx.WriteIsr)
    assert order.isr == (1, 2)
    stage.written(order)
    assert only(stage.send(decided(1, 2, 2, (1, 2, 3))), fx.WriteIsr) == []
    assert one(stage.fetch(3, 0), fx.WriteIsr).isr == (1, 2, 3)


def test_min_insync_counts_although_a_write_has_overtaken_it() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2), min_isr=1)
    [order] = only(stage.send(ev.BrokersChanged({1: 11, 3: 13})), fx.WriteIsr)
    stage.written(order)
    stage.send(decided(1, 1, 1, (1, 2), incarnations={1: 11, 3: 13}))
    _, effects = stage.produce()
    assert one(effects, fx.RespondToProduce).code == ErrorCode.NOT_ENOUGH_REPLICAS


def test_an_overtaken_decision_of_an_ended_epoch_is_ignored() -> None:
    """The decision's replicas may be those from before a move."""
    stage = Stage()
    stage.lead(epoch=2, version=2, isr=(1, 2), replicas=(1, 2))
    stage.send(decided(1, 1, 1, (1, 2)))
    assert one(stage.fetch(3, 0), fx.RefuseFetch).code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def deposed(isr: tuple[int, ...]) -> tuple[Stage, list[fx.Effect]]:
    """Return broker 1, which led, after it has read from ZooKeeper that broker 2 leads in epoch 2, with a move that
    broker 1 does not know."""
    stage = Stage(log_of(1))
    stage.lead()
    return stage, stage.send(ev.IsrRefused(LeaderAndIsr(2, 2, isr, 1), 5, 1))


def test_a_deposed_leader_outside_the_isr_awaits_the_epochs_decision() -> None:
    """The epoch must fence every broker that has no replica since the end of that move."""
    stage, effects = deposed((2, 3))
    assert only(effects, fx.StartFetching) == []
    assert (stage.replica.role, stage.replica.leader_epoch) == ("follower", 2)
    stage.send(decided(2, 2, 5, (2, 3), replicas=(2, 3)))
    assert stage.replica.dismissed


def test_a_deposed_leader_follows_once_it_is_a_known_replica() -> None:
    for version in (4, 5, 6):  # older than the state that it has read, in which the new leader has written the ISR
        stage, _ = deposed((2, 3))
        assert one(stage.send(decided(2, 2, version, (2, 3))), fx.StartFetching) == fx.StartFetching(2, 2)
        assert only(stage.send(decided(2, 2, version, (2, 3))), fx.StartFetching) == []
    stage, _ = deposed((2, 3))
    assert only(stage.send(decided(2, 1, 4, (2, 3))), fx.StartFetching) == [], (
        "in a decision of an earlier epoch that proves nothing"
    )


def test_a_deposed_leader_in_the_isr_follows_at_once() -> None:
    _, effects = deposed((2, 1))
    assert one(effects, fx.StartFetching) == fx.StartFetching(2, 2)
