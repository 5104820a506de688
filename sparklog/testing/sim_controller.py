"""A stand-in for the controller: elects, bumps epochs of changed incarnations, strips untrusted members, tells brokers.

Deliberately plain: it looks at everything every few milliseconds. ``SimCluster`` takes any ``ControllerActor``, so that
the production core can take its place.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Protocol

from sparklog.model import NO_LEADER, LeaderAndIsr, TopicPartition, VersionedState
from sparklog.replica.events import Decided
from sparklog.testing.sim_broker import SimBroker, Surroundings
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_world import ZK
from sparklog.testing.sim_zk import Registration

CONTROLLER = "controller"
PERIOD_MS = 30
REPEAT_MS = 200


class ControllerActor(Protocol):
    """Whatever keeps the cluster led."""

    #: brokers that are being taken out of their ISRs
    leaving: Collection[int]

    def start(self) -> None: ...

    def disturb(self, chance: Random) -> None:
        """Do something that nothing asks for; choices are drawn from ``chance``."""

    def calm(self) -> None:
        """Take back what was done for no reason: the faults stop."""


class ControlledCluster(Surroundings, Protocol):
    """What a controller asks of the cluster besides."""

    assignment: dict[TopicPartition, tuple[int, ...]]
    checkers: dict[TopicPartition, PartitionChecker]


class StandInController:
    """Mutable, owned by the ``SimCluster``. ``resume_epochs`` and ``trust_all`` break it on purpose, for mutants."""

    resume_epochs = False
    trust_all = False

    def __init__(self, cluster: ControlledCluster) -> None:
        self.cluster = cluster
        #: leader changes that nothing asks for: partition to a number that chooses among the able
        self._moves: dict[TopicPartition, int] = {}
        self.leaving: Collection[int] = ()
        self._world = cluster.world
        #: incarnation of the leader that an epoch was given to
        self._given: dict[tuple[TopicPartition, int], int] = {}
        #: untrusted incarnations known to have left the ISR since they came
        self._stripped: set[tuple[TopicPartition, int, int]] = set()
        self._told: dict[tuple[TopicPartition, int], tuple[object, int]] = {}

    def start(self) -> None:
        self._look()

    def disturb(self, chance: Random) -> None:
        self._moves[chance.choice(list(self.cluster.assignment))] = chance.randrange(1000)

    def calm(self) -> None:
        self._moves.clear()

    def _look(self) -> None:
        for tp in self.cluster.assignment:
            node = self.cluster.zk.read(tp)
            registered = dict(self.cluster.zk.registered)
            self._note_stripped(tp, node.state, registered)
            wanted = self._decide(tp, node.state, registered)
            if wanted is not None:
                self._write(tp, wanted, node, registered)
            self._tell(tp, node, registered)
        self._trust_stripped()
        self._world.at(PERIOD_MS + self._world.random.randrange(PERIOD_MS), self._look)

    def _trust_stripped(self) -> None:
        for broker, registration in self.cluster.zk.registered.items():
            hosted = self.cluster.brokers[broker].hosted
            if all((tp, broker, registration.incarnation) in self._stripped for tp in hosted):
                self.cluster.zk.trust(broker, registration.incarnation)

    def _suspect(self, tp: TopicPartition, broker: int, registered: dict[int, Registration]) -> bool:
        """Registered after its page cache was lost, and not yet out of the ISR since."""
        registration = registered.get(broker)
        if registration is None or registration.trusted or self.trust_all:
            return False
        return (tp, broker, registration.incarnation) not in self._stripped

    def _note_stripped(self, tp: TopicPartition, state: LeaderAndIsr, registered: dict[int, Registration]) -> None:
        for broker, registration in registered.items():
            if not registration.trusted and broker not in state.isr:
                self._stripped.add((tp, broker, registration.incarnation))

    def _decide(
        self, tp: TopicPartition, state: LeaderAndIsr, registered: dict[int, Registration]
    ) -> LeaderAndIsr | None:
        """The next epoch's state, or None when the present one will do."""
        suspects = {broker for broker in state.isr if self._suspect(tp, broker, registered)}
        isr = tuple(broker for broker in state.isr if broker not in suspects) or state.isr
        if isr == state.isr:
            suspects = set()
        able = [b for b in self.cluster.assignment[tp] if b in isr and b in registered and b not in suspects]
        leader = state.leader
        move = self._moves.pop(tp, None)
        restless = bool(able) and move is not None
        if able and move is not None:
            leader = able[move % len(able)]
        elif leader not in able:
            leader = able[0] if able else NO_LEADER
        given = self._given.get((tp, state.leader_epoch), -1)
        resumed = leader != NO_LEADER and registered[leader].incarnation != given and not self.resume_epochs
        if leader == state.leader and isr == state.isr and not resumed and not restless:
            return None
        return LeaderAndIsr(leader, state.leader_epoch + 1, isr, controller_epoch=1)

    def _write(
        self, tp: TopicPartition, wanted: LeaderAndIsr, node: VersionedState, registered: dict[int, Registration]
    ) -> None:
        """The next look sees whether it was written."""
        self.cluster.checkers[tp].proposed.add((node.version, wanted.isr))
        incarnation = registered[wanted.leader].incarnation if wanted.leader != NO_LEADER else -1

        def execute() -> None:
            result = self.cluster.zk.write_state(tp, wanted, node.version, leader_incarnation=incarnation)
            if isinstance(result, VersionedState):
                self._given[tp, wanted.leader_epoch] = incarnation
                self._world.note(f"controller: {tp} epoch {wanted.leader_epoch} leader {wanted.leader} {wanted.isr}")

        self._world.send(CONTROLLER, ZK, execute)

    def _tell(self, tp: TopicPartition, node: VersionedState, registered: dict[int, Registration]) -> None:
        """All live replicas, when there is news and again from time to time: messages get lost."""
        live = {
            broker: registration.incarnation
            for broker, registration in registered.items()
            if broker not in node.state.isr or not self._suspect(tp, broker, registered)
        }
        decided = Decided(node.state, node.version, self.cluster.assignment[tp], live, self.cluster.min_isr)
        for broker_id in self.cluster.assignment[tp]:
            broker = self.cluster.brokers[broker_id]
            if broker_id not in live or not broker.alive or self._outlived(tp, node.state, broker_id, live):
                continue
            news = (node.version, tuple(live.items()), broker.process)
            told, told_ms = self._told.get((tp, broker_id), (None, 0))
            if news != told or self._world.now_ms - told_ms >= REPEAT_MS:
                self._told[tp, broker_id] = (news, self._world.now_ms)
                self._send(tp, broker, live[broker_id], decided)

    def _outlived(self, tp: TopicPartition, state: LeaderAndIsr, broker_id: int, live: dict[int, int]) -> bool:
        """The broker leads in an epoch that an earlier incarnation was given: it hears only of the next."""
        given = self._given.get((tp, state.leader_epoch), -1)
        return state.leader == broker_id and live[broker_id] != given and not self.resume_epochs

    def _send(self, tp: TopicPartition, broker: SimBroker, incarnation: int, decided: Decided) -> None:
        process = broker.process
        self._world.send(
            CONTROLLER,
            broker.broker_id,
            lambda: broker.run(process, lambda: broker.told(tp, incarnation, decided)),
        )
