"""A record of whether a log directory still has everything that earlier processes wrote.

Two files show this. The file ``running`` is written when a directory is opened, and has the host's boot id. The file
``clean-stop`` is written when the directory is closed and everything in it is fsynced. The next process concludes from
these files:

- ``clean-stop`` exists: nothing was lost;
- no ``clean-stop``, same boot id: the process died, but the host still has its page cache. Every completed write exists
  (trusted);
- no ``clean-stop``, another boot id: the page cache was lost. Writes without an fsync may be missing (untrusted).

``running`` also has the last incarnation of the directory's broker. The broker writes this number before it registers
in ZooKeeper with it. So if the number is lower than ZooKeeper's, the directory is not the one that the broker wrote to
last: it was emptied, or restored from an older copy (``zk/broker_registry``).

``running`` also records a doubt: some logs, or all logs, may lack acknowledged records. The doubt stays in the file
until the broker's registration reports it, because a process that found damaged logs may end before it registers.

A doubt is also recorded when the disk fails. After a failed fsync the kernel counts the pages as written and shows them
to the next process, but the disk may not have them. The boot id alone would then show a trusted directory.

A broker adds each new log to the checkpoint before the log's replica confirms records as a follower or commits records
as a leader (``CheckpointWriter.name_logs``). After the first such checkpoint, ``running`` records that the broker
follows this rule. From then on a log that is in the checkpoint but not on disk is lost, and an unreadable checkpoint
puts all logs in doubt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import TopicPartition
from sparklog.storage.disk import Disk, is_full, read_file, replace_file, write_all
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

RUNNING_FILE = "running"
CLEAN_STOP_FILE = "clean-stop"

logger = logging.getLogger(__name__)


class DoubtedLog(msgspec.Struct, frozen=True, array_like=True):
    """A log that may lack acknowledged records. ``topic_id`` is empty if the topic id is unknown."""

    topic: str
    partition: int
    topic_id: str = ""

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class BootMark(msgspec.Struct, frozen=True):
    """The content of the files ``running`` and ``clean-stop``, which show how the process that wrote them has ended."""

    boot_id: str
    #: The broker's last incarnation. None: an older release wrote the mark without it.
    incarnation: int | None = None
    #: Whether logs may lack acknowledged records, and no registration has reported that yet.
    doubted: bool = False
    version: int = 1
    #: If ``doubted``: the logs that may lack records. Empty: all logs may lack records.
    logs: tuple[DoubtedLog, ...] = ()
    #: Whether the checkpoint exists, and names each log whose replica may have confirmed or committed records.
    named: bool = False


_DAMAGED = BootMark("")


class LastStop(NamedTuple):
    """A description of how the last process that used the log directory ended."""

    clean: bool
    #: Whether every write that the process completed still exists.
    trusted: bool
    #: The last incarnation of the directory's broker: 0 for a new directory, None if ``running`` does not have it.
    incarnation: int | None
    #: Whether the page cache may show data that the disk does not have.
    failed: bool
    #: If ``trusted``: the logs that may lack records nevertheless, and that no registration has reported yet.
    doubted: tuple[DoubtedLog, ...] = ()
    #: Whether the checkpoint names each log whose replica may have confirmed or committed records.
    named: bool = False


class DirectoryTrust:
    """A record of whether the content of one log directory can be trusted.

    The result depends on how the last process stopped and on what this process finds.

    Any thread may call ``fail``, ``sync_failed`` and ``note_incarnation``. Use the other methods only on the broker's
    event loop.
    """

    def __init__(self, disk: Disk, path: Path, *, boot_id: str, last_stop: LastStop) -> None:
        self._disk = disk
        self._path = path
        self._boot_id = boot_id
        #: Held while ``running`` is written. If that write fails, the failure is recorded under the same lock.
        self._lock = threading.RLock()
        #: The reason why the directory is offline. None: it is usable.
        self.offline: str | None = None
        #: Whether no write was in flight when the last process ended.
        self.clean = last_stop.clean
        #: Whether the disk has everything that the last process wrote: no page cache was lost, and no damage was found.
        self.trusted = last_stop.trusted
        #: The last incarnation of the broker, as ``running`` records it. None: ``running`` has no incarnation.
        self.incarnation = last_stop.incarnation
        #: Whether the disk has failed since the host's boot. If so, the page cache may show data that the disk lacks.
        self.failed_before = last_stop.failed
        #: Topic ids of logs that may lack acknowledged records although the directory as a whole is trusted. An empty
        #: id means that the id is unknown.
        self.doubted: dict[TopicPartition, str] = {log.tp: log.topic_id for log in last_stop.doubted}
        #: Whether the checkpoint names each log whose replica may have confirmed or committed records.
        self.names_complete = last_stop.named

    def check_online(self) -> None:
        if self.offline is not None:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"log directory {self._path} is offline: {self.offline}")

    def doubt_all(self) -> None:
        """Record durably that all logs may lack acknowledged records.

        After their repair the logs show no damage. If this process ends before it registers in ZooKeeper, only the file
        ``running`` shows the next process that records may be missing.
        """
        if self.trusted:
            self.trusted = False
            self._mark_doubt()

    def doubt(self, logs: Mapping[TopicPartition, str]) -> None:
        """Add these logs to ``doubted``, because they may lack acknowledged records. This is recorded durably.

        ``logs`` has the topic ids of the logs. The next checkpoint has no entries for lost logs. If this process ends
        before it registers in ZooKeeper, only the file ``running`` shows the next process that records may be missing.
        """
        known = len(self.doubted)
        for tp, topic_id in logs.items():
            self.doubted[tp] = topic_id or self.doubted.get(tp, "")
        if len(self.doubted) > known and self.trusted:
            self._mark_doubt()

    def _mark_doubt(self) -> None:
        logs = tuple(DoubtedLog(*tp, topic_id) for tp, topic_id in self.doubted.items()) if self.trusted else ()
        mark = BootMark(self._boot_id, self.incarnation, doubted=True, logs=logs, named=self.names_complete)
        with self._lock:
            try:
                mark_running(self._disk, self._path, mark)
            except OSError as failure:
                if not is_full(failure):
                    raise
                mark_failed(self._disk, self._path, mark)

    def set_names_complete(self, complete: bool) -> None:
        """Set whether each log with records that count for a commit has an entry in the checkpoint.

        Records count if the log's replica has confirmed them to the leader, as a follower, or has committed them, as a
        leader. The next write of the file ``running`` records this.
        """
        self.names_complete = complete

    def note_incarnation(self, incarnation: int) -> None:
        """Record durably the incarnation with which this process registers, or has registered, in ZooKeeper.

        If logs may lack records, the registration reports this to ZooKeeper. So this method removes this fact from the
        file ``running``, unless the disk has failed in this process. Any thread may call this method. The method blocks
        for an fsync.

        Raises:
            OSError: the incarnation is not recorded. The next process will not trust the directory.
        """
        with self._lock:
            self.incarnation = incarnation
            if self.offline is None:
                mark = BootMark(self._boot_id, incarnation, named=self.names_complete)
                mark_running(self._disk, self._path, mark)
                return
        self._note_failure()

    def fail(self, detail: str) -> None:
        """Take the directory offline because its disk is unreliable, and record that for the next process.

        Any thread may call this method. Only the first call has an effect.
        """
        with self._lock:
            if self.offline is not None:
                return
            self.offline = detail
        logger.error("log directory %s goes offline: %s", self._path, detail)
        self._note_failure()

    def _note_failure(self) -> None:
        with self._lock:
            try:
                mark = BootMark(self._boot_id, self.incarnation, doubted=True, named=self.names_complete)
                mark_failed(self._disk, self._path, mark)
            except OSError as failure:
                logger.critical(
                    "%s: the next start must not trust this directory, but the mark for it cannot be written: %s",
                    self._path,
                    failure,
                )

    def sync_failed(self, failure: OSError) -> None:
        """Take the directory offline after a failed fsync, unless the disk is only full.

        A full disk need not have lost data. The caller of the fsync handles this case.
        """
        if not is_full(failure):
            self.fail(f"fsync: {failure}")

    def mark_clean_stop(self) -> None:
        """Write the file ``clean-stop``. Raises OSError.

        Everything in the directory must be fsynced before this call, and nothing may be written after it.
        """
        mark_clean_stop(self._disk, self._path, boot_id=self._boot_id)


def begin_running(disk: Disk, log_dir: Path, *, boot_id: str) -> LastStop:
    """Mark the directory as in use by this process, and return how the last process ended."""
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
    # Do not write an unchanged mark: the broker must be able to start on a full disk, so that retention can free space.
    if mark != earlier:
        mark_running(disk, log_dir, mark)
    if clean:
        disk.remove(log_dir / CLEAN_STOP_FILE)
        disk.sync_directory(log_dir)
    return LastStop(clean, trusted, incarnation, failed, doubted, named)


def mark_running(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Write the file ``running`` durably. Raises OSError."""
    replace_file(disk, log_dir / RUNNING_FILE, encode_state(mark))


def mark_failed(disk: Disk, log_dir: Path, mark: BootMark) -> None:
    """Write to the file ``running`` of a failing or full disk that logs may lack records.

    Write a new file, or overwrite the old one if that fails. The next process also distrusts a partly written file. The
    file is not fsynced, because an fsync might fail or hang. After a reboot the next process distrusts the directory
    even without the file. Raises OSError if neither write succeeds.
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
    """Write the file ``clean-stop``. Raises OSError.

    Everything in the directory must be fsynced before this call, and nothing may be written after it.
    """
    replace_file(disk, log_dir / CLEAN_STOP_FILE, encode_state(BootMark(boot_id)))


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the host's boot id, which changes with each start of the kernel.

    The page cache is empty after such a start.
    """
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
