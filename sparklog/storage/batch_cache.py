"""The newest batches in memory, in the buffers that they arrived in.

Consumers and followers at the end of a log read these batches, not the file.

All logs of a directory share one limit of bytes. The oldest batch of any log is dropped first. So the cached batches of
one log are always the last ones of that log.
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
    """The cache of all logs of a directory. Owned by the event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._arrivals: deque[tuple[HotLog, int, CachedBatch]] = deque()

    def add(self, log: HotLog, base_offset: int, batch: CachedBatch) -> None:
        """Add a batch that was just appended to ``log``. A buffer inside a larger frame keeps that frame alive."""
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
    """Drop the batches below ``offset``, which a cleaner has rewritten."""
    for base_offset in [base for base in log if base < offset]:
        del log[base_offset]


def drop_from(log: HotLog, offset: int) -> None:
    """Drop the batches at or above ``offset``, where the log was truncated.

    Their bytes count against the limit until the cache would have dropped them as its oldest batches.
    """
    for base_offset in [base for base in log if base >= offset]:
        del log[base_offset]
