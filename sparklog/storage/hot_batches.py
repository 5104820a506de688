"""The newest batches in memory, as the buffers they arrived in: tailing readers never touch the file.

One budget for all logs of a directory; the oldest appended goes first, whichever log it is in. Within one log the hot
batches are therefore always a suffix of the log.
"""

from __future__ import annotations

from collections import deque

from sparklog.storage.disk import Buffer

#: What the bookkeeping of a batch costs besides its bytes, roughly.
_OVERHEAD = 600

#: base offset -> (packed header, stored bytes of the body)
HotLog = dict[int, tuple[Buffer, Buffer]]


class HotBatches:
    """Owned by the event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._arrivals: deque[tuple[HotLog, int, int]] = deque()

    def add(self, log: HotLog, base_offset: int, header: Buffer, body: Buffer) -> None:
        """Keep a batch just appended to ``log``. A buffer into a larger frame keeps that frame alive with it."""
        cost = len(body) + _OVERHEAD
        log[base_offset] = (header, body)
        self._arrivals.append((log, base_offset, cost))
        self.size_bytes += cost
        while self.size_bytes > self.limit_bytes:
            oldest, offset, freed = self._arrivals.popleft()
            oldest.pop(offset, None)
            self.size_bytes -= freed


def forget_from(log: HotLog, offset: int) -> None:
    """The log was cut at ``offset``. Arrivals stay counted until their turn comes."""
    for base_offset in [base for base in log if base >= offset]:
        del log[base_offset]
