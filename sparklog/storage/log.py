"""One replica's log: a partition directory of segments, appended at the end, read anywhere, cut when it must be.

Owned by the event loop of its broker: nothing here is safe to call from another thread, except ``SealJob.run``,
``FlushJob.run``, ``TruncationJob.run`` and what is handed to ``remove_later``. Appends go to the page cache; durability
comes from replication, and from fsync when a segment is sealed, in ``FlushJob``, on a clean stop, and in the append
itself where ``flush.messages`` has it acknowledged only then.

Here is what requests ask of a log. What it consists of: ``log_state``; how it becomes longer: ``log_appends`` and, by
one plain batch, ``append_fast_path``; shorter: ``log_truncation``; what is fsynced when: ``log_durability``;
compaction: ``log_cleaning``.
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
    """One partition directory. Made by ``LogDirectory.create`` or found by ``LogDirectory.load``."""

    __slots__ = ("_state", "cleaning", "cuts", "durability", "named", "topic_id", "tp")

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
        #: a durable checkpoint names this log; ``LogDirectory`` sets it (``LogDirectory.name_logs``)
        self.named = True
        self._state = LogState(tp, topic_id, directory=directory, schemas=schemas, config=config, services=services)
        self.durability = LogDurability(self._state)
        self.cleaning = LogCleaning(self._state, self.durability)
        self.cuts = LogTruncation(self._state, self.durability, self.cleaning)

    def __repr__(self) -> str:
        return f"Log({self.tp}, [{self.log_start_offset}, {self.log_end_offset}), hw {self.high_watermark})"

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> None:
        """Open what is in the directory. Called once, before anything else.

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
            self.cuts.cancel()
            self.durability.cancel_flush()
            self.durability.cancel_schemas()
            state.seals.cancel(state.chain.segments)
            state.chain.close()
            state.hot.clear()
            state.producers.count_in(None)
            state.closed = True

    def expire_producers(self, now_us: int) -> None:
        """Forget producer ids that have been idle for ``producer.id.expiration.ms``."""
        state = self._state
        state.producers.expire(now_us - state.services.producer_id_expiration_ms * 1000)

    def delete(self) -> None:
        """Close and delete the directory: out of the way at once, from the disk in a thread."""
        self.close()
        if self.on_disk:
            self._state.services.remove_directory(self.directory)

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def config(self) -> TopicConfig:
        return self._state.config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        """The topic's settings have changed."""
        self._state.config = config

    @property
    def directory(self) -> Path:
        return self._state.directory.path

    @property
    def findings(self) -> tuple[str, ...]:
        """What the last open had to cut, for people."""
        return self._state.findings

    @property
    def log_start_offset(self) -> int:
        return self._state.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Next to be written."""
        return self._state.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self._state.high_watermark

    @property
    def recovery_point(self) -> int:
        """Everything below is fsynced."""
        return self._state.recovery_point

    @property
    def last_epoch(self) -> int:
        """Leader epoch of the last batch, -1 when the log is empty."""
        return self._state.epochs.last_epoch

    @property
    def first_segment_offset(self) -> int:
        """Where an out-of-range follower begins, so that its files become equal; at or below the log start."""
        return self._state.first_segment_offset

    @property
    def on_disk(self) -> bool:
        """Whether it has a directory: from its first batch on."""
        return self._state.directory.exists

    @property
    def size_bytes(self) -> int:
        return self._state.chain.size_bytes

    @property
    def schema_ids(self) -> tuple[int, ...]:
        return tuple(self._state.directory.schemas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Oldest first; to look at."""
        return tuple(self._state.chain.segments)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """The largest leader epoch <= ``epoch`` in the log and its exclusive end; (-1, log start) if none."""
        return self._state.epochs.end_of_epoch(epoch, self.log_start_offset, log_end_offset=self.log_end_offset)

    def checkpoint(self) -> PartitionCheckpoint:
        """What is to be written now; it counts as claimed from here on."""
        return self._state.checkpoint()

    def set_high_watermark(self, high_watermark: int) -> None:
        """Everything below is committed and may be served; bounded by the log's ends."""
        state = self._state
        if not state.log_start_offset <= high_watermark <= state.log_end_offset:
            high_watermark = min(max(high_watermark, state.log_start_offset), state.log_end_offset)
        state.high_watermark = high_watermark
        if high_watermark > state.served_end:  # noqa: PLR1730 - hot
            state.served_end = high_watermark
        state.producers.transactions.committed_below(high_watermark)

    def add_schema(self, schema: TopicSchema) -> None:
        """Learn a schema before batches of it come. Known ids are left as they are."""
        self._state.directory.learn(schema)

    def restore_partition_file(self) -> None:
        """It could not be read, and ``recover`` has found what it said. Durable on return. Raises OSError."""
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
        """Append checked batches; return the offsets of the first to the last of them.

        Batches that are already in the log are not appended again: the earlier offsets are returned for them.
        ``known``: what ``known`` has just said of the batches, None if it was not asked.
        ``placed``: they have their offsets and times already, and continue the log. ``roll``: in a new segment.

        Raises:
            BrokerError: nothing was appended. INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER,
                DUPLICATE_SEQUENCE_NUMBER, FENCED_LEADER_EPOCH, CORRUPT_MESSAGE, SCHEMA_OUTDATED; KAFKA_STORAGE_ERROR
                when the disk is full; OFFSET_OUT_OF_RANGE for placed batches that do not begin at the log's end.
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
        """Append a leader's batches verbatim; return the new log end.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE when they do not continue this log; SCHEMA_OUTDATED
                when a schema id is not known here; KAFKA_STORAGE_ERROR when the disk is full.
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
        """Offsets of the first batches, as far as they are in the log already: a retry is answered as such before its
        content is checked against a schema that may have moved on. Raises BrokerError as ``append_as_leader``."""
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
        """Whole batches from the one that holds ``offset`` on, within one segment.

        At least one batch if there is one that ends at or below ``end_offset``, else as many as fit ``max_bytes`` and
        ``max_batches``. ``for_follower``: from where the first segment begins, which may be below the log start.
        ``mapped``: bodies may be views of files that still grow, and count as handed out: they are not cut in place any
        more.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        state = self._state
        self._check_readable(offset, state.first_segment_offset if for_follower else state.log_start_offset)
        if offset >= end_offset or offset == state.log_end_offset:
            return log_reads.nothing_at(offset)
        try:  # every fetch comes here: cheaper than ``offline_on_error``
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
        """As ``read``, but the headers alone; ``body_bytes`` is what the batches take.

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
        """The files of the segment that holds ``offset``, for a reader that maps them, up to the last batch that ends
        at or below ``end_offset``; None when there is none. Nothing of it will be cut in place any more.

        ``end_offset`` is at most the high watermark.

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
        """Base offset and greatest timestamp of the first batch below ``end_offset`` that holds a record at or after
        ``timestamp_us``; None when there is none.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._state.check_open()
        with self._state.offline_on_error("reading"):
            return log_reads.offset_for_time(
                self._state.chain, timestamp_us, log_start_offset=self.log_start_offset, end_offset=end_offset
            )

    def schema(self, schema_id: int) -> pa.Schema:
        """The columns of the batches with this schema id. Raises BrokerError SCHEMA_OUTDATED for an unknown one."""
        return self._state.directory.schema(schema_id)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Where readers of committed records stop: at the first transaction whose end is open, at most at
        ``high_watermark``."""
        return self._state.last_stable_offset(high_watermark)

    def aborted_between(self, start: int, end: int) -> list[EndedTransaction]:
        """Aborted transactions with an offset in ``[start, end)``: their batches are not for readers of committed
        records."""
        return list(self._state.producers.transactions.aborted_between(start, end))

    def has_open_transaction(self, producer_id: int) -> bool:
        return producer_id in self._state.producers.transactions

    @property
    def in_transaction(self) -> bool:
        """Whether some transaction is open."""
        return self._state.producers.transactions.any_open

    def open_transactions(self) -> dict[int, OpenTransaction]:
        """By producer id."""
        return self._state.producers.transactions.open()

    def _check_readable(self, offset: int, start: int) -> None:
        state = self._state
        state.check_open()
        if not start <= offset <= state.log_end_offset:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"{self.tp}: offset {offset} found, {start} to {state.log_end_offset} expected",
            )

    # --- cutting ------------------------------------------------------------------------------------------------

    def truncate(self, offset: int, job: TruncationJob | None = None) -> int:
        """Cut the log so that it ends at ``offset`` or at the batch boundary below; return the new log end.

        Below what the log holds: empty at ``offset``. ``job``: that of ``cuts.begin`` for this offset, which has run;
        without it, or where it did not come to its end, what it would have copied is copied here.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.cuts.truncate(offset, job)

    def restart_at(self, offset: int) -> None:
        """Throw everything away; the log is empty at ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self.cuts.restart_at(offset)

    def advance_log_start(self, offset: int) -> int:
        """Raise the log start to ``offset``, at most the high watermark; return the log start, which stays as it is
        while the disk is too full to note what goes. The segments wholly below leave the log at once.

        Raises:
            StorageError: the log directory must go offline.
        """
        return self.cuts.advance_start(offset)

    @property
    def has_retired(self) -> bool:
        """Whether ``delete_retired`` may find something to delete."""
        return self._state.chain.has_retired

    def delete_retired(self, durable_start: int) -> None:
        """The checkpoint on disk has ``durable_start`` for the log start: delete the files of segments below it.

        Raises:
            StorageError: the log directory must go offline.
        """
        self.cuts.delete_retired(durable_start)

    def retention_due_us(self) -> int | None:
        """When ``roll_due`` or ``apply_retention`` may first find something to do while nothing is written, sealed or
        configured; us since the epoch. None: never. An idle log need not be asked before."""
        return self.cuts.retention_due_us()

    def roll_due(self, now_us: int) -> bool:
        """Whether the leader is to begin a new segment though nothing is written, so that what is in the active one may
        go: all of the log is older than ``retention.ms``, or, where it is compacted, some of that segment is than
        ``max.compaction.lag.ms``.

        Not before it is committed and decided; and never for a segment that another such roll has begun, which holds
        a marker alone. No file is touched. Source: Kafka's ``UnifiedLog.deleteSegments``, KIP-354.
        """
        return self.cuts.roll_due(now_us)

    def apply_retention(self, now_us: int, *, read_to: int | None = None) -> int:
        """Let go of the sealed segments that ``retention.ms`` and ``retention.bytes`` allow; return how many.

        ``read_to``: what the groups that are waited for have read; None: nobody is."""
        return self.cuts.apply_retention(now_us, read_to=read_to)

    # --- absence ------------------------------------------------------------------------------------------------

    def is_outdated_for(self, headers: bytes | memoryview, now_us: int) -> bool:
        """Whether a leader's batches show that this replica was away for longer than tombstones and markers are kept:
        it may hold what they deleted, and must begin anew."""
        state = self._state
        if not state.absence.is_possible(now_us) or state.log_end_offset == state.first_segment_offset:
            return False
        return state.absence.is_shown_by(headers, now_us, delete_retention_ms=state.config.delete_retention_ms)

    def caught_up(self, high_watermark: int) -> None:
        """The leader's high watermark is ``high_watermark``."""
        if self.log_end_offset >= high_watermark:
            self._state.absence.ended()
