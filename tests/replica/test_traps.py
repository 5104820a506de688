"""Tests of known traps of replication, as far as they concern a replica: one each, with its name in the design."""

from __future__ import annotations

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.isr import CommittedIsr, IsrState, PendingExpand, PendingShrink
from tests.replica.support import LIVE, Stage, decided, log_of, one, only


def isr_state(stage: Stage) -> IsrState | None:
    """Return the property. A function reads it each time, because a type checker assumes that it does not change."""
    return stage.replica.isr_state


def test_version_not_equal_loop_after_a_lost_cas_reply() -> None:
    """The write was applied and its response lost. Every retry with the old version would be refused."""
    stage = Stage()
    stage.lead()
    order = one(stage.send(ev.BrokersChanged({1: 11, 2: 12})), fx.WriteIsr)
    assert (order.isr, order.expected_version) == ((1, 2), 1)
    assert stage.send(ev.IsrWriteFailed(1)) == []
    assert stage.replica.in_flight
    effects = stage.send(ev.IsrRefused(LeaderAndIsr(1, 1, (1, 2), 1), 2, 1))
    assert one(effects, fx.IsrChanged).isr == (1, 2)
    assert only(effects, fx.WriteIsr) == []
    assert (stage.replica.isr, stage.replica.version, stage.replica.in_flight) == ((1, 2), 2, False)
    again = one(stage.send(ev.BrokersChanged({1: 11})), fx.WriteIsr)
    assert (again.isr, again.expected_version) == ((1,), 2)


def test_a_reread_of_the_old_version_does_not_settle_a_write() -> None:
    """The write may still be in flight. Only a compare-and-set of the same version can show its outcome."""
    stage = Stage()
    stage.lead(isr=(1, 2))
    order = one(stage.fetch(3, 0), fx.WriteIsr)
    stage.send(ev.IsrWriteFailed(1))
    again = one(stage.send(ev.IsrRefused(LeaderAndIsr(1, 1, (1, 2), 1), 1, 1)), fx.WriteIsr)
    assert again == order
    assert isinstance(isr_state(stage), PendingExpand)
    stage.send(ev.IsrRefused(LeaderAndIsr(1, 1, (1, 2), 1), 1, 1))
    assert isr_state(stage) == CommittedIsr(1, (1, 2))


def test_a_response_to_an_earlier_write_settles_no_later_one() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    stage.fetch(3, 0)
    stage.lead(epoch=2, version=2, isr=(1, 2))
    later = one(stage.fetch(3, 0), fx.WriteIsr)
    assert later.expected_version == 2
    stage.send(ev.IsrRefused(LeaderAndIsr(1, 2, (1, 2), 1), 2, 1))
    stage.send(ev.IsrWriteFailed(1))
    assert stage.replica.isr_state == PendingExpand(CommittedIsr(1, (1, 2)), ((3, 13),), 2)


def test_new_leader_shrinks_healthy_followers_at_once() -> None:
    """The new leader knows no follower yet. Their lag clocks start with its epoch, however old the last fetch is."""
    stage = Stage(log_of(1, 1, 1))
    stage.send(decided(2, 1, 1))
    stage.now_ms += 50_000
    assert only(stage.lead(epoch=2, version=2), fx.WriteIsr) == []
    assert only(stage.wait(999), fx.WriteIsr) == []
    stage.fetch(2, 3)
    assert one(stage.wait(1), fx.WriteIsr).isr == (1, 2)


def test_a_leader_elected_again_restarts_its_followers_lag_clocks() -> None:
    stage = Stage(log_of(1))
    stage.lead()
    stage.wait(900)
    stage.lead(epoch=2, version=2)
    assert only(stage.wait(900), fx.WriteIsr) == []


def test_followers_of_an_idle_partition_are_not_late() -> None:
    """The followers fetched long ago, but had all records until this append."""
    stage = Stage()
    stage.lead()
    stage.fetch(2, 0)
    stage.fetch(3, 0)
    assert only(stage.wait(60_000), fx.WriteIsr) == []
    stage.produce()
    assert only(stage.wait(999), fx.WriteIsr) == []
    assert one(stage.wait(1), fx.WriteIsr).isr == (1,)


def test_change_in_flight_not_cleared_on_re_election() -> None:
    stage = Stage()
    stage.lead()
    stage.send(ev.BrokersChanged({1: 11, 2: 12}))
    assert isinstance(isr_state(stage), PendingShrink)
    stage.lead(epoch=2, version=2)
    assert isr_state(stage) == CommittedIsr(1, (1, 2, 3))
    assert only(stage.send(ev.IsrWritten((1, 2), 2)), fx.IsrChanged) == []
    assert stage.replica.isr == (1, 2, 3)


@pytest.mark.parametrize("late", [ev.IsrWritten((1, 2), 2), ev.IsrWriteFailed(1)])
def test_isr_state_read_across_a_role_change(late: ev.Event) -> None:
    """A response after a change of role, even if the role has changed back, says nothing about the new one."""
    stage = Stage()
    stage.lead()
    stage.send(ev.BrokersChanged({1: 11, 2: 12}))
    stage.send(decided(2, 2, 2))
    assert stage.send(late) == []
    assert stage.replica.isr_state is None
    stage.lead(epoch=3, version=3)
    assert stage.send(late) == []
    assert stage.replica.isr_state == CommittedIsr(1, (1, 2, 3))


