"""Tests of a log directory's knowledge of logs that it no longer has or cannot read."""

from __future__ import annotations

import errno

import pytest

from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import CHECKPOINT_FILE
from sparklog.storage.directory_trust import RUNNING_FILE, BootMark
from sparklog.storage.disk import read_file, replace_file
from sparklog.storage.formats import decode_state, encode_state
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import PARTITION_FILE, directory_name
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import LOG_DIR, SCHEMAS, TOPIC_ID, TP, config, fill, open_directory

OTHER = TopicPartition(TP.topic, TP.partition + 1)
ELSEWHERE = TopicPartition("another", 0)


def create(directory: LogDirectory, tp: TopicPartition = TP, topic_id: str = TOPIC_ID) -> Log:
    return directory.create(tp, topic_id, schemas=SCHEMAS, config=config())


def name_all(directory: LogDirectory) -> list[Log]:
    directory.checkpoint()
    return directory.consume_named()


def reopened(disk: SimDisk, *, boot_id: str = "boot-1") -> LogDirectory:
    """Return the directory as the next process finds it."""
    disk.restart(page_cache_lost=False)
    return open_directory(disk=disk, boot_id=boot_id)


def written(disk: SimDisk, *tps: TopicPartition) -> LogDirectory:
    directory = open_directory(disk=disk)
    directory.name_logs(lambda: None)
    for tp in tps:
        fill(create(directory, tp), 2)
    name_all(directory)
    directory.note_incarnation(1)
    return directory


