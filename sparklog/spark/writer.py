"""The writes: every task appends its rows with a producer of its own, the driver has them committed together.

Exactly once unless the options say otherwise; see ``sink``. What is checked of a batch write is checked on the driver,
before any task; a streaming writer is made three times for each micro-batch, in processes that keep nothing, so its
tasks look the topics up themselves. Spark has a process that plans a write and another one that commits it, which do
little else: neither loads what only tasks use, and the one that commits loads no Arrow. (To know whether columns of
other types than the topic's can be cast, planning does load ``pyarrow.compute``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sparklog.spark.gc_freeze import rest_beside_tasks
from sparklog.spark.sink import abort_run, commit_run, known_run, new_run_id, stream_run
from sparklog.spark.write_plan import WritePlan

if TYPE_CHECKING:
    import pyarrow as pa


class BatchWriter(DataSourceArrowWriter):
    """Made on the driver; copies in tasks get ``write`` calls, the driver's own gets ``commit`` or ``abort``."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._run = plan.run(new_run_id()) if plan.options.exactly_once else None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append all rows, to be committed; returns once every one of them is on all in-sync replicas.

        Raises:
            BrokerError: the first error that retries could not heal; ProducerFenced among them.
        """
        from sparklog.spark.write_task import write_rows

        return write_rows(self._plan, self._run, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Raises as ``sink.commit_run``."""
        rest_beside_tasks()
        commit_run(self._plan.options.bootstrap, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Take back what the tasks wrote. Not with ``exactlyOnce=false``, where it stays in the log."""
        abort_run(self._plan.options.bootstrap, self._run)


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for the tasks of a micro-batch, and for its end: no state but what Spark's messages carry."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        #: Of the tasks that get this writer.
        self._run_id = new_run_id()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """As ``BatchWriter.write``; rows of a micro-batch that is committed already are only counted."""
        from sparklog.spark.write_task import write_rows

        run = stream_run(self._run_id) if self._plan.options.exactly_once else None
        return write_rows(self._plan, run, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Raises as ``sink.commit_run``."""
        rest_beside_tasks()
        commit_run(self._plan.options.bootstrap, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """The next run of the query aborts what this does not know of: a failed task leaves no message."""
        abort_run(self._plan.options.bootstrap, known_run(messages))
