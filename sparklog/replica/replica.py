"""The state machine of one replica of one partition: events in, effects out.

The module does no I/O and reads no clock. Only ``Replica.step(event, now_ms)`` changes a replica. A replica is offline
(until the first decision, or permanently), the leader of one epoch, or a follower in one epoch. ``TRANSITIONS`` lists
all changes of role. ``leader.py`` and ``follower.py`` define what each role does.

A decision is a state of the partition: its leader, ISR and epoch. A decision comes from the controller or from a read
of ZooKeeper, and the version of the partition's node orders decisions from both sources. A broker that starts leads no
partition until it receives a decision. So no incarnation resumes an epoch in which an earlier incarnation led with a
longer log.

The caller carries out the effects of one step, in order, before it passes the next event. So ``LogView`` shows the log
after these effects. There is one exception: a truncation may be carried out later, or never if it fails or the role
changes first (``TruncateLog``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from sparklog.errors import ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, LeaderAndIsr
from sparklog.replica import events
from sparklog.replica.effects import (
    Effect,
    HighWatermarkMoved,
    RefuseFetch,
    ReportBadDecision,
    RespondToProduce,
    RoleChanged,
    StopFetching,
)
from sparklog.replica.follower import FollowerRole
from sparklog.replica.isr import CommittedIsr, IsrState
from sparklog.replica.leader import LeaderRole
from sparklog.replica.purgatory import NEVER, Purgatory
from sparklog.replica.view import LogView, PartitionView, ReplicaSettings

__all__ = ["TRANSITIONS", "LogView", "Offline", "Replica", "ReplicaSettings", "Transition"]


class Transition(NamedTuple):
    """One row of the table of role changes. ``source`` and ``target`` are role names."""

    source: str
    event: str
    condition: str
    target: str
    effects: str


#: All changes of role. Other events do not change the role. The state diagram in the documentation is drawn from this
#: table.
TRANSITIONS: tuple[Transition, ...] = (
    Transition("offline", "Decided", "this broker leads", "leader", "RoleChanged"),
    Transition("offline", "Decided", "another leads, or none", "follower", "Start- or StopFetching, RoleChanged"),
    Transition("follower", "Decided", "new epoch, this broker leads", "leader", "StopFetching, RoleChanged"),
    Transition(
        "follower", "Decided", "new epoch, another leads or none", "follower", "Start- or StopFetching, RoleChanged"
    ),
    Transition(
        "leader",
        "Decided, IsrRefused",
        "new epoch, another leads or none",
        "follower",
        "RespondToProduce for all waiting, Start- or StopFetching, RoleChanged",
    ),
    Transition(
        "leader",
        "Decided, IsrRefused",
        "new epoch, this broker leads",
        "leader",
        "RoleChanged; drops the ISR change in flight, restarts lag clocks, keeps waiting produces",
    ),
    Transition(
        "leader",
        "Decided, IsrRefused",
        "the decision contradicts itself",
        "follower",
        "ReportBadDecision, RespondToProduce for all waiting, StopFetching, RoleChanged",
    ),
    Transition("leader", "Decided", "this broker is not a replica", "offline", "RespondToProduce for all waiting, ..."),
    Transition("follower", "Decided", "this broker is not a replica", "offline", "StopFetching, RoleChanged"),
    Transition("leader", "LogFailed, Stopped", "", "offline", "permanently: RespondToProduce for all waiting, ..."),
    Transition("follower", "LogFailed, Stopped", "", "offline", "permanently: StopFetching, RoleChanged"),
    Transition("offline", "LogFailed, Stopped", "", "offline", "permanently: StopFetching, RoleChanged"),
)


class Offline:
    """The role of a replica that does nothing and refuses every request with ``code``.

    If ``final`` is set, the replica never leaves this role.
    """

    name = "offline"

    __slots__ = ("code", "detail", "epoch", "final")

    def __init__(self, code: ErrorCode, detail: str, *, final: bool, epoch: int = NO_EPOCH) -> None:
        self.code = code
        self.detail = detail
        self.final = final
        self.epoch = epoch


Role = LeaderRole | FollowerRole | Offline


class Replica:
    """The state machine of one replica of one partition.

    Mutable and not thread-safe: use it only in one thread, the thread of the broker's event loop or of the simulator.
    The object is created when the partition's log has been opened, and used until Stopped or LogFailed.
    """

    #: The simulator replaces these classes with faulty variants, to test that its checks detect the faults.
    leader_type: ClassVar[type[LeaderRole]] = LeaderRole
    follower_type: ClassVar[type[FollowerRole]] = FollowerRole
    #: The handler of each event type. It is a dict, so that a frequent event takes one lookup.
    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[Effect]]]] = {}

    __slots__ = ("_handlers", "_role", "view")

    def __init__(
        self, broker_id: int, log: LogView, *, high_watermark: int = 0, settings: ReplicaSettings | None = None
    ) -> None:
        """Create the replica.

        ``high_watermark`` is the checkpointed one. It may be too low. It may also be above the log end, if the log lost
        its tail.
        """
        mark = max(log.log_start_offset, min(high_watermark, log.log_end_offset))
        self._handlers = self._DISPATCH  # an instance attribute, because a class attribute is found more slowly
        #: The state that all roles share. Other code may read it, but only ``step`` changes it.
        self.view = PartitionView(broker_id, log, settings or ReplicaSettings(), mark)
        self._role: Role = Offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, "started, and has no role yet", final=False)

    def step(self, event: events.Event, now_ms: int) -> list[Effect]:
        """Handle one event, and return the effects. The caller carries them out in order.

        ``now_ms`` never decreases from one step to the next.
        """
        return self._handlers[type(event)](self, event, now_ms)

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """Return the name of the role: leader, follower or offline."""
        return self._role.name

    @property
    def is_leader(self) -> bool:
        return isinstance(self._role, LeaderRole)

    @property
    def leader(self) -> int:
        """Return the leader of the last decision; NO_LEADER if the partition has none or no decision has come yet."""
        state = self.view.state
        return NO_LEADER if state is None else state.leader

    def leads_in(self, leader_epoch: int) -> bool:
        """Return whether this replica leads in ``leader_epoch``; -1 matches any epoch."""
        role = self._role
        return isinstance(role, LeaderRole) and leader_epoch in (NO_EPOCH, role.epoch)

    @property
    def leader_epoch(self) -> int:
        return self._role.epoch

    @property
    def high_watermark(self) -> int:
        return self.view.high_watermark

    @property
    def version(self) -> int:
        """Return the version of the partition's ZooKeeper node at the last decision; -1 before the first decision."""
        return self.view.version

    @property
    def replicated_end(self) -> int:
        """Return the offset up to which all replicas that may become the next leader have copied this leader's log.

        If this replica does not lead, return its own log end offset.
        """
        return self._role.replicated_end if isinstance(self._role, LeaderRole) else self.view.log.log_end_offset

    @property
    def isr(self) -> tuple[int, ...]:
        """Return the last known committed ISR; empty before the first decision."""
        state = self.view.state
        return () if state is None else state.isr

    @property
    def isr_state(self) -> IsrState | None:
        """Return the leader's ISR and any change of it in flight; None if this replica does not lead."""
        return self._role.isr if isinstance(self._role, LeaderRole) else None

    @property
    def in_flight(self) -> bool:
        """Return whether this replica leads and a change of its ISR is in flight."""
        return isinstance(self._role, LeaderRole) and not isinstance(self._role.isr, CommittedIsr)

    @property
    def dismissed(self) -> bool:
        """Return whether the partition no longer needs this broker: it is neither a replica nor in the ISR.

        The broker's log of the partition is then no longer needed.
        """
        role, view = self._role, self.view
        return isinstance(role, Offline) and not role.final and view.version >= 0 and self._dismissed(view.state)

    @property
    def refuses_truncation(self) -> bool:
        """Return whether this follower holds committed records that its leader lacks, and refuses to truncate them."""
        return isinstance(self._role, FollowerRole) and self._role.refuses

    @property
    def epoch_start(self) -> int | None:
        """Return the log end offset at the start of this leader's epoch, or None if this replica does not lead."""
        return self._role.epoch_start if isinstance(self._role, LeaderRole) else None

    @property
    def hw_settled(self) -> bool:
        """Return whether this replica leads and its high watermark has reached the start of its epoch.

        All records that earlier leaders committed are below that offset. Until then, ListOffsets requests are refused
        with OFFSET_NOT_AVAILABLE. Source: KIP-207.
        """
        return isinstance(self._role, LeaderRole) and self.view.high_watermark >= self._role.epoch_start

    @property
    def waiting(self) -> int:
        """Return the number of acks=all produces that wait for the high watermark."""
        return len(self._role.purgatory) if isinstance(self._role, LeaderRole) else 0

    def deadline_ms(self) -> int:
        """Return the earliest time at which the replica needs ReplicaTicked, or NEVER.

        This is not a property, because it runs for every event, and a property costs more.
        """
        role = self._role
        if not isinstance(role, LeaderRole):
            return NEVER
        check_ms, earliest_ms = role.check_ms, role.purgatory.earliest_ms
        return check_ms if check_ms < earliest_ms else earliest_ms  # min() is slower

    @property
    def settings(self) -> ReplicaSettings:
        return self.view.settings

    @settings.setter
    def settings(self, settings: ReplicaSettings) -> None:
        """Set the topic's new settings, which apply from the next step on."""
        if settings != self.view.settings and isinstance(self._role, LeaderRole):
            self._role.check_ms = 0  # other members may be out of sync by the new settings
        self.view.settings = settings

    def readable_end(self, isolation: int = 0) -> int:
        """Return the offset below which consumers may read.

        With ``isolation`` 1 (read_committed) this is the last stable offset, otherwise the high watermark.
        """
        view = self.view
        return view.log.last_stable_offset(view.high_watermark) if isolation else view.high_watermark

    def check_epoch(self, leader_epoch: int) -> ErrorCode | None:
        """Return the error for a request with this leader epoch, or None if the epoch is right.

        -1 matches any epoch.
        """
        if isinstance(self._role, Offline):
            return self._role.code
        if leader_epoch in {NO_EPOCH, self._role.epoch}:
            return None
        behind = leader_epoch < self._role.epoch
        return ErrorCode.FENCED_LEADER_EPOCH if behind else ErrorCode.UNKNOWN_LEADER_EPOCH

    def check_offset(self, offset: int) -> ErrorCode | None:
        """Return the error if a consumer cannot read from ``offset`` now, or None if it can.

        Another replica may have a higher high watermark and may have served records that this replica lacks. So only
        the log end offset of a leader proves that an offset is out of range.
        """
        log = self.view.log
        if offset < log.log_start_offset or (offset > log.log_end_offset and isinstance(self._role, LeaderRole)):
            return ErrorCode.OFFSET_OUT_OF_RANGE
        return ErrorCode.OFFSET_NOT_AVAILABLE if offset > self.view.high_watermark else None

    def check_invariants(self) -> None:
        """Raise AssertionError if this replica's state contradicts itself.

        For tests. Call this only after the effects of the last step were carried out.
        """
        view, role = self.view, self._role
        log = view.log
        mark, end = view.high_watermark, log.log_end_offset
        assert log.log_start_offset <= mark <= end, f"high watermark {mark} outside [{log.log_start_offset}, {end}]"
        if isinstance(role, LeaderRole):
            state = view.state
            assert state is not None and state.leader == view.broker_id and state.leader_epoch == role.epoch
            isr = role.isr
            committed = isr.committed
            assert view.broker_id in committed
            if type(isr) is not CommittedIsr:
                assert set(committed) <= set(isr.maximal)
            assert committed == state.isr, f"ISR {committed} acted on, {state.isr} written"
            assert role.epoch_start <= end
            assert role.purgatory.first_end > mark, "a committed produce has no response"
            for peer in role.progress.values():
                assert peer.log_end <= end, f"a follower fetched from {peer.log_end}, the log ends at {end}"

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decided(self, event: events.Decided, now_ms: int) -> list[Effect]:
        view = self.view
        if self._final:
            return []
        if event.version < view.version:
            return self._overtaken(event, now_ms)
        same = event.version == view.version and view.repeats(event)
        view.accept_decision(event)
        view.leaving = event.leaving
        if event.version == view.version:
            if self._dismissed(event.state):
                return self._dismiss()
            if self._waits_for_controller(event.state):
                return self._become_follower(event.state)
            if same:  # A leader also receives its own writes as decisions.
                return []
            return self._role.cluster_changed(now_ms) if isinstance(self._role, LeaderRole) else []
        old = self._role
        effects = self._follow_decision(event.state, event.version, now_ms, announce=False)
        if self._role is old and isinstance(self._role, LeaderRole):
            effects += self._role.cluster_changed(now_ms)
        return effects

    def _overtaken(self, event: events.Decided, now_ms: int) -> list[Effect]:
        """Handle a decision with an older version than the known one.

        Usually the cause is that this leader has written its ISR since.

        If the decision is about the current epoch, its other fields are still current, and no later decision repeats
        them. The decision can cancel the order to remove a leaving replica. It cannot give such an order, because an
        order is valid only for the version of its decision.
        """
        if isinstance(role := self._role, LeaderRole) and event.state.leader_epoch == role.epoch:
            self.view.accept_decision(event)
            self.view.leaving &= event.leaving
            return role.cluster_changed(now_ms)
        if self._waits_for_controller(event.state) and self.view.broker_id in event.replicas:
            self.view.accept_decision(event)
            assert self.view.state is not None
            return self._become_follower(structs.replace(self.view.state, leader=event.state.leader))
        return []

    def _follow_decision(self, state: LeaderAndIsr, version: int, now_ms: int, *, announce: bool) -> list[Effect]:
        """Change the role to the one that ``state`` requires. ``version`` is newer than the view's version."""
        view, old = self.view, self._role
        contradiction = self._contradiction(state)
        view.version = version
        if contradiction:
            effects: list[Effect] = [ReportBadDecision(contradiction)]
            if isinstance(old, LeaderRole):
                leaderless = LeaderAndIsr(
                    NO_LEADER, old.epoch, state.isr, state.controller_epoch, lossy_epoch=state.lossy_epoch
                )
                effects += self._become_follower(leaderless)
            return effects
        if self._dismissed(state):
            view.state = state
            return self._dismiss()
        if state.leader == view.broker_id:
            if isinstance(old, LeaderRole) and old.epoch == state.leader_epoch:
                view.state = state
                return old.isr_known(state.isr, now_ms, announce=announce)
            return self._become_leader(state, now_ms)
        if isinstance(old, FollowerRole) and (old.epoch, old.leader) == (state.leader_epoch, state.leader):
            view.state = state
            return []
        if announce and view.broker_id not in state.isr and view.replicas_epoch != state.leader_epoch:
            # This state was read from ZooKeeper. A reassignment may have ended with its epoch, and this broker may no
            # longer be a replica without knowing it yet. If it fetched in this epoch, a later reassignment could add it
            # to the ISR while it deletes its log. So it follows no leader until the controller sends the replicas.
            return self._become_follower(structs.replace(state, leader=NO_LEADER))
        return self._become_follower(state)

    def _waits_for_controller(self, state: LeaderAndIsr) -> bool:
        """Return whether this follower has no leader yet, because it knows the state's epoch only from ZooKeeper."""
        role = self._role
        return (
            isinstance(role, FollowerRole)
            and role.leader == NO_LEADER
            and role.epoch == state.leader_epoch
            and state.leader not in {NO_LEADER, self.view.broker_id}
        )

    def _dismissed(self, state: LeaderAndIsr | None) -> bool:
        """Return whether the partition no longer needs this broker.

        A member of the ISR is always needed, even if it is not among the replicas, because its log may be needed to
        commit or to elect.
        """
        kept = (*self.view.replicas, *(state.isr if state else ()))
        return self.view.broker_id not in kept

    def _dismiss(self) -> list[Effect]:
        detail = f"broker {self.view.broker_id} is not among the replicas {self.view.replicas}"
        return self._become_offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail, final=False)

    def _contradiction(self, state: LeaderAndIsr) -> str:
        """Return why a decision contradicts itself or the known state, or an empty string."""
        known = self.view.state
        if not state.isr:
            return f"empty ISR in leader epoch {state.leader_epoch}"
        if len(set(state.isr)) != len(state.isr):
            return f"ISR {state.isr} names a broker twice"
        if state.leader != NO_LEADER and state.leader not in state.isr:
            return f"leader {state.leader} is not in the ISR {state.isr}"
        if known is not None and state.leader_epoch < known.leader_epoch:
            return f"leader epoch {state.leader_epoch} follows {known.leader_epoch} in a newer version"
        if (
            known is not None
            and state.leader_epoch == known.leader_epoch
            and state.leader != known.leader
            and NO_LEADER not in {state.leader, known.leader}
        ):
            return f"two leaders in epoch {state.leader_epoch}: {known.leader} and {state.leader}"
        return ""

    def _become_leader(self, state: LeaderAndIsr, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        purgatory = Purgatory()
        if isinstance(self._role, LeaderRole):
            purgatory = self._role.purgatory
        elif isinstance(self._role, FollowerRole):
            effects.append(StopFetching())
        self.view.state = state
        self._role = self.leader_type(self.view, state, now_ms, purgatory=purgatory)
        effects.append(RoleChanged("leader", state.leader_epoch))
        effects += self._role.cluster_changed(now_ms)
        return effects

    def _become_follower(self, state: LeaderAndIsr) -> list[Effect]:
        effects = self._refuse_waiting(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"deposed: leader {state.leader}")
        self.view.state = state
        self._role = self.follower_type(self.view, state)
        return [*effects, self._role.start(), RoleChanged("follower", state.leader_epoch)]

    def _become_offline(self, code: ErrorCode, detail: str, *, final: bool) -> list[Effect]:
        if self._final:
            return []
        effects = self._refuse_waiting(code, detail)
        epoch = self._role.epoch
        self._role = Offline(code, detail, final=final, epoch=epoch)
        return [*effects, StopFetching(), RoleChanged("offline", epoch)]

    def _refuse_waiting(self, code: ErrorCode, detail: str) -> list[Effect]:
        if not isinstance(self._role, LeaderRole):
            return []
        return [RespondToProduce(ticket, code, -1, detail) for ticket in self._role.purgatory.drain()]

    @property
    def _final(self) -> bool:
        return isinstance(self._role, Offline) and self._role.final

    # --- handlers: each passes its event to the role that handles it ----------------------------------------------

    def _produce_arrived(self, event: events.ProduceArrived, now_ms: int) -> list[Effect]:
        if isinstance(self._role, LeaderRole):
            return self._role.produce_arrived(event)
        return [RespondToProduce(event.ticket, *self._not_leading())]

    def _follower_fetched(self, event: events.FollowerFetched, now_ms: int) -> list[Effect]:
        if isinstance(self._role, LeaderRole):
            return self._role.fetched(event, now_ms)
        code, _, detail = self._not_leading()
        return [RefuseFetch(code, detail)]

    def _not_leading(self) -> tuple[ErrorCode, int, str]:
        role = self._role
        if isinstance(role, Offline):
            return role.code, -1, role.detail
        return ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, f"broker {self.leader} leads in epoch {role.epoch}"

    def _leader_appended(self, event: events.LeaderAppended, now_ms: int) -> list[Effect]:
        return self._role.appended(event, now_ms) if isinstance(self._role, LeaderRole) else []

    def _leader_append_failed(self, event: events.LeaderAppendFailed, now_ms: int) -> list[Effect]:
        return self._role.append_failed(event) if isinstance(self._role, LeaderRole) else []

    def _leader_responded(self, event: events.LeaderResponded, now_ms: int) -> list[Effect]:
        return self._role.on_response(event) if isinstance(self._role, FollowerRole) else []

    def _follower_appended(self, event: events.FollowerAppended, now_ms: int) -> list[Effect]:
        return self._role.appended() if isinstance(self._role, FollowerRole) else []

    def _truncated(self, event: events.Truncated, now_ms: int) -> list[Effect]:
        """Move the high watermark into the bounds of the log.

        The truncated log may begin above the high watermark, or end below the ordered offset.
        """
        if isinstance(self._role, FollowerRole):
            self._role.truncated()
        log = self.view.log
        mark = max(log.log_start_offset, min(self.view.high_watermark, log.log_end_offset))
        if mark == self.view.high_watermark:
            return []
        self.view.high_watermark = mark
        return [HighWatermarkMoved(mark)]

    def _truncation_failed(self, event: events.TruncationFailed, now_ms: int) -> list[Effect]:
        return self._role.truncation_failed() if isinstance(self._role, FollowerRole) else []

    def _isr_written(self, event: events.IsrWritten, now_ms: int) -> list[Effect]:
        if isinstance(self._role, LeaderRole) and event.version > self.view.version:
            return self._role.isr_written(event, now_ms)
        return []

    def _isr_refused(self, event: events.IsrRefused, now_ms: int) -> list[Effect]:
        if self._final:
            return []
        if event.version > self.view.version:
            self.view.leaving = frozenset()  # The order was given for an earlier ISR.
            return self._follow_decision(event.state, event.version, now_ms, announce=True)
        return self._role.isr_refused(event, now_ms) if isinstance(self._role, LeaderRole) else []

    def _isr_write_failed(self, event: events.IsrWriteFailed, now_ms: int) -> list[Effect]:
        return self._role.isr_write_failed(event) if isinstance(self._role, LeaderRole) else []

    def _brokers_changed(self, event: events.BrokersChanged, now_ms: int) -> list[Effect]:
        self.view.incarnations = event.incarnations
        self.view.stopping = event.stopping
        return self._role.brokers_changed(now_ms) if isinstance(self._role, LeaderRole) else []

    def _follower_connection_lost(self, event: events.FollowerConnectionLost, now_ms: int) -> list[Effect]:
        return self._role.connection_lost(event, now_ms) if isinstance(self._role, LeaderRole) else []

    def _log_failed(self, event: events.LogFailed, now_ms: int) -> list[Effect]:
        return self._become_offline(ErrorCode.KAFKA_STORAGE_ERROR, event.detail, final=True)

    def _log_named(self, event: events.LogNamed, now_ms: int) -> list[Effect]:
        return self._role.log_named() if isinstance(self._role, LeaderRole) else []

    def _ticked(self, event: events.ReplicaTicked, now_ms: int) -> list[Effect]:
        return self._role.ticked(now_ms) if isinstance(self._role, LeaderRole) else []

    def _stopped(self, event: events.Stopped, now_ms: int) -> list[Effect]:
        return self._become_offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, "stopped on this broker", final=True)


# This is outside the class body, because the compiler that this module is built with does not accept methods as values
# inside it.
Replica._DISPATCH.update(
    {
        events.ProduceArrived: Replica._produce_arrived,
        events.LeaderAppended: Replica._leader_appended,
        events.LeaderAppendFailed: Replica._leader_append_failed,
        events.FollowerFetched: Replica._follower_fetched,
        events.LeaderResponded: Replica._leader_responded,
        events.FollowerAppended: Replica._follower_appended,
        events.Truncated: Replica._truncated,
        events.TruncationFailed: Replica._truncation_failed,
        events.Decided: Replica._decided,
        events.BrokersChanged: Replica._brokers_changed,
        events.IsrWritten: Replica._isr_written,
        events.IsrRefused: Replica._isr_refused,
        events.IsrWriteFailed: Replica._isr_write_failed,
        events.FollowerConnectionLost: Replica._follower_connection_lost,
        events.LogFailed: Replica._log_failed,
        events.LogNamed: Replica._log_named,
        events.ReplicaTicked: Replica._ticked,
        events.Stopped: Replica._stopped,
    }
)
