"""The start offset of each leader epoch: a pure cache, and the encoding of its file ``leader-epochs``.

The batch headers are authoritative. The file only saves reading all of them when a log is opened. So it is written only
on seal and on clean stop, and is trusted at most below its ``through`` offset. Source: KIP-101, KIP-279.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from sparklog.model import EpochEnd

EPOCHS_FILE = "leader-epochs"


class EpochFile(msgspec.Struct, frozen=True):
    """The content of ``leader-epochs``.

    ``entries`` has (leader epoch, offset of its first batch), both rising, for all epochs that begin below ``through``.
    """

    entries: tuple[tuple[int, int], ...]
    through: int
    version: int = 1


class EpochCache:
    """The leader epochs of one log. Owned by its ``Log``; no I/O."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        #: The epoch of the last batch, -1 for an empty log.
        self.last_epoch = -1
        for epoch, start in entries:
            self.assign(epoch, start)

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """Record that a batch of ``epoch`` begins at ``start_offset``.

        Batches come in order. Equal epochs change nothing.

        Raises:
            ValueError: epochs or offsets do not rise.
        """
        if epoch == self.last_epoch and self._epochs:
            return
        if self._epochs and (epoch < self.last_epoch or start_offset <= self._starts[-1]):
            raise ValueError(
                f"leader epoch {epoch} from offset {start_offset} on cannot follow epoch {self.last_epoch} "
                f"from {self._starts[-1]} on"
            )
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.last_epoch = epoch

    def end_of_epoch(self, epoch: int, log_start_offset: int, *, log_end_offset: int) -> EpochEnd:
        """Return the largest epoch <= ``epoch`` and its exclusive end, or (-1, log start) if there is none."""
        at = bisect_right(self._epochs, epoch) - 1
        if at < 0:
            return EpochEnd(-1, log_start_offset)
        end = self._starts[at + 1] if at + 1 < len(self._starts) else log_end_offset
        return EpochEnd(self._epochs[at], end)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the batch that holds ``offset``, or -1 before the first."""
        at = bisect_right(self._starts, offset) - 1
        return self._epochs[at] if at >= 0 else -1

    def truncate(self, end_offset: int) -> None:
        """Drop the epochs that begin at or after ``end_offset``."""
        keep = bisect_left(self._starts, end_offset)
        del self._epochs[keep:], self._starts[keep:]
        self.last_epoch = self._epochs[-1] if self._epochs else -1

    def advance_start(self, log_start_offset: int) -> None:
        """Drop the epochs that ended at or before the new log start. The epoch of that offset now begins there."""
        at = bisect_right(self._starts, log_start_offset) - 1
        if at >= 0:
            del self._epochs[:at], self._starts[:at]
            self._starts[0] = log_start_offset

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()
        self.last_epoch = -1
