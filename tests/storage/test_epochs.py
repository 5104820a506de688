"""Tests of the pure cache of leader epochs."""

from __future__ import annotations

import pytest

from sparklog.model import EpochEnd
from sparklog.storage.epochs import EpochCache


@pytest.fixture
def cache() -> EpochCache:
    return EpochCache([(1, 0), (3, 10), (7, 25)])


def entries(cache: EpochCache) -> tuple[tuple[int, int], ...]:
    """Return the property. A function reads it each time, because a type checker assumes that it does not change."""
    return cache.entries


def test_the_end_of_an_epoch_is_the_next_ones_start(cache: EpochCache) -> None:
    ends = {epoch: cache.end_of_epoch(epoch, 0, log_end_offset=40) for epoch in (0, 1, 2, 3, 6, 7, 100)}
    assert ends == {
        0: EpochEnd(-1, 0),
        1: EpochEnd(1, 10),
        2: EpochEnd(1, 10),
        3: EpochEnd(3, 25),
        6: EpochEnd(3, 25),
        7: EpochEnd(7, 40),
        100: EpochEnd(7, 40),
    }
    assert EpochCache().end_of_epoch(3, 12, log_end_offset=12) == EpochEnd(-1, 12)


def test_assign_ignores_the_same_epoch_and_refuses_lower_ones(cache: EpochCache) -> None:
    cache.assign(7, 30)
    assert cache.entries[-1] == (7, 25)
    for epoch, start in ((6, 50), (8, 25)):
        with pytest.raises(ValueError, match=f"leader epoch {epoch} from offset {start} on cannot follow epoch 7"):
            cache.assign(epoch, start)


def test_truncate_removes_later_epochs(cache: EpochCache) -> None:
    cache.truncate(26)
    assert cache.last_epoch == 7
    cache.truncate(25)
    assert entries(cache) == ((1, 0), (3, 10))
    cache.truncate(0)
    assert (entries(cache), cache.last_epoch) == ((), -1)


def test_advance_start_removes_earlier_epochs(cache: EpochCache) -> None:
    cache.advance_start(5)
    assert entries(cache) == ((1, 5), (3, 10), (7, 25))
    cache.advance_start(10)
    assert entries(cache) == ((3, 10), (7, 25))
    cache.advance_start(99)
    assert entries(cache) == ((7, 99),)
    assert [cache.epoch_at(offset) for offset in (98, 99)] == [-1, 7]
