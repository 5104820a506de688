"""Tests that recovery does not delete unusable data that may contain records: it moves to ``set-aside/``, and the
log is doubted."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sparklog.record.header import HEADER_BYTES, unpack_headers
from sparklog.storage.disk import read_file
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import PARTITION_FILE
from sparklog.storage.set_aside import MARK_FILE, SET_ASIDE, SetAsideEntry
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import (
    LOG_DIR,
    SMALL,
    TOPIC_ID,
    TP,
    commit_and_seal,
    config,
    create_log,
    fill,
    open_directory,
)
from tests.storage.batches import read_numbers as numbers

DIRECTORY = LOG_DIR / str(TP)
ASIDE = LOG_DIR / SET_ASIDE
BASES = (0, 12, 24)


def data(base: int) -> str:
    return f"{base:020d}.arrow"


def index(base: int) -> str:
    return f"{base:020d}.index"


@pytest.fixture(params=[True, False], ids=["checkpoint", "no checkpoint"])
def files(disk: SimDisk, request: pytest.FixtureRequest) -> dict[str, bytes]:
    """Write a log of three segments, the first of which is sealed. Return its segments' files."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log, 12)
    if request.param:
        log.set_high_watermark(30)
        directory.checkpoint()
    names = [kind(base) for base in BASES for kind in (data, index)]
    return {name: read_file(disk, DIRECTORY / name) for name in names}


def reopened(disk: SimDisk) -> tuple[LogDirectory, Log]:
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    log = directory.get(TP)
    assert log is not None
    return directory, log


def kept(disk: SimDisk, directory: LogDirectory) -> tuple[SetAsideEntry, dict[str, bytes]]:
    """Return the one entry of ``set-aside/`` and its segments' files."""
    (entry,) = directory.kept_aside.entries()
    names = [name for name in disk.names(ASIDE / entry.name) if name not in (PARTITION_FILE, MARK_FILE)]
    return entry, {name: read_file(disk, ASIDE / entry.name / name) for name in names}


def test_without_any_index_all_data_are_kept(disk: SimDisk, files: dict[str, bytes]) -> None:
    """Kafka rebuilds an index from its log. Here the index has what the data do not: offsets, producers, checksums."""
    for base in BASES:
        disk.remove(DIRECTORY / index(base))
    directory, log = reopened(disk)
    assert not directory.trusted
    assert (log.log_start_offset, log.log_end_offset) == (0, 0)
    entry, found = kept(disk, directory)
    assert found == {data(base): files[data(base)] for base in BASES}
    assert (entry.mark.topic, entry.mark.partition, entry.mark.topic_id) == (*TP, TOPIC_ID)
    assert "segment 0 holds no batch, or lacks one of its files" in entry.mark.reason
    assert not entry.mark.intact and entry.mark.last_epoch == -1, "its records are unknown"
    assert read_file(disk, ASIDE / entry.name / PARTITION_FILE) == read_file(disk, DIRECTORY / PARTITION_FILE)
    fill(log, 3, leader_epoch=2)
    assert numbers(log) == list(range(9))
    directory, log = reopened(disk)
    assert kept(disk, directory) == (entry, found), "another start must change nothing"
    assert numbers(log) == list(range(9))


def test_without_the_only_index_the_data_are_kept_and_doubted(disk: SimDisk) -> None:
    """A single segment may be in no checkpoint yet, so nothing else shows that it existed."""
    fill(create_log(open_directory(disk=disk)), 3)
    before = read_file(disk, DIRECTORY / data(0))
    disk.remove(DIRECTORY / index(0))
    directory, log = reopened(disk)
    assert not directory.trusted and log.findings
    assert kept(disk, directory)[1] == {data(0): before}


@pytest.mark.parametrize("kind", [data, index])
def test_segments_after_one_that_lacks_a_file_are_kept(disk: SimDisk, files: dict[str, bytes], kind) -> None:  # type: ignore[no-untyped-def]
    lost = kind(12)
    disk.remove(DIRECTORY / lost)
    directory, log = reopened(disk)
    assert not directory.trusted
    assert numbers(log) == list(range(12))
    entry, found = kept(disk, directory)
    assert found == {name: files[name] for name in files if name not in (data(0), index(0), lost)}
    assert (entry.mark.log_end_offset, entry.mark.last_epoch) == (30, 1), "a leader has these records"


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_after_a_damaged_one_are_kept(disk: SimDisk, files: dict[str, bytes], batch: int) -> None:
    """A log has no holes, so it ends before the damaged batch."""
    headers = unpack_headers(files[index(12)])
    disk.flip_bit(DIRECTORY / data(12), headers[batch].position + 200)
    directory, log = reopened(disk)
    assert not directory.trusted
    end = 12 + 3 * batch
    assert numbers(log) == list(range(end))
    entry, found = kept(disk, directory)
    assert found[data(24)] == files[data(24)] and found[index(24)] == files[index(24)]
    assert found[index(12)] == files[index(12)][batch * HEADER_BYTES :]
    for header in headers[batch + 1 :]:
        place = slice(header.position, header.position + header.stored_bytes)
        assert found[data(12)][place] == files[data(12)][place]
    assert (entry.mark.log_end_offset, entry.mark.last_epoch) == (30, 1)


