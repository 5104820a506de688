"""Reads of a log: whole batches, their headers alone, or the files that hold them.

This module only reads. The log decides which offsets may be read, what counts as served, and how to handle a disk's
error. Each read stays within one segment. Functions raise OSError and StorageError like the disk and the segment.
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
    """Whole batches read from a log. ``bodies`` together are ``body_bytes`` long; ``headers`` are packed."""

    headers: bytes
    bodies: list[Buffer]
    body_bytes: int
    batch_count: int
    #: The offset of the next read: the requested offset if there is no batch.
    next_offset: int


class HandedOut(NamedTuple):
    """Batches ``[first, last)`` of a segment's index, and the ``data_bytes`` of its data that a reader may map."""

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
    """Return batches from the one that holds ``offset`` on.

    The result has at least one batch if one ends at or below ``end_offset``; otherwise it has as many as fit into
    ``max_bytes`` and ``max_batches``. The batches come from memory if they are there, else from the file. ``mapped``:
    see ``Log.read``.
    """
    newest = hot.get(offset)
    if newest is not None and newest.next_offset == end_offset:  # the only batch, as usual when latency matters
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
    """Return what ``whole_batches`` returns, without bodies. ``body_bytes`` is the size of the batches."""
    segment = chain.at(offset)
    first = segment.find(offset)
    last = min(segment.reach(first, segment.data_size, end_offset=end_offset), first + max_batches)
    headers = segment.read_headers(first, last)
    size = segment.position_of(last) - segment.position_of(first)
    return LogSlice(headers, [], size, last - first, _offset_of(segment, last) if last > first else offset)


def files(chain: SegmentChain, offset: int, *, end_offset: int) -> HandedOut | None:
    """Return the files of the segment that holds ``offset``, up to its last batch that ends at or below ``end_offset``.

    Return None if there is no such batch.
    """
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
    """Return base offset and greatest timestamp of the first batch with a record at or after ``timestamp_us``.

    Only batches below ``end_offset`` count. Return None if there is none. The offset is not below the log start.
    """
    for segment in chain.segments:
        if segment.base_offset >= end_offset:
            break
        header = segment.first_at_or_after(timestamp_us, log_start_offset=log_start_offset)
        if header is not None:
            offset = max(header.base_offset, log_start_offset)
            return (offset, header.max_timestamp) if offset < end_offset else None
    return None


def _offset_of(segment: Segment, number: int) -> int:
    """Return the base offset of batch ``number``. The number after the last batch has the segment's end offset."""
    return segment.bases()[number] if number < segment.count else segment.end_offset
