"""Logs that are kept although this broker does not serve them: ``set-aside/`` below a log directory.

::

    set-aside/<nanoseconds>-<topic>-<partition>/set-aside.json     the log's partition, the reason and the time
                                                partition.json     and all other files, unchanged

One rename moves a directory into ``set-aside/``, which needs no disk space, and one rename moves it out again. The
number in the name is the wall clock's time, so the entries of one log sort by time. The broker serves a log again only
if its ``set-aside.json`` is readable and says that the log is intact. Other entries are kept for an operator. This
module does not decide what may be deleted.

Only the broker's event loop uses the object, but ``entries``, ``size_bytes`` and ``sync`` may run in any thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.disk import Disk, is_full, read_file, replace_file, sync_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, parse_directory_name

SET_ASIDE = "set-aside"
MARK_FILE = "set-aside.json"

logger = logging.getLogger(__name__)


class SetAsideMark(msgspec.Struct, frozen=True):
    """The content of ``set-aside.json``: the partition of a set-aside log, the reason, the time and the log's offsets.

    ``intact`` means that the log was open when it was set aside. Then the offsets and the last leader epoch are right.
    """

    topic: str
    partition: int
    topic_id: str
    reason: str
    since_ms: int
    intact: bool = False
    high_watermark: int = 0
    recovery_point: int = 0
    log_start_offset: int = 0
    log_end_offset: int = 0
    last_epoch: int = -1
    version: int = 1


class SetAsideEntry(msgspec.Struct, frozen=True):
    """One entry of ``set-aside/``: a log that is kept, but not served.

    If there is no readable ``set-aside.json``, ``mark`` is derived from the entry's name and from ``partition.json``.
    An earlier release wrote no ``set-aside.json``.
    """

    name: str
    mark: SetAsideMark
    size_bytes: int

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.mark.topic, self.mark.partition)


class SetAside:
    """A store of the logs of one log directory that are kept in ``set-aside/`` and are not served.

    Not thread-safe: use it only on the broker's event loop. But any thread may call ``entries``, ``size_bytes`` and
    ``sync``.
    """

    def __init__(self, disk: Disk, log_dir: Path) -> None:
        self._disk = disk
        self._log_dir = log_dir
        self.path = log_dir / SET_ASIDE
        #: The sizes and marks that were read, by name. These values stay valid, because a set-aside log does not
        #: change.
        self._sizes: dict[str, int] = {}
        self._marks: dict[str, SetAsideMark] = {}
        #: The names of the intact logs, by partition and topic id, the newest last. None: they were not read yet.
        self._intact: dict[tuple[str, int, str], list[str]] | None = None
        #: The names of entries that were added and are not durable yet.
        self._unsynced: list[str] = []

    def add(self, name: str, mark: SetAsideMark, *, now_ns: int) -> str:
        """Move the entry ``name`` of the log directory into ``set-aside/``, and return its new name.

        The move is durable only after a call of ``sync``. The event loop may move thousands of logs at a time, so this
        method fsyncs nothing.

        Raises:
            OSError: the directory could not be moved.
        """
        # A name has at most 255 bytes. The mark has the full name.
        target = f"{now_ns}-{name}"[:255]
        self._disk.make_directory(self.path)
        try:
            replace_file(self._disk, self._log_dir / name / MARK_FILE, encode_state(mark), sync=False)
        except OSError as failure:
            is_file = isinstance(failure, (NotADirectoryError, FileNotFoundError))
            if not is_full(failure) and not is_file:
                raise
            logger.warning("%s: set aside without %s: %s", name, MARK_FILE, failure)
        self._disk.rename(self._log_dir / name, self.path / target)
        self._unsynced.append(target)
        if self._intact is not None and mark.intact:
            self._intact.setdefault((mark.topic, mark.partition, mark.topic_id), []).append(target)
        return target

    def add_unreadable(self, name: str, reason: str, *, now_ns: int) -> None:
        """Move an entry of the log directory into ``set-aside/``, because it cannot be opened as a log.

        Raises OSError.
        """
        named = parse_directory_name(name) or TopicPartition(name, -1)
        target = self.add(name, SetAsideMark(*named, "", reason, now_ns // 1_000_000), now_ns=now_ns)
        logger.error("%s: set aside as %s/%s: %s", self._log_dir / name, SET_ASIDE, target, reason)

    def sync(self) -> None:
        """Make the added entries durable. Any thread may call this method. Raises OSError."""
        added, self._unsynced = self._unsynced, []
        if not added:
            return
        for name in added:
            with suppress(FileNotFoundError, NotADirectoryError):  # It was moved out again, or is a single file.
                for file in self._disk.names(self.path / name):
                    sync_file(self._disk, self.path / name / file)
                self._disk.sync_directory(self.path / name)
        self._disk.sync_directory(self.path)
        self._disk.sync_directory(self._log_dir)

    def take_out(self, name: str, target: Path) -> None:
        """Move the entry ``name`` out of ``set-aside/`` to ``target``, which is on the same disk.

        Raises:
            OSError: the entry could not be moved.
        """
        mark = self._mark(name)
        self._disk.rename(self.path / name, target)
        self._disk.sync_directory(target.parent)
        self._sizes.pop(name, None)
        self._marks.pop(name, None)
        names = (self._intact or {}).get((mark.topic, mark.partition, mark.topic_id), [])
        if name in names:
            names.remove(name)

    def entries(self) -> list[SetAsideEntry]:
        """Return all entries, oldest first."""
        found = [SetAsideEntry(name, self._mark(name), self._size(name)) for name in self._names()]
        return sorted(found, key=lambda entry: (entry.mark.since_ms, entry.name))

    def newest_intact(self, tp: TopicPartition, topic_id: str) -> SetAsideEntry | None:
        """Return the intact log of this partition and topic id that was set aside last, or None if there is none."""
        if self._intact is None:
            self._intact = {}
            for entry in self.entries():
                if entry.mark.intact:
                    self._intact.setdefault((*entry.tp, entry.mark.topic_id), []).append(entry.name)
        names = self._intact.get((*tp, topic_id))
        return SetAsideEntry(names[-1], self._mark(names[-1]), 0) if names else None

    def schemas(self, name: str) -> tuple[TopicSchema, ...]:
        """Return the schemas of an entry's batches, or no schemas if its ``partition.json`` is unreadable."""
        path = self.path / name / PARTITION_FILE
        try:
            return decode_state(read_file(self._disk, path), PartitionFile, path=path).schemas
        except (OSError, StorageError):
            return ()

    def size_bytes(self) -> int:
        return sum(self._size(name) for name in self._names())

    def _names(self) -> list[str]:
        try:
            return self._disk.names(self.path)
        except FileNotFoundError:
            return []

    def _mark(self, name: str) -> SetAsideMark:
        mark = self._marks.get(name)
        if mark is None:
            mark = self._marks[name] = self._read_mark(name)
        return mark

    def _read_mark(self, name: str) -> SetAsideMark:
        path = self.path / name / MARK_FILE
        try:
            return decode_state(read_file(self._disk, path), SetAsideMark, path=path)
        except (OSError, StorageError):
            pass
        since_ns, _, was = name.partition("-")
        since_ms = int(since_ns) // 1_000_000 if since_ns.isascii() and since_ns.isdigit() else 0
        named = parse_directory_name(was) or TopicPartition(was, -1)
        return SetAsideMark(*named, self._topic_id(name), "set aside by an earlier release", since_ms)

    def _topic_id(self, name: str) -> str:
        path = self.path / name / PARTITION_FILE
        try:
            return decode_state(read_file(self._disk, path), PartitionFile, path=path).topic_id
        except NewerFormatError:
            return ""
        except (OSError, StorageError):
            return ""

    def _size(self, name: str) -> int:
        size = self._sizes.get(name)
        if size is None:
            size = self._sizes[name] = _tree_bytes(self._disk, self.path / name)
        return size


def _tree_bytes(disk: Disk, path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    try:
        names = disk.names(path)
    except OSError:  # It is a file, or no longer exists.
        return _file_bytes(disk, path)
    return sum(_tree_bytes(disk, path / name) for name in names)


def _file_bytes(disk: Disk, path: Path) -> int:
    try:
        handle = disk.open(path)
    except OSError:
        return 0
    try:
        return disk.size(handle)
    finally:
        disk.close(handle)
