"""Simulated time and network: one queue of things to happen, and a seed for all that depends on chance.

What befalls messages is drawn from a generator of the network's own, so that the same schedule of faults can be played
in another weather (``salt``). Everything that happens later goes through ``at``. So a seed replays exactly, and a trace
of it can be kept.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

#: ZooKeeper's name on the network
ZK = "zk"


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is. Probabilities per message, delays in ms."""

    loss: float = 0.03
    duplicate: float = 0.05
    slow: float = 0.05
    delay_ms: int = 4
    slow_ms: int = 250
    #: more loss of what ZooKeeper answers: writes whose fate the writer does not know
    zk_answer_loss: float = 0.0
    #: a second copy of a message comes up to so late
    duplicate_ms: int = 1500

    #: chance that a message is lost, late or doubled: one of them
    bad: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad", self.loss + self.slow + self.duplicate)


FINE = Weather(loss=0.0, duplicate=0.0, slow=0.0)
#: A seed takes one of these: what one hides another shows. Source: "Swarm Testing" (Groce et al.).
WEATHERS = (
    Weather(),
    Weather(loss=0.0, duplicate=0.0, slow=0.02),
    Weather(loss=0.15, duplicate=0.02, slow=0.02),
    Weather(loss=0.02, duplicate=0.4, slow=0.1, duplicate_ms=2500),
    Weather(loss=0.02, duplicate=0.05, slow=0.3, slow_ms=400),
    Weather(loss=0.05, duplicate=0.02, slow=0.02, zk_answer_loss=0.5),
)


class SimWorld:
    """Mutable, single-threaded. ``now_ms`` moves only in ``run_until``."""

    def __init__(self, seed: int, *, weather: Weather, salt: int = 0, trace_length: int = 400) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.now_ms = 0
        self.events = 0
        #: (from, to) pairs over which nothing gets through; names are those of ``send``
        self.cut: set[tuple[object, object]] = set()
        #: what befell the cluster, by kind
        self.happened: Counter[str] = Counter()
        self._chance = random.Random(f"net {seed} {salt}").random
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        #: when the last message of a pair arrives
        self._last: dict[tuple[object, object], int] = {}
        self.trace: deque[str] = deque(maxlen=trace_length)

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        heappush(self._queue, (self.now_ms + delay_ms, next(self._order), action))

    def send(self, source: object, target: object, deliver: Callable[[], None], *, ordered: bool = False) -> None:
        """Hand a message to the network: it may come late, twice, after a later one, or never. ``ordered``: over one
        connection, which may break but neither doubles nor reorders."""
        weather, pair = self.weather, (source, target)
        if self.cut and pair in self.cut:
            self.happened["message lost in a partition"] += 1
            return
        fate = self._chance()
        due_ms = self.now_ms + 1 + int(self._chance() * weather.delay_ms)
        twice = False
        if fate < weather.bad:
            if fate < weather.loss:
                self.happened["message lost"] += 1
                return
            if fate < weather.loss + weather.slow:
                due_ms += int(self._chance() * weather.slow_ms)
                self.happened["message late"] += 1
            else:
                twice = not ordered
        if source == ZK and self._chance() < weather.zk_answer_loss:
            self.happened["message lost"] += 1
            return
        last_ms = self._last.get(pair, 0)
        if due_ms >= last_ms:
            self._last[pair] = due_ms
        elif ordered:
            due_ms = last_ms
        else:
            self.happened["message overtaken"] += 1
        heappush(self._queue, (due_ms, next(self._order), deliver))
        if twice:
            self.happened["message doubled"] += 1
            due_ms += int(self._chance() * weather.duplicate_ms)
            heappush(self._queue, (due_ms, next(self._order), deliver))

    def run_until(self, end_ms: int) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end_ms:
            self.now_ms, _, action = heappop(queue)
            self.events += 1
            action()
        self.now_ms = end_ms

    def note(self, line: str) -> None:
        """A line of the trace: shown when the seed fails."""
        self.trace.append(f"{self.now_ms:>6} {line}")
