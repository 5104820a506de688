"""The reader of a topic's Delta table at one version, by partition and ascending offset. It needs no JVM.

It reads windows of offsets whose rows take about ``WINDOW_BYTES``. If several windows overlap a file, the file is read
several times, each time without the row groups outside the window. So the window bounds the memory, even if compaction
has put rows of many offsets into one file. Rows of the quarantine (records that could not be cast) are returned with
their original values, in the order of offsets among the other rows. They are returned even if the archive has not
committed the other rows of their batch yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparklog.delta.archive_progress import ArchiveProgress, read_progress
from sparklog.delta.data_file import DataFile
from sparklog.delta.restore_batches import Numbers, RestoredRows
from sparklog.delta.rows import ends_of_rows, place_of, read_rows
from sparklog.delta.snapshot import check_kind, data_files
from sparklog.delta.table import OFFSET, PARTITION, RECORD, TIMESTAMP, quarantine_path
from sparklog.delta.topic_description import PROPERTY, ArchivedTopic, from_json
from sparklog.errors import ConfigError, SparklogError
from sparklog.model import Span
from sparklog.record.schema import DEFAULT_EVENT_TIME, fit_table

WINDOW_BYTES = 64 << 20
_FIRST_WINDOW = 20_000
_LARGEST_WINDOW = 1 << 21
_PLACE = (PARTITION, OFFSET, TIMESTAMP)


class ArchiveDamagedError(SparklogError):
    """The error for a damaged archive, in which the same offset occurs twice."""


@dataclass(frozen=True, slots=True)
class Archive:
    """One version of a topic's archive: the Delta table, and the quarantine of records that could not be cast.

    Create it with ``open_archive``.
    """

    table: str
    version: int
    #: Delta's id of the table. If the table at a path is replaced, the new one has another id.
    table_id: str
    topic: ArchivedTopic
    progress: ArchiveProgress
    files: tuple[DataFile, ...]
    #: For each partition, the end of its log according to the table and the quarantine. If a restored log ended before
    #: a row of the quarantine, a new record would get the offset of that row, and the archive would take the record for
    #: that row.
    ends: Mapping[int, int]
    quarantine: str = ""
    quarantined: tuple[DataFile, ...] = ()

    @property
    def name(self) -> str:
        """Return the topic id, table id and version of this archive, as in the topic setting ``restored.from``."""
        return f"{self.progress.topic_id}/{self.table_id}@{self.version}"

    def end(self, partition: int) -> int:
        """Return the end offset of a partition's log according to the table and the quarantine.

        It is 0 for a partition without archived offsets.
        """
        return self.ends.get(partition, 0)

    @property
    def partitions(self) -> int:
        return max([self.topic.partitions, *(partition + 1 for partition in self.ends)])

    def first_offset(self, partition: int) -> int:
        """Return the offset of a partition's first archived record, or the partition's end offset if it has none."""
        rows = next(self.rows(partition), None)
        return self.end(partition) if rows is None else int(rows.offsets[0])

    def rows(self, partition: int, start: int = 0) -> Iterator[RestoredRows]:
        """Yield the archived rows of a partition from offset ``start`` on, in ascending order of offsets.

        Raises:
            ArchiveFileGone: VACUUM has deleted a file of this version.
            ArchiveDamagedError: an offset occurs twice.
            BrokerError: SCHEMA_MISMATCH if values do not fit the topic's columns.
        """
        end = self.end(partition)
        whole = Span(start, end)
        files = [file for file in self.files if file.may_contain(partition, whole)]
        extra = [file for file in self.quarantined if file.may_contain(partition, whole)]
        size = _FIRST_WINDOW
        while start < end:
            held = [file.offsets for file in (*files, *extra) if file.may_contain(partition, Span(start, end))]
            if not held:
                return
            start = max(start, min(span.low for span in held))
            window = Span(start, _window_end(held, start, min(start + size, end)))
            rows = self._window(partition, window, files, extra)
            start = window.high
            if rows is not None:
                bytes_per_row = max(rows.records.nbytes / len(rows.offsets), 1)
                size = int(min(WINDOW_BYTES / bytes_per_row, 8 * size, _LARGEST_WINDOW)) or 1
                yield rows
            else:  # There is only a gap, and the position of the next rows is unknown.
                size = min(2 * size, _LARGEST_WINDOW)

    def _window(
        self, partition: int, window: Span, files: list[DataFile], extra: list[DataFile]
    ) -> RestoredRows | None:
        columns = [name for name in self.topic.columns.names if not (self.topic.is_default and name == "timestamp")]
        found: list[RestoredRows] = []
        for file in files:
            if file.may_contain(partition, window):
                ranges = {partition: window}
                found += map(self._rows, read_rows(self.table, file, [*columns, *_PLACE], ranges=ranges))
        bad: list[RestoredRows] = []
        for file in extra:
            if file.may_contain(partition, window):
                batches = read_rows(self.quarantine, file, [RECORD, *_PLACE], ranges={partition: window})
                bad += (self._rows(_unpacked(batch)) for batch in batches)
        return _sorted(found, bad, f"{self.table} at version {self.version}, partition {partition}")

    def _rows(self, batch: pa.RecordBatch) -> RestoredRows:
        """Return rows with the topic's columns and types. Columns that a file does not have are null."""
        _, offsets, times = place_of(batch)
        own = batch.select([name for name in batch.schema.names if name not in _PLACE])
        if self.topic.is_default:
            own = own.append_column(DEFAULT_EVENT_TIME, batch.column(TIMESTAMP))
        return RestoredRows(fit_table(own, self.topic.columns), offsets, times)


