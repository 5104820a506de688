"""The effects of a replica: orders that the broker process (or the simulator) carries out, in order.

Each docstring says what must be true before, and which event reports the result.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import UNKNOWN_LOSS


class AppendAsLeader(msgspec.Struct, frozen=True, gc=False):
    """Append the batches that wait under ``ticket`` with this leader epoch, at once and before any other event.

    Result: LeaderAppended or LeaderAppendFailed.
    """

    ticket: int
    leader_epoch: int


class AnswerProduce(msgspec.Struct, frozen=True, gc=False):
    """Answer the produce under ``ticket``: with an error, or with success and its base offset.

    For acks=all only committed records are acknowledged. Every ticket is answered exactly once. For acks=0 the caller
    only drops the ticket.
    """

    ticket: int
    code: ErrorCode
    base_offset: int
    detail: str = ""


class AppendAsFollower(msgspec.Struct, frozen=True, gc=False):
    """Append the batches of the response that caused this. Result: FollowerAppended."""


class TruncateLog(msgspec.Struct, frozen=True, gc=False):
    """Truncate the log to ``offset``, or to a batch boundary below it.

    Result: Truncated. The next fetch starts at the new end.

    The caller may carry it out later. Until then the log stays unchanged, and no response of the leader counts. The
    next RoleChanged withdraws the order. If the truncation is impossible, the result is TruncationFailed, after a
    pause, because it sends the next fetch to the leader.
    """

    offset: int


class RestartLog(msgspec.Struct, frozen=True, gc=False):
    """Delete all records and start empty at ``offset``, the leader's log start: the follower was out of range.

    Result: Truncated. The next fetch starts there.
    """

    offset: int


class RefuseCut(msgspec.Struct, frozen=True, gc=False):
    """Report to the controller that this replica refuses to truncate its log, as its leader requires.

    The leader of ``leader_epoch`` lacks committed records from ``offset`` on, which this replica holds. The replica
    continues to fetch after a pause, and each fetch says that it refuses (``Replica.refuses_cut``). The refusal lasts
    until the role changes or the leader responds without a divergence.
    """

    leader: int
    leader_epoch: int
    offset: int
    high_watermark: int


class CutAccepted(msgspec.Struct, frozen=True, gc=False):
    """Withdraw an earlier RefuseCut: the leader now has the records, or another replica leads."""


class WriteIsr(msgspec.Struct, frozen=True, gc=False):
    """Compare-and-set the partition's node from ``expected_version`` to ``isr`` under this leader and epoch.

    The multi also checks each (broker, incarnation) of ``added``. Result: IsrWritten, IsrRefused or IsrWriteFailed.
    """

    leader: int
    leader_epoch: int
    controller_epoch: int
    isr: tuple[int, ...]
    expected_version: int
    added: tuple[tuple[int, int], ...]
    lossy_epoch: int = UNKNOWN_LOSS


class HighWatermarkMoved(msgspec.Struct, frozen=True, gc=False):
    """The high watermark is now ``high_watermark``: wake waiting fetches, checkpoint later, and seal when due."""

    high_watermark: int


class LogEndMoved(msgspec.Struct, frozen=True, gc=False):
    """The leader's log grew: wake the followers that wait for records."""

    log_end_offset: int


class ServeFetch(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch with the records from ``offset`` on. The fetch may wait for more."""

    offset: int


class RefuseFetch(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch with an error."""

    code: ErrorCode
    detail: str


class AnswerDiverging(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch with the divergence point, without records."""

    epoch: int
    end_offset: int


class StartFetching(msgspec.Struct, frozen=True, gc=False):
    """Fetch from ``leader`` under ``leader_epoch``, from the log's current end, until the next order.

    This replaces any earlier StartFetching of this partition.
    """

    leader: int
    leader_epoch: int


class StopFetching(msgspec.Struct, frozen=True, gc=False):
    """Stop fetching for this partition. A response in flight is later ignored because of its epoch."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """The role changed.

    Log and count it, and answer the consumers that wait here, so that they refresh their metadata.
    """

    role: str
    leader_epoch: int


class IsrChanged(msgspec.Struct, frozen=True, gc=False):
    """The committed ISR changed by this leader's own write. Notify the controller (a notification node)."""

    isr: tuple[int, ...]


class ReportBadDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision contradicts itself and was not followed. Count it, log it, and report it to its sender."""

    detail: str


Effect = (
    AppendAsLeader
    | AnswerProduce
    | AppendAsFollower
    | TruncateLog
    | RestartLog
    | RefuseCut
    | CutAccepted
    | WriteIsr
    | HighWatermarkMoved
    | LogEndMoved
    | ServeFetch
    | RefuseFetch
    | AnswerDiverging
    | StartFetching
    | StopFetching
    | RoleChanged
    | IsrChanged
    | ReportBadDecision
)
