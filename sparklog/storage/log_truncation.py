"""The operations that make a log shorter: truncation at its end, a restart, and deletion at its start.

A truncation removes appends that must not count. First the checkpoint on disk is lowered to what will remain, then the
segments are deleted, newest first, then the derived state. At the start whole segments leave the log at once, and their
files are deleted once the new log start is durable.
"""

from __future__ import annotations

from sparklog.storage import retention
from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_state import LogState
from sparklog.storage.segment import Segment
from sparklog.storage.truncation_job import TruncationJob


class LogTruncation:
    """The truncations of one ``Log``, which owns it and documents the methods.

    The methods raise StorageError if the log directory must go offline.
    """

    __slots__ = ("_cleaning", "_durability", "_job", "_state")

    def __init__(self, state: LogState, durability: LogDurability, cleaning: LogCleaning) -> None:
        self._state = state
        self._durability = durability
        self._cleaning = cleaning
        #: The job of the next truncation.
        self._job: TruncationJob | None = None

    # --- at the end -----------------------------------------------------------------------------------------------

    def begin(self, offset: int) -> TruncationJob | None:
        """Return a job for a thread that prepares ``truncate`` to this offset, or None if there is nothing to copy.

        The log does not change until then. Its high watermark must be at or below ``offset``, or at a log start above
        that, and must stay there.

        Raises:
            StorageError: the log directory must go offline.
        """
        state = self._state
        state.check_open()
        self.cancel()
        if offset >= state.log_end_offset or offset <= state.first_segment_offset:
            return None
        with state.offline_on_error("truncating"):
            end = state.chain.boundary(offset)
            if end > state.first_segment_offset:
                copied = state.chain.copied_by_truncation(end, served_end=state.served_end)
                if copied is not None:
                    self._cleaning.stop()  # the cleaner may have begun when more was committed
                    self._job = TruncationJob(*copied, frees_segments=copied[0] is not state.chain.last)
                    self._cleaning.held = True
        return self._job

    def cancel(self) -> None:
        """Cancel the job: its truncation does not follow, or not in that form."""
        job, self._job = self._job, None
        self._cleaning.held = False
        if job is not None:
            self._state.services.remove_later(job.cancel())

    def truncate(self, offset: int, job: TruncationJob | None = None) -> int:
        state = self._state
        state.check_open()
        try:
            return self._truncate(offset, job if job is self._job else None)
        finally:
            self.cancel()  # drop the unused part of the job

    def _truncate(self, offset: int, job: TruncationJob | None) -> int:
        state = self._state
        if offset >= state.log_end_offset:
            return state.log_end_offset
        with state.offline_on_error("truncating"):
            first = state.first_segment_offset
            end = state.chain.boundary(offset) if offset > first else offset
            if end <= first:
                self.restart_at(end)
                return end
            served_end = state.served_end
            self._prepare_truncation(end)
            # The segment that ends at the new end becomes the last one, and may be appended to.
            state.seals.cancel(segment for segment in state.chain.segments if segment.end_offset >= end)
            state.chain.truncate(end, served_end=served_end, job=job)
            state.segment_was_truncated()
            state.drop_from(end)
            state.producers.count_in(None)
            state.producers = state.load_producers(state.chain.segments)
            state.producers.count_in(state.services.producer_count)
        return end

    def restart_at(self, offset: int) -> None:
        state = self._state
        state.check_open()
        self.cancel()
        with state.offline_on_error("restarting"):
            self._prepare_truncation(0)
            state.seals.cancel(state.chain.segments)
            if state.directory.exists:
                state.chain.clear()
            state.drop_from(-1)
            state.log_start_offset = state.log_end_offset = offset
            state.high_watermark = state.served_end = offset
            state.producers.clear()
            state.tombstone_window.ended()

    def _prepare_truncation(self, end: int) -> None:
        """Lower the checkpoint on disk to what a truncation to ``end`` leaves.

        Appends above ``end`` are not fsynced, whatever the checkpoint says of the old batches there. A log shorter than
        its checkpoint counts as damaged. And the next open removes segments below the checkpoint's log start. This uses
        what the checkpoint claims, not the current state, because the caller lowers the high watermark before the
        truncation.
        """
        state = self._state
        if state.directory.exists:
            self._cleaning.before_truncation(end)
        self._durability.cancel_flush()
        if end < max(state.claimed_end, state.high_watermark, state.recovery_point):
            state.log_start_offset = min(state.log_start_offset, end)
            state.high_watermark = min(state.high_watermark, end)
            state.recovery_point = min(state.recovery_point, end)
            state.services.checkpoint_now()
            state.claimed_end = max(state.high_watermark, state.recovery_point)

    # --- at the start ---------------------------------------------------------------------------------------------

    def advance_start(self, offset: int) -> int:
        """Raise the log start.

        ``delete_retired`` deletes the files after a checkpoint has made it durable.

        Otherwise a log without a part of its first segment would count as damaged.
        """
        state = self._state
        state.check_open()
        start = min(offset, state.high_watermark)
        if start <= state.log_start_offset:
            return state.log_start_offset
        leaving = [segment for segment in state.chain.segments[:-1] if segment.end_offset <= start]
        if leaving and not state.bridge(leaving):
            return state.log_start_offset
        if leaving:
            with state.offline_on_error("stopping the cleaner of"):
                self._cleaning.stop()
        state.log_start_offset = start
        if leaving:
            self._durability.cancel_flush()
        state.chain.retire_below(start)
        if state.chain.has_retired:
            state.services.retired.add(state.tp)
        state.epochs.advance_start(state.first_segment_offset)
        state.producers.transactions.drop_below(start)
        return start

    def delete_retired(self, durable_start: int) -> None:
        state = self._state
        with state.offline_on_error("deleting segments"):
            if state.chain.is_deletable(durable_start):
                self._durability.cancel_flush()
            state.services.remove_later(state.chain.delete_retired(durable_start))

    def retention_due_us(self) -> int | None:
        state, config = self._state, self._state.config
        due_us = self._roll_due_us()
        sealed = min(state.chain.sealed_prefix, len(state.chain.segments) - 1)
        if sealed > 0 and "delete" in config.cleanup_policy and not config.restoring:
            deletable_us = retention.due_us(
                _to_retention(state.chain.segments[0]),
                log_size_bytes=state.chain.size_bytes if config.retention_bytes >= 0 else 0,
                retention_ms=config.retention_ms,
                retention_bytes=config.retention_bytes,
            )
            due_us = _earlier(due_us, deletable_us)
        return due_us

    def _roll_due_us(self) -> int | None:
        """Return when the active segment will be old enough to be rolled, or None if not before the next write."""
        state, last, config = self._state, self._state.chain.last, self._state.config
        if last is None or config.restoring or (last.count == 1 and last.begins_with_marker):
            return None
        due_us = None
        if "delete" in config.cleanup_policy and config.retention_ms >= 0:
            # Segments are deleted in order. If an earlier one stays, the active one would roll again and again.
            due_us = max(segment.running_max for segment in state.chain.segments) + config.retention_ms * 1000 + 1
        if config.compacted:
            due_us = _earlier(due_us, last.first_append_us + config.max_compaction_lag_ms * 1000 + 1)
        return due_us

    def roll_due(self, now_us: int) -> bool:
        state, due_us = self._state, self._roll_due_us()
        if due_us is None or due_us > now_us:
            return False
        return state.last_stable_offset(state.high_watermark) == state.log_end_offset

    def apply_retention(self, now_us: int, *, read_to: int | None) -> int:
        state = self._state
        if "delete" not in state.config.cleanup_policy or state.config.restoring:
            return 0
        sealed = [_to_retention(segment) for segment in state.chain.segments[:-1][: state.chain.sealed_prefix]]
        count = retention.deletable(
            sealed,
            log_size_bytes=state.chain.size_bytes,
            now_us=now_us,
            retention_ms=state.config.retention_ms,
            retention_bytes=state.config.retention_bytes,
            read_to=read_to,
            retention_hard_ms=state.config.retention_hard_ms,
        )
        if not count:
            return 0
        start = state.chain.segments[count].base_offset
        return count if self.advance_start(start) >= start else 0


def _to_retention(segment: Segment) -> retention.SealedSegment:
    return retention.SealedSegment(segment.size_bytes, segment.running_max, segment.end_offset)


def _earlier(one_us: int | None, other_us: int | None) -> int | None:
    if one_us is None or other_us is None:
        return other_us if one_us is None else one_us
    return min(one_us, other_us)
