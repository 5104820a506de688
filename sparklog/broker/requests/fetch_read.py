"""One read of one partition for one fetch, which returns records, an error, or nothing new.

A consumer reads up to the high watermark (or the last stable offset) of the replica that it asks. A follower reads up
to the leader's log end, after its log was compared with the leader's log. For positions that the request names, the
replica's state machine has made this comparison. For other positions of the fetch session, this module makes it.
"""

from __future__ import annotations

import msgspec

from sparklog.broker.replication.crc_cache import CrcCache
from sparklog.broker.replication.partition import FetchVerdict, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.projected_read import read_projected
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import EpochEnd
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import AbortedRange, FetchedPartition, FetchPartition
from sparklog.record.header import HEADER_BYTES
from sparklog.replica.effects import AnswerDiverging, RefuseFetch
from sparklog.replica.view import divergence_point


class PartitionRead(msgspec.Struct, frozen=True, gc=False):
    """The result of a read of one partition.

    ``body`` has ``size`` bytes: the headers of all batches, then their bodies. ``urgent`` is true for an error or a
    divergence, which the fetch sends without waiting. ``cost`` is the number of bytes that the read uses of the
    response's size limit. ``cost`` is more than ``size`` if the batches were projected.
    """

    result: FetchedPartition
    body: tuple[Buffer, ...]
    size: int
    urgent: bool
    cost: int = 0


def read_for_consumer(
    partitions: Partitions, wanted: FetchPartition, *, verdict: FetchVerdict | None, max_bytes: int, isolation: int
) -> PartitionRead:
    partition: Partition | None = None
    try:
        partition = partitions.require((wanted.topic, wanted.partition), wanted.topic_id)
        divergence_point = _check_consumer(partition, wanted)
        if divergence_point is not None:
            return _diverging(partition, wanted, divergence_point.epoch, divergence_point.end_offset)
        end_offset = partition.replica.readable_end(isolation)
        return _read(
            partition,
            wanted,
            end_offset=end_offset,
            max_bytes=max_bytes,
            committed=isolation == 1,
            kept=partitions.crc_cache,
        )
    except BrokerError as error:
        return _error(partition, wanted, error)


def require_readable(partitions: Partitions, wanted: FetchPartition) -> tuple[Partition, EpochEnd | None]:
    """Return the partition and the point where the consumer's position and the log diverge (None if they agree).

    Raises:
        BrokerError: a consumer may not read at the offset. A fetch at this offset would get the same error.
    """
    partition = partitions.require((wanted.topic, wanted.partition), wanted.topic_id)
    return partition, _check_consumer(partition, wanted)


def _check_consumer(partition: Partition, wanted: FetchPartition) -> EpochEnd | None:
    replica = partition.replica
    code = replica.check_epoch(wanted.leader_epoch)
    if code is not None:
        raise BrokerError(code, partition.describe_role(wanted.leader_epoch))
    if wanted.last_epoch > replica.leader_epoch:
        # The consumer has read records of a later leader. This replica is out of date, so a comparison with its log
        # proves nothing.
        raise BrokerError(ErrorCode.UNKNOWN_LEADER_EPOCH, partition.describe_role(wanted.last_epoch))
    divergence = parted_from_consumer(partition, wanted)
    if divergence is not None:
        return divergence
    code = replica.check_offset(wanted.fetch_offset)
    if code is not None:
        raise BrokerError(code, _out_of_reach(partition, wanted.fetch_offset))
    return None


def read_for_follower(
    partitions: Partitions, wanted: FetchPartition, *, verdict: FetchVerdict | None, max_bytes: int, isolation: int
) -> PartitionRead:
    partition: Partition | None = None
    try:
        if wanted.columns is not None:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"a follower requested columns {wanted.columns[:20]}, all expected"
            )
        partition = partitions.require((wanted.topic, wanted.partition), wanted.topic_id)
        # The role may have changed since the position was checked, or while the fetch waited.
        partition.require_leader(wanted.leader_epoch)
        if isinstance(verdict, RefuseFetch):
            raise BrokerError(verdict.code, f"{partition.tp}: {verdict.detail}")
        if isinstance(verdict, AnswerDiverging):
            return _diverging(partition, wanted, verdict.epoch, verdict.end_offset)
        log = partition.log
        end_offset = log.offsets.log_end
        # A position in the log's last epoch cannot diverge, unless the position is beyond the log end.
        if wanted.last_epoch >= 0 and (wanted.last_epoch != log.last_epoch or wanted.fetch_offset > end_offset):
            divergence = divergence_point(log, wanted.fetch_offset, wanted.last_epoch)
            if divergence is not None:
                return _diverging(partition, wanted, divergence.epoch, divergence.end_offset)
        return _read(
            partition, wanted, end_offset=end_offset, max_bytes=max_bytes, kept=partitions.crc_cache, for_follower=True
        )
    except BrokerError as error:
        return _error(partition, wanted, error, for_follower=True)


