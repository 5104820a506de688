"""``gc.freeze()`` in Spark's Python workers, so that their garbage collections skip loaded modules.

Between two tasks a worker runs a full garbage collection before it takes the next task. With pyspark, Arrow and this
package loaded, the collection visits hundreds of thousands of objects that are never freed: about 40 ms of CPU time,
for which the next task waits. Source: manager() of pyspark/daemon.py.

Processes that plan and commit need the same time after each of their steps. Planning a write needs it twice, because a
second collection runs while its result is created, after Arrow and numpy are loaded.
"""

from __future__ import annotations

import functools
import gc
import sys

from pyspark import TaskContext


def freeze_worker() -> None:
    """Freeze all objects that exist now. Call it once per worker, at the end of a task.

    Then all modules are loaded and the task's objects are freed. Later objects are collected as usual.
    """
    if TaskContext.get() is not None:
        _freeze()


@functools.cache  # Once per process.
def freeze_planner() -> None:
    """Freeze all objects that exist now, if Spark forked this process for planning or committing.

    Call it at the beginning of a planning or committing step, when there is little garbage. In other processes it does
    nothing.
    """
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name == "pyspark.daemon" and TaskContext.get() is None:
        gc.freeze()


@functools.cache  # Cached, because gc.get_freeze_count() counts all frozen objects, which takes 8 ms per task.
def _freeze() -> None:
    gc.collect()  # Otherwise current garbage would stay forever. The worker's own collection then has little to do.
    gc.freeze()
