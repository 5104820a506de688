"""Tests of the daemon that forks Spark's Python workers."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from sparklog.spark.worker_daemon import keep_memory

_LOADS = """
import os, sys
from pathlib import Path
from sparklog.spark import worker_daemon

Path("raises.py").write_text("print('loaded'); raise ValueError('numpy.dtype size changed')")
sys.path.insert(0, "")
worker_daemon._LOADED = ("sparklog.no_such_module", "raises", *worker_daemon._LOADED)
before = dict(os.environ)
worker_daemon.load()
assert dict(os.environ) == before, "what workers start is their own affair"
assert set(worker_daemon._LOADED) - set(sys.modules) <= {"uvloop", "raises", "sparklog.no_such_module"}
print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
@pytest.mark.parametrize("given", [{}, {"JE_ARROW_MALLOC_CONF": "narenas:1"}])
def test_modules_loaded_before_forks_start_no_thread(given: dict[str, str], tmp_path: Path) -> None:
    """A module that cannot be loaded, or that prints to the JVM's pipe, does not prevent the import of the others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **given}
    done = subprocess.run(
        [sys.executable, "-c", _LOADS],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


#: A daemon, its worker, which receives a wrong secret and therefore does no work, and modules that are loaded late.
_ARCHIVES = """
import importlib, os, socket, sys, zipfile
from pathlib import Path
from pyspark.serializers import write_with_length
from sparklog.spark import worker_daemon

def write(path, **modules):
    with zipfile.ZipFile("new.zip", "w") as archive:
        for name, text in modules.items():
            archive.writestr(f"{path.stem}/{name}.py", text)
    os.replace("new.zip", path)

same, other, gone = (Path(f"{name}.zip").absolute() for name in ("same", "other", "gone"))
for path in (same, other, gone):
    write(path, __init__="", late="version = 1", moved="version = 'of another module'")
sys.path[:0] = map(str, (same, other, gone))
worker_daemon._LOADED = ("same", "other", "gone")
worker_daemon.load()
write(other, added="version = 2", __init__="", late="version = 2")
gone.unlink()

opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0]).rpartition("/")[2]) if event == "open" else None)
ours, theirs = socket.socketpair()
with theirs.makefile("wb") as out:
    write_with_length(b"not it", out)
os.environ["PYTHON_WORKER_FACTORY_SECRET"] = "secret"
assert worker_daemon.worker(ours, False) == 1
importlib.invalidate_caches()
import other.late, other.added
assert (other.late.version, other.added.version) == (2, 2)
assert "same.zip" not in opened
import same.late
assert same.late.version == 1
assert "same.zip" in opened
try:
    import gone.late
except ModuleNotFoundError:
    print("gone")
"""


def test_a_replaced_archive_is_read_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ARCHIVES], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, "gone"), done.stderr


def test_nothing_is_preloaded_where_worker_memory_is_bounded() -> None:
    code = (
        "import sys; from sparklog.spark.worker_daemon import load; load();"
        "assert not {'numpy', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    bounded = {**os.environ, "PYSPARK_EXECUTOR_MEMORY_MB": "256"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=bounded)


#: Batches as they come from the JVM: several at a time, freed together. It prints how many MiB remain at the end.
_FREED = """
import sys
from pathlib import Path
from resource import getpagesize
from sparklog.spark import worker_daemon

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() >> 20

worker_daemon.keep_memory()
size, count = (int(given) for given in sys.argv[1:])
before = resident()
for turn in range(5):
    batches = [b"x" * (size << 20) for _ in range(count)]
    del batches
print(resident() - before)
"""
_of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has these settings")
_MALLOC = ("MALLOC_", "GLIBC_")


@_of_glibc
@pytest.mark.parametrize(
    ("given", "size", "count", "least", "most"),
    [
        ({}, 8, 2, 12, 24),
        ({}, 1, 16, 12, 24),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, 8, 2, 12, 24),
        ({}, 16, 16, 0, 80),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 8, 2, 0, 4),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, 8, 2, 0, 4),
        ({"MALLOC_TOP_PAD_": "131072"}, 8, 2, 0, 4),
        ({"MALLOC_MMAP_MAX_": "65536"}, 8, 2, 0, 4),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, 8, 2, 0, 4),
        ({"PYSPARK_EXECUTOR_MEMORY_MB": "256"}, 8, 4, 0, 4),
    ],
    ids=[
        "large",
        "small",
        "told something else",
        "more than is kept",
        "told",
        "told what to map",
        "told how to grow",
        "told how much to map",
        "told by tunables",
        "bounded",
    ],
)
def test_memory_of_freed_batches_is_kept_within_bounds(
    given: dict[str, str], size: int, count: int, least: int, most: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_MALLOC)}
    done = subprocess.run(
        [sys.executable, "-c", _FREED, str(size), str(count)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, **given},
    )
    assert least <= int(done.stdout) <= most


@pytest.mark.parametrize("refusal", [OSError("no dynamic loading"), MemoryError()], ids=["static", "hardened"])
def test_workers_are_forked_without_ctypes(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise refusal

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    for name in [name for name in os.environ if name.startswith(_MALLOC)]:
        monkeypatch.delenv(name)

    keep_memory()


@pytest.mark.integration
def test_workers_draw_independent_random_numbers(plain_spark: SparkSession) -> None:
    def drawn(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number = np.random.rand()
        time.sleep(0.5)  # so the second task has its own worker
        yield pa.RecordBatch.from_pydict({"number": [number], "pid": [os.getpid()]})

    rows = plain_spark.range(2, numPartitions=2).mapInArrow(drawn, "number double, pid long").collect()

    assert len({row.pid for row in rows}) == 2
    assert len({row.number for row in rows}) == 2


@pytest.mark.integration
def test_workers_have_their_modules_and_their_own_threads(plain_spark: SparkSession) -> None:
    def seen(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        loaded = {"pandas", "sparklog.spark.write_task", "sparklog.spark.read_task"} <= set(sys.modules)
        status = Path(f"/proc/{os.getppid()}/status").read_text()
        threads = int(status.split("Threads:")[1].split()[0])
        table = pa.table({"n": [n % 7 for n in range(100_000)]})
        counted = table.group_by("n", use_threads=True).aggregate([("n", "count")])
        yield pa.RecordBatch.from_pydict({"loaded": [loaded], "threads": [threads], "groups": [counted.num_rows]})

    kinds = "loaded boolean, threads long, groups long"
    rows = plain_spark.range(4, numPartitions=4).mapInArrow(seen, kinds).collect()

    assert [tuple(row) for row in rows] == [(True, 1, 7)] * 4


@_of_glibc
@pytest.mark.skipif(any(name.startswith(_MALLOC) for name in os.environ), reason="the environment sets glibc's malloc")
@pytest.mark.integration
def test_workers_keep_the_memory_of_freed_batches(plain_spark: SparkSession) -> None:
    def kept(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

        before = resident()
        for _turn in range(5):
            batches = [b"x" * (8 << 20) for _ in range(4)]
            del batches
        yield pa.RecordBatch.from_pydict({"kept": [resident() - before]})

    row = plain_spark.range(1, numPartitions=1).mapInArrow(kept, "kept long").head()

    assert row is not None
    assert 24 <= row.kept <= 40
