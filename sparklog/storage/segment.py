"""One segment: ``<base offset>.arrow`` with the batches and ``<base offset>.index`` with their headers.

::

    .arrow   ARROW1 + Schema message | batch | batch | ...  [ end-of-stream + footer, once sealed ]
    .index   header (96 bytes) | header | ...

An append writes the data first, then the header. A batch without a header does not exist. In memory a segment has only
a few numbers while its files are closed. While they are open, it also has the base offsets and positions of all
batches. Other modules decide what a segment contains (``append_plan``, ``log``) and when it is sealed (``sealing``).
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sparklog.errors import StorageError
from sparklog.record.header import HEADER_BYTES, HEADER_DTYPE, BatchHeader, Flag, header_array, unpack_header
from sparklog.storage.append_plan import NO_MAXIMUM
from sparklog.storage.disk import Buffer, Disk, sync_file, write_all, write_one
from sparklog.storage.open_files import OpenFiles

DATA_SUFFIX = ".arrow"
INDEX_SUFFIX = ".index"
#: This suffix is added to the name of a file whose segment is being deleted. The next start removes such files.
DELETED_SUFFIX = ".deleted"
#: The suffix of the copy of a truncated file, until the copy is complete.
COPY_SUFFIX = ".copy"
#: An offset above every segment, which means that nothing is truncated.
NO_TRUNCATION = 2**63 - 1
#: A segment of at least this size reserves disk space for its next appends: a quarter of its size, but at most
#: ``_RESERVE_MOST_BYTES``.
RESERVE_FROM_BYTES = 16 << 20
_RESERVE_MOST_BYTES = 32 << 20
_CLEANED, _CONTROL = int(Flag.CLEANED), int(Flag.CONTROL)


def file_stem(base_offset: int) -> str:
    """Return the file name of a segment without suffix: the base offset with leading zeros, as in Kafka."""
    return f"{base_offset:020d}"


class Segment:
    """One segment of a log: its state in memory and its two files.

    Not thread-safe: use it only on the broker's event loop, except for ``sync``. The files are opened at the first use.
    ``OpenFiles`` closes them if too many segments are open.
    """

    __slots__ = (
        "_bases",
        "_data",
        "_index",
        "_mapped",
        "_positions",
        "_reserved",
        "base_offset",
        "begins_with_marker",
        "cleaned",
        "count",
        "data_path",
        "data_size",
        "disk",
        "end_offset",
        "files",
        "first_append_us",
        "index_path",
        "last_append_us",
        "running_max",
        "schema_id",
        "sealed",
    )

    def __init__(self, disk: Disk, directory: Path, *, base_offset: int, files: OpenFiles) -> None:
        self.disk = disk
        self.files = files
        self.base_offset = base_offset
        self.data_path = directory / (file_stem(base_offset) + DATA_SUFFIX)
        self.index_path = directory / (file_stem(base_offset) + INDEX_SUFFIX)
        self.end_offset = base_offset
        #: The number of batches.
        self.count = 0
        #: The size of the schema at the beginning and of all batches, without the footer.
        self.data_size = 0
        self.running_max = NO_MAXIMUM
        self.schema_id = -1
        self.first_append_us = self.last_append_us = -1
        #: Whether the footer is complete and durable.
        self.sealed = False
        #: Whether the last batch is from the cleaner, so that its position may differ between replicas
        #: (``Flag.CLEANED``).
        self.cleaned = False
        #: Whether the first batch is a control marker.
        self.begins_with_marker = False
        self._data = -1
        self._index = -1
        self._bases: array[int] = array("q")
        self._positions: array[int] = array("q")
        self._mapped: memoryview | None = None
        #: An append that ends above this position reserves more space first, see ``_reserve``.
        self._reserved = RESERVE_FROM_BYTES

    def __repr__(self) -> str:
        return f"Segment([{self.base_offset}, {self.end_offset}), {self.count} batches, {self.data_size} bytes)"

    @property
    def size_bytes(self) -> int:
        return self.data_size + self.count * HEADER_BYTES

    def adopt(self, *, count: int, first: BatchHeader, last: BatchHeader, sealed: bool) -> None:
        """Set the state of a segment that exists on disk, according to its first and last header."""
        self.sealed = sealed
        self.count = count
        self.end_offset = last.next_offset
        self.data_size = last.position + last.stored_bytes
        self.running_max = last.running_max
        self.schema_id = first.schema_id
        self.first_append_us = first.append_time
        self.last_append_us = last.append_time
        self.cleaned = bool(last.flags & _CLEANED)
        self.begins_with_marker = bool(first.flags & _CONTROL)

    # --- append -------------------------------------------------------------------------------------------------

    def append(
        self, headers: Sequence[BatchHeader], *, packed: Sequence[Buffer], data: Sequence[Buffer], prelude: bytes
    ) -> None:
        """Append batches whose headers already have their final offsets and positions.

        ``prelude`` is the beginning of a new segment's data file, or empty if the segment already has batches.

        Raises:
            OSError: nothing was appended. The files are unchanged.
            StorageError: the append could not be undone. The log directory must go offline.
        """
        new = self.count == 0
        data_size = self.data_size
        first, last = headers[0], headers[-1]
        end = last.position + last.stored_bytes
        try:
            if self._data < 0:
                self._open(create=new)
            else:
                self.files.used(self)
            if end > self._reserved:
                self._reserve(end)
            written = write_all(self.disk, self._data, [prelude, *data] if prelude else data, data_size)
            write_all(self.disk, self._index, packed, self.count * HEADER_BYTES)
        except OSError as failure:
            self._undo_append(failure)
            raise
        assert data_size + written == end, (self, last)
        if new:
            self.schema_id = first.schema_id
            self.first_append_us = first.append_time
            self.begins_with_marker = bool(first.flags & _CONTROL)
        self.data_size = end
        self.end_offset = last.next_offset
        self.running_max = last.running_max
        self.count += len(headers)
        self.last_append_us = last.append_time
        self.cleaned = bool(last.flags & _CLEANED)
        for header in headers:
            self._bases.append(header.base_offset)
            self._positions.append(header.position)

    def append_plain(
        self, packed: Buffer, body: Buffer, *, base_offset: int, end_offset: int, running_max: int, append_us: int
    ) -> None:
        """Append a single batch. It must be neither compacted nor the first batch of the segment.

        Raises the same errors as ``append``.
        """
        position, count = self.data_size, self.count
        assert count and not self.cleaned, self
        try:
            if self._data < 0:
                self._open()
            else:
                self.files.used(self)
            if position + len(body) > self._reserved:
                self._reserve(position + len(body))
            write_one(self.disk, self._data, body, position)
            write_one(self.disk, self._index, packed, count * HEADER_BYTES)
        except OSError as failure:
            self._undo_append(failure)
            raise
        self.data_size = position + len(body)
        self.end_offset = end_offset
        self.running_max = running_max
        self.count = count + 1
        self.last_append_us = append_us
        self._bases.append(base_offset)
        self._positions.append(position)

    def _reserve(self, end: int) -> None:
        """Reserve disk space for the next append, which ends at position ``end``, and for later ones.

        On ext4 an append that needs new space waits for a lock. The kernel holds that lock while it writes back pages
        and allocates space for earlier writes. This may block the broker's event loop for hundreds of milliseconds. An
        append into reserved space waits less. Reserved space does not count in the file's size. When the segment is
        sealed or truncated, the unused part is freed. Small segments reserve nothing, because there may be ten thousand
        of them.
        """
        start, end = self.data_size, end + min(end // 4, _RESERVE_MOST_BYTES)
        try:
            self.disk.reserve(self._data, end - start, start)
            self._reserved = end
        except OSError:  # No space, or the file system cannot reserve. The append itself may still succeed.
            self._reserved = NO_TRUNCATION
            with contextlib.suppress(OSError):  # Free the part that may be reserved.
                self.disk.truncate(self._data, start)

    def _undo_append(self, failure: OSError) -> None:
        try:
            if self.count == 0:
                self.close()
                for path in (self.index_path, self.data_path):
                    if self.disk.exists(path):
                        self.disk.remove(path)
            elif self._data >= 0:
                self.disk.truncate(self._index, self.count * HEADER_BYTES)
                self.disk.truncate(self._data, self.data_size)
                self._reserved = RESERVE_FROM_BYTES
        except OSError as second:
            raise StorageError(
                f"{self.data_path}: an append failed ({failure}) and could not be undone ({second})"
            ) from failure

    # --- read ---------------------------------------------------------------------------------------------------

    def find(self, offset: int) -> int:
        """Return the number (from 0) of the batch that contains ``offset``. The offset must be in the segment."""
        return bisect_right(self.bases(), offset) - 1

    def reach(self, first: int, max_bytes: int, *, end_offset: int) -> int:
        """Return the end of the range ``[first, end)`` of the batches that a read from batch number ``first`` returns.

        The read returns the batches that fit into ``max_bytes`` and end at or below ``end_offset``. It returns at least
        one batch even if that batch does not fit into ``max_bytes``. If batch ``first`` ends above ``end_offset``, the
        result is ``first``.
        """
        if end_offset >= self.end_offset:
            last = self.count
        else:
            last = bisect_right(self._bases, end_offset) - 1
        if last - first <= 1:
            return max(first, last)
        start = self._positions[first]
        if self.position_of(last) - start <= max_bytes:
            return last
        return max(first + 1, bisect_right(self._positions, start + max_bytes, first, last) - 1)

    def position_of(self, batch: int) -> int:
        """Return the position of a batch in the data file.

        For the number after the last batch, return the end of the data.
        """
        return self._positions[batch] if batch < self.count else self.data_size

    def bases(self) -> array[int]:
        """Return the base offsets of all batches, in ascending order.

        The caller must not keep the array, because an append changes it, and ``close`` replaces it.
        """
        if self._data < 0:
            self._open()
        else:
            self.files.used(self)
        return self._bases

    def read(self, first: int, last: int, *, mapped: bool = False) -> tuple[bytes, memoryview]:
        """Return headers and data of the batches ``[first, last)``.

        The data of a sealed segment are a view of the memory-mapped file. The data of an unsealed segment are a view
        only with ``mapped``, because the file may be truncated in place while a reader holds the view.
        """
        self.bases()
        start = self._positions[first]
        return self.read_headers(first, last), self._read_data(start, self.position_of(last) - start, mapped=mapped)

    def read_headers(self, first: int, last: int) -> bytes:
        """Return the packed headers of the batches ``[first, last)``."""
        self.bases()
        expected = (last - first) * HEADER_BYTES
        found = self.disk.read(self._index, expected, first * HEADER_BYTES)
        self._check_length(self.index_path, len(found), expected)
        return found

    def headers(self, first: int = 0) -> np.ndarray:
        """Return the headers of the batches from number ``first`` on, as an array of ``HEADER_DTYPE``."""
        return header_array(self.read_headers(first, self.count))

    def header(self, batch: int) -> BatchHeader:
        return unpack_header(self.read_headers(batch, batch + 1))

    def first_at_or_after(self, timestamp_us: int, *, log_start_offset: int) -> BatchHeader | None:
        """Return the header of the first batch that has a record at or after ``timestamp_us``, or None.

        Only batches that end above ``log_start_offset`` count. Producers' timestamps are not in order, so the binary
        search uses the running maximum. But the running maximum includes batches below the log start offset. So if the
        log start offset is inside the segment, all headers are searched.
        """
        if self.running_max < timestamp_us:
            return None
        headers = self.headers()
        if log_start_offset <= self.base_offset:
            found = int(np.searchsorted(headers["running_max"], timestamp_us, side="left"))
        else:
            inside = headers["base_offset"] + headers["offset_span"] > log_start_offset
            matches = np.flatnonzero(inside & (headers["max_timestamp"] >= timestamp_us))
            found = int(matches[0]) if len(matches) else len(headers)
        return unpack_header(headers[found : found + 1].tobytes()) if found < len(headers) else None

    def _read_data(self, start: int, length: int, *, mapped: bool) -> memoryview:
        if self.sealed:
            if self._mapped is None:
                self._mapped = self.disk.map(self._data, self.data_size)
            return self._mapped[start : start + length]
        if mapped:
            self._check_length(self.data_path, min(self.disk.size(self._data) - start, length), length)
            return self.disk.map(self._data, start + length)[start:]
        found = self.disk.read(self._data, length, start)
        self._check_length(self.data_path, len(found), length)
        return memoryview(found)

    def _check_length(self, path: Path, found: int, expected: int) -> None:
        if found != expected:
            raise StorageError(f"{path}: {found} bytes found, {expected} expected: another process truncated the file")

    # --- truncation ---------------------------------------------------------------------------------------------

    def truncate(self, count: int, *, in_place: bool, put_copies: Callable[[], None] | None = None) -> None:
        """Truncate the segment to its first ``count`` batches (at least one), and remove its footer.

        The index is truncated first, then the data file.

        A file must not shrink while a reader maps it, because the reader would get a SIGBUS. So unless ``in_place`` is
        set, the remaining part is copied to a new file, which replaces the old file by a rename. The new file is
        fsynced before the rename, because the old file may have been durable.

        If ``put_copies`` is given, fsynced copies of both files already exist, and ``put_copies`` renames them.
        """
        assert 0 < count <= self.count, (count, self)
        last = self.header(count - 1)
        data_size = last.position + last.stored_bytes
        if in_place:
            self.disk.truncate(self._index, count * HEADER_BYTES)
            self.disk.truncate(self._data, data_size)
        else:
            files = self.files_truncated_to(count)
            self.close()
            if put_copies is not None:
                put_copies()
            else:
                for path, length in files:
                    self._replace_by_copy(path, length)
        self.sealed = False
        self._mapped = None
        self._reserved = RESERVE_FROM_BYTES
        del self._bases[count:], self._positions[count:]
        self.count = count
        self.end_offset = last.next_offset
        self.data_size = data_size
        self.running_max = last.running_max
        self.last_append_us = last.append_time
        self.cleaned = bool(last.flags & _CLEANED)

    def mark_sealed(self) -> None:
        """Record that the footer is complete and durable."""
        self.sealed = True

    def files_truncated_to(self, count: int) -> list[tuple[Path, int]]:
        """Return the paths of index and data file, and the size of each after a truncation to ``count`` batches."""
        last = self.header(count - 1)
        return [(self.index_path, count * HEADER_BYTES), (self.data_path, last.position + last.stored_bytes)]

    def _replace_by_copy(self, path: Path, length: int) -> None:
        fresh = path.with_name(path.name + COPY_SUFFIX)
        self.disk.copy(path, fresh, length)
        sync_file(self.disk, fresh)
        self.disk.rename(fresh, path)

    def mark_deleted(self) -> list[Path]:
        """Rename the files so that they do not belong to the log any more. Return the new paths.

        Any thread may delete the renamed files.
        """
        self.close()
        doomed = []
        for path in (self.data_path, self.index_path):
            if self.disk.exists(path):
                target = path.with_name(path.name + DELETED_SUFFIX)
                self.disk.rename(path, target)
                doomed.append(target)
        return doomed

    # --- files --------------------------------------------------------------------------------------------------

    def _open(self, *, create: bool = False) -> None:
        data = self.disk.open(self.data_path, create=create)
        try:
            index = self.disk.open(self.index_path, create=create)
        except OSError:
            self.disk.close(data)
            raise
        self._data, self._index = data, index
        if create:
            for handle in (data, index):
                if self.disk.size(handle):
                    self.disk.truncate(handle, 0)
        if self.count:
            packed = self.disk.read(index, self.count * HEADER_BYTES, 0)
            if len(packed) != self.count * HEADER_BYTES:
                self.close()
                self._check_length(self.index_path, len(packed), self.count * HEADER_BYTES)
            headers = header_array(packed)
            self._bases.frombytes(headers["base_offset"].tobytes())
            self._positions.frombytes(headers["position"].tobytes())
        self.files.opened(self)

    def close(self) -> None:
        """Close the files, and drop the state that the next use loads again.

        Readers may still use their memory maps.
        """
        self.files.closed(self)
        if self._data >= 0:
            self.disk.close(self._data)
        if self._index >= 0:
            self.disk.close(self._index)
        self._data = self._index = -1
        self._bases = array("q")
        self._positions = array("q")
        self._mapped = None

    def sync(self) -> None:
        """Fsync the data file, then the index. Block until it is done.

        Several threads may fsync different segments at the same time. So this does not use the open files, which belong
        to the event loop, but opens the files again.
        """
        for path in (self.data_path, self.index_path):
            sync_file(self.disk, path)


def segment_at(segments: Sequence[Segment], offset: int) -> int:
    """Return the index of the segment that contains ``offset``, or -1 if the offset is below the first segment."""
    return bisect_right(segments, offset, key=_base_offset) - 1


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


assert HEADER_DTYPE.itemsize == HEADER_BYTES
