"""Batches from which the cleaner has removed records.

The remaining records keep their offsets. The offsets are stored as an array of deltas, which follows the body:

::

    body (one RecordBatch message) | u32 offset delta of each record | zeros up to a multiple of 8

A compacted batch covers all offsets of its source batches, so there is no gap between batches. Adjacent batches are
merged, because otherwise many batches with few records would remain. Batches of different leader epochs are not merged.
A marker is not merged. The last batch of a producer is not merged either, because it must keep its sequences. Records
of an ended transaction become plain records.

A record without an event time has the greatest time of its batch. The cleaning must not change this time. So such
records are merged only with records of the same time. This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_PRODUCER
from sparklog.record.arrays import empty_batch
from sparklog.record.checksum import Buffer, crc32c
from sparklog.record.codec import NO_TIMESTAMP, decode_batch, encode_batch
from sparklog.record.header import BatchHeader, Flag

#: The maximum number of offsets that one batch covers. The header has 32 bits for this number.
MAX_SPAN = 2**31
_CODECS = int(Flag.LZ4 | Flag.ZSTD)


class CompactedBatch(NamedTuple):
    """A new batch that compaction has made, and that is not in a file yet.

    The position, the running maximum and the first-of-segment flag in ``header`` are wrong until the batch is written.
    """

    header: BatchHeader
    body: Buffer


class Source(NamedTuple):
    """A stored batch, and its records that remain after compaction.

    ``body`` is the whole stored body. ``records`` has the remaining records, and ``offsets`` their offsets.
    """

    header: BatchHeader
    body: memoryview
    records: pa.RecordBatch
    offsets: npt.NDArray[np.int64]

    @property
    def is_whole(self) -> bool:
        return len(self.offsets) == self.header.record_count

    def stamp(self, event_time: str | None) -> int | None:
        """Return the time that records without an event time have, or None if each record has an event time."""
        at = self.records.schema.get_field_index(event_time) if event_time is not None else -1
        return None if at >= 0 and not self.records.column(at).null_count else self.header.max_timestamp


def offsets_of(header: BatchHeader, body: Buffer) -> npt.NDArray[np.int64]:
    """Return the offset of each record of a stored batch.

    Raises:
        BrokerError: CORRUPT_MESSAGE if there are fewer offsets than records, if the offsets do not ascend, or if some
            are outside the batch.
    """
    if not header.flags & Flag.OFFSET_ARRAY:
        return np.arange(header.base_offset, header.base_offset + header.record_count, dtype=np.int64)
    array = memoryview(body)[header.length : header.length + header.offset_array_length]
    deltas = np.frombuffer(array, dtype="<u4")[: header.record_count].astype(np.int64)
    if len(deltas) < header.record_count or (
        len(deltas) and (deltas[-1] >= header.offset_span or bool((np.diff(deltas) <= 0).any()))
    ):
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE,
            f"batch at offset {header.base_offset}: offset array does not fit {header.record_count} records"
            f" over {header.offset_span} offsets",
        )
    return header.base_offset + deltas


def cut_front(header: BatchHeader, body: memoryview, start: int, *, schema: pa.Schema) -> CompactedBatch:
    """Return the rest of a stored batch from offset ``start`` on, for a follower whose log ends at ``start``.

    ``start`` must be inside the batch.
    """
    records = decode_batch(header, body[: header.length + header.offset_array_length], schema)
    offsets = offsets_of(header, body)
    first = int(np.searchsorted(offsets, start))
    merger = BatchMerger(schema, target_bytes=0, event_time=None)
    merger.begin_at = start
    found = merger.add(Source(header, body, records.slice(first), offsets[first:]), alone=True)
    assert len(found) == 1
    return found[0]


class BatchMerger:
    """A merger that combines the remaining records of batches into new batches, for one new segment.

    The caller passes the batches in the order of their offsets.
    """

    def __init__(
        self, schema: pa.Schema, *, target_bytes: int, event_time: str | None, keep_times: bool = True
    ) -> None:
        """Create a merger.

        ``target_bytes`` is the uncompressed size up to which batches are merged. ``event_time`` is the event-time
        column, or None if records have the times of their batches. ``keep_times`` is False if no reader uses the time
        of a record without an event time. Then records with different times may be merged.
        """
        self._schema = schema
        self._target_bytes = target_bytes
        self._event_time = event_time
        self._keep_times = keep_times
        self._parts: list[Source] = []
        self._bytes = 0
        #: The ``Source.stamp`` that all parts of the next batch have.
        self._stamp: int | None = None
        #: The first source of the next batch. It determines the batch's codec and leader epoch.
        self._first: BatchHeader | None = None
        self._begin = -1
        #: The offset at which the next batch begins. -1: at the base offset of its first source.
        self.begin_at = -1
        self._end = -1

    def add(self, source: Source, *, alone: bool) -> list[CompactedBatch]:
        """Add the next source batch, and return the new batches that are complete.

        With ``alone`` the source batch keeps its producer id and sequence, and is not merged.
        """
        header = source.header
        made: list[CompactedBatch] = []
        size = source.records.nbytes
        stamp = source.stamp(self._event_time) if self._keep_times and len(source.offsets) else None
        if self._first is not None and (
            alone
            or header.leader_epoch != self._first.leader_epoch
            or header.next_offset - self._begin > MAX_SPAN
            or (
                self._parts
                and len(source.offsets)
                and (self._bytes + size > self._target_bytes or stamp != self._stamp)
            )
        ):
            made += self.flush()
        if self._first is None:
            self._first = header
            self._begin = header.base_offset if self.begin_at < 0 else self.begin_at
        self._end = header.next_offset
        if len(source.offsets):
            self._parts.append(source)
            self._bytes += size
            self._stamp = stamp
        if alone:
            made.append(self._build_batch(keep_producer=True))
        return made

    def flush(self) -> list[CompactedBatch]:
        """Return the last new batch, or no batch if all sources are already in complete batches."""
        return [] if self._first is None else [self._build_batch(keep_producer=False)]

    def verbatim(self, header: BatchHeader, body: memoryview) -> list[CompactedBatch]:
        """Add a batch that must not be changed, such as a marker. Return the new batches that are complete."""
        flags = header.flags & ~Flag.FIRST_OF_SEGMENT | Flag.CLEANED
        return [*self.flush(), CompactedBatch(header._replace(flags=int(flags)), body)]

    def _build_batch(self, *, keep_producer: bool) -> CompactedBatch:
        assert self._first is not None
        first, parts, begin, end = self._first, self._parts, self._begin, self._end
        self._first, self._parts, self._bytes, self.begin_at = None, [], 0, -1
        body, shape = self._body(parts, first, self._stamp)
        offsets = np.concatenate([part.offsets for part in parts]) if parts else np.empty(0, np.int64)
        array = offset_array(offsets, begin)
        whole = b"".join([body, array]) if array else body
        sources = [part.header for part in parts] or [first]
        flags = shape.flags & _CODECS | Flag.CLEANED | (Flag.OFFSET_ARRAY if array else 0)
        producer = (first.producer_id, first.producer_epoch, first.first_sequence)
        producer_id, producer_epoch, first_sequence = producer if keep_producer else (NO_PRODUCER, -1, -1)
        header = shape._replace(
            base_offset=begin,
            append_time=max(header.append_time for header in sources),
            producer_id=producer_id,
            offset_span=end - begin,
            record_count=len(offsets),
            length=memoryview(body).nbytes,
            body_crc=crc32c(whole),
            leader_epoch=first.leader_epoch,
            schema_id=first.schema_id,
            first_sequence=first_sequence,
            offset_array_length=len(array),
            producer_epoch=producer_epoch,
            flags=int(flags),
        )
        return CompactedBatch(header, whole)

    def _body(self, parts: Sequence[Source], first: BatchHeader, stamp: int | None) -> tuple[Buffer, BatchHeader]:
        """Return the message of a new batch, and a header with its codec and its times.

        ``stamp`` is the ``Source.stamp`` of all ``parts``.
        """
        if not parts:
            body = empty_batch(self._schema).serialize()
            shape = first._replace(flags=0, min_timestamp=NO_TIMESTAMP, max_timestamp=NO_TIMESTAMP)
            return memoryview(body), shape
        if len(parts) == 1 and parts[0].is_whole:
            return parts[0].body[: parts[0].header.length], parts[0].header
        records = parts[0].records if len(parts) == 1 else pa.concat_batches([part.records for part in parts])
        flags = parts[0].header.flags
        compression = "lz4" if flags & Flag.LZ4 else "zstd" if flags & Flag.ZSTD else None
        shape, made = encode_batch(
            records, schema_id=first.schema_id, compression=compression, event_time=self._event_time
        )
        if stamp is not None:
            earliest = min(part.header.min_timestamp for part in parts)
            shape = shape._replace(min_timestamp=earliest, max_timestamp=stamp)
        elif shape.max_timestamp == NO_TIMESTAMP:
            shape = shape._replace(
                min_timestamp=min(part.header.min_timestamp for part in parts),
                max_timestamp=max(part.header.max_timestamp for part in parts),
            )
        return memoryview(made), shape


def offset_array(offsets: npt.NDArray[np.int64], base_offset: int) -> bytes:
    """Return the offset array, which is empty if the offsets begin at ``base_offset`` and have no gaps."""
    if not len(offsets) or offsets[-1] - base_offset == len(offsets) - 1:
        return b""
    deltas = (offsets - base_offset).astype("<u4").tobytes()
    return deltas + bytes(-len(deltas) % 8)
