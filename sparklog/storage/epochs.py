"""Which leader epoch starts at which offset: a pure cache and the encoding of its file ``leader-epochs``.

The batch headers are what counts: the file only spares reading all of them when a log is opened. It is therefore
written at leisure (on seal and on clean stop) and believed below its ``through`` offset at most.

Source: KIP-101, KIP-279.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from sparklog.model import EpochEnd

EPOCHS_FILE = "leader-epochs"


class EpochFile(msgspec.Struct, frozen=True):
    """``entries`` are (leader epoch, offset of its first batch), both rising; all that begin below ``through``."""

    entries: tuple[tuple[int, int], ...]
    through: int
    version: int = 1


class EpochCache:
    """The leader epochs found in one log. Owned by its ``Log``; no I/O."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        #: Epoch of the last batch, -1 for an empty log.
        self.last_epoch = -1
        for epoch, start in entries:
            self.assign(epoch, start)

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """A batch of ``epoch`` begins at ``start_offset``. Batches come in order; equal epochs change nothing.

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
        """The largest epoch <= ``epoch`` and its exclusive end; (-1, log start) when there is none."""
        at = bisect_right(self._epochs, epoch) - 1
        if at < 0:
            return EpochEnd(-1, log_start_offset)
        end = self._starts[at + 1] if at + 1 < len(self._starts) else log_end_offset
        return EpochEnd(self._epochs[at], end)

    def epoch_at(self, offset: int) -> int:
        """Epoch of the batch that holds ``offset``, -1 before the first."""
        at = bisect_right(self._starts, offset) - 1
        return self._epochs[at] if at >= 0 else -1

    def truncate(self, end_offset: int) -> None:
        """Forget epochs that begin at or after ``end_offset``."""
        keep = bisect_left(self._starts, end_offset)
        del self._epochs[keep:], self._starts[keep:]
        self.last_epoch = self._epochs[-1] if self._epochs else -1

    def advance_start(self, log_start_offset: int) -> None:
        """Forget epochs that ended at or before the log's new start; the one it lies in begins there now."""
        at = bisect_right(self._starts, log_start_offset) - 1
        if at >= 0:
            del self._epochs[:at], self._starts[:at]
            self._starts[0] = log_start_offset

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()
        self.last_epoch = -1
