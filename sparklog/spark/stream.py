"""The streaming read: the methods that Spark calls for each micro-batch. ``micro_batch_plan`` plans the batches.

Spark keeps one reader for planning while a query runs, and creates another one for ``read``. The reader does not query
the cluster until Spark requests the first offset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.limits import TriggerClock
from sparklog.spark.micro_batch_plan import (
    BatchRange,
    StreamPosition,
    Withheld,
    batch_ranges,
    end_of_batch,
    first_position,
    held_back,
    next_position,
    waiting,
)
from sparklog.spark.offsets import PartitionRange, asked_offsets, cut_ranges
from sparklog.spark.progress import GroupProgress
from sparklog.spark.range_read import DataLoss, RangeRead
from sparklog.spark.read_options import Assign, ReadOptions
from sparklog.spark.read_task import TaskReader, read_task
from sparklog.spark.reader import project, settle_place
from sparklog.spark.stream_offset import MARKER, Position, StreamOffset, is_marker, parse_stream_offset
from sparklog.spark.task_login import TaskLogin
from sparklog.spark.task_scope import read_scope
from sparklog.spark.topics import Selected, SourceTopic, TopicLogEnds

if TYPE_CHECKING:
    from sparklog.spark.history import History
    from sparklog.spark.history_plan import BothEnds

_LOG = logging.getLogger(__name__)

#: The maximum number of attempts if topics are deleted between the lookup of topics and the query of their offsets.
_ATTEMPTS = 5


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one run of a streaming query.

    One thread of Spark's planning process uses it. Tasks get a ``TaskReader``.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        #: The client of this run. It is created on demand, because the reader that serves tasks is pickled.
        self._open_view: SourceTopic | None = None
        self._login = TaskLogin(options.bootstrap, options.security, lifetime_ms=options.token_lifetime_ms)
        self._clock = TriggerClock()
        self._progress = GroupProgress(options.group_id) if options.group_id else None
        self._selected = Selected({}, ())
        #: For a query that reads the archive: the archive of its topic, and the last known ends of archive and log.
        self._history: History | None = None
        self._both: BothEnds | None = None
        #: The column plans by topic and topic id.
        self._columns: dict[tuple[str, str], ColumnPlan] = {}
        #: The start of the first batch, after this run has determined it.
        self._first: StreamPosition | None = None
        #: With the trigger AvailableNow: the ends of the logs when the run began.
        self._target: dict[TopicPartition, Withheld] | None = None
        self._available_now = False
        self._latest: dict[str, Any] | None = None
        self._reported: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskReader, ()

    # --- offsets ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - pyspark's name
        return dict(MARKER)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return self._options.limits.default_read_limit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_now = True
        # A missing topic is no error here. ``latestOffset`` handles it, because that knows whether the topic existed
        # before.
        _, self._target = self._read_topics(known=(), positions={})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the batch that begins at ``start``, or ``start`` if there are not enough new records.

        Raises:
            DataLoss: records after ``start`` are lost or may be lost, and the options do not allow that.
            BrokerError: a topic's columns do not match, or an error persists after retries.
        """
        last = None if is_marker(start) else parse_stream_offset(start)
        if last is not None and self._progress is not None:
            self._progress.store(self._view.link, last.positions)
        position, held = self._next_position(last)
        self._check_columns(position)
        self._report_losses(position.losses)
        if not isinstance(limit, ReadAllAvailable) and not self._available_now:
            ready = sum(found.end - found.start for found in waiting(position, held).values())
            if self._clock.is_too_early(self._options.limits, ready, time.monotonic() * 1000):
                # The first batch never waits, because its end stores where the query began.
                assert last is not None
                return start
        end = end_of_batch(position, held, limit=limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if last is not None and end.positions == last.positions:
            return start
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the readable ends of the logs, as they were when the last batch was planned.

        Spark computes the lag from them.
        """
        return self._latest

    # --- batches ---

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of the batch from ``start`` to ``end``.

        Raises:
            DataLoss: a replayed batch needs a topic that no longer exists.
        """
        first = None if is_marker(start) else parse_stream_offset(start)
        # If both offsets are ``MARKER``, the batch is empty.
        last = first if is_marker(end) else parse_stream_offset(end)
        found = batch_ranges(first, last) if last is not None else []
        ranges = {part.partition: part for part in found if self._is_there(part)}
        wanted = [PartitionRange(part.partition, part.begin.offset, part.end) for part in ranges.values()]

        def log_task(piece: PartitionRange) -> RangeRead:
            return self._task(ranges[piece.partition], start=piece.start, end=piece.end)

        if self._options.history is None or not wanted:
            return [log_task(piece) for piece in self._cut(wanted)]
        return self._tasks_of_both(self._options.history, wanted, log_task)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a task. Raises the same errors as ``read_task``."""
        return read_task(partition)

    def stop(self) -> None:
        if self._open_view is not None:
            self._open_view.close()

    # --- lookups ---

    @property
    def _view(self) -> SourceTopic:
        if self._open_view is None:
            self._open_view = SourceTopic(self._options.bootstrap, self._options.security)
        return self._open_view

    def _next_position(self, last: StreamOffset | None) -> tuple[StreamPosition, dict[TopicPartition, Withheld]]:
        positions = last.positions if last is not None else {}
        known = {tp.topic for tp in positions} if last is not None else None
        selected, held = self._read_topics(known=known, positions=positions)
        self._selected = selected
        ends = {tp: Position(now.topic_id, now.readable) for tp, now in held.items()}
        self._latest = StreamOffset(ends).to_json() if ends else None
        if self._target is not None:
            held = held_back(held, self._target)
        if last is not None:
            # With AvailableNow, partitions that were created after the run began are in neither ``held`` nor
            # ``positions``.
            position = next_position(positions, held, unseen=self._unseen(positions, held))
            return self._with_losses_between(position, held), held
        if self._first is None:
            ends_now = {tp: TopicLogEnds(now.start, now.readable, now.epoch) for tp, now in held.items()}
            archive = self._both.snapshot if self._both is not None else None
            offsets = settle_place(
                self._view, self._options.starting, ends_now, options=self._options, selected=selected, archive=archive
            )
            self._first = self._with_losses_between(first_position(offsets, held), held)
        return self._first, held

    def _with_losses_between(self, position: StreamPosition, held: Mapping[TopicPartition, Withheld]) -> StreamPosition:
        """Return ``position`` with messages about records that neither the archive nor the log has."""
        if self._both is None:
            return position
        ahead = [
            PartitionRange(tp, begin.offset, held[tp].readable) for tp, begin in position.begins.items() if tp in held
        ]
        return replace(position, losses=(*position.losses, *self._both.losses(ahead)))

    def _read_topics(
        self, *, known: set[str] | tuple[()] | None, positions: Mapping[TopicPartition, Position]
    ) -> tuple[Selected, dict[TopicPartition, Withheld]]:
        """Return the topics and the ends of their logs. If ``known`` is None, all topics in the options must exist."""
        known_ends = {tp: found.offset for tp, found in positions.items()}
        known_ends = known_ends or asked_offsets(self._options.starting)
        for attempt in range(_ATTEMPTS):
            selected = self._view.select(self._options.selection, known=known)
            try:
                ends = self._ends(selected, known_ends, positions=positions)
                # A query that read uncommitted records before may be past the end that it can read now. So compare it
                # with the end of all records.
                beyond = [tp for tp in ends if tp in positions and positions[tp].offset > ends[tp].end]
                all_ends = self._view.ends(beyond, 0, known=known_ends) if self._options.isolation and beyond else {}
                break
            except BrokerError as error:
                # The topic was deleted between the two calls. The next lookup will not return it.
                if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or attempt == _ATTEMPTS - 1:
                    raise
        held = {}
        for tp, found in ends.items():
            end = max(found.end, all_ends.get(tp, found).end)
            held[tp] = Withheld(selected.topics[tp.topic].topic_id, found.start, found.end, end, found.epoch)
        return selected, held

    def _ends(
        self,
        selected: Selected,
        known: Mapping[TopicPartition, int],
        *,
        positions: Mapping[TopicPartition, Position],
    ) -> Mapping[TopicPartition, TopicLogEnds]:
        """Return the ends of the logs, or of archive and log together."""

        def ask(believed: Mapping[TopicPartition, int]) -> dict[TopicPartition, TopicLogEnds]:
            reached = {tp: max(known.get(tp, 0), believed.get(tp, 0)) for tp in {*known, *believed}}
            return self._view.ends(selected.partitions, self._options.isolation, known=reached)

        if self._options.history is None or not selected.topics:
            return ask({})
        ((name, topic),) = selected.topics.items()
        offsets = {tp: found.offset for tp, found in positions.items()}
        self._both = self._opened(self._options.history, name).ends(topic, ask, positions=offsets)
        return self._both.ends

    def _opened(self, path: str, topic: str) -> History:
        from sparklog.spark.history import History

        if self._history is None:
            self._history = History(path, topic)
        return self._history

    def _tasks_of_both(
        self, path: str, wanted: list[PartitionRange], log_task: Callable[[PartitionRange], RangeRead]
    ) -> list[InputPartition]:
        from sparklog.spark.history import tasks_of_both
        from sparklog.spark.history_plan import split_at_archive_end

        ((name, topic),) = self._selected.topics.items()
        columns = self._plan_of(name, topic.topic_id)
        assert columns is not None, "of a topic that was found"
        # Use the snapshot from the planning of the batch. A replay is not planned again, and uses the newest one.
        snapshot = self._opened(path, name).snapshot(topic)
        archived, logged = split_at_archive_end(wanted, snapshot.progress.ends)
        pieces = self._cut([*archived, *logged])
        return tasks_of_both(pieces, snapshot, topic, columns=columns, log_task=log_task, apart=self._options.is_cut)

    def _cut(self, ranges: list[PartitionRange]) -> list[PartitionRange]:
        options = self._options
        return cut_ranges(ranges, at_least=options.min_partitions, max_records=options.max_records_per_partition)

    def _unseen(
        self, positions: Mapping[TopicPartition, Position], held: Mapping[TopicPartition, Withheld]
    ) -> set[TopicPartition]:
        """Return the partitions of the query that the queried broker does not know yet.

        A topic never loses partitions, so if one is missing, the broker's metadata is outdated.
        """
        if isinstance(self._options.selection, Assign):
            return set()
        topics = self._selected.topics
        return {
            tp
            for tp, found in positions.items()
            if tp not in held and tp.topic in topics and topics[tp.topic].topic_id == found.topic_id
        }

    def _check_columns(self, position: StreamPosition) -> None:
        for name in {tp.topic for tp in position.begins}:
            self._plan_of(name, self._selected.topics[name].topic_id)

    def _plan_of(self, name: str, topic_id: str) -> ColumnPlan | None:
        """Return the column plan of a topic, or None if no topic with this id exists."""
        plan = self._columns.get((name, topic_id))
        if plan is None:
            topic = self._selected.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                plan = self._columns[name, topic_id] = project(name, topic.shape, self._schema)
        return plan

    def _is_there(self, part: BatchRange) -> bool:
        tp, topic_id = part.partition, part.begin.topic_id
        if self._plan_of(tp.topic, topic_id) is None:
            # This is a replay before the first lookup, or the topic no longer exists.
            self._selected = self._view.select(self._options.selection, known={tp.topic})
        if self._plan_of(tp.topic, topic_id) is not None:
            return True
        offsets = f"offsets {part.begin.offset} to {part.end}"
        self._report_losses((f"{tp}: the batch needs {offsets} of the topic with id {topic_id}, which does not exist",))
        return False

    def _task(self, part: BatchRange, *, start: int, end: int) -> RangeRead:
        plan = self._plan_of(part.partition.topic, part.begin.topic_id)
        assert plan is not None, "looked up before"
        login = self._login.of(read_scope(self._selected.topics))
        return RangeRead(
            self._options.bootstrap,
            part.partition,
            part.begin.topic_id,
            start=start,
            end=end,
            columns=plan,
            isolation=self._options.isolation,
            fail_on_data_loss=self._options.fail_on_data_loss,
            last_epoch=part.begin.epoch if start == part.begin.offset else -1,
            local=self._options.local_reads,
            security=login.security,
            renewal=login.renewal,
        )

    def _report_losses(self, losses: tuple[str, ...]) -> None:
        """Raise DataLoss for the first loss, or log a warning for each loss once."""
        if losses and self._options.fail_on_data_loss:
            more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
            raise DataLoss(losses[0] + more)
        for loss in losses:
            if loss not in self._reported:
                self._reported.add(loss)
                _LOG.warning("records may be missing: %s", loss)
