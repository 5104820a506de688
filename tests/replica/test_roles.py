"""Tests of changes of role, of the order of decisions, and of the table that documents them."""

from __future__ import annotations

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.purgatory import NEVER
from sparklog.replica.replica import TRANSITIONS
from tests.replica.support import LIVE, Stage, decided, log_of, one

TO_LEADER = decided(1, 5, 5)
TO_FOLLOWER = decided(2, 5, 5)
NO_REPLICA = decided(2, 5, 5, isr=(2, 3), replicas=(2, 3))


@pytest.mark.parametrize("first", [None, decided(1, 4, 4), decided(2, 4, 4)], ids=["offline", "leader", "follower"])
@pytest.mark.parametrize(
    ("event", "role"),
    [
        (TO_LEADER, "leader"),
        (TO_FOLLOWER, "follower"),
        (NO_REPLICA, "offline"),
        (ev.LogFailed("disk"), "offline"),
        (ev.Stopped(), "offline"),
    ],
)
def test_the_table_has_every_change_of_role(first: ev.Event | None, event: ev.Event, role: str) -> None:
    stage = Stage()
    if first is not None:
        stage.send(first)
    before = stage.replica.role
    effects = stage.send(event)
    assert stage.replica.role == role
    changed = one(effects, fx.RoleChanged)
    assert changed.role == role
    rows = [row for row in TRANSITIONS if (row.source, row.target) == (before, role)]
    if (before, event) != ("offline", NO_REPLICA):
        assert any(type(event).__name__ in row.event for row in rows), (before, event, role)


def test_an_elected_follower_stops_fetching() -> None:
    stage = Stage()
    stage.send(TO_FOLLOWER)
    assert stage.send(decided(1, 6, 6)) == [fx.StopFetching(), fx.RoleChanged("leader", 6)]


def test_decisions_are_ordered_by_version_in_any_arrival_order() -> None:
    stage = Stage()
    stage.send(decided(2, 6, 9))
    assert stage.send(decided(1, 5, 8)) == []
    assert stage.send(decided(1, 7, 9)) == []
    assert (stage.replica.role, stage.replica.leader_epoch) == ("follower", 6)
    assert stage.send(decided(1, 7, 10)) != []


def test_a_repeated_version_updates_only_fields_outside_the_node() -> None:
    stage = Stage(log_of(1))
    stage.lead(isr=(1, 2), min_isr=3)
    stage.fetch(2, 1)
    assert stage.replica.high_watermark == 0
    assert stage.lead(isr=(1, 2), min_isr=2) == [fx.HighWatermarkMoved(1)]
    assert stage.fetch(3, 1, incarnation=13) != []


def test_an_epoch_that_decreases_is_reported() -> None:
    stage = Stage()
    stage.send(decided(2, 6, 9))
    assert "follows 6" in one(stage.send(decided(1, 5, 10)), fx.ReportBadDecision).detail


@pytest.mark.parametrize("end", [ev.Stopped(), ev.LogFailed("disk")])
def test_the_end_is_final(end: ev.Event) -> None:
    stage = Stage()
    stage.send(TO_LEADER)
    stage.send(end)
    for event in (decided(1, 9, 9), end, ev.IsrRefused(LeaderAndIsr(1, 9, (1,), 1), 9), ev.BrokersChanged(LIVE)):
        assert stage.send(event) == []
    assert stage.replica.role == "offline"
    assert stage.replica.deadline_ms() == NEVER


def test_queries_return_results_before_any_decision() -> None:
    replica = Stage(log_of(1), high_watermark=9).replica
    assert (replica.role, replica.leader, replica.isr, replica.version) == ("offline", NO_LEADER, (), -1)
    assert replica.high_watermark == 1
    assert not replica.hw_settled
    assert replica.check_epoch(-1) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_requests_are_fenced_by_their_leader_epoch() -> None:
    stage = Stage()
    stage.send(TO_LEADER)
    codes = [stage.replica.check_epoch(epoch) for epoch in (-1, 4, 5, 6)]
    assert codes == [None, ErrorCode.FENCED_LEADER_EPOCH, None, ErrorCode.UNKNOWN_LEADER_EPOCH]
