"""Produce requests of Kafka clients: each record batch is decoded once, and appended as one batch of the log.

A batch keeps its producer id, epoch and sequence, so the log recognizes retries. This broker has encoded the batch that
it appends, so it does not validate the batch again. The effective acks, the checks of access, the quotas and the wait
for the in-sync replicas are the same as for producers of sparklog.

The decoding of a batch takes 2 to 5 ms per megabyte, and up to 60 ms if the records have very many headers. A request
with several partitions is handled in slices, and a batch of more than ``LOOP_BYTES`` is decoded in a thread, so that
the event loop also serves other clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.kafka.call import LOOP_ENTRIES, KafkaCall
from sparklog.broker.kafka.data_topics import DataTopics, json_topic, refuse_internal_topic, require_kafka_columns
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.broker.kafka.stored_batches import LOOP_BYTES
from sparklog.broker.kafka.transaction_codes import produce_code, transaction_key
from sparklog.broker.replication.partition import Answer, AppendRules, CheckedBatches, Partition, PendingProduce
from sparklog.broker.requests.fetch import Fetches
from sparklog.broker.requests.slices import Slices, Steps, resumed
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.broker.transactions.verification import TransactionVerification
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.records.batch_view import BatchView, read_batches
from sparklog.kafka.records.decode import DecodedBatch, decode_batch
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.kafka.wire.data import (
    BatchIndexAndErrorMessage,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ACKS_ALL, MAX_ENTRIES, Produce
from sparklog.record.codec import EncodedBatch, encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.security.acls import Operation

_log = logging.getLogger(__name__)

_ACKS = frozenset({0, 1, ACKS_ALL})
_MAX_TIMEOUT_MS = 3_600_000
#: The maximum number of uncompressed bytes of JSON documents that are decoded on the event loop. They take up to a
#: hundred times as long as other records if they are read one by one.
_JSON_LOOP_BYTES = 64 * 1024
#: The first version of Produce whose clients may compress with zstd. Source: KIP-110.
_ZSTD_FROM = 7
_ZSTD = 4
#: The first version whose responses name the leader. Source: KIP-951.
_LEADERS_FROM = 10
#: The first version whose clients do not send AddPartitionsToTxn. Source: KIP-890.
_ADDS_FROM = 12
#: One thread, so that only one large batch at a time is decompressed in memory.
_thread = ThreadPoolExecutor(1, "kafka batches")
#: Another thread for JSON, because one batch of documents may take seconds. Each connection has at most one batch in a
#: thread or waiting for it, so connections take turns.
_json_thread = ThreadPoolExecutor(1, "kafka json batches")
#: The codec of the log for each codec of Kafka: none, gzip, snappy, lz4, zstd.
_STORED_AS: dict[int, str | None] = {0: None, 1: "zstd", 2: "lz4", 3: "lz4", 4: "zstd"}

#: A callback with the partition, the batch's CRC in the log, its base offset, and the batch as the producer sent it.
OnAppended = Callable[[Partition, int, int, BatchView], None]


class _Part(NamedTuple):
    """The records for one partition in a request, and the place of their result in the response."""

    topic: TopicProduceData
    topic_at: int
    at: int
    records: memoryview


class KafkaProduce:
    """The handler of Produce requests of Kafka clients.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        topics: DataTopics,
        *,
        slices: Slices,
        fetches: Fetches,
        quotas: QuotaManager,
        verifications: TransactionVerification,
    ) -> None:
        self.context = context
        self.topics = topics
        self.slices = slices
        self.fetches = fetches
        self.quotas = quotas
        self.verifications = verifications
        self.counters = context.counters
        #: By connection: the requests that wait until an earlier request, which is handled in slices, is complete.
        self.sliced: dict[ServerConnection, deque[_OpenKafkaProduce]] = {}
        #: Called after each append of a new batch.
        self.on_appended: OnAppended | None = None

    def handle(self, call: KafkaCall, request: ProduceRequest) -> asyncio.Future[ProduceResponse | None]:
        """Append the batches of each partition, and return the future of the response.

        The result is None for acks=0, which has no response.

        Raises:
            BrokerError: the request has more than ``MAX_ENTRIES`` partitions.
        """
        count = sum(len(topic.partition_data) for topic in request.topic_data)
        if count > MAX_ENTRIES:
            detail = f"found {count} partitions in a Produce request; expected at most {MAX_ENTRIES}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        opened = _OpenKafkaProduce(self, call, request)
        opened.start()
        return opened.answer

    def effective_acks(self, acks: int) -> int:
        """Return the acks that a produce must wait for.

        During a controlled shutdown a produce with acks=1 waits like a produce with acks=all. ``ProduceRequests`` has
        the reason.
        """
        return ACKS_ALL if acks == 1 and self.context.moves_leaderships else acks


