"""A cache of the running CRCs of verified batches, so that a later projection need not verify the batch again.

A running CRC is the CRC of the bytes of a batch up to the start or the end of a column: see ``record.projection``.

The key of an entry consists of the topic id, the partition and the stored header of the batch. The header contains base
offset, leader epoch, append time, length and the CRC of the body. So a batch that replaces another one (after a
truncation, a compaction or a recreation of the topic) has another key. The least recently used entries are dropped
first. If a disk damages the bytes later, the reader's check fails, and its next request makes the broker drop the entry
(``FetchPartition.verify``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from sparklog.record.projection import RunningCrcs

#: The default limit is enough for about 20,000 batches of 20 columns, which are 80 GB if each batch has 4 MiB.
LIMIT_BYTES = 16 * 1024 * 1024
#: The approximate size in bytes of an entry without its CRCs.
_OVERHEAD = 600


class BatchKey(NamedTuple):
    """The key of a stored batch in the cache. ``header`` is the batch's packed header, as stored."""

    topic_id: str
    partition: int
    header: bytes


class CrcCache:
    """A cache of the running CRCs of the most recently used batches of all logs.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        #: The limit for the size of all entries together.
        self.limit_bytes = limit_bytes
        #: The size of all entries, each with ``_OVERHEAD``.
        self.size_bytes = 0
        self._entries: OrderedDict[BatchKey, RunningCrcs] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: BatchKey) -> RunningCrcs | None:
        """Return the CRCs of this batch and mark them as the most recently used; return None if they are not cached."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: BatchKey, running: RunningCrcs) -> None:
        """Store the CRCs of a batch, and drop the least recently used entries above the limit."""
        self.drop(key)
        self._entries[key] = running
        self.size_bytes += _bytes_of(running)
        while self.size_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size_bytes -= _bytes_of(oldest)

    def drop(self, key: BatchKey) -> None:
        """Drop the CRCs of a batch, so that the next read verifies the batch. Do nothing if they are not cached."""
        found = self._entries.pop(key, None)
        if found is not None:
            self.size_bytes -= _bytes_of(found)


def _bytes_of(running: RunningCrcs) -> int:
    return len(running) * running.itemsize + _OVERHEAD
