"""DescribeProducers, DescribeTransactions and ListTransactions requests of Kafka clients. They change nothing.

The transactions of Spark's sinks have no transactional id, so these requests omit them.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import KafkaCode, KafkaError
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.group_topics import matching_names, pattern_error
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.transactions import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListedTransactionState,
    ListTransactionsRequest,
    ListTransactionsResponse,
    PartitionResponse,
    ProducerState,
    TopicData,
    TopicResponse,
    TransactionState,
)
from sparklog.model import TRANSACTIONAL_ID_PREFIX, TopicPartition
from sparklog.protocol.messages import DescribedTransaction, ListTransactions, ListTransactionsReply
from sparklog.security.acls import Operation, ResourceType

#: Kafka's names for the states of a transaction. Kafka has more states, which no transaction of sparklog has.
_STATES = {"empty": "Empty", "open": "Ongoing", "committing": "PrepareCommit", "aborting": "PrepareAbort"}
_KNOWN_STATES = frozenset({*_STATES.values(), "CompleteCommit", "CompleteAbort", "Dead", "PrepareEpochFence"})
_UNKNOWN = -1


class TransactionHandlers:
    """The handlers of DescribeProducers, DescribeTransactions and ListTransactions."""

    def __init__(self, broker: Broker, permissions: Permissions) -> None:
        self._context = broker.context
        self._partitions = broker.partitions
        self._coordinators = broker.transactions
        self._slices = broker.slices
        self._permissions = permissions

    # --- DescribeProducers ---

    async def describe_producers(self, call: KafkaCall, request: DescribeProducersRequest) -> DescribeProducersResponse:
        wanted: dict[str, dict[int, None]] = {}  # each partition once: it may have very many producers
        for topic in request.topics:
            wanted.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
        topics = []
        for name, numbers in wanted.items():
            partitions = []
            for number in numbers:
                await call.pause()
                partitions.append(self._producers(call, TopicPartition(name, number)))
            topics.append(TopicResponse(name=name, partitions=partitions))
        return DescribeProducersResponse(topics=topics)

    def _producers(self, call: KafkaCall, tp: TopicPartition) -> PartitionResponse:
        try:
            self._permissions.require(call, "DescribeProducers", Operation.READ, ResourceType.TOPIC, tp.topic)
            partition = self._partitions.require(tp)
            partition.require_leader(_UNKNOWN)
        except FAILURES as failure:
            error = item_error(failure)
            return PartitionResponse(partition_index=tp.partition, error_code=error.code, error_message=error.message)
        state = partition.log.producer_state()
        open_transactions = state.transactions.open
        return PartitionResponse(
            partition_index=tp.partition,
            active_producers=[
                ProducerState(
                    producer_id=producer_id,
                    producer_epoch=entry.epoch,
                    last_sequence=entry.batches[-1].last_sequence if entry.batches else _UNKNOWN,
                    last_timestamp=entry.last_append_us // 1000,
                    coordinator_epoch=_UNKNOWN,
                    current_txn_start_offset=open_transactions[producer_id].first_offset
                    if producer_id in open_transactions
                    else _UNKNOWN,
                )
                for producer_id, entry in state.entries.items()
            ],
        )

    # --- DescribeTransactions ---

    async def describe(self, call: KafkaCall, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
        states = []
        for name in dict.fromkeys(request.transactional_ids):  # each once: a transaction may be large
            await call.pause()
            states.append(await self._describe_one(call, name))
        return DescribeTransactionsResponse(transaction_states=states)

    async def _describe_one(self, call: KafkaCall, name: str) -> TransactionState:
        try:
            self._permissions.require(
                call, "DescribeTransactions", Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name
            )
            host = self._coordinators.of(TRANSACTIONAL_ID_PREFIX + name)
            found = await self._slices.result(host.describe(TRANSACTIONAL_ID_PREFIX + name))
            if found is None:
                raise KafkaError(KafkaCode.TRANSACTIONAL_ID_NOT_FOUND, f"transactional id {name!r} does not exist")
        except FAILURES as failure:
            return TransactionState(error_code=item_error(failure).code, transactional_id=name)

        def visible(topic: str) -> bool:
            return self._permissions.allows(call, Operation.DESCRIBE, ResourceType.TOPIC, topic)

        return _state(name, found, visible)

    # --- ListTransactions ---

    async def list_transactions(self, call: KafkaCall, request: ListTransactionsRequest) -> ListTransactionsResponse:
        pattern = request.transactional_id_pattern
        try:
            if pattern and (detail := pattern_error(pattern)):
                raise BrokerError(ErrorCode.INVALID_REGULAR_EXPRESSION, detail)
            reply = await call.native(ListTransactions(0))
        except FAILURES as failure:
            return ListTransactionsResponse(error_code=item_error(failure).code)
        assert isinstance(reply, ListTransactionsReply)
        now_ms = self._context.wall_ms()
        found = {
            one.key.removeprefix(TRANSACTIONAL_ID_PREFIX): one
            for one in reply.transactions
            if one.key.startswith(TRANSACTIONAL_ID_PREFIX) and _is_selected(request, one, now_ms)
        }
        names = matching_names(pattern, list(found)) if pattern else found.keys()
        return ListTransactionsResponse(
            unknown_state_filters=[name for name in request.state_filters if name not in _KNOWN_STATES],
            transaction_states=[
                ListedTransactionState(
                    transactional_id=name, producer_id=_producer_id(one), transaction_state=_STATES[one.state]
                )
                for name, one in found.items()
                if name in names
            ],
        )


def _is_selected(request: ListTransactionsRequest, found: DescribedTransaction, now_ms: int) -> bool:
    """Return whether the filters of the request select this transaction. An empty filter selects all."""
    if request.state_filters and _STATES[found.state] not in request.state_filters:
        return False
    if request.producer_id_filters and _producer_id(found) not in request.producer_id_filters:
        return False
    return request.duration_filter < 0 or (found.state != "empty" and now_ms - found.began_ms > request.duration_filter)


def _producer_id(found: DescribedTransaction) -> int:
    """Return the producer id of a transaction, or -1 for a transaction of sparklog without records."""
    return found.participants[0][0] if found.participants else found.kafka_producer_id


def _state(name: str, found: DescribedTransaction, visible: Callable[[str], bool]) -> TransactionState:
    topics: dict[str, list[int]] = {}
    for _, _, partitions in found.participants:
        for topic, partition in partitions:
            if visible(topic):
                topics.setdefault(topic, []).append(partition)
    is_open = found.state != "empty"
    return TransactionState(
        transactional_id=name,
        transaction_state=_STATES[found.state],
        transaction_timeout_ms=max(0, min(found.deadline_ms - found.began_ms, 2**31 - 1)) if is_open else 0,
        transaction_start_time_ms=found.began_ms if is_open else _UNKNOWN,
        producer_id=_producer_id(found),
        producer_epoch=found.participants[0][1] if found.participants else found.kafka_producer_epoch,
        topics=[TopicData(topic=topic, partitions=sorted(partitions)) for topic, partitions in topics.items()],
    )
