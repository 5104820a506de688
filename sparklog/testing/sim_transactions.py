"""The transactions of Kafka's producers in a simulated broker: leaders, coordinators and senders of markers.

The decisions are the production code: ``TransactionVerification`` and ``MarkerAppend`` with ``LeaderTransactions``,
``TransactionHost`` with the ``Transactions`` core, ``HostedCoordinators`` and ``CoordinatorEpochs``. The classes of
this module replace sockets, tasks and timers by simulated ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, cast

from msgspec.structs import replace

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import TRANSACTIONS, coordinator_of
from sparklog.broker.replication.partition import Answer
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.broker.transactions.leader_transactions import LeaderTransactions, Question
from sparklog.broker.transactions.marker_append import MarkerAppend, OnResult
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.broker.transactions.transaction_requests import ask_host, confirmed
from sparklog.broker.transactions.verification import TransactionVerification
from sparklog.config import broker_config
from sparklog.coordinator.effects import Outcome, Refused, SendMarkers, SendOffsets
from sparklog.coordinator.events import CoordinatorTicked, MarkersWritten
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import PartitionPlace
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    ACKS_ALL,
    PartitionResult,
    TransactionMarker,
    VerifyTransaction,
    VerifyTransactionReply,
)
from sparklog.record.header import BatchHeader
from sparklog.record.marker import Marker
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.purgatory import NEVER
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_hosted import Hosted, SimProduce
from sparklog.testing.sim_log import A_MARKER, NOT_IDEMPOTENT, SimLog

_CONFIG = broker_config({})
#: How long a leader or a coordinator waits for a response before it asks again, and its pause before that.
_ANSWER_MS, _PAUSE_MS = 150, 20
#: The longest wait for the commit of a marker.
_MARKER_MS = 400
#: The share of markers that are sent a second time, and the longest delay of the second one.
_REPEATED, _LATE_MS = 0.3, 1500


class SimContext(BrokerContext):
    """The context of one process of a simulated broker. It has the clock and the metadata of that broker."""

    def __init__(self, broker: SimBroker) -> None:
        self._broker = broker
        super().__init__(broker.broker_id, "simulated", log_dir="", config=_CONFIG)
        self.cache = broker.cache

    def now_ms(self) -> int:
        return self._broker.now_ms

    def wall_ms(self) -> int:
        return self._broker.now_ms

    def spawn(self, work: Coroutine[Any, Any, None] | None, name: str) -> None:
        """Start nothing, because the simulation has no tasks."""


class SimPartition:
    """A partition of a simulated broker, with the part of ``Partition``'s interface that the production code uses."""

    rules = SimpleNamespace(schema_id=0)
    offline = None
    stopped = False

    def __init__(self, broker: SimBroker, tp: TopicPartition, hosted: Hosted) -> None:
        assert hosted.replica is not None
        self.broker = broker
        self.tp = tp
        self.topic_id = hosted.topic_id
        self.hosted = hosted
        self.replica = hosted.replica

    @property
    def log(self) -> SimLog:
        return self.hosted.log

    def require_leader(self, leader_epoch: int) -> None:
        if not self.replica.is_leader:
            raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.tp}: broker {self.broker.broker_id}")

    def append(self, produce: SimProduce) -> None:
        """Append a batch of the broker itself after the current step, if the replica still leads in this epoch."""
        epoch, on_result = self.replica.leader_epoch, produce.on_result
        assert on_result is not None

        def append() -> None:
            if self.replica.is_leader and self.replica.leader_epoch == epoch:
                self.broker.produce(self.tp, produce)
            else:
                on_result(ErrorCode.NOT_LEADER_OR_FOLLOWER)

        self.broker.later(0, append)


class SimPartitions:
    """The partitions of a simulated broker's process, with the part of ``Partitions``' interface that the code uses."""

    def __init__(self, broker: SimBroker) -> None:
        self._broker = broker

    def get(self, tp: TopicPartition) -> SimPartition | None:
        hosted = self._broker.hosted.get(tp)
        return SimPartition(self._broker, tp, hosted) if hosted is not None and hosted.replica is not None else None

    def require(self, tp: TopicPartition, topic_id: str = "") -> SimPartition:
        found = self.get(tp)
        if found is None or topic_id not in {"", found.topic_id}:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, str(tp))
        return found


