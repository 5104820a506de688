"""A simulated broker: the performer of one ``Replica`` core per partition, over simulated log, network and ZooKeeper.

What ``broker/`` does with sockets, files and kazoo is done here with ``SimWorld``; the replica cores are the
production ones. A crash ends the process and keeps the log, all of it or what was flushed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from msgspec import structs

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr, TopicPartition, VersionedState
from sparklog.protocol.messages import ControlUpdate
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_checks import PartitionChecker, Violation
from sparklog.testing.sim_log import SimBatch, SimLog
from sparklog.testing.sim_world import ZK, SimWorld
from sparklog.testing.sim_zk import BadVersion, SimZk

FETCH_TIMEOUT_MS = 150
FETCH_PAUSE_MS = 20
FETCH_BATCHES = 4
ZK_TIMEOUT_MS = 120
TICK_MS = 25
CHECKPOINT_MS = 300

_T = TypeVar("_T")
Reply = Callable[[ev.LeaderAnswered, tuple[SimBatch, ...]], None]


@dataclass(frozen=True, slots=True)
class Produce:
    """One batch a client sent. The network may double it: each arrival is made unique."""

    body: str
    count: int
    acks: int
    timeout_ms: int = 500


@dataclass(slots=True)
class Fetching:
    """The follower's fetch loop for one leader and epoch; a later one replaces it."""

    leader: int
    leader_epoch: int
    #: number of the request under way; its answer or its time-out starts the next
    request: int = 0


@dataclass(slots=True)
class Hosted:
    """One partition on one broker. ``log`` and ``checkpoint`` are on disk; the rest dies with the process."""

    log: SimLog
    checker: PartitionChecker
    checkpoint: int = 0
    replica: Replica | None = None
    fetching: Fetching | None = None
    produces: dict[int, Produce] = field(default_factory=dict)


class Surroundings(Protocol):
    """What a broker asks of the cluster it is in."""

    world: SimWorld
    zk: SimZk
    settings: ReplicaSettings
    replica_type: type[Replica]
    brokers: dict[int, SimBroker]
    min_isr: int
    #: whether to call ``Replica.check_invariants`` after each event
    check_cores: bool
    #: chance that an append fails its checks
    append_failure: float


