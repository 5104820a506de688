"""The inventory of a log directory, read while no broker is running.

This module changes nothing. It reads the end and the last leader epoch of each log from the headers in the index files.
It also counts batches that the recovery of a starting broker would truncate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import NO_EPOCH, DirectoryInventory, LogCopy, SeenNumbers
from sparklog.storage.cluster_seen import read_seen
from sparklog.storage.directory_meta import BROKER_LOCK, META_FILE, DirectoryMeta, is_locked
from sparklog.storage.directory_trust import RUNNING_FILE, BootMark
from sparklog.storage.disk import RealDisk, read_file
from sparklog.storage.formats import decode_state
from sparklog.storage.inspect import StoredPartition
from sparklog.storage.partition_file import parse_directory_name
from sparklog.storage.topic_notes import read_topic_notes


def survey(log_dir: Path) -> DirectoryInventory:
    """Return the inventory of a log directory: its logs and topics, and the highest numbers that it has recorded.

    Raises:
        StorageError: the path is not a broker's log directory, a broker has it open, or it has a newer format.
    """
    disk = RealDisk()
    try:
        meta = decode_state(read_file(disk, log_dir / META_FILE), DirectoryMeta, path=log_dir / META_FILE)
    except OSError as failure:
        raise StorageError(f"{log_dir}: not a broker's log directory: {failure.strerror or failure}") from failure
    if is_locked(disk, log_dir / BROKER_LOCK):
        raise StorageError(f"{log_dir}: broker {meta.broker_id} is running: stop it first")
    seen = read_seen(disk, log_dir)
    problems: list[str] = []
    logs = tuple(_logs(log_dir, meta.broker_id, problems))
    return DirectoryInventory(
        path=str(log_dir),
        cluster_id=meta.cluster_id,
        broker_id=meta.broker_id,
        seen=SeenNumbers(
            seen.controller_epoch,
            seen.controller_id,
            seen.producer_ids,
            max((log.last_epoch for log in logs), default=NO_EPOCH),
        ),
        incarnation=max(seen.incarnation, _noted_incarnation(disk, log_dir)),
        logs=logs,
        topics=tuple(read_topic_notes(disk, log_dir).values()),
        problems=tuple(problems),
    )


def _noted_incarnation(disk: RealDisk, log_dir: Path) -> int:
    try:
        mark = decode_state(read_file(disk, log_dir / RUNNING_FILE), BootMark, path=log_dir / RUNNING_FILE)
    except (OSError, StorageError):
        return NO_EPOCH
    return mark.incarnation if mark.incarnation is not None else NO_EPOCH


def _logs(log_dir: Path, broker_id: int, problems: list[str]) -> Iterator[LogCopy]:
    for directory in sorted(log_dir.iterdir()):
        named = parse_directory_name(directory.name)
        if named is None or not directory.is_dir():
            continue
        try:
            copy = read_copy(directory, broker_id)
        except (OSError, StorageError, msgspec.DecodeError) as failure:
            problems.append(f"{directory}: {failure}")
            continue
        if (copy.topic, copy.partition) != named:
            problems.append(f"{directory}: holds the log of {copy.topic}-{copy.partition}")
            continue
        yield copy


def read_copy(directory: Path, broker_id: int) -> LogCopy:
    """Return the description of the log in one partition directory. Raises StorageError or OSError."""
    stored = StoredPartition(directory)
    last_epoch, end = NO_EPOCH, 0
    for report in stored.reports(thorough=False):
        last_epoch, end = max(last_epoch, *report.leader_epochs), max(end, report.end_offset)
    content = stored.content
    return LogCopy(broker_id, content.topic, content.partition, content.topic_id, content.schemas, last_epoch, end)
