"""Tests of a leader: produces, the high watermark, followers' fetches, the in-sync set."""

from __future__ import annotations

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.isr import CommittedIsr, PendingExpand, PendingShrink
from sparklog.replica.purgatory import NEVER
from sparklog.replica.replica import ReplicaSettings
from sparklog.testing.sim_log import SimLog
from tests.replica.support import LIVE, REPLICAS, Stage, decided, log_of, one, only


def test_acks_all_waits_for_every_member() -> None:
    stage = Stage()
    stage.lead()
    ticket, effects = stage.produce()
    assert effects == [fx.AppendAsLeader(ticket, 1), fx.LogEndMoved(1)]
    assert stage.fetch(2, 1) == [fx.ServeFetch(1)]
    assert stage.fetch(3, 1) == [
        fx.HighWatermarkMoved(1),
        fx.RespondToProduce(ticket, ErrorCode.NONE, 0),
        fx.ServeFetch(1),
    ]


@pytest.mark.parametrize("acks", [0, 1])
def test_acks_1_and_0_wait_only_for_the_leaders_log(acks: int) -> None:
    stage = Stage()
    stage.lead()
    ticket, effects = stage.produce(acks)
    assert effects[1:] == [fx.LogEndMoved(1), fx.RespondToProduce(ticket, ErrorCode.NONE, 0)]
    assert stage.replica.high_watermark == 0


def test_other_acks_are_refused() -> None:
    stage = Stage()
    stage.lead()
    ticket, effects = stage.produce(2)
    assert effects == [fx.RespondToProduce(ticket, ErrorCode.INVALID_REQUIRED_ACKS, -1, "acks=2: expected 0, 1 or -1")]


def test_acks_all_is_refused_before_the_append_below_min_insync() -> None:
    stage = Stage()
    stage.lead(isr=(1,))
    _, effects = stage.produce()
    assert one(effects, fx.RespondToProduce).code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert only(effects, fx.AppendAsLeader) == []
    assert stage.log.log_end_offset == 0


def test_min_isr_counts_up_to_the_replication_factor() -> None:
    stage = Stage()
    stage.lead(isr=(1,), replicas=(1,), min_isr=2)
    ticket, effects = stage.produce()
    assert effects[1:] == [
        fx.LogEndMoved(1),
        fx.HighWatermarkMoved(1),
        fx.RespondToProduce(ticket, ErrorCode.NONE, 0),
    ]


def test_the_high_watermark_stays_while_the_isr_is_too_small() -> None:
    """An addition in flight holds the mark back, and does not count for the minimum yet."""
    stage = Stage()
    stage.lead(isr=(1,))
    stage.produce(1)
    effects = stage.fetch(2, 1)
    assert only(effects, fx.HighWatermarkMoved) == []
    effects = stage.written(one(effects, fx.WriteIsr))
    assert effects == [fx.IsrChanged((1, 2)), fx.HighWatermarkMoved(1)]


def test_a_produce_not_committed_in_time_times_out() -> None:
    stage = Stage()
    stage.lead()
    ticket, _ = stage.produce(timeout_ms=300)
    assert only(stage.wait(299), fx.RespondToProduce) == []
    answer = one(stage.wait(1), fx.RespondToProduce)
    assert (answer.ticket, answer.code) == (ticket, ErrorCode.REQUEST_TIMED_OUT)
    assert stage.replica.waiting == 0


def test_a_produce_times_out_if_the_isr_shrinks_during_it() -> None:
    """The records stay in the log, and the error comes only at the timeout: the follower may return earlier."""
    stage = Stage()
    stage.lead()
    stage.produce(timeout_ms=500)
    stage.written(one(stage.send(ev.BrokersChanged({1: 11})), fx.WriteIsr))
    assert stage.replica.isr == (1,)
    assert one(stage.wait(500), fx.RespondToProduce).code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


