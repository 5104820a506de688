"""The newest offset of each key, in a stated number of bytes a key: the part of a cleaning's keys that is in memory.

Pure numpy: hashes of keys (``record.key_hash``) and offsets in a table that whole batches are put into and asked of at
a time. A key stands in the first free slot from the one that its hash names; no slot is freed but all at once. What
becomes of a full one is its owner's (``key_table``). Source: Kafka's ``SkimpyOffsetMap``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparklog.record.key_hash import KeyHashes

#: What a key takes at most: 24 bytes a slot, at most 8/3 slots a key, and half as much again while the table grows, or
#: is read in order.
BYTES_PER_KEY = 96
#: Slots that may be taken, of four.
_TAKEN_OF_FOUR = 3
_SMALLEST_SLOTS = 1024
#: Slots looked through at a time while the table grows: what is copied out of them comes on top of both tables.
_MOVED_AT_ONCE = 8192
#: Offset of a key that is not there.
ABSENT = -1


class OffsetMap:
    """Filled with ``put``, asked with ``newest``. Used by one thread."""

    def __init__(self, max_bytes: int) -> None:
        #: distinct keys it takes
        self.capacity = max(1, max_bytes // BYTES_PER_KEY)
        self._used = 0
        self._make(_SMALLEST_SLOTS)

    def __len__(self) -> int:
        """Distinct keys."""
        return self._used

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Take the keys of records at rising ``offsets``, all above those put before; return how many, from the
        first on, there was room for."""
        count = len(offsets)
        room = self.capacity - self._used
        if count > room:  # more of them than there is room for may be there already
            absent = np.flatnonzero(self.newest(keys) == ABSENT)
            if len(absent) > room:
                count = int(absent[room])
                keys, offsets = KeyHashes(keys.high[:count], keys.low[:count]), offsets[:count]
                absent = absent[:room]
            room = len(absent)
        self._make_room(min(count, room))
        self._insert(keys.high, keys.low, offsets)
        return count

    def newest(self, keys: KeyHashes) -> npt.NDArray[np.int64]:
        """The newest offset of each key, -1 for one that was not put."""
        at = self._first_slots(keys.high)
        found = self._offsets[at]
        asking = np.flatnonzero((found != ABSENT) & ~self._is_at(at, keys.high, keys.low))
        at = at[asking]
        while len(asking):
            at = (at + 1) & self._mask
            high, low = keys.high[asking], keys.low[asking]
            found[asking] = self._offsets[at]
            on = (self._offsets[at] != ABSENT) & ~self._is_at(at, high, low)
            asking, at = asking[on], at[on]
        return found

    def sorted_rows(self, at_once: int) -> Iterator[npt.NDArray[np.uint64]]:
        """All keys by hash, ``at_once`` at a time: upper half, lower half and offset of each."""
        taken = np.flatnonzero(self._offsets != ABSENT)
        taken = taken[np.argsort(self._high[taken])]
        for first in range(0, len(taken), at_once):
            some = taken[first : first + at_once]
            rows = np.empty((len(some), 3), np.uint64)
            rows[:, 0], rows[:, 1] = self._high[some], self._low[some]
            rows[:, 2] = self._offsets[some].view(np.uint64)
            yield rows

    def clear(self) -> None:
        """No key is there any more; the table stays as large as it is."""
        self._used = 0
        self._offsets.fill(ABSENT)

    # --- the table -------------------------------------------------------------------------------------------------

    def _make(self, slots: int) -> None:
        self._mask = slots - 1
        self._high, self._low = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._offsets = np.full(slots, ABSENT, np.int64)

    def _make_room(self, more: int) -> None:
        """For so many keys more: the table is doubled until they fit."""
        slots = self._mask + 1
        while 4 * (self._used + more) > _TAKEN_OF_FOUR * slots:
            slots *= 2
        if slots > self._mask + 1:
            high, low, offsets = self._high, self._low, self._offsets
            self._make(slots)
            self._used = 0
            for first in range(0, len(offsets), _MOVED_AT_ONCE):
                some = slice(first, first + _MOVED_AT_ONCE)
                taken = offsets[some] != ABSENT
                self._insert(high[some][taken], low[some][taken], offsets[some][taken])

    def _insert(
        self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]
    ) -> None:
        """There is room for all of them. Of a key that comes twice the later one counts: where a place is assigned to
        more than once, numpy keeps the last."""
        at = self._first_slots(high)
        while len(at):
            free = np.flatnonzero(self._offsets[at] == ABSENT)
            if len(free):  # of those that want the same slot the last one gets it, whole
                slots = at[free]
                self._high[slots], self._low[slots] = high[free], low[free]
                self._offsets[slots] = offsets[free]
                self._used += int(np.count_nonzero(self._offsets[slots] == offsets[free]))
            here = self._is_at(at, high, low)
            self._offsets[at[here]] = offsets[here]
            rest = np.flatnonzero(~here)
            at = (at[rest] + 1) & self._mask
            high, low, offsets = high[rest], low[rest], offsets[rest]

    def _first_slots(self, high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        slots: npt.NDArray[np.int64] = (high & np.uint64(self._mask)).view(np.int64)
        return slots

    def _is_at(
        self, at: npt.NDArray[np.int64], high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = (self._high[at] == high) & (self._low[at] == low)
        return same
