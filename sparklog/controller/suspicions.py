"""Which in-sync claims are void because their broker lost its page cache. Mutable, owned by one ``Controller``.

A broker that comes back unable to vouch for its logs is suspected on every partition it hosts, until the partition's
ISR, read after its registration, is seen without it. Until then its replica is not elected while another member can
be trusted, and the partition's leader is told that the broker is away, so that it takes it out of the ISR. Once no
partition is left the broker is trusted like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparklog.controller.cluster_state import Partition
from sparklog.model import BrokerRegistration


class Suspicions:
    """``Partition.suspects`` holds the same facts by partition; only this class changes them."""

    def __init__(self) -> None:
        self._by_broker: dict[int, set[Partition]] = {}

    def begin(self, broker_id: int, partitions: Iterable[Partition]) -> list[Partition]:
        """Suspect the broker on those of ``partitions`` whose ISR it may be in. Returns them."""
        suspected = [p for p in partitions if p.stored is not None or p.pending is not None]
        self._by_broker[broker_id] = set(suspected)
        for partition in suspected:
            partition.suspects.add(broker_id)
        return suspected

    def end(self, broker_id: int) -> None:
        """The broker is gone, or another incarnation."""
        for partition in self._by_broker.pop(broker_id, ()):
            partition.suspects.discard(broker_id)

    def review(self, partition: Partition) -> None:
        """Drop the suspicions that the partition's state, if it is known for certain, shows to be settled."""
        if not partition.suspects or partition.rereading or partition.pending is not None:
            return
        isr = partition.stored.state.isr if partition.stored is not None else ()
        self._acquit(partition, [broker_id for broker_id in partition.suspects if broker_id not in isr])

    def drop(self, partition: Partition) -> None:
        """All of the partition's: its new leader is the measure, whatever it lost; or the partition is gone."""
        if partition.suspects:
            self._acquit(partition, list(partition.suspects))

    def open(self, live: Mapping[int, BrokerRegistration]) -> set[int]:
        """Brokers with void claims that a leader at work can take away."""
        return {
            broker_id
            for broker_id, partitions in self._by_broker.items()
            if any(_led_by_another(partition, broker_id, live) for partition in partitions)
        }

    def settled(self) -> list[int]:
        """Brokers suspected nowhere any more; each is returned once."""
        clear = [broker_id for broker_id, partitions in self._by_broker.items() if not partitions]
        for broker_id in clear:
            del self._by_broker[broker_id]
        return clear

    def _acquit(self, partition: Partition, brokers: Iterable[int]) -> None:
        for broker_id in brokers:
            partition.suspects.discard(broker_id)
            suspected = self._by_broker.get(broker_id)
            if suspected is not None:
                suspected.discard(partition)


def _led_by_another(partition: Partition, broker_id: int, live: Mapping[int, BrokerRegistration]) -> bool:
    """Whether a leader at work may change the ISR, as far as is known."""
    stored = partition.stored
    if stored is None or partition.pending is not None or partition.rereading:
        return True
    leader = live.get(stored.state.leader)
    return leader is not None and leader.broker_id != broker_id and leader.incarnation == stored.leader_incarnation
