"""Tests of the trust in a log directory: after a clean shutdown, a crash, a power failure and damage."""

from __future__ import annotations

from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import LOG_DIR, TP, create_log, fill, open_directory

SMALL = 1280  #: four batches of twelve records
DIRECTORY = LOG_DIR / str(TP)


def test_damage_makes_the_directory_untrusted(disk: SimDisk) -> None:
    """Records that this replica had acknowledged may be lost: it must not return as if it had them."""
    directory = open_directory(disk=disk)
    log = create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    log.set_high_watermark(30)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    assert directory.trusted
    disk.restart(page_cache_lost=False)
    disk.remove(DIRECTORY / f"{24:020d}.index")
    directory = open_directory(disk=disk)
    assert not directory.trusted
    disk.restart(page_cache_lost=False)
    disk.flip_bit(DIRECTORY / f"{12:020d}.arrow", 500)
    assert not open_directory(disk=disk).trusted


def test_doubt_survives_processes_that_end_before_they_register(disk: SimDisk) -> None:
    """ZooKeeper may be unreachable at that time, and the supervisor starts the next process, which finds no damage
    any more."""

    def trusted(boot_id: str = "a") -> bool:
        disk.restart(page_cache_lost=False)
        return open_directory(disk=disk, boot_id=boot_id).trusted

    assert trusted()
    assert not trusted("b")
    assert not trusted("b"), "with the same boot id, and the doubt still not registered"
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk, boot_id="b")
    directory.note_incarnation(1)
    assert trusted("b")
    disk.restart(page_cache_lost=False)
    log = create_log(open_directory(disk=disk, boot_id="b"), segment_bytes=SMALL)
    fill(log, 10)
    disk.restart(page_cache_lost=False)
    disk.flip_bit(DIRECTORY / f"{12:020d}.arrow", 500)
    assert not trusted("b")
    assert not trusted("b"), "the damage has been truncated"


def test_a_directory_knows_the_last_incarnation_that_wrote_to_it(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    assert directory.incarnation == 0
    directory.note_incarnation(7)
    directory.write_clean_marker()
    directory.close()
    assert open_directory(disk=disk).incarnation == 7


def test_a_clean_directory_is_trusted(disk: SimDisk) -> None:
    def opened(boot_id: str) -> tuple[LogDirectory, bool, bool]:
        disk.restart(page_cache_lost=False)
        directory = open_directory(disk=disk, boot_id=boot_id)
        return directory, directory.trust.clean, directory.trusted

    assert opened("a")[1:] == (False, True)
    directory, *state = opened("a")
    assert state == [False, True]
    directory.write_clean_marker()
    directory.close()
    assert opened("b")[1:] == (True, True)
    assert opened("b")[1:] == (False, True)
    assert opened("c")[1:] == (False, False)
