"""Variants of the production code, each of which breaks one rule on purpose.

``sim_mutants`` says which check catches it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

from msgspec import structs

from sparklog.broker.lifecycle.supervisor_lease import LeaseName, OrphanStep, SupervisorLease
from sparklog.broker.transactions.leader_transactions import Batches, LeaderTransactions, TransactionalLog
from sparklog.controller import reassignments
from sparklog.controller.cluster_state import ClusterPartition
from sparklog.controller.controller import Controller
from sparklog.controller.election import ELECTED, MOVED, ElectionDecision, IsrLiveness, decide, leader_remains
from sparklog.controller.election import move as elect
from sparklog.coordinator import kafka_transactions
from sparklog.coordinator.effects import Refused
from sparklog.coordinator.events import KafkaAddRequested, KafkaEndRequested, VerifyRequested
from sparklog.coordinator.records import Transaction
from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, LeaderAndIsr, OffsetRange, Reassignment, TopicPartition, VersionedState
from sparklog.protocol.messages import ControlUpdate
from sparklog.record.header import BatchHeader
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.follower import FollowerRole
from sparklog.replica.isr import IsrState, PendingIsr
from sparklog.replica.leader import LeaderRole
from sparklog.replica.progress import Progress
from sparklog.replica.replica import Replica
from sparklog.storage.producers import ProducerEntry, check_sequence
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_log import SimLog
from sparklog.testing.sim_transactions import TransactionBroker


class CommittedOnly(LeaderRole):
    def _isr_became(self, isr: IsrState) -> None:
        super()._isr_became(isr)
        self._peers = [self.progress[broker] for broker in isr.committed if broker != self.view.broker_id]


class CommittedOnlyReplica(Replica):
    leader_type = CommittedOnly


class ToMarkReplica(Replica):
    """A broken replica with the rule of Kafka 0.8: a new follower truncates its log to its own high watermark."""

    def _become_follower(self, state: LeaderAndIsr) -> list[fx.Effect]:
        effects = super()._become_follower(state)
        if self.high_watermark < self.view.log.log_end_offset:
            return [fx.TruncateLog(self.high_watermark), *effects]
        return effects


class NoFenceReplica(Replica):
    """A replica that accepts fetches and responses of any leader epoch."""

    def _follower_fetched(self, event: ev.FollowerFetched, now_ms: int) -> list[fx.Effect]:
        return super()._follower_fetched(structs.replace(event, leader_epoch=self.leader_epoch), now_ms)

    def _leader_responded(self, event: ev.LeaderResponded, now_ms: int) -> list[fx.Effect]:
        return super()._leader_responded(structs.replace(event, leader_epoch=self.leader_epoch), now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.FollowerFetched: _follower_fetched,
        ev.LeaderResponded: _leader_responded,
    }


class AnyOrderReplica(Replica):
    """A replica that obeys the controller's decision that arrived last, even if this decision is not the newest."""

    def _decided(self, event: ev.Decided, now_ms: int) -> list[fx.Effect]:
        if event.version != self.version:
            self.view.version = -1
            self.view.state = None
        return super()._decided(event, now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.Decided: _decided,
    }


class Hasty(LeaderRole):
    """A leader that uses a new ISR before it is written to ZooKeeper."""

    def _propose(self, pending: PendingIsr, effects: list[fx.Effect]) -> None:
        super()._propose(pending, effects)
        self._members = frozenset(pending.proposed)
        self._peers = [self.progress[broker] for broker in pending.proposed if broker != self.view.broker_id]
        self.advance(effects)


class HastyReplica(Replica):
    leader_type = Hasty


class Unbound(LeaderRole):
    """A leader that adds a broker to the ISR without a check of the broker's incarnation."""

    def _order(self, pending: PendingIsr) -> fx.WriteIsr:
        return structs.replace(super()._order(pending), added=())

    def _may_join(self, broker: int, peer: Progress, now_ms: int) -> bool:
        incarnations = self.view.incarnations
        self.view.incarnations = {**incarnations, broker: peer.incarnation}
        try:
            return super()._may_join(broker, peer, now_ms)
        finally:
            self.view.incarnations = incarnations


class UnboundReplica(Replica):
    leader_type = Unbound


class EarlyRejoin(LeaderRole):
    """A leader that adds a follower to the ISR too early (KAFKA-7128).

    The follower has reached the high watermark, but earlier leaders may have committed more records.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.epoch_start = 0


class EarlyRejoinReplica(Replica):
    leader_type = EarlyRejoin


class NoDivergence(LeaderRole):
    """A leader that accepts any fetch offset without a check whether the logs diverge."""

    def _compare(self, event: ev.FollowerFetched, end: int) -> fx.Effect | None:
        return super()._compare(structs.replace(event, last_epoch=-1), end)


class NoDivergenceReplica(Replica):
    leader_type = NoDivergence


class EagerMark(FollowerRole):
    """A follower that raises its high watermark although its log may still diverge from the leader's."""

    def on_response(self, event: ev.LeaderResponded) -> list[fx.Effect]:
        if event.leader_epoch != self.epoch:
            return []
        return [*self._raise_to(event.high_watermark), *super().on_response(event)]


