"""The state of reading one partition: the position, what is known about the log before it, and failures.

This module is pure. The fetches of consumers, bounded reads and reads of local files move cursors by the same rules.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.client.consumer.fetched_batches import PartitionBytes
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition


class LogPosition(NamedTuple):
    """A position in a log, and the leader epoch of the record before it if it is known."""

    offset: int
    #: The leader epoch of the record before the offset. -1: unknown, so a truncation cannot be detected.
    last_epoch: int = NO_EPOCH
    #: True if ``last_epoch`` is only an upper bound: the log ended at or after the offset in this leader epoch. The
    #: record before the offset may be of an older epoch, because a leader may append nothing in its epoch.
    epoch_is_bound: bool = False


class PartitionCursor:
    """The state of one partition that is read: its position, its failures, and when it may be fetched again."""

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
        """Create the cursor.

        ``last_epoch`` is a leader epoch in which the log had reached ``position``, or -1 if unknown.
        """
        self.tp = tp
        self.topic_id = topic_id
        #: This attribute and the next two are the parts of a ``LogPosition``.
        self.position = position
        self.last_epoch = last_epoch
        self.epoch_is_bound = last_epoch != NO_EPOCH
        self.failures = 0
        self.failing_since = 0.0
        self.retry_at = 0.0
        #: The time of the first response without batches since the last response with batches. None: there was no such
        #: response.
        self.waiting_since: float | None = None
        #: The reason why the last fetch returned no batches, as text for error messages.
        self.problem = "no response"
        #: A range of offsets, set after a damaged batch of which only some columns were fetched. The range begins at
        #: this batch and ends at the end of the response. A fetch at an offset in the range asks the broker to verify
        #: the batches on its disk.
        self.to_verify = range(0)

    @property
    def log_position(self) -> LogPosition:
        return LogPosition(self.position, self.last_epoch, self.epoch_is_bound)

    def move(self, position: int, last_epoch: int = NO_EPOCH, epoch_is_bound: bool = False) -> None:
        """Set the position, which is the offset of the next fetch, and the leader epoch of the record before it.

        With ``epoch_is_bound``, the epoch of that record may also be lower than ``last_epoch``.
        """
        self.position, self.last_epoch, self.epoch_is_bound = position, last_epoch, epoch_is_bound

    def move_past(self, part: PartitionBytes) -> CompletedFetch:
        """Move the position past the batches of ``part``, and return the batches with the earlier position.

        ``part`` has at least one batch.
        """
        start = self.log_position
        self.move(part.next_offset, part.headers[-1].leader_epoch)
        self.waiting_since = None
        return CompletedFetch(self, start, part)

    def on_diverging(self, diverging: tuple[int, int]) -> None:
        """Handle the leader's report (leader epoch, end offset) that its log differs from the records that were read.

        If the cursor has only an upper bound of the last epoch, and the leader's log still has all offsets below the
        position, then nothing was truncated. In this case the cursor takes the reported epoch as the last epoch.

        Raises:
            LogTruncated: records before the position are no longer in the log.
        """
        epoch, end_offset = diverging
        if not self.epoch_is_bound or end_offset < self.position:
            raise LogTruncated(self.tp, self.position, diverging)
        self.last_epoch, self.epoch_is_bound = epoch, False

    def request_verification(self, error: Exception, end: int) -> bool:
        """If ``error`` reports a damaged batch, make the next fetches below ``end`` ask the broker to verify its disk.

        Return whether the next fetches will ask. Return False for any other error, or if the broker has already
        verified the batch. Only the broker can distinguish damage on its disk from damage on the network.
        """
        damaged = isinstance(error, BrokerError) and error.code == ErrorCode.CORRUPT_MESSAGE
        if not damaged or self.position in self.to_verify:
            return False
        self.to_verify = range(self.position, end)
        return True

    # --- responses without batches ---

    def end_failures(self, retry_at: float = 0.0) -> None:
        """End a series of failures, and allow the next fetch at the time ``retry_at``."""
        self.failures, self.retry_at = 0, retry_at

    def on_empty(self, problem: str, now: float) -> float:
        """Record a response without batches.

        Return the time since the first of the consecutive responses without batches, in seconds.
        """
        self.problem = problem
        if self.waiting_since is None:
            self.waiting_since = now
        return now - self.waiting_since

    def failing_s(self, now: float) -> float:
        """Return the time since the first failure of the current series, or 0 if the last fetch did not fail."""
        return now - self.failing_since if self.failures else 0.0

    def on_error(self, error: BrokerError, now: float, *, pause_ms: float, timeout_s: float, grace_s: float) -> None:
        """Count a failure, and allow the next fetch after ``pause_ms``.

        An unknown topic is retried for ``grace_s``, because the broker may not know a new topic yet.

        Raises:
            BrokerError: ``error`` is not retriable.
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
    """Fetched batches of one partition that are not decoded yet. The cursor has already moved past them."""

    cursor: PartitionCursor
    #: The position that was requested.
    start: LogPosition
    part: PartitionBytes
