"""Tests of a follower: responses, truncation, its high watermark."""

from __future__ import annotations

from typing import Any

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, NO_LOSS, UNKNOWN_LOSS, LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.testing.sim_log import SimLog
from tests.replica.support import LIVE, REPLICAS, Stage, decided, log_of, only


def following(log: SimLog | None = None, *, high_watermark: int = 0, epoch: int = 9) -> Stage:
    stage = Stage(log, high_watermark=high_watermark)
    stage.send(decided(2, epoch, 1))
    return stage


def test_a_follower_appends_before_it_adopts_the_leaders_high_watermark() -> None:
    stage = following(log_of(1))
    assert stage.answer(log_of(1, 1, 1), high_watermark=7) == [fx.AppendAsFollower(), fx.HighWatermarkMoved(3)]


def test_a_new_leaders_lower_high_watermark_does_not_lower_ours() -> None:
    stage = following(log_of(1, 1, 1), high_watermark=3)
    assert stage.answer(log_of(1, 1, 1), high_watermark=1) == []
    assert stage.replica.high_watermark == 3


def test_never_truncate_to_the_high_watermark() -> None:
    stage = Stage(log_of(1, 1, 1), high_watermark=1)
    assert stage.send(decided(2, 5, 1)) == [fx.StartFetching(2, 5), fx.RoleChanged("follower", 5)]
    assert stage.log.log_end_offset == 3


def test_truncate_before_raising_the_high_watermark() -> None:
    stage = following(log_of(1, 2, 2), high_watermark=1)
    leader = log_of(1, 3, 3, 3)
    assert stage.answer(leader, diverging=(1, 1), high_watermark=3) == [fx.TruncateLog(1)]
    assert stage.replica.high_watermark == 1
    assert stage.answer(leader, high_watermark=3) == [fx.AppendAsFollower(), fx.HighWatermarkMoved(3)]


@pytest.mark.parametrize(
    ("epochs", "diverging", "end"),
    [
        ((1, 1, 2, 2), (1, 2), 2),  # the leader's end of an epoch that both know
        ((1, 1, 1, 1), (1, 2), 2),  # the leader left that epoch earlier
        ((1, 1, 4, 4), (3, 9), 2),  # an unknown epoch: the answer is the largest smaller one
        ((1, 1), (-1, 0), 0),  # no common epoch
    ],
)
def test_a_follower_truncates_where_the_histories_diverge(
    epochs: tuple[int, ...], diverging: tuple[int, int], end: int
) -> None:
    stage = following(log_of(*epochs))
    assert stage.answer(SimLog(), diverging=diverging) == [fx.TruncateLog(end)]


def test_histories_converge_in_as_many_responses_as_epochs_differ() -> None:
    """Source: KIP-279. It covers fast leader changes, which a single comparison does not repair."""
    leader_log = log_of(1, 1, 4, 4, 6, 6)
    leader = Stage(leader_log)
    leader.lead(epoch=9, isr=(1,), min_isr=1)
    stage = following(log_of(1, 1, 2, 3, 3, 5, 5))
    for _ in range(8):
        effect = leader.fetch(2, stage.log.log_end_offset, last_epoch=stage.log.last_epoch)[-1]
        if isinstance(effect, fx.AnswerDiverging):
            stage.answer(leader_log, diverging=(effect.epoch, effect.end_offset), batch_count=0)
        else:
            stage.answer(leader_log)
    assert stage.log.batches == leader_log.batches


@pytest.mark.parametrize("log_start", [2, 3, 4])
@pytest.mark.parametrize("leaders", [(1, 4, 4, 4, 4), (4, 4, 4, 4, 4)])
def test_histories_that_diverge_below_the_log_start_converge(log_start: int, leaders: tuple[int, ...]) -> None:
    """Records that an unclean leader never had were deleted, up to an offset inside the first segment."""
    leader_log = log_of(*leaders)
    leader = Stage(leader_log)
    leader.lead(epoch=9, isr=(1,), min_isr=1)
    stage = following(log_of(1, 3, 3, 3), high_watermark=4)
    stage.log.log_start_offset = log_start
    for _ in range(4):
        effect = leader.fetch(2, stage.log.log_end_offset, last_epoch=stage.log.last_epoch)[-1]
        if isinstance(effect, fx.AnswerDiverging):
            stage.answer(leader_log, diverging=(effect.epoch, effect.end_offset), batch_count=0)
        else:
            stage.answer(leader_log)
    assert stage.log.batches == leader_log.batches


