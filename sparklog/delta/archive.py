"""The exactly-once archive of one topic in one Delta table, written by streaming queries.

Only the table records the progress (``archive_progress``). Every query, even after a failure or a change of the topic's
schema, starts at the offsets at which the table ends. It has a new checkpoint, which is deleted at its end, so no
checkpoint can contradict the table. ``micro_batch_archiver`` describes one micro-batch.

``ArchiveTable.append`` commits rows; ``upsert`` merges them by key. Each commit has the progress as JSON in its
userMetadata, and the progress's ``batch`` as Delta's txnVersion for ``app_id``. A micro-batch has all committed records
of its offsets. If it is repeated, it may end at other offsets, but it always begins where the table ends.
``maintenance`` runs concurrently with the batches, and its commits do not change the progress.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import TopicDescription
from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_table import ArchiveFenced, ArchiveRefused
from sparklog.delta.file_sizes import FileSizes
from sparklog.delta.maintenance import maintenance_of
from sparklog.delta.micro_batch_archiver import Archived, BatchArchiver, data_loss
from sparklog.delta.options import ArchiveOptions, interval_s
from sparklog.delta.process_liveness import longest_wait_s, may_run, this_process
from sparklog.delta.stream_ends import BatchEnds, read_batch_ends
from sparklog.delta.table_setup import prepare
from sparklog.errors import SparklogError
from sparklog.model import TopicPartition

_LOG = logging.getLogger(__name__)

_POLL_S = 0.2
#: The settings of the session in which batches are written.
_BATCH_SETTINGS = {
    # Spark disables adaptive execution for streams, but the archive runs each micro-batch as a batch query.
    "spark.sql.adaptive.enabled": "true",
    # The number of directories that a task writes concurrently. It is enough because most batches have few dates. A
    # task with more directories sorts its rows; by default every task does.
    "spark.sql.maxConcurrentOutputFileWriters": "4",
}
#: The maximum wait of a stop for the current batch. An interrupted batch is repeated by the next run.
_STOP_PATIENCE_S = 60.0


class TopicArchive:
    """A job that archives one topic in its Delta table.

    It runs until ``stop`` is called or, if the options have no interval, until it has archived all records that existed
    at its start. One thread uses the object. Only ``stop`` may be called from another thread.
    """

    #: Tests replace this class to interrupt its steps.
    batches: type[BatchArchiver] = BatchArchiver

    def __init__(self, spark: SparkSession, options: ArchiveOptions, tell: Callable[[str], None]) -> None:
        self._spark = spark
        self._options = options
        self._tell = tell
        self._admin = Admin(options.bootstrap, client_id="sparklog-archive")
        self._attempt = uuid.uuid4().hex
        self._stopping = threading.Event()
        #: An event that is set when the query must end: it failed, the topic's schema changed, or the archive stops.
        self._wake = threading.Event()
        #: A lock that the current batch holds.
        self._busy = threading.Lock()
        self._failure: BaseException | None = None
        self._outdated = False
        #: The table's progress, as this run last read or wrote it.
        self._last: ArchiveProgress | None = None
        #: The seconds for which the first commit waits, in case the run that made the last commit is still running.
        self._gives_way_s = 0.0
        self._sizes = FileSizes(options.maintenance.target_file_size)
        self._maintenance = maintenance_of(spark, options, batches=self._busy, tell=tell)
        #: The number of commits so far. The caller uses it to distinguish repeated failures from a failure after
        #: progress.
        self.commits = 0

    def run(self) -> None:
        """Archive with streaming queries, one after the other. Each change of the topic's schema starts a new query.

        Raises:
            ArchiveRefused: the topic cannot be archived in the table. A retry would not help.
            SparklogError, and Spark's errors: the archive failed. A retry may help.
        """
        with self._maintenance.running():
            while not self._stopping.is_set():
                self._failure, self._outdated = None, False
                # Each query has its own event, so a batch that continues after the end of its query finds the event
                # set.
                self._wake = threading.Event()
                checkpoint = Path(tempfile.mkdtemp(prefix="sparklog-archive-"))
                try:
                    self._run_query(checkpoint)
                finally:
                    shutil.rmtree(checkpoint, ignore_errors=True)
                if not self._outdated:
                    break
        if self._options.interval is None and not self._stopping.is_set():
            self._maintenance.run()

    def stop(self) -> None:
        """Ask the archive to end once the current batch is committed. This returns before the archive has ended."""
        self._stopping.set()
        self._wake.set()

    def close(self) -> None:
        self._admin.close()

    # --- one query ---

    def _run_query(self, checkpoint: Path) -> None:
        topic = self._admin.describe_topic(self._options.topic)
        offered = self._source(topic).load().schema
        prepared = prepare(self._spark, self._options, topic, columns=offered)
        progress = self._own(prepared.progress)
        # Set the group's offsets first: they may be those of another table, and brokers must not delete records that
        # this table lacks. This is also necessary if the start is refused below.
        nothing = dict.fromkeys((part.partition for part in topic.partitions), 0)
        self._store(progress if progress.ends else msgspec.structs.replace(progress, ends=nothing))
        starting = self._starting(topic, progress)
        archiver = self.batches(
            prepared.table,
            prepared.quarantine,
            prepared.casting,
            progress=progress,
            fail_on_data_loss=self._options.fail_on_data_loss,
            store=self._store,
            sizes=self._sizes,
        )
        columns = prepared.casting.read_columns(offered)
        stream = self._source(topic, startingOffsets=starting).schema(columns).load()

        wake, ready = self._wake, threading.Event()

        def is_over() -> bool:
            return wake.is_set() or self._stopping.is_set()

        def run_batch(batch: DataFrame, number: int) -> None:
            ready.wait()
            # No batch may run after the end.
            while not self._busy.acquire(timeout=_POLL_S):  # Maintenance may hold the lock for long.
                if is_over():
                    return
            try:
                if not is_over():
                    self._run_batch(archiver, topic, batch, ends_in=checkpoint, number=number)
            finally:
                self._busy.release()

        writer = stream.writeStream.foreachBatch(run_batch).queryName(f"archive-{self._options.topic}-{self._attempt}")
        writer = writer.option("checkpointLocation", checkpoint.as_uri())
        interval = self._options.interval
        query = (writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)).start()
        try:
            prepared.finish()  # This runs while Spark starts the process that plans the query.
        except BaseException as error:
            self._failure = error
            wake.set()
        ready.set()
        self._await(query)

    def _run_batch(
        self, archiver: BatchArchiver, topic: TopicDescription, batch: DataFrame, *, ends_in: Path, number: int
    ) -> None:
        try:
            # The description is newer than the records of the batch, so it has their schemas.
            now = self._admin.describe_topic(topic.name)
            if now.topic_id == topic.topic_id and now.schema_id != topic.schema_id:
                self._outdated = True
                self._wake.set()
                return
            for name, value in _BATCH_SETTINGS.items():
                batch.sparkSession.conf.set(name, value)
            ends = read_batch_ends(ends_in, number, topic=topic.name)
            if not self._has_given_way(archiver, ends):
                return
            has_news = archiver.has_news(ends)
            done = archiver.archive(batch, ends)
        except BaseException as error:
            self._failure = error
            self._wake.set()
        else:
            if has_news:
                self.commits += 1
                self._last = done.progress
            self._tell(_summary(done) if has_news else f"no new records after batch {done.progress.batch}")

    def _has_given_way(self, archiver: BatchArchiver, ends: BatchEnds) -> bool:
        """Before the first commit, wait for a while in case the run that made the last commit is still running.

        Return False if this run must end. Raises ArchiveFenced or QuarantineMoved if the other run commits: of two runs
        the first one continues.
        """
        if not (self._gives_way_s and archiver.has_news(ends)):
            return True
        self._tell(
            f"waiting for {self._gives_way_s:.0f} s: another run made the last commit, and may still be running; of two"
            " runs, the first one continues"
        )
        until = time.monotonic() + self._gives_way_s
        while time.monotonic() < until:
            if self._wake.wait(_POLL_S) or self._stopping.is_set():
                return False
            archiver.check_unchanged()
        self._gives_way_s = 0.0
        return True

    def _await(self, query: StreamingQuery) -> None:
        while query.isActive and not self._is_over:
            with suppress(StreamingQueryException):  # The error is read below.
                query.awaitTermination(_POLL_S)  # type: ignore[arg-type] # It accepts fractions of a second.
        has_ended = not self._is_over
        self._wake.set()
        # Wait for the batch even if another thread stopped the query: the batch continues in its own thread, with our
        # connections.
        if self._busy.acquire(timeout=_STOP_PATIENCE_S):
            self._busy.release()
        query.stop()
        if self._failure is not None:
            raise self._failure
        if has_ended and (error := query.exception()) is not None:
            raise explained(error)
        if has_ended and self._options.interval is not None:
            raise SparklogError(f"the query that archives topic {self._options.topic} was stopped from outside")

    @property
    def _is_over(self) -> bool:
        return self._wake.is_set() or self._stopping.is_set()

    def _source(self, topic: TopicDescription, **more: str) -> DataStreamReader:
        options = {
            "bootstrap.servers": self._options.bootstrap,
            "subscribe": topic.name,
            "failOnDataLoss": str(self._options.fail_on_data_loss).lower(),
            "maxOffsetsPerTrigger": str(self._options.max_offsets),
            "includeHeaders": "true",
            "includeCastErrors": "true",
        }
        return self._spark.readStream.format("sparklog").options(**options, **more)

    # --- start ---

    def _own(self, found: ArchiveProgress) -> ArchiveProgress:
        """Return the table's progress with the id of this run.

        Raises ArchiveFenced if the progress has changed since this run last read it.
        """
        if self._last is None:
            self._gives_way_s = longest_wait_s(found.every_s) if may_run(found.process) else 0.0
        elif found.attempt != self._attempt and found.commit != self._last.commit:
            raise ArchiveFenced(
                f"another archive of topic {found.topic} has committed batch {found.batch}; this one had reached batch "
                f"{self._last.batch}"
            )
        self._last = found
        return msgspec.structs.replace(
            found, attempt=self._attempt, process=this_process(), every_s=interval_s(self._options.interval)
        )

    def _starting(self, topic: TopicDescription, progress: ArchiveProgress) -> str:
        """Return the option ``startingOffsets``. Raises ArchiveRefused if the log does not have the next records."""
        if not progress.ends:
            return "earliest"
        ends = {TopicPartition(topic.name, number): end for number, end in progress.ends.items()}
        first = self._admin.list_offsets(list(ends), at="earliest")
        last = self._admin.list_offsets(list(ends), isolation="read_uncommitted", known=ends)
        for tp, end in ends.items():
            if last[tp] < end:
                raise ArchiveRefused(
                    f"{tp} ends at {last[tp]} but its table has records up to {end}: the log was truncated or replaced"
                )
        lost = {tp.partition: (end, first[tp]) for tp, end in ends.items() if first[tp] > end}
        if lost and self._options.fail_on_data_loss:
            raise ArchiveRefused(data_loss(topic.name, lost))
        starts = {str(tp.partition): max(end, first[tp]) for tp, end in ends.items()}
        return msgspec.json.encode({topic.name: starts}).decode()

    def _store(self, progress: ArchiveProgress) -> None:
        """Set the consumer group's offsets. An error is logged, and the archive continues."""
        try:
            self._admin.commit_offsets(
                self._options.group,
                {TopicPartition(progress.topic, number): end for number, end in progress.ends.items()},
                topic_ids={progress.topic: progress.topic_id},  # Otherwise a recreated topic would count as read.
            )
        except SparklogError as error:
            _LOG.warning("%s: could not store progress in group %s: %s", progress.topic, self._options.group, error)


def _summary(done: Archived) -> str:
    bad = f", {done.bad_rows:,} to quarantine" if done.bad_rows else ""
    return f"batch {done.progress.batch}: {done.rows:,} rows{bad}"


def explained(error: StreamingQueryException) -> Exception:
    """Return an error that names the cause of a query's failure, if the text of Spark's error shows it.

    For any other failure, return ``error`` itself.
    """
    text = str(error)
    if found := re.search(r"DataLoss: (.*?)(; with option failOnDataLoss|\n|$)", text):
        return ArchiveRefused(f"{found[1]}; to continue without them: --fail-on-data-loss false")
    if "must give an offset for each partition" in text:
        return SparklogError("partitions were added while the archive started, and not all brokers know them yet")
    return error
