"""A table of the newest offset of each key, in memory, and also on disk if the keys do not fit into memory.

A cleaning puts the keys of the dirty part into a ``KeyTable``, and then searches it for the key of every record. The
table's map in memory (``offset_map``) needs ``BYTES_PER_KEY`` for each key. When it is full, its rows are sorted by
hash and written to a file as one run, and the map is emptied. At the end all runs are merged into one run with a
single row for each key::

    row = upper half of the hash (u64), lower half (u64), offset (i64), in the machine's own byte order: 24 bytes

A lookup is a binary search in the memory-mapped file. The lookup finds all keys of a batch at a time, in the order of
the rows. So lookups need memory only for one batch, besides the page cache. The file is unlinked right after it is
created. So a crash does not leave it on disk, and a truncation or deletion of the log need not remove it.

If the disk has no room for the file, the table accepts no more keys, and the cleaning covers only the records of the
keys that the table has.
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

#: The file's name in the log's directory until the file is unlinked. A start removes files with this suffix.
SPILL_FILE = "keys.tmp"
ROW_BYTES = 24
#: The number of the map's rows that are sorted at a time.
_BLOCK_ROWS = 8192
#: Bytes of memory for each row of a merge: for the row itself, its sorted copy and its selected copy.
_MERGING_BYTES = 128
#: When the file has this number of runs, they are merged.
_MOST_RUNS = 64

#: Rows of three columns: the two halves of the hash, and the offset.
Rows = npt.NDArray[np.uint64]


class SpillFile:
    """A temporary file for the rows of a ``KeyTable`` that do not fit into memory.

    The rows are stored in runs, one after the other. A run is a sequence of rows that are sorted by the hash of the
    key. The file has no name on disk, so it disappears when it is closed. The methods raise OSError if the disk fails.
    """

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
        """Append rows to the current run. Then call ``end_run`` to complete the run, or ``drop_run`` to remove it."""
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
        """Return the complete runs, oldest first, as views of the mapped file.

        The views stay valid after the file is closed.
        """
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
    """A table of the newest offset of each key, in memory, and also on disk if the keys do not fit into memory.

    Call ``put`` with all keys, then ``complete``, then ``newest`` to look keys up. One thread makes all calls.
    ``open_file`` returns an empty temporary file. ``spend`` is called with a number of bytes before these bytes are
    written, and may raise. The methods raise OSError if the disk fails, but not if it is full.
    """

    def __init__(self, max_bytes: int, *, open_file: Callable[[], SpillFile], spend: Callable[[int], None]) -> None:
        #: The number of bytes written to files.
        self.spilled_bytes = 0
        self._max_bytes = max_bytes
        self._open_file = open_file
        self._spend = spend
        self._map = OffsetMap(max_bytes)
        self._file: SpillFile | None = None
        #: The runs, after ``complete``. If two runs have a key, the later run has the newer offset.
        self._runs: list[Rows] = []

    def __len__(self) -> int:
        """Return the number of distinct keys, after ``complete``."""
        return len(self._map) + sum(map(len, self._runs))

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Add the keys of records. The ``offsets`` must ascend, and be above the offsets of all earlier calls.

        Return the number of added keys, which are the first keys of ``keys``. All keys are added unless both the
        table's memory and the disk are full.
        """
        taken = self._map.put(keys, offsets)
        while taken < len(offsets):
            spilled = self._spill()
            # Try again even if nothing was spilled: the map first counts the key of two records twice, so it may still
            # have room.
            more = self._map.put(KeyHashes(keys.high[taken:], keys.low[taken:]), offsets[taken:])
            if not spilled and not more:
                break
            taken += more
        return taken

    def complete(self) -> None:
        """Prepare the table for lookups, after the last ``put``.

        Merge the sorted runs on disk into one run, if the disk has room for it.
        """
        if self._file is None:
            return
        if self._spill() and len(self._file.ends) > 1:
            self._merge()
        self._runs = self._file.runs()

    def close(self) -> None:
        """Close the temporary file. ``newest`` still works if ``complete`` was called before.

        Also drop the references to ``open_file`` and ``spend``. Otherwise the table and the owner of these functions
        would refer to each other, and their memory and the mapped file would stay until the garbage collector runs.
        """
        self._open_file = self._spend = _closed
        if self._file is not None:
            self._file.close()
            self._file = None

    def newest(self, keys: KeyHashes) -> npt.NDArray[np.int64]:
        """Return the newest offset of each key, or -1 for a key that is not in the table."""
        found = self._map.newest(keys)
        for run in reversed(self._runs):
            asking = np.flatnonzero(found == ABSENT)
            # Search in the order of the run, so that each page of the file is read only once.
            asking = asking[np.argsort(keys.high[asking])]
            found[asking] = _search(run, keys.high[asking], keys.low[asking])
        return found

    def _spill(self) -> bool:
        """Write the map's rows to the file as a run, and empty the map.

        Return False, and leave the map unchanged, if the disk is full.
        """
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
        """Merge all runs into one run in a new file. If the disk has no room for the new file, keep the old runs."""
        assert self._file is not None and not len(self._map)
        self._map = OffsetMap(self._max_bytes)  # frees the memory of the full map, for the merge
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
    """Merge sorted runs: yield the newest row of each key, in several arrays, sorted by hash.

    At most ``at_once`` rows are in memory at a time, but at least one row of each run.
    """
    share = max(1, at_once // len(runs))
    at = [0] * len(runs)
    while any(start < len(run) for run, start in zip(runs, at, strict=True)):
        # Each run's share ends at a hash. Merge the rows up to the lowest of these hashes: of no run are these more
        # than its share.
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
    """Return the offset of each key, or -1 for an absent key. The upper halves of the hashes must ascend."""
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
