"""A simulated process: it starts, pauses, ends, and has a clock of its own that may run fast or slow.

What an earlier process of the same name began (timers, messages to it, answers to its requests) never happens to a
later one: its connections died with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sparklog.testing.sim_network import ProcessEnded, SimNetwork

__all__ = ["ProcessEnded", "SimProcess"]


class SimProcess:
    """Mutable, owned by the ``SimCluster``. Base of brokers, controllers and the ZooKeeper server."""

    def __init__(self, name: object, world: SimNetwork) -> None:
        self.name = name
        self.world = world
        self.alive = False
        #: counts starts and ends
        self.process = 0
        self.paused_until_ms = 0
        self._rate = 1.0
        #: the world's time and the own time when the clock's rate was last set
        self._since_ms = 0
        self._base_ms = 0.0
        #: how far it is ahead of the world's time, while it runs as fast
        self._ahead_ms = 0

    def begin(self) -> None:
        self.process += 1
        self.alive = True
        self.paused_until_ms = 0

    def end(self) -> None:
        self.process += 1
        self.alive = False

    @property
    def now_ms(self) -> int:
        """By its own clock, which never goes back."""
        if self._rate == 1.0:
            return self.world.now_ms + self._ahead_ms
        return int(self._base_ms + (self.world.now_ms - self._since_ms) * self._rate)

    def set_clock(self, rate: float) -> None:
        """``rate``: own milliseconds in one of the world's."""
        elapsed = (self.world.now_ms - self._since_ms) * self._rate
        self._base_ms = float(int(self._base_ms + elapsed))
        self._since_ms, self._rate = self.world.now_ms, rate
        self._ahead_ms = int(self._base_ms) - self._since_ms

    def pause(self, pause_ms: int) -> None:
        """It does nothing for so long, and does not know it. A second pause does not cut the first one short: what
        comes then would overtake what waits for its end."""
        self.paused_until_ms = max(self.paused_until_ms, self.world.now_ms + pause_ms)

    def run(self, process: int, action: Callable[[], None]) -> None:
        """Do it now, as that process, or when it is not paused; never as a later one."""
        if process != self.process or not self.alive:
            return
        if self.paused_until_ms > self.world.now_ms:
            self.world.put(self.paused_until_ms, (self, process, action))
        else:
            with suppress(ProcessEnded):
                action()

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """In so many milliseconds of the own clock."""
        world = self.world
        world_ms = delay_ms if self._rate == 1.0 else max(1, int(delay_ms / self._rate))
        world.put(world.now_ms + world_ms, (self, self.process, action))

    def send(self, target: SimProcess, action: Callable[[], None], *, ordered: bool = False) -> None:
        """A message to that process as it is now."""
        self.world.send(self.name, target.name, (target, target.process, action), ordered=ordered)

    def reply(self, target: SimProcess, process: int, action: Callable[[], None], *, ordered: bool = False) -> None:
        """A message to that process as it was when it asked."""
        self.world.send(self.name, target.name, (target, process, action), ordered=ordered)
