"""A topic's archive (its Delta table) and log, for the planning of a read. Each of the two is read only on demand.

The archive grows while it is read, and retention may delete archived records from the log soon after. Therefore the
table is read first and then the log. If there is a gap between them, both are read again. Records are lost if the gap
remains although the table has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from sparklog.delta.snapshot import TableSnapshot, find_table, take_snapshot
from sparklog.delta.table import META_COLUMNS
from sparklog.delta.time_index import BEGINNING_US, first_offsets
from sparklog.errors import ConfigError
from sparklog.model import Span, TopicPartition
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.history_plan import BothEnds, pack_files, split_at_archive_end
from sparklog.spark.history_read_task import FilesRead
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.range_read import ArchivePlace, RangeRead
from sparklog.spark.topics import SelectedTopic, TopicLogEnds

_ALL = Span()
#: The columns that the table of a topic without a schema must have, in addition to those of position and time.
_DEFAULT_OWN = ("key", "value", "headers")
#: The maximum number of reads of both stores, if the archive grows between reads and there is a gap.
_LOOKS = 10

#: A function that returns the ends of the log. Its argument has offsets that the log is expected to reach.
AskEnds = Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, TopicLogEnds]]


class History:
    """A reader of one topic's archive, for the planning of reads. It keeps the last snapshot of the archive's table.

    Not thread-safe: use it from one thread of a planning process.
    """

    def __init__(self, path: str, topic: str) -> None:
        self._path = path
        self._topic = topic
        self._table: str | None = None
        self._snapshot: TableSnapshot | None = None
        #: ``_first`` has the first archived offsets. They are cached, because an archive grows only at its end.
        #: ``_rowless`` has partitions without archived rows, each with the end offset up to which that is known.
        self._first: dict[int, int] = {}
        self._rowless: dict[int, int] = {}
        self._topic_id = ""

    def snapshot(self, topic: SelectedTopic, *, fresh: bool = False) -> TableSnapshot:
        """Return the last snapshot of the table, or take a new one.

        A new snapshot is taken if there is no last one, if the topic was recreated, or if ``fresh`` is set.

        Raises:
            ConfigError: there is no archive of the topic, or its columns do not fit the topic.
            ArchiveProgressError: the table's progress cannot be read.
        """
        if self._snapshot is None or fresh or topic.topic_id != self._topic_id:
            self._table = self._table or find_table(self._path, self._topic)
            self._snapshot = take_snapshot(self._table, self._topic, topic.origin)
            _check_columns(self._snapshot, topic)
            self._topic_id = topic.topic_id
        return self._snapshot

    def ends(
        self,
        topic: SelectedTopic,
        ask: AskEnds,
        *,
        positions: Mapping[TopicPartition, int] | None = None,
    ) -> BothEnds:
        """Return the ends of the archive and of the log, for a query that continues from ``positions``.

        If ``positions`` is None, the query reads each partition from its beginning. ``ask`` is a function that queries
        the ends of the log. If the query needs only the log, the table is not read again.

        Raises:
            ConfigError: there is no archive of the topic, or its columns do not fit the topic.
            ArchiveProgressError: the table's progress cannot be read.
            BrokerError, ClientTimeout: raised by ``ask``.
        """
        fresh = self._snapshot is None
        torn_at: int | None = None
        for _ in range(_LOOKS):
            snapshot = self.snapshot(topic, fresh=fresh)
            log = ask({TopicPartition(self._topic, number): end for number, end in snapshot.progress.ends.items()})
            found = BothEnds(snapshot, log, self._firsts(snapshot, log))
            if positions is not None and not found.is_archive_needed(positions):
                break
            if fresh and (not found.is_torn or torn_at == snapshot.version):
                break
            torn_at = snapshot.version if fresh else None
            fresh = True
        return found

    def _firsts(self, snapshot: TableSnapshot, log: Mapping[TopicPartition, TopicLogEnds]) -> Mapping[int, int]:
        if snapshot.progress.begins:
            return snapshot.progress.begins
        ends = snapshot.progress.ends
        missing = {
            tp.partition: BEGINNING_US
            for tp in log
            if tp.partition not in self._first and self._rowless.get(tp.partition, 0) < ends.get(tp.partition, 0)
        }
        if missing:
            self._first.update(first_offsets(snapshot, missing))
            self._rowless.update({number: ends[number] for number in missing if number not in self._first})
        return self._first


def _check_columns(snapshot: TableSnapshot, topic: SelectedTopic) -> None:
    """Raise ConfigError if the table's columns do not fit the topic.

    They do not fit if the archive parsed values into columns, or if the table has a column whose name differs only in
    case (Delta ignores case). A column of a typed topic that the table lacks is no error, because it was added later.
    """
    there = {name.lower(): name for name in snapshot.columns}
    own = _DEFAULT_OWN if topic.shape.is_default else topic.shape.schema.names
    if topic.shape.is_default and not there.keys() >= set(own):
        raise ConfigError(
            f"history: {snapshot.table} has columns parsed from the topic's values instead of the values: "
            "archive the topic without a schema to another path, or read the table and the topic separately"
        )
    for name in (*own, *META_COLUMNS.names):
        if (found := there.get(name.lower(), name)) != name:
            raise ConfigError(
                f"history: {snapshot.table} has a column {found}, which the topic calls {name}: archive the topic to "
                "another path"
            )


def tasks_of_both(
    pieces: Sequence[PartitionRange],
    snapshot: TableSnapshot,
    topic: SelectedTopic,
    *,
    columns: ColumnPlan,
    log_task: Callable[[PartitionRange], RangeRead],
    times: Span = _ALL,
    apart: bool = False,
) -> list[InputPartition]:
    """Return the tasks that read the ranges ``pieces`` from the archive and the log.

    ``log_task`` is a function that returns the task for a range of the log. By default, each file of the archive is
    read by one task, even if several ranges need it. With ``apart``, each range has its own tasks, one or more.
    """
    archived, logged = split_at_archive_end(pieces, snapshot.progress.ends)
    groups = [[piece] for piece in archived] if apart or not archived else [archived]
    of_archive = [
        FilesRead(snapshot.table, group[0].partition.topic, files, _spans(group), columns, times)
        for group in groups
        for files in pack_files(snapshot.files, group, times)
    ]
    place = ArchivePlace(snapshot.table, topic.origin)
    return [*of_archive, *(replace(log_task(piece), archive=place) for piece in logged)]


def _spans(pieces: Sequence[PartitionRange]) -> dict[int, Span]:
    spans = {tp.partition: Span(start, end) for tp, start, end in pieces}
    assert len(spans) == len(pieces), "one piece per partition, unless apart"
    return spans


def as_new_as_log(snapshot: TableSnapshot, topic: SelectedTopic, starts: Mapping[TopicPartition, int]) -> TableSnapshot:
    """Return ``snapshot``, or a new snapshot if the log now begins after the end of ``snapshot``.

    In that case, a lookup by time in the log may have skipped records that were archived, and deleted from the log,
    after ``snapshot`` was taken. ``starts`` are the log start offsets. They must be queried after the lookup.

    Raises:
        ConfigError: the table is no longer an archive of the topic.
        ArchiveProgressError: the table's progress cannot be read.
    """
    if all(start <= snapshot.progress.ends.get(tp.partition, 0) for tp, start in starts.items()):
        return snapshot
    (name,) = {tp.topic for tp in starts}
    return take_snapshot(snapshot.table, name, topic.origin)


def records_of_both(
    snapshot: TableSnapshot, times: Mapping[TopicPartition, int], in_log: Mapping[TopicPartition, int | None]
) -> dict[TopicPartition, int | None]:
    """Return, for each partition, the offset of the first record at or after the partition's time, or None.

    ``times`` are in microseconds. ``in_log`` has the offsets that the same lookup found in the log. They are used for
    partitions without such a record in the archive, but an offset below the archive's end offset is raised to it.
    """
    archived = first_offsets(snapshot, {tp.partition: time_us for tp, time_us in times.items()})
    found: dict[TopicPartition, int | None] = {}
    for tp in times:
        offset = in_log[tp]
        if tp.partition in archived:
            found[tp] = archived[tp.partition]
        else:
            found[tp] = None if offset is None else max(offset, snapshot.progress.ends.get(tp.partition, 0))
    return found