def test_a_duplicate_gets_the_offsets_of_the_first_append() -> None:
    stage = Stage()
    stage.lead()
    stage.produce(1)
    stage.produce(1)
    stage.replica.step(ev.ProduceArrived(90, -1, 99_999), stage.now_ms)
    assert stage.send(ev.LeaderAppended(90, 0, 1)) == []
    stage.fetch(2, 1)
    assert one(stage.fetch(3, 1), fx.RespondToProduce) == fx.RespondToProduce(90, ErrorCode.NONE, 0)
    stage.replica.step(ev.ProduceArrived(91, -1, 99_999), stage.now_ms)
    assert stage.send(ev.LeaderAppended(91, 0, 1)) == [fx.RespondToProduce(91, ErrorCode.NONE, 0)]


def test_a_failed_append_is_dropped() -> None:
    stage = Stage()
    stage.lead()
    stage.replica.step(ev.ProduceArrived(5, -1, 99_999), stage.now_ms)
    assert stage.send(ev.LeaderAppendFailed(5)) == []
    assert stage.send(decided(2, 2, 2)) == [fx.StartFetching(2, 2), fx.RoleChanged("follower", 2)]


def test_waiting_produces_are_refused_when_the_leader_is_deposed() -> None:
    stage = Stage()
    stage.lead()
    ticket, _ = stage.produce()
    answer, *rest = stage.send(decided(2, 2, 2))
    assert isinstance(answer, fx.RespondToProduce)
    assert (answer.ticket, answer.code) == (ticket, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert rest == [fx.StartFetching(2, 2), fx.RoleChanged("follower", 2)]


def test_waiting_produces_continue_when_the_same_leader_is_elected_again() -> None:
    stage = Stage()
    stage.lead()
    ticket, _ = stage.produce()
    assert stage.lead(epoch=2, version=2) == [fx.RoleChanged("leader", 2)]
    stage.fetch(2, 1)
    assert one(stage.fetch(3, 1), fx.RespondToProduce) == fx.RespondToProduce(ticket, ErrorCode.NONE, 0)


# --- fencing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetch", "code"),
    [
        (ev.FollowerFetched(2, 12, 4, 0, -1), ErrorCode.FENCED_LEADER_EPOCH),
        (ev.FollowerFetched(2, 12, 6, 0, -1), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (ev.FollowerFetched(2, 11, 5, 0, -1), ErrorCode.STALE_BROKER_EPOCH),
        (ev.FollowerFetched(9, 12, 5, 0, -1), ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (ev.FollowerFetched(2, 12, 5, 7, -1), ErrorCode.OFFSET_OUT_OF_RANGE),
    ],
)
def test_invalid_fetches_are_refused(fetch: ev.FollowerFetched, code: ErrorCode) -> None:
    stage = Stage(log_of(5))
    stage.lead(epoch=5)
    assert one(stage.send(fetch), fx.RefuseFetch).code == code
    assert stage.replica.high_watermark == 0


def test_a_fetch_below_the_log_start_is_out_of_range() -> None:
    stage = Stage(SimLog(start_offset=10))
    stage.lead()
    assert one(stage.fetch(2, 4), fx.RefuseFetch).code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_follower_may_start_at_the_first_segments_base_offset() -> None:
    log = SimLog(start_offset=10)
    log.append("x", 20, leader_epoch=5, now_ms=0)
    log.log_start_offset = 25
    stage = Stage(log)
    stage.lead(epoch=5)
    assert one(stage.fetch(2, 10), fx.ServeFetch).offset == 10
    assert one(stage.fetch(2, 9), fx.RefuseFetch).code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_fetch_of_a_newer_incarnation_fences_the_older_one() -> None:
    stage = Stage()
    stage.lead()
    stage.produce(1)
    stage.fetch(2, 1)
    stage.send(ev.BrokersChanged({**LIVE, 2: 22}))
    assert only(stage.fetch(3, 1), fx.HighWatermarkMoved) == []
    assert one(stage.fetch(2, 1), fx.RefuseFetch).code == ErrorCode.STALE_BROKER_EPOCH
    assert one(stage.fetch(2, 1, incarnation=22), fx.HighWatermarkMoved).high_watermark == 1


@pytest.mark.parametrize(
    ("offset", "last_epoch", "point"),
    [(5, 1, (1, 2)), (3, 2, (1, 2)), (2, 1, None), (5, 3, None), (9, 3, (3, 5)), (9, 8, (3, 5)), (1, 0, (-1, 0)),
     # An epoch that this log never had, at an offset that it has: the records differ nevertheless. Source: KIP-279.
     (2, 2, (1, 2)), (5, 4, (3, 5))],
)  # fmt: skip
def test_divergence_is_found_by_epoch(offset: int, last_epoch: int, point: tuple[int, int] | None) -> None:
    stage = Stage(log_of(1, 1, 3, 3, 3))
    stage.lead(epoch=9)
    effects = stage.fetch(2, offset, last_epoch=last_epoch)
    assert effects == ([fx.AnswerDiverging(*point)] if point else [fx.ServeFetch(offset)])


def test_a_follower_caught_up_to_the_log_start_continues() -> None:
    """Records were deleted up to the start of an epoch and of a segment. A member of the ISR at that offset must
    keep its log: if it led next with an empty one, its offsets would start again."""
    stage = Stage(log_of(5, 5, start=4))
    stage.lead(epoch=5)
    assert stage.fetch(2, 4, last_epoch=3)[-1] == fx.ServeFetch(4)
    assert stage.fetch(2, 5, last_epoch=3) == [fx.AnswerDiverging(-1, 4)]
    assert stage.fetch(2, 4, last_epoch=6) == [fx.AnswerDiverging(5, 6)]


def test_an_empty_log_begins_where_the_leaders_first_segment_does() -> None:
    """The log does not begin within that segment, where a replica may have been truncated: its file would lack the
    earlier records."""
    stage = Stage(log_of(1, 1, 3, start=4))
    stage.lead(epoch=9)
    assert stage.fetch(2, 4, last_epoch=-1) == [fx.ServeFetch(4)]
    for offset in (5, 7):
        assert one(stage.fetch(2, offset, last_epoch=-1), fx.RefuseFetch).code == ErrorCode.OFFSET_OUT_OF_RANGE
    empty = Stage(log_of(start=4))
    empty.lead(epoch=9)
    assert empty.fetch(2, 4, last_epoch=-1) == [fx.ServeFetch(4)]


# --- in-sync set ------------------------------------------------------------------------------------------------------


def test_a_follower_that_is_not_caught_up_leaves_the_isr() -> None:
    stage = Stage()
    stage.lead()
    stage.produce(1)
    stage.fetch(2, 1)
    order = one(stage.wait(1000), fx.WriteIsr)
    assert (order.isr, order.added, order.expected_version) == ((1, 2), (), 1)
    assert stage.replica.high_watermark == 0
    assert stage.written(order) == [fx.IsrChanged((1, 2)), fx.HighWatermarkMoved(1)]


def test_a_follower_under_steady_load_counts_as_caught_up() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2), replicas=(1, 2))
    for _ in range(40):
        stage.produce(1)
        stage.fetch(2, stage.log.log_end_offset - 1)
        assert only(stage.wait(100), fx.WriteIsr) == []