def test_leader_not_in_its_own_isr() -> None:
    """The replica reports such a decision and does not follow it. A leader that receives one stops leading."""
    stage = Stage()
    effects = stage.send(decided(1, 1, 1, isr=(2, 3)))
    assert "not in the ISR" in one(effects, fx.ReportBadDecision).detail
    assert stage.replica.role == "offline"
    stage.lead(version=2)
    ticket, _ = stage.produce()
    effects = stage.send(decided(1, 1, 3, isr=(2, 3)))
    assert one(effects, fx.RespondToProduce) == fx.RespondToProduce(
        ticket, ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, f"deposed: leader {NO_LEADER}"
    )
    assert stage.replica.role == "follower"
    with pytest.raises(ValueError, match="lacks its leader"):
        CommittedIsr(1, (2, 3))


def test_empty_isr() -> None:
    stage = Stage()
    effects = stage.send(decided(NO_LEADER, 1, 1, isr=()))
    assert "empty ISR" in one(effects, fx.ReportBadDecision).detail
    with pytest.raises(ValueError, match="lacks its leader"):
        CommittedIsr(1, ())


def test_a_leader_never_leaves_its_own_isr() -> None:
    """The leader stays for any event: all others gone, or a broker table without this broker."""
    stage = Stage()
    stage.lead()
    assert only(stage.send(ev.BrokersChanged({})), fx.WriteIsr) == []
    order = one(stage.send(ev.BrokersChanged({1: 11})), fx.WriteIsr)
    assert order.isr == (1,)
    stage.written(order)
    assert only(stage.wait(100_000), fx.WriteIsr) == []
    with pytest.raises(ValueError, match="names the leader"):
        CommittedIsr(1, (1, 2)).shrink((1,), expected_version=1)


def test_last_isr_member_offline_must_keep_its_claim() -> None:
    """When its log fails it goes offline, and writes nothing: only this replica is known to have all records."""
    stage = Stage(log_of(1))
    stage.lead(isr=(1,))
    effects = stage.send(ev.LogFailed("disk is gone"))
    assert only(effects, fx.WriteIsr) == []
    assert stage.replica.role == "offline"
    assert stage.replica.isr == (1,)
    assert stage.lead(epoch=2, version=2, isr=(1,)) == []
    _, effects = stage.produce()
    assert one(effects, fx.RespondToProduce).code == ErrorCode.KAFKA_STORAGE_ERROR


@pytest.mark.parametrize(
    "change",
    [
        ev.BrokersChanged({1: 11, 2: 12}),
        ev.BrokersChanged({1: 11, 2: 12, 3: 14}),
        ev.BrokersChanged(LIVE, stopping=frozenset({3})),
    ],
    ids=["fenced", "of another incarnation", "stopping"],
)
def test_fenced_or_stopping_broker_rejoins_isr(change: ev.Event) -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    stage.send(change)
    assert only(stage.send(ev.FollowerFetched(3, 13, 1, 0, -1)), fx.WriteIsr) == []
    assert only(stage.send(ev.BrokersChanged({1: 11, 2: 12, 3: 15})), fx.WriteIsr) == []
    order = one(stage.send(ev.FollowerFetched(3, 15, 1, 0, -1)), fx.WriteIsr)
    assert order.added == ((3, 15),)


def test_bounced_broker_resumes_its_old_epoch_with_a_shorter_log() -> None:
    """A started process leads nothing without an order, although its log says that it led. In the new epoch its
    followers' old fetches do not count."""
    stage = Stage(log_of(1, 1))
    assert stage.replica.role == "offline"
    assert one(stage.produce()[1], fx.RespondToProduce).code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    refusal = one(stage.send(ev.FollowerFetched(2, 12, 1, 5, 1)), fx.RefuseFetch)
    assert refusal.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    stage.lead(epoch=2, version=2)
    assert one(stage.send(ev.FollowerFetched(2, 12, 1, 5, 1)), fx.RefuseFetch).code == ErrorCode.FENCED_LEADER_EPOCH
    assert one(stage.send(ev.FollowerFetched(2, 12, 2, 5, 1)), fx.AnswerDiverging) == fx.AnswerDiverging(1, 2)


def test_follower_ahead_of_leader() -> None:
    """The leader sends it the divergence point, and it does not count before it has truncated its log there."""
    leader_log = log_of(1, 1, 3)
    leader = Stage(leader_log)
    leader.lead(epoch=4, isr=(1,), min_isr=1)
    effects = leader.fetch(2, 4, last_epoch=2)
    assert effects == [fx.AnswerDiverging(1, 2)]
    follower = Stage(log_of(1, 1, 2, 2), high_watermark=2)
    follower.send(decided(2, 4, 9))
    effects = follower.answer(leader_log, diverging=(1, 2), batch_count=0, high_watermark=3)
    assert effects == [fx.TruncateLog(2)]
    assert follower.replica.high_watermark == 2
    follower.answer(leader_log, high_watermark=3)
    assert follower.log.batches == leader_log.batches
    assert follower.replica.high_watermark == 3


def test_two_leaders_after_a_full_restart() -> None:
    """Two brokers return, and both have led before. Only the newest decision counts, in any order of arrival. One
    epoch with two leaders is reported."""
    stage = Stage(log_of(1))
    stage.send(decided(2, 7, 20))
    assert stage.send(decided(1, 6, 19)) == []
    assert stage.replica.role == "follower"
    effects = stage.send(decided(1, 7, 21))
    assert "two leaders in epoch 7" in one(effects, fx.ReportBadDecision).detail
    assert stage.replica.role == "follower"
