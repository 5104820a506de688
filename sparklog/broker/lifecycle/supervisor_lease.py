"""The lease of a broker's supervisor, and the decisions of a broker without a supervisor.

This module is pure. A supervisor is a task of the driver's barrier job. A generation is one run of that job. A
supervisor holds a lease named (driver epoch, generation). The broker obeys the supervisor with the highest lease name
that it has seen, and rejects supervisors with a lower name. So two generations never control one broker.

A broker without a supervisor is an orphan. If a driver is alive, but its running generation does not include the broker
for ``orphan_timeout_ms``, the broker asks the controller to move its leaderships. It stops once no ISR contains it,
which needs a live controller.

If there is no driver, all brokers are orphans, and stops would end the whole service. So an orphan continues to serve
then, but for at most ``orphan_max_ms`` if that is set.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LeaseName(NamedTuple):
    """The name of a supervisor's lease on a broker.

    Names are ordered by the driver's epoch, and then by the generation (the run) of the driver's barrier job.
    """

    driver_epoch: int
    generation: int


class OrphanStep(Enum):
    """An action of a broker without a supervisor."""

    NOTHING = "nothing"
    ASK_RELIEF = "ask_relief"
    #: continue to serve, and withdraw the request to move leaderships
    SERVE_ON = "serve_on"
    STOP = "stop"


class SupervisorLease:
    """A tracker of the newest supervisor's lease on one broker, and of the time without a supervisor.

    ``supervised`` is false for brokers started by hand or by a test. Not thread-safe: use it only on the broker's event
    loop.
    """

    def __init__(self, highest: LeaseName, *, supervised: bool, orphan_timeout_ms: int, orphan_max_ms: int) -> None:
        self.highest = highest
        self._holders = 0
        self._orphan_timeout_ms = orphan_timeout_ms
        self._orphan_max_ms = orphan_max_ms
        self._supervised = supervised
        self._alone_since_ms: int | None = None
        #: the last running generation known, from a supervisor's hello or from ZooKeeper
        self._at_work = highest

    @property
    def held(self) -> bool:
        return self._holders > 0

    def admit(self, name: LeaseName) -> bool:
        """Accept the supervisor with this lease name. Return False if the broker has seen a higher name.

        A name higher than all earlier ones starts a new lease.
        """
        if name < self.highest:
            return False
        if name > self.highest:
            self._holders = 0
        self.highest = self._at_work = name
        self._holders += 1
        self._supervised = True
        self._alone_since_ms = None
        return True

    def released(self, name: LeaseName) -> None:
        """Record that the connection of the supervisor with this lease name was closed.

        The connection of a superseded supervisor does not count.
        """
        if name == self.highest and self._holders:
            self._holders -= 1

    def expect_supervisor(self) -> None:
        """Count the time without a supervisor from 0 again, because the driver is submitting a new barrier job.

        The new job may include this broker.
        """
        self._alone_since_ms = None

    def check(self, now_ms: int) -> OrphanStep:
        """Return the action that a broker without a supervisor must take now; NOTHING if it has a supervisor.

        Call this about once a second. The time without a supervisor begins at the first call that finds no supervisor.
        """
        if self.held or not self._supervised:
            self._alone_since_ms = None
            return OrphanStep.NOTHING
        if self._alone_since_ms is None:
            self._alone_since_ms = now_ms
        alone_ms = now_ms - self._alone_since_ms
        if 0 <= self._orphan_max_ms <= alone_ms:
            return OrphanStep.STOP
        return OrphanStep.ASK_RELIEF if alone_ms >= self._orphan_timeout_ms else OrphanStep.NOTHING

    def left_out(self, generation: LeaseName | None) -> bool:
        """Return whether this broker has no supervisor because the running barrier job does not include it.

        ``generation`` is the running generation, or None if there is no running generation or no driver. The time
        without a supervisor begins again at each new generation, because the supervisors of the new generation may not
        have connected yet.
        """
        if generation is None:
            return False
        if generation != self._at_work:
            self._at_work = generation
            self._alone_since_ms = None
            return False
        return True


def relief(*, left_out: bool, controller_lives: bool, announced: bool, counted_on: int, held: bool) -> OrphanStep:
    """Return the next step of a broker that had no supervisor for longer than ``orphan_timeout_ms``.

    The broker stops only when no ISR contains it, so the last in-sync replica of a partition keeps running.
    ``counted_on`` is the number of partitions whose ISR contains the broker, including those that it leads.
    ``announced`` is whether the broker has asked the controller to move its leaderships. ``held`` is whether a
    supervisor is connected again.
    """
    if not left_out:
        return OrphanStep.SERVE_ON if announced and not held else OrphanStep.NOTHING
    if not controller_lives or held:
        return OrphanStep.NOTHING
    if not announced:
        return OrphanStep.ASK_RELIEF
    return OrphanStep.NOTHING if counted_on else OrphanStep.STOP
