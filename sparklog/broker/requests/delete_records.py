"""DeleteRecords requests: the leader moves a partition's log start offset to an offset that a client chooses.

Each follower moves its log start offset after its next fetch. The new log start is durable before the response. A topic
whose cleanup policy is only ``compact`` refuses the request, because its oldest record may be the only one of its key.
A topic that is being restored accepts the request: a restore uses it to set the log start. Source: Kafka,
DeleteRecords.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.replication.partition import OnLogFailed, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.requests.slices import Slices
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import DeletedRecords, DeleteRecords, DeleteRecordsPartition, DeleteRecordsReply, Reply

_log = logging.getLogger(__name__)
_HIGH_WATERMARK = -1


class DeleteRecordsRequests:
    """The handler of DeleteRecords requests, which raise the log start offset of a partition."""

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        slices: Slices,
        log_start_moved: Callable[[Partition], None],
        log_failed: OnLogFailed,
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._slices = slices
        self._log_start_moved = log_start_moved
        self._log_failed = log_failed

    def handle(self, connection: ServerConnection, request: DeleteRecords, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._delete_records(request))

    async def _delete_records(self, request: DeleteRecords) -> Reply:
        results = tuple(await self._slices.result(self._delete(request)))
        if any(result.code == ErrorCode.NONE for result in results):
            write = self._partitions.directory.checkpoint_job()
            try:
                await asyncio.get_running_loop().run_in_executor(None, write)
            except StorageError as error:
                self._log_failed(None, error)
                raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
            except OSError as error:
                raise BrokerError(
                    ErrorCode.KAFKA_STORAGE_ERROR, f"could not record the new log start offsets: {error}"
                ) from error
        return DeleteRecordsReply(request.cid, results)

    def _delete(self, request: DeleteRecords) -> Generator[None, None, list[DeletedRecords]]:
        results: list[DeletedRecords] = []
        for wanted in request.partitions:
            if self._slices.over():
                yield
            results.append(self._delete_one(wanted))
        return results

    def _delete_one(self, wanted: DeleteRecordsPartition) -> DeletedRecords:
        try:
            return DeletedRecords(ErrorCode.NONE, self._log_start(wanted))
        except BrokerError as error:
            return DeletedRecords(error.code, -1, error.detail)

    def _log_start(self, wanted: DeleteRecordsPartition) -> int:
        tp = TopicPartition(wanted.topic, wanted.partition)
        refuse_internal(wanted.topic, "not shortened")
        partition = self._partitions.require(tp)
        partition.require_leader(wanted.leader_epoch)
        log, end = partition.log, partition.replica.high_watermark
        if "delete" not in log.config.cleanup_policy and not log.config.restoring:
            detail = f"{tp}: cleanup.policy={log.config.cleanup_policy} found, delete expected among it"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        offset = end if wanted.offset == _HIGH_WATERMARK else wanted.offset
        if not 0 <= offset <= end:
            detail = f"{tp}: offset {offset} found, 0 to the high watermark {end} expected"
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, detail)
        before = log.log_start_offset
        try:
            start = log.advance_log_start(offset)
        except StorageError as error:
            raise partition.storage_failed(error) from error
        if start < offset:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{tp}: no disk space to record a new log start offset")
        if start > before:
            _log.info("%s: deleted records below offset %d on request", tp, start)
            self._context.counters["records.deleted.on.request"] += start - before
            self._log_start_moved(partition)
        return start
