"""The newest offset of each key, in a stated number of bytes a key: what a cleaning asks of every record.

Pure numpy: hashes of keys (``record.key_hash``) and offsets in three arrays. Keys are put in order of their offsets; of
keys that came twice the later one stays. When it is full the cleaning goes as far as it has come, and another one goes
on from there. Source: Kafka's ``SkimpyOffsetMap``.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sparklog.record.key_hash import KeyHashes

#: What a key takes at most: 24 bytes in the arrays; while they are sorted, their order and their copies come on top.
BYTES_PER_KEY = 96
_ABSENT = -1
_Number = TypeVar("_Number", bound=np.generic)


class OffsetMap:
    """Filled with ``put``, then ``seal``, then asked with ``newest``. Used by one thread."""

    def __init__(self, max_bytes: int) -> None:
        #: distinct keys it takes
        self.capacity = max(1, max_bytes // BYTES_PER_KEY)
        self._high = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint64)
        self._offsets = np.empty(0, np.int64)
        self._used = 0
        self._sealed = False

    def __len__(self) -> int:
        """Entries; distinct keys once sealed."""
        return self._used

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Take the keys of records at rising ``offsets``, all above those put before; return how many, from the
        first on, there was room for."""
        assert not self._sealed
        taken = 0
        while taken < len(offsets):
            room = self.capacity - self._used
            if not room:
                self._sort()
                room = self.capacity - self._used
                # sorting for a few more keys at a time would take for ever
                if room <= self.capacity // 16:
                    break
            count = min(room, len(offsets) - taken)
            self._append(keys, offsets, taken, count)
            taken += count
        return taken

    def _append(self, keys: KeyHashes, offsets: npt.NDArray[np.int64], first: int, count: int) -> None:
        end = self._used + count
        if end > len(self._offsets):
            size = min(self.capacity, max(end, 2 * len(self._offsets), 1024))
            self._high, self._low = _grown(self._high, size), _grown(self._low, size)
            self._offsets = _grown(self._offsets, size)
        self._high[self._used : end] = keys.high[first : first + count]
        self._low[self._used : end] = keys.low[first : first + count]
        self._offsets[self._used : end] = offsets[first : first + count]
        self._used = end

    def _sort(self) -> None:
        """By hash, and of each the newest: the sort is stable, and newer entries stand behind older ones."""
        used = self._used
        order = np.lexsort((self._low[:used], self._high[:used]))
        high, low = self._high[order], self._low[order]
        last = np.ones(used, np.bool_)
        last[:-1] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._used = int(last.sum())
        self._high[: self._used] = high[last]
        self._low[: self._used] = low[last]
        self._offsets[: self._used] = self._offsets[order][last]

    def seal(self) -> None:
        """Nothing is put any more."""
        self._sort()
        self._high, self._low = self._high[: self._used], self._low[: self._used]
        self._offsets = self._offsets[: self._used]
        self._sealed = True

    def newest(self, keys: KeyHashes) -> npt.NDArray[np.int64]:
        """The newest offset of each key, -1 for one that was not put."""
        assert self._sealed
        found = np.full(len(keys.high), _ABSENT, np.int64)
        at = np.searchsorted(self._high, keys.high)
        asking = np.arange(len(keys.high))
        while len(asking):
            # two keys with the same upper half are as good as never there
            inside = at < self._used
            asking, at = asking[inside], at[inside]
            same = self._high[at] == keys.high[asking]
            asking, at = asking[same], at[same]
            hit = self._low[at] == keys.low[asking]
            found[asking[hit]] = self._offsets[at[hit]]
            asking, at = asking[~hit], at[~hit] + 1
        return found


def _grown(array: npt.NDArray[_Number], size: int) -> npt.NDArray[_Number]:
    larger = np.empty(size, array.dtype)
    larger[: len(array)] = array
    return larger