class _OpenKafkaProduce:
    """A Produce request that waits for the results of some partitions."""

    __slots__ = ("_acks", "_call", "_deadline_ms", "_handler", "_missing", "_nodes", "_request", "_results", "answer")

    def __init__(self, handler: KafkaProduce, call: KafkaCall, request: ProduceRequest) -> None:
        self._handler = handler
        self._call = call
        self._request = request
        self._acks = request.acks
        self._deadline_ms = 0
        #: The result of each partition, by topic. None means that the result is still missing.
        self._results: list[list[Any]] = [[None] * len(topic.partition_data) for topic in request.topic_data]
        self._missing = sum(map(len, self._results))
        #: The leaders that the response names, by broker id.
        self._nodes: dict[int, NodeEndpoint] = {}
        self.answer: asyncio.Future[ProduceResponse | None] = asyncio.get_running_loop().create_future()

    # --- the request ---

    def start(self) -> None:
        """Handle the request now, or after the wait that a quota demands."""
        size = 0
        for topic in self._request.topic_data:
            for part in topic.partition_data:
                size += len(part.records) if part.records is not None else 0
        counters = self._handler.counters
        counters["produce.requests"] += 1
        counters["produce.bytes"] += size
        try:
            self._handler.quotas.begin(
                self._call.connection, Produce, self._request, size, self._begin, failed=self._fail
            )
        except BrokerError as error:
            self._refuse(error)

    def _begin(self, connection: ServerConnection, request: ProduceRequest, size: object) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._handler.counters["produce.requests.refused"] += 1
            self._refuse(refusal)
            return
        if not self._missing:
            self._finish()
            return
        timeout_ms = min(max(request.timeout_ms, 0), _MAX_TIMEOUT_MS)
        self._deadline_ms = self._handler.context.now_ms() + timeout_ms
        earlier = self._handler.sliced.get(connection)
        if earlier is not None:
            earlier.append(self)
        elif self._missing == 1:
            self._append_single(connection)
        else:
            self._slice(connection, self._steps())

    def _append_single(self, connection: ServerConnection) -> None:
        """Append the request's only batch now, without a wait for slices of others.

        If the batch must be decoded in a thread, continue in slices.
        """
        steps = self._steps()
        try:
            work = next(steps)
        except StopIteration:
            return
        except Exception as error:
            self._fail(error)
            return
        self._slice(connection, resumed(work, steps))

    def _slice(self, connection: ServerConnection, steps: Steps) -> None:
        """Do ``steps`` in slices. From now on, later requests of the connection wait for them."""
        following = self._handler.sliced[connection] = deque()
        self._handler.slices.run(connection, self._sliced(connection, steps, following), self._fail)

    def _sliced(self, connection: ServerConnection, steps: Steps, following: deque[_OpenKafkaProduce]) -> Steps:
        """Append the batches in slices.

        Then append the batches of the ``following`` requests, which have arrived on the connection meanwhile, in order.
        An unexpected error fails only its own request.
        """
        opened = self
        try:
            while True:
                try:
                    yield from steps
                except Exception as error:
                    opened._fail(error)
                if not following:
                    return
                opened = following.popleft()
                steps = opened._steps()
        finally:
            del self._handler.sliced[connection]

    def _refusal(self) -> BrokerError | None:
        """Return the error for which the whole request is refused, or None."""
        context, acks = self._handler.context, self._acks
        if acks not in _ACKS:
            return BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks: expected 0, 1 or -1 (all), found {acks}")
        if context.quiesced:
            detail = f"broker {context.broker_id} is stopping and accepts no new writes"
            return BrokerError(ErrorCode.BROKER_STOPPING, detail)
        if self._request.transactional_id is not None:
            try:
                self._handler.topics.require_transactional_id(self._call, self._request.transactional_id, api="Produce")
            except BrokerError as error:
                return error
        return None

    def _steps(self) -> Steps:
        """Append the batch of each partition. Yield when the event loop should run other work."""
        over, first = self._handler.slices.over, True
        for number, topic in enumerate(self._request.topic_data):
            for index, data in enumerate(topic.partition_data):
                if not first and over():
                    yield None
                first = False
                records = data.records if isinstance(data.records, memoryview) else memoryview(b"")
                yield from self._produce(_Part(topic, number, index, records), data.index)

    def _produce(self, part: _Part, partition_index: int) -> Steps:
        try:
            topic = self._handler.topics.name(part.topic.name, part.topic.topic_id)
            partition = self._writable(part, topic, partition_index)
            rules = partition.rules
            view = self._single_batch(part)
            yield from self._decode_and_append(part, partition, view, rules)
        except BrokerError as error:
            self._on_error(part, partition_index, error)
        except Exception as error:
            # One batch that this broker cannot decode must not keep the others from their results.
            self._handler.counters["requests.failed"] += 1
            _log.exception("produce of %s to partition %d failed", self._call.connection.peer, partition_index)
            detail = f"{type(error).__name__}: {error}"
            self._on_error(part, partition_index, BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, detail))

    def _writable(self, part: _Part, topic: str, partition_index: int) -> Partition:
        """Return the partition. Raise BrokerError if the client cannot write to it on this broker."""
        handler = self._handler
        handler.topics.require_access(self._call, Operation.WRITE, topic, api="Produce")
        refuse_internal_topic(topic, "not written to")
        if handler.context.quiesced:  # the broker may have begun to stop since the request arrived
            raise BrokerError(ErrorCode.BROKER_STOPPING, f"broker {handler.context.broker_id} accepts no new writes")
        partition = handler.topics.require(topic, partition_index, part.topic.topic_id)
        partition.require_leader(NO_EPOCH)
        require_kafka_columns(topic, partition.rules)
        return partition

    def _single_batch(self, part: _Part) -> BatchView:
        """Return the only batch for a partition. Source: Kafka accepts one batch since version 3 of Produce."""
        batches = read_batches(part.records)
        if len(batches) != 1:
            detail = f"{len(batches)} record batches found for one partition, exactly one expected"
            raise InvalidRecords(ErrorCode.INVALID_RECORD, detail)
        view = batches[0]
        if view.codec == _ZSTD and self._call.version < _ZSTD_FROM:
            detail = f"zstd found in Produce version {self._call.version}, expected from version {_ZSTD_FROM} on"
            raise BrokerError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, detail)
        if view.transactional and not self._request.transactional_id:
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, "a transactional batch without a transactional id found")
        return view

    def _decode_and_append(self, part: _Part, partition: Partition, view: BatchView, rules: AppendRules) -> Steps:
        decoded = _decoded_on_loop(view, rules)
        if decoded is not None:
            batch = _encoded(decoded, view.codec, rules)
        else:
            thread = _json_thread if rules.kafka_json else _thread
            work = asyncio.get_running_loop().run_in_executor(thread, _stored, view, rules)
            yield work
            batch = work.result()
            # The topic may have been deleted or recreated meanwhile.
            partition = self._writable(part, partition.tp.topic, partition.tp.partition)
        header, body = batch
        if not view.transactional and header.producer_id >= 0 and header.producer_id in partition.log.transactions:
            detail = f"{partition.tp}: producer {header.producer_id} has a transaction open, a batch outside it found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        self._handler.counters["produce.batches"] += 1
        pending = PendingProduce(
            [(header, memoryview(body))],
            partial(self._on_result, part, partition, view, header.body_crc),
            checked=CheckedBatches(rules, {}),
            begins_anywhere=True,
        )
        if view.transactional:
            self._verify_and_append(partition, pending)
        else:
            partition.produce(pending, acks=self._handler.effective_acks(self._acks), deadline_ms=self._deadline_ms)

    def _verify_and_append(self, partition: Partition, pending: PendingProduce) -> None:
        """Append a batch after the transaction's coordinator has verified the producer. Raises BrokerError."""
        tp, topic_id, acks, deadline_ms = partition.tp, partition.topic_id, self._acks, self._deadline_ms

        def append() -> None:
            try:
                hosted = self._handler.topics.hosted(tp, topic_id)
            except BrokerError as error:  # the partition was dropped or recreated during the verification
                pending.on_result(Answer(error.code, -1, -1, error.detail))
            else:
                hosted.produce(pending, acks=acks, deadline_ms=deadline_ms)

        self._handler.verifications.produce(
            partition,
            pending.batches,
            key=transaction_key(self._request.transactional_id or ""),
            acks=acks,
            deadline_ms=deadline_ms,
            append=append,
            on_result=pending.on_result,
            adds=self._call.version >= _ADDS_FROM,
        )

    # --- the response ---

    def _on_result(self, part: _Part, partition: Partition, view: BatchView, body_crc: int, answer: Answer) -> None:
        """Record the result of the append of one batch."""
        if answer.code is not ErrorCode.NONE:
            self._on_error(part, partition.tp.partition, BrokerError(answer.code, answer.detail))
            return
        stamped = partition.rules.stamped_by_log
        # Consumers of JSON get documents with all columns, and not what the producer has sent.
        # A retry may differ from the batch in the log.
        original_us, is_json = answer.original_us, partition.rules.kafka_json
        if self._handler.on_appended is not None and original_us is None and not stamped and not is_json:
            self._handler.on_appended(partition, body_crc, answer.base_offset, view)
        append_time_us = answer.append_time_us if original_us is None else original_us
        self._record(
            part,
            PartitionProduceResponse(
                index=partition.tp.partition,
                base_offset=answer.base_offset,
                log_append_time_ms=append_time_us // 1000 if stamped else -1,
                log_start_offset=partition.log.log_start_offset,
            ),
        )

    def _on_error(self, part: _Part, partition_index: int, error: BrokerError) -> None:
        self._handler.counters["produce.errors"] += 1
        code = kafka_code(error.code)
        if self._request.transactional_id:
            code = produce_code(code, self._call.version)
        leader = LeaderIdAndEpoch()
        if code == ErrorCode.NOT_LEADER_OR_FOLLOWER and self._call.version >= _LEADERS_FROM:
            leader = self._leader(part, partition_index)
        faults = error.record_errors if isinstance(error, InvalidRecords) else ()
        named = [
            BatchIndexAndErrorMessage(batch_index=fault.batch_index, batch_index_error_message=fault.message)
            for fault in faults
        ]
        self._record(
            part,
            PartitionProduceResponse(
                index=partition_index,
                error_code=code,
                base_offset=-1,
                record_errors=named,
                error_message=error.detail,
                current_leader=leader,
            ),
        )

    def _leader(self, part: _Part, partition_index: int) -> LeaderIdAndEpoch:
        """Return the leader of the partition, and add its address to the response."""
        listener, topics = self._call.connection.listener, self._handler.topics
        try:
            name = topics.name(part.topic.name, part.topic.topic_id)
        except BrokerError:
            return LeaderIdAndEpoch()
        leader, epoch, endpoint = topics.leader(TopicPartition(name, partition_index), listener)
        if endpoint is None or leader == self._handler.context.broker_id:
            return LeaderIdAndEpoch()
        self._nodes[leader] = NodeEndpoint(node_id=leader, host=endpoint.host, port=endpoint.port)
        return LeaderIdAndEpoch(leader_id=leader, leader_epoch=epoch)

    def _record(self, part: _Part, result: PartitionProduceResponse) -> None:
        results = self._results[part.topic_at]
        if results[part.at] is None:
            results[part.at] = result
            self._missing -= 1
            if not self._missing:
                self._finish()

    def _refuse(self, error: BrokerError) -> None:
        """Enter the same error for all partitions."""
        if not self._missing:
            self._finish()
        for number, topic in enumerate(self._request.topic_data):
            for index, data in enumerate(topic.partition_data):
                self._on_error(_Part(topic, number, index, memoryview(b"")), data.index, error)

    def _fail(self, error: Exception) -> None:
        """Enter the error for all partitions that have no result yet."""
        if isinstance(error, BrokerError):
            self._refuse(error)
            return
        self._handler.counters["requests.failed"] += 1
        _log.error("produce of %s failed", self._call.connection.peer, exc_info=error)
        self._refuse(BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}"))

    def _finish(self) -> None:
        if self.answer.done():  # the client's connection has ended
            return
        connection = self._call.connection
        if self._acks == 0:
            # A producer with acks=0 gets no responses. It learns of an error only because the connection is closed.
            if any(result.error_code for results in self._results for result in results):
                connection.close()
            self.answer.set_result(None)
            return
        self._call.encodes_in_thread = sum(map(len, self._results)) > LOOP_ENTRIES
        quotas = self._handler.quotas
        response = ProduceResponse(
            responses=[
                TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=results)
                for topic, results in zip(self._request.topic_data, self._results, strict=True)
            ],
            throttle_time_ms=quotas.throttle_ms(connection) if quotas.active else 0,
            node_endpoints=list(self._nodes.values()),
        )
        self._handler.fetches.reply_after_consumers(self._set_answer, response)

    def _set_answer(self, response: ProduceResponse) -> None:
        if not self.answer.done():
            self.answer.set_result(response)


