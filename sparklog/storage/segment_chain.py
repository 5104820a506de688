"""The segments of one log, oldest first.

An append is complete or has no effect. A truncation removes the newest segments first.

The chain has the files and their offsets. Leader epochs, producers and the high watermark belong to the log.
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
    """A list of the segments of one log, oldest first. A part of ``Log``.

    The methods raise OSError if the disk fails.
    """

    def __init__(self, disk: Disk, directory: Path, *, files: OpenFiles) -> None:
        self.segments: list[Segment] = []
        #: The number of sealed segments before the first unsealed one.
        self.sealed_prefix = 0
        self._disk = disk
        self._directory = directory
        self._files = files
        #: Segments below the log start offset. Their files are deleted after the next checkpoint.
        self._retired: list[Segment] = []

    def found(self, segments: Sequence[Segment]) -> None:
        """Set the segments that recovery found on disk."""
        self.segments = list(segments)
        self.count_sealed()

    def first_offset(self, log_end: int) -> int:
        """Return the base offset of the first segment, or ``log_end`` if there is none."""
        return self.segments[0].base_offset if self.segments else log_end

    @property
    def last(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def at(self, offset: int) -> Segment:
        """Return the segment that contains ``offset``. The offset must not be below the first segment."""
        last = self.segments[-1]
        return last if offset >= last.base_offset else self.segments[segment_at(self.segments, offset)]

    def count_sealed(self) -> None:
        """Update ``sealed_prefix`` after segments were sealed, truncated or removed."""
        count = min(self.sealed_prefix, len(self.segments))
        while count and not self.segments[count - 1].sealed:
            count -= 1
        while count < len(self.segments) and self.segments[count].sealed:
            count += 1
        self.sealed_prefix = count

    # --- append -------------------------------------------------------------------------------------------------

    def append(self, runs: Sequence[SegmentWrite], prelude: Callable[[int], bytes]) -> None:
        """Write the batches of an append plan to the segments.

        ``prelude`` returns the bytes before the first batch of a segment, by schema id.

        Raises:
            OSError: nothing was appended.
            StorageError: the append could not be undone.
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
            # An earlier leader rolled here, and this leader did not. Remove the footer and append after the data.
            segment.truncate(segment.count, in_place=False)
            self.count_sealed()
        segment.append(run.headers, packed=run.packed, data=run.data, prelude=b"")

    def _undo(self, segments: int, count: int, failure: OSError) -> None:
        """Undo the writes of a plan to other segments. The segment that failed has already undone its own write."""
        try:
            while len(self.segments) > segments:
                self._remove(self.segments.pop())
            if segments and self.segments[-1].count > count:
                self.segments[-1].truncate(count, in_place=True)
        except (OSError, StorageError) as second:
            raise StorageError(
                f"{self._directory}: an append failed ({failure}) and could not be undone ({second})"
            ) from failure

    # --- truncation ---------------------------------------------------------------------------------------------

    def boundary(self, offset: int) -> int:
        """Return the base offset of the batch that contains ``offset``."""
        segment = self.at(offset)
        return segment.bases()[segment.find(offset)]

    def copied_by_truncation(self, end: int, *, served_end: int) -> tuple[Segment, int] | None:
        """Return the segment whose files ``truncate`` would copy, and the number of its batches that remain.

        Return None if ``truncate`` would copy nothing.
        """
        last = self.segments[segment_at(self.segments, end - 1)]
        count = last.count if end == last.end_offset else last.find(end)
        is_whole = count == last.count and last.sealed
        return None if is_whole or (end >= served_end and not last.sealed) else (last, count)

    def truncate(self, end: int, *, served_end: int, job: TruncationJob | None = None) -> None:
        """Remove the batch at ``end`` and everything after it.

        At least one batch remains. A file that is truncated below ``served_end`` is replaced by a copy of its remaining
        part, because a reader may have mapped the file. If ``job`` has already made this copy, the copy is used.
        Batches that remain and were durable are still durable. The caller has canceled the seal of the segment that
        becomes the last one, so this segment may have a part of a footer.
        """
        keep = segment_at(self.segments, end - 1)
        for doomed in reversed(self.segments[keep + 1 :]):
            self._remove(doomed)
            self.segments.pop()
        last = self.segments[keep]
        copied = self.copied_by_truncation(end, served_end=served_end)
        if copied is not None:
            is_there = job is not None and job.done and copied == (job.segment, job.count)
            last.truncate(copied[1], in_place=False, put_copies=job.put_in_place if job and is_there else None)
        elif not last.sealed:
            last.truncate(last.count if end == last.end_offset else last.find(end), in_place=True)
        self.count_sealed()

    def clear(self) -> None:
        """Remove all segments, including retired ones, because later appends may use the same offsets."""
        while self.segments:
            self._remove(self.segments[-1])
            self.segments.pop()
        while self._retired:
            self._remove(self._retired.pop())
        for name in self._disk.names(self._directory):
            if name.endswith(DELETED_SUFFIX):
                # The thread that removes files may have removed it already.
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(self._directory / name)
        self.count_sealed()

    def retire_below(self, log_start_offset: int) -> None:
        """Retire the segments that end at or below the log start offset, except the last segment of the log.

        A retired segment no longer belongs to the log, but its files exist until ``delete_retired``.
        """
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
        """Return whether ``delete_retired`` would delete files."""
        return bool(self._retired) and self._retired[0].end_offset <= durable_start

    def delete_retired(self, durable_start: int) -> list[Path]:
        """Rename the files of the retired segments that end at or below ``durable_start``. Return the new paths.

        The renamed files do not belong to the log any more. The caller deletes them.
        """
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
        """Replace the sealed segments that begin at ``bases`` by one sealed segment of ``count`` batches.

        ``rename`` renames the new segment's files, so that they replace the files of the first old segment. Readers may
        still use their memory maps of the old files.
        """
        at = segment_at(self.segments, bases[0])
        old = self.segments[at : at + len(bases)]
        assert [segment.base_offset for segment in old] == list(bases), (bases, old)
        for segment in old:
            segment.close()
        rename()
        fresh = Segment(self._disk, self._directory, base_offset=bases[0], files=self._files)
        fresh.adopt(count=count, first=ends[0], last=ends[1], sealed=True)
        self.segments[at : at + len(bases)] = [fresh]
        self.sealed_prefix -= len(bases) - 1
        self.count_sealed()

    def _remove(self, segment: Segment) -> None:
        for path in segment.mark_deleted():
            self._disk.remove(path)

    # --- files --------------------------------------------------------------------------------------------------

    def beyond(self, offset: int) -> list[Segment]:
        """Return every segment that ends above ``offset``, including retired segments whose files still exist.

        Retired segments must be fsynced too. If the process dies before the checkpoint has the new log start offset,
        the next start reads these segments again, and would end the log at the first damaged file.
        """
        return [segment for segment in (*self._retired, *self.segments) if segment.end_offset > offset]

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
