"""Compaction of one log, in a thread: find the last record of each key, then write segments with only these records.

``CleanJob`` reads sealed segments, which do not change, through its own file descriptors. First it reads the dirty
part: it puts hash and offset of each key into a table with bounded memory, which spills to disk (``key_table``). Then
it rewrites groups of segments, from the log's front on. For each group it copies the newest record of each key into a
new segment, and the log replaces the old segments by the new one (``LogCleaning.replace_segments``, on the event loop).
A reader in the middle of an old segment can finish, because it keeps the old file open.

The job verifies each batch's checksum before it writes the batch again: damaged data must not get a new checksum.

The log may be truncated or deleted, or its front removed, while the job runs. After ``cancel`` the job neither opens
nor renames any file of the log.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, StorageError
from sparklog.record.arrays import empty_batch
from sparklog.record.codec import decode_batch, verify_body_crc
from sparklog.record.compacted_batch import BatchMerger, CompactedBatch, Source, offsets_of
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_header
from sparklog.record.key_hash import KeyHash
from sparklog.record.keys import encode_keys, tombstones
from sparklog.record.schema import parse_schema
from sparklog.storage import segment_swap
from sparklog.storage.aborted_ranges import EndedTransaction
from sparklog.storage.cleaned_segment import CleanedSegmentWriter
from sparklog.storage.cleaning_plan import CLEANER_FILE, CleanerState, CleaningCandidate, SegmentFacts, groups
from sparklog.storage.disk import Disk, is_full, replace_file
from sparklog.storage.formats import encode_state
from sparklog.storage.key_table import SPILL_FILE, KeyTable, SpillFile
from sparklog.storage.producers import ONE_TRANSACTION
from sparklog.storage.segment import DATA_SUFFIX, INDEX_SUFFIX, file_stem

#: The target size, uncompressed, of a batch that is merged from several batches.
_BATCH_BYTES = 1 << 20
#: The number of headers that are read from an index at a time. Each takes 96 bytes until it is yielded.
_HEADERS_AT_ONCE = 8192
_NOTHING = np.empty(0, np.int64)
#: The time by which a thread may be ahead of its permitted rate. A shorter wait would cost more than it delays.
_AHEAD_S = 0.01


class CleaningRules(NamedTuple):
    """The settings of one compaction of a log, from the topic and the broker.

    ``seed`` is a secret number for the hash of the keys. Each compaction has another seed.
    """

    key_columns: tuple[str, ...]
    #: The column of event times. None: the batches' stored timestamps are used.
    event_time: str | None
    config: TopicConfig
    buffer_bytes: int
    #: The limit of bytes read and written together.
    bytes_per_second: int
    seed: int
    #: See ``BatchMerger``.
    keep_times: bool = True


class Replacement(NamedTuple):
    """A new segment, and the base offsets (``bases``) of the old segments that it replaces.

    The ``.swap`` file, which records the decision to replace the old segments, is already on disk (``segment_swap``).
    """

    bases: tuple[int, ...]
    end_offset: int
    batch_count: int
    first: BatchHeader
    last: BatchHeader


class CleaningTally:
    """The counters of one compaction for metrics: bytes, segments, records, keys and tombstones."""

    __slots__ = (
        "bytes_after", "bytes_before", "bytes_read", "bytes_spilled", "deletes", "kept", "keys", "records", "segments",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bytes_read = 0
        #: Bytes of the segments that were rewritten.
        self.bytes_before = 0
        self.bytes_after = 0
        #: Bytes of keys that were written to disk.
        self.bytes_spilled = 0
        self.segments = 0
        self.records = 0
        self.kept = 0
        self.keys = 0
        #: Tombstones and markers that remain.
        self.deletes = 0


class CleanJob:
    """A job that compacts one log.

    ``LogCleaning.begin`` creates the job on the event loop. Then one thread calls ``read_keys``, then ``rewrite`` and
    ``settle`` for each of the ``groups``, then ``finish``. The event loop calls ``swap_in`` between ``rewrite`` and
    ``settle``. ``cancel`` may be called at any time.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        *,
        segments: Sequence[SegmentFacts],
        due: CleaningCandidate,
        state: CleanerState,
        schemas: Mapping[int, bytes],
        aborted: Sequence[EndedTransaction],
        last_batches: frozenset[int],
        rules: CleaningRules,
        may_spill: bool = True,
    ) -> None:
        self.tally = CleaningTally()
        self.due = due
        self.cancelled = False
        #: Whether the disk had no room for a new segment.
        self.out_of_room = False
        #: The offset below which the table has the keys of all records.
        self.map_end = state.end
        self.segments = segments
        self._disk = disk
        self._directory = directory
        self._state = state
        self._schemas = schemas
        self._aborted: dict[int, list[EndedTransaction]] = {}
        for one in aborted:
            self._aborted.setdefault(one.producer_id, []).append(one)
        #: The base offset of the last batch of each known producer.
        self._last_batches = last_batches
        self._rules = rules
        self._hash = KeyHash(rules.seed)
        self._keys = KeyTable(rules.buffer_bytes, open_file=self._spill_file, spend=self._spend)
        self._may_spill = may_spill
        self._pace = _RateLimiter(rules.bytes_per_second)
        self._by_path = threading.Lock()
        self._decided: Replacement | None = None
        self._swapped = False

    def cancel(self) -> None:
        """Stop the job. After this method returns, the job changes no file of the log.

        If the new segment's files already have their final names, the old segments are deleted. If only the decision to
        replace the old segments is on disk, the decision is undone. A call after the end of the job has no effect.

        Raises:
            OSError: the disk failed.
        """
        self._pace.stop()
        with self._by_path:
            self.cancelled = True
            self._settle()

    def _settle(self) -> None:
        decided, self._decided = self._decided, None
        if decided is None:
            return
        if self._swapped:
            segment_swap.finish(self._disk, self._directory, decided.bases)
        else:
            segment_swap.forget(self._disk, self._directory, decided.bases[0])

    # --- keys -----------------------------------------------------------------------------------------------------

    def read_keys(self) -> None:
        """Put the keys of the dirty part of the log into the key table.

        If the table fills its memory and cannot spill to disk, it gets only the first keys.

        Raises:
            OSError, StorageError, BrokerError: the disk failed, its content is damaged, or the job was canceled.
        """
        try:
            for segment in self.segments:
                if segment.end_offset > self._state.end and not self._read_keys_of(segment):
                    break
            self._keys.complete()
        finally:
            self._keys.close()
        self.tally.keys, self.tally.bytes_spilled = len(self._keys), self._keys.spilled_bytes

    def _spill_file(self) -> SpillFile:
        if not self._may_spill:
            raise OSError(errno.ENOSPC, "the remaining room is reserved for new segments")
        with self._by_path:
            self._check_wanted()
            return SpillFile(self._disk, self._directory / SPILL_FILE)

    def _spend(self, count: int) -> None:
        self._pace.spend(count)
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self.cancelled:
            raise StorageError(f"{self._directory}: the cleaning was cancelled")

    def _read_keys_of(self, segment: SegmentFacts) -> bool:
        for header, body in self._batches(segment):
            if self.cancelled:
                return False
            if header.next_offset <= self._state.end:
                continue
            if self._has_records(header):
                records, offsets = self._decoded(header, body)
                keys = encode_keys(records, self._rules.key_columns)
                wanted = offsets >= self._state.end
                if keys.null_count:
                    wanted &= keys.is_valid().to_numpy(zero_copy_only=False)
                if not wanted.all():
                    keys, offsets = keys.filter(pa.array(wanted)), offsets[wanted]
                taken = self._keys.put(self._hash.of(keys), offsets)
                if taken < len(offsets):
                    self.map_end = int(offsets[taken])
                    return False
            self.map_end = header.next_offset
        return True

    # --- new segments ---------------------------------------------------------------------------------------------

    def groups(self) -> list[list[SegmentFacts]]:
        """Return the groups of segments in the order in which ``rewrite`` must be called with them.

        A segment is in a group if its base offset is below one of two offsets. One is ``map_end``: the key table has
        the keys of all records below it. The other is the offset below which tombstones may be removed.
        """
        reached = [segment for segment in self.segments if segment.base_offset < max(self.map_end, self.due.horizon)]
        return groups(reached, segment_bytes=self._rules.config.segment_bytes)

    def rewrite(self, group: Sequence[SegmentFacts]) -> Replacement | None:
        """Write a new segment that replaces the segments of ``group``, and record this replacement on disk.

        Return None if the compaction of the group would change nothing, or if the job is canceled.

        Raises:
            OSError: the disk failed or is full.
            StorageError, BrokerError: the data on disk is damaged.
        """
        base = group[0].base_offset
        try:
            writer = CleanedSegmentWriter(self._disk, self._directory, base, self._schemas[group[0].schema_id])
            try:
                changed = self._copy(group, writer)
                if self.cancelled or not changed:
                    segment_swap.remove_cleaned(self._disk, self._directory, base)
                    return None
                writer.complete()
            finally:
                writer.close()
            return self._decide(group, writer)
        except OSError as failure:
            if self.cancelled:
                return None
            self.out_of_room = is_full(failure)
            self._discard(base)
            raise
        except (BrokerError, StorageError):
            self._discard(base)
            raise

    def _discard(self, base: int) -> None:
        """Remove the new files, and undo a decision that failed after it was written.

        Otherwise the next start would carry out the decision, although the log may have changed since then.
        """
        with self._by_path, contextlib.suppress(OSError):
            if self.cancelled:
                return
            if segment_swap.is_decided(self._disk, self._directory, base):
                segment_swap.forget(self._disk, self._directory, base)
            else:
                segment_swap.remove_cleaned(self._disk, self._directory, base)

    def _copy(self, group: Sequence[SegmentFacts], writer: CleanedSegmentWriter) -> bool:
        """Copy the remaining records of ``group``. Return whether anything differs from the old segments."""
        first = group[0]
        schema = parse_schema(self._schemas[first.schema_id])
        target = min(_BATCH_BYTES, self._rules.config.max_message_bytes)
        rules = self._rules
        merger = BatchMerger(schema, target_bytes=target, event_time=rules.event_time, keep_times=rules.keep_times)
        changed = len(group) > 1
        batches = 0
        for segment in group:
            for header, body in self._batches(segment):
                if self.cancelled:
                    return False
                batches += 1
                marker = bool(header.flags & Flag.CONTROL)
                if marker and header.base_offset >= self.due.horizon:
                    self.tally.deletes += 1
                    made = merger.verbatim(header, body)
                else:
                    source = self._left(header, body, schema)
                    changed |= marker or not source.is_whole or bool(header.flags & Flag.TRANSACTIONAL)
                    # A marker leaves the producers of many transactions in the table of producers.
                    lasts = header.producer_epoch > ONE_TRANSACTION or not header.flags & Flag.TRANSACTIONAL
                    alone = header.base_offset in self._last_batches and lasts
                    made = merger.add(source, alone=alone and header.producer_id >= 0)
                self._write(writer, made)
        self._write(writer, merger.flush())
        if not changed and writer.count == batches:
            return False
        self.tally.segments += len(group)
        self.tally.bytes_before += sum(segment.size_bytes for segment in group)
        self.tally.bytes_after += writer.size
        return True

    def _write(self, writer: CleanedSegmentWriter, made: Sequence[CompactedBatch]) -> None:
        for batch in made:
            writer.add(batch)
            self._pace.spend(batch.header.stored_bytes)

    def _left(self, header: BatchHeader, body: memoryview, schema: pa.Schema) -> Source:
        """Return the records of a batch that the compaction keeps."""
        if not self._has_records(header):
            return Source(header, body, empty_batch(schema), _NOTHING)
        records, offsets = self._decoded(header, body)
        keys = encode_keys(records, self._rules.key_columns)
        stays = self._keys.newest(self._hash.of(keys)) <= offsets
        if keys.null_count:  # Records without a key are from before the topic was compacted. The cleaner keeps them.
            stays |= keys.is_null().to_numpy(zero_copy_only=False)
        deletes = tombstones(records, self._rules.key_columns)
        if deletes is not None:
            stays &= ~deletes | (offsets >= self.due.horizon)
            self.tally.deletes += int((stays & deletes).sum())
        self.tally.records += len(offsets)
        count = int(stays.sum())
        self.tally.kept += count
        if count == len(offsets):
            return Source(header, body, records, offsets)
        return Source(header, body, records.filter(pa.array(stays)), offsets[stays])

    def _has_records(self, header: BatchHeader) -> bool:
        if not header.record_count or header.flags & Flag.CONTROL:
            return False
        return not header.flags & Flag.TRANSACTIONAL or not any(
            one.first_offset <= header.base_offset <= one.last_offset
            for one in self._aborted.get(header.producer_id, ())
        )

    def _decide(self, group: Sequence[SegmentFacts], writer: CleanedSegmentWriter) -> Replacement | None:
        assert writer.first is not None and writer.last is not None
        bases = tuple(segment.base_offset for segment in group)
        found = Replacement(bases, group[-1].end_offset, writer.count, writer.first, writer.last)
        assert found.last.next_offset == found.end_offset, (found, group)
        with self._by_path:
            if self.cancelled:
                return None
            segment_swap.decide(self._disk, self._directory, bases, end_offset=found.end_offset)
            self._decided = found
            return found

    def swap_in(self) -> None:
        """Rename the new segment's files to their final names. Call this on the event loop. Raises OSError."""
        with self._by_path:
            assert self._decided is not None and not self.cancelled
            segment_swap.rename(self._disk, self._directory, self._decided.bases[0])
            self._swapped = True

    def settle(self) -> None:
        """Delete the files of the old segments, which the log has already replaced by the new segment.

        Call this in the thread that runs the job. Raises OSError.
        """
        with self._by_path:
            self._settle()
            self._swapped = False

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, now_ms: int) -> CleanerState | None:
        """Write the log's new compaction state durably, and return it.

        Return None if the job was canceled. Raises OSError.
        """
        state = self._state.cleaned(self.map_end, now_ms, horizon=self.due.horizon, deletes=self.tally.deletes)
        with self._by_path:
            if self.cancelled:
                return None
            replace_file(self._disk, self._directory / CLEANER_FILE, encode_state(state))
            return state

    # --- reading --------------------------------------------------------------------------------------------------

    def _batches(self, segment: SegmentFacts) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield header and stored bytes of each batch. The bytes are views of the memory-mapped file."""
        stem = self._directory / file_stem(segment.base_offset)
        index = stem.with_name(stem.name + INDEX_SUFFIX)
        count = self._headers_in(index)
        last = unpack_header(self._read(index, max(0, count - 1), 1))
        if last.next_offset != segment.end_offset:
            raise StorageError(f"{stem}{INDEX_SUFFIX}: does not end at offset {segment.end_offset}")
        size = last.position + last.stored_bytes
        handle = self._disk.open(stem.with_name(stem.name + DATA_SUFFIX))
        try:
            data = self._disk.map(handle, size)
        finally:
            self._disk.close(handle)
        # A segment of small batches may have millions of headers, so they are not all read at once.
        for first in range(0, count, _HEADERS_AT_ONCE):
            packed = self._read(index, first, min(_HEADERS_AT_ONCE, count - first))
            for at in range(0, len(packed), HEADER_BYTES):
                header = unpack_header(packed, at)
                self._pace.spend(header.stored_bytes)
                self.tally.bytes_read += header.stored_bytes
                yield header, data[header.position : header.position + header.stored_bytes]

    def _headers_in(self, index: Path) -> int:
        handle = self._disk.open(index)
        try:
            return self._disk.size(handle) // HEADER_BYTES
        finally:
            self._disk.close(handle)

    def _read(self, index: Path, first: int, count: int) -> bytes:
        handle = self._disk.open(index)
        try:
            return self._disk.read(handle, count * HEADER_BYTES, first * HEADER_BYTES)
        finally:
            self._disk.close(handle)

    def _decoded(self, header: BatchHeader, body: memoryview) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        schema = parse_schema(self._schemas[header.schema_id])
        stored = body[: header.length + header.offset_array_length]
        verify_body_crc(header, stored)
        return decode_batch(header, stored, schema, verify_crc=False), offsets_of(header, body)


class _RateLimiter:
    """A limiter of the bytes per second of one thread. Any thread may call ``stop``, even while that thread waits."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._stopped = threading.Event()
        self._paid_until_s = time.monotonic()

    def spend(self, count: int) -> None:
        """Wait until ``count`` more bytes are within the rate. Idle time does not allow a later burst."""
        now_s = time.monotonic()
        self._paid_until_s = max(self._paid_until_s, now_s) + count / self._rate
        if self._paid_until_s - now_s > _AHEAD_S:
            self._stopped.wait(self._paid_until_s - now_s)

    def stop(self) -> None:
        """Stop all waits, now and later. Any thread may call it."""
        self._stopped.set()
