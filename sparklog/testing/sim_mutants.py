"""Broken variants of the replica core that the simulator must catch: a simulator that finds nothing proves nothing.

Each breaks one rule, and is run with the core's own assertions off, so that only its behaviour can give it away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from sparklog.broker.lease import Lease, OrphanStep
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.controller import reassignments
from sparklog.controller.cluster_state import Partition
from sparklog.controller.controller import Controller
from sparklog.controller.election import ELECTED, MOVED, Decision, Standing, decide, stands
from sparklog.controller.election import move as elect
from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, LeaderAndIsr, Reassignment, VersionedState
from sparklog.protocol.messages import ControlUpdate
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.follower import Follower
from sparklog.replica.isr import IsrState, PendingIsr
from sparklog.replica.leader import Leader
from sparklog.replica.progress import Progress
from sparklog.replica.replica import Replica
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_log import SimLog
from sparklog.testing.sim_world import Weather

#: module or class, name of a function in it, and what stands in its place
NOTHING = "nothing"
Patch = tuple[object, str, Callable[..., Any]]


class Caught(NamedTuple):
    """The rule that is found broken, the seed that shows it now, and the bound: one of so many seeds must show it."""

    rule: str
    seed: int
    within: int


@dataclass(frozen=True, slots=True)
class Mutant:
    """Broken on purpose. ``caught`` says by what.
    ``weather`` and ``restless`` seek the rare cases where the broken rule is the only one that holds; the others are
    found in any weather. So does ``page_cache_loss``."""

    name: str
    broken: str
    caught: Caught
    replica_type: type[Replica] = Replica
    controller_type: type[CoreController] = CoreController
    broker_type: type[SimBroker] = SimBroker
    log_type: type[SimLog] = SimLog
    lease_type: type[Lease] = Lease
    patches: tuple[Patch, ...] = ()
    weather: Weather | None = None
    restless: float | None = None
    page_cache_loss: float = 0.3
    #: weights of faults and operations that are likelier than usual
    likely: tuple[tuple[str, float], ...] = ()
    partitions: int = 1

    @property
    def sound(self) -> bool:
        """Nothing is broken: it must not be caught."""
        return self.broken == NOTHING

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the patched functions are the broken ones."""
        with ExitStack() as restored:
            for module, name, broken in self.patches:
                restored.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, broken)
            yield


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


class _AnyIncarnation(Leader):
    """Takes a late fetch of an earlier incarnation for one of the present: what that one held counts for this."""

    def fetched(self, event: ev.FollowerFetched, now_ms: int) -> list[fx.Effect]:
        peer = self.progress.get(event.replica_id)
        if peer is not None and event.incarnation < peer.incarnation:
            event = structs.replace(event, incarnation=peer.incarnation)
        return super().fetched(event, now_ms)


class _AnyIncarnationReplica(Replica):
    leader_type = _AnyIncarnation


class _Kip101Leader(Leader):
    """Compares ends only: an epoch of the follower's that this log lacks is no objection."""

    def _compare(self, event: ev.FollowerFetched, end: int) -> fx.Effect | None:
        objection = super()._compare(event, end)
        if isinstance(objection, fx.AnswerDiverging) and objection.end_offset >= event.offset:
            return None
        return objection


class _Kip101Follower(Follower):
    """Cuts at the end that the leader names, whatever the epoch: its own end of that epoch is not looked at."""

    def _truncate(self, epoch: int, end_offset: int) -> list[fx.Effect]:
        return super()._truncate(self.epoch, end_offset)


class _Kip101Replica(Replica):
    leader_type = _Kip101Leader
    follower_type = _Kip101Follower


class _Staying(Leader):
    """Does not take out whom the controller tells to leave."""

    def _leaving_members(self) -> tuple[int, ...]:
        return ()


class _StayingReplica(Replica):
    leader_type = _Staying


class _SmallFactorReplica(Replica):
    """Measures min.insync.replicas against one replica less while the partition moves."""

    def _decided(self, event: ev.Decided, now_ms: int) -> list[fx.Effect]:
        return super()._decided(structs.replace(event, factor=max(1, event.factor - 1)), now_ms)

    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[fx.Effect]]]] = {
        **Replica._DISPATCH,
        ev.Decided: _decided,
    }


