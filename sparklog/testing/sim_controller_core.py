"""A simulated controller process. It performs the effects of production controller cores, one core for each term.

A core decides and returns effects: the actions to perform. The process does in the simulation what
``cluster/controller_loop.py``, ``controller_term.py`` and ``effect_performer.py`` do with kazoo and sockets. Several
processes stand for election. A process that is not elected waits until the controller node is deleted. Instead of
watches, the process reads all watched nodes (``Levels``) every few milliseconds. A term may end at any time, and its
process may not know that: another process is elected and starts from the content of ZooKeeper, and the new epoch fences
the old term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

from sparklog.controller import effects as fx
from sparklog.controller import events as ev
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.election import UNCLEAN
from sparklog.errors import ErrorCode
from sparklog.model import (
    BrokerRegistration,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    assert_never,
)
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_hosted import SimBrokerHost
from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_session import SimSession
from sparklog.testing.sim_zk import SESSION_MS, BadVersion, EpochLost, Levels, NodeGone

PERIOD_MS = 20
ANSWER_MS = 150
STAND_MS = 60
UNCLEAN_RECOVERY_MS = 1000

_T = TypeVar("_T")
_Outcome = VersionedState | BadVersion | NodeGone | EpochLost


class ControlledCluster(SimBrokerHost, Protocol):
    """The part of the simulated cluster that the controllers use."""

    checkers: dict[TopicPartition, PartitionChecker]
    controllers: list[CoreController]

    @property
    def brokers(self) -> Mapping[int, SimBroker]: ...


class CoreController(SimProcess):
    """A simulated controller process. A part of ``SimCluster``."""

    #: The class of the core. Subclasses replace it by a broken variant, which the simulator must catch.
    core_type: ClassVar[type[Controller]] = Controller

    def __init__(self, name: str, cluster: ControlledCluster) -> None:
        super().__init__(name, cluster.world)
        self.cluster = cluster
        self.zk = cluster.zk
        self.core: Controller | None = None
        self.session: SimSession | None = None
        #: True if the last session expired. The sessions of missing brokers may have expired for the same reason.
        self._cautious = False
        #: The watched nodes as the core has last seen them.
        self._shown: Levels | None = None
        self._deleting: set[str] = set()

    def start(self) -> None:
        self.begin()
        self.core = None
        self._cautious = False
        self._open_session()

    def crash(self) -> None:
        self.end()
        self.core = None
        self.world.note(f"{self.name} crashes")

    def _open_session(self) -> None:
        self.session = SimSession(self, self.zk, on_over=self._session_over, on_moved=self._moved)
        self._stand(self.session)

    def _session_over(self) -> None:
        self.world.note(f"{self.name} hears that its session is over")
        self._cautious = self._cautious or self.core is not None
        self.core = None
        self._open_session()

    def _moved(self, connected: bool) -> None:
        if self.core is not None:
            self._step(self.core, ev.Reconnected() if connected else ev.Disconnected())
            self._shown = None

    # --- terms --------------------------------------------------------------------------------------------------

    def _stand(self, session: SimSession) -> None:
        """Stand for election until elected. An earlier claim of this session, whose response was lost, counts too."""
        if session is not self.session or self.core is not None:
            return

        def again() -> None:
            self.later(STAND_MS, lambda: self._stand(session))

        if self.zk.controller_session not in {-1, session.session_id}:
            again()  # another session holds the node, so wait
            return

        def elected(epoch: int | None) -> None:
            if epoch is None:
                again()
            elif session is self.session and self.core is None:
                self._load(session, epoch)

        session.ask(lambda: self.zk.elect(session.session_id), elected, again)

    def _load(self, session: SimSession, epoch: int) -> None:
        """Read all data at one moment, and begin the term.

        So the partition states are as new as the registrations.
        """
        if session is not self.session:
            return

        def loaded(found: tuple[Levels, dict[TopicPartition, VersionedState | None], dict[int, int]]) -> None:
            if session is self.session and self.core is None:
                self._begin_term(epoch, *found)

        def execute() -> tuple[Levels, dict[TopicPartition, VersionedState | None], dict[int, int]]:
            return self.zk.levels(), dict(self.zk.nodes), self.zk.absent()

        session.ask(execute, loaded, lambda: self.later(10, lambda: self._load(session, epoch)))

    def _begin_term(
        self,
        epoch: int,
        levels: Levels,
        states: dict[TopicPartition, VersionedState | None],
        absent: dict[int, int],
    ) -> None:
        self.world.note(f"{self.name} begins controller term {epoch}")
        self.world.happened["controller term"] += 1
        others = [other for other in self.cluster.controllers if other is not self and other.core is not None]
        self.world.happened["two controllers at once"] += bool(others)
        if self.zk.last_elected not in {"", self.name}:
            self.world.happened["controller change"] += 1
        self.zk.last_elected = str(self.name)
        settings = ControllerSettings(
            session_timeout_ms=SESSION_MS, unclean_recovery_timeout_ms=UNCLEAN_RECOVERY_MS, topic_defaults={}
        )
        core = self.core_type(controller_id=str(self.name), controller_epoch=epoch, settings=settings)
        self.core, self._shown, self._deleting = core, levels, set()
        topics = []
        for name, (record, version) in levels.topics.items():
            tps = [TopicPartition(name, number) for number in range(len(record.assignment))]
            known = {tp.partition: state for tp in tps if (state := states.get(tp)) is not None}
            topics.append(ev.TopicSnapshot(record, known, version))
        loaded = ev.Loaded(
            self._brokers(levels),
            levels.stopping,
            tuple(topics),
            levels.deletions,
            cautious=self._cautious,
            retired=levels.retired,
            elections=levels.elections,
            absent=tuple(_registration(b, incarnation) for b, incarnation in absent.items()),
            refusals=levels.refusals,
        )
        self._cautious = False
        self._step(core, loaded)
        self._look(core)

    def resign(self) -> None:
        """Close the ZooKeeper session, which ends the controller's term; then stand for election again."""
        if self.session is not None:
            self.session.close()
        self.world.note(f"{self.name} resigns")
        self.core = None
        self._open_session()

    def _over(self, core: Controller, why: str) -> None:
        if core is self.core:
            self.world.note(f"{self.name}: term {core.controller_epoch} is over: {why}")
            self.world.happened["deposed controller stopped"] += 1
            self.resign()

    def _brokers(self, levels: Levels) -> tuple[BrokerRegistration, ...]:
        """Return the registrations as the controller's store does.

        Whether a log is trusted comes from a separate node.
        """
        return tuple(
            _registration(
                b, incarnation, trusted=b not in levels.untrusted, doubted=tuple(sorted(levels.untrusted.get(b, ())))
            )
            for b, incarnation in levels.registered.items()
        )

    # --- watches ------------------------------------------------------------------------------------------------

    def _look(self, core: Controller) -> None:
        """Read the watched nodes and pass the time to the core, repeatedly until the term ends."""
        session = self.session
        if core is not self.core or session is None:
            return
        shown = self._shown
        # Without a change, no watch would fire. Notifications are read again until they are deleted.
        if shown is None or shown.isr_changes or not self.zk.shows(shown):
            session.ask(self.zk.levels, lambda levels: self._show(core, session, levels), lambda: None)
        if core.deadline_ms is not None and core.deadline_ms <= self.now_ms:
            self._step(core, ev.ControllerTicked())
        self.later(PERIOD_MS + int(self.world.random.random() * PERIOD_MS), lambda: self._look(core))

    def _show(self, core: Controller, session: SimSession, levels: Levels) -> None:
        """Pass the changes to the core in the order in which watches fire. After a lost connection, pass all nodes."""
        if core is not self.core:
            return
        if levels.controller_session != session.session_id:
            self._over(core, "the controller node is another's")
            return
        before, self._shown = self._shown, levels
        if before is None or (before.registered, before.untrusted, before.retired) != (
            levels.registered,
            levels.untrusted,
            levels.retired,
        ):
            self._step(core, ev.BrokersRead(self._brokers(levels), levels.retired))
        if before is None or before.stopping != levels.stopping:
            self._step(core, ev.StoppingRead(levels.stopping))
        for name in before.topics if before else ():
            if name not in levels.topics and name not in self._deleting:
                self._step(core, ev.TopicGone(name, deleted=True))
        for name, found in levels.topics.items():
            if before is None or before.topics.get(name) != found:
                self._step(core, ev.TopicRead(ev.TopicSnapshot(found[0], {}, found[1])))
        if before is None or before.deletions != levels.deletions:
            self._step(core, ev.DeletionsRead(levels.deletions))
        if before is None or before.elections != levels.elections:
            self._step(core, ev.ElectionsRead(levels.elections))
        if before is None or before.refusals != levels.refusals:
            self._step(core, ev.RefusalsRead(levels.refusals))
        if levels.isr_changes:
            self._read_changed(core, levels.isr_changes)

    def _read_changed(self, core: Controller, changes: dict[int, tuple[TopicStates, ...]]) -> None:
        """Pass the changed states to the core, and delete the notifications.

        If a notification names no partitions, read the states of all partitions.
        """
        epoch = core.controller_epoch
        told = tuple(said for of_one in changes.values() for said in of_one)
        unsaid = () if all(changes.values()) else tuple(partition.tp for partition in core.state.partitions())

        def read(found: dict[TopicPartition, VersionedState | None]) -> None:
            if told:
                self._step(core, ev.StatesReported(told))
            if found:
                self._step(core, ev.StatesRead(found))
            self._ask(core, lambda: self.zk.delete_notifications(changes, epoch), lambda _: None, lambda: None)

        self._ask(core, lambda: self.zk.states(unsaid), read, lambda: None)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, core: Controller, event: ev.Event) -> None:
        """Pass an event to the core and perform its effects. Drop the event if the term has ended."""
        if core is not self.core:
            return
        for effect in core.step(event, self.now_ms):
            self._perform(core, effect)

    def _perform(self, core: Controller, effect: fx.Effect) -> None:
        match effect:
            case fx.WriteStates(writes):
                for write in writes:
                    if write.reason == UNCLEAN:
                        self._check_unclean(core, write)
                    self._write(core, write)
            case fx.ReadStates(partitions):
                self._read(core, partitions)
            case fx.SendUpdate():
                self._send(core, effect)
            case fx.TrustBroker(broker_id, incarnation):
                self._until_done(core, lambda: self.zk.trust(broker_id, incarnation))
            case fx.RequestLogEnds(broker, partitions):
                self._ask_log_ends(core, broker.broker_id, broker.incarnation, partitions)
            case fx.DeleteTopicNodes(name, topic_id):
                self._delete_topic(core, name, topic_id)
            case fx.DropDeletionRequest(name, topic_id):
                self._until_done(core, lambda: self.zk.drop_deletion(name, topic_id))
            case fx.ControllerReport(kind, detail):
                self.world.note(f"{self.name}: {kind}: {detail}")
                self.world.happened[kind] += 1
            case fx.RaiseCounters():
                raise AssertionError("simulated brokers register without what they have seen")
            case fx.Resign(detail):
                self._over(core, detail)
            case fx.DropElection(name):
                self._until_done(core, lambda: self.zk.elections.pop(name, None))
            case fx.WriteTopic():
                self._write_topic(core, effect)
            case fx.ReadTopic(name):
                self._read_topic(core, name)
            case _:
                assert_never(effect)

    def _check_unclean(self, core: Controller, write: fx.StateWrite) -> None:
        """Check that an unclean election is the last resort.

        The controller must not know a live member of the ISR with a trusted log, or a member that may soon return.
        """
        partition, checker = core.state.partition(write.tp), self.cluster.checkers.get(write.tp)
        if partition is None or partition.stored is None or checker is None:
            return
        live = self._shown.registered.keys() if self._shown is not None else set()
        isr = partition.stored.state.isr
        able = {member for member in isr if member in live and member not in partition.suspects}
        able |= set(isr) & set(core.brokers.liveness.held)
        if able:
            checker.fail("unclean elections at last", f"{write.state} with {sorted(able)} of ISR {isr} there")

    def _ask(
        self, core: Controller, execute: Callable[[], _T], answered: Callable[[_T], None], lost: Callable[[], None]
    ) -> None:
        """Send one request of this term to ZooKeeper. Drop a result that arrives after the end of the term."""
        session = self.session
        assert session is not None
        session.ask(
            execute,
            lambda result: answered(result) if core is self.core else None,
            lambda: lost() if core is self.core else None,
        )

    def _until_done(self, core: Controller, execute: Callable[[], object]) -> None:
        self._ask(core, execute, lambda _: None, lambda: self.later(10, lambda: self._until_done_again(core, execute)))

    def _until_done_again(self, core: Controller, execute: Callable[[], object]) -> None:
        if core is self.core:
            self._until_done(core, execute)

    def _write(self, core: Controller, write: fx.StateWrite) -> None:
        tp = write.tp
        checker = self.cluster.checkers.get(tp)
        if checker is not None:
            checker.proposed.add((write.expected_version, write.state.isr))

        def execute() -> _Outcome:
            if core.controller_epoch != self.zk.controller_epoch:
                self.world.happened["write of a deposed controller refused"] += 1
                return EpochLost()
            return self.zk.write_state(
                tp,
                write.state,
                write.expected_version,
                topic_id=write.topic_id,
                leader_incarnation=write.leader_incarnation,
            )

        def answered(result: _Outcome) -> None:
            match result:
                case VersionedState():
                    self._step(core, ev.StatesWritten({tp: result.version}))
                case BadVersion(found):
                    self._step(core, ev.StatesRefused({tp: found}))
                case NodeGone():
                    self._step(core, ev.StatesRefused({tp: None}))
                case EpochLost():
                    self._step(core, ev.Fenced("a write found a newer controller epoch"))

        self._ask(core, execute, answered, lambda: self._step(core, ev.StatesUnknown((tp,))))

    def _read(self, core: Controller, partitions: tuple[TopicPartition, ...]) -> None:
        def lost() -> None:
            self._read(core, partitions)

        self._ask(core, lambda: self.zk.states(partitions), lambda found: self._step(core, ev.StatesRead(found)), lost)

    def _write_topic(self, core: Controller, order: fx.WriteTopic) -> None:
        record, epoch = order.record, core.controller_epoch
        for write in order.writes:
            checker = self.cluster.checkers.get(write.tp)
            if checker is not None:
                checker.proposed.add((write.expected_version, write.state.isr))

        def execute() -> bool | EpochLost:
            if epoch != self.zk.controller_epoch:
                return EpochLost()
            return self.zk.write_topic(record, order.expected_version, order.writes)

        def answered(done: bool | EpochLost) -> None:
            if isinstance(done, EpochLost):
                self._step(core, ev.Fenced("a write found a newer controller epoch"))
            elif done:
                self._step(core, ev.TopicWritten(record.name, record.topic_id))
            else:
                self._step(core, ev.TopicNotWritten(record.name, record.topic_id))

        def lost() -> None:
            self._step(core, ev.TopicNotWritten(record.name, record.topic_id))

        self._ask(core, execute, answered, lost)

    def _read_topic(self, core: Controller, name: str) -> None:
        def execute() -> tuple[TopicRecord, int] | None:
            record = self.zk.topics.get(name)
            return None if record is None else (record, self.zk.topic_versions[name])

        def answered(found: tuple[TopicRecord, int] | None) -> None:
            if found is None:
                self._step(core, ev.TopicGone(name, deleted=True))
            else:
                self._step(core, ev.TopicRead(ev.TopicSnapshot(found[0], {}, found[1])))

        self._ask(core, execute, answered, lambda: self._read_topic(core, name))

    def _delete_topic(self, core: Controller, name: str, topic_id: str) -> None:
        self._deleting.add(name)
        epoch = core.controller_epoch

        def answered(done: bool) -> None:
            self._deleting.discard(name)
            if done:
                self._step(core, ev.TopicDeleted(name, topic_id))
            else:
                self._step(core, ev.Fenced("a deletion found a newer controller epoch"))

        def lost() -> None:
            self.later(10, lambda: self._delete_topic(core, name, topic_id) if core is self.core else None)

        self._ask(core, lambda: self.zk.delete_topic(name, topic_id, epoch), answered, lost)

    def _send(self, core: Controller, order: fx.SendUpdate) -> None:
        """Send an update to a broker. Report the response to the core, or the lack of one after ``ANSWER_MS``."""
        broker = self.cluster.brokers[order.broker.broker_id]
        process = self.process
        waiting = [True]

        def settle(event: ev.Event) -> None:
            if waiting:
                waiting.clear()
                self._step(core, event)

        def answer(code: ErrorCode) -> None:
            event = ev.UpdateReplied(broker.broker_id, order.update_id, code)
            broker.reply(self, process, lambda: settle(event))

        self.send(broker, lambda: broker.updated(order.update, answer))
        self.later(ANSWER_MS, lambda: settle(ev.UpdateLost(broker.broker_id, order.update_id)))

    def _ask_log_ends(
        self, core: Controller, broker_id: int, incarnation: int, partitions: tuple[TopicPartition, ...]
    ) -> None:
        broker = self.cluster.brokers[broker_id]
        process = self.process

        def deliver() -> None:
            logs = {tp: broker.hosted[tp].log for tp in partitions if tp in broker.hosted}
            ends = {tp: (log.last_epoch, log.log_end_offset) for tp, log in logs.items()}
            answer = ev.LogEndsRead(broker_id, incarnation, ends)
            broker.reply(self, process, lambda: self._step(core, answer))

        self.send(broker, deliver)


def _registration(
    broker_id: int, incarnation: int, *, trusted: bool = True, doubted: tuple[TopicPartition, ...] = ()
) -> BrokerRegistration:
    return BrokerRegistration(
        broker_id, f"h{broker_id}", 9000, "boot", "c", trusted, None, incarnation, doubted=doubted
    )
