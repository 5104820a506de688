"""Reads of a log: whole batches, only their headers, or the files that contain them.

Each read stays within one segment. The log decides which offsets may be read, which count as served, and what to do if
the disk fails. The functions raise OSError if the disk fails, and StorageError if a segment is damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparklog.storage.batch_cache import HotLog
from sparklog.storage.disk import Buffer
from sparklog.storage.segment import Segment
from sparklog.storage.segment_chain import SegmentChain

#: More batches than a segment has.
MANY = 1 << 62


class LogSlice(NamedTuple):
    """Whole batches that were read from a log.

    ``headers`` has the packed headers. ``bodies`` has ``body_bytes`` bytes in total.
    """

    headers: bytes
    bodies: list[Buffer]
    body_bytes: int
    batch_count: int
    #: The offset of the next read: the requested offset if there is no batch.
    next_offset: int


class HandedOut(NamedTuple):
    """The part of a segment's files that a reader may map into its memory.

    The reader may map the batches ``[first, last)`` of the index, and the first ``data_bytes`` of the data file.
    """

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
    """Return batches, starting with the one that contains ``offset``. See ``Log.read`` for the arguments.

    ``hot`` has the newest batches in memory. Other batches are read from the file.
    """
    newest = hot.get(offset)
    if newest is not None and newest.next_offset == end_offset:  # the usual case for a reader at the end of the log
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
    """Return the headers of the batches from ``offset`` on, without the bodies.

    ``body_bytes`` of the result is the size of the bodies.
    """
    segment = chain.at(offset)
    first = segment.find(offset)
    last = min(segment.reach(first, segment.data_size, end_offset=end_offset), first + max_batches)
    headers = segment.read_headers(first, last)
    size = segment.position_of(last) - segment.position_of(first)
    return LogSlice(headers, [], size, last - first, _offset_of(segment, last) if last > first else offset)


def files(chain: SegmentChain, offset: int, *, end_offset: int) -> HandedOut | None:
    """Return the files of the segment that contains ``offset``, for a reader that maps them into its memory.

    The reader may read the batches that end at or below ``end_offset``. Return None if there are none.
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
    """Return the base offset and greatest timestamp of the first batch with a record at or after ``timestamp_us``.

    Only batches below ``end_offset`` count. Return None if no batch has such a record. If the batch begins below the
    log start offset, the log start offset is returned instead of the base offset.
    """
    for segment in chain.segments:
        if segment.base_offset >= end_offset:
            break
        header = segment.first_at_or_after(timestamp_us, log_start_offset=log_start_offset)
        if header is not None:
            offset = max(header.base_offset, log_start_offset)
            return (offset, header.max_timestamp) if offset < end_offset else None
    return None


def greatest_time(
    chain: SegmentChain, *, log_start_offset: int, end_offset: int, below_us: int
) -> tuple[int, int] | None:
    """Return the base offset of the first batch with the greatest timestamp, and this timestamp.

    Consider only batches in ``[log_start_offset, end_offset)`` that have only timestamps below ``below_us``. Return
    None if there is no such batch. If the batch begins below ``log_start_offset``, return that offset instead of the
    base offset.
    """
    found: tuple[int, int] | None = None
    for segment in chain.segments:
        if segment.base_offset >= end_offset:
            break
        if segment.end_offset <= log_start_offset or (found is not None and segment.running_max <= found[1]):
            continue
        headers = segment.headers()
        ends = headers["base_offset"] + headers["offset_span"]
        in_range = (ends > log_start_offset) & (ends <= end_offset)
        inside = np.flatnonzero(in_range & (headers["max_timestamp"] < below_us))
        if not len(inside):
            continue
        latest = inside[np.argmax(headers["max_timestamp"][inside])]
        time_us = int(headers["max_timestamp"][latest])
        if found is None or time_us > found[1]:
            found = max(int(headers["base_offset"][latest]), log_start_offset), time_us
    return found


def _offset_of(segment: Segment, number: int) -> int:
    """Return the base offset of batch ``number``, or the segment's end offset if ``number`` is after the last batch."""
    return segment.bases()[number] if number < segment.count else segment.end_offset
