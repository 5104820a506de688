"""Fixtures: a fake cluster, and the command with its address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.in_process import Cli, in_process
from tests.client.fake_cluster import FakeCluster


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def cli(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", fake.bootstrap)
    monkeypatch.setenv("COLUMNS", "200")
    return in_process
