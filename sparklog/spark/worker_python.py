"""The selection of the Python for Spark's workers, in which sparklog must be installed."""

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
    """Make workers on this machine use the program's own Python, unless the user sets one.

    By default workers run the ``python3`` of the search path. This often differs from the program's Python, for example
    if the program was started by the path of its virtual environment. Other hosts may not have the program's Python, so
    a warning then says what to set.
    """
    if os.environ.get(_VARIABLE):
        return
    if (context.master or "").startswith("local"):
        context.pythonExec = sys.executable
    elif not context.getConf().get(_SETTING):
        log.warning(
            "Spark's workers on other hosts run %s: if it does not have sparklog, set %s, or %s in Spark's settings,"
            " to a Python on those hosts that has it, before Spark starts",
            context.pythonExec,
            _VARIABLE,
            _SETTING,
        )