def test_a_removal_takes_effect_only_after_its_write() -> None:
    stage = Stage()
    stage.lead()
    stage.produce(1)
    stage.fetch(2, 1)
    effects = stage.send(ev.BrokersChanged({1: 11, 2: 12}))
    assert isinstance(stage.replica.isr_state, PendingShrink)
    assert only(effects, fx.HighWatermarkMoved) == []
    assert one(stage.written(one(effects, fx.WriteIsr)), fx.HighWatermarkMoved).high_watermark == 1


def test_an_addition_in_flight_holds_the_high_watermark() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    order = one(stage.fetch(3, 0), fx.WriteIsr)
    assert (order.isr, order.added) == ((1, 2, 3), ((3, 13),))
    ticket, _ = stage.produce()
    assert only(stage.fetch(2, 1), fx.HighWatermarkMoved) == []
    stage.send(ev.IsrWriteFailed(1))
    assert only(stage.fetch(2, 1), fx.HighWatermarkMoved) == []
    effects = stage.send(ev.IsrRefused(LeaderAndIsr(1, 1, (1, 2, 3), 1), 2, 1))
    assert effects == [fx.IsrChanged((1, 2, 3))]
    assert one(stage.fetch(3, 1), fx.RespondToProduce).ticket == ticket


def test_a_refused_addition_is_retried_later() -> None:
    """An immediate retry would ask ZooKeeper in a loop until this broker learns of the new incarnation."""
    stage = Stage()
    stage.lead(isr=(1, 2))
    stage.fetch(2, 0)
    stage.fetch(3, 0)
    effects = stage.send(ev.IsrRefused(LeaderAndIsr(1, 1, (1, 2), 1), 1, 1))
    assert only(effects, fx.WriteIsr) == []
    assert stage.replica.isr_state == CommittedIsr(1, (1, 2))
    assert only(stage.fetch(3, 0), fx.WriteIsr) == []
    assert one(stage.wait(200), fx.WriteIsr).added == ((3, 13),)