class SimBroker:
    """Mutable, owned by the ``SimCluster``."""

    def __init__(self, broker_id: int, cluster: Surroundings) -> None:
        self.broker_id = broker_id
        self.cluster = cluster
        self.world = cluster.world
        self.hosted: dict[TopicPartition, Hosted] = {}
        self.alive = False
        #: counts starts and crashes: what belongs to an earlier process does not happen
        self.process = 0
        self.incarnation = -1
        self.paused_until_ms = 0
        #: live brokers as the last update told, and (controller epoch, sequence) of that update
        self.live: dict[int, int] = {}
        self._last_update = (-1, -1)
        #: known from the host's boot id, and not yet told
        self._lost_page_cache = False
        self._tickets = 0

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process on what the disk holds; it leads nothing until told."""
        self.process += 1
        self.alive = True
        self.paused_until_ms = 0
        self.incarnation = -1
        self.live = {}
        self._last_update = (-1, -1)
        for hosted in self.hosted.values():
            hosted.replica = self.cluster.replica_type(
                self.broker_id, hosted.log, high_watermark=hosted.checkpoint, settings=self.cluster.settings
            )
            hosted.fetching = None
            hosted.produces.clear()
        self.register()
        self._later(TICK_MS, self._tick)
        self._later(CHECKPOINT_MS, self._checkpoint)

    def register(self) -> None:
        """Again and again until ZooKeeper is reached. Also after a session ended: the same process, log intact."""
        if (self.broker_id, ZK) in self.world.cut:
            self._later(50, self.register)
            return
        self.incarnation = self.cluster.zk.register(self.broker_id, lost_page_cache=self._lost_page_cache)
        self._lost_page_cache = False
        self.world.note(f"b{self.broker_id} registers as {self.incarnation}")

    def crash(self, *, lose_page_cache: bool) -> None:
        self.alive = False
        self.process += 1
        self.world.note(f"b{self.broker_id} crashes, page cache {'lost' if lose_page_cache else 'kept'}")
        for hosted in self.hosted.values():
            hosted.replica = None
            hosted.fetching = None
            if lose_page_cache:
                self._lost_page_cache = True
                hosted.log.lose_page_cache()
                hosted.checker.lost[self.broker_id] = self.cluster.zk.incarnation(self.broker_id)

    def run(self, process: int, action: Callable[[], None]) -> None:
        """Do it as that process, when it is not paused; never as a later one: connections and timers die with it."""
        if process != self.process or not self.alive:
            return
        pause_ms = self.paused_until_ms - self.world.now_ms
        if pause_ms > 0:
            self.world.at(pause_ms, lambda: self.run(process, action))
        else:
            action()

    def send(self, target: SimBroker, action: Callable[[], None]) -> None:
        """A message to that broker's present process."""
        process = target.process
        self.world.send(self.broker_id, target.broker_id, lambda: target.run(process, action))

    def _later(self, delay_ms: int, action: Callable[[], None]) -> None:
        process = self.process
        self.world.at(delay_ms, lambda: self.run(process, action))

    def _tick(self) -> None:
        for tp, hosted in self.hosted.items():
            deadline_ms = hosted.replica.deadline_ms if hosted.replica else None
            if deadline_ms is not None and deadline_ms <= self.world.now_ms:
                self.handle(tp, ev.Ticked())
        self._later(TICK_MS, self._tick)

    def _checkpoint(self) -> None:
        for hosted in self.hosted.values():
            if hosted.replica is not None:
                hosted.checkpoint = hosted.replica.high_watermark
            if self.world.random.random() < 0.5:
                hosted.log.flush()
        self._later(CHECKPOINT_MS, self._checkpoint)

    # --- what others bring --------------------------------------------------------------------------------------

    def told(self, tp: TopicPartition, incarnation: int, event: ev.Decided) -> None:
        """A controller's request; it is fenced by the incarnation it was meant for."""
        if incarnation == self.incarnation:
            self.handle(tp, event)

    def updated(self, update: ControlUpdate) -> int:
        """The production controller's request, fenced as the broker does it. Returns the answer's code."""
        if update.controller_epoch < self._last_update[0]:
            return ErrorCode.STALE_CONTROLLER_EPOCH
        if update.incarnation != self.incarnation:
            return ErrorCode.STALE_BROKER_EPOCH
        if (update.controller_epoch, update.sequence) < self._last_update:
            return ErrorCode.NONE
        self._last_update = (update.controller_epoch, update.sequence)
        if update.brokers is not None:
            self.live = {endpoint.broker_id: endpoint.incarnation for endpoint in update.brokers}
        for decision in update.partitions:
            tp = TopicPartition(decision.topic, decision.partition)
            if tp in self.hosted and decision.version >= 0:
                min_isr = self.cluster.min_isr
                self.handle(tp, ev.Decided(decision.state, decision.version, decision.replicas, self.live, min_isr))
        if update.brokers is not None:
            for tp in self.hosted:
                self.handle(tp, ev.BrokersChanged(self.live))
        return ErrorCode.NONE

    def produce(self, tp: TopicPartition, produce: Produce) -> None:
        self._tickets += 1
        unique = f"{produce.body}.{self.broker_id}.{self._tickets}"
        self.hosted[tp].produces[self._tickets] = replace(produce, body=unique)
        self.handle(tp, ev.ProduceArrived(self._tickets, produce.acks, self.world.now_ms + produce.timeout_ms))

    def handle(
        self,
        tp: TopicPartition,
        event: ev.Event,
        *,
        batches: tuple[SimBatch, ...] = (),
        reply: Reply | None = None,
    ) -> None:
        """Step the core, carry out its effects in order, then hand over what they led to."""
        hosted = self.hosted[tp]
        replica = hosted.replica
        assert replica is not None
        queue: deque[ev.Event] = deque([event])
        while queue:
            for effect in replica.step(queue.popleft(), self.world.now_ms):
                result = self._perform(tp, hosted, effect, batches, reply)
                if result is not None:
                    queue.append(result)
        if self.cluster.check_cores:
            replica.check_invariants()

    def _perform(
        self, tp: TopicPartition, hosted: Hosted, effect: fx.Effect, batches: tuple[SimBatch, ...], reply: Reply | None
    ) -> ev.Event | None:
        match effect:
            case fx.AppendAsLeader(ticket, leader_epoch):
                return self._append_as_leader(hosted, ticket, leader_epoch)
            case fx.AnswerProduce(ticket, code, base_offset):
                produce = hosted.produces.pop(ticket)
                if code == ErrorCode.NONE:
                    hosted.checker.answered(produce.body, produce.acks, base_offset)
            case fx.AppendAsFollower():
                if self.world.random.random() >= self.cluster.append_failure:
                    hosted.log.append_copies(batches)
                return ev.FollowerAppended(hosted.log.log_end_offset)
            case fx.TruncateLog(offset):
                self.world.note(f"b{self.broker_id} truncates {tp} from {hosted.log.log_end_offset} to {offset}")
                return ev.Truncated(hosted.log.truncate(offset))
            case fx.RestartLog(offset):
                hosted.log.restart_at(offset)
                return ev.Truncated(offset)
            case fx.HighWatermarkMoved(mark):
                assert hosted.replica is not None
                hosted.checker.high_watermark_moved(self.broker_id, mark, epoch=hosted.replica.leader_epoch)
            case fx.ServeFetch() | fx.RefuseFetch() | fx.AnswerDiverging():
                assert reply is not None
                self._answer_fetch(hosted, effect, reply)
            case fx.WriteIsr():
                self._write_isr(tp, effect)
            case fx.StartFetching(leader, leader_epoch):
                hosted.fetching = Fetching(leader, leader_epoch)
                self._fetch(tp, hosted.fetching)
            case fx.StopFetching():
                hosted.fetching = None
            case fx.RoleChanged(role, epoch):
                self.world.note(f"b{self.broker_id} is {role} of {tp} in epoch {epoch}")
                if role == "leader":
                    hosted.checker.became_leader(self.broker_id, self.process, epoch)
            case fx.ReportBadDecision(detail):
                raise Violation(f"{tp}: {detail}")
            case fx.LogEndMoved() | fx.IsrChanged():
                pass
        return None

    def _append_as_leader(self, hosted: Hosted, ticket: int, leader_epoch: int) -> ev.Event:
        if self.world.random.random() < self.cluster.append_failure:
            del hosted.produces[ticket]
            return ev.LeaderAppendFailed(ticket)
        produce = hosted.produces[ticket]
        batch = hosted.log.append(produce.body, produce.count, leader_epoch=leader_epoch, now_ms=self.world.now_ms)
        return ev.LeaderAppended(ticket, batch.header.base_offset, batch.header.next_offset)

    # --- fetching -----------------------------------------------------------------------------------------------

    def _fetch(self, tp: TopicPartition, fetching: Fetching) -> None:
        """One request of the loop, from the log's present end. Every answer goes to the core, which knows the stale
        ones; only the first answer to the latest request goes on with the loop."""
        hosted = self.hosted[tp]
        if hosted.fetching is not fetching:
            return
        fetching.request += 1
        number = fetching.request
        log = hosted.log
        event = ev.FollowerFetched(
            self.broker_id, self.incarnation, fetching.leader_epoch, log.log_end_offset, log.last_epoch
        )
        leader = self.cluster.brokers[fetching.leader]
        process = self.process

        def answered(answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
            self.handle(tp, answer, batches=batches)
            if fetching.request == number and hosted.fetching is fetching:
                fetching.request += 1
                news = batches or answer.diverging is not None
                self._later(1 if news else FETCH_PAUSE_MS, lambda: self._fetch(tp, fetching))

        def reply(answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
            self.world.send(
                leader.broker_id, self.broker_id, lambda: self.run(process, lambda: answered(answer, batches))
            )

        def timed_out() -> None:
            if fetching.request == number:
                self._fetch(tp, fetching)

        self.send(leader, lambda: leader.handle(tp, event, reply=_bound(reply, event)))
        self._later(FETCH_TIMEOUT_MS, timed_out)

    def _answer_fetch(self, hosted: Hosted, effect: fx.Effect, reply: Reply) -> None:
        log = hosted.log
        batches: tuple[SimBatch, ...] = ()
        code, diverging = ErrorCode.NONE, None
        match effect:
            case fx.ServeFetch(offset):
                batches = log.read(offset, FETCH_BATCHES)
            case fx.RefuseFetch(refusal):
                code = refusal
            case fx.AnswerDiverging(epoch, end_offset):
                diverging = (epoch, end_offset)
        assert hosted.replica is not None
        end = batches[-1].header.next_offset if batches else -1
        answer = ev.LeaderAnswered(
            leader_epoch=hosted.replica.leader_epoch,
            fetch_offset=-1,
            code=code,
            high_watermark=hosted.replica.high_watermark,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.log_end_offset,
            diverging=diverging,
            batch_count=len(batches),
            end_offset=end,
        )
        reply(answer, batches)

    # --- ZooKeeper ----------------------------------------------------------------------------------------------

    def _write_isr(self, tp: TopicPartition, order: fx.WriteIsr) -> None:
        """Compare-and-set. When no answer comes in time its fate is unknown: report that and read until it is known;
        an answer that comes later still is not believed, as a lost connection would not bring it."""
        expected = order.expected_version
        state = LeaderAndIsr(order.leader, order.leader_epoch, order.isr, order.controller_epoch)
        incarnation = self.incarnation
        waiting = [True]
        self.hosted[tp].checker.proposed.add((expected, order.isr))

        def execute() -> VersionedState | BadVersion:
            return self.cluster.zk.write_state(tp, state, expected, leader_incarnation=incarnation, added=order.added)

        def answered(result: VersionedState | BadVersion) -> None:
            if not waiting:
                return
            waiting.clear()
            if isinstance(result, BadVersion):
                self.handle(tp, ev.IsrRefused(result.found.state, result.found.version, expected))
            else:
                self.handle(tp, ev.IsrWritten(result.state.isr, result.version))

        def timed_out() -> None:
            if waiting:
                waiting.clear()
                self.handle(tp, ev.IsrWriteFailed(expected))
                self._read_back(tp, expected)

        self._ask_zk(execute, answered)
        self._later(ZK_TIMEOUT_MS, timed_out)

    def _read_back(self, tp: TopicPartition, expected: int) -> None:
        waiting = [True]

        def answered(found: VersionedState) -> None:
            if waiting:
                waiting.clear()
                self.handle(tp, ev.IsrRefused(found.state, found.version, expected))

        def timed_out() -> None:
            if waiting:
                waiting.clear()
                self._read_back(tp, expected)

        self._ask_zk(lambda: self.cluster.zk.read(tp), answered)
        self._later(ZK_TIMEOUT_MS, timed_out)

    def _ask_zk(self, execute: Callable[[], _T], answered: Callable[[_T], None]) -> None:
        process = self.process

        def arrive() -> None:
            result = execute()
            self.world.send(ZK, self.broker_id, lambda: self.run(process, lambda: answered(result)))

        self.world.send(self.broker_id, ZK, arrive)


def _bound(reply: Reply, event: ev.FollowerFetched) -> Reply:
    """An answer names the fetch it is for: the leader epoch it was made in, its offset and last epoch."""

    def bound(answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
        asked = {"leader_epoch": event.leader_epoch, "fetch_offset": event.offset, "last_epoch": event.last_epoch}
        reply(structs.replace(answer, **asked), batches)

    return bound
