"""Tests of one contract for the real disk and the simulated one, and then of the simulated one alone."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from sparklog.storage.disk import Buffer, Disk, RealDisk, is_full, read_ahead, read_file, replace_file, write_all
from sparklog.testing.sim_disk import ProcessDied, SimDisk


@pytest.fixture(params=["real", "sim"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return RealDisk() if request.param == "real" else SimDisk()


@pytest.fixture
def root(disk: Disk, tmp_path: Path) -> Path:
    path = tmp_path / "root"
    disk.make_directory(path)
    return path


def test_written_bytes_are_read(disk: Disk, root: Path) -> None:
    handle = disk.open(root / "f", create=True)
    assert disk.write(handle, [b"abc", memoryview(b"defg")], 0) == 7
    assert disk.write(handle, [b"XY"], 2) == 2
    assert disk.read(handle, 100, 0) == b"abXYefg"
    assert disk.read(handle, 2, 3) == b"Ye"
    assert disk.read(handle, 2, 7) == b""
    assert disk.size(handle) == 7
    disk.truncate(handle, 3)
    disk.sync(handle)
    assert disk.read(handle, 100, 0) == b"abX"
    disk.close(handle)
    assert read_file(disk, root / "f") == b"abX"


def test_reserved_space_is_not_part_of_the_file(disk: Disk, root: Path) -> None:
    handle = disk.open(root / "f", create=True)
    disk.write(handle, [b"abc"], 0)
    try:
        disk.reserve(handle, 1 << 20, 3)
    except OSError as failure:
        assert failure.errno == errno.EOPNOTSUPP
        pytest.skip("the file system cannot reserve space")
    assert disk.size(handle) == 3
    assert disk.read(handle, 100, 0) == b"abc"
    if isinstance(disk, RealDisk):
        assert os.fstat(handle).st_blocks * 512 >= 1 << 20
        disk.truncate(handle, 3)
        assert os.fstat(handle).st_blocks * 512 <= 1 << 16
    disk.write(handle, [b"def"], 3)
    assert disk.read(handle, 100, 0) == b"abcdef"
    disk.close(handle)


def test_a_sim_disk_reserves_no_more_than_its_capacity() -> None:
    disk = SimDisk(capacity_bytes=10)
    handle = disk.open(Path("f"), create=True)
    disk.write(handle, [b"abc"], 0)
    disk.reserve(handle, 7, 3)
    with pytest.raises(OSError) as caught:
        disk.reserve(handle, 8, 3)
    assert is_full(caught.value)


def test_a_whole_file_system_is_made_durable(disk: Disk, root: Path) -> None:
    disk.make_directory(root / "below")
    handle = disk.open(root / "below" / "f", create=True)
    disk.write(handle, [b"abc"], 0)
    inside = disk.open(root / "lock", create=True)
    if not disk.can_sync_file_system(inside):
        pytest.skip("the file system does not report its failures")
    disk.sync_file_system(inside)
    if isinstance(disk, SimDisk):
        disk.restart(page_cache_lost=True)
    assert read_file(disk, root / "below" / "f") == b"abc"


class AdvisedMap(mmap.mmap):
    """A map that records the advice that it gives to the kernel."""

    advised: list[tuple[int, int, int]]
    failure: OSError | None = None

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        self.advised.append((option, start, length))
        if self.failure is not None:
            raise self.failure
        super().madvise(option, start, length)


def test_a_long_range_is_read_ahead_in_steps_of_equal_size(tmp_path: Path) -> None:
    kib, page = 1024, mmap.PAGESIZE
    path = tmp_path / "f"
    path.write_bytes(bytes(600 * kib))
    with path.open("r+b") as file:
        mapping = AdvisedMap(file.fileno(), 0)
    mapping.advised = []
    view = memoryview(mapping)
    read_ahead(view[1000:], 3 * page + 100, 300 * kib)
    assert {option for option, _, _ in mapping.advised} == {mmap.MADV_WILLNEED}
    steps = [(start, start + length) for _, start, length in mapping.advised]
    assert (steps[0][0], steps[-1][1]) == (3 * page, 3 * page + 100 + 300 * kib)
    assert all(start % page == 0 and end - start <= 128 * kib for start, end in steps)
    assert all(before[1] == after[0] for before, after in pairwise(steps))
    mapping.advised.clear()
    read_ahead(view, 600 * kib - 1, 1)
    assert [length for _, _, length in mapping.advised] == [page]
    mapping.advised.clear()
    read_ahead(view, 0, 0)
    assert not mapping.advised
    mapping.failure = OSError(errno.EIO, "of a disk that is gone")
    read_ahead(view, 0, 600 * kib)
    assert len(mapping.advised) == 1, "after a failure the next step must not be tried"


def test_open_keeps_content_and_refuses_absent_files(disk: Disk, root: Path) -> None:
    replace_file(disk, root / "f", b"kept")
    disk.close(disk.open(root / "f", create=True))
    assert read_file(disk, root / "f") == b"kept"
    with pytest.raises(FileNotFoundError):
        disk.open(root / "absent")
    with pytest.raises(FileNotFoundError):
        disk.open(root / "absent" / "f", create=True)
    with pytest.raises(FileNotFoundError):
        disk.names(root / "absent")


def test_files_are_renamed_and_removed(disk: Disk, root: Path) -> None:
    for name in ("b", "a", "c"):
        replace_file(disk, root / name, name.encode())
    disk.make_directory(root / "d" / "e")
    replace_file(disk, root / "d" / "e" / "f", b"deep")
    assert disk.names(root) == ["a", "b", "c", "d"]
    disk.rename(root / "a", root / "b")
    assert disk.names(root) == ["b", "c", "d"]
    assert read_file(disk, root / "b") == b"a"
    disk.rename(root / "d", root / "g")
    assert read_file(disk, root / "g" / "e" / "f") == b"deep"
    disk.remove(root / "c")
    disk.remove_tree(root / "g")
    disk.sync_directory(root)
    assert disk.names(root) == ["b"]
    assert disk.exists(root / "b") and not disk.exists(root / "g" / "e") and not disk.exists(root / "c")
    failing: list[Callable[[], None]] = [
        lambda: disk.remove(root / "c"),
        lambda: disk.rename(root / "c", root / "b"),
    ]
    for missing in failing:
        with pytest.raises(FileNotFoundError):
            missing()


def test_a_map_survives_its_handle_its_name_and_a_replacement(disk: Disk, root: Path) -> None:
    replace_file(disk, root / "f", b"0123456789")
    handle = disk.open(root / "f")
    view = disk.map(handle, 6)
    disk.close(handle)
    disk.copy(root / "f", root / "g", 4)
    disk.rename(root / "g", root / "f")
    assert bytes(view) == b"012345" and view.readonly
    assert read_file(disk, root / "f") == b"0123"


def test_a_copy_can_be_resumed(disk: Disk, root: Path) -> None:
    replace_file(disk, root / "f", b"0123456789")
    replace_file(disk, root / "g", b"of an earlier copy")
    for start, length in ((0, 3), (3, 4), (4, 9)):
        disk.copy(root / "f", root / "g", length, start=start)
        assert read_file(disk, root / "g") == b"0123456789"[:length]
    with pytest.raises(FileNotFoundError):
        disk.copy(root / "f", root / "absent", 9, start=4)
    with pytest.raises(OSError):
        disk.copy(root / "f", root / "g", 11, start=9)


@contextlib.contextmanager
def _room_for(disk: Disk, more_bytes: int) -> Iterator[None]:
    """Limit the growth of each file of the real disk, or of all files of the simulated one together."""
    if isinstance(disk, SimDisk):
        disk.capacity_bytes = disk.used_bytes + more_bytes
        yield
        disk.capacity_bytes = None
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_copy_on_a_full_disk_keeps_what_fits(disk: Disk, root: Path) -> None:
    replace_file(disk, root / "f", b"0123456789")
    with _room_for(disk, 4), pytest.raises(OSError) as caught:
        disk.copy(root / "f", root / "g", 9)
    assert is_full(caught.value)
    assert read_file(disk, root / "g") == b"0123"
    with _room_for(disk, 0), pytest.raises(OSError) as caught:
        disk.copy(root / "f", root / "h", 9)
    assert is_full(caught.value)
    assert read_file(disk, root / "h") == b""
    with _room_for(disk, 9):
        disk.copy(root / "f", root / "h", 9)
    assert read_file(disk, root / "h") == b"012345678"


def test_a_lock_is_exclusive_until_closed(disk: Disk, root: Path) -> None:
    handle = disk.lock(root / "lock")
    assert handle is not None
    assert disk.lock(root / "lock") is None
    disk.close(handle)
    again = disk.lock(root / "lock")
    assert again is not None
    disk.close(again)


def test_a_replacement_leaves_no_trace(disk: Disk, root: Path) -> None:
    replace_file(disk, root / "f", b"a longer first content")
    replace_file(disk, root / "f", b"second", sync=False)
    assert disk.names(root) == ["f"]
    assert read_file(disk, root / "f") == b"second"


def test_only_the_rest_of_a_failed_attempt_is_truncated(
    disk: Disk, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may write a truncated and closed file immediately: that would happen for each of thousands of
    new logs."""
    cuts: list[int] = []
    real = disk.truncate

    def counted(handle: int, length: int) -> None:
        cuts.append(length)
        real(handle, length)

    monkeypatch.setattr(disk, "truncate", counted)
    replace_file(disk, root / "f", b"first", sync=False)
    assert cuts == []
    handle = disk.open(root / "f.tmp", create=True)
    write_all(disk, handle, [b"left behind by an attempt that failed"], 0)
    disk.close(handle)
    replace_file(disk, root / "f", b"second", sync=False)
    assert cuts == [0] and read_file(disk, root / "f") == b"second"


