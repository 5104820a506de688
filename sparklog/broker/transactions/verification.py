"""The verification of transactions: the coordinator confirms a transaction before the leader appends its first batch.

Without the verification, a late batch of an ended transaction would open a new transaction that no coordinator would
end. During the verification, further batches of the same producer for the partition wait in order. A marker that names
the producer cancels the verification, and the waiting batches are refused. Source: KIP-890.

``LeaderTransactions`` has the rules. This module asks the coordinators.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import TRANSACTIONS, coordinator_of
from sparklog.broker.replication.partition import Answer, Batches, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.leader_transactions import HeldProduce, LeaderTransactions, Question
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.broker.transactions.transaction_requests import verify
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import ACKS_ALL, VerifyTransaction, VerifyTransactionReply
from sparklog.storage.producers import ONE_TRANSACTION

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
#: The maximum number of produces that may wait for coordinators in one broker.
_MAX_WAITING = 10_000


class TransactionVerification:
    """The component that verifies transactions before this broker appends their first batch in a partition.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        epochs: CoordinatorEpochs,
        rules: LeaderTransactions,
        transactions: HostedCoordinators[TransactionHost],
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._epochs = epochs
        self._rules = rules
        self._transactions = transactions
        self._peers = InterBrokerClient(context, "verifications")

    def close(self) -> None:
        self._peers.close()

    def produce(
        self,
        partition: Partition,
        batches: Batches,
        *,
        key: str,
        acks: int,
        deadline_ms: int,
        append: Callable[[], None],
        on_result: Callable[[Answer], None],
        adds: bool = False,
    ) -> None:
        """Call ``append`` when the transaction is verified, or ``on_result`` when the transaction is refused.

        Unless this method raises an error, exactly one of the two is called, once, now or later.

        ``key`` is the transactional id or the name of a sink. With ``adds`` the coordinator adds the partition to the
        transaction of a Kafka producer.

        Raises:
            BrokerError: the batches are refused at once: INVALID_REQUIRED_ACKS, INVALID_RECORD, INVALID_TXN_STATE, or
                COORDINATOR_NOT_AVAILABLE if too many produces wait. If this broker does not lead the partition: the
                errors of ``Partition.require_leader``. For a Kafka producer also the errors of ``Log.known``.
        """
        tp, rules = partition.tp, self._rules
        producer_id, epoch = producer = _producer(tp, batches, key=key, acks=acks)
        if epoch > ONE_TRANSACTION:
            partition.require_leader(-1)
        if rules.may_append(partition.log, tp, batches, key=key, producer=producer):
            append()
            return
        question = rules.question_of(tp, producer_id)
        if question is None:
            partition.require_leader(-1)
        if rules.waiting >= _MAX_WAITING:
            detail = f"{tp}: {_MAX_WAITING} produces wait for coordinators"
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
        held = HeldProduce(deadline_ms, append, lambda error: on_result(Answer(error.code, -1, -1, error.detail)))
        if question is not None:
            rules.hold(question, held)
            return
        request = VerifyTransaction(0, key, producer_id, epoch, tp.topic, tp.partition, partition.topic_id, adds)
        question = rules.ask(request, leader_epoch=partition.replica.leader_epoch)
        rules.hold(question, held)
        self._context.spawn(self._verify(question), f"verification of {producer_id} in {tp}")

    async def _verify(self, question: Question) -> None:
        """Ask the coordinator until it responds, or until no produce waits any more."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self.on_answer(question, await self._asked(question))
            if question.over:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def on_answer(self, question: Question, answer: BrokerError | int) -> None:
        """Handle the coordinator's response. Unless ``question.over`` is set afterwards, the caller must ask again."""
        partition = self._partitions.get(question.tp)
        leads = partition is not None and partition.replica.is_leader
        error = self._rules.on_answer(
            question,
            answer,
            leader_epoch=partition.replica.leader_epoch if partition is not None and leads else None,
            log=partition.log if partition is not None else None,
        )
        if error is not None:
            self._expire(question, error)

    async def _asked(self, question: Question) -> BrokerError | int:
        """Ask the coordinator once. Return why the producer may not append or why there is no response.

        If the producer may append, return ``VerifyTransactionReply.decision``.
        """
        request = question.request
        left_s = (max(held.deadline_ms for held in question.held) - self._context.now_ms()) / 1000
        try:
            timeout_s = max(0.001, min(left_s, _ANSWER_TIMEOUT_S))
            reply = await self.ask(request, timeout_s=timeout_s, still=lambda: not question.over)
            return reply.decision
        except BrokerError as error:
            return error
        except Exception as error:
            # The waiting produces must get an error. Otherwise every later batch of the producer would wait too.
            _log.exception("verification of %s", request)
            return BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{request.key}: {type(error).__name__}: {error}")

    async def ask(
        self, request: VerifyTransaction, *, timeout_s: float, still: Callable[[], bool] = lambda: True
    ) -> VerifyTransactionReply:
        """Ask the coordinator once, which may be this broker, and return its confirmation.

        ``still`` returns whether the confirmation is still needed.

        Raises:
            BrokerError: the coordinator refuses the transaction, or there is no response.
        """
        context = self._context
        wanted = coordinator_of(context.cache, TRANSACTIONS, request.key)
        if wanted is None:
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{request.key}: no coordinator is available")
        if wanted == context.broker_id:
            own = await verify(self._transactions, request, timeout_s=timeout_s)
            self._epochs.accept(request.key, own.coordinator_epoch)
            return own
        reply = await self._peers.ask(
            wanted,
            request,
            timeout_s=timeout_s,
            still=lambda: still() and coordinator_of(context.cache, TRANSACTIONS, request.key) == wanted,
        )
        assert isinstance(reply, VerifyTransactionReply)
        # A former coordinator may confirm a transaction that its successor has ended.
        proved = not context.credentials.required or wanted not in context.cache.unproven
        self._epochs.accept(request.key, reply.coordinator_epoch, proved=proved)
        return reply

    def _expire(self, question: Question, error: BrokerError) -> None:
        """Refuse all waiting produces if the first one has timed out, or if this broker no longer leads."""
        try:
            self._partitions.require(question.tp).require_leader(-1)
        except BrokerError as deposed:
            self._rules.refuse(question, deposed)
        else:
            self._rules.expire(question, error, self._context.now_ms())


def _producer(tp: TopicPartition, batches: Batches, *, key: str, acks: int) -> tuple[int, int]:
    """Return the producer (id, epoch) of transactional batches, which must all have the same one.

    Raises:
        BrokerError: INVALID_REQUIRED_ACKS, INVALID_RECORD.
    """
    if acks != ACKS_ALL:
        # Otherwise a commit would confirm records that may be lost.
        raise BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"{tp}: transactions require acks -1 (all), found {acks}")
    first = batches[0][0]
    producer = first.producer_id, first.producer_epoch
    for header, _ in batches:
        found = header.producer_id, header.producer_epoch
        if found != producer or header.producer_id < 0 or header.first_sequence < 0:
            detail = f"{tp}: producer {found} with sequence {header.first_sequence} found, one id of {key!r} expected"
            raise BrokerError(ErrorCode.INVALID_RECORD, detail)
    return producer
