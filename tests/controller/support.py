"""A world for the controller core: nodes with versions, brokers that receive updates, and checks after every step.

The world performs orders immediately, unless a test holds them back so that something else happens first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import (
    CREATE,
    ControllerReport,
    DeleteTopicNodes,
    DropDeletionRequest,
    DropElection,
    Effect,
    ReadStates,
    ReadTopic,
    RequestLogEnds,
    Resign,
    SendUpdate,
    StateWrite,
    TrustBroker,
    WriteStates,
    WriteTopic,
)
from sparklog.controller.events import (
    BrokersRead,
    ControllerTicked,
    DeletionsRead,
    ElectionRequested,
    ElectionsRead,
    Event,
    Loaded,
    StatesRead,
    StatesRefused,
    StatesReported,
    StatesWritten,
    StoppingRead,
    TopicDeleted,
    TopicNotWritten,
    TopicRead,
    TopicSnapshot,
    TopicWritten,
    TruncationRefused,
    UpdateReplied,
)
from sparklog.controller.reassignments import moving_record
from sparklog.model import (
    NO_LEADER,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
)
from sparklog.protocol.messages import ControlUpdate

SESSION_TIMEOUT_MS = 2000


def topic(name: str, *assignment: tuple[int, ...], topic_id: str = "", **config: str) -> TopicRecord:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    return TopicRecord(name, topic_id or f"id-{name}", assignment, (), config=settings)


def registration(broker_id: int, incarnation: int = 1, *, trusted: bool = True) -> BrokerRegistration:
    return BrokerRegistration(broker_id, f"h{broker_id}", 9092, "boot", "c", trusted, None, incarnation)


class World:
    """ZooKeeper's nodes, the live brokers, and one controller term."""

    def __init__(self, *records: TopicRecord, brokers: int = 3, epoch: int = 1, **settings: int) -> None:
        self.now_ms = 1_000_000
        self.nodes: dict[TopicPartition, VersionedState] = {}
        self.topics = {record.name: record for record in records}
        self.topic_versions = dict.fromkeys(self.topics, 0)
        self.elections: dict[str, ElectionRequested] = {}
        self.settings = settings
        self.deletions: dict[str, str] = {}
        self.brokers = {i: registration(i) for i in range(1, brokers + 1)}
        self.stopping: dict[int, int] = {}
        #: brokers in ``retire`` that have not registered again
        self.retired: set[int] = set()
        #: last registrations of brokers without one
        self.absent: dict[int, BrokerRegistration] = {}
        #: truncations that replicas refuse, as the next controller reads them
        self.refusals: tuple[TruncationRefused, ...] = ()
        self.effects: list[Effect] = []
        self.told: list[tuple[int, ControlUpdate]] = []
        self.counters: Counter[str] = Counter()
        self.held_writes: list[StateWrite] = []
        self.held_topic_writes: list[WriteTopic] = []
        self.hold_topic_writes = False
        self.held_updates: list[SendUpdate] = []
        self.hold_writes = False
        self.hold_reads = False
        self.hold_updates = False
        self.asked: list[RequestLogEnds] = []
        self.resigned = ""
        self._highest: dict[tuple[str, TopicPartition], int] = {}
        self.take_over(epoch)

    def take_over(self, epoch: int, *, cautious: bool = False) -> None:
        """Start a new controller, which reads everything."""
        settings = replace(
            ControllerSettings(session_timeout_ms=SESSION_TIMEOUT_MS, unclean_recovery_timeout_ms=10_000),
            **self.settings,  # type: ignore[arg-type]
        )
        self.controller = Controller(controller_id=f"c{epoch}", controller_epoch=epoch, settings=settings)
        self.held_writes, self.held_updates, self.held_topic_writes = [], [], []
        snapshots = tuple(self._snapshot(name) for name in self.topics)
        brokers = tuple(self.brokers.values())
        retired = frozenset(self.retired)
        deletions, elections = dict(self.deletions), dict(self.elections)
        absent = tuple(self.absent.values())
        stopping = dict(self.stopping)
        self.feed(
            Loaded(
                brokers,
                stopping,
                snapshots,
                deletions,
                cautious,
                retired,
                elections,
                absent,
                refusals=self.refusals,
            )
        )

    def _snapshot(self, name: str, *, states: bool = True) -> TopicSnapshot:
        record = self.topics[name]
        return TopicSnapshot(record, self._states(record) if states else {}, self.topic_versions[name])

    def _states(self, record: TopicRecord) -> dict[int, VersionedState]:
        tps = [TopicPartition(record.name, p) for p in range(len(record.assignment))]
        return {tp.partition: self.nodes[tp] for tp in tps if tp in self.nodes}

    # --- events ----------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Effect]:
        """Step, perform the orders, and repeat until no order follows. Return all orders."""
        events, orders = [event], []
        while events:
            effects = self.controller.step(events.pop(0), self.now_ms)
            orders.extend(effects)
            for effect in effects:
                events.extend(self._perform(effect))
            self.check_invariants()
        self.effects.extend(orders)
        return orders

    def advance(self, ms: int) -> None:
        """Advance the time, and fire all deadlines on the way."""
        end = self.now_ms + ms
        while (deadline := self.controller.deadline_ms) is not None and deadline <= end:
            self.now_ms = max(self.now_ms + 1, deadline)
            self.feed(ControllerTicked())
        self.now_ms = max(self.now_ms, end)

    def create(self, record: TopicRecord) -> list[Effect]:
        self.topics[record.name] = record
        self.topic_versions[record.name] = 0
        return self.feed(TopicRead(TopicSnapshot(record, {})))

    def change(self, record: TopicRecord, *, tell: bool = True) -> None:
        """Write the topic's record. The controller may not receive the notification yet."""
        self.topics[record.name] = record
        self.topic_versions[record.name] += 1
        if tell:
            self.feed(TopicRead(self._snapshot(record.name, states=False)))

    def reassign(self, *target: int, partition: int = 0, name: str = "t", tell: bool = True) -> None:
        """Write what the broker that accepts the request writes."""
        self.change(moving_record(self.topics[name], {partition: target}), tell=tell)

    def cancel(self, *, partition: int = 0, name: str = "t", tell: bool = True) -> None:
        original = self.topics[name].reassigning[partition].original
        self.reassign(*original, partition=partition, name=name, tell=tell)

    def ask_election(
        self, name: str, kind: str, *tps: TopicPartition, topic_ids: Mapping[str, str] | None = None
    ) -> list[Effect]:
        self.elections[name] = ElectionRequested(kind, tps or None, topic_ids or {})
        return self.feed(ElectionsRead(dict(self.elections)))

    def delete(self, name: str) -> None:
        self.deletions[name] = self.topics[name].topic_id
        self.feed(DeletionsRead(dict(self.deletions)))

    def lose(self, *broker_ids: int) -> list[Effect]:
        """Remove registrations."""
        for broker_id in broker_ids:
            self.absent[broker_id] = self.brokers.pop(broker_id)
        return self.feed(BrokersRead(tuple(self.brokers.values()), frozenset(self.retired)))

    def retire(self, *broker_ids: int) -> list[Effect]:
        """Report processes that their supervisors saw exit."""
        for broker_id in broker_ids:
            self.brokers.pop(broker_id, None)
        self.retired |= set(broker_ids)
        return self.feed(BrokersRead(tuple(self.brokers.values()), frozenset(self.retired)))

    def register(self, broker_id: int, incarnation: int, *, trusted: bool = True) -> list[Effect]:
        self.brokers[broker_id] = registration(broker_id, incarnation, trusted=trusted)
        self.absent.pop(broker_id, None)
        self.retired.discard(broker_id)
        return self.feed(BrokersRead(tuple(self.brokers.values()), frozenset(self.retired)))

    def ask_to_stop(self, broker_id: int) -> list[Effect]:
        self.stopping[broker_id] = self.brokers[broker_id].incarnation
        return self.feed(StoppingRead(dict(self.stopping)))

    def leader_writes_isr(self, tp: TopicPartition, *isr: int, notify: bool = True) -> None:
        """Change the ISR in ZooKeeper as the partition's leader. The controller may not receive the notification
        yet."""
        node = self.nodes[tp]
        state = structs.replace(node.state, isr=isr)
        self.nodes[tp] = VersionedState(state, node.version + 1, node.leader_incarnation)
        if notify:
            told = TopicStates(tp.topic, self.topics[tp.topic].topic_id, {tp.partition: self.nodes[tp]})
            self.feed(StatesReported((told,)))

    def write_held(self) -> None:
        """Perform the held-back writes of states."""
        self.hold_writes, writes, self.held_writes = False, self.held_writes, []
        for event in self._write(writes):
            self.feed(event)

    def write_topics_held(self) -> None:
        """Perform the held-back writes of records."""
        self.hold_topic_writes, writes, self.held_topic_writes = False, self.held_topic_writes, []
        for write in writes:
            self.feed(self.write_topic(write))

    def write_topic(self, order: WriteTopic) -> TopicWritten | TopicNotWritten:
        """Write all changes or none."""
        name, topic_id = order.record.name, order.record.topic_id
        same = name in self.topics and self.topics[name].topic_id == topic_id
        expected = {write.tp: write.expected_version for write in order.writes}
        found = {tp: self.nodes[tp].version if tp in self.nodes else CREATE for tp in expected}
        if not same or self.topic_versions[name] != order.expected_version or found != expected:
            return TopicNotWritten(name, topic_id, "lost")
        self.topics[name] = order.record
        self.topic_versions[name] += 1
        self._write(list(order.writes))
        return TopicWritten(name, topic_id)

    def answer_held(self) -> None:
        self.hold_updates, updates, self.held_updates = False, self.held_updates, []
        for update in updates:
            self.told.append((update.broker.broker_id, update.update))
            self.feed(UpdateReplied(update.broker.broker_id, update.update_id, 0))

    def answer_held_but(self, silent: int) -> None:
        """Let all brokers receive their updates and what follows, except one that hangs."""
        while heard := [held for held in self.held_updates if held.broker.broker_id != silent]:
            self.held_updates = [held for held in self.held_updates if held.broker.broker_id == silent]
            for held in heard:
                self.told.append((held.broker.broker_id, held.update))
                self.feed(UpdateReplied(held.broker.broker_id, held.update_id, 0))

    # --- orders ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> list[Event]:
        match effect:
            case WriteStates():
                if self.hold_writes:
                    self.held_writes.extend(effect.writes)
                    return []
                return self._write(list(effect.writes))
            case ReadStates():
                if self.hold_reads:
                    return []
                return [StatesRead({tp: self.nodes.get(tp) for tp in effect.partitions})]
            case WriteTopic():
                if self.hold_topic_writes:
                    self.held_topic_writes.append(effect)
                    return []
                return [self.write_topic(effect)]
            case ReadTopic():
                return [TopicRead(self._snapshot(effect.name, states=False))] if effect.name in self.topics else []
            case DropElection():
                del self.elections[effect.name]
            case SendUpdate():
                if self.hold_updates:
                    self.held_updates.append(effect)
                    return []
                self.told.append((effect.broker.broker_id, effect.update))
                return [UpdateReplied(effect.broker.broker_id, effect.update_id, 0)]
            case DeleteTopicNodes():
                del self.topics[effect.name]
                del self.deletions[effect.name]
                self.nodes = {tp: node for tp, node in self.nodes.items() if tp.topic != effect.name}
                return [TopicDeleted(effect.name, effect.topic_id)]
            case DropDeletionRequest():
                assert self.deletions.pop(effect.name) == effect.topic_id
            case RequestLogEnds():
                self.asked.append(effect)
            case ControllerReport():
                self.counters[effect.kind] += effect.count
            case Resign():
                self.resigned = effect.detail
            case TrustBroker():
                pass
        return []

    def _write(self, writes: list[StateWrite]) -> list[Event]:
        written: dict[TopicPartition, int] = {}
        refused: dict[TopicPartition, VersionedState | None] = {}
        for write in writes:
            node = self.nodes.get(write.tp)
            exists = write.tp.topic in self.topics and self.topics[write.tp.topic].topic_id == write.topic_id
            if exists and (node.version if node else CREATE) == write.expected_version:
                version = write.expected_version + 1
                self.nodes[write.tp] = VersionedState(write.state, version, write.leader_incarnation)
                written[write.tp] = version
            else:
                refused[write.tp] = node
        events: list[Event] = []
        if written:
            events.append(StatesWritten(written))
        if refused:
            events.append(StatesRefused(refused))
        return events

    # --- state -----------------------------------------------------------------------------------------------------

    def state(self, name: str = "t", partition: int = 0) -> LeaderAndIsr:
        return self.nodes[TopicPartition(name, partition)].state

    def trace(self, name: str = "t") -> list[str]:
        """Return one line for each partition: leader/epoch[ISR]."""
        lines = []
        for tp, node in sorted(self.nodes.items()):
            if tp.topic == name:
                lines.append(f"{node.state.leader}/{node.state.leader_epoch}{list(node.state.isr)}")
        return lines

    def knows(self, broker_id: int) -> Mapping[TopicPartition, LeaderAndIsr]:
        """Return what this broker's current incarnation has received, in the newest version each."""
        known: dict[TopicPartition, tuple[int, LeaderAndIsr]] = {}
        for told_id, update in self.told:
            if told_id != broker_id or update.incarnation != self.brokers[broker_id].incarnation:
                continue
            if update.full:
                known = {}
            for decision in update.partitions:
                tp = TopicPartition(decision.topic, decision.partition)
                if tp not in known or decision.version > known[tp][0]:
                    known[tp] = (decision.version, decision.state)
            for name, _ in update.deleted:
                known = {tp: found for tp, found in known.items() if tp.topic != name}
        return {tp: state for tp, (_, state) in known.items()}

    def sees(self, broker_id: int) -> list[int]:
        """Return the live brokers according to the last update of this broker."""
        lists = [update.brokers for told_id, update in self.told if told_id == broker_id and update.brokers is not None]
        return [endpoint.broker_id for endpoint in lists[-1]]

    def check_invariants(self) -> None:
        for tp, node in self.nodes.items():
            state = node.state
            assert state.isr, f"{tp}: empty ISR"
            assert state.leader == NO_LEADER or state.leader in state.isr, f"{tp}: leader not in its ISR: {state}"
            topic_id = self.topics[tp.topic].topic_id
            assert state.leader_epoch >= self._highest.get((topic_id, tp), 0), f"{tp}: the leader epoch decreased"
            self._highest[topic_id, tp] = state.leader_epoch
        known = self.controller.state
        for broker_id in self.brokers:
            leaders = {p.stored.state.leader for p in known.hosted(broker_id) if p.stored is not None}
            assert sorted(known.leaders(broker_id)) == sorted(leaders), f"leaders of what broker {broker_id} hosts"
        for broker_id, update in self.told:
            for decision in update.partitions:
                tp = TopicPartition(decision.topic, decision.partition)
                current = self.nodes.get(tp)
                if current is None or self.topics[tp.topic].topic_id != decision.topic_id:
                    continue
                assert decision.version <= current.version, f"{tp}: sent before it was durable"
                if decision.version == current.version and decision.state.leader == broker_id:
                    assert current.leader_incarnation == update.incarnation, (
                        f"{tp}: an epoch of an old incarnation was sent"
                    )
