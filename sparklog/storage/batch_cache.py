"""The newest batches in memory, in the buffers that they arrived in.

Consumers and followers at the end of a log read these batches, not the file.

All logs of a directory share one limit of bytes. At the limit, the oldest batch of all logs is dropped first. So the
cached batches of a log are always the newest batches of that log.
"""

from __future__ import annotations

from collections import deque

import msgspec

from sparklog.storage.disk import Buffer

#: The approximate overhead of a batch, in bytes.
_OVERHEAD = 600


class CachedBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch as it was appended: its packed header, its stored bytes, and the offset after its last record."""

    header: Buffer
    body: Buffer
    next_offset: int


#: The cached batches of one log, by base offset.
HotLog = dict[int, CachedBatch]


class BatchCache:
    """A cache of the newest batches of all logs of a directory, with one limit of bytes for all of them.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._arrivals: deque[tuple[HotLog, int, CachedBatch]] = deque()

    def add(self, log: HotLog, base_offset: int, batch: CachedBatch) -> None:
        """Add a batch that was just appended to ``log``, and remove the oldest batches while the limit is exceeded.

        If a buffer of the batch is a part of a larger network frame, the whole frame stays in memory.
        """
        log[base_offset] = batch
        self._arrivals.append((log, base_offset, batch))
        self.size_bytes += len(batch.body) + _OVERHEAD
        while self.size_bytes > self.limit_bytes:
            oldest, offset, leaving = self._arrivals.popleft()
            self.size_bytes -= len(leaving.body) + _OVERHEAD
            # After a truncation another batch may have this offset. That batch is dropped later.
            if oldest.get(offset) is leaving:
                del oldest[offset]


def drop_below(log: HotLog, offset: int) -> None:
    """Remove the cached batches that begin below ``offset``, because compaction has rewritten them on disk."""
    for base_offset in [base for base in log if base < offset]:
        del log[base_offset]


def drop_from(log: HotLog, offset: int) -> None:
    """Remove the cached batches that begin at or above ``offset``, because the log was truncated there.

    The bytes of these batches still count against the cache's limit until the batches would have become the oldest
    batches of the cache.
    """
    for base_offset in [base for base in log if base >= offset]:
        del log[base_offset]
