"""A hash table in memory with the newest offset of each key, for the cleaner.

The table stores the hash of each key (``record.key_hash``) and an offset, in a fixed number of bytes for each key. The
table is implemented with numpy, and each operation works on a whole batch of keys. The table uses linear probing: if
the slot for a hash is used, the key goes to the next free slot. Single keys cannot be removed. The owner
(``key_table``) decides what happens when the map is full. Source: Kafka's ``SkimpyOffsetMap``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparklog.record.key_hash import KeyHashes

#: The maximum memory for a key: 24 bytes for a slot times at most 8/3 slots for a key, and half of that in addition
#: while the table grows or its rows are sorted.
BYTES_PER_KEY = 96
#: The number of slots that may be used in every four slots.
_TAKEN_OF_FOUR = 3
_SMALLEST_SLOTS = 1024
#: The number of slots that are moved at a time while the table grows. The copies of these slots need memory in addition
#: to both tables.
_MOVED_AT_ONCE = 8192
#: The offset of an absent key.
ABSENT = -1


class OffsetMap:
    """A hash table with the newest offset of each key. Only one thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        #: The number of distinct keys that fit.
        self.capacity = max(1, max_bytes // BYTES_PER_KEY)
        self._used = 0
        self._make(_SMALLEST_SLOTS)

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return self._used

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Add the keys of records. The ``offsets`` must ascend, and be above the offsets of all earlier calls.

        Return the number of added keys, which are the first keys of ``keys``. All keys are added unless the map is
        full.
        """
        count = len(offsets)
        room = self.capacity - self._used
        if count > room:  # All may fit nevertheless, because the map may already have some of the keys.
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
        """Return the newest offset of each key, or -1 for a key that is not in the map."""
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
        """Yield a row for each key, sorted by hash, in arrays of at most ``at_once`` rows.

        A row has the upper half of the hash, the lower half and the offset.
        """
        taken = np.flatnonzero(self._offsets != ABSENT)
        taken = taken[np.argsort(self._high[taken])]
        for first in range(0, len(taken), at_once):
            some = taken[first : first + at_once]
            rows = np.empty((len(some), 3), np.uint64)
            rows[:, 0], rows[:, 1] = self._high[some], self._low[some]
            rows[:, 2] = self._offsets[some].view(np.uint64)
            yield rows

    def clear(self) -> None:
        """Remove all keys. The table keeps its size."""
        self._used = 0
        self._offsets.fill(ABSENT)

    # --- the table -------------------------------------------------------------------------------------------------

    def _make(self, slots: int) -> None:
        self._mask = slots - 1
        self._high, self._low = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._offsets = np.full(slots, ABSENT, np.int64)

    def _make_room(self, more: int) -> None:
        """Double the table's size until ``more`` keys fit."""
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
        """Insert the keys. The table must have room for them.

        If a key occurs twice, the later offset is stored: if numpy assigns to one index several times, the last value
        stays.
        """
        at = self._first_slots(high)
        while len(at):
            free = np.flatnonzero(self._offsets[at] == ABSENT)
            if len(free):  # If several keys have the same free slot, the last one gets it.
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
