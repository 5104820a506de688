"""Tests of a log after crashes, damage and power failures. The tests damage files on purpose; see also
test_crash_points."""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c
import pytest

from sparklog.model import EpochEnd
from sparklog.record.header import HEADER_BYTES
from sparklog.storage.checkpoints import CHECKPOINT_FILE
from sparklog.storage.disk import read_file, replace_file
from sparklog.storage.epochs import EPOCHS_FILE
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.log import Log
from sparklog.storage.producers import SNAPSHOT_SUFFIX
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    LOG_DIR,
    TP,
    append,
    batch,
    commit_and_seal,
    config,
    create_log,
    fill,
    open_directory,
    read_numbers,
)

SMALL = 1280  #: four batches of twelve records
DIRECTORY = LOG_DIR / str(TP)


def filled(disk: SimDisk, batches: int = 10, *, seal_to: int = 0) -> Log:
    log = create_log(open_directory(disk=disk), segment_bytes=SMALL)
    fill(log, batches)
    commit_and_seal(log, seal_to)
    return log


def reopened(disk: SimDisk, *, power_cut: bool = False) -> Log:
    disk.restart(page_cache_lost=power_cut)
    directory = open_directory(disk=disk, boot_id="boot-2" if power_cut else "boot-1")
    log = directory.get(TP)
    assert log is not None
    return log


def cut(disk: SimDisk, name: str, by: int) -> None:
    handle = disk.open(DIRECTORY / name)
    disk.truncate(handle, disk.size(handle) - by)
    disk.close(handle)


def extend(disk: SimDisk, name: str, content: bytes) -> None:
    handle = disk.open(DIRECTORY / name)
    disk.write(handle, [content], disk.size(handle))
    disk.close(handle)


def data(base: int) -> str:
    return f"{base:020d}.arrow"


def index(base: int) -> str:
    return f"{base:020d}.index"


def check_usable(log: Log, end: int) -> None:
    """Check that the log ends at ``end``, has exactly the offsets below, and accepts more."""
    assert log.log_end_offset == end
    assert read_numbers(log) == list(range(end))
    fill(log, 5, leader_epoch=9)
    assert read_numbers(log) == list(range(end + 15))


def test_a_process_crash_loses_nothing(disk: SimDisk) -> None:
    filled(disk, 10, seal_to=15)
    log = reopened(disk)
    assert log.findings == ()
    assert [segment.sealed for segment in log.segments] == [True, False, False]
    assert (log.last_epoch, log.end_of_epoch(1)) == (1, EpochEnd(1, 30))
    check_usable(log, 30)


def test_high_watermark_and_log_start_come_from_the_checkpoint(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log, 20)
    log.advance_log_start(13)
    directory.checkpoint()
    log.set_high_watermark(25)
    again = reopened(disk)
    assert (again.log_start_offset, again.high_watermark, again.recovery_point) == (13, 20, 12)


