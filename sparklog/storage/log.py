"""The log of one replica: a partition directory of segments.

Only the broker's event loop uses the log. Other threads run only its jobs (``SealJob``, ``FlushJob``,
``TruncationJob``, ``PartitionFileJob``, ``CleanJob``) and the functions that ``remove_later`` receives.

An append writes to the page cache. Records survive a power failure because other replicas have them. Records are
fsynced when their segment is sealed, by a ``FlushJob``, on a clean shutdown, and in the append itself if
``flush.messages`` requires this.

``Log`` has the operations that requests need. The state is in the parts of ``Log``, and only the part itself changes
its state:

::

    LogFiles       the directory, the segments, their seals, the topic's settings
    LogOffsets     log start, high watermark, log end, recovery point
    LogTail        appends; leader epochs, producers, transactions, the newest batches in memory
    LogDurability  fsyncs, and what they have not reached
    LogCleaning    compaction
    LogTruncation  truncation of the end
    LogRetention   deletions at the start
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange, TopicPartition, TopicSchema
from sparklog.record.header import BatchHeader
from sparklog.storage import append_fast_path, log_reads
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.cleaning_plan import CLEANER_FILE
from sparklog.storage.disk import Buffer, is_full
from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_context import LogContext
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.log_reads import MANY, HandedOut
from sparklog.storage.log_reads import LogSlice as LogSlice  # callers import the result type of ``read`` from here
from sparklog.storage.log_retention import LogRetention
from sparklog.storage.log_tail import LogTail
from sparklog.storage.log_truncation import LogTruncation
from sparklog.storage.producers import ProducerState
from sparklog.storage.recovery import recover_log
from sparklog.storage.segment import Segment
from sparklog.storage.transactions import TransactionTable
from sparklog.storage.truncation_job import TruncationJob


class Log:
    """The log of one replica.

    ``LogDirectory.create`` makes a new log, and ``LogDirectory.load`` opens the existing logs.

    Not thread-safe: use it only on the broker's event loop.
    """

    __slots__ = (
        "_files",
        "_tail",
        "cleaning",
        "durability",
        "findings",
        "named",
        "offsets",
        "retention",
        "topic_id",
        "tp",
        "truncation",
    )

    def __init__(
        self,
        tp: TopicPartition,
        topic_id: str,
        *,
        directory: Path,
        schemas: Iterable[TopicSchema],
        config: TopicConfig,
        services: LogContext,
        named: bool = True,
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        #: Whether a durable checkpoint has an entry for this log, or need not have one
        #: (``CheckpointWriter.name_logs``).
        self.named = named
        #: What the recovery truncated, as sentences for operators.
        self.findings: tuple[str, ...] = ()
        self._files = LogFiles(tp, topic_id, directory=directory, schemas=schemas, config=config, services=services)
        #: The offsets of this log. Code that every request runs reads this attribute, because a property of ``Log``
        #: costs as much as a call.
        self.offsets = LogOffsets(tp, topic_id, services)
        self._tail = LogTail(self._files, self.offsets)
        self.durability = LogDurability(self._files, self.offsets, self._tail)
        self.cleaning = LogCleaning(self._files, self.offsets, self._tail, self.durability)
        self.truncation = LogTruncation(self._files, self.offsets, self._tail, self.durability, self.cleaning)
        self.retention = LogRetention(self._files, self.offsets, self._tail, self.durability, self.cleaning)

    def __repr__(self) -> str:
        return f"Log({self.tp}, [{self.log_start_offset}, {self.log_end_offset}), hw {self.high_watermark})"

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> None:
        """Open the files of the directory, and repair the log if necessary. Call this once, before any other method.

        ``checkpoint`` is the log's entry in the checkpoint, if there is one. ``clean`` and ``trusted`` describe how the
        last process ended (``LastStop``).

        Raises:
            NewerFormatError: a newer release wrote a batch or file.
            StorageError: the disk failed.
        """
        files = self._files
        at = checkpoint if checkpoint is not None else PartitionCheckpoint(*self.tp, self.topic_id, 0, 0, 0)
        found = recover_log(
            files.disk,
            files.directory.path,
            schemas=files.directory.schemas,
            files=files.services.files,
            recovery_point=at.recovery_point,
            log_start_offset=at.log_start_offset,
            claimed=max(at.high_watermark, at.recovery_point),
            thorough=not (clean or trusted),
        )
        self.findings = found.findings
        files.recovered(found)
        log_end = found.segments[-1].end_offset if found.segments else at.log_start_offset
        self.offsets.recovered(at, first_segment_offset=files.chain.first_offset(log_end), log_end=log_end)
        self._tail.recovered(found)
        self.durability.recovered(found, clean=clean)
        if CLEANER_FILE in found.names:
            with files.offline_on_error("opening"):
                self.cleaning.load()

    def close(self) -> None:
        """Cancel the log's jobs and close its files. Readers may still use their memory maps of the files."""
        if not self._files.closed:
            with self._files.offline_on_error("stopping the cleaner of"):
                self.cleaning.stop()
            self.truncation.cancel()
            self.durability.cancel_flush()
            self.durability.cancel_schemas()
            self._files.close()
            self._tail.close()

    def expire_producers(self, now_us: int) -> None:
        """Drop the producer ids that have been idle for ``producer.id.expiration.ms``.

        Ids with an open transaction are kept.
        """
        self._tail.expire_producers(now_us)

    def delete(self) -> None:
        """Close the log, and move its directory away at once. A thread removes the files later."""
        self.close()
        if self.on_disk:
            self._files.services.remove_directory(self.directory)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def config(self) -> TopicConfig:
        return self._files.config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        """Set the topic's new settings."""
        self._files.configure(config)

    @property
    def directory(self) -> Path:
        return self._files.directory.path

    @property
    def log_start_offset(self) -> int:
        return self.offsets.log_start

    @property
    def log_end_offset(self) -> int:
        """Return the offset that the next record will get."""
        return self.offsets.log_end

    @property
    def high_watermark(self) -> int:
        return self.offsets.high_watermark

    @property
    def recovery_point(self) -> int:
        """Return the offset below which everything is fsynced."""
        return self.offsets.recovery_point

    @property
    def last_epoch(self) -> int:
        """Return the leader epoch of the last batch, or -1 if the log is empty."""
        return self._tail.epochs.last_epoch

    @property
    def first_segment_offset(self) -> int:
        """Return the base offset of the first segment, which is at or below the log start offset.

        A follower whose fetch offset is out of range fetches from this offset on, so that its files become equal to the
        leader's.
        """
        return self._files.chain.first_offset(self.offsets.log_end)

    @property
    def on_disk(self) -> bool:
        """Return whether the log has a directory. The first append creates the directory."""
        return self._files.directory.exists

    @property
    def size_bytes(self) -> int:
        return self._files.chain.size_bytes

    @property
    def schema_ids(self) -> tuple[int, ...]:
        return tuple(self._files.directory.schemas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments, oldest first. The caller must not change them."""
        return tuple(self._files.chain.segments)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """Return the largest leader epoch of the log that is at most ``epoch``, and the offset where it ends.

        Return (-1, log start offset) if there is no such epoch. The end is exclusive.
        """
        return self._tail.epochs.end_of_epoch(epoch, self.log_start_offset, log_end_offset=self.log_end_offset)

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the batch that contains ``offset``, or -1 if the log does not know it."""
        return self._tail.epochs.epoch_at(offset)

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the log's entry for a checkpoint.

        The log remembers the offsets in the entry, because the checkpoint will claim that the log has all records below
        these offsets. A later truncation of the log below one of these offsets first lowers the offset in the
        checkpoint.
        """
        return self.offsets.checkpoint()

    def set_high_watermark(self, high_watermark: int) -> None:
        """Set the high watermark, limited to the range from the log start offset to the log end offset.

        Readers may then map the files up to this offset.
        """
        self._tail.producers.transactions.committed_below(self.offsets.committed(high_watermark))

    def mark_named(self) -> None:
        """Record that a durable checkpoint has an entry for this log."""
        self.named = True

    def add_schema(self, schema: TopicSchema) -> None:
        """Add a schema, before batches with this schema arrive. A schema id that is already known keeps its schema."""
        self._files.directory.learn(schema)

    def restore_partition_file(self) -> None:
        """Write ``partition.json`` again, after ``recover`` has found the schemas in the segments.

        The file is durable on return. Raises OSError.
        """
        self._files.directory.restore_partition_file()

    # --- append -------------------------------------------------------------------------------------------------

    def append_as_leader(
        self,
        batches: Sequence[tuple[BatchHeader, Buffer]],
        *,
        leader_epoch: int,
        now_us: int,
        known: Sequence[OffsetRange] | None = None,
        placed: bool = False,
        roll: bool = False,
    ) -> OffsetRange:
        """Append batches that the caller has checked, and return the offset range of all of them.

        Batches that are already in the log are not appended again; their earlier offsets are returned. The argument
        ``known`` is the result of the method ``known`` for these batches, or None if the caller did not call it. With
        ``placed`` the batches keep their offsets and times, and must continue the log. With ``roll`` the first batch
        begins a new segment.

        Raises:
            BrokerError: nothing was appended. The same errors as ``known``; FENCED_LEADER_EPOCH, CORRUPT_MESSAGE,
                SCHEMA_OUTDATED; KAFKA_STORAGE_ERROR if the disk is full or the log is closed; OFFSET_OUT_OF_RANGE for
                placed batches that do not begin at the log end offset.
            StorageError: the log directory must go offline.
        """
        files, offsets, tail = self._files, self.offsets, self._tail
        files.check_open()
        if leader_epoch < tail.epochs.last_epoch:
            raise BrokerError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"{self.tp}: leader epoch {leader_epoch} found, {tail.epochs.last_epoch} is in the log",
            )
        if known is None:
            known = self.known(batches)
        fresh = batches[len(known) :] if known else batches
        start = offsets.log_end
        if fresh:
            try:
                if (
                    len(fresh) == 1
                    and not (placed or roll)
                    and append_fast_path.append_as_leader(
                        files, offsets, tail, fresh[0], leader_epoch=leader_epoch, now_us=now_us
                    )
                ):
                    records = fresh[0][0].record_count
                else:
                    records = tail.append_as_leader(
                        fresh, leader_epoch=leader_epoch, now_us=now_us, placed=placed, roll=roll
                    )
            except (OSError, StorageError) as failure:
                raise self._append_failed(failure) from failure
            self.durability.appended(records, now_us)
        if not known:
            return OffsetRange(start, offsets.log_end)
        return OffsetRange(known[0].start, offsets.log_end if fresh else known[-1].end)

    def append_as_follower(self, headers: bytes | memoryview, bodies: memoryview) -> int:
        """Append a leader's batches unchanged and return the new log end offset.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE if the batches do not continue this log; SCHEMA_OUTDATED
                if this log does not know a schema id; KAFKA_STORAGE_ERROR if the disk is full or the log is closed.
            StorageError: the log directory must go offline.
        """
        self._files.check_open()
        appended: tuple[int, int] | None
        try:
            plain = append_fast_path.append_as_follower(self._files, self.offsets, self._tail, headers, bodies)
            if plain is not None:
                appended = plain.record_count, plain.append_time
            else:
                appended = self._tail.append_as_follower(headers, bodies)
        except (OSError, StorageError) as failure:
            raise self._append_failed(failure) from failure
        if appended is not None:  # perhaps no record: a cleaner may leave an empty batch
            self.durability.appended(*appended)
        return self.offsets.log_end

    def _append_failed(self, failure: OSError | StorageError) -> BrokerError | StorageError:
        """Return the error to raise after a failed append: a BrokerError if the disk is full.

        Otherwise take the log directory offline and return a StorageError.
        """
        services = self._files.services
        if isinstance(failure, StorageError):
            return services.offline(str(failure))
        if is_full(failure):
            self.durability.truncated()
            detail = f"{self.tp}: no room left in {self.directory.parent}: {failure}"
            return BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, detail)
        return services.offline(f"appending to {self.tp}: {failure}")

    def known(
        self, batches: Sequence[tuple[BatchHeader, Buffer]], *, begins_anywhere: bool = False
    ) -> list[OffsetRange]:
        """Return the offset ranges of the batches that are already in the log, because the producer has retried them.

        These are the first batches of ``batches``, because a retry begins with the oldest batch. The broker answers a
        retry with these offsets before it checks the batches against the schema, which may have changed since the first
        attempt. With ``begins_anywhere`` the first batch of an unknown producer id may have any sequence, as in Kafka.

        Raises:
            BrokerError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER or DUPLICATE_SEQUENCE_NUMBER for a wrong
                sequence; INVALID_REQUEST if a known batch follows a new one; THROTTLING_QUOTA_EXCEEDED for a new
                producer id if there is no room for it.
        """
        return self._tail.producers.known(batches, self.tp, begins_anywhere=begins_anywhere)

    def original_append_us(self, producer_id: int, base_offset: int) -> int:
        """Return the time of the first append of a retried batch at ``base_offset``, or -1 if it is unknown."""
        return self._tail.producers.append_time_us(producer_id, base_offset)

    # --- read ---------------------------------------------------------------------------------------------------

    def read(
        self,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int,
        max_batches: int = MANY,
        for_follower: bool = False,
        mapped: bool = False,
    ) -> LogSlice:
        """Return whole batches of one segment, starting with the batch that contains ``offset``.

        The result has the batches that end at or below ``end_offset`` and fit into ``max_bytes`` and ``max_batches``,
        but at least one batch if one ends at or below ``end_offset``. With ``for_follower`` the offset may be below the
        log start offset, down to the start of the first segment. With ``mapped`` the bodies may be views of files that
        still grow. Later truncations do not change the viewed bytes in place.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        chain, offsets = self._files.chain, self.offsets
        self._check_readable(offset, chain.first_offset(offsets.log_end) if for_follower else offsets.log_start)
        if offset >= end_offset or offset == offsets.log_end:
            return log_reads.nothing_at(offset)
        try:  # Every fetch runs this code, and ``try`` costs less than ``offline_on_error``.
            found = log_reads.whole_batches(
                chain,
                self._tail.hot,
                offset,
                max_bytes=max_bytes,
                end_offset=end_offset,
                max_batches=max_batches,
                mapped=mapped,
            )
        except (OSError, StorageError) as failure:
            raise self._files.services.offline(f"reading {self.tp}: {failure}") from failure
        if mapped:
            offsets.served(found.next_offset)
        return found

    def read_headers(self, offset: int, *, max_batches: int, end_offset: int) -> LogSlice:
        """Return the headers of the batches that ``read`` would return, without the bodies.

        ``body_bytes`` of the result is the size of the bodies.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return log_reads.nothing_at(offset)
        with self._files.offline_on_error("reading"):
            return log_reads.headers_alone(self._files.chain, offset, max_batches=max_batches, end_offset=end_offset)

    def hand_out(self, offset: int, *, end_offset: int) -> HandedOut | None:
        """Return the files of the segment that contains ``offset``, for a reader that maps them into its memory.

        Return None if there is no batch to read.

        The reader may read the batches that end at or below ``end_offset``, which is at most the high watermark. Later
        truncations do not change this part of the files in place.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return None
        with self._files.offline_on_error("reading"):
            found = log_reads.files(self._files.chain, offset, end_offset=end_offset)
        if found is not None:
            self.offsets.served(found.next_offset)
        return found

    def offset_for_time(self, timestamp_us: int, *, end_offset: int, start_offset: int = 0) -> tuple[int, int] | None:
        """Return the base offset and greatest timestamp of the first batch with a record at or after ``timestamp_us``.

        Only batches that begin below ``end_offset`` and end above ``start_offset`` count. Return None if no batch has
        such a record. If the batch begins below ``start_offset`` or below the log start offset, the greater of these
        two offsets is returned instead of the base offset.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._files.check_open()
        with self._files.offline_on_error("reading"):
            start = max(start_offset, self.log_start_offset)
            return log_reads.offset_for_time(
                self._files.chain, timestamp_us, log_start_offset=start, end_offset=end_offset
            )

    def greatest_time(self, *, end_offset: int, below_us: int = 2**63 - 1) -> tuple[int, int] | None:
        """Return the base offset of the first batch with the greatest timestamp in the log, and this timestamp.

        Consider only batches that end at or below ``end_offset`` and have only timestamps below ``below_us``. Return
        None if there is no such batch. If the batch begins below the log start offset, return the log start offset
        instead of the base offset.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._files.check_open()
        with self._files.offline_on_error("reading"):
            return log_reads.greatest_time(
                self._files.chain, log_start_offset=self.log_start_offset, end_offset=end_offset, below_us=below_us
            )

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the schema with this id. Raises BrokerError SCHEMA_OUTDATED if it is unknown."""
        return self._files.directory.schema(schema_id)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the last stable offset, the offset at which ``read_committed`` consumers stop.

        The last stable offset is the lowest first offset of a transaction that is open or whose marker is not
        committed. It is ``high_watermark`` if ``high_watermark`` is lower, or if there is no such transaction.
        """
        return self._tail.last_stable_offset(high_watermark)

    @property
    def transactions(self) -> TransactionTable:
        """Return the table of the open and the aborted transactions. The caller must not change it."""
        return self._tail.producers.transactions

    def producer_state(self) -> ProducerState:
        """Return a copy of the producers that have written to the log, and of their transactions."""
        return self._tail.producers.state()

    def _check_readable(self, offset: int, start: int) -> None:
        self._files.check_open()
        if not start <= offset <= self.offsets.log_end:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"{self.tp}: offset {offset} found, {start} to {self.offsets.log_end} expected",
            )

    # --- truncation ---------------------------------------------------------------------------------------------

    def truncate(self, offset: int, job: TruncationJob | None = None) -> int:
        """Truncate the log to ``offset``, or to the batch boundary below it, and return the new log end offset.

        If ``offset`` is below all records, the log becomes empty, and its next record gets ``offset``.

        A segment that readers may have mapped is not truncated in place: its remaining part is copied to new files.
        ``job`` is the finished job that ``truncation.begin`` returned for this offset, which has made these copies.
        Without a complete job this method makes them itself.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.truncation.truncate(offset, job)

    def restart_at(self, offset: int) -> None:
        """Delete all records. The next record gets ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self.truncation.restart_at(offset)

    def advance_log_start(self, offset: int) -> int:
        """Raise the log start offset to ``offset``, but not above the high watermark. Return the log start offset.

        The log start offset stays unchanged while the disk has no room to record the deletion. The segments that end at
        or below the new log start offset leave the log at once.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.retention.advance_start(offset)

    # --- absence ------------------------------------------------------------------------------------------------

    def is_outdated_for(self, headers: bytes | memoryview, now_us: int) -> bool:
        """Return whether a leader's batches show that this replica has received no batches for too long.

        That is the case if the replica received no batches for longer than the leader keeps tombstones and markers. The
        replica may then still have records whose tombstones it will never get, so it must start again with an empty
        log.
        """
        window, end = self._tail.tombstone_window, self.offsets.log_end
        if not window.is_possible(now_us) or end == self.first_segment_offset:
            return False
        return window.is_shown_by(headers, now_us, delete_retention_ms=self.config.delete_retention_ms)

    def caught_up(self, high_watermark: int) -> None:
        """Record that this follower has caught up, if its log reaches the leader's ``high_watermark``."""
        if self.offsets.log_end >= high_watermark:
            self._tail.tombstone_window.ended()
