"""The controller's reads and writes of partition states in ZooKeeper, and its handling of states that leaders wrote.

A write that fails because the node has another version returns the node's state. After a write without a response the
controller reads the node. In both cases it evaluates the partition again. The objects of this module are not
thread-safe: they are parts of ``Controller``. At most one write per partition is in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from sparklog.controller import election
from sparklog.controller.broker_table import BrokerTable
from sparklog.controller.cluster_state import ClusterPartition, ClusterState, ClusterTopic
from sparklog.controller.effects import ControllerReport, Effect, ReadStates, ReadTopic, StateWrite
from sparklog.controller.events import StatesRefused, StatesReported, StatesUnknown, StatesWritten
from sparklog.controller.leader_rebalance import LeaderRebalance
from sparklog.controller.outbox import Outbox
from sparklog.controller.untrusted_replicas import UntrustedReplicas
from sparklog.model import TopicPartition, VersionedState

#: The number of partitions that one step evaluates, which takes about 20 ms.
AT_ONCE = 2000


class PartitionStates:
    """The part of ``Controller`` that requests reads and writes of partition states, and handles their results.

    It also has the set of partitions that are marked for evaluation.
    """

    def __init__(
        self,
        state: ClusterState,
        brokers: BrokerTable,
        *,
        outbox: Outbox,
        untrusted: UntrustedReplicas,
        leader_rebalance: LeaderRebalance,
        effects: list[Effect],
    ) -> None:
        """Create the part of the controller. It appends to ``effects``, the list of the current step."""
        #: Whether ZooKeeper is reachable. While it is not, the controller requests nothing.
        self.connected = True
        #: The number of writes in flight.
        self.writing = 0
        self._state = state
        self._brokers = brokers
        self._outbox = outbox
        self._untrusted = untrusted
        self._leader_rebalance = leader_rebalance
        self._effects = effects
        #: The partitions to evaluate.
        self._marked: dict[ClusterPartition, None] = {}

    # --- marked partitions -----------------------------------------------------------------------------------------

    def mark(self, partitions: Iterable[ClusterPartition]) -> None:
        """Mark partitions for evaluation, because a change may concern them.

        The controller evaluates them in this step or a later one.
        """
        self._marked.update(dict.fromkeys(partitions))

    def unmark(self, partition: ClusterPartition) -> None:
        self._marked.pop(partition, None)

    @property
    def any_marked(self) -> bool:
        return bool(self._marked)

    def next_marked(self) -> list[ClusterPartition]:
        """Return and unmark the partitions that have been marked for the longest time, at most ``AT_ONCE``."""
        marked = list(self._marked) if len(self._marked) <= AT_ONCE else list(islice(self._marked, AT_ONCE))
        if len(marked) == len(self._marked):
            self._marked = {}
        else:
            for partition in marked:
                del self._marked[partition]
        return marked

    # --- writes ----------------------------------------------------------------------------------------------------

    def begin_write(self, partition: ClusterPartition, write: StateWrite) -> None:
        partition.pending = write
        self.writing += 1

    def end_write(self, partition: ClusterPartition) -> None:
        if partition.pending is not None:
            partition.pending = None
            self.writing -= 1

    def on_written(self, event: StatesWritten, now_ms: int) -> None:
        reasons: Counter[str] = Counter()
        changed = []
        moved = []
        for tp, version in event.versions.items():
            partition = self._state.partition(tp)
            if partition is None or partition.pending is None:
                continue
            write = partition.pending
            self.end_write(partition)
            reasons[write.reason] += 1
            if write.reason in {election.UNCLEAN, election.RECOVERED}:
                self._untrusted.drop(partition)
                self._leader_rebalance.elected_uncleanly(partition)
            before = partition.stored
            self.adopt(partition, VersionedState(write.state, version, write.leader_incarnation))
            # Only a stopping leader may receive its successor last, because it acknowledges no record before its
            # followers have it. Any other leader could meanwhile accept records that are truncated later. (An orphan
            # that requests a controlled shutdown counts as stopping too, but still acknowledges acks=1. Such records
            # may be truncated.)
            if write.reason == election.MOVED and before is not None and before.state.leader in self._brokers.stopping:
                moved.append((partition, before.state.leader))
            else:
                changed.append(partition)
        self._outbox.partitions_changed(changed)
        self._outbox.leaders_moved(moved, now_ms)
        for reason, count in reasons.items():
            detail = f"{count} of {len(event.versions)} partitions, {next(iter(event.versions))} among them"
            grave = reason in {*election.LOSSY, election.LEADERLESS, election.RESTORED, election.DISPUTED}
            self._effects.append(ControllerReport(f"controller.partitions.{reason}", detail, count, grave))

    def on_refused(self, event: StatesRefused) -> None:
        for tp in event.found:
            partition = self._state.partition(tp)
            if partition is not None:
                self.end_write(partition)
        # If the node does not exist, the topic is gone, and a separate event reports that. Do not write again.
        self._effects.append(
            ControllerReport("controller.writes.refused", f"{next(iter(event.found), None)} first", len(event.found))
        )
        self.found((tp, stored) for tp, stored in event.found.items() if stored is not None)

    def on_unknown(self, event: StatesUnknown) -> None:
        """Request reads of the nodes whose writes got no response, because each write may have succeeded.

        The controller decides nothing about these partitions until it has the results of the reads.
        """
        partitions = [p for p in map(self._state.partition, event.partitions) if p is not None]
        for partition in partitions:
            self.end_write(partition)
        self.reread(partitions)

    # --- stored states ---------------------------------------------------------------------------------------------

    def found(self, states: Iterable[tuple[TopicPartition, VersionedState | None]]) -> None:
        changed = []
        for tp, stored in states:
            partition = self._state.partition(tp)
            if partition is None:
                continue
            if stored is not None and self._is_epoch_uncertain(partition, stored):
                partition.rereading = True
                partition.found = stored
                partition.topic.rereading = True
                if self.connected:
                    self._effects.append(ReadTopic(tp.topic))
                continue
            partition.rereading = False
            if stored is not None and self.adopt(partition, stored):
                changed.append(partition)
            self._untrusted.review(partition)
            self.mark((partition,))
        self._outbox.partitions_changed(changed)

    def on_reported(self, event: StatesReported, now_ms: int) -> None:
        """Store the reported states that are newer than the known states.

        A report does not show later writes. If a read of a partition is in flight, the controller therefore still waits
        for it.
        """
        changed = []
        isrs = []
        uncertain = []
        for reported in event.topics:
            topic = self._state.topics.get(reported.topic)
            if topic is None or topic.record.topic_id != reported.topic_id:
                continue
            for number, stored in reported.states.items():
                partition = topic.partitions[number] if 0 <= number < len(topic.partitions) else None
                if partition is None or (partition.stored is not None and stored.version <= partition.stored.version):
                    continue
                if self._is_epoch_uncertain(partition, stored):
                    uncertain.append(partition)
                    continue
                if not _changes_only_isr(partition, stored):
                    changed.append(partition)
                else:
                    isrs.append(partition)
                    if self._is_led(stored) and not partition.unfit:
                        self._state.store(partition, stored)  # The leader stays right.
                        continue
                self.adopt(partition, stored)
        self.reread(uncertain)
        self._outbox.partitions_changed(changed)
        self._outbox.isrs_changed(isrs, now_ms)

    def adopt_found(self, topic: ClusterTopic) -> None:
        """Store the states that were read earlier, but had to wait until the topic's metadata was read."""
        changed = []
        for partition in topic.partitions:
            stored, partition.found = partition.found, None
            if stored is not None:
                partition.rereading = False
                if self.adopt(partition, stored):
                    changed.append(partition)
        self._outbox.partitions_changed(changed)

    def adopt(self, partition: ClusterPartition, stored: VersionedState) -> bool:
        """Store a state if it is newer than the known one. Return whether it is."""
        newer = partition.stored is None or stored.version > partition.stored.version
        if newer:
            self._state.store(partition, stored)
        self._untrusted.review(partition)
        self.mark((partition,))
        return newer

    def reread(self, partitions: Iterable[ClusterPartition]) -> None:
        tps = []
        for partition in partitions:
            partition.rereading = True
            tps.append(partition.tp)
        if tps and self.connected:
            self._effects.append(ReadStates(tuple(tps)))

    def has_settled_leader(self, partition: ClusterPartition) -> bool:
        """Return whether the leader is live and not stopping, every replica may lead, and no reassignment is open.

        The failure of a follower's broker then requires no decision about the partition.
        """
        stored = partition.stored
        return stored is not None and partition.move is None and not partition.unfit and self._is_led(stored)

    def awaits_successor(self, partition: ClusterPartition) -> bool:
        """Return whether the leader is live but stopping, every replica may lead, and no reassignment is open.

        The partition then only needs a new leader, and may wait in the queue of ``PendingMoves``.
        """
        stored = partition.stored
        if stored is None or partition.move is not None or partition.unfit:
            return False
        return stored.state.leader in self._brokers.stopping and self._is_at_work(stored)

    def _is_led(self, stored: VersionedState) -> bool:
        return self._is_at_work(stored) and stored.state.leader not in self._brokers.stopping

    def _is_at_work(self, stored: VersionedState) -> bool:
        found = self._brokers.registrations.get(stored.state.leader)
        return found is not None and found.incarnation == stored.leader_incarnation

    @staticmethod
    def _is_epoch_uncertain(partition: ClusterPartition, stored: VersionedState) -> bool:
        """Return whether a reassignment may have ended or started without this controller's knowledge.

        Its leader epoch is newer than the known one. Brokers must not receive the old replicas with the new epoch, or
        the leader could add a former replica to the ISR.
        """
        known = partition.stored
        return partition.move is not None and known is not None and stored.state.leader_epoch > known.state.leader_epoch


def _changes_only_isr(partition: ClusterPartition, stored: VersionedState) -> bool:
    """Return whether the new state differs from the known one only in the ISR.

    The leader's process and epoch are then the same, and no replica waits for its removal from the ISR.
    """
    known = partition.stored
    return (
        known is not None
        and partition.move is None
        and not partition.void
        and stored.state.leader == known.state.leader
        and stored.state.leader_epoch == known.state.leader_epoch
        and stored.leader_incarnation == known.leader_incarnation
        and all(member in partition.replicas for member in known.state.isr)
    )
