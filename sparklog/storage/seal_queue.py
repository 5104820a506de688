"""The seal jobs of one log, and the state files that sealing writes.

The state files are the snapshots of the producers (``<offset>.producers``) and ``leader-epochs``. With the state files,
the next start need not read all headers. If a state file covers more than the log has after a truncation, the file is
removed durably before the next append.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sparklog.storage.disk import Disk, replace_file
from sparklog.storage.epochs import EPOCHS_FILE, EpochCache, EpochFile
from sparklog.storage.formats import encode_state
from sparklog.storage.producers import SNAPSHOT_SUFFIX, ProducerState, ProducerTable, to_snapshot
from sparklog.storage.rebuild_state import snapshot_offsets
from sparklog.storage.sealing import SealJob
from sparklog.storage.segment import Segment, file_stem
from sparklog.storage.segment_chain import SegmentChain

#: The number of producer snapshots to keep. A truncation needs a snapshot below the new end. Three are enough, because
#: a truncation rarely goes far below the high watermark.
_KEPT_SNAPSHOTS = 3


class SealQueue:
    """A queue of the jobs that seal the segments of one log. It also manages the log's state files.

    The state files are the snapshots of the producers, and ``leader-epochs``. Not thread-safe. The methods raise
    OSError if the disk fails.
    """

    def __init__(self, disk: Disk, directory: Path, *, remove_later: Callable[[Sequence[Path]], None]) -> None:
        self._disk = disk
        self._directory = directory
        self._remove_later = remove_later
        self._jobs: dict[int, SealJob] = {}
        #: The state of the producers at the beginning of each segment whose predecessor is not sealed, by base offset.
        self._rolled: dict[int, ProducerState] = {}
        #: The offsets of the snapshots on disk, in ascending order.
        self._snapshots: list[int] = []

    def found(self, snapshots: list[int]) -> None:
        """Set the offsets of the snapshots that recovery found in the directory, in ascending order."""
        self._snapshots = snapshots

    def rolled(self, base_offset: int, producers: ProducerState) -> None:
        """Record that a new segment begins at ``base_offset``.

        ``producers`` is the state of the producers at this offset.
        """
        self._rolled[base_offset] = producers

    def due(
        self, chain: SegmentChain, high_watermark: int, *, epochs: EpochCache, schemas: Mapping[int, bytes]
    ) -> list[SealJob]:
        """Return a job for each rolled and committed segment that has no job yet.

        The segments that ``sealed_prefix`` counts need no job: they are sealed and durable. This is true even if a
        process was killed after it had written a footer and before the fsync, because the next start fsyncs the
        segment.
        """
        jobs = []
        for segment in chain.segments[chain.sealed_prefix : -1]:
            if segment.end_offset > high_watermark:
                break
            if segment.sealed or segment.base_offset in self._jobs:
                continue
            end = segment.end_offset
            job = SealJob(
                segment,
                schema_message=schemas[segment.schema_id],
                producers=self._rolled.get(end),
                epochs=EpochFile(tuple(entry for entry in epochs.entries if entry[1] < end), end),
            )
            self._jobs[segment.base_offset] = job
            jobs.append(job)
        return jobs

    def finished(self, job: SealJob) -> None:
        """Record that ``job`` has ended. If it is ``done``, the segment is sealed.

        Otherwise the segment will get a new job.
        """
        del self._jobs[job.segment.base_offset]
        if not job.done:
            return
        job.segment.mark_sealed()
        if self._rolled.pop(job.end_offset, None) is not None:
            self._snapshots = sorted({*self._snapshots, job.end_offset})
        self._remove_later([self._snapshot_path(old) for old in self._snapshots[:-_KEPT_SNAPSHOTS]])
        del self._snapshots[:-_KEPT_SNAPSHOTS]

    def cancel(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            job = self._jobs.pop(segment.base_offset, None)
            if job is not None:
                job.cancel()

    def drop_from(self, end: int) -> None:
        """Remove the state files for offsets above ``end``, because the log was truncated to ``end``.

        The removal is durable on return. This method lists the directory, because a canceled job may have written
        files.
        """
        self._rolled = {base: entries for base, entries in self._rolled.items() if base <= end}
        stale = [
            self._snapshot_path(offset)
            for offset in snapshot_offsets(self._disk.names(self._directory))
            if offset > end
        ]
        self._snapshots = [offset for offset in self._snapshots if offset <= end]
        if self._disk.exists(self._directory / EPOCHS_FILE):
            stale.append(self._directory / EPOCHS_FILE)
        for path in stale:
            self._disk.remove(path)
        if stale:
            self._disk.sync_directory(self._directory)

    def bridge(self, base: int, read_producers: Callable[[], ProducerTable]) -> None:
        """Write a snapshot of the producers at ``base``, unless there is a snapshot at or above ``base``.

        The segments below ``base`` are about to be deleted or compacted. Without the snapshot, a later start would not
        know that a transaction has ended if its marker was deleted.
        """
        if self._snapshots and self._snapshots[-1] >= base:
            return
        state = self._rolled.get(base) or read_producers().state()
        if self._snapshots or state.entries or any(state.transactions):
            replace_file(self._disk, self._snapshot_path(base), encode_state(to_snapshot(state, base)))
            self._snapshots.append(base)

    def drop_below(self, base: int) -> None:
        """Remove the snapshots below ``base``, because the log is about to be compacted up to ``base``.

        A start that used such a snapshot would need batches and markers that the compaction removes. Without these
        snapshots, the start uses the snapshot at or above ``base``, which ``bridge`` has written.
        """
        stale = [offset for offset in self._snapshots if offset < base]
        for offset in stale:
            self._disk.remove(self._snapshot_path(offset))
        if stale:
            self._snapshots = [offset for offset in self._snapshots if offset >= base]
            self._disk.sync_directory(self._directory)

    def write_state(self, end: int, *, producers: ProducerTable, epochs: EpochCache, sync: bool) -> None:
        """Write a snapshot of the producers, and ``leader-epochs``, for a log that ends at ``end``.

        With ``sync`` fsync both files, and block until this is done. The caller fsyncs the log before this call, or
        together with these files.
        """
        if len(producers) and end not in self._snapshots:
            content = encode_state(to_snapshot(producers.state(), end))
            replace_file(self._disk, self._snapshot_path(end), content, sync=sync)
            self._snapshots.append(end)
        content = encode_state(EpochFile(epochs.entries, end))
        replace_file(self._disk, self._directory / EPOCHS_FILE, content, sync=sync)

    def _snapshot_path(self, offset: int) -> Path:
        return self._directory / (file_stem(offset) + SNAPSHOT_SUFFIX)
