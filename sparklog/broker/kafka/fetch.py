"""Fetch requests of Kafka clients.

The broker handles these requests like fetches of sparklog's consumers: the same code waits for data and reads it. The
responses have Kafka's record batches.

Only the leader of a partition serves it. There are no fetch sessions (KIP-227): a response with session id 0 tells the
client to name all its partitions in each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.kafka.call import LOOP_ENTRIES, KafkaCall
from sparklog.broker.kafka.data_topics import DataTopics, json_topic, refuse_internal_topic, require_kafka_columns
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.broker.kafka.fetched_records import DecodedBatches, FetchedRecords, Rows, encode_fetched
from sparklog.broker.kafka.sent_batches import SentBatches
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.requests.fetch_read import PartitionRead, read_for_consumer
from sparklog.broker.requests.open_fetch import OpenFetch
from sparklog.broker.requests.slices import Slices, Steps, Waited, resumed
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import ZERO_UUID
from sparklog.kafka.wire.data import (
    DivergingEpoch,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
)
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import CONSUMER, MAX_ENTRIES, Fetch, FetchedPartition, FetchPartition
from sparklog.record.header import BatchHeader
from sparklog.replica.fetch_session import Key
from sparklog.security.acls import Operation

_log = logging.getLogger(__name__)

_NO_SESSION, _SESSIONLESS, _FULL = 0, -1, 0
#: The maximum number of bytes of batches that are encoded without a pause for other work.
_AT_ONCE_BYTES = 256 * 1024
#: A request with at most this number of partitions and of topics is handled without a pause.
_AT_ONCE = 500
#: The maximum size in bytes of the cache of decoded batches that were only partly sent.
_DECODED_BYTES = 32 * 1024 * 1024
#: The first version whose clients can decompress zstd. Source: KIP-110.
_ZSTD_FROM = 10
#: The first version whose responses name the leader of a partition. Source: KIP-951.
_LEADERS_FROM = 12
_LEADER_ERRORS = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})


class KafkaFetches:
    """The handler of Fetch requests of Kafka clients.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        topics: DataTopics,
        partitions: Partitions,
        *,
        sent: SentBatches,
        slices: Slices,
        fetches: Fetches,
        quotas: QuotaManager,
    ) -> None:
        self.context = context
        self.topics = topics
        self.partitions = partitions
        self.sent = sent
        self.slices = slices
        self.fetches = fetches
        self.quotas = quotas
        self.decoded = DecodedBatches(_DECODED_BYTES)

    def handle(self, call: KafkaCall, request: FetchRequest) -> asyncio.Future[FetchResponse] | FetchResponse:
        """Read the requested partitions. Return the response, or a future of the response.

        The response has records or errors. It is empty if there are none until the client's maximum wait ends.
        """
        refused = _refusal(request)
        if refused is not None:
            return FetchResponse(error_code=refused)
        opened = _FetchCall(self, call, request)
        self.quotas.begin(call.connection, Fetch, request, 0, opened.begin, failed=opened.fail)
        return opened.answer

    def check_readable(self, call: KafkaCall, wanted: FetchPartition) -> None:
        """Raise BrokerError if the client may not read the partition, or if another broker leads it."""
        self.topics.require_access(call, Operation.READ, wanted.topic, api="Fetch")
        refuse_internal_topic(wanted.topic, "not read")
        partition = self.partitions.require((wanted.topic, wanted.partition), wanted.topic_id)
        partition.require_leader(wanted.leader_epoch)
        require_kafka_columns(wanted.topic, partition.rules)


def _refusal(request: FetchRequest) -> int | None:
    """Return the code of the error for which the whole request is refused, or None."""
    if request.session_id != _NO_SESSION:
        return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    if request.session_epoch not in {_SESSIONLESS, _FULL}:
        return ErrorCode.INVALID_FETCH_SESSION_EPOCH
    if request.replica_id >= 0 or request.replica_state.replica_id >= 0 or request.isolation_level not in {0, 1}:
        return ErrorCode.INVALID_REQUEST
    if max(len(request.topics), _partition_count(request)) > MAX_ENTRIES:
        return ErrorCode.INVALID_REQUEST
    return None


def _partition_count(request: FetchRequest) -> int:
    return sum(len(topic.partitions) for topic in request.topics)


