"""DescribeLogDirs requests of Kafka clients: the replicas in this broker's log directory, and their sizes."""

from __future__ import annotations

import shutil

from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.errors import ErrorCode
from sparklog.kafka.wire.admin import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from sparklog.protocol.messages import DescribeBroker, DescribeBrokerReply, ReplicaDescription


async def describe_log_dirs(call: KafkaCall, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """Return the one log directory of this broker, with the replicas that the request names, or all of them."""
    try:
        reply = await call.native(DescribeBroker(0))
    except FAILURES as failure:
        return DescribeLogDirsResponse(error_code=item_error(failure).code)
    assert isinstance(reply, DescribeBrokerReply)
    wanted = (
        {(topic.topic, partition) for topic in request.topics for partition in topic.partitions}
        if request.topics is not None
        else None
    )
    topics: dict[str, list[DescribeLogDirsPartition]] = {}
    for replica in reply.replicas:
        if wanted is None or (replica.topic, replica.partition) in wanted:
            topics.setdefault(replica.topic, []).append(_partition(replica))
    try:
        usage = shutil.disk_usage(reply.log_dir)
    except OSError:
        return DescribeLogDirsResponse(
            results=[DescribeLogDirsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=reply.log_dir)]
        )
    return DescribeLogDirsResponse(
        results=[
            DescribeLogDirsResult(
                log_dir=reply.log_dir,
                topics=[DescribeLogDirsTopic(name=name, partitions=found) for name, found in topics.items()],
                total_bytes=usage.total,
                usable_bytes=usage.free,
            )
        ]
    )


def _partition(replica: ReplicaDescription) -> DescribeLogDirsPartition:
    return DescribeLogDirsPartition(
        partition_index=replica.partition,
        partition_size=replica.size_bytes,
        offset_lag=max(0, replica.high_watermark - replica.log_end_offset),
    )
