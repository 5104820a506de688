"""The checkpoint of a log directory and the marks by which the next start knows how the last one ended.

``checkpoint``: for each partition the high watermark, the recovery point (everything below is fsynced) and the log
start offset; replaced atomically, durable on return.

``running`` is written when a directory is opened and names the host's boot id; ``clean-stop`` when it is closed after
everything was fsynced. From them follows what may be believed on the next open:

- clean-stop present: nothing was lost;
- none, same boot id: the process died, the page cache did not: every completed write is there (trusted);
- none, another boot id: the page cache was lost: whatever was not fsynced may be missing (untrusted).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.disk import Disk, read_file, replace_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

CHECKPOINT_FILE = "checkpoint"
RUNNING_FILE = "running"
CLEAN_STOP_FILE = "clean-stop"

logger = logging.getLogger(__name__)


class PartitionCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    topic_id: str
    high_watermark: int
    recovery_point: int
    log_start_offset: int


class Checkpoint(msgspec.Struct, frozen=True):
    partitions: tuple[PartitionCheckpoint, ...]
    version: int = 1


class BootMark(msgspec.Struct, frozen=True):
    boot_id: str
    version: int = 1


_DAMAGED = BootMark("")


class LastStop(NamedTuple):
    """How the last process that had this directory ended."""

    clean: bool
    #: every write that process completed is there
    trusted: bool


def read_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint]:
    """A missing or damaged checkpoint is an empty one: recovery then checks every batch.

    Raises:
        NewerFormatError: it was written by a newer release.
    """
    path = log_dir / CHECKPOINT_FILE
    try:
        checkpoint = decode_state(read_file(disk, path), Checkpoint, path=path)
    except FileNotFoundError:
        return {}
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; every batch will be checked", failure)
        return {}
    return {TopicPartition(entry.topic, entry.partition): entry for entry in checkpoint.partitions}


def write_checkpoint(disk: Disk, log_dir: Path, checkpoint: Checkpoint) -> None:
    replace_file(disk, log_dir / CHECKPOINT_FILE, encode_state(checkpoint))


def begin_running(disk: Disk, log_dir: Path, *, boot_id: str) -> LastStop:
    """Find out how the last process ended and mark the directory as in use by this one."""
    clean = _read_mark(disk, log_dir / CLEAN_STOP_FILE) not in (None, _DAMAGED)
    earlier = _read_mark(disk, log_dir / RUNNING_FILE)
    trusted = clean or earlier is None or earlier.boot_id == boot_id
    replace_file(disk, log_dir / RUNNING_FILE, encode_state(BootMark(boot_id)))
    if clean:
        disk.remove(log_dir / CLEAN_STOP_FILE)
        disk.sync_directory(log_dir)
    return LastStop(clean, trusted)


def mark_clean_stop(disk: Disk, log_dir: Path, *, boot_id: str) -> None:
    """Everything in the directory is fsynced and nothing will be written any more."""
    replace_file(disk, log_dir / CLEAN_STOP_FILE, encode_state(BootMark(boot_id)))


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Changes whenever the host's kernel, and with it the page cache, starts anew."""
    return path.read_text(encoding="ascii").strip()


def _read_mark(disk: Disk, path: Path) -> BootMark | None:
    try:
        return decode_state(read_file(disk, path), BootMark, path=path)
    except FileNotFoundError:
        return None
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; taken for the mark of a lost page cache", failure)
        return _DAMAGED
