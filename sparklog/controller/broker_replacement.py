"""Replacement of the replicas of a broker that stays absent: when it starts, and where the new replicas go.

It is off unless ``broker.replace.after.ms`` is set, because copying all replicas of a broker costs more than waiting
for its return. The time of an absence starts again with each controller term and each reconnection to ZooKeeper,
because a controller that was disconnected itself does not know how long brokers were absent. If a broker returns before
the moves finish, the moves continue. The objects of this module are not thread-safe: they are parts of ``Controller``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from sparklog.controller import election
from sparklog.controller.broker_table import BrokerTable
from sparklog.controller.cluster_state import ClusterPartition, ClusterState, ClusterTopic
from sparklog.controller.effects import ControllerReport
from sparklog.controller.reassignments import MAX_FINISHED, moving_record
from sparklog.controller.replica_targets import ReplicaTargets
from sparklog.errors import BrokerError
from sparklog.model import BrokerEndpoint, TopicPartition, TopicRecord

#: The number of partitions in reassignment in the whole cluster above which no new move starts here. The limit does not
#: apply to a partition in reassignment whose target broker is lost. Such a partition gets another target, because it
#: would otherwise wait forever.
MAX_MOVING = 100
_ROUND_MS = 1000
#: The pause after a round in which no move could start.
_IDLE_MS = 10_000


class ReplacementPlan(NamedTuple):
    """The reassignments to start next. ``stuck`` are the brokers with replicas that no other broker can hold."""

    targets: dict[ClusterTopic, dict[int, tuple[int, ...]]]
    stuck: frozenset[int]

    @property
    def size(self) -> int:
        return sum(map(len, self.targets.values()))


class ReplacementBegun(NamedTuple):
    """The reassignments to start now, and reports about them for the operator.

    ``records`` has the metadata to write for each topic. The metadata contains the reassignments.
    """

    records: tuple[tuple[ClusterTopic, TopicRecord], ...] = ()
    reports: tuple[ControllerReport, ...] = ()


class BrokerReplacement:
    """A tracker of absent brokers that moves their replicas to other brokers after ``after_ms``.

    A negative ``after_ms`` disables it.
    """

    def __init__(self, after_ms: int) -> None:
        self._after_ms = after_ms
        self._away_since: dict[int, int] = {}
        self._reported_stuck: set[int] = set()
        self._round_at_ms = 0

    @property
    def deadline_ms(self) -> int | None:
        first = min(self._away_since.values(), default=None)
        return None if first is None else max(first + self._after_ms, self._round_at_ms)

    def begin(self, state: ClusterState, brokers: BrokerTable, now_ms: int) -> ReplacementBegun:
        """Return the reassignments to start now for the replicas of brokers that have been absent for ``after_ms``."""
        if self._after_ms < 0:
            return ReplacementBegun()
        self._note_absent(brokers.failed_among(state.hosts()), now_ms)
        lost = self._due(now_ms)
        if not lost:
            return ReplacementBegun()
        found = plan(state, lost, [live.endpoint for live in brokers.registrations.values()], brokers.liveness)
        reports = []
        if found.targets:
            detail = f"{found.size} replicas of brokers {sorted(lost)} are rebuilt on other brokers"
            reports.append(ControllerReport("controller.replicas.replaced", detail, found.size, grave=True))
        for broker_id in sorted(self._finish_round(found, now_ms)):
            detail = f"broker {broker_id} stays absent, and no other broker can hold its replicas"
            reports.append(ControllerReport("controller.replicas.irreplaceable", detail, grave=True))
        records = [(topic, moving_record(topic.record, targets)) for topic, targets in found.targets.items()]
        return ReplacementBegun(tuple(records), tuple(reports))

    def _note_absent(self, away: Collection[int], now_ms: int) -> None:
        """Record which brokers with replicas have failed; ``away`` has all of them."""
        self._away_since = {broker_id: self._away_since.get(broker_id, now_ms) for broker_id in away}
        self._reported_stuck.intersection_update(away)

    def start_over(self) -> None:
        """Restart the measurement of all absences: the time before this call does not count.

        A controller that was disconnected from ZooKeeper does not know how long brokers were absent.
        """
        self._away_since = {}

    def _due(self, now_ms: int) -> frozenset[int]:
        """Return the brokers to replace now."""
        if now_ms < self._round_at_ms:
            return frozenset()
        return frozenset(i for i, since in self._away_since.items() if now_ms >= since + self._after_ms)

    def _finish_round(self, plan: ReplacementPlan, now_ms: int) -> frozenset[int]:
        """Finish a round; return the brokers with replicas that no other broker can hold, each once per absence."""
        self._round_at_ms = now_ms + (_ROUND_MS if plan.targets else _IDLE_MS)
        news = plan.stuck - self._reported_stuck
        self._reported_stuck |= news
        return news


def plan(
    state: ClusterState, lost: frozenset[int], brokers: Iterable[BrokerEndpoint], liveness: election.IsrLiveness
) -> ReplacementPlan:
    """Return the next reassignments, which move replicas from the ``lost`` brokers to other ``brokers``.

    Only partitions with a live leader are reassigned, because new replicas copy from the leader.
    """
    candidates = [broker for broker in brokers if broker.broker_id not in liveness.stopping]
    wanted = {p.tp: p.move.target if p.move else p.replicas for p in state.partitions()}
    choice = ReplicaTargets(candidates, wanted, without=lost)
    targets: dict[ClusterTopic, dict[int, tuple[int, ...]]] = {}
    stuck: set[int] = set()
    free = MAX_MOVING - len(state.moving)
    for partition in dict.fromkeys(p for broker_id in sorted(lost) for p in state.hosted(broker_id)):
        if free <= 0 and partition.move is None:
            continue
        gone = lost.intersection(wanted[partition.tp])
        if not gone or not _ready(partition, liveness) or len(targets.get(partition.topic, ())) >= MAX_FINISHED:
            continue
        try:
            target = _in_place(wanted[partition.tp], lost, choice, partition.tp)
        except BrokerError:
            stuck |= gone
            continue
        targets.setdefault(partition.topic, {})[partition.tp.partition] = target
        free -= partition.move is None
    return ReplacementPlan(targets, frozenset(stuck))


def _ready(partition: ClusterPartition, liveness: election.IsrLiveness) -> bool:
    topic = partition.topic
    if partition.busy or topic.pending is not None or topic.rereading or partition.stored is None:
        return False
    return election.leader_remains(partition.stored, liveness, partition.unfit)


def _in_place(
    replicas: tuple[int, ...], lost: frozenset[int], choice: ReplicaTargets, tp: TopicPartition
) -> tuple[int, ...]:
    """Return the target with each new broker in the position of the lost one, so that leaderships stay spread."""
    target = choice.of(tp, replicas, len(replicas))
    added = iter([broker_id for broker_id in target if broker_id not in replicas])
    return tuple(next(added) if broker_id in lost else broker_id for broker_id in replicas)
