"""The checkpoint of a log directory and the marks by which the next start knows how the last one ended.

``checkpoint``: for each partition the high watermark, the recovery point (everything below is fsynced) and the log
start offset; replaced atomically, durable on return. Old segments are deleted only once their going is in it, so beside
it lies ``checkpoint.reserve``, room for one more checkpoint: on a full disk that is what retention frees space with.

``running`` is written when a directory is opened and names the host's boot id; ``clean-stop`` when it is closed after
everything was fsynced. From them follows what may be believed on the next open:

- clean-stop present: nothing was lost;
- none, same boot id: the process died, the page cache did not: every completed write is there (trusted);
- none, another boot id: the page cache was lost: whatever was not fsynced may be missing (untrusted).

``running`` names the incarnation, too, that the directory's broker had last. The number is written before ZooKeeper
counts it, so a directory that is behind ZooKeeper's count is not the one its broker wrote in last: emptied, or put back
from an older copy (``zk/broker_registry``). And doubt stays in it until it is registered: a process that found its logs
wanting may end before it could tell. Doubt is about all logs, or about those that ``running`` names.

The same doubt is noted when the disk fails. After a failed fsync the kernel takes the pages for written and still shows
them to the next process, but the disk may not have them: the boot id alone would make them trusted.

A broker writes the name of each new log to the checkpoint before its replica counts for anything
(``LogDirectory.name_logs``). ``running`` says so once the first checkpoint exists. From then on a log that the
checkpoint names and the disk lacks is lost, and a checkpoint that cannot be read makes all logs doubtful.
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
#: A reserve is this large at least, and twice the checkpoint it is made after.
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
    """A log that may lack acknowledged records. ``topic_id`` is empty where the directory does not tell it."""

    topic: str
    partition: int
    topic_id: str = ""

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class BootMark(msgspec.Struct, frozen=True):
    boot_id: str
    #: the broker's last one; None: by a release that did not note it
    incarnation: int | None = None
    #: logs may lack what they held, and no registration has said so yet
    doubted: bool = False
    version: int = 1
    #: the logs that ``doubted`` is about; empty: all of them
    logs: tuple[DoubtedLog, ...] = ()
    #: the checkpoint exists, and names each log whose replica has counted
    named: bool = False


_DAMAGED = BootMark("")


class LastStop(NamedTuple):
    """How the last process that had this directory ended."""

    clean: bool
    #: every write that process completed is there
    trusted: bool
    #: its last incarnation; 0 for a directory without a past, None when it did not say
    incarnation: int | None
    #: the page cache may show what the disk does not have
    failed: bool
    #: logs in doubt that no registration has named yet, where the others are trusted
    doubted: tuple[DoubtedLog, ...] = ()
    #: the checkpoint names each log whose replica has counted
    named: bool = False


def read_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint]:
    """Return the entries of the checkpoint. A missing or damaged checkpoint is an empty one: recovery then checks every
    batch.

    Raises:
        NewerFormatError: it was written by a newer release.
    """
    return find_checkpoint(disk, log_dir) or {}


def find_checkpoint(disk: Disk, log_dir: Path) -> dict[TopicPartition, PartitionCheckpoint] | None:
    """Return the entries of the checkpoint, or None where it is missing or damaged.

    Raises:
        NewerFormatError: it was written by a newer release.
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
    """Raises OSError: what is on disk is the checkpoint of before."""
    content = encode_state(checkpoint)
    try:
        replace_file(disk, log_dir / CHECKPOINT_FILE, content)
    except OSError as failure:
        if not is_full(failure) or not _use_reserve(disk, log_dir, content):
            raise
    else:
        _keep_reserve(disk, log_dir, len(content))


def _use_reserve(disk: Disk, log_dir: Path, content: bytes) -> bool:
    """Overwrite the reserve, which takes no room, and put it in the checkpoint's place. False: none is large enough."""
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
    """Make the reserve if it is missing or has become too small, as far as there is room. Its content means nothing."""
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
    """Find out how the last process ended and mark the directory as in use by this one."""
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
    if mark != earlier:  # a killed process comes back also where there is no room: retention may free the disk
        mark_running(disk, log_dir, mark)
    if clean:
        disk.remove(log_dir / CLEAN_STOP_FILE)
        disk.sync_directory(log_dir)
    return LastStop(clean, trusted, incarnation, failed, doubted, named)


def mark_running(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Durable on return. Raises OSError."""
    replace_file(disk, log_dir / RUNNING_FILE, encode_state(mark))


def mark_failed(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Put ``mark``, which doubts, on a disk that fails or is full: in place of the old one or, where nothing new can be
    made, over it. A mark that is written in part doubts as well. Not durable: another boot doubts by itself, and an
    fsync would fail or hang. Raises OSError when the disk takes neither."""
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
