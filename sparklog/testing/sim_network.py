"""The simulated clock and network: one queue of events, and one seed for all random choices.

A separate random generator (``salt``) decides the delay and loss of messages, so that the same schedule of faults can
be played with other delays and losses. Each event has a place in the one queue, so the same seed always has the same
run and the same trace.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

#: The names of processes on the network.
ZK = "zk"
CONTROLLERS = ("c1", "c2")


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """The settings of the network's faults: probabilities for each message, and delays in milliseconds."""

    loss: float = 0.03
    duplicate: float = 0.05
    slow: float = 0.05
    delay_ms: int = 4
    slow_ms: int = 250
    #: The additional probability that a response of ZooKeeper is lost, so that the client does not know the outcome.
    zk_answer_loss: float = 0.0
    #: The maximum delay of the second copy of a duplicated message.
    duplicate_ms: int = 1500
    #: The probability that a controller's update is delayed by up to ``slow_ms``, so that later messages overtake it.
    late_updates: float = 0.0

    #: The probability that a message is lost, delayed or duplicated.
    bad: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad", self.loss + self.slow + self.duplicate)


FINE = NetworkFaults(loss=0.0, duplicate=0.0, slow=0.0)
#: The fault settings of which a seed chooses one. They differ, because some faults hide the effects of others. Source:
#: "Swarm Testing" (Groce et al.).
WEATHERS = (
    NetworkFaults(),
    NetworkFaults(loss=0.0, duplicate=0.0, slow=0.02),
    NetworkFaults(loss=0.15, duplicate=0.02, slow=0.02),
    NetworkFaults(loss=0.02, duplicate=0.4, slow=0.1, duplicate_ms=2500),
    NetworkFaults(loss=0.02, duplicate=0.05, slow=0.3, slow_ms=400),
    NetworkFaults(loss=0.05, duplicate=0.02, slow=0.02, zk_answer_loss=0.5),
)


class ProcessEnded(Exception):
    """The exception that ends a simulated process in the middle of an action."""


class Actor(Protocol):
    """The part of a simulated process that the network checks before it runs an action of the process."""

    alive: bool
    #: A number that each start and each end of the process increases.
    process: int
    paused_until_ms: int


#: An action, its process, and the process number. The action runs only if the process still has that number. While the
#: process is paused, the action waits. A process of None means that the action belongs to no process.
Deed = tuple[Actor | None, int, Callable[[], None]]


class SimNetwork:
    """The simulated network and clock. ``now_ms`` moves only in ``run_until``. Not thread-safe."""

    def __init__(self, seed: int, *, weather: NetworkFaults, salt: int = 0, trace_length: int = 400) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.now_ms = 0
        self.events = 0
        #: The cut connections, as pairs (source, target) with the names that ``send`` uses.
        self.cut: set[tuple[object, object]] = set()
        #: The number of events of each kind.
        self.happened: Counter[str] = Counter()
        self._chance = random.Random(f"net {seed} {salt}").random
        #: The actions by their time, in the order of ``put``. Times are whole milliseconds, so no heap is needed.
        self._due: dict[int, list[Deed]] = {}
        #: The arrival time of the last message of each pair.
        self._last: dict[tuple[object, object], int] = {}
        self.trace: deque[str] = deque(maxlen=trace_length)

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.put(self.now_ms + delay_ms, (None, 0, action))

    def put(self, due_ms: int, deed: Deed) -> None:
        """Schedule an action at ``due_ms``. It runs after the actions that were scheduled earlier for that time."""
        due = self._due.get(due_ms)
        if due is None:
            self._due[due_ms] = [deed]
        else:
            due.append(deed)

    def send(self, source: object, target: object, deed: Deed, *, ordered: bool = False) -> None:
        """Send a message. It may arrive late, twice, after a later message, or never.

        ``ordered`` means that the message uses a connection, which may break but does not duplicate or reorder
        messages.
        """
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
        if weather.late_updates and source in CONTROLLERS and target != ZK and self._chance() < weather.late_updates:
            due_ms += int(self._chance() * weather.slow_ms)
        last_ms = self._last.get(pair, 0)
        if due_ms >= last_ms:
            self._last[pair] = due_ms
        elif ordered:
            due_ms = last_ms
        else:
            self.happened["message overtaken"] += 1
        due = self._due.get(due_ms)  # as in ``put``, but inline, because this code is hot
        if due is None:
            self._due[due_ms] = [deed]
        else:
            due.append(deed)
        if twice:
            self.happened["message doubled"] += 1
            self.put(due_ms + int(self._chance() * weather.duplicate_ms), deed)

    def run_until(self, end_ms: int) -> None:
        for now_ms in range(self.now_ms, end_ms + 1):
            due = self._due.get(now_ms)
            if due is None:
                continue
            self.now_ms = now_ms
            for deed in due:  # the list grows during the loop
                owner, process, action = deed
                if owner is not None:
                    if process != owner.process or not owner.alive:
                        continue
                    if owner.paused_until_ms > now_ms:
                        self.put(owner.paused_until_ms, deed)
                        continue
                try:  # noqa: SIM105  this code is hot
                    action()
                except ProcessEnded:
                    pass
            self.events += len(due)
            del self._due[now_ms]
        self.now_ms = end_ms

    def note(self, line: str) -> None:
        """Add a line to the trace, which is printed when the seed fails."""
        self.trace.append(f"{self.now_ms:>6} {line}")
