"""The newest offset of each key, for any number of keys: in memory while they fit, else also in sorted runs on disk.

A cleaning fills ``KeyTable`` with the dirty part's keys and then searches it for the key of every record. The table's
map (``offset_map``) takes ``BYTES_PER_KEY`` for each key. When the map is full, its content goes to a file as a run of
rows sorted by hash, and the map is emptied. At the end all runs are merged into one with a single row for each key::

    row = upper half of the hash (u64), lower half (u64), offset (i64), in the machine's own byte order: 24 bytes

Lookups use binary search in the mapped file, for whole batches in the order of the rows. So they need only a batch's
worth of memory besides the page cache. The file loses its name as soon as it is made. So no crash leaves it on disk,
and a truncation or deletion of the log need not remove it.

If the disk has no room to spill, the table ends with the keys that it has, and the cleaning goes only that far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from sparklog.record.key_hash import KeyHashes
from sparklog.storage.disk import Disk, is_full, write_all
from sparklog.storage.offset_map import ABSENT, OffsetMap

#: The file's name in a log's directory, for a moment. A start removes files with this suffix.
SPILL_FILE = "keys.tmp"
ROW_BYTES = 24
#: The number of the map's rows that are sorted at a time.
_BLOCK_ROWS = 8192
#: Bytes of memory for a row during a merge: the row in its run, and its sorted and selected copies.
_MERGING_BYTES = 128
#: The number of runs that are merged at a time.
_MOST_RUNS = 64

#: Rows of three columns, as in the file.
Rows = npt.NDArray[np.uint64]


class SpillFile:
    """Runs of rows, one after the other, in a file without a name. Raises OSError like the disk."""

    def __init__(self, disk: Disk, path: Path) -> None:
        #: The end of each complete run, in rows.
        self.ends: list[int] = []
        self._rows = 0
        self._disk = disk
        self._handle: int | None = disk.open(path, create=True)
        try:
            disk.truncate(self._handle, 0)
            disk.remove(path)
        except OSError:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._rows * ROW_BYTES

    def append(self, rows: Rows) -> None:
        """Append to the run that ``end_run`` completes or ``drop_run`` removes."""
        assert self._handle is not None
        write_all(self._disk, self._handle, [rows.tobytes()], self.size_bytes)
        self._rows += len(rows)

    def end_run(self) -> None:
        self.ends.append(self._rows)

    def drop_run(self) -> None:
        assert self._handle is not None
        self._rows = self.ends[-1] if self.ends else 0
        self._disk.truncate(self._handle, self.size_bytes)

    def runs(self) -> list[Rows]:
        """Return views of the complete runs, oldest first. They stay valid after the file is closed."""
        assert self._handle is not None
        if not self.ends:
            return []
        mapped = self._disk.map(self._handle, self.ends[-1] * ROW_BYTES)
        rows = np.frombuffer(mapped, np.uint64).reshape(-1, 3)
        return [rows[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disk.close(handle)


class KeyTable:
    """The newest offset of each key: filled with ``put``, ended with ``complete``, read with ``newest``.

    One thread uses it. ``open_file`` makes an empty file to spill to. ``spend`` is called before bytes are written, and
    may raise. Methods raise OSError like the disk, except for a full one.
    """

    def __init__(self, max_bytes: int, *, open_file: Callable[[], SpillFile], spend: Callable[[int], None]) -> None:
        #: Bytes written to files.
        self.spilled_bytes = 0
        self._max_bytes = max_bytes
        self._open_file = open_file
        self._spend = spend
        self._map = OffsetMap(max_bytes)
        self._file: SpillFile | None = None
        #: The runs, after ``complete``. A later run has newer offsets of a key.
        self._runs: list[Rows] = []

    def __len__(self) -> int:
        """Return the number of distinct keys, after ``complete``."""
        return len(self._map) + sum(map(len, self._runs))

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Add the keys of records at rising ``offsets``, all above the earlier ones.

        Return the number of added keys. They are the first ones: fewer than all if the disk has no room for more.
        """
        taken = self._map.put(keys, offsets)
        while taken < len(offsets):
            spilled = self._spill()
            # A map that nothing could be spilled from may also accept more: it first counts a key of two records twice.
            more = self._map.put(KeyHashes(keys.high[taken:], keys.low[taken:]), offsets[taken:])
            if not spilled and not more:
                break
            taken += more
        return taken

    def complete(self) -> None:
        """End the adding of keys. The spilled runs become one run if the disk has room for it besides the others."""
        if self._file is None:
            return
        if self._spill() and len(self._file.ends) > 1:
            self._merge()
        self._runs = self._file.runs()

    def close(self) -> None:
        """Close the files.

        A complete table can still be read.

        This drops the owner's callbacks. With them the owner would be part of a reference cycle, and its memory and the
        mapped file would stay until the garbage collector runs.
        """
        self._open_file = self._spend = _closed
        if self._file is not None:
            self._file.close()
            self._file = None

    def newest(self, keys: KeyHashes) -> npt.NDArray[np.int64]:
        """Return the newest offset of each key, or -1 for a key that was not put."""
        found = self._map.newest(keys)
        for run in reversed(self._runs):
            asking = np.flatnonzero(found == ABSENT)
            # in the run's order, so that each of its pages is read once
            asking = asking[np.argsort(keys.high[asking])]
            found[asking] = _search(run, keys.high[asking], keys.low[asking])
        return found

    def _spill(self) -> bool:
        """Write the map's content to the file as a run. Return False, with the map unchanged, if the disk is full."""
        try:
            if self._file is None:
                self._file = self._open_file()
            for rows in self._map.sorted_rows(_BLOCK_ROWS):
                self._append(self._file, rows)
        except OSError as failure:
            if not is_full(failure):
                raise
            if self._file is not None:
                self._file.drop_run()
            return False
        self._file.end_run()
        self._map.clear()
        if len(self._file.ends) >= _MOST_RUNS:
            self._merge()
        return True

    def _merge(self) -> None:
        """Merge all runs into one in a new file. If the disk has no room for it, keep the runs."""
        assert self._file is not None and not len(self._map)
        self._map = OffsetMap(self._max_bytes)  # the merge may use the memory of the full map
        fresh = None
        try:
            fresh = self._open_file()
            for rows in merged(self._file.runs(), at_once=self._max_bytes // _MERGING_BYTES):
                self._append(fresh, rows)
        except BaseException as failure:
            if fresh is not None:
                fresh.close()
            if isinstance(failure, OSError) and is_full(failure):
                return
            raise
        fresh.end_run()
        self._file.close()
        self._file = fresh

    def _append(self, file: SpillFile, rows: Rows) -> None:
        self._spend(rows.nbytes)
        file.append(rows)
        self.spilled_bytes += rows.nbytes


def _closed(*_: object) -> NoReturn:
    raise AssertionError("the table is closed")


def merged(runs: Sequence[Rows], *, at_once: int) -> Iterator[Rows]:
    """Yield the rows of sorted runs, sorted, with the newest row of each key.

    ``at_once`` limits the rows in memory, but each run has at least one.
    """
    share = max(1, at_once // len(runs))
    at = [0] * len(runs)
    while any(start < len(run) for run, start in zip(runs, at, strict=True)):
        # Up to the hash at the end of the smallest share, no run has more rows than its share.
        ends = [run[start + share - 1, 0] for run, start in zip(runs, at, strict=True) if start + share < len(run)]
        pieces = []
        for number, (run, start) in enumerate(zip(runs, at, strict=True)):
            end = start + int(np.searchsorted(run[start:, 0], min(ends), "right")) if ends else len(run)
            pieces.append(run[start:end])
            at[number] = end
        yield _newest_of_each(np.concatenate(pieces))


def _newest_of_each(rows: Rows) -> Rows:
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    newest = np.ones(len(rows), np.bool_)
    newest[:-1] = (rows[1:, 0] != rows[:-1, 0]) | (rows[1:, 1] != rows[:-1, 1])
    return rows[newest]


def _search(run: Rows, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the offsets of these keys, or -1 for absent ones. The upper halves must rise."""
    found = np.full(len(high), ABSENT, np.int64)
    asking = np.arange(len(high))
    at = np.searchsorted(run[:, 0], high)
    while len(asking):
        here = at < len(run)
        asking, at = asking[here], at[here]
        here = run[at, 0] == high[asking]
        asking, at = asking[here], at[here]
        hit = run[at, 1] == low[asking]
        found[asking[hit]] = run[at[hit], 2].view(np.int64)
        asking, at = asking[~hit], at[~hit] + 1
    return found
