"""The open and the aborted transactions of one log.

Pure. A transaction is open from its producer's first transactional batch to the marker that names the producer. Readers
of committed records stop at the first open one (the last stable offset), and skip the batches of aborted producers
within their ranges. A marker counts for that only once it is committed itself. If it were lost with its leader, the
transaction would be open again, and the last stable offset must not decrease. Source: KIP-98.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.aborted_ranges import AbortedRanges, EndedTransaction, last_offset_of

__all__ = ["EndedTransaction", "OpenTransaction", "TransactionState", "TransactionTable"]


class OpenTransaction(NamedTuple):
    epoch: int
    first_offset: int


class TransactionState(NamedTuple):
    """A copy of the table, for a snapshot. ``recent``: ended transactions whose marker may not be committed yet."""

    open: dict[int, OpenTransaction]
    aborted: tuple[EndedTransaction, ...]
    recent: tuple[EndedTransaction, ...]


#: A plain int, because it is tested for every batch of a producer, and ``&`` of an enum makes a new member each time.
_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


class TransactionTable:
    """The transactions of one log. Owned by its ``ProducerTable``."""

    def __init__(self, state: TransactionState | None = None) -> None:
        #: By producer id, in order of first offset, because logs grow at their end.
        self._open: dict[int, OpenTransaction] = dict(state.open) if state else {}
        #: The number of transactions that began since the table was made.
        self.begun = 0
        self._aborted = AbortedRanges(state.aborted if state else ())
        #: In order of the markers' offsets.
        self._recent: list[EndedTransaction] = list(state.recent) if state else []

    def __contains__(self, producer_id: int) -> bool:
        """Return whether the producer has an open transaction in this log."""
        return producer_id in self._open

    def appended(self, header: BatchHeader) -> None:
        """Record a producer's appended batch."""
        if header.flags & _TRANSACTIONAL and header.producer_id not in self._open:
            self._open[header.producer_id] = OpenTransaction(header.producer_epoch, header.base_offset)
            self.begun += 1

    def ended(self, header: BatchHeader, marker: Marker) -> None:
        """Record an appended marker: it ends the open transactions of the producers that it names."""
        for aborted, producers in ((False, marker.committed), (True, marker.aborted)):
            for producer_id, _ in producers:
                begun = self._open.pop(producer_id, None)
                if begun is None:
                    continue
                over = EndedTransaction(producer_id, begun.first_offset, header.base_offset)
                self._recent.append(over)
                if aborted:
                    self._aborted.append(over)

    def committed_below(self, high_watermark: int) -> None:
        """Drop ended transactions whose marker is below the high watermark and so committed.

        They no longer limit readers. Call it for every move, even on replicas without readers, or the list would grow
        without a bound.
        """
        if self._recent and self._recent[0].last_offset < high_watermark:
            del self._recent[: bisect_left(self._recent, high_watermark, key=last_offset_of)]

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the first offset of a transaction whose end is not committed, at most ``high_watermark``."""
        if not (self._open or self._recent):
            return high_watermark
        self.committed_below(high_watermark)
        stable = high_watermark
        if self._open:
            stable = min(stable, next(iter(self._open.values())).first_offset)
        for over in self._recent:
            stable = min(stable, over.first_offset)
        return stable

    def aborted_between(self, start: int, end: int) -> list[EndedTransaction]:
        """Return the aborted transactions with an offset in ``[start, end)``.

        Readers of committed records skip their batches.
        """
        return list(self._aborted.between(start, end))

    def drop_below(self, log_start_offset: int) -> None:
        """Drop the aborted transactions that ended below the log start."""
        self._aborted.drop_below(log_start_offset)

    def drop_open(self) -> None:
        """Drop the open transactions, because their ends are unknown. Only aborted ranges stay."""
        self._open.clear()
        self._recent.clear()

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def open(self) -> dict[int, OpenTransaction]:
        """Return the open transactions by producer id, for operators."""
        return dict(self._open)

    def state(self) -> TransactionState:
        return TransactionState(dict(self._open), tuple(self._aborted.all()), tuple(self._recent))

    def clear(self) -> None:
        self._open.clear()
        self._aborted.clear()
        self._recent.clear()
