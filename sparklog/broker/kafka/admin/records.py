"""DeleteRecords requests of Kafka clients."""

from __future__ import annotations

from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import DeletedRecords, DeleteRecords, DeleteRecordsPartition, DeleteRecordsReply


async def delete_records(call: KafkaCall, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """Delete the records before the given offsets, in the partitions that this broker leads."""
    wanted = tuple(
        DeleteRecordsPartition(topic.name, partition.partition_index, partition.offset)
        for topic in request.topics
        for partition in topic.partitions
    )
    try:
        if len(wanted) > MAX_ENTRIES:
            detail = f"found {len(wanted)} partitions; expected at most {MAX_ENTRIES}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        reply = await call.native(DeleteRecords(0, wanted))
        assert isinstance(reply, DeleteRecordsReply)
        results = iter(reply.results)
    except FAILURES as failure:
        results = iter([DeletedRecords(item_error(failure).code, -1)] * len(wanted))
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[_result(partition.partition_index, next(results)) for partition in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _result(partition: int, deleted: DeletedRecords) -> DeleteRecordsPartitionResult:
    return DeleteRecordsPartitionResult(
        partition_index=partition, low_watermark=deleted.log_start_offset, error_code=kafka_code(deleted.code)
    )
