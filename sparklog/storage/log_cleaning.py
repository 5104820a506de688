"""The cleaning of one log, as its owner sees it: when it is due, what is under way, what earlier ones have done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sparklog.config import TopicConfig
from sparklog.errors import StorageError
from sparklog.storage.cleaning import CleaningRules, CleanJob, Replacement
from sparklog.storage.cleaning_plan import CLEANER_FILE, CleanerState, Due, SegmentFacts, due
from sparklog.storage.disk import Disk, read_file, replace_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state
from sparklog.storage.producers import ProducerTable
from sparklog.storage.segment import Segment
from sparklog.storage.segment_chain import SegmentChain

_log = logging.getLogger(__name__)


class LogCleaning:
    """Owned by its log, on the event loop. Methods raise OSError as the disk does."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self.state = CleanerState()
        self.job: CleanJob | None = None
        self._disk = disk
        self._directory = directory

    def load(self, log_end: int) -> None:
        """Read what earlier cleanings have left. Without it, or where it cannot be read, all is dirty again."""
        path = self._directory / CLEANER_FILE
        try:
            self.state = decode_state(read_file(self._disk, path), CleanerState, path=path).cut(log_end)
        except FileNotFoundError:
            pass
        except NewerFormatError:
            raise
        except StorageError as failure:
            _log.warning("%s; the log is cleaned from its start", failure)

    def due(
        self, chain: SegmentChain, *, stable_end: int, now_us: int, config: TopicConfig, at_once: bool
    ) -> tuple[Due, list[SegmentFacts]] | None:
        """Whether a cleaning is to begin, and of which segments. ``stable_end``: what lies below is decided."""
        if not config.compacted or config.restoring or self.job is not None or not chain.sealed_prefix:
            return None
        segments = []
        for segment in chain.segments[:-1][: chain.sealed_prefix]:
            if segment.end_offset > stable_end:
                break
            segments.append(_facts(segment))
        found = due(segments, self.state, now_us=now_us, config=config, at_once=at_once)
        return (found, segments[: found.segment_count]) if found is not None else None

    def begin(
        self,
        found: Due,
        segments: list[SegmentFacts],
        *,
        schemas: Mapping[int, bytes],
        producers: ProducerTable,
        expired_us: int,
        rules: CleaningRules,
    ) -> CleanJob:
        """``expired_us``: producers that were last heard of before are forgotten."""
        last_batches = frozenset(
            entry.batches[-1].base_offset
            for entry in producers.entries()
            if entry.batches and entry.last_append_us >= expired_us
        )
        self.job = CleanJob(
            self._disk,
            self._directory,
            segments=segments,
            due=found,
            state=self.state,
            schemas=dict(schemas),
            aborted=list(producers.transactions.aborted_between(segments[0].base_offset, segments[-1].end_offset)),
            last_batches=last_batches,
            rules=rules,
        )
        return self.job

    def replace(self, chain: SegmentChain, replacement: Replacement) -> bool:
        """The new segment takes the old ones' place; False: the job was cancelled, nothing changed."""
        job = self.job
        if job is None or job.cancelled:
            return False
        ends = (replacement.first, replacement.last)
        chain.replace(replacement.bases, rename=job.swap_in, count=replacement.batch_count, ends=ends)
        return True

    def finished(self, state: CleanerState | None) -> None:
        """The job has ended: with what it noted, or None."""
        self.job = None
        if state is not None:
            self.state = state

    def stop(self) -> None:
        """Before the segments are touched by anyone else."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel()

    def cut(self, end: int) -> None:
        """The log is about to be cut to ``end``: what is known of more must be gone from the disk before."""
        self.stop()
        state = self.state.cut(end)
        if state != self.state:
            replace_file(self._disk, self._directory / CLEANER_FILE, encode_state(state))
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
