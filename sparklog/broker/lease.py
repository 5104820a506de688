"""Who supervises this broker, and what it does when nobody does. Pure: times come in, decisions go out.

A supervisor holds a lease named by (driver epoch, barrier generation). The broker obeys the highest name it has seen
and tells an older supervisor that it is superseded, so two generations of barrier tasks never pull at one broker.
Without a supervisor for ``orphan_timeout_ms`` the broker asks to be relieved of its leaderships; it stops only when
that has been done, which takes a live controller. Without one it serves on, up to ``orphan_max_ms`` if that is set:
else a dead driver would stop the whole cluster.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LeaseName(NamedTuple):
    """Orders supervisors: a later driver first, then a later generation of its barrier job."""

    driver_epoch: int
    generation: int


class OrphanStep(Enum):
    """What the lack of a supervisor asks for now."""

    NOTHING = "nothing"
    ASK_RELIEF = "ask_relief"
    STOP = "stop"


class Lease:
    """Owner: the broker process' event loop. ``supervised`` is false for brokers started by hand or by a test."""

    def __init__(self, highest: LeaseName, *, supervised: bool, orphan_timeout_ms: int, orphan_max_ms: int) -> None:
        self.highest = highest
        self._holders = 0
        self._orphan_timeout_ms = orphan_timeout_ms
        self._orphan_max_ms = orphan_max_ms
        self._supervised = supervised
        self._alone_since_ms: int | None = None

    @property
    def held(self) -> bool:
        return self._holders > 0

    def admit(self, name: LeaseName) -> bool:
        """Take a supervisor's hello: false when it is superseded. A higher name starts a lease of its own."""
        if name < self.highest:
            return False
        if name > self.highest:
            self._holders = 0
        self.highest = name
        self._holders += 1
        self._supervised = True
        self._alone_since_ms = None
        return True

    def released(self, name: LeaseName) -> None:
        """A supervisor's connection closed; those of superseded ones no longer count."""
        if name == self.highest and self._holders:
            self._holders -= 1

    def expect_supervisor(self) -> None:
        """A newer generation is being submitted: being alone counts from its end, should it leave this broker out."""
        self._alone_since_ms = None

    def check(self, now_ms: int) -> OrphanStep:
        """Call about once a second: the clock starts with the first call that finds nobody."""
        if self.held or not self._supervised:
            self._alone_since_ms = None
            return OrphanStep.NOTHING
        if self._alone_since_ms is None:
            self._alone_since_ms = now_ms
        alone_ms = now_ms - self._alone_since_ms
        if 0 <= self._orphan_max_ms <= alone_ms:
            return OrphanStep.STOP
        return OrphanStep.ASK_RELIEF if alone_ms >= self._orphan_timeout_ms else OrphanStep.NOTHING


def relief(*, controller_lives: bool, announced: bool, movable: int, held: bool) -> OrphanStep:
    """What an orphan that asks for relief does next: without a controller it serves on, and it stops only when it
    leads nothing that another could lead (``movable``). ``announced``: the controller knows that it wants to go."""
    if not controller_lives:
        return OrphanStep.NOTHING
    if not announced:
        return OrphanStep.ASK_RELIEF
    return OrphanStep.STOP if not movable and not held else OrphanStep.NOTHING
