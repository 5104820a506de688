"""``python -m sparklog.spark.worker_daemon``: pyspark's daemon, with what tasks need loaded before it forks workers.

Workers that nobody has used for a minute end, and Spark's new ones would load it all again, each for itself: half a
second of processor time before the first row of every query that comes after a pause. What is loaded rests
(``gc_freeze``), so that workers share its memory and do not go through it when they collect garbage.

Nor do they read archives' directories that have not changed. A worker tells Python that there may be new modules, as
its job's own files may be. Before 3.13 all that has found a module in an archive then reads its directory anew, once
for each package of pyspark's and once for ``spark-core``'s jar: 0.05 to 0.1 s. Here what has found them is forgotten
before the fork; what is needed again is made from the directory as it was read.

Workers keep memory that they have freed (docs/adr/0014). pyspark reads each of Spark's batches into memory of its own,
and glibc gives what is freed of it back to the kernel every few batches, to be handed cleared pages for the next ones,
by a fault for each: half of the kernel's time in a task that writes rows of 100 B. Who has told glibc otherwise is left
alone.

And a worker that the JVM has done with ends without a traceback. Spark closes the socket of a worker that nobody has
used for a minute, and of one whose rows nobody wants any more, as behind a LIMIT. The worker then ends as it should;
but its last words cannot be sent, and pyspark 4.2 shows that as if something had failed.

A fork has its parent's memory and one of its threads, so nothing may have a thread when it is forked that it needs
afterwards: pyspark's daemon therefore loads hardly anything. Here Arrow's jemalloc, which is not the allocator it
uses, would start a thread for itself, and is told not to. numpy's OpenBLAS starts as many as OMP_NUM_THREADS says,
which Spark sets to ``spark.task.cpus``: with one none, and what there are more of it ends before a fork and starts anew
when they are needed. numpy's generator of random numbers would go on in each worker where it was here, and is seeded
anew; Python's own does that by itself. ``conf/spark-defaults.conf`` names this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import socket
import sys
import zipimport
from pathlib import Path

from pyspark import daemon

_LOADED = (
    "encodings.idna",  # which looking up a broker's address loads
    "pyspark.worker",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pandas",  # which pyspark's end of a write loads, by way of the next two
    "pyarrow.pandas_compat",
    "pyarrow.vendored.version",
    "pyarrow.compute",
    "sparklog.client.producer.producer",
    "sparklog.client.consumer.partition_reader",
    "sparklog.spark.coalesce_batches",
    "sparklog.spark.history_read_task",
    "sparklog.spark.reader",
    "sparklog.spark.source",
    "sparklog.spark.stream",
    "sparklog.spark.read_task",
    "sparklog.spark.write_task",
    "sparklog.spark.writer",
    "uvloop",
)
_ARROWS_JEMALLOC = "JE_ARROW_MALLOC_CONF"
#: Where ``spark.executor.pyspark.memory`` bounds a worker's address space, of which what is loaded takes 250 MB.
#: Source: pyspark/worker_util.py.
_BOUNDED = "PYSPARK_EXECUTOR_MEMORY_MB"
#: Parameters of glibc's mallopt(3) and their values, in bytes. Smaller blocks than the first are cut from heaps, as
#: glibc does it by itself from the first larger one that is freed on. So much may stay free at the end of each heap.
_MMAP_THRESHOLD = (-3, 32 << 20)
_TRIM_THRESHOLD = (-1, 64 << 20)
#: What ends that glibc finds such values by itself: somebody has thought about them.
_MALLOC_IS_TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_GLIBC_IS_TOLD = "GLIBC_TUNABLES"

_worker = daemon.worker
#: Archives, as they were before anything was loaded.
_archives: dict[str, tuple[int, ...] | None] = {}


def load() -> None:
    """What cannot be loaded is left to the task that needs it, which then says why: others go on without it."""
    if _BOUNDED in os.environ:
        return
    _archives.update((path, _identity(path)) for path in sys.path if Path(path).is_file())
    given = os.environ.get(_ARROWS_JEMALLOC)
    os.environ[_ARROWS_JEMALLOC] = ",".join(filter(None, [given, "background_thread:false"]))
    with contextlib.redirect_stdout(sys.stderr):  # the JVM reads from ours where to find this daemon
        for name in _LOADED:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if given is None:  # what workers start is their own affair
        del os.environ[_ARROWS_JEMALLOC]
    else:
        os.environ[_ARROWS_JEMALLOC] = given
    _forget_archives()
    gc.collect()
    gc.freeze()


def keep_memory() -> None:
    """Of this process and of those that it forks. Nothing happens with another C library than glibc."""
    told = any(name in os.environ for name in _MALLOC_IS_TOLD) or "glibc.malloc." in os.environ.get(_GLIBC_IS_TOLD, "")
    if told or _BOUNDED in os.environ:
        return
    with contextlib.suppress(OSError, MemoryError):  # a Python that may not call C: tasks go on without
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        # Where the first is refused, as on 32 bits, the second alone would end what glibc does by itself.
        if mallopt is not None and mallopt(*_MMAP_THRESHOLD) == 1:
            mallopt(*_TRIM_THRESHOLD)


def _forget_archives() -> None:
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            _archives.setdefault(finder.archive, _identity(finder.archive))
            del sys.path_importer_cache[path]


@functools.cache  # once a worker, as it tells Python of its job's files
def _read_changed_archives() -> None:
    """Else a module would be cut out of the new file where the old one had it."""
    for archive, seen in _archives.items():
        if _identity(archive) != seen:
            with contextlib.suppress(zipimport.ZipImportError):  # it is gone
                zipimport.zipimporter(archive).invalidate_caches()


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def worker(sock: socket.socket, authenticated: bool) -> int:
    """As pyspark's, which tells the JVM of what tasks raise and returns: what comes here is that nobody listened."""
    _draw_other_numbers()
    _read_changed_archives()
    try:
        return _worker(sock, authenticated)
    except ConnectionError:
        return 1


@functools.cache  # once a worker: what a task of its own seeds stays seeded
def _draw_other_numbers() -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


if __name__ == "__main__":
    load()
    keep_memory()
    daemon.worker = worker
    daemon.manager()
