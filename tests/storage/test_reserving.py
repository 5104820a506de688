"""Tests of disk space that is reserved for large segments: how much, when, and its release."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sparklog.errors import BrokerError
from sparklog.storage import sealing, segment
from sparklog.storage.log import Log
from sparklog.storage.segment import NO_TRUNCATION, Segment
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    append,
    batch,
    commit_and_seal,
    create_log,
    follow,
    open_directory,
    read_numbers,
)

_FROM, _MOST, _LARGE = 4096, 2048, 1 << 20

#: Blocks that a file system uses in addition to those of a scattered file.
_BOOKKEEPING = 32 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segment, sealing):
        monkeypatch.setattr(module, "RESERVE_FROM_BYTES", _FROM)
    monkeypatch.setattr(segment, "_RESERVE_MOST_BYTES", _MOST)


class Noting(SimDisk):
    """A disk that records reserved ranges as (from, to), and the length of each truncation."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        self.reserved: list[tuple[int, int]] = []
        self.cuts: list[int] = []

    def reserve(self, handle: int, length: int, at: int) -> None:
        super().reserve(handle, length, at)
        self.reserved.append((at, at + length))

    def truncate(self, handle: int, length: int) -> None:
        super().truncate(handle, length)
        self.cuts.append(length)


def _log(disk: Noting, segment_bytes: int = _LARGE) -> Log:
    return create_log(open_directory(Path("/logs"), disk=disk), segment_bytes=segment_bytes)


def _size(log: Log) -> int:
    return log.segments[-1].data_size if log.segments else 0


def _append(log: Log, count: int = 1) -> None:
    for _ in range(count):
        append(log, batch(100, first=log.log_end_offset))


def test_a_large_segment_reserves_a_quarter_of_itself() -> None:
    disk = Noting()
    log = _log(disk)
    room = _FROM
    while _size(log) < 10 * _FROM:
        before, times = _size(log), len(disk.reserved)
        _append(log)
        size = _size(log)
        if size <= room:
            assert len(disk.reserved) == times
        else:
            room = size + min(size // 4, _MOST)
            assert disk.reserved[times:] == [(before, room)]
    assert len(disk.reserved) > 10


def test_followers_reserve_space_too() -> None:
    disk, other = Noting(), Noting()
    leader, follower = _log(disk), _log(other)
    _append(leader, 20)
    follow(follower, leader)
    assert follower.log_end_offset == leader.log_end_offset
    assert other.reserved


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EINTR])
def test_appends_continue_where_space_cannot_be_reserved(code: int) -> None:
    disk = Noting()
    log = _log(disk)
    disk.fail_next("reserve", code)
    before = 0
    while not log.segments or log.segments[-1]._reserved == _FROM:
        before = _size(log)
        disk.cuts.clear()
        _append(log)
    assert before + 2000 > _FROM and log.segments[-1]._reserved == NO_TRUNCATION
    assert disk.cuts == [before]  # other files may have taken a part of it
    _append(log, 20)
    assert disk.reserved == []
    assert read_numbers(log) == list(range(log.log_end_offset))


def test_a_full_disk_stores_what_fits() -> None:
    disk = Noting(capacity_bytes=6 * _FROM)
    log = _log(disk)
    with pytest.raises(BrokerError, match="no room left"):
        _append(log, 1000)
    assert read_numbers(log) == list(range(log.log_end_offset))
    assert disk.capacity_bytes is not None and disk.capacity_bytes - disk.used_bytes < 3000


def test_a_truncated_log_reserves_again() -> None:
    disk = Noting()
    log = _log(disk)
    _append(log, 20)
    reserved = len(disk.reserved)
    assert reserved
    log.truncate(log.log_end_offset // 2)
    _append(log, 1)
    assert len(disk.reserved) == reserved + 1
    assert read_numbers(log) == list(range(log.log_end_offset))


def test_an_undone_append_drops_its_reserved_space() -> None:
    disk = Noting()
    log = _log(disk)
    while not disk.reserved or disk.reserved[-1][1] < _size(log) + 2000:  # the next append finds space
        _append(log)
    reserved = len(disk.reserved)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(BrokerError, match="no room left"):
        _append(log)
    assert len(disk.reserved) == reserved
    _append(log)
    assert len(disk.reserved) == reserved + 1


def test_sealed_files_have_no_reserved_space_after_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_RESERVE_MOST_BYTES", _LARGE)
    log = create_log(open_directory(tmp_path), segment_bytes=_LARGE)
    while len(log.segments) < 3:
        _append(log)

    def behind(part: Segment) -> int:
        found = part.data_path.stat()
        return found.st_blocks * 512 - found.st_size

    if not any(behind(part) > _BOOKKEEPING for part in log.segments[:-1]):
        pytest.skip("the file system cannot reserve space")
    assert commit_and_seal(log) == 2
    assert [behind(part) <= _BOOKKEEPING for part in log.segments[:-1]] == [True, True]
    assert read_numbers(log) == list(range(log.log_end_offset))
