"""The start offset of each leader epoch of a log, in memory and in the file ``leader-epochs``.

The batch headers are authoritative. The file only makes it unnecessary to read all headers when a log is opened. It is
written when a segment is sealed and on a clean shutdown, so it may lack the newest epochs. The file is used only below
its ``through`` offset. This module does no I/O. Source: KIP-101, KIP-279.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from sparklog.model import EpochEnd

EPOCHS_FILE = "leader-epochs"


class EpochFile(msgspec.Struct, frozen=True):
    """The content of ``leader-epochs``.

    ``entries`` has one pair for each epoch that begins below ``through``: the leader epoch and the offset of its first
    batch. Epochs and offsets ascend.
    """

    entries: tuple[tuple[int, int], ...]
    through: int
    version: int = 1


class EpochCache:
    """A table of the leader epochs of one log, with the offset at which each epoch begins. It does no I/O."""

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

        Call this for the batches in the order of their offsets. A batch of the last epoch changes nothing.

        Raises:
            ValueError: the epoch is lower than the last one, or ``start_offset`` is not above the start of the last
                epoch.
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
        """Return the largest epoch of the log that is at most ``epoch``, and the offset where it ends.

        Return (-1, log start offset) if there is no such epoch. The end is exclusive.
        """
        at = bisect_right(self._epochs, epoch) - 1
        if at < 0:
            return EpochEnd(-1, log_start_offset)
        end = self._starts[at + 1] if at + 1 < len(self._starts) else log_end_offset
        return EpochEnd(self._epochs[at], end)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the batch that contains ``offset``, or -1 if the offset is below the first epoch."""
        at = bisect_right(self._starts, offset) - 1
        return self._epochs[at] if at >= 0 else -1

    def truncate(self, end_offset: int) -> None:
        """Drop the epochs that begin at or after ``end_offset``."""
        keep = bisect_left(self._starts, end_offset)
        del self._epochs[keep:], self._starts[keep:]
        self.last_epoch = self._epochs[-1] if self._epochs else -1

    def advance_start(self, log_start_offset: int) -> None:
        """Drop the epochs that end at or below the new log start offset.

        The first epoch that remains now begins at the new log start offset.
        """
        at = bisect_right(self._starts, log_start_offset) - 1
        if at >= 0:
            del self._epochs[:at], self._starts[:at]
            self._starts[0] = log_start_offset

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()
        self.last_epoch = -1
