"""Fixtures: a log on a disk in memory."""

from __future__ import annotations

import pytest

from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import SMALL, create_log, open_directory


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def directory(disk: SimDisk) -> LogDirectory:
    return open_directory(disk=disk)


@pytest.fixture
def log(directory: LogDirectory) -> Log:
    return create_log(directory, segment_bytes=SMALL)
