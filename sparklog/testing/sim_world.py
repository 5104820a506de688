"""Simulated time and network: one queue of things to happen, one random generator, one seed.

Everything that depends on chance asks ``SimWorld.random``; everything that happens later goes through ``at``. So a
seed replays exactly, and a trace of it can be kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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

    def __init__(self, seed: int, *, weather: Weather, trace_length: int = 400) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.now_ms = 0
        self.events = 0
        #: (from, to) pairs over which nothing gets through; names are those of ``send``
        self.cut: set[tuple[object, object]] = set()
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self.trace: deque[str] = deque(maxlen=trace_length)

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        heappush(self._queue, (self.now_ms + delay_ms, next(self._order), action))

    def send(self, source: object, target: object, deliver: Callable[[], None]) -> None:
        """Hand a message to the network: it may come late, twice, after a later one, or never."""
        weather, chance = self.weather, self.random
        if (source, target) in self.cut or chance.random() < weather.loss:
            return
        if source == ZK and chance.random() < weather.zk_answer_loss:
            return
        delay_ms = 1 + int(chance.random() * weather.delay_ms)
        if chance.random() < weather.slow:
            delay_ms += int(chance.random() * weather.slow_ms)
        self.at(delay_ms, deliver)
        if chance.random() < weather.duplicate:
            self.at(delay_ms + int(chance.random() * weather.duplicate_ms), deliver)

    def run_until(self, end_ms: int) -> None:
        while self._queue and self._queue[0][0] <= end_ms:
            self.now_ms, _, action = heappop(self._queue)
            self.events += 1
            action()
        self.now_ms = end_ms

    def note(self, line: str) -> None:
        """A line of the trace: shown when the seed fails."""
        self.trace.append(f"{self.now_ms:>6} {line}")
