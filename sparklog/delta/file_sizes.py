"""How many tasks write a batch: a small one is to make one file in each directory, a large one to be written by all.
Pure."""

from __future__ import annotations

import math

#: Tasks for each file of the target size that a batch comes to: fewer would read the log one after the other.
_TASKS_PER_FILE = 4
#: Of a record, before the first commit tells.
_GUESSED_BYTES = 100.0


class FileSizes:
    """Learns from what was written how large records are in files. ``target``: in bytes."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._bytes_per_offset = _GUESSED_BYTES

    def tasks(self, offsets: int) -> int:
        """For a batch of so many offsets; there may be fewer anyway."""
        return max(1, math.ceil(offsets * self._bytes_per_offset * _TASKS_PER_FILE / self._target))

    def wrote(self, offsets: int, size: int) -> None:
        """A batch was committed in files of ``size`` bytes altogether."""
        if offsets > 0:
            self._bytes_per_offset = size / offsets
