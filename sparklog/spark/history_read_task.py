"""The task that reads ranges of offsets from files of an archive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from sparklog.delta.data_file import DataFile
from sparklog.model import Span
from sparklog.spark.coalesce_batches import gathered
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.range_read import RangeRead

_ALL = Span()
#: The bytes of a batch for Spark, as in ``read_task``.
_ENOUGH_BYTES = 256 * 1024


@dataclass(frozen=True)
class FilesRead(InputPartition):
    """The plan of a task that reads files of an archive.

    The task returns only records in ``ranges`` (offsets by partition) and with timestamps in ``times`` (us).
    """

    table: str
    topic: str
    files: tuple[DataFile, ...]
    ranges: Mapping[int, Span]
    columns: ColumnPlan
    times: Span = _ALL


def read_files(wanted: FilesRead) -> Iterator[pa.RecordBatch]:
    """Yield the records that the plan ``wanted`` describes, as batches of the output columns.

    Raises:
        ArchiveFileGone: VACUUM has deleted a file.
        BrokerError: a value does not fit its column.
    """
    return gathered(_assembled(wanted), _ENOUGH_BYTES)


def _assembled(wanted: FilesRead) -> Iterator[pa.RecordBatch]:
    from sparklog.delta.rows import read_rows

    # A batch without columns would lose its number of rows, so read at least one.
    names = wanted.columns.archived_columns or ("_offset",)
    for file in wanted.files:
        for batch in read_rows(wanted.table, file, names, ranges=wanted.ranges, times=wanted.times):
            yield wanted.columns.assemble_archived(batch, topic=wanted.topic)


def taken_over(wanted: RangeRead, position: int) -> tuple[int, Iterator[pa.RecordBatch]]:
    """Return the part of the range ``wanted`` that the archive has now, from offset ``position`` on.

    The result is the end offset of the archived part, and an iterator over the batches of this part. A task calls this
    if records of its range were archived, and then deleted from the log, before it had read them.

    Raises:
        ConfigError: the table is not an archive of the topic.
        ArchiveProgressError: the table's progress cannot be read.
    """
    from sparklog.delta.snapshot import take_snapshot
    from sparklog.spark.history_plan import pack_files

    assert wanted.archive is not None
    table, origin = wanted.archive
    snapshot = take_snapshot(table, wanted.partition.topic, origin)
    end = min(wanted.end, snapshot.progress.ends.get(wanted.partition.partition, 0))
    times = wanted.times or _ALL
    files = pack_files(snapshot.files, [PartitionRange(wanted.partition, position, end)], times)
    ranges = {wanted.partition.partition: Span(position, end)}
    reads = [FilesRead(table, wanted.partition.topic, pack, ranges, wanted.columns, times) for pack in files]
    return end, (batch for read in reads for batch in _assembled(read))
