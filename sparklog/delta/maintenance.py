"""OPTIMIZE and VACUUM of the archive's tables, which keep the number of files low and remove unreferenced ones.

Every micro-batch writes files. OPTIMIZE compacts directories with many small files; VACUUM removes files that no
version within the table's retention references. Neither changes rows or the archive's progress. Versions stay readable
during the retention, and appends continue at the same time. A failure does not stop the archive; the operation is
retried when it is due again.
"""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from sparklog.delta.archive_table import ArchiveTable
from sparklog.delta.options import ArchiveOptions, MaintenanceOptions
from sparklog.delta.table import quarantine_path, table_path

_LOG = logging.getLogger(__name__)

#: The table property with the time of the last VACUUM, in ISO 8601.
VACUUMED = "sparklog.vacuumed"
RETENTION = "delta.deletedFileRetentionDuration"
LOG_RETENTION = "delta.logRetentionDuration"
#: Delta's defaults.
_RETENTION, _LOG_RETENTION = "interval 7 days", "interval 30 days"
#: The number of small files at which a directory is compacted. Files below half the target size are small. Larger files
#: are left out, because they would be rewritten repeatedly.
_MANY = 8
#: The maximum number of directories in one OPTIMIZE. Those with the most files come first.
_DIRECTORIES = 100
_FIRST_LOOK_S = 60.0
_POLL_S = 1.0
#: The maximum wait of the end of an archive for current maintenance. Delta discards interrupted operations.
_PATIENCE_S = 60.0


