"""The exactly-once writes of Spark: how a write is identified, committed and aborted.

Writes follow one another in a sequence, such as the micro-batches of a query. A *key*, which is a transactional id,
identifies the sequence, and a *version* is the number of a write in the sequence. A *run* is one attempt to do a write:
one writer object that Spark created on the driver.

All task attempts of a run take part in one transaction, each with its own producer id. The messages that Spark passes
to ``commit`` name the successful attempts. The commit also aborts the rows of all other attempts: failed, killed or
late ones.

The key of a streaming batch has the query's id, and the version is the batch's number. Only tasks know them, so the
driver learns them from the tasks' messages. A batch write has a new key, or a key from the name that its user gave it.
Spark's own ids cannot identify a batch write, because all writes in one ``foreachBatch`` have the same ids.

A name that a user gives identifies one sequence of writes per topic. If the option ``topic`` names the topic, the key
of the sequence contains the topic's id. If rows name the topics, the write is one transaction over all their topics
under another key. When the first row for a topic appears, the write checks whether the version is already committed to
the topic. So a topic's versions may be under either key. Suppose that two runs have the same name, but different keys:
only one of them can commit. Each run first begins a transaction under its own key, and then sends SettleVersion for the
other run's key. The second SettleVersion finds the transaction of the other run, and fences that run.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from sparklog.client.errors import ProducerFenced
from sparklog.client.producer.transaction_run import Joined
from sparklog.client.producer.two_phase_write import AlreadyCommitted, decide, join, settled_version
from sparklog.errors import BrokerError, ClusterError, ErrorCode, SparklogError
from sparklog.model import OffsetRange, TopicPartition
from sparklog.net.client_security import Security
from sparklog.spark.write_options import NamedWrite

_log = logging.getLogger(__name__)

#: The local properties that Spark sets for the tasks of a micro-batch. Source: MicroBatchExecution.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
#: The maximum wait of a task for the coordinator, and of the driver for the commit. It is long enough for several
#: elections.
_PATIENCE_S = 120.0
_ABORT_PATIENCE_S = 10.0
#: The beginnings of the transactional ids of writes: unnamed and named batch writes, and streaming queries.
BATCH_PREFIX, NAMED_PREFIX, STREAM_PREFIX = "write:", "app:", "query:"


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The identity of a run: one attempt to do one micro-batch or one batch write.

    ``key`` is the transactional id that identifies a sequence of writes, such as those of a query. ``version`` is the
    number of this write in the sequence. ``run_id`` is different for each attempt. ``app_id`` is the name that the user
    gave the write, or empty. ``topic_id`` is the id of the topic that the option names, or empty if rows name their
    topics.
    """

    key: str
    version: int
    run_id: str
    app_id: str = ""
    topic_id: str = ""

    @property
    def is_by_topic(self) -> bool:
        """Return whether this is a named write (txnAppId, txnVersion) whose rows name their topics.

        The version of such a write is checked for each topic.
        """
        return bool(self.app_id) and not self.topic_id

    def __str__(self) -> str:
        return f"{self.key} version {self.version}"


@dataclass(frozen=True)
class WrittenRows(WriterCommitMessage):
    """The result of one task: the number of appended rows, and the offset ranges that contain these rows.

    The ranges may also contain records of other producers. ``run`` is None if the write is not exactly once.
    ``producer_id`` is None if an earlier run has committed this write; the task then only counted the rows.
    ``topic_ids`` has the ids of the written topics, by name. ``known_rows`` is the number of rows that were not
    written because this version of the write is already committed to their topics.
    """

    rows: int
    ranges: tuple[tuple[TopicPartition, OffsetRange], ...] = ()
    run: SinkRun | None = None
    producer_id: int | None = None
    topic_ids: tuple[tuple[str, str], ...] = ()
    known_rows: int = 0

    @property
    def is_replay(self) -> bool:
        return self.run is not None and self.producer_id is None


def new_run_id() -> str:
    return uuid.uuid4().hex


def batch_run(run_id: str, named: NamedWrite | None = None, *, topic_id: str = "") -> SinkRun:
    """Return the ``SinkRun`` of a batch write. ``named`` is the name that its user gave it, or None.

    ``topic_id`` is the id of the topic to which the write goes, or empty if rows name their topics.

    The same name for two topics means two sequences of writes, and a recreated topic begins a new one. Otherwise a
    write could be mistaken for one that was committed to another topic, and its rows would be skipped. Source: Delta
    Lake, where names are per table.
    """
    if named is None:
        return SinkRun(f"{BATCH_PREFIX}{run_id}", 0, run_id)
    return SinkRun(named_key(named.app_id, topic_id), named.version, run_id, named.app_id, topic_id)


def named_key(app_id: str, topic_id: str = "") -> str:
    """Return the transactional id of a write with txnAppId. ``topic_id`` is empty if its rows name their topics."""
    return f"{NAMED_PREFIX}{topic_id}:{app_id}"


