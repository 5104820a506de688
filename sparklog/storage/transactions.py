"""The open and the aborted transactions of one log.

This module is pure. A transaction is open from its producer's first transactional batch to the marker that names the
producer. ``read_committed`` consumers stop at the first open transaction (the last stable offset), and skip the batches
of aborted transactions. A transaction limits these consumers until its marker is committed. Otherwise, if the marker
were lost with its leader, the transaction would be open again and the last stable offset would decrease. Source:
KIP-98.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.aborted_ranges import AbortedRanges, EndedTransaction, last_offset_of

__all__ = ["EndedTransaction", "OpenTransaction", "TransactionState", "TransactionTable"]


class OpenTransaction(NamedTuple):
    """An open transaction: its producer's epoch, and the offset of its first batch."""

    epoch: int
    first_offset: int


class TransactionState(NamedTuple):
    """A copy of a ``TransactionTable`` for a snapshot file.

    ``recent`` has the ended transactions whose marker may not be committed yet.
    """

    open: dict[int, OpenTransaction]
    aborted: tuple[EndedTransaction, ...]
    recent: tuple[EndedTransaction, ...]


#: A plain int, because it is tested for every batch of a producer, and ``&`` of an enum makes a new member each time.
_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


class TransactionTable:
    """A table of the open and the aborted transactions of one log. A part of ``ProducerTable``."""

    def __init__(self, state: TransactionState | None = None) -> None:
        #: The open transactions by producer id, in order of their first offsets.
        self._open: dict[int, OpenTransaction] = dict(state.open) if state else {}
        #: The number of transactions that have begun since the table was created.
        self.begun = 0
        self._aborted = AbortedRanges(state.aborted if state else ())
        #: Ended transactions whose marker may not be committed yet, in order of the markers' offsets.
        self._recent: list[EndedTransaction] = list(state.recent) if state else []

    def __contains__(self, producer_id: int) -> bool:
        """Return whether the producer has an open transaction in this log."""
        return producer_id in self._open

    def get(self, producer_id: int) -> OpenTransaction | None:
        """Return the producer's open transaction in this log, or None if the producer has no open transaction."""
        return self._open.get(producer_id)

    def appended(self, header: BatchHeader) -> None:
        """Record an appended batch of a producer. It may begin a transaction."""
        if header.flags & _TRANSACTIONAL and header.producer_id not in self._open:
            self._open[header.producer_id] = OpenTransaction(header.producer_epoch, header.base_offset)
            self.begun += 1

    def ended(self, header: BatchHeader, marker: Marker) -> None:
        """Record an appended marker, which ends the open transactions of the producers that it names."""
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
        """Drop the ended transactions whose marker is below the high watermark and therefore committed.

        These transactions no longer limit ``read_committed`` consumers. Call this method whenever the high watermark
        moves, even on replicas without consumers. Otherwise the list of ended transactions would grow without bound.
        """
        if self._recent and self._recent[0].last_offset < high_watermark:
            del self._recent[: bisect_left(self._recent, high_watermark, key=last_offset_of)]

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the lowest first offset of a transaction that is open or whose marker is not committed.

        Return ``high_watermark`` if ``high_watermark`` is lower, or if there is no such transaction.
        """
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
        """Return the aborted transactions whose offset range overlaps ``[start, end)``.

        ``read_committed`` consumers skip the batches of these transactions.
        """
        return list(self._aborted.between(start, end))

    def drop_below(self, log_start_offset: int) -> None:
        """Drop the aborted transactions that ended below the log start offset."""
        self._aborted.drop_below(log_start_offset)

    def drop_open(self) -> None:
        """Drop the open transactions, because it is unknown whether they have ended. Keep the aborted ones."""
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
