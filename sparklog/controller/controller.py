"""The state machine of one controller term: it receives events about the cluster and returns effects.

The controller is pure: it does no I/O and reads no clock. It works from the current state, not from changes. An event
updates the known state and marks the partitions that it may concern. The controller then evaluates each marked
partition again (``election.decide``) and requests a write if the stored state has to change. If a write fails because
the node has another version, the result contains the node's state, and the controller evaluates the partition again. So
no special code handles a conflict, a lost response or a new controller. One step evaluates at most 2,000 partitions.
The next step is due at once and evaluates further partitions, so a topic with many partitions does not block the event
loop.

Invariants: the controller sends a state to brokers only after the state is durable. At most one write per partition and
one update per broker are in flight. The controller requests nothing while ZooKeeper is unreachable or after the term
has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from sparklog.controller import election
from sparklog.controller.broker_replacement import BrokerReplacement
from sparklog.controller.broker_table import BrokerChanges, BrokerTable
from sparklog.controller.cluster_state import ClusterPartition, ClusterState
from sparklog.controller.effects import (
    ControllerReport,
    DropElection,
    Effect,
    ReadTopic,
    RequestLogEnds,
    Resign,
    TrustBroker,
    WriteStates,
    WriteTopic,
)
from sparklog.controller.events import (
    BrokersRead,
    ControllerTicked,
    DeletionsRead,
    Disconnected,
    ElectionsRead,
    Event,
    Fenced,
    Loaded,
    LogEndsRead,
    Reconnected,
    RefusalsRead,
    StatesRead,
    StatesRefused,
    StatesReported,
    StatesUnknown,
    StatesWritten,
    StoppingRead,
    TopicDeleted,
    TopicGone,
    TopicNotWritten,
    TopicRead,
    TopicWritten,
    UpdateLost,
    UpdateReplied,
)
from sparklog.controller.leader_rebalance import LeaderRebalance
from sparklog.controller.outbox import Outbox
from sparklog.controller.partition_decisions import PartitionDecisions, ReassignmentCompletion, state_write
from sparklog.controller.partition_states import PartitionStates
from sparklog.controller.pending_moves import PendingMoves
from sparklog.controller.refused_truncations import RefusedTruncations
from sparklog.controller.shutdown_blockers import ShutdownBlockers
from sparklog.controller.topic_changes import TopicChanges
from sparklog.controller.unclean_recovery import UncleanRecovery
from sparklog.controller.untrusted_replicas import UntrustedReplicas
from sparklog.controller.zookeeper_rollback import MOST_RAISED, ZookeeperRollback
from sparklog.model import NO_EPOCH, NO_LEADER, BrokerRegistration, assert_never


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The settings of a controller term.

    ``topic_defaults`` are the cluster's topic settings; a topic's own settings override them. If
    ``preferred_leader_rebalance_interval_ms`` is 0, leaderships return to preferred leaders only on request. If
    ``broker_replace_after_ms`` is negative, the controller never replaces the replicas of absent brokers.
    """

    session_timeout_ms: int = 6000
    unclean_recovery_timeout_ms: int = 30_000
    topic_defaults: dict[str, str] = field(default_factory=dict)
    preferred_leader_rebalance_interval_ms: int = 0
    broker_replace_after_ms: int = -1


