"""Followers moved from brokers that hold most of a topic to those that hold least, until no move makes it more even.

Part of ``spread``, for what its one pass leaves. Pure; nothing is moved that would bring replicas closer together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class _Gift(NamedTuple):
    """``giver``'s replica of ``partition`` becomes ``taker``'s."""

    giver: int
    taker: int
    partition: int


class Levelling:
    """Owner: one placement; changes ``replicas`` and ``held`` in place. Use: ``run``, once."""

    def __init__(
        self,
        replicas: list[list[int]],
        held: list[int],
        besides: Sequence[int],
        apart: Callable[[tuple[int, ...]], list[int]],
    ) -> None:
        """``replicas``: brokers of each partition, its leader first, who stays; ``held``: how many of the topic each
        broker holds; ``besides``: how many of other topics; ``apart``: who may be added to a set of brokers, in order.
        """
        self._replicas = replicas
        self._held = held
        self._besides = besides
        self._apart = apart
        #: By broker: the partitions that it follows; a dict for its order.
        self._followed: list[dict[int, None]] = [{} for _ in held]
        for partition, (_, *followers) in enumerate(replicas):
            for follower in followers:
                self._followed[follower][partition] = None
        #: By broker: whom it may give one of its replicas to.
        self._gifts: dict[int, dict[int, _Gift]] = {}

    def run(self) -> None:
        while gifts := self._find():
            for gift in gifts:
                self._give(gift)

    def _find(self) -> list[_Gift]:
        """Gifts by which one broker comes to hold one less and another one more, for the better. Brokers between them
        give on for what they get. Empty when there are none."""
        brokers = range(len(self._held))
        for source in sorted(brokers, key=lambda i: (-self._held[i], -self._held[i] - self._besides[i], i)):
            if not any(self._better(source, taker) for taker in brokers):
                continue
            ways: dict[int, list[_Gift]] = {source: []}
            queue = [source]
            for giver in queue:  # grows on the way
                for gift in self._gifts_of(giver).values():
                    # Of a partition that changes twice on one way the second change was not looked at.
                    if gift.taker in ways or any(gift.partition == other.partition for other in ways[giver]):
                        continue
                    ways[gift.taker] = [*ways[giver], gift]
                    if self._better(source, gift.taker):
                        return ways[gift.taker]
                    queue.append(gift.taker)
        return []

    def _better(self, giver: int, taker: int) -> bool:
        """Whether it is more even with one less there and one more here: the topic first, then the cluster."""
        less = self._held[giver] - self._held[taker]
        return less > 1 or (less == 1 and self._besides[giver] - self._besides[taker] > 0)

    def _gifts_of(self, giver: int) -> dict[int, _Gift]:
        if giver in self._gifts:
            return self._gifts[giver]
        gifts = self._gifts[giver] = {}
        seen = set()
        for partition in self._followed[giver]:
            others = tuple(sorted(broker for broker in self._replicas[partition] if broker != giver))
            if others in seen:
                continue
            seen.add(others)
            for taker in self._apart(others):
                if taker != giver:
                    gifts.setdefault(taker, _Gift(giver, taker, partition))
            if len(gifts) == len(self._held) - 1:
                break
        return gifts

    def _give(self, gift: _Gift) -> None:
        replicas = self._replicas[gift.partition]
        for broker in (*replicas, gift.taker):
            self._gifts.pop(broker, None)
        replicas[replicas.index(gift.giver)] = gift.taker
        del self._followed[gift.giver][gift.partition]
        self._followed[gift.taker][gift.partition] = None
        self._held[gift.giver] -= 1
        self._held[gift.taker] += 1
