"""Exactly once: who writes (key, version, run), what a task tells the driver, what the driver has decided.

A run is one writer object that Spark made on the driver: all its task attempts take part in one transaction, each
under a producer id of its own. The messages that Spark hands to ``commit`` name the attempts that count; whatever else
was written, by attempts that lost, died or came late, is aborted by the same decision.

A streaming batch is known by the query's id and the batch's number, which only tasks see: the driver learns them from
their messages. A batch write has a key of its own, or the one its user gave it; Spark's ids are not asked for, because
all writes inside one ``foreachBatch`` carry the same.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from sparklog.client.sink_transaction import AlreadyCommitted, decide, join
from sparklog.client.transaction_run import Joined
from sparklog.errors import ClusterError, SparklogError
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.write_options import NamedWrite

_log = logging.getLogger(__name__)

#: Names of the properties that Spark gives to the tasks of a micro-batch. Source: MicroBatchExecution.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
#: How long a task waits for the coordinator, and the driver for the decision: several elections.
_PATIENCE_S = 120.0
_ABORT_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class SinkRun:
    """One run of one version of what ``key`` names."""

    key: str
    version: int
    run_id: str

    def __str__(self) -> str:
        return f"{self.key} version {self.version}"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task did: rows appended, and the offset ranges that hold them, other producers' records between.

    ``run`` None: not exactly once. ``producer_id`` None: the rows of this version were committed before; ``rows`` were
    only counted.
    """

    rows: int
    ranges: tuple[tuple[TopicPartition, OffsetRange], ...] = ()
    run: SinkRun | None = None
    producer_id: int | None = None

    @property
    def is_replay(self) -> bool:
        return self.run is not None and self.producer_id is None


@dataclass(frozen=True)
class WrittenByTopic(WriterCommitMessage):
    """What one task did of a named write whose rows name their topics: a run for each topic."""

    parts: tuple[Written, ...]


def new_run_id() -> str:
    return uuid.uuid4().hex


def batch_run(run_id: str, named: NamedWrite | None = None, *, topic_id: str = "") -> SinkRun:
    """A write of its own, or the one that its user has named: for the topic with this id.

    The same name for two topics is two sequences of writes, and a topic made anew begins one of its own: else a write
    would be taken for one committed elsewhere, and its rows left out. Source: Delta Lake, where it is by table.
    """
    if named is None:
        return SinkRun(f"write:{run_id}", 0, run_id)
    assert topic_id, "a named write is known by its topic"
    return SinkRun(f"app:{topic_id}:{named.app_id}", named.version, run_id)


def stream_run(run_id: str) -> SinkRun:
    """The micro-batch that this task belongs to. Raises ClusterError outside of one."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
    batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
    if not query_id or not batch_id:
        raise ClusterError(f"a streaming write outside of a query: {_QUERY_ID}={query_id!r}, {_BATCH_ID}={batch_id!r}")
    return SinkRun(f"query:{query_id}", int(batch_id), run_id)


def take_part(bootstrap: str, run: SinkRun, *, timeout_s: float) -> Joined | None:
    """Join the run's transaction; None when its version is committed already.

    Raises:
        ProducerFenced: a later run has come.
        ClientTimeout: no coordinator answered.
    """
    found = join(
        bootstrap,
        key=run.key,
        version=run.version,
        run_id=run.run_id,
        timeout_s=timeout_s,
        max_block_s=_PATIENCE_S,
    )
    return None if isinstance(found, AlreadyCommitted) else found


def commit_run(bootstrap: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Have what the tasks of ``messages`` wrote committed, all of it or nothing; of a named write whose rows name their
    topics, that holds for each topic.

    Raises:
        ClusterError: a task gave no message, so that its rows may be missing.
        ProducerFenced, TransactionStateError: another run has taken over; nothing of this one is committed.
        CommitOutcomeUnknown: nobody could be asked; running the version again finds out.
    """
    reported = [message for message in messages if isinstance(message, Written | WrittenByTopic)]
    if missing := len(messages) - len(reported):
        raise ClusterError(f"{missing} of {len(messages)} write tasks reported nothing")
    written: dict[SinkRun, list[Written]] = {}
    for message in reported:
        for part in message.parts if isinstance(message, WrittenByTopic) else (message,):
            if part.run is not None:
                written.setdefault(part.run, []).append(part)
    if len({run.run_id for run in written}) > 1:
        raise ClusterError(f"tasks of different runs in one commit: {', '.join(sorted(map(str, written)))}")
    for run, parts in written.items():
        _commit_one(bootstrap, run, parts)


def _commit_one(bootstrap: str, run: SinkRun, written: Sequence[Written]) -> None:
    if all(part.is_replay for part in written):
        _log.warning("%s was committed before: %d rows left out", run, sum(part.rows for part in written))
        return
    # An attempt without rows has registered nothing that could be committed.
    winners = [part.producer_id for part in written if part.producer_id is not None and part.rows]
    decide(
        bootstrap,
        key=run.key,
        version=run.version,
        run_id=run.run_id,
        winners=winners,
        timeout_s=_PATIENCE_S,
    )


def abort_run(bootstrap: str, run: SinkRun | None) -> None:
    """Abort it as far as that is possible now; else the next run does, or the transaction's time-out. What is committed
    stays so: Spark aborts, too, when only the answer to a commit was lost."""
    if run is None:
        return
    try:
        decide(
            bootstrap,
            key=run.key,
            version=run.version,
            run_id=run.run_id,
            commit=False,
            timeout_s=_ABORT_PATIENCE_S,
        )
    except SparklogError as error:
        _log.warning("%s was not aborted, its time-out will: %s", run, error)


def abort_all_runs(bootstrap: str, run_id: str) -> None:
    """As ``abort_run``, of every topic in which this run has something open: tasks that failed do not say which."""
    from sparklog.client.admin import Admin

    try:
        with Admin(bootstrap) as admin:
            found = [one for one in admin.transactions() if one.run_id == run_id and one.version is not None]
    except SparklogError as error:
        _log.warning("run %s was not aborted, its time-out will: %s", run_id, error)
        return
    for one in found:
        assert one.version is not None
        abort_run(bootstrap, SinkRun(one.key, one.version, run_id))


def known_run(messages: Sequence[WriterCommitMessage | None]) -> SinkRun | None:
    """The run of a batch by any message of its tasks; None when none got through."""
    return next((message.run for message in messages if isinstance(message, Written)), None)
