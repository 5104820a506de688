"""Broken variants of the replica core that the simulator must catch: a simulator that finds nothing proves nothing.

Each breaks one rule, and is run with the core's own assertions off, so that only its behaviour can give it away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import structs

from sparklog.controller.cluster_state import Partition
from sparklog.controller.controller import Controller
from sparklog.controller.election import ELECTED, MOVED, Decision, Standing
from sparklog.model import LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.follower import Follower
from sparklog.replica.isr import CommittedIsr, IsrState, PendingIsr
from sparklog.replica.leader import Leader
from sparklog.replica.progress import Progress
from sparklog.replica.replica import Replica
from sparklog.testing.sim_controller import ControlledCluster, ControllerActor, StandInController
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_world import Weather


@dataclass(frozen=True, slots=True)
class Mutant:
    """``within``: seeds from 0 on, one of which must fail. ``weather`` and ``restless`` seek the rare cases where the
    broken rule is the only one that holds; the others are found in any weather. So does ``page_cache_loss``."""

    name: str
    replica_type: type[Replica] = Replica
    controller_type: Callable[[ControlledCluster], ControllerActor] = StandInController
    within: int = 100
    weather: Weather | None = None
    restless: float | None = None
    page_cache_loss: float = 0.3
    partitions: int = 1


class _CommittedOnly(Leader):
    def _isr_became(self, isr: IsrState) -> None:
        super()._isr_became(isr)
        self._peers = [self.progress[broker] for broker in isr.committed if broker != self.view.broker_id]


class _CommittedOnlyReplica(Replica):
    leader_type = _CommittedOnly


class _ToMarkReplica(Replica):
    """Kafka 0.8: a new follower cuts its log to its own high watermark."""

    def _become_follower(self, state: LeaderAndIsr) -> list[fx.Effect]:
        effects = super()._become_follower(state)
        if self.high_watermark < self._view.log.log_end_offset:
            return [fx.TruncateLog(self.high_watermark), *effects]
        return effects


class _NoFenceReplica(Replica):
    """Fetches and answers of any leader epoch are taken for the present one's."""

    def _follower_fetched(self, event: ev.FollowerFetched, now_ms: int) -> list[fx.Effect]:
        return super()._follower_fetched(structs.replace(event, leader_epoch=self.leader_epoch), now_ms)

    def _leader_answered(self, event: ev.LeaderAnswered, now_ms: int) -> list[fx.Effect]:
        return super()._leader_answered(structs.replace(event, leader_epoch=self.leader_epoch), now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.FollowerFetched: _follower_fetched,
        ev.LeaderAnswered: _leader_answered,
    }


class _AnyOrderReplica(Replica):
    """Follows whatever decision comes last, not the newest."""

    def _decided(self, event: ev.Decided, now_ms: int) -> list[fx.Effect]:
        if event.version != self.version:
            self._view.version = -1
            self._view.state = None
        return super()._decided(event, now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.Decided: _decided,
    }


class _Hasty(Leader):
    """Acts on an ISR change before it is written."""

    def _propose(self, pending: PendingIsr, effects: list[fx.Effect]) -> None:
        super()._propose(pending, effects)
        self._members = frozenset(pending.proposed)
        self._peers = [self.progress[broker] for broker in pending.proposed if broker != self.view.broker_id]
        self.advance(effects)


class _HastyReplica(Replica):
    leader_type = _Hasty


class _Unbound(Leader):
    """Adds a broker whatever its incarnation."""

    def _order(self, pending: PendingIsr) -> fx.WriteIsr:
        return structs.replace(super()._order(pending), added=())

    def _may_join(self, broker: int, peer: Progress, now_ms: int) -> bool:
        incarnations = self.view.incarnations
        self.view.incarnations = {**incarnations, broker: peer.incarnation}
        try:
            return super()._may_join(broker, peer, now_ms)
        finally:
            self.view.incarnations = incarnations


class _UnboundReplica(Replica):
    leader_type = _Unbound


