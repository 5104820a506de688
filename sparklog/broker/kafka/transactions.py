"""The requests of Kafka's transactional and idempotent producers, see ADR 31.

InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn and EndTxn go to the coordinator of the transactional id.
TxnOffsetCommit goes to the coordinator of the group, which passes the offsets on to the coordinator of the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from sparklog.broker.kafka.call import Handler, KafkaCall
from sparklog.broker.kafka.coordinator_access import coordinator_of, outcome_of
from sparklog.broker.kafka.error_codes import REFUSALS, KafkaCode, KafkaError, kafka_error
from sparklog.broker.kafka.groups.committed_offsets import CommittedOffsetsHandlers, commit_code
from sparklog.broker.kafka.groups.group_access import MAX_NAME, GroupAccess
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.kafka.transaction_codes import check_transactional_id, transaction_code, transaction_key
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.coordinator.effects import Done, Ended, KafkaProducerGiven, Outcome
from sparklog.coordinator.events import (
    KafkaAddRequested,
    KafkaEndRequested,
    KafkaInitRequested,
    VerifyRequested,
)
from sparklog.coordinator.group_events import HoldRequested
from sparklog.coordinator.records import LAST_EPOCH, PartitionPlace
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.transactions import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from sparklog.model import TopicPartition, is_internal
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import GroupOffset, InitProducerId, InitProducerIdReply, VerifyTransaction
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType

#: The first versions with PRODUCER_FENCED: of InitProducerId, and of the other requests. Source: KIP-588.
_INIT_FENCES_FROM, _FENCES_FROM = 4, 2
#: The first version of AddPartitionsToTxn that only Kafka's brokers send, and the first versions of TxnOffsetCommit
#: and EndTxn that clients with transaction.version 2 send. Source: KIP-890.
_BROKERS_FROM, _ADDS_FROM, _RAISES_FROM = 4, 5, 5
#: The maximum wait for the markers of a transaction. After this wait, EndTxn succeeds, because the decision is durable.
#: InitProducerId gets the error CONCURRENT_TRANSACTIONS, and the client sends it again.
_MARKERS_MS = 5000
#: The maximum wait for the transaction's coordinator.
_ASK_S = 5.0
_NO_EPOCH = -1
#: Errors that only groups of KIP-848 have. A TxnOffsetCommit response has an older error code instead.
_STALE = frozenset({int(ErrorCode.STALE_MEMBER_EPOCH), int(ErrorCode.FENCED_MEMBER_EPOCH)})


def transaction_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handlers of the requests of transactional and idempotent producers."""
    requests = KafkaTransactions(broker)
    offsets = TransactionalOffsets(broker)
    return {
        ApiKey.INIT_PRODUCER_ID: requests.init_producer_id,
        ApiKey.ADD_PARTITIONS_TO_TXN: requests.add_partitions,
        ApiKey.ADD_OFFSETS_TO_TXN: requests.add_offsets,
        ApiKey.END_TXN: requests.end,
        ApiKey.TXN_OFFSET_COMMIT: offsets.commit,
    }