class TransactionPeer(Protocol):
    """The part of another broker that this module uses."""

    def verify(self, request: VerifyTransaction, reply: Callable[[VerifyTransactionReply | BrokerError], None]) -> None:
        """Receive a leader's request that asks whether a producer may append."""

    def write_marker(self, marker: TransactionMarker, leader_epoch: int, reply: OnResult) -> None:
        """Receive a marker of a coordinator."""


class SimVerification(TransactionVerification):
    """A leader's verification of transactions. It asks the coordinator by messages of the simulation."""

    def __init__(self, broker: TransactionBroker, context: SimContext, rules: LeaderTransactions) -> None:
        self._broker = broker
        super().__init__(
            context,
            cast(Any, broker.partitions),
            epochs=broker.epochs,
            rules=rules,
            transactions=broker.transactions,
        )

    def _verify(self, question: Question) -> Any:
        self._ask_once(question)

    def _ask_once(self, question: Question) -> None:
        if question.over:
            return
        broker, request, waiting = self._broker, question.request, [True]

        def answered(answer: VerifyTransactionReply | BrokerError) -> None:
            if not waiting:
                return
            waiting.clear()
            decision: BrokerError | int
            if isinstance(answer, BrokerError):
                decision = answer
            else:
                decision = answer.decision
                try:
                    self._epochs.accept(request.key, answer.coordinator_epoch)
                except BrokerError as error:
                    decision = error
            self.on_answer(question, decision)
            if not question.over:
                broker.world.happened["question repeated"] += 1
                broker.later(_PAUSE_MS, lambda: self._ask_once(question))

        wanted = coordinator_of(broker.cache, TRANSACTIONS, request.key)
        if wanted is None:
            broker.later(0, lambda: answered(BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, request.key)))
            return
        other = broker.peer(wanted)
        process = broker.process
        reply = lambda found: other.reply(broker, process, partial(answered, found))  # noqa: E731
        broker.send(other, partial(other.verify, request, reply))
        broker.later(_ANSWER_MS, lambda: answered(BrokerError(ErrorCode.NETWORK_EXCEPTION, "no response")))


class SimMarkers(MarkerAppend):
    """The writer of markers in a leader. It appends them to simulated logs."""

    def _append(self, partition: Any, what: Marker, on_result: OnResult) -> None:
        tp = partition.tp
        result = lambda code: on_result(PartitionResult(tp.topic, tp.partition, code))  # noqa: E731
        partition.append(
            SimProduce(
                f"marker {tp}", 1, ACKS_ALL, partition.topic_id, A_MARKER, _MARKER_MS, content=what, on_result=result
            )
        )


class SimTransactionHost(TransactionHost):
    """A transaction coordinator in the leader of a simulated partition of the internal topic."""

    def __init__(self, broker: TransactionBroker, context: SimContext, partition: SimPartition) -> None:
        super().__init__(
            context, cast(Any, partition), decisions=_MarkerSender(broker), log_start_moved=lambda partition: None
        )
        self._broker = broker
        self._place = partition
        self._loaded = False

    def load_when_committed(self) -> None:
        """Load the log and begin to serve, once the records of earlier leaders are committed."""
        if self._loaded or self.ended or self._place.replica.high_watermark < self._read_to:
            return
        self._loaded = True
        with suppress(StopIteration):
            self.load().send(None)
            raise AssertionError("the load of a coordinator waits for a task")

    async def _read_log(self) -> None:
        for batch in self._place.log.batches:
            if batch.header.base_offset < self._read_to and isinstance(batch.content, tuple):
                self._core.load(batch.content)

    def _write(self, records: Sequence[Record], ended: Callable[[Answer], None]) -> None:
        result = lambda code: ended(Answer(code, -1, -1, ""))  # noqa: E731
        produce = SimProduce(
            f"records {self.epoch}",
            1,
            ACKS_ALL,
            self._place.topic_id,
            NOT_IDEMPOTENT,
            timeout_ms=NEVER,
            content=tuple(records),
            on_result=result,
        )
        self._place.append(produce)

    def _fail(self) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            raise error
        self._broker.world.happened["coordinator failed"] += 1
        super()._fail()

    def _arm(self) -> None:
        deadline_ms = self._core.deadline_ms if not self.not_ready_reason else None
        if deadline_ms is None or 0 < self._timer_at_ms <= deadline_ms:
            return
        self._timer_at_ms = deadline_ms
        self._broker.later(max(deadline_ms - self._now_ms(), 1), lambda: self._due(deadline_ms))

    def _due(self, at_ms: int) -> None:
        if at_ms == self._timer_at_ms and not self.not_ready_reason:
            self._timer_at_ms = 0
            self.step(CoordinatorTicked())


