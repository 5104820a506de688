"""Tests of the division of file descriptors between segments and sockets."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from sparklog.storage.open_files import OpenFiles, descriptors_for_clients, raise_descriptor_limit


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("soft", [600, 1024, 4096])
def test_segments_and_clients_together_leave_some_descriptors(soft: int, limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    assert 16 <= descriptors_for_clients() < soft - 3 * OpenFiles().limit


def test_the_soft_limit_is_raised_to_the_allowed_maximum(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == limits[1]
    assert soft == min(65_536, hard)
