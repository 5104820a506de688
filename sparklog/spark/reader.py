"""The batch read: when the DataFrame is planned, the driver fixes offset ranges and splits them into tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.spark.columns import ColumnPlan, plan_columns
from sparklog.spark.offsets import (
    PartitionRange,
    StartPlace,
    asked_offsets,
    cut_ranges,
    settle,
    settle_ranges,
    times_to_ask,
)
from sparklog.spark.range_read import RangeRead, report_losses
from sparklog.spark.read_options import ReadOptions
from sparklog.spark.read_task import TaskReader, read_task
from sparklog.spark.schema import CAST_ERROR_COLUMN, TopicShape, check_projection, topic_columns
from sparklog.spark.task_login import TaskLogin
from sparklog.spark.task_scope import read_scope
from sparklog.spark.token_renewal import LoginOfTasks
from sparklog.spark.topics import Selected, SourceTopic, TopicLogEnds

if TYPE_CHECKING:
    from sparklog.delta.snapshot import TableSnapshot
    from sparklog.spark.history_plan import BothEnds

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The result of planning a batch read: its options, its topics, and a column plan for each topic.

    It is small and is pickled.
    """

    options: ReadOptions
    selected: Selected
    columns: Mapping[str, ColumnPlan]


def plan_read(view: SourceTopic, options: ReadOptions, *, schema: StructType) -> ReadPlan:
    """Look up the topics, and plan where the values of each column of ``schema`` come from.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the columns that a topic does not have; UNKNOWN_TOPIC_OR_PARTITION with the
            missing topics or partitions.
        ConfigError: the pattern matches no topic.
    """
    selected = view.select(options.selection)
    columns = {name: project(name, topic.shape, schema) for name, topic in selected.topics.items()}
    return ReadPlan(options, selected, columns)


def project(topic: str, shape: TopicShape, schema: StructType) -> ColumnPlan:
    """Return, for one topic, a plan that says where the values of each column of ``schema`` come from.

    Raises BrokerError SCHEMA_MISMATCH with the columns that the topic does not have.
    """
    with_errors = CAST_ERROR_COLUMN.name in schema.fieldNames() and CAST_ERROR_COLUMN.name not in shape.schema.names
    try:
        offered = topic_columns(shape, include_headers=True, include_cast_errors=with_errors)
        check_projection(schema, offered, with_errors=with_errors)
    except BrokerError as error:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"topic {topic}: {error.detail}") from None
    return plan_columns(schema, shape)


class BatchReader(DataSourceReader):
    """The reader of a batch read.

    The driver creates it and calls ``partitions`` once per ``load()``. Tasks get a ``TaskReader``. The class
    deliberately has no method ``pushFilters``; the module ``source`` explains why.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        #: The login of the tasks. Each task has its own copy in its plan.
        self._login = LoginOfTasks(plan.options.security)

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskReader, ()

    def partitions(self) -> list[InputPartition]:
        """Return the tasks of the read, for ranges of the current logs.

        ``latest`` means the current readable end of a log.

        Raises:
            DataLoss: some of the records are neither in the log nor in the archive.
        """
        options, selected = self._plan.options, self._plan.selected
        login = TaskLogin(options.bootstrap, options.security, lifetime_ms=options.token_lifetime_ms)
        self._login = login.of(read_scope(selected.topics))
        with SourceTopic(options.bootstrap, options.security) as view:
            if options.history is not None:
                return self._tasks_of_both(view, options.history)
            ranges = asked_ranges(view, options, selected, _ends(view, options, selected))
            ranges = _from_first_time(view, options, ranges)
        return [self._log_task(piece) for piece in self._cut(ranges)]

    def _tasks_of_both(self, view: SourceTopic, path: str) -> list[InputPartition]:
        from sparklog.spark.history import tasks_of_both

        ((name, topic),) = self._plan.selected.topics.items()
        found = ranges_of_both(view, path, self._plan.options, self._plan.selected)
        return tasks_of_both(
            self._cut([*found.archived, *found.logged]),
            found.both.snapshot,
            topic,
            columns=self._plan.columns[name],
            log_task=self._log_task,
            times=self._plan.options.where.timestamp,
            apart=self._plan.options.is_cut,
        )

    def _cut(self, ranges: list[PartitionRange]) -> list[PartitionRange]:
        options = self._plan.options
        return cut_ranges(ranges, at_least=options.min_partitions, max_records=options.max_records_per_partition)

    def _log_task(self, piece: PartitionRange) -> RangeRead:
        options = self._plan.options
        return RangeRead(
            options.bootstrap,
            piece.partition,
            self._plan.selected.topics[piece.partition.topic].topic_id,
            start=piece.start,
            end=piece.end,
            columns=self._plan.columns[piece.partition.topic],
            isolation=options.isolation,
            fail_on_data_loss=options.fail_on_data_loss,
            times=options.where.timestamp if options.where.by_time else None,
            local=options.local_reads,
            security=self._login.security,
            renewal=self._login.renewal,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a task as batches of the declared columns. Raises the same errors as ``read_task``."""
        return read_task(partition)


def _ends(
    view: SourceTopic, options: ReadOptions, selected: Selected, known: Mapping[TopicPartition, int] | None = None
) -> dict[TopicPartition, TopicLogEnds]:
    asked = asked_offsets(options.starting, options.ending)
    believed = {tp: max(asked.get(tp, 0), (known or {}).get(tp, 0)) for tp in {*asked, *(known or {})}}
    return view.ends(selected.partitions, options.isolation, known=believed)


