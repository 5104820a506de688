"""The segments of one log, oldest first: appended to at the end as a whole or not at all, cut newest first.

Knows files and offsets; leader epochs, producers and what is committed are the log's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.record.header import BatchHeader
from sparklog.storage.append_plan import SegmentWrite
from sparklog.storage.disk import Disk
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.segment import DELETED_SUFFIX, Segment, segment_at
from sparklog.storage.truncation_job import TruncationJob


class SegmentChain:
    """Owned by its log. Methods raise OSError as the disk does, except where they say otherwise."""

    def __init__(self, disk: Disk, directory: Path, *, files: OpenFiles, segments: Sequence[Segment] = ()) -> None:
        self.segments = list(segments)
        #: how many segments at the front are sealed
        self.sealed_prefix = 0
        self._disk = disk
        self._directory = directory
        self._files = files
        #: below the log start; their files go with the next checkpoint
        self._retired: list[Segment] = []
        self.count_sealed()

    @property
    def last(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def at(self, offset: int) -> Segment:
        """The segment that holds ``offset``, which is not below the first one."""
        last = self.segments[-1]
        return last if offset >= last.base_offset else self.segments[segment_at(self.segments, offset)]

    def count_sealed(self) -> None:
        """Bring ``sealed_prefix`` up to date after segments were sealed, cut or removed."""
        count = min(self.sealed_prefix, len(self.segments))
        while count and not self.segments[count - 1].sealed:
            count -= 1
        while count < len(self.segments) and self.segments[count].sealed:
            count += 1
        self.sealed_prefix = count

    # --- append -------------------------------------------------------------------------------------------------

    def append(self, runs: Sequence[SegmentWrite], prelude: Callable[[int], bytes]) -> None:
        """Carry out a plan. ``prelude`` gives the first bytes of a segment by schema id.

        Raises:
            OSError: nothing was appended.
            StorageError: what was appended could not be taken back.
        """
        segments, count = len(self.segments), self.segments[-1].count if self.segments else 0
        try:
            for run in runs:
                self._append_run(run, prelude)
        except OSError as failure:
            self._undo(segments, count, failure)
            raise

    def _append_run(self, run: SegmentWrite, prelude: Callable[[int], bytes]) -> None:
        first = run.headers[0]
        if run.new_segment:
            segment = Segment(self._disk, self._directory, base_offset=first.base_offset, files=self._files)
            segment.append(run.headers, packed=run.packed, data=run.data, prelude=prelude(first.schema_id))
            self.segments.append(segment)
            return
        segment = self.segments[-1]
        if segment.sealed:
            # the leader did not roll where an earlier one did: go on behind the data, without the footer
            segment.truncate(segment.count, in_place=False)
            self.count_sealed()
        segment.append(run.headers, packed=run.packed, data=run.data, prelude=b"")

    def _undo(self, segments: int, count: int, failure: OSError) -> None:
        """The failed segment cut itself back; take back the runs before."""
        try:
            while len(self.segments) > segments:
                self._remove(self.segments.pop())
            if segments and self.segments[-1].count > count:
                self.segments[-1].truncate(count, in_place=True)
        except (OSError, StorageError) as second:
            raise StorageError(
                f"{self._directory}: an append failed ({failure}) and could not be cut back ({second})"
            ) from failure

    # --- cutting ------------------------------------------------------------------------------------------------

    def boundary(self, offset: int) -> int:
        """Base offset of the batch that holds ``offset``."""
        segment = self.at(offset)
        return segment.bases()[segment.find(offset)]

    def copied_by_cut(self, end: int, *, served_end: int) -> tuple[Segment, int] | None:
        """The segment of which ``cut`` makes a copy, and how many batches of it; None: it makes none."""
        last = self.segments[segment_at(self.segments, end - 1)]
        count = last.count if end == last.end_offset else last.find(end)
        is_whole = count == last.count and last.sealed
        return None if is_whole or (end >= served_end and not last.sealed) else (last, count)

    def cut(self, end: int, *, served_end: int, job: TruncationJob | None = None) -> None:
        """Remove everything from the batch at ``end`` on; at least one batch is left.

        Nothing below ``served_end`` is cut in place, as a reader may have it mapped; what is left is as durable as it
        was. The seal of the segment that becomes the last was cancelled before, so that a part of a footer may be
        there. ``job`` may have made the copy already.
        """
        keep = segment_at(self.segments, end - 1)
        for doomed in reversed(self.segments[keep + 1 :]):
            self._remove(doomed)
            self.segments.pop()
        last = self.segments[keep]
        copied = self.copied_by_cut(end, served_end=served_end)
        if copied is not None:
            is_there = job is not None and job.done and copied == (job.segment, job.count)
            last.truncate(copied[1], in_place=False, put_copies=job.put_in_place if job and is_there else None)
        elif not last.sealed:
            last.truncate(last.count if end == last.end_offset else last.find(end), in_place=True)
        self.count_sealed()

    def clear(self) -> None:
        """Remove all segments, retired ones too: the log may now go where they were."""
        while self.segments:
            self._remove(self.segments[-1])
            self.segments.pop()
        while self._retired:
            self._remove(self._retired.pop())
        for name in self._disk.names(self._directory):
            if name.endswith(DELETED_SUFFIX):
                # a removal in the thread may be faster
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(self._directory / name)
        self.count_sealed()

    def retire_below(self, log_start_offset: int) -> None:
        """Take the segments wholly below out of the log, except the last; their files stay."""
        while len(self.segments) > 1 and self.segments[0].end_offset <= log_start_offset:
            segment = self.segments.pop(0)
            segment.close()
            self._retired.append(segment)
            self.sealed_prefix = max(0, self.sealed_prefix - 1)
        self.count_sealed()

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def is_deletable(self, durable_start: int) -> bool:
        """Whether ``delete_retired`` would take files away."""
        return bool(self._retired) and self._retired[0].end_offset <= durable_start

    def delete_retired(self, durable_start: int) -> list[Path]:
        """Rename the files of retired segments below ``durable_start`` out of the way; return what to remove."""
        doomed: list[Path] = []
        while self.is_deletable(durable_start):
            doomed.extend(self._retired.pop(0).mark_deleted())
        return doomed

    def replace(
        self,
        bases: Sequence[int],
        *,
        rename: Callable[[], None],
        count: int,
        ends: tuple[BatchHeader, BatchHeader],
    ) -> None:
        """A sealed segment of ``count`` batches takes the place of those that begin at ``bases``, which are sealed.

        ``rename`` puts its files over those of the first of them. Views of the old ones stay valid.
        """
        at = segment_at(self.segments, bases[0])
        old = self.segments[at : at + len(bases)]
        assert [segment.base_offset for segment in old] == list(bases), (bases, old)
        for segment in old:
            segment.close()
        rename()
        fresh = Segment(self._disk, self._directory, base_offset=bases[0], files=self._files)
        fresh.adopt(count=count, first=ends[0], last=ends[1])
        fresh.sealed = True
        self.segments[at : at + len(bases)] = [fresh]
        self.sealed_prefix -= len(bases) - 1
        self.count_sealed()

    def _remove(self, segment: Segment) -> None:
        for path in segment.mark_deleted():
            self._disk.remove(path)

    # --- files --------------------------------------------------------------------------------------------------

    def beyond(self, offset: int) -> list[Segment]:
        """Every segment that reaches beyond ``offset``, of those as well that have left the log and are still there: a
        start that does not hear of their leaving takes what is torn of them for the log's end."""
        return [segment for segment in (*self._retired, *self.segments) if segment.end_offset > offset]

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
