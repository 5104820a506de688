"""Replicas of a broker that stays away are rebuilt elsewhere: since when it is away, and what takes its place.

Off unless ``broker.replace.after.ms`` is set: copying everything a broker held costs more than waiting for it to come
back. The clock starts anew with a term and with each reconnection, for a controller that was cut off itself cannot say
how long others were. A broker that returns half-way finds the moves going on. Mutable, owned by one ``Controller``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from sparklog.controller import election
from sparklog.controller.broker_table import BrokerTable
from sparklog.controller.cluster_state import ClusterState, Partition, Topic
from sparklog.controller.effects import Report
from sparklog.controller.reassignments import MAX_FINISHED, moving_record
from sparklog.controller.replica_targets import ReplicaTargets
from sparklog.errors import BrokerError
from sparklog.model import BrokerEndpoint, TopicPartition, TopicRecord

#: Partitions of the whole cluster being moved at a time, for whatever reason, beyond which none is begun here. One that
#: moves already is turned from a lost target however many there are: else they would all wait for it for ever.
MAX_MOVING = 100
_ROUND_MS = 1000
#: After a round in which nothing could be begun.
_IDLE_MS = 10_000


class ReplacementPlan(NamedTuple):
    """Moves to begin, by topic and partition number; brokers for some of whose replicas there is no other place."""

    targets: dict[Topic, dict[int, tuple[int, ...]]]
    stuck: frozenset[int]

    @property
    def size(self) -> int:
        return sum(map(len, self.targets.values()))


class ReplacementBegun(NamedTuple):
    """Records of topics to be written, with the moves in them, and what is to be said of it."""

    records: tuple[tuple[Topic, TopicRecord], ...] = ()
    reports: tuple[Report, ...] = ()


class BrokerReplacement:
    """``after_ms`` negative: never."""

    def __init__(self, after_ms: int) -> None:
        self._after_ms = after_ms
        self._away_since: dict[int, int] = {}
        self._told_stuck: set[int] = set()
        self._round_at_ms = 0

    @property
    def deadline_ms(self) -> int | None:
        first = min(self._away_since.values(), default=None)
        return None if first is None else max(first + self._after_ms, self._round_at_ms)

    def begin(self, state: ClusterState, brokers: BrokerTable, now_ms: int) -> ReplacementBegun:
        """Begin to rebuild what brokers held that have been away for too long."""
        if self._after_ms < 0:
            return ReplacementBegun()
        self._observe(brokers.given_up(state.hosts()), now_ms)
        lost = self._due(now_ms)
        if not lost:
            return ReplacementBegun()
        found = plan(state, lost, [live.endpoint for live in brokers.registrations.values()], brokers.standing)
        reports = []
        if found.targets:
            detail = f"{found.size} replicas of brokers {sorted(lost)} are rebuilt elsewhere"
            reports.append(Report("controller.replicas.replaced", detail, found.size, grave=True))
        for broker_id in sorted(self._planned(found, now_ms)):
            detail = f"broker {broker_id} stays away, and there is no other broker for its replicas"
            reports.append(Report("controller.replicas.irreplaceable", detail, grave=True))
        records = [(topic, moving_record(topic.record, targets)) for topic, targets in found.targets.items()]
        return ReplacementBegun(tuple(records), tuple(reports))

    def _observe(self, away: Collection[int], now_ms: int) -> None:
        """All brokers that hold replicas and have been given up."""
        self._away_since = {broker_id: self._away_since.get(broker_id, now_ms) for broker_id in away}
        self._told_stuck.intersection_update(away)

    def start_over(self) -> None:
        """Nothing is known of who was away how long."""
        self._away_since = {}

    def _due(self, now_ms: int) -> frozenset[int]:
        """Brokers to be replaced now."""
        if now_ms < self._round_at_ms:
            return frozenset()
        return frozenset(i for i, since in self._away_since.items() if now_ms >= since + self._after_ms)

    def _planned(self, plan: ReplacementPlan, now_ms: int) -> frozenset[int]:
        """A round is over. Returns brokers that are stuck, each once for as long as it is away."""
        self._round_at_ms = now_ms + (_ROUND_MS if plan.targets else _IDLE_MS)
        news = plan.stuck - self._told_stuck
        self._told_stuck |= news
        return news


def plan(
    state: ClusterState, lost: frozenset[int], brokers: Iterable[BrokerEndpoint], standing: election.IsrLiveness
) -> ReplacementPlan:
    """The next moves away from ``lost`` brokers to ``brokers``: of partitions that are led by somebody, for there is
    nobody else to copy from, and perhaps nobody else who has everything."""
    candidates = [broker for broker in brokers if broker.broker_id not in standing.stopping]
    wanted = {p.tp: p.move.target if p.move else p.replicas for p in state.partitions()}
    choice = ReplicaTargets(candidates, wanted, without=lost)
    targets: dict[Topic, dict[int, tuple[int, ...]]] = {}
    stuck: set[int] = set()
    free = MAX_MOVING - len(state.moving)
    for partition in dict.fromkeys(p for broker_id in sorted(lost) for p in state.hosted(broker_id)):
        if free <= 0 and partition.move is None:
            continue
        gone = lost.intersection(wanted[partition.tp])
        if not gone or not _ready(partition, standing) or len(targets.get(partition.topic, ())) >= MAX_FINISHED:
            continue
        try:
            target = _in_place(wanted[partition.tp], lost, choice, partition.tp)
        except BrokerError:
            stuck |= gone
            continue
        targets.setdefault(partition.topic, {})[partition.tp.partition] = target
        free -= partition.move is None
    return ReplacementPlan(targets, frozenset(stuck))


def _ready(partition: Partition, standing: election.IsrLiveness) -> bool:
    topic = partition.topic
    if partition.busy or topic.pending is not None or topic.rereading or partition.stored is None:
        return False
    return election.stands(partition.stored, standing, partition.unfit)


def _in_place(
    replicas: tuple[int, ...], lost: frozenset[int], choice: ReplicaTargets, tp: TopicPartition
) -> tuple[int, ...]:
    """Whoever comes instead takes the place of who went: leaderships stay spread as they were."""
    target = choice.of(tp, replicas, len(replicas))
    added = iter([broker_id for broker_id in target if broker_id not in replicas])
    return tuple(next(added) if broker_id in lost else broker_id for broker_id in replicas)
