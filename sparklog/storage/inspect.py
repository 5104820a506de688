"""Inspection of segment files on disk: their content, their damage, and the differences between two replicas.

The code opens files for reading only and changes nothing. No broker needs to run. If a broker is writing to the
partition directory, the last segment may seem to end in the middle of an append.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.errors import BrokerError, StorageError
from sparklog.record.checksum import crc32c
from sparklog.record.codec import decode_batch
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.footer import arrow_prelude, schema_of_prelude
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, header_array, unpack_header
from sparklog.record.marker import Marker, decode_marker
from sparklog.record.schema import parse_schema
from sparklog.storage.append_plan import NO_MAXIMUM
from sparklog.storage.disk import RealDisk
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, read_partition_file
from sparklog.storage.sealing import footer_of
from sparklog.storage.segment import DATA_SUFFIX, INDEX_SUFFIX, file_stem


class StoredBatch(NamedTuple):
    """A batch that was read from a segment and decoded.

    For a marker ``records`` is None. For any other batch ``marker`` is None.
    """

    header: BatchHeader
    records: pa.RecordBatch | None
    offsets: npt.NDArray[np.int64]
    marker: Marker | None


@dataclass(slots=True)
class SegmentReport:
    """The summary of one segment's files. ``problems`` is empty if the checks found nothing wrong."""

    data_path: str
    base_offset: int
    end_offset: int
    batches: int = 0
    records: int = 0
    data_bytes: int = 0
    leader_epochs: tuple[int, int] = (-1, -1)
    timestamps_us: tuple[int, int] = (-1, -1)
    sealed: bool = False
    cleaned: bool = False
    problems: list[str] = field(default_factory=list)


