"""The reader of one data file of a table: selected columns, within ranges of offsets and times. It needs no JVM.

Row groups whose statistics show that they have no matching rows are skipped. Deleted rows are omitted. Rows are in the
order of the file; after compaction this is not the order of offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparklog.delta.data_file import DataFile
from sparklog.delta.table import OFFSET, PARTITION, TIMESTAMP
from sparklog.errors import SparklogError
from sparklog.model import Span

_ALL = Span()
_BATCH_ROWS = 1 << 16
_UTC_US = pa.timestamp("us", tz="UTC")


class ArchiveFileGone(SparklogError):
    """The error for a data file that VACUUM deleted before it was read. A new read uses a newer version."""


def file_system(table: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a table, and the path of the table's directory in this file system.

    ``table`` is a local path or a URI.
    """
    if "://" in table or table.startswith("file:"):
        system, root = pafs.FileSystem.from_uri(table)
        return system, root.rstrip("/")
    return pafs.LocalFileSystem(), table.rstrip("/")


def read_rows(
    table: str,
    file: DataFile,
    columns: Sequence[str],
    *,
    ranges: Mapping[int, Span] | None,
    times: Span = _ALL,
) -> Iterator[pa.RecordBatch]:
    """Yield the matching rows of ``file`` in non-empty batches, with the ``columns`` that the file has.

    ``ranges`` has the offsets to read, by partition. Rows of other partitions are not read. None means all rows. Only
    rows with timestamps in ``times`` (us) are read.

    Raises:
        ArchiveFileGone: the file was deleted.
    """
    system, root = file_system(table)
    try:
        opened = system.open_input_file(f"{root}/{file.path}")
    except FileNotFoundError:
        raise ArchiveFileGone(
            f"{root}/{file.path} no longer exists: the table was vacuumed after the read was planned. Read again"
        ) from None
    with opened:
        # The statistics of a file without deleted rows are exact, so rows need no check.
        is_whole = not file.deleted and _lies_within(file, ranges, times)
        needed = [] if is_whole else [PARTITION, OFFSET, *([TIMESTAMP] if times != _ALL else [])]
        with pq.ParquetFile(opened, coerce_int96_timestamp_unit="us", pre_buffer=True) as parquet:
            there = set(parquet.schema_arrow.names) - set(file.constants)
            stored = [name for name in dict.fromkeys([*columns, *needed, OFFSET]) if name in there]
            for position, batch in _batches(parquet, stored, ranges):
                whole = _completed(batch, [*columns, *needed], file.constants)
                if not is_whole:
                    whole = whole.filter(_kept(whole, position, ranges, times=times, deleted=file.deleted))
                if whole.num_rows:
                    yield whole.select([name for name in dict.fromkeys(columns) if name in whole.schema.names])


def _lies_within(file: DataFile, ranges: Mapping[int, Span] | None, times: Span) -> bool:
    if ranges is None:
        return file.times & times == file.times
    span = ranges.get(file.partitions.low) if file.single_partition is not None else None
    return span is not None and file.offsets & span == file.offsets and file.times & times == file.times


def _batches(
    parquet: pq.ParquetFile, columns: list[str], ranges: Mapping[int, Span] | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of the row groups that may have rows of ``ranges``, each with the position of its first row."""
    first = 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if ranges is None or _may_contain(group, ranges):
            position = first
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[number], columns=columns):
                yield position, batch
                position += batch.num_rows
        first += group.num_rows


def _may_contain(group: pq.RowGroupMetaData, ranges: Mapping[int, Span]) -> bool:
    spans = {PARTITION: _ALL, OFFSET: _ALL}
    for at in range(group.num_columns):
        column = group.column(at)
        if column.path_in_schema in spans and column.statistics is not None and column.statistics.has_min_max:
            spans[column.path_in_schema] = Span(column.statistics.min, column.statistics.max + 1)
    part = DataFile("", 0, partitions=spans[PARTITION], offsets=spans[OFFSET])
    return any(part.may_contain(partition, offsets) for partition, offsets in ranges.items())


def _completed(batch: pa.RecordBatch, wanted: Sequence[str], constants: Mapping[str, object]) -> pa.RecordBatch:
    """Return ``batch`` with the columns that are constant in the file. Their values come from the table's log."""
    for name in dict.fromkeys(wanted):
        if name in constants:
            batch = batch.append_column(name, pa.repeat(pa.scalar(constants[name]), batch.num_rows))
    return batch


def _kept(
    batch: pa.RecordBatch, position: int, ranges: Mapping[int, Span] | None, *, times: Span, deleted: bytes
) -> pa.BooleanArray:
    partitions, offsets = _numbers(batch, PARTITION), _numbers(batch, OFFSET)
    kept = np.full(batch.num_rows, ranges is None)
    for partition, span in (ranges or {}).items():
        kept |= (partitions == partition) & (offsets >= span.low) & (offsets < span.high)
    if times != _ALL:
        us = _numbers(batch, TIMESTAMP)
        kept &= (us >= times.low) & (us < times.high)
    if deleted:
        positions = np.frombuffer(deleted, dtype=np.int64) - position
        kept[positions[(positions >= 0) & (positions < batch.num_rows)]] = False
    return pa.array(kept)


def _numbers(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """Return the values of an integer column, or of a time column in microseconds."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(_UTC_US)
    return column.cast(pa.int64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def place_of(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the partitions, offsets and times (us) of the rows of a batch."""
    return _numbers(batch, PARTITION), _numbers(batch, OFFSET), _numbers(batch, TIMESTAMP)


def ends_of_rows(table: str, files: Sequence[DataFile]) -> dict[int, int]:
    """Return, for each partition, the offset after its last row in ``files``.

    Use this function if Delta has deleted every commit that recorded the archive's progress. In that case, only the
    rows show the progress.

    Raises:
        ArchiveFileGone: VACUUM has deleted a file.
    """
    ends: dict[int, int] = {}
    for file in files:
        number = file.single_partition
        if number is not None and file.offsets.high != _ALL.high and not file.deleted:
            ends[number] = max(file.offsets.high, ends.get(number, 0))
            continue
        for batch in read_rows(table, file, (PARTITION, OFFSET, TIMESTAMP), ranges=None):
            partitions, offsets, _ = place_of(batch)
            for number in np.unique(partitions).tolist():
                ends[number] = max(int(offsets[partitions == number].max()) + 1, ends.get(number, 0))
    return ends
