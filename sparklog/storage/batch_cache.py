"""The newest batches in memory, as the buffers they arrived in: tailing readers never touch the file.

One budget for all logs of a directory; the oldest appended goes first, whichever log it is in. Within one log the hot
batches are therefore always a suffix of the log.
"""

from __future__ import annotations

from collections import deque

import msgspec

from sparklog.storage.disk import Buffer

#: What the bookkeeping of a batch costs besides its bytes, roughly.
_OVERHEAD = 600


class CachedBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch as it arrived: packed header, the bytes stored for it, and the offset behind its last record."""

    header: Buffer
    body: Buffer
    next_offset: int


#: by base offset
HotLog = dict[int, CachedBatch]


class BatchCache:
    """Owned by the event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._arrivals: deque[tuple[HotLog, int, CachedBatch]] = deque()

    def add(self, log: HotLog, base_offset: int, batch: CachedBatch) -> None:
        """Keep a batch just appended to ``log``. A buffer into a larger frame keeps that frame alive with it."""
        log[base_offset] = batch
        self._arrivals.append((log, base_offset, batch))
        self.size_bytes += len(batch.body) + _OVERHEAD
        while self.size_bytes > self.limit_bytes:
            oldest, offset, leaving = self._arrivals.popleft()
            self.size_bytes -= len(leaving.body) + _OVERHEAD
            # a truncation may have put another batch in its place, whose turn is later
            if oldest.get(offset) is leaving:
                del oldest[offset]


def forget_below(log: HotLog, offset: int) -> None:
    """What lies below was written anew."""
    for base_offset in [base for base in log if base < offset]:
        del log[base_offset]


def forget_from(log: HotLog, offset: int) -> None:
    """The log was cut at ``offset``. Arrivals stay counted until their turn comes."""
    for base_offset in [base for base in log if base >= offset]:
        del log[base_offset]
