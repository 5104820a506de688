"""The controller's core alone for a cluster larger than this machine: the cost of a dead broker.

There are no processes and no network. The production core gets the events of a real cluster: its writes of partition
states go through the production store to a ZooKeeper that only counts, and its updates to brokers are encoded and
dropped. So the times are pure processor time: of the core, and of the encoding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kazoo.protocol import serialization

from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import Effect, ReadStates, SendUpdate, WriteStates
from sparklog.controller.events import (
    BrokersRead,
    ControllerTicked,
    Event,
    Loaded,
    StatesRead,
    StatesWritten,
    TopicSnapshot,
    UpdateReplied,
)
from sparklog.model import (
    NO_LEADER,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicSchema,
    VersionedState,
)
from sparklog.protocol.messages import encode_message
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.zk.controller_store import ControllerStore, StateOutcome, Written
from sparklog.zk.multi_batcher import MultiBatcher
from sparklog.zk.ops import Check, Op, SetData
from sparklog.zk.session import ZkSession

_EPOCH = 1
#: The length, correlation id and kind of a request, before its content.
_REQUEST_BYTES = 12
_NAMES = 32


class Cost(NamedTuple):
    """The cost of a dead broker. Seconds are of one core."""

    brokers: int
    partitions: int
    #: The time until a new term has found no work, and every broker has a full update.
    load_s: float
    #: The time of the longest single step.
    load_stall_s: float
    #: The time from the event that the broker died until the core has ordered all writes of its partitions' states.
    decide_s: float
    #: The processor time of the core, until all brokers have all updates about the dead broker.
    core_s: float
    #: The additional time to create and encode requests to ZooKeeper and updates to brokers.
    sent_s: float
    #: The number of new leaders, and the number of ISRs that leaders shrank.
    elected: int
    shrunk: int
    #: The number of sequential requests; ``MultiBatcher`` has two in flight.
    round_trips: int
    requests: int
    request_bytes: int
    updates: int
    update_bytes: int
    largest_update_bytes: int


class CountingZookeeper:
    """The part of ``ZkSession`` that writes of states need: it grants every request in the next turn, and counts."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.turns = 0
        self._loop = asyncio.get_running_loop()
        self._company = MultiBatcher(self.multi)
        self._waiting: list[tuple[asyncio.Future[tuple[Any, ...]], Sequence[Op]]] = []

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
        self.requests += 1
        self.bytes += _request_bytes(ops)
        future: asyncio.Future[tuple[Any, ...]] = self._loop.create_future()
        self._waiting.append((future, ops))
        return future

    def multi_batched(self, ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
        return self._company.multi(ops)

    async def answer_all(self) -> None:
        """Complete requests, one round trip after the other, until no request waits."""
        await asyncio.sleep(0)
        while self._waiting:
            self.turns += 1
            waiting, self._waiting = self._waiting, []
            for future, ops in waiting:
                future.set_result(tuple(op.version + 1 if isinstance(op, SetData) else None for op in ops))
            await asyncio.sleep(0)
            await asyncio.sleep(0)


class LargeCluster:
    """A cluster of ``brokers`` with ``partitions``, in topics of 100, replication factor 3. Owner: one measurement."""

    def __init__(self, brokers: int, partitions: int) -> None:
        self.brokers = {number: _registration(number) for number in range(brokers)}
        self.topics = {record.name: record for record in _records(brokers, partitions)}
        self.nodes = {
            TopicPartition(record.name, number): _first_state(replicas)
            for record in self.topics.values()
            for number, replicas in enumerate(record.assignment)
        }
        settings = ControllerSettings(topic_defaults={"min.insync.replicas": "2"})
        self.controller = Controller(controller_id="bench", controller_epoch=_EPOCH, settings=settings)
        self.now_ms = 1_000_000
        self.core_s = 0.0
        self.longest_step_s = 0.0
        self.sent_s = 0.0
        self.updates: list[int] = []

    def step(self, event: Event) -> list[Effect]:
        began = time.process_time()
        effects = self.controller.step(event, self.now_ms)
        took_s = time.process_time() - began
        self.core_s += took_s
        self.longest_step_s = max(self.longest_step_s, took_s)
        return effects

    def load(self) -> float:
        """Load a new term with the whole cluster; return the seconds."""
        snapshots = tuple(
            TopicSnapshot(
                record,
                {number: self.nodes[TopicPartition(name, number)] for number in range(len(record.assignment))},
            )
            for name, record in self.topics.items()
        )
        self._follow(self.step(Loaded(tuple(self.brokers.values()), {}, snapshots, {})))
        self._tick()  # one step examines a bounded number of partitions
        assert self.controller.settled(), "a healthy cluster must need no change"
        took_s, self.core_s, self.updates = self.core_s, 0.0, []
        return took_s

    async def lose(self, victim: int) -> Cost:
        """Retire a broker and carry out all consequences; return their cost."""
        load_s = self.load()
        load_stall_s = self.longest_step_s
        del self.brokers[victim]
        zookeeper = CountingZookeeper()
        self.sent_s = 0.0
        effects = list(self.step(BrokersRead(tuple(self.brokers.values()), frozenset((victim,)))))
        while self.controller.deadline_ms is not None and self.controller.deadline_ms <= self.now_ms:
            effects += self.step(ControllerTicked())  # one step decides about a bounded number of partitions
        decide_s = self.core_s
        elected = await self._carry_out(effects, zookeeper)
        shrunk = self._shrink(victim)
        assert self.controller.settled(), "every broker must have its updates"
        assert not self.controller.state.leads(victim)
        return Cost(
            brokers=len(self.brokers) + 1,
            partitions=len(self.nodes),
            load_s=load_s,
            load_stall_s=load_stall_s,
            decide_s=decide_s,
            core_s=self.core_s,
            sent_s=self.sent_s,
            elected=elected,
            shrunk=shrunk,
            round_trips=zookeeper.turns,
            requests=zookeeper.requests,
            request_bytes=zookeeper.bytes,
            updates=len(self.updates),
            update_bytes=sum(self.updates),
            largest_update_bytes=max(self.updates),
        )

    async def _carry_out(self, effects: Sequence[Effect], zookeeper: CountingZookeeper) -> int:
        """Send writes to ZooKeeper as a controller's term does; return their number."""
        store = ControllerStore(cast("ZkSession", zookeeper))
        outcomes: dict[TopicPartition, int] = {}

        def told(tp: TopicPartition, outcome: StateOutcome | None) -> None:
            assert isinstance(outcome, Written)
            outcomes[tp] = outcome.version

        written = 0
        for effect in effects:
            if not isinstance(effect, WriteStates):
                continue
            written += len(effect.writes)
            began = time.process_time()
            for write in effect.writes:
                store.write_state(
                    write.tp,
                    write.state,
                    topic_id=write.topic_id,
                    leader_incarnation=write.leader_incarnation,
                    expected_version=write.expected_version,
                    on_outcome=told,
                )
                self.nodes[write.tp] = VersionedState(write.state, write.expected_version + 1, write.leader_incarnation)
            await zookeeper.answer_all()
            self.sent_s += time.process_time() - began
        self._follow(effects)
        # A term passes on all results of one turn of its loop: of the two multis in flight.
        for tps in _in_groups(list(outcomes), 100):
            self.now_ms += 5
            self._follow(self.step(StatesWritten({tp: outcomes[tp] for tp in tps})))
        self._tick()
        return written

    def _shrink(self, victim: int) -> int:
        """Shrink the in-sync sets as every leader does, and pass the notifications to the controller.

        The notification of a broker names the partitions that it leads. Returns the number of shrunk sets.
        """
        led: dict[int, dict[TopicPartition, VersionedState | None]] = {}
        for tp, node in self.nodes.items():
            state = node.state
            if victim in state.isr and state.leader != NO_LEADER:
                isr = tuple(member for member in state.isr if member != victim)
                shrunk = LeaderAndIsr(state.leader, state.leader_epoch, isr, state.controller_epoch)
                found = VersionedState(shrunk, node.version + 1, node.leader_incarnation)
                led.setdefault(state.leader, {})[tp] = found
        for states in led.values():
            self.nodes.update(cast("Mapping[TopicPartition, VersionedState]", states))
            self.now_ms += 5
            self._follow(self.step(StatesRead(states)))
        self._tick()
        return sum(map(len, led.values()))

    def _tick(self) -> None:
        while self.controller.deadline_ms is not None:
            self.now_ms = max(self.now_ms, self.controller.deadline_ms)
            self._follow(self.step(ControllerTicked()))

    def _follow(self, effects: Iterable[Effect]) -> None:
        """Answer the updates as brokers do."""
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            assert not isinstance(effect, ReadStates), "no log may be doubted"
            if isinstance(effect, SendUpdate):
                began = time.process_time()
                self.updates.append(len(encode_message(effect.update)))
                self.sent_s += time.process_time() - began
                waiting += self.step(UpdateReplied(effect.broker.broker_id, effect.update_id, 0))


def measure(brokers: int = 100, partitions: int = 200_000) -> Cost:
    async def run() -> Cost:
        return await LargeCluster(brokers, partitions).lose(brokers // 2)

    return asyncio.run(run())


def text(cost: Cost) -> str:
    rows = (
        (
            "a new term: all decided, every broker has a full update",
            f"{cost.load_s:.1f} s, at most {cost.load_stall_s:.1f} s without a decision",
        ),
        ("a broker is dead: its partitions decided, writes ordered", f"{cost.decide_s:.3f} s"),
        ("until all brokers have their updates, the core", f"{cost.core_s:.2f} s"),
        ("until all brokers have their updates, encoding of the requests", f"{cost.sent_s:.2f} s"),
        ("new leaders, and in-sync sets without it", f"{cost.elected:,} and {cost.shrunk:,}"),
        ("requests to ZooKeeper, in how many round trips", f"{cost.requests:,} in {cost.round_trips:,}"),
        ("bytes to ZooKeeper", f"{cost.request_bytes / 1e3:,.0f} kB"),
        ("updates to brokers", f"{cost.updates:,}"),
        (
            "bytes to brokers",
            f"{cost.update_bytes / 1e6:,.1f} MB, the largest {cost.largest_update_bytes / 1e3:,.0f} kB",
        ),
    )
    head = f"{cost.brokers:,} brokers, {cost.partitions:,} partitions, replication factor 3"
    return "\n".join([f"| {head} | one core |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _registration(number: int) -> BrokerRegistration:
    return BrokerRegistration(number, f"host-{number}.example.org", 9092, "boot", "cluster", True, None, 1)


def _records(brokers: int, partitions: int) -> Iterator[TopicRecord]:
    """Yield topics with replicas as Kafka spreads them: each round over the brokers with another shift."""
    per_topic = 100
    schema = (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),)
    for topic in range(-(-partitions // per_topic)):
        numbers = range(topic * per_topic, min((topic + 1) * per_topic, partitions))
        assignment = tuple(_replicas(number, brokers) for number in numbers)
        yield TopicRecord(f"topic-{topic:05}", f"{topic:0{_NAMES}x}", assignment, schema)


def _replicas(number: int, brokers: int) -> tuple[int, ...]:
    leader = number % brokers
    distance = 1 + (number // brokers) % (brokers - 2)
    return leader, (leader + distance) % brokers, (leader + distance + 1) % brokers


def _first_state(replicas: tuple[int, ...]) -> VersionedState:
    return VersionedState(LeaderAndIsr(replicas[0], 0, replicas, _EPOCH), 0, 1)


def _request_bytes(ops: Sequence[Op]) -> int:
    """Return the size of a request as kazoo encodes it."""
    encoded = [
        serialization.CheckVersion(op.path, op.version)
        if isinstance(op, Check)
        else serialization.SetData(op.path, op.data, op.version)
        for op in ops
        if isinstance(op, Check | SetData)
    ]
    assert len(encoded) == len(ops), "only existing states may be checked and set"
    return _REQUEST_BYTES + len(serialization.Transaction(encoded).serialize())


def _in_groups(tps: Sequence[TopicPartition], size: int) -> Iterator[Sequence[TopicPartition]]:
    for first in range(0, len(tps), size):
        yield tps[first : first + size]