def test_a_follower_returns_at_the_epochs_start() -> None:
    """The last leader may have committed offsets 1 and 2, although this one's high watermark is lower."""
    stage = Stage(log_of(1, 1, 1), high_watermark=1)
    stage.lead(epoch=2, isr=(1, 2))
    assert only(stage.fetch(3, 2), fx.WriteIsr) == []
    assert one(stage.fetch(3, 3), fx.WriteIsr).added == ((3, 13),)


def test_a_follower_returns_only_with_all_committed_records() -> None:
    """The follower has passed the epoch's start, but not the records committed since."""
    stage = Stage()
    stage.lead(isr=(1, 2))
    for end in (1, 2):
        stage.produce()
        stage.fetch(2, end)
    assert stage.replica.high_watermark == 2
    assert only(stage.fetch(3, 1), fx.WriteIsr) == []
    assert one(stage.fetch(3, 2), fx.WriteIsr).added == ((3, 13),)


def test_a_returning_follower_gets_a_fresh_lag_clock() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    stage.produce(1)
    stage.fetch(2, 1)
    stage.wait(5000)
    stage.produce(1)
    effects = stage.written(one(stage.fetch(3, 1), fx.WriteIsr))
    assert only(effects, fx.WriteIsr) == []
    assert only(stage.wait(999), fx.WriteIsr) == []


def test_a_silent_removed_follower_does_not_return_on_old_knowledge() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2), replicas=(1, 2))
    stage.fetch(2, 0)
    stage.produce()
    order = one(stage.wait(1000), fx.WriteIsr)
    assert order.isr == (1,)
    assert stage.replica.high_watermark == 0
    assert only(stage.written(order), fx.WriteIsr) == []
    assert one(stage.fetch(2, 0), fx.WriteIsr).isr == (1, 2)


def test_a_follower_that_cannot_truncate_is_not_in_sync() -> None:
    """The follower has no space for the truncation, and the records before its fetch position are not part of this
    log."""
    stage = Stage(log_of(1, 1, 1))
    stage.lead(epoch=9)
    ticket, _ = stage.produce()
    orders: list[fx.WriteIsr] = []
    for _ in range(30):
        seen = stage.fetch(3, 4)
        assert stage.fetch(2, 5, last_epoch=2) == [fx.AnswerDiverging(1, 3)]
        seen += stage.wait(100)
        assert not only(seen, fx.RespondToProduce) and not only(seen, fx.HighWatermarkMoved), (
            "the follower does not have that record"
        )
        orders += only(seen, fx.WriteIsr)
    assert [order.isr for order in orders[:1]] == [(1, 3)]
    effects = stage.written(orders[0])
    assert one(effects, fx.HighWatermarkMoved).high_watermark == 4
    assert one(effects, fx.RespondToProduce).ticket == ticket
    assert stage.fetch(2, 5, last_epoch=2) == [fx.AnswerDiverging(1, 3)]


def test_a_lost_connection_shrinks_early_unless_the_follower_is_back() -> None:
    stage = Stage()
    stage.lead()
    stage.send(ev.FollowerConnectionLost(2))
    stage.send(ev.FollowerConnectionLost(3))
    stage.fetch(3, 0)
    assert only(stage.wait(99), fx.WriteIsr) == []
    assert one(stage.wait(1), fx.WriteIsr).isr == (1, 3)


def test_the_lag_in_records_may_have_a_limit() -> None:
    stage = Stage(settings=ReplicaSettings(lag_time_max_ms=60_000, lag_max_messages=2))
    stage.lead(isr=(1, 2), replicas=(1, 2))
    stage.fetch(2, 0)
    stage.produce(1)
    stage.produce(1)
    assert only(stage.wait(1000), fx.WriteIsr) == []
    stage.produce(1)
    order = one(stage.wait(500), fx.WriteIsr)
    assert order.isr == (1,)
    stage.written(order)
    assert only(stage.fetch(2, 0), fx.WriteIsr) == []
    assert one(stage.fetch(2, 1), fx.WriteIsr).isr == (1, 2)


