"""Replicas and leaderships of a topic handed on from brokers that have most to those that have least, until no more
handing on makes it more even.

Part of ``assignment_spread``: improves what its one pass leaves. Pure. No move brings replicas of a partition closer
together.

The topic comes first. Of all topics, the sum of squares becomes smaller of what brokers hold, and of what they follow:
that is held without being led. What each holds would not do alone: a broker that holds most and leads least will have
to lead a partition of the next topic and hold one more, whatever that does to the difference. As long as it can only
follow as many as others do, it has led its share before it holds too much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class _ReplicaTransfer(NamedTuple):
    """``giver``'s part in ``partition``, as its follower or as its leader, becomes ``taker``'s."""

    giver: int
    taker: int
    partition: int


_Gifts = dict[int, _ReplicaTransfer]


class AssignmentRefinement:
    """Owner: one placement; changes what it is given in place. Use: ``run``, once."""

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
        """``replicas``: brokers of each new partition, its leader first; ``apart``: who may be added to a set of
        brokers, in order. By broker: how many partitions of the topic it leads and holds, and of all topics, the new
        ones among them.
        """
        self._replicas = replicas
        self._apart = apart
        self._led = led
        self._held = held
        self._all_led = all_led
        self._all_held = all_held
        #: By broker: the partitions that it leads, and those that it follows; dicts for their order.
        self._leading: list[dict[int, None]] = [{} for _ in held]
        self._following: list[dict[int, None]] = [{} for _ in held]
        for partition, (leader, *followers) in enumerate(replicas):
            self._leading[leader][partition] = None
            for follower in followers:
                self._following[follower][partition] = None
        #: By broker: whom it may give one of its replicas to.
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
        """Gifts by which one broker comes to have one less and another one more, for the better. Brokers between them
        give on for what they get. Empty when there are none."""
        brokers = range(len(self._held))
        for source in sorted(brokers, key=lambda i: (-self._held[i], -self._weight(i), i)):
            if not any(is_better(source, taker) for taker in brokers):
                continue
            ways: dict[int, list[_ReplicaTransfer]] = {source: []}
            queue = [source]
            for giver in queue:  # grows on the way
                for gift in gifts_of(giver).values():
                    # Of a partition that changes twice on one way the second change was not looked at.
                    if gift.taker in ways or any(gift.partition == other.partition for other in ways[giver]):
                        continue
                    ways[gift.taker] = [*ways[giver], gift]
                    if is_better(source, gift.taker):
                        return ways[gift.taker]
                    queue.append(gift.taker)
        return []

    # --- replicas ---

    def _should_hold_less(self, giver: int, taker: int) -> bool:
        """Whether it is more even with one less there and one more here: the topic first, then the cluster."""
        less = self._held[giver] - self._held[taker]
        return less > 1 or (less == 1 and self._weight(giver) - self._weight(taker) > 2)

    def _weight(self, broker: int) -> int:
        """What it holds, and what it follows, of all topics."""
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
        """Whether they follow more evenly when one leads one less, and the other one more, and lead as evenly."""
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
        """They change places."""
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