class EagerMarkReplica(Replica):
    follower_type = EagerMark


class BelowMinIsr(LeaderRole):
    """A leader that commits although the ISR is smaller than min.insync.replicas."""

    def _isr_became(self, isr: IsrState) -> None:
        super()._isr_became(isr)
        self._may_commit = True


class BelowMinIsrReplica(Replica):
    leader_type = BelowMinIsr


class AnyIncarnation(LeaderRole):
    """A leader that accepts a late fetch of an earlier incarnation as a fetch of the current one."""

    def fetched(self, event: ev.FollowerFetched, now_ms: int) -> list[fx.Effect]:
        peer = self.progress.get(event.replica_id)
        if peer is not None and event.incarnation < peer.incarnation:
            event = structs.replace(event, incarnation=peer.incarnation)
        return super().fetched(event, now_ms)


class AnyIncarnationReplica(Replica):
    leader_type = AnyIncarnation


class Kip101Leader(LeaderRole):
    """A leader that compares only log end offsets, and ignores that it does not have an epoch of the follower."""

    def _compare(self, event: ev.FollowerFetched, end: int) -> fx.Effect | None:
        objection = super()._compare(event, end)
        if isinstance(objection, fx.AnswerDiverging) and objection.end_offset >= event.offset:
            return None
        return objection


class Kip101Follower(FollowerRole):
    """A follower that truncates at the leader's end offset of an epoch, although its own end offset may be lower."""

    def _truncate(self, diverging: tuple[int, int], event: ev.LeaderResponded) -> list[fx.Effect]:
        return super()._truncate((self.epoch, diverging[1]), event)


class Kip101Replica(Replica):
    leader_type = Kip101Leader
    follower_type = Kip101Follower


class Staying(LeaderRole):
    """A leader that keeps replicas in the ISR although the controller has ordered their removal."""

    def _leaving_members(self) -> tuple[int, ...]:
        return ()


class StayingReplica(Replica):
    leader_type = Staying


class LatchedLeavingReplica(Replica):
    """A leader that still removes a replica from the ISR after the controller has withdrawn the order.

    The leader ignores the withdrawal if the leader's ISR write was faster than the controller's decision.
    """

    def _overtaken(self, event: ev.Decided, now_ms: int) -> list[fx.Effect]:
        return super()._overtaken(structs.replace(event, leaving=self.view.leaving), now_ms)


class SmallFactorReplica(Replica):
    """A replica that assumes a replication factor lower by one when it applies min.insync.replicas."""

    def _decided(self, event: ev.Decided, now_ms: int) -> list[fx.Effect]:
        return super()._decided(structs.replace(event, factor=max(1, event.factor - 1)), now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.Decided: _decided,
    }


class Resuming(Controller):
    """A controller that lets a new incarnation of a leader continue in the leader epoch of the earlier one."""

    def _decide(self, partition: ClusterPartition, liveness: IsrLiveness, now_ms: int) -> ElectionDecision | None:
        stored = partition.stored
        if stored is not None and stored.state.leader in liveness.live:
            partition.stored = structs.replace(stored, leader_incarnation=liveness.live[stored.state.leader])
        return super()._decide(partition, liveness, now_ms)


class ResumingController(CoreController):
    core_type = Resuming


class Trusting(Controller):
    """A controller that trusts the log of every broker, even after a loss of the page cache."""

    def _distrust(
        self, broker_id: int, doubted: list[ClusterPartition], *, states_are_newer: bool, in_part: bool
    ) -> None:
        pass


class TrustingController(CoreController):
    core_type = Trusting


class Unclean(Controller):
    """A controller that elects any live replica, though the topic does not allow unclean elections."""

    def _decide(self, partition: ClusterPartition, liveness: IsrLiveness, now_ms: int) -> ElectionDecision | None:
        decision = super()._decide(partition, liveness, now_ms)
        if partition.stored is None or (decision is not None and decision.state.leader != NO_LEADER):
            return decision
        unclean = decide(partition.replicas, partition.stored, liveness, suspects=partition.suspects, unclean=True)
        return unclean or decision


class UncleanController(CoreController):
    core_type = Unclean


class Hurried(Controller):
    """A controller that does not wait for ISR members that have just disappeared before an unclean election."""

    def _decide(self, partition: ClusterPartition, liveness: IsrLiveness, now_ms: int) -> ElectionDecision | None:
        if self._leader_rebalance.may_be_unclean(partition):
            liveness = liveness._replace(held=frozenset())
        return super()._decide(partition, liveness, now_ms)


