"""Where aborted transactions lie in one log, found without looking at all of them. Pure.

A log that nobody trims may have a hundred thousand of them, and every fetch asks for those that it reaches into. They
stand in the order of their markers, so those that end inside the asked range stand together. Those that end behind it
and begin before its end are few, but may stand anywhere behind: blocks in which none begins so early are passed over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

_BLOCK = 256


class EndedTransaction(NamedTuple):
    """Batches of ``producer_id`` between ``first_offset`` and ``last_offset``, its marker's, belong to it."""

    producer_id: int
    first_offset: int
    last_offset: int


last_offset_of = attrgetter("last_offset")


class AbortedRanges:
    """In order of the markers' offsets. Owned by a ``TransactionTable``."""

    def __init__(self, ranges: Iterable[EndedTransaction] = ()) -> None:
        self._ranges: list[EndedTransaction] = []
        #: By block of ``_BLOCK`` ranges: the smallest first offset.
        self._first: list[int] = []
        self._take(ranges)

    def _take(self, ranges: Iterable[EndedTransaction]) -> None:
        self._ranges, self._first = [], []
        for over in ranges:
            self.append(over)

    def __len__(self) -> int:
        return len(self._ranges)

    def append(self, over: EndedTransaction) -> None:
        """``over`` ends at or behind all others."""
        if len(self._ranges) % _BLOCK == 0:
            self._first.append(over.first_offset)
        else:
            self._first[-1] = min(self._first[-1], over.first_offset)
        self._ranges.append(over)

    def between(self, start: int, end: int) -> Iterator[EndedTransaction]:
        """Those with an offset in ``[start, end)``."""
        if start >= end:
            return
        ranges = self._ranges
        at = bisect_left(ranges, end, key=last_offset_of)
        yield from ranges[bisect_left(ranges, start, key=last_offset_of) : at]
        while at < len(ranges):
            block_end = (at // _BLOCK + 1) * _BLOCK
            if self._first[at // _BLOCK] < end:
                yield from (over for over in ranges[at:block_end] if over.first_offset < end)
            at = block_end

    def forget_below(self, offset: int) -> None:
        """Those that end below are of no interest any more."""
        gone = bisect_left(self._ranges, offset, key=last_offset_of)
        if gone:
            self._take(self._ranges[gone:])

    def clear(self) -> None:
        self._take(())

    def all(self) -> Sequence[EndedTransaction]:
        return self._ranges
