"""Where a topic's replicas go: different hosts first, then racks, then brokers; leaders and replicas evenly.

Pure and deterministic: the same brokers and the same load give the same assignment. The first replica of each
partition is its preferred leader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint

MAX_PARTITIONS = 100_000

Assignment = tuple[tuple[int, ...], ...]


class Placement(NamedTuple):
    """``warning`` says why the assignment is weaker than asked for; empty when it is not."""

    assignment: Assignment
    warning: str = ""


class Load(NamedTuple):
    """What brokers carry already: broker id to number of partitions led, and of replicas held."""

    leaders: Mapping[int, int] = {}
    replicas: Mapping[int, int] = {}


def place(
    brokers: Sequence[BrokerEndpoint], *, partitions: int, replication_factor: int, load: Load | None = None
) -> Placement:
    """Assign ``partitions`` times ``replication_factor`` replicas to live brokers.

    Raises:
        BrokerError: INVALID_REPLICATION_FACTOR, INVALID_PARTITIONS.
    """
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise BrokerError(
            ErrorCode.INVALID_PARTITIONS, f"found {partitions} partitions; expected 1 to {MAX_PARTITIONS}"
        )
    if not 1 <= replication_factor <= len(brokers):
        raise BrokerError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"found replication factor {replication_factor}; expected 1 to {len(brokers)}, the live brokers"
            f"{': ' + ', '.join(str(broker.broker_id) for broker in brokers) if brokers else ''}",
        )
    placer = _Placer(sorted(brokers, key=lambda broker: broker.broker_id), load or Load())
    assignment = tuple(placer.place_one(replication_factor) for _ in range(partitions))
    return Placement(assignment, shared_hosts(assignment, brokers))


def check_assignment(assignment: Assignment, brokers: Sequence[BrokerEndpoint]) -> Placement:
    """Check an assignment given by the user; same warning as ``place``.

    Raises:
        BrokerError: INVALID_REPLICA_ASSIGNMENT.
    """
    known = {broker.broker_id for broker in brokers}
    for partition, replicas in enumerate(assignment):
        reason = ""
        if not replicas:
            reason = "has no replica"
        elif len(set(replicas)) != len(replicas):
            reason = f"names a broker twice: {list(replicas)}"
        elif unknown := sorted(set(replicas) - known):
            reason = f"names brokers {unknown}; live are {sorted(known)}"
        elif len(replicas) != len(assignment[0]):
            reason = f"has {len(replicas)} replicas; partition 0 has {len(assignment[0])}"
        if reason:
            raise BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"partition {partition} {reason}")
    return Placement(assignment, shared_hosts(assignment, brokers))


def shared_hosts(assignment: Assignment, brokers: Sequence[BrokerEndpoint]) -> str:
    """A sentence when replicas of one partition share a host, else empty."""
    host_of = {broker.broker_id: broker.host for broker in brokers}
    sharing = [
        partition
        for partition, replicas in enumerate(assignment)
        if len({host_of.get(broker_id, str(broker_id)) for broker_id in replicas}) < len(replicas)
    ]
    if not sharing:
        return ""
    hosts = len(set(host_of.values()))
    return (
        f"replicas of {len(sharing)} of {len(assignment)} partitions share a host: replication factor "
        f"{len(assignment[sharing[0]])}, live hosts {hosts}; losing one host can lose acknowledged records"
    )


class _Placer:
    """Greedy, partition by partition: the lightest broker that adds a host, else a rack, else a broker."""

    def __init__(self, brokers: Sequence[BrokerEndpoint], load: Load) -> None:
        self._brokers = brokers
        self._leaders = Counter({b.broker_id: load.leaders.get(b.broker_id, 0) for b in brokers})
        self._replicas = Counter({b.broker_id: load.replicas.get(b.broker_id, 0) for b in brokers})
        #: (leader, follower): spread, so that a dead leader's partitions do not all fall to one successor.
        self._pairs: Counter[tuple[int, int]] = Counter()

    def place_one(self, replication_factor: int) -> tuple[int, ...]:
        leader = min(
            self._brokers, key=lambda b: (self._leaders[b.broker_id], self._replicas[b.broker_id], b.broker_id)
        )
        chosen = [leader]
        while len(chosen) < replication_factor:
            chosen.append(self._next_follower(leader.broker_id, chosen))
        replicas = tuple(broker.broker_id for broker in chosen)
        self._leaders[leader.broker_id] += 1
        self._replicas.update(replicas)
        self._pairs.update((leader.broker_id, follower) for follower in replicas[1:2])
        return replicas

    def _next_follower(self, leader: int, chosen: Sequence[BrokerEndpoint]) -> BrokerEndpoint:
        taken = {broker.broker_id for broker in chosen}
        hosts = {broker.host for broker in chosen}
        racks = {broker.rack for broker in chosen}

        def weight(broker: BrokerEndpoint) -> tuple[bool, bool, int, int, int]:
            broker_id = broker.broker_id
            return (
                broker.host in hosts,
                broker.rack is not None and broker.rack in racks,
                self._replicas[broker_id],
                self._pairs[leader, broker_id],
                (broker_id - leader) % 1_000_003,  # ties: the next id round the ring, not always the lowest
            )

        return min((broker for broker in self._brokers if broker.broker_id not in taken), key=weight)
