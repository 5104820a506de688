"""What a read of a log finds: whole batches, their headers alone, or the files they lie in.

Looks only: which offsets may be asked for, what counts as served, and what becomes of a disk's error are the log's
business. All of it stays within one segment. Functions raise OSError and StorageError as the disk and the segment do.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sparklog.storage.batch_cache import HotLog
from sparklog.storage.disk import Buffer
from sparklog.storage.segment import Segment
from sparklog.storage.segment_chain import SegmentChain

#: More batches than a segment has.
MANY = 1 << 62


class LogSlice(NamedTuple):
    """Whole batches read from a log. ``bodies`` back to back are ``body_bytes`` long; ``headers`` are packed."""

    headers: bytes
    bodies: list[Buffer]
    body_bytes: int
    batch_count: int
    #: where to read on; the offset asked for when there is nothing
    next_offset: int


class HandedOut(NamedTuple):
    """Batches ``[first, last)`` of a segment's index, and so many bytes of its data that a reader may map."""

    data_path: Path
    index_path: Path
    first: int
    last: int
    data_bytes: int
    next_offset: int


def nothing_at(offset: int) -> LogSlice:
    return LogSlice(b"", [], 0, 0, offset)


def whole_batches(
    chain: SegmentChain,
    hot: HotLog,
    offset: int,
    *,
    max_bytes: int,
    end_offset: int,
    max_batches: int,
    mapped: bool,
) -> LogSlice:
    """From the batch that holds ``offset`` on: one that ends at or below ``end_offset`` at least, else as many as fit
    ``max_bytes`` and ``max_batches``. Out of memory where they are there, else out of the file. ``mapped``: see
    ``Log.read``."""
    newest = hot.get(offset)
    if newest is not None and newest.next_offset == end_offset:  # the only one, as it is where latency counts
        return LogSlice(bytes(newest.header), [newest.body], len(newest.body), 1, end_offset)
    segment = chain.at(offset)
    first = segment.find(offset)
    last = min(segment.reach(first, max_bytes, end_offset=end_offset), first + max_batches)
    if first >= last:
        return nothing_at(offset)
    bases = segment.bases()
    next_offset = bases[last] if last < segment.count else segment.end_offset
    newest = hot.get(bases[first])
    if newest is None:
        headers, body = segment.read(first, last, mapped=mapped)
        return LogSlice(headers, [body], len(body), last - first, next_offset)
    found = [hot[base] for base in bases[first:last]]
    bodies = [batch.body for batch in found]
    headers = b"".join([batch.header for batch in found])
    return LogSlice(headers, bodies, sum(map(len, bodies)), last - first, next_offset)


def headers_alone(chain: SegmentChain, offset: int, *, max_batches: int, end_offset: int) -> LogSlice:
    """As ``whole_batches`` without bodies; ``body_bytes`` is what the batches take."""
    segment = chain.at(offset)
    first = segment.find(offset)
    last = min(segment.reach(first, segment.data_size, end_offset=end_offset), first + max_batches)
    headers = segment.read_headers(first, last)
    size = segment.position_of(last) - segment.position_of(first)
    return LogSlice(headers, [], size, last - first, _offset_of(segment, last) if last > first else offset)


def files(chain: SegmentChain, offset: int, *, end_offset: int) -> HandedOut | None:
    """The segment that holds ``offset``, up to its last batch that ends at or below ``end_offset``; None: there is no
    such batch."""
    segment = chain.at(offset)
    first = segment.find(offset)
    last = segment.reach(first, segment.data_size, end_offset=end_offset)
    if first >= last:
        return None
    data_bytes = segment.position_of(last)
    return HandedOut(segment.data_path, segment.index_path, first, last, data_bytes, _offset_of(segment, last))


def offset_for_time(
    chain: SegmentChain, timestamp_us: int, *, log_start_offset: int, end_offset: int
) -> tuple[int, int] | None:
    """Base offset and greatest timestamp of the first batch below ``end_offset`` that holds a record at or after
    ``timestamp_us``; None when there is none. The offset is not below the log start."""
    for segment in chain.segments:
        if segment.base_offset >= end_offset:
            break
        header = segment.first_at_or_after(timestamp_us, log_start_offset=log_start_offset)
        if header is not None:
            offset = max(header.base_offset, log_start_offset)
            return (offset, header.max_timestamp) if offset < end_offset else None
    return None


def _offset_of(segment: Segment, number: int) -> int:
    """Where batch ``number`` of a segment begins; for the number behind the last one, where the segment ends."""
    return segment.bases()[number] if number < segment.count else segment.end_offset
