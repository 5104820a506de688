"""Fixtures of the client tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake_cluster import FakeCluster


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster
