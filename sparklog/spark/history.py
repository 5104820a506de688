"""The archive of a topic beside its log, as planning sees both. Nothing is asked before it is wanted.

The archive goes on while it is looked at, and so does retention, which may follow it closely. So the two are looked at
in this order, the table and then the log, and again where they do not fit together: what does not fit twice with
nothing archived in between is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from sparklog.delta.snapshot import Snapshot, find_table, take_snapshot
from sparklog.delta.table import META_COLUMNS
from sparklog.delta.time_index import BEGINNING_US, first_offsets
from sparklog.errors import ConfigError
from sparklog.model import Span, TopicPartition
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.history_plan import BothEnds, pack_files, split_at_seam
from sparklog.spark.history_read_task import FilesRead
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.range_read import ArchivePlace, RangeRead
from sparklog.spark.topics import LogEnds, SelectedTopic

_ALL = Span()
#: The columns of a topic without a schema in its table, beside those of place and time.
_DEFAULT_OWN = ("key", "value", "headers")
#: How often the archive may go on between two looks that do not fit.
_LOOKS = 10

#: Asks for the ends of the log, which is believed to reach what is given.
AskEnds = Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, LogEnds]]


class History:
    """The archive of one topic. Used by one thread of a planning process; keeps the last snapshot it took."""

    def __init__(self, path: str, topic: str) -> None:
        self._path = path
        self._topic = topic
        self._table: str | None = None
        self._snapshot: Snapshot | None = None
        #: First archived offsets, as they were found: an archive grows at its end. Of partitions without any row in it
        #: the seam, up to which that holds.
        self._first: dict[int, int] = {}
        self._rowless: dict[int, int] = {}
        self._topic_id = ""

    def snapshot(self, topic: SelectedTopic, *, fresh: bool = False) -> Snapshot:
        """The last one taken; a new one where there is none, for a topic made anew, or where ``fresh``.

        Raises:
            ConfigError, SeamError: as ``take_snapshot``.
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
        """Both stores, as they are needed by who stands at ``positions`` (None: at the beginning): a query that has
        passed the seam goes on in the log, and the snapshot is the one that was taken before.

        Raises:
            ConfigError, SeamError: as ``take_snapshot``; BrokerError, ClientTimeout: as ``ask``.
        """
        fresh = self._snapshot is None
        torn_at: int | None = None
        for _ in range(_LOOKS):
            snapshot = self.snapshot(topic, fresh=fresh)
            log = ask({TopicPartition(self._topic, number): end for number, end in snapshot.seam.ends.items()})
            found = BothEnds(snapshot, log, self._firsts(snapshot, log))
            if positions is not None and not found.is_archive_needed(positions):
                break
            if fresh and (not found.is_torn or torn_at == snapshot.version):
                break
            torn_at = snapshot.version if fresh else None
            fresh = True
        return found

    def _firsts(self, snapshot: Snapshot, log: Mapping[TopicPartition, LogEnds]) -> Mapping[int, int]:
        if snapshot.seam.begins:
            return snapshot.seam.begins
        seam = snapshot.seam.ends
        missing = {
            tp.partition: BEGINNING_US
            for tp in log
            if tp.partition not in self._first and self._rowless.get(tp.partition, 0) < seam.get(tp.partition, 0)
        }
        if missing:
            self._first.update(first_offsets(snapshot, missing))
            self._rowless.update({number: seam[number] for number in missing if number not in self._first})
        return self._first


def _check_columns(snapshot: Snapshot, topic: SelectedTopic) -> None:
    """Raises ConfigError where values were taken apart as they were archived, and where Delta, which ignores case, has
    them under other names. A column that a typed topic has and the archive lacks came later."""
    there = {name.lower(): name for name in snapshot.columns}
    own = _DEFAULT_OWN if topic.shape.is_default else topic.shape.schema.names
    if topic.shape.is_default and not there.keys() >= set(own):
        raise ConfigError(
            f"history: {snapshot.table} has columns that were taken out of the topic's values, and not the values: "
            "archive the topic without a schema to another path, or read the table and the topic each for itself"
        )
    for name in (*own, *META_COLUMNS.names):
        if (found := there.get(name.lower(), name)) != name:
            raise ConfigError(
                f"history: {snapshot.table} has a column {found}, which is {name} elsewhere: archive the topic to "
                "another path"
            )


def tasks_of_both(
    pieces: Sequence[PartitionRange],
    snapshot: Snapshot,
    topic: SelectedTopic,
    *,
    columns: ColumnPlan,
    log_task: Callable[[PartitionRange], RangeRead],
    times: Span = _ALL,
    apart: bool = False,
) -> list[InputPartition]:
    """Tasks that read ``pieces``, none of which lies on both sides of the seam. The archive's are shared by file, so
    that each is read once, but for ``apart``: then each piece is a task of its own, or several."""
    archived, logged = split_at_seam(pieces, snapshot.seam.ends)
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
    assert len(spans) == len(pieces), "one piece of each partition, or each for itself"
    return spans


def as_new_as_log(snapshot: Snapshot, topic: SelectedTopic, starts: Mapping[TopicPartition, int]) -> Snapshot:
    """``snapshot``, or a newer one where the log begins behind its seam by now. What was looked up in the log by time
    may then have passed over records that the archive has taken over since. ``starts``: asked for behind that.

    Raises:
        ConfigError, SeamError: as ``take_snapshot``.
    """
    if all(start <= snapshot.seam.ends.get(tp.partition, 0) for tp, start in starts.items()):
        return snapshot
    (name,) = {tp.topic for tp in starts}
    return take_snapshot(snapshot.table, name, topic.origin)


def records_of_both(
    snapshot: Snapshot, times: Mapping[TopicPartition, int], in_log: Mapping[TopicPartition, int | None]
) -> dict[TopicPartition, int | None]:
    """The offset of the first record at or after each time (us): the archive's, where it has one, else that of the
    log, which was found there and counts from the seam on."""
    archived = first_offsets(snapshot, {tp.partition: time_us for tp, time_us in times.items()})
    found: dict[TopicPartition, int | None] = {}
    for tp in times:
        offset = in_log[tp]
        if tp.partition in archived:
            found[tp] = archived[tp.partition]
        else:
            found[tp] = None if offset is None else max(offset, snapshot.seam.ends.get(tp.partition, 0))
    return found
