"""The verification of transactions: the coordinator confirms a transaction before the leader appends its first batch.

Without this, a late batch of an ended transaction would open a new transaction that no coordinator would end. During
the verification, further batches of the same producer for the partition wait in order. A marker that names the producer
cancels the verification, and the waiting batches are refused. Source: KIP-890.

A producer id of sparklog has epoch 0 and serves one transaction. The id of a Kafka producer has an epoch from 1 on and
serves many. For such an id the coordinator confirms each transaction, and a batch that is in the log already needs no
confirmation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from sparklog.broker.context import BrokerContext
from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import TRANSACTIONS, coordinator_of
from sparklog.broker.replication.partition import Answer, Batches, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
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


@dataclass(slots=True)
class _Held:
    """A produce that waits for the verification. ``append`` gives the batches to the partition."""

    deadline_ms: int
    append: Callable[[], None]
    on_result: Callable[[Answer], None]


@dataclass(eq=False, slots=True)
class _Question:
    request: VerifyTransaction
    #: the leader epoch of the partition when the verification began
    leader_epoch: int
    held: list[_Held] = field(default_factory=list)
    over: bool = False


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
        fences: FencedProducers,
        transactions: HostedCoordinators[TransactionHost],
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._epochs = epochs
        self._fences = fences
        self._transactions = transactions
        self._peers = InterBrokerClient(context, "verifications")
        self._questions: dict[tuple[TopicPartition, int], _Question] = {}
        self._waiting = 0

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
        """Call ``append`` once the transaction is verified, now or later. If it is refused, call ``on_result``.

        ``key`` is the transactional id or the name of a sink. With ``adds`` the coordinator adds the partition to the
        transaction of a Kafka producer.

        Raises:
            BrokerError: the batches are refused at once: INVALID_REQUIRED_ACKS, INVALID_RECORD, INVALID_TXN_STATE, or
                COORDINATOR_NOT_AVAILABLE if too many produces wait. If this broker does not lead the partition: the
                errors of ``Partition.require_leader``. For a Kafka producer also the errors of ``Log.known``.
        """
        tp = partition.tp
        producer_id, epoch = _producer(tp, batches, key=key, acks=acks)
        question = self._questions.get((tp, producer_id))
        if question is None and epoch > ONE_TRANSACTION:
            partition.require_leader(-1)
            if self._needs_no_question(partition, batches, producer_id, epoch):
                append()
                return
        elif question is None:
            if self._fences.has(tp, producer_id):
                detail = f"{tp}: the transaction of producer {producer_id} has ended"
                raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
            if producer_id in partition.log.transactions:
                append()
                return
            partition.require_leader(-1)
        elif question.request.producer_epoch < epoch:
            detail = f"{tp}: producer {producer_id} with epoch {question.request.producer_epoch} is being verified"
            raise BrokerError(ErrorCode.CONCURRENT_TRANSACTIONS, detail)
        elif (question.request.key, question.request.producer_epoch) != (key, epoch):
            detail = f"{tp}: producer {producer_id} belongs to {question.request.key!r}, {key!r} found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        if self._waiting >= _MAX_WAITING:
            detail = f"{tp}: {_MAX_WAITING} produces wait for coordinators"
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
        self._waiting += 1
        held = _Held(deadline_ms, append, on_result)
        if question is not None:
            question.held.append(held)
            return
        self._context.counters["verifications.asked"] += 1
        request = VerifyTransaction(0, key, producer_id, epoch, tp.topic, tp.partition, partition.topic_id, adds)
        question = self._questions[tp, producer_id] = _Question(request, partition.replica.leader_epoch, [held])
        self._context.spawn(self._verify(tp, question), f"verification of {producer_id} in {tp}")

    def _needs_no_question(self, partition: Partition, batches: Batches, producer_id: int, epoch: int) -> bool:
        """Return whether a Kafka producer's batches can be appended without a confirmation.

        Either the coordinator has confirmed the transaction, or the batches are in the log already. Raises BrokerError
        if the sequences or the epoch are wrong.
        """
        tp, log = partition.tp, partition.log
        opened = log.transactions.get(producer_id)
        if opened is not None and opened.epoch == epoch and not self._fences.has(tp, producer_id):
            return True
        return len(log.known(batches, begins_anywhere=True)) == len(batches)

    def cancel(self, tp: TopicPartition, producer_id: int) -> None:
        """Refuse the producer's waiting batches, because a marker has ended the producer's transaction."""
        question = self._questions.get((tp, producer_id))
        if question is not None:
            self._context.counters["verifications.overtaken"] += 1
            detail = f"{tp}: the transaction of producer {producer_id} has ended meanwhile"
            self._refuse(question, BrokerError(ErrorCode.INVALID_TXN_STATE, detail))

    async def _verify(self, tp: TopicPartition, question: _Question) -> None:
        """Ask the coordinator until it responds, or until no produce waits any more."""
        pause_s = _FIRST_PAUSE_S
        while True:
            found = await self._asked(question)
            if question.over:
                return
            refusal = found if isinstance(found, BrokerError) else None
            if refusal is None and not self._still_leads(tp, question):
                # Another leader may have appended a marker since, so the coordinator's response proves nothing now.
                detail = f"{tp}: leader epoch {question.leader_epoch} is over"
                self._refuse(question, BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail))
                return
            if refusal is None and question.request.producer_epoch > ONE_TRANSACTION:
                assert isinstance(found, int)
                refusal = self._begin(tp, question.request, found)
            if refusal is None:
                self._context.counters["verifications"] += 1
                for held in self._end(question):
                    held.append()
                return
            if not refusal.retriable:
                self._refuse(question, refusal)
                return
            self._context.counters["verifications.retried"] += 1
            self._expire(tp, question, refusal)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _begin(self, tp: TopicPartition, request: VerifyTransaction, decision: int) -> BrokerError | None:
        """Record that the coordinator has confirmed the next transaction of a Kafka producer."""
        opened = self._partitions.require(tp).log.transactions.get(request.producer_id)
        if opened is not None and opened.epoch != request.producer_epoch:
            detail = f"{tp}: producer {request.producer_id} has a transaction without a marker in epoch {opened.epoch}"
            return BrokerError(ErrorCode.CONCURRENT_TRANSACTIONS, detail)
        self._fences.begin(tp, request.producer_id, decision)
        return None

    async def _asked(self, question: _Question) -> BrokerError | int:
        """Ask the coordinator once. Return why the producer may not append or why there is no response.

        If the producer may append, return the number of decisions about the key, see VerifyTransactionReply.
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

    def _still_leads(self, tp: TopicPartition, question: _Question) -> bool:
        partition = self._partitions.get(tp)
        return (
            partition is not None
            and partition.replica.is_leader
            and partition.replica.leader_epoch == question.leader_epoch
        )

    def _end(self, question: _Question) -> list[_Held]:
        question.over = True
        request = question.request
        self._questions.pop((TopicPartition(request.topic, request.partition), request.producer_id), None)
        self._waiting -= len(question.held)
        return question.held

    def _refuse(self, question: _Question, error: BrokerError) -> None:
        self._context.counters["verifications.refused"] += 1
        for held in self._end(question):
            held.on_result(Answer(error.code, -1, -1, error.detail))

    def _expire(self, tp: TopicPartition, question: _Question, error: BrokerError) -> None:
        """Refuse all waiting produces if the first one has timed out, or if this broker no longer leads.

        Without the first batch of a producer, the later batches would begin with a gap in the sequence.
        """
        try:
            self._partitions.require(tp).require_leader(-1)
        except BrokerError as deposed:
            self._refuse(question, deposed)
            return
        if question.held and self._context.now_ms() >= question.held[0].deadline_ms:
            detail = f"{tp}: the coordinator of {question.request.key!r} has not answered in time: {error}"
            self._refuse(question, BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail))


def _producer(tp: TopicPartition, batches: Batches, *, key: str, acks: int) -> tuple[int, int]:
    """Return the producer (id, epoch) of transactional batches, which must all have the same one.

    Raises:
        BrokerError: INVALID_REQUIRED_ACKS, INVALID_RECORD.
    """
    if acks != ACKS_ALL:
        # Otherwise a commit would confirm records that may be lost.
        raise BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"{tp}: transactions require acks -1 (all), found {acks}")
    producers = {(header.producer_id, header.producer_epoch) for header, _ in batches}
    producer = min(producers)
    if len(producers) != 1 or producer[0] < 0 or any(header.first_sequence < 0 for header, _ in batches):
        detail = f"{tp}: producers {sorted(producers)[:8]} with sequences found, one id of {key!r} expected"
        raise BrokerError(ErrorCode.INVALID_RECORD, detail)
    return producer
