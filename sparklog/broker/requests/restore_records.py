"""RestoreRecords requests: batches with their original offsets for a partition whose topic is being restored.

Unlike a producer's batches, these batches already have offsets. The first one must begin at the log end offset. Every
response names the log end offset, at which the client must continue. So the log has no record twice, even if a client
sends a batch again or two clients restore at the same time. After the append the batches are like all other batches:
followers copy them, and the response waits until they are committed.
"""

from __future__ import annotations

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.replication.partition import Answer, Batches, PendingProduce
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.batch_checks import check_batches
from sparklog.broker.requests.slices import Slices, Steps, answer_failure
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ACKS_ALL, RestoreRecords, RestoreRecordsReply
from sparklog.record.header import HEADER_BYTES, unpack_headers

_MAX_TIMEOUT_MS = 3_600_000


class RestoreRecordsRequests:
    """The handler of RestoreRecords requests, which append batches with their original offsets."""

    def __init__(self, context: BrokerContext, partitions: Partitions, slices: Slices) -> None:
        self._context = context
        self._partitions = partitions
        self._slices = slices

    def handle(self, connection: ServerConnection, request: RestoreRecords, body: memoryview) -> None:
        tp = TopicPartition(request.topic, request.partition)
        refuse_internal(request.topic, "not restored")
        if self._context.quiesced:
            raise BrokerError(
                ErrorCode.BROKER_STOPPING, f"broker {self._context.broker_id} is stopping and accepts no new writes"
            )
        partition = self._partitions.require(tp, request.topic_id)
        batches = cut_placed_batches(request, body)
        self._context.counters["restore.batches"] += len(batches)

        def on_result(answer: Answer) -> None:
            hosted = self._partitions.get(tp)
            end = hosted.log.log_end_offset if hosted is not None else -1
            connection.reply(RestoreRecordsReply(request.cid, answer.code, end, answer.detail))

        deadline_ms = self._context.now_ms() + min(max(request.timeout_ms, 0), _MAX_TIMEOUT_MS)

        def steps() -> Steps:
            checked = yield from check_batches(partition, batches, self._slices, placed=True)
            hosted = self._partitions.require(tp, request.topic_id)
            pending = PendingProduce(batches, on_result, placed=True, checked=checked)
            hosted.produce(pending, acks=ACKS_ALL, deadline_ms=deadline_ms)

        self._slices.run(connection, steps(), lambda error: answer_failure(connection, request, error))


def cut_placed_batches(request: RestoreRecords, body: memoryview) -> Batches:
    """Split the request's body into batches, each with its header and its stored body.

    Raises:
        BrokerError: INVALID_REQUEST or CORRUPT_MESSAGE for counts and lengths that do not add up.
    """
    count, at = request.batch_count, request.batch_count * HEADER_BYTES
    if count < 1 or request.body_bytes < 0 or at + request.body_bytes != len(body):
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"body of {len(body)} bytes found, {count} headers and {request.body_bytes} bytes announced",
        )
    batches = []
    for header in unpack_headers(body[:at]):
        batches.append((header, body[at : at + header.stored_bytes]))
        at += header.stored_bytes
    if at != len(body):
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"body of {len(body)} bytes found, the headers announce {at}")
    return batches
