"""From a micro-batch to commits: bad rows, then the table with its new ends, then the consumer group.

Each step rests on the one before it: a record counts as archived when the table's ends are behind it, and that commit
comes when its bad rows are safe; the group, which lets brokers delete records, comes last. Whoever dies between two
steps has promised nothing that is not so. No step looks at an earlier one of another run: it is done again, and what
must not be done twice is numbered in Delta's log (``archive_table``) or keyed by offset (``quarantine``).
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
    """What one batch came to."""

    seam: ArchiveProgress
    rows: int
    bad_rows: int


class BatchArchiver:
    """Owner: the thread in which Spark runs the batches of one query. ``seam``: what the table says before the first of
    them, its ``attempt`` already that of this run. Tests interrupt it by overriding the steps."""

    #: Whether the last batch had any.
    expects_bad_rows = False

    def __init__(
        self,
        table: ArchiveTable,
        quarantine: Quarantine,
        casting: Casting,
        *,
        seam: ArchiveProgress,
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
        #: The last commit of this run, or what it found.
        self.seam = seam
        #: The newest seam of the table as this run has seen or made it.
        self._expected = table.seam

    def archive(self, read: DataFrame, batch: BatchEnds) -> Archived:
        """Archive the records of a micro-batch, which ends at ``batch``.

        Raises:
            ArchiveFenced: another archive has come in between.
            ArchiveRefused: the batch does not follow from what the table holds.
        """
        self.check_unchanged()
        seam = self._next(batch)
        if not self.has_news(batch):
            return Archived(self.seam, 0, 0)  # the first batch of a run has to be, whether there is anything or not
        done = self._in_one_pass(read, seam) or self._in_two_passes(read, seam)
        self.expects_bad_rows = done.bad_rows > 0
        self.seam = self._expected = seam
        self.store_progress(seam)
        return done

    def _in_one_pass(self, read: DataFrame, seam: ArchiveProgress) -> Archived | None:
        """None where there is a bad row: then nothing has been committed. A batch is read for each look at it, and bad
        rows, which have to be known before the commit, are rare."""
        if self.expects_bad_rows:
            return None
        good = self._quarantine.without_pending(self._casting.rows_or_failure(read), self.seam.ends)
        try:
            return Archived(seam, self.commit(good, seam), 0)
        except SPARK_ERRORS as error:
            if BAD_ROW not in str(error):
                raise
            _LOG.warning("%s: batch %d has bad rows, it is done again without them", seam.topic, seam.batch)
            return None

    def _in_two_passes(self, read: DataFrame, seam: ArchiveProgress) -> Archived:
        good, bad = self._casting.rows(read)
        bad_rows = self.set_aside(self._quarantine.without_pending(bad, self.seam.ends), seam)
        self.check_unchanged()
        return Archived(seam, self.commit(self._quarantine.without_pending(good, self.seam.ends), seam), bad_rows)

    # --- the steps ---

    def set_aside(self, bad: DataFrame, seam: ArchiveProgress) -> int:
        """Commit bad rows to the quarantine; how many there were."""
        count = bad.count()
        if count:
            self._quarantine.add(bad, seam)
        return count

    def commit(self, good: DataFrame, seam: ArchiveProgress) -> int:
        """Commit the other rows to the table, with its new ends; how many there were."""
        if self._casting.keys:
            return upsert(self._table, good, seam, keys=self._casting.table_keys)
        offsets = sum(seam.ends.values()) - sum(self.seam.ends.values())
        metrics = self._table.append(good.coalesce(self._sizes.tasks(offsets)), seam)
        self._sizes.wrote(offsets, int(metrics.get("numOutputBytes", 0)))
        return int(metrics.get("numOutputRows", 0))

    def store_progress(self, seam: ArchiveProgress) -> None:
        """Tell the consumer group. Nothing rests on it but what brokers keep, and they may keep more."""
        self._store(seam)

    # --- what they rest on ---

    def has_news(self, batch: BatchEnds) -> bool:
        """Whether there is anything to commit; to a new table there is."""
        return self._expected is None or {**self.seam.ends, **batch.ends} != self.seam.ends

    def check_unchanged(self) -> None:
        """Raises ArchiveFenced, QuarantineMoved: another archive has committed since this one last did, or began."""
        found = self._table.look()
        if found != self._expected:
            raise ArchiveFenced(
                f"another archive has committed to {self._table.path}: {_named(found)} found, {_named(self._expected)} "
                "expected"
            )
        self._quarantine.check()

    def _next(self, batch: BatchEnds) -> ArchiveProgress:
        before = self.seam
        if batch.topic_id != before.topic_id:
            raise ArchiveRefused(
                f"topic {before.topic} was deleted and made again: its id was {before.topic_id} and is "
                f"{batch.topic_id} now; {self._table.path} holds the old one: archive the new one to another path"
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
        """Partitions that come later begin at 0; what is gone of them by then is ``lost``."""
        before = self.seam
        if not before.ends:
            return {number: batch.begun.get(number, 0) for number in batch.ends}
        if not before.begins:
            return {}  # not known
        return {**dict.fromkeys(batch.ends, 0), **before.begins}

    def _lost(self, ends: Mapping[int, int], batch: BatchEnds) -> dict[int, tuple[int, int]]:
        """Ranges that the batch left out behind the table's ends."""
        lost = {}
        for number, end in batch.ends.items():
            first = batch.begun.get(number, ends.get(number, 0))
            expected = ends.get(number, 0)
            if first > expected and ends:  # partitions that come later begin at 0
                lost[number] = (expected, first)
            if first < expected or end < expected:
                raise ArchiveRefused(
                    f"{self.seam.topic}-{number} is read from {first} to {end}, and {self._table.path} holds it up to "
                    f"{expected}: the log was cut, or is another one"
                )
        if lost and self._fail_on_data_loss:
            raise ArchiveRefused(data_loss(self.seam.topic, lost))
        if lost:
            _LOG.warning("%s: passed over: %s", self.seam.topic, lost)
        return lost


def _named(seam: ArchiveProgress | None) -> str:
    return f"batch {seam.batch}" if seam is not None else "no batch"


def data_loss(topic: str, lost: Mapping[int, tuple[int, int]]) -> str:
    """What to say of ranges that are gone from the log."""
    ranges = ", ".join(f"offsets {low} to {high} of {topic}-{number}" for number, (low, high) in sorted(lost.items()))
    return (
        f"{ranges} are gone from the log and were not archived (retention, or deleted records); "
        "to go on without them: --fail-on-data-loss false"
    )
