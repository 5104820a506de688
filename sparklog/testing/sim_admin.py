"""The operators of a simulated cluster. They create, extend, move and delete topics, and restart brokers cleanly.

Each action makes its random choices with its own generator. An action that is impossible does nothing. The requests are
written to ZooKeeper, as the admin handlers of a broker do. The checks of these handlers are the production code.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec import structs

from sparklog.broker.requests.reassignments import ReassignmentDraft
from sparklog.controller.events import PREFERRED, UNCLEAN, ElectionRequested
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition, TopicRecord
from sparklog.protocol.messages import ReplicaMove
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_zk import SimZk

#: The names of the topics in addition to the permanent topic.
NAMES = ("u", "v")
MAX_PARTITIONS = 8
#: The fraction of the topics ``NAMES`` that allow unclean elections.
UNCLEAN_SHARE = 0.4
#: The limits of moves in bytes per second; 0 means no limit. A batch has about ten bytes.
LIMITS = (0, 0, 200, 1000)


class OperatedCluster(Protocol):
    """The part of the simulated cluster that the operators use."""

    world: SimNetwork
    zk: SimZk
    brokers: dict[int, SimBroker]
    checkers: dict[TopicPartition, PartitionChecker]
    faults_over: bool

    def create_topic(self, name: str, assignment: tuple[tuple[int, ...], ...], *, unclean: bool = False) -> None: ...


class AdminActions:
    """The actions that operators perform on one simulated cluster. A part of ``SimCluster``."""

    def __init__(self, cluster: OperatedCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.zk = cluster.zk
        self._elections = 0
        self.kinds: dict[str, Callable[[Random], None]] = {
            "restart broker": self._restart,
            "withdrawn stop": self._withdrawn_stop,
            "create topic": self._create,
            "delete topic": self._delete,
            "create topic again": self._create_again,
            "add partitions": self._add_partitions,
            "reassign": self._reassign,
            "cancel reassignment": self._cancel,
            "elect preferred": self._elect,
            "elect uncleanly": self._elect_uncleanly,
        }

    def _did(self, kind: str, detail: object = "") -> None:
        self.world.note(f"operator: {kind} {detail}")
        self.world.happened[kind] += 1

    # --- brokers ------------------------------------------------------------------------------------------------

    def _spared(self, broker: SimBroker) -> bool:
        """Return whether the other ISR members have all acknowledged data if this broker stops cleanly."""
        return all(
            hosted.checker.spared(broker.broker_id, self.zk.read(tp), leaving=self.zk.stopping)
            for tp, hosted in broker.hosted.items()
        )

    def _stoppable(self, chance: Random) -> SimBroker | None:
        broker = self.cluster.brokers[chance.choice(list(self.cluster.brokers))]
        able = broker.alive and not broker.stopping and broker.incarnation != -1
        return broker if able and self._spared(broker) else None

    def _restart(self, chance: Random) -> None:
        broker = self._stoppable(chance)
        if broker is None:
            return
        self._did("restart broker", f"b{broker.broker_id}")
        away_ms = chance.randrange(600)

        def stopped() -> None:
            process = broker.process
            self.world.at(away_ms, lambda: broker.start() if broker.process == process else None)

        process = broker.process
        broker.run(process, lambda: broker.stop_in_order(stopped))

    def _withdrawn_stop(self, chance: Random) -> None:
        broker = self._stoppable(chance)
        if broker is None:
            return
        self._did("withdrawn stop", f"b{broker.broker_id}")
        process = broker.process
        broker.run(process, broker.ask_to_stop)
        self.world.at(chance.randrange(600), lambda: broker.run(process, broker.withdraw_stop))

    # --- topics -------------------------------------------------------------------------------------------------

    def _replicas(self, chance: Random, count: int) -> tuple[int, ...]:
        return tuple(chance.sample(list(self.cluster.brokers), count))

    def _factor(self, chance: Random) -> int:
        return min(len(self.cluster.brokers), chance.choice((2, 3, 3)))

    def _create(self, chance: Random) -> None:
        name = chance.choice(NAMES)
        factor, count = self._factor(chance), chance.randint(1, 2)
        if name not in self.zk.topics:
            self._did("create topic", name)
            assignment = tuple(self._replicas(chance, factor) for _ in range(count))
            self.cluster.create_topic(name, assignment, unclean=chance.random() < UNCLEAN_SHARE)

    def _delete(self, chance: Random) -> None:
        record = self._some_topic(chance)
        if record is not None and record.name not in self.zk.deletions:
            away = [broker.broker_id for broker in self.cluster.brokers.values() if not broker.alive]
            self._did("delete topic", record.name)
            self.world.happened["topic deleted while a broker was away"] += bool(away)
            self.zk.deletions[record.name] = record.topic_id

    def _create_again(self, chance: Random) -> None:
        """Delete a topic, and create another topic with the same name as soon as the name is free."""
        record = self._some_topic(chance)
        if record is None:
            return
        self.zk.deletions.setdefault(record.name, record.topic_id)
        assignment = tuple(self._replicas(chance, self._factor(chance)) for _ in range(chance.randint(1, 2)))

        def again() -> None:
            if record.name not in self.zk.topics:
                self._did("create topic again", record.name)
                self.cluster.create_topic(record.name, assignment)
            elif self.zk.topics[record.name].topic_id == record.topic_id and not self.cluster.faults_over:
                self.world.at(5, again)

        again()

    def _some_topic(self, chance: Random) -> TopicRecord | None:
        names = [name for name in NAMES if name in self.zk.topics]
        return self.zk.topics[chance.choice(names)] if names else None

    def _add_partitions(self, chance: Random) -> None:
        record = self._some_topic(chance)
        factor, choice = self._factor(chance), Random(chance.random())
        if record is None or record.name in self.zk.deletions or len(record.assignment) >= MAX_PARTITIONS:
            return
        self._did("add partitions", record.name)
        added = (self._replicas(choice, factor),)
        self.zk.put_topic(structs.replace(record, assignment=record.assignment + added))

    # --- moves and elections ------------------------------------------------------------------------------------

    def _move(self, kind: str, chance: Random, target: Callable[[tuple[int, ...]], tuple[int, ...] | None]) -> None:
        name = chance.choice(list(self.zk.topics))
        record = self.zk.topics[name]
        number = chance.randrange(len(record.assignment))
        if kind == "cancel reassignment":
            if not record.reassigning:
                return
            number = chance.choice(sorted(record.reassigning))
        wanted = target(record.assignment[number])
        live = {broker: found.incarnation for broker, found in self.zk.registered.items()}
        draft = ReassignmentDraft(record, live=live)
        try:
            draft.alter(ReplicaMove(name, number, wanted), throttle_bytes=chance.choice(LIMITS))
        except BrokerError:
            return
        if draft.record == record:
            return
        if number in record.reassigning and wanted is not None:
            kind = "change reassignment"
        self._did(kind, f"{name}-{number} to {wanted}")
        self.zk.put_topic(draft.record)

    def _reassign(self, chance: Random) -> None:
        """Move partitions to at least two replicas each.

        With fewer, they could not commit with min.insync.replicas=2.
        """

        def target(replicas: tuple[int, ...]) -> tuple[int, ...]:
            return self._replicas(chance, self._factor(chance))

        self._move("reassign", chance, target)

    def _cancel(self, chance: Random) -> None:
        self._move("cancel reassignment", chance, lambda replicas: None)

    def _elect(self, chance: Random) -> None:
        self._elections += 1
        self._did("elect preferred")
        self.zk.elections[f"e{self._elections}"] = ElectionRequested(PREFERRED)

    def _elect_uncleanly(self, chance: Random) -> None:
        """Request unclean elections in a temporary topic. They may lose records, which the permanent topic must not."""
        record = self._some_topic(chance)
        if record is None:
            return
        self._elections += 1
        self._did("elect uncleanly", record.name)
        tps = tuple(TopicPartition(record.name, number) for number in range(len(record.assignment)))
        for tp in tps:
            self.cluster.checkers[tp].unclean_allowed = True
        self.zk.elections[f"e{self._elections}"] = ElectionRequested(UNCLEAN, tps, {record.name: record.topic_id})

    def lift_limits(self) -> None:
        """Remove the throughput limits of all reassignments."""
        for record in list(self.zk.topics.values()):
            if any(move.throttle_bytes for move in record.reassigning.values()):
                moves = {n: structs.replace(move, throttle_bytes=0) for n, move in record.reassigning.items()}
                self.zk.put_topic(structs.replace(record, reassigning=moves))
