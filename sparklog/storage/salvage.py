"""The rows that can be saved from segment files that no broker uses: set aside, damaged, or without a complete index.

Batches that have a header are found by the header, and both checksums of each batch are verified. In data without
headers, the module searches for Arrow messages. Such a message has rows, but no offsets. Damaged batches are skipped
and reported. Files are opened for reading only.

Invariant: every returned row was in the files in an intact batch. The module does not check transactions and
duplicates, because that needs the whole log. So the result may have rows of aborted transactions, and rows that are
still in the log.
"""

from __future__ import annotations

import mmap
from bisect import insort
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.record.codec import decode_batch, read_record_batch, verify_body_crc
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.footer import END_OF_STREAM, MAGIC, schema_of_prelude
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_header
from sparklog.record.marker import MARKER_KEY
from sparklog.record.message import (
    read_batch_message,
    read_custom_metadata,
    read_message_length,
    read_metadata_length,
)
from sparklog.record.schema import parse_schema
from sparklog.storage.disk import RealDisk
from sparklog.storage.partition_file import read_partition_file
from sparklog.storage.segment import DATA_SUFFIX, INDEX_SUFFIX, file_stem

_CONTINUATION = END_OF_STREAM[:4]
_FRONT_BYTES = len(MAGIC) + 2
_ALIGNMENT = 8


class SalvagedBatch(NamedTuple):
    """The rows of an intact batch that was found in segment files."""

    records: pa.RecordBatch
    #: The offset of each record. None: unknown, because the batch has no header.
    offsets: npt.NDArray[np.int64] | None
    #: Whether the rows belong to a transaction. None: unknown, because the batch has no header.
    transactional: bool | None


class SalvagedSegment:
    """A reader of the intact batches in the files of one segment.

    Read all ``batches`` once. Then the counts and ``problems`` describe what was found.
    """

    def __init__(self, data_path: Path, messages: Mapping[int, bytes]) -> None:
        """Open the files. ``messages`` has the known schemas by schema id."""
        self.data_path = data_path
        self.problems: list[str] = []
        self.batch_count = self.row_count = 0
        #: The number of rows whose offsets are unknown. ``row_count`` includes them.
        self.rows_without_header = 0
        self._messages = messages
        with data_path.open("rb") as file:
            size = file.seek(0, 2)
            self._data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._view = memoryview(self._data)
        self._front = self._read_front()

    @property
    def base_offset(self) -> int:
        return int(self.data_path.stem)

    def schema(self) -> pa.Schema | None:
        """Return the schema for rows without a header: the one at the file's beginning, or else the newest schema.

        Return None if no schema is known.
        """
        if self._front is not None:
            return parse_schema(self._front)
        return parse_schema(self._messages[max(self._messages)]) if self._messages else None

    def batches(self) -> Iterator[SalvagedBatch]:
        """Yield all intact batches, in the order of the file."""
        at = 0
        for header in self._headers():
            yield from self._messages_between(at, header.position)
            yield from self._described(header)
            at = max(at, header.position + header.stored_bytes)
        yield from self._messages_between(at, len(self._view))

    def _read_front(self) -> bytes | None:
        try:
            length = read_metadata_length(self._view[_FRONT_BYTES:])
            return schema_of_prelude(bytes(self._view[: _FRONT_BYTES + length]))
        except BrokerError:
            return None

    def _headers(self) -> list[BatchHeader]:
        """Return the intact headers whose batches are completely in the data file, sorted by position."""
        try:
            packed = self.data_path.with_suffix(INDEX_SUFFIX).read_bytes()
        except FileNotFoundError:
            self.problems.append("has no index")
            return []
        found: list[BatchHeader] = []
        for number in range(len(packed) // HEADER_BYTES):
            try:
                header = unpack_header(packed[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            except BrokerError as error:
                self.problems.append(f"header {number}: {error}")
                continue
            if header.position < 0 or header.position + header.stored_bytes > len(self._view):
                self.problems.append(f"the batch at offset {header.base_offset} is not completely in the data")
            else:
                insort(found, header, key=lambda one: one.position)
        return found

    def _described(self, header: BatchHeader) -> Iterator[SalvagedBatch]:
        stored = self._view[header.position : header.position + header.stored_bytes]
        try:
            if header.flags & Flag.CONTROL:
                verify_body_crc(header, stored)
                return
            message = self._messages.get(header.schema_id, self._front)
            if message is None:
                raise BrokerError(ErrorCode.SCHEMA_OUTDATED, f"schema id {header.schema_id} is not known")
            body = stored[: header.length + header.offset_array_length]
            records = decode_batch(header, body, parse_schema(message))
            offsets = offsets_of(header, stored)
            _validate(records)
        except BrokerError as error:
            self.problems.append(f"the batch at offset {header.base_offset} is skipped: {error}")
            return
        yield self._counted(SalvagedBatch(records, offsets, bool(header.flags & Flag.TRANSACTIONAL)))

    def _messages_between(self, start: int, end: int) -> Iterator[SalvagedBatch]:
        """Yield the intact batches in data without headers.

        All other bytes are skipped: the schema at the beginning, offset arrays, the footer, and damaged bytes.
        """
        at = self._data.find(_CONTINUATION, start, end)
        while at >= 0:
            length = 0
            if at % _ALIGNMENT == 0:
                try:
                    length = read_message_length(self._view[at:end])
                    records = self._undescribed(self._view[at : at + length])
                except BrokerError:
                    length = 0
                else:
                    if records is not None:
                        yield self._counted(SalvagedBatch(records, None, None))
            at = self._data.find(_CONTINUATION, at + max(length, 1), end)

    def _undescribed(self, stored: memoryview) -> pa.RecordBatch | None:
        """Return the rows of a message, or None for a marker. Raises BrokerError if the message is damaged."""
        read_batch_message(stored)
        if MARKER_KEY.encode() in read_custom_metadata(stored):
            return None
        schema = self.schema()
        if schema is None:
            raise BrokerError(ErrorCode.SCHEMA_OUTDATED, "no schema is known")
        records = read_record_batch(pa.py_buffer(stored), schema)
        _validate(records)
        return records

    def _counted(self, batch: SalvagedBatch) -> SalvagedBatch:
        self.batch_count += 1
        self.row_count += batch.records.num_rows
        self.rows_without_header += batch.records.num_rows if batch.offsets is None else 0
        return batch


def segments_to_salvage(directory: Path) -> list[SalvagedSegment]:
    """Open the segments of a directory, for example an entry of ``set-aside/``. Return them sorted by base offset.

    Raises:
        StorageError: the directory has no segment files.
    """
    try:
        messages = {one.schema_id: one.message for one in read_partition_file(RealDisk(), directory).schemas}
    except (FileNotFoundError, StorageError):
        messages = {}
    stem_length = len(file_stem(0))
    paths = sorted(
        path for path in directory.glob(f"*{DATA_SUFFIX}") if path.stem.isdigit() and len(path.stem) == stem_length
    )
    if not paths:
        raise StorageError(
            f"{directory}: no segment files found, the directory of a log or of a set-aside one expected"
        )
    return [SalvagedSegment(path, messages) for path in paths]


def _validate(records: pa.RecordBatch) -> None:
    try:
        records.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, str(error).partition("\n")[0][:200]) from None
