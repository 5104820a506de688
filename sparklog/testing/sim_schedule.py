"""The actions on a simulated cluster as data: the seed draws them in advance, so that a run can omit some of them.

An action has a time, a kind and its own seed. The player draws all choices of the action from that seed, and decides
by the state of the moment whether the action is possible. So an action stays the same whatever happened before it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

#: faults: kind to weight
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
    # only in runs that name them
    "lose a log": 0,
    "exchange logs": 0,
}
#: operations: kind to weight
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
#: interval at which an operation may happen
LOOK_MS = 30


class Action(NamedTuple):
    """One action on the cluster. ``number`` is its position in the whole schedule of its seed."""

    at_ms: int
    kind: str
    #: seed of the generator of its choices
    seed: int
    number: int = -1


def draw_schedule(
    chance: random.Random, *, until_ms: int, restless: float, likely: Mapping[str, float] | None = None
) -> tuple[Action, ...]:
    """Return all actions on a cluster before ``until_ms``, in order of time.

    ``restless`` is the chance of an operation in each ``LOOK_MS``; ``likely`` overrides weights by kind. A shorter
    schedule is the beginning of a longer one.
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
