"""What a Python worker of Spark has loaded rests: its garbage collector does not go through it after every task.

Between two tasks a worker collects garbage, all of it, and only then takes the next task. With pyspark, Arrow and this
package loaded there are hundreds of thousands of objects to go through, none of which ever goes: some 40 ms of
processor time, which the next task waits for. Source: manager() of pyspark/daemon.py.

Processes that plan and that commit go through as much: behind each of their steps, and to plan a write once more, as
its answer is made, for all that Arrow and numpy have when they are loaded.
"""

from __future__ import annotations

import functools
import gc
import sys

from pyspark import TaskContext


def rest_what_is_loaded() -> None:
    """To be called at the end of a task, when all that tasks use is loaded and what they made is let go. Once in the
    life of a worker, and nowhere else; what comes later is collected as ever."""
    if TaskContext.get() is not None:
        _rest()


@functools.cache  # once a process
def rest_beside_tasks() -> None:
    """To be called where planning or committing begins, in whatever process that is: nothing rests but in one that
    Spark has forked for it, and there as it is, for it has made no garbage yet that would be worth a search."""
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name == "pyspark.daemon" and TaskContext.get() is None:
        gc.freeze()


@functools.cache  # the collector would count all that rests, to say whether anything does: 8 ms a task
def _rest() -> None:
    gc.collect()  # else what is garbage now would stay; the worker's own collection then finds nothing to do
    gc.freeze()