@pytest.mark.parametrize("leader", [1, 3])
def test_a_cancelled_truncation_below_the_log_start_keeps_the_mark(leader: int) -> None:
    """The high watermark was lowered to the divergence point, and the next leader's log begins above its end."""
    stage = following(log_of(1, 1, 1, 1), high_watermark=4)
    stage.log.log_start_offset = 3
    answer = ev.LeaderResponded(9, 4, ErrorCode.NONE, 0, 0, 5, (1, 1), 0, 1)
    assert stage.replica.step(answer, 0) == [fx.HighWatermarkMoved(3), fx.TruncateLog(1)]
    stage.replica.check_invariants()
    stage.send(decided(leader, 10, 2))
    assert stage.replica.high_watermark == 3


def test_an_unclean_elections_truncation_lowers_the_mark_first() -> None:
    """No reader may see records that are about to be truncated."""
    stage = following(log_of(1, 1, 1), high_watermark=3)
    assert stage.answer(SimLog(), diverging=(1, 1)) == [fx.HighWatermarkMoved(1), fx.TruncateLog(1)]


def test_an_out_of_range_follower_restarts_at_the_leaders_first_offset() -> None:
    stage = following(log_of(1, 1), high_watermark=2)
    effects = stage.answer(SimLog(50), code=ErrorCode.OFFSET_OUT_OF_RANGE, batch_count=0)
    assert effects == [fx.RestartLog(50), fx.HighWatermarkMoved(50)]
    assert stage.log.log_end_offset == 50


@pytest.mark.parametrize(
    "change",
    [
        {"leader_epoch": 8},
        {"fetch_offset": 0},
        {"code": ErrorCode.FENCED_LEADER_EPOCH},
        {"code": ErrorCode.NOT_LEADER_OR_FOLLOWER},
    ],
)
def test_responses_without_changes_have_no_effect(change: dict[str, Any]) -> None:
    stage = following(log_of(1))
    assert stage.answer(log_of(1, 1), high_watermark=1, **change) == []


def test_a_repeated_response_does_not_truncate_newer_records() -> None:
    """The log ends where it diverged, but with the leader's records. Found by seed 1103."""
    stage = following(log_of(1, 2, 2))
    leader = log_of(1, 4, 4)
    old: dict[str, Any] = {"diverging": (1, 1), "batch_count": 0, "fetch_offset": 3, "last_epoch": 2}
    assert stage.answer(leader, **old) == [fx.TruncateLog(1)]
    stage.answer(leader)
    assert stage.log.batches == leader.batches
    assert stage.answer(leader, **old) == []


def test_records_of_the_present_epoch_are_never_truncated() -> None:
    stage = following(log_of(1, 9))
    assert stage.answer(SimLog(), diverging=(1, 1), batch_count=0) == []


def test_responses_during_a_truncation_are_ignored() -> None:
    stage = following(log_of(1, 2))
    answer = ev.LeaderResponded(9, 2, 0, 0, 0, 5, (1, 1), 0, -1)
    assert stage.replica.step(answer, 0) == [fx.TruncateLog(1)]
    assert stage.replica.step(answer, 0) == []


def test_a_follower_fetches_again_after_a_failed_truncation() -> None:
    """Without the fetch the follower would wait for space as long as its leader leads, and receive no records."""
    stage = following(log_of(1, 2), high_watermark=2)
    parted = ev.LeaderResponded(9, 2, 0, 5, 0, 5, (1, 1), 0, 2)
    assert stage.replica.step(parted, 0) == [fx.HighWatermarkMoved(1), fx.TruncateLog(1)]
    for _ in range(3):
        assert stage.replica.step(ev.TruncationFailed(), 0) == [fx.StartFetching(2, 9)]
        stage.replica.check_invariants()
        assert (stage.log.log_end_offset, stage.replica.high_watermark) == (2, 1)
        assert stage.replica.step(parted, 0) == [fx.TruncateLog(1)]
    assert stage.replica.step(ev.TruncationFailed(), 0) == [fx.StartFetching(2, 9)]
    effects = stage.answer(SimLog(50), code=ErrorCode.OFFSET_OUT_OF_RANGE, batch_count=0)
    assert effects == [fx.RestartLog(50), fx.HighWatermarkMoved(50)]


