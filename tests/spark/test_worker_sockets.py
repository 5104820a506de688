"""Tests of the sockets between Spark's JVM and its Python workers."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.integration


def test_workers_use_unix_sockets_that_send_small_writes_at_once(
    plain_spark: SparkSession,
) -> None:
    def families(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = set()
        for entry in Path("/proc/self/fd").iterdir():
            descriptor = int(entry.name)
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    found.add(socket.socket(fileno=os.dup(descriptor)).family.name)
            except OSError:  # the process that lists them
                continue
        yield pa.RecordBatch.from_pydict({"family": sorted(found)})

    rows = plain_spark.range(1, numPartitions=1).mapInArrow(families, "family string").collect()

    assert [row.family for row in rows] == ["AF_UNIX"]


def test_sockets_of_sparks_scripts_are_not_writable_by_others() -> None:
    settings = Path(__file__).parents[2] / "conf" / "spark-env.sh"
    done = subprocess.run(
        ["sh", "-c", 'umask 002; . "$0"; umask', str(settings)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout, 8) & 0o022 == 0o022


_LIMITED = """
import pyarrow as pa
from pyspark.sql import SparkSession

def endless(_):
    while True:
        yield pa.RecordBatch.from_pydict({"n": list(range(100_000))})

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
for _ in range(3):
    assert len(spark.range(1, numPartitions=1).mapInArrow(endless, "n long").limit(5).collect()) == 5
spark.stop()
"""


@pytest.mark.extended
def test_a_worker_with_an_absent_reader_exits_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
