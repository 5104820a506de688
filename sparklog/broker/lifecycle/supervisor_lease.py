"""The lease of a broker's supervisor, and the broker's steps without one. Pure: times come in, decisions go out.

A supervisor holds a lease named by (driver epoch, barrier generation). The broker obeys the highest name it has seen,
and an older supervisor learns that it is superseded, so two generations of barrier tasks never control one broker. A
broker that the running generation of a living driver leaves out for ``orphan_timeout_ms`` asks the controller to move
its leaderships. It stops only once no ISR contains it, which needs a live controller. Without a driver it serves on,
whichever process is the controller, up to ``orphan_max_ms`` if that is set: then all brokers are orphans, and would
stop the whole service.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LeaseName(NamedTuple):
    """The name of a lease. It orders supervisors: a later driver first, then a later generation of its barrier job."""

    driver_epoch: int
    generation: int


class OrphanStep(Enum):
    """The step that the lack of a supervisor requires now."""

    NOTHING = "nothing"
    ASK_RELIEF = "ask_relief"
    #: withdraw the request to move leaderships
    SERVE_ON = "serve_on"
    STOP = "stop"


class SupervisorLease:
    """The lease of one broker. Owner: the broker process's event loop.

    ``supervised`` is false for brokers started by hand or by a test.
    """

    def __init__(self, highest: LeaseName, *, supervised: bool, orphan_timeout_ms: int, orphan_max_ms: int) -> None:
        self.highest = highest
        self._holders = 0
        self._orphan_timeout_ms = orphan_timeout_ms
        self._orphan_max_ms = orphan_max_ms
        self._supervised = supervised
        self._alone_since_ms: int | None = None
        #: the last running generation that was seen, as a supervisor or in ZooKeeper
        self._at_work = highest

    @property
    def held(self) -> bool:
        return self._holders > 0

    def admit(self, name: LeaseName) -> bool:
        """Accept a supervisor's hello; return false if it is superseded. A higher name starts a new lease."""
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
        """Note that a supervisor's connection closed; superseded ones do not count."""
        if name == self.highest and self._holders:
            self._holders -= 1

    def expect_supervisor(self) -> None:
        """Reset the orphan clock, because a newer generation is being submitted, which may include this broker."""
        self._alone_since_ms = None

    def check(self, now_ms: int) -> OrphanStep:
        """Return the next step.

        Call it about once a second: the clock starts at the first call without a supervisor.
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
        """Return whether an orphan has no supervisor because the running ``generation`` leaves it out.

        ``generation`` None means that there is none, or no driver. The orphan clock starts again at each new
        generation: its tasks may not have started yet.
        """
        if generation is None:
            return False
        if generation != self._at_work:
            self._at_work = generation
            self._alone_since_ms = None
            return False
        return True


def relief(*, left_out: bool, controller_lives: bool, announced: bool, counted_on: int, held: bool) -> OrphanStep:
    """Return the next step of an orphan whose time is up.

    It stops only when no ISR contains it (``counted_on`` is the number of partitions whose ISR does, including those it
    leads), so the last broker of a partition stays. ``announced``: the controller knows that it wants to stop.
    """
    if not left_out:
        return OrphanStep.SERVE_ON if announced and not held else OrphanStep.NOTHING
    if not controller_lives or held:
        return OrphanStep.NOTHING
    if not announced:
        return OrphanStep.ASK_RELIEF
    return OrphanStep.NOTHING if counted_on else OrphanStep.STOP
