"""ListOffsets and OffsetForLeaderEpoch requests of Kafka clients.

Kafka's clients expect the offset of the exact record for a time, so the broker decodes the batch that contains it. A
record's time is rounded down to milliseconds, as Kafka clients see it. A search by time never finds a record without a
time.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.data_topics import DataTopics, json_topic, require_kafka_columns
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.broker.kafka.stored_batches import run_by_size
from sparklog.broker.replication.partition import AppendRules, Partition
from sparklog.broker.requests.slices import Slices, Waited
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.kafka.wire.data import (
    EpochEndOffset,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from sparklog.record.codec import decode_batch
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.header import BatchHeader, Flag, unpack_headers
from sparklog.record.schema import DEFAULT_EVENT_TIME
from sparklog.security.acls import Operation

#: The special timestamps of requests. Sources: KIP-734, KIP-405, KIP-1005.
LATEST, EARLIEST, GREATEST_TIME, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5
#: The maximum number of milliseconds that fit into 64 bits of microseconds.
_MOST_MS = (2**63 - 1) // 1000
#: The maximum number of batches that one search decodes. A search decodes a further batch only if no record
#: of the batch has the time in the batch's header.
_MOST_DECODED = 1000


class _Found(NamedTuple):
    """The result for one partition: a record's offset, time and leader epoch, or -1 if there is none."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


_NOTHING = _Found(-1, -1, -1)