class _MarkerSender:
    """The sender of markers of one coordinator: it sends each marker until the leader has written it."""

    def __init__(self, broker: TransactionBroker) -> None:
        self._broker = broker

    def send_markers(self, host: Any, effect: SendMarkers) -> None:
        said_by = {"coordinator": host.partition.tp.partition, "coordinator_epoch": host.epoch}
        for marker in effect.markers:
            said = replace(marker, **said_by, decision=effect.decision)
            self._broker.later(0, partial(self._send, host, effect, said))

    def send_offsets(self, host: Any, effect: SendOffsets) -> None:
        raise AssertionError("the simulated clients commit no offsets")

    def _send(self, host: SimTransactionHost, effect: SendMarkers, marker: TransactionMarker) -> None:
        broker, waiting = self._broker, [True]
        if host.ended:
            return

        def answered(code: ErrorCode) -> None:
            if not waiting:
                return
            waiting.clear()
            if code is ErrorCode.NONE:
                place = PartitionPlace(marker.topic, marker.partition, marker.topic_id)
                host.step(MarkersWritten(effect.key, effect.decision, (place,), effect.part))
            else:
                broker.world.happened["marker sent again"] += 1
                broker.later(_PAUSE_MS, lambda: self._send(host, effect, marker))

        known = broker.cache.partition(TopicPartition(marker.topic, marker.partition))
        if known is None or known.state.leader not in broker.cache.incarnations:
            answered(ErrorCode.LEADER_NOT_AVAILABLE)
            return
        other, process = broker.peer(known.state.leader), broker.process
        reply = lambda result: other.reply(broker, process, partial(answered, result.code))  # noqa: E731
        message = partial(other.write_marker, marker, known.state.leader_epoch)
        broker.send(other, partial(message, reply))
        broker.later(_ANSWER_MS, lambda: answered(ErrorCode.NETWORK_EXCEPTION))
        if broker.world.random.random() < _REPEATED:
            late_ms = broker.world.random.randrange(_LATE_MS)
            broker.later(late_ms, lambda: self._repeat(other, message))

    def _repeat(self, leader: TransactionBroker, message: Callable[..., None]) -> None:
        if not self._broker.cluster.clients_stopped:  # a late marker would leave the log no time to settle
            self._broker.send(leader, partial(message, lambda result: None))


