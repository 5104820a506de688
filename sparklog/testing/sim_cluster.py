"""A whole cluster in one thread: production replica cores under a seed's faults, checked after every step.

``SimCluster(seed).run()`` plays a schedule: brokers crash and come back, with or without their page cache; links are
cut in one or both directions; brokers pause longer than their sessions live; messages are lost, late, doubled;
leaders change for no reason. Then the faults stop, and everything acknowledged must be on every replica. A failure
raises ``Violation`` and carries the seed; the same seed fails the same way.

::

    clients --produce--> SimBroker (Replica core, SimLog) --fetch--> SimBroker
                              |  WriteIsr                       ^ Decided
                              v                                 |
                            SimZk <-- compare-and-set -- ControllerActor
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from random import Random

from sparklog.model import LeaderAndIsr, TopicPartition, VersionedState
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_broker import Hosted, Produce, SimBroker
from sparklog.testing.sim_checks import PartitionChecker, Violation
from sparklog.testing.sim_controller import CONTROLLER, ControlledCluster, ControllerActor, StandInController
from sparklog.testing.sim_log import SimLog
from sparklog.testing.sim_schedule import DISTURB, Action, draw_schedule, keep_only
from sparklog.testing.sim_world import FINE, WEATHERS, ZK, SimWorld, Weather
from sparklog.testing.sim_zk import SimZk

SESSION_MS = 400
PRODUCE_MS = 12
COMPARE_MS = 250


class SimCluster:
    """Mutable; one run each. ``check_cores`` off leaves finding a fault to the checker that sees only behaviour."""

    def __init__(
        self,
        seed: int,
        *,
        brokers: int = 3,
        partitions: int = 1,
        min_isr: int = 2,
        replica_type: type[Replica] = Replica,
        controller_type: Callable[[ControlledCluster], ControllerActor] = StandInController,
        check_cores: bool = True,
        weather: Weather | None = None,
        restless: float | None = None,
        page_cache_loss: float = 0.3,
        accidents: bool = True,
    ) -> None:
        """``weather`` and ``restless`` (how often leaders change for no reason) are the seed's choice if not given;
        ``page_cache_loss`` is the chance that a crash takes what was not flushed, where the promise allows it. Without
        ``accidents`` nothing happens but what a test orders."""
        self.seed = seed
        self.world = SimWorld(seed, weather=FINE)
        self.world.weather = weather or self.world.random.choice(WEATHERS)
        self.zk = SimZk(self._written)
        self.settings = ReplicaSettings(lag_time_max_ms=400, connection_grace_ms=60, isr_retry_ms=100)
        self.replica_type = replica_type
        self.check_cores = check_cores
        self.append_failure = 0.01
        self.page_cache_loss = page_cache_loss
        self.min_isr = min_isr
        self.brokers: dict[int, SimBroker] = {}
        self.assignment: dict[TopicPartition, tuple[int, ...]] = {}
        self.checkers: dict[TopicPartition, PartitionChecker] = {}
        self._restless = self.world.random.choice((0.0, 0.03, 0.15)) if restless is None else restless
        self._produced = 0
        self._faults = True
        self._accidents = accidents
        self._kinds: dict[str, Callable[[SimBroker, Random], None]] = {
            "crash": self._crash,
            "pause": self._pause,
            "cut link": self._cut_link,
            "cut zookeeper": self._cut_zk,
        }
        ids = list(range(1, brokers + 1))
        for broker_id in ids:
            self.brokers[broker_id] = SimBroker(broker_id, self)
        for number in range(partitions):
            self._place(TopicPartition("t", number), tuple(ids[number % brokers :] + ids[: number % brokers]))
        self.controller = controller_type(self)

    def _place(self, tp: TopicPartition, replicas: tuple[int, ...]) -> None:
        logs = {broker_id: SimLog() for broker_id in replicas}
        checker = PartitionChecker(str(tp), logs, min_copies=min(self.min_isr, len(replicas)))
        checker.isr = replicas
        for broker_id, log in logs.items():
            self.brokers[broker_id].hosted[tp] = Hosted(log, checker)
        self.assignment[tp] = replicas
        self.checkers[tp] = checker
        self.zk.create(tp, LeaderAndIsr(replicas[0], 0, replicas, controller_epoch=1))

    # --- the run ------------------------------------------------------------------------------------------------

    def schedule(self, fault_ms: int) -> tuple[Action, ...]:
        """What befalls this cluster within that time, by its seed."""
        if not self._accidents:
            return ()
        return draw_schedule(Random(f"schedule {self.seed}"), until_ms=fault_ms, restless=self._restless)

    def run(self, *, fault_ms: int = 6000, heal_ms: int = 4000, only: Collection[int] | None = None) -> None:
        """Play the seed's schedule; of its actions the ``only`` ones, if given.

        Raises:
            Violation: a promise was broken; the message has seed, time and the end of the trace.
        """
        try:
            for action in keep_only(self.schedule(fault_ms), only):
                self.world.at(action.at_ms, partial(self._play, action))
            self._start()
            self.world.run_until(fault_ms)
            self._heal()
            self.world.run_until(fault_ms + heal_ms)
            self._check_settled()
        except AssertionError as broken:
            trace = "\n".join(list(self.world.trace)[-40:])
            raise Violation(f"seed {self.seed} at {self.world.now_ms} ms: {broken}\n{trace}") from broken

    def _start(self) -> None:
        for broker in self.brokers.values():
            broker.start()
        self.controller.start()
        self.world.at(PRODUCE_MS, self._produce)
        self.world.at(COMPARE_MS, self._compare)

    def _produce(self) -> None:
        """Clients know the leader most of the time."""
        if not self._faults:
            return
        chance = self.world.random
        for tp, replicas in self.assignment.items():
            self._produced += 1
            leader = self.zk.read(tp).state.leader
            target = leader if leader in self.brokers and chance.random() < 0.8 else chance.choice(replicas)
            acks = chance.choices((-1, 1, 0), (8, 2, 1))[0]
            self.produce(tp, target, Produce(f"{tp}/{self._produced}", chance.randint(1, 3), acks))
        self.world.at(1 + chance.randrange(2 * PRODUCE_MS), self._produce)

    def produce(self, tp: TopicPartition, target: int, produce: Produce) -> None:
        broker = self.brokers[target]
        process = broker.process
        self.world.send("client", target, lambda: broker.run(process, lambda: broker.produce(tp, produce)))

    def _compare(self) -> None:
        for checker in self.checkers.values():
            checker.logs_match()
        self.world.at(COMPARE_MS, self._compare)

    def _written(self, tp: TopicPartition, before: VersionedState, after: VersionedState) -> None:
        self.world.note(f"zk: {tp} version {after.version}: {after.state}")
        self.checkers[tp].isr_written(before, after, incarnation=self.zk.incarnation)

    # --- faults -------------------------------------------------------------------------------------------------

    def _play(self, action: Action) -> None:
        """Actions overlap. A fault that meets a broker that is down starts it."""
        chance = Random(action.seed)
        if action.kind == DISTURB:
            self.controller.disturb(chance)
            return
        broker = self.brokers[chance.choice(list(self.brokers))]
        if not broker.alive:
            broker.start()
        else:
            self._kinds[action.kind](broker, chance)

    def _crash(self, broker: SimBroker, chance: Random) -> None:
        """The page cache goes only where that leaves a member of each ISR with its data: the promise's condition."""
        spared = all(
            hosted.checker.spared(broker.broker_id, self.zk.read(tp), leaving=self.controller.leaving)
            for tp, hosted in broker.hosted.items()
        )
        incarnation = broker.incarnation
        loss, seen, restart_ms = chance.random(), chance.random(), chance.randrange(1200)
        broker.crash(lose_page_cache=spared and loss < self.page_cache_loss)
        if seen < 0.5:
            self.world.at(20, lambda: self.zk.retire(broker.broker_id, incarnation))
        else:
            self.world.at(SESSION_MS, lambda: self.zk.expire(broker.broker_id, incarnation))
        process = broker.process

        def restart() -> None:
            if not broker.alive and broker.process == process:
                broker.start()

        self.world.at(restart_ms, restart)

    def _pause(self, broker: SimBroker, chance: Random) -> None:
        """Longer than the session, sometimes: it wakes as a leader that does not know it is none."""
        pause_ms = chance.randrange(2 * SESSION_MS)
        broker.paused_until_ms = self.world.now_ms + pause_ms
        self.world.note(f"b{broker.broker_id} pauses for {pause_ms} ms")
        if pause_ms > SESSION_MS:
            self._expire_later(broker, pause_ms)

    def _cut_link(self, broker: SimBroker, chance: Random) -> None:
        ends: list[object] = [*(b for b in self.brokers if b != broker.broker_id), CONTROLLER]
        other = chance.choice(ends)
        pairs = [(broker.broker_id, other), (other, broker.broker_id)]
        self._cut(pairs if chance.random() < 0.5 else pairs[: chance.randint(1, 2)], chance.randrange(1000))

    def _cut_zk(self, broker: SimBroker, chance: Random) -> None:
        """Requests, answers or both get lost; the session ends when it lasts."""
        cut_ms = chance.randrange(2 * SESSION_MS)
        pairs: list[tuple[object, object]] = [(broker.broker_id, ZK), (ZK, broker.broker_id)]
        self._cut(chance.choice((pairs, pairs[:1], pairs[1:])), cut_ms)
        if cut_ms > SESSION_MS:
            self._expire_later(broker, cut_ms)

    def _cut(self, pairs: list[tuple[object, object]], cut_ms: int) -> None:
        self.world.note(f"cut {pairs} for {cut_ms} ms")
        self.world.cut.update(pairs)
        self.world.at(cut_ms, lambda: self.world.cut.difference_update(pairs))

    def _expire_later(self, broker: SimBroker, back_ms: int) -> None:
        """Its session ends while it cannot be heard; when it is back it registers again, as the same process."""
        incarnation, process = broker.incarnation, broker.process
        self.world.at(SESSION_MS, lambda: self.zk.expire(broker.broker_id, incarnation))
        self.world.at(back_ms + 1, lambda: broker.run(process, lambda: self._register_again(broker, incarnation)))

    def _register_again(self, broker: SimBroker, incarnation: int) -> None:
        if broker.incarnation == incarnation and incarnation != -1:
            broker.register()

    # --- the end ------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self._faults = False
        self.controller.calm()
        self.world.weather = FINE
        self.world.cut.clear()
        self.append_failure = 0.0
        self.world.note("faults stop")
        for broker in self.brokers.values():
            if not broker.alive:
                broker.start()
            else:
                self._revive(broker)

    def _revive(self, broker: SimBroker) -> None:
        """A broker whose session ended while it was away notices at the latest now."""
        broker.paused_until_ms = min(broker.paused_until_ms, self.world.now_ms)
        registration = self.zk.registered.get(broker.broker_id)
        if registration is None or registration.incarnation != broker.incarnation:
            broker.register()

    def _check_settled(self) -> None:
        for tp, checker in self.checkers.items():
            state = self.zk.read(tp).state
            if set(state.isr) != set(self.assignment[tp]) or state.leader not in self.brokers:
                raise Violation(f"{tp}: after the faults the state is {state}")
            leader = self.brokers[state.leader].hosted[tp]
            checker.settled(leader.log)
            for broker_id in self.assignment[tp]:
                replica = self.brokers[broker_id].hosted[tp].replica
                if replica is None or replica.high_watermark != leader.log.log_end_offset:
                    raise Violation(f"{tp}: broker {broker_id} has not reached the log end")
                if replica.in_flight or replica.waiting:
                    raise Violation(f"{tp}: broker {broker_id} still waits")
