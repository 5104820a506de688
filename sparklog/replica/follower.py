"""The follower role of a replica: it makes its log equal to the leader's, batch by batch.

A ``FollowerRole`` exists for one leader epoch; ``replica.py`` creates and drops it. Its rules prevent a loss of
records:

- Never truncate to the high watermark, because records above it may be committed. The leader compares histories by
  epoch and returns the divergence point. Only records after that point are removed. Source: KIP-101, KIP-279.
- Truncate before raising the high watermark: a response with a divergence does not raise it.
- The high watermark never exceeds the end of this replica's own log.
- Never truncate committed records, except those below the leader's log start. A record counts as committed here if it
  is below this replica's own high watermark, and if no election since its epoch could lose records. A leader that lacks
  committed records has lost its log, or has an old copy of it. The follower then refuses to truncate, and the
  controller decides which copy of the log is right.
- A response counts only if its request had this epoch and the log's current end offset and last epoch. Other responses
  are outdated. The simulator showed that the check of the last epoch is necessary: a log was truncated and grew to the
  same end again with committed records, and then the old response was delivered a second time and truncated the log
  again.
"""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, UNKNOWN_LOSS, LeaderAndIsr
from sparklog.replica.effects import (
    AppendAsFollower,
    Effect,
    HighWatermarkMoved,
    RefuseTruncation,
    RestartLog,
    StartFetching,
    StopFetching,
    TruncateLog,
    TruncationAccepted,
)
from sparklog.replica.events import LeaderResponded
from sparklog.replica.view import PartitionView

#: The ``LeaderResponded.last_epoch`` that a caller passes if it does not know the epoch.
UNKNOWN_LAST_EPOCH = -2


class FollowerRole:
    """The follower role of a replica in one leader epoch.

    A part of ``Replica``; mutable. ``leader`` is NO_LEADER while the partition has no leader.
    """

    name = "follower"

    __slots__ = ("_append_to", "_must_truncate", "_truncating", "epoch", "leader", "refuses", "view")

    def __init__(self, view: PartitionView, state: LeaderAndIsr) -> None:
        self.view = view
        self.leader = state.leader
        self.epoch = state.leader_epoch
        #: The leader's high watermark from the response whose batches are being appended; None if no append is in
        #: progress.
        self._append_to: int | None = None
        self._truncating = False
        #: Whether a truncation that this leader's history requires has failed and has not been done since.
        self._must_truncate = False
        #: Whether this replica refuses to truncate, because this leader lacks committed records that this log holds.
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
        if self.refuses:  # The histories agree now.
            self.refuses = False
            return [TruncationAccepted(), *self.on_response(event)]
        if self._must_truncate:
            # The histories differed below this log's end. The leader's log now begins at that end, so it can no longer
            # compare them.
            return self._restart(log.log_end_offset, event)
        if event.batch_count:
            self._append_to = event.high_watermark
            return [AppendAsFollower()]
        return self._raise_to(event.high_watermark)

    def appended(self) -> list[Effect]:
        mark, self._append_to = self._append_to, None
        return [] if mark is None else self._raise_to(mark)

    def truncated(self) -> None:
        """Record that the log was truncated. ``Replica`` adjusts the high watermark."""
        self._truncating = self._must_truncate = False

    def truncation_failed(self) -> list[Effect]:
        """Fetch again after a failed truncation.

        The log is unchanged, so the leader's next response will be the same, unless its log start has moved. If the
        leader's log start has reached this log's end, no truncation is necessary, and this log restarts there.
        """
        self._truncating, self._must_truncate = False, True
        return [self.start()]

    def _truncate(self, diverging: tuple[int, int], event: LeaderResponded) -> list[Effect]:
        """Truncate to the divergence point.

        ``diverging`` has the leader's largest epoch up to this log's last epoch, and the end offset of that epoch. The
        divergence point is that offset or the end of this log's largest epoch up to that epoch, whichever is lower.

        The next fetch has the last epoch that then remains, so repeated truncations reach a common history. The offset
        may be below the log start, because the log start may lie inside a batch. If that batch remained, the histories
        would diverge forever.

        If the leader has no epoch up to this log's last one, this log is emptied. The leader's log then begins with a
        later epoch, so none of this log's records is of use.

        If this log already has records of the current epoch, its history agrees with that of the leader they came from.
        The response is then outdated and ignored.
        """
        epoch, end_offset = diverging
        log = self.view.log
        if log.last_epoch == self.epoch:
            return []
        first, ours = log.first_segment_offset, log.end_of_epoch(epoch)
        offset = max(first, min(end_offset, first if ours.epoch == NO_EPOCH else ours.end_offset))
        if offset >= log.log_end_offset:
            return []
        return self._truncate_unless_committed(offset, TruncateLog(offset), event)

    def _restart(self, offset: int, event: LeaderResponded) -> list[Effect]:
        return self._truncate_unless_committed(offset, RestartLog(offset), event)

    def _loses_committed(self, offset: int, event: LeaderResponded) -> bool:
        """Return whether a truncation to ``offset`` would remove committed records.

        Records below the leader's log start, and of epochs before the last lossy election, do not count.
        """
        view, log = self.view, self.view.log
        lossy = UNKNOWN_LOSS if view.state is None else view.state.lossy_epoch
        if event.outdated or lossy == UNKNOWN_LOSS or log.last_epoch == NO_EPOCH or log.last_epoch < lossy:
            return False
        return max(offset, event.log_start_offset) < view.high_watermark

    def _truncate_unless_committed(self, offset: int, order: Effect, event: LeaderResponded) -> list[Effect]:
        """Truncate the log by the effect ``order``. Refuse to do so if committed records would be removed.

        Before the truncation, lower the high watermark if it is above ``offset`` (after an unclean election). Readers
        must not see records that are about to be removed. The high watermark does not go below the log start, because
        no reader reads there and the truncation may be cancelled.
        """
        view = self.view
        if self._loses_committed(offset, event):
            if self.refuses:
                return []
            self.refuses = True
            return [RefuseTruncation(self.leader, self.epoch, offset, view.high_watermark)]
        self._truncating = True
        accepted: list[Effect] = [TruncationAccepted()] if self.refuses else []
        self.refuses = False
        return [*accepted, *self._set_mark(max(view.log.log_start_offset, min(view.high_watermark, offset))), order]

    def _raise_to(self, leader_mark: int) -> list[Effect]:
        """Raise the high watermark to that of the leader.

        If the high watermark of a new leader is lower, keep this one, because committed records stay committed.
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