class Controller:
    """The state machine of one controller term, which begins with the event ``Loaded``.

    Not thread-safe: only one event loop, or the simulator, may use it.
    """

    def __init__(self, *, controller_id: str, controller_epoch: int, settings: ControllerSettings) -> None:
        self.controller_id = controller_id
        self.controller_epoch = controller_epoch
        self.state = ClusterState(settings.topic_defaults, controller_epoch=controller_epoch)
        self.brokers = BrokerTable(controller_epoch=controller_epoch, session_timeout_ms=settings.session_timeout_ms)
        self.resigned = False
        self._outbox = Outbox(controller_id=controller_id, controller_epoch=controller_epoch)
        self._unclean_recovery = UncleanRecovery(settings.unclean_recovery_timeout_ms)
        self._untrusted = UntrustedReplicas()
        self._leader_rebalance = LeaderRebalance(rebalance_interval_ms=settings.preferred_leader_rebalance_interval_ms)
        self._replacement = BrokerReplacement(settings.broker_replace_after_ms)
        self._pending_moves = PendingMoves()
        self._refused_truncations = RefusedTruncations()
        self._shutdown_blockers = ShutdownBlockers()
        self._zookeeper_rollback = ZookeeperRollback(controller_id=controller_id, controller_epoch=controller_epoch)
        #: The effects of the current step.
        self._effects: list[Effect] = []
        #: The time of the last step.
        self._now_ms = 0
        self._states = PartitionStates(
            self.state,
            self.brokers,
            outbox=self._outbox,
            untrusted=self._untrusted,
            leader_rebalance=self._leader_rebalance,
            effects=self._effects,
        )
        self._topics = TopicChanges(
            self.state, self._states, outbox=self._outbox, forget=self._forget, effects=self._effects
        )
        self._decisions = PartitionDecisions(
            self._leader_rebalance, self._refused_truncations, self._unclean_recovery, effects=self._effects
        )

    # --- the entry point -------------------------------------------------------------------------------------------

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Handle one event; return the resulting effects, in order."""
        if self.resigned:
            return []
        self._effects.clear()  # A step that raised an exception may have left effects.
        self._now_ms = now_ms
        self._handle(event, now_ms)
        if self._states.connected and not self.resigned:
            self._states.mark(self._pending_moves.next_ready(now_ms, self._outbox.has_sent))
            self._settle(now_ms)
            if not self._states.any_marked:
                self._conclude(now_ms)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def _conclude(self, now_ms: int) -> None:
        """Add the effects that depend on all partitions, after the marked partitions are evaluated."""
        self._replace_lost(now_ms)
        self._outbox.partitions_changed(self._untrusted.next_cleared())
        self._outbox.announce()
        self._trust_settled()
        self._effects.extend(map(DropElection, self._leader_rebalance.settled()))
        self._request_log_ends(now_ms)
        self._update_broker_table()
        self._effects.extend(self._outbox.due(self.state, now_ms, more_coming=self._states.writing > 0))

    @property
    def deadline_ms(self) -> int | None:
        """Return the latest time for the next ``ControllerTicked``, or None if the controller waits for no time."""
        if not self._states.connected or self.resigned:
            return None
        if self._states.any_marked:
            return self._now_ms
        times = (
            self.brokers.deadline_ms,
            self._unclean_recovery.deadline_ms,
            self._leader_rebalance.deadline_ms,
            self._replacement.deadline_ms,
            self._pending_moves.deadline_ms,
            self._outbox.deadline_ms,
        )
        return min((time for time in times if time is not None), default=None)

    def _handle(self, event: Event, now_ms: int) -> None:
        match event:
            case StatesWritten():
                self._states.on_written(event, now_ms)
            case StatesRead():
                self._states.found(event.states.items())
            case StatesReported():
                self._states.on_reported(event, now_ms)
            case StatesRefused():
                self._states.on_refused(event)
            case StatesUnknown():
                self._states.on_unknown(event)
            case UpdateReplied():
                self._on_update_response(event, now_ms)
            case UpdateLost():
                self._outbox.on_lost(event.broker_id, event.update_id, now_ms)
            case BrokersRead():
                # A list that was read before the disconnection is stale. After the reconnection the performer reads it
                # again.
                if self._states.connected:
                    brokers = self._accepted(event.brokers)
                    self._brokers_changed(self.brokers.read(brokers, now_ms, retired=event.retired))
            case StoppingRead():
                for broker_id in self.brokers.read_stopping(event.stopping):
                    leaving = {broker_id, NO_LEADER, *self.brokers.stopping}
                    concerned = [p for p in self.state.hosted(broker_id) if _may_be_moved(p, leaving)]
                    # Thousands of partitions may only need a move. The controller moves them a few at a time.
                    self._pending_moves.queue(p for p in concerned if self._states.awaits_successor(p))
                    self._states.mark(p for p in concerned if not self._states.awaits_successor(p))
            case TopicRead():
                self._topics.read(event.topic)
            case TopicWritten() | TopicNotWritten():
                self._topics.on_written(event)
            case TopicGone():
                known = self.state.topics.get(event.name)
                # If the ids differ, the topic has been recreated since.
                if known is not None and event.topic_id in {"", known.record.topic_id}:
                    self._topics.drop(event.name, deleted=event.deleted)
            case RefusalsRead():
                self._states.mark(self._refused_truncations.read(event.refusals, self.state))
            case DeletionsRead():
                self._topics.on_deletions(event)
            case ElectionsRead():
                self._states.mark(self._leader_rebalance.on_requests(event, self.state))
            case TopicDeleted():
                self._topics.on_deleted(event)
            case LogEndsRead():
                self._log_ends_read(event)
            case Loaded():
                self._loaded(event, now_ms)
            case Disconnected():
                self._states.connected = False
            case Reconnected():
                self._reconnected(now_ms)
            case Fenced():
                self.resigned = True
                self._effects.append(Resign(event.detail))
            case ControllerTicked():
                if self._states.connected:
                    self._brokers_changed(BrokerChanges(failed=self.brokers.fail_overdue(now_ms)))
                    self._states.mark(self._unclean_recovery.overdue(now_ms))
                    partitions = self.state.partitions()
                    self._states.mark(self._leader_rebalance.due_returns(partitions, self.brokers.liveness, now_ms))
            case _:
                assert_never(event)

    # --- term and connection -------------------------------------------------------------------------------------

    def _loaded(self, event: Loaded, now_ms: int) -> None:
        self.state.incomplete = bool(event.unreadable)
        for snapshot in event.topics:
            self._topics.read(snapshot)
        stored = [p.stored.state for p in self.state.partitions() if p.stored is not None]
        expected = {member for state in stored for member in state.isr}
        if event.cautious:
            self.brokers.be_cautious(now_ms)
        brokers = self._accepted(event.brokers)
        changes = self.brokers.load(brokers, expected, now_ms, retired=event.retired, absent=event.absent)
        for registration in self.brokers.held:
            # The broker may still serve requests as its last known incarnation.
            self._outbox.broker_arrived(registration)
        self._brokers_changed(changes, states_are_newer=True)
        self.brokers.read_stopping(event.stopping)
        self._topics.on_deletions(event)
        self._refused_truncations.read(event.refusals, self.state)
        self._states.mark(self._leader_rebalance.on_requests(event, self.state))
        self._leader_rebalance.start(now_ms)
        self._states.mark(self.state.partitions())

    def _reconnected(self, now_ms: int) -> None:
        """Resume after a disconnection.

        The performer then reads everything from ZooKeeper again. A broker that disappeared during the disconnection may
        well be alive, so the controller waits longer before the broker counts as failed.
        """
        self._states.connected = True
        self._replacement.start_over()
        self.brokers.be_cautious(now_ms)
        self._states.reread([p for p in self.state.partitions() if p.rereading])
        self._effects.extend(ReadTopic(name) for name, topic in self.state.topics.items() if topic.rereading)

    # --- brokers -------------------------------------------------------------------------------------------------

    def _accepted(self, brokers: Iterable[BrokerRegistration]) -> tuple[BrokerRegistration, ...]:
        """Return the accepted registrations. End this term if a registration proves that ZooKeeper's data is older."""
        judged = self._zookeeper_rollback.judge(brokers)
        self._effects.extend(judged.reports)
        if judged.raise_counters is not None:
            self.resigned = True
            self._effects.append(judged.raise_counters)
        return judged.believed

    def _brokers_changed(self, changes: BrokerChanges, *, states_are_newer: bool = False) -> None:
        """Handle arrived, held and failed brokers.

        ``states_are_newer`` means that all partition states were read after these registrations.
        """
        if changes.held:
            detail = f"brokers {list(changes.held)} disappeared together; waiting before they count as failed"
            self._effects.append(ControllerReport("controller.brokers.held", detail, len(changes.held), grave=True))
            for broker_id in changes.held:
                self._states.mark(self.state.hosted(broker_id))
        for broker_id in changes.failed:
            self._effects.append(
                ControllerReport("controller.brokers.failed", f"broker {broker_id} is no longer registered", grave=True)
            )
            self._outbox.broker_failed(broker_id)
            self._untrusted.end(broker_id)
            self._states.mark(p for p in self.state.hosted(broker_id) if not self._states.has_settled_leader(p))
        for registration in changes.arrived:
            self._arrived(registration, states_are_newer=states_are_newer)

    def _arrived(self, registration: BrokerRegistration, *, states_are_newer: bool) -> None:
        broker_id = registration.broker_id
        self._outbox.broker_arrived(registration)
        self._untrusted.end(broker_id)
        self._unclean_recovery.forget(broker_id)
        hosted = list(self.state.hosted(broker_id))
        for partition in hosted:
            partition.broken.discard(broker_id)
        if not registration.trusted:
            doubted = [partition for partition in hosted if registration.doubts(partition.tp)]
            in_part = bool(registration.doubted)
            self._distrust(broker_id, doubted, states_are_newer=states_are_newer, in_part=in_part)
        self._states.mark(hosted)

    def _distrust(
        self, broker_id: int, doubted: list[ClusterPartition], *, states_are_newer: bool, in_part: bool
    ) -> None:
        """Mark the replicas of a broker that lost its page cache, or only some of its logs (``in_part``), as untrusted.

        If the broker is in the ISR of one of these partitions since before its registration, that membership is void.

        A leader may have added the earlier incarnation after the controller last read the state, so the controller
        reads the state again first. An addition after this registration is valid: the leader checks the new
        incarnation.
        """
        suspected = self._untrusted.begin(broker_id, doubted, in_part=in_part, unread=self.state.incomplete)
        if in_part and suspected:
            names = ", ".join(str(partition.tp) for partition in suspected[:5])
            detail = f"broker {broker_id} has lost the logs of {len(suspected)} partitions, {names} among them"
            self._effects.append(ControllerReport("controller.replicas.doubted", detail, len(suspected), grave=True))
            self._outbox.partitions_changed(suspected)
        if not states_are_newer:
            self._states.reread(suspected)
        for partition in suspected:
            self._untrusted.review(partition)

    def _trust_settled(self) -> None:
        if self.state.incomplete:
            return  # The ISR of a topic that cannot be read may contain a broker that lost its log.
        for broker_id in self._untrusted.settled():
            if broker_id in self.brokers.registrations:
                self._effects.append(TrustBroker(broker_id, self.brokers.registrations[broker_id].incarnation))

    def _update_broker_table(self) -> None:
        """Choose the brokers in the table that is sent to all brokers.

        A broker that is not in the table is hidden: leaders remove it from their ISRs and do not add it again. A
        stopping broker that leads no partition is hidden. So is an untrusted broker until its void ISR memberships are
        gone. A void membership that no live leader can remove does not keep a broker hidden, because the broker could
        then serve no partition.
        """
        suspects = self._untrusted.open(self.brokers.registrations)
        leaving = [broker_id for broker_id in self.brokers.stopping if not self.state.leads(broker_id)]
        hidden = suspects.union(leaving)
        present = [found.endpoint for found in self.brokers.present()]
        self._outbox.set_brokers(
            tuple(found for found in present if found.broker_id not in hidden),
            suspects={found.broker_id: found for found in present if found.broker_id in suspects},
        )
        needed = self._shutdown_blockers.among(leaving, self.state, self.brokers.registrations)
        for broker_id in leaving:
            leaders = filter(self.brokers.registrations.__contains__, self.state.leaders(broker_id))
            if not all(map(self._outbox.has_current_brokers, leaders)):
                # A leader without the new table of brokers may add the broker to its ISR again.
                needed[broker_id] = True
        self._outbox.set_leaving(needed)

    def _replace_lost(self, now_ms: int) -> None:
        replaced = self._replacement.begin(self.state, self.brokers, now_ms)
        for topic, record in replaced.records:
            self._topics.write(topic, WriteTopic(record, topic.version))
        self._effects.extend(replaced.reports)

    # --- decisions -------------------------------------------------------------------------------------------------

    def _settle(self, now_ms: int) -> None:
        """Evaluate marked partitions, as many as one step may, and order the writes and moves that they need."""
        if not self._states.any_marked:
            return
        liveness = self.brokers.liveness
        writes = []
        ends = ReassignmentCompletion()
        for partition in self._states.next_marked():
            if partition.busy:
                continue
            decision = self._decide(partition, liveness, now_ms)
            if decision is None:
                decision = self._leader_rebalance.better_leader(partition, liveness)
            elif decision.reason == election.MOVED and not self._pending_moves.begin(partition, now_ms):
                continue
            if decision is None:
                ends.check(partition, liveness)
                continue
            write = state_write(partition, decision)
            self._states.begin_write(partition, write)
            writes.append(write)
        if writes:
            # Write first the partitions that wait for a leader, and last those that only lose a follower.
            writes.sort(key=lambda write: write.reason == election.STRIPPED)
            self._effects.append(WriteStates(tuple(writes)))
        for topic, order in ends.orders():
            self._topics.write(topic, order)

    def _decide(
        self, partition: ClusterPartition, liveness: election.IsrLiveness, now_ms: int
    ) -> election.ElectionDecision | None:
        return self._decisions.decide(partition, liveness, now_ms)

    def _forget(self, partition: ClusterPartition) -> None:
        """Remove a partition whose topic no longer exists."""
        self._unclean_recovery.give_up(partition)
        self._untrusted.forget(partition)
        self._leader_rebalance.forget(partition)
        self._refused_truncations.forget(partition)
        self._pending_moves.forget(partition)

    # --- unclean recovery ------------------------------------------------------------------------------------------

    def _request_log_ends(self, now_ms: int) -> None:
        for broker_id, partitions in self._unclean_recovery.due_requests(self.brokers.registrations, now_ms).items():
            endpoint = self.brokers.registrations[broker_id].endpoint
            self._effects.append(RequestLogEnds(endpoint, tuple(p.tp for p in partitions)))

    def _log_ends_read(self, event: LogEndsRead) -> None:
        found = self.brokers.registrations.get(event.broker_id)
        if found is None or found.incarnation != event.incarnation:
            return
        for tp, end in event.ends.items():
            partition = self.state.partition(tp)
            if partition is not None:
                self._unclean_recovery.on_log_end(event.broker_id, partition, end)
                self._states.mark((partition,))

    # --- responses of brokers --------------------------------------------------------------------------------------

    def _on_update_response(self, event: UpdateReplied, now_ms: int) -> None:
        replies = self._outbox.on_reply(event, self.state, now_ms)
        self._effects.extend(replies.reports)
        if replies.superseded:
            self.resigned = True
            self._effects.append(Resign(replies.superseded))
        for partition in replies.broken:
            partition.broken.add(event.broker_id)
        self._states.mark(replies.broken)
        self._raise_outdated(event.broker_id, replies.outdated)

    def _raise_outdated(self, broker_id: int, partitions: Iterable[ClusterPartition]) -> None:
        """Raise the leader epochs of partitions whose logs prove that their epoch was already assigned.

        This happens after ZooKeeper was restored from an older copy.

        The new epochs are above the highest leader epoch of all logs of the broker, which is in its registration.
        """
        registration = self.brokers.registrations.get(broker_id)
        if registration is None:
            return  # The broker receives everything again when it registers.
        highest = registration.seen.leader_epoch
        for partition in partitions:
            known = partition.stored.state.leader_epoch if partition.stored is not None else NO_EPOCH
            if highest - known > MOST_RAISED:
                detail = (
                    f"{partition.tp}: broker {broker_id} has records of leader epoch {highest}, more than {MOST_RAISED}"
                    f" above {known}: restore a newer copy of ZooKeeper's data, or run `sparklog zookeeper rebuild`"
                )
                self._effects.append(ControllerReport("controller.partitions.refused", detail, grave=True))
                continue
            partition.outdated = max(partition.outdated, highest, known)
        self._states.mark(partitions)

    # --- for operators and tests -----------------------------------------------------------------------------------

    def has_current_brokers(self, broker_id: int) -> bool:
        """Return whether this live broker has accepted the current table of live brokers."""
        return self._outbox.has_current_brokers(broker_id)

    def leaderless(self) -> int:
        """Return the number of partitions without a leader."""
        return sum(1 for p in self.state.partitions() if p.stored is None or p.stored.state.leader == NO_LEADER)

    def settled(self) -> bool:
        """Return whether nothing is left to do: no operation is in flight, and brokers have accepted all changes."""
        writing = any(p.pending is not None or p.rereading for p in self.state.partitions())
        writing = writing or any(t.pending is not None or t.rereading for t in self.state.topics.values())
        waiting = writing or self._states.any_marked or not self._pending_moves.idle
        return not waiting and self._leader_rebalance.idle and self._outbox.idle


def _may_be_moved(partition: ClusterPartition, leaving: Set[int]) -> bool:
    """Return whether the start or end of a broker's controlled shutdown may change a partition.

    It may if the partition is led by a broker in ``leaving``, has no leader, or is being reassigned. The controller
    does not change the ISR for a shutdown.
    """
    stored = partition.stored
    return stored is None or partition.move is not None or stored.state.leader in leaving
