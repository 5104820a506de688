"""The checkpoint of a log directory, and the marks that describe how the last process ended.

``checkpoint`` has for each partition the high watermark, the recovery point (everything below is fsynced) and the log
start offset. It is replaced atomically and durable on return. Old segments are deleted only after a checkpoint has the
new log start. So ``checkpoint.reserve`` keeps room for one more checkpoint: with it, retention can free space on a full
disk.

``running`` is written when a directory is opened and has the host's boot id. ``clean-stop`` is written when it is
closed after everything was fsynced. The next open concludes from them:

- clean-stop exists: nothing was lost;
- no clean-stop, same boot id: the process died, but not the page cache. Every completed write exists (trusted);
- no clean-stop, another boot id: the page cache was lost. Writes without an fsync may be missing (untrusted).

``running`` also has the last incarnation of the directory's broker. The number is written before ZooKeeper counts it.
So a directory whose number is below ZooKeeper's count is not the one that its broker wrote last: it was emptied, or
restored from an older copy (``zk/broker_registry``). A doubt stays in ``running`` until the broker's registration
reports it, because a process that found damaged logs may end before it registers. A doubt covers all logs, or those
that ``running`` names.

The same doubt is recorded when the disk fails. After a failed fsync the kernel counts the pages as written and shows
them to the next process, but the disk may not have them. By the boot id alone they would be trusted.

A broker writes the name of each new log to the checkpoint before its replica counts (``LogDirectory.name_logs``).
``running`` records that once the first checkpoint exists. From then on a log that the checkpoint names and the disk
lacks is lost, and an unreadable checkpoint makes all logs doubtful.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.disk import Disk, is_full, read_file, replace_file, write_all
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

CHECKPOINT_FILE = "checkpoint"
RESERVE_FILE = "checkpoint.reserve"
RUNNING_FILE = "running"
CLEAN_STOP_FILE = "clean-stop"
#: The minimum size of the reserve. A new reserve has at least twice the size of the checkpoint.
_RESERVE_BYTES = 64 * 1024

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


class DoubtedLog(msgspec.Struct, frozen=True, array_like=True):
    """A log that may lack acknowledged records. ``topic_id`` is empty if the directory does not have it."""

    topic: str
    partition: int
    topic_id: str = ""

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class BootMark(msgspec.Struct, frozen=True):
    boot_id: str
    #: The broker's last incarnation. None: an older release wrote the mark without it.
    incarnation: int | None = None
    #: Logs may lack records, and no registration has reported that yet.
    doubted: bool = False
    version: int = 1
    #: The logs that ``doubted`` covers. Empty: all of them.
    logs: tuple[DoubtedLog, ...] = ()
    #: The checkpoint exists, and names each log whose replica may have confirmed or committed records.
    named: bool = False


_DAMAGED = BootMark("")


class LastStop(NamedTuple):
    """How the last process with this directory ended."""

    clean: bool
    #: Every write that the process completed exists.
    trusted: bool
    #: Its last incarnation: 0 for a new directory, None if the mark does not have it.
    incarnation: int | None
    #: The page cache may show data that the disk does not have.
    failed: bool
    #: Doubted logs that no registration has reported yet, if the others are trusted.
    doubted: tuple[DoubtedLog, ...] = ()
    #: The checkpoint names each log whose replica may have confirmed or committed records.
    named: bool = False


def read_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint]:
    """Return the entries of the checkpoint.

    A missing or damaged checkpoint counts as empty: recovery then checks every batch.

    Raises:
        NewerFormatError: a newer release wrote it.
    """
    return find_checkpoint(disk, log_dir) or {}


def find_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint] | None:
    """Return the entries of the checkpoint, or None if it is missing or damaged.

    Raises:
        NewerFormatError: a newer release wrote it.
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
    """Write the checkpoint, durably. Raises OSError; the previous checkpoint then stays."""
    content = encode_state(checkpoint)
    try:
        replace_file(disk, log_dir / CHECKPOINT_FILE, content)
    except OSError as failure:
        if not is_full(failure) or not _use_reserve(disk, log_dir, content):
            raise
    else:
        _keep_reserve(disk, log_dir, len(content))


def _use_reserve(disk: Disk, log_dir: Path, content: bytes) -> bool:
    """Overwrite the reserve, which needs no room, and rename it to the checkpoint.

    Return False if it is too small or absent.
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
    """Make or extend the reserve if there is room. Its content has no meaning."""
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


def begin_running(disk: Disk, log_dir: Path, *, boot_id: str) -> LastStop:
    """Find out how the last process ended, and mark the directory as in use by this process."""
    clean = _read_mark(disk, log_dir / CLEAN_STOP_FILE) not in (None, _DAMAGED)
    earlier = _read_mark(disk, log_dir / RUNNING_FILE)
    in_doubt = earlier.logs if earlier is not None else ()
    all_in_doubt = earlier is not None and earlier.doubted and not in_doubt
    trusted = earlier is None or ((clean or earlier.boot_id == boot_id) and not all_in_doubt)
    failed = earlier is not None and all_in_doubt and earlier.boot_id == boot_id
    doubted = in_doubt if trusted else ()
    incarnation = 0 if earlier is None else earlier.incarnation
    named = earlier is not None and earlier.named
    mark = BootMark(boot_id, incarnation, doubted=not trusted or bool(doubted), logs=doubted, named=named)
    # Write only a changed mark: a killed process must start again on a full disk, so that retention can free space.
    if mark != earlier:
        mark_running(disk, log_dir, mark)
    if clean:
        disk.remove(log_dir / CLEAN_STOP_FILE)
        disk.sync_directory(log_dir)
    return LastStop(clean, trusted, incarnation, failed, doubted, named)


def mark_running(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Write ``running``. Durable on return. Raises OSError."""
    replace_file(disk, log_dir / RUNNING_FILE, encode_state(mark))


def mark_failed(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Write a doubting ``mark`` to a disk that fails or is full: as a new file or, if that fails, over the old one.

    A partly written mark also counts as doubt. It is not durable: after a reboot the directory is in doubt anyway, and
    an fsync would fail or hang. Raises OSError if the disk accepts neither.
    """
    path, content = log_dir / RUNNING_FILE, encode_state(mark)
    try:
        replace_file(disk, path, content, sync=False)
    except OSError:
        handle = disk.open(path)
        try:
            write_all(disk, handle, [content], 0)
            disk.truncate(handle, len(content))
        finally:
            disk.close(handle)


def mark_clean_stop(disk: Disk, log_dir: Path, *, boot_id: str) -> None:
    """Write the mark of a clean stop: everything in the directory is fsynced, and nothing more will be written."""
    replace_file(disk, log_dir / CLEAN_STOP_FILE, encode_state(BootMark(boot_id)))


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the boot id. It changes when the host's kernel starts, with an empty page cache."""
    return path.read_text(encoding="ascii").strip()


def _read_mark(disk: Disk, path: Path) -> BootMark | None:
    try:
        return decode_state(read_file(disk, path), BootMark, path=path)
    except FileNotFoundError:
        return None
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; treating the page cache as lost", failure)
        return _DAMAGED
