"""The cleaning of one log from the log's side: when one is due, which one runs, and the result of earlier ones."""

from __future__ import annotations

import logging

from sparklog.errors import StorageError
from sparklog.storage.batch_cache import drop_below
from sparklog.storage.cleaning import CleaningRules, CleanJob, Replacement
from sparklog.storage.cleaning_plan import (
    CLEANER_FILE,
    CleanerState,
    CleaningCandidate,
    SegmentFacts,
    due,
    due_again_us,
)
from sparklog.storage.disk import read_file, replace_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_state import LogState
from sparklog.storage.segment import Segment

logger = logging.getLogger(__name__)


class LogCleaning:
    """The cleanings of one ``Log``, which owns it, on the event loop."""

    __slots__ = ("_durability", "_log", "_may_spill", "held", "job", "state")

    def __init__(self, log: LogState, durability: LogDurability) -> None:
        #: How far the log was compacted.
        self.state = CleanerState()
        self.job: CleanJob | None = None
        #: A thread copies segments for a truncation. A replaced segment would be shorter than the copy.
        self.held = False
        #: False after a cleaning whose spilled keys left no room for segments. The next one stays in memory and frees
        #: space.
        self._may_spill = True
        self._log = log
        self._durability = durability

    def load(self) -> None:
        """Read the state that earlier cleanings left.

        If it is missing or unreadable, the whole log is dirty again.

        Raises:
            NewerFormatError, OSError.
        """
        path = self._log.directory.path / CLEANER_FILE
        try:
            found = decode_state(read_file(self._log.disk, path), CleanerState, path=path)
            self.state = found.truncated(self._log.log_end_offset)
        except FileNotFoundError:
            pass
        except NewerFormatError:
            raise
        except StorageError as failure:
            logger.warning("%s; the log is cleaned from its start", failure)

    def dirty_ratio(self, now_us: int, *, at_once: bool = False) -> float | None:
        """Return the part of the log's bytes that is new since the last cleaning, or None if no cleaning is due.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._log.check_open()
        with self._log.offline_on_error("planning the cleaning of"):
            found = self._due(now_us, at_once=at_once)
        return found[0].dirty_ratio if found is not None else None

    def due_again_us(self, now_us: int) -> int | None:
        """Return when a log without a ``dirty_ratio`` at ``now_us`` may have one without a change, or None for never.

        The time is in microseconds since the epoch.

        Raises:
            StorageError: the log directory must go offline.
        """
        with self._log.offline_on_error("planning the cleaning of"):
            return due_again_us(self._cleanable(), self.state, now_us=now_us, config=self._log.config)

    def begin(self, rules: CleaningRules, now_us: int, *, at_once: bool = False) -> CleanJob | None:
        """Return a job for a thread if a cleaning is due.

        The thread calls ``read_keys``, then ``rewrite`` for each of its ``groups``. After each the loop calls
        ``replace_segments`` here, and the thread ``settle``. At the end the thread calls ``finish``, and the loop
        ``finished`` here.

        Raises:
            StorageError: the log directory must go offline.
        """
        log = self._log
        log.check_open()
        with log.offline_on_error("beginning to clean"):
            found = self._due(now_us, at_once=at_once)
            if found is None or not log.bridge(log.chain.segments[: found[0].segment_count]):
                return None
            due, segments = found
            log.seals.drop_below(segments[-1].end_offset)
            self.job = CleanJob(
                log.disk,
                log.directory.path,
                segments=segments,
                due=due,
                state=self.state,
                schemas=dict(log.directory.schemas),
                aborted=list(
                    log.producers.transactions.aborted_between(segments[0].base_offset, segments[-1].end_offset)
                ),
                last_batches=self._last_batches(now_us),
                rules=rules,
                may_spill=self._may_spill,
            )
        return self.job

    def _due(self, now_us: int, *, at_once: bool) -> tuple[CleaningCandidate, list[SegmentFacts]] | None:
        """Return the cleaning that is due and its segments, or None."""
        segments = self._cleanable()
        found = due(segments, self.state, now_us=now_us, config=self._log.config, at_once=at_once)
        return (found, segments[: found.segment_count]) if found is not None else None

    def _cleanable(self) -> list[SegmentFacts]:
        """Return the sealed segments without open transactions, or none if no cleaning may run now."""
        log = self._log
        if not log.config.compacted or log.config.restoring or not log.chain.sealed_prefix:
            return []
        if self.held or self.job is not None:
            return []
        stable_end = log.last_stable_offset(log.high_watermark)
        segments = []
        for segment in log.chain.segments[:-1][: log.chain.sealed_prefix]:
            if segment.end_offset > stable_end:
                break
            segments.append(_facts(segment))
        return segments

    def _last_batches(self, now_us: int) -> frozenset[int]:
        """Return the base offsets of the last batch of each producer that is not expired.

        These batches stay, even without records.
        """
        expired_us = now_us - self._log.services.producer_id_expiration_ms * 1000
        return frozenset(
            entry.batches[-1].base_offset
            for entry in self._log.producers.entries()
            if entry.batches and entry.last_append_us >= expired_us
        )

    def replace_segments(self, job: CleanJob, replacement: Replacement) -> bool:
        """Replace the old segments by one that ``job`` wrote.

        Return False if the log has changed in the meantime.

        Readers of an old segment are not disturbed.

        Raises:
            StorageError: the log directory must go offline.
        """
        log = self._log
        if log.closed or job.cancelled or job is not self.job:
            return False
        self._durability.cancel_flush()
        with log.offline_on_error("replacing segments of"):
            ends = (replacement.first, replacement.last)
            log.chain.replace(replacement.bases, rename=job.swap_in, count=replacement.batch_count, ends=ends)
        drop_below(log.hot, replacement.end_offset)
        log.services.moved.add(log.tp)
        return True

    def finished(self, job: CleanJob, state: CleanerState | None) -> None:
        """Handle the end of ``job``. ``state`` is the result of its ``finish``, or None if it did not get there."""
        if self.job is not job:
            return
        self.job = None
        self._may_spill = not (job.out_of_room and job.tally.bytes_spilled)
        if state is not None:
            self.state = state
            # the cleaned part has no aborted records any more
            self._log.producers.transactions.drop_below(min(state.end, job.segments[-1].end_offset))

    def stop(self) -> None:
        """Cancel the running job before another part of the log changes the segments. Raises OSError like the disk."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel()

    def before_truncation(self, end: int) -> None:
        """Lower the cleaned state on disk before the log is truncated to ``end``. Raises OSError like the disk."""
        self.stop()
        state = self.state.truncated(end)
        if state != self.state:
            replace_file(self._log.disk, self._log.directory.path / CLEANER_FILE, encode_state(state))
            self.state = state


def _facts(segment: Segment) -> SegmentFacts:
    return SegmentFacts(
        segment.base_offset,
        segment.end_offset,
        segment.size_bytes,
        segment.schema_id,
        segment.first_append_us,
        segment.last_append_us,
    )
