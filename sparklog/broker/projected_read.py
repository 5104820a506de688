"""Reading a log for a consumer that wants some of the columns: batches cut down before they are sent.

What is read from the log is the same as for all columns, and its checksum is verified, because the one that goes out
with the projected batch is made here. Where no column at all is wanted, only the index is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparklog.broker.partition import Partition
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import BatchHeader, unpack_headers
from sparklog.record.projection import ProjectedBatch, Projection, header_alone, plan_projection, project_batch
from sparklog.storage.log import LogSlice

#: What a batch counts for at least in the bytes an answer may hold: reading its metadata takes the event loop some
#: ten microseconds, however small it is.
BATCH_COST_BYTES = 16 * 1024
#: The same of a header alone.
HEADER_COST_BYTES = 2 * 1024


class ProjectedRead(NamedTuple):
    """``records`` as they are sent. ``stored_bytes``: bodies as they are stored. ``cost``: what the read counts for in
    the bytes an answer may hold."""

    records: LogSlice
    stored_bytes: int
    cost: int


def read_projected(
    partition: Partition, offset: int, columns: Sequence[str], *, max_bytes: int, end_offset: int
) -> ProjectedRead:
    """As ``Log.read``, with ``columns`` alone.

    Raises:
        BrokerError: SCHEMA_OUTDATED for a column that the topic does not have, or that this broker has not been told
            of yet; CORRUPT_MESSAGE when a stored batch is damaged; as ``Log.read``.
        StorageError: the log directory must go offline.
    """
    known = partition.rules.schema.names
    if unknown := sorted(set(columns).difference(known)):
        raise BrokerError(
            ErrorCode.SCHEMA_OUTDATED, f"{partition.tp}: columns {unknown[:20]} found, {known} are known here"
        )
    if not columns:
        most = max(1, max_bytes // HEADER_COST_BYTES)
        found = partition.log.read_headers(offset, max_batches=most, end_offset=end_offset)
        headers = unpack_headers(found.headers)
        if not any(header.offset_array_length for header in headers):
            return _sent([header_alone(header) for header in headers], found, found.body_bytes, HEADER_COST_BYTES)
    # What is sent may be views of it, which the connection keeps until they are sent.
    found = partition.log.read(offset, max_bytes=max_bytes, end_offset=end_offset, mapped=True)
    headers = unpack_headers(found.headers)[: max(1, max_bytes // BATCH_COST_BYTES)]
    return _project(partition, headers, columns, found)


def _project(
    partition: Partition, headers: list[BatchHeader], columns: Sequence[str], found: LogSlice
) -> ProjectedRead:
    plans: dict[int, Projection] = {}
    batches = []
    chosen = frozenset(columns)
    bodies = _cut(headers, found)
    for header, body in zip(headers, bodies, strict=True):
        plan = plans.get(header.schema_id)
        if plan is None:
            plan = plans[header.schema_id] = plan_projection(partition.log.schema(header.schema_id), chosen)
        try:
            batches.append(project_batch(header, body, plan))
        except BrokerError as error:
            if batches:
                break  # those in front of the damage are good
            raise BrokerError(error.code, f"{partition.tp} at offset {header.base_offset}: {error.detail}") from error
    return _sent(batches, found, sum(map(len, bodies[: len(batches)])), BATCH_COST_BYTES)


def _cut(headers: list[BatchHeader], found: LogSlice) -> list[memoryview]:
    """The batches' bodies, which lie in one piece or in a piece each."""
    if len(found.bodies) == found.batch_count:
        return [memoryview(body) for body in found.bodies[: len(headers)]]
    whole = memoryview(found.bodies[0])
    bodies = []
    at = 0
    for header in headers:
        bodies.append(whole[at : at + header.stored_bytes])
        at += header.stored_bytes
    return bodies


def _sent(batches: list[ProjectedBatch], found: LogSlice, stored_bytes: int, batch_cost: int) -> ProjectedRead:
    if not batches:
        return ProjectedRead(found, 0, 0)
    bodies = [piece for batch in batches for piece in batch.pieces]
    size = sum(batch.header.stored_bytes for batch in batches)
    records = LogSlice(
        b"".join(batch.header.pack() for batch in batches),
        [*bodies],
        size,
        len(batches),
        batches[-1].header.next_offset,
    )
    read_bytes = stored_bytes if bodies else 0
    return ProjectedRead(records, stored_bytes, max(read_bytes, len(batches) * batch_cost))
