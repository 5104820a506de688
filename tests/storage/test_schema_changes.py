"""Tests of new schemas of a log and power failures: fsynced records exist afterwards, whatever happened to
``partition.json``.

That file has the topic's id, and a log is unusable without it. The segments of a later schema begin with it, and a
thread stores it in the file.
"""

from __future__ import annotations

import errno
import random

import pyarrow as pa
import pytest

from sparklog.errors import ErrorCode, StorageError
from sparklog.model import TopicSchema
from sparklog.record.schema import schema_message
from sparklog.storage.disk import read_file, replace_file, sync_file
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import PARTITION_FILE, read_partition_file
from sparklog.testing.sim_disk import ProcessDied, SimDisk
from tests.storage.batches import (
    LOG_DIR,
    SCHEMAS,
    SMALL,
    TOPIC_ID,
    TP,
    WIDER,
    WIDEST,
    append,
    batch,
    commit_and_seal,
    config,
    open_directory,
    read_numbers,
    refused,
    store_schemas,
)
from tests.tiers import marked_after

DIRECTORY = LOG_DIR / str(TP)
ALL = (*SCHEMAS, TopicSchema(2, schema_message(WIDEST)))


def new_log(directory: LogDirectory, known: int = 1) -> Log:
    """Return a topic with this number of schemas."""
    return directory.create(TP, TOPIC_ID, schemas=ALL[:known], config=config(segment_bytes=SMALL))


def fill(log: Log, batches: int, schema_id: int, *, leader_epoch: int = 1) -> None:
    """Append ``batches`` of three records each, numbered by their offsets."""
    for _ in range(batches):
        append(log, batch(3, first=log.log_end_offset, schema_id=schema_id), leader_epoch=leader_epoch)


def stored_ids(disk: SimDisk) -> list[int]:
    return [schema.schema_id for schema in read_partition_file(disk, DIRECTORY).schemas]


def reopened(disk: SimDisk, *, power_cut: bool = False) -> Log | None:
    disk.restart(page_cache_lost=power_cut)
    return open_directory(disk=disk, boot_id="boot-2" if power_cut else "boot-1").get(TP)


class Witness:
    """A client's knowledge: the end of the log, and the fsynced end according to its directory."""

    appended = 0
    fsynced = 0
    #: the number of operations before the first new schema
    before = 0


def script(disk: SimDisk, witness: Witness) -> None:
    directory = open_directory(disk=disk)
    log = new_log(directory)

    def more(batches: int, schema_id: int) -> None:
        for _ in range(batches):
            fill(log, 1, schema_id)
            witness.appended = log.log_end_offset

    def checkpoint() -> None:
        directory.checkpoint()
        witness.fsynced = log.recovery_point

    more(6, 0)
    commit_and_seal(log)
    log.durability.flush()
    checkpoint()
    witness.before = disk.changes
    log.add_schema(ALL[1])
    more(1, 1)
    assert store_schemas(log)
    commit_and_seal(log)
    more(2, 1)
    checkpoint()
    log.add_schema(ALL[2])
    more(2, 2)
    log.durability.flush()  # before a thread has stored the schema, and before the next checkpoint
    witness.fsynced = log.log_end_offset
    more(4, 2)
    commit_and_seal(log)
    checkpoint()
    directory.write_clean_marker()
    witness.fsynced = log.log_end_offset
    directory.close()


def operations() -> range:
    disk, witness = SimDisk(), Witness()
    script(disk, witness)
    return range(witness.before, disk.changes)


OPERATIONS = operations()
#: power failures at each operation
_SEEDS = 2


def died_at(operation: int, *, seed: int) -> tuple[SimDisk, Witness]:
    disk, witness = SimDisk(seed=seed), Witness()
    disk.die_after(operation)
    with pytest.raises(ProcessDied):
        script(disk, witness)
    return disk, witness


