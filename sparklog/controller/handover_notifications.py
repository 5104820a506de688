"""The order in which brokers learn the successor of a stopping leader: the successor, other brokers, the old leader.

- The other brokers receive the new state after the successor. Otherwise they would send requests before the successor
  knows that it leads: it would refuse thousands of fetches and have less time to process the update.
- The old leader receives the new state last. Until then it accepts records, and when producers switch to the successor,
  the successor is ready. If the old leader received the state first, it would refuse records while no other broker
  leads, and followers would receive errors.

A broker that does not respond delays the next brokers by at most ``_PATIENCE_MS``. The objects of this module are not
thread-safe: they are parts of ``Outbox``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.broker_link import BrokerLink
from sparklog.controller.cluster_state import ClusterPartition
from sparklog.model import LeaderAndIsr

#: The time after which all brokers receive a new state, even if the brokers before them have not responded. It is long
#: for two reasons: requests that a slow successor must refuse make it slower, and a broker in the ISR that hangs delays
#: the partition in any case. The controller does not wait for brokers outside the ISR.
_PATIENCE_MS = 1000


class _Move(NamedTuple):
    old_leader: int
    #: The time at which the remaining brokers receive the state without waiting for responses.
    end_ms: int


class HandoverNotifications:
    def __init__(self, links: Mapping[int, BrokerLink]) -> None:
        """Create the object. ``links`` has the link to each broker, by broker id."""
        self._links = links
        #: Moves that have been sent only to the successor.
        self._first: dict[ClusterPartition, _Move] = {}
        #: Moves that have been sent to all brokers except the old leader.
        self._others: dict[ClusterPartition, _Move] = {}
        #: The moves to check again: something has changed that may allow their next step.
        self._to_check: dict[ClusterPartition, None] = {}
        #: The earliest time at which a move can time out.
        self._end_ms = 0

    def begin(self, moved: Iterable[tuple[ClusterPartition, int]], now_ms: int) -> None:
        """Start to notify brokers of new leaders. ``moved`` has each partition with its old leader."""
        by_leader: defaultdict[int, list[ClusterPartition]] = defaultdict(list)
        if self.idle:
            self._end_ms = now_ms + _PATIENCE_MS
        for partition, old_leader in moved:
            by_leader[_leader(partition)].append(partition)
            self._others.pop(partition, None)
            self._first[partition] = _Move(old_leader, now_ms + _PATIENCE_MS)
            self._to_check[partition] = None  # Check it at once, because the successor may have no connection.
        for leader, partitions in by_leader.items():
            link = self._links.get(leader)
            if link is not None:
                link.partitions_changed(partitions)

    def on_accepted(self, partitions: Iterable[ClusterPartition]) -> None:
        """Record that a broker has accepted an update that contains these partitions.

        If a broker accepts a full update, call ``brokers_changed`` instead.
        """
        self._to_check.update((p, None) for p in partitions if p in self._first or p in self._others)

    def brokers_changed(self) -> None:
        """Make the next ``notify_next`` check every new leader that some broker has not been notified of.

        Call it after a broker arrived, failed or accepted a full update. No notification then has to wait for that
        broker.
        """
        self._to_check.update(dict.fromkeys(self._first))
        self._to_check.update(dict.fromkeys(self._others))

    def notify_next(self, now_ms: int) -> None:
        """Notify the next brokers of each new leader if the brokers before them have accepted it or timed out."""
        overdue = not self.idle and now_ms >= self._end_ms
        if overdue:
            self.brokers_changed()
        if not self._to_check:
            return
        to_check, self._to_check = self._to_check, {}
        self._notify_others([p for p in to_check if p in self._first], now_ms)
        self._notify_old_leaders([p for p in to_check if p in self._others], now_ms)
        if overdue:
            moves = (*self._first.values(), *self._others.values())
            self._end_ms = min((move.end_ms for move in moves), default=0)

    def _notify_others(self, partitions: Iterable[ClusterPartition], now_ms: int) -> None:
        announced: defaultdict[tuple[int, int], list[ClusterPartition]] = defaultdict(list)
        for partition in partitions:
            move, leader = self._first[partition], _leader(partition)
            if now_ms >= move.end_ms or not self._has_news(partition, [leader]):
                self._others[partition] = self._first.pop(partition)
                announced[leader, move.old_leader].append(partition)
        for they_know, changed in announced.items():
            for broker_id, link in self._links.items():
                if broker_id not in they_know:
                    link.partitions_changed(changed)

    def _notify_old_leaders(self, partitions: Iterable[ClusterPartition], now_ms: int) -> None:
        announced: defaultdict[int, list[ClusterPartition]] = defaultdict(list)
        for partition in partitions:
            old_leader, end_ms = self._others[partition]
            others = [broker_id for broker_id in _stored(partition).isr if broker_id != old_leader]
            if now_ms >= end_ms or not self._has_news(partition, others):
                del self._others[partition]
                announced[old_leader].append(partition)
        for old_leader, changed in announced.items():
            link = self._links.get(old_leader)
            if link is not None:
                link.partitions_changed(changed)

    def _has_news(self, partition: ClusterPartition, brokers: Iterable[int]) -> bool:
        for broker_id in brokers:
            link = self._links.get(broker_id)
            if link is not None and link.has_news_of(partition):
                return True
        return False

    def is_in_progress(self, partition: ClusterPartition) -> bool:
        """Return whether the new leader of this partition has yet to be sent to some broker."""
        return partition in self._first or partition in self._others

    def drop(self, partition: ClusterPartition) -> None:
        self._first.pop(partition, None)
        self._others.pop(partition, None)
        self._to_check.pop(partition, None)

    @property
    def idle(self) -> bool:
        return not self._first and not self._others

    @property
    def deadline_ms(self) -> int | None:
        """Return the time at which ``notify_next`` must run even if no broker has responded.

        Return None if no broker has yet to be notified of a new leader.
        """
        return None if self.idle else self._end_ms


def _leader(partition: ClusterPartition) -> int:
    return _stored(partition).leader


def _stored(partition: ClusterPartition) -> LeaderAndIsr:
    assert partition.stored is not None, f"{partition.tp} was led, and has no state"
    return partition.stored.state
