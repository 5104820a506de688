"""The rules by which a leader appends transactional batches and markers.

This module is pure: ``TransactionVerification`` asks the coordinators and ``MarkerAppend`` appends the markers. The
simulator uses the same rules (docs/simulator.md).

A producer id of sparklog has epoch 0 and serves one transaction. The id of a Kafka producer has an epoch from 1 on and
serves many transactions. For such an id the coordinator confirms each transaction, and a batch that the log already has
needs no confirmation. Source: KIP-890.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.protocol.messages import TransactionMarker, VerifyTransaction
from sparklog.record.checksum import Buffer
from sparklog.record.header import BatchHeader
from sparklog.record.marker import Marker
from sparklog.storage.producers import ONE_TRANSACTION
from sparklog.storage.transactions import TransactionTable

Batches = Sequence[tuple[BatchHeader, Buffer]]


class TransactionalLog(Protocol):
    """The part of a log that a leader uses to append transactional batches and markers."""

    @property
    def transactions(self) -> TransactionTable: ...

    def known(self, batches: Batches, *, begins_anywhere: bool = False) -> list[OffsetRange]: ...


@dataclass(slots=True)
class HeldProduce:
    """A produce that waits for the confirmation of its transaction.

    ``append`` gives the batches to the partition, and ``refuse`` fails the produce.
    """

    deadline_ms: int
    append: Callable[[], None]
    refuse: Callable[[BrokerError], None]


@dataclass(eq=False, slots=True)
class Question:
    """A verification of one producer in one partition, with the produces that wait for the coordinator's response."""

    request: VerifyTransaction
    #: The leader epoch of the partition when the verification began.
    leader_epoch: int
    held: list[HeldProduce] = field(default_factory=list)
    over: bool = False

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.request.topic, self.request.partition)


