"""The daemon that forks Spark's Python workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

_LOADS = """
import os, sys
from pathlib import Path
from sparklog.spark import worker_daemon

worker_daemon._LOADED = (*worker_daemon._LOADED, "sparklog.no_such_module")
before = dict(os.environ)
worker_daemon.load()
assert dict(os.environ) == before, "what workers start is their own affair"
assert set(worker_daemon._LOADED) - set(sys.modules) <= {"uvloop", "sparklog.no_such_module"}
print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
@pytest.mark.parametrize("given", [{}, {"JE_ARROW_MALLOC_CONF": "narenas:1"}])
def test_what_is_loaded_before_forks_has_no_thread(given: dict[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **given}
    done = subprocess.run(
        [sys.executable, "-c", _LOADS], check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.integration
def test_workers_have_what_they_need_and_threads_of_their_own(plain_spark: SparkSession) -> None:
    def seen(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        loaded = {"pandas", "sparklog.spark.writer", "sparklog.spark.task"} <= set(sys.modules)
        status = Path(f"/proc/{os.getppid()}/status").read_text()
        threads = int(status.split("Threads:")[1].split()[0])
        table = pa.table({"n": [n % 7 for n in range(100_000)]})
        counted = table.group_by("n", use_threads=True).aggregate([("n", "count")])
        yield pa.RecordBatch.from_pydict({"loaded": [loaded], "threads": [threads], "groups": [counted.num_rows]})

    kinds = "loaded boolean, threads long, groups long"
    rows = plain_spark.range(4, numPartitions=4).mapInArrow(seen, kinds).collect()

    assert [tuple(row) for row in rows] == [(True, 1, 7)] * 4
