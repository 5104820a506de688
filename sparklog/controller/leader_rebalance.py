"""Moves of leadership from live leaders: to preferred leaders, and on request.

``election.py`` has the elections after a leader fails. The elections here are not necessary: if one cannot be made now,
a later evaluation of the partition makes it. The objects of this module are not thread-safe: they are parts of
``Controller``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparklog.controller import election, reassignments
from sparklog.controller.cluster_state import ClusterPartition, ClusterState
from sparklog.controller.election_requests import OpenElectionRequests
from sparklog.controller.events import PREFERRED, UNCLEAN, ElectionRequested, ElectionsRead, Loaded

#: The number of leaderships moved in one round, and the pause before the next round if more have to move.
MAX_MOVED = 500
_NEXT_ROUND_MS = 1000


class LeaderRebalance:
    """The part of ``Controller`` that moves leaderships away from live leaders, and tracks election requests.

    If ``rebalance_interval_ms`` is 0, leaderships return to preferred leaders only on request.
    """

    def __init__(self, *, rebalance_interval_ms: int) -> None:
        self._requests = OpenElectionRequests()
        self._schedule = _Schedule(rebalance_interval_ms)
        #: Partitions whose leadership returns to the preferred leader when they are next evaluated.
        self._to_return: dict[ClusterPartition, None] = {}

    @property
    def deadline_ms(self) -> int | None:
        return self._schedule.deadline_ms

    @property
    def idle(self) -> bool:
        """Return whether there is no open election request."""
        return self._requests.idle

    def start(self, now_ms: int) -> None:
        self._schedule.start(now_ms)

    def on_requests(self, event: Loaded | ElectionsRead, state: ClusterState) -> list[ClusterPartition]:
        """Replace the known election requests by the requests of the event. Return the partitions to evaluate."""
        requests = event.elections if isinstance(event, Loaded) else event.requests
        return self._requests.read(requests, _finder(state))

    def due_returns(
        self, partitions: Iterable[ClusterPartition], liveness: election.IsrLiveness, now_ms: int
    ) -> list[ClusterPartition]:
        """Return at most ``MAX_MOVED`` partitions whose leadership should return to the preferred leader now.

        Return an empty list if the next round is not due yet.
        """
        if not self._schedule.due(now_ms):
            return []
        for partition in partitions:
            if partition.busy or partition.stored is None:
                continue
            if election.prefer(partition.replicas, partition.stored, liveness, partition.unfit) is not None:
                self._to_return[partition] = None
                if len(self._to_return) >= MAX_MOVED:
                    break
        self._schedule.on_round(now_ms, moved=len(self._to_return))
        return list(self._to_return)

    def may_be_unclean(self, partition: ClusterPartition) -> bool:
        return partition.topic.unclean or self._requests.wants(partition, UNCLEAN)

    def better_leader(
        self, partition: ClusterPartition, liveness: election.IsrLiveness
    ) -> election.ElectionDecision | None:
        """Return the decision that moves the leadership of a partition away from a live leader, or None if it may stay.

        The reason for a move is a reassignment, an election request, or the return to the preferred leader. If there is
        no reason, the open election requests for the partition are done. But a request for an unclean election stays
        open while a broker that has disappeared may still return and lead.
        """
        stored, move = partition.stored, partition.move
        to_return = partition in self._to_return
        self._to_return.pop(partition, None)
        decision = None
        if stored is not None and move is not None:
            decision = reassignments.next_leader(
                move, stored, liveness, unfit=partition.unfit, min_isr=partition.topic.min_isr
            )
        if stored is not None and decision is None and (to_return or self._requests.wants(partition, PREFERRED)):
            decision = election.prefer(partition.replicas, stored, liveness, partition.unfit)
        if decision is None:
            # A request for an unclean election stays open until it is clear whether a held member of the ISR returns.
            held = stored is not None and election.held_up(stored, liveness, partition.unfit)
            self._requests.satisfied(partition, but=UNCLEAN if held else "")
        return decision

    def elected_uncleanly(self, partition: ClusterPartition) -> None:
        """Remove the partition from requests for unclean elections, so that one request causes only one election."""
        self._requests.satisfied(partition, only=UNCLEAN)

    def forget(self, partition: ClusterPartition) -> None:
        self._requests.satisfied(partition)
        self._to_return.pop(partition, None)

    def settled(self) -> list[str]:
        """Return the names of the finished election requests. Each is returned only once."""
        return self._requests.settled()


def _finder(state: ClusterState) -> Callable[[ElectionRequested], Iterable[ClusterPartition]]:
    def find(request: ElectionRequested) -> Iterable[ClusterPartition]:
        if request.partitions is None:
            return state.partitions()
        found = (p for p in map(state.partition, request.partitions) if p is not None)
        return (p for p in found if request.topic_ids.get(p.tp.topic) in {None, p.topic.record.topic_id})

    return find


class _Schedule:
    """The times at which leaderships return to the preferred leaders; ``interval_ms`` 0 disables returns.

    After a broker was absent, other brokers lead its partitions. The move back interrupts each partition for a short
    time, so the partitions do not all move at once. Source: Kafka's ``auto.leader.rebalance.enable``.
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self.deadline_ms: int | None = None

    def start(self, now_ms: int) -> None:
        """Start a term. The first moves are one interval later, so that brokers have time to return."""
        if self._interval_ms:
            self.deadline_ms = now_ms + self._interval_ms

    def due(self, now_ms: int) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def on_round(self, now_ms: int, *, moved: int) -> None:
        pause_ms = min(_NEXT_ROUND_MS, self._interval_ms) if moved >= MAX_MOVED else self._interval_ms
        self.deadline_ms = now_ms + pause_ms
