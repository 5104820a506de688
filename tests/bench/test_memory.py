"""Tests of the memory filler that runs before a bench."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.memory import PageCache, free_bytes, total_bytes

_STRIDE = 512 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PageCache]:
    found = PageCache(tmp_path / "holes")
    yield found
    found.close()


def test_nothing_is_read_when_little_memory_is_free(cache: PageCache) -> None:
    assert cache.fill(left_free=total_bytes()) == 0


def test_free_memory_is_filled_by_pages_without_disk(cache: PageCache, tmp_path: Path) -> None:
    before = free_bytes()
    if before < 2 * _STRIDE:
        pytest.skip("this machine has hardly any free memory")

    read = cache.fill(left_free=before - _STRIDE // 2)

    assert read >= _STRIDE
    assert os.fstat(cache._file).st_blocks == 0
    assert not list(tmp_path.iterdir())


def test_no_page_is_read_twice(cache: PageCache) -> None:
    free = free_bytes()
    if free < 3 * _STRIDE:
        pytest.skip("this machine has hardly any free memory")

    first = cache.fill(left_free=free - _STRIDE // 2)
    second = cache.fill(left_free=free_bytes() - _STRIDE // 2)

    assert second > 0
    assert cache._at == first + second
