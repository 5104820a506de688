"""Decisions about marked partitions: elections, recoveries, refused truncations, and finished reassignments.

``election.py`` has the rules for one state. This module chooses the rule that applies to a partition.
"""

from __future__ import annotations

from sparklog.controller import election, reassignments
from sparklog.controller.cluster_state import ClusterPartition, ClusterTopic
from sparklog.controller.effects import CREATE, ControllerReport, Effect, StateWrite, WriteTopic
from sparklog.controller.leader_rebalance import LeaderRebalance
from sparklog.controller.refused_truncations import RefusedTruncations
from sparklog.controller.unclean_recovery import UncleanRecovery
from sparklog.model import TopicPartition


class PartitionDecisions:
    """The part of ``Controller`` that chooses the next state of each partition.

    It also remembers for which partitions a wait for absent replicas was reported.
    """

    def __init__(
        self,
        leader_rebalance: LeaderRebalance,
        refused_truncations: RefusedTruncations,
        unclean_recovery: UncleanRecovery,
        *,
        effects: list[Effect],
    ) -> None:
        self._leader_rebalance = leader_rebalance
        self._refused_truncations = refused_truncations
        self._unclean_recovery = unclean_recovery
        self._effects = effects
        #: Partitions, with their leader epochs, whose wait for an absent replica was reported.
        self._waiting_reported: set[tuple[TopicPartition, int]] = set()
        self._waits_ended: set[tuple[TopicPartition, int]] = set()

    def decide(
        self, partition: ClusterPartition, liveness: election.IsrLiveness, now_ms: int
    ) -> election.ElectionDecision | None:
        """Return the decision that changes the partition's state, or None if the state stays for now."""
        stored = partition.stored
        if stored is not None and stored.state.leader_epoch <= partition.outdated:
            return election.raised(stored, liveness, partition.outdated)
        settled = self._refused_truncations.settle(partition, liveness)
        if settled is not None:
            self._effects.append(settled.report)
            return settled.decision
        if stored is not None and partition.suspects and not stored.state.disputed:
            isr = stored.state.isr
            if isr and all(m in liveness.live and m in partition.suspects for m in isr):
                if _may_lack_longest_log(partition, liveness) and self._must_wait(partition, liveness):
                    return None
                self._unclean_recovery.search(
                    partition, (*isr, *_possibly_longer_replicas(partition, liveness)), now_ms
                )
                ends = self._unclean_recovery.decided(partition, now_ms)
                return election.recover(stored, liveness, ends) if ends else None
        self._unclean_recovery.give_up(partition)
        return election.decide(
            partition.replicas,
            stored,
            liveness,
            suspects=partition.suspects,
            broken=partition.broken,
            copying=[r for r in partition.replicas if partition.move and r not in partition.move.original],
            unclean=self._leader_rebalance.may_be_unclean(partition),
        )

    def _must_wait(self, partition: ClusterPartition, liveness: election.IsrLiveness) -> bool:
        """Return whether a partition must wait for an absent replica. Report the wait once for each leader epoch.

        A request for an unclean election ends the wait. This is remembered, because the election comes later, after the
        brokers have returned their log ends.
        """
        assert partition.stored is not None
        waiting = (partition.tp, partition.stored.state.leader_epoch)
        if self._leader_rebalance.may_be_unclean(partition):
            self._waits_ended.add(waiting)
        if waiting in self._waits_ended or waiting in self._waiting_reported:
            return waiting not in self._waits_ended
        self._waiting_reported.add(waiting)
        away = [r for r in partition.replicas if r not in liveness.live]
        detail = (
            f"{partition.tp}: the in-sync replicas have lost the log, and brokers {away} may have records of it: start"
            " these brokers, or accept the loss of the records with"
            f" 'sparklog topics elect-leaders {partition.tp.topic}:{partition.tp.partition} --unclean'"
        )
        self._effects.append(ControllerReport("controller.partitions.waiting", detail, grave=True))
        return True


def _possibly_longer_replicas(partition: ClusterPartition, liveness: election.IsrLiveness) -> tuple[int, ...]:
    """Return the live replicas outside the ISR if every member of the ISR has lost its whole log, not only the tail.

    A replica that lags may have more records than a member that lost all records.
    """
    assert partition.stored is not None
    isr = partition.stored.state.isr
    if not partition.void.issuperset(isr):
        return ()
    return tuple(r for r in partition.replicas if r not in isr and r in liveness.live and r not in partition.broken)


def _may_lack_longest_log(partition: ClusterPartition, liveness: election.IsrLiveness) -> bool:
    """Return whether every member of the ISR has lost its whole log and a replica is absent.

    The absent replica may then have the longest log.
    """
    assert partition.stored is not None
    away = any(r not in liveness.live for r in partition.replicas)
    return away and partition.void.issuperset(partition.stored.state.isr)


class ReassignmentCompletion:
    """A collector of finished reassignments, for one pass of the controller over the marked partitions."""

    def __init__(self) -> None:
        self._found: dict[ClusterTopic, dict[ClusterPartition, StateWrite | None]] = {}

    def check(self, partition: ClusterPartition, liveness: election.IsrLiveness) -> None:
        """Add the partition if its reassignment is finished.

        Also add its final state, unless the reassignment has only changed the order of the replicas.

        Skip the partition while a write of its topic's metadata is in flight. The controller evaluates it again after
        the write.
        """
        move, topic = partition.move, partition.topic
        if move is None or topic.pending is not None or topic.rereading:
            return
        if reassignments.only_reorders(partition.replicas, move):
            self._found.setdefault(topic, {})[partition] = None
        elif partition.stored is not None:
            end = reassignments.finish(move, partition.stored, liveness, unfit=partition.unfit, min_isr=topic.min_isr)
            if end is not None:
                self._found.setdefault(topic, {})[partition] = state_write(partition, end)

    def orders(self) -> list[tuple[ClusterTopic, WriteTopic]]:
        """Return one write per topic. Each write ends the reassignments of at most ``MAX_FINISHED`` partitions."""
        orders = []
        for topic, found in self._found.items():
            ended = dict(list(found.items())[: reassignments.MAX_FINISHED])
            numbers = tuple(partition.tp.partition for partition in ended)
            record = reassignments.finished_record(topic.record, numbers)
            writes = tuple(write for write in ended.values() if write is not None)
            orders.append((topic, WriteTopic(record, topic.version, writes, numbers)))
        return orders


def state_write(partition: ClusterPartition, decision: election.ElectionDecision) -> StateWrite:
    stored = partition.stored
    return StateWrite(
        partition.tp,
        partition.topic.record.topic_id,
        decision.state,
        decision.leader_incarnation,
        CREATE if stored is None else stored.version,
        decision.reason,
    )