class _FetchCall:
    """One Fetch request of a Kafka client, from its arrival to its response."""

    def __init__(self, handler: KafkaFetches, call: KafkaCall, request: FetchRequest) -> None:
        self._handler = handler
        self._call = call
        self._request = request
        #: The error of each topic whose id this broker does not know, by the topic's number in the request.
        self._unknown: dict[int, BrokerError] = {}
        #: The requested partitions by topic and partition; ``_names`` has the topics' names by number.
        self._wanted: dict[Key, FetchPartition] = {}
        self._names: list[str] = []
        self._max_bytes = 0
        self._nodes: dict[int, NodeEndpoint] = {}
        self.answer: asyncio.Future[FetchResponse] = asyncio.get_running_loop().create_future()

    def begin(self, connection: ServerConnection, request: FetchRequest, size: object) -> None:
        """Read the partitions, and respond now or later. A quota may have reduced the limit in ``request``."""
        if self.answer.done():  # the client's connection has ended
            return
        self._max_bytes = max(1, min(request.max_bytes, self._handler.fetches.consumer_max_bytes))
        self._run(self._serve(connection, request))

    def _run(self, steps: Steps, size: int = 0) -> None:
        """Do the steps now, or in slices for many partitions or for more than ``_AT_ONCE_BYTES`` of batches."""
        if size > _AT_ONCE_BYTES or max(len(self._request.topics), _partition_count(self._request)) > _AT_ONCE:
            self._handler.slices.start(steps, self.fail)
            return
        try:
            for waited in steps:
                if waited is not None:
                    self._handler.slices.start(resumed(waited, steps), self.fail)
                    return
        except Exception as error:
            self.fail(error)

    def _serve(self, connection: ServerConnection, request: FetchRequest) -> Steps:
        """Find the partitions of the request, and read them."""
        over = self._handler.slices.over
        for number, topic in enumerate(request.topics):
            if over():
                yield None
            self._add(number, topic)
        wait_ms = 0 if self._unknown or request.min_bytes <= 0 else max(request.max_wait_ms, 0)
        native = Fetch(
            0,
            CONSUMER,
            -1,
            wait_ms,
            request.min_bytes,
            self._max_bytes,
            request.isolation_level,
            _NO_SESSION,
            _SESSIONLESS,
            tuple(self._wanted.values()),
        )
        self._handler.fetches.serve(connection, native, partial(KafkaFetch, self))

    def _add(self, number: int, topic: FetchTopic) -> None:
        """Add the partitions of one topic of the request."""
        try:
            name = self._handler.topics.name(topic.topic, topic.topic_id)
        except BrokerError as error:
            self._unknown[number] = error
            self._names.append("")
            return
        self._names.append(name)
        topic_id = "" if topic.topic_id == ZERO_UUID else topic.topic_id.hex()
        for wanted in topic.partitions:
            self._wanted[name, wanted.partition] = FetchPartition(
                name,
                wanted.partition,
                topic_id,
                wanted.current_leader_epoch,
                wanted.fetch_offset,
                max(wanted.partition_max_bytes, 1),
                wanted.last_fetched_epoch,
            )

    def check_readable(self, wanted: FetchPartition) -> None:
        """Raise BrokerError if the client may not read the partition, or if another broker leads it."""
        self._handler.check_readable(self._call, wanted)

    # --- the response ---

    def respond(self, reads: Mapping[Key, PartitionRead]) -> None:
        """Encode the records that were read, and respond. Encode many records in slices."""
        self._run(self._respond(reads), sum(read.size for read in reads.values()))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _respond(self, reads: Mapping[Key, PartitionRead]) -> Steps:
        left, responses, size, over = self._max_bytes, [], 0, self._handler.slices.over
        for number, topic in enumerate(self._request.topics):
            if number in self._unknown:
                code = kafka_code(self._unknown[number].code)
                partitions = [_unread(wanted.partition, code) for wanted in topic.partitions]
                responses.append(
                    FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=partitions)
                )
                continue
            partitions = []
            for index in dict.fromkeys(wanted.partition for wanted in topic.partitions):
                if self.answer.done():
                    return
                if over():
                    yield None
                wanted = self._wanted[self._names[number], index]
                read = reads.get((wanted.topic, index)) or self._unread_partition(wanted)
                data, records_size = yield from self._partition(wanted, read, left)
                left -= records_size
                size += records_size
                partitions.append(data)
            responses.append(FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=partitions))
        self._finish(responses, size)

    def _unread_partition(self, wanted: FetchPartition) -> PartitionRead:
        """Return the offsets of a partition whose records did not fit into the response, without records."""
        return read_for_consumer(
            self._handler.partitions, wanted, verdict=None, max_bytes=0, isolation=self._request.isolation_level
        )

    def _partition(
        self, wanted: FetchPartition, read: PartitionRead, left: int
    ) -> Generator[Waited, None, tuple[PartitionData, int]]:
        result, records = read.result, FetchedRecords([], 0)
        code = kafka_code(result.code)
        if read.body and left > 0:
            try:
                records = yield from self._records(wanted, read, min(wanted.max_bytes, left))
            except BrokerError as error:
                code = kafka_code(error.code)
                _log.error("%s-%d at offset %d: %s", wanted.topic, wanted.partition, wanted.fetch_offset, error.detail)
        diverging = DivergingEpoch()
        if result.diverging is not None:
            diverging = DivergingEpoch(epoch=result.diverging[0], end_offset=result.diverging[1])
        return (
            PartitionData(
                partition_index=wanted.partition,
                error_code=code,
                high_watermark=result.high_watermark,
                last_stable_offset=result.last_stable_offset,
                log_start_offset=result.log_start_offset,
                diverging_epoch=diverging,
                current_leader=self._leader(wanted) if code in _LEADER_ERRORS else LeaderIdAndEpoch(),
                records=records.buffers,
            ),
            records.size,
        )

    def _records(
        self, wanted: FetchPartition, read: PartitionRead, max_bytes: int
    ) -> Generator[Waited, None, FetchedRecords]:
        partition = self._handler.partitions.require((wanted.topic, wanted.partition), wanted.topic_id)
        source = _Source(self._handler, partition, zstd=self._call.version >= _ZSTD_FROM)
        work = encode_fetched(read.body, wanted.fetch_offset, source, max_bytes=max_bytes, aborted=read.result.aborted)
        over = self._handler.slices.over
        while True:
            try:
                waited = next(work)
            except StopIteration as end:
                found: FetchedRecords = end.value
                return found
            if waited is not None or over():
                yield waited

    def _leader(self, wanted: FetchPartition) -> LeaderIdAndEpoch:
        """Return the leader of a partition that this broker does not lead, and add its address to the response."""
        if self._call.version < _LEADERS_FROM:
            return LeaderIdAndEpoch()
        tp = TopicPartition(wanted.topic, wanted.partition)
        leader, epoch, endpoint = self._handler.topics.leader(tp, self._call.connection.listener)
        if endpoint is None:
            return LeaderIdAndEpoch()
        self._nodes[leader] = NodeEndpoint(node_id=leader, host=endpoint.host, port=endpoint.port)
        return LeaderIdAndEpoch(leader_id=leader, leader_epoch=epoch)

    def _finish(self, responses: list[FetchableTopicResponse], size: int) -> None:
        self._call.encodes_in_thread = sum(len(topic.partitions) for topic in responses) > LOOP_ENTRIES
        fetches, throttle_ms = self._handler.fetches, 0
        fetches.counters["fetch.consumer.bytes"] += size
        if fetches.consumer_sent is not None:
            throttle_ms = fetches.consumer_sent(self._call.connection, size)
        if not self.answer.done():
            self.answer.set_result(
                FetchResponse(
                    throttle_time_ms=throttle_ms,
                    session_id=_NO_SESSION,
                    responses=responses,
                    node_endpoints=list(self._nodes.values()),
                )
            )


