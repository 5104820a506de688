"""The lookup of a time in an archive: it finds each partition's first record at or after the time.

Timestamps are not ordered by offset, so every file that may have a matching time is a candidate. Candidates are read in
the order of their minimum offsets. A file is skipped if it cannot have a lower offset than the best match, so few rows
are read.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparklog.delta.data_file import DataFile
from sparklog.delta.rows import place_of, read_rows
from sparklog.delta.snapshot import TableSnapshot
from sparklog.delta.table import OFFSET, PARTITION, TIMESTAMP
from sparklog.model import Span

_ALL = Span()
#: A time before the time of every record.
BEGINNING_US = _ALL.low


def first_offsets(snapshot: TableSnapshot, times: Mapping[int, int]) -> dict[int, int]:
    """Return, for each partition in ``times``, the offset of the first archived record at or after its time (us).

    Partitions without such a record are omitted.

    Raises:
        ArchiveFileGone: VACUUM has deleted a file of the snapshot.
    """
    found: dict[int, int] = {}
    for file in snapshot.files:
        wanted = {
            partition: time_us
            for partition, time_us in times.items()
            if file.times.high > time_us and file.may_contain(partition, Span(high=found.get(partition, _ALL.high)))
        }
        if wanted:
            for partition, offset in _firsts(snapshot, file, wanted, found).items():
                found[partition] = min(offset, found.get(partition, offset))
    return found


def _firsts(
    snapshot: TableSnapshot, file: DataFile, wanted: Mapping[int, int], found: Mapping[int, int]
) -> Mapping[int, int]:
    partition = file.single_partition
    if partition is not None and file.offsets != _ALL and not file.deleted and file.times.low >= wanted[partition]:
        return {partition: file.offsets.low}
    firsts: dict[int, int] = {}
    ranges = {partition: Span(high=found.get(partition, _ALL.high)) for partition in wanted}
    for batch in read_rows(snapshot.table, file, (PARTITION, OFFSET, TIMESTAMP), ranges=ranges):
        partitions, offsets, us = place_of(batch)
        for number, time_us in wanted.items():
            young = offsets[(partitions == number) & (us >= time_us)]
            if len(young):
                firsts[number] = min(int(young.min()), firsts.get(number, _ALL.high))
    return firsts
