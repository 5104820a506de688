"""Who hears when that a leader which stops has a successor: first the successor, then the others, then the old leader.

- The others hear of it once the successor has. Told together they would ask it before it knows that it leads: thousands
  of fetches that are refused and come again, on the processor that has to let it know.
- The old leader hears last. Until then it takes records that wait for the successor, who is ready when the producers
  hear of it; told first, it would refuse them while nobody else leads, and followers would be answered with errors.

Nothing waits for a broker that does not answer for longer than ``_PATIENCE_MS``. Mutable, owned by one ``Outbox``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.broker_link import BrokerLink
from sparklog.controller.cluster_state import Partition
from sparklog.model import LeaderAndIsr

#: From when the new state is written until everybody is told of it, whoever has answered. Long: a slow broker becomes
#: slower by followers that ask in vain, and one that hangs holds up the partition in any case, while it is in sync. Who
#: is not in sync is not waited for.
_PATIENCE_MS = 1000


class _Move(NamedTuple):
    old_leader: int
    #: When everybody is told.
    end_ms: int


class HandoverNotifications:
    def __init__(self, links: Mapping[int, BrokerLink]) -> None:
        """``links``: of the brokers that can be told, by id."""
        self._links = links
        #: Told to the successor only.
        self._first: dict[Partition, _Move] = {}
        #: Told to all but the old leader.
        self._others: dict[Partition, _Move] = {}
        #: Of these, those whose turn may have come since they were last looked at.
        self._heard: dict[Partition, None] = {}
        #: No move ends sooner.
        self._end_ms = 0

    def begin(self, moved: Iterable[tuple[Partition, int]], now_ms: int) -> None:
        """These are led by others now: partitions with their old leaders."""
        by_leader: defaultdict[int, list[Partition]] = defaultdict(list)
        if self.idle:
            self._end_ms = now_ms + _PATIENCE_MS
        for partition, old_leader in moved:
            by_leader[_leader(partition)].append(partition)
            self._others.pop(partition, None)
            self._first[partition] = _Move(old_leader, now_ms + _PATIENCE_MS)
            self._heard[partition] = None  # the successor may not be there to be told
        for leader, partitions in by_leader.items():
            link = self._links.get(leader)
            if link is not None:
                link.partitions_changed(partitions)

    def heard(self, partitions: Iterable[Partition]) -> None:
        """Some broker has taken in what it was told of these. Of one that was told everything: ``brokers_changed``."""
        self._heard.update((p, None) for p in partitions if p in self._first or p in self._others)

    def brokers_changed(self) -> None:
        """Brokers that were waited for may not be there any more, or know all there is."""
        self._heard.update(dict.fromkeys(self._first))
        self._heard.update(dict.fromkeys(self._others))

    def tell(self, now_ms: int) -> None:
        """Let the next ones know, where it is their turn."""
        overdue = not self.idle and now_ms >= self._end_ms
        if overdue:
            self.brokers_changed()
        if not self._heard:
            return
        heard, self._heard = self._heard, {}
        self._tell_others([p for p in heard if p in self._first], now_ms)
        self._tell_old_leaders([p for p in heard if p in self._others], now_ms)
        if overdue:
            moves = (*self._first.values(), *self._others.values())
            self._end_ms = min((move.end_ms for move in moves), default=0)

    def _tell_others(self, partitions: Iterable[Partition], now_ms: int) -> None:
        told: defaultdict[tuple[int, int], list[Partition]] = defaultdict(list)
        for partition in partitions:
            move, leader = self._first[partition], _leader(partition)
            if now_ms >= move.end_ms or not self._owed(partition, [leader]):
                self._others[partition] = self._first.pop(partition)
                told[leader, move.old_leader].append(partition)
        for they_know, changed in told.items():
            for broker_id, link in self._links.items():
                if broker_id not in they_know:
                    link.partitions_changed(changed)

    def _tell_old_leaders(self, partitions: Iterable[Partition], now_ms: int) -> None:
        told: defaultdict[int, list[Partition]] = defaultdict(list)
        for partition in partitions:
            old_leader, end_ms = self._others[partition]
            others = [broker_id for broker_id in _stored(partition).isr if broker_id != old_leader]
            if now_ms >= end_ms or not self._owed(partition, others):
                del self._others[partition]
                told[old_leader].append(partition)
        for old_leader, changed in told.items():
            link = self._links.get(old_leader)
            if link is not None:
                link.partitions_changed(changed)

    def _owed(self, partition: Partition, brokers: Iterable[int]) -> bool:
        for broker_id in brokers:
            link = self._links.get(broker_id)
            if link is not None and link.owes(partition):
                return True
        return False

    def under_way(self, partition: Partition) -> bool:
        """Somebody has still to be told."""
        return partition in self._first or partition in self._others

    def forget(self, partition: Partition) -> None:
        self._first.pop(partition, None)
        self._others.pop(partition, None)
        self._heard.pop(partition, None)

    @property
    def idle(self) -> bool:
        return not self._first and not self._others

    @property
    def deadline_ms(self) -> int | None:
        """When ``tell`` has something to do, whatever has been answered."""
        return None if self.idle else self._end_ms


def _leader(partition: Partition) -> int:
    return _stored(partition).leader


def _stored(partition: Partition) -> LeaderAndIsr:
    assert partition.stored is not None, f"{partition.tp} was led, and has no state"
    return partition.stored.state
