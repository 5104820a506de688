"""In-sync claims that are void because their broker lost its page cache or logs. Mutable, owned by one ``Controller``.

A broker that comes back unable to vouch for its logs is suspected on every partition it hosts, until the partition's
ISR, read after its registration, is seen without it. Until then its replica is not elected while another member can
be trusted, and the partition's leader is told that the broker is away, so that it takes it out of the ISR. Once no
partition is left the broker is trusted like any other. A broker that doubts some of its logs is suspected on these
alone: it is not said to be away, but the leaders of these partitions are told to take it out of their ISRs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparklog.controller.cluster_state import Partition
from sparklog.model import BrokerRegistration


class UntrustedReplicas:
    """``Partition.suspects`` and ``Partition.void`` hold the same facts by partition; only this class changes them."""

    def __init__(self) -> None:
        self._by_broker: dict[int, set[Partition]] = {}
        #: Brokers that doubt some of their logs only.
        self._in_part: set[int] = set()
        #: Partitions whose leaders have been told, or are about to be, to take out a broker that need not go any more.
        self._cleared: dict[Partition, None] = {}

    def begin(
        self, broker_id: int, partitions: Iterable[Partition], *, in_part: bool = False, unread: bool = False
    ) -> list[Partition]:
        """Suspect the broker on those of ``partitions`` whose ISR it may be in, and return them. ``in_part``: it
        vouches for its other logs."""
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
        """The broker is gone, or another incarnation."""
        for partition in self._by_broker.pop(broker_id, ()):
            self._clear(partition, broker_id)
        self._in_part.discard(broker_id)

    def take_cleared(self) -> list[Partition]:
        """Return the partitions whose leaders are to be told that a broker need not leave the ISR any more."""
        if not self._cleared:
            return []
        cleared, self._cleared = self._cleared, {}
        return list(cleared)

    def review(self, partition: Partition) -> None:
        """Drop the suspicions that the partition's state, if it is known for certain, shows to be settled."""
        if not partition.suspects or partition.rereading or partition.pending is not None or partition.stored is None:
            return
        isr = partition.stored.state.isr
        self._acquit(partition, [broker_id for broker_id in partition.suspects if broker_id not in isr])

    def drop(self, partition: Partition) -> None:
        """All of the partition's: its new leader is the measure, whatever it lost."""
        if partition.suspects:
            self._acquit(partition, list(partition.suspects))

    def forget(self, partition: Partition) -> None:
        """The partition's topic is gone, and no broker is to be told of it."""
        self.drop(partition)
        self._cleared.pop(partition, None)

    def open(self, live: Mapping[int, BrokerRegistration]) -> set[int]:
        """Brokers with void claims that a leader at work can take away."""
        return {
            broker_id
            for broker_id, partitions in self._by_broker.items()
            if broker_id not in self._in_part
            and any(_led_by_another(partition, broker_id, live) for partition in partitions)
        }

    def settled(self) -> list[int]:
        """Brokers suspected nowhere any more; each is returned once."""
        clear = [broker_id for broker_id, partitions in self._by_broker.items() if not partitions]
        for broker_id in clear:
            del self._by_broker[broker_id]
            self._in_part.discard(broker_id)
        return clear

    def _acquit(self, partition: Partition, brokers: Iterable[int]) -> None:
        for broker_id in brokers:
            self._clear(partition, broker_id)
            suspected = self._by_broker.get(broker_id)
            if suspected is not None:
                suspected.discard(partition)

    def _clear(self, partition: Partition, broker_id: int) -> None:
        partition.suspects.discard(broker_id)
        if broker_id in partition.void:
            partition.void.discard(broker_id)
            self._cleared[partition] = None


def _led_by_another(partition: Partition, broker_id: int, live: Mapping[int, BrokerRegistration]) -> bool:
    """Whether a leader at work may change the ISR, as far as is known."""
    stored = partition.stored
    if stored is None or partition.pending is not None or partition.rereading:
        return True
    leader = live.get(stored.state.leader)
    return leader is not None and leader.broker_id != broker_id and leader.incarnation == stored.leader_incarnation
