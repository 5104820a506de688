"""The checkpoint of a log directory: how far each log is committed and fsynced, and where it starts.

The file ``checkpoint`` has three offsets for each partition: the high watermark, the recovery point (all records below
it are fsynced) and the log start offset. ``write_checkpoint`` replaces the file atomically, and the new content is
durable on return. Old segments are deleted only after a checkpoint has the new log start offset. So a full disk must
have room for one more checkpoint, or retention could not free space. The file ``checkpoint.reserve`` keeps this room.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.disk import Disk, is_full, read_file, replace_file, write_all
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

CHECKPOINT_FILE = "checkpoint"
RESERVE_FILE = "checkpoint.reserve"
#: The minimum size of ``checkpoint.reserve``. A new one also has at least twice the size of the checkpoint.
_RESERVE_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


class PartitionCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The entry of one log in the checkpoint file: its partition, its topic id and three of its offsets."""

    topic: str
    partition: int
    topic_id: str
    high_watermark: int
    recovery_point: int
    log_start_offset: int


class Checkpoint(msgspec.Struct, frozen=True):
    """The content of the file ``checkpoint``: one entry for each log with records."""

    partitions: tuple[PartitionCheckpoint, ...]
    version: int = 1


def read_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint]:
    """Return the entries of the checkpoint file by partition.

    A missing or damaged checkpoint counts as empty. Recovery then checks every batch.

    Raises:
        NewerFormatError: a newer release wrote the file.
    """
    return find_checkpoint(disk, log_dir) or {}


def find_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint] | None:
    """Return the entries of the checkpoint file by partition, or None if the file is missing or damaged.

    Raises:
        NewerFormatError: a newer release wrote the file.
    """
    path = log_dir / CHECKPOINT_FILE
    try:
        checkpoint = decode_state(read_file(disk, path), Checkpoint, path=path)
    except FileNotFoundError:
        return None
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; every batch will be checked", failure)
        return None
    return {TopicPartition(entry.topic, entry.partition): entry for entry in checkpoint.partitions}


def write_checkpoint(disk: Disk, log_dir: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint file durably. If this raises OSError, the previous checkpoint stays valid."""
    content = encode_state(checkpoint)
    try:
        replace_file(disk, log_dir / CHECKPOINT_FILE, content)
    except OSError as failure:
        if not is_full(failure) or not _use_reserve(disk, log_dir, content):
            raise
    else:
        _keep_reserve(disk, log_dir, len(content))


def _use_reserve(disk: Disk, log_dir: Path, content: bytes) -> bool:
    """Write the checkpoint into the reserve's file, which needs no more room, and rename that file to ``checkpoint``.

    Return False if the reserve is too small or absent.
    """
    reserve = log_dir / RESERVE_FILE
    if not disk.exists(reserve):
        return False
    handle = disk.open(reserve)
    try:
        if disk.size(handle) < len(content):
            return False
        write_all(disk, handle, [content], 0)
        disk.truncate(handle, len(content))
        disk.sync(handle)
    finally:
        disk.close(handle)
    disk.rename(reserve, log_dir / CHECKPOINT_FILE)
    disk.sync_directory(log_dir)
    return True


def _keep_reserve(disk: Disk, log_dir: Path, checkpoint_bytes: int) -> None:
    """Create or extend the reserve if the disk has room. The reserve's content has no meaning."""
    handle = disk.open(log_dir / RESERVE_FILE, create=True)
    try:
        size = disk.size(handle)
        if size < checkpoint_bytes:
            write_all(disk, handle, [bytes(max(_RESERVE_BYTES, 2 * checkpoint_bytes) - size)], size)
    except OSError as failure:
        if not is_full(failure):
            raise
    finally:
        disk.close(handle)
