"""What one task reads of an archive: ranges of offsets, out of some files of one version of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from sparklog.delta.snapshot import DataFile
from sparklog.model import Span
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.gather import gathered

_ALL = Span()
#: Of a batch for Spark: as in ``task``.
_ENOUGH_BYTES = 256 * 1024


@dataclass(frozen=True)
class FilesRead(InputPartition):
    """The records of ``ranges`` (offsets by partition) and ``times`` (us) that ``files`` hold, as ``columns``."""

    table: str
    topic: str
    files: tuple[DataFile, ...]
    ranges: Mapping[int, Span]
    columns: ColumnPlan
    times: Span = _ALL


def read_files(wanted: FilesRead) -> Iterator[pa.RecordBatch]:
    """Batches of the wanted columns.

    Raises:
        ArchiveFileGone: a file was vacuumed.
        BrokerError: a value does not fit its column.
    """
    return gathered(_assembled(wanted), _ENOUGH_BYTES)


def _assembled(wanted: FilesRead) -> Iterator[pa.RecordBatch]:
    from sparklog.delta.rows import read_rows

    # Without any column a batch would not say how many rows it has.
    names = wanted.columns.archived_columns or ("_offset",)
    for file in wanted.files:
        for batch in read_rows(wanted.table, file, names, ranges=wanted.ranges, times=wanted.times):
            yield wanted.columns.assemble_archived(batch, topic=wanted.topic)
