"""The memory state of a machine that has run for days: little memory is free, and the page cache holds the rest.

A virtual machine may return its free pages to its host, which allocates them again at the first access. On the machine
of the first measurements, this allocation took two to three seconds per gigabyte, while a copy of a gigabyte into
allocated pages took a quarter of a second. The allocation would slow the fastest writer most, and make all differences
smaller. Clean pages of an unwritten file, loaded before a run, keep the host out of the run.
"""

from __future__ import annotations

import os
from pathlib import Path

_PIECE = 1 << 20
#: The number of pieces that are read between two checks of the free memory.
_STRIDE = 512
#: The number of strides in a row after which the filler stops if the free memory does not decrease. The deletion of a
#: large file causes one such stride, and the deletion of a topic deletes several large files in sequence.
_IN_VAIN = 6
#: The share of all memory that stays free: new processes use it, and the kernel frees pages before it is used up.
_LEFT_FREE = 0.01
#: The size in bytes of a file of holes, which uses no disk space. It is enough for all runs of a bench, each of which
#: reads other pages.
_FILE_SIZE = 1 << 40


class PageCache:
    """A filler of free memory with clean pages. Owner: the main thread; ``close`` frees the pages."""

    def __init__(self, path: Path) -> None:
        """Create the file and remove its name. Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        path.unlink()
        os.ftruncate(self._file, _FILE_SIZE)
        self._into = bytearray(_PIECE)
        self._at = 0

    def fill(self, left_free: int | None = None) -> int:
        """Read the file into the page cache, and return the bytes read.

        Return when at most ``left_free`` bytes of memory are free (by default a hundredth of all memory), or when the
        kernel frees pages as fast as this method reads them.
        """
        wanted = round(_LEFT_FREE * total_bytes()) if left_free is None else left_free
        began, before, in_vain = self._at, free_bytes(), 0
        while before > wanted and in_vain < _IN_VAIN:
            for _ in range(_STRIDE):
                # Always read new pages: the kernel keeps a page that is read twice.
                os.preadv(self._file, [self._into], self._at % _FILE_SIZE)
                self._at += _PIECE
            after = free_bytes()
            in_vain = in_vain + 1 if before - after < _STRIDE * _PIECE / 2 else 0
            before = after
        return self._at - began

    def close(self) -> None:
        os.close(self._file)


def free_bytes() -> int:
    """Return the bytes of unused memory, without the page cache. Return 0 on systems other than Linux."""
    found = Path("/proc/meminfo")
    lines = found.read_text().splitlines() if found.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:")), 0)


def total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
