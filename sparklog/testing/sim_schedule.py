"""The actions on a simulated cluster, as data. All actions are drawn in advance, so that a run can omit some of them.

An action has a time, a kind and its own seed. All random choices of the action come from that seed, so an action does
not depend on the actions before it. The state of the cluster at the time of an action decides whether the action is
possible.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

#: The kinds of faults, with their weights.
FAULTS = {
    "crash": 6,
    "pause": 3,
    "cut link": 6,
    "cut zookeeper": 3,
    "isolate": 1,
    "clock rate": 2,
    "expire session": 2,
    "full disk": 2,
    "failed write": 1,
    "torn write": 2,
    "power cut": 0.4,
    "crash controller": 1,
    "restart zookeeper": 1,
    "resign": 1,
    "driver away": 0.3,
    # only in runs that set another weight
    "lose a log": 0,
    "exchange logs": 0,
}
#: The kinds of operations, with their weights.
OPERATIONS = {
    "restart broker": 3,
    "withdrawn stop": 2,
    "create topic": 2,
    "delete topic": 2,
    "create topic again": 1,
    "add partitions": 1,
    "reassign": 3,
    "cancel reassignment": 1,
    "elect preferred": 2,
    "elect uncleanly": 1,
}
#: The interval at which an operation may happen.
LOOK_MS = 30


class Action(NamedTuple):
    """An action on the cluster. ``number`` is its position in the complete schedule of the seed."""

    at_ms: int
    kind: str
    #: The seed of the random choices of this action.
    seed: int
    number: int = -1


def draw_schedule(
    chance: random.Random, *, until_ms: int, restless: float, likely: Mapping[str, float] | None = None
) -> tuple[Action, ...]:
    """Return random actions on a cluster before ``until_ms``, in the order of their times.

    ``restless`` is the probability of an operation in each ``LOOK_MS``. ``likely`` overrides the weights of some kinds.
    A shorter schedule of the same seed is the beginning of a longer one.
    """
    faults = {kind: (likely or {}).get(kind, weight) for kind, weight in FAULTS.items()}
    todo = {kind: (likely or {}).get(kind, weight) for kind, weight in OPERATIONS.items()}
    actions = []
    operating = random.Random(chance.random())
    kinds, weights = list(faults), list(faults.values())
    at_ms = 100
    while at_ms < until_ms:
        actions.append(Action(at_ms, chance.choices(kinds, weights)[0], chance.getrandbits(32)))
        at_ms += 50 + chance.randrange(400)
    operations, wanted = list(todo), list(todo.values())
    actions += [
        Action(look_ms, operating.choices(operations, wanted)[0], operating.getrandbits(32))
        for look_ms in range(LOOK_MS, until_ms, LOOK_MS)
        if operating.random() < restless
    ]
    actions.sort()
    return tuple(action._replace(number=number) for number, action in enumerate(actions))
