"""Memory as a machine has it that has run for days: little of it free, the rest the page cache's, to be used anew.

A virtual machine may hand its free pages back to its host, which gives them again when they are first touched. Where
this was written that takes two to three seconds a gigabyte, and a copy of a gigabyte into pages that the machine has
had a quarter of a second: it levels whatever is compared, and slows down most what writes fastest. Pages of a file that
nobody wrote to, at hand before a run begins, keep the host out of it.
"""

from __future__ import annotations

import os
from pathlib import Path

_PIECE = 1 << 20
#: Read between two looks at what is free, in pieces.
_STRIDE = 512
#: After so many strides that left as much free as before, or more, nothing is to be had. Who deletes a large file
#: meanwhile makes one of them, and the replicas of a topic are large files one after the other.
_IN_VAIN = 6
#: Of all memory, left free: what starts meanwhile takes it, and the kernel frees pages before it is gone.
_LEFT_FREE = 0.01
#: Bytes; a file of holes takes nothing on the disk. Far enough for all runs of a bench, none of which reads twice.
_FILE_SIZE = 1 << 40


class PageCache:
    """Fills free memory with clean pages. Owner: the main thread; ``close`` gives them back."""

    def __init__(self, path: Path) -> None:
        """The file exists without a name only. Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        path.unlink()
        os.ftruncate(self._file, _FILE_SIZE)
        self._into = bytearray(_PIECE)
        self._at = 0

    def fill(self, left_free: int | None = None) -> int:
        """Read until no more than ``left_free`` bytes of memory are free (by default a hundredth of all), or until
        the kernel frees pages as fast as they are read. Returns the bytes read."""
        wanted = round(_LEFT_FREE * total_bytes()) if left_free is None else left_free
        began, before, in_vain = self._at, free_bytes(), 0
        while before > wanted and in_vain < _IN_VAIN:
            for _ in range(_STRIDE):
                # Always further on: a page that is read twice counts as wanted, and would be kept.
                os.preadv(self._file, [self._into], self._at % _FILE_SIZE)
                self._at += _PIECE
            after = free_bytes()
            in_vain = in_vain + 1 if before - after < _STRIDE * _PIECE / 2 else 0
            before = after
        return self._at - began

    def close(self) -> None:
        os.close(self._file)


def free_bytes() -> int:
    """Memory that nothing is in, not even a file. Linux alone tells; elsewhere there is none."""
    found = Path("/proc/meminfo")
    lines = found.read_text().splitlines() if found.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:")), 0)


def total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