def follower_has_all(partition: Partition | None, wanted: FetchPartition) -> bool:
    """Return whether the follower has all records of the log, so that there is nothing to send to it."""
    if partition is None or partition.offline is not None or wanted.topic_id not in {"", partition.topic_id}:
        return False
    log, replica = partition.log, partition.replica
    return (
        wanted.fetch_offset == log.log_end_offset
        and wanted.last_epoch == log.last_epoch
        and wanted.leader_epoch == replica.leader_epoch
        and replica.is_leader
        and wanted.columns is None
    )


def parted_from_consumer(partition: Partition, wanted: FetchPartition, *, in_sync: bool = False) -> EpochEnd | None:
    """Return the point where the log and the consumer's position diverge; None if no divergence is found.

    An unclean election may have replaced the record before the consumer's position. The leader can detect this while
    its log still has records at that offset. If ``in_sync`` is set, this replica may be an in-sync follower, which can
    detect the same for positions up to its high watermark. Source: KIP-320.
    """
    log, replica = partition.log, partition.replica
    if wanted.last_epoch < 0 or wanted.fetch_offset <= log.log_start_offset:
        return None
    if not replica.is_leader and not (in_sync and wanted.fetch_offset <= replica.high_watermark):
        return None
    ours = log.end_of_epoch(wanted.last_epoch)
    return ours if ours.epoch != wanted.last_epoch or ours.end_offset < wanted.fetch_offset else None


def _read(
    partition: Partition,
    wanted: FetchPartition,
    *,
    end_offset: int,
    max_bytes: int,
    kept: CrcCache,
    committed: bool = False,
    for_follower: bool = False,
) -> PartitionRead:
    """Read the records.

    ``kept`` is the cache of CRCs for projections. With ``committed`` the result lists the aborted transactions that the
    records may belong to. With ``for_follower`` records of the first segment before the log start offset are also read.
    """
    if max_bytes <= 0 or wanted.fetch_offset >= end_offset:
        return PartitionRead(_result(partition, wanted), (), 0, urgent=False)
    limit = max(min(wanted.max_bytes, max_bytes), 1)
    stored_bytes = cost = 0
    try:
        if wanted.columns is None:
            records = partition.log.read(
                wanted.fetch_offset, max_bytes=limit, end_offset=end_offset, for_follower=for_follower
            )
        else:
            records, stored_bytes, cost = read_projected(
                partition,
                wanted.fetch_offset,
                wanted.columns,
                kept=kept,
                max_bytes=limit,
                end_offset=end_offset,
                verify=wanted.verify,
            )
    except StorageError as error:
        raise partition.storage_failed(error) from error
    if not records.batch_count:
        return PartitionRead(_result(partition, wanted), (), 0, urgent=False)
    aborted: tuple[AbortedRange, ...] = ()
    if committed:
        found = partition.log.transactions.aborted_between(wanted.fetch_offset, records.next_offset)
        aborted = tuple(AbortedRange(*transaction) for transaction in found)
    result = _result(
        partition,
        wanted,
        batch_count=records.batch_count,
        body_bytes=records.body_bytes,
        aborted=aborted,
        stored_bytes=stored_bytes,
    )
    size = records.batch_count * HEADER_BYTES + records.body_bytes
    return PartitionRead(
        result, (records.headers, *records.bodies), size, urgent=False, cost=cost if cost > size else size
    )


def _diverging(partition: Partition, wanted: FetchPartition, epoch: int, end_offset: int) -> PartitionRead:
    result = _result(partition, wanted, diverging=(epoch, end_offset))
    return PartitionRead(result, (), 0, urgent=True)


def _result(
    partition: Partition,
    wanted: FetchPartition,
    *,
    batch_count: int = 0,
    body_bytes: int = 0,
    diverging: tuple[int, int] | None = None,
    aborted: tuple[AbortedRange, ...] = (),
    stored_bytes: int = 0,
) -> FetchedPartition:
    high_watermark, log = partition.replica.view.high_watermark, partition.log
    return FetchedPartition(
        wanted.topic,
        wanted.partition,
        ErrorCode.NONE,
        high_watermark,
        log.last_stable_offset(high_watermark),
        log.offsets.log_start,
        log.offsets.log_end,
        batch_count,
        body_bytes,
        diverging,
        aborted,
        stored_bytes=stored_bytes,
    )


def _error(
    partition: Partition | None, wanted: FetchPartition, error: BrokerError, *, for_follower: bool = False
) -> PartitionRead:
    marks = (-1, -1, -1, -1)
    if partition is not None:
        replica, log = partition.replica, partition.log
        # A follower whose offset is out of range restarts at the first segment, so that its files equal the leader's.
        start = log.first_segment_offset if for_follower else log.log_start_offset
        marks = (replica.high_watermark, replica.readable_end(1), start, log.log_end_offset)
    result = FetchedPartition(wanted.topic, wanted.partition, error.code, *marks, detail=error.detail)
    return PartitionRead(result, (), 0, urgent=True)


def _out_of_reach(partition: Partition, offset: int) -> str:
    log = partition.log
    return (
        f"{partition.tp}: offset {offset} requested, the log is [{log.log_start_offset}, {log.log_end_offset}) "
        f"with high watermark {partition.replica.high_watermark}"
    )