@pytest.mark.parametrize("regrown_to", [15, 45])
@pytest.mark.parametrize("on_its_way", [False, True])
def test_a_lowered_high_watermark_is_stored_before_the_truncation(
    disk: SimDisk, regrown_to: int, on_its_way: bool
) -> None:
    """After an unclean election the follower lowers its high watermark and then truncates. If it is killed, it must
    neither treat later records as committed, nor its own log as one that has lost its end."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(30)
    write = directory.checkpoint_job()
    if not on_its_way:
        write()
    log.set_high_watermark(15)
    log.truncate(15)
    write()  # a late checkpoint
    fill(log, (regrown_to - 15) // 3, leader_epoch=2)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    again = directory.get(TP)
    assert again is not None and directory.trusted
    assert (again.log_end_offset, again.high_watermark) == (regrown_to, 15)


def test_truncations_above_the_stored_mark_write_no_checkpoint(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(15)
    directory.checkpoint()
    before = read_file(disk, LOG_DIR / CHECKPOINT_FILE)
    log.set_high_watermark(21)
    log.truncate(21)
    assert read_file(disk, LOG_DIR / CHECKPOINT_FILE) == before
    log.truncate(9)
    assert read_file(disk, LOG_DIR / CHECKPOINT_FILE) != before


def test_torn_data_are_truncated(disk: SimDisk) -> None:
    filled(disk)
    extend(disk, data(24), b"\xff\xff\xff\xff half of a batch")
    check_usable(reopened(disk), 30)


def test_a_torn_header_is_truncated(disk: SimDisk) -> None:
    filled(disk)
    cut(disk, index(24), 50)
    check_usable(reopened(disk), 27)


def test_headers_without_their_data_are_truncated(disk: SimDisk) -> None:
    filled(disk)
    cut(disk, data(24), 1)
    log = reopened(disk)
    assert "data end at" in log.findings[0]
    check_usable(log, 27)


@pytest.mark.parametrize(("batch", "end"), [(0, 24), (1, 27)])
def test_a_flipped_byte_in_the_active_segment_is_found(disk: SimDisk, batch: int, end: int) -> None:
    log = filled(disk)
    disk.flip_bit(DIRECTORY / data(24), log.segments[2].position_of(batch) + 200)
    log = reopened(disk)
    assert f"batch {batch} of segment 24" in log.findings[0] and "CRC32C" in log.findings[0]
    check_usable(log, end)


def test_a_bit_flip_in_an_unsealed_segment_truncates_the_rest(disk: SimDisk) -> None:
    log = filled(disk, seal_to=12)
    disk.flip_bit(DIRECTORY / data(12), log.segments[1].position_of(2) + 100)
    log = reopened(disk)
    assert len(log.findings) == 3 and "removed 1 segments from offset 24 on" in log.findings[1]
    assert disk.names(DIRECTORY).count(data(24)) == 0
    check_usable(log, 18)


def test_a_flipped_byte_in_a_header_is_found(disk: SimDisk) -> None:
    filled(disk)
    disk.flip_bit(DIRECTORY / index(24), HEADER_BYTES + 30)
    log = reopened(disk)
    assert "header CRC32C" in log.findings[0]
    check_usable(log, 27)


def test_a_damaged_prelude_truncates_the_segment(disk: SimDisk) -> None:
    filled(disk)
    disk.flip_bit(DIRECTORY / data(24), 3)
    check_usable(reopened(disk), 24)


@pytest.mark.parametrize("kind", [data, index])
def test_a_missing_file_truncates_the_segment(disk: SimDisk, kind) -> None:  # type: ignore[no-untyped-def]
    filled(disk)
    disk.remove(DIRECTORY / kind(12))
    log = reopened(disk)
    assert "lacks one of its files" in log.findings[0]
    check_usable(log, 12)


@pytest.mark.parametrize("seed", [21, 25, 51, 166, 192])
def test_batches_that_replace_damaged_ones_are_not_trusted(seed: int) -> None:
    disk = SimDisk(seed=seed)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log, 24)
    directory.checkpoint()
    disk.remove(DIRECTORY / index(12))
    log = reopened(disk)
    log.config = config(segment_bytes=SMALL)
    fill(log, 6, leader_epoch=2)
    log = reopened(disk, power_cut=True)
    assert read_numbers(log) == list(range(log.log_end_offset))


@pytest.mark.parametrize("field", [0, 8, 40, 72])
def test_a_damaged_header_inside_a_segment_is_found(disk: SimDisk, field: int) -> None:
    """Recovery finds it where it has to read headers because other files are missing, even below the recovery point."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    for number in range(0, 30, 3):
        append(log, batch(3, first=number, producer=7, sequence=number))
    commit_and_seal(log, 24)
    directory.checkpoint()
    for name in disk.names(DIRECTORY):
        if name == EPOCHS_FILE or name.endswith(SNAPSHOT_SUFFIX):
            disk.remove(DIRECTORY / name)
    disk.flip_bit(DIRECTORY / index(12), HEADER_BYTES + field)
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    again = directory.get(TP)
    assert again is not None
    assert not directory.trusted
    assert any("offset 15" in finding for finding in again.findings)
    check_usable(again, 15)
    assert reopened(disk).findings == ()


def test_a_truncated_index_of_a_sealed_segment_is_found(disk: SimDisk) -> None:
    filled(disk, seal_to=24)
    cut(disk, index(12), 2 * HEADER_BYTES + 10)
    log = reopened(disk)
    assert not log.segments[-1].sealed
    check_usable(log, 15)


@pytest.mark.parametrize("tail", [b"", b"torn footer", bytes(5000)])
def test_an_incomplete_footer_is_removed_and_the_segment_resealed(disk: SimDisk, tail: bytes) -> None:
    log = filled(disk, seal_to=12)
    whole = read_file(disk, DIRECTORY / data(0))
    replace_file(disk, DIRECTORY / data(0), whole[: log.segments[0].data_size] + tail)
    log = reopened(disk, power_cut=False)
    assert not log.segments[0].sealed
    assert commit_and_seal(log, 12) == 1
    assert read_file(disk, DIRECTORY / data(0)) == whole


