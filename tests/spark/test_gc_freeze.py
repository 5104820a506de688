"""Tests that a worker's garbage collector scans loaded modules only once, and later objects as usual."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparklog.spark.sink import WrittenRows
from sparklog.spark.source import SparklogSource
from sparklog.spark.write_options import WriteOptions
from sparklog.spark.write_plan import WritePlan
from sparklog.spark.writer import BatchWriter

_CODE = """
import gc, sys, weakref
at_start = gc.get_freeze_count()  # Python 3.12 starts with some frozen objects
from pyspark import TaskContext
from sparklog.spark.gc_freeze import freeze_worker

class Node:
    def __init__(self):
        self.itself = self

freeze_worker()
assert gc.get_freeze_count() == at_start, "this is no task"
TaskContext._setTaskContext(TaskContext())
early, loaded = Node(), len(gc.get_objects())
seen = weakref.ref(early)
del early
freeze_worker()
assert seen() is None, "what was garbage is gone"
frozen = gc.get_freeze_count()
assert frozen > 0.9 * loaded and len(gc.get_objects()) < 0.1 * loaded
count, gc.get_freeze_count = gc.get_freeze_count, None  # it would scan all frozen objects
freeze_worker()
assert count() == frozen
late = Node()
seen = weakref.ref(late)
del late
gc.collect()
assert seen() is None, "later objects must be collected"
"""


def test_loaded_modules_are_frozen_once_and_only_in_tasks() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)


def test_a_source_created_by_user_code_does_not_freeze_the_gc() -> None:
    code = """
import gc
at_start = gc.get_freeze_count()
from sparklog.spark.source import SparklogSource
SparklogSource({})
assert gc.get_freeze_count() == at_start
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.integration
def test_loaded_modules_are_frozen_where_spark_plans_and_commits(plain_spark: SparkSession, tmp_path: Path) -> None:
    def tell(step: str) -> None:
        (tmp_path / step).write_text(str(gc.get_freeze_count()))

    class Writer(BatchWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            return WrittenRows(sum(batch.num_rows for batch in iterator))

        def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
            super().commit(messages)
            tell("commit")

    class Telling(SparklogSource):
        @classmethod
        def name(cls) -> str:
            return "telling"

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            tell("plan")
            options = WriteOptions("nowhere:1", None, None, exactly_once=False)
            return Writer(WritePlan(options, schema, {}, None))

    plain_spark.dataSource.register(Telling)
    plain_spark.range(3).write.format("telling").mode("append").save()

    # pyspark alone has several times this number of objects; without the freeze the count is zero
    for step in ("plan", "commit"):
        assert int((tmp_path / step).read_text()) > 10_000, step
