"""``python -m sparklog.spark.worker_daemon``: pyspark's daemon, which loads modules before it forks workers.

Workers that are idle for a minute end, and each new worker would load all modules again. This would take half a second
of CPU time before the first row of every query after a pause. The loaded objects are frozen (``gc_freeze``), so that
workers share their memory and their garbage collections skip them.

Workers also do not read the directories of unchanged archives again. A worker invalidates Python's import caches,
because its job may have brought new files. Before Python 3.13, every importer of an archive then reads the archive's
directory again: once for each package of pyspark and once for the jar of ``spark-core``. This takes 0.05 to 0.1 s. The
daemon drops these importers before the fork. Those that a worker needs are created again from the directory that was
already read.

Workers keep freed memory (docs/adr/0014). pyspark reads each of Spark's batches into newly allocated memory. glibc
returns freed memory to the kernel every few batches, and gets cleared pages for the next ones, with one page fault
each. In a task that writes rows of 100 B, this is half of the kernel's time. If the user has set a parameter of glibc,
its value does not change.

A worker whose socket the JVM closes ends without a traceback. Spark closes the socket of a worker that was idle for a
minute, and of a worker whose rows are no longer needed, as after a LIMIT. The worker then ends as intended, but its
final message cannot be sent, and pyspark 4.2 prints a traceback as for a failure.

A fork has its parent's memory but only one of its threads. So a module that needs a thread after the fork must not
start the thread before the fork. For this reason pyspark's own daemon loads almost no modules. Arrow's jemalloc, which
is not the allocator in use, would start a thread, and is configured not to. numpy's OpenBLAS starts OMP_NUM_THREADS
threads, which Spark sets to ``spark.task.cpus``: with 1 it starts none, and it stops additional threads before a fork
and starts them again on demand. numpy's random generator would continue from the same state in each worker, so workers
seed the generator again. Python seeds its own generator after a fork. ``conf/spark-defaults.conf`` names this module.
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

from sparklog.net.user_directory import PREFIX, private_directory

_LOADED = (
    "encodings.idna",  # The lookup of a broker's address loads it.
    "pyspark.worker",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pandas",  # pyspark loads it at the end of a write, through the next two modules.
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
#: The environment variable with the limit of a worker's address space (``spark.executor.pyspark.memory``). The loaded
#: modules would take 250 MB of it. Source: pyspark/worker_util.py.
_BOUNDED = "PYSPARK_EXECUTOR_MEMORY_MB"
#: Parameters of glibc's mallopt(3) with their values in bytes. Blocks smaller than the first value are allocated from
#: heaps. (glibc itself raises this limit when a larger block is freed.) At the end of each heap, free memory up to the
#: second value is kept.
_MMAP_THRESHOLD = (-3, 32 << 20)
_TRIM_THRESHOLD = (-1, 64 << 20)
#: Environment variables with which the user sets such values. They disable glibc's own adaptation.
_MALLOC_IS_TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_GLIBC_IS_TOLD = "GLIBC_TUNABLES"

#: The environment variable with the directory of Spark's sockets (``spark.python.unix.domain.socket.dir``).
_SOCKET_DIRECTORY = "PYTHON_WORKER_FACTORY_SOCK_DIR"

_worker = daemon.worker
#: The archives, each with its state before the first import.
_archives: dict[str, tuple[int, ...] | None] = {}


def load() -> None:
    """Load the modules that tasks need.

    If a module cannot be loaded, the task that needs it raises the error. Other tasks work without the module.
    """
    if _BOUNDED in os.environ:
        return
    _archives.update((path, _identity(path)) for path in sys.path if Path(path).is_file())
    given = os.environ.get(_ARROWS_JEMALLOC)
    os.environ[_ARROWS_JEMALLOC] = ",".join(filter(None, [given, "background_thread:false"]))
    with contextlib.redirect_stdout(sys.stderr):  # The JVM reads the daemon's port from stdout.
        for name in _LOADED:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if given is None:  # Do not pass the setting on to processes that workers start.
        del os.environ[_ARROWS_JEMALLOC]
    else:
        os.environ[_ARROWS_JEMALLOC] = given
    _forget_archives()
    gc.collect()
    gc.freeze()


def keep_memory() -> None:
    """Make this process, and the processes that it forks, keep freed memory. Without glibc this does nothing."""
    told = any(name in os.environ for name in _MALLOC_IS_TOLD) or "glibc.malloc." in os.environ.get(_GLIBC_IS_TOLD, "")
    if told or _BOUNDED in os.environ:
        return
    with contextlib.suppress(OSError, MemoryError):  # Some Pythons cannot call C functions.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        # If glibc refuses the first value, as on 32-bit systems, the second alone would only disable glibc's own
        # adaptation.
        if mallopt is not None and mallopt(*_MMAP_THRESHOLD) == 1:
            mallopt(*_TRIM_THRESHOLD)


def _forget_archives() -> None:
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            _archives.setdefault(finder.archive, _identity(finder.archive))
            del sys.path_importer_cache[path]


@functools.cache  # Once per worker, when it invalidates import caches for its job's files.
def _read_changed_archives() -> None:
    """Read the directories of changed archives again.

    Otherwise modules would be read from the new file at the old positions.
    """
    for archive, seen in _archives.items():
        if _identity(archive) != seen:
            with contextlib.suppress(zipimport.ZipImportError):  # The archive was deleted.
                zipimport.zipimporter(archive).invalidate_caches()


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Run pyspark's worker.

    The worker sends exceptions of tasks to the JVM and then returns. A ConnectionError that reaches this function means
    that the JVM has closed the socket.
    """
    _draw_other_numbers()
    _read_changed_archives()
    try:
        return _worker(sock, authenticated)
    except ConnectionError:
        return 1


@functools.cache  # Once per worker, because a seed that a task sets must stay.
def _draw_other_numbers() -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def make_socket_directory() -> None:
    """Create the directory of Spark's sockets on this host, if it has a name that sparklog chose.

    The driver has chosen the name, and has created the directory only on the driver's host. Raises ClusterError if
    other users can enter the directory.
    """
    path = Path(os.environ.get(_SOCKET_DIRECTORY, ""))
    if path.name.startswith(PREFIX):
        private_directory(path)


if __name__ == "__main__":
    make_socket_directory()
    load()
    keep_memory()
    daemon.worker = worker
    daemon.manager()
