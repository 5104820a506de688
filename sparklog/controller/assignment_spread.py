"""The placement of a topic's replicas on different hosts and racks, with even counts of leaders and of replicas.

The module is pure and deterministic. Brokers are numbers from 0 here. For one topic, the counts of leaders and of
replicas of two brokers differ by at most one, unless different hosts and racks require more. The brokers' other topics
decide which brokers get one more. Source: Kafka, AdminUtils.assignReplicasToBrokers, which spreads each topic over all
brokers. Kafka balances only leaders; here the counts of all replicas also differ by at most one.

Leaders are assigned first, for all partitions. Any broker may lead, so the counts of leaders are exactly even. Each
follower then goes to the broker that has the fewest replicas of the topic. For the last partitions, those brokers may
already hold a replica of the partition; ``assignment_refinement`` then moves replicas of earlier partitions.
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
    """The host and rack of a broker, and the numbers of partitions that it currently leads and holds.

    If ``rack`` is None, no other broker is in the same rack.
    """

    host: Hashable
    rack: Hashable | None
    #: The number of partitions of this topic that the broker leads before the placement, and the number that it holds.
    led: int = 0
    held: int = 0
    #: The number of partitions of all topics that the broker leads, and the number that it holds.
    all_led: int = 0
    all_held: int = 0


class Spread:
    """A calculation of the placement of one topic's new partitions. Call ``replicas`` only once."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._hosts = [site.host for site in sites]
        self._racks = [("of its own", i) if site.rack is None else site.rack for i, site in enumerate(sites)]
        self._led = [site.led for site in sites]
        self._held = [site.held for site in sites]
        #: A cache of ``_farthest``, because the same sets of brokers recur.
        self._apart = lru_cache(_CACHED)(self._farthest)

    def replicas(self, partitions: int, replication_factor: int) -> list[list[int]]:
        """Place new partitions. Return the brokers of each, its preferred leader first, as indexes into ``sites``."""
        found = [[leader] for leader in self._leaders(partitions, replication_factor)]
        rows = [self._successors(leader) for leader in range(len(self._sites))]
        for number, chosen in enumerate(found):
            row = rows[chosen[0]]
            # A slack of one allows a choice of followers. The last partitions, one for each broker, have a slack of
            # zero, so that the counts become even.
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
        """Return the leader of each new partition.

        The leader is the broker that leads the fewest partitions of the topic. Of several such brokers, it is the one
        that holds the fewest partitions of the topic, and then the one that leads the fewest partitions of all topics.
        If there are still several, it is the one that holds the fewest partitions of all topics if one more leadership
        requires one more replica. Otherwise it is the one that holds the most.
        """
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
        """Return a weight for each broker as follower of ``leader``; the smallest weight is chosen first.

        The weights spread the first followers, so that one broker does not take over all partitions of a dead leader.
        The weight starts as the distance on the ring from the leader, shifted by one for each partition of other topics
        that the leader leads. The caller adds the number of brokers each time the broker is chosen.
        """
        brokers = len(self._sites)
        turned = self._sites[leader].all_led
        return [((i - leader) % brokers - 1 - turned) % max(brokers - 1, 1) for i in range(brokers)]

    def _follower(self, chosen: Sequence[int], row: Sequence[int], slack: int) -> int:
        """Return the broker with the smallest weight in ``row``: the one that follows this leader least often.

        Only brokers that hold at most ``slack`` replicas more than the broker with the fewest replicas are candidates.
        """
        held = self._held
        candidates = self._apart(tuple(sorted(chosen)))
        most = min(map(held.__getitem__, candidates)) + slack
        return min([broker for broker in candidates if held[broker] <= most], key=row.__getitem__)

    def _farthest(self, chosen: tuple[int, ...]) -> list[int]:
        """Return the brokers that may be added to ``chosen``."""
        candidates = [i for i in range(len(self._sites)) if i not in chosen]
        for places in (self._hosts, self._racks):
            taken = Counter(places[i] for i in chosen)
            fewest = min(taken[places[i]] for i in candidates)
            candidates = [i for i in candidates if taken[places[i]] == fewest]
        return candidates
