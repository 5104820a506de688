"""The ranges of aborted transactions in one log, searchable without a full scan.

This module is pure. A log without retention may have a hundred thousand ranges. Every fetch needs the ranges that
overlap its offsets. The ranges are ordered by the offsets of their markers, so the ranges that end inside the fetch are
adjacent. A few more ranges begin before the end of the fetch and end after it. Such ranges may be anywhere later in the
order, so the search skips blocks in which no range begins early enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

_BLOCK = 256


class EndedTransaction(NamedTuple):
    """The offset range of an ended transaction of the producer ``producer_id``.

    ``first_offset`` is the base offset of the transaction's first batch. ``last_offset`` is the offset of its commit or
    abort marker.
    """

    producer_id: int
    first_offset: int
    last_offset: int


last_offset_of = attrgetter("last_offset")


class AbortedRanges:
    """A list of the aborted transactions of one log, ordered by their markers' offsets.

    ``TransactionTable`` owns this list.
    """

    def __init__(self, ranges: Iterable[EndedTransaction] = ()) -> None:
        self._ranges: list[EndedTransaction] = []
        #: The smallest first offset in each block of ``_BLOCK`` ranges.
        self._first: list[int] = []
        self._take(ranges)

    def _take(self, ranges: Iterable[EndedTransaction]) -> None:
        self._ranges, self._first = [], []
        for over in ranges:
            self.append(over)

    def __len__(self) -> int:
        return len(self._ranges)

    def append(self, over: EndedTransaction) -> None:
        """Add an aborted transaction. Its marker must not be below the marker of a transaction in the list."""
        if len(self._ranges) % _BLOCK == 0:
            self._first.append(over.first_offset)
        else:
            self._first[-1] = min(self._first[-1], over.first_offset)
        self._ranges.append(over)

    def between(self, start: int, end: int) -> Iterator[EndedTransaction]:
        """Yield the aborted transactions whose offset range overlaps ``[start, end)``."""
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

    def drop_below(self, offset: int) -> None:
        """Remove the transactions whose marker is below ``offset``."""
        gone = bisect_left(self._ranges, offset, key=last_offset_of)
        if gone:
            self._take(self._ranges[gone:])

    def clear(self) -> None:
        self._take(())

    def all(self) -> Sequence[EndedTransaction]:
        return self._ranges
