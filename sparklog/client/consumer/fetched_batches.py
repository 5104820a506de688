"""The decoding of fetched bytes into Arrow batches with the requested offsets.

This module is pure. A fetch returns whole batches. The first batch may begin before the requested offset, and the last
batch may end after the range. The records outside of the range are removed. Markers are dropped, and so are the batches
of transactions that the response lists as aborted. Uncompressed columns are not copied: they are views of the received
frame.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import AbortedRange, FetchedPartition
from sparklog.record.codec import decode_batch
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_headers
from sparklog.record.projection import Projection, plan_projection, projected_schema, read_columns


class PartitionBytes(NamedTuple):
    """The part of a fetch response for one partition: the decoded batch headers, and all bodies in one piece."""

    answer: FetchedPartition
    headers: list[BatchHeader]
    bodies: memoryview
    #: True if ``bodies`` is a part of a memory-mapped file. Then only the bytes that are used are read from the disk.
    mapped: bool = False

    @property
    def next_offset(self) -> int:
        """Return the offset to fetch next. The result is valid only if there are batches."""
        return self.headers[-1].next_offset


class FetchedBatch(NamedTuple):
    """Records of one batch, from ``first_offset`` on.

    ``offsets`` has the offset of each record if there are gaps between them, as in compacted batches.
    """

    header: BatchHeader
    batch: pa.RecordBatch
    first_offset: int
    offsets: np.ndarray | None = None
    #: The number of bytes of the batch that were read.
    read_bytes: int = 0

    def head(self, rows: int) -> FetchedBatch:
        """Return the first ``rows`` records."""
        offsets = None if self.offsets is None else self.offsets[:rows]
        return self._replace(batch=self.batch.slice(0, rows), offsets=offsets)

    def tail(self, rows: int) -> FetchedBatch:
        """Return the batch without its first ``rows`` records. The batch must have more than ``rows`` records."""
        if self.offsets is None:
            return self._replace(batch=self.batch.slice(rows), first_offset=self.first_offset + rows)
        offsets = self.offsets[rows:]
        return self._replace(batch=self.batch.slice(rows), first_offset=int(offsets[0]), offsets=offsets)


class ConsumedBatch(NamedTuple):
    """A decoded batch, and the partition from which it was fetched."""

    tp: TopicPartition
    fetched: FetchedBatch


def split_partitions(answers: Sequence[FetchedPartition], body: memoryview) -> Iterator[PartitionBytes]:
    """Split the body of a fetch response into the parts of its partitions.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the lengths do not add up, or a header has a wrong checksum.
    """
    at = 0
    for answer in answers:
        headers_end = at + answer.batch_count * HEADER_BYTES
        end = headers_end + answer.body_bytes
        if end > len(body):
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"fetch of {answer.topic}-{answer.partition}: {len(body)} bytes of body found; expected {end}",
            )
        headers = unpack_headers(body[at:headers_end])
        stored = sum(header.stored_bytes for header in headers)
        if stored != answer.body_bytes:
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"fetch of {answer.topic}-{answer.partition}: batches of {stored} bytes; expected {answer.body_bytes}",
            )
        yield PartitionBytes(answer, headers, body[headers_end:end])
        at = end
    if at != len(body):
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"fetch: {len(body)} bytes of body found; expected {at}")


def decode_partition(
    fetched: PartitionBytes,
    schema_of: Callable[[int], pa.Schema],
    *,
    start: int,
    end: int | None = None,
    keep: Callable[[BatchHeader], bool] | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[FetchedBatch]:
    """Yield the records with offsets in ``[start, end)``, batch by batch. Batches without such records are skipped.

    ``keep`` filters batches by their header. ``columns`` are the requested columns; None means all columns. If the
    bodies are in a mapped file, only the bytes of these columns are read. The checksum covers all columns, so it is
    verified only if all columns are read.

    Raises:
        BrokerError: CORRUPT_MESSAGE if a checksum is wrong, or the bytes are not an Arrow batch.
    """
    at = 0
    tp = TopicPartition(fetched.answer.topic, fetched.answer.partition)
    aborted = _ranges_by_producer(fetched.answer.aborted)
    chosen = _SchemaProjections(schema_of, columns)
    for header in fetched.headers:
        body = fetched.bodies[at : at + header.stored_bytes]
        at += header.stored_bytes
        if header.next_offset <= start or header.flags & Flag.CONTROL or not header.record_count:
            continue
        if end is not None and header.base_offset >= end:
            return
        if (aborted and _is_aborted(header, aborted)) or (keep is not None and not keep(header)):
            continue
        try:
            batch, read_bytes = _decoded(header, body, chosen.of(header.schema_id), mapped=fetched.mapped)
        except BrokerError as error:
            raise BrokerError(error.code, f"{tp} at offset {header.base_offset}: {error.detail}") from error
        found = _slice_to_range(header, body, batch, start=start, end=end)
        if found is not None:
            yield found._replace(read_bytes=read_bytes)


class _SchemaProjection(NamedTuple):
    """The projection of batches of one schema: from ``schema`` to the ``projected`` schema.

    ``plan`` is None if both are the same.
    """

    schema: pa.Schema
    projected: pa.Schema
    plan: Projection | None


class _SchemaProjections:
    """The projections of the batches of one fetch, by schema id."""

    def __init__(self, schema_of: Callable[[int], pa.Schema], columns: Collection[str] | None) -> None:
        self._schema_of = schema_of
        self._columns = columns
        self._known: dict[int, _SchemaProjection] = {}

    def of(self, schema_id: int) -> _SchemaProjection:
        choice = self._known.get(schema_id)
        if choice is None:
            schema = self._schema_of(schema_id)
            columns = schema.names if self._columns is None else self._columns
            is_part = not set(schema.names).issubset(columns)
            plan = plan_projection(schema, columns) if is_part else None
            choice = self._known[schema_id] = _SchemaProjection(schema, projected_schema(schema, columns), plan)
        return choice


def _decoded(
    header: BatchHeader, body: memoryview, choice: _SchemaProjection, *, mapped: bool
) -> tuple[pa.RecordBatch, int]:
    """Decode a batch. Return its records, and the number of bytes that were read."""
    schema = choice.projected
    if not header.flags & Flag.PROJECTED and choice.plan is not None:
        if mapped:
            return read_columns(header, body, choice.schema, choice.plan)
        schema = choice.schema
    return decode_batch(header, body[: header.length + header.offset_array_length], schema), header.stored_bytes


def _ranges_by_producer(aborted: Sequence[AbortedRange]) -> dict[int, list[AbortedRange]]:
    """Return the aborted ranges by producer id.

    A fetch may list thousands of ranges, but rarely two of the same producer id, which is used for one transaction.
    """
    found: dict[int, list[AbortedRange]] = {}
    for one in aborted:
        found.setdefault(one.producer_id, []).append(one)
    return found


def _is_aborted(header: BatchHeader, aborted: Mapping[int, Sequence[AbortedRange]]) -> bool:
    return bool(header.flags & Flag.TRANSACTIONAL) and any(
        found.first_offset <= header.base_offset <= found.last_offset for found in aborted.get(header.producer_id, ())
    )


def _slice_to_range(
    header: BatchHeader, body: memoryview, batch: pa.RecordBatch, *, start: int, end: int | None
) -> FetchedBatch | None:
    if header.flags & Flag.OFFSET_ARRAY:
        offsets = offsets_of(header, body)
        low = int(np.searchsorted(offsets, start))
        high = len(offsets) if end is None else int(np.searchsorted(offsets, end))
        if low >= high:
            return None
        return FetchedBatch(header, batch.slice(low, high - low), int(offsets[low]), offsets[low:high])
    low = max(0, start - header.base_offset)
    high = batch.num_rows if end is None else min(batch.num_rows, end - header.base_offset)
    if low >= high:
        return None
    cut = batch if low == 0 and high == batch.num_rows else batch.slice(low, high - low)
    return FetchedBatch(header, cut, header.base_offset + low)