class StoredPartition:
    """A reader of the files in one partition directory.

    The constructor raises StorageError or OSError if ``partition.json`` cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.content: PartitionFile = read_partition_file(RealDisk(), directory)
        self._messages = {schema.schema_id: schema.message for schema in self.content.schemas}

    @property
    def name(self) -> str:
        return f"{self.content.topic}-{self.content.partition}"

    def bases(self) -> list[int]:
        """Return the base offsets of the segments that have a data file, in ascending order."""
        names = (path.name.removesuffix(DATA_SUFFIX) for path in self.directory.glob(f"*{DATA_SUFFIX}"))
        return sorted(int(name) for name in names if name.isdigit() and len(name) == len(file_stem(0)))

    def reports(self, *, thorough: bool) -> Iterator[SegmentReport]:
        """Yield a report of each segment.

        The reports are based on the headers and the footers. With ``thorough`` every checksum and record is checked
        too. A gap between two segments is reported as a problem of the later segment.
        """
        end = None
        for base in self.bases():
            report = self._report(base, thorough=thorough)
            if end is not None and base != end:
                report.problems.append(f"begins at {base}, the segment before ends at {end}")
            end = report.end_offset
            yield report

    def batches(self, start: int = 0, end: int | None = None) -> Iterator[StoredBatch]:
        """Yield the batches that overlap ``[start, end)``.

        Raises:
            BrokerError: CORRUPT_MESSAGE for a damaged batch.
        """
        bases = self.bases()
        for base, following in zip(bases, [*bases[1:], None], strict=True):
            if (following is not None and following <= start) or (end is not None and base >= end):
                continue
            data, headers = self._mapped(base), self._headers(base)
            self._message(headers[:1], data)
            for at in range(len(headers)):
                header = unpack_header(headers[at : at + 1].tobytes())
                if header.next_offset > start and (end is None or header.base_offset < end):
                    yield self._decoded(header, data)

    def _message(self, first: npt.NDArray[np.void], data: memoryview) -> bytes | None:
        """Return the Arrow schema message of the segment whose first header is ``first``.

        If ``partition.json`` does not have this schema yet, the message is read from the beginning of the data file.
        Return None if neither file has it.
        """
        if not len(first):
            return None
        schema_id, end = int(first[0]["schema_id"]), int(first[0]["position"])
        if schema_id not in self._messages:
            try:
                self._messages[schema_id] = schema_of_prelude(bytes(data[: max(end, 0)]))
            except BrokerError:
                return None
        return self._messages[schema_id]

    def _decoded(self, header: BatchHeader, data: memoryview) -> StoredBatch:
        stored = data[header.position : header.position + header.stored_bytes]
        if header.flags & Flag.CONTROL:
            return StoredBatch(header, None, np.empty(0, np.int64), decode_marker(header, stored))
        schema = parse_schema(self._messages[header.schema_id])
        records = decode_batch(header, stored[: header.length + header.offset_array_length], schema)
        return StoredBatch(header, records, offsets_of(header, stored), None)

    def _headers(self, base: int) -> npt.NDArray[np.void]:
        path = self.directory / (file_stem(base) + INDEX_SUFFIX)
        content = path.read_bytes()
        return header_array(content[: len(content) // HEADER_BYTES * HEADER_BYTES])

    def _mapped(self, base: int) -> memoryview:
        with (self.directory / (file_stem(base) + DATA_SUFFIX)).open("rb") as file:
            try:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file
                return memoryview(b"")

    def _report(self, base: int, *, thorough: bool) -> SegmentReport:
        path = self.directory / (file_stem(base) + DATA_SUFFIX)
        report = SegmentReport(str(path), base, base, data_bytes=path.stat().st_size)
        try:
            headers = self._headers(base)
        except FileNotFoundError:
            report.problems.append("has no index")
            return report
        if not len(headers):
            report.problems.append("has no batch")
            return report
        data = self._mapped(base)
        self._summarise(report, headers)
        if thorough:
            report.problems += self._damage(headers, data, base)
        self._check_footer(report, headers, data)
        return report

    def _summarise(self, report: SegmentReport, headers: npt.NDArray[np.void]) -> None:
        last = headers[-1]
        times = headers["max_timestamp"][headers["max_timestamp"] >= 0]
        report.end_offset = int(last["base_offset"]) + int(last["offset_span"])
        report.batches = len(headers)
        report.records = int(headers["record_count"].sum(dtype=np.int64))
        report.leader_epochs = (int(headers["leader_epoch"][0]), int(last["leader_epoch"]))
        if len(times):
            oldest = headers["min_timestamp"][headers["min_timestamp"] >= 0]
            report.timestamps_us = (int(oldest.min(initial=times.max())), int(times.max()))
        report.cleaned = bool((headers["flags"] & int(Flag.CLEANED)).any())
        index_bytes = (self.directory / (file_stem(report.base_offset) + INDEX_SUFFIX)).stat().st_size
        if index_bytes % HEADER_BYTES:
            report.problems.append(f"index of {index_bytes} bytes, not a multiple of {HEADER_BYTES}")

    def _damage(self, headers: npt.NDArray[np.void], data: memoryview, base: int) -> Iterator[str]:
        """Describe each damage, in the order of the batches. Stop at the first wrong offset or position."""
        end, running_max = base, NO_MAXIMUM
        message = self._message(headers[:1], data)
        if message is None:
            yield f"schema id {int(headers[0]['schema_id'])} is neither in {PARTITION_FILE} nor at the segment's front"
            return
        prelude = arrow_prelude(message)
        if data[: len(prelude)] != prelude:
            yield "does not begin with its schema"
        position = len(prelude)
        for at in range(len(headers)):
            where = f"batch {at}, offset {end}"
            try:
                header = unpack_header(headers[at : at + 1].tobytes())
            except BrokerError as error:
                yield f"{where}: {error}"
                return
            if (header.base_offset, header.position) != (end, position):
                found, expected = (header.base_offset, header.position), (end, position)
                yield f"{where}: (offset, position) {found} found, {expected} expected"
                return
            running_max = max(running_max, header.max_timestamp)
            if header.running_max != running_max:
                yield f"{where}: running maximum timestamp {header.running_max} found, {running_max} expected"
            stored = data[position : position + header.stored_bytes]
            crc = crc32c(stored)
            if crc != header.body_crc:
                yield f"{where}: CRC32C {crc:#010x} found, {header.body_crc:#010x} expected"
            else:
                try:
                    found_batch = self._decoded(header, data)
                    if found_batch.records is not None:
                        found_batch.records.validate(full=True)
                except (BrokerError, pa.ArrowException, KeyError) as error:
                    yield f"{where}: {error}"
            end, position = header.next_offset, position + header.stored_bytes

    def _check_footer(self, report: SegmentReport, headers: npt.NDArray[np.void], data: memoryview) -> None:
        """Check that the last batch is followed by the footer of a sealed segment, or by nothing."""
        last = unpack_header_or_none(headers)
        message = self._message(headers[:1], data)
        if last is None or message is None:
            return
        data_end = last.position + last.stored_bytes
        tail = data[data_end:]
        if len(data) < data_end:
            report.problems.append(f"data end at {len(data)}, {data_end} expected")
        elif len(tail):
            try:
                expected = footer_of(headers, data, schema_message=message)
            except (BrokerError, ValueError, IndexError) as error:
                report.problems.append(f"its footer cannot be computed: {error}")
                return
            report.sealed = bytes(tail) == expected
            if not report.sealed:
                report.problems.append(f"{len(tail)} bytes after the last batch are not its footer")


def unpack_header_or_none(headers: npt.NDArray[np.void]) -> BatchHeader | None:
    """Decode and return the last of ``headers``, or return None if it is damaged."""
    try:
        return unpack_header(headers[-1:].tobytes())
    except BrokerError:
        return None


def partitions_in(path: Path) -> list[StoredPartition]:
    """Open the partition directory at ``path``, or all partition directories of the log directory at ``path``.

    Raises:
        StorageError: ``path`` is neither a partition directory nor a log directory with partitions.
    """
    if (path / PARTITION_FILE).exists():
        return [StoredPartition(path)]
    found = [StoredPartition(file.parent) for file in sorted(path.glob(f"*/{PARTITION_FILE}"))]
    if not found:
        raise StorageError(f"{path}: neither a partition's directory nor a log directory with partitions")
    return found


# --- replicas -----------------------------------------------------------------------------------------------------


def differences(one: StoredPartition, other: StoredPartition, *, below: int | None = None) -> Iterator[str]:
    """Yield the first ten differences between two replicas.

    Only offsets that both replicas have, and that are lower than ``below``, are compared. In compacted batches one
    replica may lack records that the other replica has, but records that both have must be equal. Other batches must be
    equal byte for byte.
    """
    ranges = [_range(replica) for replica in (one, other)]
    start, end = max(low for low, _ in ranges), min(high for _, high in ranges)
    end = end if below is None else min(end, below)
    yield from islice(_differing(one, other, start, end), 10)


def _range(partition: StoredPartition) -> tuple[int, int]:
    reports = list(partition.reports(thorough=False))
    return (reports[0].base_offset, reports[-1].end_offset) if reports else (0, 0)


def _differing(one: StoredPartition, other: StoredPartition, start: int, end: int) -> Iterator[str]:
    others = _Window(other, start, end)
    for batch in one.batches(start, end):
        header = batch.header
        low, high = max(header.base_offset, start), min(header.next_offset, end)
        found = others.between(low, high)
        cleaned = bool(header.flags & Flag.CLEANED) or any(each.header.flags & Flag.CLEANED for each in found)
        if not cleaned:
            same = [each.header for each in found] == [header]
            if not same:
                yield f"offsets {low} to {high}: the replicas have different batches"
            continue
        mine, theirs = _rows([batch], low, high), _rows(found, low, high)
        _, at, there = np.intersect1d(mine[0], theirs[0], assume_unique=True, return_indices=True)
        if mine[1] is None or theirs[1] is None:
            continue
        left, right = mine[1].take(pa.array(at)), theirs[1].take(pa.array(there))
        if left.schema != right.schema or not left.equals(right):
            yield f"offsets {low} to {high}: the replicas have different records"


class _Window:
    """A reader of the batches of one replica, by ranges of offsets that ascend."""

    def __init__(self, partition: StoredPartition, start: int, end: int) -> None:
        self._source = partition.batches(start, end)
        self._held: list[StoredBatch] = []

    def between(self, low: int, high: int) -> list[StoredBatch]:
        self._held = [batch for batch in self._held if batch.header.next_offset > low]
        while not self._held or self._held[-1].header.next_offset < high:
            found = next(self._source, None)
            if found is None:
                break
            self._held.append(found)
        return [batch for batch in self._held if batch.header.base_offset < high and batch.header.next_offset > low]


def _rows(batches: Sequence[StoredBatch], low: int, high: int) -> tuple[npt.NDArray[np.int64], pa.Table | None]:
    with_records = [batch for batch in batches if batch.records is not None and len(batch.offsets)]
    if not with_records:
        return np.empty(0, np.int64), None
    offsets = np.concatenate([batch.offsets for batch in with_records])
    tables = [pa.Table.from_batches([batch.records]) for batch in with_records]
    table = pa.concat_tables(tables, promote_options="default")
    inside = (offsets >= low) & (offsets < high)
    return offsets[inside], table.filter(pa.array(inside))
