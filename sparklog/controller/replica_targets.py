"""The target replicas of partitions for a new replication factor, or to move all replicas off a broker.

The module is pure and deterministic. Replicas that may stay keep their order. New replicas follow. The choice of the
broker for a new replica prefers a host without a replica of the partition, then a rack without one, then the lowest
load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition


class ReplicaTargets:
    """A planner that chooses the target replicas of partitions. It counts the replicas of each broker."""

    def __init__(
        self,
        brokers: Sequence[BrokerEndpoint],
        replicas: Mapping[TopicPartition, Sequence[int]],
        *,
        without: Collection[int] = (),
    ) -> None:
        """Count the ``replicas`` of all partitions on the live ``brokers``. Brokers in ``without`` get no replicas."""
        self._brokers = [
            broker for broker in sorted(brokers, key=lambda b: b.broker_id) if broker.broker_id not in without
        ]
        self._known = {broker.broker_id: broker for broker in brokers}
        self._without = frozenset(without)
        self._load = Counter(broker_id for holders in replicas.values() for broker_id in holders)

    def of(self, tp: TopicPartition, replicas: Sequence[int], replication_factor: int) -> tuple[int, ...]:
        """Return the target replicas of one partition.

        The targets equal ``replicas`` if no replica has to move and ``replicas`` has ``replication_factor`` brokers.

        Raises:
            BrokerError: INVALID_REPLICATION_FACTOR, because ``replication_factor`` is below 1 or there are not enough
                brokers.
        """
        kept = [replica for replica in replicas if replica not in self._without]
        while len(kept) > max(replication_factor, 0):
            kept.remove(self._least_needed(kept))
        while len(kept) < replication_factor:
            kept.append(self._best_addition(tp, kept, replication_factor))
        target = tuple(kept)
        if not target:
            raise BrokerError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"{tp}: replication factor {replication_factor} found, expected 1 or more",
            )
        self._load.subtract(replicas)
        self._load.update(target)
        return target

    def _best_addition(self, tp: TopicPartition, kept: Sequence[int], replication_factor: int) -> int:
        hosts = {self._known[replica].host for replica in kept if replica in self._known}
        racks = {self._known[replica].rack for replica in kept if replica in self._known} - {None}
        free = [broker for broker in self._brokers if broker.broker_id not in kept]
        if not free:
            raise BrokerError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"{tp} needs {replication_factor} replicas; brokers that may hold one: "
                f"{sorted({*kept, *(broker.broker_id for broker in self._brokers)})}",
            )
        best = min(free, key=lambda b: (b.host in hosts, b.rack in racks, self._load[b.broker_id], b.broker_id))
        return best.broker_id

    def _least_needed(self, kept: Sequence[int]) -> int:
        """Return a replica to drop.

        A replica on a broker that is not live is dropped first, then one that shares its host, then the one on the most
        loaded broker. The first live replica is the leader and is dropped last.
        """

        def need(replica: int) -> tuple[bool, bool, bool, int]:
            broker = self._known.get(replica)
            first = broker is not None and replica == next(r for r in kept if r in self._known)
            shared = (
                broker is not None
                and sum(other in self._known and self._known[other].host == broker.host for other in kept) > 1
            )
            return (first, broker is not None, not shared, -self._load[replica])

        return min(reversed(kept), key=need)
