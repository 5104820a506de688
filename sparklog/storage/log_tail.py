"""The end of one log: appends, and the state that is derived from the batches.

Leader and follower append in the same way. A plan (``append_plan``) says what to write, before a byte is written.
``LogTail`` carries out the whole plan or leaves the log unchanged. First it writes the segments. Then it updates the
derived state: leader epochs, producers and transactions, and the newest batches in memory. A single plain batch needs
no plan (``append_fast_path``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sparklog.record.compacted_batch import cut_front
from sparklog.record.header import BatchHeader
from sparklog.storage.append_plan import (
    NO_MAXIMUM,
    AppendPoint,
    SegmentWrite,
    plan_follower_append,
    plan_leader_append,
)
from sparklog.storage.batch_cache import CachedBatch, HotLog, drop_below, drop_from
from sparklog.storage.disk import Buffer
from sparklog.storage.epochs import EpochCache
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.producers import ProducerTable
from sparklog.storage.rebuild_state import load_producers, snapshot_offsets
from sparklog.storage.recovery import RecoveredLog
from sparklog.storage.segment import Segment
from sparklog.storage.tombstone_window import TombstoneWindow


class LogTail:
    """The part of a ``Log`` that appends batches and keeps the state that is derived from them.

    This state is the leader epochs, the producers and transactions, and the newest batches in memory. Not thread-safe:
    use it only on the broker's event loop.

    Invariant: the leader epochs of the batches never decrease.
    """

    __slots__ = ("_files", "_offsets", "epochs", "hot", "producers", "tombstone_window")

    def __init__(self, files: LogFiles, offsets: LogOffsets) -> None:
        self._files = files
        self._offsets = offsets
        self.epochs = EpochCache()
        self.producers = ProducerTable()
        self.producers.count_in(files.services.producer_count)
        #: The newest batches, in memory.
        self.hot: HotLog = {}
        self.tombstone_window = TombstoneWindow()

    def recovered(self, found: RecoveredLog) -> None:
        """Set the state that recovery derived from the batches."""
        self.epochs = found.epochs
        self._replace_producers(found.producers)
        if found.segments:
            self.tombstone_window.progressed(found.segments[-1].last_append_us)

    def close(self) -> None:
        """Forget this log's batches in memory, and remove its producer ids from the count that all logs share."""
        self.hot.clear()
        self.producers.count_in(None)

    # --- append ---------------------------------------------------------------------------------------------------

    def append_as_leader(
        self,
        batches: Sequence[tuple[BatchHeader, Buffer]],
        *,
        leader_epoch: int,
        now_us: int,
        placed: bool,
        roll: bool,
    ) -> int:
        """Append batches that are not in the log yet, and return the number of their records.

        With ``placed`` the batches keep their offsets and times. With ``roll`` the first batch begins a new segment.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE, SCHEMA_OUTDATED or OFFSET_OUT_OF_RANGE; see
                ``plan_leader_append``.
            OSError: nothing was appended.
            StorageError: the append could not be undone.
        """
        files = self._files
        runs = plan_leader_append(
            self._append_point(reopen_sealed=False, roll=roll),
            batches,
            leader_epoch=leader_epoch,
            now_us=now_us,
            config=files.config,
            prelude_length=files.directory.prelude_length,
            placed=placed,
        )
        return self._append(runs, now_us)

    def append_as_follower(self, headers: bytes | memoryview, bodies: memoryview) -> tuple[int, int] | None:
        """Append a leader's batches unchanged.

        Return the number of records and the last batch's append time, in microseconds.

        Return None if there are no batches.

        Raises:
            BrokerError: nothing was appended. CORRUPT_MESSAGE or SCHEMA_OUTDATED; see ``plan_follower_append``.
            OSError: nothing was appended.
            StorageError: the append could not be undone.
        """
        runs = plan_follower_append(
            self._append_point(reopen_sealed=True, roll=False),
            headers,
            bodies=bodies,
            prelude_length=self._files.directory.prelude_length,
            cut_front=self._cut_front,
        )
        if not runs:
            return None
        now_us = runs[-1].headers[-1].append_time
        return self._append(runs, now_us), now_us

    def append_plain(
        self, segment: Segment, header: BatchHeader, packed: Buffer, body: Buffer, *, running_max: int, append_us: int
    ) -> None:
        """Append a single batch to the active segment, after the checks of ``append_fast_path``.

        ``packed`` is the complete header, as it is stored. ``header`` may be the header that the producer sent, because
        this method reads from it only the fields that a leader does not change.

        Raises:
            OSError: nothing was appended.
            StorageError: the append could not be undone.
        """
        base_offset = self._offsets.log_end
        end_offset = base_offset + header.offset_span
        segment.append_plain(
            packed, body, base_offset=base_offset, end_offset=end_offset, running_max=running_max, append_us=append_us
        )
        self.tombstone_window.progressed(time.time_ns() // 1000)
        self.producers.record_plain(header, base_offset, append_us)
        self._files.services.hot.add(self.hot, base_offset, CachedBatch(packed, body, end_offset))
        self._offsets.appended(base_offset, end_offset)

    def _cut_front(self, header: BatchHeader, body: memoryview, start: int) -> tuple[BatchHeader, Buffer]:
        return cut_front(header, body, start, schema=self._files.directory.schema(header.schema_id))

    def _append_point(self, *, reopen_sealed: bool, roll: bool) -> AppendPoint:
        """Return the place of the next batch. With ``roll`` it begins a new segment.

        With ``reopen_sealed`` the last segment may continue although it is sealed or compacted: a follower must do what
        its leader did. A leader begins a new segment then.
        """
        last = self._files.chain.last
        if last is None:
            return AppendPoint(self._offsets.log_end, self.epochs.last_epoch, -1, NO_MAXIMUM, -1, -1)
        # After compacted batches the leader rolls, so that the segments of all replicas are byte-identical again.
        appendable = reopen_sealed or not (last.sealed or last.cleaned or roll)
        return AppendPoint(
            self._offsets.log_end,
            self.epochs.last_epoch,
            last.data_size if appendable else -1,
            last.running_max,
            last.first_append_us,
            last.schema_id,
            last.cleaned,
        )

    def _append(self, runs: Sequence[SegmentWrite], now_us: int) -> int:
        files = self._files
        files.directory.prepare_for_append()
        files.chain.append(runs, files.directory.prelude)
        self.tombstone_window.progressed(time.time_ns() // 1000)
        records = self._record(runs, now_us)
        self._offsets.appended(runs[0].headers[0].base_offset, files.chain.segments[-1].end_offset)
        return records

    def _record(self, runs: Sequence[SegmentWrite], now_us: int) -> int:
        """Update all state that is derived from the batches. Return the number of their records."""
        files, own_hot, epochs, producers = self._files, self.hot, self.epochs, self.producers
        services = files.services
        records = 0
        begun, rolled = producers.transactions.begun, False
        for run in runs:
            if run.new_segment:
                rolled = True
                base_offset = run.headers[0].base_offset
                if base_offset != files.chain.segments[0].base_offset:
                    self.expire_producers(now_us)
                    files.seals.rolled(base_offset, producers.state())
            markers = run.markers
            for header, packed_header, body in zip(run.headers, run.packed, run.data, strict=True):
                base_offset = header.base_offset
                epochs.assign(header.leader_epoch, base_offset)
                producers.record(header, markers.get(base_offset) if markers else None)
                services.hot.add(own_hot, base_offset, CachedBatch(packed_header, body, header.next_offset))
                records += header.record_count
        # Report the log as moved: a seal or retention may now be due, although no offset of the checkpoint has changed.
        if rolled or producers.transactions.begun != begun:
            services.moved.add(files.tp)
        return records

    # --- producers and transactions -------------------------------------------------------------------------------

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the lowest first offset of a transaction that is open or whose marker is not committed.

        Return ``high_watermark`` if ``high_watermark`` is lower, or if there is no such transaction. The result is
        below the log start offset only if ``high_watermark`` is below it.
        """
        stable = self.producers.transactions.last_stable_offset(high_watermark)
        return stable if stable == high_watermark else max(stable, min(self._offsets.log_start, high_watermark))

    def expire_producers(self, now_us: int) -> None:
        """Drop the producer ids that have been idle for ``producer.id.expiration.ms``.

        Ids with an open transaction are kept.
        """
        self.producers.expire(now_us - self._files.services.producer_id_expiration_ms * 1000)

    def bridge(self, leaving: list[Segment]) -> bool:
        """Write a snapshot of the producers at the end of ``leaving``, the segments that will be deleted or compacted.

        A later start will need the snapshot instead of these segments. Return False if the disk has no room for it.
        """
        files, base = self._files, leaving[-1].end_offset
        files.seals.cancel(leaving)  # A seal of the last segment would write the same file in another thread.
        return files.write_if_room(
            "writing the producers of",
            lambda: files.seals.bridge(base, lambda: self._load_producers(leaving)),
        )

    def _load_producers(self, segments: list[Segment]) -> ProducerTable:
        """Return the state of the producers at the end of these segments, from the snapshots and the headers."""
        disk, directory = self._files.disk, self._files.directory.path
        return load_producers(disk, directory, segments, snapshots=snapshot_offsets(disk.names(directory)))[0]

    def _replace_producers(self, producers: ProducerTable) -> None:
        self.producers.count_in(None)
        self.producers = producers
        producers.count_in(self._files.services.producer_count)

    # --- truncation, deletion, cleaning ---------------------------------------------------------------------------

    def truncated(self, end: int) -> None:
        """Drop the state that was derived from batches at or above ``end``, where the log now ends.

        Also set the log end offset to ``end``.
        """
        self._drop_from(end)
        self._offsets.truncated(end)
        self._replace_producers(self._load_producers(self._files.chain.segments))

    def restarted(self, offset: int) -> None:
        """Drop all derived state, because the log now has no segments and begins at ``offset``."""
        self._drop_from(-1)
        self._offsets.restarted(offset)
        self.producers.clear()
        self.tombstone_window.ended()

    def _drop_from(self, end: int) -> None:
        drop_from(self.hot, end)
        self.epochs.truncate(end)
        if self._files.directory.exists:
            self._files.seals.drop_from(end)

    def start_raised(self, log_start: int) -> None:
        """Drop the state that was derived only from batches that have been deleted at the log's start."""
        self.epochs.advance_start(self._files.chain.first_offset(self._offsets.log_end))
        self.producers.transactions.drop_below(log_start)

    def cleaned(self, end_offset: int) -> None:
        """Forget the batches in memory below ``end_offset``, because compaction has rewritten them on disk."""
        drop_below(self.hot, end_offset)