def check(log: Log, *, at_least: int) -> None:
    """Check that all records exist, and that the log continues with the newest schema, in Arrow files of one schema
    each."""
    log.config = config(segment_bytes=SMALL)
    assert log.log_end_offset >= at_least
    assert read_numbers(log) == list(range(log.log_end_offset))
    for schema in ALL:
        log.add_schema(schema)
    fill(log, 2, 2, leader_epoch=2)
    store_schemas(log)
    fill(log, 5, 2, leader_epoch=2)
    commit_and_seal(log)
    assert read_numbers(log) == list(range(log.log_end_offset))
    assert len(log.segments) > 2 and all(segment.sealed for segment in log.segments[:-1])
    for segment in log.segments[:-1]:
        with pa.ipc.open_file(read_file(segment.disk, segment.data_path)) as file:
            assert file.schema == log.schema(segment.schema_id)
            assert file.read_all()["number"].to_pylist() == list(range(segment.base_offset, segment.end_offset))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_power_failure_around_a_new_schema_keeps_fsynced_records(operation: int) -> None:
    for seed in range(_SEEDS):
        disk, witness = died_at(operation, seed=1000 * seed + operation)
        disk.restart(page_cache_lost=True)
        assert stored_ids(disk)[0] == 0, "the file can be read"
        log = reopened(disk, power_cut=True)
        assert log is not None and log.log_end_offset >= witness.fsynced > 0
        again = reopened(disk, power_cut=True)
        assert again is not None and again.log_end_offset >= witness.fsynced, "a start must not make it worse"
        check(again, at_least=witness.fsynced)


@pytest.mark.parametrize("operation", OPERATIONS[::2])
def test_a_process_crash_around_a_new_schema_loses_nothing(operation: int) -> None:
    disk, witness = died_at(operation, seed=operation)
    log = reopened(disk)
    assert log is not None and log.findings == ()
    check(log, at_least=witness.appended)


@pytest.mark.parametrize("seed", marked_after(10, range(40), pytest.mark.extended))
def test_random_histories_with_new_schemas_keep_fsynced_records(seed: int) -> None:
    """Appends, truncations, seals, flushes, starts and power failures in any order."""
    rng = random.Random(seed)
    disk = SimDisk(seed=seed)
    directory, known, epoch, boots, fsynced = open_directory(disk=disk), 1, 1, 1, 0
    log = new_log(directory)
    for _ in range(60):
        match rng.choice(
            ["append"] * 6 + ["schema", "store", "seal", "flush", "checkpoint", "cut", "begin", "start", "power"]
        ):
            case "append":
                newest = max(log.schema_ids)
                append(log, batch(3, first=log.log_end_offset, schema_id=newest), leader_epoch=epoch)
            case "schema":
                known = min(known + 1, len(ALL))
                log.add_schema(ALL[known - 1])
            case "store":
                store_schemas(log)
            case "seal":
                commit_and_seal(log)
            case "flush":
                log.durability.flush()
            case "checkpoint":
                directory.checkpoint()
                fsynced = log.recovery_point
            case "cut":
                fsynced = min(fsynced, log.truncate(rng.randrange(log.log_end_offset + 1)))
                epoch += 1
            case "begin":
                if rng.random() < 0.3:
                    log.restart_at(0)
                    fsynced, epoch = 0, epoch + 1
            case "start" | "power" as how:
                boots += how == "power"
                disk.restart(page_cache_lost=how == "power")
                directory = open_directory(disk=disk, boot_id=f"boot-{boots}")
                found = directory.get(TP)
                assert (found.log_end_offset if found is not None else 0) >= fsynced
                log, epoch = new_log(directory, known), epoch + 1
        assert read_numbers(log) == list(range(log.log_end_offset))


def test_an_unused_new_schema_is_not_written(disk: SimDisk, directory: LogDirectory) -> None:
    """There may be ten thousand such logs, and the event loop learns of the schema for all."""
    log = new_log(directory)
    fill(log, 1, 0)
    before = disk.changes
    log.add_schema(ALL[1])
    assert not store_schemas(log)
    fill(log, 1, 0)
    assert not store_schemas(log)
    assert disk.changes == before + 2
    fill(log, 1, 1)
    assert disk.changes == before + 6, "two files must be created and written"
    assert store_schemas(log)
    assert not store_schemas(log)
    assert stored_ids(disk) == [0, 1]


