"""Tests of keys beyond the memory: runs on disk, against a dictionary, in bounded memory, on disks that fill up."""

from __future__ import annotations

import errno
import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog.config import MIB
from sparklog.record.key_hash import KeyHashes
from sparklog.storage.disk import RealDisk
from sparklog.storage.key_table import ROW_BYTES, SPILL_FILE, KeyTable, Rows, SpillFile, merged
from sparklog.storage.offset_map import BYTES_PER_KEY
from sparklog.testing.sim_disk import SimDisk

#: Only a few halves of hashes exist, so keys collide in one of them.
keys = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=40)


def hashes(pairs: list[tuple[int, int]]) -> KeyHashes:
    both = np.array(pairs, np.uint64).reshape(-1, 2)
    return KeyHashes(both[:, 0].copy(), both[:, 1].copy())


def table(capacity: int, disk: SimDisk | RealDisk, directory: Path = Path("/")) -> KeyTable:
    return KeyTable(
        capacity * BYTES_PER_KEY, open_file=lambda: SpillFile(disk, directory / SPILL_FILE), spend=lambda _: None
    )


@settings(deadline=None)
@example(written=[[(0, 0), (0, 0), (0, 1)]], asked=[(0, 0)], capacity=2, room=0)  # the same key twice, and no disk
@given(
    written=st.lists(keys, min_size=1, max_size=6),
    asked=keys,
    capacity=st.integers(1, 50),
    room=st.none() | st.integers(0, 3000),
)
def test_the_newest_offset_of_each_key_is_found_after_spills(
    written: list[list[tuple[int, int]]], asked: list[tuple[int, int]], capacity: int, room: int | None
) -> None:
    disk = SimDisk()
    found = table(capacity, disk)
    disk.capacity_bytes = room
    truth: dict[tuple[int, int], int] = {}
    at = 0
    for batch in written:
        offsets = np.arange(at, at + 2 * len(batch), 2)
        taken = found.put(hashes(batch), offsets)
        truth.update(zip(batch[:taken], offsets[:taken].tolist(), strict=True))
        at += 2 * len(batch)
        if taken < len(batch):
            assert room is not None
            break
    found.complete()
    found.close()
    assert len(truth) >= min(capacity, len({key for batch in written for key in batch}))
    if room is None:
        assert len(found) == len(truth)
    everything = [*asked, *truth]
    assert found.newest(hashes(everything)).tolist() == [truth.get(key, -1) for key in everything]
    assert not disk._files and not disk._handles


def test_memory_is_bounded_for_any_number_of_keys(tmp_path: Path) -> None:
    """The test uses twenty times as many keys as the memory holds, at the capacity that leaves most slots empty, and
    more runs than are merged at a time. Lookups read a mapped file."""
    capacity, rows, batches = 3 * 2**11 + 1, 3000, 160
    numbers = np.random.default_rng(1)
    tracemalloc.start()
    try:
        found = table(capacity, RealDisk(), tmp_path)
        for number in range(batches):
            batch = KeyHashes(*(numbers.integers(0, 2**64, rows, np.uint64) for _ in range(2)))
            assert found.put(batch, np.arange(number * rows, (number + 1) * rows)) == rows
        found.complete()
        _, peak = tracemalloc.get_traced_memory()
        found.close()
        gc.collect()
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        assert found.newest(batch).tolist() == list(range((batches - 1) * rows, batches * rows))
        _, asking_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == rows * batches > 70 * capacity
    assert peak < capacity * BYTES_PER_KEY + MIB
    assert held < MIB and asking_peak - held < MIB
    assert found.spilled_bytes < 5 * len(found) * ROW_BYTES
    assert not list(tmp_path.iterdir())


def test_unmerged_runs_are_searched_newest_first() -> None:
    disk = SimDisk()
    files: list[SpillFile] = []

    def open_file() -> SpillFile:
        if files:
            raise OSError(errno.ENOSPC, "injected")
        files.append(SpillFile(disk, Path("/") / SPILL_FILE))
        return files[0]

    found = KeyTable(2 * BYTES_PER_KEY, open_file=open_file, spend=lambda _: None)
    again = [(1, 0), (2, 0), (3, 0), (1, 0), (4, 0), (5, 0), (3, 0), (6, 0)]
    assert found.put(hashes(again), np.arange(8)) == 8
    found.complete()
    found.close()
    assert len(files[0].ends) == 4
    assert found.newest(hashes([(number, 0) for number in range(8)])).tolist() == [-1, 3, 1, 6, 4, 5, 7, -1]


@settings(deadline=None)
@given(
    runs=st.lists(st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 2)), st.integers(0, 99)), min_size=1),
    at_once=st.integers(0, 30),
)
def test_runs_merge_into_one(runs: list[dict[tuple[int, int], int]], at_once: int) -> None:
    """Offsets increase from run to run."""
    told: list[Rows] = []
    truth: dict[tuple[int, int], int] = {}
    for number, run in enumerate(runs):
        there = {key: 100 * number + offset for key, offset in run.items()}
        truth.update(there)
        found = np.array([(*key, there[key]) for key in sorted(there, key=lambda key: key[0])], np.uint64)
        told.append(found.reshape(-1, 3))
    blocks = list(merged(told, at_once=at_once))
    rows = [tuple(row) for block in blocks for row in block.tolist()]
    assert rows == [(*key, truth[key]) for key in sorted(truth)]
    # equal upper halves stay together, and at most three of them are in a run
    assert all(len(block) <= max(at_once, len(runs)) + 2 * len(runs) for block in blocks)


@pytest.mark.parametrize("operation", ["open", "truncate", "remove", "write", "map"])
def test_a_broken_disk_is_reported_and_no_file_stays_open(operation: str) -> None:
    disk = SimDisk()
    found = table(3, disk)
    disk.fail_next(operation, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        try:
            found.put(hashes([(number, 0) for number in range(20)]), np.arange(20))
            found.complete()
        finally:
            found.close()
    assert not disk._handles
