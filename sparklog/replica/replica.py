"""One replica of one partition: events in, effects out. No I/O, no clock.

``Replica.step(event, now_ms)`` is the only door for what changes it; ``append_epoch`` only says what a step would. A
replica is offline (until told, or for good), leader of one epoch, or follower in one epoch; ``TRANSITIONS`` lists every
change between these, and ``_follow_decision`` makes them. What a role does meanwhile stands in ``leader.py`` and
``follower.py``.

Who may tell it what: decisions come from the controller or from reading ZooKeeper, ordered by the version of the
partition's node whichever way they arrive. A started broker leads nothing until told, so that no incarnation resumes
an epoch that an earlier one led with a longer log.

The performer carries out the effects of one step, in order, before it hands over the next event; so the ``LogView``
always shows the log as ordered so far. A batch appended at once is in it before its event (``AppendedAtOnce``), and a
cut may come later, or not at all where it fails or the role has changed by then (``TruncateLog``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from sparklog.errors import ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, LeaderAndIsr
from sparklog.replica import events
from sparklog.replica.effects import (
    AnswerProduce,
    Effect,
    HighWatermarkMoved,
    RefuseFetch,
    ReportBadDecision,
    RoleChanged,
    StopFetching,
)
from sparklog.replica.follower import Follower
from sparklog.replica.isr import CommittedIsr, IsrState
from sparklog.replica.leader import Leader
from sparklog.replica.purgatory import NEVER, Purgatory
from sparklog.replica.view import LogView, PartitionView, ReplicaSettings

__all__ = ["TRANSITIONS", "LogView", "Offline", "Replica", "ReplicaSettings", "Transition"]


class Transition(NamedTuple):
    """One row of the state table. ``source`` and ``target`` are role names."""

    source: str
    event: str
    condition: str
    target: str
    effects: str


#: Every change of role; the documentation's state diagram is drawn from it. What is not listed changes no role.
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
        "AnswerProduce for all that wait, Start- or StopFetching, RoleChanged",
    ),
    Transition(
        "leader",
        "Decided, IsrRefused",
        "new epoch, this broker leads",
        "leader",
        "RoleChanged; ISR change in flight forgotten, lag clocks afresh, waiting produces kept",
    ),
    Transition(
        "leader",
        "Decided, IsrRefused",
        "the decision contradicts itself",
        "follower",
        "ReportBadDecision, AnswerProduce for all that wait, StopFetching, RoleChanged",
    ),
    Transition("leader", "Decided", "this broker is no replica", "offline", "AnswerProduce for all that wait, ..."),
    Transition("follower", "Decided", "this broker is no replica", "offline", "StopFetching, RoleChanged"),
    Transition("leader", "LogFailed, Stopped", "", "offline", "for good: AnswerProduce for all that wait, ..."),
    Transition("follower", "LogFailed, Stopped", "", "offline", "for good: StopFetching, RoleChanged"),
    Transition("offline", "LogFailed, Stopped", "", "offline", "for good: StopFetching, RoleChanged"),
)


class Offline:
    """Does nothing and refuses everything with ``code``. ``final``: no decision brings it back in this process."""

    name = "offline"

    __slots__ = ("code", "detail", "epoch", "final")

    def __init__(self, code: ErrorCode, detail: str, *, final: bool, epoch: int = NO_EPOCH) -> None:
        self.code = code
        self.detail = detail
        self.final = final
        self.epoch = epoch


Role = Leader | Follower | Offline


class Replica:
    """Mutable, owned by one thread: the broker's event loop, or the simulator. Lives from the opening of the
    partition's log until Stopped or LogFailed."""

    #: seams for variants that the simulator must catch
    leader_type: ClassVar[type[Leader]] = Leader
    follower_type: ClassVar[type[Follower]] = Follower
    #: What takes an event, by its type: the hot ones cost one look-up.
    _DISPATCH: ClassVar[dict[type, Callable[[Any, Any, int], list[Effect]]]] = {}

    __slots__ = ("_role", "_view")

    def __init__(
        self, broker_id: int, log: LogView, *, high_watermark: int = 0, settings: ReplicaSettings | None = None
    ) -> None:
        """``high_watermark`` is the checkpointed one; it may lag or, after a lost tail, lead."""
        mark = max(log.log_start_offset, min(high_watermark, log.log_end_offset))
        self._view = PartitionView(broker_id, log, settings or ReplicaSettings(), mark)
        self._role: Role = Offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, "started, and not told its role yet", final=False)

    def step(self, event: events.Event, now_ms: int) -> list[Effect]:
        """Take note of one fact and return what is to be done, in order. ``now_ms`` never goes back."""
        return self._DISPATCH[type(event)](self, event, now_ms)

    # --- queries ------------------------------------------------------------------------------------------------

    def append_epoch(self, acks: int) -> int:
        """The leader epoch that AppendAsLeader would say for a produce that arrives now, NO_EPOCH where it would be
        refused. Whoever appends it in this turn says so with AppendedAtOnce."""
        role = self._role
        return role.append_epoch(acks) if isinstance(role, Leader) else NO_EPOCH

    @property
    def role(self) -> str:
        """Name of the role: leader, follower or offline."""
        return self._role.name

    @property
    def is_leader(self) -> bool:
        return isinstance(self._role, Leader)

    @property
    def leader(self) -> int:
        """The leader as last decided; NO_LEADER when there is none or nothing was decided."""
        state = self._view.state
        return NO_LEADER if state is None else state.leader

    @property
    def leader_epoch(self) -> int:
        return self._role.epoch

    @property
    def high_watermark(self) -> int:
        return self._view.high_watermark

    @property
    def version(self) -> int:
        """Version of the ZooKeeper node this replica acts on; -1 before the first decision."""
        return self._view.version

    @property
    def replicated_end(self) -> int:
        """Up to here every replica that may lead next has the log of this one, which leads; else its own end."""
        return self._role.replicated_end if isinstance(self._role, Leader) else self._view.log.log_end_offset

    @property
    def isr(self) -> tuple[int, ...]:
        """The committed in-sync set as last known."""
        state = self._view.state
        return () if state is None else state.isr

    @property
    def isr_state(self) -> IsrState | None:
        """The leader's in-sync set with the change in flight; None unless this replica leads."""
        return self._role.isr if isinstance(self._role, Leader) else None

    @property
    def in_flight(self) -> bool:
        """An ISR change was ordered and is not settled."""
        return isinstance(self._role, Leader) and not isinstance(self._role.isr, CommittedIsr)

    @property
    def dismissed(self) -> bool:
        """Whether the controller removed this broker from the partition's replicas, so that its log is not needed."""
        role, view = self._role, self._view
        return isinstance(role, Offline) and not role.final and view.version >= 0 and self._dismissed(view.state)

    @property
    def refuses_cut(self) -> bool:
        """Whether this follower holds committed records that its leader lacks, and does not cut them."""
        return isinstance(self._role, Follower) and self._role.refuses

    @property
    def epoch_start(self) -> int | None:
        """The log end when this leader's epoch began; None unless this replica leads."""
        return self._role.epoch_start if isinstance(self._role, Leader) else None

    @property
    def hw_settled(self) -> bool:
        """False while a new leader's high watermark may lag behind what its predecessors committed: then list-offsets
        is answered with OFFSET_NOT_AVAILABLE. Source: KIP-207."""
        return isinstance(self._role, Leader) and self._view.high_watermark >= self._role.epoch_start

    @property
    def waiting(self) -> int:
        """acks=all produces that wait for the high watermark."""
        return len(self._role.purgatory) if isinstance(self._role, Leader) else 0

    @property
    def deadline_ms(self) -> int:
        """When Ticked is due at the latest; NEVER: no need."""
        role = self._role
        if not isinstance(role, Leader):
            return NEVER
        check_ms, earliest_ms = role.check_ms, role.purgatory.earliest_ms
        return check_ms if check_ms < earliest_ms else earliest_ms  # min() costs more, and this is hot

    @property
    def settings(self) -> ReplicaSettings:
        return self._view.settings

    @settings.setter
    def settings(self, settings: ReplicaSettings) -> None:
        """The topic's configuration changed; the next step goes by it."""
        if settings != self._view.settings and isinstance(self._role, Leader):
            self._role.check_ms = 0  # others may be out of sync by these
        self._view.settings = settings

    def readable_end(self, isolation: int = 0) -> int:
        """Consumers read below this offset: with ``isolation`` 1 (read committed) the last stable offset."""
        view = self._view
        return view.log.last_stable_offset(view.high_watermark) if isolation else view.high_watermark

    def check_epoch(self, leader_epoch: int) -> ErrorCode | None:
        """Why a request that names this leader epoch (-1: none) is refused here, or None."""
        if isinstance(self._role, Offline):
            return self._role.code
        if leader_epoch in {NO_EPOCH, self._role.epoch}:
            return None
        behind = leader_epoch < self._role.epoch
        return ErrorCode.FENCED_LEADER_EPOCH if behind else ErrorCode.UNKNOWN_LEADER_EPOCH

    def check_offset(self, offset: int) -> ErrorCode | None:
        """Why a consumer cannot read from ``offset`` now, or None. Above the high watermark records may exist that
        another replica has shown already, so only a leader's log end is a proof that an offset is out of range."""
        log = self._view.log
        if offset < log.log_start_offset or (offset > log.log_end_offset and isinstance(self._role, Leader)):
            return ErrorCode.OFFSET_OUT_OF_RANGE
        return ErrorCode.OFFSET_NOT_AVAILABLE if offset > self._view.high_watermark else None

    def check_invariants(self) -> None:
        """Raise AssertionError when this replica's state contradicts itself. For tests; not between an effect and
        its carrying out."""
        view, role = self._view, self._role
        log = view.log
        mark, end = view.high_watermark, log.log_end_offset
        assert log.log_start_offset <= mark <= end, f"high watermark {mark} outside [{log.log_start_offset}, {end}]"
        if isinstance(role, Leader):
            state = view.state
            assert state is not None and state.leader == view.broker_id and state.leader_epoch == role.epoch
            isr = role.isr
            committed = isr.committed
            assert view.broker_id in committed
            if type(isr) is not CommittedIsr:
                assert set(committed) <= set(isr.maximal)
            assert committed == state.isr, f"ISR {committed} acted on, {state.isr} written"
            assert role.epoch_start <= end
            assert role.purgatory.first_end > mark, "a committed produce was not answered"
            for peer in role.progress.values():
                assert peer.log_end <= end, f"a follower fetched from {peer.log_end}, the log ends at {end}"

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decided(self, event: events.Decided, now_ms: int) -> list[Effect]:
        view = self._view
        if self._final:
            return []
        if event.version < view.version:
            return self._overtaken(event, now_ms)
        same = event.version == view.version and view.as_told(event)
        view.take(event)
        view.leaving = event.leaving
        if event.version == view.version:
            if self._dismissed(event.state):
                return self._dismiss()
            if self._awaits_word(event.state):
                return self._become_follower(event.state)
            if same:  # a leader hears of each of its own writes
                return []
            return self._role.cluster_changed(now_ms) if isinstance(self._role, Leader) else []
        old = self._role
        effects = self._follow_decision(event.state, event.version, now_ms, announce=False)
        if self._role is old and isinstance(self._role, Leader):
            effects += self._role.cluster_changed(now_ms)
        return effects

    def _overtaken(self, event: events.Decided, now_ms: int) -> list[Effect]:
        """A leader has written an ISR since: what else is said of its epoch is news, and is not said again.

        The decision can withdraw the order to let a replica go. It cannot give that order, which holds for its own
        version only.
        """
        if isinstance(role := self._role, Leader) and event.state.leader_epoch == role.epoch:
            self._view.take(event)
            self._view.leaving &= event.leaving
            return role.cluster_changed(now_ms)
        if self._awaits_word(event.state) and self._view.broker_id in event.replicas:
            self._view.take(event)
            assert self._view.state is not None
            return self._become_follower(structs.replace(self._view.state, leader=event.state.leader))
        return []

    def _follow_decision(self, state: LeaderAndIsr, version: int, now_ms: int, *, announce: bool) -> list[Effect]:
        """The one place where roles change; ``version`` is newer than the view's."""
        view, old = self._view, self._role
        contradiction = self._contradiction(state)
        view.version = version
        if contradiction:
            effects: list[Effect] = [ReportBadDecision(contradiction)]
            if isinstance(old, Leader):
                leaderless = LeaderAndIsr(
                    NO_LEADER, old.epoch, state.isr, state.controller_epoch, lossy_epoch=state.lossy_epoch
                )
                effects += self._become_follower(leaderless)
            return effects
        if self._dismissed(state):
            view.state = state
            return self._dismiss()
        if state.leader == view.broker_id:
            if isinstance(old, Leader) and old.epoch == state.leader_epoch:
                view.state = state
                return old.isr_known(state.isr, now_ms, announce=announce)
            return self._become_leader(state, now_ms)
        if isinstance(old, Follower) and (old.epoch, old.leader) == (state.leader_epoch, state.leader):
            view.state = state
            return []
        if announce and view.broker_id not in state.isr and view.told_epoch != state.leader_epoch:
            # Read from ZooKeeper. A move may have ended with that epoch, which is to fence whoever is no replica since.
            # If this broker followed all the same, a later move could have it added to the ISR while it deletes its
            # log, for it hears of the end of the earlier move late.
            return self._become_follower(structs.replace(state, leader=NO_LEADER))
        return self._become_follower(state)

    def _awaits_word(self, state: LeaderAndIsr) -> bool:
        """Return whether this broker knows the state's epoch from ZooKeeper alone, and follows nobody for that."""
        role = self._role
        return (
            isinstance(role, Follower)
            and role.leader == NO_LEADER
            and role.epoch == state.leader_epoch
            and state.leader not in {NO_LEADER, self._view.broker_id}
        )

    def _dismissed(self, state: LeaderAndIsr | None) -> bool:
        """Whether the partition goes on without this broker. A member of the ISR is never dismissed, whatever the
        replicas are said to be: others may count on its log."""
        kept = (*self._view.replicas, *(state.isr if state else ()))
        return self._view.broker_id not in kept

    def _dismiss(self) -> list[Effect]:
        detail = f"broker {self._view.broker_id} is not among the replicas {self._view.replicas}"
        return self._become_offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail, final=False)

    def _contradiction(self, state: LeaderAndIsr) -> str:
        """What is wrong with a decision, or the empty string."""
        known = self._view.state
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
        if isinstance(self._role, Leader):
            purgatory = self._role.purgatory
        elif isinstance(self._role, Follower):
            effects.append(StopFetching())
        self._view.state = state
        self._role = self.leader_type(self._view, state, now_ms, purgatory=purgatory)
        effects.append(RoleChanged("leader", state.leader_epoch))
        effects += self._role.cluster_changed(now_ms)
        return effects

    def _become_follower(self, state: LeaderAndIsr) -> list[Effect]:
        effects = self._refuse_waiting(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"deposed: leader {state.leader}")
        self._view.state = state
        self._role = self.follower_type(self._view, state)
        return [*effects, self._role.start(), RoleChanged("follower", state.leader_epoch)]

    def _become_offline(self, code: ErrorCode, detail: str, *, final: bool) -> list[Effect]:
        if self._final:
            return []
        effects = self._refuse_waiting(code, detail)
        epoch = self._role.epoch
        self._role = Offline(code, detail, final=final, epoch=epoch)
        return [*effects, StopFetching(), RoleChanged("offline", epoch)]

    def _refuse_waiting(self, code: ErrorCode, detail: str) -> list[Effect]:
        if not isinstance(self._role, Leader):
            return []
        return [AnswerProduce(ticket, code, -1, detail) for ticket in self._role.purgatory.drain()]

    @property
    def _final(self) -> bool:
        return isinstance(self._role, Offline) and self._role.final

    # --- handlers: each hands its event to the role it is meant for -----------------------------------------------

    def _produce_arrived(self, event: events.ProduceArrived, now_ms: int) -> list[Effect]:
        if isinstance(self._role, Leader):
            return self._role.produce_arrived(event)
        return [AnswerProduce(event.ticket, *self._not_leading())]

    def _follower_fetched(self, event: events.FollowerFetched, now_ms: int) -> list[Effect]:
        if isinstance(self._role, Leader):
            return self._role.fetched(event, now_ms)
        code, _, detail = self._not_leading()
        return [RefuseFetch(code, detail)]

    def _not_leading(self) -> tuple[ErrorCode, int, str]:
        role = self._role
        if isinstance(role, Offline):
            return role.code, -1, role.detail
        return ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, f"broker {self.leader} leads in epoch {role.epoch}"

    def _leader_appended(self, event: events.LeaderAppended, now_ms: int) -> list[Effect]:
        return self._role.appended(event, now_ms) if isinstance(self._role, Leader) else []

    def _appended_at_once(self, event: events.AppendedAtOnce, now_ms: int) -> list[Effect]:
        return self._role.appended_at_once(event, now_ms) if isinstance(self._role, Leader) else []

    def _leader_append_failed(self, event: events.LeaderAppendFailed, now_ms: int) -> list[Effect]:
        return self._role.append_failed(event) if isinstance(self._role, Leader) else []

    def _leader_answered(self, event: events.LeaderAnswered, now_ms: int) -> list[Effect]:
        return self._role.answered(event) if isinstance(self._role, Follower) else []

    def _follower_appended(self, event: events.FollowerAppended, now_ms: int) -> list[Effect]:
        return self._role.appended() if isinstance(self._role, Follower) else []

    def _truncated(self, event: events.Truncated, now_ms: int) -> list[Effect]:
        """Fit the high watermark to the log, which may begin above it now, or end below what was ordered."""
        if isinstance(self._role, Follower):
            self._role.truncated()
        log = self._view.log
        mark = max(log.log_start_offset, min(self._view.high_watermark, log.log_end_offset))
        if mark == self._view.high_watermark:
            return []
        self._view.high_watermark = mark
        return [HighWatermarkMoved(mark)]

    def _truncation_failed(self, event: events.TruncationFailed, now_ms: int) -> list[Effect]:
        return self._role.truncation_failed() if isinstance(self._role, Follower) else []

    def _isr_written(self, event: events.IsrWritten, now_ms: int) -> list[Effect]:
        if isinstance(self._role, Leader) and event.version > self._view.version:
            return self._role.isr_written(event, now_ms)
        return []

    def _isr_refused(self, event: events.IsrRefused, now_ms: int) -> list[Effect]:
        if self._final:
            return []
        if event.version > self._view.version:
            self._view.leaving = frozenset()  # told for an ISR that is no more
            return self._follow_decision(event.state, event.version, now_ms, announce=True)
        return self._role.isr_refused(event, now_ms) if isinstance(self._role, Leader) else []

    def _isr_write_failed(self, event: events.IsrWriteFailed, now_ms: int) -> list[Effect]:
        return self._role.isr_write_failed(event) if isinstance(self._role, Leader) else []

    def _brokers_changed(self, event: events.BrokersChanged, now_ms: int) -> list[Effect]:
        self._view.incarnations = event.incarnations
        self._view.stopping = event.stopping
        return self._role.brokers_changed(now_ms) if isinstance(self._role, Leader) else []

    def _follower_connection_lost(self, event: events.FollowerConnectionLost, now_ms: int) -> list[Effect]:
        return self._role.connection_lost(event, now_ms) if isinstance(self._role, Leader) else []

    def _log_failed(self, event: events.LogFailed, now_ms: int) -> list[Effect]:
        return self._become_offline(ErrorCode.KAFKA_STORAGE_ERROR, event.detail, final=True)

    def _log_named(self, event: events.LogNamed, now_ms: int) -> list[Effect]:
        return self._role.log_named() if isinstance(self._role, Leader) else []

    def _ticked(self, event: events.Ticked, now_ms: int) -> list[Effect]:
        return self._role.ticked(now_ms) if isinstance(self._role, Leader) else []

    def _stopped(self, event: events.Stopped, now_ms: int) -> list[Effect]:
        return self._become_offline(ErrorCode.NOT_LEADER_OR_FOLLOWER, "stopped on this broker", final=True)


# Behind the class, as a compiler of Python knows no methods as values within it.
Replica._DISPATCH.update(
    {
        events.ProduceArrived: Replica._produce_arrived,
        events.LeaderAppended: Replica._leader_appended,
        events.AppendedAtOnce: Replica._appended_at_once,
        events.LeaderAppendFailed: Replica._leader_append_failed,
        events.FollowerFetched: Replica._follower_fetched,
        events.LeaderAnswered: Replica._leader_answered,
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
        events.Ticked: Replica._ticked,
        events.Stopped: Replica._stopped,
    }
)
