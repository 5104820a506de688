"""Tests of the search for aborted ranges by offset: it finds the same ranges as a full scan, without the scan."""

from __future__ import annotations

import random

import pytest

from sparklog.storage.aborted_ranges import AbortedRanges, EndedTransaction


def ranges(seed: int, count: int) -> list[EndedTransaction]:
    """Generate ranges in order of their ends. Some are long, and some end with one marker."""
    chance = random.Random(seed)
    found: list[EndedTransaction] = []
    end = 10
    for producer in range(count):
        end += chance.choice([0, 1, 7])
        found.append(EndedTransaction(producer, max(0, end - chance.choice([1, 3, 50, 3000])), end))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_every_aborted_range_that_overlaps_is_found(seed: int) -> None:
    everything = ranges(seed, 1000)
    kept = AbortedRanges(everything)
    chance = random.Random(seed)
    for _ in range(100):
        start = chance.randint(0, everything[-1].last_offset)
        end = start + chance.choice([0, 1, 20, 5000])
        below = everything[0].last_offset if chance.random() < 0.9 else start // 2
        kept.drop_below(below)
        everything = [over for over in everything if over.last_offset >= below]
        wanted = [over for over in everything if over.last_offset >= start and over.first_offset < end]
        assert list(kept.between(start, end)) == (wanted if start < end else [])
        assert list(kept.all()) == everything
    kept.clear()
    assert not list(kept.between(0, 10**6)) and not len(kept)


class Watched(EndedTransaction):
    """A list that counts its reads."""

    looks = 0

    @property
    def first_offset(self) -> int:
        Watched.looks += 1
        return self[1]

    @property
    def last_offset(self) -> int:
        Watched.looks += 1
        return self[2]


def test_a_fetch_at_the_start_does_not_visit_100000_ranges() -> None:
    long = Watched(1, 0, 1_000_001)
    kept = AbortedRanges([*(Watched(0, 10 * n, 10 * n + 5) for n in range(100_000)), long])
    Watched.looks = 0
    assert list(kept.between(0, 10)) == [Watched(0, 0, 5), long]
    assert Watched.looks < 1000
