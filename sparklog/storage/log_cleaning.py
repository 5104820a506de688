"""The compaction of one log: when a compaction is due, which job runs, and what earlier jobs have compacted."""

from __future__ import annotations

import logging

from sparklog.errors import StorageError
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
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.log_tail import LogTail
from sparklog.storage.segment import Segment

logger = logging.getLogger(__name__)


class LogCleaning:
    """The part of a ``Log`` that manages compaction: it decides when a compaction is due, and creates the job.

    Not thread-safe: use it only on the broker's event loop.
    """

    __slots__ = ("_durability", "_files", "_held", "_may_spill", "_offsets", "_tail", "job", "state")

    def __init__(self, files: LogFiles, offsets: LogOffsets, tail: LogTail, durability: LogDurability) -> None:
        #: The progress of the log's compaction.
        self.state = CleanerState()
        self.job: CleanJob | None = None
        #: Whether no compaction may begin, because a thread copies segments for a truncation. A compaction would
        #: replace these segments.
        self._held = False
        #: False after a compaction that filled the disk with spilled keys, so that new segments had no room. The next
        #: compaction keeps its keys in memory.
        self._may_spill = True
        self._files = files
        self._offsets = offsets
        self._tail = tail
        self._durability = durability

    def load(self) -> None:
        """Read the state that earlier compactions wrote to the file ``cleaned``.

        If the file is missing or unreadable, the whole log counts as dirty: no part of it is compacted yet.

        Raises:
            NewerFormatError: a newer release wrote the file.
            OSError: the disk failed.
        """
        path = self._files.directory.path / CLEANER_FILE
        try:
            found = decode_state(read_file(self._files.disk, path), CleanerState, path=path)
            self.state = found.truncated(self._offsets.log_end)
        except FileNotFoundError:
            pass
        except NewerFormatError:
            raise
        except StorageError as failure:
            logger.warning("%s; the log is cleaned from its start", failure)

    def dirty_ratio(self, now_us: int, *, at_once: bool = False) -> float | None:
        """Return the ratio of dirty (not yet compacted) bytes in the part to compact, or None if no compaction is due.

        With ``at_once`` a low ratio does not delay the compaction.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._files.check_open()
        with self._files.offline_on_error("planning the cleaning of"):
            found = self._due(now_us, at_once=at_once)
        return found[0].dirty_ratio if found is not None else None

    def due_again_us(self, now_us: int) -> int | None:
        """Return the next time at which a compaction may become due although no records are appended.

        The time is in microseconds since the epoch. None means never.

        Raises:
            StorageError: the log directory must go offline.
        """
        with self._files.offline_on_error("planning the cleaning of"):
            return due_again_us(self._cleanable(), self.state, now_us=now_us, config=self._files.config)

    def begin(self, rules: CleaningRules, now_us: int, *, at_once: bool = False) -> CleanJob | None:
        """Return a job that compacts the log in a thread. Return None if no compaction is due, or the disk is full.

        The thread calls the job's ``read_keys``, then ``rewrite`` for each of its ``groups``. After each group, the
        event loop calls ``replace_segments`` of this object, and then the thread calls the job's ``settle``. At the end
        the thread calls the job's ``finish``, and the event loop calls ``finished`` of this object.

        Raises:
            StorageError: the log directory must go offline.
        """
        files = self._files
        files.check_open()
        with files.offline_on_error("beginning to clean"):
            found = self._due(now_us, at_once=at_once)
            if found is None or not self._tail.bridge(files.chain.segments[: found[0].segment_count]):
                return None
            due, segments = found
            files.seals.drop_below(segments[-1].end_offset)
            self.job = CleanJob(
                files.disk,
                files.directory.path,
                segments=segments,
                due=due,
                state=self.state,
                schemas=dict(files.directory.schemas),
                aborted=self._tail.producers.transactions.aborted_between(
                    segments[0].base_offset, segments[-1].end_offset
                ),
                last_batches=self._last_batches(now_us),
                rules=rules,
                may_spill=self._may_spill,
            )
        return self.job

    def _due(self, now_us: int, *, at_once: bool) -> tuple[CleaningCandidate, list[SegmentFacts]] | None:
        """Return the compaction that is due and its segments, or None."""
        segments = self._cleanable()
        found = due(segments, self.state, now_us=now_us, config=self._files.config, at_once=at_once)
        return (found, segments[: found.segment_count]) if found is not None else None

    def _cleanable(self) -> list[SegmentFacts]:
        """Return the sealed segments without open transactions, or none if no compaction may run now."""
        config, chain = self._files.config, self._files.chain
        if not config.compacted or config.restoring or not chain.sealed_prefix:
            return []
        if self._held or self.job is not None:
            return []
        stable_end = self._tail.last_stable_offset(self._offsets.high_watermark)
        segments = []
        for segment in chain.segments[:-1][: chain.sealed_prefix]:
            if segment.end_offset > stable_end:
                break
            segments.append(_facts(segment))
        return segments

    def _last_batches(self, now_us: int) -> frozenset[int]:
        """Return the base offsets of the last batch of each producer that is not expired.

        Compaction keeps these batches even without records, so that retries are still recognized.
        """
        expired_us = now_us - self._files.services.producer_id_expiration_ms * 1000
        return frozenset(
            entry.batches[-1].base_offset
            for entry in self._tail.producers.entries()
            if entry.batches and entry.last_append_us >= expired_us
        )

    def replace_segments(self, job: CleanJob, replacement: Replacement) -> bool:
        """Replace the old segments of the log by the new segment that ``job`` wrote.

        Return False if the job was canceled in the meantime. A reader of an old segment can continue to read it.

        Raises:
            StorageError: the log directory must go offline.
        """
        files = self._files
        if files.closed or job.cancelled or job is not self.job:
            return False
        self._durability.cancel_flush()
        with files.offline_on_error("replacing segments of"):
            ends = (replacement.first, replacement.last)
            files.chain.replace(replacement.bases, rename=job.swap_in, count=replacement.batch_count, ends=ends)
        self._tail.cleaned(replacement.end_offset)
        files.services.moved.add(files.tp)
        return True

    def finished(self, job: CleanJob, state: CleanerState | None) -> None:
        """Record that ``job`` has ended.

        ``state`` is the result of the job's ``finish``, or None if the job failed or was canceled.
        """
        if self.job is not job:
            return
        self.job = None
        self._may_spill = not (job.out_of_room and job.tally.bytes_spilled)
        if state is not None:
            self.state = state
            # The cleaned part no longer has records of aborted transactions.
            self._tail.producers.transactions.drop_below(min(state.end, job.segments[-1].end_offset))

    def stop(self) -> None:
        """Cancel the running job, because the segments are about to change. Raises OSError if the disk fails."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel()

    def hold(self) -> None:
        """Cancel the running job, and begin no other job until ``resume`` is called.

        Raises OSError if the disk fails.
        """
        self.stop()
        self._held = True

    def resume(self) -> None:
        """Allow compactions again after ``hold``."""
        self._held = False

    def before_truncation(self, end: int) -> None:
        """Cancel the running job, and lower the offsets in the file ``cleaned`` to at most ``end``.

        The caller then truncates the log to ``end``.

        Raises OSError if the disk fails.
        """
        self.stop()
        state = self.state.truncated(end)
        if state != self.state:
            replace_file(self._files.disk, self._files.directory.path / CLEANER_FILE, encode_state(state))
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