def test_batches_below_the_recovery_point_are_not_read(disk: SimDisk) -> None:
    """After a clean shutdown the readers' CRC finds damage in the data: a start must not read all data."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log, 24)
    position = log.segments[2].position_of(1)
    directory.write_clean_marker()
    directory.close()
    disk.flip_bit(DIRECTORY / data(24), position + 200)
    again = reopened(disk)
    assert again.findings == () and again.log_end_offset == 30


def test_a_leftover_copy_or_deletion_is_finished(disk: SimDisk) -> None:
    filled(disk, seal_to=12)
    disk.rename(DIRECTORY / data(0), DIRECTORY / (data(0) + ".deleted"))
    for name in (data(12) + ".copy", index(12) + ".copy", "leader-epochs.tmp"):
        replace_file(disk, DIRECTORY / name, b"half")
    log = reopened(disk)
    assert not [name for name in disk.names(DIRECTORY) if name.endswith((".copy", ".tmp", ".deleted"))]
    assert not disk.exists(DIRECTORY / index(0))
    assert (log.log_start_offset, log.log_end_offset) == (12, 30)


def test_invalid_epoch_files_are_rebuilt_from_the_batches(disk: SimDisk) -> None:
    log = filled(disk, 3)
    for epoch in (4, 6):
        fill(log, 4, leader_epoch=epoch)
    commit_and_seal(log)
    log.durability.flush()
    expected = log._tail.epochs.entries
    assert len(expected) == 3
    good = read_file(disk, DIRECTORY / EPOCHS_FILE)
    for content in (
        good,
        b"{",
        b'{"entries":[],"through":24,"version":1}',
        b'{"entries":[[1,0],[7,9]],"through":24,"version":1}',
        b'{"entries":[[1,0],[0,9]],"through":24,"version":1}',
    ):
        replace_file(disk, DIRECTORY / EPOCHS_FILE, content)
        assert reopened(disk)._tail.epochs.entries == expected
    assert not disk.exists(DIRECTORY / EPOCHS_FILE)
    assert reopened(disk)._tail.epochs.entries == expected


def test_truncated_epochs_do_not_return(disk: SimDisk) -> None:
    log = filled(disk, 4)
    fill(log, 6, leader_epoch=3)
    commit_and_seal(log)
    log.truncate(12)
    fill(log, 6, leader_epoch=5)
    log.durability.flush()
    again = reopened(disk)
    assert again.end_of_epoch(4) == EpochEnd(1, 12)
    check_usable(again, 30)


@pytest.mark.parametrize("change", ["append", "truncate", "restart"])
def test_a_second_clean_stop_covers_later_changes(disk: SimDisk, change: str) -> None:
    filled(disk, 6)
    for _ in range(3):
        disk.restart(page_cache_lost=False)
        directory = open_directory(disk=disk)
        log = create_log(directory, segment_bytes=SMALL)
        if change == "append":
            fill(log, 2, leader_epoch=log.last_epoch + 1)
        elif change == "truncate":
            log.truncate(log.log_end_offset - 3)
        else:
            log.restart_at(log.log_end_offset + 100)
        expected = (log.log_end_offset, log.last_epoch, log.end_of_epoch(log.last_epoch))
        directory.write_clean_marker()
        directory.close()
        log = reopened(disk, power_cut=True)
        assert (log.log_end_offset, log.last_epoch, log.end_of_epoch(log.last_epoch)) == expected
        assert log.findings == () and log.recovery_point == log.log_end_offset


def test_an_earlier_processs_records_are_not_truncated_in_place(disk: SimDisk) -> None:
    """A reader may have mapped them while that process served them. The stored high watermark may be too low."""
    filled(disk, 4)
    log = reopened(disk)
    assert log.high_watermark == 0
    handle = disk.open(DIRECTORY / data(0))
    view = disk.map(handle, 1000)
    log.truncate(3)
    assert len(view) == 1000
    check_usable(log, 3)


def test_a_removal_in_progress_spares_a_recreated_log(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    directory._removal._in_background = lambda work: None
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(30)
    log.advance_log_start(30)
    directory.checkpoint()
    log.restart_at(0)
    fill(log, 2)
    check_usable(reopened(disk), 6)


def test_epochs_of_lost_batches_are_dropped(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 6)
    fill(log, 6, leader_epoch=3)
    directory.write_clean_marker()
    directory.close()
    disk.remove(DIRECTORY / index(12))
    log = reopened(disk)
    assert (log.log_end_offset, log.last_epoch) == (12, 1)
    check_usable(log, 12)


def test_a_damaged_snapshot_is_ignored(disk: SimDisk) -> None:
    filled(disk, seal_to=24)
    replace_file(disk, DIRECTORY / f"{24:020d}.producers", b"nonsense")
    check_usable(reopened(disk), 30)


def test_a_torn_producer_snapshot_is_not_used(disk: SimDisk) -> None:
    """Snapshots of many logs are written before any is fsynced, and then the batches that a snapshot covers may be
    deleted."""
    log = create_log(open_directory(disk=disk), segment_bytes=SMALL)
    append(log, batch(3, producer=7, sequence=0))
    fill(log, 9)
    log.durability.flush()
    log.durability.leave_state()
    snapshot = DIRECTORY / f"{log.log_end_offset:020d}.producers"
    assert disk.exists(snapshot)
    replace_file(disk, snapshot, read_file(disk, snapshot)[:10])
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk, boot_id="boot-2")
    log = create_log(directory, segment_bytes=SMALL)
    commit_and_seal(log)
    log.advance_log_start(log.log_end_offset)
    directory.checkpoint()
    assert log.first_segment_offset > 0 and not disk.exists(DIRECTORY / data(0))
    log = reopened(disk)
    start = log.log_end_offset
    append(log, batch(3, first=start, producer=7, sequence=3), leader_epoch=9)
    assert log.log_end_offset == start + 3, "the next batch of its sequence must be accepted"


def test_a_newer_batch_format_is_refused_and_nothing_is_truncated(disk: SimDisk) -> None:
    filled(disk)
    path = DIRECTORY / index(24)
    content = bytearray(read_file(disk, path))
    flags = struct.unpack_from("<H", content, HEADER_BYTES + 90)[0]
    struct.pack_into("<H", content, HEADER_BYTES + 90, (flags & 0xFFF) | 2 << 12)
    head = bytes(content[HEADER_BYTES : 2 * HEADER_BYTES - 4])
    struct.pack_into("<I", content, 2 * HEADER_BYTES - 4, google_crc32c.value(head))
    replace_file(disk, path, bytes(content))
    disk.restart(page_cache_lost=False)
    with pytest.raises(NewerFormatError, match="format version 2 found, at most 1 expected"):
        open_directory(disk=disk)
    assert read_file(disk, path) == bytes(content)


@pytest.mark.parametrize("name", ["partition.json", EPOCHS_FILE, f"{24:020d}.producers"])
def test_a_newer_state_file_is_refused_by_name(disk: SimDisk, name: str) -> None:
    filled(disk, seal_to=24)
    newer = 3 if name.endswith(".producers") else 2
    replace_file(disk, DIRECTORY / name, f'{{"version":{newer},"surprise":true}}'.encode())
    disk.restart(page_cache_lost=False)
    with pytest.raises(NewerFormatError, match=f"{name}: format version {newer} found"):
        open_directory(disk=disk)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_keeps_everything_below_the_recovery_point(seed: int) -> None:
    disk = SimDisk(seed=seed)
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 20)
    commit_and_seal(log, 40)
    fill(log, 5)
    directory.checkpoint()
    assert log.recovery_point == 36
    log = reopened(disk, power_cut=True)
    assert log.log_end_offset >= 36
    check_usable(log, log.log_end_offset)


def test_each_file_of_a_log_is_opened_once(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting broker opens thousands of logs: it reads no file twice, and does not search for missing files. It
    still finds leader epochs and producers."""
    log = create_log(open_directory(disk=disk), segment_bytes=SMALL)
    fill(log, 2)
    append(log, batch(producer=7, sequence=0), leader_epoch=4)
    append(log, batch(producer=7, sequence=3), leader_epoch=5)
    appended = log.log_end_offset
    opened: list[str] = []
    real = disk.open

    def counted(path: Path, *, create: bool = False) -> int:
        if path.parent.name == DIRECTORY.name:
            opened.append(path.name)
        return real(path, create=create)

    disk.restart(page_cache_lost=False)
    monkeypatch.setattr(disk, "open", counted)
    again = open_directory(disk=disk).get(TP)
    assert again is not None
    assert sorted(opened) == sorted(["partition.json", data(0), index(0)])
    assert [again.end_of_epoch(epoch) for epoch in (1, 4, 5)] == [log.end_of_epoch(epoch) for epoch in (1, 4, 5)]
    append(again, batch(producer=7, sequence=3), leader_epoch=5)
    assert again.log_end_offset == appended, "a repeated batch must be recognized"
