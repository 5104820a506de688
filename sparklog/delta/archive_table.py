"""The Delta table of an archive: this module creates it, appends rows, and checks which run made the last commit.

Each start of the archive is a new *run*. Every commit is a Delta transaction whose number is the ``batch`` of the
progress that it records. Delta refuses one of two concurrent transactions with the same application id, and skips a
transaction whose number is already committed. So of all runs, exactly one can commit each number. A run has been
fenced if another run has committed a number that this run tried to commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparklog.delta.archive_progress import ArchiveProgress, ArchiveProgressAt, open_log_with_spark
from sparklog.delta.table import needed_properties
from sparklog.errors import SparklogError

#: The errors of Spark: those with classes in pyspark, and all others, such as aborted jobs.
SPARK_ERRORS = (PySparkException, Py4JJavaError)


class ArchiveRefused(SparklogError):
    """The error for a topic that cannot be archived in the table. A retry would not help."""


class ArchiveFenced(ArchiveRefused):
    """The error for a run of an archive that must end, because another run has committed to the same table."""


class ArchiveTable:
    """The Delta table of an archive: the object reads the table's progress and commits rows to the table.

    Not thread-safe: each thread uses its own object. Between two calls the object keeps only the last known version and
    progress.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._spark = spark
        self._log = open_log_with_spark(spark, path)
        #: The newest known version, and the newest progress at or before it.
        self._version = -1
        self._progress: ArchiveProgressAt | None = None

    @property
    def exists(self) -> bool:
        return self._version >= 0

    @property
    def progress(self) -> ArchiveProgress | None:
        """Return the progress that the last ``refresh`` found, or None if no commit recorded one."""
        return self._progress.progress if self._progress is not None else None

    @property
    def progress_version(self) -> int:
        """Return the version of the table whose commit records ``progress``, or -1 if there is no progress."""
        return self._progress.version if self._progress is not None else -1

    def refresh(self) -> ArchiveProgress | None:
        """Read the commits since the last call. Return the newest progress, or None if no commit records one."""
        if self._version < 0:
            versions = self._log.versions()
            if versions:
                self._version = versions[-1]
                self._progress = self._log.progress()
        else:
            self._version, found = self._log.newest_since(self._version)
            self._progress = found or self._progress
        return self.progress

    # --- description ---

    def columns(self) -> StructType:
        return self._spark.read.format("delta").load(self.path).schema

    def detail(self) -> dict[str, Any]:
        """Return Delta's description of the table: ``partitionColumns``, ``properties``, ``numFiles`` and more."""
        from delta.tables import DeltaTable

        found = DeltaTable.forPath(self._spark, self.path).detail().first()
        assert found is not None
        return found.asDict()

    def create(
        self, columns: StructType, *, partition_by: Sequence[str], properties: Mapping[str, str], comment: str = ""
    ) -> None:
        """Create an empty table, unless the table already exists."""
        from delta.tables import DeltaTable

        builder = DeltaTable.createIfNotExists(self._spark).location(self.path).addColumns(columns)
        for name, value in properties.items():
            builder = builder.property(name, value)
        if comment:
            builder = builder.comment(comment)
        (builder.partitionedBy(*partition_by) if partition_by else builder).execute()
        self.refresh()

    def transaction(self, app: str) -> int:
        """Return the number of the last Delta transaction with the application id ``app``, or -1 if there is none."""
        found = self._snapshot().transactions().get(app)
        return int(found.get()) if found.isDefined() else -1

    def file_count(self) -> int:
        snapshot = self._snapshot()
        # Usually the last commit has the number. Otherwise Spark reads the log again.
        known = snapshot.numOfFilesIfKnown()
        return int(known.get() if known.isDefined() else snapshot.numOfFiles())

    def files(self) -> DataFrame:
        """Return the data files of the newest version, in Delta's format.

        The columns are ``path``, ``partitionValues``, ``size`` and more.
        """
        return DataFrame(self._snapshot().allFiles().toDF(), self._spark)

    def _snapshot(self) -> Any:
        """Return Delta's snapshot of the newest version."""
        self.columns()
        jvm: Any = self._spark._jvm
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(self._spark._jsparkSession, self.path)
        return log.unsafeVolatileSnapshot()

    def set_properties(self, properties: Mapping[str, str]) -> None:
        pairs = ", ".join(f"{_quoted(name)} = {_quoted(value)}" for name, value in properties.items())
        path = self.path.replace("`", "``")
        self._spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({pairs})")

    def bring_properties(self, wanted: Mapping[str, str], columns: StructType, detail: Mapping[str, Any]) -> None:
        """Set the properties in ``wanted``, and the properties that ``columns`` require, if the table has other values.

        ``detail`` is the result of the method ``detail``, which contains the table's current properties.
        """
        wanted = {**wanted, **needed_properties(columns, detail["tableFeatures"] or ())}
        changed = {name: value for name, value in wanted.items() if detail["properties"].get(name) != value}
        if changed:
            self.set_properties(changed)

    # --- commits ---

    def append(self, rows: DataFrame, progress: ArchiveProgress) -> dict[str, str]:
        """Commit rows, together with the progress of the archive after them. Return Delta's metrics of the commit.

        Columns that the table does not have yet are added to it.

        Raises:
            ArchiveFenced: another run of an archive has committed a batch with the same number.
        """
        writer = rows.write.format("delta").mode("append").option("mergeSchema", "true")
        options = {"txnAppId": progress.app_id, "txnVersion": str(progress.batch), "userMetadata": progress.to_json()}
        try:
            writer.options(**options).save(self.path)
        except SPARK_ERRORS:
            self.check_own(progress, may_lack=True)
            raise
        return self.check_own(progress)

    def check_own(self, progress: ArchiveProgress, *, may_lack: bool = False) -> dict[str, str]:
        """Check that the newest archive commit recorded ``progress``. Return Delta's metrics of this commit.

        With ``may_lack``, return an empty dict if the batch of ``progress`` is not committed yet.

        Raises:
            ArchiveFenced: another run of an archive made the newest commit.
        """
        found = self.refresh()
        if may_lack and (found is None or found.batch < progress.batch):
            return {}
        if found is None or (found.batch, found.attempt) != (progress.batch, progress.attempt):
            other = f"{found.batch} ({found.attempt})" if found is not None else "none"
            raise ArchiveFenced(
                f"another archive of topic {progress.topic} has committed to {self.path}: the last commit is {other}, "
                f"expected {progress.batch} ({progress.attempt})"
            )
        assert self._progress is not None
        return self._metrics(self._progress.version)

    def committed_at(self) -> float | None:
        """Return the time of the newest archive commit in seconds since 1970, or None if there is no such commit.

        The time comes from the clock of the process that made the commit.
        """
        if self._progress is None:
            return None
        for action in self._log.actions(self._progress.version):
            if "commitInfo" in action:
                return float(action["commitInfo"]["timestamp"]) / 1000
        return None

    def _metrics(self, version: int) -> dict[str, str]:
        for action in self._log.actions(version):
            if "commitInfo" in action:
                return dict(action["commitInfo"].get("operationMetrics") or {})
        return {}


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
