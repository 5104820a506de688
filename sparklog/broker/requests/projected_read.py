"""Reads for a consumer that requests only some columns: batches are projected before they are sent.

The broker computes a new checksum for a projected batch, so it must first read the whole batch and verify the stored
checksum. The CRC cache keeps running CRCs of long batches. With these CRCs, a later read of any columns neither reads
nor verifies the whole batch, so one response may have batches from a longer part of the log. If a consumer requests no
column at all, only the index is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparklog.broker.replication.crc_cache import BatchKey, CrcCache
from sparklog.broker.replication.partition import Partition
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import HEADER_BYTES, BatchHeader, unpack_headers
from sparklog.record.projection import (
    RUN_BYTES,
    ProjectedBatch,
    Projection,
    header_alone,
    plan_projection,
    project_batch,
)
from sparklog.storage.disk import read_ahead
from sparklog.storage.log import LogSlice

#: The minimum cost of a batch, in bytes of the response's limit. The event loop needs about 10 us to read the metadata
#: of even a small batch.
BATCH_COST_BYTES = 16 * 1024
#: The cost of a batch of which only the header is sent.
HEADER_COST_BYTES = 2 * 1024
#: The cost of a batch with cached CRCs, unless the batch itself is smaller. The event loop needs as long for such a
#: read as for the verification of half as many bytes, and the disk may have to seek.
KEPT_COST_BYTES = 512 * 1024
#: The cost of each column of the schema, including nested and unselected ones: the event loop needs as long to find a
#: column in the message as to verify this number of bytes. If the cost of all columns, plus ``RUN_BYTES`` for each run
#: of bytes that is sent, exceeds ``KEPT_COST_BYTES``, this sum is the cost of a batch with cached CRCs.
COLUMN_COST_BYTES = 3 * 1024
#: The size of the metadata of a message with up to about 80 columns.
_METADATA_BYTES = 4096
#: The broker reads up to this multiple of the response's remaining bytes from the log, because batches with cached CRCs
#: cost less than their size.
_STRETCH = 8


class ProjectedRead(NamedTuple):
    """The result of a projected read.

    ``records`` has the batches as they are sent. ``stored_bytes`` is the size of their bodies as stored. ``cost`` is
    the number of bytes that the read uses of the response's size limit.
    """

    records: LogSlice
    stored_bytes: int
    cost: int


def read_projected(
    partition: Partition,
    offset: int,
    columns: Sequence[str],
    *,
    kept: CrcCache,
    max_bytes: int,
    end_offset: int,
    verify: bool = False,
) -> ProjectedRead:
    """Return the batches from ``offset`` up to ``end_offset``, with only the columns in ``columns``.

    ``max_bytes`` limits ``ProjectedRead.cost``. ``kept`` has the cached CRCs, which are not used if ``verify`` is set.

    Raises:
        BrokerError: SCHEMA_OUTDATED for a column that the topic does not have or this broker does not know yet;
            CORRUPT_MESSAGE if a stored batch is damaged; errors of ``Log.read``.
        StorageError: the log directory must go offline.
    """
    known = partition.rules.schema.names
    if unknown := sorted(set(columns).difference(known)):
        raise BrokerError(
            ErrorCode.SCHEMA_OUTDATED, f"{partition.tp}: columns {unknown[:20]} found, this broker knows {known}"
        )
    log = partition.log
    if not columns:
        most = max(1, max_bytes // HEADER_COST_BYTES)
        found = log.read_headers(offset, max_batches=most, end_offset=end_offset)
        headers = unpack_headers(found.headers)
        if not any(header.offset_array_length for header in headers):
            cost = max(1, len(headers)) * HEADER_COST_BYTES
            return _sent([header_alone(header) for header in headers], found, found.body_bytes, cost)
    response = _Response(partition, frozenset(columns), kept, max_bytes=max_bytes, verify=verify)
    # The response may contain views of the mapped file. The connection keeps these views until they are sent.
    most = max(1, max_bytes // BATCH_COST_BYTES)
    first = found = log.read(offset, max_bytes=max_bytes, end_offset=end_offset, max_batches=most, mapped=True)
    while found.batch_count and response.add_batches(found):
        left = max_bytes - response.cost
        most = max(1, left // BATCH_COST_BYTES)
        found = log.read(
            found.next_offset, max_bytes=_STRETCH * left, end_offset=end_offset, max_batches=most, mapped=True
        )
    return _sent(response.batches, first, response.stored_bytes, response.cost)


class _Response:
    """Projected batches of a response that is being built."""

    def __init__(
        self, partition: Partition, columns: frozenset[str], kept: CrcCache, *, max_bytes: int, verify: bool
    ) -> None:
        self.batches: list[ProjectedBatch] = []
        self.stored_bytes = 0
        self.cost = 0
        self._partition = partition
        self._columns = columns
        self._plans: dict[int, Projection] = {}
        self._kept = kept
        self._max_bytes = max_bytes
        self._verify = verify

    def add_batches(self, found: LogSlice) -> bool:
        """Add batches while there is room in the response. Return whether further batches may fit.

        The result is True only if no batch had to be verified. Then the cost of the batches is less than their size in
        the log.

        Raises:
            BrokerError: CORRUPT_MESSAGE if the first batch of the response is damaged.
        """
        none_verified = True
        headers = unpack_headers(found.headers)
        bodies = _cut(headers, found)
        keys = self._keys(found)
        self._read_ahead(headers, bodies, keys)
        for header, body, key in zip(headers, bodies, keys, strict=True):
            running = self._kept.get(key)
            if running is None and not self._has_room(len(body)):
                return False
            try:
                batch = project_batch(header, body, self._plan(header.schema_id), running)
            except BrokerError as error:
                self._kept.drop(key)
                if self.batches:
                    return False  # the batches before the damaged one are good
                detail = f"{self._partition.tp} at offset {header.base_offset}: {error.detail}"
                raise BrokerError(error.code, detail) from error
            if batch.running is not None and batch.running is not running:
                self._kept.put(key, batch.running)
            cost = len(body)
            if running is not None and batch.running is running:
                cost = max(self._kept_cost(header, cost), min(cost, batch.header.stored_bytes))
            else:
                none_verified = False
            if not self._has_room(cost):
                return False
            for start, length in batch.unread:
                read_ahead(body, header.position + start, length)
            self.batches.append(batch)
            self.stored_bytes += len(body)
            self.cost += max(cost, BATCH_COST_BYTES)
        return none_verified and self.cost < self._max_bytes

    def _keys(self, found: LogSlice) -> list[BatchKey]:
        """Return the cache keys of all batches.

        If the reader has found wrong data (``verify``), drop the cached CRCs.
        """
        topic_id, partition, headers = self._partition.topic_id, self._partition.tp.partition, found.headers
        keys = [
            BatchKey(topic_id, partition, headers[at : at + HEADER_BYTES])
            for at in range(0, len(headers), HEADER_BYTES)
        ]
        if self._verify:
            for key in keys:
                self._kept.drop(key)
        return keys

    def _read_ahead(self, headers: list[BatchHeader], bodies: list[memoryview], keys: list[BatchKey]) -> None:
        """Ask the operating system to read the metadata of batches with cached CRCs from the disk, all at once.

        The metadata of the batches is far apart on the disk. Without this, the event loop would wait for each batch.
        """
        left = self._max_bytes - self.cost
        for header, body, key in zip(headers, bodies, keys, strict=True):
            if self._kept.get(key) is None:
                return
            left -= self._kept_cost(header, len(body))
            if left < 0:
                return
            read_ahead(body, header.position, min(len(body), _METADATA_BYTES))

    def _has_room(self, cost: int) -> bool:
        return not self.batches or self.cost + cost <= self._max_bytes

    def _kept_cost(self, header: BatchHeader, verified: int) -> int:
        """Return the cost of a batch with cached CRCs; ``verified`` is its cost without them."""
        plan = self._plan(header.schema_id)
        arithmetic = len(plan.spans) * RUN_BYTES + plan.nodes * COLUMN_COST_BYTES
        return min(verified, max(KEPT_COST_BYTES, arithmetic))

    def _plan(self, schema_id: int) -> Projection:
        plan = self._plans.get(schema_id)
        if plan is None:
            schema = self._partition.log.schema(schema_id)
            plan = self._plans[schema_id] = plan_projection(schema, self._columns)
        return plan


def _cut(headers: list[BatchHeader], found: LogSlice) -> list[memoryview]:
    """Return the body of each batch. ``found`` has one piece for each batch, or one piece for all."""
    if len(found.bodies) == found.batch_count:
        return [memoryview(body) for body in found.bodies]
    whole = memoryview(found.bodies[0])
    bodies = []
    at = 0
    for header in headers:
        bodies.append(whole[at : at + header.stored_bytes])
        at += header.stored_bytes
    return bodies


def _sent(batches: list[ProjectedBatch], found: LogSlice, stored_bytes: int, cost: int) -> ProjectedRead:
    """Return the result of a projected read. If there are no batches, its records are ``found``."""
    if not batches:
        return ProjectedRead(found, 0, 0)
    records = LogSlice(
        b"".join(batch.header.pack() for batch in batches),
        [piece for batch in batches for piece in batch.pieces],
        sum(batch.header.stored_bytes for batch in batches),
        len(batches),
        batches[-1].header.next_offset,
    )
    return ProjectedRead(records, stored_bytes, cost)
