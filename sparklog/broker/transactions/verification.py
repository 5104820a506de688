"""The first batches of transactions: held at the leader until the coordinator says that they are expected.

Without this, a batch that comes late, when its transaction has ended, would open a new one that nobody ever ends. While
the question is under way, batches of the same producer for the partition wait behind the first, in order; a marker that
names the producer ends the question, whatever the answer would have been. Source: KIP-890.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from sparklog.broker.inter_broker_client import InterBrokerClient
from sparklog.broker.internal_topics import TRANSACTIONS, coordinator_of
from sparklog.broker.replication.partition import Answer, Batches, Partition
from sparklog.broker.state import BrokerState
from sparklog.broker.transactions.coordinator_epochs import believe
from sparklog.broker.transactions.transaction_requests import verify
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import ACKS_ALL, VerifyTransaction, VerifyTransactionReply

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
#: Produces of one broker that may wait for coordinators.
_MAX_WAITING = 10_000


@dataclass(slots=True)
class _Held:
    """A produce that waits. ``append`` hands it to the partition."""

    deadline_ms: int
    append: Callable[[], None]
    answered: Callable[[Answer], None]


@dataclass(eq=False, slots=True)
class _Question:
    request: VerifyTransaction
    #: in which this broker led when it asked
    leader_epoch: int
    held: list[_Held] = field(default_factory=list)
    over: bool = False


class TransactionVerification:
    """Owner: the broker's event loop."""

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker
        self._peers = InterBrokerClient(broker, "verifications")
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
        answered: Callable[[Answer], None],
    ) -> None:
        """Call ``append``, now or later, or ``answered`` with why it was not.

        Raises:
            BrokerError: the batches are refused at once: INVALID_REQUIRED_ACKS, INVALID_RECORD, INVALID_TXN_STATE, or
                COORDINATOR_NOT_AVAILABLE when too many wait.
        """
        tp = partition.tp
        producer_id, epoch = _producer(tp, batches, key=key, acks=acks)
        question = self._questions.get((tp, producer_id))
        if question is None:
            if self._broker.markers.fenced(tp, producer_id):
                detail = f"{tp}: the transaction of producer {producer_id} has ended"
                raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
            if partition.log.has_open_transaction(producer_id):
                append()
                return
            partition.require_leader(-1)
        elif (question.request.key, question.request.producer_epoch) != (key, epoch):
            detail = f"{tp}: producer {producer_id} is of {question.request.key!r}, {key!r} found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        if self._waiting >= _MAX_WAITING:
            detail = f"{tp}: {_MAX_WAITING} produces wait for coordinators"
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
        self._waiting += 1
        held = _Held(deadline_ms, append, answered)
        if question is not None:
            question.held.append(held)
            return
        self._broker.counters["verifications.asked"] += 1
        request = VerifyTransaction(0, key, producer_id, epoch, tp.topic, tp.partition, partition.topic_id)
        question = self._questions[tp, producer_id] = _Question(request, partition.replica.leader_epoch, [held])
        self._broker.spawn(self._verify(tp, question), f"verification of {producer_id} in {tp}")

    def cancel(self, tp: TopicPartition, producer_id: int) -> None:
        """A marker ends the producer's transaction: what waits came too late."""
        question = self._questions.get((tp, producer_id))
        if question is not None:
            self._broker.counters["verifications.overtaken"] += 1
            detail = f"{tp}: the transaction of producer {producer_id} has ended meanwhile"
            self._refuse(question, BrokerError(ErrorCode.INVALID_TXN_STATE, detail))

    async def _verify(self, tp: TopicPartition, question: _Question) -> None:
        """Ask until there is an answer, or nobody waits any more."""
        pause_s = _FIRST_PAUSE_S
        while True:
            refusal = await self._asked(question)
            if question.over:
                return
            if refusal is None and not self._still_leads(tp, question):
                # Another leader may have been given the marker meanwhile: what was asked then says nothing now.
                detail = f"{tp}: leader epoch {question.leader_epoch} is over"
                self._refuse(question, BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail))
                return
            if refusal is None:
                self._broker.counters["verifications"] += 1
                for held in self._end(question):
                    held.append()
                return
            if not refusal.retriable:
                self._refuse(question, refusal)
                return
            self._broker.counters["verifications.retried"] += 1
            self._expire(tp, question, refusal)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _asked(self, question: _Question) -> BrokerError | None:
        """Why the producer may not append, or why nobody could say so; None: it may."""
        broker, request = self._broker, question.request
        wanted = coordinator_of(broker, TRANSACTIONS, request.key)
        if wanted is None:
            return BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{request.key}: no coordinator is available")
        left_s = (max(held.deadline_ms for held in question.held) - broker.now_ms()) / 1000
        try:
            timeout_s = max(0.001, min(left_s, _ANSWER_TIMEOUT_S))
            if wanted == broker.broker_id:
                believe(broker, request.key, await verify(broker, request, timeout_s=timeout_s))
                return None
            reply = await self._peers.ask(
                wanted,
                request,
                timeout_s=timeout_s,
                still=lambda: not question.over and coordinator_of(broker, TRANSACTIONS, request.key) == wanted,
            )
            assert isinstance(reply, VerifyTransactionReply)
            # A deposed coordinator that does not know it yet vouches for what its successor may have ended.
            proved = not broker.keys or wanted not in broker.cache.unproven
            believe(broker, request.key, reply.coordinator_epoch, proved=proved)
        except BrokerError as error:
            return error
        except Exception as error:
            # Whoever waits must hear of it, or every later batch of the producer would wait behind.
            _log.exception("verification of %s", request)
            return BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{request.key}: {type(error).__name__}: {error}")
        return None

    def _still_leads(self, tp: TopicPartition, question: _Question) -> bool:
        partition = self._broker.partitions.get(tp)
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
        self._broker.counters["verifications.refused"] += 1
        for held in self._end(question):
            held.answered(Answer(error.code, -1, -1, error.detail))

    def _expire(self, tp: TopicPartition, question: _Question, error: BrokerError) -> None:
        """Produces whose time is up are told so, or that another broker leads by now. With the first of a producer all
        behind it go, which would not continue anything."""
        try:
            self._broker.partitions.require(tp).require_leader(-1)
        except BrokerError as deposed:
            self._refuse(question, deposed)
            return
        if question.held and self._broker.now_ms() >= question.held[0].deadline_ms:
            detail = f"{tp}: the coordinator of {question.request.key!r} has not answered in time: {error}"
            self._refuse(question, BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail))


def _producer(tp: TopicPartition, batches: Batches, *, key: str, acks: int) -> tuple[int, int]:
    """The one producer (id, epoch) of transactional batches.

    Raises:
        BrokerError: INVALID_REQUIRED_ACKS, INVALID_RECORD.
    """
    if acks != ACKS_ALL:
        # A commit would vouch for records that may be lost.
        raise BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"{tp}: transactions require acks -1 (all), found {acks}")
    producers = {(header.producer_id, header.producer_epoch) for header, _ in batches}
    producer = min(producers)
    if len(producers) != 1 or producer[0] < 0 or any(header.first_sequence < 0 for header, _ in batches):
        detail = f"{tp}: producers {sorted(producers)[:8]} with sequences found, one id of {key!r} expected"
        raise BrokerError(ErrorCode.INVALID_RECORD, detail)
    return producer