class _EarlyRejoin(Leader):
    """Lets a follower in at the high watermark, though earlier leaders committed more. Source: KAFKA-7128."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.epoch_start = 0


class _EarlyRejoinReplica(Replica):
    leader_type = _EarlyRejoin


class _NoDivergence(Leader):
    """Believes any offset: histories are not compared."""

    def _compare(self, event: ev.FollowerFetched, end: int) -> fx.Effect | None:
        return super()._compare(structs.replace(event, last_epoch=-1), end)


class _NoDivergenceReplica(Replica):
    leader_type = _NoDivergence


class _EagerMark(Follower):
    """Raises its mark before the histories agree, as far as its own end."""

    def answered(self, event: ev.LeaderAnswered) -> list[fx.Effect]:
        if event.leader_epoch != self.epoch:
            return []
        return [*self._raise_to(event.high_watermark), *super().answered(event)]


class _EagerMarkReplica(Replica):
    follower_type = _EagerMark


class _BelowMinIsr(Leader):
    """Commits whatever the size of the in-sync set."""

    def _isr_became(self, isr: IsrState) -> None:
        super()._isr_became(isr)
        self._may_commit = True


class _BelowMinIsrReplica(Replica):
    leader_type = _BelowMinIsr


class _Impatient(Leader):
    """Forgets an addition whose answer was lost, as if it had not been written."""

    def isr_write_failed(self, event: ev.IsrWriteFailed) -> list[fx.Effect]:
        if not isinstance(self.isr, CommittedIsr):
            self._isr_became(self.isr.before)
        return []


class _ImpatientReplica(Replica):
    leader_type = _Impatient


class _ResumingController(StandInController):
    """Lets a new incarnation go on in the epoch of an earlier one."""

    resume_epochs = True


class _TrustingController(StandInController):
    """Takes every incarnation's log for whole."""

    trust_all = True


class _VotingOut(Controller):
    """Takes dead and stopping members out of the ISR when it elects."""

    def _decide(self, partition: Partition, standing: Standing, now_ms: int) -> Decision | None:
        decision = super()._decide(partition, standing, now_ms)
        if decision is None or decision.reason not in {ELECTED, MOVED}:
            return decision
        able = standing.live.keys() - standing.stopping
        isr = tuple(member for member in decision.state.isr if member in able or member == decision.state.leader)
        return decision._replace(state=structs.replace(decision.state, isr=isr))


class _VotingOutController(CoreController):
    core_type = _VotingOut


MUTANTS: tuple[Mutant, ...] = (
    Mutant("high watermark from the committed instead of the maximal ISR", _CommittedOnlyReplica),
    Mutant("truncate to the high watermark", _ToMarkReplica),
    Mutant(
        "no epoch fence",
        _NoFenceReplica,
        within=200,
        weather=Weather(loss=0.02, duplicate=0.5, slow=0.1, duplicate_ms=500),
        restless=0.5,
    ),
    Mutant("decisions followed in any order", _AnyOrderReplica),
    Mutant("ISR used before it is written", _HastyReplica),
    Mutant("an ISR addition not bound to the incarnation", _UnboundReplica),
    Mutant("rejoin before the epoch's start", _EarlyRejoinReplica),
    Mutant("histories not compared", _NoDivergenceReplica),
    Mutant("high watermark raised before truncating", _EagerMarkReplica),
    Mutant("high watermark moves below min ISR", _BelowMinIsrReplica),
    Mutant(
        "a lost answer taken for a refusal",
        _ImpatientReplica,
        within=200,
        weather=Weather(loss=0.02, duplicate=0.0, slow=0.02, zk_answer_loss=0.9),
        restless=0.03,
    ),
    Mutant("an epoch resumed by a new incarnation", controller_type=_ResumingController),
    Mutant("a lost page cache trusted", controller_type=_TrustingController),
    Mutant("members voted out by an election", controller_type=_VotingOutController, page_cache_loss=0.9),
)

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
#: the code as it is
SOUND = Mutant("sound", controller_type=CoreController, partitions=6)