def test_schemas_of_segments_alone_are_found_and_then_stored(disk: SimDisk) -> None:
    log = new_log(open_directory(disk=disk))
    fill(log, 2, 0)
    for schema_id in (1, 2):
        log.add_schema(ALL[schema_id])
        fill(log, 2, schema_id)
    assert stored_ids(disk) == [0]
    found = reopened(disk)
    assert found is not None
    assert (found.schema_ids, found.log_end_offset, found.findings) == ((0, 1, 2), 18, ())
    assert found.schema(1).equals(WIDER)
    assert store_schemas(found)
    assert stored_ids(disk) == [0, 1, 2]


def test_a_schema_without_a_checksum_is_not_trusted_after_power_failures(disk: SimDisk) -> None:
    """Some sectors at the start of a segment may be missing: it would be read with another schema than it was
    written with."""
    directory = open_directory(disk=disk)
    log = new_log(directory)
    fill(log, 2, 0)
    log.durability.flush()
    directory.checkpoint()
    log.add_schema(ALL[1])
    fill(log, 2, 1)
    segment = log.segments[-1]
    for path in (segment.data_path, segment.index_path):
        sync_file(disk, path)
    disk.sync_directory(DIRECTORY)
    disk.flip_bit(segment.data_path, read_file(disk, segment.data_path).index(b"more"))
    found = reopened(disk, power_cut=True)
    assert found is not None
    assert (found.schema_ids, found.log_end_offset) == ((0,), 6)


def test_a_deleted_log_stores_no_schema_in_its_successor(disk: SimDisk) -> None:
    directory = open_directory(disk=disk)
    log = new_log(directory)
    fill(log, 1, 0)
    log.add_schema(ALL[1])
    fill(log, 1, 1)
    job = log.durability.schemas_due()
    assert job is not None
    directory.delete(TP)
    log = directory.create(TP, "t-2", schemas=ALL[:1], config=config())
    fill(log, 1, 0)
    job.run()
    assert not job.done
    assert read_partition_file(disk, DIRECTORY).topic_id == "t-2"


def test_schemas_without_disk_space_are_stored_later(disk: SimDisk, directory: LogDirectory) -> None:
    log = new_log(directory)
    fill(log, 1, 0)
    log.add_schema(ALL[1])
    fill(log, 1, 1)
    disk.capacity_bytes = disk.used_bytes
    assert store_schemas(log)
    assert (stored_ids(disk), directory.offline) == ([0], None)
    disk.capacity_bytes = None
    assert store_schemas(log)
    assert stored_ids(disk) == [0, 1]


def test_a_disk_failure_during_a_schemas_storage_is_reported(disk: SimDisk, directory: LogDirectory) -> None:
    log = new_log(directory)
    fill(log, 1, 0)
    log.add_schema(ALL[1])
    fill(log, 1, 1)
    disk.fail_next("sync", errno.EIO)
    with pytest.raises(StorageError, match="storing the schemas of"):
        store_schemas(log)


def test_a_new_schema_is_stored_with_its_batch_despite_a_full_disk(disk: SimDisk, directory: LogDirectory) -> None:
    log = new_log(directory)
    fill(log, 2, 0)
    disk.capacity_bytes = disk.used_bytes
    log.add_schema(ALL[1])
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        fill(log, 1, 1)
    assert (read_numbers(log), directory.offline) == (list(range(6)), None)
    disk.capacity_bytes = None
    fill(log, 1, 1)
    directory.checkpoint()
    again = reopened(disk)
    assert again is not None
    assert (again.schema_ids, again.log_end_offset, again.findings) == ((0, 1), 9, ())


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_an_unreadable_fsynced_partition_file_is_rebuilt(disk: SimDisk, content: bytes | None) -> None:
    """Earlier releases left such a file after a power failure following a new schema."""
    directory = open_directory(disk=disk)
    log = new_log(directory)
    fill(log, 6, 0)
    log.add_schema(ALL[1])
    fill(log, 2, 1)
    log.durability.flush()
    directory.checkpoint()
    fill(log, 1, 1)
    if content is None:
        disk.remove(DIRECTORY / PARTITION_FILE)
        disk.sync_directory(DIRECTORY)
    else:
        replace_file(disk, DIRECTORY / PARTITION_FILE, content)
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk, boot_id="boot-2")
    found = directory.get(TP)
    assert found is not None and not directory.trusted
    assert (found.topic_id, found.schema_ids) == (TOPIC_ID, (0, 1))
    assert stored_ids(disk) == [0, 1]
    check(found, at_least=24)
