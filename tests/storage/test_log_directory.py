"""Tests of log directories: ownership, refusals, creation and deletion of logs, checkpoints."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import CHECKPOINT_FILE, RESERVE_FILE, read_checkpoint
from sparklog.storage.directory_meta import META_FILE, DirectoryMeta, claim_directory, file_system_of, refuse_remote
from sparklog.storage.directory_trust import read_boot_id
from sparklog.storage.disk import RealDisk, read_file, replace_file
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import PARTITION_FILE, directory_name, parse_directory_name
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import (
    LOG_DIR,
    SCHEMAS,
    TOPIC_ID,
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


def test_directory_names_survive_encoding() -> None:
    for tp in (TopicPartition("a", 0), TopicPartition("a-1", 22), TopicPartition("..x-", 3)):
        assert parse_directory_name(directory_name(tp)) == tp
    for name in ("removed", "set-aside", "checkpoint", "running", "clean-stop", "meta.json", "broker.lock", "-1", "a-"):
        assert parse_directory_name(name) is None
    assert len(directory_name(TopicPartition("t" * 249, 99_999))) == 255


def test_a_directory_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first = open_directory(tmp_path)
    with pytest.raises(StorageError, match="in use by another broker process"):
        open_directory(tmp_path)
    first.close()
    open_directory(tmp_path).close()


def test_another_clusters_or_brokers_directory_is_refused(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    with pytest.raises(StorageError, match="belongs to cluster 'cluster', this is cluster 'other'"):
        LogDirectory.open(tmp_path, cluster_id="other", broker_id=1)
    with pytest.raises(StorageError, match="belongs to broker 1, this is broker 2"):
        LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=2)
    # the refusal has released the lock
    open_directory(tmp_path).close()


@pytest.mark.parametrize("name", [META_FILE, CHECKPOINT_FILE, "running", f"{TP}/{PARTITION_FILE}"])
def test_a_newer_format_is_refused_by_name(disk: SimDisk, name: str) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 1)
    directory.write_clean_marker()
    directory.close()
    replace_file(disk, LOG_DIR / name, b'{"version":2}')
    with pytest.raises(NewerFormatError, match=f"{name}: format version 2 found, at most 1 expected"):
        open_directory(disk=disk)
    assert read_file(disk, LOG_DIR / name) == b'{"version":2}'


def test_a_log_in_a_checkpoint_without_files_is_reported_missing(disk: SimDisk) -> None:
    """The log was deleted just before the end, removed by hand, or has no readable partition.json: the caller
    decides."""
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 1)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    assert open_directory(disk=disk).missing == {}
    disk.restart(page_cache_lost=False)
    replace_file(disk, LOG_DIR / str(TP) / PARTITION_FILE, b"{}")
    assert open_directory(disk=disk).missing == {TP: log.topic_id}


def test_a_log_that_never_had_a_record_is_not_missing(disk: SimDisk) -> None:
    """Every broker has such logs. If it were untrusted after each restart, partitions would wait for their last
    member."""
    directory = open_directory(disk=disk)
    log = create_log(directory)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    assert open_directory(disk=disk).missing == {}
    disk.restart(page_cache_lost=False)
    directory = open_directory(disk=disk)
    log = create_log(directory)
    log.restart_at(7)  # a follower that starts where its leader starts, and has no records yet
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    assert open_directory(disk=disk).missing == {}


def test_a_damaged_meta_file_is_refused(disk: SimDisk) -> None:
    open_directory(disk=disk).close()
    replace_file(disk, LOG_DIR / META_FILE, b"{}")
    with pytest.raises(StorageError, match=r"meta\.json: damaged"):
        open_directory(disk=disk)


def test_a_full_or_read_only_directory_is_refused(disk: SimDisk) -> None:
    disk.capacity_bytes = 0
    with pytest.raises(StorageError, match="cannot be written: No space left"):
        open_directory(disk=disk)
    disk.read_only = True
    with pytest.raises(StorageError, match="Read-only file system"):
        open_directory(disk=disk)


def test_a_killed_process_starts_again_on_a_full_disk(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 10)
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    disk.capacity_bytes = disk.used_bytes
    directory = open_directory(disk=disk)
    log = directory.get(TP)
    assert directory.trusted and log is not None and log.log_end_offset > 0


def test_a_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        open_directory(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot be used"):
        claim_directory([tmp_path / "file" / "below"], cluster_id="cluster")


def test_a_damaged_checkpoint_makes_a_start_check_everything(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 3)
    directory.write_clean_marker()
    directory.close()
    replace_file(disk, LOG_DIR / CHECKPOINT_FILE, b"\0\0")
    log = open_directory(disk=disk).get(TP)
    assert log is not None and (log.log_end_offset, log.recovery_point, log.high_watermark) == (9, 0, 0)


def test_a_repeated_create_updates_the_log(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = directory.create(TP, TOPIC_ID, schemas=SCHEMAS[:1], config=config())
    fill(log, 1)
    assert directory.create(TP, TOPIC_ID, schemas=SCHEMAS, config=config(segment_bytes=5000)) is log
    assert (log.schema_ids, log.config.segment_bytes) == ((0, 1), 5000)
    with pytest.raises(BrokerError) as caught:
        directory.create(TP, "another", schemas=SCHEMAS, config=config())
    assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID
    append(log, batch(schema_id=1))
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None and (again.topic_id, again.schema_ids) == (TOPIC_ID, (0, 1))


def test_a_deleted_log_disappears_at_once_and_may_be_recreated(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 3)
    directory.checkpoint()
    directory.delete(TP)
    directory.delete(TP)
    assert directory.get(TP) is None and directory.logs() == []
    assert str(TP) not in disk.names(LOG_DIR) and disk.names(LOG_DIR / "removed") == []
    with pytest.raises(BrokerError):
        fill(log, 1)
    fresh = directory.create(TP, "t-2", schemas=SCHEMAS, config=config())
    assert fresh.log_end_offset == 0
    fill(fresh, 1)
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    # the checkpoint of the deleted topic does not apply to the new one
    assert again is not None and (again.topic_id, again.log_end_offset, again.high_watermark) == ("t-2", 3, 0)


def test_an_interrupted_removal_is_finished_on_the_next_start(tmp_path: Path) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1, in_background=lambda work: None)
    directory.load()
    fill(create_log(directory), 1)
    directory.delete(TP)
    assert len(list((tmp_path / "removed").iterdir())) == 1
    directory.close()
    open_directory(tmp_path).close()
    assert list((tmp_path / "removed").iterdir()) == []


def test_a_removal_runs_in_a_thread(tmp_path: Path) -> None:
    class Disk(RealDisk):
        thread = ""

        def remove_tree(self, path: Path) -> None:
            self.thread = threading.current_thread().name
            super().remove_tree(path)

    disk = Disk()
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1, disk=disk)
    fill(create_log(directory), 1)
    directory.delete(TP)
    directory.close()
    assert disk.thread.startswith("log-removal")


def test_a_directory_without_its_partition_file_is_set_aside(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 1)
    disk.restart(page_cache_lost=False)
    replace_file(disk, LOG_DIR / str(TP) / PARTITION_FILE, b"")
    directory = open_directory(disk=disk)
    assert directory.logs() == []
    (kept,) = disk.names(LOG_DIR / "set-aside")
    assert f"{0:020d}.arrow" in disk.names(LOG_DIR / "set-aside" / kept)
    fill(create_log(directory), 2)


def test_a_late_older_checkpoint_writes_nothing(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    log.set_high_watermark(3)
    late = directory.checkpoint_job()
    log.set_high_watermark(6)
    directory.checkpoint()
    changes = disk.changes
    late()
    directory.checkpoint()
    assert disk.changes == changes
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None and again.high_watermark == 6


def test_a_late_checkpoint_writes_nothing_even_after_an_empty_one(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    log.set_high_watermark(3)
    directory.checkpoint()
    log.set_high_watermark(6)
    late = directory.checkpoint_job()
    log.set_high_watermark(3)
    directory.checkpoint()
    late()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None and again.high_watermark == 3


def test_a_full_disk_keeps_the_last_checkpoint_and_the_directory(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    log.set_high_watermark(3)
    directory.checkpoint()
    log.set_high_watermark(6)
    disk.remove(LOG_DIR / RESERVE_FILE)
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(OSError, match="No space left"):
        directory.checkpoint()
    assert directory.offline is None
    disk.capacity_bytes = None
    directory.checkpoint()
    disk.restart(page_cache_lost=False)
    again = open_directory(disk=disk).get(TP)
    assert again is not None and again.high_watermark == 6


def test_a_failed_checkpoint_takes_the_directory_offline(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    fill(create_log(directory), 1)
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="checkpoint"):
        directory.checkpoint()
    assert directory.offline is not None


def test_the_lock_and_boot_id_are_real(tmp_path: Path) -> None:
    assert len(read_boot_id()) == 36
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1, port=9093)
    fill(create_log(directory), 2)
    commit_and_seal(directory.logs()[0])
    directory.write_clean_marker()
    directory.close()
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    assert directory.meta == DirectoryMeta("cluster", 1, 9093)
    assert [read_numbers(log) for log in directory.load()] == [list(range(6))]
    assert directory.trust.clean and directory.trusted
    directory.close()


# --- claims -----------------------------------------------------------------------------------------------------


def test_a_claim_prefers_known_directories_and_is_released(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    LogDirectory.open(b, cluster_id="cluster", broker_id=4, port=9094).close()
    first = claim_directory([a, b], cluster_id="cluster")
    assert first is not None and (first.path, first.meta) == (b, DirectoryMeta("cluster", 4, 9094))
    second = claim_directory([a, b], cluster_id="cluster")
    assert second is not None and (second.path, second.meta) == (a, None)
    assert claim_directory([a, b], cluster_id="cluster") is None
    second.write_meta(DirectoryMeta("cluster", 5))
    second.release()
    second.release()
    third = claim_directory([a, b], cluster_id="cluster")
    assert third is not None and third.meta == DirectoryMeta("cluster", 5)
    for claim in (first, third):
        claim.release()


def test_a_claim_knows_whether_its_broker_is_running(tmp_path: Path) -> None:
    claim = claim_directory([tmp_path], cluster_id="cluster")
    assert claim is not None and not claim.broker_running
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    assert claim.broker_running
    directory.close()
    assert not claim.broker_running
    claim.release()
    with pytest.raises(StorageError, match="belongs to cluster"):
        claim_directory([tmp_path], cluster_id="other")


MOUNTS = """22 1 0:21 / / rw - overlay overlay rw
30 22 0:30 / /srv/my\\040nfs rw,relatime shared:1 master:2 - nfs4 server:/x rw
31 22 0:31 / /srv/fuse rw - fuse.sshfs host: rw
32 22 0:32 / /srv/fuse/local rw - ext4 /dev/sda rw
33 22 0:33 / /srv/twice rw - nfs a rw
34 22 0:34 / /srv/twice rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/my nfs/x", "nfs4"),
        ("/srv/fuse/x", "fuse.sshfs"),
        ("/srv/fuse/local/x", "ext4"),
        ("/srv/twice", "xfs"),
        ("/srv/fusex", "overlay"),
    ],
)
def test_remote_file_systems_are_refused(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind
    if kind in ("nfs4", "fuse.sshfs"):
        with pytest.raises(StorageError, match=f"is on {kind}, whose locks may expire"):
            refuse_remote(Path(path), mounts=MOUNTS)
    else:
        refuse_remote(Path(path), mounts=MOUNTS)


def test_a_checkpoint_has_every_log_for_any_number_of_changes(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    tps = [TopicPartition("many", number) for number in range(3)]
    logs = [directory.create(tp, TOPIC_ID, schemas=SCHEMAS, config=config()) for tp in tps]
    for log in logs:
        fill(log, 2)
        log.set_high_watermark(3)
        directory.checkpoint()
    logs[1].truncate(3)
    logs[0].set_high_watermark(6)
    logs[0].advance_log_start(3)
    directory.checkpoint()
    changes = disk.changes
    directory.checkpoint()
    assert disk.changes == changes, "no log has changed"
    directory.delete(tps[2])
    directory.checkpoint()
    marks = {(e.topic, e.partition): e for e in read_checkpoint(disk, directory.path).values()}
    assert sorted(marks) == [("many", 0), ("many", 1)]
    assert (marks["many", 0].high_watermark, marks["many", 0].log_start_offset) == (6, 3)
    assert marks["many", 1].high_watermark == 3


def test_an_intact_set_aside_log_is_served_again(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 4)
    log.set_high_watermark(6)
    topic_id, end, epoch = log.topic_id, log.log_end_offset, log.last_epoch
    directory.set_aside(TP, reason="no topic has it")
    assert directory.get(TP) is None
    [entry] = directory.kept_aside.entries()
    assert (entry.tp, entry.mark.topic_id, entry.mark.reason) == (TP, topic_id, "no topic has it")
    assert (entry.mark.intact, entry.mark.log_end_offset, entry.mark.last_epoch) == (True, end, epoch)
    assert entry.size_bytes == directory.kept_aside.size_bytes() > 0
    directory.checkpoint()
    disk.restart(page_cache_lost=False)

    directory = open_directory(disk=disk)
    assert (directory.logs(), directory.missing) == ([], {})
    assert directory.put_back(TP, "another id") is None
    again = directory.put_back(TP, topic_id)
    assert again is not None and again is directory.get(TP)
    assert (again.log_end_offset, again.high_watermark, again.last_epoch) == (end, 6, epoch)
    assert not again.findings
    assert directory.kept_aside.entries() == []
    fill(again, 1)


def test_the_last_set_aside_copy_is_served_again(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    for batches in (1, 3):
        fill(create_log(directory), batches)
        directory.set_aside(TP, reason=f"{batches} batches")
    topic_id = directory.kept_aside.entries()[0].mark.topic_id
    log = directory.put_back(TP, topic_id)
    assert log is not None
    [left] = directory.kept_aside.entries()
    assert left.mark.reason == "1 batches"
    directory.remove_set_aside(left.name)
    assert directory.kept_aside.entries() == []
    with pytest.raises(FileNotFoundError):
        directory.remove_set_aside(left.name)


def test_an_unreadable_set_aside_log_is_never_served_automatically(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 1)
    disk.restart(page_cache_lost=False)
    replace_file(disk, LOG_DIR / str(TP) / PARTITION_FILE, b"")
    directory = open_directory(disk=disk)
    [entry] = directory.kept_aside.entries()
    assert (entry.tp, entry.mark.intact) == (TP, False)
    assert directory.put_back(TP, log.topic_id) is None


def test_a_set_aside_log_survives_a_power_failure(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 4)
    commit_and_seal(log)
    directory.write_clean_marker()
    directory.set_aside(TP, reason="no topic has it")
    directory.kept_aside.sync()
    changes = disk.changes
    directory.kept_aside.sync()
    assert disk.changes == changes
    disk.restart(page_cache_lost=True)
    again = open_directory(disk=disk).put_back(TP, log.topic_id)
    assert again is not None and again.log_end_offset == log.log_end_offset


def test_a_set_aside_log_keeps_its_records_after_a_power_failure() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 4)
    log.set_high_watermark(log.log_end_offset)
    end, topic_id = log.log_end_offset, log.topic_id
    directory.set_aside(TP, reason="no topic claims it")
    directory.kept_aside.sync()
    disk.restart(page_cache_lost=True)
    again = open_directory(disk=disk).put_back(TP, topic_id)
    assert again is not None
    assert (again.log_end_offset, again.high_watermark) == (end, end)


def test_no_new_log_replaces_one_that_could_not_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 4)
    topic_id = log.topic_id
    directory.set_aside(TP, reason="no topic claims it")

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove", failing)
        with pytest.raises(StorageError, match="putting"):
            directory.put_back(TP, topic_id)
    with pytest.raises(StorageError, match="start the broker again"):
        directory.put_back(TP, topic_id)