class _Resuming(Controller):
    """Lets a new incarnation go on in the epoch of an earlier one."""

    def _decide(self, partition: Partition, standing: Standing, now_ms: int) -> Decision | None:
        stored = partition.stored
        if stored is not None and stored.state.leader in standing.live:
            partition.stored = structs.replace(stored, leader_incarnation=standing.live[stored.state.leader])
        return super()._decide(partition, standing, now_ms)


class _ResumingController(CoreController):
    core_type = _Resuming


class _Trusting(Controller):
    """Takes every incarnation's log for whole."""

    def _suspect(self, broker_id: int, hosted: list[Partition], *, states_are_newer: bool) -> None:
        pass


class _TrustingController(CoreController):
    core_type = _Trusting


class _Unclean(Controller):
    """Elects whoever lives, though the topic does not allow it."""

    def _decide(self, partition: Partition, standing: Standing, now_ms: int) -> Decision | None:
        decision = super()._decide(partition, standing, now_ms)
        if partition.stored is None or (decision is not None and decision.state.leader != NO_LEADER):
            return decision
        unclean = decide(partition.replicas, partition.stored, standing, suspects=partition.suspects, unclean=True)
        return unclean or decision


class _UncleanController(CoreController):
    core_type = _Unclean


class _ObedientBroker(SimBroker):
    """Does what any controller says, deposed or not."""

    def refusal(self, update: ControlUpdate) -> ErrorCode | None:
        refusal = super().refusal(update)
        return None if refusal == ErrorCode.STALE_CONTROLLER_EPOCH else refusal


class _ForgetfulLog(SimLog):
    """Does not rebuild the table of producers when it is opened or cut: what is gone is still a duplicate."""

    def rebuild_producers(self) -> None:
        pass


class _CredulousLog(SimLog):
    """Takes whatever lies at its end for a batch."""

    def recover(self) -> None:
        torn = self.torn
        super().recover()
        if torn is not None:
            self._add(torn._replace(body=f"half of {torn.body}"))


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


class _ImpatientLease(Lease):
    """An orphan's time is up: it stops, whoever else might serve."""

    def check(self, now_ms: int) -> OrphanStep:
        step = super().check(now_ms)
        return OrphanStep.STOP if step is OrphanStep.ASK_RELIEF else step


def _done_too_early(move: Reassignment, isr: Collection[int], min_isr: int) -> bool:
    """A move lets replicas go though the target is not all in sync."""
    return bool(set(move.target).intersection(isr))


def _in_the_same_epoch(*arguments: Any, **named: Any) -> Decision | None:
    """A move ends in the leader epoch that it went on in."""
    decision = _finish(*arguments, **named)
    if decision is None:
        return None
    state = decision.state
    return decision._replace(state=structs.replace(state, leader_epoch=state.leader_epoch - 1))


def _never(*_: Any) -> bool:
    return False


def _with_the_removed(
    move: Reassignment, stored: VersionedState, standing: Standing, *, unfit: Collection[int], min_isr: int
) -> Decision | None:
    """A move ends while replicas that it removes are still in the ISR."""
    ready = reassignments.may_leave(move, stored.state.isr, min_isr) and stands(stored, standing, unfit)
    if stored.state.leader not in move.target or not ready:
        return None
    return elect(stored, standing, stored.state.leader)._replace(reason=reassignments.REASSIGNED)


_finish = reassignments.finish

