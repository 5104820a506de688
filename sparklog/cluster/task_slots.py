"""Checks that Spark has enough task slots for a barrier job, and the search for the cause if the job failed.

The driver checks the number of slots before it submits a barrier job, because Spark's own check repeats for ten minutes
and cannot be cancelled.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from pyspark import SparkContext

from sparklog.cluster.options import Sizing
from sparklog.errors import ClusterError

_TICK_S = 0.2
#: Matches the last line of a Python traceback within a Java error, or the line that reports that Python could not be
#: started.
_RAISED_IN_PYTHON = re.compile(
    r"Traceback \(most recent call last\):\n(?:\s.*\n)+(?P<raised>\S.*)|(?P<missing>Cannot run program .*)"
)
#: Matches errors that a retry does not fix.
_NO_FITTING_PYTHON = re.compile(r"^(ModuleNotFoundError|ImportError)\b|PYTHON_VERSION_MISMATCH|Cannot run program")


def never() -> bool:
    return False


def concurrent_tasks(context: SparkContext) -> int:
    """Return the number of tasks that the registered executors can run at the same time."""
    scala_context = context._jsc.sc()  # Spark's method has no Python API.
    profile = scala_context.resourceProfileManager().defaultResourceProfile()
    return int(scala_context.maxNumConcurrentTasks(profile))


def master_of(context: SparkContext) -> str:
    return context.master or ""


def require_slots(
    context: SparkContext, sizing: Sizing, *, brokers: int, timeout_s: float, given_up: Callable[[], bool] = never
) -> None:
    """Wait until the registered executors have enough task slots. Return early if ``given_up`` returns true.

    Raises:
        ClusterError: there are too few slots. The error has their number and says what to change.
    """
    needed = sizing.tasks + sizing.spare
    deadline = time.monotonic() + timeout_s
    while (found := concurrent_tasks(context)) < needed:
        master = master_of(context)
        if given_up():
            return
        if time.monotonic() > deadline or most_slots(master) < needed:
            found = max(found, min(most_slots(master), needed - 1))
            raise ClusterError(too_few_slots(found, sizing, brokers=brokers, master=master))
        time.sleep(_TICK_S)


def most_slots(master: str) -> int:
    """Return the maximum number of task slots that the master's name allows, or ``sys.maxsize`` if it sets no limit."""
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(cluster[1]) * int(cluster[2])
    if threads := re.fullmatch(r"local\[\s*(\d+)\s*(?:,\s*\d+\s*)?\]", master):
        return int(threads[1])
    return 1 if master == "local" else sys.maxsize


def too_few_slots(found: int, sizing: Sizing, *, brokers: int, master: str) -> str:
    spare = f" and {sizing.spare} for user jobs" if sizing.spare else ""
    needed = sizing.tasks + sizing.spare
    if master.startswith("local-cluster["):
        change = f"--master 'local-cluster[{needed},1,1024]', or fewer brokers"
    elif master.startswith("local"):
        change = f"--master 'local[{needed}]' or more"
    else:
        change = "more executors or cores (spark.executor.instances, spark.cores.max), or fewer brokers"
    return (
        f"{brokers} brokers need {sizing.tasks} task slots at the same time{spare}, {needed} in all;"
        f" {master} has {found}: use {change}"
    )


def cause_of(error: BaseException) -> str:
    """Return the line of a Java error that best explains it.

    This is the exception of a Python worker, or the reason why no worker started. If there is neither, it is the first
    line that names an exception, except py4j's own.
    """
    if raised := _RAISED_IN_PYTHON.search(str(error)):
        return str(raised["raised"] or raised["missing"]).strip()[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next((line for line in lines if "Exception" in line and "An error occurred" not in line), "")
    return (found or (lines[0] if lines else type(error).__name__)).lstrip(": ")[:300]


def require_fitting_python(error: BaseException) -> None:
    """Raise ClusterError if ``error`` shows that a job failed because the workers' Python cannot run sparklog."""
    cause = cause_of(error)
    if _NO_FITTING_PYTHON.search(cause):
        raise ClusterError(
            f"Spark's workers run a Python without the packages that brokers need ({cause}): set PYSPARK_PYTHON"
            " to one that has sparklog installed, on every host, before Spark is started"
        )
