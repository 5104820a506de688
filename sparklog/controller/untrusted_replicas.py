"""ISR memberships that are void because their broker lost its page cache or logs.

Mutable, owned by one ``Controller``. A broker that returns and cannot vouch for its logs is untrusted on every
partition that it hosts, until the partition's ISR, read after its registration, does not contain it. Until then its
replica is not elected while another member can be trusted, and the partition's leader receives a table without the
broker, so that it removes the broker from the ISR. When no partition is left, the broker is trusted like any other. A
broker that doubts some of its logs is untrusted on these alone: it stays in the table, and the leaders of these
partitions are ordered to remove it from their ISRs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparklog.controller.cluster_state import ClusterPartition
from sparklog.model import BrokerRegistration


class UntrustedReplicas:
    """The untrusted replicas by broker.

    ``suspects`` and ``void`` of ``ClusterPartition`` have the same facts by partition; only this class changes them.
    """

    def __init__(self) -> None:
        self._by_broker: dict[int, set[ClusterPartition]] = {}
        #: Brokers that doubt only some of their logs.
        self._in_part: set[int] = set()
        #: Partitions whose leaders have received, or are about to receive, the order to remove a broker that may stay.
        self._cleared: dict[ClusterPartition, None] = {}

    def begin(
        self, broker_id: int, partitions: Iterable[ClusterPartition], *, in_part: bool = False, unread: bool = False
    ) -> list[ClusterPartition]:
        """Distrust the broker on those of ``partitions`` whose ISR may contain it, and return them.

        ``in_part`` means that it vouches for its other logs.
        """
        suspected = [p for p in partitions if unread or p.stored is not None or p.pending is not None]
        self._by_broker[broker_id] = set(suspected)
        if in_part:
            self._in_part.add(broker_id)
        for partition in suspected:
            partition.suspects.add(broker_id)
            if in_part:
                partition.void.add(broker_id)
        return suspected

    def end(self, broker_id: int) -> None:
        """End all distrust of a broker that is gone or has a new incarnation."""
        for partition in self._by_broker.pop(broker_id, ()):
            self._clear(partition, broker_id)
        self._in_part.discard(broker_id)

    def next_cleared(self) -> list[ClusterPartition]:
        """Return the partitions whose leaders must learn that a broker may stay in the ISR."""
        if not self._cleared:
            return []
        cleared, self._cleared = self._cleared, {}
        return list(cleared)

    def review(self, partition: ClusterPartition) -> None:
        """End the distrust that the partition's state, if it is known for certain, shows to be settled."""
        if not partition.suspects or partition.rereading or partition.pending is not None or partition.stored is None:
            return
        isr = partition.stored.state.isr
        self._acquit(partition, [broker_id for broker_id in partition.suspects if broker_id not in isr])

    def drop(self, partition: ClusterPartition) -> None:
        """End all distrust on the partition: its new leader's log is the reference, whatever it lost."""
        if partition.suspects:
            self._acquit(partition, list(partition.suspects))

    def forget(self, partition: ClusterPartition) -> None:
        """Drop a partition whose topic is gone; brokers need no notice."""
        self.drop(partition)
        self._cleared.pop(partition, None)

    def open(self, live: Mapping[int, BrokerRegistration]) -> set[int]:
        """Return the brokers with void ISR memberships that a live leader can remove."""
        return {
            broker_id
            for broker_id, partitions in self._by_broker.items()
            if broker_id not in self._in_part
            and any(_led_by_another(partition, broker_id, live) for partition in partitions)
        }

    def settled(self) -> list[int]:
        """Return the brokers that are untrusted on no partition any more; each is returned once."""
        clear = [broker_id for broker_id, partitions in self._by_broker.items() if not partitions]
        for broker_id in clear:
            del self._by_broker[broker_id]
            self._in_part.discard(broker_id)
        return clear

    def _acquit(self, partition: ClusterPartition, brokers: Iterable[int]) -> None:
        for broker_id in brokers:
            self._clear(partition, broker_id)
            suspected = self._by_broker.get(broker_id)
            if suspected is not None:
                suspected.discard(partition)

    def _clear(self, partition: ClusterPartition, broker_id: int) -> None:
        partition.suspects.discard(broker_id)
        if broker_id in partition.void:
            partition.void.discard(broker_id)
            self._cleared[partition] = None


def _led_by_another(partition: ClusterPartition, broker_id: int, live: Mapping[int, BrokerRegistration]) -> bool:
    """Return whether a live leader may change the ISR, as far as is known."""
    stored = partition.stored
    if stored is None or partition.pending is not None or partition.rereading:
        return True
    leader = live.get(stored.state.leader)
    return leader is not None and leader.broker_id != broker_id and leader.incarnation == stored.leader_incarnation
