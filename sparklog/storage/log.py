"""One replica's log: a partition directory of segments, appended at the end, read anywhere, cut when it must be.

Owned by the event loop of its broker: nothing here is safe to call from another thread, except ``SealJob.run`` and
what is handed to ``remove_later``. Appends go to the page cache; durability comes from replication, and from fsync when
a segment is sealed, on ``flush`` and on a clean stop.

Invariants: log start <= high watermark <= log end; segments follow each other without gap; only the last segment is
appended to; everything below the recovery point is fsynced; the leader epochs of the batches do not fall.

The directory and its files are made by the first append, so that an empty partition costs nothing on disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd, OffsetRange, TopicPartition, TopicSchema
from sparklog.record.footer import arrow_prelude
from sparklog.record.header import BatchHeader
from sparklog.storage import retention
from sparklog.storage.append_plan import NO_MAXIMUM, LogTail, Run, plan_follower_append, plan_leader_append
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.disk import Buffer, Disk, is_full, replace_file
from sparklog.storage.epochs import EPOCHS_FILE, EpochCache, EpochFile
from sparklog.storage.formats import encode_state
from sparklog.storage.hot_batches import HotBatches, HotLog, forget_from
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, write_partition_file
from sparklog.storage.producers import (
    SNAPSHOT_SUFFIX,
    Entries,
    ProducerEntry,
    ProducerTable,
    check_sequence,
    to_snapshot,
    with_batch,
)
from sparklog.storage.recovery import RecoveredLog, load_producers, recover_log, snapshot_offsets
from sparklog.storage.sealing import SealJob
from sparklog.storage.segment import DELETED_SUFFIX, Segment, file_stem, segment_at

#: Producer snapshots kept: a truncation above the high watermark finds one at or below its end.
_KEPT_SNAPSHOTS = 3


class LogSlice(NamedTuple):
    """Whole batches read from a log. ``bodies`` back to back are ``body_bytes`` long; ``headers`` are packed."""

    headers: bytes
    bodies: list[Buffer]
    body_bytes: int
    batch_count: int
    #: where to read on; the offset asked for when there is nothing
    next_offset: int


@dataclass(slots=True)
class LogServices:
    """What the logs of one log directory share; owned by ``LogDirectory``."""

    disk: Disk
    files: OpenFiles
    hot: HotBatches
    #: Removes files that were renamed out of the way, in a thread.
    remove_later: Callable[[Sequence[Path]], None]
    #: Takes a partition directory out of sight and removes it.
    remove_directory: Callable[[Path], None]
    #: Writes the checkpoint; returns when it is durable.
    checkpoint_now: Callable[[], None]
    #: The directory is broken and must go offline.
    failed: Callable[[str], None]
    producer_id_expiration_ms: int = 86_400_000
    preludes: dict[bytes, bytes] = field(default_factory=dict)


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
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.high_watermark = 0
        #: everything below is fsynced
        self.recovery_point = 0
        #: what the last open had to cut, for people
        self.findings: tuple[str, ...] = ()
        self._services = services
        self._disk = services.disk
        self._schemas = {schema.schema_id: schema.message for schema in schemas}
        self._segments: list[Segment] = []
        #: below the log start; their files go with the next checkpoint
        self._retired: list[Segment] = []
        self._epochs = EpochCache()
        self._producers = ProducerTable()
        self._hot: HotLog = {}
        self._on_disk = False
        self._closed = False
        #: readers may have mapped the files up to here
        self._served_end = 0
        #: segments at the front that are sealed
        self._sealed_prefix = 0
        self._sealing: dict[int, SealJob] = {}
        #: producers as they were at the base offset of each segment not yet sealed up to
        self._rolled_producers: dict[int, Entries] = {}
        self._snapshots: list[int] = []
        self._unflushed_since_us = -1
        self._unflushed_records = 0

    def __repr__(self) -> str:
        return f"Log({self.tp}, [{self.log_start_offset}, {self.log_end_offset}), hw {self.high_watermark})"

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> None:
        """Open what is in the directory. Called once, before anything else.

        Raises:
            NewerFormatError, StorageError: as ``recover_log``.
        """
        recovery_point = checkpoint.recovery_point if checkpoint is not None else 0
        found: RecoveredLog = recover_log(
            self._disk,
            self.directory,
            schemas=self._schemas,
            files=self._services.files,
            recovery_point=recovery_point,
            log_start_offset=checkpoint.log_start_offset if checkpoint is not None else 0,
            thorough=not (clean or trusted),
        )
        self._on_disk = True
        self._segments = found.segments
        self._epochs = found.epochs
        self._producers = found.producers
        self.findings = found.findings
        self._snapshots = sorted(snapshot_offsets(self._disk, self.directory))
        start = checkpoint.log_start_offset if checkpoint is not None else 0
        if self._segments:
            self.log_end_offset = self._segments[-1].end_offset
            self.log_start_offset = min(max(start, self._segments[0].base_offset), self.log_end_offset)
        else:
            self.log_start_offset = self.log_end_offset = start
        high_watermark = checkpoint.high_watermark if checkpoint is not None else 0
        self.high_watermark = min(max(high_watermark, self.log_start_offset), self.log_end_offset)
        self.recovery_point = min(recovery_point, self.log_end_offset)
        # a reader of the earlier process may still have any of this mapped
        self._served_end = self.log_end_offset
        self._advance_sealed_prefix()

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """Leader epoch of the last batch, -1 when the log is empty."""
        return self._epochs.last_epoch

    @property
    def first_segment_offset(self) -> int:
        """Where an out-of-range follower begins, so that its files become equal; at or below the log start."""
        return self._segments[0].base_offset if self._segments else self.log_end_offset

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def schema_ids(self) -> tuple[int, ...]:
        return tuple(self._schemas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Oldest first; to look at."""
        return tuple(self._segments)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """The largest leader epoch <= ``epoch`` in the log and its exclusive end; (-1, log start) if none."""
        return self._epochs.end_of_epoch(epoch, self.log_start_offset, log_end_offset=self.log_end_offset)

    def checkpoint(self) -> PartitionCheckpoint:
        return PartitionCheckpoint(
            self.tp.topic,
            self.tp.partition,
            self.topic_id,
            self.high_watermark,
            self.recovery_point,
            self.log_start_offset,
        )

    def set_high_watermark(self, high_watermark: int) -> None:
        """Everything below is committed and may be served; bounded by the log's ends."""
        self.high_watermark = min(max(high_watermark, self.log_start_offset), self.log_end_offset)
        self._served_end = max(self._served_end, self.high_watermark)

    def add_schema(self, schema: TopicSchema) -> None:
        """Learn a schema before batches of it come. Known ids are left as they are."""
        if schema.schema_id not in self._schemas:
            self._schemas[schema.schema_id] = schema.message
            if self._on_disk:
                with self._offline_on_error("storing a schema"):
                    self._write_partition_file(sync=False)

    # --- append -------------------------------------------------------------------------------------------------

    def append_as_leader(
        self, batches: Sequence[tuple[BatchHeader, Buffer]], *, leader_epoch: int, now_us: int
    ) -> OffsetRange:
        """Append checked batches; return the offsets of the first to the last of them.

        Batches that are already in the log are not appended again: the earlier offsets are returned for them.

        Raises:
            BrokerError: nothing was appended. INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER,
                DUPLICATE_SEQUENCE_NUMBER, FENCED_LEADER_EPOCH, CORRUPT_MESSAGE, SCHEMA_OUTDATED; KAFKA_STORAGE_ERROR
                when the disk is full.
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if leader_epoch < self._epochs.last_epoch:
            raise BrokerError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"{self.tp}: leader epoch {leader_epoch} found, {self._epochs.last_epoch} is in the log",
            )
        fresh, known = self._without_duplicates(batches)
        start = self.log_end_offset
        if fresh:
            runs = plan_leader_append(
                self._tail(reopen_sealed=False),
                fresh,
                leader_epoch=leader_epoch,
                now_us=now_us,
                config=self.config,
                prelude_length=self._prelude_length,
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
            self._tail(reopen_sealed=True), headers, bodies=bodies, prelude_length=self._prelude_length
        )
        if runs:
            self._append(runs, runs[-1].headers[-1].append_time)
        return self.log_end_offset

    def duplicate_count(self, batches: Sequence[tuple[BatchHeader, Buffer]]) -> int:
        """How many of the first batches are in the log already: a retry is answered as such before its content is
        checked against a schema that may have moved on. Raises BrokerError as ``append_as_leader``."""
        return len(self._without_duplicates(batches)[1])

    def _without_duplicates(
        self, batches: Sequence[tuple[BatchHeader, Buffer]]
    ) -> tuple[Sequence[tuple[BatchHeader, Buffer]], list[OffsetRange]]:
        """Split off what is in the log already: a prefix, since a retry begins with the oldest batch."""
        known: list[OffsetRange] = []
        staged: dict[int, ProducerEntry] = {}
        for header, _ in batches:
            producer_id = header.producer_id
            if producer_id < 0 or header.first_sequence < 0:
                continue
            entry = staged.get(producer_id) or self._producers.get(producer_id)
            earlier = check_sequence(entry, header)
            if earlier is None:
                if len(batches) > 1:
                    staged[producer_id] = with_batch(entry, header)
            elif staged:
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST,
                    f"{self.tp}: a known batch of producer {producer_id} follows a new one in one request",
                )
            else:
                known.append(earlier)
        return (batches[len(known) :] if known else batches), known

    def _tail(self, *, reopen_sealed: bool) -> LogTail:
        """``reopen_sealed``: a follower goes on in a sealed segment if its leader did; a leader begins a new one."""
        if not self._segments:
            return LogTail(self.log_end_offset, self._epochs.last_epoch, -1, NO_MAXIMUM, -1, -1)
        last = self._segments[-1]
        appendable = reopen_sealed or not last.sealed
        return LogTail(
            self.log_end_offset,
            self._epochs.last_epoch,
            last.data_size if appendable else -1,
            last.running_max,
            last.first_append_us,
            last.schema_id,
        )

    def _append(self, runs: list[Run], now_us: int) -> None:
        """Carry out a plan whole, or leave the log as it was."""
        segments, count = len(self._segments), self._segments[-1].count if self._segments else 0
        try:
            if not self._on_disk:
                self._make_directory()
            for run in runs:
                self._append_run(run)
        except OSError as failure:
            self._undo_append(segments, count, failure)
            if is_full(failure):
                raise BrokerError(
                    ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: no room left in {self.directory.parent}: {failure}"
                ) from failure
            raise self._offline(f"appending to {self.tp}: {failure}") from failure
        except StorageError as failure:
            raise self._offline(str(failure)) from failure
        hot = self._services.hot
        for new_segment, headers, packed, data in runs:
            if new_segment and self._segments[0].base_offset != headers[0].base_offset:
                self._producers.expire(now_us - self._services.producer_id_expiration_ms * 1000)
                self._rolled_producers[headers[0].base_offset] = self._producers.entries()
            for header, packed_header, body in zip(headers, packed, data, strict=True):
                self._epochs.assign(header.leader_epoch, header.base_offset)
                self._producers.record(header)
                hot.add(self._hot, header.base_offset, packed_header, body)
                self._unflushed_records += header.record_count
        if self.log_start_offset == self.log_end_offset:
            # an empty follower took its leader's first segment, which may begin below
            self.log_start_offset = min(self.log_start_offset, runs[0].headers[0].base_offset)
        self.log_end_offset = runs[-1].headers[-1].next_offset
        self.high_watermark = min(self.high_watermark, self.log_end_offset)
        if self._unflushed_since_us < 0:
            self._unflushed_since_us = now_us
        if 0 < self.config.flush_messages <= self._unflushed_records:
            self.flush()

    def _append_run(self, run: Run) -> None:
        first = run.headers[0]
        if run.new_segment:
            segment = Segment(self._disk, self.directory, base_offset=first.base_offset, files=self._services.files)
            segment.append(run.headers, packed=run.packed, data=run.data, prelude=self._prelude(first.schema_id))
            self._segments.append(segment)
            return
        segment = self._segments[-1]
        if segment.sealed:
            self._reopen_sealed(segment)
        segment.append(run.headers, packed=run.packed, data=run.data, prelude=b"")

    def _reopen_sealed(self, segment: Segment) -> None:
        """The leader did not roll where an earlier one did: go on behind the data, without the footer."""
        segment.truncate(segment.count, in_place=False, durable=True)
        self._sealed_prefix = min(self._sealed_prefix, len(self._segments) - 1)

    def _undo_append(self, segments: int, count: int, failure: OSError) -> None:
        """Segments cut themselves back; take back what the runs before the failed one appended."""
        try:
            while len(self._segments) > segments:
                self._remove_segment(self._segments.pop())
            if segments and self._segments[-1].count > count:
                self._segments[-1].truncate(count, in_place=True)
        except (OSError, StorageError) as second:
            raise self._offline(
                f"an append to {self.tp} failed ({failure}) and could not be cut back ({second})"
            ) from failure

    # --- read ---------------------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int, end_offset: int) -> LogSlice:
        """Whole batches from the one that holds ``offset`` on, within one segment.

        At least one batch if there is one that ends at or below ``end_offset``, else as many as fit ``max_bytes``.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE outside [log start, log end].
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"{self.tp}: offset {offset} found, {self.log_start_offset} to {self.log_end_offset} expected",
            )
        if offset >= end_offset or offset == self.log_end_offset:
            return LogSlice(b"", [], 0, 0, offset)
        segment = self._segments[-1]
        if offset < segment.base_offset:
            segment = self._segments[segment_at(self._segments, offset)]
        try:
            first = segment.find(offset)
            last = segment.reach(first, max_bytes, end_offset=end_offset)
            if first >= last:
                return LogSlice(b"", [], 0, 0, offset)
            bases = segment.bases()
            next_offset = bases[last] if last < segment.count else segment.end_offset
            hot = self._hot
            if bases[first] in hot:
                found = [hot[base] for base in bases[first:last]]
                bodies: list[Buffer] = [body for _, body in found]
                headers = b"".join([header for header, _ in found])
            else:
                headers, body = segment.read(first, last)
                bodies = [body]
            size = segment.position_of(last) - segment.position_of(first)
        except (OSError, StorageError) as failure:
            raise self._offline(f"reading {self.tp}: {failure}") from failure
        return LogSlice(headers, bodies, size, last - first, next_offset)

    def offset_for_time(self, timestamp_us: int, *, end_offset: int) -> tuple[int, int] | None:
        """Base offset and greatest timestamp of the first batch below ``end_offset`` that holds a record at or after
        ``timestamp_us``; None when there is none."""
        self._check_open()
        try:
            for segment in self._segments:
                if segment.base_offset >= end_offset:
                    break
                header = segment.first_at_or_after(timestamp_us, log_start_offset=self.log_start_offset)
                if header is not None:
                    offset = max(header.base_offset, self.log_start_offset)
                    return (offset, header.max_timestamp) if offset < end_offset else None
        except (OSError, StorageError) as failure:
            raise self._offline(f"reading {self.tp}: {failure}") from failure
        return None

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
        at = segment_at(self._segments, offset)
        if at < 0:
            self.restart_at(offset)
            return offset
        with self._offline_on_error("truncating"):
            segment = self._segments[at]
            keep = segment.find(offset)
            end = segment.bases()[keep]
            if keep == 0 and at == 0:
                self.restart_at(end)
                return end
            last = segment if keep else self._segments[at - 1]
            in_place = end >= self._served_end and not last.sealed
            durable = last.base_offset < self.recovery_point
            self._prepare_cut(end)
            self._cancel_seals(at if keep else at - 1)
            for doomed in reversed(self._segments[at + (keep > 0) :]):
                self._remove_segment(doomed)
                self._segments.pop()
            if keep:
                last.truncate(keep, in_place=in_place, durable=durable)
            elif not last.sealed:
                # its seal was cancelled: a part of the footer may be there
                last.truncate(last.count, in_place=in_place, durable=durable)
            self._forget_from(end)
            self._producers = load_producers(self._disk, self.directory, self._segments)
        return end

    def restart_at(self, offset: int) -> None:
        """Throw everything away; the log is empty at ``offset``.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        with self._offline_on_error("restarting"):
            self._prepare_cut(0)
            self._cancel_seals(0)
            while self._segments:
                self._remove_segment(self._segments[-1])
                self._segments.pop()
            self._remove_retired()
            self._forget_from(-1)
            self.log_start_offset = self.log_end_offset = offset
            self.high_watermark = self._served_end = offset
            self._producers.clear()

    def advance_log_start(self, offset: int) -> int:
        """Raise the log start to ``offset``, at most the high watermark; return the log start.

        The segments wholly below leave the log at once. Their files go when a checkpoint has made the new log start
        durable (``delete_retired``): a log whose first segment is missing in part must not be taken for a damaged one.
        """
        self._check_open()
        start = min(offset, self.high_watermark)
        if start <= self.log_start_offset:
            return self.log_start_offset
        self.log_start_offset = start
        while len(self._segments) > 1 and self._segments[0].end_offset <= start:
            segment = self._segments.pop(0)
            self._cancel_seal(segment)
            segment.close()
            self._retired.append(segment)
            self._sealed_prefix = max(0, self._sealed_prefix - 1)
        self._advance_sealed_prefix()
        self._epochs.advance_start(self._segments[0].base_offset)
        return start

    def delete_retired(self, durable_start: int) -> None:
        """The checkpoint on disk has ``durable_start`` for the log start: delete the files of segments below it.

        Raises:
            StorageError: the log directory must go offline.
        """
        doomed: list[Path] = []
        with self._offline_on_error("deleting segments"):
            while self._retired and self._retired[0].end_offset <= durable_start:
                doomed.extend(self._retired.pop(0).mark_deleted())
        self._services.remove_later(doomed)

    def apply_retention(self, now_us: int) -> int:
        """Let go of the sealed segments that ``retention.ms`` and ``retention.bytes`` allow; return how many."""
        if "delete" not in self.config.cleanup_policy:
            return 0
        sealed = [
            retention.SealedSegment(segment.size_bytes, segment.running_max)
            for segment in self._segments[: min(self._sealed_prefix, len(self._segments) - 1)]
        ]
        count = retention.deletable(
            sealed,
            log_size_bytes=self.size_bytes,
            now_us=now_us,
            retention_ms=self.config.retention_ms,
            retention_bytes=self.config.retention_bytes,
        )
        if count:
            self.advance_log_start(self._segments[count].base_offset)
        return count

    def _forget_from(self, end: int) -> None:
        """The segments end at ``end`` now: so does everything derived from them."""
        forget_from(self._hot, end)
        self._epochs.truncate(end)
        self._rolled_producers = {base: entries for base, entries in self._rolled_producers.items() if base <= end}
        if self._on_disk:
            self._remove_newer_state(end)
        self._sealed_prefix = 0
        self._advance_sealed_prefix()
        self.log_end_offset = end
        self.log_start_offset = min(self.log_start_offset, end)
        self.high_watermark = min(self.high_watermark, end)
        self._served_end = min(self._served_end, end)

    def _remove_newer_state(self, end: int) -> None:
        """Remove snapshots and epochs beyond ``end``, durably: what is appended next must not meet them again.

        The directory is asked, not this object: a cancelled seal may have got as far as writing them.
        """
        stale = [self._snapshot_path(offset) for offset in snapshot_offsets(self._disk, self.directory) if offset > end]
        self._snapshots = [offset for offset in self._snapshots if offset <= end]
        if self._disk.exists(self.directory / EPOCHS_FILE):
            stale.append(self.directory / EPOCHS_FILE)
        for path in stale:
            self._disk.remove(path)
        if stale:
            self._disk.sync_directory(self.directory)

    def _remove_retired(self) -> None:
        """At once, since the log may now go where they were."""
        while self._retired:
            self._remove_segment(self._retired.pop())
        for name in self._disk.names(self.directory) if self._on_disk else []:
            if name.endswith(DELETED_SUFFIX):
                # a removal in the thread may be faster
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(self.directory / name)

    def _remove_segment(self, segment: Segment) -> None:
        for path in segment.mark_deleted():
            self._disk.remove(path)

    def _prepare_cut(self, end: int) -> None:
        """Before a cut to ``end`` the checkpoint on disk must not claim more than will be left.

        What is appended next above ``end`` is not fsynced, whatever was there before; and a log shorter than its
        checkpoint is taken for a damaged one.
        """
        if end < max(self.high_watermark, self.recovery_point):
            self.high_watermark = min(self.high_watermark, end)
            self.recovery_point = min(self.recovery_point, end)
            self._services.checkpoint_now()

    # --- sealing and durability ---------------------------------------------------------------------------------

    def seals_due(self) -> list[SealJob]:
        """Jobs for the rolled segments that are committed by now: run each in a thread, then ``seal_finished``.

        Cheap when there are none. To be asked when the high watermark moved and from time to time: a job that found
        the disk full is due again.
        """
        jobs = []
        for segment in self._segments[self._sealed_prefix : -1]:
            if segment.end_offset > self.high_watermark:
                break
            if segment.sealed or segment.base_offset in self._sealing:
                continue
            end = segment.end_offset
            job = SealJob(
                segment,
                schema_message=self._schemas[segment.schema_id],
                producers=self._rolled_producers.get(end),
                epochs=EpochFile(tuple(entry for entry in self._epochs.entries if entry[1] < end), end),
            )
            self._sealing[segment.base_offset] = job
            jobs.append(job)
        return jobs

    def seal_finished(self, job: SealJob) -> None:
        """``job.run`` returned (when it raised, the directory goes offline instead)."""
        if job.cancelled or self._closed:
            return
        del self._sealing[job.segment.base_offset]
        if not job.done:
            return
        job.segment.sealed = True
        if self._rolled_producers.pop(job.end_offset, None) is not None:
            self._snapshots = sorted({*self._snapshots, job.end_offset})
        self._advance_sealed_prefix()
        if self._sealed_prefix:
            self.recovery_point = max(self.recovery_point, self._segments[self._sealed_prefix - 1].end_offset)
        self._services.remove_later([self._snapshot_path(old) for old in self._snapshots[:-_KEPT_SNAPSHOTS]])
        del self._snapshots[:-_KEPT_SNAPSHOTS]

    def flush(self) -> None:
        """fsync everything up to the log end. Blocks for as long as the disk takes.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        if self.recovery_point >= self.log_end_offset:
            return
        with self._offline_on_error("flushing"):
            for segment in self._segments:
                if segment.end_offset > self.recovery_point:
                    segment.sync()
            handle = self._disk.open(self.directory / PARTITION_FILE)
            try:
                self._disk.sync(handle)
            finally:
                self._disk.close(handle)
            self._disk.sync_directory(self.directory)
            self._disk.sync_directory(self.directory.parent)
        self.recovery_point = self.log_end_offset
        self._unflushed_since_us = -1
        self._unflushed_records = 0

    def flush_if_due(self, now_us: int) -> bool:
        """``flush`` when ``flush.ms`` have passed since the oldest append that was not; return whether it did."""
        waited_us = now_us - self._unflushed_since_us
        if self._unflushed_since_us < 0 or not 0 < self.config.flush_ms * 1000 <= waited_us:
            return False
        self.flush()
        return True

    def prepare_clean_stop(self) -> None:
        """Make everything durable, and the next open quick. Blocks.

        Raises:
            StorageError: the log directory must go offline.
        """
        self._check_open()
        self._cancel_seals(0)
        if not self._on_disk:
            return
        self.flush()
        end = self.log_end_offset
        with self._offline_on_error("writing the state of"):
            if len(self._producers) and end not in self._snapshots:
                snapshot = to_snapshot(self._producers.entries(), end)
                replace_file(self._disk, self._snapshot_path(end), encode_state(snapshot))
                self._snapshots.append(end)
            epochs = EpochFile(self._epochs.entries, end)
            replace_file(self._disk, self.directory / EPOCHS_FILE, encode_state(epochs))

    def close(self) -> None:
        """Close the files. Views that readers hold stay valid."""
        if not self._closed:
            self._cancel_seals(0)
            for segment in self._segments:
                segment.close()
            self._hot.clear()
            self._closed = True

    def delete(self) -> None:
        """Close and delete the directory: out of the way at once, from the disk in a thread."""
        self.close()
        if self._on_disk:
            self._services.remove_directory(self.directory)

    # --- inside -------------------------------------------------------------------------------------------------

    def _advance_sealed_prefix(self) -> None:
        while self._sealed_prefix < len(self._segments) and self._segments[self._sealed_prefix].sealed:
            self._sealed_prefix += 1

    def _cancel_seals(self, first: int) -> None:
        for segment in self._segments[first:]:
            self._cancel_seal(segment)

    def _cancel_seal(self, segment: Segment) -> None:
        job = self._sealing.pop(segment.base_offset, None)
        if job is not None:
            job.cancel()

    def _make_directory(self) -> None:
        self._disk.make_directory(self.directory)
        self._write_partition_file(sync=False)
        self._on_disk = True

    def _write_partition_file(self, *, sync: bool) -> None:
        schemas = tuple(TopicSchema(schema_id, message) for schema_id, message in self._schemas.items())
        content = PartitionFile(self.tp.topic, self.tp.partition, self.topic_id, schemas)
        write_partition_file(self._disk, self.directory, content, sync=sync)

    def _snapshot_path(self, offset: int) -> Path:
        return self.directory / (file_stem(offset) + SNAPSHOT_SUFFIX)

    def _prelude(self, schema_id: int) -> bytes:
        message = self._schemas.get(schema_id)
        if message is None:
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED,
                f"{self.tp}: schema id {schema_id} found, {sorted(self._schemas)} known here",
            )
        preludes = self._services.preludes
        if message not in preludes:
            preludes[message] = arrow_prelude(message)
        return preludes[message]

    def _prelude_length(self, schema_id: int) -> int:
        return len(self._prelude(schema_id))

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: the log is closed")

    def _offline(self, detail: str) -> StorageError:
        self._services.failed(detail)
        return StorageError(detail)

    def _offline_on_error(self, doing: str) -> _OfflineOnError:
        return _OfflineOnError(self, doing)


class _OfflineOnError:
    """Turns the disk's errors into a StorageError and takes the directory offline."""

    def __init__(self, log: Log, doing: str) -> None:
        self._log = log
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, StorageError)):
            raise self._log._offline(f"{self._doing} {self._log.tp}: {error}") from error