@pytest.mark.parametrize("batches", [0, 1])
def test_a_follower_that_cannot_truncate_restarts_at_the_leaders_start(batches: int) -> None:
    """A leader whose log begins at our end has no record to compare. It would send later records on top of a tail
    that it never had."""
    stage = following(log_of(1, 1), high_watermark=1)
    assert stage.replica.step(ev.LeaderResponded(9, 2, 0, 5, 0, 5, (1, 1), 0, 1), 0) == [fx.TruncateLog(1)]
    assert stage.replica.step(ev.TruncationFailed(), 0) == [fx.StartFetching(2, 9)]
    assert stage.replica.step(ev.LeaderResponded(9, 2, 0, 5, 2, 5, None, batches, 1), 0) == [fx.RestartLog(2)]


def test_a_late_truncation_equals_an_early_one() -> None:
    stage = following(log_of(1, 1), high_watermark=1)
    parted = ev.LeaderResponded(9, 2, 0, 5, 0, 5, (1, 1), 0, 1)
    stage.replica.step(parted, 0)
    stage.send(ev.TruncationFailed())
    assert fx.TruncateLog(1) in stage.send(parted)
    assert stage.log.log_end_offset == 1
    assert stage.answer(log_of(1, 9), high_watermark=2) == [fx.AppendAsFollower(), fx.HighWatermarkMoved(2)]


def test_a_failed_truncation_does_not_affect_a_leader() -> None:
    stage = following(log_of(1, 2))
    assert stage.replica.step(ev.LeaderResponded(9, 2, 0, 5, 0, 5, (1, 1), 0, 2), 0) == [fx.TruncateLog(1)]
    stage.send(decided(1, 10, 2))
    assert stage.send(ev.TruncationFailed()) == []


def test_a_failed_append_leaves_the_follower_at_its_end() -> None:
    stage = following(log_of(1))
    answer = ev.LeaderResponded(9, 1, 0, 2, 0, 2, None, 1, 2)
    assert stage.replica.step(answer, 0) == [fx.AppendAsFollower()]
    assert stage.send(ev.FollowerAppended(1)) == [fx.HighWatermarkMoved(1)]
    assert stage.answer(log_of(1, 1), high_watermark=2) == [fx.AppendAsFollower(), fx.HighWatermarkMoved(2)]


def test_a_follower_without_a_leader_does_not_fetch() -> None:
    stage = Stage(log_of(1))
    assert stage.send(decided(NO_LEADER, 3, 1)) == [fx.StopFetching(), fx.RoleChanged("follower", 3)]
    assert stage.answer(log_of(1, 1), high_watermark=1) == []


def test_an_isr_change_alone_does_not_restart_the_fetch() -> None:
    stage = following()
    assert stage.send(decided(2, 9, 2, isr=(2, 3))) == []
    assert stage.replica.isr == (2, 3)


def test_an_unknown_committed_offset_is_not_out_of_range() -> None:
    """The leader may have shown the offset already."""
    stage = following(log_of(1, 1), high_watermark=1)
    assert stage.replica.check_offset(2) == ErrorCode.OFFSET_NOT_AVAILABLE
    assert stage.replica.check_offset(70) == ErrorCode.OFFSET_NOT_AVAILABLE
    assert stage.replica.check_offset(1) is None


def committed_log(*, high_watermark: int, lossy_epoch: int = NO_LOSS, epochs: tuple[int, ...] = (1, 1, 2, 2)) -> Stage:
    """Return a follower of broker 2 in epoch 3 that knows that the first records are committed."""
    stage = Stage(log_of(*epochs), high_watermark=high_watermark)
    state = LeaderAndIsr(2, 3, (1, 2, 3), 1, lossy_epoch=lossy_epoch)
    stage.send(ev.Decided(state, 1, REPLICAS, LIVE, 2))
    return stage


