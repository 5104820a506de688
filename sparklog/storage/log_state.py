"""The state of one log: its segments, the state derived from their batches, and how far it is committed and fsynced.

``Log`` owns it. Each module for a part of the log's life uses it: ``log_appends`` makes the log longer
(``append_fast_path`` by one plain batch), ``LogTruncation`` shorter. ``LogDurability`` is for seals, flushes and clean
stops, and ``LogCleaning`` for compaction. All run on the event loop.

Invariants: log start <= high watermark <= log end; everything below the recovery point is fsynced; the leader epochs of
the batches never decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.batch_cache import HotLog, drop_from
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.disk import is_full
from sparklog.storage.epochs import EpochCache
from sparklog.storage.log_context import LogContext
from sparklog.storage.partition_directory import PartitionDirectory
from sparklog.storage.producers import ProducerTable
from sparklog.storage.rebuild_state import load_producers, snapshot_offsets
from sparklog.storage.recovery import recover_log
from sparklog.storage.seal_queue import SealQueue
from sparklog.storage.segment import NO_TRUNCATION, Segment
from sparklog.storage.segment_chain import SegmentChain
from sparklog.storage.tombstone_window import TombstoneWindow


class LogState:
    """The state of one ``Log``, which owns it. Empty until ``recover`` or the first append."""

    __slots__ = (
        "_high_watermark",
        "_log_start_offset",
        "_recovery_point",
        "chain",
        "claimed_end",
        "clean",
        "closed",
        "config",
        "directory",
        "disk",
        "epochs",
        "findings",
        "hot",
        "log_end_offset",
        "producers",
        "seals",
        "served_end",
        "services",
        "tombstone_window",
        "topic_id",
        "tp",
        "unsynced_truncation",
        "untouched",
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
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        #: Replaced when the topic's settings change.
        self.config = config
        self.services = services
        self.disk = services.disk
        self.directory = PartitionDirectory(directory, tp=tp, topic_id=topic_id, schemas=schemas, services=services)
        self.chain = SegmentChain(services.disk, directory, files=services.files)
        self.seals = SealQueue(services.disk, directory, remove_later=services.remove_later)
        self.epochs = EpochCache()
        self.producers = ProducerTable()
        self.producers.count_in(services.producer_count)
        self.hot: HotLog = {}
        self.tombstone_window = TombstoneWindow()
        #: The next offset to be written.
        self.log_end_offset = 0
        self._log_start_offset = 0
        self._high_watermark = 0
        self._recovery_point = 0
        #: Segments from this offset on were truncated and not fsynced since. A power cut may restore what was
        #: truncated. Then the batches of the next segment would not follow it, so they are not durable before the
        #: truncation is.
        self.unsynced_truncation = NO_TRUNCATION
        #: Readers may have mapped the files up to this offset.
        self.served_end = 0
        #: The greatest offset that any checkpoint, on disk or being written, has for this log.
        self.claimed_end = 0
        #: Nothing has changed since the state for a clean stop was written.
        self.clean = False
        #: Nothing was appended or truncated since a round of fsyncs before a clean stop began.
        self.untouched = False
        self.closed = False
        #: What the last open truncated, as sentences for operators.
        self.findings: tuple[str, ...] = ()

    def recover(self, checkpoint: PartitionCheckpoint | None, *, clean: bool, trusted: bool) -> list[str]:
        """Open the files of the directory and return its names. Raises as ``recover_log``."""
        recovery_point = checkpoint.recovery_point if checkpoint is not None else 0
        start = checkpoint.log_start_offset if checkpoint is not None else 0
        found = recover_log(
            self.disk,
            self.directory.path,
            schemas=self.directory.schemas,
            files=self.services.files,
            recovery_point=recovery_point,
            log_start_offset=start,
            claimed=max(checkpoint.high_watermark, recovery_point) if checkpoint is not None else 0,
            thorough=not (clean or trusted),
        )
        self.directory.exists = True
        for schema_id, message in found.schemas.items():
            self.directory.learn(TopicSchema(schema_id, message))
        self.clean = clean and not found.findings
        self.chain = SegmentChain(self.disk, self.directory.path, files=self.services.files, segments=found.segments)
        self.seals.found(found.snapshots)
        self.epochs = found.epochs
        self.producers = found.producers
        self.producers.count_in(self.services.producer_count)
        self.findings = found.findings
        last = self.chain.last
        self.log_end_offset = last.end_offset if last is not None else start
        self.log_start_offset = min(max(start, self.first_segment_offset), self.log_end_offset)
        high_watermark = checkpoint.high_watermark if checkpoint is not None else 0
        self.claimed_end = max(high_watermark, recovery_point)
        self.high_watermark = min(max(high_watermark, self.log_start_offset), self.log_end_offset)
        self.recovery_point = min(recovery_point, self.log_end_offset)
        self.unsynced_truncation = found.truncated_from
        if last is not None and not clean:
            # The killed process may have truncated any segment that is not wholly below the recovery point, or that
            # ends there.
            self.unsynced_truncation = min(found.truncated_from, self.recovery_point - 1)
        # a reader of the earlier process may still have all of this mapped
        self.served_end = self.log_end_offset
        if last is not None:
            self.tombstone_window.last_progress_us = last.last_append_us
        return found.names

    # --- marks: the entry of this log in the directory's checkpoint ---------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self._log_start_offset

    @log_start_offset.setter
    def log_start_offset(self, offset: int) -> None:
        self._log_start_offset = offset
        self.services.moved.add(self.tp)

    @property
    def high_watermark(self) -> int:
        return self._high_watermark

    @high_watermark.setter
    def high_watermark(self, offset: int) -> None:
        self._high_watermark = offset
        self.services.moved.add(self.tp)

    @property
    def recovery_point(self) -> int:
        """Return the offset below which everything is fsynced."""
        return self._recovery_point

    @recovery_point.setter
    def recovery_point(self, offset: int) -> None:
        self._recovery_point = offset
        self.services.moved.add(self.tp)

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the entry to be checkpointed now. It counts as claimed from now on."""
        mark, recovery_point = self._high_watermark, self._recovery_point
        self.claimed_end = max(self.claimed_end, mark, recovery_point)
        topic, partition = self.tp
        return PartitionCheckpoint(topic, partition, self.topic_id, mark, recovery_point, self._log_start_offset)

    # --- state derived from the batches ------------------------------------------------------------------------------

    @property
    def first_segment_offset(self) -> int:
        return self.chain.segments[0].base_offset if self.chain.segments else self.log_end_offset

    def last_stable_offset(self, high_watermark: int) -> int:
        stable = self.producers.transactions.last_stable_offset(high_watermark)
        return stable if stable == high_watermark else max(stable, min(self.log_start_offset, high_watermark))

    def load_producers(self, segments: list[Segment]) -> ProducerTable:
        """Return the producers according to these segments and the snapshots on disk."""
        snapshots = snapshot_offsets(self.disk.names(self.directory.path))
        return load_producers(self.disk, self.directory.path, segments, snapshots=snapshots)[0]

    def bridge(self, leaving: list[Segment]) -> bool:
        """Save the producers of segments that are about to be deleted. Return whether the disk had room for that."""
        base = leaving[-1].end_offset
        self.seals.cancel(leaving)  # the seal of the last one would write the same file in another thread
        return self.write_if_room(
            "writing the producers of",
            lambda: self.seals.bridge(base, lambda: self.load_producers(leaving)),
        )

    def segment_was_truncated(self) -> None:
        """Record that the last segment was truncated: batches, or the beginning of an append."""
        self.clean = self.untouched = False
        last = self.chain.last
        if last is not None:
            self.unsynced_truncation = min(self.unsynced_truncation, last.base_offset)

    def drop_from(self, end: int) -> None:
        """Drop everything derived from batches at or above ``end``, where the segments now end."""
        self.clean = self.untouched = False
        drop_from(self.hot, end)
        self.epochs.truncate(end)
        if self.directory.exists:
            self.seals.drop_from(end)
        self.log_end_offset = end
        self.log_start_offset = min(self.log_start_offset, end)
        self.high_watermark = min(self.high_watermark, end)
        self.served_end = min(self.served_end, end)

    # --- errors ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: the log is closed")

    def write_if_room(self, doing: str, write: Callable[[], None]) -> bool:
        """Run ``write``. Return False if the disk is full, which other logs may soon change."""
        with self.offline_on_error(doing):
            try:
                write()
            except OSError as failure:
                if not is_full(failure):
                    raise
                return False
        return True

    def offline_on_error(self, doing: str) -> AbstractContextManager[None]:
        """Take the log directory offline if the block fails. For the rare paths."""
        return self.services.offline_on_error(f"{doing} {self.tp}")
