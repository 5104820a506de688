"""The faults of a simulated cluster.

Each fault makes its random choices with its own generator, and acts on the current state of the cluster. Every effect
is counted, because a fault that never has an effect proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from sparklog.model import TopicPartition
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_hosted import Hosted
from sparklog.testing.sim_log import SimBatch
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_zk import SESSION_MS, SimZk

CLOCK_RATES = (0.5, 0.9, 0.97, 1.03, 1.1, 2.0)
#: The time after which a supervisor sees the end of its broker.
SEEN_MS = 20


class FaultyCluster(Protocol):
    """The part of the simulated cluster that the faults use."""

    world: SimNetwork
    zk: SimZk
    brokers: dict[int, SimBroker]
    controllers: list[CoreController]
    checkers: dict[TopicPartition, PartitionChecker]
    page_cache_loss: float
    faults_over: bool


class SimFaults:
    """A component that causes faults in one simulated cluster. A part of ``SimCluster``."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.zk = cluster.zk
        self.kinds: dict[str, Callable[[Random], None]] = {
            "crash": self._crash,
            "pause": self._pause,
            "cut link": self._cut_link,
            "cut zookeeper": self._cut_zookeeper,
            "isolate": self._isolate,
            "clock rate": self._clock_rate,
            "expire session": self._expire_session,
            "full disk": self._full_disk,
            "failed write": self._failed_write,
            "torn write": self._torn_write,
            "power cut": self._power_cut,
            "crash controller": self._crash_controller,
            "restart zookeeper": self._restart_zookeeper,
            "resign": self._resign,
            "lose a log": self._lose_log,
            "exchange logs": self._exchange_logs,
        }

    @property
    def _processes(self) -> list[SimProcess]:
        return [*self.cluster.brokers.values(), *self.cluster.controllers, self.zk]

    def _did(self, kind: str, detail: object = "") -> None:
        self.world.happened[kind] += 1
        if detail:
            self.world.note(f"{kind}: {detail}")

    def _broker(self, chance: Random) -> SimBroker:
        return self.cluster.brokers[chance.choice(list(self.cluster.brokers))]

    # --- crashes ------------------------------------------------------------------------------------------------

    def _crash(self, chance: Random) -> None:
        """Crash a broker or its host.

        The page cache is lost only if each ISR keeps a member that has its data. Otherwise the log guarantees nothing.
        """
        broker = self._broker(chance)
        loss = chance.random()
        if not broker.alive:
            return
        spared = all(
            hosted.checker.spared(broker.broker_id, self.zk.read(tp), leaving=self.zk.stopping)
            for tp, hosted in broker.hosted.items()
        )
        lose = spared and loss < self.cluster.page_cache_loss
        self._did("crash with lost page cache" if lose else "crash")
        incarnation = broker.incarnation
        broker.crash(lose_page_cache=lose, chance=Random(loss))
        self._after_death(broker, incarnation, chance)

    def _after_death(self, broker: SimBroker, incarnation: int, chance: Random) -> None:
        """Start the broker again later. The supervisor may see the end before that; otherwise the session expires."""
        process = broker.process
        if chance.random() < 0.5:
            self.world.at(SEEN_MS, lambda: self.zk.retire(broker.broker_id, incarnation))
        self.world.at(chance.randrange(1200), lambda: self._start(broker, process))

    def _start(self, broker: SimProcess, process: int) -> None:
        if not broker.alive and broker.process == process:
            self._begin(broker)

    @staticmethod
    def _begin(process: SimProcess) -> None:
        if isinstance(process, SimBroker | CoreController | SimZk):
            process.start()

    def _power_cut(self, chance: Random) -> None:
        """Crash every host at once, so that all data that is on no disk is lost."""
        self._did("power cut", "every host of a broker")
        for broker in self.cluster.brokers.values():
            incarnation = broker.incarnation
            if broker.alive:
                broker.crash(lose_page_cache=True, chance=chance)
            else:
                broker.lose_page_cache(chance)
            self._after_death(broker, incarnation, chance)
        for checker in self.cluster.checkers.values():
            checker.power_cut(self.zk.incarnation)

    def _crash_controller(self, chance: Random) -> None:
        controller = chance.choice(self.cluster.controllers)
        if controller.alive:
            self._did("crash controller")
            controller.crash()
            process = controller.process
            self.world.at(chance.randrange(1000), lambda: self._start(controller, process))

    def _resign(self, chance: Random) -> None:
        leading = [controller for controller in self.cluster.controllers if controller.core is not None]
        if leading and leading[0].alive:
            self._did("resign")
            leading[0].run(leading[0].process, leading[0].resign)

    def _restart_zookeeper(self, chance: Random) -> None:
        if self.zk.alive:
            self._did("restart zookeeper", "for a while")
            self.zk.end()
            process = self.zk.process
            self.world.at(chance.randrange(2 * SESSION_MS), lambda: self._start(self.zk, process))

    # --- time ---------------------------------------------------------------------------------------------------

    def _pause(self, chance: Random) -> None:
        """Pause a process, sometimes for longer than its session.

        After that, it still believes that it is leader or controller.
        """
        process = self._some_process(chance)
        pause_ms = chance.randrange(2 * SESSION_MS)
        if process.alive:
            self._did("pause beyond the session" if pause_ms > SESSION_MS else "pause")
            self.world.note(f"{process.name} pauses for {pause_ms} ms")
            process.pause(pause_ms)

    def _some_process(self, chance: Random) -> SimProcess:
        if chance.random() < 0.7:
            return self._broker(chance)
        return chance.choice([*self.cluster.controllers, self.zk])

    def _clock_rate(self, chance: Random) -> None:
        process, rate = self._some_process(chance), chance.choice(CLOCK_RATES)
        self._did("fast clock" if rate > 1 else "slow clock", f"{process.name} at {rate}")
        process.set_clock(rate)
        self.world.at(chance.randrange(2000), lambda: process.set_clock(1.0))

    # --- links and sessions -------------------------------------------------------------------------------------

    def _cut_link(self, chance: Random) -> None:
        """Cut one or both directions between any two of the brokers, controllers and ZooKeeper."""
        names = [process.name for process in self._processes]
        one, other = chance.sample(names, 2)
        self._cut_between(chance, one, other, chance.randrange(1000))

    def _cut_zookeeper(self, chance: Random) -> None:
        one = chance.choice([process.name for process in self._processes if process is not self.zk])
        self._cut_between(chance, one, self.zk.name, chance.randrange(2 * SESSION_MS))

    def _cut_between(self, chance: Random, one: object, other: object, cut_ms: int) -> None:
        pairs = [(one, other), (other, one)]
        kind = chance.random()
        if kind < 0.4:
            self._did("two-way partition")
        else:
            self._did("one-way partition")
            pairs = pairs[:1] if kind < 0.7 else pairs[1:]
        self._cut(pairs, cut_ms)

    def _isolate(self, chance: Random) -> None:
        """Cut one process off from all others."""
        alone = self._some_process(chance).name
        others = [process.name for process in self._processes if process.name != alone]
        self._did("isolation")
        self._cut([pair for other in others for pair in ((alone, other), (other, alone))], chance.randrange(1000))

    def _cut(self, pairs: Sequence[tuple[object, object]], cut_ms: int) -> None:
        self.world.note(f"cut {' '.join(f'{one}>{other}' for one, other in pairs)} for {cut_ms} ms")
        self.world.cut.update(pairs)
        self.world.at(cut_ms, lambda: self.world.cut.difference_update(pairs))

    def _expire_session(self, chance: Random) -> None:
        """Expire the session of a broker, of the controller, or of both at once."""
        broker, which = self._broker(chance), chance.randrange(3)
        leading = [controller for controller in self.cluster.controllers if controller.core is not None]
        if which != 1 and broker.session is not None:
            self._did("session of a broker ended", f"b{broker.broker_id}")
            self.zk.end_session(broker.session.session_id)
        if which != 0 and leading and leading[0].session is not None:
            self._did("session of the controller ended", leading[0].name)
            self.zk.end_session(leading[0].session.session_id)
        self.world.happened["sessions of broker and controller ended"] += which == 2

    # --- disks --------------------------------------------------------------------------------------------------

    def _full_disk(self, chance: Random) -> None:
        broker = self._broker(chance)
        full_ms = chance.randrange(600)
        self.world.note(f"b{broker.broker_id} has no room for {full_ms} ms")
        broker.full_until_ms = self.world.now_ms + full_ms

    def _failed_write(self, chance: Random) -> None:
        """Make the next append fail, so that the broker takes its log directory offline."""
        broker = self._broker(chance)

        def fail(hosted: Hosted, batch: SimBatch) -> None:
            self._did("failed write")

            def stopped() -> None:
                process = broker.process
                self.world.at(chance.randrange(600), lambda: self._start(broker, process))

            broker.disk_failed(stopped)

        broker.append_fault = fail

    def _torn_write(self, chance: Random) -> None:
        """Make the process die in the next append, with half of the batch or the whole batch on the disk."""
        broker = self._broker(chance)

        def tear(hosted: Hosted, batch: SimBatch) -> None:
            whole = chance.random() < 0.5
            if whole:
                hosted.log.append_copies((batch,))
                hosted.checker.appended(broker.broker_id, 1)
            else:
                hosted.log.tear(batch)
            self._did("death after a write" if whole else "torn write", f"b{broker.broker_id}")
            incarnation = broker.incarnation
            broker.crash(lose_page_cache=False)
            self._after_death(broker, incarnation, chance)

        broker.append_fault = tear

    def _damaged(self, chance: Random, count: int) -> tuple[SimBroker, list[TopicPartition]] | None:
        """End a broker's process; return the logs to damage. Each ISR must keep a member that has its data."""
        broker = self._broker(chance)
        logs = chance.sample(sorted(broker.hosted), min(count, len(broker.hosted)))
        if not broker.alive or len(logs) < count:
            return None
        for tp in logs:
            if not broker.hosted[tp].checker.spared(broker.broker_id, self.zk.read(tp), leaving=self.zk.stopping):
                return None
        incarnation = broker.incarnation
        broker.crash(lose_page_cache=False)
        self._after_death(broker, incarnation, chance)
        return broker, logs

    def _lose_log(self, chance: Random) -> None:
        """Lose a log directory, or its readable partition.json, while the process is down."""
        found = self._damaged(chance, 1)
        if found is not None:
            broker, (tp,) = found
            self._did("lose a log", f"b{broker.broker_id} {tp}")
            broker.lose_log(tp)

    def _exchange_logs(self, chance: Random) -> None:
        """Swap two log directories, so that neither holds the log of its name."""
        found = self._damaged(chance, 2)
        if found is not None:
            broker, logs = found
            self._did("exchange logs", f"b{broker.broker_id} {logs[0]} {logs[1]}")
            for tp in logs:
                broker.lose_log(tp)

    # --- the end ------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """Start every process that is down, and end all faults; return the time at which the last pause ends.

        Pauses are not shortened. Otherwise later messages would overtake messages of the same connection that already
        wait for the end of the pause. During its pause, a process may still believe that it is leader, and refuse
        appends.
        """
        for broker in self.cluster.brokers.values():
            broker.append_fault = None
            broker.full_until_ms = -1
        for process in self._processes:
            process.set_clock(1.0)
            if not process.alive:
                self._begin(process)
        return max(self.world.now_ms, *(process.paused_until_ms for process in self._processes))