@pytest.mark.parametrize("base", [0, 12])
def test_data_without_headers_are_kept(disk: SimDisk, files: dict[str, bytes], base: int) -> None:
    handle = disk.open(DIRECTORY / index(base))
    disk.truncate(handle, HEADER_BYTES)
    disk.close(handle)
    directory, log = reopened(disk)
    assert not directory.trusted
    assert numbers(log) == list(range(base + 3))
    entry, found = kept(disk, directory)
    position = unpack_headers(files[index(base)])[1].position
    assert found[data(base)][position:] == files[data(base)][position:] and found[index(base)] == b""
    assert set(found) == {kind(at) for at in BASES if at >= base for kind in (data, index)}
    assert entry.mark.log_end_offset == 30


def test_data_named_by_a_checkpoint_survive_an_emptied_index(disk: SimDisk) -> None:
    """Without the checkpoint's claim they are the rest of an unfinished append."""
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 3)
    log.set_high_watermark(9)
    directory.checkpoint()
    before = read_file(disk, DIRECTORY / data(0))
    handle = disk.open(DIRECTORY / index(0))
    disk.truncate(handle, 0)
    disk.close(handle)
    directory, _ = reopened(disk)
    assert not directory.trusted
    assert kept(disk, directory)[1] == {data(0): before, index(0): b""}


def test_without_space_for_a_copy_the_whole_segment_is_kept(disk: SimDisk, files: dict[str, bytes]) -> None:
    """A rename needs no space. The log then ends before the segment."""
    disk.flip_bit(DIRECTORY / data(12), unpack_headers(files[index(12)])[2].position + 200)
    damaged = read_file(disk, DIRECTORY / data(12))
    disk.restart(page_cache_lost=False)
    disk.capacity_bytes = disk.used_bytes
    directory = open_directory(disk=disk)
    log = directory.get(TP)
    assert not directory.trusted
    assert log is not None and numbers(log) == list(range(12))
    (entry,) = directory.kept_aside.entries()
    names = disk.names(ASIDE / entry.name)
    assert [name for name in names if name.endswith((".arrow", ".index"))] == sorted(
        kind(base) for base in (12, 24) for kind in (data, index)
    )
    assert read_file(disk, ASIDE / entry.name / data(12)) == damaged


def test_a_failing_copy_truncates_nothing(disk: SimDisk, files: dict[str, bytes]) -> None:
    disk.flip_bit(DIRECTORY / data(24), unpack_headers(files[index(24)])[0].position + 200)
    before = {name: read_file(disk, DIRECTORY / name) for name in files}
    disk.restart(page_cache_lost=False)
    disk.flip_bit(DIRECTORY / data(12), unpack_headers(files[index(12)])[2].position + 200)
    before[data(12)] = read_file(disk, DIRECTORY / data(12))
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(Exception, match="Input/output error"):
        open_directory(disk=disk)
    found = {name: read_file(disk, path / name) for path in [DIRECTORY] for name in disk.names(path) if name in files}
    assert found == before


@pytest.mark.parametrize("batches", [4, 3])
def test_the_rest_of_a_killed_append_is_not_kept(disk: SimDisk, batches: int) -> None:
    """No client got an acknowledgement: neither for the first batch of a segment nor for a later one."""
    fill(create_log(open_directory(disk=disk), segment_bytes=SMALL), batches)
    for operations in range(20):
        directory, log = reopened(disk)
        assert directory.trusted and not disk.exists(ASIDE)
        log.config = config(segment_bytes=SMALL)
        end = log.log_end_offset
        disk.die_after(operations)
        try:
            fill(log, 1)
        except ProcessDied:
            continue
        assert log.log_end_offset == end + 3
        return
    pytest.fail("the append must have failed")


def test_a_real_disk_keeps_the_same_data(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    position = log.segments[1].position_of(1)
    directory.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / str(TP)).glob("0*")}
    with (tmp_path / str(TP) / data(12)).open("r+b") as file:
        file.seek(position + 200)
        file.write(b"?")
    directory = open_directory(tmp_path)
    (entry,) = directory.kept_aside.entries()
    found = {path.name: path.read_bytes() for path in (tmp_path / SET_ASIDE / entry.name).glob("0*")}
    directory.close()
    assert found[data(24)] == before[data(24)]
    assert found[data(12)][:position] == bytes(position)
    assert found[data(12)][position + 201 :] == before[data(12)][position + 201 :]
