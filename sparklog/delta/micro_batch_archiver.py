"""The archiving of a micro-batch in three commits: to the quarantine, to the table, and to the consumer group.

Each commit is one step, and the order is important. Bad rows are committed to the quarantine first. Then the other rows
are committed to the table together with its new ends; from then on the records below the ends count as archived. The
group's offsets, which allow brokers to delete records, come last. So after a crash between two steps, every record that
counts as archived is in a table. After a crash the next run repeats all steps. A commit that must not be repeated has a
number in Delta's log (``archive_table``), and rows of the quarantine are identified by offset (``quarantine``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyspark.sql import DataFrame

from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_table import SPARK_ERRORS, ArchiveFenced, ArchiveRefused, ArchiveTable
from sparklog.delta.casting import BAD_ROW, Casting
from sparklog.delta.file_sizes import FileSizes
from sparklog.delta.quarantine import Quarantine
from sparklog.delta.stream_ends import BatchEnds
from sparklog.delta.upsert import upsert

_LOG = logging.getLogger(__name__)


class Archived(NamedTuple):
    """The result of archiving one batch: the table's new progress, and the numbers of archived rows and of bad rows."""

    progress: ArchiveProgress
    rows: int
    bad_rows: int


class BatchArchiver:
    """An archiver of one query's micro-batches. Spark calls it in the thread that runs the batches.

    ``progress`` is the table's progress before the first batch. Its ``attempt`` is the id of this run; each start of
    the archive is a new run. Tests override the methods of the steps to interrupt a batch between two of them.
    """

    #: Whether the last batch had bad rows.
    expects_bad_rows = False

    def __init__(
        self,
        table: ArchiveTable,
        quarantine: Quarantine,
        casting: Casting,
        *,
        progress: ArchiveProgress,
        fail_on_data_loss: bool,
        store: Callable[[ArchiveProgress], None],
        sizes: FileSizes,
    ) -> None:
        self._table = table
        self._quarantine = quarantine
        self._casting = casting
        self._fail_on_data_loss = fail_on_data_loss
        self._store = store
        self._sizes = sizes
        #: The progress at the last commit of this run, or at its start.
        self.progress = progress
        #: The newest progress of the table that this run expects to find there.
        self._expected = table.progress

    def archive(self, read: DataFrame, batch: BatchEnds) -> Archived:
        """Archive the records ``read`` of one micro-batch. ``batch`` has the start and end offsets of the micro-batch.

        Raises:
            ArchiveFenced, QuarantineMoved: another archive has committed to the table or to the quarantine.
            ArchiveRefused: the batch does not begin where the table ends, records were deleted from the log before they
                were archived, or the topic was recreated.
        """
        self.check_unchanged()
        progress = self._next(batch)
        if not self.has_news(batch):
            return Archived(self.progress, 0, 0)  # The first batch of a run may be empty.
        done = self._in_one_pass(read, progress) or self._in_two_passes(read, progress)
        self.expects_bad_rows = done.bad_rows > 0
        self.progress = self._expected = progress
        self.store_progress(progress)
        return done

    def _in_one_pass(self, read: DataFrame, progress: ArchiveProgress) -> Archived | None:
        """Archive the batch in one pass. Return None, without a commit, if there is a bad row.

        Bad rows must be known before the table's commit, which takes a second pass over the batch. They are rare, so
        this tries one pass first.
        """
        if self.expects_bad_rows:
            return None
        good = self._quarantine.without_pending(self._casting.rows_or_failure(read), self.progress.ends)
        try:
            return Archived(progress, self.commit(good, progress), 0)
        except SPARK_ERRORS as error:
            if BAD_ROW not in str(error):
                raise
            _LOG.warning("%s: batch %d has bad rows, repeating it without them", progress.topic, progress.batch)
            return None

    def _in_two_passes(self, read: DataFrame, progress: ArchiveProgress) -> Archived:
        good, bad = self._casting.rows(read)
        bad_rows = self.set_aside(self._quarantine.without_pending(bad, self.progress.ends), progress)
        self.check_unchanged()
        return Archived(
            progress, self.commit(self._quarantine.without_pending(good, self.progress.ends), progress), bad_rows
        )

    # --- the steps ---

    def set_aside(self, bad: DataFrame, progress: ArchiveProgress) -> int:
        """Commit the bad rows to the quarantine. Return the number of bad rows."""
        count = bad.count()
        if count:
            self._quarantine.add(bad, progress)
        return count

    def commit(self, good: DataFrame, progress: ArchiveProgress) -> int:
        """Commit the rows that are not bad to the table, together with its new end offsets.

        Return the number of rows that this added, changed or deleted.
        """
        if self._casting.keys:
            return upsert(self._table, good, progress, keys=self._casting.table_keys)
        offsets = sum(progress.ends.values()) - sum(self.progress.ends.values())
        metrics = self._table.append(good.coalesce(self._sizes.tasks(offsets)), progress)
        self._sizes.wrote(offsets, int(metrics.get("numOutputBytes", 0)))
        return int(metrics.get("numOutputRows", 0))

    def store_progress(self, progress: ArchiveProgress) -> None:
        """Commit the table's end offsets as offsets of the consumer group.

        Only the brokers' retention uses these offsets. If the commit fails, the brokers merely keep records longer.
        """
        self._store(progress)

    # --- checks ---

    def has_news(self, batch: BatchEnds) -> bool:
        """Return whether the batch moves the table's end offsets, so that a commit is needed.

        This is always true for a table without progress.
        """
        return self._expected is None or {**self.progress.ends, **batch.ends} != self.progress.ends

    def check_unchanged(self) -> None:
        """Raise ArchiveFenced or QuarantineMoved if another archive has committed since this run's last commit.

        If this run has not committed yet, raise the error for any commit since the start of this run.
        """
        found = self._table.refresh()
        if found != self._expected:
            raise ArchiveFenced(
                f"another archive has committed to {self._table.path}: found {_named(found)}, expected "
                f"{_named(self._expected)}"
            )
        self._quarantine.check()

    def _next(self, batch: BatchEnds) -> ArchiveProgress:
        before = self.progress
        if batch.topic_id != before.topic_id:
            raise ArchiveRefused(
                f"topic {before.topic} was deleted and created again: its id changed from {before.topic_id} to "
                f"{batch.topic_id}; {self._table.path} has the old topic: archive the new one to another path"
            )
        lost = self._lost(before.ends, batch)
        ends = {**before.ends, **batch.ends}
        return ArchiveProgress(
            topic=before.topic,
            topic_id=before.topic_id,
            batch=before.batch + 1,
            ends=ends,
            begins=self._begins(batch),
            mode=before.mode,
            attempt=before.attempt,
            process=before.process,
            every_s=before.every_s,
            lost=lost,
        )

    def _begins(self, batch: BatchEnds) -> dict[int, int]:
        """Return the offset at which the archive of each partition begins.

        A partition that was added later begins at 0; if its first records were deleted, they are ``lost``.
        """
        before = self.progress
        if not before.ends:
            return {number: batch.begun.get(number, 0) for number in batch.ends}
        if not before.begins:
            return {}  # the begins are unknown
        return {**dict.fromkeys(batch.ends, 0), **before.begins}

    def _lost(self, ends: Mapping[int, int], batch: BatchEnds) -> dict[int, tuple[int, int]]:
        """Return the ranges between the table's ends and the batch's start."""
        lost = {}
        for number, end in batch.ends.items():
            first = batch.begun.get(number, ends.get(number, 0))
            expected = ends.get(number, 0)
            if first > expected and ends:  # Partitions that were added later begin at 0.
                lost[number] = (expected, first)
            if first < expected or end < expected:
                raise ArchiveRefused(
                    f"{self.progress.topic}-{number} is read from {first} to {end}, but {self._table.path} ends at "
                    f"{expected}: the log was truncated or replaced"
                )
        if lost and self._fail_on_data_loss:
            raise ArchiveRefused(data_loss(self.progress.topic, lost))
        if lost:
            _LOG.warning("%s: skipped lost offsets: %s", self.progress.topic, lost)
        return lost


def _named(progress: ArchiveProgress | None) -> str:
    return f"batch {progress.batch}" if progress is not None else "no batch"


def data_loss(topic: str, lost: Mapping[int, tuple[int, int]]) -> str:
    """Return the error message about ranges of offsets that were deleted from the log before they were archived."""
    ranges = ", ".join(f"offsets {low} to {high} of {topic}-{number}" for number, (low, high) in sorted(lost.items()))
    return (
        f"{ranges} were deleted from the log before they were archived (retention, or deleted records); "
        "to continue without them: --fail-on-data-loss false"
    )
