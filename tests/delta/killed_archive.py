"""A driver that a test kills: it archives several topics, and stops each of them at a step of one of its batches.

    python -m tests.delta.killed_archive <bootstrap> <path of the tables> <JSON: {topic: [step, batch]}>

Steps in their order: ``setting aside`` (the quarantine has data files without a commit), ``set aside`` (and their
commit), ``writing`` (the table has data files without a commit), and ``committed`` (and their commit, which the group
does not know). For topics in mode upsert ``merging`` and ``merged`` are the last two of these. Prints a line when every
topic has reached its step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from sparklog.delta.archive import TopicArchive
from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.job import run_archives
from sparklog.delta.micro_batch_archiver import BatchArchiver
from sparklog.delta.options import ArchiveOptions, MaintenanceOptions
from sparklog.delta.table import PARTITION
from sparklog.spark.configure import configure

JSON = "a int"
MAX_OFFSETS = 16
UPSERT_STEPS = ("merging", "merged")


class Stays(BatchArchiver):
    """An archiver that ends no batch after its topic's step."""

    expects_bad_rows = True
    steps: dict[str, tuple[str, int]]
    reached: set[str]

    def set_aside(self, bad: DataFrame, progress: ArchiveProgress) -> int:
        if self._is_here("setting aside", progress.batch):
            self._quarantine.add(self._stuck(bad), progress)
        count = super().set_aside(bad, progress)
        self._stay("set aside", progress.batch)
        return count

    def commit(self, good: DataFrame, progress: ArchiveProgress) -> int:
        if self._is_here("merging", progress.batch):
            self._freeze_while_merging(good.sparkSession)
        count = super().commit(self._stuck(good) if self._is_here("writing", progress.batch) else good, progress)
        self._stay("committed", progress.batch)
        self._stay("merged", progress.batch)
        return count

    def _freeze_while_merging(self, spark: SparkSession) -> None:
        """Stop all of Spark when the merge has files and no commit.

        Nothing else can stop a merge there, so the other topics reach their steps first.
        """
        table, jvm = Path(self._table.path), spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]

        def freeze() -> None:
            while not _has_uncommitted(table):
                time.sleep(0.002)
            os.kill(jvm, signal.SIGSTOP)
            if _has_uncommitted(table):
                self.reached.add(self.progress.topic)
            else:
                print("too late", flush=True)

        while self.reached != set(self.steps) - {self.progress.topic}:
            time.sleep(0.1)
        threading.Thread(target=freeze, daemon=True).start()

    def _is_here(self, step: str, batch: int) -> bool:
        return self.steps[self.progress.topic] == (step, batch)

    def _stay(self, step: str, batch: int) -> None:
        if self._is_here(step, batch):
            self.reached.add(self.progress.topic)
            threading.Event().wait()

    def _stuck(self, rows: DataFrame) -> DataFrame:
        """Return rows of which Spark can write the first partition. The tasks of the others wait forever."""
        self.reached.add(self.progress.topic)
        is_first: Column = sf.udf(_waits_unless_first, "boolean")(sf.col(PARTITION))
        return rows.where(is_first)


def _waits_unless_first(partition: int) -> bool:
    while partition:
        time.sleep(1)
    return True


def main(bootstrap: str, lake: str, steps: str) -> None:
    Stays.steps = {topic: (step, batch) for topic, (step, batch) in json.loads(steps).items()}
    Stays.reached = set()
    TopicArchive.batches = Stays
    spark = SparkSession.builder.getOrCreate()
    configure(spark, bootstrap=bootstrap)
    options: dict[str, Any] = {"interval": "1 second", "max_offsets": MAX_OFFSETS, "json": StructType.fromDDL(JSON)}
    archives = [
        ArchiveOptions(
            bootstrap=bootstrap,
            topic=topic,
            to=lake,
            group=f"archive-{topic}",
            mode="upsert" if step in UPSERT_STEPS else "append",
            maintenance=MaintenanceOptions(target_file_size=2),  # one task for each partition
            **options,
        )
        for topic, (step, _) in Stays.steps.items()
    ]
    threading.Thread(target=_say_when_all_are_there, args=(lake,), daemon=True).start()
    run_archives(
        spark, archives, stopping=threading.Event(), tell=lambda text: print(text, file=sys.stderr, flush=True)
    )


def _say_when_all_are_there(lake: str) -> None:
    parent, is_said = os.getppid(), False
    while os.getppid() == parent:  # the driver exits with the test that would kill it
        time.sleep(0.1)
        if not is_said and set(Stays.steps) == Stays.reached and all(map(_has_uncommitted, stuck_tables(lake))):
            print("all are there", flush=True)
            is_said = True
    os._exit(1)


def stuck_tables(lake: str) -> list[Path]:
    """Return the tables whose commit an archive has begun and does not finish."""
    places = {"setting aside": Path(lake) / "_quarantine", "writing": Path(lake)}
    return [places[step] / topic for topic, (step, _) in Stays.steps.items() if step in places]


def _has_uncommitted(table: Path) -> bool:
    log = table / "_delta_log"
    committed = "".join(path.read_text() for path in log.glob("*.json"))
    return any(path.name not in committed for path in table.rglob("*.parquet") if log not in path.parents)


if __name__ == "__main__":
    main(*sys.argv[1:])