def _unread(partition: int, code: int) -> PartitionData:
    return PartitionData(partition_index=partition, error_code=code, high_watermark=-1, records=[])


class KafkaFetch(OpenFetch):
    """A fetch that checks before each read whether the Kafka client may read the partition, and answers the call."""

    __slots__ = ("_fetch_call",)

    def __init__(self, fetch_call: _FetchCall, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._fetch_call = fetch_call

    def read_one(self, key: Key, wanted: FetchPartition, max_bytes: int) -> int:
        try:
            self._fetch_call.check_readable(wanted)
        except BrokerError as error:
            refusal = FetchedPartition(wanted.topic, wanted.partition, error.code, -1, -1, -1, -1, detail=error.detail)
            return self.refuse_one(key, refusal)
        return super().read_one(key, wanted, max_bytes)

    def _answer(self) -> None:
        self.abandon()
        self._fetch_call.respond(self._reads)

    def _failed(self, error: Exception) -> None:
        self.abandon()
        self._fetch_call.fail(error)


class _Source(NamedTuple):
    """A partition as the source of records for one response."""

    handler: KafkaFetches
    partition: Partition
    #: Whether the client can decompress zstd.
    zstd: bool

    @property
    def stamped(self) -> bool:
        return self.partition.rules.stamped_by_log

    def schema(self, schema_id: int) -> pa.Schema:
        return self.partition.log.schema(schema_id)

    @property
    def json(self) -> bool:
        return self.partition.rules.kafka_json

    def records(self, rows: pa.RecordBatch, header: BatchHeader) -> pa.RecordBatch:
        if not self.json:
            return rows
        return json_topic(self.partition.rules, rows.schema).records(rows, append_time_us=header.append_time)

    def sent(self, header: BatchHeader) -> memoryview | None:
        return self.handler.sent.get(self.partition, header, zstd=self.zstd)

    def decoded(self, header: BatchHeader) -> Rows | None:
        return self.handler.decoded.get(self._key(header))

    def keep_decoded(self, header: BatchHeader, rows: Rows) -> None:
        self.handler.decoded.add(self._key(header), rows)

    def _key(self, header: BatchHeader) -> tuple[str, int, int, int]:
        partition = self.partition
        return partition.topic_id, partition.tp.partition, header.base_offset, header.body_crc
