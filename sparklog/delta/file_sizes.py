"""The number of tasks that write a batch.

A small batch should create one file per directory. For a large batch, all tasks should write.
"""

from __future__ import annotations

import math

#: The number of tasks per file of the target size. With fewer, too few tasks would read the log in parallel.
_TASKS_PER_FILE = 4
#: The assumed bytes of a record before the first commit.
_GUESSED_BYTES = 100.0


class FileSizes:
    """An estimator of the bytes that records take in files, which learns from each commit.

    Its estimate determines the number of tasks for a batch. ``target`` is the target size of files in bytes.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._bytes_per_offset = _GUESSED_BYTES

    def tasks(self, offsets: int) -> int:
        """Return the maximum number of tasks that should write a batch of ``offsets`` offsets."""
        return max(1, math.ceil(offsets * self._bytes_per_offset * _TASKS_PER_FILE / self._target))

    def wrote(self, offsets: int, size: int) -> None:
        """Record that a batch of ``offsets`` offsets was committed in files of ``size`` bytes in total."""
        if offsets > 0:
            self._bytes_per_offset = size / offsets
