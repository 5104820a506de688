"""Untrusted replicas: members of an ISR whose broker lost its page cache or logs, so that records may be missing.

The objects of this module are not thread-safe: they are parts of ``Controller``. If a broker returns and its logs may
lack records, all its replicas are untrusted. A replica is trusted again when the partition's ISR, read after the
broker's registration, does not contain the broker. Until then the replica is not elected while another member of the
ISR can be trusted. The partition's leader receives a table of live brokers without this broker, so that the leader
removes the broker from the ISR. When no replica of the broker is untrusted any more, the broker is trusted again. If
only some logs of a broker may lack records, only these replicas are untrusted. The broker then stays in the table of
live brokers, and the controller orders the leaders of these partitions to remove it from their ISRs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparklog.controller.cluster_state import ClusterPartition
from sparklog.model import BrokerRegistration


class UntrustedReplicas:
    """A tracker of the untrusted replicas of each broker.

    ``ClusterPartition.suspects`` and ``void`` have the same information by partition. Only this class changes them.
    """

    def __init__(self) -> None:
        self._by_broker: dict[int, set[ClusterPartition]] = {}
        #: Brokers of which only some replicas are untrusted.
        self._in_part: set[int] = set()
        #: Partitions whose leaders were ordered to remove a broker that may now stay in the ISR.
        self._cleared: dict[ClusterPartition, None] = {}

    def begin(
        self, broker_id: int, partitions: Iterable[ClusterPartition], *, in_part: bool = False, unread: bool = False
    ) -> list[ClusterPartition]:
        """Mark the broker's replicas of ``partitions`` as untrusted where the ISR may contain the broker.

        Return the partitions of these replicas. ``in_part`` means that the broker's other replicas remain trusted.
        ``unread`` means that the states of some partitions could not be read.
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
        """Forget which replicas of a broker are untrusted, because the broker failed or has a new incarnation."""
        for partition in self._by_broker.pop(broker_id, ()):
            self._clear(partition, broker_id)
        self._in_part.discard(broker_id)

    def next_cleared(self) -> list[ClusterPartition]:
        """Return the partitions whose leaders must learn that a broker may stay in the ISR after all.

        Each partition is returned only once.
        """
        if not self._cleared:
            return []
        cleared, self._cleared = self._cleared, {}
        return list(cleared)

    def review(self, partition: ClusterPartition) -> None:
        """Trust an untrusted replica again if it is certainly not in the partition's ISR.

        Such a replica first catches up with the leader before it returns to the ISR, so records that its log lacks do
        no harm. Do nothing while the state of the partition is unknown, or a read or write of the state is in flight.
        """
        if not partition.suspects or partition.rereading or partition.pending is not None or partition.stored is None:
            return
        isr = partition.stored.state.isr
        self._acquit(partition, [broker_id for broker_id in partition.suspects if broker_id not in isr])

    def drop(self, partition: ClusterPartition) -> None:
        """Trust all replicas of the partition again.

        The log of its new leader is now the reference, even if it lost records.
        """
        if partition.suspects:
            self._acquit(partition, list(partition.suspects))

    def forget(self, partition: ClusterPartition) -> None:
        """Remove a partition whose topic no longer exists. No broker is notified."""
        self.drop(partition)
        self._cleared.pop(partition, None)

    def open(self, live: Mapping[int, BrokerRegistration]) -> set[int]:
        """Return the brokers that are wholly untrusted and that a live leader may still have to remove from an ISR."""
        return {
            broker_id
            for broker_id, partitions in self._by_broker.items()
            if broker_id not in self._in_part
            and any(_led_by_another(partition, broker_id, live) for partition in partitions)
        }

    def settled(self) -> list[int]:
        """Return the brokers whose last untrusted replica is trusted again. Each broker is returned only once."""
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
    """Return whether another live broker may lead the partition, so that it can remove the broker from the ISR."""
    stored = partition.stored
    if stored is None or partition.pending is not None or partition.rereading:
        return True
    leader = live.get(stored.state.leader)
    return leader is not None and leader.broker_id != broker_id and leader.incarnation == stored.leader_incarnation
