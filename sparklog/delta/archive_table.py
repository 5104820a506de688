"""One Delta table that an archive commits to: made, given columns, appended to, and asked whose the last commit is.

Every commit is a Delta transaction numbered by its seam's ``batch``. Delta refuses one of two that run at the same
time with the same application id, and leaves out one whose number was there before; so of all that try a number one
succeeds, and whoever finds another's attempt in the commit of its number has been overtaken.
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

#: What Spark raises: the errors that pyspark knows as classes of its own, and all others, among them aborted jobs.
SPARK_ERRORS = (PySparkException, Py4JJavaError)


class ArchiveRefused(SparklogError):
    """The topic cannot be archived to the table as things stand; trying again would not help."""


class ArchiveFenced(ArchiveRefused):
    """Another archive has committed to the table in between."""


class ArchiveTable:
    """Owner: the one thread that archives a topic. Nothing of the table is kept but its last known version."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._spark = spark
        self._log = open_log_with_spark(spark, path)
        #: The newest known, and the newest seam at or before it.
        self._version = -1
        self._seam: ArchiveProgressAt | None = None

    @property
    def exists(self) -> bool:
        return self._version >= 0

    @property
    def seam(self) -> ArchiveProgress | None:
        """As of the last ``look``."""
        return self._seam.seam if self._seam is not None else None

    @property
    def seam_version(self) -> int:
        """Of the commit that says ``seam``; -1: none."""
        return self._seam.version if self._seam is not None else -1

    def look(self) -> ArchiveProgress | None:
        """The newest seam; None when there is no table, or none that says one."""
        if self._version < 0:
            versions = self._log.versions()
            if versions:
                self._version = versions[-1]
                self._seam = self._log.seam()
        else:
            self._version, found = self._log.newest_since(self._version)
            self._seam = found or self._seam
        return self.seam

    # --- what it is ---

    def columns(self) -> StructType:
        return self._spark.read.format("delta").load(self.path).schema

    def detail(self) -> dict[str, Any]:
        """Delta's description: ``partitionColumns``, ``properties``, ``numFiles`` and more."""
        from delta.tables import DeltaTable

        found = DeltaTable.forPath(self._spark, self.path).detail().first()
        assert found is not None
        return found.asDict()

    def create(
        self, columns: StructType, *, partition_by: Sequence[str], properties: Mapping[str, str], comment: str = ""
    ) -> None:
        """An empty table, unless there is one."""
        from delta.tables import DeltaTable

        builder = DeltaTable.createIfNotExists(self._spark).location(self.path).addColumns(columns)
        for name, value in properties.items():
            builder = builder.property(name, value)
        if comment:
            builder = builder.comment(comment)
        (builder.partitionedBy(*partition_by) if partition_by else builder).execute()
        self.look()

    def transaction(self, app: str) -> int:
        """The last number of Delta's transactions under an application id; -1: none."""
        found = self._snapshot().transactions().get(app)
        return int(found.get()) if found.isDefined() else -1

    def file_count(self) -> int:
        snapshot = self._snapshot()
        # The last commit has said it, mostly; else Spark reads the log anew.
        known = snapshot.numOfFilesIfKnown()
        return int(known.get() if known.isDefined() else snapshot.numOfFiles())

    def files(self) -> DataFrame:
        """Those of the newest version, in Delta's words: ``path``, ``partitionValues``, ``size`` and more."""
        return DataFrame(self._snapshot().allFiles().toDF(), self._spark)

    def _snapshot(self) -> Any:
        """Delta's, brought up to date."""
        self.columns()
        jvm: Any = self._spark._jvm
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(self._spark._jsparkSession, self.path)
        return log.unsafeVolatileSnapshot()

    def set_properties(self, properties: Mapping[str, str]) -> None:
        pairs = ", ".join(f"{_quoted(name)} = {_quoted(value)}" for name, value in properties.items())
        path = self.path.replace("`", "``")
        self._spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({pairs})")

    def bring_properties(self, wanted: Mapping[str, str], columns: StructType, detail: Mapping[str, Any]) -> None:
        """Set what the table, described by ``detail``, has not of ``wanted`` and of what ``columns`` need."""
        wanted = {**wanted, **needed_properties(columns, detail["tableFeatures"] or ())}
        changed = {name: value for name, value in wanted.items() if detail["properties"].get(name) != value}
        if changed:
            self.set_properties(changed)

    # --- commits ---

    def append(self, rows: DataFrame, seam: ArchiveProgress) -> dict[str, str]:
        """Commit rows together with the seam that they make true; new columns come into the table with them. Returns
        Delta's metrics of the commit.

        Raises:
            ArchiveFenced: the number is another's.
        """
        writer = rows.write.format("delta").mode("append").option("mergeSchema", "true")
        options = {"txnAppId": seam.app_id, "txnVersion": str(seam.batch), "userMetadata": seam.to_json()}
        try:
            writer.options(**options).save(self.path)
        except SPARK_ERRORS:
            self.check_own(seam, may_lack=True)
            raise
        return self.check_own(seam)

    def check_own(self, seam: ArchiveProgress, *, may_lack: bool = False) -> dict[str, str]:
        """Whether the newest archive commit is the one of ``seam``; ``may_lack``: or comes before it.

        Raises:
            ArchiveFenced: it is another's.
        """
        found = self.look()
        if may_lack and (found is None or found.batch < seam.batch):
            return {}
        if found is None or (found.batch, found.attempt) != (seam.batch, seam.attempt):
            other = f"{found.batch} ({found.attempt})" if found is not None else "none"
            raise ArchiveFenced(
                f"another archive of topic {seam.topic} has committed to {self.path}: the last commit is {other}, "
                f"expected {seam.batch} ({seam.attempt})"
            )
        assert self._seam is not None
        return self._metrics(self._seam.version)

    def told_at(self) -> float | None:
        """When the newest seam was committed, in s since 1970, by the clock of its archive; None: there is none."""
        if self._seam is None:
            return None
        for action in self._log.actions(self._seam.version):
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
