"""Functions that archive topics to their end, and read the tables without Spark."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from sparklog.delta.archive_progress import ArchiveProgress, open_log, parse_progress
from sparklog.delta.job import run_archives
from sparklog.delta.options import ArchiveOptions
from sparklog.delta.table import quarantine_path, table_path
from sparklog.testing.process_cluster import ProcessCluster


def asked(brokers: ProcessCluster, topic: str, lake: str, **options: Any) -> ArchiveOptions:
    wanted: dict[str, Any] = {"group": f"archive-{topic}", "interval": None, **options}
    return ArchiveOptions(bootstrap=brokers.bootstrap, topic=topic, to=lake, **wanted)


def archive(
    spark: SparkSession, brokers: ProcessCluster, topic: str, lake: str, **options: Any
) -> tuple[list[str], Exception | None]:
    """Archive all existing records. Return the archive's messages, and its error or None."""
    said: list[str] = []
    failed = run_archives(spark, [asked(brokers, topic, lake, **options)], stopping=threading.Event(), tell=said.append)
    return said, failed.get(topic)


def archived(spark: SparkSession, brokers: ProcessCluster, topic: str, lake: str, **options: Any) -> list[str]:
    said, error = archive(spark, brokers, topic, lake, **options)
    assert error is None, said
    return said


class RunningArchives:
    """Archives in a separate thread, until they end or the ``with`` block ends."""

    def __init__(self, spark: SparkSession, *options: ArchiveOptions) -> None:
        self.said: list[str] = []
        #: The result of ``run_archives``. None while the archives run.
        self.failed: Mapping[str, Exception] | None = None
        self._stopping = threading.Event()

        def run() -> None:
            self.failed = run_archives(spark, options, stopping=self._stopping, tell=self.said.append)

        self._thread = threading.Thread(target=run)

    def __enter__(self) -> RunningArchives:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()

    def join(self) -> None:
        self._thread.join(120)


def rows(lake: str, topic: str) -> pa.Table:
    """Return the table's rows in order of partition and offset."""
    table = DeltaTable(table_path(lake, topic)).to_pyarrow_table()
    return table.sort_by([("_partition", "ascending"), ("_offset", "ascending")])


def bad_rows(lake: str, topic: str) -> pa.Table:
    table = DeltaTable(quarantine_path(lake, topic)).to_pyarrow_table()
    return table.sort_by([("_partition", "ascending"), ("_offset", "ascending")])


def places(table: pa.Table) -> list[tuple[int, int]]:
    """Return the partition and the offset of each row."""
    return list(zip(table["_partition"].to_pylist(), table["_offset"].to_pylist(), strict=True))


def progress_of_commits(lake: str, topic: str) -> list[ArchiveProgress]:
    """Return the progress of all commits that the archive made in the table, in order."""
    log = open_log(table_path(lake, topic))
    found = [
        parse_progress(action["commitInfo"].get("userMetadata"))
        for version in log.versions()
        for action in log.actions(version)
        if "commitInfo" in action
    ]
    return [progress for progress in found if progress is not None]


def ends(lake: str, topic: str) -> Mapping[int, int]:
    return progress_of_commits(lake, topic)[-1].ends
