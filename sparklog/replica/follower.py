"""A replica while it follows: its log is brought to equal the leader's, batch by batch.

Lives for one leader epoch; ``replica.py`` makes and drops it. The rules, each with the loss it prevents:

- Never truncate to the high watermark: it lags behind what is committed. The leader compares histories by epoch and
  names the point of divergence; only what lies behind that goes. Source: KIP-101, KIP-279.
- Truncate before raising the high watermark: an answer that names a divergence raises nothing.
- The high watermark never passes the log's own end.
- Never cut below the own high watermark what the log holds of the epochs since the last lossy election, unless the
  leader's log start has passed it: these records are committed, and a leader that lacks them has lost its log, or was
  given an old copy of it. The follower refuses, and the controller decides which copy counts.
- An answer counts only when it is for this epoch and for the log as it is now, by its end and last epoch: others
  were overtaken. (The simulator found the last epoch necessary: an answer delivered twice cut the log where it had
  once diverged, after it had grown to the same end again with committed records.)
"""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, UNKNOWN_LOSS, LeaderAndIsr
from sparklog.replica.effects import (
    AppendAsFollower,
    CutAccepted,
    Effect,
    HighWatermarkMoved,
    RefuseCut,
    RestartLog,
    StartFetching,
    StopFetching,
    TruncateLog,
)
from sparklog.replica.events import LeaderAnswered
from sparklog.replica.view import PartitionView

#: ``LeaderAnswered.last_epoch`` of a performer that does not tell it
NOT_TOLD = -2


class Follower:
    """Mutable, owned by one ``Replica``. ``leader`` is NO_LEADER while the partition has none."""

    name = "follower"

    __slots__ = ("_append_to", "_parted", "_truncating", "epoch", "leader", "refuses", "view")

    def __init__(self, view: PartitionView, state: LeaderAndIsr) -> None:
        self.view = view
        self.leader = state.leader
        self.epoch = state.leader_epoch
        #: the leader's high watermark that came with batches now being appended, else None
        self._append_to: int | None = None
        self._truncating = False
        #: a cut that this leader's history asked for has failed, and was not made since
        self._parted = False
        #: this leader lacks committed records that are here
        self.refuses = False

    def start(self) -> Effect:
        return StopFetching() if self.leader == NO_LEADER else StartFetching(self.leader, self.epoch)

    def answered(self, event: LeaderAnswered) -> list[Effect]:
        log = self.view.log
        if (
            event.leader_epoch != self.epoch
            or self.leader == NO_LEADER
            or self._append_to is not None
            or self._truncating
            or event.fetch_offset != log.log_end_offset
            or event.last_epoch not in (log.last_epoch, NOT_TOLD)
        ):
            return []
        if event.code == ErrorCode.OFFSET_OUT_OF_RANGE:
            return self._restart(event.log_start_offset, event)
        if event.code != ErrorCode.NONE:
            return []
        if event.diverging is not None:
            return self._truncate(event.diverging, event)
        if self.refuses:  # the histories agree by now
            self.refuses = False
            return [CutAccepted(), *self.answered(event)]
        if self._parted:
            # It had another history up to our end. By now its log begins there, and it has nothing to compare.
            return self._restart(log.log_end_offset, event)
        if event.batch_count:
            self._append_to = event.high_watermark
            return [AppendAsFollower()]
        return self._raise_to(event.high_watermark)

    def appended(self) -> list[Effect]:
        mark, self._append_to = self._append_to, None
        return [] if mark is None else self._raise_to(mark)

    def truncated(self) -> None:
        """The ordered truncation is done; ``Replica`` fits the high watermark to the log."""
        self._truncating = self._parted = False

    def truncation_failed(self) -> list[Effect]:
        """The log is as it was, and so is this leader's answer, unless its log start has moved meanwhile: from our end
        on there is nothing to cut any more, and the log begins anew."""
        self._truncating, self._parted = False, True
        return [self.start()]

    def _truncate(self, diverging: tuple[int, int], event: LeaderAnswered) -> list[Effect]:
        """Cut where the histories part: at the leader's end of ``epoch`` or at our own end of the largest epoch up to
        it, whichever comes first. What remains ends in an epoch the next fetch names, so this converges. That may lie
        below the log start, which is no batch's end: what is left up to there would diverge again, for ever.

        A leader that has no epoch up to ours leaves nothing to keep: it begins with a later one than any here, and has
        let go of what lay below. A cut to where it begins would spare no copying.

        Records of the present epoch are its leader's own, which it cannot disown: such an answer is an old one."""
        epoch, end_offset = diverging
        log = self.view.log
        if log.last_epoch == self.epoch:
            return []
        first, ours = log.first_segment_offset, log.end_of_epoch(epoch)
        offset = max(first, min(end_offset, first if ours.epoch == NO_EPOCH else ours.end_offset))
        if offset >= log.log_end_offset:
            return []
        return self._cut(offset, TruncateLog(offset), event)

    def _restart(self, offset: int, event: LeaderAnswered) -> list[Effect]:
        return self._cut(offset, RestartLog(offset), event)

    def _loses_committed(self, offset: int, event: LeaderAnswered) -> bool:
        """Whether a cut to ``offset`` takes committed records that no leader since has let go of."""
        view, log = self.view, self.view.log
        lossy = UNKNOWN_LOSS if view.state is None else view.state.lossy_epoch
        if event.outdated or lossy == UNKNOWN_LOSS or log.last_epoch == NO_EPOCH or log.last_epoch < lossy:
            return False
        return max(offset, event.log_start_offset) < view.high_watermark

    def _cut(self, offset: int, order: Effect, event: LeaderAnswered) -> list[Effect]:
        """Lower the high watermark first, where it must be lowered (after an unclean election): no reader may be
        shown what is about to go. Not below the log start: nobody reads there, and the cut may be forgotten."""
        view = self.view
        if self._loses_committed(offset, event):
            if self.refuses:
                return []
            self.refuses = True
            return [RefuseCut(self.leader, self.epoch, offset, view.high_watermark)]
        self._truncating = True
        accepted: list[Effect] = [CutAccepted()] if self.refuses else []
        self.refuses = False
        return [*accepted, *self._set_mark(max(view.log.log_start_offset, min(view.high_watermark, offset))), order]

    def _raise_to(self, leader_mark: int) -> list[Effect]:
        """A new leader's mark may lag behind ours; what was committed stays committed."""
        view = self.view
        end = view.log.log_end_offset
        mark = leader_mark if leader_mark < end else end
        if mark <= view.high_watermark:
            return []
        view.high_watermark = mark
        return [HighWatermarkMoved(mark)]

    def _set_mark(self, mark: int) -> list[Effect]:
        if mark == self.view.high_watermark:
            return []
        self.view.high_watermark = mark
        return [HighWatermarkMoved(mark)]
