"""A topic's replicas over brokers: leaders evenly, then replicas evenly, apart from each other by host and rack.

Pure and deterministic. Brokers are numbers from 0 here. What one topic has on each broker differs by one at most,
wherever the rule of hosts and racks leaves the choice; which brokers get the one more is decided by what they carry of
other topics. Source: Kafka, AdminUtils.assignReplicasToBrokers, which spreads each topic over all brokers; that a
broker's replicas, and not its leaders alone, differ by one at most is ours.

Leaders are dealt out for all partitions first, for anybody may lead: their counts are exact. Followers are then added
to the broker that has the least of the topic. The last partitions may find only such brokers as they have already;
``assignment_refinement`` then moves replicas of earlier ones. It also counts the brokers' other topics, which decide
which broker gets the one more.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from sparklog.controller.assignment_refinement import AssignmentRefinement

_CACHED = 20_000


class Site(NamedTuple):
    """One broker: where it stands, and what it carries. ``rack`` None: never shared with another."""

    host: Hashable
    rack: Hashable | None
    #: Of this topic, before anything is placed.
    led: int = 0
    held: int = 0
    #: Of all topics.
    all_led: int = 0
    all_held: int = 0


class Spread:
    """Owner: one placement. Use: ``replicas``, once."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._hosts = [site.host for site in sites]
        self._racks = [("of its own", i) if site.rack is None else site.rack for i, site in enumerate(sites)]
        self._led = [site.led for site in sites]
        self._held = [site.held for site in sites]
        #: For each set of brokers, those that may join it; the same sets come again and again.
        self._apart = lru_cache(_CACHED)(self._farthest)

    def replicas(self, partitions: int, replication_factor: int) -> list[list[int]]:
        """Brokers of each partition, its preferred leader first."""
        found = [[leader] for leader in self._leaders(partitions, replication_factor)]
        rows = [self._successors(leader) for leader in range(len(self._sites))]
        for number, chosen in enumerate(found):
            row = rows[chosen[0]]
            # Room for spreading successors, but for the last round, which makes up for it.
            slack = int(number < partitions - len(self._sites))
            while len(chosen) < replication_factor:
                follower = self._follower(chosen, row, slack)
                if len(chosen) == 1:
                    row[follower] += len(self._sites)
                chosen.append(follower)
                self._held[follower] += 1
        all_led = [site.all_led - site.led + led for site, led in zip(self._sites, self._led, strict=True)]
        all_held = [site.all_held - site.held + held for site, held in zip(self._sites, self._held, strict=True)]
        AssignmentRefinement(
            found, self._apart, led=self._led, held=self._held, all_led=all_led, all_held=all_held
        ).run()
        return found

    def _leaders(self, partitions: int, replication_factor: int) -> list[int]:
        """The broker that leads least of the topic, and holds least of it; then that leads least of all. Where these
        are several: who holds least, if who leads one more has to hold one more for it; else who holds most."""
        brokers = len(self._sites)
        led, held = sum(self._led) + partitions, sum(self._held) + partitions * replication_factor
        sign = 1 if led // brokers == held // brokers else -1
        heap = [(site.led, site.held, site.all_led, sign * site.all_held, i) for i, site in enumerate(self._sites)]
        heapq.heapify(heap)
        leaders = []
        for _ in range(partitions):
            led, held, all_led, all_held, leader = heap[0]
            heapq.heapreplace(heap, (led + 1, held + 1, all_led + 1, all_held + sign, leader))
            leaders.append(leader)
            self._led[leader] += 1
            self._held[leader] += 1
        return leaders

    def _successors(self, leader: int) -> list[int]:
        """A weight for each broker as the first follower of ``leader``: what a dead leader led shall not all fall to
        one. Round the ring from the leader, one further for each partition that it leads of other topics; plus the
        number of brokers for each time that it is chosen."""
        brokers = len(self._sites)
        turned = self._sites[leader].all_led
        return [((i - leader) % brokers - 1 - turned) % max(brokers - 1, 1) for i in range(brokers)]

    def _follower(self, chosen: Sequence[int], row: Sequence[int], slack: int) -> int:
        """Of the brokers that hold at most ``slack`` more than the emptiest, who has followed this leader least."""
        held = self._held
        candidates = self._apart(tuple(sorted(chosen)))
        most = min(map(held.__getitem__, candidates)) + slack
        return min([broker for broker in candidates if held[broker] <= most], key=row.__getitem__)

    def _farthest(self, chosen: tuple[int, ...]) -> list[int]:
        """Brokers that may hold a replica beside ``chosen``: on hosts with the fewest of these, then in racks."""
        candidates = [i for i in range(len(self._sites)) if i not in chosen]
        for places in (self._hosts, self._racks):
            taken = Counter(places[i] for i in chosen)
            fewest = min(taken[places[i]] for i in candidates)
            candidates = [i for i in candidates if taken[places[i]] == fewest]
        return candidates
