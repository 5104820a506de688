"""What of a read comes from the archive and what from the log, and which files hold it. Pure.

Below the seam of a snapshot the archive is read, from it on the log. Positions are offsets on both sides, so a range
means the same records whichever version of the table they are read from, and wherever its seam lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparklog.delta.data_file import DataFile
from sparklog.delta.snapshot import Snapshot
from sparklog.model import Span, TopicPartition
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.topics import LogEnds

_ALL = Span()
#: Of files in one task: few enough to share a large table among tasks, many enough to bring small files together.
_TASK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BothEnds:
    """The archive and the log of one topic, looked at in this order: the seam lies within the log, or something is
    lost. ``log`` are the ends of the log, ``first`` the first archived offset of each partition that has any.
    """

    snapshot: Snapshot
    log: Mapping[TopicPartition, LogEnds]
    first: Mapping[int, int]

    def seam(self, tp: TopicPartition) -> int:
        return self.snapshot.seam.ends.get(tp.partition, 0)

    @property
    def ends(self) -> dict[TopicPartition, LogEnds]:
        """Where history begins and ends."""
        return {
            tp: LogEnds(
                min(found.start, self.first.get(tp.partition, found.start)), max(found.end, self.seam(tp)), found.epoch
            )
            for tp, found in self.log.items()
        }

    @property
    def is_torn(self) -> bool:
        """The log does not go on where the archive ends; as far as this look could tell."""
        return any(not found.start <= self.seam(tp) <= found.end for tp, found in self.log.items())

    def is_archive_needed(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Whether a query at ``positions``, and at the beginning of other partitions, needs more than the log."""
        return any(positions.get(tp, 0) < max(found.start, self.seam(tp)) for tp, found in self.log.items())

    def losses(self, ranges: Iterable[PartitionRange]) -> list[str]:
        """What of ``ranges`` neither store has, in words."""
        archive = f"the archive {self.snapshot.table} (version {self.snapshot.version})"
        found = []
        for tp, start, end in ranges:
            log, seam = self.log[tp], self.seam(tp)
            low, high = max(start, seam), min(end, log.start)
            if low < high:
                found.append(f"{tp}: offsets {low} to {high} are gone from the log, {archive} reaches up to {seam}")
            if log.end < seam:
                found.append(f"{tp}: the log ends at {log.end} and was cut, {archive} reaches up to {seam}")
        return found


def split_at_seam(
    pieces: Iterable[PartitionRange], seam: Mapping[int, int]
) -> tuple[list[PartitionRange], list[PartitionRange]]:
    """The parts of ``pieces`` that are read from the archive, and those from the log; none is empty."""
    archived, logged = [], []
    for tp, start, end in pieces:
        middle = seam.get(tp.partition, 0)
        if start < min(end, middle):
            archived.append(PartitionRange(tp, start, min(end, middle)))
        if max(start, middle) < end:
            logged.append(PartitionRange(tp, max(start, middle), end))
    return archived, logged


def pack_files(
    files: Sequence[DataFile], ranges: Collection[PartitionRange], times: Span = _ALL
) -> list[tuple[DataFile, ...]]:
    """The files that may hold records of ``ranges`` and ``times``, a tuple for each task."""
    packs: list[tuple[DataFile, ...]] = []
    open_pack: list[DataFile] = []
    open_bytes = 0
    for file in files:
        holds = any(file.may_hold(tp.partition, Span(start, end)) for tp, start, end in ranges)
        if not holds or file.times.high <= times.low or file.times.low >= times.high:
            continue
        if open_pack and open_bytes + file.size > _TASK_BYTES:
            packs.append(tuple(open_pack))
            open_pack, open_bytes = [], 0
        open_pack.append(file)
        open_bytes += file.size
    return [*packs, tuple(open_pack)] if open_pack else packs
