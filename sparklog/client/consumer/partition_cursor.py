"""A reader's position in one partition: its progress, its place in the log's history, and its failures. Pure.

The consumer's fetches, bounded reads and reads of local files move cursors by the same rules.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.client.consumer.fetched_batches import PartitionBytes
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition


class LogPosition(NamedTuple):
    """A position in a log, with what is known about the record before it."""

    offset: int
    #: The leader epoch of the record before the offset; -1: not known, so no truncation can be detected.
    last_epoch: int = NO_EPOCH
    #: True if ``last_epoch`` only means that the log reached the offset in this epoch. The record before the offset may
    #: be of an older epoch: a leader that appended nothing left no trace in the log.
    epoch_is_bound: bool = False


class PartitionCursor:
    """The state of one partition that is read: its position, and the time from which it may be fetched."""

    __slots__ = (
        "epoch_is_bound",
        "failing_since",
        "failures",
        "last_epoch",
        "position",
        "problem",
        "retry_at",
        "to_verify",
        "topic_id",
        "tp",
        "waiting_since",
    )

    def __init__(self, tp: TopicPartition, topic_id: str, position: int, *, last_epoch: int = NO_EPOCH) -> None:
        """Create the cursor. ``last_epoch``: an epoch in which the log reached ``position``; -1: not known."""
        self.tp = tp
        self.topic_id = topic_id
        #: This and the next two are the parts of a ``LogPosition``.
        self.position = position
        self.last_epoch = last_epoch
        self.epoch_is_bound = last_epoch != NO_EPOCH
        self.failures = 0
        self.failing_since = 0.0
        self.retry_at = 0.0
        #: The time of the first response without batches since the last one with batches; None: there was none.
        self.waiting_since: float | None = None
        #: The reason why the last fetch returned no batches.
        self.problem = "no response"
        #: The offsets of a response from a damaged batch on, if only some columns of the batch were fetched. For
        #: fetches from this range the broker is asked to verify what is on its disk.
        self.to_verify = range(0)

    @property
    def log_position(self) -> LogPosition:
        return LogPosition(self.position, self.last_epoch, self.epoch_is_bound)

    def move(self, position: int, last_epoch: int = NO_EPOCH, epoch_is_bound: bool = False) -> None:
        """Set the offset of the next fetch, and what is known about the record before it."""
        self.position, self.last_epoch, self.epoch_is_bound = position, last_epoch, epoch_is_bound

    def move_past(self, part: PartitionBytes) -> CompletedFetch:
        """Move past the batches of ``part``, which has at least one."""
        start = self.log_position
        self.move(part.next_offset, part.headers[-1].leader_epoch)
        self.waiting_since = None
        return CompletedFetch(self, start, part)

    def on_diverging(self, diverging: tuple[int, int]) -> None:
        """Handle the leader epoch and end offset at which the log has left the history that was read.

        If only a bound of the epoch was known, and the log still reaches the position, take the leader's epoch instead.

        Raises:
            LogTruncated: records before the position are no longer in the log.
        """
        epoch, end_offset = diverging
        if not self.epoch_is_bound or end_offset < self.position:
            raise LogTruncated(self.tp, self.position, diverging)
        self.last_epoch, self.epoch_is_bound = epoch, False

    def request_verification(self, error: Exception, end: int) -> bool:
        """Request verification from the position to ``end`` if ``error`` means damage that was not verified.

        Return whether it does. Only the broker can tell damage on its disk from damage on the way.
        """
        damaged = isinstance(error, BrokerError) and error.code == ErrorCode.CORRUPT_MESSAGE
        if not damaged or self.position in self.to_verify:
            return False
        self.to_verify = range(self.position, end)
        return True

    # --- responses without batches ---

    def end_failures(self, retry_at: float = 0.0) -> None:
        """End a series of failures, and allow the next fetch from ``retry_at`` on."""
        self.failures, self.retry_at = 0, retry_at

    def on_empty(self, problem: str, now: float) -> float:
        """Note a response without batches. Return the time since the first one after the last batches, in s."""
        self.problem = problem
        if self.waiting_since is None:
            self.waiting_since = now
        return now - self.waiting_since

    def failing_s(self, now: float) -> float:
        """Return the time since the first of a series of failures; 0 if the last fetch did not fail."""
        return now - self.failing_since if self.failures else 0.0

    def on_error(self, error: BrokerError, now: float, *, pause_ms: float, timeout_s: float, grace_s: float) -> None:
        """Count a failure, and allow the next fetch after ``pause_ms``.

        An unknown topic may mean for ``grace_s`` that the broker does not know the topic yet.

        Raises:
            BrokerError: a retry does not fix ``error``.
            ClientTimeout: all fetches have failed for more than ``timeout_s``.
        """
        if not self.failures:
            self.failing_since = now
        since = now - self.failing_since
        unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and since > min(grace_s, timeout_s)
        if isinstance(error, LogTruncated):
            raise error
        if not error.retriable or unknown:
            raise BrokerError(error.code, f"{self.tp} at offset {self.position}: {error.detail}")
        if since > timeout_s:
            raise ClientTimeout(
                f"reading {self.tp} at offset {self.position}: not possible for {timeout_s:g} s, last: {error}"
            ) from error
        self.problem = str(error)
        self.retry_at = now + pause_ms / 1000
        self.failures += 1


class CompletedFetch(NamedTuple):
    """Batches of one partition that are not decoded yet. The cursor has moved past them."""

    cursor: PartitionCursor
    #: The position that was requested.
    start: LogPosition
    part: PartitionBytes
