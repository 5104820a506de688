"""A topic's current state as a Delta table: of each key the newest record, merged in by key; tombstones delete.

A key lives in one partition, unless producers chose partitions themselves or the topic got more of them. Within a
partition the record of the greater offset is the newer one; of two partitions', that of the later ``_timestamp``, for
which nothing is kept of keys that were deleted. A commit is a Delta transaction of the seam's number, as in append, so
nothing is merged twice; and were it, an older record would not replace a newer one that is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as sf

from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_table import SPARK_ERRORS, ArchiveTable
from sparklog.delta.casting import TOMBSTONE
from sparklog.delta.table import OFFSET, PARTITION, TIMESTAMP

#: Of tables of a topic's state when they are made.
PROPERTIES = {"delta.enableChangeDataFeed": "true"}
#: Columns that the change data feed has beside a table's own.
RESERVED = ("_change_type", "_commit_version", "_commit_timestamp")
#: What another's commit in between makes of a merge, and what its next try may not meet.
_PASSING = {
    "ConcurrentAppendException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentDeleteReadException",
    "ConcurrentWriteException",
}
#: How often a merge is begun anew that another's OPTIMIZE or DELETE has come into.
_TRIES = 3
_RANK = "_sparklog_rank"
_NEWER = (
    f"(s.{PARTITION} = t.{PARTITION} AND s.{OFFSET} > t.{OFFSET}) "
    f"OR (s.{PARTITION} <> t.{PARTITION} AND s.{TIMESTAMP} >= t.{TIMESTAMP})"
)


def upsert(table: ArchiveTable, rows: DataFrame, seam: ArchiveProgress, *, keys: Collection[str]) -> int:
    """Commit what ``rows``, of a table's columns and ``TOMBSTONE``, come to, together with the seam that they make
    true; new columns come into the table with them. How many rows of the table were added, changed and deleted.

    Raises:
        ArchiveFenced: the number is another's.
    """
    found = newest(rows, keys)
    if seam.batch == 0 and table.file_count() == 0:
        # Nothing is there that could be replaced.
        metrics = table.append(found.where(~sf.col(TOMBSTONE)).drop(TOMBSTONE), seam)
        return int(metrics.get("numOutputRows", 0))
    metrics = _merge(table, found, seam, keys=keys)
    return sum(int(metrics.get(f"numTargetRows{done}", 0)) for done in ("Inserted", "Updated", "Deleted"))


def newest(rows: DataFrame, keys: Collection[str]) -> DataFrame:
    """Of each key the newest of ``rows``."""
    columns = [sf.col(_quoted(name)) for name in keys]
    # One exchange for both windows.
    found = rows.repartition(*columns)
    within = Window.partitionBy(*columns, PARTITION).orderBy(sf.desc(OFFSET))
    found = found.withColumn(_RANK, sf.row_number().over(within)).where(sf.col(_RANK) == 1)
    between = Window.partitionBy(*columns).orderBy(sf.desc(TIMESTAMP), sf.desc(PARTITION))
    return found.withColumn(_RANK, sf.row_number().over(between)).where(sf.col(_RANK) == 1).drop(_RANK)


def _merge(
    table: ArchiveTable, rows: DataFrame, seam: ArchiveProgress, *, keys: Collection[str], tries: int = _TRIES
) -> dict[str, str]:
    try:
        _merge_once(table, rows, seam, keys=keys)
    except SPARK_ERRORS as error:
        table.check_own(seam, may_lack=True)
        if tries > 1 and type(error).__name__ in _PASSING:
            return _merge(table, rows, seam, keys=keys, tries=tries - 1)
        raise
    return table.check_own(seam)


def _merge_once(table: ArchiveTable, rows: DataFrame, seam: ArchiveProgress, *, keys: Collection[str]) -> None:
    from delta.tables import DeltaTable

    session = rows.sparkSession
    same = " AND ".join(f"t.{_quoted(name)} <=> s.{_quoted(name)}" for name in keys)
    values = {_quoted(name): f"s.{_quoted(name)}" for name in rows.columns if name != TOMBSTONE}
    merge = DeltaTable.forPath(session, table.path).alias("t").merge(rows.alias("s"), same).withSchemaEvolution()
    merge = merge.whenMatchedDelete(f"s.{TOMBSTONE} AND ({_NEWER})")
    merge = merge.whenMatchedUpdate(_NEWER, dict(values))
    merge = merge.whenNotMatchedInsert(f"NOT s.{TOMBSTONE}", dict(values))
    settings = {
        "spark.databricks.delta.write.txnAppId": seam.app_id,
        "spark.databricks.delta.write.txnVersion": str(seam.batch),
        "spark.databricks.delta.commitInfo.userMetadata": seam.to_json(),
    }
    with _set(session, settings):
        merge.execute()


@contextmanager
def _set(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """A merge has no options of its own: it takes them from the session, which is the query's, and so this thread's."""
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
