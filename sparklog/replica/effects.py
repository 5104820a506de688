"""What a replica orders: carried out by the broker process (or the simulator) in the order given.

Each docstring says what must be true before, and which event brings back the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class AppendAsLeader:
    """Append the batches waiting under ``ticket`` with this leader epoch. At once: nothing may come between.
    Then LeaderAppended or LeaderAppendFailed."""

    ticket: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class AnswerProduce:
    """Answer the produce under ``ticket``: an error, or success with its base offset. Only committed records are
    answered for acks=all."""

    ticket: int
    code: ErrorCode
    base_offset: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AppendAsFollower:
    """Append the batches of the answer that caused this. Then FollowerAppended."""


@dataclass(frozen=True, slots=True)
class TruncateLog:
    """Cut the log so that it ends at ``offset`` (or before, at a batch boundary). Then Truncated."""

    offset: int


@dataclass(frozen=True, slots=True)
class RestartLog:
    """Throw the log away and start empty at ``offset`` (the leader's log start; the follower was out of range).
    Then Truncated."""

    offset: int


@dataclass(frozen=True, slots=True)
class WriteIsr:
    """Compare-and-set the partition's node from ``expected_version`` to ``isr`` under this leader and epoch, in a
    multi that checks each (broker, incarnation) of ``added``. Then IsrWritten, IsrRefused or IsrWriteFailed."""

    leader: int
    leader_epoch: int
    controller_epoch: int
    isr: tuple[int, ...]
    expected_version: int
    added: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class HighWatermarkMoved:
    """The high watermark is now ``high_watermark``: wake waiting fetches, checkpoint at leisure, seal when due."""

    high_watermark: int


@dataclass(frozen=True, slots=True)
class LogEndMoved:
    """The leader's log grew: wake followers that wait for records."""

    log_end_offset: int


@dataclass(frozen=True, slots=True)
class ServeFetch:
    """Answer the follower's fetch from ``offset`` on with what is there (it may wait for more)."""

    offset: int


@dataclass(frozen=True, slots=True)
class RefuseFetch:
    """Answer the follower's fetch with an error."""

    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class AnswerDiverging:
    """Answer the follower's fetch with the point of divergence; no records."""

    epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class StartFetching:
    """Fetch from ``leader`` under ``leader_epoch``, from the log's current end on, until told otherwise. Replaces
    any earlier StartFetching of this partition."""

    leader: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class StopFetching:
    """No further fetches for this partition; an answer under way will be ignored by its epoch."""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """For logs, counters and waiting requests: consumers that wait here must be answered and ask for metadata."""

    role: str
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class IsrChanged:
    """The committed ISR changed by this leader's own write: tell the controller (a notification node)."""

    isr: tuple[int, ...]


Effect = (
    AppendAsLeader
    | AnswerProduce
    | AppendAsFollower
    | TruncateLog
    | RestartLog
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
)
