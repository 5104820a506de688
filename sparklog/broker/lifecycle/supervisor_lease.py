"""Who supervises this broker, and what it does when nobody does. Pure: times come in, decisions go out.

A supervisor holds a lease named by (driver epoch, barrier generation). The broker obeys the highest name it has seen
and tells an older supervisor that it is superseded, so two generations of barrier tasks never pull at one broker.
A broker that the generation at work of a living driver leaves out for ``orphan_timeout_ms`` asks to be relieved of its
leaderships, and stops only when nobody counts on it any more, which takes a live controller. Without a driver it
serves on, whoever controls the cluster, up to ``orphan_max_ms`` if that is set: all brokers are orphans then, and
would stop one another's service.
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
    #: take back that relief was asked for
    SERVE_ON = "serve_on"
    STOP = "stop"


class SupervisorLease:
    """Owner: the broker process' event loop. ``supervised`` is false for brokers started by hand or by a test."""

    def __init__(self, highest: LeaseName, *, supervised: bool, orphan_timeout_ms: int, orphan_max_ms: int) -> None:
        self.highest = highest
        self._holders = 0
        self._orphan_timeout_ms = orphan_timeout_ms
        self._orphan_max_ms = orphan_max_ms
        self._supervised = supervised
        self._alone_since_ms: int | None = None
        #: of the generations at work the one seen last, as a supervisor or from afar
        self._at_work = highest

    @property
    def held(self) -> bool:
        return self._holders > 0

    def admit(self, name: LeaseName) -> bool:
        """Take a supervisor's hello: false when it is superseded. A higher name starts a lease of its own."""
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

    def left_out(self, generation: LeaseName | None) -> bool:
        """Whether an orphan whose time is up by ``check`` is without a supervisor because the ``generation`` at work
        goes without it. None: there is none, or no driver. Being alone counts anew from the first sight of each: its
        tasks may still be on their way."""
        if generation is None:
            return False
        if generation != self._at_work:
            self._at_work = generation
            self._alone_since_ms = None
            return False
        return True


def relief(*, left_out: bool, controller_lives: bool, announced: bool, counted_on: int, held: bool) -> OrphanStep:
    """What an orphan whose time is up does next. It stops only when it is in no ISR (``counted_on`` are the partitions
    that have it there, those it leads among them): so the last one to serve a partition stays. ``announced``: the
    controller knows that it wants to go."""
    if not left_out:
        return OrphanStep.SERVE_ON if announced and not held else OrphanStep.NOTHING
    if not controller_lives or held:
        return OrphanStep.NOTHING
    if not announced:
        return OrphanStep.ASK_RELIEF
    return OrphanStep.NOTHING if counted_on else OrphanStep.STOP
