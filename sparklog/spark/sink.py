"""Exactly once: who writes (key, version, run), what a task tells the driver, what the driver has decided.

A run is one writer object that Spark made on the driver: all its task attempts take part in one transaction, each
under a producer id of its own. The messages that Spark hands to ``commit`` name the attempts that count; whatever else
was written, by attempts that lost, died or came late, is aborted by the same decision.

A streaming batch is known by the query's id and the batch's number, which only tasks see: the driver learns them from
their messages. A batch write has a key of its own, or the one its user gave it; Spark's ids are not asked for, because
all writes inside one ``foreachBatch`` carry the same.

What a user has named is one sequence of writes for each topic. Where the option ``topic`` says which, that is a key of
its own. Where rows do, the write is one transaction over all their topics, and which of them have its version already
is asked of each as it turns up. So a topic's versions stand under two keys. Two runs of one name, one of each kind, do
not both commit: each begins under its own key first and settles the other's then, so whichever of them settles later
finds the other's begin, and fences it.
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
    """One run of one version of what ``key`` names. ``app_id``: of a write that its user has named; ``topic_id``: of
    the topic that an option names, empty where rows do."""

    key: str
    version: int
    run_id: str
    app_id: str = ""
    topic_id: str = ""

    @property
    def is_by_topic(self) -> bool:
        """Which topics it goes to is known row by row, and versions count for each."""
        return bool(self.app_id) and not self.topic_id

    def __str__(self) -> str:
        return f"{self.key} version {self.version}"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task did: rows appended, and the offset ranges that hold them, other producers' records between.

    ``run`` None: not exactly once. ``producer_id`` None: the rows of this version were committed before; ``rows`` were
    only counted. ``topic_ids``: by name, of the topics written to. ``known_rows``: of topics that have this version
    already; they are not written.
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
    """A write of its own, or the one that its user has named: for the topic with this id, or those its rows name.

    The same name for two topics is two sequences of writes, and a topic made anew begins one of its own: else a write
    would be taken for one committed elsewhere, and its rows left out. Source: Delta Lake, where it is by table.
    """
    if named is None:
        return SinkRun(f"write:{run_id}", 0, run_id)
    return SinkRun(_named_key(named.app_id, topic_id), named.version, run_id, named.app_id, topic_id)


def _named_key(app_id: str, topic_id: str = "") -> str:
    return f"app:{topic_id}:{app_id}"


def stream_run(run_id: str) -> SinkRun:
    """The micro-batch that this task belongs to. Raises ClusterError outside of one."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
    batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
    if not query_id or not batch_id:
        raise ClusterError(f"a streaming write outside of a query: {_QUERY_ID}={query_id!r}, {_BATCH_ID}={batch_id!r}")
    return SinkRun(f"query:{query_id}", int(batch_id), run_id)


def take_part(bootstrap: str, run: SinkRun, *, timeout_s: float) -> Joined | None:
    """Join the run's transaction; None when its version is committed already, by topic only if that is known.

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
        by_topic=run.is_by_topic,
    )
    return None if isinstance(found, AlreadyCommitted) else found


def is_known(bootstrap: str, run: SinkRun, topic_id: str) -> bool:
    """Whether this topic has the version of a named write already: by a write whose rows named it, or one with the
    option. Asked once ``run`` has been joined, and the same for all its tasks.

    Raises as ``take_part``.
    """
    asked = [(_named_key(run.app_id), topic_id)]
    if run.is_by_topic:
        asked.append((_named_key(run.app_id, topic_id), ""))
    return any(
        run.version <= settled_version(bootstrap, key=key, run_id=run.run_id, topic_id=of, max_block_s=_PATIENCE_S)
        for key, of in asked
    )


def commit_run(bootstrap: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Have what the tasks of ``messages`` wrote committed, all of it or nothing.

    Raises:
        ClusterError: a task gave no message, so that its rows may be missing.
        BrokerError: INCONSISTENT_TOPIC_ID, a topic was made anew between two tasks.
        ProducerFenced, TransactionStateError: another run has taken over; nothing of this one is committed.
        CommitOutcomeUnknown: nobody could be asked; running the version again finds out.
    """
    written = [message for message in messages if isinstance(message, Written)]
    if missing := len(messages) - len(written):
        raise ClusterError(f"{missing} of {len(messages)} write tasks reported nothing")
    runs = {message.run for message in written}
    if len(runs) > 1:
        raise ClusterError(f"tasks of different runs in one commit: {', '.join(sorted(map(str, runs)))}")
    run = next(iter(runs), None)
    if run is not None:
        _require_same_topics(run, written)
        _commit(bootstrap, run, written)


def _require_same_topics(run: SinkRun, written: Sequence[Written]) -> None:
    """Committed as rows of two topics of one name, those in the older would be lost to the next run, too: the version
    would be known."""
    first: dict[str, str] = {}
    for topic, topic_id in (named for message in written for named in message.topic_ids):
        if first.setdefault(topic, topic_id) != topic_id:
            detail = f"{run}: topic {topic} was deleted and created again between two tasks"
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID, f"{detail} ({first[topic]} and {topic_id} found): run it again"
            )


def _commit(bootstrap: str, run: SinkRun, written: Sequence[Written]) -> None:
    known = sum(part.rows if part.is_replay else part.known_rows for part in written)
    if known or any(part.is_replay for part in written):
        _log.warning("%s was committed before: %d rows left out", run, known)
    # An attempt without rows has registered nothing that could be committed.
    winners = [part.producer_id for part in written if part.producer_id is not None and part.rows]
    if not winners and (run.is_by_topic or all(part.is_replay for part in written)):
        if run.app_id:
            abort_run(bootstrap, run)  # it may be open: that its rows are known shows later than it begins
        return
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
    except ProducerFenced as error:
        _log.info("%s has nothing open any more: %s", run, error)
    except SparklogError as error:
        _log.warning("%s was not aborted, its time-out will: %s", run, error)


def known_run(messages: Sequence[WriterCommitMessage | None]) -> SinkRun | None:
    """The run of a batch by any message of its tasks; None when none got through."""
    return next((message.run for message in messages if isinstance(message, Written)), None)