class TransactionBroker(SimBroker):
    """A simulated broker that also serves the transactions of Kafka's producers."""

    #: The leader's rules. Mutants replace them.
    rules_type = LeaderTransactions

    def start(self) -> None:
        super().start()
        context = SimContext(self)
        self.rules = rules = self.rules_type(FencedProducers(), context.counters)
        self.context = context
        self.partitions = SimPartitions(self)
        self.epochs = CoordinatorEpochs(self.cache)
        self.transactions: HostedCoordinators[TransactionHost] = HostedCoordinators(context, TRANSACTIONS)
        self.verifications = SimVerification(self, context, rules)
        self.markers = SimMarkers(context, cast(Any, self.partitions), epochs=self.epochs, rules=rules)

    def peer(self, broker_id: int) -> TransactionBroker:
        return cast(TransactionBroker, self.cluster.brokers[broker_id])

    # --- partitions ------------------------------------------------------------------------------------------------

    def _role_changed(self, tp: TopicPartition, hosted: Hosted, effect: Any, *more: object) -> None:
        super()._role_changed(tp, hosted, effect, *more)
        if tp.topic != TRANSACTIONS:
            return
        self._end_coordinator(tp)
        if effect.role == "leader":
            # The replica may be in the middle of a step.
            self.later(0, lambda: self._begin_coordinator(tp, hosted))

    def _begin_coordinator(self, tp: TopicPartition, hosted: Hosted) -> None:
        if hosted.replica is None or not hosted.replica.is_leader or self.hosted.get(tp) is not hosted:
            return
        self._end_coordinator(tp)
        host = SimTransactionHost(self, self.context, SimPartition(self, tp, hosted))
        self.transactions.by_partition[tp.partition] = host
        host.on_failed = lambda: self.later(_ANSWER_MS, lambda: self._begin_again(tp, hosted, host))
        host.load_when_committed()

    def _begin_again(self, tp: TopicPartition, hosted: Hosted, host: TransactionHost) -> None:
        if self.transactions.by_partition.get(tp.partition) is host and not host.ended:
            self._begin_coordinator(tp, hosted)

    def _end_coordinator(self, tp: TopicPartition) -> None:
        known = self.transactions.by_partition.pop(tp.partition, None)
        if known is not None:
            known.end()

    def drop(self, tp: TopicPartition) -> None:
        super().drop(tp)
        if tp.topic == TRANSACTIONS:
            self._end_coordinator(tp)

    def _mark_moved(self, tp: TopicPartition, hosted: Hosted, effect: Any, *more: object) -> None:
        super()._mark_moved(tp, hosted, effect, *more)
        hosted.log.transactions.committed_below(effect.high_watermark)
        host = self.transactions.by_partition.get(tp.partition) if tp.topic == TRANSACTIONS else None
        if isinstance(host, SimTransactionHost):
            self.later(0, host.load_when_committed)

    # --- requests of clients ---------------------------------------------------------------------------------------

    def coordinate(
        self, key: str, event_of: Callable[[int], object], told: Callable[[Outcome], None], *, ordered: bool
    ) -> None:
        """Pass a client's request to the coordinator of its transactional id, and send the response."""

        def answered(outcome: Outcome) -> None:
            self.world.send(self.name, "client", (None, 0, partial(told, outcome)), ordered=ordered)

        try:
            self.transactions.of(key).ask(event_of, answered)
        except BrokerError as error:
            answered(Refused(error.code, error.detail))

    def produce_for_kafka(self, tp: TopicPartition, produce: SimProduce, *, key: str, adds: bool) -> None:
        """Append a batch of a Kafka producer. ``broker.kafka.produce`` is the production code for this.

        ``key`` is empty outside transactions.
        """
        partition = self.partitions.get(tp)
        if not key or partition is None:
            self.produce(tp, produce)
            return
        log = partition.log
        planned = log.planned(
            produce.body, produce.count, leader_epoch=0, now_ms=self.now_ms, sequence=produce.sequence
        )
        try:
            self.verifications.produce(
                cast(Any, partition),
                cast(Any, [(planned.header, None)]),
                key=key,
                acks=produce.acks,
                deadline_ms=self.now_ms + produce.timeout_ms,
                append=lambda: self.produce(tp, produce),
                on_result=lambda answer: self._tell(produce, answer.code),
                adds=adds,
            )
        except BrokerError as error:
            self._sequence_refused(partition, planned.header, error)
            self._tell(produce, error.code)

    def _sequence_refused(self, partition: SimPartition, header: BatchHeader, error: BrokerError) -> None:
        unknown = partition.log.producers.get(header.producer_id) is None
        partition.hosted.checker.sequence_refused(error, unknown=unknown)

    # --- requests of brokers ---------------------------------------------------------------------------------------

    def verify(self, request: VerifyTransaction, reply: Callable[[VerifyTransactionReply | BrokerError], None]) -> None:
        try:
            host = self.transactions.of(request.key)
        except BrokerError as error:
            reply(error)
            return

        def answered(outcome: Outcome) -> None:
            if isinstance(outcome, Refused):
                reply(BrokerError(outcome.code, outcome.detail))
            else:
                reply(confirmed(0, host, outcome))

        ask_host(host, request, answered)

    def write_marker(self, marker: TransactionMarker, leader_epoch: int, reply: OnResult) -> None:
        """Write a marker. ``leader_epoch`` is the leader epoch that the sender knew.

        A marker from an earlier term of this leader is dropped, because the simulation does not cover late copies of
        markers across terms (ADR 31, "What remains").
        """
        tp = TopicPartition(marker.topic, marker.partition)
        partition = self.partitions.get(tp)
        if partition is None or partition.replica.leader_epoch != leader_epoch:
            self.world.happened["marker of an earlier term"] += 1
            reply(PartitionResult(marker.topic, marker.partition, ErrorCode.NOT_LEADER_OR_FOLLOWER))
            return
        producer_ids = [producer_id for producer_id, _ in (*marker.committed, *marker.aborted)]
        if any(self.rules.fences.is_over(tp, producer_id, marker.decision) for producer_id in producer_ids):
            self.world.happened["marker of an earlier transaction"] += 1
        self.markers.write(marker, reply)

    _PERFORM: ClassVar[dict[type, Callable[..., ev.Event | None]]] = {
        **SimBroker._PERFORM,
        fx.RoleChanged: _role_changed,
        fx.HighWatermarkMoved: _mark_moved,
    }
