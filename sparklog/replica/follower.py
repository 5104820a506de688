"""The follower role of a replica: it makes its log equal to the leader's, batch by batch.

A ``FollowerRole`` lives for one leader epoch; ``replica.py`` makes and drops it. Its rules, each with the loss that the
rule prevents:

- Never truncate to the high watermark: records above it may be committed. The leader compares histories by epoch and
  names the divergence point. Only records after that point are removed. Source: KIP-101, KIP-279.
- Truncate before raising the high watermark: a response with a divergence raises nothing.
- The high watermark never exceeds the log's own end.
- Never truncate below the own high watermark records of the epochs since the last lossy election, unless the leader's
  log start is above them. These records are committed. A leader that lacks them has lost its log, or has an old copy of
  it. The follower refuses, and the controller decides which copy counts.
- A response counts only if it is for this epoch and for the current log, by its end and last epoch. Others are
  outdated. (The simulator showed that the last epoch is necessary. A response that was delivered twice truncated the
  log at its old divergence, after the log had grown to the same end again with committed records.)
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
from sparklog.replica.events import LeaderResponded
from sparklog.replica.view import PartitionView

#: ``LeaderResponded.last_epoch`` of a caller that does not know it.
UNKNOWN_LAST_EPOCH = -2


class FollowerRole:
    """The follower role of one epoch.

    Mutable; one ``Replica`` owns it. ``leader`` is NO_LEADER while the partition has none.
    """

    name = "follower"

    __slots__ = ("_append_to", "_must_truncate", "_truncating", "epoch", "leader", "refuses", "view")

    def __init__(self, view: PartitionView, state: LeaderAndIsr) -> None:
        self.view = view
        self.leader = state.leader
        self.epoch = state.leader_epoch
        #: The leader's high watermark of the batches that are being appended, or None.
        self._append_to: int | None = None
        self._truncating = False
        #: A truncation that this leader's history requires has failed and was not repeated.
        self._must_truncate = False
        #: This leader lacks committed records that this log holds.
        self.refuses = False

    def start(self) -> Effect:
        return StopFetching() if self.leader == NO_LEADER else StartFetching(self.leader, self.epoch)

    def on_response(self, event: LeaderResponded) -> list[Effect]:
        log = self.view.log
        if (
            event.leader_epoch != self.epoch
            or self.leader == NO_LEADER
            or self._append_to is not None
            or self._truncating
            or event.fetch_offset != log.log_end_offset
            or event.last_epoch not in (log.last_epoch, UNKNOWN_LAST_EPOCH)
        ):
            return []
        if event.code == ErrorCode.OFFSET_OUT_OF_RANGE:
            return self._restart(event.log_start_offset, event)
        if event.code != ErrorCode.NONE:
            return []
        if event.diverging is not None:
            return self._truncate(event.diverging, event)
        if self.refuses:  # the histories now agree
            self.refuses = False
            return [CutAccepted(), *self.on_response(event)]
        if self._must_truncate:
            # The leader had another history up to this log's end. Its log now begins there, so it has nothing to
            # compare.
            return self._restart(log.log_end_offset, event)
        if event.batch_count:
            self._append_to = event.high_watermark
            return [AppendAsFollower()]
        return self._raise_to(event.high_watermark)

    def appended(self) -> list[Effect]:
        mark, self._append_to = self._append_to, None
        return [] if mark is None else self._raise_to(mark)

    def truncated(self) -> None:
        """Note that the ordered truncation is done. ``Replica`` adjusts the high watermark."""
        self._truncating = self._must_truncate = False

    def truncation_failed(self) -> list[Effect]:
        """Fetch again after a failed truncation.

        The log is unchanged, so the leader's next response will be the same, unless its log start has moved. If that
        has reached this log's end, there is nothing to truncate, and the log restarts there.
        """
        self._truncating, self._must_truncate = False, True
        return [self.start()]

    def _truncate(self, diverging: tuple[int, int], event: LeaderResponded) -> list[Effect]:
        """Truncate to the divergence point.

        It is the leader's end of ``epoch``, or this log's end of its largest epoch up to that, whichever is lower.

        The log then ends in an epoch that the next fetch names, so this converges. The offset may be below the log
        start, which is not the end of a batch. If records remained up to the log start, they would diverge again,
        forever.

        If the leader has no epoch up to this log's, nothing is kept: its log begins with a later epoch, and it has
        deleted the records below. Truncating to its start would save no copying.

        The records of the current epoch come from its leader, which cannot disown them. So such a response is outdated.
        """
        epoch, end_offset = diverging
        log = self.view.log
        if log.last_epoch == self.epoch:
            return []
        first, ours = log.first_segment_offset, log.end_of_epoch(epoch)
        offset = max(first, min(end_offset, first if ours.epoch == NO_EPOCH else ours.end_offset))
        if offset >= log.log_end_offset:
            return []
        return self._cut(offset, TruncateLog(offset), event)

    def _restart(self, offset: int, event: LeaderResponded) -> list[Effect]:
        return self._cut(offset, RestartLog(offset), event)

    def _loses_committed(self, offset: int, event: LeaderResponded) -> bool:
        """Return whether a truncation to ``offset`` removes committed records that no later leader has given up."""
        view, log = self.view, self.view.log
        lossy = UNKNOWN_LOSS if view.state is None else view.state.lossy_epoch
        if event.outdated or lossy == UNKNOWN_LOSS or log.last_epoch == NO_EPOCH or log.last_epoch < lossy:
            return False
        return max(offset, event.log_start_offset) < view.high_watermark

    def _cut(self, offset: int, order: Effect, event: LeaderResponded) -> list[Effect]:
        """Lower the high watermark if necessary (after an unclean election), then truncate.

        No reader may see records that are about to be removed. The high watermark does not go below the log start: no
        reader reads there, and the truncation may be withdrawn.
        """
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
        """Raise the high watermark to the leader's.

        A new leader's may be lower, but committed records stay committed.
        """
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
