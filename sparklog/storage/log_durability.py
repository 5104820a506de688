"""The fsyncs of one log: when an fsync is due, and which records earlier fsyncs have made durable.

A log is fsynced when a segment is sealed, when ``flush.messages`` or ``flush.ms`` require it, and before a clean
shutdown. Records that are not fsynced are safe only because other replicas have them. Seals and flushes are jobs that
the caller runs in threads. The recovery point moves when the caller reports the end of a job (``seal_finished``,
``flush_finished``).
"""

from __future__ import annotations

from sparklog.storage.disk import is_full
from sparklog.storage.flushing import FlushJob
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.log_tail import LogTail
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFileJob
from sparklog.storage.recovery import RecoveredLog
from sparklog.storage.sealing import SealJob
from sparklog.storage.segment import NO_TRUNCATION

#: A log with one segment and at most this many batches writes no state files on a clean shutdown.
_FEW_BATCHES = 256


class LogDurability:
    """The part of a ``Log`` that decides what must be fsynced and when, and records what is fsynced.

    Not thread-safe: use it only on the broker's event loop. But several threads may call ``prepare_clean_stop`` for
    different logs.
    """

    __slots__ = (
        "_clean",
        "_files",
        "_job",
        "_offsets",
        "_schemas_job",
        "_tail",
        "_truncated_from",
        "_truncated_from_at_flush",
        "_unflushed_records",
        "_unflushed_since_us",
        "_untouched",
    )

    def __init__(self, files: LogFiles, offsets: LogOffsets, tail: LogTail) -> None:
        self._files = files
        self._offsets = offsets
        self._tail = tail
        #: Whether the log is durable, with its state files, and has not changed since then.
        self._clean = False
        #: Whether nothing was appended or truncated since ``await_sync``.
        self._untouched = False
        #: The offset from which segments were truncated and not fsynced since then. A power failure may restore the
        #: truncated batches of a segment. Then the next segment would not continue the restored segment. So later
        #: batches do not count as durable before the truncation is durable.
        self._truncated_from = NO_TRUNCATION
        self._unflushed_since_us = -1
        self._unflushed_records = 0
        #: The flush that runs in a thread.
        self._job: FlushJob | None = None
        #: The value of ``_truncated_from`` at the start of the flush ``_job``.
        self._truncated_from_at_flush = NO_TRUNCATION
        self._schemas_job: PartitionFileJob | None = None

    @property
    def is_behind(self) -> bool:
        """Return whether a rolled segment is not sealed yet, or a schema in use is not in ``partition.json`` yet.

        If so, ``seals_due`` and ``schemas_due`` must be called periodically. Otherwise they need not be called until
        the next append.
        """
        chain = self._files.chain
        return chain.sealed_prefix < len(chain.segments) - 1 or self._has_unstored_schema()

    @property
    def may_be_due(self) -> bool:
        """Return whether ``seals_due`` or ``schemas_due`` may return a job. This check is faster than the calls."""
        files = self._files
        return bool(files.directory.unstored) or files.chain.sealed_prefix < len(files.chain.segments) - 1

    # --- seals ----------------------------------------------------------------------------------------------------

    def seals_due(self) -> list[SealJob]:
        """Return jobs that seal the rolled segments that are now committed: write their footers and fsync their files.

        The caller runs each job in a thread, and then calls ``seal_finished``.

        Call this method when the high watermark has moved. Also call it periodically, because a job must be repeated if
        it found the disk full. The method is fast if no job is due.
        """
        files = self._files
        if files.chain.sealed_prefix >= len(files.chain.segments) - 1:
            return []  # the usual case after an append
        schemas = files.directory.schemas
        return files.seals.due(files.chain, self._offsets.high_watermark, epochs=self._tail.epochs, schemas=schemas)

    def seal_finished(self, job: SealJob) -> None:
        """Record the result of a seal job, after ``job.run`` has returned.

        If ``job.run`` raised an error, the caller takes the log directory offline instead.
        """
        files = self._files
        if job.cancelled or files.closed:
            return
        files.seals.finished(job)
        files.chain.count_sealed()
        self._count_sealed()
        if job.done and files.chain.sealed_prefix:
            # The sealed segments are fsynced. Later segments may have been truncated without an fsync.
            fsynced = files.chain.segments[files.chain.sealed_prefix - 1].end_offset
            self._truncated_from = max(self._truncated_from, fsynced)

    def _count_sealed(self) -> None:
        chain = self._files.chain
        if chain.sealed_prefix:
            self._offsets.fsynced(self._with_schemas(chain.segments[chain.sealed_prefix - 1].end_offset))

    def _with_schemas(self, end_offset: int) -> int:
        """Return the offset, at most ``end_offset``, below which fsynced batches survive a power failure.

        Batches do not survive if their schema is only at the beginning of the segment and not in ``partition.json``.
        Recovery does not trust such a schema unless a checkpoint says that it is durable. So the result is at most the
        start of the first such segment.
        """
        unstored = self._files.directory.unstored
        if unstored:
            for segment in self._files.chain.segments:
                if segment.schema_id in unstored:
                    return min(end_offset, segment.base_offset)
        return end_offset

    # --- schemas --------------------------------------------------------------------------------------------------

    def schemas_due(self) -> PartitionFileJob | None:
        """Return a job that writes new schemas to ``partition.json``, if a segment uses one of them.

        The caller runs the job in a thread, and then calls ``schemas_stored``. Return None while an earlier job runs.
        Call this method whenever ``seals_due`` is called. The method is fast if no job is due.
        """
        directory = self._files.directory
        if not directory.unstored or self._schemas_job is not None:
            return None  # the usual case after an append
        if self._has_unstored_schema():
            self._schemas_job = directory.store_job()
        return self._schemas_job

    def _has_unstored_schema(self) -> bool:
        """Return whether an unsealed segment uses a schema that is not in ``partition.json``."""
        unstored, chain = self._files.directory.unstored, self._files.chain
        return bool(unstored) and any(
            segment.schema_id in unstored for segment in chain.segments[chain.sealed_prefix :]
        )

    def schemas_stored(self, job: PartitionFileJob) -> None:
        """Record the result of a job of ``schemas_due``, after ``job.run`` has returned.

        If ``job.run`` raised an error, the caller takes the log directory offline instead.
        """
        if job is self._schemas_job:
            self._schemas_job = None
            if job.done:
                self._files.directory.stored(job.content)
                self._count_sealed()

    def cancel_schemas(self) -> None:
        """Cancel the job of ``schemas_due``, because the log is closed or the caller writes the schemas itself."""
        job, self._schemas_job = self._schemas_job, None
        if job is not None:
            job.cancel()

    # --- flushes --------------------------------------------------------------------------------------------------

    def recovered(self, found: RecoveredLog, *, clean: bool) -> None:
        """Record what recovery truncated, and count the records that an earlier process appended and did not fsync.

        For ``flush.ms``, all these records have the age of the newest batch. The flush of these records does not wait
        for the next append. ``clean`` means that the earlier process stopped cleanly.
        """
        last, offsets = self._files.chain.last, self._offsets
        self._clean = clean and not found.findings
        self._truncated_from = found.truncated_from
        if last is not None and not clean:
            # The killed process may have truncated any segment that ends at or above the recovery point.
            self._truncated_from = min(found.truncated_from, offsets.recovery_point - 1)
        if last is not None and offsets.recovery_point < offsets.log_end:
            self._unflushed_records = offsets.log_end - offsets.recovery_point
            self._unflushed_since_us = max(last.last_append_us, 0)

    def appended(self, records: int, now_us: int) -> None:
        """Count appended records, which are not fsynced yet. Fsync the log if ``flush.messages`` requires it.

        Raises:
            StorageError: the log directory must go offline.
        """
        files = self._files
        self._clean = self._untouched = False
        self._unflushed_records += records
        since_us = self._unflushed_since_us
        if since_us < 0 or since_us > now_us:  # a batch from a leader with a fast clock
            self._unflushed_since_us = now_us
            if since_us < 0 and files.config.flush_ms > 0:
                files.services.flush_later(files.tp)
        if 0 < files.config.flush_messages <= self._unflushed_records:
            self.flush()

    def truncated(self) -> None:
        """Record that files at the end of the log were truncated or removed.

        Call this after each truncation of the log, and after the bytes of a failed append were removed.
        """
        self._clean = self._untouched = False
        last = self._files.chain.last
        if last is not None:
            self._truncated_from = min(self._truncated_from, last.base_offset)

    def flush(self) -> None:
        """Fsync the log up to its end. Block until that is done.

        Raises:
            StorageError: the log directory must go offline.
        """
        files = self._files
        files.check_open()
        # While a flush job runs, the truncations before it count as not fsynced.
        truncated_from = NO_TRUNCATION if self._job is None else self._truncated_from_at_flush
        start = min(self._offsets.recovery_point, self._truncated_from, truncated_from)
        if start >= self._offsets.log_end:
            return
        with files.offline_on_error("flushing"):
            if files.directory.unstored:
                self._store_schemas()
            for segment in files.chain.beyond(start):
                segment.sync()
            files.directory.sync()
        self._flushed()

    def _store_schemas(self) -> None:
        """Store the schemas in ``partition.json``, durably. If the disk is full, a later flush tries again."""
        self.cancel_schemas()
        try:
            self._files.directory.restore_partition_file()
        except OSError as failure:
            if not is_full(failure):
                raise

    def _flushed(self) -> None:
        self._offsets.fsynced(self._with_schemas(self._offsets.log_end))
        self._truncated_from = NO_TRUNCATION
        self._unflushed_since_us = -1
        self._unflushed_records = 0

    @property
    def awaits_flush(self) -> bool:
        """Return whether ``flush_due`` and ``schemas_due`` must be called periodically because of ``flush.ms``.

        ``LogContext.flush_later`` is called when this becomes true.
        """
        if self._files.config.flush_ms <= 0:
            return False
        return self._unflushed_since_us >= 0 or self._job is not None or self._has_unstored_schema()

    def flush_due(self, now_us: int) -> FlushJob | None:
        """Return a job that fsyncs the log, if an append has been waiting for an fsync for at least ``flush.ms``.

        The caller runs the job in a thread, and then calls ``flush_finished``. Return None if no flush is due or an
        earlier job runs.
        """
        files = self._files
        self._unflushed_since_us = min(self._unflushed_since_us, now_us)  # the clock may have been set back
        waited_us = now_us - self._unflushed_since_us
        if self._job is not None or self._unflushed_since_us < 0 or not 0 < files.config.flush_ms * 1000 <= waited_us:
            return None
        self._truncated_from_at_flush, self._truncated_from = self._truncated_from, NO_TRUNCATION
        segments = files.chain.beyond(min(self._offsets.recovery_point, self._truncated_from_at_flush))
        self._job = FlushJob(
            files.disk,
            [path for segment in segments for path in (segment.data_path, segment.index_path)]
            + [files.directory.path / PARTITION_FILE],
            directory=files.directory.path,
            end_offset=self._offsets.log_end,
            records=self._unflushed_records,
            since_us=self._unflushed_since_us,
        )
        self._unflushed_since_us = -1
        return self._job

    def flush_finished(self, job: FlushJob) -> None:
        """Record the result of a flush job, after ``job.run`` has returned.

        If ``job.run`` raised an error, the caller takes the log directory offline instead.
        """
        if job is not self._job:
            return
        self._job = None
        self._offsets.fsynced(self._with_schemas(job.end_offset))
        self._unflushed_records = max(self._unflushed_records - job.records, 0)

    def cancel_flush(self) -> None:
        """Cancel the running flush job, because some of the job's files are about to be deleted or truncated."""
        job, self._job = self._job, None
        if job is not None:
            job.cancel()
            self._unflushed_since_us = job.since_us
            self._truncated_from = min(self._truncated_from, self._truncated_from_at_flush)

    # --- clean stops ----------------------------------------------------------------------------------------------

    @property
    def is_clean(self) -> bool:
        """Return whether this log is already durable, so that a clean shutdown has nothing to do for it."""
        return self._clean or not self._files.directory.exists

    def prepare_clean_stop(self) -> None:
        """Make everything durable, and write state files with which the next start opens the log faster.

        Block until this is done. Several threads may do this for different logs at the same time.

        Raises:
            StorageError: the log directory must go offline.
        """
        files = self._files
        files.check_open()
        if self.is_clean:
            return
        files.seals.cancel(files.chain.segments)
        self.flush()
        with files.offline_on_error("flushing"):
            # Make the renames of truncations durable too, which ``flush`` does not do if all records are fsynced.
            files.disk.sync_directory(files.directory.path)
        self._write_state(sync=True)
        self._clean = True

    def await_sync(self) -> bool:
        """Prepare for a sync of the whole file system. The caller runs the sync and then calls ``synced``.

        Return False if the sync does not help this log: the log is already durable or closed, or a clean shutdown must
        also write its state files.
        """
        self._untouched = not (self._files.closed or self.is_clean or self._leaves_state)
        return self._untouched

    def synced(self) -> None:
        """Record that the sync of the file system has made the log durable.

        This has no effect if the log has changed since ``await_sync``.
        """
        if self._untouched and not self._files.closed:
            self.made_durable()

    def leave_state(self) -> None:
        """Write the log's state files (producers and leader epochs) without an fsync.

        Then the caller syncs the whole file system and calls ``made_durable``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._files.check_open()
        self._files.seals.cancel(self._files.chain.segments)
        self._write_state(sync=False)

    def made_durable(self) -> None:
        """Record that everything written until now is durable, including the files of ``leave_state``."""
        self._flushed()
        self._clean = True

    @property
    def _leaves_state(self) -> bool:
        """Return whether state files make the next start faster.

        If the log has few batches, reading all headers is faster.
        """
        segments = self._files.chain.segments
        return len(segments) != 1 or segments[0].count > _FEW_BATCHES

    def _write_state(self, *, sync: bool) -> None:
        files, tail = self._files, self._tail
        if not self._leaves_state:
            return
        with files.offline_on_error("writing the state of"):
            files.seals.write_state(self._offsets.log_end, producers=tail.producers, epochs=tail.epochs, sync=sync)