class LeaderTransactions:
    """The state of the transactions in the partitions that a broker leads, apart from their logs.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, fences: FencedProducers, counters: MutableMapping[str, int]) -> None:
        self.fences = fences
        self._counters = counters
        self._questions: dict[tuple[TopicPartition, int], Question] = {}
        #: The number of held produces.
        self.waiting = 0

    # --- batches ---------------------------------------------------------------------------------------------------

    def may_append(
        self, log: TransactionalLog, tp: TopicPartition, batches: Batches, *, key: str, producer: tuple[int, int]
    ) -> bool:
        """Return whether the leader may append a producer's batches now. Otherwise the caller must ``hold`` them.

        ``key`` is the transactional id or the name of a sink, ``producer`` the id and the epoch of the producer.

        Raises:
            BrokerError: INVALID_TXN_STATE if the transaction has ended, or if another key or a later epoch of the
                producer is being verified. CONCURRENT_TRANSACTIONS while an earlier epoch of the producer is being
                verified. For a Kafka producer also the errors of ``ProducerTable.known``.
        """
        producer_id, epoch = producer
        question = self._questions.get((tp, producer_id))
        if question is None and epoch > ONE_TRANSACTION:
            return self._is_confirmed_or_known(log, tp, batches, producer=producer)
        if question is None:
            if self.fences.has(tp, producer_id):
                detail = f"{tp}: the transaction of producer {producer_id} has ended"
                raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
            return producer_id in log.transactions
        if question.request.producer_epoch < epoch:
            detail = f"{tp}: producer {producer_id} with epoch {question.request.producer_epoch} is being verified"
            raise BrokerError(ErrorCode.CONCURRENT_TRANSACTIONS, detail)
        if (question.request.key, question.request.producer_epoch) != (key, epoch):
            detail = f"{tp}: producer {producer_id} belongs to {question.request.key!r}, {key!r} found"
            raise BrokerError(ErrorCode.INVALID_TXN_STATE, detail)
        return False

    def _is_confirmed_or_known(
        self, log: TransactionalLog, tp: TopicPartition, batches: Batches, *, producer: tuple[int, int]
    ) -> bool:
        """Return whether a Kafka producer's transaction is confirmed, or its batches are in the log already.

        Raises BrokerError if the sequences or the epoch are wrong.
        """
        producer_id, epoch = producer
        opened = log.transactions.get(producer_id)
        if opened is not None and opened.epoch == epoch and not self.fences.has(tp, producer_id):
            return True
        return len(log.known(batches, begins_anywhere=True)) == len(batches)

    def question_of(self, tp: TopicPartition, producer_id: int) -> Question | None:
        """Return the verification in progress for the producer, or None."""
        return self._questions.get((tp, producer_id))

    def ask(self, request: VerifyTransaction, *, leader_epoch: int) -> Question:
        """Begin a verification. The caller asks the coordinator, and passes each response to ``on_answer``."""
        self._counters["verifications.asked"] += 1
        question = Question(request, leader_epoch)
        self._questions[question.tp, request.producer_id] = question
        return question

    def hold(self, question: Question, held: HeldProduce) -> None:
        """Let a produce wait for the end of the verification. Produces of one producer are appended in order."""
        self.waiting += 1
        question.held.append(held)

    def on_answer(
        self, question: Question, answer: int | BrokerError, *, leader_epoch: int | None, log: TransactionalLog | None
    ) -> BrokerError | None:
        """Handle the coordinator's response to a verification, and append or refuse the waiting produces.

        ``answer`` is a BrokerError if the coordinator refused the transaction. Otherwise it is the number of commits
        and aborts that the coordinator has decided for the key. ``leader_epoch`` and ``log`` are the partition's
        present leader epoch and log. ``leader_epoch`` is None if this broker does not lead the partition.

        Returns:
            A retriable error, after which the caller must ask again. None if the verification is complete: its produces
            have been appended or refused.
        """
        if question.over:
            return None
        request = question.request
        refusal = answer if isinstance(answer, BrokerError) else None
        if refusal is None and (leader_epoch != question.leader_epoch or log is None):
            # Another leader may have appended a marker since, so the coordinator's answer proves nothing now.
            detail = f"{question.tp}: leader epoch {question.leader_epoch} is over"
            self.refuse(question, BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail))
            return None
        if log is not None and isinstance(answer, int) and request.producer_epoch > ONE_TRANSACTION:
            refusal = self._begin(question, answer, log)
        if refusal is None:
            self._counters["verifications"] += 1
            for held in self._end(question):
                held.append()
            return None
        if not refusal.retriable:
            self.refuse(question, refusal)
            return None
        self._counters["verifications.retried"] += 1
        return refusal

    def _begin(self, question: Question, decision: int, log: TransactionalLog) -> BrokerError | None:
        """Record that the coordinator has confirmed the next transaction of a Kafka producer.

        If the last transaction has no marker yet, return the error for that.
        """
        tp, request = question.tp, question.request
        opened = log.transactions.get(request.producer_id)
        if opened is not None and opened.epoch != request.producer_epoch:
            detail = f"{tp}: producer {request.producer_id} has a transaction without a marker in epoch {opened.epoch}"
            return BrokerError(ErrorCode.CONCURRENT_TRANSACTIONS, detail)
        self.fences.begin(tp, request.producer_id, decision)
        return None

    def expire(self, question: Question, error: BrokerError, now_ms: int) -> None:
        """Refuse all produces that wait for the verification if the first of these produces has timed out.

        All waiting produces are refused together: without the first batch, the later batches would begin with a gap in
        the producer's sequence. ``error`` is the last error of the verification.
        """
        if question.held and now_ms >= question.held[0].deadline_ms:
            detail = f"{question.tp}: the coordinator of {question.request.key!r} did not respond in time: {error}"
            self.refuse(question, BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail))

    def refuse(self, question: Question, error: BrokerError) -> None:
        """End the verification, and refuse the produces that wait for it."""
        self._counters["verifications.refused"] += 1
        for held in self._end(question):
            held.refuse(error)

    def _end(self, question: Question) -> list[HeldProduce]:
        question.over = True
        self._questions.pop((question.tp, question.request.producer_id), None)
        self.waiting -= len(question.held)
        return question.held

    # --- markers ---------------------------------------------------------------------------------------------------

    def fence(self, log: TransactionalLog, marker: TransactionMarker) -> Marker:
        """Fence the producers of a decided transaction, and refuse their waiting batches.

        Return the content of the marker to append: the producers whose transaction is open in the log. The marker is
        empty if there is no such producer.
        """
        tp = TopicPartition(marker.topic, marker.partition)
        over = set()
        for producer_id, _ in (*marker.committed, *marker.aborted):
            if self.fences.is_over(tp, producer_id, marker.decision):
                over.add(producer_id)
            elif self.fences.add(tp, producer_id, marker.decision):
                self._cancel(tp, producer_id)
        transactions = log.transactions
        return Marker(
            tuple(producer for producer in marker.committed if producer[0] in transactions and producer[0] not in over),
            tuple(producer for producer in marker.aborted if producer[0] in transactions and producer[0] not in over),
        )

    def _cancel(self, tp: TopicPartition, producer_id: int) -> None:
        question = self._questions.get((tp, producer_id))
        if question is not None:
            self._counters["verifications.overtaken"] += 1
            detail = f"{tp}: the transaction of producer {producer_id} has ended meanwhile"
            self.refuse(question, BrokerError(ErrorCode.INVALID_TXN_STATE, detail))