def test_write_all_accepts_more_buffers_than_one_writev(disk: Disk, root: Path) -> None:
    handle = disk.open(root / "f", create=True)
    parts = [bytes([number % 251]) * (number % 3) for number in range(2500)]
    assert write_all(disk, handle, parts, 5) == len(b"".join(parts))
    assert disk.read(handle, 10_000, 5) == b"".join(parts)
    disk.close(handle)


class ShortWrites(RealDisk):
    """Write at most seven bytes a call."""

    def write(self, handle: int, buffers: Sequence[Buffer], at: int) -> int:
        return os.pwrite(handle, b"".join(buffers)[:7], at)


def test_write_all_survives_short_writes(tmp_path: Path) -> None:
    disk = ShortWrites()
    handle = disk.open(tmp_path / "f", create=True)
    assert write_all(disk, handle, [b"abcde", b"", b"fghijklmno", b"p"], 0) == 16
    assert disk.read(handle, 100, 0) == b"abcdefghijklmnop"
    disk.close(handle)


def test_dev_full_reports_a_full_disk() -> None:
    handle = RealDisk().open(Path("/dev/full"))
    with pytest.raises(OSError) as caught:
        write_all(RealDisk(), handle, [b"x"], 0)
    RealDisk().close(handle)
    assert is_full(caught.value)


