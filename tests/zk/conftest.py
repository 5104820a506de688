"""One real ZooKeeper for all tests of this directory. Each test has its own chroot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper

_numbers = itertools.count()


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZookeeper]:
    directory: Path = tmp_path_factory.mktemp("zookeeper")
    server = EmbeddedZookeeper.start(directory)
    yield server
    server.stop()


@pytest.fixture
def connect(zookeeper_server: EmbeddedZookeeper) -> str:
    """Return the connect string with a new chroot of two levels."""
    return f"{zookeeper_server.connect}/tests/{next(_numbers)}"
