"""The Spark driver of a simulated cluster, which may end and be started again.

While there is no driver, no broker has a supervisor, and the driver's controllers are down: all of them, or all but a
standby on another host. A driver that starts again may leave one broker without a supervisor for a while.

A broker without a supervisor is an orphan. The production class ``SupervisorLease`` decides how an orphan reacts. The
simulation checks these rules: without a driver, every broker continues to serve, with or without a controller. An
orphan stops only if it is in no ISR and a live driver supervises the other brokers, but not the orphan.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from sparklog.broker.lifecycle.supervisor_lease import LeaseName, OrphanStep, SupervisorLease, relief
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import SimViolation
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_zk import SimZk

CHECK_MS = 50
#: How long a broker is an orphan before it reacts. Longer than a session, so that a controller that died with the
#: driver does not seem alive.
ORPHAN_MS = 600
#: The time after which the returned driver sees that one of its brokers has ended.
SEEN_MS = 20
#: The maximum absence of the driver, and the maximum time for which it leaves out a broker.
AWAY_MS = 2000


class DrivenCluster(Protocol):
    """The part of the simulated cluster that the driver uses."""

    world: SimNetwork
    zk: SimZk
    brokers: dict[int, SimBroker]
    controllers: list[CoreController]


class Driver:
    """The simulated Spark driver, which supervises brokers. A part of ``SimCluster``.

    A running driver causes no simulated events.
    """

    def __init__(self, cluster: DrivenCluster, *, lease_type: type[SupervisorLease] = SupervisorLease) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self._lease_type = lease_type
        self._name = LeaseName(1, 1)
        self._away = False
        #: The broker that the driver leaves without a supervisor; -1 means none.
        self._left_out = -1
        #: The leases, by broker and process.
        self._leases: dict[tuple[int, int], SupervisorLease] = {}
        #: The orphans that have asked the controller to move their leaderships, by broker and process.
        self._asked: set[tuple[int, int]] = set()
        self.kinds: dict[str, Callable[[Random], None]] = {"driver away": self._go}

    def _go(self, chance: Random) -> None:
        away_ms = chance.randrange(AWAY_MS)
        spared = chance.choice([*self.cluster.controllers, None])
        left_out = chance.choice([*self.cluster.brokers, -1])
        if self._away or self._left_out != -1:
            return
        self._away = True
        self.world.happened["driver away"] += 1
        self.world.happened["driver away, and a controller is there"] += spared is not None
        self.world.note(f"driver away for {away_ms} ms: no supervisor, controller {spared and spared.name}")
        for controller in self.cluster.controllers:
            if controller.alive and controller is not spared:
                controller.crash()
        for broker in self.cluster.brokers.values():
            self._lease(broker)
        self.world.at(away_ms, lambda: self.come_back(left_out))
        self.world.at(CHECK_MS, self._check)

    def come_back(self, left_out: int = -1) -> None:
        """Start a new driver, which supervises all running brokers except ``left_out`` (-1: no exception).

        If a driver is running already, make it supervise the broker that it has left out so far.
        """
        if not self._away:
            self._adopt_left_out()
            return
        self._away = False
        self._left_out = left_out
        self._name = LeaseName(self._name.driver_epoch + 1, 1)
        self.world.note(f"the driver is back, without b{left_out}" if left_out != -1 else "the driver is back")
        for controller in self.cluster.controllers:
            if not controller.alive:
                controller.start()
        for broker in self.cluster.brokers.values():
            if broker.broker_id != left_out:
                self._adopt(broker)
        if left_out != -1:
            self.world.happened["broker left out"] += 1
            self.world.at(AWAY_MS, self._adopt_left_out)

    def _adopt(self, broker: SimBroker) -> None:
        self._leases.pop((broker.broker_id, broker.process), None)
        if not broker.alive:
            broker.start()
        elif broker.stopping:
            broker.run(broker.process, broker.withdraw_stop)

    def _adopt_left_out(self) -> None:
        if self._left_out != -1:
            broker, self._left_out = self.cluster.brokers[self._left_out], -1
            self._adopt(broker)

    def _lease(self, broker: SimBroker) -> SupervisorLease:
        key = broker.broker_id, broker.process
        if key not in self._leases:
            self._leases[key] = self._lease_type(
                self._name, supervised=True, orphan_timeout_ms=ORPHAN_MS, orphan_max_ms=-1
            )
        return self._leases[key]

    def _check(self) -> None:
        if not self._away and self._left_out == -1:
            return
        for broker in self.cluster.brokers.values():
            orphan = self._away or broker.broker_id == self._left_out
            if orphan and broker.alive and broker.incarnation != -1:
                broker.run(broker.process, lambda broker=broker: self._look(broker))  # type: ignore[misc]
        self.world.at(CHECK_MS, self._check)

    def _look(self, broker: SimBroker) -> None:
        lease, key = self._lease(broker), (broker.broker_id, broker.process)
        if broker.stopping and key not in self._asked:
            return  # another action stops this broker already
        step = lease.check(broker.now_ms)
        if step is OrphanStep.ASK_RELIEF:
            step = relief(
                left_out=lease.left_out(None if self._away else self._name),
                controller_lives=self.cluster.zk.controller_session != -1,
                announced=broker.stopping,
                counted_on=broker.in_sync,
                held=lease.held,
            )
        if step is OrphanStep.ASK_RELIEF:
            self._asked.add(key)
            broker.ask_to_stop()
        elif step is OrphanStep.SERVE_ON:
            broker.withdraw_stop()
        elif step is OrphanStep.STOP:
            self._check_stop(broker)
            self.world.note(f"b{broker.broker_id} stops: an orphan in no ISR")
            self.world.happened["orphan stops"] += 1
            broker.stop_in_order(lambda: self._stopped(broker))

    def _check_stop(self, broker: SimBroker) -> None:
        who = f"broker {broker.broker_id} stops as an orphan"
        if self._away:
            raise SimViolation(f"{who}: the driver is away", rule="orphans serve on")
        if broker.in_sync:
            raise SimViolation(f"{who} and is in sync in {broker.in_sync} partitions", rule="orphans serve on")

    def _stopped(self, broker: SimBroker) -> None:
        """Restart a broker that was stopping when the driver returned, as the driver restarts every dead broker."""
        process = broker.process

        def start() -> None:
            wanted = not self._away and self._left_out != broker.broker_id
            if wanted and not broker.alive and broker.process == process:
                broker.start()

        self.world.at(SEEN_MS, start)