class KafkaTransactions:
    """The handlers of the requests that a transactional id's coordinator serves."""

    def __init__(self, broker: Broker) -> None:
        self._context = broker.context
        self._registry = broker.registry
        self._transactions = broker.transactions
        self._permissions = Permissions(broker)
        self._groups = GroupAccess(broker)

    async def _ask(self, name: str, event_of: Callable[[int], object], timeout_s: float | None = None) -> Outcome:
        """Pass a request to the coordinator of the transactional id on this broker, and return the outcome.

        Raises:
            BrokerError: the coordinator refuses the request, is not on this broker, or does not respond in time.
        """
        try:
            return await outcome_of(self._host(name), event_of, timeout_s=timeout_s)
        except asyncio.TimeoutError:
            detail = f"{name}: the previous transaction has not ended within {timeout_s} s"
            raise BrokerError(ErrorCode.CONCURRENT_TRANSACTIONS, detail) from None

    def _host(self, name: str) -> TransactionHost:
        return coordinator_of(self._transactions, transaction_key(name))

    def _require(self, call: KafkaCall, request: str, name: str) -> None:
        check_transactional_id(name)
        self._permissions.require(call, request, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)

    async def _fresh_id(self) -> int:
        try:
            return await self._registry.next_producer_id()
        except ClusterError as error:
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)) from None

    # --- InitProducerId ---

    async def init_producer_id(self, call: KafkaCall, request: InitProducerIdRequest) -> InitProducerIdResponse:
        """Return an id and an epoch for a producer.

        A producer without transactions that sends the request again gets another id, as in Kafka. Such a producer
        raises its epoch itself.
        """
        try:
            producer_id, epoch = await self._init(call, request)
        except REFUSALS as error:
            code = transaction_code(kafka_error(error)[0], fences=call.version >= _INIT_FENCES_FROM)
            return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)
        return InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)

    async def _init(self, call: KafkaCall, request: InitProducerIdRequest) -> tuple[int, int]:
        name, timeout_ms = request.transactional_id, request.transaction_timeout_ms
        if name is None:
            reply = await call.native(InitProducerId(0))
            assert isinstance(reply, InitProducerIdReply)
            return reply.producer_id, reply.producer_epoch
        self._require(call, "InitProducerId", name)
        if not 0 < timeout_ms <= self._context.config.transaction_max_timeout_ms:
            detail = f"transaction timeout {timeout_ms} ms found; see transaction.max.timeout.ms"
            raise KafkaError(KafkaCode.INVALID_TRANSACTION_TIMEOUT, detail)
        if (request.producer_id < 0) != (request.producer_epoch < 0):
            raise BrokerError(ErrorCode.INVALID_REQUEST, "a producer id and a producer epoch expected, or neither")
        self._host(name)
        fresh = await self._fresh_id()
        producer = (request.producer_id, request.producer_epoch)
        outcome = await self._ask(
            name,
            lambda ticket: KafkaInitRequested(ticket, transaction_key(name), timeout_ms, fresh, *producer),
            _MARKERS_MS / 1000,
        )
        assert isinstance(outcome, KafkaProducerGiven)
        return outcome.producer_id, outcome.producer_epoch

    # --- AddPartitionsToTxn ---

    async def add_partitions(self, call: KafkaCall, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        """Add partitions to a transaction, and begin it if necessary."""
        if call.version >= _BROKERS_FROM:
            return await self._add_for_broker(call, request)
        name, topics = request.v3_and_below_transactional_id, request.v3_and_below_topics
        producer = (request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        try:
            self._require(call, "AddPartitionsToTxn", name)
            results = await self._add(call, name, producer, topics)
        except REFUSALS as error:
            code = transaction_code(kafka_error(error)[0], fences=call.version >= _FENCES_FROM)
            results = _topic_results(topics, lambda tp: code)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)

    async def _add_for_broker(self, call: KafkaCall, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        """Handle the request of a broker of Kafka, which needs the permission ClusterAction."""
        self._permissions.require(
            call, "AddPartitionsToTxn", Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME
        )
        found = []
        for one in request.transactions:
            await call.pause()
            producer = (one.producer_id, one.producer_epoch)
            try:
                check_transactional_id(one.transactional_id)
                results = await (self._verify if one.verify_only else self._add)(
                    call, one.transactional_id, producer, one.topics
                )
            except REFUSALS as error:
                code = transaction_code(kafka_error(error)[0], fences=True)
                results = _topic_results(one.topics, lambda tp, code=code: code)  # type: ignore[misc]
            found.append(AddPartitionsToTxnResult(transactional_id=one.transactional_id, topic_results=results))
        return AddPartitionsToTxnResponse(results_by_transaction=found)

    async def _add(
        self, call: KafkaCall, name: str, producer: tuple[int, int], topics: Iterable[AddPartitionsToTxnTopic]
    ) -> list[AddPartitionsToTxnTopicResult]:
        """Add all partitions, or none if one of them is refused. Raises BrokerError."""
        wanted = [TopicPartition(topic.name, number) for topic in topics for number in topic.partitions]
        if len(wanted) > MAX_ENTRIES:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"at most {MAX_ENTRIES} partitions expected")
        refused = {tp: code for tp in wanted if (code := self._refusal(call, tp))}
        if refused:
            return _topic_results(topics, lambda tp: refused.get(tp, int(KafkaCode.OPERATION_NOT_ATTEMPTED)))
        places = tuple(map(self._place, wanted))
        await self._ask(name, lambda ticket: KafkaAddRequested(ticket, transaction_key(name), *producer, places))
        return _topic_results(topics, lambda tp: 0)

    async def _verify(
        self, call: KafkaCall, name: str, producer: tuple[int, int], topics: Iterable[AddPartitionsToTxnTopic]
    ) -> list[AddPartitionsToTxnTopicResult]:
        codes: dict[TopicPartition, int] = {}
        for topic in topics:
            for number in topic.partitions:
                await call.pause()
                tp = TopicPartition(topic.name, number)
                try:
                    place = self._place(tp)
                    await self._ask(
                        name,
                        lambda ticket, place=place: VerifyRequested(  # type: ignore[misc]
                            ticket, transaction_key(name), *producer, place
                        ),
                    )
                    codes[tp] = 0
                except BrokerError as error:
                    code = kafka_error(error)[0]
                    if code == ErrorCode.INVALID_TXN_STATE and call.version > _BROKERS_FROM:
                        code = int(KafkaCode.TRANSACTION_ABORTABLE)
                    codes[tp] = transaction_code(code, fences=True)
        return _topic_results(topics, codes.__getitem__)

    def _refusal(self, call: KafkaCall, tp: TopicPartition) -> int:
        if is_internal(tp.topic) or not self._permissions.allows(call, Operation.WRITE, ResourceType.TOPIC, tp.topic):
            return int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        known = self._context.cache.partition(tp)
        return int(ErrorCode.NONE if known is not None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def _place(self, tp: TopicPartition) -> PartitionPlace:
        known = self._context.cache.partition(tp)
        if known is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know partition {tp}")
        return PartitionPlace(tp.topic, tp.partition, known.topic_id)

    # --- AddOffsetsToTxn ---

    async def add_offsets(self, call: KafkaCall, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
        """Add a group to a transaction, so that TxnOffsetCommit may add its offsets."""
        name, group = request.transactional_id, request.group_id
        try:
            self._require(call, "AddOffsetsToTxn", name)
            self._groups.require(call, "AddOffsetsToTxn", Operation.READ, group)
            producer = (request.producer_id, request.producer_epoch)
            await self._ask(
                name, lambda ticket: KafkaAddRequested(ticket, transaction_key(name), *producer, group=group)
            )
        except REFUSALS as error:
            code = transaction_code(kafka_error(error)[0], fences=call.version >= _FENCES_FROM)
            return AddOffsetsToTxnResponse(error_code=code)
        return AddOffsetsToTxnResponse()

    # --- EndTxn ---

    async def end(self, call: KafkaCall, request: EndTxnRequest) -> EndTxnResponse:
        """Commit or abort a transaction.

        From version 5 on, the response has the producer's id and epoch for the next transaction.
        """
        name = request.transactional_id
        try:
            self._require(call, "EndTxn", name)
            outcome = await self._end(call, request)
        except REFUSALS as error:
            code = transaction_code(kafka_error(error)[0], fences=call.version >= _FENCES_FROM)
            return EndTxnResponse(error_code=code, producer_id=-1, producer_epoch=_NO_EPOCH)
        return EndTxnResponse(producer_id=outcome.producer_id, producer_epoch=outcome.producer_epoch)

    async def _end(self, call: KafkaCall, request: EndTxnRequest) -> Ended:
        name, raises = request.transactional_id, call.version >= _RAISES_FROM
        self._host(name)
        fresh = await self._fresh_id() if raises and request.producer_epoch >= LAST_EPOCH else -1
        producer = (request.producer_id, request.producer_epoch)
        deadline_ms = self._context.wall_ms() + _MARKERS_MS
        outcome = await self._ask(
            name,
            lambda ticket: KafkaEndRequested(
                ticket, transaction_key(name), *producer, request.committed, deadline_ms, raises, fresh
            ),
        )
        assert isinstance(outcome, Ended)
        return outcome


class TransactionalOffsets:
    """The handler of TxnOffsetCommit, in the coordinator of the group."""

    def __init__(self, broker: Broker) -> None:
        self._slices = broker.slices
        self._verifications = broker.verifications
        self._access = GroupAccess(broker)
        self._offsets = CommittedOffsetsHandlers(broker, self._access)

    async def commit(self, call: KafkaCall, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
        """Add a group's offsets to a transaction. The commit of the transaction commits them."""
        refused: dict[tuple[str, int], int] = {}
        code = 0
        try:
            _check_names(request)
            self._access.permissions.require(
                call,
                "TxnOffsetCommit",
                Operation.WRITE,
                ResourceType.TRANSACTIONAL_ID,
                request.transactional_id,
            )
            self._access.require(call, "TxnOffsetCommit", Operation.READ, request.group_id)
            self._access.host(request.group_id)
            if sum(len(topic.partitions) for topic in request.topics) > MAX_ENTRIES:
                raise BrokerError(ErrorCode.INVALID_REQUEST, f"at most {MAX_ENTRIES} offsets expected")
            offsets, refused = await self._slices.result(self._offsets.checked(call, request))
            if offsets or not refused:
                await self._commit(call, request, offsets)
        except REFUSALS as error:
            code = transaction_code(commit_code(error), fences=False)
            if code in _STALE:
                code = int(ErrorCode.ILLEGAL_GENERATION)
        return TxnOffsetCommitResponse(
            topics=[
                TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        TxnOffsetCommitResponsePartition(
                            partition_index=partition.partition_index,
                            error_code=refused.get((topic.name, partition.partition_index), code),
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    async def _commit(self, call: KafkaCall, request: TxnOffsetCommitRequest, offsets: tuple[GroupOffset, ...]) -> None:
        """Put a hold on the offsets until the transaction ends, and add them to it. Raises BrokerError.

        Nothing is added for a sender that may not commit. The group checks the sender at once, and again with the hold,
        which needs the epoch of the transaction's coordinator. The group is part of the transaction by then, but
        without offsets. Kafka has the same order.
        """
        group, key = request.group_id, transaction_key(request.transactional_id)
        member = (request.member_id, request.generation_id, request.group_instance_id or "")

        def hold(ticket: int, epoch: int) -> HoldRequested:
            return HoldRequested(ticket, group, key, request.producer_id, epoch, offsets, *member)

        refusal = self._access.host(group).groups.refuses_hold(hold(0, _NO_EPOCH))
        if refusal is not None:
            raise BrokerError(refusal.code, refusal.detail)
        epoch = await self._add(call, request, ())
        outcome = await self._access.ask(group, lambda ticket: hold(ticket, epoch))
        assert isinstance(outcome, Done)
        await self._add(call, request, offsets)

    async def _add(self, call: KafkaCall, request: TxnOffsetCommitRequest, offsets: tuple[GroupOffset, ...]) -> int:
        """Pass the offsets on to the transaction's coordinator. Return the coordinator's leader epoch."""
        question = VerifyTransaction(
            0,
            transaction_key(request.transactional_id),
            request.producer_id,
            request.producer_epoch,
            "",
            -1,
            adds=call.version >= _ADDS_FROM,
            group=request.group_id,
            offsets=offsets,
        )
        try:
            return (await self._verifications.ask(question, timeout_s=_ASK_S)).coordinator_epoch
        except BrokerError as error:
            if error.retriable and error.code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                # The client would take an error of the transaction's coordinator for one of the group's.
                raise BrokerError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, error.detail) from None
            raise


def _check_names(request: TxnOffsetCommitRequest) -> None:
    """Raise BrokerError INVALID_REQUEST if the transactional id or the name of the group's member is too long."""
    check_transactional_id(request.transactional_id)
    if max(len(request.member_id), len(request.group_instance_id or "")) > MAX_NAME:
        detail = f"a member id and an instance id of at most {MAX_NAME} characters expected"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)


def _topic_results(
    topics: Iterable[AddPartitionsToTxnTopic], code_of: Callable[[TopicPartition], int]
) -> list[AddPartitionsToTxnTopicResult]:
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(
                    partition_index=number, partition_error_code=code_of(TopicPartition(topic.name, number))
                )
                for number in topic.partitions
            ],
        )
        for topic in topics
    ]
