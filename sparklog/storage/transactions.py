"""Which transactions are open in one log, and where the aborted ones lie. Pure.

A transaction is open here from its producer's first transactional batch to the marker that names the producer. Readers
of committed records stop at the first open one (the last stable offset), and skip the batches of aborted producers
within their ranges. A marker counts for that only once it is committed itself: were it lost with its leader, the
transaction would be open again, and the last stable offset must not go back. Source: KIP-98.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.aborted_ranges import AbortedRanges, EndedTransaction, last_offset_of

__all__ = ["EndedTransaction", "OpenTransaction", "TransactionState", "TransactionTable"]


class OpenTransaction(NamedTuple):
    epoch: int
    first_offset: int


class TransactionState(NamedTuple):
    """A copy of the table, for a snapshot. ``recent``: ended ones whose marker may not be committed yet."""

    open: dict[int, OpenTransaction]
    aborted: tuple[EndedTransaction, ...]
    recent: tuple[EndedTransaction, ...]


#: A plain number: every batch of a producer is asked, and ``&`` of an enum makes a new member each time.
_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


class TransactionTable:
    """The transactions of one log. Owned by its ``ProducerTable``."""

    def __init__(self, state: TransactionState | None = None) -> None:
        #: By producer id, in order of first offset: logs grow at their end.
        self._open: dict[int, OpenTransaction] = dict(state.open) if state else {}
        #: how many began since the table was made
        self.begun = 0
        self._aborted = AbortedRanges(state.aborted if state else ())
        #: In order of the markers' offsets.
        self._recent: list[EndedTransaction] = list(state.recent) if state else []

    def __contains__(self, producer_id: int) -> bool:
        """Whether it has a transaction open here."""
        return producer_id in self._open

    def appended(self, header: BatchHeader) -> None:
        """A producer's batch was appended."""
        if header.flags & _TRANSACTIONAL and header.producer_id not in self._open:
            self._open[header.producer_id] = OpenTransaction(header.producer_epoch, header.base_offset)
            self.begun += 1

    def ended(self, header: BatchHeader, marker: Marker) -> None:
        """A marker was appended: whom it names has nothing open any more."""
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
        """Markers below are committed: what they ended holds no reader up any more. To be told of every move, by
        replicas that nobody reads from as well, or the list would grow for ever."""
        if self._recent and self._recent[0].last_offset < high_watermark:
            del self._recent[: bisect_left(self._recent, high_watermark, key=last_offset_of)]

    def last_stable_offset(self, high_watermark: int) -> int:
        """First offset whose fate is open, at most ``high_watermark``."""
        if not (self._open or self._recent):
            return high_watermark
        self.committed_below(high_watermark)
        stable = high_watermark
        if self._open:
            stable = min(stable, next(iter(self._open.values())).first_offset)
        for over in self._recent:
            stable = min(stable, over.first_offset)
        return stable

    def aborted_between(self, start: int, end: int) -> Iterator[EndedTransaction]:
        """Aborted transactions with an offset in ``[start, end)``."""
        return self._aborted.between(start, end)

    def forget_below(self, log_start_offset: int) -> None:
        """Records below are gone: so are aborted transactions that ended there."""
        self._aborted.forget_below(log_start_offset)

    def forget_open(self) -> None:
        """Nothing is known of what followed: only ranges that ended stay."""
        self._open.clear()
        self._recent.clear()

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def open(self) -> dict[int, OpenTransaction]:
        """Producer id to what it has open: for people."""
        return dict(self._open)

    def state(self) -> TransactionState:
        return TransactionState(dict(self._open), tuple(self._aborted.all()), tuple(self._recent))

    def clear(self) -> None:
        self._open.clear()
        self._aborted.clear()
        self._recent.clear()