def test_a_sim_disk_fills_up_in_the_middle_of_a_write() -> None:
    disk = SimDisk(capacity_bytes=10)
    handle = disk.open(Path("/f"), create=True)
    assert disk.write(handle, [b"12345678"], 0) == 8
    assert disk.write(handle, [b"abcdef"], 8) == 2
    with pytest.raises(OSError) as caught:
        disk.write(handle, [b"c"], 10)
    assert caught.value.errno == errno.ENOSPC
    assert disk.write(handle, [b"xy"], 0) == 2


def test_a_sim_disk_has_faults_and_can_be_read_only() -> None:
    disk = SimDisk()
    handle = disk.open(Path("/f"), create=True)
    disk.fail_next("write", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.write(handle, [b"x"], 0)
    assert disk.write(handle, [b"x"], 0) == 1
    disk.read_only = True
    with pytest.raises(OSError, match="Read-only"):
        disk.write(handle, [b"x"], 0)
    assert disk.read(handle, 1, 0) == b"x"


def test_a_process_crash_keeps_the_sim_disks_page_cache() -> None:
    disk = SimDisk(seed=1)
    handle = disk.open(Path("/f"), create=True)
    disk.write(handle, [b"whole"], 0)
    disk.die_after(0)
    with pytest.raises(ProcessDied):
        disk.write(handle, [b"x" * 1000], 5)
    with pytest.raises(ProcessDied):
        disk.read(handle, 1, 0)
    disk.restart(page_cache_lost=False)
    content = read_file(disk, Path("/f"))
    assert content.startswith(b"whole") and 5 <= len(content) <= 1005


def test_a_sim_disk_power_cut_loses_only_unsynced_writes() -> None:
    outcomes = set()
    for seed in range(40):
        disk = SimDisk(seed=seed)
        replace_file(disk, Path("/synced"), b"s" * 2000)
        handle = disk.open(Path("/loose"), create=True)
        disk.write(handle, [b"l" * 2000], 0)
        disk.restart(page_cache_lost=True)
        assert read_file(disk, Path("/synced")) == b"s" * 2000
        outcomes.add(len(read_file(disk, Path("/loose"))) if disk.exists(Path("/loose")) else None)
    assert {None, 0, 2000} < outcomes


def test_a_sim_disk_notices_a_file_that_shrinks_under_a_map() -> None:
    disk = SimDisk()
    handle = disk.open(Path("/f"), create=True)
    disk.write(handle, [b"0123456789"], 0)
    view = disk.map(handle, 8)[2:4]
    disk.truncate(handle, 8)
    with pytest.raises(AssertionError, match="SIGBUS"):
        disk.truncate(handle, 7)
    del view
    disk.truncate(handle, 7)