def diverging(
    stage: Stage, epoch: int, end: int, *, log_start: int = 0, code: int = 0, outdated: bool = False
) -> list[fx.Effect]:
    log = stage.log
    parts = None if code else (epoch, end)
    return stage.send(
        ev.LeaderResponded(3, log.log_end_offset, code, 0, log_start, end, parts, 0, -1, log.last_epoch, outdated)
    )


def test_committed_records_are_not_truncated_for_a_leader_without_them() -> None:
    """The follower reports it once, for any response of the leader, and keeps its log and high watermark."""
    stage = committed_log(high_watermark=3)
    assert diverging(stage, 1, 2) == [fx.RefuseTruncation(2, 3, 2, 3)]
    assert stage.replica.refuses_truncation
    assert diverging(stage, 1, 1) == []
    assert diverging(stage, -1, 0) == []
    assert (stage.log.log_end_offset, stage.replica.high_watermark) == (4, 3)


def test_an_empty_leader_is_refused_as_well() -> None:
    stage = committed_log(high_watermark=1)
    assert diverging(stage, -1, 0) == [fx.RefuseTruncation(2, 3, 0, 1)]


def test_uncommitted_records_are_truncated_as_usual() -> None:
    stage = committed_log(high_watermark=2)
    assert fx.TruncateLog(2) in diverging(stage, 1, 2)
    assert not stage.replica.refuses_truncation


@pytest.mark.parametrize("lossy_epoch", [3, UNKNOWN_LOSS])
def test_records_from_before_a_lossy_election_are_truncated(lossy_epoch: int) -> None:
    """The election lost them. An earlier release does not report such elections."""
    stage = committed_log(high_watermark=3, lossy_epoch=lossy_epoch)
    assert only(diverging(stage, 1, 2), fx.TruncateLog) == [fx.TruncateLog(2)]


def test_records_of_a_lossy_elections_own_epoch_are_kept() -> None:
    stage = committed_log(high_watermark=4, lossy_epoch=2)
    assert only(diverging(stage, 1, 2), fx.RefuseTruncation) == [fx.RefuseTruncation(2, 3, 2, 4)]


def test_records_below_the_leaders_log_start_are_dropped() -> None:
    stage = committed_log(high_watermark=3)
    assert only(diverging(stage, 0, 9, log_start=9, code=ErrorCode.OFFSET_OUT_OF_RANGE), fx.RestartLog) == [
        fx.RestartLog(9)
    ]


def test_a_log_start_below_the_high_watermark_is_no_excuse() -> None:
    stage = committed_log(high_watermark=3)
    assert only(diverging(stage, 0, 1, log_start=1, code=ErrorCode.OFFSET_OUT_OF_RANGE), fx.RestartLog) == []
    assert stage.replica.refuses_truncation


def test_an_outdated_log_is_copied_again_completely() -> None:
    """The follower's leader has later records, so it has this log's records or has deleted them."""
    stage = committed_log(high_watermark=3)
    again = diverging(stage, 0, 0, code=ErrorCode.OFFSET_OUT_OF_RANGE, outdated=True)
    assert only(again, fx.RestartLog) == [fx.RestartLog(0)]


def test_a_refusal_ends_with_the_role_and_when_histories_agree() -> None:
    stage = committed_log(high_watermark=3)
    diverging(stage, 1, 2)
    agree = ev.LeaderResponded(3, 4, 0, 4, 0, 4, None, 0, 4, stage.log.last_epoch)
    assert stage.send(agree) == [fx.TruncationAccepted(), fx.HighWatermarkMoved(4)]
    assert not stage.replica.refuses_truncation
    diverging(stage, 1, 2)
    assert stage.replica.refuses_truncation
    stage.send(ev.Decided(LeaderAndIsr(3, 4, (1, 2, 3), 1, lossy_epoch=NO_LOSS), 2, REPLICAS, LIVE, 2))
    assert not stage.replica.refuses_truncation
    stage.send(ev.Decided(LeaderAndIsr(1, 5, (1,), 1, lossy_epoch=NO_LOSS), 3, REPLICAS, LIVE, 1))
    assert not stage.replica.refuses_truncation and stage.replica.is_leader
