"""ListOffsets requests: the leader returns the start or end offset of a partition, or the offset for a time.

The high watermark of a new leader may be lower than that of the earlier leader. Until it reaches the start of the new
leader's epoch, a request for the end or for a time gets the retriable error OFFSET_NOT_AVAILABLE. So a consumer never
sees the end offset move backwards.
"""

from __future__ import annotations

from collections.abc import Generator

from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.slices import Slices, answer_in_slices
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    EARLIEST,
    LATEST,
    ListedOffset,
    ListOffsets,
    ListOffsetsPartition,
    ListOffsetsReply,
    Reply,
)


class ListOffsetsRequests:
    """The handler of ListOffsets requests, which return the start or end offset, or the offset for a time."""

    def __init__(self, partitions: Partitions, slices: Slices) -> None:
        self._partitions = partitions
        self._slices = slices

    def handle(self, connection: ServerConnection, request: ListOffsets, body: memoryview) -> None:
        answer_in_slices(self._slices, connection, request, self._list(request))

    def _list(self, request: ListOffsets) -> Generator[None, None, Reply]:
        results: list[ListedOffset] = []
        for wanted in request.partitions:
            if self._slices.over():
                yield
            results.append(self._list_one(wanted, request.isolation))
        return ListOffsetsReply(request.cid, tuple(results))

    def _list_one(self, wanted: ListOffsetsPartition, isolation: int) -> ListedOffset:
        try:
            partition = self._partitions.require((wanted.topic, wanted.partition))
            return _answer(partition, wanted, isolation)
        except BrokerError as error:
            return ListedOffset(error.code, -1, -1, -1, error.detail)


def _answer(partition: Partition, wanted: ListOffsetsPartition, isolation: int) -> ListedOffset:
    replica = partition.replica
    partition.require_leader(wanted.leader_epoch)
    epoch = replica.leader_epoch
    if wanted.timestamp_us == EARLIEST:
        return ListedOffset(ErrorCode.NONE, partition.log.log_start_offset, -1, epoch)
    if not replica.hw_settled:
        raise BrokerError(
            ErrorCode.OFFSET_NOT_AVAILABLE,
            f"{partition.tp}: high watermark {replica.high_watermark} is still below the start of epoch {epoch}",
        )
    end_offset = replica.readable_end(isolation)
    if wanted.timestamp_us == LATEST:
        return ListedOffset(ErrorCode.NONE, end_offset, -1, epoch)
    if wanted.timestamp_us < 0:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"{partition.tp}: timestamp {wanted.timestamp_us}: expected microseconds, {LATEST} or {EARLIEST}",
        )
    try:
        found = partition.log.offset_for_time(wanted.timestamp_us, end_offset=end_offset)
    except StorageError as error:
        raise partition.storage_failed(error) from error
    if found is None:
        return ListedOffset(ErrorCode.NONE, -1, -1, epoch)
    offset, timestamp_us = found
    return ListedOffset(ErrorCode.NONE, offset, timestamp_us, epoch)