class HurriedController(CoreController):
    core_type = Hurried


class ObedientBroker(SimBroker):
    """A broker that also obeys a controller that has been replaced."""

    def refusal(self, update: ControlUpdate) -> ErrorCode | None:
        refusal = super().refusal(update)
        return None if refusal == ErrorCode.STALE_CONTROLLER_EPOCH else refusal


class ForgetfulLog(SimLog):
    """A log that keeps its table of producers when it is opened or truncated.

    So a retry of a removed batch still counts as a duplicate.
    """

    def rebuild_producers(self) -> None:
        pass


class CredulousLog(SimLog):
    """A log that accepts incomplete data at its end as a batch."""

    def recover(self) -> None:
        torn = self.torn
        super().recover()
        if torn is not None:
            self._add(torn._replace(body=f"half of {torn.body}"))


class CredulousBroker(SimBroker):
    """A broker that treats a lost log as a log that never had a record."""

    def lose_log(self, tp: TopicPartition) -> None:
        super().lose_log(tp)
        self._lost_logs.clear()


class VotingOut(Controller):
    """A controller that removes dead and stopping brokers from the ISR when it elects a leader."""

    def _decide(self, partition: ClusterPartition, liveness: IsrLiveness, now_ms: int) -> ElectionDecision | None:
        decision = super()._decide(partition, liveness, now_ms)
        if decision is None or decision.reason not in {ELECTED, MOVED}:
            return decision
        able = liveness.live.keys() - liveness.stopping
        isr = tuple(member for member in decision.state.isr if member in able or member == decision.state.leader)
        return decision._replace(state=structs.replace(decision.state, isr=isr))


class VotingOutController(CoreController):
    core_type = VotingOut


class ImpatientLease(SupervisorLease):
    """A lease by which a broker without a supervisor (an orphan) stops too early.

    The broker should first ask the controller to move its leaderships.
    """

    def check(self, now_ms: int) -> OrphanStep:
        step = super().check(now_ms)
        return OrphanStep.STOP if step is OrphanStep.ASK_RELIEF else step


class ForsakenLease(SupervisorLease):
    """A lease by which a broker without a supervisor (an orphan) gives up its leaderships too early.

    The broker may do this only if a live driver runs and does not supervise the broker.
    """

    def left_out(self, generation: LeaseName | None) -> bool:
        return True


def done_too_early(move: Reassignment, isr: Collection[int], min_isr: int) -> bool:
    """Return whether replicas outside the target may leave the ISR.

    This variant returns True too early: it requires only one target replica in the ISR.
    """
    return bool(set(move.target).intersection(isr))


def in_the_same_epoch(*arguments: Any, **named: Any) -> ElectionDecision | None:
    """End a reassignment without a new leader epoch."""
    decision = _finish(*arguments, **named)
    if decision is None:
        return None
    state = decision.state
    return decision._replace(state=structs.replace(state, leader_epoch=state.leader_epoch - 1))


def never(*_: Any) -> bool:
    return False


def with_the_removed(
    move: Reassignment, stored: VersionedState, liveness: IsrLiveness, *, unfit: Collection[int], min_isr: int
) -> ElectionDecision | None:
    """End a reassignment while replicas that it removes are still in the ISR."""
    ready = reassignments.may_leave(move, stored.state.isr, min_isr) and leader_remains(stored, liveness, unfit)
    if stored.state.leader not in move.target or not ready:
        return None
    return elect(stored, liveness, stored.state.leader)._replace(reason=reassignments.REASSIGNED)


_finish = reassignments.finish


class EagerTransactions(LeaderTransactions):
    """A leader that asks the coordinator only about producers that are new in its log."""

    def _is_confirmed_or_known(
        self, log: TransactionalLog, tp: TopicPartition, batches: Batches, *, producer: tuple[int, int]
    ) -> bool:
        known = super()._is_confirmed_or_known(log, tp, batches, producer=producer)
        return known or (isinstance(log, SimLog) and log.producers.get(producer[0]) is not None)


class EagerLeader(TransactionBroker):
    rules_type = EagerTransactions


def any_epoch(
    key: str, now: Transaction, request: KafkaAddRequested | KafkaEndRequested | VerifyRequested
) -> Refused | None:
    """Accept a request of any epoch of the producer id."""
    if now.kafka is None:
        return _not_current(key, now, request)
    known = now.kafka.producer_id, now.kafka.epoch
    return _not_current(key, now, replace(request, producer_id=known[0], producer_epoch=known[1]))


def from_zero(entry: ProducerEntry | None, header: BatchHeader, *, begins_anywhere: bool = False) -> OffsetRange | None:
    """Require that the first batch of any unknown producer has sequence 0."""
    return _check_sequence(entry, header)


_not_current = kafka_transactions.not_current
_check_sequence = check_sequence
