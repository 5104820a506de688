"""Tests of the map of keys to offsets, against a dictionary, and of the hash of keys."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.config import MIB
from sparklog.record.key_hash import KeyHash, KeyHashes
from sparklog.storage.offset_map import BYTES_PER_KEY, OffsetMap

keys = st.lists(st.binary(max_size=20), min_size=1, max_size=200)


@settings(deadline=None)
@given(written=st.lists(keys, min_size=1, max_size=5), asked=keys, capacity=st.integers(1, 300), seed=st.integers(0))
def test_the_newest_offset_of_each_key_is_found(
    written: list[list[bytes]], asked: list[bytes], capacity: int, seed: int
) -> None:
    hashes, found = KeyHash(seed % 2**64), OffsetMap(capacity * BYTES_PER_KEY)
    truth: dict[bytes, int] = {}
    at = 0
    for batch in written:
        offsets = np.arange(at, at + 2 * len(batch), 2)
        taken = found.put(hashes.of(pa.array(batch, pa.binary())), offsets)
        truth.update(zip(batch[:taken], offsets[:taken].tolist(), strict=True))
        at += 2 * len(batch)
        if taken < len(batch):
            break
    assert truth
    assert len(found) == len(truth) <= capacity
    everything = [*asked, *truth]
    expected = [truth.get(key, -1) for key in everything]
    assert found.newest(hashes.of(pa.array(everything, pa.large_binary()))).tolist() == expected


def test_a_growing_offset_map_stays_within_its_memory() -> None:
    """The capacity is the one that leaves most slots empty."""
    capacity, rows = 3 * 2**16 + 1, 1000
    keys = np.random.default_rng(1)
    tracemalloc.start()
    try:
        found, at = OffsetMap(capacity * BYTES_PER_KEY), 0
        taken = rows
        while taken == rows:
            hashes = KeyHashes(*(keys.integers(0, 2**64, rows, np.uint64) for _ in range(2)))
            taken = found.put(hashes, np.arange(at, at + rows))
            at += taken
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == at == capacity
    assert peak < capacity * BYTES_PER_KEY + 2 * MIB


def test_equal_upper_halves_are_distinguished() -> None:
    found = OffsetMap(1 << 20)
    high = np.array([7, 7, 7, 9], np.uint64)
    low = np.array([1, 2, 3, 1], np.uint64)
    found.put(KeyHashes(high, low), np.array([10, 20, 30, 40]))
    asked = KeyHashes(np.array([7, 7, 7, 7, 9, 9, 8], np.uint64), np.array([3, 1, 2, 4, 1, 2, 1], np.uint64))
    assert found.newest(asked).tolist() == [30, 10, 20, -1, 40, -1, -1]


def test_a_million_keys_do_not_collide_and_zeros_count() -> None:
    numbers = pa.array([b"%d" % number for number in range(1_000_000)], pa.binary())
    found = KeyHash(1).of(numbers)
    pairs = np.stack([found.high, found.low])
    assert np.unique(pairs, axis=1).shape[1] == 1_000_000
    zeros = KeyHash(2).of(pa.array([bytes(count) for count in range(50)], pa.binary()))
    assert len(set(zeros.low.tolist())) == 50


@pytest.mark.parametrize("size", [0, 3, 4, 5, 1 << 20, (1 << 21) + 1])
def test_a_hash_depends_only_on_the_content(size: int) -> None:
    key = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
    other = bytearray(key)
    if size:
        other[size // 2] ^= 1
    hashes = KeyHash(5)
    alone = hashes.of(pa.array([key], pa.binary()))
    among = hashes.of(pa.array([b"x", key, bytes(other), None, b"longer than most"], pa.large_binary()).slice(1, 3))
    assert (alone.high[0], alone.low[0]) == (among.high[0], among.low[0])
    assert bool(size) == (among.low[1] != among.low[0])
    again = KeyHash(6).of(pa.array([key], pa.binary()))
    assert (again.high[0], again.low[0]) != (alone.high[0], alone.low[0])
