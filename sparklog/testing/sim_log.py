"""A log in memory with real batch headers: what ``Replica`` sees of a log, and what a performer does to it.

A model of ``storage.Log`` without files: same offsets, epochs and truncation at batch boundaries, and a page cache
that can be lost (``lose_page_cache``) down to what was flushed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sparklog.model import NO_EPOCH, EpochEnd
from sparklog.record.header import BatchHeader


class SimBatch(NamedTuple):
    """One stored batch; ``body`` names what was produced and is the same on every replica that holds it."""

    header: BatchHeader
    body: str


def new_header(base_offset: int, count: int, *, leader_epoch: int, now_ms: int, length: int) -> BatchHeader:
    """A header as a leader seals it."""
    now_us = now_ms * 1000
    return BatchHeader(
        base_offset=base_offset,
        position=0,
        max_timestamp=now_us,
        running_max=now_us,
        append_time=now_us,
        producer_id=-1,
        min_timestamp=now_us,
        offset_span=count,
        record_count=count,
        length=length,
        body_crc=0,
        leader_epoch=leader_epoch,
        schema_id=0,
        first_sequence=-1,
        offset_array_length=0,
        producer_epoch=-1,
        flags=0,
    )


class SimLog:
    """Mutable, owned by one simulated broker; survives the crash of its process."""

    def __init__(self, start_offset: int = 0) -> None:
        self._start = start_offset
        self.batches: list[SimBatch] = []
        #: what an fsync has made safe from the loss of the page cache
        self.flushed_end = start_offset

    @property
    def log_start_offset(self) -> int:
        return self._start

    @property
    def log_end_offset(self) -> int:
        return self.batches[-1].header.next_offset if self.batches else self._start

    @property
    def last_epoch(self) -> int:
        return self.batches[-1].header.leader_epoch if self.batches else NO_EPOCH

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        at = bisect_right(self.batches, epoch, key=lambda batch: batch.header.leader_epoch)
        if at == 0:
            return EpochEnd(NO_EPOCH, self._start)
        header = self.batches[at - 1].header
        return EpochEnd(header.leader_epoch, header.next_offset)

    def append(self, body: str, count: int, *, leader_epoch: int, now_ms: int) -> SimBatch:
        """Append as leader."""
        header = new_header(self.log_end_offset, count, leader_epoch=leader_epoch, now_ms=now_ms, length=len(body))
        batch = SimBatch(header, body)
        self.batches.append(batch)
        return batch

    def append_copies(self, batches: Sequence[SimBatch]) -> int:
        """Append as follower; returns the new end. A gap or an epoch that goes back is a bug of whoever sent it."""
        for batch in batches:
            end, epoch = self.log_end_offset, self.last_epoch
            assert batch.header.base_offset == end, f"batch at {batch.header.base_offset} appended at {end}"
            assert batch.header.leader_epoch >= epoch, f"epoch {batch.header.leader_epoch} appended after {epoch}"
            self.batches.append(batch)
        return self.log_end_offset

    def read(self, offset: int, max_batches: int) -> tuple[SimBatch, ...]:
        at = bisect_right(self.batches, offset, key=lambda batch: batch.header.next_offset)
        return tuple(self.batches[at : at + max_batches])

    def truncate(self, offset: int) -> int:
        """Keep whole batches that end at or below ``offset``; returns the new end."""
        del self.batches[bisect_right(self.batches, offset, key=lambda batch: batch.header.next_offset) :]
        self.flushed_end = min(self.flushed_end, self.log_end_offset)
        return self.log_end_offset

    def restart_at(self, offset: int) -> None:
        self.batches.clear()
        self._start = offset
        self.flushed_end = offset

    def flush(self) -> None:
        self.flushed_end = self.log_end_offset

    def lose_page_cache(self) -> None:
        """The host went down: what was not flushed is gone."""
        self.truncate(self.flushed_end)

    def batch_at(self, offset: int) -> SimBatch | None:
        """The batch that starts at ``offset``."""
        at = bisect_left(self.batches, offset, key=lambda batch: batch.header.base_offset)
        if at < len(self.batches) and self.batches[at].header.base_offset == offset:
            return self.batches[at]
        return None
