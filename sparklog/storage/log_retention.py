"""The deletion of whole segments at the start of a log, by retention or because a client deletes records.

The segments leave the log at once. Their files are deleted after a checkpoint has the new log start offset.
"""

from __future__ import annotations

from sparklog.storage import retention
from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.log_tail import LogTail
from sparklog.storage.segment import Segment

#: The time without batches after which a compacted log counts as idle.
_QUIET_US = 500_000


class LogRetention:
    """The part of a ``Log`` that deletes old segments at its start.

    The methods raise StorageError if the log directory must go offline.
    """

    __slots__ = ("_cleaning", "_durability", "_files", "_offsets", "_tail")

    def __init__(
        self, files: LogFiles, offsets: LogOffsets, tail: LogTail, durability: LogDurability, cleaning: LogCleaning
    ) -> None:
        self._files = files
        self._offsets = offsets
        self._tail = tail
        self._durability = durability
        self._cleaning = cleaning

    def advance_start(self, offset: int) -> int:
        """Raise the log start offset to ``offset``, but not above the high watermark. Return the log start offset.

        The log start offset stays unchanged while the disk has no room to record the deletion. The segments that end at
        or below the new log start offset leave the log at once. ``delete_retired`` deletes their files after a
        checkpoint has the new offset. If the files were deleted before that, a start could find only some of the files
        and report a damaged log.
        """
        files, offsets, tail = self._files, self._offsets, self._tail
        files.check_open()
        start = min(offset, offsets.high_watermark)
        if start <= offsets.log_start:
            return offsets.log_start
        leaving = [segment for segment in files.chain.segments[:-1] if segment.end_offset <= start]
        if leaving and not tail.bridge(leaving):
            return offsets.log_start
        if leaving:
            with files.offline_on_error("stopping the cleaner of"):
                self._cleaning.stop()
        offsets.start_raised(start)
        if leaving:
            self._durability.cancel_flush()
        files.chain.retire_below(start)
        if files.chain.has_retired:
            files.services.retired.add(files.tp)
        tail.start_raised(start)
        return start

    @property
    def has_retired(self) -> bool:
        """Return whether there are retired segments: they have left the log, but their files are not deleted yet."""
        return self._files.chain.has_retired

    def delete_retired(self, durable_start: int) -> None:
        """Delete the files of the retired segments that end at or below ``durable_start``.

        Retired segments have left the log. ``durable_start`` is the log start offset in the durable checkpoint.
        """
        files = self._files
        with files.offline_on_error("deleting segments"):
            if files.chain.is_deletable(durable_start):
                self._durability.cancel_flush()
            files.services.remove_later(files.chain.delete_retired(durable_start))

    def due_us(self) -> int | None:
        """Return the next time at which ``roll_due`` may return True or ``apply`` may delete a segment.

        The time is in microseconds since the epoch. None means never. Before this time the log need not be checked,
        unless records are appended, a segment is sealed or the settings change.
        """
        chain, config = self._files.chain, self._files.config
        due_us = self._roll_due_us()
        sealed = min(chain.sealed_prefix, len(chain.segments) - 1)
        if sealed > 0 and "delete" in config.cleanup_policy and not config.restoring:
            deletable_us = retention.due_us(
                _to_retention(chain.segments[0]),
                log_size_bytes=chain.size_bytes if config.retention_bytes >= 0 else 0,
                retention_ms=config.retention_ms,
                retention_bytes=config.retention_bytes,
            )
            due_us = _earlier(due_us, deletable_us)
        return due_us

    def _roll_due_us(self) -> int | None:
        """Return when the active segment will be old enough to be rolled, or None if not before the next write."""
        chain, config = self._files.chain, self._files.config
        last = chain.last
        if last is None or config.restoring or (last.count == 1 and last.begins_with_marker):
            return None
        due_us = None
        if "delete" in config.cleanup_policy and config.retention_ms >= 0:
            # Segments are deleted in order. So roll only if all are old: otherwise the log would roll again and again.
            due_us = max(segment.running_max for segment in chain.segments) + config.retention_ms * 1000 + 1
        if config.compacted:
            lag_us = last.first_append_us + config.max_compaction_lag_ms * 1000 + 1
            due_us = _earlier(due_us, max(lag_us, last.last_append_us + _QUIET_US))
        return due_us

    def roll_due(self, now_us: int) -> bool:
        """Return whether the leader should begin a new segment although no client has written.

        Retention and compaction skip the active segment, so the segment must roll before its records can be deleted.
        The segment must be committed and have no open transactions. Then it should roll in two cases:

        - the whole log is older than ``retention.ms``;
        - the log is compacted, a record of the segment is older than ``max.compaction.lag.ms``, and no batch has
          arrived for half a second (``_QUIET_US``).

        The leader begins the new segment with a marker, which takes an offset. While batches arrive, the next batch
        begins the new segment, so no marker is necessary. A segment with only that marker does not roll. This method
        reads no file. Source: Kafka's ``UnifiedLog.deleteSegments``, KIP-354.
        """
        due_us = self._roll_due_us()
        if due_us is None or due_us > now_us:
            return False
        return self._tail.last_stable_offset(self._offsets.high_watermark) == self._offsets.log_end

    def apply(self, now_us: int, *, read_to: int | None = None) -> int:
        """Delete the sealed segments that ``retention.ms`` and ``retention.bytes`` allow, and return their number.

        Retention may have to wait for consumer groups. ``read_to`` is the offset up to which all these groups have
        read. None means that there are no such groups.
        """
        chain, config = self._files.chain, self._files.config
        if "delete" not in config.cleanup_policy or config.restoring:
            return 0
        sealed = [_to_retention(segment) for segment in chain.segments[:-1][: chain.sealed_prefix]]
        count = retention.deletable(
            sealed,
            log_size_bytes=chain.size_bytes,
            now_us=now_us,
            retention_ms=config.retention_ms,
            retention_bytes=config.retention_bytes,
            read_to=read_to,
            retention_hard_ms=config.retention_hard_ms,
        )
        if not count:
            return 0
        start = chain.segments[count].base_offset
        return count if self.advance_start(start) >= start else 0


def _to_retention(segment: Segment) -> retention.SealedSegment:
    return retention.SealedSegment(segment.size_bytes, segment.running_max, segment.end_offset)


def _earlier(one_us: int | None, other_us: int | None) -> int | None:
    if one_us is None or other_us is None:
        return other_us if one_us is None else one_us
    return min(one_us, other_us)
