"""``gc.freeze()`` in Spark's Python workers, so that their garbage collections skip loaded modules.

Between two tasks a worker runs a full garbage collection before it takes the next task. With pyspark, Arrow and this
package loaded, the collection visits hundreds of thousands of objects that are never freed: about 40 ms of CPU time,
for which the next task waits. Source: manager() of pyspark/daemon.py.

Processes that plan and commit run such a collection after each of their steps. A process that plans a write also
runs one while it creates the plan, after Arrow and numpy are loaded.
"""

from __future__ import annotations

import functools
import gc
import sys

from pyspark import TaskContext


def freeze_worker() -> None:
    """Exclude all objects that exist now from later garbage collections. Call this at the end of a task.

    At that time, all modules are loaded and the task's objects are freed. Objects that are created later are collected
    as usual. Only the first call in a worker has an effect.
    """
    if TaskContext.get() is not None:
        _freeze()


@functools.cache  # Once per process.
def freeze_planner() -> None:
    """Exclude all objects that exist now from later garbage collections, if this process plans or commits for Spark.

    Call this at the beginning of a planning or committing step, when there is little garbage. In other processes, this
    function does nothing.
    """
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name == "pyspark.daemon" and TaskContext.get() is None:
        gc.freeze()


@functools.cache  # Cached, because gc.get_freeze_count() counts all frozen objects, which takes 8 ms per task.
def _freeze() -> None:
    gc.collect()  # Otherwise current garbage would stay forever. The worker's own collection then has little to do.
    gc.freeze()
