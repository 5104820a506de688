"""The handling of refused truncations: a follower holds committed records that its leader lacks.

A refusal proves that the leader lost its log, or has an old copy of its log, and did not notice. The controller elects
the replica that refuses if its log is sound. If another replica then refuses to truncate for this new leader, the logs
contradict each other: the partition is disputed, and no replica leads it until an operator decides. A second replica
with a higher high watermark is no contradiction: it is elected next. The high watermark rises each time, so the
elections end. The objects of this module are not thread-safe: they are parts of ``Controller``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparklog.controller import election
from sparklog.controller.cluster_state import ClusterPartition, ClusterState
from sparklog.controller.effects import ControllerReport
from sparklog.controller.events import TruncationRefused
from sparklog.model import NO_LEADER, VersionedState


class SettledRefusal(NamedTuple):
    """The decision for a partition in which a replica refuses to truncate, and the report about the decision."""

    decision: election.ElectionDecision
    report: ControllerReport


class RefusedTruncations:
    """A tracker of the truncations that replicas currently refuse. A refusal lasts until its replica withdraws it."""

    def __init__(self) -> None:
        self._by_partition: dict[ClusterPartition, list[TruncationRefused]] = {}

    def read(self, refusals: Iterable[TruncationRefused], state: ClusterState) -> list[ClusterPartition]:
        """Replace the known refusals by ``refusals``. Return the partitions to which they belong."""
        self._by_partition = {}
        for refusal in refusals:
            partition = state.partition(refusal.tp)
            if partition is not None and partition.topic.record.topic_id == refusal.topic_id:
                self._by_partition.setdefault(partition, []).append(refusal)
        return list(self._by_partition)

    def forget(self, partition: ClusterPartition) -> None:
        """Remove the refusals of a partition whose topic no longer exists."""
        self._by_partition.pop(partition, None)

    def settle(self, partition: ClusterPartition, liveness: election.IsrLiveness) -> SettledRefusal | None:
        """Return the decision about refusals to truncate for the current leader, or None if no replica refuses."""
        stored, refusals = partition.stored, self._by_partition.get(partition)
        if stored is None or not refusals or stored.state.leader == NO_LEADER:
            return None
        state = stored.state
        counted = [
            refusal
            for refusal in refusals
            if refusal.leader_epoch == state.leader_epoch
            and liveness.live.get(refusal.broker_id) == refusal.incarnation
            and refusal.broker_id in partition.replicas
        ]
        if not counted:
            return None
        refusal = max(counted, key=lambda found: (found.broker_id not in partition.unfit, found.high_watermark))
        epoch, mark = partition.restored
        contradicts = epoch == state.leader_epoch and refusal.high_watermark <= mark
        sound = refusal.broker_id not in partition.unfit and not contradicts
        decision = election.settle(stored, liveness, refusal.broker_id, sound=sound)
        if sound:
            partition.restored = (decision.state.leader_epoch, refusal.high_watermark)
        return SettledRefusal(
            decision, ControllerReport("controller.cuts.refused", _words(stored, refusal, sound=sound), 1, grave=True)
        )


def _words(stored: VersionedState, refusal: TruncationRefused, *, sound: bool) -> str:
    leader, tp = stored.state.leader, refusal.tp
    found = (
        f"{tp}: broker {leader} leads and lacks committed records from offset {refusal.offset} to "
        f"{refusal.high_watermark}, which broker {refusal.broker_id} holds"
    )
    if sound:
        return f"{found} and does not truncate: broker {refusal.broker_id} leads now"
    return (
        f"{found}, and neither log is known to be complete: the partition is offline until you stop the brokers "
        f"whose copies you give up and run 'sparklog topics elect-leaders {tp.topic}:{tp.partition} --unclean'"
    )
