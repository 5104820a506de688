"""What of a log is fsynced, and when: with a seal, as ``flush.messages`` and ``flush.ms`` ask, before a clean stop.

Everything else rests on replication. Jobs run in threads; the recovery point moves when the log hears of their end.
"""

from __future__ import annotations

from sparklog.storage.disk import is_full
from sparklog.storage.flushing import FlushJob
from sparklog.storage.log_state import LogState
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFileJob
from sparklog.storage.sealing import SealJob
from sparklog.storage.segment import NO_CUT

#: A log of so few batches leaves no state files behind at a clean stop.
_FEW_BATCHES = 256


class LogDurability:
    """Owned by its ``Log``, on the event loop."""

    __slots__ = ("_cut", "_job", "_schemas_job", "_state", "_unflushed_records", "_unflushed_since_us")

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._unflushed_since_us = -1
        self._unflushed_records = 0
        #: at work in a thread
        self._job: FlushJob | None = None
        #: ``LogState.unsynced_cut`` as it was when that began
        self._cut = NO_CUT
        self._schemas_job: PartitionFileJob | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a rolled segment waits for its seal, or a schema to be stored: ``seals_due`` and ``schemas_due`` are
        to be asked again from time to time. Else not before something is written."""
        chain = self._state.chain
        return chain.sealed_prefix < len(chain.segments) - 1 or self._lacks_schema()

    @property
    def may_be_due(self) -> bool:
        """False: ``seals_due`` and ``schemas_due`` have nothing."""
        state = self._state
        return bool(state.directory.unstored) or state.chain.sealed_prefix < len(state.chain.segments) - 1

    # --- seals ----------------------------------------------------------------------------------------------------

    def seals_due(self) -> list[SealJob]:
        """Jobs for the rolled segments that are committed by now: run each in a thread, then ``seal_finished``.

        Cheap when there are none. To be asked when the high watermark moved and from time to time: a job that found
        the disk full is due again.
        """
        state = self._state
        if state.chain.sealed_prefix >= len(state.chain.segments) - 1:
            return []  # as after nearly every append
        schemas = state.directory.schemas
        return state.seals.due(state.chain, state.high_watermark, epochs=state.epochs, schemas=schemas)

    def seal_finished(self, job: SealJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        state = self._state
        if job.cancelled or state.closed:
            return
        state.seals.finished(job)
        state.chain.count_sealed()
        self._count_sealed()
        if job.done and state.chain.sealed_prefix:
            # all of those; what comes behind them may still have been cut
            fsynced = state.chain.segments[state.chain.sealed_prefix - 1].end_offset
            state.unsynced_cut = max(state.unsynced_cut, fsynced)

    def _count_sealed(self) -> None:
        state = self._state
        if state.chain.sealed_prefix:
            fsynced = state.chain.segments[state.chain.sealed_prefix - 1].end_offset
            state.recovery_point = max(state.recovery_point, self._with_schemas(fsynced))

    def _with_schemas(self, end_offset: int) -> int:
        """As far as ``end_offset`` batches survive a power cut once they are fsynced: below the first segment whose
        schema only its own front has, which recovery does not believe before a checkpoint tells that it is durable."""
        unstored = self._state.directory.unstored
        if unstored:
            for segment in self._state.chain.segments:
                if segment.schema_id in unstored:
                    return min(end_offset, segment.base_offset)
        return end_offset

    # --- schemas --------------------------------------------------------------------------------------------------

    def schemas_due(self) -> PartitionFileJob | None:
        """A job that stores the schemas which ``partition.json`` lacks, once a segment is of one of them: run it in a
        thread, then ``schemas_stored``. None while one is at work.

        Cheap when there is none. To be asked as ``seals_due``.
        """
        state = self._state
        if not state.directory.unstored or self._schemas_job is not None:
            return None  # as after nearly every append
        if self._lacks_schema():
            self._schemas_job = state.directory.store_job()
        return self._schemas_job

    def _lacks_schema(self) -> bool:
        """Whether there is a segment of a schema that only its own front has."""
        unstored, chain = self._state.directory.unstored, self._state.chain
        return bool(unstored) and any(
            segment.schema_id in unstored for segment in chain.segments[chain.sealed_prefix :]
        )

    def schemas_stored(self, job: PartitionFileJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        if job is self._schemas_job:
            self._schemas_job = None
            if job.done:
                self._state.directory.stored(job.content)
                self._count_sealed()

    def cancel_schemas(self) -> None:
        """The directory is about to go, or what is to be stored is stored here and now."""
        job, self._schemas_job = self._schemas_job, None
        if job is not None:
            job.cancel()

    # --- flushes --------------------------------------------------------------------------------------------------

    def recovered(self) -> None:
        """The log was opened. What an earlier process appended and did not fsync is as old as its newest batch: with
        ``flush.ms`` it does not wait for the next append."""
        state = self._state
        last = state.chain.last
        if last is not None and state.recovery_point < state.log_end_offset:
            self._unflushed_records = state.log_end_offset - state.recovery_point
            self._unflushed_since_us = max(last.last_append_us, 0)

    def appended(self, records: int, now_us: int) -> None:
        """So many are in the page cache alone; with ``flush.messages`` of them there, not for longer.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._unflushed_records += records
        since_us = self._unflushed_since_us
        if since_us < 0 or since_us > now_us:  # of a batch whose leader's clock was ahead
            self._unflushed_since_us = now_us
            if since_us < 0 and self._state.config.flush_ms > 0:
                self._state.services.flush_later(self._state.tp)
        if 0 < self._state.config.flush_messages <= self._unflushed_records:
            self.flush()

    def flush(self) -> None:
        """fsync everything up to the log end. Blocks for as long as the disk takes.

        Raises:
            StorageError: the log directory must go offline.
        """
        state = self._state
        state.check_open()
        start = min(state.recovery_point, self._unsynced_cut)
        if start >= state.log_end_offset:
            return
        with state.offline_on_error("flushing"):
            if state.directory.unstored:
                self._store_schemas()
            for segment in state.chain.beyond(start):
                segment.sync()
            state.directory.sync()
        self._flushed()

    @property
    def _unsynced_cut(self) -> int:
        """As far as is known before the flush at work ends."""
        return min(self._state.unsynced_cut, NO_CUT if self._job is None else self._cut)

    def _store_schemas(self) -> None:
        """In ``partition.json``, durably; a disk without room for it is asked again later."""
        self.cancel_schemas()
        try:
            self._state.directory.restore_partition_file()
        except OSError as failure:
            if not is_full(failure):
                raise

    def _flushed(self) -> None:
        self._state.recovery_point = max(self._state.recovery_point, self._with_schemas(self._state.log_end_offset))
        self._state.unsynced_cut = NO_CUT
        self._unflushed_since_us = -1
        self._unflushed_records = 0

    @property
    def awaits_flush(self) -> bool:
        """Whether ``flush_due`` and ``schemas_due`` are to be asked until what is here is durable, as ``flush.ms``
        wants it. When that begins ``LogContext.flush_later`` is told."""
        if self._state.config.flush_ms <= 0:
            return False
        return self._unflushed_since_us >= 0 or self._job is not None or self._lacks_schema()

    def flush_due(self, now_us: int) -> FlushJob | None:
        """A job for what is to be fsynced when ``flush.ms`` have passed since the oldest append that was not: run it in
        a thread, then ``flush_finished``. None while one is at work."""
        state = self._state
        self._unflushed_since_us = min(self._unflushed_since_us, now_us)  # the clock has been put back since
        waited_us = now_us - self._unflushed_since_us
        if self._job is not None or self._unflushed_since_us < 0 or not 0 < state.config.flush_ms * 1000 <= waited_us:
            return None
        self._cut, state.unsynced_cut = state.unsynced_cut, NO_CUT
        segments = state.chain.beyond(min(state.recovery_point, self._cut))
        self._job = FlushJob(
            state.disk,
            [path for segment in segments for path in (segment.data_path, segment.index_path)]
            + [state.directory.path / PARTITION_FILE],
            directory=state.directory.path,
            end_offset=state.log_end_offset,
            records=self._unflushed_records,
            since_us=self._unflushed_since_us,
        )
        self._unflushed_since_us = -1
        return self._job

    def flush_finished(self, job: FlushJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        if job is not self._job:
            return
        self._job = None
        self._state.recovery_point = max(self._state.recovery_point, self._with_schemas(job.end_offset))
        self._unflushed_records = max(self._unflushed_records - job.records, 0)

    def cancel_flush(self) -> None:
        """Files that it knows of are about to go, or to be cut."""
        job, self._job = self._job, None
        if job is not None:
            job.cancelled = True
            self._unflushed_since_us = job.since_us
            self._state.unsynced_cut = min(self._state.unsynced_cut, self._cut)

    # --- clean stops ----------------------------------------------------------------------------------------------

    @property
    def is_clean(self) -> bool:
        """Nothing is to be done before a clean stop."""
        return self._state.clean or not self._state.directory.exists

    def prepare_clean_stop(self) -> None:
        """Make everything durable, and the next open quick. Blocks; other logs may be made ready at the same time.

        Raises:
            StorageError: the log directory must go offline.
        """
        state = self._state
        state.check_open()
        if self.is_clean:
            return
        state.seals.cancel(state.chain.segments)
        self.flush()
        with state.offline_on_error("flushing"):
            state.disk.sync_directory(state.directory.path)  # a cut below what was flushed has renamed files
        self._write_state(sync=True)
        state.clean = True

    def await_sync(self) -> bool:
        """The file system is about to be told to write all it has; ``synced`` follows. False: nothing is to be done for
        this log, or more than that."""
        state = self._state
        state.untouched = not (state.closed or self.is_clean or self._leaves_state)
        return state.untouched

    def synced(self) -> None:
        """All that had been written at ``await_sync`` is durable: where nothing was since, that is all there is."""
        if self._state.untouched and not self._state.closed:
            self.made_durable()

    def leave_state(self) -> None:
        """As ``prepare_clean_stop``, for one of many logs that are made durable together: ``made_durable`` follows.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._state.check_open()
        self._state.seals.cancel(self._state.chain.segments)
        self._write_state(sync=False)

    def made_durable(self) -> None:
        """All that was written until now is durable, what ``leave_state`` wrote as well."""
        self._flushed()
        self._state.clean = True

    @property
    def _leaves_state(self) -> bool:
        """Of few batches the next open has read the headers sooner than the files that would spare it that."""
        segments = self._state.chain.segments
        return len(segments) != 1 or segments[0].count > _FEW_BATCHES

    def _write_state(self, *, sync: bool) -> None:
        state = self._state
        if not self._leaves_state:
            return
        with state.offline_on_error("writing the state of"):
            state.seals.write_state(state.log_end_offset, producers=state.producers, epochs=state.epochs, sync=sync)
