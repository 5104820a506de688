"""Tests of the highest numbers of the cluster in a log directory: they never decrease, however the process ends."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sparklog.storage.cluster_seen import SEEN_FILE, ClusterSeen, SeenFile
from sparklog.storage.disk import replace_file
from sparklog.storage.formats import NewerFormatError
from sparklog.testing.sim_disk import SimDisk

DIRECTORY = Path("/log")


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    disk.make_directory(DIRECTORY)
    return disk


def test_the_highest_numbers_survive_a_power_failure(disk: SimDisk) -> None:
    file = SeenFile(disk, DIRECTORY)
    assert file.seen == ClusterSeen()
    file.note_controller(4, "a")
    file.note_incarnation(7)
    file.note_producer_ids(3000)
    changes = disk.changes
    file.note_controller(4, "b")
    file.note_controller(3, "c")
    file.note_incarnation(7)
    file.note_producer_ids(2000)
    assert disk.changes == changes
    disk.restart(page_cache_lost=True)
    assert SeenFile(disk, DIRECTORY).seen == ClusterSeen(4, "a", 7, 3000)


def test_a_number_that_could_not_be_stored_is_stored_next_time(disk: SimDisk) -> None:
    file = SeenFile(disk, DIRECTORY)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(OSError, match="space"):
        file.note_incarnation(7)
    assert file.seen.incarnation == -1
    file.note_incarnation(7)
    assert SeenFile(disk, DIRECTORY).seen.incarnation == 7


def test_a_damaged_file_is_ignored_and_a_newer_one_is_kept(disk: SimDisk) -> None:
    replace_file(disk, DIRECTORY / SEEN_FILE, b"{")
    assert SeenFile(disk, DIRECTORY).seen == ClusterSeen()
    replace_file(disk, DIRECTORY / SEEN_FILE, b'{"version": 2}')
    with pytest.raises(NewerFormatError):
        SeenFile(disk, DIRECTORY)