def asked_ranges(
    view: SourceTopic,
    options: ReadOptions,
    selected: Selected,
    ends: Mapping[TopicPartition, TopicLogEnds],
    *,
    archive: TableSnapshot | None = None,
) -> list[PartitionRange]:
    """Return the ranges that the options of a batch read request.

    ``ends`` are the start and end offsets of the logs, or of archive and log together.

    Raises:
        ConfigError: a start is after its end, or an option names single partitions, but not exactly the partitions of
            the read.
        BrokerError: OFFSET_OUT_OF_RANGE if an offset is outside the log, or no record is at or after a time.
    """
    starts = settle_place(view, options.starting, ends, options=options, selected=selected, archive=archive)
    stops = settle_place(view, options.ending, ends, options=options, selected=selected, archive=archive)
    ranges = [found for found in settle_ranges(starts, stops) if options.where.takes(found.partition.partition)]
    low, high = options.where.offset
    ranges = [PartitionRange(tp, max(start, low), min(end, high)) for tp, start, end in ranges]
    return [found for found in ranges if found.start < found.end]


@dataclass(frozen=True, slots=True)
class HistoryRanges:
    """The ranges that a read of the history takes from the archive (``archived``) and from the log (``logged``).

    Offsets below the archive's end offset are read from the archive, and later offsets from the log.
    """

    both: BothEnds
    archived: list[PartitionRange]
    logged: list[PartitionRange]


def ranges_of_both(view: SourceTopic, path: str, options: ReadOptions, selected: Selected) -> HistoryRanges:
    """Return the ranges to read from the archive at ``path``, and the ranges to read from the log.

    ``selected`` has exactly one topic, to which both belong.

    Raises:
        DataLoss: some of the requested records are neither in the archive nor in the log.
        ConfigError, ArchiveProgressError: ``path`` has no archive of the topic.
        BrokerError: OFFSET_OUT_OF_RANGE if an offset is outside archive and log, or no record is at or after a time.
    """
    from sparklog.spark.history import History
    from sparklog.spark.history_plan import split_at_archive_end

    ((name, topic),) = selected.topics.items()
    both = History(path, name).ends(topic, lambda known: _ends(view, options, selected, known))
    ranges = asked_ranges(view, options, selected, both.ends, archive=both.snapshot)
    report_losses(both.losses(ranges), fail=options.fail_on_data_loss)
    archived, logged = split_at_archive_end(ranges, both.snapshot.progress.ends)
    return HistoryRanges(both, archived, _from_first_time(view, options, logged, is_archived=True))


def _from_first_time(
    view: SourceTopic, options: ReadOptions, ranges: list[PartitionRange], *, is_archived: bool = False
) -> list[PartitionRange]:
    """Return the ranges without the batches at their start whose records are all too old.

    ``is_archived`` means that records that retention deletes during the call are in the archive.
    """
    first_us = options.where.timestamp.low
    if first_us < 0 or not ranges:
        return ranges
    found = view.batches_at({part.partition: first_us for part in ranges}, options.isolation)
    # Query the log starts after the lookup by time: if a log now begins at or below a range, it had the whole range at
    # the lookup.
    starts = view.starts(found) if is_archived else {}
    return narrow(ranges, found, starts)


def narrow(
    ranges: list[PartitionRange],
    firsts: Mapping[TopicPartition, int | None],
    starts: Mapping[TopicPartition, int],
) -> list[PartitionRange]:
    """Return ``ranges``, each beginning at the first offset that can match. ``firsts`` has this offset by partition.

    A range of a partition without a match (None) is omitted. The end of a range does not change: the timestamps in a
    log are not ordered, so any later record may match. ``starts`` has the log start offsets. If a log now begins after
    the start of a range, the start does not change either: matching records may have been archived, and deleted from
    the log, before the lookup.
    """
    narrowed = []
    for tp, start, end in ranges:
        first = start if starts.get(tp, 0) > start else firsts[tp]
        if first is not None and max(start, first) < end:
            narrowed.append(PartitionRange(tp, max(start, first), end))
    return narrowed


def settle_place(
    view: SourceTopic,
    place: StartPlace,
    ends: Mapping[TopicPartition, TopicLogEnds],
    *,
    options: ReadOptions,
    selected: Selected,
    archive: TableSnapshot | None = None,
) -> dict[TopicPartition, int]:
    """Resolve ``place``, the start or the end of the read, to an offset in each partition.

    With failOnDataLoss=false, a given offset outside the log is moved to the nearer end of the log.

    Raises:
        ConfigError: ``place`` names single partitions, but not exactly the partitions of the read.
        BrokerError: OFFSET_OUT_OF_RANGE if an offset is outside the log, or no record is at or after a time.
    """
    times = times_to_ask(place, ends)
    at_times = view.records_at(times, selected, ends=ends, isolation=options.isolation) if times else {}
    if archive is not None and times:
        from sparklog.spark.history import as_new_as_log, records_of_both

        (topic,) = selected.topics.values()
        at_times = records_of_both(as_new_as_log(archive, topic, view.starts(times)), times, at_times)
    held = {tp: found.range for tp, found in ends.items()}
    try:
        return settle(place, held, at_times)
    except BrokerError as error:
        if options.fail_on_data_loss or times:
            raise
        _LOG.warning("%s: reading from the nearest available offset", error)
        return settle(place, held, at_times, strict=False)
