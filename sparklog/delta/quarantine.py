"""The quarantine of bad rows: a separate Delta table whose rows are identified by partition and offset.

The bad rows of a batch are committed before its other rows. If an archive crashes between the two commits, the
quarantine has rows at or above the table's ends: *pending* rows. Pending rows stay in the quarantine. When their
offsets are archived again, these rows are not written again, neither to the quarantine nor to the table, even if they
could be cast now. So every record below the table's ends is in exactly one of the two tables, even if batches were
repeated with other bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from sparklog.delta.archive_progress import ArchiveProgress, app_id
from sparklog.delta.archive_table import ArchiveFenced, ArchiveRefused, ArchiveTable
from sparklog.delta.table import OFFSET, PARTITION, needed_properties
from sparklog.errors import SparklogError

#: There are no statistics of times, because bad rows may have times that no format of statistics supports.
_PROPERTIES = {"delta.dataSkippingStatsColumns": f"{PARTITION},{OFFSET}"}


class QuarantineMoved(SparklogError):
    """The error raised when another archive has committed to the quarantine since this run last read it.

    The caller retries, because the commit to the topic's table decides which of the two archives continues.
    """


class Quarantine:
    """The quarantine of one topic: a Delta table of its bad rows, which are records that could not be cast.

    Not thread-safe: use it only in the thread that archives the topic. The table is created when it gets its first row.
    """

    def __init__(self, spark: SparkSession, path: str, columns: StructType) -> None:
        self.table = ArchiveTable(spark, path)
        self._spark = spark
        self._columns = columns
        #: The newest progress of the quarantine when this run last read it.
        self._expected: ArchiveProgress | None = None
        self._pending: DataFrame | None = None
        self._pending_ends: Mapping[int, int] = {}

    def begin(self, ends: Mapping[int, int]) -> None:
        """Prepare for a query: find the pending rows.

        Pending rows are at or above ``ends``, the end offsets of the topic's table.
        """
        self._expected = self.table.refresh()
        self._pending, self._pending_ends = None, {}
        if not self.table.exists:
            return
        if needed_properties(self._columns):
            # The topic may have new columns; the next bad row adds them to the quarantine.
            self.table.bring_properties({}, self._columns, self.table.detail())
        found = self._spark.read.format("delta").load(self.table.path).where(_from(ends)).select(PARTITION, OFFSET)
        rows = found.groupBy(PARTITION).agg(sf.max(OFFSET).alias(OFFSET)).collect()
        if rows:
            self._pending = found
            self._pending_ends = {row[PARTITION]: row[OFFSET] + 1 for row in rows}

    def check_topic(self, topic_ids: Collection[str]) -> None:
        """Raise ArchiveRefused if the pending rows belong to another topic.

        Otherwise the topic's records at the same offsets would be missing from its new table. ``topic_ids`` are the ids
        of the topic and of the topic that it was restored from.
        """
        if self._pending is None:
            return
        if self._expected is not None:
            is_own = self._expected.topic_id in topic_ids
        else:  # Delta has deleted the commits that recorded it.
            is_own = any(self.table.transaction(app_id(found)) >= 0 for found in topic_ids)
        if not is_own:
            raise ArchiveRefused(
                f"{self.table.path} has bad rows of an earlier topic, but the topic's table is new: move the quarantine"
                " away, or archive the topic to another path"
            )

    def without_pending(self, rows: DataFrame, ends: Mapping[int, int]) -> DataFrame:
        """Return ``rows``, the rows of a batch with the start offsets ``ends``, without the pending rows."""
        if self._pending is None or all(ends.get(number, 0) >= end for number, end in self._pending_ends.items()):
            return rows
        return rows.join(self._pending, [PARTITION, OFFSET], "left_anti")

    def add(self, rows: DataFrame, progress: ArchiveProgress) -> None:
        """Commit the bad rows of the next batch to the quarantine.

        ``progress`` is the archive's progress after this batch: the table will then end at ``progress.ends``.

        Raises:
            QuarantineMoved: another archive has committed bad rows.
        """
        if not self.table.exists:
            self.table.create(
                self._columns,
                partition_by=(),
                properties=_PROPERTIES | needed_properties(self._columns),
                comment="Records left out of the archive",
            )
        # Delta keeps the transaction number, even if it has deleted the commits.
        before = self._expected.batch if self._expected is not None else self.table.transaction(progress.app_id)
        own = ArchiveProgress(
            topic=progress.topic,
            topic_id=progress.topic_id,
            batch=before + 1,
            ends=progress.ends,
            mode="quarantine",
            attempt=progress.attempt,
        )
        try:
            self.table.append(rows.select(*self._columns.names), own)
        except ArchiveFenced as error:
            raise QuarantineMoved(str(error)) from error
        self._expected = own

    def check(self) -> None:
        """Raise QuarantineMoved if another archive has committed since this run's last commit, or since its start."""
        if self.table.refresh() != self._expected:
            raise QuarantineMoved(f"another archive has committed to {self.table.path}")


def _from(ends: Mapping[int, int]) -> Column:
    """Return the condition for rows at or above ``ends``. All rows of partitions without an end satisfy it."""
    if not ends:
        return sf.lit(True)
    by_partition = sf.create_map(*(sf.lit(value) for pair in ends.items() for value in pair))
    return sf.coalesce(sf.try_element_at(by_partition, sf.col(PARTITION)), sf.lit(0)) <= sf.col(OFFSET)
