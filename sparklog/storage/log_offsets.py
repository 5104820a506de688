"""The offsets of one log: its start and end, and up to which offset it is committed, fsynced, served and claimed.

This module is pure. Served means that a reader may have mapped the files up to this offset. Claimed means that,
according to a checkpoint, the log has all records up to this offset. The parts of the log report what happened, and
only this module changes the offsets. If an offset in the log's checkpoint entry changes, the partition is added to
``LogContext.moved``.

Invariants: log start <= high watermark <= log end; recovery point <= log end.
"""

from __future__ import annotations

from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.log_context import LogContext


class LogOffsets:
    """The offsets of one log, such as its high watermark and recovery point. A part of ``Log``.

    Other objects read the attributes, but only the methods of this class change them.
    """

    __slots__ = (
        "_claimed_end",
        "_services",
        "_topic_id",
        "_tp",
        "high_watermark",
        "log_end",
        "log_start",
        "recovery_point",
        "served_end",
    )

    def __init__(self, tp: TopicPartition, topic_id: str, services: LogContext) -> None:
        self._tp = tp
        self._topic_id = topic_id
        self._services = services
        self.log_start = 0
        self.high_watermark = 0
        #: The next offset to be written.
        self.log_end = 0
        #: The offset below which everything is fsynced.
        self.recovery_point = 0
        #: The offset up to which readers may have mapped the files.
        self.served_end = 0
        #: The greatest offset that any checkpoint, on disk or being written, has for this log.
        self._claimed_end = 0

    def _moved(self) -> None:
        self._services.moved.add(self._tp)

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the log's entry for a checkpoint.

        Remember the offsets of the entry, because the checkpoint will claim that the log has all records below them.
        """
        mark, recovery_point = self.high_watermark, self.recovery_point
        self._claimed_end = max(self._claimed_end, mark, recovery_point)
        topic, partition = self._tp
        return PartitionCheckpoint(topic, partition, self._topic_id, mark, recovery_point, self.log_start)

    # --- facts ----------------------------------------------------------------------------------------------------

    def recovered(self, checkpoint: PartitionCheckpoint, *, first_segment_offset: int, log_end: int) -> None:
        """Set the offsets of a log that recovery found on disk."""
        self.log_end = log_end
        self.log_start = min(max(checkpoint.log_start_offset, first_segment_offset), log_end)
        self._claimed_end = max(checkpoint.high_watermark, checkpoint.recovery_point)
        self.high_watermark = min(max(checkpoint.high_watermark, self.log_start), log_end)
        self.recovery_point = min(checkpoint.recovery_point, log_end)
        # A reader that the earlier process served may still have all of these files mapped.
        self.served_end = log_end
        self._moved()

    def appended(self, base_offset: int, log_end: int) -> None:
        """Record an append of batches from ``base_offset`` to ``log_end``."""
        if self.log_start == self.log_end:
            # An empty follower has received its leader's first segment, which may begin below this log start offset.
            self.log_start = min(self.log_start, base_offset)
            self._moved()
        self.log_end = log_end
        if self.high_watermark > log_end:
            self.high_watermark = log_end
            self._moved()

    def committed(self, high_watermark: int) -> int:
        """Set the high watermark, limited to the range from the log start offset to the log end offset. Return it."""
        if not self.log_start <= high_watermark <= self.log_end:
            high_watermark = min(max(high_watermark, self.log_start), self.log_end)
        self.high_watermark = high_watermark
        self._services.moved.add(self._tp)
        if high_watermark > self.served_end:  # noqa: PLR1730 - hot
            self.served_end = high_watermark
        return high_watermark

    def served(self, end_offset: int) -> None:
        """Record that a reader may have mapped the files up to ``end_offset``."""
        self.served_end = max(self.served_end, end_offset)

    def fsynced(self, end_offset: int) -> None:
        """Record that everything below ``end_offset`` is fsynced."""
        self.recovery_point = max(self.recovery_point, end_offset)
        self._moved()

    def start_raised(self, offset: int) -> None:
        """Set the log start offset to ``offset``, because the records below it are deleted."""
        self.log_start = offset
        self._moved()

    def truncated(self, end_offset: int) -> None:
        """Record that the log now ends at ``end_offset``."""
        self.log_end = end_offset
        self.log_start = min(self.log_start, end_offset)
        self.high_watermark = min(self.high_watermark, end_offset)
        self.served_end = min(self.served_end, end_offset)
        self._moved()

    def restarted(self, offset: int) -> None:
        """Record that the log is empty and begins at ``offset``."""
        self.log_start = self.log_end = self.high_watermark = self.served_end = offset
        self._moved()

    # --- before a truncation --------------------------------------------------------------------------------------

    def lower_claims(self, end_offset: int) -> bool:
        """Limit the offsets for the next checkpoint to at most ``end_offset``, before the log is truncated there.

        Return True if the checkpoint on disk may have an offset above ``end_offset``. Then the caller writes a
        checkpoint and calls ``claims_lowered``. The offsets of earlier checkpoints count too, because the high
        watermark may have been lowered since then.
        """
        if end_offset >= max(self._claimed_end, self.high_watermark, self.recovery_point):
            return False
        self.log_start = min(self.log_start, end_offset)
        self.high_watermark = min(self.high_watermark, end_offset)
        self.recovery_point = min(self.recovery_point, end_offset)
        self._moved()
        return True

    def claims_lowered(self) -> None:
        """Record that the checkpoint on disk has the lowered offsets."""
        self._claimed_end = max(self.high_watermark, self.recovery_point)
