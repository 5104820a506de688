"""The division of a read between the archive and the log, and the choice of files to read.

The *archive end* of a snapshot is, for each partition, the first offset that is not archived. Offsets below it are read
from the archive, later ones from the log. Both have the same offsets, so a range means the same records for every
version of the table. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparklog.delta.data_file import DataFile
from sparklog.delta.snapshot import TableSnapshot
from sparklog.model import Span, TopicPartition
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.topics import TopicLogEnds

_ALL = Span()
#: The maximum bytes of the files of one task: small enough to divide a large table among tasks, large enough to combine
#: small files.
_TASK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BothEnds:
    """The offsets at which a topic's archive and log begin and end.

    The archive was read first, so its end offset is inside the log unless records are lost. ``log`` has the start and
    end offsets of the log. ``first`` has the first archived offset of each partition that has one.
    """

    snapshot: TableSnapshot
    log: Mapping[TopicPartition, TopicLogEnds]
    first: Mapping[int, int]

    def archive_end(self, tp: TopicPartition) -> int:
        return self.snapshot.progress.ends.get(tp.partition, 0)

    @property
    def ends(self) -> dict[TopicPartition, TopicLogEnds]:
        """Return, for each partition, the start and end offset of archive and log together."""
        return {
            tp: TopicLogEnds(
                min(found.start, self.first.get(tp.partition, found.start)),
                max(found.end, self.archive_end(tp)),
                found.epoch,
            )
            for tp, found in self.log.items()
        }

    @property
    def is_torn(self) -> bool:
        """Return whether the archive of a partition ends outside the partition's log.

        In that case, records appear to be missing.
        """
        return any(not found.start <= self.archive_end(tp) <= found.end for tp, found in self.log.items())

    def is_archive_needed(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Return whether a query at ``positions`` must read the archive.

        A partition that is not in ``positions`` is read from its beginning.
        """
        return any(positions.get(tp, 0) < max(found.start, self.archive_end(tp)) for tp, found in self.log.items())

    def losses(self, ranges: Iterable[PartitionRange]) -> list[str]:
        """Return a message for each part of ``ranges`` that is neither in the archive nor in the log.

        A log that was truncated below the end of the archive also counts as a loss.
        """
        archive = f"the archive {self.snapshot.table} (version {self.snapshot.version})"
        found = []
        for tp, start, end in ranges:
            log, archive_end = self.log[tp], self.archive_end(tp)
            low, high = max(start, archive_end), min(end, log.start)
            if low < high:
                found.append(
                    f"{tp}: offsets {low} to {high} were deleted from the log, but {archive} ends at {archive_end}"
                )
            if log.end < archive_end:
                found.append(f"{tp}: the log was truncated to {log.end}, but {archive} ends at {archive_end}")
        return found


def split_at_archive_end(
    pieces: Iterable[PartitionRange], ends: Mapping[int, int]
) -> tuple[list[PartitionRange], list[PartitionRange]]:
    """Split the ranges ``pieces`` at the end offsets ``ends`` of the archive.

    Return the ranges to read from the archive, and the ranges to read from the log. No returned range is empty.
    """
    archived, logged = [], []
    for tp, start, end in pieces:
        middle = ends.get(tp.partition, 0)
        if start < min(end, middle):
            archived.append(PartitionRange(tp, start, min(end, middle)))
        if max(start, middle) < end:
            logged.append(PartitionRange(tp, max(start, middle), end))
    return archived, logged


def pack_files(
    files: Sequence[DataFile], ranges: Collection[PartitionRange], times: Span = _ALL
) -> list[tuple[DataFile, ...]]:
    """Return the files that may have records in ``ranges`` and ``times`` (us), grouped into one tuple per task."""
    packs: list[tuple[DataFile, ...]] = []
    open_pack: list[DataFile] = []
    open_bytes = 0
    for file in files:
        holds = any(file.may_contain(tp.partition, Span(start, end)) for tp, start, end in ranges)
        if not holds or file.times.high <= times.low or file.times.low >= times.high:
            continue
        if open_pack and open_bytes + file.size > _TASK_BYTES:
            packs.append(tuple(open_pack))
            open_pack, open_bytes = [], 0
        open_pack.append(file)
        open_bytes += file.size
    return [*packs, tuple(open_pack)] if open_pack else packs
