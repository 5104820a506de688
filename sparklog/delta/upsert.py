"""The merge of a topic's current state into a Delta table: the newest record of each key. Tombstones delete keys.

All records of a key are in one partition, unless producers chose partitions themselves or partitions were added. Of two
records in one partition, the one with the higher offset is newer. Of two records in different partitions, the one with
the later ``_timestamp`` is newer. A deleted key leaves no row, so an older record of another partition can add the key
again. As in append mode, each commit is a Delta transaction with the number of its batch, so no batch is merged twice.
Even if a batch were merged twice, an older record would not replace a newer one.
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

#: The properties of new tables of a topic's current state.
PROPERTIES = {"delta.enableChangeDataFeed": "true"}
#: The columns that the change data feed adds to the table's own columns.
RESERVED = ("_change_type", "_commit_version", "_commit_timestamp")
#: The conflicts of a merge with a concurrent commit. A retry may succeed.
_PASSING = {
    "ConcurrentAppendException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentDeleteReadException",
    "ConcurrentWriteException",
}
#: The maximum number of retries of a merge that conflicts with an OPTIMIZE or DELETE of another program.
_TRIES = 3
_RANK = "_sparklog_rank"
_NEWER = (
    f"(s.{PARTITION} = t.{PARTITION} AND s.{OFFSET} > t.{OFFSET}) "
    f"OR (s.{PARTITION} <> t.{PARTITION} AND s.{TIMESTAMP} >= t.{TIMESTAMP})"
)


def upsert(table: ArchiveTable, rows: DataFrame, progress: ArchiveProgress, *, keys: Collection[str]) -> int:
    """Merge ``rows`` into the table, and commit them with the progress of the archive after them.

    ``rows`` has the table's columns and ``TOMBSTONE``. Columns that the table does not have yet are added to it. Return
    the number of rows that were added, changed and deleted.

    Raises:
        ArchiveFenced: another run of an archive has committed a batch with the same number.
    """
    found = newest(rows, keys)
    if progress.batch == 0 and table.file_count() == 0:
        # The table has no rows to replace.
        metrics = table.append(found.where(~sf.col(TOMBSTONE)).drop(TOMBSTONE), progress)
        return int(metrics.get("numOutputRows", 0))
    metrics = _merge(table, found, progress, keys=keys)
    return sum(int(metrics.get(f"numTargetRows{done}", 0)) for done in ("Inserted", "Updated", "Deleted"))


def newest(rows: DataFrame, keys: Collection[str]) -> DataFrame:
    """Return the newest row of each key. The module's docstring defines which of two rows is newer."""
    columns = [sf.col(_quoted(name)) for name in keys]
    # With this, both windows need only one exchange.
    found = rows.repartition(*columns)
    within = Window.partitionBy(*columns, PARTITION).orderBy(sf.desc(OFFSET))
    found = found.withColumn(_RANK, sf.row_number().over(within)).where(sf.col(_RANK) == 1)
    between = Window.partitionBy(*columns).orderBy(sf.desc(TIMESTAMP), sf.desc(PARTITION))
    return found.withColumn(_RANK, sf.row_number().over(between)).where(sf.col(_RANK) == 1).drop(_RANK)


def _merge(
    table: ArchiveTable, rows: DataFrame, progress: ArchiveProgress, *, keys: Collection[str], tries: int = _TRIES
) -> dict[str, str]:
    try:
        _merge_once(table, rows, progress, keys=keys)
    except SPARK_ERRORS as error:
        table.check_own(progress, may_lack=True)
        if tries > 1 and type(error).__name__ in _PASSING:
            return _merge(table, rows, progress, keys=keys, tries=tries - 1)
        raise
    return table.check_own(progress)


def _merge_once(table: ArchiveTable, rows: DataFrame, progress: ArchiveProgress, *, keys: Collection[str]) -> None:
    from delta.tables import DeltaTable

    session = rows.sparkSession
    same = " AND ".join(f"t.{_quoted(name)} <=> s.{_quoted(name)}" for name in keys)
    values = {_quoted(name): f"s.{_quoted(name)}" for name in rows.columns if name != TOMBSTONE}
    merge = DeltaTable.forPath(session, table.path).alias("t").merge(rows.alias("s"), same).withSchemaEvolution()
    merge = merge.whenMatchedDelete(f"s.{TOMBSTONE} AND ({_NEWER})")
    merge = merge.whenMatchedUpdate(_NEWER, dict(values))
    merge = merge.whenNotMatchedInsert(f"NOT s.{TOMBSTONE}", dict(values))
    settings = {
        "spark.databricks.delta.write.txnAppId": progress.app_id,
        "spark.databricks.delta.write.txnVersion": str(progress.batch),
        "spark.databricks.delta.commitInfo.userMetadata": progress.to_json(),
    }
    with _set(session, settings):
        merge.execute()


@contextmanager
def _set(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Apply session settings within the block, because a merge has no options.

    Only this thread uses the session, because it is the query's own.
    """
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
