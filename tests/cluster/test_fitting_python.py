"""Tests of failures of the first job after which no other job can succeed."""

from __future__ import annotations

import pytest

from sparklog.cluster.task_slots import cause_of, require_fitting_python
from sparklog.errors import ClusterError

_JOB = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times, most recent failure: {}
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2856)
"""
_RAISED = """org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] Traceback (most recent call last):
  File "worker.py", line 3592, in main
    func = read_command(pickleSer, infile)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{}
 SQLSTATE: 38000
"""


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (_RAISED.format("ModuleNotFoundError: No module named 'msgspec'"), "ModuleNotFoundError: No module"),
        (_RAISED.format("pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] 3.9"), "PYTHON_VERSION_MISM"),
        (
            'a barrier task failed.\njava.io.IOException: Cannot run program "python9": error=2, No such file',
            'Cannot run program "python9": error=2',
        ),
    ],
)
def test_an_unsuitable_worker_python_names_the_remedy(failure: str, cause: str) -> None:
    error = RuntimeError(_JOB.format(failure))
    with pytest.raises(ClusterError, match="set PYSPARK_PYTHON") as told:
        require_fitting_python(error)
    assert cause in str(told.value)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (_RAISED.format("sparklog.errors.ClusterError: port 9092 is taken"), "sparklog.errors.ClusterError: port 9092"),
        ("ExecutorLostFailure (executor 1 exited)", "org.apache.spark.SparkException: Job aborted"),
    ],
)
def test_other_failures_may_pass_on_another_try(failure: str, cause: str) -> None:
    error = RuntimeError(_JOB.format(failure))
    require_fitting_python(error)
    assert cause_of(error).startswith(cause)