def _decoded_on_loop(view: BatchView, rules: AppendRules) -> DecodedBatch | None:
    """Decode a batch on the event loop, or return None if a thread must decode it.

    The size of compressed records is not known, so the decompression stops at the limit of the event loop.

    Raises:
        BrokerError: the batch is invalid. If single records are invalid, InvalidRecords names them.
    """
    most_bytes = _JSON_LOOP_BYTES if rules.kafka_json else LOOP_BYTES
    if len(view.records) > most_bytes:
        return None
    limit = min(most_bytes, rules.max_message_bytes)
    try:
        return _decoded(view, rules, max_bytes=limit)
    except InvalidRecords:
        # The limit may be the cause, also of other errors than MESSAGE_TOO_LARGE: it bounds zstd's blocks and windows.
        if not view.codec or limit == rules.max_message_bytes:
            raise
    return None


def _stored(view: BatchView, rules: AppendRules) -> EncodedBatch:
    """Decode a batch, and encode it for the log. Any thread may call this.

    Raises:
        BrokerError: the batch is invalid. If single records are invalid, InvalidRecords names them.
    """
    return _encoded(_decoded(view, rules, max_bytes=rules.max_message_bytes), view.codec, rules)


def _decoded(view: BatchView, rules: AppendRules, *, max_bytes: int) -> DecodedBatch:
    return decode_batch(view, max_bytes=max_bytes, keyed=rules.compacted and not rules.kafka_json)


