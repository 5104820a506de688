"""Fetched bytes into Arrow batches, cut to the offsets that were asked for. Pure.

A fetch answers with whole batches: the first may start before the asked offset and the last may end behind the wanted
range. Control markers are dropped, and so are batches of transactions that the answer names as aborted. Nothing is
copied: uncompressed columns are views of the frame they arrived in.
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
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_headers
from sparklog.record.projection import plan_projection, project_batch, projected_schema

_COMPRESSED = int(Flag.LZ4 | Flag.ZSTD)


class PartitionBytes(NamedTuple):
    """One partition's part of a fetch answer: decoded headers, and their bodies back to back."""

    answer: FetchedPartition
    headers: list[BatchHeader]
    bodies: memoryview

    @property
    def next_offset(self) -> int:
        """The offset to fetch next; only when there are batches."""
        return self.headers[-1].next_offset


class FetchedBatch(NamedTuple):
    """Records ``[first_offset, ...)`` of one batch; ``offsets`` only where they are not dense (cleaned batches)."""

    header: BatchHeader
    batch: pa.RecordBatch
    first_offset: int
    offsets: np.ndarray | None = None


def split_partitions(answers: Sequence[FetchedPartition], body: memoryview) -> Iterator[PartitionBytes]:
    """Cut the body of a fetch answer by its partitions.

    Raises:
        BrokerError: CORRUPT_MESSAGE when lengths do not add up or a header fails its checksum.
    """
    at = 0
    for answer in answers:
        headers_end = at + answer.batch_count * HEADER_BYTES
        end = headers_end + answer.body_bytes
        if end > len(body):
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"fetch of {answer.topic}-{answer.partition}: {len(body)} bytes of body, {end} expected",
            )
        headers = unpack_headers(body[at:headers_end])
        stored = sum(header.stored_bytes for header in headers)
        if stored != answer.body_bytes:
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE,
                f"fetch of {answer.topic}-{answer.partition}: batches take {stored} bytes, {answer.body_bytes} found",
            )
        yield PartitionBytes(answer, headers, body[headers_end:end])
        at = end
    if at != len(body):
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"fetch: {len(body)} bytes of body, {at} expected")


def decode_partition(
    fetched: PartitionBytes,
    schema_of: Callable[[int], pa.Schema],
    *,
    start: int,
    end: int | None = None,
    keep: Callable[[BatchHeader], bool] | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[FetchedBatch]:
    """The records with offsets in ``[start, end)``, batch by batch; empty batches are left out, and those that ``keep``
    does not want by their header. ``columns``: those that were asked for; None: all.

    Raises:
        BrokerError: CORRUPT_MESSAGE when a checksum fails or the bytes are no Arrow batch.
    """
    at = 0
    tp = TopicPartition(fetched.answer.topic, fetched.answer.partition)
    aborted = _by_producer(fetched.answer.aborted)
    projected: dict[int, pa.Schema] = {}
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
            schema = schema_of(header.schema_id)
            if header.flags & Flag.PROJECTED:
                if header.schema_id not in projected:
                    projected[header.schema_id] = projected_schema(schema, columns or ())
                schema = projected[header.schema_id]
            elif columns is not None and header.flags & _COMPRESSED:
                # from a file of this host: what is not wanted need not be decompressed
                header, chosen = project_batch(header, body, plan_projection(schema, columns))
                body = memoryview(chosen)
                schema = projected_schema(schema, columns)
            batch = decode_batch(header, body[: header.length + header.offset_array_length], schema)
        except BrokerError as error:
            raise BrokerError(error.code, f"{tp} at offset {header.base_offset}: {error.detail}") from error
        found = _cut(header, body, batch, start=start, end=end)
        if found is not None:
            yield found


def _by_producer(aborted: Sequence[AbortedRange]) -> dict[int, list[AbortedRange]]:
    """A fetch may name thousands of ranges, but hardly two of one producer id, which serves one transaction."""
    found: dict[int, list[AbortedRange]] = {}
    for one in aborted:
        found.setdefault(one.producer_id, []).append(one)
    return found


def _is_aborted(header: BatchHeader, aborted: Mapping[int, Sequence[AbortedRange]]) -> bool:
    return bool(header.flags & Flag.TRANSACTIONAL) and any(
        found.first_offset <= header.base_offset <= found.last_offset for found in aborted.get(header.producer_id, ())
    )


def _cut(
    header: BatchHeader, body: memoryview, batch: pa.RecordBatch, *, start: int, end: int | None
) -> FetchedBatch | None:
    if header.flags & Flag.OFFSET_ARRAY:
        deltas = np.frombuffer(body[header.length : header.length + header.offset_array_length], dtype="<u4")
        offsets = header.base_offset + deltas.astype(np.int64)
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