_DOUBLED = Weather(loss=0.02, duplicate=0.5, slow=0.1, duplicate_ms=500)
_LATE_COPIES = Weather(loss=0.02, duplicate=0.5, slow=0.1, duplicate_ms=2500)
_MOVING_LEADERS = (
    ("withdrawn stop", 40),
    ("elect preferred", 40),
    ("restart broker", 10),
    ("create topic", 0),
    ("reassign", 0),
)
_DRIVERLESS = (("driver away", 20),)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "high watermark from the committed instead of the maximal ISR",
        "leader",
        Caught("StrongIsr", 0, 40),
        replica_type=_CommittedOnlyReplica,
    ),
    Mutant("truncate to the high watermark", "follower", Caught("StrongIsr", 0, 40), replica_type=_ToMarkReplica),
    Mutant(
        "KIP-101 without KIP-279",
        "leader, follower",
        Caught("log matching", 15, 100),
        replica_type=_Kip101Replica,
        restless=0.3,
        likely=_MOVING_LEADERS,
    ),
    Mutant("histories not compared", "leader", Caught("core", 1, 40), replica_type=_NoDivergenceReplica),
    Mutant(
        "no epoch fence on fetches",
        "leader, follower",
        Caught("core", 155, 200),
        replica_type=_NoFenceReplica,
        weather=_DOUBLED,
        restless=0.5,
        likely=(*_MOVING_LEADERS, ("cut link", 40)),
    ),
    Mutant(
        "decisions followed in any order",
        "replica, broker",
        Caught("core", 0, 40),
        replica_type=_AnyOrderReplica,
        patches=((MetadataCache, "overtaken", _never),),
        weather=_DOUBLED,
        restless=0.3,
        likely=_MOVING_LEADERS,
    ),
    Mutant(
        "fetches of an earlier incarnation believed",
        "leader",
        Caught("StrongIsr", 0, 40),
        replica_type=_AnyIncarnationReplica,
        weather=_LATE_COPIES,
        likely=(("crash", 40),),
        page_cache_loss=0.9,
    ),
    Mutant("ISR used before it is written", "leader", Caught("StrongIsr", 0, 40), replica_type=_HastyReplica),
    Mutant(
        "high watermark moves below min ISR",
        "leader",
        Caught("min.insync.replicas", 0, 40),
        replica_type=_BelowMinIsrReplica,
    ),
    Mutant(
        "high watermark raised before truncating",
        "follower",
        Caught("consistent reads", 0, 40),
        replica_type=_EagerMarkReplica,
    ),
    Mutant("rejoin before the epoch's start", "leader", Caught("StrongIsr", 1, 40), replica_type=_EarlyRejoinReplica),
    Mutant(
        "an ISR addition not bound to the incarnation",
        "leader",
        Caught("StrongIsr", 78, 200),
        replica_type=_UnboundReplica,
        likely=(("crash", 30),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "a deposed controller obeyed",
        "broker",
        Caught("control requests fenced", 0, 40),
        broker_type=_ObedientBroker,
        patches=((MetadataCache, "overtaken", _never),),
        weather=_LATE_COPIES,
        likely=(("resign", 30), ("crash controller", 30)),
    ),
    Mutant(
        "an epoch resumed by a new incarnation",
        "controller",
        Caught("one leader an epoch", 0, 40),
        controller_type=_ResumingController,
    ),
    Mutant(
        "a lost page cache trusted",
        "controller",
        Caught("StrongIsr", 2, 40),
        controller_type=_TrustingController,
        likely=(("crash", 30),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "members voted out by an election",
        "controller",
        Caught("StrongIsr", 73, 200),
        controller_type=_VotingOutController,
        page_cache_loss=0.9,
        likely=(("crash", 30), ("restart broker", 20)),
    ),
    Mutant(
        "unclean elections where they are not allowed",
        "controller",
        Caught("StrongIsr", 4, 40),
        controller_type=_UncleanController,
    ),
    Mutant(
        "table of producers not rebuilt",
        "log",
        Caught("acks=all", 4, 40),
        log_type=_ForgetfulLog,
        likely=(("crash", 20),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "an unverified tail trusted",
        "log",
        Caught("consistent reads", 1, 40),
        log_type=_CredulousLog,
        likely=(("torn write", 30),),
    ),
    Mutant(
        "replicas told to leave stay",
        "leader",
        Caught("reassignments finish", 1, 40),
        replica_type=_StayingReplica,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
        restless=0.15,
    ),
    Mutant(
        "a removed replica still counted",
        "controller",
        Caught("moves end in sync", 1, 40),
        patches=((reassignments, "finish", _with_the_removed),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "min.insync.replicas too small in a move",
        "replica",
        Caught("min.insync.replicas", 0, 40),
        replica_type=_SmallFactorReplica,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
        restless=0.15,
    ),
    Mutant(
        "a move ends before its target is in sync",
        "controller",
        Caught("moves end in sync", 8, 40),
        patches=((reassignments, "may_leave", _done_too_early),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "a move ends in the epoch it began in",
        "controller",
        Caught("moves end in a new epoch", 1, 40),
        patches=((reassignments, "finish", _in_the_same_epoch),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "an orphaned cluster that stops itself",
        "lease",
        Caught("orphans serve on", 0, 40),
        lease_type=_ImpatientLease,
        likely=_DRIVERLESS,
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
#: the code as it is
SOUND = Mutant("sound", NOTHING, Caught("", 0, 0), partitions=6)
#: the same, and the driver goes away now and then
DRIVERLESS = Mutant("sound, without its driver at times", NOTHING, Caught("", 0, 0), partitions=6, likely=_DRIVERLESS)
BY_NAME[DRIVERLESS.name] = DRIVERLESS
