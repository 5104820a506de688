"""``gc.freeze()`` in Spark's Python workers: the garbage collector skips loaded modules after every task.

Between two tasks a worker runs a full garbage collection before it takes the next task. With pyspark, Arrow and this
package loaded, the collection visits hundreds of thousands of objects that are never freed: about 40 ms of CPU time,
for which the next task waits. Source: manager() of pyspark/daemon.py.

Processes that plan and commit spend as much after each of their steps. Planning a write spends it a second time while
creating its result, because Arrow and numpy are then loaded.
"""

from __future__ import annotations

import functools
import gc
import sys

from pyspark import TaskContext


def freeze_worker() -> None:
    """Freeze all loaded objects. Call once per worker, at the end of a task, when all modules are loaded and the task's
    objects are freed; later objects are collected as usual."""
    if TaskContext.get() is not None:
        _freeze()


@functools.cache  # once a process
def freeze_planner() -> None:
    """Freeze all loaded objects if Spark forked this process for planning or committing; otherwise do nothing. Call at
    the beginning of planning or committing, when there is no garbage worth collecting yet."""
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name == "pyspark.daemon" and TaskContext.get() is None:
        gc.freeze()


@functools.cache  # cached, because gc.get_freeze_count() counts all frozen objects: 8 ms per task
def _freeze() -> None:
    gc.collect()  # otherwise current garbage would stay forever; the worker's own collection then has nothing to do
    gc.freeze()
