"""The second pass of a topic's placement: it transfers replicas and leaderships until the placement is even.

``assignment_spread`` makes the first pass and then calls this module. The module is pure. Brokers with the most
replicas transfer some to brokers with the fewest, until no transfer makes the placement more even. No transfer puts
more replicas of one partition on the same host or rack.

The balance of the topic comes first, then the balance of all topics together. To balance all topics, transfers make two
counts per broker more even: the replicas that the broker holds, and the replicas that it follows (holds without leading
them). The first count alone is not enough. A broker that holds the most replicas and leads the fewest partitions will
get a leadership of the next topic, and with it one more replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class _ReplicaTransfer(NamedTuple):
    """A transfer of ``giver``'s role in ``partition``, as its follower or as its leader, to ``taker``."""

    giver: int
    taker: int
    partition: int


_Gifts = dict[int, _ReplicaTransfer]


class AssignmentRefinement:
    """The second pass over the placement of one topic. Call ``run`` once: it makes the placement even.

    The object changes the lists that its constructor receives.
    """

    def __init__(
        self,
        replicas: list[list[int]],
        apart: Callable[[tuple[int, ...]], list[int]],
        *,
        led: list[int],
        held: list[int],
        all_led: list[int],
        all_held: list[int],
    ) -> None:
        """Prepare the pass over the given placement, with the counts of each broker.

        ``replicas`` has the brokers of each new partition, its leader first. ``apart`` returns, in order, the brokers
        that may get one more replica of a partition that has replicas on a given set of brokers. The lists have one
        number per broker. ``led`` and ``held`` count the partitions of the topic that the broker leads and holds.
        ``all_led`` and ``all_held`` count the partitions of all topics, including the new partitions.
        """
        self._replicas = replicas
        self._apart = apart
        self._led = led
        self._held = held
        self._all_led = all_led
        self._all_held = all_held
        #: The partitions that each broker leads, and the partitions that it follows, in dicts because a dict keeps its
        #: order.
        self._leading: list[dict[int, None]] = [{} for _ in held]
        self._following: list[dict[int, None]] = [{} for _ in held]
        for partition, (leader, *followers) in enumerate(replicas):
            self._leading[leader][partition] = None
            for follower in followers:
                self._following[follower][partition] = None
        #: For each broker, the brokers to which it may transfer a replica.
        self._gifts: dict[int, _Gifts] = {}

    def run(self) -> None:
        while True:
            while gifts := self._find(self._should_hold_less, self._gifts_of):
                for gift in gifts:
                    self._give(gift)
            successions = self._find(self._should_lead_less, self._successions_of)
            if not successions:
                return
            for succession in successions:
                self._succeed(succession)

    def _find(self, is_better: Callable[[int, int], bool], gifts_of: Callable[[int], _Gifts]) -> list[_ReplicaTransfer]:
        """Return a chain of transfers that makes the placement more even, or an empty list.

        The first broker of the chain ends with one replica less and the last one with one more. Each broker between
        them gets one replica and gives one away.
        """
        brokers = range(len(self._held))
        for source in sorted(brokers, key=lambda i: (-self._held[i], -self._weight(i), i)):
            if not any(is_better(source, taker) for taker in brokers):
                continue
            ways: dict[int, list[_ReplicaTransfer]] = {source: []}
            queue = [source]
            for giver in queue:  # The loop appends to this list.
                for gift in gifts_of(giver).values():
                    # A chain does not change a partition twice, because the second change was not checked.
                    if gift.taker in ways or any(gift.partition == other.partition for other in ways[giver]):
                        continue
                    ways[gift.taker] = [*ways[giver], gift]
                    if is_better(source, gift.taker):
                        return ways[gift.taker]
                    queue.append(gift.taker)
        return []

    # --- replicas ---

    def _should_hold_less(self, giver: int, taker: int) -> bool:
        """Return whether moving one replica from ``giver`` to ``taker`` evens out the topic, or else the cluster."""
        less = self._held[giver] - self._held[taker]
        return less > 1 or (less == 1 and self._weight(giver) - self._weight(taker) > 2)

    def _weight(self, broker: int) -> int:
        """Return the number of replicas that a broker holds plus the number that it follows, over all topics."""
        return 2 * self._all_held[broker] - self._all_led[broker]

    def _gifts_of(self, giver: int) -> _Gifts:
        if giver in self._gifts:
            return self._gifts[giver]
        gifts = self._gifts[giver] = {}
        seen = set()
        for partition in self._following[giver]:
            others = tuple(sorted(broker for broker in self._replicas[partition] if broker != giver))
            if others in seen:
                continue
            seen.add(others)
            for taker in self._apart(others):
                if taker != giver:
                    gifts.setdefault(taker, _ReplicaTransfer(giver, taker, partition))
            if len(gifts) == len(self._held) - 1:
                break
        return gifts

    def _give(self, gift: _ReplicaTransfer) -> None:
        replicas = self._replicas[gift.partition]
        for broker in (*replicas, gift.taker):
            self._gifts.pop(broker, None)
        replicas[replicas.index(gift.giver)] = gift.taker
        del self._following[gift.giver][gift.partition]
        self._following[gift.taker][gift.partition] = None
        for held in (self._held, self._all_held):
            held[gift.giver] -= 1
            held[gift.taker] += 1

    # --- leaderships ---

    def _should_lead_less(self, giver: int, taker: int) -> bool:
        """Return whether moving one leadership from ``giver`` to ``taker`` evens out how many replicas each follows.

        The numbers of leaderships must not become less even.
        """
        if self._led[giver] <= self._led[taker] or self._all_led[giver] <= self._all_led[taker]:
            return False
        return self._followed(taker) - self._followed(giver) > 1

    def _followed(self, broker: int) -> int:
        return self._all_held[broker] - self._all_led[broker]

    def _successions_of(self, leader: int) -> _Gifts:
        successions: _Gifts = {}
        for partition in self._leading[leader]:
            for follower in self._replicas[partition][1:]:
                successions.setdefault(follower, _ReplicaTransfer(leader, follower, partition))
        return successions

    def _succeed(self, gift: _ReplicaTransfer) -> None:
        """Exchange the roles of a partition's leader and one of its followers."""
        replicas = self._replicas[gift.partition]
        for broker in replicas:
            self._gifts.pop(broker, None)
        place = replicas.index(gift.taker)
        replicas[0], replicas[place] = gift.taker, gift.giver
        del self._leading[gift.giver][gift.partition], self._following[gift.taker][gift.partition]
        self._leading[gift.taker][gift.partition] = self._following[gift.giver][gift.partition] = None
        for led in (self._led, self._all_led):
            led[gift.giver] -= 1
            led[gift.taker] += 1