def stream_run(run_id: str) -> SinkRun:
    """Return the ``SinkRun`` of this task's micro-batch. Raises ClusterError outside a micro-batch."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
    batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
    if not query_id or not batch_id:
        raise ClusterError(f"a streaming write outside of a query: {_QUERY_ID}={query_id!r}, {_BATCH_ID}={batch_id!r}")
    return SinkRun(f"{STREAM_PREFIX}{query_id}", int(batch_id), run_id)


def join_run(bootstrap: str, run: SinkRun, *, timeout_s: float, security: Security = None) -> Joined | None:
    """Join the transaction of ``run``. Return None if the run's version is already committed.

    If rows name their topics, the version is checked later, for each topic.

    Raises:
        ProducerFenced: a later run has begun.
        ClientTimeout: no coordinator responded.
    """
    found = join(
        bootstrap,
        key=run.key,
        version=run.version,
        run_id=run.run_id,
        timeout_s=timeout_s,
        max_block_s=_PATIENCE_S,
        by_topic=run.is_by_topic,
        security=security,
    )
    return None if isinstance(found, AlreadyCommitted) else found


def is_known(bootstrap: str, run: SinkRun, topic_id: str, *, security: Security = None) -> bool:
    """Return whether the version of ``run``, a named write (txnAppId, txnVersion), is already committed to a topic.

    It does not matter whether an option or the rows named the topic in the earlier write. Call this after ``join_run``.
    All tasks of the run get the same result. Raises the same errors as ``join_run``.
    """
    asked = [(named_key(run.app_id), topic_id)]
    if run.is_by_topic:
        asked.append((named_key(run.app_id, topic_id), ""))
    return any(
        run.version
        <= settled_version(
            bootstrap, key=key, run_id=run.run_id, topic_id=of, max_block_s=_PATIENCE_S, security=security
        )
        for key, of in asked
    )


def commit_run(bootstrap: str, messages: Sequence[WriterCommitMessage | None], *, security: Security = None) -> None:
    """Commit the rows of the tasks that sent ``messages``, all or none.

    Raises:
        ClusterError: a task sent no message, so its rows may be missing, or the messages belong to several runs.
        BrokerError: INCONSISTENT_TOPIC_ID if a topic was recreated between two tasks.
        ProducerFenced, TransactionStateError: another run has taken over, and no row of this run is committed.
        CommitOutcomeUnknown: no coordinator responded. Repeat the write with the same version to complete the commit or
            to learn the outcome.
    """
    written = [message for message in messages if isinstance(message, WrittenRows)]
    if missing := len(messages) - len(written):
        raise ClusterError(f"{missing} of {len(messages)} write tasks sent no result")
    runs = {message.run for message in written}
    if len(runs) > 1:
        raise ClusterError(f"one commit got tasks of different runs: {', '.join(sorted(map(str, runs)))}")
    run = next(iter(runs), None)
    if run is not None:
        _require_same_topics(run, written)
        _commit(bootstrap, run, written, security)


def _require_same_topics(run: SinkRun, written: Sequence[WrittenRows]) -> None:
    """Raise BrokerError if tasks wrote to two topics with the same name.

    If this were committed, the rows in the deleted topic would be lost, and the next run would skip them because the
    version is committed.
    """
    first: dict[str, str] = {}
    for topic, topic_id in (named for message in written for named in message.topic_ids):
        if first.setdefault(topic, topic_id) != topic_id:
            detail = f"{run}: topic {topic} was deleted and created again between two tasks"
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID, f"{detail} (ids {first[topic]} and {topic_id}): run the write again"
            )


def _commit(bootstrap: str, run: SinkRun, written: Sequence[WrittenRows], security: Security) -> None:
    known = sum(part.rows if part.is_replay else part.known_rows for part in written)
    if known or any(part.is_replay for part in written):
        _log.warning("%s was already committed: skipped %d rows", run, known)
    # Leave out attempts without rows, which have registered no partition.
    winners = [part.producer_id for part in written if part.producer_id is not None and part.rows]
    if not winners and (run.is_by_topic or all(part.is_replay for part in written)):
        if run.app_id:
            abort_run(bootstrap, run, security=security)  # It may still be open without any rows.
        return
    decide(
        bootstrap,
        key=run.key,
        version=run.version,
        run_id=run.run_id,
        winners=winners,
        timeout_s=_PATIENCE_S,
        security=security,
    )


def abort_run(bootstrap: str, run: SinkRun | None, *, security: Security = None) -> None:
    """Abort the transaction of ``run``. If this fails, the next run or the transaction's time-out aborts it.

    Rows that are already committed stay. Spark also calls abort if only the response to a commit was lost.
    """
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
            security=security,
        )
    except ProducerFenced as error:
        _log.info("%s has no open transaction: %s", run, error)
    except SparklogError as error:
        _log.warning("could not abort %s, its time-out will: %s", run, error)


def known_run(messages: Sequence[WriterCommitMessage | None]) -> SinkRun | None:
    """Return the ``SinkRun`` that the messages of a batch's tasks contain, or None if there is no message."""
    return next((message.run for message in messages if isinstance(message, WrittenRows)), None)
