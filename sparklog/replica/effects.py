"""What a replica orders: carried out by the broker process (or the simulator) in the order given.

Each docstring says what must be true before, and which event brings back the result.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import UNKNOWN_LOSS


class AppendAsLeader(msgspec.Struct, frozen=True, gc=False):
    """Append the batches waiting under ``ticket`` with this leader epoch. At once: nothing may come between.
    Then LeaderAppended or LeaderAppendFailed."""

    ticket: int
    leader_epoch: int


class AnswerProduce(msgspec.Struct, frozen=True, gc=False):
    """Answer the produce under ``ticket``: an error, or success with its base offset. Only committed records are
    answered for acks=all. Every ticket is answered exactly once; for acks=0 the performer only drops the ticket."""

    ticket: int
    code: ErrorCode
    base_offset: int
    detail: str = ""


class AppendAsFollower(msgspec.Struct, frozen=True, gc=False):
    """Append the batches of the answer that caused this. Then FollowerAppended."""


class TruncateLog(msgspec.Struct, frozen=True, gc=False):
    """Cut the log so that it ends at ``offset`` (or before, at a batch boundary). Then Truncated; the next fetch
    starts at the new end.

    It may be carried out later: the log stays as it is until then, and no answer of the leader counts. With the next
    RoleChanged it is forgotten, as if the answer that led to it had not come. So it is where it cannot be done: then
    TruncationFailed, after a pause, for the leader is asked again with that."""

    offset: int


class RestartLog(msgspec.Struct, frozen=True, gc=False):
    """Throw the log away and start empty at ``offset`` (the leader's log start; the follower was out of range).
    Then Truncated; the next fetch starts there."""

    offset: int


class RefuseCut(msgspec.Struct, frozen=True, gc=False):
    """Tell the controller that the leader of ``leader_epoch`` lacks committed records from ``offset`` on, which this
    replica holds and does not cut. The replica goes on to fetch after a pause, and each fetch says that it refuses
    (``Replica.refuses_cut``). The refusal stands until the role changes or the leader answers without a divergence."""

    leader: int
    leader_epoch: int
    offset: int
    high_watermark: int


class CutAccepted(msgspec.Struct, frozen=True, gc=False):
    """Withdraw RefuseCut: what the leader lacked is there by now, or another leads."""


class WriteIsr(msgspec.Struct, frozen=True, gc=False):
    """Compare-and-set the partition's node from ``expected_version`` to ``isr`` under this leader and epoch, in a
    multi that checks each (broker, incarnation) of ``added``. Then IsrWritten, IsrRefused or IsrWriteFailed."""

    leader: int
    leader_epoch: int
    controller_epoch: int
    isr: tuple[int, ...]
    expected_version: int
    added: tuple[tuple[int, int], ...]
    lossy_epoch: int = UNKNOWN_LOSS


class HighWatermarkMoved(msgspec.Struct, frozen=True, gc=False):
    """The high watermark is now ``high_watermark``: wake waiting fetches, checkpoint at leisure, seal when due."""

    high_watermark: int


class LogEndMoved(msgspec.Struct, frozen=True, gc=False):
    """The leader's log grew: wake followers that wait for records."""

    log_end_offset: int


class ServeFetch(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch from ``offset`` on with what is there (it may wait for more)."""

    offset: int


class RefuseFetch(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch with an error."""

    code: ErrorCode
    detail: str


class AnswerDiverging(msgspec.Struct, frozen=True, gc=False):
    """Answer the follower's fetch with the point of divergence; no records."""

    epoch: int
    end_offset: int


class StartFetching(msgspec.Struct, frozen=True, gc=False):
    """Fetch from ``leader`` under ``leader_epoch``, from the log's current end on, until told otherwise. Replaces
    any earlier StartFetching of this partition."""

    leader: int
    leader_epoch: int


class StopFetching(msgspec.Struct, frozen=True, gc=False):
    """No further fetches for this partition; an answer under way will be ignored by its epoch."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """For logs, counters and waiting requests: consumers that wait here must be answered and ask for metadata."""

    role: str
    leader_epoch: int


class IsrChanged(msgspec.Struct, frozen=True, gc=False):
    """The committed ISR changed by this leader's own write: tell the controller (a notification node)."""

    isr: tuple[int, ...]


class ReportBadDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision contradicts itself and was not followed: count it, log it, tell whoever sent it."""

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