def _encoded(decoded: DecodedBatch, codec: int, rules: AppendRules) -> EncodedBatch:
    """Encode a decoded batch for the log. Raise InvalidRecords if it does not fit the topic."""
    compression = _STORED_AS[codec]
    timed = rules.event_time is not None
    if rules.kafka_json:
        rows = json_topic(rules, rules.schema).rows(decoded.rows, keyed=rules.compacted)
        batch = decoded.stored_rows(
            rows, schema_id=rules.schema_id, event_time=rules.event_time, compression=compression
        )
    elif rules.schema is DEFAULT_SCHEMA:
        batch = decoded.stored(schema_id=rules.schema_id, timed=timed, compression=compression)
    else:
        batch = _widened(decoded, rules, compression)
    if batch.header.length > rules.max_message_bytes:
        detail = f"{batch.header.length} bytes as columns, max.message.bytes is {rules.max_message_bytes}"
        raise InvalidRecords(ErrorCode.MESSAGE_TOO_LARGE, detail)
    return batch


def _widened(decoded: DecodedBatch, rules: AppendRules, compression: str | None) -> EncodedBatch:
    """Encode the batch for a topic with further columns, which are null in all records."""
    rows, schema = decoded.rows, rules.schema
    columns = [*rows.columns, *(pa.nulls(rows.num_rows, schema.field(at).type) for at in range(4, len(schema)))]
    return encode_batch(
        pa.record_batch(columns, schema),
        schema_id=rules.schema_id,
        compression=compression,
        event_time=rules.event_time,
        producer_id=decoded.producer_id,
        producer_epoch=decoded.producer_epoch,
        first_sequence=decoded.base_sequence,
        transactional=decoded.transactional,
    )