class KafkaListOffsets:
    """The handler of ListOffsets and OffsetForLeaderEpoch requests of Kafka clients.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, topics: DataTopics, slices: Slices) -> None:
        self._topics = topics
        self._slices = slices

    async def list_offsets(self, call: KafkaCall, request: ListOffsetsRequest) -> ListOffsetsResponse:
        return await self._slices.result(self._list(call, request))

    def _list(self, call: KafkaCall, request: ListOffsetsRequest) -> Generator[Waited, None, ListOffsetsResponse]:
        topics = []
        for topic in request.topics:
            results = []
            for wanted in topic.partitions:
                if self._slices.over():
                    yield None
                results.append((yield from self._list_one(call, topic.name, wanted, request.isolation_level)))
            topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=results))
        return ListOffsetsResponse(topics=topics)

    def _list_one(
        self, call: KafkaCall, topic: str, wanted: ListOffsetsPartition, isolation: int
    ) -> Generator[Waited, None, ListOffsetsPartitionResponse]:
        try:
            self._topics.require_access(call, Operation.DESCRIBE, topic, api="ListOffsets")
            partition = self._topics.require(topic, wanted.partition_index)
            partition.require_leader(wanted.current_leader_epoch)
            found = yield from self._find(partition, wanted.timestamp, isolation)
        except BrokerError as error:
            return ListOffsetsPartitionResponse(
                partition_index=wanted.partition_index, error_code=kafka_code(error.code)
            )
        return ListOffsetsPartitionResponse(
            partition_index=wanted.partition_index,
            timestamp=found.timestamp_ms,
            offset=found.offset,
            leader_epoch=found.leader_epoch,
        )

    def _find(self, partition: Partition, timestamp: int, isolation: int) -> Generator[Waited, None, _Found]:
        log, replica = partition.log, partition.replica
        if timestamp in {EARLIEST, EARLIEST_LOCAL}:
            start = log.log_start_offset
            # The next record of an empty log gets the leader's epoch.
            epoch = log.epoch_at(start) if start < log.log_end_offset else replica.leader_epoch
            return _Found(start, -1, epoch)
        if timestamp == LATEST_TIERED:  # As in a Kafka without tiered storage.
            return _NOTHING
        if timestamp < GREATEST_TIME:
            raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, f"{partition.tp}: timestamp {timestamp} found")
        if not replica.hw_settled:
            detail = f"{partition.tp}: the high watermark is still below the start of the leader's epoch"
            raise BrokerError(ErrorCode.OFFSET_NOT_AVAILABLE, detail)
        end_offset = replica.readable_end(isolation)
        if timestamp == LATEST:
            return _Found(end_offset, -1, replica.leader_epoch)
        require_kafka_columns(partition.tp.topic, partition.rules)
        try:
            if timestamp == GREATEST_TIME:
                return (yield from self._greatest_time(partition, end_offset))
            return (yield from self._at_or_after(partition, timestamp, end_offset))
        except StorageError as error:
            raise partition.storage_failed(error) from error

    def _at_or_after(self, partition: Partition, timestamp: int, end_offset: int) -> Generator[Waited, None, _Found]:
        """Find the first record at or after ``timestamp``, in milliseconds."""
        if timestamp > _MOST_MS:
            return _NOTHING
        start = 0
        for _ in range(_MOST_DECODED):
            found = partition.log.offset_for_time(timestamp * 1000, end_offset=end_offset, start_offset=start)
            if found is None:
                return _NOTHING
            record, start = yield from _search(partition, found[0], end_offset, at_least_ms=timestamp)
            if record is not None:
                return record
            if self._slices.over():
                yield None
        return _NOTHING

    def _greatest_time(self, partition: Partition, end_offset: int) -> Generator[Waited, None, _Found]:
        """Find the first record with the greatest time.

        If the records of a batch have no times, its header has the time of the append. No record has this time, so the
        search then continues with lower times.
        """
        below_us = 2**63 - 1
        for _ in range(_MOST_DECODED):
            found = partition.log.greatest_time(end_offset=end_offset, below_us=below_us)
            if found is None:
                return _NOTHING
            offset, below_us = found
            record, _end = yield from _search(partition, offset, end_offset, at_least_ms=below_us // 1000)
            if record is not None:
                return record
            if self._slices.over():
                yield None
        return _NOTHING

    # --- leader epochs ---

    async def end_offsets(self, call: KafkaCall, request: OffsetForLeaderEpochRequest) -> OffsetForLeaderEpochResponse:
        def steps() -> Generator[Waited, None, OffsetForLeaderEpochResponse]:
            topics = []
            for topic in request.topics:
                results = []
                for wanted in topic.partitions:
                    if self._slices.over():
                        yield None
                    results.append(self._end_offset(call, topic.topic, wanted))
                topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=results))
            return OffsetForLeaderEpochResponse(topics=topics)

        return await self._slices.result(steps())

    def _end_offset(self, call: KafkaCall, topic: str, wanted: OffsetForLeaderPartition) -> EpochEndOffset:
        """Return the end offset of the largest epoch that is at most the requested one. Source: KIP-101, KIP-320."""
        try:
            self._topics.require_access(call, Operation.DESCRIBE, topic, api="OffsetForLeaderEpoch")
            partition = self._topics.require(topic, wanted.partition)
            partition.require_leader(wanted.current_leader_epoch)
        except BrokerError as error:
            return EpochEndOffset(error_code=kafka_code(error.code), partition=wanted.partition)
        epoch, end_offset = wanted.leader_epoch, -1
        if 0 <= epoch <= partition.replica.leader_epoch:
            found = partition.log.end_of_epoch(epoch)
            epoch, end_offset = (epoch if found.epoch < 0 else found.epoch), found.end_offset
        else:
            epoch = -1
        return EpochEndOffset(partition=wanted.partition, leader_epoch=epoch, end_offset=end_offset)


def _search(
    partition: Partition, offset: int, end_offset: int, *, at_least_ms: int
) -> Generator[Waited, None, tuple[_Found | None, int]]:
    """Search the batch at ``offset`` for the first record from ``offset`` on with a time of at least ``at_least_ms``.

    Return a pair: the record, or None if the batch has no such record, and the offset after the batch.
    """
    read = partition.log.read(offset, max_bytes=1, end_offset=max(end_offset, offset + 1), max_batches=1)
    if not read.batch_count:
        return None, end_offset
    header = unpack_headers(read.headers)[0]
    if header.flags & Flag.CONTROL or not header.record_count:
        return None, header.next_offset
    stored = memoryview(read.bodies[0])[: header.length + header.offset_array_length]
    find = partial(
        _first_record,
        header,
        stored,
        partition.log.schema(header.schema_id),
        partition.rules,
        range(offset, end_offset),
        at_least_ms=at_least_ms,
    )
    return (yield from run_by_size(header, stored, find)), header.next_offset


def _first_record(
    header: BatchHeader,
    stored: memoryview,
    schema: pa.Schema,
    rules: AppendRules,
    wanted: range,
    *,
    at_least_ms: int,
) -> _Found | None:
    """Return the first record of the batch with a wanted offset and a time of at least ``at_least_ms``.

    Any thread may call this.
    """
    rows = decode_batch(header, stored, schema)
    offsets = offsets_of(header, stored)
    if rules.stamped_by_log:
        times = np.full(rows.num_rows, header.max_timestamp, dtype=np.int64)
        known = np.ones(rows.num_rows, dtype=bool)
    else:
        if rules.kafka_json:
            column = json_topic(rules, rows.schema).times(rows, append_time_us=header.append_time)
        else:
            column = rows.column(DEFAULT_EVENT_TIME)
        known = pc.is_valid(column).to_numpy(zero_copy_only=False)
        times = column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    in_range = (offsets >= wanted.start) & (offsets < wanted.stop) & known & (times >= at_least_ms * 1000)
    matches = np.flatnonzero(in_range)
    if not len(matches):
        return None
    first = int(matches[0])
    return _Found(int(offsets[first]), int(times[first]) // 1000, header.leader_epoch)