def open_archive(table: str, version: int | None = None) -> Archive:
    """Open one version of a topic's archive (None: the newest).

    Raises:
        ConfigError: ``table`` is not an archive, does not have the original records, or has unsupported features.
        ArchiveProgressError: the table's progress cannot be read.
    """
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(table):
        raise ConfigError(f"there is no Delta table at {table}")
    found = DeltaTable(table, version=version)
    check_kind(table, found)
    said = read_progress(table, found.version())
    described = found.metadata().configuration.get(PROPERTY)
    if not described:
        raise ConfigError(f"{table} was not written by an archive, or has no description of its topic")
    topic = from_json(described)
    _check_columns(table, found, topic)
    files = data_files(table, found)
    quarantine = _quarantine_of(table)
    bad = DeltaTable(quarantine) if DeltaTable.is_deltatable(quarantine) else None
    bad_files = data_files(quarantine, bad) if bad is not None else ()
    progress = said.progress if said is not None else _progress_of_rows(table, topic, files)
    ends = dict(progress.ends)
    # The quarantine is always read at its newest version, so with an older version of the table it also has rows of
    # later batches.
    if version is None or read_progress(table) == said:
        for partition, end in ends_of_rows(quarantine, bad_files).items():
            ends[partition] = max(end, ends.get(partition, 0))
    return Archive(
        table,
        found.version(),
        str(found.metadata().id),
        topic,
        progress,
        files,
        ends,
        quarantine if bad is not None else "",
        bad_files,
    )


def _progress_of_rows(table: str, topic: ArchivedTopic, files: Sequence[DataFile]) -> ArchiveProgress:
    """Return progress that is computed from the rows, because Delta has deleted all commits of the archive.

    The logs may have ended later, with offsets without records.
    """
    ends = {**dict.fromkeys(range(topic.partitions), 0), **ends_of_rows(table, files)}
    return ArchiveProgress(topic=topic.name, topic_id=topic.topic_id, batch=-1, ends=ends, mode="append")


def _quarantine_of(table: str) -> str:
    to, _, name = table.rstrip("/").rpartition("/")
    return quarantine_path(to or ".", name)


def _check_columns(table: str, found: object, topic: ArchivedTopic) -> None:
    """Raise ConfigError if the archive parsed records into columns, so that the table lacks the original records."""
    there = {field.name for field in found.schema().fields}  # type: ignore[attr-defined]
    wanted = {"key", "value"} if topic.is_default else set(topic.columns.names)
    if missing := sorted(wanted - there):
        raise ConfigError(
            f"{table} does not have the original records of topic {topic.name}: column {missing[0]} is missing"
        )


def _window_end(held: list[Span], start: int, end: int) -> int:
    """Return the end of the window: ``end``, or the end of a file in the second half of the window.

    That file is then read only once.
    """
    ends = [span.high for span in held if start + (end - start) // 2 <= span.high <= end]
    return max(ends, default=end)


def _unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a quarantine with the columns of the records in them."""
    record = batch.column(RECORD)
    names = [record.type.field(at).name for at in range(record.type.num_fields)]
    columns = [*record.flatten(), *(batch.column(name) for name in _PLACE)]
    return pa.RecordBatch.from_arrays(columns, names=[*names, *_PLACE])


def _sorted(found: list[RestoredRows], bad: list[RestoredRows], where: str) -> RestoredRows | None:
    """Return all rows by offset. A quarantine may have a row twice, or a row that is also in the table."""
    parts = [*found, *bad]
    if not parts:
        return None
    offsets: Numbers = np.concatenate([part.offsets for part in parts])
    order = np.argsort(offsets, kind="stable")
    offsets = offsets[order]
    is_again = np.concatenate([[False], offsets[1:] == offsets[:-1]])
    in_table = sum(len(part.offsets) for part in found)
    if (twice := is_again & (order < in_table)).any():
        raise ArchiveDamagedError(f"{where}: offset {int(offsets[np.argmax(twice)])} occurs twice")
    order, offsets = order[~is_again], offsets[~is_again]
    records = parts[0].records if len(parts) == 1 else pa.concat_batches([part.records for part in parts])
    if not np.array_equal(order, np.arange(len(records))):
        records = records.take(pa.array(order))
    times: Numbers = np.concatenate([part.times for part in parts])[order]
    return RestoredRows(records, offsets, times)
