"""Which Python the workers of Spark run: one that has sparklog, or a warning that says how to name one."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_VARIABLE = "PYSPARK_PYTHON"
_SETTING = "spark.pyspark.python"


def choose_worker_python(context: SparkContext) -> None:
    """Have workers on this machine run the program's own Python, unless the user names one.

    Without a name they run the ``python3`` of the search path, often another than the program's, as when that is
    started by its virtual environment's path. Other hosts may not have it: a warning says what to set.
    """
    if os.environ.get(_VARIABLE):
        return
    if (context.master or "").startswith("local"):
        context.pythonExec = sys.executable
    elif not context.getConf().get(_SETTING):
        log.warning(
            "Spark's workers on other hosts run %s: if that has no sparklog, set %s, or %s in Spark's configuration, to"
            " a Python of those hosts that has it, before Spark starts",
            context.pythonExec,
            _VARIABLE,
            _SETTING,
        )