def test_a_log_is_named_after_a_later_checkpoint_is_durable(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    asked: list[int] = []
    directory.name_logs(lambda: asked.append(len(directory.unnamed)))
    log = create(directory)
    assert not log.named and asked == [], "an empty log must cost nothing"
    early = directory.checkpoint_job()
    fill(log, 1)
    assert asked == [1] and directory.unnamed == {TP}
    early()
    assert directory.consume_named() == [] and not log.named
    write = directory.checkpoint_job()
    assert directory.consume_named() == [] and not log.named, "it is not written yet"
    write()
    assert directory.consume_named() == [log] and log.named and not directory.unnamed
    fill(log, 1)
    assert asked == [1]


def test_a_failed_checkpoint_names_nothing(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    directory.name_logs(lambda: None)
    log = create(directory)
    fill(log, 1)
    for _ in range(2):  # the second checkpoint uses the reserved space
        disk.fail_next("sync", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        directory.checkpoint()
    assert directory.consume_named() == [] and directory.unnamed == {TP}
    assert name_all(directory) == [log]


def test_a_log_recreated_during_a_checkpoint_has_another_name(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    directory.name_logs(lambda: None)
    fill(create(directory), 1)
    write = directory.checkpoint_job()
    directory.delete(TP)
    again = create(directory, topic_id="again")
    fill(again, 1)
    write()
    assert directory.consume_named() == [] and not again.named and directory.unnamed == {TP}


def test_logs_found_at_start_are_named_before_they_count(disk: SimDisk) -> None:
    """The last process ended before it had named them: it had acknowledged none of their records."""
    directory = open_directory(disk=disk)
    directory.name_logs(lambda: None)
    fill(create(directory), 1)
    directory = reopened(disk)
    (log,) = directory.logs()
    assert log.named and not directory.unnamed and not directory.doubted and directory.trusted


def torn(disk: SimDisk) -> None:
    replace_file(disk, LOG_DIR / directory_name(TP) / PARTITION_FILE, b"")


def missing(disk: SimDisk) -> None:
    disk.remove_tree(LOG_DIR / directory_name(TP))


def of_another_topic_id(disk: SimDisk) -> None:
    path = LOG_DIR / directory_name(TP) / PARTITION_FILE
    replace_file(disk, path, read_file(disk, path).replace(TOPIC_ID.encode(), b"f" * len(TOPIC_ID)))


@pytest.mark.parametrize("damage", [torn, missing, of_another_topic_id])
def test_a_named_log_that_changed_or_disappeared_is_doubted(disk: SimDisk, damage: object) -> None:
    """All other logs are trusted. The doubt stays until a registration has named it, over any number of processes,
    although the next checkpoint no longer names the log."""
    written(disk, TP, OTHER, ELSEWHERE)
    assert callable(damage)
    damage(disk)
    for _ in range(3):
        directory = reopened(disk)
        assert directory.doubted == {TP: TOPIC_ID} and directory.trusted
        directory.checkpoint()
    assert not reopened(disk, boot_id="boot-2").trusted, "all logs must be doubted then"
    directory.note_incarnation(2)
    directory = reopened(disk)
    assert directory.doubted == {} and directory.trusted


def test_swapped_logs_are_doubted(disk: SimDisk) -> None:
    written(disk, TP, OTHER, ELSEWHERE)
    between = LOG_DIR / "between"
    disk.rename(LOG_DIR / directory_name(TP), between)
    disk.rename(LOG_DIR / directory_name(OTHER), LOG_DIR / directory_name(TP))
    disk.rename(between, LOG_DIR / directory_name(OTHER))
    directory = reopened(disk)
    assert directory.doubted == {TP: TOPIC_ID, OTHER: TOPIC_ID} and directory.trusted
    assert [log.tp for log in directory.logs()] == [ELSEWHERE]


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_without_the_checkpoint_every_log_is_doubted(disk: SimDisk, damage: bytes | None) -> None:
    """The checkpoint names the logs."""
    written(disk, TP)
    if damage is None:
        disk.remove(LOG_DIR / CHECKPOINT_FILE)
    else:
        replace_file(disk, LOG_DIR / CHECKPOINT_FILE, damage)
    assert not reopened(disk).trusted
    assert not reopened(disk).trusted, "a new checkpoint must not settle the doubt"


@pytest.mark.parametrize("damage", [torn, missing])
def test_a_log_that_never_counted_is_not_doubted(disk: SimDisk, damage: object) -> None:
    """The log's process ended between its first record and its name."""
    directory = written(disk, OTHER)
    fill(create(directory), 1)
    assert callable(damage)
    damage(disk)
    directory = reopened(disk)
    assert directory.trusted and not directory.doubted


def of_an_earlier_release(disk: SimDisk) -> None:
    """Write the mark that such a process leaves, and the checkpoint from before its last records."""
    path = LOG_DIR / RUNNING_FILE
    mark = decode_state(read_file(disk, path), BootMark, path=path)
    replace_file(disk, path, encode_state(BootMark(mark.boot_id, mark.incarnation)))
    disk.remove(LOG_DIR / CHECKPOINT_FILE)


def test_an_unnamed_log_of_an_earlier_release_may_have_counted(disk: SimDisk) -> None:
    written(disk, TP, OTHER)
    of_an_earlier_release(disk)
    torn(disk)
    directory = reopened(disk)
    assert directory.doubted == {TP: ""} and directory.trusted
    directory.note_incarnation(2)
    missing_now = LOG_DIR / directory_name(OTHER)
    disk.remove_tree(missing_now)
    assert reopened(disk).doubted == {OTHER: TOPIC_ID}, "this release has named it"


def test_swapped_unnamed_logs_of_an_earlier_release_are_doubted(disk: SimDisk) -> None:
    written(disk, TP, OTHER)
    of_an_earlier_release(disk)
    disk.rename(LOG_DIR / directory_name(TP), LOG_DIR / directory_name(ELSEWHERE))
    directory = reopened(disk)
    assert directory.doubted == {ELSEWHERE: ""}


def test_an_earlier_release_reads_one_doubted_log_as_all_doubted(disk: SimDisk) -> None:
    written(disk, TP)
    missing(disk)
    reopened(disk)
    path = LOG_DIR / RUNNING_FILE
    mark = decode_state(read_file(disk, path), BootMark, path=path)
    assert mark.doubted and [log.tp for log in mark.logs] == [TP]
