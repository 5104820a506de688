"""One replica's log: a partition directory of segments.

Appends go to the end, reads start anywhere, truncation is rare.

The broker's event loop owns it. No other thread may call it, except for ``SealJob.run``, ``FlushJob.run``,
``TruncationJob.run`` and the functions that ``remove_later`` receives. Appends go to the page cache. Durability comes
from replication, and from fsyncs: when a segment is sealed, in ``FlushJob``, on a clean stop, and in the append itself
if ``flush.messages`` requires it.

This module has the operations that requests need. ``log_state`` has the parts of a log. ``log_appends``, and for one
plain batch ``append_fast_path``, make it longer. ``log_truncation`` makes it shorter. ``log_durability`` decides about
fsyncs, and ``log_cleaning`` compacts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange, TopicPartition, TopicSchema
from sparklog.record.compacted_batch import cut_front
from sparklog.record.header import BatchHeader
from sparklog.storage import append_fast_path, log_appends, log_reads
from sparklog.storage.append_plan import SegmentWrite, plan_follower_append, plan_leader_append
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.cleaning_plan import CLEANER_FILE
from sparklog.storage.disk import Buffer
from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_context import LogContext
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_reads import MANY, HandedOut
from sparklog.storage.log_reads import LogSlice as LogSlice  # what ``read`` gives: known from here
from sparklog.storage.log_state import LogState
from sparklog.storage.log_truncation import LogTruncation
from sparklog.storage.segment import Segment
from sparklog.storage.transactions import EndedTransaction, OpenTransaction
from sparklog.storage.truncation_job import TruncationJob


class Log:
    """One partition directory. ``LogDirectory.create`` makes it, or ``LogDirectory.load`` finds it."""

    __slots__ = ("_state", "cleaning", "durability", "named", "topic_id", "tp", "truncation")

    def __init__(
        self,
        tp: TopicPartition,
        topic_id: str,
        *,
        directory: Path,
        schemas: Iterable[TopicSchema],
        config: TopicConfig,
        services: LogContext,
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        #: A durable checkpoint names this log. ``LogDirectory`` sets it (``LogDirectory.name_logs``).
        self.named = True
        self._state = LogState(tp, topic_id, directory=directory, schemas=schemas, config=config, services=services)
        self.durability = LogDurability(self._state)
        self.cleaning = LogCleaning(self._state, self.durability)
        self.truncation = LogTruncation(self._state, self.durability, self.cleaning)

    def __repr__(self) -> str:
        return f"Log({self.tp}, [{self.log_start_offset}, {self.log_end_offset}), hw {self.high_watermark})"

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> None:
        """Open the files of the directory.

        Called once, before any other method.

        Raises:
            NewerFormatError, StorageError: as ``recover_log``.
        """
        names = self._state.recover(checkpoint, clean=clean, trusted=trusted)
        self.durability.recovered()
        if CLEANER_FILE in names:
            with self._state.offline_on_error("opening"):
                self.cleaning.load()

    def close(self) -> None:
        """Close the files. Views that readers hold stay valid."""
        state = self._state
        if not state.closed:
            with state.offline_on_error("stopping the cleaner of"):
                self.cleaning.stop()
            self.truncation.cancel()
            self.durability.cancel_flush()
            self.durability.cancel_schemas()
            state.seals.cancel(state.chain.segments)
            state.chain.close()
            state.hot.clear()
            state.producers.count_in(None)
            state.closed = True

    def expire_producers(self, now_us: int) -> None:
        """Drop producer ids that have been idle for ``producer.id.expiration.ms``."""
        state = self._state
        state.producers.expire(now_us - state.services.producer_id_expiration_ms * 1000)

    def delete(self) -> None:
        """Close the log and delete its directory. It disappears at once, and a thread removes the files."""
        self.close()
        if self.on_disk:
            self._state.services.remove_directory(self.directory)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def config(self) -> TopicConfig:
        return self._state.config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        """Set the topic's new settings."""
        self._state.config = config

    @property
    def directory(self) -> Path:
        return self._state.directory.path

    @property
    def findings(self) -> tuple[str, ...]:
        """Return what recovery truncated, as sentences for operators."""
        return self._state.findings

    @property
    def log_start_offset(self) -> int:
        return self._state.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Return the next offset to be written."""
        return self._state.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self._state.high_watermark

    @property
    def recovery_point(self) -> int:
        """Return the offset below which everything is fsynced."""
        return self._state.recovery_point

    @property
    def last_epoch(self) -> int:
        """Return the leader epoch of the last batch, or -1 if the log is empty."""
        return self._state.epochs.last_epoch

    @property
    def first_segment_offset(self) -> int:
        """Return the offset at which an out-of-range follower begins, so that its files become equal.

        It is at or below the log start offset.
        """
        return self._state.first_segment_offset

    @property
    def on_disk(self) -> bool:
        """Return whether the log has a directory. The first batch creates it."""
        return self._state.directory.exists

    @property
    def size_bytes(self) -> int:
        return self._state.chain.size_bytes

    @property
    def schema_ids(self) -> tuple[int, ...]:
        return tuple(self._state.directory.schemas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments, oldest first. Read only."""
        return tuple(self._state.chain.segments)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """Return the largest leader epoch <= ``epoch`` in the log and its exclusive end.

        Return (-1, log start) if there is none.
        """
        return self._state.epochs.end_of_epoch(epoch, self.log_start_offset, log_end_offset=self.log_end_offset)

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the entry to be checkpointed now. It counts as claimed from now on."""
        return self._state.checkpoint()

    def set_high_watermark(self, high_watermark: int) -> None:
        """Set the high watermark, bounded by the log's ends. Everything below it is committed and may be served."""
        state = self._state
        if not state.log_start_offset <= high_watermark <= state.log_end_offset:
            high_watermark = min(max(high_watermark, state.log_start_offset), state.log_end_offset)
        state.high_watermark = high_watermark
        if high_watermark > state.served_end:  # noqa: PLR1730 - hot
            state.served_end = high_watermark
        state.producers.transactions.committed_below(high_watermark)

    def add_schema(self, schema: TopicSchema) -> None:
        """Add a schema before batches with it arrive. A known id keeps its schema."""
        self._state.directory.learn(schema)

    def restore_partition_file(self) -> None:
        """Write ``partition.json`` again after ``recover`` has restored its content.

        Durable on return. Raises OSError.
        """
        self._state.directory.restore_partition_file()

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
        """Append checked batches and return the offset range of all of them.

        Batches that are already in the log are not appended again; their earlier offsets are returned. ``known`` is the
        result of ``known`` for these batches, or None if the caller did not call it. ``placed``: the batches already
        have offsets and times, and continue the log. ``roll``: begin a new segment.

        Raises:
            BrokerError: nothing was appended. INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER,
                DUPLICATE_SEQUENCE_NUMBER, FENCED_LEADER_EPOCH, CORRUPT_MESSAGE, SCHEMA_OUTDATED; KAFKA_STORAGE_ERROR if
                the disk is full; OFFSET_OUT_OF_RANGE for placed batches that do not begin at the log end offset.
            StorageError: the log directory must go offline.
        """
        state = self._state
        state.check_open()
        if leader_epoch < state.epochs.last_epoch:
            raise BrokerError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"{self.tp}: leader epoch {leader_epoch} found, {state.epochs.last_epoch} is in the log",
            )
        if known is None:
            known = self.known(batches)
        fresh = batches[len(known) :] if known else batches
        start = state.log_end_offset
        if len(batches) == 1 and fresh and not (placed or roll):
            header, body = batches[0]
            if append_fast_path.append_as_leader(state, header, body, leader_epoch=leader_epoch, now_us=now_us):
                self.durability.appended(header.record_count, now_us)
                return OffsetRange(start, state.log_end_offset)
        if fresh:
            tail = log_appends.tail(state, reopen_sealed=False)
            runs = plan_leader_append(
                tail._replace(position=-1) if roll else tail,
                fresh,
                leader_epoch=leader_epoch,
                now_us=now_us,
                config=state.config,
                prelude_length=state.directory.prelude_length,
                placed=placed,
            )
            self._carry_out(runs, now_us)
        if not known:
            return OffsetRange(start, state.log_end_offset)
        return OffsetRange(known[0].start, state.log_end_offset if fresh else known[-1].end)

    def append_as_follower(self, headers: bytes | memoryview, bodies: memoryview) -> int:
        """Append a leader's batches unchanged and return the new log end offset.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE if they do not continue this log; SCHEMA_OUTDATED if this
                log does not know a schema id; KAFKA_STORAGE_ERROR if the disk is full.
            StorageError: the log directory must go offline.
        """
        state = self._state
        state.check_open()
        plain = append_fast_path.append_as_follower(state, headers, bodies)
        if plain is not None:
            self.durability.appended(plain.record_count, plain.append_time)
            return state.log_end_offset
        runs = plan_follower_append(
            log_appends.tail(state, reopen_sealed=True),
            headers,
            bodies=bodies,
            prelude_length=state.directory.prelude_length,
            cut_front=self._cut_front,
        )
        if runs:
            self._carry_out(runs, runs[-1].headers[-1].append_time)
        return state.log_end_offset

    def known(self, batches: Sequence[tuple[BatchHeader, Buffer]]) -> list[OffsetRange]:
        """Return the offset ranges of the first batches, as far as the log already has them.

        A retry is answered from here, before its content is checked against a schema that may be newer than the retry.
        Raises BrokerError as ``append_as_leader``.
        """
        return self._state.producers.known(batches, self.tp)

    def _cut_front(self, header: BatchHeader, body: memoryview, start: int) -> tuple[BatchHeader, Buffer]:
        return cut_front(header, body, start, schema=self.schema(header.schema_id))

    def _carry_out(self, runs: list[SegmentWrite], now_us: int) -> None:
        records = log_appends.carry_out(self._state, runs, now_us)
        self.durability.appended(records, now_us)

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
        """Return whole batches of one segment, starting with the batch that holds ``offset``.

        The result has at least one batch if one ends at or below ``end_offset``; otherwise it has as many as fit into
        ``max_bytes`` and ``max_batches``. ``for_follower``: reads may begin at the first segment's start, which may be
        below the log start. ``mapped``: bodies may be views of files that still grow. These batches count as served,
        and are no longer truncated in place.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        state = self._state
        self._check_readable(offset, state.first_segment_offset if for_follower else state.log_start_offset)
        if offset >= end_offset or offset == state.log_end_offset:
            return log_reads.nothing_at(offset)
        try:  # every fetch runs this, and it costs less than ``offline_on_error``
            found = log_reads.whole_batches(
                state.chain,
                state.hot,
                offset,
                max_bytes=max_bytes,
                end_offset=end_offset,
                max_batches=max_batches,
                mapped=mapped,
            )
        except (OSError, StorageError) as failure:
            raise state.services.offline(f"reading {self.tp}: {failure}") from failure
        if mapped:
            state.served_end = max(state.served_end, found.next_offset)
        return found

    def read_headers(self, offset: int, *, max_batches: int, end_offset: int) -> LogSlice:
        """Return only the headers of the batches that ``read`` would return.

        ``body_bytes`` is the size of the batches.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return log_reads.nothing_at(offset)
        with self._state.offline_on_error("reading"):
            return log_reads.headers_alone(self._state.chain, offset, max_batches=max_batches, end_offset=end_offset)

    def hand_out(self, offset: int, *, end_offset: int) -> HandedOut | None:
        """Return the files of the segment that holds ``offset``, for a reader that maps them.

        Return None if there is no batch to read.

        The reader may read up to the last batch that ends at or below ``end_offset``, which is at most the high
        watermark. No part of that is truncated in place any more.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return None
        with self._state.offline_on_error("reading"):
            found = log_reads.files(self._state.chain, offset, end_offset=end_offset)
        if found is not None:
            self._state.served_end = max(self._state.served_end, found.next_offset)
        return found

    def offset_for_time(self, timestamp_us: int, *, end_offset: int) -> tuple[int, int] | None:
        """Return base offset and greatest timestamp of the first batch with a record at or after ``timestamp_us``.

        Only batches below ``end_offset`` count. Return None if there is none.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._state.check_open()
        with self._state.offline_on_error("reading"):
            return log_reads.offset_for_time(
                self._state.chain, timestamp_us, log_start_offset=self.log_start_offset, end_offset=end_offset
            )

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the schema with this id. Raises BrokerError SCHEMA_OUTDATED if it is unknown."""
        return self._state.directory.schema(schema_id)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the offset at which readers of committed records stop.

        It is the start of the first open transaction, and at most ``high_watermark``.
        """
        return self._state.last_stable_offset(high_watermark)

    def aborted_between(self, start: int, end: int) -> list[EndedTransaction]:
        """Return the aborted transactions with an offset in ``[start, end)``.

        Readers of committed records skip their batches.
        """
        return list(self._state.producers.transactions.aborted_between(start, end))

    def has_open_transaction(self, producer_id: int) -> bool:
        return producer_id in self._state.producers.transactions

    @property
    def in_transaction(self) -> bool:
        """Return whether any transaction is open."""
        return self._state.producers.transactions.any_open

    def open_transactions(self) -> dict[int, OpenTransaction]:
        """Return the open transactions by producer id."""
        return self._state.producers.transactions.open()

    def _check_readable(self, offset: int, start: int) -> None:
        state = self._state
        state.check_open()
        if not start <= offset <= state.log_end_offset:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"{self.tp}: offset {offset} found, {start} to {state.log_end_offset} expected",
            )

    # --- truncation ---------------------------------------------------------------------------------------------

    def truncate(self, offset: int, job: TruncationJob | None = None) -> int:
        """Truncate the log to ``offset``, or to the batch boundary below it, and return the new log end offset.

        If ``offset`` is below all records, the log becomes empty at ``offset``. ``job`` is the finished job that
        ``truncation.begin`` returned for this offset. Without it, or if it did not complete, this method makes the
        copies itself.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.truncation.truncate(offset, job)

    def restart_at(self, offset: int) -> None:
        """Delete all records.

        The log is then empty at ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self.truncation.restart_at(offset)

    def advance_log_start(self, offset: int) -> int:
        """Raise the log start offset to ``offset``, at most the high watermark, and return the log start offset.

        It stays unchanged while the disk has no room to record the deletion. The segments that end at or below it leave
        the log at once.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.truncation.advance_start(offset)

    @property
    def has_retired(self) -> bool:
        """Return whether ``delete_retired`` may have files to delete."""
        return self._state.chain.has_retired

    def delete_retired(self, durable_start: int) -> None:
        """Delete the files of segments below ``durable_start``, the log start offset in the checkpoint on disk.

        Raises:
            StorageError: the log directory must go offline.
        """
        self.truncation.delete_retired(durable_start)

    def retention_due_us(self) -> int | None:
        """Return when ``roll_due`` or ``apply_retention`` may next have work, in us since the epoch, or None for never.

        The time is valid until the log is written, sealed or configured. An idle log needs no check before it.
        """
        return self.truncation.retention_due_us()

    def roll_due(self, now_us: int) -> bool:
        """Return whether the leader should begin a new segment without a write.

        Only then can the active segment's records be deleted.

        That is so if the whole log is older than ``retention.ms``. In a compacted log it is so if a record of the
        active segment is older than ``max.compaction.lag.ms``. The segment must be committed and without open
        transactions. A segment with only the marker of such a roll never rolls again. This touches no file. Source:
        Kafka's ``UnifiedLog.deleteSegments``, KIP-354.
        """
        return self.truncation.roll_due(now_us)

    def apply_retention(self, now_us: int, *, read_to: int | None = None) -> int:
        """Delete the sealed segments that ``retention.ms`` and ``retention.bytes`` allow, and return their number.

        ``read_to`` is the offset that all awaited groups have read. None: no group is awaited.
        """
        return self.truncation.apply_retention(now_us, read_to=read_to)

    # --- absence ------------------------------------------------------------------------------------------------

    def is_outdated_for(self, headers: bytes | memoryview, now_us: int) -> bool:
        """Return whether a leader's batches show that this replica was away for too long.

        That is longer than the leader keeps tombstones and markers.

        The replica may then hold records that they deleted, and must start again with an empty log.
        """
        state = self._state
        if not state.tombstone_window.is_possible(now_us) or state.log_end_offset == state.first_segment_offset:
            return False
        return state.tombstone_window.is_shown_by(headers, now_us, delete_retention_ms=state.config.delete_retention_ms)

    def caught_up(self, high_watermark: int) -> None:
        """End the absence if the log reaches the leader's ``high_watermark``."""
        if self.log_end_offset >= high_watermark:
            self._state.tombstone_window.ended()