def test_one_isr_change_is_in_flight_and_removals_come_first() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    first = one(stage.fetch(3, 0), fx.WriteIsr)
    assert only(stage.send(ev.BrokersChanged({1: 11, 3: 13})), fx.WriteIsr) == []
    second = one(stage.written(first), fx.WriteIsr)
    assert (second.isr, second.expected_version) == ((1, 3), 2)


def test_an_older_broker_table_without_a_broker_proves_no_death() -> None:
    stage = Stage()
    assert only(stage.lead(incarnations={}), fx.WriteIsr) == []
    assert only(stage.send(ev.BrokersChanged({9: 1})), fx.WriteIsr) == []


def test_a_newer_decision_is_followed_after_a_refused_write() -> None:
    stage = Stage()
    stage.lead()
    ticket, _ = stage.produce()
    stage.send(ev.BrokersChanged({1: 11, 2: 12}))
    effects = stage.send(ev.IsrRefused(LeaderAndIsr(2, 2, (1, 2), 1), 2, 1))
    assert one(effects, fx.RespondToProduce).ticket == ticket
    assert effects[1:] == [fx.StartFetching(2, 2), fx.RoleChanged("follower", 2)]


def test_a_decision_may_contain_our_write_before_its_response() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    order = one(stage.fetch(3, 0), fx.WriteIsr)
    assert stage.lead(version=2, isr=(1, 2, 3)) == []
    assert stage.replica.isr_state == CommittedIsr(1, (1, 2, 3))
    assert stage.written(order) == []


def test_illegal_isr_states_cannot_be_built() -> None:
    whole = CommittedIsr(1, (1, 2))
    for broken in (
        lambda: CommittedIsr(1, (1, 1)),
        lambda: PendingExpand(whole, (), 1),
        lambda: PendingExpand(whole, ((2, 5),), 1),
        lambda: PendingExpand(whole, ((3, 5), (3, 6)), 1),
        lambda: PendingShrink(whole, (), 1),
        lambda: PendingShrink(whole, (3,), 1),
        lambda: PendingShrink(whole, (1, 2), 1),
    ):
        with pytest.raises(ValueError, match=r"names|lacks|empty"):
            broken()


def test_a_lagging_high_watermark_shows_until_the_epochs_start() -> None:
    stage = Stage(log_of(1, 1), high_watermark=1)
    stage.lead(epoch=2)
    assert not stage.replica.hw_settled
    assert stage.replica.check_offset(2) == ErrorCode.OFFSET_NOT_AVAILABLE
    assert stage.replica.check_offset(3) == ErrorCode.OFFSET_OUT_OF_RANGE
    stage.fetch(2, 2)
    stage.fetch(3, 2)
    assert stage.replica.hw_settled
    assert stage.replica.check_offset(2) is None


def test_an_idle_leader_removes_a_follower_that_stops_fetching() -> None:
    """Ten thousand idle partitions must not be scanned, and none may be missed."""
    stage = Stage()
    stage.lead()
    for follower in (2, 3):
        stage.fetch(follower, 0)
    stage.wait(2000)
    assert stage.replica.deadline_ms() == NEVER, "all replicas have all records"
    stage.wait(100_000)
    stage.produce()
    assert stage.replica.deadline_ms() == stage.now_ms + 1000
    stage.fetch(2, 1)
    assert one(stage.wait(1000), fx.WriteIsr).isr == (1, 2)


def test_a_member_that_returns_with_less_is_removed_without_writes() -> None:
    stage = Stage(log_of(1, 1))
    stage.lead(epoch=2)
    for follower in (2, 3):
        stage.fetch(follower, 2)
    stage.wait(100_000)
    assert stage.replica.deadline_ms() == NEVER
    stage.fetch(3, 1, incarnation=LIVE[3] + 1)
    assert one(stage.wait(2000), fx.WriteIsr).isr == (1, 2)


