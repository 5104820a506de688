"""The writers: every task appends its rows with its own producer, and the driver commits all rows together.

Writes are exactly-once unless the options say otherwise; see ``sink``. The driver checks a batch write before any task.
A streaming writer is created three times per micro-batch, in processes without state, so its tasks look up the topics
themselves. Spark plans a write in one process and commits it in another. To start fast, neither loads modules that only
tasks need, and the one that commits does not load Arrow. (Planning loads ``pyarrow.compute`` to check whether columns
with other types than the topic's can be cast.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sparklog.spark.gc_freeze import freeze_planner
from sparklog.spark.sink import abort_run, commit_run, known_run, new_run_id, stream_run
from sparklog.spark.write_plan import WritePlan

if TYPE_CHECKING:
    import pyarrow as pa

    from sparklog.spark.task_login import TaskLogin


class BatchWriter(DataSourceArrowWriter):
    """The writer of a batch write. The driver creates it and calls ``commit`` or ``abort``.

    Tasks call ``write`` on copies.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._run = plan.run(new_run_id()) if plan.options.exactly_once else None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append all rows of a task. Return when all in-sync replicas have every row.

        The rows are committed later, by ``commit``.

        Raises:
            BrokerError: an error persists after retries, such as ProducerFenced.
        """
        from sparklog.spark.write_task import write_rows

        return write_rows(self._plan, self._run, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks. Raises the same errors as ``sink.commit_run``."""
        freeze_planner()
        commit_run(self._plan.options.bootstrap, messages, security=self._plan.options.security)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort the rows of all tasks. With ``exactlyOnce=false`` they stay in the log."""
        abort_run(self._plan.options.bootstrap, self._run, security=self._plan.options.security)


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of one micro-batch.

    Spark creates one object for the tasks and another one for the commit, so the two objects share only the messages of
    the tasks. The object for the tasks gets their token when Spark pickles it: the constructor must not use the
    network, because Spark also calls it for the commit.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        #: The run id of the tasks that get this writer.
        self._run_id = new_run_id()
        #: The plan for the tasks, with their token; None until Spark pickles this object.
        self._plan_of_tasks: WritePlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the tasks, with a token instead of the login of the options. Raises BrokerError."""
        from sparklog.spark.task_scope import write_scope

        if self._plan_of_tasks is None:
            login = self._login().of(write_scope(self._plan, streaming=True))
            self._plan_of_tasks = self._plan.with_login(login)
        return {**self.__dict__, "_plan": self._plan_of_tasks}

    def _login(self) -> TaskLogin:
        from sparklog.spark.task_login import TaskLogin

        options = self._plan.options
        lifetime_ms = options.token_lifetime_ms
        return TaskLogin(options.bootstrap, options.security, lifetime_ms=lifetime_ms, checks_rarely=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append all rows of a task, as ``BatchWriter.write`` does. Raises the same errors.

        If the micro-batch is already committed, its rows are only counted.
        """
        from sparklog.spark.write_task import write_rows

        run = stream_run(self._run_id) if self._plan.options.exactly_once else None
        return write_rows(self._plan, run, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the rows of all tasks. Raises the same errors as ``sink.commit_run``."""
        freeze_planner()
        commit_run(self._plan.options.bootstrap, messages, security=self._plan.options.security)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Abort the run that the messages of the tasks name.

        If no task sent a message, the next run of the query aborts their rows.
        """
        from sparklog.spark.task_scope import write_scope

        abort_run(self._plan.options.bootstrap, known_run(messages), security=self._plan.options.security)
        self._login().doubt(write_scope(self._plan, streaming=True))
