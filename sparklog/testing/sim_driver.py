"""The driver of a simulated cluster goes away: its controllers end, and nobody supervises the brokers.

Brokers decide by the production lease what to do about it. The rule that is checked: a cluster that nobody controls
serves on; an orphan stops only where a live controller has moved what it led.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from sparklog.broker.lease import Lease, LeaseName, OrphanStep, relief
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import Violation
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_world import SimWorld
from sparklog.testing.sim_zk import SimZk

CHECK_MS = 50
#: longer than a session: a controller that died with the driver is not taken for one that lives
ORPHAN_MS = 600
#: the driver that came back sees after so long that a broker of its has ended
SEEN_MS = 20
#: the driver stays away for up to this long
AWAY_MS = 2000


class DrivenCluster(Protocol):
    """What the driver's end befalls."""

    world: SimWorld
    zk: SimZk
    brokers: dict[int, SimBroker]
    controllers: list[CoreController]


class Driver:
    """Mutable, owned by the ``SimCluster``. While it is there it costs nothing."""

    def __init__(self, cluster: DrivenCluster, *, lease_type: type[Lease] = Lease) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self._lease_type = lease_type
        self._name = LeaseName(1, 1)
        self._away = False
        #: by broker and process
        self._leases: dict[tuple[int, int], Lease] = {}
        self.kinds: dict[str, Callable[[Random], None]] = {"driver away": self._go}

    def _go(self, chance: Random) -> None:
        away_ms = chance.randrange(AWAY_MS)
        if self._away:
            return
        self._away = True
        self.world.happened["driver away"] += 1
        self.world.note(f"driver away for {away_ms} ms: no controller, no supervisor")
        for controller in self.cluster.controllers:
            if controller.alive:
                controller.crash()
        for broker in self.cluster.brokers.values():
            self._lease(broker)
        self.world.at(away_ms, self.come_back)
        self.world.at(CHECK_MS, self._check)

    def come_back(self) -> None:
        """As another driver, which adopts the brokers it finds."""
        if not self._away:
            return
        self._away = False
        self._name = LeaseName(self._name.driver_epoch + 1, 1)
        self._leases.clear()
        self.world.note("the driver is back")
        for controller in self.cluster.controllers:
            if not controller.alive:
                controller.start()
        for broker in self.cluster.brokers.values():
            if not broker.alive:
                broker.start()
            elif broker.stopping:
                broker.run(broker.process, broker.withdraw_stop)

    def _lease(self, broker: SimBroker) -> Lease:
        key = broker.broker_id, broker.process
        if key not in self._leases:
            self._leases[key] = self._lease_type(
                self._name, supervised=True, orphan_timeout_ms=ORPHAN_MS, orphan_max_ms=-1
            )
        return self._leases[key]

    def _check(self) -> None:
        if not self._away:
            return
        for broker in self.cluster.brokers.values():
            if broker.alive and broker.incarnation != -1:
                broker.run(broker.process, lambda broker=broker: self._look(broker))  # type: ignore[misc]
        self.world.at(CHECK_MS, self._check)

    def _look(self, broker: SimBroker) -> None:
        lives = self.cluster.zk.controller_session != -1
        lease = self._lease(broker)
        step = lease.check(broker.now_ms)
        if step is OrphanStep.ASK_RELIEF:
            step = relief(controller_lives=lives, announced=broker.stopping, movable=broker.movable, held=lease.held)
        if step is OrphanStep.ASK_RELIEF:
            broker.ask_to_stop()
        elif step is OrphanStep.STOP:
            if broker.movable:
                raise Violation(
                    f"broker {broker.broker_id} stops as an orphan and leads {broker.movable} partitions still",
                    rule="orphans serve on",
                )
            self.world.note(f"b{broker.broker_id} stops: an orphan that leads nothing")
            broker.stop_in_order(lambda: self._stopped(broker))

    def _stopped(self, broker: SimBroker) -> None:
        """It was on its way out when the driver came back: it is started again, as one that is found dead is."""
        process = broker.process

        def start() -> None:
            if not self._away and not broker.alive and broker.process == process:
                broker.start()

        self.world.at(SEEN_MS, start)
