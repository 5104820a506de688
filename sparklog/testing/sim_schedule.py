"""What befalls a simulated cluster, as data: drawn up front by the seed, so that it can be played with some left out.

An action is a time, a kind and a seed of its own. Whoever plays it draws its choices from that seed and from nothing
else, and judges by the state of the moment whether it can happen at all: the same action stays the same whatever
befell the cluster before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

#: faults: kind to weight
FAULTS = {"crash": 4, "pause": 2, "cut link": 3, "cut zookeeper": 2}
#: what a controller does for no reason
DISTURB = "disturb"
#: how often the chance of a disturbance is thrown
LOOK_MS = 30


class Action(NamedTuple):
    """One thing that befalls the cluster. ``number`` is its place in the whole schedule of its seed."""

    at_ms: int
    kind: str
    #: of the generator that its choices are drawn from
    seed: int
    number: int = -1


def draw_schedule(chance: random.Random, *, until_ms: int, restless: float) -> tuple[Action, ...]:
    """Everything that befalls a cluster before ``until_ms``, in order of time. ``restless``: how likely the controller
    does something for no reason, in each ``LOOK_MS``."""
    actions = []
    kinds, weights = list(FAULTS), list(FAULTS.values())
    at_ms = 100
    while at_ms < until_ms:
        actions.append(Action(at_ms, chance.choices(kinds, weights)[0], chance.getrandbits(32)))
        at_ms += 50 + chance.randrange(400)
    actions += [
        Action(look_ms, DISTURB, chance.getrandbits(32))
        for look_ms in range(LOOK_MS, until_ms, LOOK_MS)
        if chance.random() < restless
    ]
    actions.sort()
    return tuple(action._replace(number=number) for number, action in enumerate(actions))


def keep_only(schedule: Iterable[Action], numbers: Iterable[int] | None) -> tuple[Action, ...]:
    """The actions of these numbers; all of them for None."""
    if numbers is None:
        return tuple(schedule)
    kept = frozenset(numbers)
    return tuple(action for action in schedule if action.number in kept)
