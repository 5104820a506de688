"""Running CRCs of stored batches that were verified, for the next projection of them (``record.projection``).

An entry is of the batch that has this header in the log of this topic id. The header says base offset, leader epoch,
append time, length and the body's CRC, so a batch that takes the place of another one, after a truncation, a compaction
or a topic made anew, is another key; what nobody asks for any more goes in its turn. Whatever a disk does to the bytes
later shows in the reader's check, and a reader who has found that has the broker forget (``FetchPartition.verify``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from sparklog.record.projection import RunningCrcs

#: Some 20,000 batches of 20 columns, so 80 GB where they are of 4 MiB.
LIMIT_BYTES = 16 * 1024 * 1024
#: What an entry takes besides its CRCs, roughly.
_OVERHEAD = 600


class BatchKey(NamedTuple):
    """``header``: as stored, packed."""

    topic_id: str
    partition: int
    header: bytes


class CrcCache:
    """Those of the batches that were used last, of all logs of a broker. Owner: its event loop."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        #: What all entries may take together.
        self.limit_bytes = limit_bytes
        #: What they take, each with ``_OVERHEAD``.
        self.size_bytes = 0
        self._entries: OrderedDict[BatchKey, RunningCrcs] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: BatchKey) -> RunningCrcs | None:
        """Those of this batch, or None; they are the ones used last from now on."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: BatchKey, running: RunningCrcs) -> None:
        """Keep them, in the place of others. More than the limit allows in all are not kept, whatever is in the way."""
        self.forget(key)
        self._entries[key] = running
        self.size_bytes += _bytes_of(running)
        while self.size_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size_bytes -= _bytes_of(oldest)

    def forget(self, key: BatchKey) -> None:
        """Have the batch verified when it is asked for next; one of which nothing is kept is fine."""
        found = self._entries.pop(key, None)
        if found is not None:
            self.size_bytes -= _bytes_of(found)


def _bytes_of(running: RunningCrcs) -> int:
    return len(running) * running.itemsize + _OVERHEAD