def test_the_end_of_an_unused_connection_wakes_no_replica() -> None:
    stage = Stage()
    stage.lead(isr=(1, 2))
    stage.fetch(2, 0)
    stage.wait(2000)
    stage.send(ev.FollowerConnectionLost(3))
    assert stage.replica.deadline_ms() == NEVER


def test_a_shorter_lag_time_applies_from_the_next_tick_on() -> None:
    stage = Stage(settings=ReplicaSettings(lag_time_max_ms=60_000))
    stage.lead()
    for follower in (2, 3):
        stage.fetch(follower, 0)
    stage.produce()
    stage.fetch(2, 1)
    assert stage.wait(2000) == []
    stage.replica.settings = ReplicaSettings(lag_time_max_ms=1000)
    assert stage.send(decided(1, 1, 1)) == [], "sent again, because of the topic's settings"
    assert one(stage.wait(10), fx.WriteIsr).isr == (1, 2)


def test_nothing_is_committed_before_the_leaders_log_has_a_name() -> None:
    """If the log were lost then, this replica would treat it as one that was always empty, and lead without it."""
    stage = Stage()
    stage.log.named = False
    stage.lead()
    ticket, effects = stage.produce()
    assert only(effects, fx.RespondToProduce) == []
    for follower in (2, 3):
        effects = stage.fetch(follower, 1)
        assert only(effects, fx.HighWatermarkMoved) == []
    assert stage.replica.high_watermark == 0
    stage.log.named = True
    effects = stage.send(ev.LogNamed())
    assert only(effects, fx.HighWatermarkMoved) == [fx.HighWatermarkMoved(1)]
    assert one(effects, fx.RespondToProduce).ticket == ticket


def test_a_replica_that_does_not_lead_ignores_log_names() -> None:
    stage = Stage()
    assert stage.send(ev.LogNamed()) == []
    stage.send(decided(2, 1, 1))
    assert stage.send(ev.LogNamed()) == []


def refused(stage: Stage, follower: int, offset: int, *, last_epoch: int) -> list[fx.Effect]:
    """Send the fetch of a follower that refuses to truncate committed records."""
    return stage.send(
        ev.FollowerFetched(follower, LIVE[follower], stage.replica.leader_epoch, offset, last_epoch, refuses=True)
    )


def test_a_leader_without_committed_records_acknowledges_nothing() -> None:
    """No acks are allowed: acknowledged records would be truncated when the replica with the committed records
    leads."""
    stage = Stage()
    stage.lead(epoch=3)
    ticket, _ = stage.produce()
    assert one(refused(stage, 2, 5, last_epoch=2), fx.AnswerDiverging)
    assert only(stage.fetch(3, 1), fx.HighWatermarkMoved) == []
    for acks in (-1, 0, 1):
        _, effects = stage.produce(acks)
        assert one(effects, fx.RespondToProduce).code == ErrorCode.NOT_ENOUGH_REPLICAS
        assert "replicas [2] hold committed records" in one(effects, fx.RespondToProduce).detail
    stage.send(decided(1, 3, 2, isr=(1, 3)))  # the refusing follower has left the ISR by now
    assert stage.replica.high_watermark == 0
    effects = stage.fetch(2, 1)
    _, effects2 = stage.produce(1)
    assert one(effects2, fx.RespondToProduce).code == ErrorCode.NONE, "the follower has cut its records"
    stage.fetch(3, 1)
    assert stage.replica.high_watermark == 1
    assert ticket


def test_a_fetch_that_refuses_and_does_not_diverge_is_served() -> None:
    stage = Stage()
    stage.lead(epoch=3)
    stage.produce()
    assert refused(stage, 2, 1, last_epoch=3)[-1] == fx.ServeFetch(1)
    assert one(stage.produce(1)[1], fx.RespondToProduce).code == ErrorCode.NONE


def test_isr_writes_keep_the_epoch_of_the_last_lossy_election() -> None:
    stage = Stage()
    state = LeaderAndIsr(1, 3, (1, 2, 3), 1, lossy_epoch=2)
    stage.send(ev.Decided(state, 1, REPLICAS, LIVE, 2))
    effects = stage.send(ev.BrokersChanged({1: LIVE[1], 2: LIVE[2]}))
    assert one(effects, fx.WriteIsr).lossy_epoch == 2
