"""One replica's log: a partition directory of segments, appended at the end, read anywhere, cut when it must be.

Owned by the event loop of its broker: nothing here is safe to call from another thread, except ``SealJob.run``,
``FlushJob.run`` and what is handed to ``remove_later``. Appends go to the page cache; durability comes from
replication, and from fsync when a segment is sealed, in ``FlushJob``, on a clean stop, and in the append itself where
``flush.messages`` has it acknowledged only then.

Invariants: log start <= high watermark <= log end; segments follow each other without gap; only the last segment is
appended to; everything below the recovery point is fsynced; the leader epochs of the batches do not fall.

The directory and its files are made by the first append, so that an empty partition costs nothing on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange, TopicPartition, TopicSchema
from sparklog.record.cleaned import cut_front
from sparklog.record.header import BatchHeader, Flag, unpack_headers
from sparklog.record.marker import Marker
from sparklog.record.schema import parse_schema
from sparklog.storage import log_reads, retention
from sparklog.storage.append_plan import NO_MAXIMUM, LogTail, Run, markers_of, plan_follower_append, plan_leader_append
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.cleaning import CleaningRules, CleanJob, Replacement
from sparklog.storage.cleaning_plan import CleanerState, Due, SegmentFacts
from sparklog.storage.disk import Buffer, is_full, sync_file
from sparklog.storage.epochs import EpochCache
from sparklog.storage.flushing import FlushJob
from sparklog.storage.hot_batches import HotBatch, HotLog, forget_below, forget_from
from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_reads import HandedOut
from sparklog.storage.log_reads import LogSlice as LogSlice  # what ``read`` gives: known from here
from sparklog.storage.log_services import LogServices
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, write_partition_file
from sparklog.storage.producers import ProducerTable
from sparklog.storage.recovery import load_producers, recover_log, snapshot_offsets
from sparklog.storage.seal_queue import SealQueue
from sparklog.storage.sealing import SealJob
from sparklog.storage.segment import Segment
from sparklog.storage.segment_chain import SegmentChain
from sparklog.storage.transactions import EndedTransaction, OpenTransaction

#: A replica that got nothing for a shorter time has not been away.
_SHORTEST_ABSENCE_US = 10_000_000
#: A log of so few batches leaves no state files behind at a clean stop.
_FEW_BATCHES = 256


class Log:
    """One partition directory. Made by ``LogDirectory.create`` or found by ``LogDirectory.load``."""

    def __init__(
        self,
        tp: TopicPartition,
        topic_id: str,
        *,
        directory: Path,
        schemas: Iterable[TopicSchema],
        config: TopicConfig,
        services: LogServices,
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        self.directory = directory
        #: replaced when the topic's settings change
        self.config = config
        self._log_start_offset = 0
        self.log_end_offset = 0
        self._high_watermark = 0
        self._recovery_point = 0
        #: what the last open had to cut, for people
        self.findings: tuple[str, ...] = ()
        self._services = services
        self._disk = services.disk
        self._schemas = {schema.schema_id: schema.message for schema in schemas}
        self._chain = SegmentChain(services.disk, directory, files=services.files)
        self._seals = SealQueue(services.disk, directory, remove_later=services.remove_later)
        self._cleaning = LogCleaning(services.disk, directory)
        self._epochs = EpochCache()
        self._producers = ProducerTable()
        self._hot: HotLog = {}
        self._on_disk = False
        #: ``partition.json`` has all schemas; where there was no room for one, the next append writes it first
        self._schemas_stored = True
        self._closed = False
        #: readers may have mapped the files up to here
        self._served_end = 0
        #: nothing changed since the state for a clean stop was written
        self._clean = False
        self._unflushed_since_us = -1
        self._unflushed_records = 0
        #: when the last batch was appended, by this replica's clock
        self._last_progress_us = 0
        #: for longer than its leader keeps tombstones, and not caught up since
        self._was_away = False
        #: at work in a thread
        self._flush: FlushJob | None = None
        #: the most that a checkpoint, on disk or on its way there, says of this log
        self._claimed_end = 0

    def __repr__(self) -> str:
        return f"Log({self.tp}, [{self.log_start_offset}, {self.log_end_offset}), hw {self.high_watermark})"

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> None:
        """Open what is in the directory. Called once, before anything else.

        Raises:
            NewerFormatError, StorageError: as ``recover_log``.
        """
        recovery_point = checkpoint.recovery_point if checkpoint is not None else 0
        start = checkpoint.log_start_offset if checkpoint is not None else 0
        found = recover_log(
            self._disk,
            self.directory,
            schemas=self._schemas,
            files=self._services.files,
            recovery_point=recovery_point,
            log_start_offset=start,
            thorough=not (clean or trusted),
        )
        self._on_disk = True
        self._clean = clean and not found.findings
        self._chain = SegmentChain(self._disk, self.directory, files=self._services.files, segments=found.segments)
        self._seals.found(found.snapshots)
        self._epochs = found.epochs
        self._producers = found.producers
        self.findings = found.findings
        last = self._chain.last
        self.log_end_offset = last.end_offset if last is not None else start
        self.log_start_offset = min(max(start, self.first_segment_offset), self.log_end_offset)
        high_watermark = checkpoint.high_watermark if checkpoint is not None else 0
        self._claimed_end = max(high_watermark, recovery_point)
        self.high_watermark = min(max(high_watermark, self.log_start_offset), self.log_end_offset)
        self.recovery_point = min(recovery_point, self.log_end_offset)
        with self._offline_on_error("opening"):
            self._cleaning.load(self.log_end_offset)
        # a reader of the earlier process may still have any of this mapped
        self._served_end = self.log_end_offset
        if last is not None:
            self._last_progress_us = last.last_append_us

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self._log_start_offset

    @log_start_offset.setter
    def log_start_offset(self, offset: int) -> None:
        self._log_start_offset = offset
        self._services.moved.add(self)

    @property
    def high_watermark(self) -> int:
        return self._high_watermark

    @high_watermark.setter
    def high_watermark(self, offset: int) -> None:
        self._high_watermark = offset
        self._services.moved.add(self)

    @property
    def recovery_point(self) -> int:
        """Everything below is fsynced."""
        return self._recovery_point

    @recovery_point.setter
    def recovery_point(self, offset: int) -> None:
        self._recovery_point = offset
        self._services.moved.add(self)

    @property
    def last_epoch(self) -> int:
        """Leader epoch of the last batch, -1 when the log is empty."""
        return self._epochs.last_epoch

    @property
    def first_segment_offset(self) -> int:
        """Where an out-of-range follower begins, so that its files become equal; at or below the log start."""
        return self._chain.segments[0].base_offset if self._chain.segments else self.log_end_offset

    @property
    def has_rolled(self) -> bool:
        """Whether it has more than one segment: else there is nothing to seal and nothing that may go."""
        return len(self._chain.segments) > 1

    @property
    def on_disk(self) -> bool:
        """Whether it has a directory: from its first batch on."""
        return self._on_disk

    @property
    def size_bytes(self) -> int:
        return self._chain.size_bytes

    @property
    def schema_ids(self) -> tuple[int, ...]:
        return tuple(self._schemas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Oldest first; to look at."""
        return tuple(self._chain.segments)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """The largest leader epoch <= ``epoch`` in the log and its exclusive end; (-1, log start) if none."""
        return self._epochs.end_of_epoch(epoch, self.log_start_offset, log_end_offset=self.log_end_offset)

    def checkpoint(self) -> PartitionCheckpoint:
        """What is to be written now; it counts as claimed from here on."""
        self._claimed_end = max(self._claimed_end, self.high_watermark, self.recovery_point)
        marks = (self.high_watermark, self.recovery_point, self.log_start_offset)
        return PartitionCheckpoint(self.tp.topic, self.tp.partition, self.topic_id, *marks)

    def set_high_watermark(self, high_watermark: int) -> None:
        """Everything below is committed and may be served; bounded by the log's ends."""
        self.high_watermark = min(max(high_watermark, self.log_start_offset), self.log_end_offset)
        self._served_end = max(self._served_end, self.high_watermark)
        self._producers.transactions.committed_below(self.high_watermark)

    def add_schema(self, schema: TopicSchema) -> None:
        """Learn a schema before batches of it come. Known ids are left as they are."""
        if schema.schema_id not in self._schemas:
            self._schemas[schema.schema_id] = schema.message
            self._schemas_stored = False
            if self._on_disk:
                self._write_if_room("storing a schema", self._write_partition_file)

    # --- append -------------------------------------------------------------------------------------------------

    def append_as_leader(
        self,
        batches: Sequence[tuple[BatchHeader, Buffer]],
        *,
        leader_epoch: int,
        now_us: int,
        placed: bool = False,
        roll: bool = False,
    ) -> OffsetRange:
        """Append checked batches; return the offsets of the first to the last of them.

        Batches that are already in the log are not appended again: the earlier offsets are returned for them.
        ``placed``: they have their offsets and times already, and continue the log. ``roll``: in a new segment.

        Raises:
            BrokerError: nothing was appended. INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER,
                DUPLICATE_SEQUENCE_NUMBER, FENCED_LEADER_EPOCH, CORRUPT_MESSAGE, SCHEMA_OUTDATED; KAFKA_STORAGE_ERROR
                when the disk is full; OFFSET_OUT_OF_RANGE for placed batches that do not begin at the log's end.
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if leader_epoch < self._epochs.last_epoch:
            raise BrokerError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"{self.tp}: leader epoch {leader_epoch} found, {self._epochs.last_epoch} is in the log",
            )
        known = self._producers.known([header for header, _ in batches], self.tp)
        fresh = batches[len(known) :] if known else batches
        start = self.log_end_offset
        if fresh:
            tail = self._tail(reopen_sealed=False)
            runs = plan_leader_append(
                tail._replace(position=-1) if roll else tail,
                fresh,
                leader_epoch=leader_epoch,
                now_us=now_us,
                config=self.config,
                prelude_length=self._prelude_length,
                placed=placed,
            )
            self._append(runs, now_us)
        if not known:
            return OffsetRange(start, self.log_end_offset)
        return OffsetRange(known[0].start, self.log_end_offset if fresh else known[-1].end)

    def append_as_follower(self, headers: bytes | memoryview, bodies: memoryview) -> int:
        """Append a leader's batches verbatim; return the new log end.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE when they do not continue this log; SCHEMA_OUTDATED
                when a schema id is not known here; KAFKA_STORAGE_ERROR when the disk is full.
            StorageError: the log directory must go offline.
        """
        self._check_open()
        runs = plan_follower_append(
            self._tail(reopen_sealed=True),
            headers,
            bodies=bodies,
            prelude_length=self._prelude_length,
            cut_front=self._cut_front,
        )
        if runs:
            self._append(runs, runs[-1].headers[-1].append_time)
        return self.log_end_offset

    def duplicate_count(self, batches: Sequence[tuple[BatchHeader, Buffer]]) -> int:
        """How many of the first batches are in the log already: a retry is answered as such before its content is
        checked against a schema that may have moved on. Raises BrokerError as ``append_as_leader``."""
        return len(self._producers.known([header for header, _ in batches], self.tp))

    def _tail(self, *, reopen_sealed: bool) -> LogTail:
        """``reopen_sealed``: a follower goes on in a sealed segment if its leader did; a leader begins a new one."""
        last = self._chain.last
        if last is None:
            return LogTail(self.log_end_offset, self._epochs.last_epoch, -1, NO_MAXIMUM, -1, -1)
        # behind what a cleaner wrote a leader rolls, so that replicas are byte-identical again
        appendable = reopen_sealed or not (last.sealed or last.cleaned)
        return LogTail(
            self.log_end_offset,
            self._epochs.last_epoch,
            last.data_size if appendable else -1,
            last.running_max,
            last.first_append_us,
            last.schema_id,
            last.cleaned,
        )

    def _append(self, runs: list[Run], now_us: int) -> None:
        """Carry out a plan whole, or leave the log as it was."""
        markers = markers_of(runs)
        try:
            if not self._on_disk:
                self._make_directory()
            elif not self._schemas_stored:
                self._write_partition_file()
            self._chain.append(runs, self._prelude)
        except OSError as failure:
            if is_full(failure):
                raise BrokerError(
                    ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: no room left in {self.directory.parent}: {failure}"
                ) from failure
            raise self._services.offline(f"appending to {self.tp}: {failure}") from failure
        except StorageError as failure:
            raise self._services.offline(str(failure)) from failure
        self._clean = False
        self._last_progress_us = time.time_ns() // 1000
        first = runs[0].headers[0]
        if self.log_start_offset == self.log_end_offset:
            # an empty follower took its leader's first segment, which may begin below
            self.log_start_offset = min(self.log_start_offset, first.base_offset)
        self._record(runs, now_us, markers)
        self.log_end_offset = runs[-1].headers[-1].next_offset
        self.high_watermark = min(self.high_watermark, self.log_end_offset)
        if self._unflushed_since_us < 0:
            self._unflushed_since_us = now_us
        if 0 < self.config.flush_messages <= self._unflushed_records:
            self.flush()

    def _record(self, runs: list[Run], now_us: int, markers: Mapping[int, Marker]) -> None:
        """Bring everything that is derived from the batches up to date."""
        hot = self._services.hot
        for new_segment, headers, packed, data in runs:
            base_offset = headers[0].base_offset
            if new_segment and base_offset != self.first_segment_offset:
                self._producers.expire(now_us - self._services.producer_id_expiration_ms * 1000)
                self._seals.rolled(base_offset, self._producers.state())
            for header, packed_header, body in zip(headers, packed, data, strict=True):
                self._epochs.assign(header.leader_epoch, header.base_offset)
                self._producers.record(header, markers.get(header.base_offset))
                hot.add(self._hot, header.base_offset, HotBatch(packed_header, body))
                self._unflushed_records += header.record_count

    # --- read ---------------------------------------------------------------------------------------------------

    def read(
        self, offset: int, *, max_bytes: int, end_offset: int, for_follower: bool = False, for_now: bool = False
    ) -> LogSlice:
        """Whole batches from the one that holds ``offset`` on, within one segment.

        At least one batch if there is one that ends at or below ``end_offset``, else as many as fit ``max_bytes``.
        ``for_follower``: from where the first segment begins, which may be below the log start. ``for_now``: the caller
        is done with the bodies before anything else happens to the log, so they need not be copies.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.first_segment_offset if for_follower else self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return log_reads.nothing_at(offset)
        try:  # every fetch comes here: cheaper than ``_offline_on_error``
            return log_reads.whole_batches(
                self._chain, self._hot, offset, max_bytes=max_bytes, end_offset=end_offset, for_now=for_now
            )
        except (OSError, StorageError) as failure:
            raise self._services.offline(f"reading {self.tp}: {failure}") from failure

    def read_headers(self, offset: int, *, max_batches: int, end_offset: int) -> LogSlice:
        """As ``read``, but the headers alone; ``body_bytes`` is what the batches take.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_readable(offset, self.log_start_offset)
        if offset >= end_offset or offset == self.log_end_offset:
            return log_reads.nothing_at(offset)
        with self._offline_on_error("reading"):
            return log_reads.headers_alone(self._chain, offset, max_batches=max_batches, end_offset=end_offset)

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
        with self._offline_on_error("reading"):
            found = log_reads.files(self._chain, offset, end_offset=end_offset)
        if found is not None:
            self._served_end = max(self._served_end, found.next_offset)
        return found

    def offset_for_time(self, timestamp_us: int, *, end_offset: int) -> tuple[int, int] | None:
        """Base offset and greatest timestamp of the first batch below ``end_offset`` that holds a record at or after
        ``timestamp_us``; None when there is none.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        with self._offline_on_error("reading"):
            return log_reads.offset_for_time(
                self._chain, timestamp_us, log_start_offset=self.log_start_offset, end_offset=end_offset
            )

    def schema(self, schema_id: int) -> pa.Schema:
        """The columns of the batches with this schema id. Raises BrokerError SCHEMA_OUTDATED for an unknown one."""
        return parse_schema(self._schema_message(schema_id))

    def last_stable_offset(self, high_watermark: int) -> int:
        """Where readers of committed records stop: at the first transaction whose end is open, at most at
        ``high_watermark``."""
        stable = self._producers.transactions.last_stable_offset(high_watermark)
        return max(stable, min(self.log_start_offset, high_watermark))

    def aborted_between(self, start: int, end: int) -> list[EndedTransaction]:
        """Aborted transactions with an offset in ``[start, end)``: their batches are not for readers of committed
        records."""
        return list(self._producers.transactions.aborted_between(start, end))

    def has_open_transaction(self, producer_id: int) -> bool:
        return producer_id in self._producers.transactions

    def open_transactions(self) -> dict[int, OpenTransaction]:
        """By producer id."""
        return self._producers.transactions.open()

    # --- cutting ------------------------------------------------------------------------------------------------

    def truncate(self, offset: int) -> int:
        """Cut the log so that it ends at ``offset`` or at the batch boundary below; return the new log end.

        Below what the log holds: empty at ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if offset >= self.log_end_offset:
            return self.log_end_offset
        with self._offline_on_error("truncating"):
            first = self.first_segment_offset
            end = self._chain.boundary(offset) if offset > first else offset
            if end <= first:
                self.restart_at(end)
                return end
            served_end, fsynced_end = self._served_end, self.recovery_point
            self._prepare_cut(end)
            # the one that ends at the cut becomes the last: it may go on
            self._seals.cancel(segment for segment in self._chain.segments if segment.end_offset >= end)
            self._chain.cut(end, served_end=served_end, fsynced_end=fsynced_end)
            self._forget_from(end)
            self._producers = self._load_producers(self._chain.segments)
        return end

    def restart_at(self, offset: int) -> None:
        """Throw everything away; the log is empty at ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        with self._offline_on_error("restarting"):
            self._prepare_cut(0)
            self._seals.cancel(self._chain.segments)
            if self._on_disk:
                self._chain.clear()
            self._forget_from(-1)
            self.log_start_offset = self.log_end_offset = offset
            self.high_watermark = self._served_end = offset
            self._producers.clear()
            self._was_away = False

    def advance_log_start(self, offset: int) -> int:
        """Raise the log start to ``offset``, at most the high watermark; return the log start, which stays as it is
        while the disk is too full to note what goes.

        The segments wholly below leave the log at once. Their files go when a checkpoint has made the new log start
        durable (``delete_retired``): a log whose first segment is missing in part must not be taken for a damaged one.
        """
        self._check_open()
        start = min(offset, self.high_watermark)
        if start <= self.log_start_offset:
            return self.log_start_offset
        leaving = [segment for segment in self._chain.segments[:-1] if segment.end_offset <= start]
        if leaving and not self._bridge(leaving):
            return self.log_start_offset
        if leaving:
            with self._offline_on_error("stopping the cleaner of"):
                self._cleaning.stop()
        self.log_start_offset = start
        self._seals.cancel(leaving)
        if leaving:
            self._cancel_flush()
        self._chain.retire_below(start)
        if self.has_retired:
            self._services.retired.add(self)
        self._epochs.advance_start(self.first_segment_offset)
        self._producers.transactions.forget_below(start)
        return start

    def _bridge(self, leaving: list[Segment]) -> bool:
        """Keep what the segments about to go say of producers, if there is room for that."""
        base = leaving[-1].end_offset
        return self._write_if_room(
            "writing the producers of",
            lambda: self._seals.bridge(base, lambda: self._load_producers(leaving)),
        )

    @property
    def has_retired(self) -> bool:
        """Whether ``delete_retired`` may find something to delete."""
        return self._chain.has_retired

    def delete_retired(self, durable_start: int) -> None:
        """The checkpoint on disk has ``durable_start`` for the log start: delete the files of segments below it.

        Raises:
            StorageError: the log directory must go offline.
        """
        with self._offline_on_error("deleting segments"):
            self._services.remove_later(self._chain.delete_retired(durable_start))

    def roll_due(self, now_us: int) -> bool:
        """Whether the leader is to begin a new segment though nothing is written, so that what is in the active one may
        go: all of it is older than ``retention.ms``, or, where it is compacted, some is than ``max.compaction.lag.ms``.

        Not before it is committed and decided; and never for a segment that another such roll has begun, which holds
        a marker alone. Source: Kafka's ``UnifiedLog.deleteSegments``, KIP-354.

        Raises:
            StorageError: the log directory must go offline.
        """
        last, config = self._chain.last, self.config
        if last is None or config.restoring:
            return False
        expired = "delete" in config.cleanup_policy and 0 <= config.retention_ms < (now_us - last.running_max) / 1000
        lagging = config.compacted and now_us - last.first_append_us > config.max_compaction_lag_ms * 1000
        if not (expired or lagging) or self.last_stable_offset(self.high_watermark) < self.log_end_offset:
            return False
        with self._offline_on_error("looking at"):
            return last.count > 1 or not last.header(0).flags & Flag.CONTROL

    def apply_retention(self, now_us: int, *, read_to: int | None = None) -> int:
        """Let go of the sealed segments that ``retention.ms`` and ``retention.bytes`` allow; return how many.

        ``read_to``: what the groups that are waited for have read; None: nobody is."""
        if "delete" not in self.config.cleanup_policy or self.config.restoring:
            return 0
        sealed = [
            retention.SealedSegment(segment.size_bytes, segment.running_max, segment.end_offset)
            for segment in self._chain.segments[:-1][: self._chain.sealed_prefix]
        ]
        count = retention.deletable(
            sealed,
            log_size_bytes=self.size_bytes,
            now_us=now_us,
            retention_ms=self.config.retention_ms,
            retention_bytes=self.config.retention_bytes,
            read_to=read_to,
            retention_hard_ms=self.config.retention_hard_ms,
        )
        if not count:
            return 0
        start = self._chain.segments[count].base_offset
        return count if self.advance_log_start(start) >= start else 0

    def _forget_from(self, end: int) -> None:
        """The segments end at ``end`` now: so does everything derived from them."""
        self._clean = False
        forget_from(self._hot, end)
        self._epochs.truncate(end)
        if self._on_disk:
            self._seals.forget_from(end)
        self.log_end_offset = end
        self.log_start_offset = min(self.log_start_offset, end)
        self.high_watermark = min(self.high_watermark, end)
        self._served_end = min(self._served_end, end)

    def _prepare_cut(self, end: int) -> None:
        """Before a cut to ``end`` the checkpoint on disk must not claim more than will be left.

        What is appended next above ``end`` is not fsynced, whatever was there before; a log shorter than its
        checkpoint is taken for a damaged one; and segments below its log start are removed on open. What it claims
        is not what is known here: whoever orders the cut lowers the high watermark first.
        """
        if self._on_disk:
            self._cleaning.cut(end)
        self._cancel_flush()
        if end < max(self._claimed_end, self.high_watermark, self.recovery_point):
            self.log_start_offset = min(self.log_start_offset, end)
            self.high_watermark = min(self.high_watermark, end)
            self.recovery_point = min(self.recovery_point, end)
            self._services.checkpoint_now()
            self._claimed_end = max(self.high_watermark, self.recovery_point)

    # --- sealing and durability ---------------------------------------------------------------------------------

    def seals_due(self) -> list[SealJob]:
        """Jobs for the rolled segments that are committed by now: run each in a thread, then ``seal_finished``.

        Cheap when there are none. To be asked when the high watermark moved and from time to time: a job that found
        the disk full is due again.
        """
        return self._seals.due(self._chain, self.high_watermark, epochs=self._epochs, schemas=self._schemas)

    def seal_finished(self, job: SealJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        if job.cancelled or self._closed:
            return
        self._seals.finished(job)
        self._chain.count_sealed()
        if self._chain.sealed_prefix:
            fsynced = self._chain.segments[self._chain.sealed_prefix - 1].end_offset
            self.recovery_point = max(self.recovery_point, fsynced)

    def flush(self) -> None:
        """fsync everything up to the log end. Blocks for as long as the disk takes.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if self.recovery_point >= self.log_end_offset:
            return
        with self._offline_on_error("flushing"):
            self._chain.sync_from(self.recovery_point)
            sync_file(self._disk, self.directory / PARTITION_FILE)
            self._disk.sync_directory(self.directory)
            self._disk.sync_directory(self.directory.parent)
        self._flushed()

    def _flushed(self) -> None:
        self.recovery_point = self.log_end_offset
        self._unflushed_since_us = -1
        self._unflushed_records = 0

    def flush_due(self, now_us: int) -> FlushJob | None:
        """A job for what is to be fsynced when ``flush.ms`` have passed since the oldest append that was not: run it in
        a thread, then ``flush_finished``. None while one is at work."""
        waited_us = now_us - self._unflushed_since_us
        if self._flush is not None or self._unflushed_since_us < 0 or not 0 < self.config.flush_ms * 1000 <= waited_us:
            return None
        segments = [segment for segment in self._chain.segments if segment.end_offset > self.recovery_point]
        self._flush = FlushJob(
            self._disk,
            [path for segment in segments for path in (segment.data_path, segment.index_path)]
            + [self.directory / PARTITION_FILE],
            directory=self.directory,
            end_offset=self.log_end_offset,
            records=self._unflushed_records,
            since_us=self._unflushed_since_us,
        )
        self._unflushed_since_us = -1
        return self._flush

    def flush_finished(self, job: FlushJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        if job is not self._flush:
            return
        self._flush = None
        self.recovery_point = max(self.recovery_point, job.end_offset)
        self._unflushed_records = max(self._unflushed_records - job.records, 0)

    def _cancel_flush(self) -> None:
        """Files that it knows of are about to go, or to be cut."""
        job, self._flush = self._flush, None
        if job is not None:
            job.cancelled = True
            self._unflushed_since_us = job.since_us

    @property
    def is_clean(self) -> bool:
        """Nothing is to be done before a clean stop."""
        return self._clean or not self._on_disk

    def prepare_clean_stop(self) -> None:
        """Make everything durable, and the next open quick. Blocks; other logs may be made ready at the same time.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if self.is_clean:
            return
        self._seals.cancel(self._chain.segments)
        self.flush()
        with self._offline_on_error("flushing"):
            self._disk.sync_directory(self.directory)  # a cut below what was flushed has renamed files
        self._write_state(sync=True)
        self._clean = True

    def leave_state(self) -> None:
        """As ``prepare_clean_stop``, for one of many logs that are made durable together: ``made_durable`` follows.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        self._seals.cancel(self._chain.segments)
        self._write_state(sync=False)

    def made_durable(self) -> None:
        """All that was written until now is durable, what ``leave_state`` wrote as well."""
        self._flushed()
        self._clean = True

    def _write_state(self, *, sync: bool) -> None:
        segments = self._chain.segments
        if len(segments) == 1 and segments[0].count <= _FEW_BATCHES:
            return  # the next open has read their headers sooner than the files that would spare it that
        with self._offline_on_error("writing the state of"):
            self._seals.write_state(self.log_end_offset, producers=self._producers, epochs=self._epochs, sync=sync)

    def _load_producers(self, segments: list[Segment]) -> ProducerTable:
        snapshots = snapshot_offsets(self._disk.names(self.directory))
        return load_producers(self._disk, self.directory, segments, snapshots=snapshots)

    def close(self) -> None:
        """Close the files. Views that readers hold stay valid."""
        if not self._closed:
            with self._offline_on_error("stopping the cleaner of"):
                self._cleaning.stop()
            self._cancel_flush()
            self._seals.cancel(self._chain.segments)
            self._chain.close()
            self._hot.clear()
            self._closed = True

    def delete(self) -> None:
        """Close and delete the directory: out of the way at once, from the disk in a thread."""
        self.close()
        if self._on_disk:
            self._services.remove_directory(self.directory)

    # --- cleaning -----------------------------------------------------------------------------------------------

    @property
    def cleaner_state(self) -> CleanerState:
        """How far the log was compacted."""
        return self._cleaning.state

    def dirty_ratio(self, now_us: int, *, at_once: bool = False) -> float | None:
        """Part of the log's bytes that is new since the last cleaning; None: no cleaning is due."""
        self._check_open()
        with self._offline_on_error("looking at"):
            found = self._due(now_us, at_once=at_once)
        return found[0].dirty_ratio if found is not None else None

    def _due(self, now_us: int, *, at_once: bool) -> tuple[Due, list[SegmentFacts]] | None:
        stable_end = self.last_stable_offset(self.high_watermark)
        return self._cleaning.due(
            self._chain, stable_end=stable_end, now_us=now_us, config=self.config, at_once=at_once
        )

    def begin_cleaning(self, rules: CleaningRules, now_us: int, *, at_once: bool = False) -> CleanJob | None:
        """A job for a thread, when a cleaning is due: ``read_keys``, then for each of its ``groups`` ``rewrite``, here
        ``replace_segments``, in the thread ``settle``; at last ``finish``, and here ``cleaning_finished``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        with self._offline_on_error("beginning to clean"):
            found = self._due(now_us, at_once=at_once)
            if found is None or not self._bridge(self._chain.segments[: found[0].segment_count]):
                return None
            self._seals.forget_below(found[1][-1].end_offset)
            return self._cleaning.begin(
                *found,
                schemas=self._schemas,
                producers=self._producers,
                expired_us=now_us - self._services.producer_id_expiration_ms * 1000,
                rules=rules,
            )

    def replace_segments(self, job: CleanJob, replacement: Replacement) -> bool:
        """Put a segment that ``job`` wrote in the place of the old ones; False when the log has changed meanwhile.
        Who reads an old one goes on undisturbed.

        Raises:
            StorageError: the log directory must go offline.
        """
        if self._closed or job.cancelled:
            return False
        self._cancel_flush()
        with self._offline_on_error("replacing segments of"):
            replaced = self._cleaning.replace(self._chain, replacement)
        if replaced:
            forget_below(self._hot, replacement.end_offset)
        return replaced

    def cleaning_finished(self, job: CleanJob, state: CleanerState | None) -> None:
        """``job`` has ended; ``state`` is what its ``finish`` returned, None when it did not come so far."""
        if self._cleaning.job is not job:
            return
        self._cleaning.finished(state)
        if state is not None:
            # aborted records are gone from there
            self._producers.transactions.forget_below(min(state.end, job.segments[-1].end_offset))

    def is_outdated_for(self, headers: bytes | memoryview, now_us: int) -> bool:
        """Whether a leader's batches show that this replica was away for longer than tombstones and markers are kept:
        it may hold what they deleted, and must begin anew.

        Only what a cleaner wrote shows it: those that a member of the in-sync set is sent were not cleaned before it
        had them. It need not be the first thing that is sent: segments in which a cleaner changed nothing may lie
        before, so an absence counts until the replica has caught up. Below a floor of some seconds the time between
        two fetches would count as absence.
        """
        if self.log_end_offset == self.first_segment_offset:
            return False
        kept_us = max(self.config.delete_retention_ms * 1000, _SHORTEST_ABSENCE_US)
        self._was_away |= now_us - self._last_progress_us > kept_us
        if not self._was_away:
            return False
        try:
            return any(header.flags & Flag.CLEANED for header in unpack_headers(headers))
        except BrokerError:  # the append will say so
            return False

    def caught_up(self, high_watermark: int) -> None:
        """The leader's high watermark is ``high_watermark``: from there on nothing was cleaned."""
        if self._was_away and self.log_end_offset >= high_watermark:
            self._was_away = False

    # --- inside -------------------------------------------------------------------------------------------------

    def _cut_front(self, header: BatchHeader, body: memoryview, start: int) -> tuple[BatchHeader, Buffer]:
        return cut_front(header, body, start, schema=self.schema(header.schema_id))

    def _make_directory(self) -> None:
        self._disk.make_directory(self.directory)
        self._write_partition_file()
        self._on_disk = True
        self._services.moved.add(self)

    def _write_partition_file(self) -> None:
        """Not fsynced before the batches that need it are (``flush``, sealing)."""
        schemas = tuple(TopicSchema(schema_id, message) for schema_id, message in self._schemas.items())
        content = PartitionFile(self.tp.topic, self.tp.partition, self.topic_id, schemas)
        write_partition_file(self._disk, self.directory, content, sync=False)
        self._schemas_stored = True

    def _prelude(self, schema_id: int) -> bytes:
        return self._services.prelude(self._schema_message(schema_id))

    def _schema_message(self, schema_id: int) -> bytes:
        message = self._schemas.get(schema_id)
        if message is None:
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED,
                f"{self.tp}: schema id {schema_id} found, {sorted(self._schemas)} known here",
            )
        return message

    def _prelude_length(self, schema_id: int) -> int:
        return len(self._prelude(schema_id))

    def _check_readable(self, offset: int, start: int) -> None:
        self._check_open()
        if not start <= offset <= self.log_end_offset:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"{self.tp}: offset {offset} found, {start} to {self.log_end_offset} expected",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: the log is closed")

    def _write_if_room(self, doing: str, write: Callable[[], None]) -> bool:
        """False: the disk is full, which other logs may be about to change."""
        with self._offline_on_error(doing):
            try:
                write()
            except OSError as failure:
                if not is_full(failure):
                    raise
                return False
        return True

    def _offline_on_error(self, doing: str) -> AbstractContextManager[None]:
        return self._services.offline_on_error(f"{doing} {self.tp}")
