"""The production controller core in the simulated cluster: its performer over ``SimZk`` and the simulated network.

What ``cluster/controller_loop.py`` does with kazoo and sockets. Watches are modelled by looking at levels every few
milliseconds; a term may end at any moment, and the next one starts from what ZooKeeper holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import ClassVar, TypeVar

from sparklog.controller import effects as fx
from sparklog.controller import events as ev
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.model import BrokerRegistration, TopicPartition, TopicRecord, TopicSchema, VersionedState
from sparklog.testing.sim_controller import CONTROLLER, ControlledCluster
from sparklog.testing.sim_world import ZK
from sparklog.testing.sim_zk import BadVersion

PERIOD_MS = 20
ANSWER_MS = 150
SESSION_MS = 400

_T = TypeVar("_T")


class CoreController:
    """Mutable, owned by the ``SimCluster``. Disturbed, it stops a broker in the controlled way and takes it back
    later, or ends its term."""

    #: seam for variants that the simulator must catch
    core_type: ClassVar[type[Controller]] = Controller

    def __init__(self, cluster: ControlledCluster) -> None:
        self.cluster = cluster
        self._world = cluster.world
        self._zk = cluster.zk
        self._core: Controller | None = None
        #: stopping brokers: id to the incarnation that asked
        self._stopping: dict[int, int] = {}
        #: of these, the ones that a test stops: not taken back
        self._stopping_for_good: set[int] = set()
        self.leaving: Collection[int] = self._stopping.keys()
        #: levels as last shown to the core
        self._shown: dict[str, object] = {}

    def start(self) -> None:
        self._new_term()
        self._look()

    def disturb(self, chance: Random) -> None:
        if chance.random() < 0.1:
            self._new_term()
            return
        registered = self._zk.registered
        broker = chance.choice(list(self.cluster.brokers))
        if broker in registered and broker not in self._stopping and self._spared(broker):
            self._ask_relief(broker)
            incarnation = registered[broker].incarnation
            self._world.at(chance.randrange(600), lambda: self._take_back(broker, incarnation))

    def calm(self) -> None:
        for broker in self._stopping.keys() - self._stopping_for_good:
            del self._stopping[broker]

    def _take_back(self, broker: int, incarnation: int) -> None:
        if broker not in self._stopping_for_good and self._stopping.get(broker) == incarnation:
            del self._stopping[broker]

    # --- terms --------------------------------------------------------------------------------------------------

    def _new_term(self) -> None:
        """Whatever the last term had under way goes on in the network, and is fenced by its epoch."""
        self._zk.controller_epoch += 1
        epoch = self._zk.controller_epoch
        self._world.note(f"controller term {epoch}")
        settings = ControllerSettings(session_timeout_ms=SESSION_MS, unclean_recovery_timeout_ms=1000)
        self._core = self.core_type(controller_id=f"c{epoch}", controller_epoch=epoch, settings=settings)
        self._shown = {"brokers": self._brokers(), "stopping": dict(self._stopping)}
        states = {tp: self._zk.read(tp) for tp in self.cluster.assignment}
        self._shown.update({str(tp): state.version for tp, state in states.items()})
        record = self._record()
        snapshot = ev.TopicSnapshot(record, {tp.partition: state for tp, state in states.items()})
        loaded = ev.Loaded(self._brokers(), dict(self._stopping), (snapshot,), {}, retired=self._retired())
        self._step(self._core, loaded)

    def _record(self) -> TopicRecord:
        assignment = tuple(replicas for _, replicas in sorted(self.cluster.assignment.items()))
        topic = next(iter(self.cluster.assignment)).topic
        return TopicRecord(topic, "topic-id", assignment, (TopicSchema(0, b""),))

    def _brokers(self) -> tuple[BrokerRegistration, ...]:
        """As the controller's store reads them: the mark says whether a broker is trusted, not its registration."""
        return tuple(
            BrokerRegistration(
                broker, f"h{broker}", 9000, "boot", "c", broker not in self._zk.untrusted, None, found.incarnation
            )
            for broker, found in sorted(self._zk.registered.items())
        )

    def _retired(self) -> frozenset[int]:
        """As the controller's store reads them: no later process of theirs has registered."""
        zk = self._zk
        return frozenset(
            broker
            for broker, incarnation in zk.retired.items()
            if broker not in zk.registered and zk.incarnation(broker) == incarnation
        )

    # --- watches ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Show the core what has changed, as watches and ISR notifications would."""
        chance = self._world.random
        core = self._core
        assert core is not None
        self._drop_outlived_stops()
        brokers, stopping = self._brokers(), dict(self._stopping)
        if self._changed("brokers", brokers):
            self._step(core, ev.BrokersRead(brokers, self._retired()))
        if self._changed("stopping", stopping):
            self._step(core, ev.StoppingRead(stopping))
        for tp in self.cluster.assignment:
            found = self._zk.read(tp)
            if self._changed(str(tp), found.version):
                self._step(core, ev.StatesRead({tp: found}))
        if core.deadline_ms is not None and core.deadline_ms <= self._world.now_ms:
            self._step(core, ev.Ticked())
        self._world.at(PERIOD_MS + chance.randrange(PERIOD_MS), self._look)

    def _changed(self, name: str, level: object) -> bool:
        if self._shown.get(name) == level:
            return False
        self._shown[name] = level
        return True

    def _drop_outlived_stops(self) -> None:
        """A stop does not outlive its incarnation."""
        registered = self._zk.registered
        for broker, incarnation in list(self._stopping.items()):
            if broker not in registered or registered[broker].incarnation != incarnation:
                self._stopping_for_good.discard(broker)
                del self._stopping[broker]

    def ask_to_stop(self, broker: int) -> None:
        """A controlled stop that is not taken back."""
        self._stopping_for_good.add(broker)
        self._ask_relief(broker)

    def _ask_relief(self, broker: int) -> None:
        self._stopping[broker] = self._zk.registered[broker].incarnation
        self._world.note(f"b{broker} asks to be relieved")

    def _spared(self, broker: int) -> bool:
        """A controlled stop takes a log out of the ISRs as a crash does; the others must hold what is promised."""
        return all(
            hosted.checker.spared(broker, self._zk.read(tp), leaving=self.leaving)
            for tp, hosted in self.cluster.brokers[broker].hosted.items()
        )

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, core: Controller, event: ev.Event) -> None:
        """Results for a term that is over are nobody's."""
        if core is not self._core:
            return
        for effect in core.step(event, self._world.now_ms):
            self._perform(core, effect)

    def _perform(self, core: Controller, effect: fx.Effect) -> None:
        match effect:
            case fx.WriteStates(writes):
                for write in writes:
                    self._write(core, write)
            case fx.ReadStates(partitions):
                self._read(core, partitions)
            case fx.SendUpdate():
                self._send(core, effect)
            case fx.TrustBroker(broker_id, incarnation):
                self._trust(core, broker_id, incarnation)
            case fx.AskLogEnds(broker, partitions):
                self._ask_log_ends(core, broker.broker_id, broker.incarnation, partitions)
            case fx.Report(kind, detail):
                self._world.note(f"controller: {kind}: {detail}")
            case fx.DeleteTopic() | fx.DropDeletionRequest() | fx.Resign():
                raise AssertionError(f"not expected here: {effect}")

    def _ask(self, execute: Callable[[], _T], answered: Callable[[_T], None], lost: Callable[[], None]) -> None:
        """One request to ZooKeeper; exactly one of ``answered`` and ``lost`` follows."""
        waiting = [True]

        def settle(action: Callable[[], None]) -> None:
            if waiting:
                waiting.clear()
                action()

        def arrive() -> None:
            result = execute()
            self._world.send(ZK, CONTROLLER, lambda: settle(lambda: answered(result)))

        self._world.send(CONTROLLER, ZK, arrive)
        self._world.at(ANSWER_MS, lambda: settle(lost))

    def _write(self, core: Controller, write: fx.StateWrite) -> None:
        tp = write.tp
        self.cluster.checkers[tp].proposed.add((write.expected_version, write.state.isr))

        def execute() -> VersionedState | BadVersion:
            if core.controller_epoch != self._zk.controller_epoch:
                return BadVersion(self._zk.read(tp))
            return self._zk.write_state(
                tp, write.state, write.expected_version, leader_incarnation=write.leader_incarnation
            )

        def answered(result: VersionedState | BadVersion) -> None:
            if isinstance(result, BadVersion):
                self._step(core, ev.StatesRefused({tp: result.found}))
            else:
                self._step(core, ev.StatesWritten({tp: result.version}))

        self._ask(execute, answered, lambda: self._step(core, ev.StatesUnknown((tp,))))

    def _read(self, core: Controller, partitions: tuple[TopicPartition, ...]) -> None:
        def execute() -> dict[TopicPartition, VersionedState | None]:
            return {tp: self._zk.read(tp) for tp in partitions}

        def lost() -> None:
            if core is self._core:
                self._read(core, partitions)

        self._ask(execute, lambda found: self._step(core, ev.StatesRead(found)), lost)

    def _trust(self, core: Controller, broker_id: int, incarnation: int) -> None:
        def lost() -> None:
            if core is self._core:
                self._trust(core, broker_id, incarnation)

        self._ask(lambda: self._zk.trust(broker_id, incarnation), lambda _: None, lost)

    def _send(self, core: Controller, order: fx.SendUpdate) -> None:
        """Over a connection of its own: an answer, or the news that it broke."""
        broker = self.cluster.brokers[order.broker.broker_id]
        process = broker.process
        waiting = [True]

        def settle(event: ev.Event) -> None:
            if waiting:
                waiting.clear()
                self._step(core, event)

        def deliver() -> None:
            code = broker.updated(order.update)
            answer = ev.UpdateAnswered(broker.broker_id, order.update_id, code)
            self._world.send(broker.broker_id, CONTROLLER, lambda: settle(answer))

        self._world.send(CONTROLLER, broker.broker_id, lambda: broker.run(process, deliver))
        self._world.at(ANSWER_MS, lambda: settle(ev.UpdateLost(broker.broker_id, order.update_id)))

    def _ask_log_ends(
        self, core: Controller, broker_id: int, incarnation: int, partitions: tuple[TopicPartition, ...]
    ) -> None:
        broker = self.cluster.brokers[broker_id]
        process = broker.process

        def deliver() -> None:
            ends = {tp: (broker.hosted[tp].log.last_epoch, broker.hosted[tp].log.log_end_offset) for tp in partitions}
            answer = ev.LogEndsRead(broker_id, incarnation, ends)
            self._world.send(broker_id, CONTROLLER, lambda: self._step(core, answer))

        self._world.send(CONTROLLER, broker_id, lambda: broker.run(process, deliver))
