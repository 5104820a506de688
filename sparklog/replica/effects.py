"""The effects of a replica. The broker process (or the simulator) carries them out in order.

Each docstring names the event that reports the result, and any precondition.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import UNKNOWN_LOSS


class AppendAsLeader(msgspec.Struct, frozen=True, gc=False):
    """Append the batches of the produce ``ticket`` with this leader epoch, before the next event is handled.

    Result: LeaderAppended or LeaderAppendFailed.
    """

    ticket: int
    leader_epoch: int


class RespondToProduce(msgspec.Struct, frozen=True, gc=False):
    """Respond to the produce ``ticket``: with an error, or with success and the base offset.

    With acks=all only committed records are acknowledged. Every ticket gets exactly one response. With acks=0 the
    caller sends nothing and only drops the ticket.
    """

    ticket: int
    code: ErrorCode
    base_offset: int
    detail: str = ""


class AppendAsFollower(msgspec.Struct, frozen=True, gc=False):
    """Append the batches of the LeaderResponded that caused this effect. Result: FollowerAppended."""


class TruncateLog(msgspec.Struct, frozen=True, gc=False):
    """Truncate the log to ``offset``, or to a batch boundary below it.

    Result: Truncated. The next fetch starts at the new end.

    The caller may truncate later. Until then the log does not change, and the replica ignores responses of the leader.
    The next RoleChanged cancels the truncation. If the truncation is impossible, the caller pauses and then reports
    TruncationFailed; the pause is needed because the replica then fetches again at once.
    """

    offset: int


class RestartLog(msgspec.Struct, frozen=True, gc=False):
    """Delete all records and start an empty log at ``offset``.

    ``offset`` is usually the leader's log start: the leader no longer has the follower's next offset.

    Result: Truncated. The next fetch starts there.
    """

    offset: int


class RefuseTruncation(msgspec.Struct, frozen=True, gc=False):
    """Report to the controller that this replica refuses to truncate its log as its leader requires.

    This replica holds committed records from ``offset`` on that the leader of ``leader_epoch`` lacks. After a pause it
    continues to fetch, and each fetch says that it refuses (``Replica.refuses_truncation``). The refusal lasts until
    the role changes or the leader responds without a divergence.
    """

    leader: int
    leader_epoch: int
    offset: int
    high_watermark: int


class TruncationAccepted(msgspec.Struct, frozen=True, gc=False):
    """Withdraw an earlier RefuseTruncation: the logs agree again, or the truncation is now allowed."""


class WriteIsr(msgspec.Struct, frozen=True, gc=False):
    """Write ``isr`` to the partition's node, for this leader and epoch, if the node has ``expected_version``.

    The ZooKeeper multi also checks each (broker, incarnation) of ``added``. Result: IsrWritten, IsrRefused or
    IsrWriteFailed.
    """

    leader: int
    leader_epoch: int
    controller_epoch: int
    isr: tuple[int, ...]
    expected_version: int
    added: tuple[tuple[int, int], ...]
    lossy_epoch: int = UNKNOWN_LOSS


class HighWatermarkMoved(msgspec.Struct, frozen=True, gc=False):
    """The high watermark has changed. Wake waiting fetches; later checkpoint it, and seal segments when due."""

    high_watermark: int


class LogEndMoved(msgspec.Struct, frozen=True, gc=False):
    """The leader's log has grown. Wake the followers that wait for records."""

    log_end_offset: int


class ServeFetch(msgspec.Struct, frozen=True, gc=False):
    """Respond to the follower's fetch with the records from ``offset`` on. The response may wait for more records."""

    offset: int


class RefuseFetch(msgspec.Struct, frozen=True, gc=False):
    """Respond to the follower's fetch with an error."""

    code: ErrorCode
    detail: str


class AnswerDiverging(msgspec.Struct, frozen=True, gc=False):
    """Respond to the follower's fetch with the divergence point, without records."""

    epoch: int
    end_offset: int


class StartFetching(msgspec.Struct, frozen=True, gc=False):
    """Fetch from ``leader`` in ``leader_epoch``, from the end of the log, until the next StartFetching or StopFetching.

    It replaces any earlier StartFetching of this partition.
    """

    leader: int
    leader_epoch: int


class StopFetching(msgspec.Struct, frozen=True, gc=False):
    """Stop fetching for this partition. The replica ignores a response that is still in flight."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """The role has changed.

    Log and count the change, and respond to consumers that wait here, so that they refresh their metadata.
    """

    role: str
    leader_epoch: int


class IsrChanged(msgspec.Struct, frozen=True, gc=False):
    """The committed ISR has changed by this leader's own write. Notify the controller with a notification node."""

    isr: tuple[int, ...]


class ReportBadDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision was not followed because it contradicts itself or the known state.

    Count it, log it, and report it to its sender.
    """

    detail: str


Effect = (
    AppendAsLeader
    | RespondToProduce
    | AppendAsFollower
    | TruncateLog
    | RestartLog
    | RefuseTruncation
    | TruncationAccepted
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
