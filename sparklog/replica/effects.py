"""The effects of a replica: commands to the broker process (or the simulator), and reports of changes.

The caller carries out the effects of a step in order. Each docstring names the event that reports the result, and any
precondition.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import UNKNOWN_LOSS


class AppendAsLeader(msgspec.Struct, frozen=True, gc=False):
    """A command to append the batches of a produce with this leader epoch. ``ticket`` identifies the produce.

    The caller carries it out before it passes the next event. Result: LeaderAppended or LeaderAppendFailed.
    """

    ticket: int
    leader_epoch: int


class RespondToProduce(msgspec.Struct, frozen=True, gc=False):
    """A command to respond to a produce: with an error, or with success and the base offset.

    ``ticket`` identifies the produce. With acks=all only committed records are acknowledged. Every ticket gets exactly
    one response. With acks=0 the caller sends nothing and only drops the ticket.
    """

    ticket: int
    code: ErrorCode
    base_offset: int
    detail: str = ""


class AppendAsFollower(msgspec.Struct, frozen=True, gc=False):
    """A command to append the batches of the LeaderResponded that caused this effect. Result: FollowerAppended."""


class TruncateLog(msgspec.Struct, frozen=True, gc=False):
    """A command to truncate the log to ``offset``, or to a batch boundary below it.

    Result: Truncated. The next fetch starts at the new log end.

    The caller may truncate later. Until then the log does not change, and the replica ignores responses of the leader.
    The next RoleChanged cancels the truncation. If the truncation is impossible, the caller pauses and then reports
    TruncationFailed. The pause is needed because the replica fetches again as soon as it gets TruncationFailed.
    """

    offset: int


class RestartLog(msgspec.Struct, frozen=True, gc=False):
    """A command to delete all records and to start an empty log at ``offset``.

    ``offset`` is usually the leader's log start, because the leader no longer has the follower's next offset.

    Result: Truncated. The next fetch starts at ``offset``.
    """

    offset: int


class RefuseTruncation(msgspec.Struct, frozen=True, gc=False):
    """A command to report to the controller that this replica refuses to truncate its log as its leader requires.

    This replica holds committed records from ``offset`` on. The leader of ``leader_epoch`` lacks these records. After a
    pause this replica continues to fetch, and each fetch tells the leader of the refusal
    (``Replica.refuses_truncation``). The refusal lasts until the role changes or the leader responds without a
    divergence.
    """

    leader: int
    leader_epoch: int
    offset: int
    high_watermark: int


class TruncationAccepted(msgspec.Struct, frozen=True, gc=False):
    """A command to withdraw an earlier RefuseTruncation: the logs agree again, or the truncation is now allowed."""


class WriteIsr(msgspec.Struct, frozen=True, gc=False):
    """A command to write ``isr`` to the partition's ZooKeeper node, if the node still has ``expected_version``.

    The node then names this leader and its epoch. The write is a ZooKeeper transaction (multi), which succeeds only if
    each broker in ``added`` still has the incarnation of its (broker, incarnation) pair. Result: IsrWritten, IsrRefused
    or IsrWriteFailed.
    """

    leader: int
    leader_epoch: int
    controller_epoch: int
    isr: tuple[int, ...]
    expected_version: int
    added: tuple[tuple[int, int], ...]
    lossy_epoch: int = UNKNOWN_LOSS


class HighWatermarkMoved(msgspec.Struct, frozen=True, gc=False):
    """The report that the high watermark has changed.

    The caller wakes waiting fetches. Later it writes the high watermark to a checkpoint, and seals segments that are
    complete and committed.
    """

    high_watermark: int


class LogEndMoved(msgspec.Struct, frozen=True, gc=False):
    """The report that the leader's log has grown. The caller wakes the followers that wait for records."""

    log_end_offset: int


class ServeFetch(msgspec.Struct, frozen=True, gc=False):
    """A command to respond to the follower's fetch with the records from ``offset`` on.

    The caller may delay the response until there are more records.
    """

    offset: int


class RefuseFetch(msgspec.Struct, frozen=True, gc=False):
    """A command to respond to the follower's fetch with an error."""

    code: ErrorCode
    detail: str


class AnswerDiverging(msgspec.Struct, frozen=True, gc=False):
    """A command to respond to the follower's fetch with the point where the logs diverge, without records."""

    epoch: int
    end_offset: int


class StartFetching(msgspec.Struct, frozen=True, gc=False):
    """A command to fetch from ``leader`` in ``leader_epoch``, from the end of this replica's log on.

    The command is valid until the next StartFetching or StopFetching, and replaces any earlier StartFetching of this
    partition.
    """

    leader: int
    leader_epoch: int


class StopFetching(msgspec.Struct, frozen=True, gc=False):
    """A command to stop fetching for this partition. The replica ignores a response that is still in flight."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """The report that the role has changed.

    The caller logs and counts the change. It also responds to the consumers that wait at this replica, so that they
    refresh their metadata.
    """

    role: str
    leader_epoch: int


class IsrChanged(msgspec.Struct, frozen=True, gc=False):
    """The report that a write of this leader has changed the committed ISR.

    The caller notifies the controller by a notification node in ZooKeeper.
    """

    isr: tuple[int, ...]


class ReportBadDecision(msgspec.Struct, frozen=True, gc=False):
    """The report that the replica did not follow a decision that contradicts itself or the known state.

    The caller counts and logs the decision. It also reports the contradiction to the sender of the decision.
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