class Maintenance:
    """A component that runs OPTIMIZE and VACUUM on one topic's tables.

    It has its own thread inside a ``running`` block. ``batches`` is the lock that the topic's archive holds during each
    batch. This component takes the lock before it changes a table's properties, because the change would make a
    concurrent batch restart. If batches merge rows (``merging``), it also takes the lock for OPTIMIZE, which would
    conflict with a merge. OPTIMIZE does not conflict with appends.
    """

    def __init__(
        self,
        spark: SparkSession,
        tables: Sequence[str],
        options: MaintenanceOptions,
        *,
        tell: Callable[[str], None],
        batches: AbstractContextManager[Any],
        merging: bool = False,
    ) -> None:
        self._tables = tables
        self._batches = batches
        self._merging = merging
        self._options = options
        self._tell = tell
        self._spark = spark.newSession()
        for name, value in {
            "spark.databricks.delta.optimize.maxFileSize": str(options.target_file_size),
            "spark.databricks.delta.optimize.minFileSize": str(self._small),
            # The number of tasks with which VACUUM lists files. The default is 10,000 for any table.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(spark.sparkContext.defaultParallelism),
        }.items():
            self._spark.conf.set(name, value)
        given = [every for every in (options.optimize_every_s, options.vacuum_every_s) if every is not None]
        self._every_s = min(given, default=None)
        self._next = time.monotonic() + min(_FIRST_LOOK_S, self._every_s or 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run maintenance in a new thread, each time it is due, until the ``with`` block ends."""
        over = threading.Event()
        thread = threading.Thread(target=self._run_when_due, args=(over,), name="archive-maintenance", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE_S)

    def _run_when_due(self, over: threading.Event) -> None:
        while self._every_s is not None and not over.wait(_POLL_S):
            if time.monotonic() >= self._next:
                self.run()

    def run(self, *, until: Callable[[], bool] = lambda: False) -> Exception | None:
        """Run OPTIMIZE on directories with many small files, and VACUUM if it is due. Return the first error, or None.

        Once ``until`` returns true, no further table is started.
        """
        errors = [self._maintain(path) for path in itertools.takewhile(lambda _: not until(), self._tables)]
        self._next = time.monotonic() + (self._every_s or 0.0)
        return next((error for error in errors if error is not None), None)

    @property
    def _small(self) -> int:
        """Return the size in bytes below which a file is small."""
        return self._options.target_file_size // 2

    def _maintain(self, path: str) -> Exception | None:
        try:
            table = ArchiveTable(self._spark, path)
            table.refresh()
            if not table.exists:
                return None
            if self._options.optimize_every_s is not None:
                self._optimize(table)
            if self._options.vacuum_every_s is not None:
                self._vacuum(table, self._options.vacuum_every_s)
        except Exception as error:
            _LOG.warning("%s: maintenance failed, and will be retried when it is due again: %s", path, error)
            return error
        return None

    # --- OPTIMIZE ---

    def _optimize(self, table: ArchiveTable) -> None:
        from delta.tables import DeltaTable

        crowded = self._crowded(table)
        if not crowded:
            return
        builder = DeltaTable.forPath(self._spark, table.path).optimize()
        where = _predicate(table, crowded)
        with self._batches if self._merging else nullcontext():
            result = (builder.where(where) if where else builder).executeCompaction().select("metrics.*").first()
        assert result is not None
        self._tell(f"{table.path}: compacted {result['numFilesRemoved']:,} files to {result['numFilesAdded']:,}")

    def _crowded(self, table: ArchiveTable) -> list[dict[str, str | None]]:
        """Return the directories to compact, each with its partition values by column."""
        if table.file_count() < _MANY:
            return []
        small = table.files().where(sf.col("size") < self._small)
        entries = sf.map_entries("partitionValues").alias("directory")
        counts = small.groupBy(entries).count().where(sf.col("count") >= _MANY)
        rows = counts.orderBy(sf.desc("count")).limit(_DIRECTORIES).collect()
        return [dict(row["directory"]) for row in rows]

    # --- VACUUM ---

    def _vacuum(self, table: ArchiveTable, every_s: float) -> None:
        """Vacuum if it is due. The time is stored in the table before, so that a failure is not retried immediately."""
        detail = table.detail()
        now, recorded = dt.datetime.now(dt.timezone.utc), detail["properties"].get(VACUUMED)
        last = dt.datetime.fromisoformat(recorded) if recorded else detail["createdAt"].astimezone(dt.timezone.utc)
        retention = _hours(detail["properties"].get(RETENTION, _RETENTION))
        if (now - last).total_seconds() < every_s or self._has_rested(table, last, retention):
            return
        wanted = {VACUUMED: now.isoformat(timespec="seconds")}
        if self._options.retain_h is not None and self._options.retain_h != retention:
            wanted[RETENTION] = f"interval {self._options.retain_h} hours"
            # Both are necessary: a version is readable while its files and the commit that references them exist.
            if self._options.retain_h > _hours(detail["properties"].get(LOG_RETENTION, _LOG_RETENTION)):
                wanted[LOG_RETENTION] = wanted[RETENTION]
        with self._batches:
            table.set_properties(wanted)
        self._spark.sql(f"VACUUM delta.`{table.path.replace('`', '``')}`")
        self._tell(f"{table.path}: vacuumed")

    def _has_rested(self, table: ArchiveTable, last: dt.datetime, retention_h: float) -> bool:
        """Return whether nothing is left to vacuum since the last time.

        Each vacuum makes commits. After enough of them Delta would delete from its log the commit that records the
        archive's progress.
        """
        changed = table.committed_at()
        slack_h = 1 + (self._options.optimize_every_s or 0.0) / 3600
        return changed is None or last.timestamp() > changed + (retention_h + slack_h) * 3600


#: The types whose values have the same form in a directory's name and in SQL.
_TOLD_BY_TEXT = {"date", "string", "boolean", "tinyint", "smallint", "int", "bigint"}


def _is(name: str, value: str | None, kind: str) -> str:
    column = "`" + name.replace("`", "``") + "`"
    if value is None:
        return f"{column} IS NULL"
    text = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{column} = CAST('{text}' AS {kind})"


def _hours(interval: str) -> float:
    """Return the hours of a table property. An interval in another form counts as very long."""
    match = re.fullmatch(r"interval (\d+) (hour|day|week)s?", interval)
    return float(int(match[1]) * {"hour": 1, "day": 24, "week": 168}[match[2]]) if match else math.inf


def _predicate(table: ArchiveTable, directories: list[dict[str, str | None]]) -> str | None:
    """Return the SQL predicate for these directories, or None for the whole table."""
    kinds = {field.name: field.dataType.simpleString() for field in table.columns().fields}
    names = {name for directory in directories for name in directory}
    if not names or any(kinds.get(name) not in _TOLD_BY_TEXT for name in names):
        return None
    return " OR ".join(
        "(" + " AND ".join(_is(name, value, kinds[name]) for name, value in directory.items()) + ")"
        for directory in directories
    )


def maintenance_of(
    spark: SparkSession,
    options: ArchiveOptions,
    *,
    tell: Callable[[str], None],
    batches: AbstractContextManager[Any] | None = None,
) -> Maintenance:
    """Return a ``Maintenance`` for a topic's table and quarantine.

    ``batches`` is the lock that the topic's archive holds during each batch, or None if no archive runs in this
    process.
    """
    tables = (table_path(options.to, options.topic), quarantine_path(options.to, options.topic))
    return Maintenance(
        spark,
        tables,
        options.maintenance,
        tell=tell,
        batches=nullcontext() if batches is None else batches,
        merging=options.mode == "upsert",
    )
