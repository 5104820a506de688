"""The newest offset of each key, however many keys there are: in memory while they fit, else in sorted runs on disk.

``KeyTable`` is what a cleaning fills with the dirty part's keys and then asks of every record. Its map
(``offset_map``) takes ``BYTES_PER_KEY`` a key; when it is full, what it holds goes to a file as a run of rows sorted by
hash, and it is emptied. At last all runs are merged to one, in which each key stands once::

    row = upper half of the hash (u64), lower half (u64), offset (i64), in the machine's own byte order: 24 bytes

Asked is the mapped file, by binary search for whole batches in the order of the rows, so that what it takes beside the
page cache is a batch's worth. The file has no name from the moment it is made: no crash leaves it behind, and nobody
has to remove it when the log is cut or deleted meanwhile.

Where the disk has no room to spill, the table ends with what it has: the cleaning goes as far as that.
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

#: In a log's directory, for a moment; a start removes what ends so.
SPILL_FILE = "keys.tmp"
ROW_BYTES = 24
#: Rows of the map that become sorted ones at a time.
_BLOCK_ROWS = 8192
#: What a row takes while runs are merged: itself, where it belongs, and itself sorted and chosen.
_MERGING_BYTES = 128
#: Runs that are merged at a time.
_MOST_RUNS = 64

#: Of three columns, as in the file.
Rows = npt.NDArray[np.uint64]


class SpillFile:
    """Runs of rows, one behind the other, in a file that has lost its name. Raises OSError as the disk."""

    def __init__(self, disk: Disk, path: Path) -> None:
        #: rows up to the end of each whole run
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
        """To the run that ``end_run`` ends, or ``drop_run`` takes back."""
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
        """Views of the whole runs, oldest first; valid also when the file is closed."""
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
    """Filled with ``put``, ended with ``complete``, asked with ``newest``. Used by one thread.

    ``open_file`` makes an empty file to spill to; ``spend`` is told of bytes about to be written, and may raise.
    Methods raise OSError as the disk, but for a full one.
    """

    def __init__(self, max_bytes: int, *, open_file: Callable[[], SpillFile], spend: Callable[[int], None]) -> None:
        #: written to files
        self.spilled_bytes = 0
        self._max_bytes = max_bytes
        self._open_file = open_file
        self._spend = spend
        self._map = OffsetMap(max_bytes)
        self._file: SpillFile | None = None
        #: once complete; what a later one says of a key is newer
        self._runs: list[Rows] = []

    def __len__(self) -> int:
        """Distinct keys, once complete."""
        return len(self._map) + sum(map(len, self._runs))

    def put(self, keys: KeyHashes, offsets: npt.NDArray[np.int64]) -> int:
        """Take the keys of records at rising ``offsets``, all above those put before; return how many, from the first
        on: fewer than all when the disk has no room for more."""
        taken = self._map.put(keys, offsets)
        while taken < len(offsets):
            spilled = self._spill()
            # Also a map that nothing could be spilled of may take more: it counts a key of two records twice at first.
            more = self._map.put(KeyHashes(keys.high[taken:], keys.low[taken:]), offsets[taken:])
            if not spilled and not more:
                break
            taken += more
        return taken

    def complete(self) -> None:
        """Nothing more is put: what was spilled becomes one run, if there is room for it beside the others."""
        if self._file is None:
            return
        if self._spill() and len(self._file.ends) > 1:
            self._merge()
        self._runs = self._file.runs()

    def close(self) -> None:
        """The files; what is complete can still be asked. Whose methods this has called is let go of: an owner in a
        cycle would keep memory, and the room of the mapped file, until the collector comes by."""
        self._open_file = self._spend = _closed
        if self._file is not None:
            self._file.close()
            self._file = None

    def newest(self, keys: KeyHashes) -> npt.NDArray[np.int64]:
        """The newest offset of each key, -1 for one that was not put."""
        found = self._map.newest(keys)
        for run in reversed(self._runs):
            asking = np.flatnonzero(found == ABSENT)
            # in the run's order: each of its pages is touched once
            asking = asking[np.argsort(keys.high[asking])]
            found[asking] = _look_up(run, keys.high[asking], keys.low[asking])
        return found

    def _spill(self) -> bool:
        """What the map holds goes to the file as a run. False: no room; the map has it still."""
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
        """All runs become one, in another file; without room for that they stay as they are."""
        assert self._file is not None and not len(self._map)
        self._map = OffsetMap(self._max_bytes)  # the memory of the full one is what the merge may take
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
    """The rows of sorted runs, sorted; of each key the newest. ``at_once``: rows in memory, at most, but that each run
    has one."""
    share = max(1, at_once // len(runs))
    at = [0] * len(runs)
    while any(start < len(run) for run, start in zip(runs, at, strict=True)):
        # up to the hash where the first of the shares ends, no run has more rows than its share
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


def _look_up(run: Rows, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Offsets of these keys, whose upper halves rise; -1 where the run has none."""
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
