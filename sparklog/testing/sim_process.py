"""A simulated process, which can start, pause and end. Its clock may run fast or slow.

Timers of an ended process, messages to it, and responses to its requests never reach a later process with the same
name, because the connections ended with the process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sparklog.testing.sim_network import ProcessEnded, SimNetwork

__all__ = ["ProcessEnded", "SimProcess"]


class SimProcess:
    """The base class of simulated processes: brokers, controllers and the ZooKeeper server."""

    def __init__(self, name: object, world: SimNetwork) -> None:
        self.name = name
        self.world = world
        self.alive = False
        #: A number that each start and each end of the process increases.
        self.process = 0
        self.paused_until_ms = 0
        self._rate = 1.0
        #: The time of the simulation, and the time of the process, when the clock's rate was last set.
        self._since_ms = 0
        self._base_ms = 0.0
        #: How far the clock of the process is ahead of the simulation while its rate is 1.
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
        """Return the time by the clock of the process, which never goes back."""
        if self._rate == 1.0:
            return self.world.now_ms + self._ahead_ms
        return int(self._base_ms + (self.world.now_ms - self._since_ms) * self._rate)

    def set_clock(self, rate: float) -> None:
        """Set the speed of the clock: ``rate`` is the time of the process divided by the time of the simulation."""
        elapsed = (self.world.now_ms - self._since_ms) * self._rate
        self._base_ms = float(int(self._base_ms + elapsed))
        self._since_ms, self._rate = self.world.now_ms, rate
        self._ahead_ms = int(self._base_ms) - self._since_ms

    def pause(self, pause_ms: int) -> None:
        """Pause the process for ``pause_ms``. The process does not notice the pause.

        A second pause does not shorten the first one, because later events would overtake events that wait for the end
        of the first pause.
        """
        self.paused_until_ms = max(self.paused_until_ms, self.world.now_ms + pause_ms)

    def run(self, process: int, action: Callable[[], None]) -> None:
        """Run an action of the incarnation ``process`` now, or after the current pause.

        Do nothing if this incarnation has ended.
        """
        if process != self.process or not self.alive:
            return
        if self.paused_until_ms > self.world.now_ms:
            self.world.put(self.paused_until_ms, (self, process, action))
        else:
            with suppress(ProcessEnded):
                action()

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Run ``action`` once ``delay_ms`` have passed by the clock of the process."""
        world = self.world
        world_ms = delay_ms if self._rate == 1.0 else max(1, int(delay_ms / self._rate))
        world.put(world.now_ms + world_ms, (self, self.process, action))

    def send(self, target: SimProcess, action: Callable[[], None], *, ordered: bool = False) -> None:
        """Send a message to the incarnation of ``target`` that runs now."""
        self.world.send(self.name, target.name, (target, target.process, action), ordered=ordered)

    def reply(self, target: SimProcess, process: int, action: Callable[[], None], *, ordered: bool = False) -> None:
        """Send a response to ``process``, the incarnation of ``target`` that sent the request."""
        self.world.send(self.name, target.name, (target, process, action), ordered=ordered)
