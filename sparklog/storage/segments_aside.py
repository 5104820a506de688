"""Segment files that recovery moves out of a log: it cannot use them, but they may contain records.

::

    set-aside/<nanoseconds>-<topic>-<partition>/set-aside.json      their partition, and the reason
                                                partition.json      a copy: the schemas of their batches
                                                <base>.arrow, .index

A whole segment is moved here by renames, which need no disk space. If the beginning of a segment stays in the log, the
rest is copied here. The copied data keep their file positions, so that their headers stay valid. No broker reads these
files again. An operator can read them with ``storage.salvage``.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from sparklog.errors import BrokerError, StorageError
from sparklog.model import TopicPartition
from sparklog.record.footer import END_OF_STREAM, MAGIC
from sparklog.record.header import HEADER_BYTES, BatchHeader, unpack_header
from sparklog.record.message import read_metadata_length
from sparklog.record.schema import MAX_SCHEMA_BYTES
from sparklog.storage.disk import Disk, read_file, replace_file, sync_file, write_all
from sparklog.storage.formats import encode_state
from sparklog.storage.partition_file import PARTITION_FILE, parse_directory_name, read_partition_file
from sparklog.storage.segment import DATA_SUFFIX, INDEX_SUFFIX, Segment
from sparklog.storage.set_aside import MARK_FILE, SET_ASIDE, SetAsideMark

_PIECE_BYTES = 1 << 20
#: The bytes before the schema message of a data file.
_MAGIC_BYTES = 8
#: The bytes at the end of a sealed data file: the footer's length as an i32, and the magic.
_FOOTER_END_BYTES = 4 + len(MAGIC)

logger = logging.getLogger(__name__)


class SegmentsAside:
    """A helper for the recovery of one log: it moves or copies segment files to ``set-aside/``.

    The directory for them is created with the first file. The methods raise OSError if the disk fails.
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._target: Path | None = None

    @property
    def name(self) -> str:
        """Return the path of the files, relative to the log directory, or "" if nothing was set aside."""
        return f"{SET_ASIDE}/{self._target.name}" if self._target is not None else ""

    def move(self, segment: Segment) -> None:
        """Move the files of ``segment`` out of the log."""
        target = self._make_target()
        for path in (segment.data_path, segment.index_path):
            if self._disk.exists(path):
                self._disk.rename(path, target / path.name)

    def keep_tail(self, segment: Segment, data: int, index: int, *, batches: int, position: int) -> None:
        """Copy the parts of the data file and the index that follow the first ``batches`` batches.

        In the data file these batches end at ``position``. The copies are durable on return, because the originals are
        about to be truncated.
        """
        target = self._make_target()
        copies = (
            (data, target / segment.data_path.name, position, position),
            (index, target / segment.index_path.name, batches * HEADER_BYTES, 0),
        )
        try:
            for handle, path, start, at in copies:
                self._copy(handle, path, start=start, at=at)
            self._disk.sync_directory(target)
            self._disk.sync_directory(target.parent)
        except OSError:
            for _, path, _, _ in copies:
                if self._disk.exists(path):
                    self._disk.remove(path)
            raise

    def finish(self, reason: str) -> None:
        """Write a description of the files that were set aside, if there are any.

        The files are kept even if the disk has no room for the description.
        """
        if self._target is None:
            return
        try:
            self._describe(self._target, reason)
        except OSError as failure:
            logger.warning("%s: set aside without %s: %s", self._target, MARK_FILE, failure)
        self._disk.sync_directory(self._target)
        self._disk.sync_directory(self._target.parent)
        self._disk.sync_directory(self._directory)

    def _make_target(self) -> Path:
        if self._target is None:
            # A name has at most 255 bytes. The mark has the full name.
            name = f"{time.time_ns()}-{self._directory.name}"[:255]
            target = self._directory.parent / SET_ASIDE / name
            self._disk.make_directory(target)
            self._target = target
        return self._target

    def _copy(self, source: int, path: Path, *, start: int, at: int) -> None:
        end = self._disk.size(source)
        handle = self._disk.open(path, create=True)
        try:
            for position in range(start, end, _PIECE_BYTES):
                piece = self._disk.read(source, min(_PIECE_BYTES, end - position), position)
                write_all(self._disk, handle, [piece], position - start + at)
        finally:
            self._disk.close(handle)
        sync_file(self._disk, path)

    def _describe(self, target: Path, reason: str) -> None:
        tp = parse_directory_name(self._directory.name) or TopicPartition(self._directory.name, -1)
        topic_id = ""
        try:
            topic_id = read_partition_file(self._disk, self._directory).topic_id
            replace_file(self._disk, target / PARTITION_FILE, read_file(self._disk, self._directory / PARTITION_FILE))
        except (FileNotFoundError, StorageError) as failure:
            logger.warning("%s: set aside without its schemas: %s", target, failure)
        mark = SetAsideMark(*tp, topic_id, reason, since_ms=time.time_ns() // 1_000_000)
        last = self._last_header(target)
        if last is not None:  # With this the broker can ask the leader whether the leader has all these records.
            mark = msgspec.structs.replace(mark, log_end_offset=last.next_offset, last_epoch=last.leader_epoch)
        replace_file(self._disk, target / MARK_FILE, encode_state(mark))

    def _last_header(self, target: Path) -> BatchHeader | None:
        """Return the last header in ``target``, or None if there is no header or there may be data of later batches."""
        stems = [name.removesuffix(DATA_SUFFIX).removesuffix(INDEX_SUFFIX) for name in self._disk.names(target)]
        stem = max(filter(str.isdigit, stems))
        index, data = target / (stem + INDEX_SUFFIX), target / (stem + DATA_SUFFIX)
        if not self._disk.exists(index):
            return None
        packed = read_file(self._disk, index)
        whole = len(packed) // HEADER_BYTES * HEADER_BYTES
        try:
            header = unpack_header(packed[whole - HEADER_BYTES : whole]) if whole else None
        except BrokerError:
            return None
        if header is None or not self._disk.exists(data):
            return header
        end = header.position + header.stored_bytes
        size = _size(self._disk, data)
        return header if size <= end or size == end + _footer_bytes(self._disk, data, size) else None


def may_hold_records(segment: Segment, *, claimed: int) -> bool:
    """Return whether a segment that recovery cannot use may contain records.

    The segment may contain records if it has headers, or data that cannot come from an unfinished append. An append
    creates and writes the data file first and then the index. ``claimed`` is the offset up to which the log was once
    committed or fsynced.
    """
    disk = segment.disk
    if disk.exists(segment.index_path):
        if _size(disk, segment.index_path) >= HEADER_BYTES:
            return True
        indexed = True
    else:
        indexed = False
    if not disk.exists(segment.data_path):
        return False
    handle = disk.open(segment.data_path)
    try:
        size = disk.size(handle)
        front = disk.read(handle, min(size, _MAGIC_BYTES + MAX_SCHEMA_BYTES), 0)
    finally:
        disk.close(handle)
    try:
        front_bytes = _MAGIC_BYTES + read_metadata_length(memoryview(front)[_MAGIC_BYTES:])
    except BrokerError:
        front_bytes = 0
    return size > front_bytes and (not indexed or claimed > segment.base_offset)


def _footer_bytes(disk: Disk, path: Path, size: int) -> int:
    """Return the size of a file's footer, as the file declares it, or 0 if it has none. ``size`` is the file's size."""
    handle = disk.open(path)
    try:
        ending = disk.read(handle, _FOOTER_END_BYTES, size - _FOOTER_END_BYTES) if size > _FOOTER_END_BYTES else b""
    finally:
        disk.close(handle)
    if not ending.endswith(MAGIC):
        return 0
    return len(END_OF_STREAM) + int.from_bytes(ending[:4], "little") + _FOOTER_END_BYTES


def _size(disk: Disk, path: Path) -> int:
    handle = disk.open(path)
    try:
        return disk.size(handle)
    finally:
        disk.close(handle)
