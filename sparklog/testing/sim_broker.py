"""A simulated broker: the performer of one ``Replica`` core per partition, over simulated log, network and ZooKeeper.

What ``broker/`` does with sockets, files and kazoo is done here with ``SimWorld``; the replica cores, the picture of
the cluster and the tables of producers are the production ones. A crash ends the process and keeps the log, all of it
or what was flushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import ClassVar, Protocol

from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import LeaderAndIsr, TopicPartition, VersionedState
from sparklog.protocol.messages import ControlUpdate, PartitionDecision
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_checks import PartitionChecker, Violation
from sparklog.testing.sim_log import NOT_IDEMPOTENT, Sequenced, SimBatch, SimLog
from sparklog.testing.sim_process import ProcessEnded, SimProcess
from sparklog.testing.sim_session import SimSession
from sparklog.testing.sim_world import SimWorld
from sparklog.testing.sim_zk import BadVersion, NodeGone, SimZk

FETCH_TIMEOUT_MS = 150
FETCH_PAUSE_MS = 20
FETCH_BATCHES = 4
TICK_MS = 25
CHECKPOINT_MS = 300
REGISTER_MS = 50
#: an update for an incarnation that the broker has not heard of yet waits so long
REGISTRATION_MS = 300
STOP_MS = 500
NOTIFY_MS = 5

Told = Callable[[ErrorCode], None]
Reply = Callable[[ev.LeaderAnswered, tuple[SimBatch, ...]], None]
FetchVerdict = fx.ServeFetch | fx.RefuseFetch | fx.AnswerDiverging


@dataclass(frozen=True, slots=True)
class Produce:
    """One batch a client sent. What is not idempotent is made unique at each arrival: the network may double it."""

    body: str
    count: int
    acks: int
    topic_id: str
    sequence: Sequenced = NOT_IDEMPOTENT
    timeout_ms: int = 500
    #: hears the answer, over the network
    told: Told | None = None


@dataclass(slots=True)
class Fetching:
    """The follower's fetch loop for one leader and epoch; a later one replaces it."""

    leader: int
    leader_epoch: int
    #: number of the request under way; its answer or its time-out starts the next
    request: int = 0
    #: when it was sent, by the own clock
    sent_ms: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A follower's fetch, waiting to be answered. ``mark`` is the high watermark that the follower knows."""

    event: ev.FollowerFetched
    mark: int
    reply: Reply


@dataclass(slots=True)
class Hosted:
    """One partition on one broker. ``log`` and ``checkpoint`` are on disk; the rest dies with the process. ``replica``
    None: found on the disk, and not told yet whether it is this broker's."""

    topic_id: str
    log: SimLog
    checker: PartitionChecker
    checkpoint: int = 0
    replica: Replica | None = None
    fetching: Fetching | None = None
    produces: dict[int, Produce] = field(default_factory=dict)
    #: long polls, by follower
    parked: dict[int, Asked] = field(default_factory=dict)

    def forget_process(self) -> None:
        self.replica = None
        self.fetching = None
        self.produces.clear()
        self.parked.clear()


class Surroundings(Protocol):
    """What a broker asks of the cluster it is in."""

    world: SimWorld
    zk: SimZk
    settings: ReplicaSettings
    replica_type: type[Replica]
    log_type: type[SimLog]
    brokers: dict[int, SimBroker]
    #: whether to call ``Replica.check_invariants`` after each event
    check_cores: bool
    #: chance that an append fails its checks
    append_failure: float

    def checker(self, tp: TopicPartition, topic_id: str) -> PartitionChecker: ...


class SimBroker(SimProcess):
    """Mutable, owned by the ``SimCluster``."""

    def __init__(self, broker_id: int, cluster: Surroundings) -> None:
        super().__init__(broker_id, cluster.world)
        self.broker_id = broker_id
        self.cluster = cluster
        self.zk = cluster.zk
        self.hosted: dict[TopicPartition, Hosted] = {}
        self.incarnation = -1
        self.cache = MetadataCache("simulated", {})
        self.session: SimSession | None = None
        #: until then, by the world's clock, the disk has no room
        self.full_until_ms = -1
        #: what the next append comes to, and who hears that it did
        self.append_fault: Callable[[Hosted, SimBatch], None] | None = None
        self.stopping = False
        #: known from the host's boot id, and not yet told to a controller
        self._lost_page_cache = False
        self._tickets = 0
        self._changed: dict[TopicPartition, None] = {}

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process on what the disk holds; it leads nothing until told."""
        self.begin()
        self.incarnation = -1
        self.cache = MetadataCache("simulated", {})
        self.append_fault = None
        self.stopping = False
        self._changed.clear()
        for hosted in self.hosted.values():
            hosted.forget_process()
            hosted.log.recover()
            hosted.checkpoint = min(hosted.checkpoint, hosted.log.log_end_offset)
        self._open_session()
        self.later(TICK_MS, self._tick)
        self.later(CHECKPOINT_MS, self._checkpoint)

    def _open_session(self) -> None:
        """Also after a session ended: the same process, log intact, under a new incarnation."""
        self.session = SimSession(self, self.zk, on_over=self._open_session)
        self._register(self.session)

    def _register(self, session: SimSession) -> None:
        """Read the last incarnation, then register as the next one; from the start where an answer is lost, or where
        somebody else's registration, perhaps an earlier process' late one, came between."""
        if session is not self.session:
            return
        broker_id, lost = self.broker_id, self._lost_page_cache

        def again() -> None:
            self.later(REGISTER_MS, lambda: self._register(session))

        def registered(incarnation: int | None) -> None:
            if incarnation is None:
                again()
            elif session is self.session and incarnation != self.incarnation:
                self.incarnation = incarnation
                self.world.note(f"b{broker_id} is registered as {incarnation}")

        def read(last: int) -> None:
            session.ask(
                lambda: self.zk.register(broker_id, session.session_id, after=last, lost_page_cache=lost),
                registered,
                again,
            )

        session.ask(lambda: self.zk.incarnation(broker_id), read, again)

    def crash(self, *, lose_page_cache: bool, chance: Random | None = None) -> None:
        """The process ends, and with ``lose_page_cache`` the host. Closed connections tell the others."""
        self.end()
        self.world.note(f"b{self.broker_id} crashes, page cache {'lost' if lose_page_cache else 'kept'}")
        for hosted in self.hosted.values():
            hosted.forget_process()
        if lose_page_cache:
            self.lose_page_cache(chance or Random(self.process))
        else:
            self._connections_close()

    def lose_page_cache(self, chance: Random) -> None:
        self._lost_page_cache = True
        for hosted in self.hosted.values():
            hosted.log.lose_page_cache(chance)
            hosted.checker.lost[self.broker_id] = self.zk.incarnation(self.broker_id)

    def _connections_close(self) -> None:
        for other in self.cluster.brokers.values():
            if other.alive and other is not self:
                self.send(other, other.follower_lost(self.broker_id))

    def follower_lost(self, replica_id: int) -> Callable[[], None]:
        def lost() -> None:
            for tp, hosted in list(self.hosted.items()):
                if hosted.replica is not None and hosted.replica.is_leader:
                    self.handle(tp, ev.FollowerConnectionLost(replica_id))

        return lost

    # --- stopping in an orderly way -----------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Ask the controller to move what this broker leads."""
        session, incarnation = self.session, self.incarnation
        if session is not None and incarnation != -1:
            self.stopping = True
            self.world.note(f"b{self.broker_id} asks to be relieved")
            session.ask(lambda: self.zk.ask_to_stop(self.broker_id, incarnation), lambda _: None, lambda: None)

    def withdraw_stop(self) -> None:
        session = self.session
        if self.stopping and session is not None:
            session.ask(
                lambda: self.zk.withdraw_stop(self.broker_id),
                self._withdrawn,
                lambda: self.later(50, self.withdraw_stop),
            )

    def _withdrawn(self, _: None) -> None:
        self.stopping = False

    def stop_in_order(self, stopped: Callable[[], None]) -> None:
        """Ask to be relieved, wait until nothing is led that another could lead, flush, and end."""
        self.ask_to_stop()
        end_ms = self.now_ms + STOP_MS

        def look() -> None:
            if self.movable and self.now_ms < end_ms:
                self.later(10, look)
                return
            for hosted in self.hosted.values():
                hosted.log.flush()
                if hosted.replica is not None:
                    hosted.checkpoint = hosted.replica.high_watermark
                    self.handle_stop(hosted)
            self.world.note(f"b{self.broker_id} stops in an orderly way")
            if self.session is not None:
                self.session.close()
            for hosted in self.hosted.values():
                hosted.forget_process()
            self._connections_close()
            self.end()
            stopped()

        self.later(20, look)

    def handle_stop(self, hosted: Hosted) -> None:
        tp = next(tp for tp, found in self.hosted.items() if found is hosted)
        self.handle(tp, ev.Stopped())

    @property
    def movable(self) -> int:
        """Led partitions that another live in-sync replica could lead."""
        live, own = self.cache.incarnations, self.broker_id
        return sum(
            hosted.replica is not None
            and hosted.replica.is_leader
            and any(b != own and b in live for b in hosted.replica.isr)
            for hosted in self.hosted.values()
        )

    # --- timers -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_ms = self.now_ms
        for tp, hosted in list(self.hosted.items()):
            deadline_ms = hosted.replica.deadline_ms if hosted.replica else None
            if deadline_ms is not None and deadline_ms <= now_ms:
                self.handle(tp, ev.Ticked())
            fetching = hosted.fetching
            if fetching is not None and now_ms - fetching.sent_ms >= FETCH_TIMEOUT_MS:
                self._fetch(tp, hosted, fetching)
        self.later(TICK_MS, self._tick)

    def _checkpoint(self) -> None:
        for hosted in self.hosted.values():
            if hosted.replica is not None:
                hosted.checkpoint = hosted.replica.high_watermark
            if self.world.random.random() < 0.5:
                hosted.log.flush()
        self.later(CHECKPOINT_MS, self._checkpoint)

    # --- what the controller says -------------------------------------------------------------------------------

    def refusal(self, update: ControlUpdate) -> ErrorCode | None:
        """Why an update changes nothing here."""
        if update.controller_epoch < self.cache.controller_epoch:
            return ErrorCode.STALE_CONTROLLER_EPOCH
        return ErrorCode.STALE_BROKER_EPOCH if update.incarnation != self.incarnation else None

    def updated(self, update: ControlUpdate, answer: Callable[[ErrorCode], None], *, waited_ms: int = 0) -> None:
        """A controller's request, in the order of ``broker/control.py``."""
        if update.incarnation > self.incarnation and waited_ms < REGISTRATION_MS:
            self.later(20, lambda: self.updated(update, answer, waited_ms=waited_ms + 20))
            return
        refusal = self.refusal(update)
        if refusal is not None:
            self.world.happened["update refused"] += 1
            answer(refusal)
            return
        if self.cache.overtaken(update):
            self.world.happened["update overtaken"] += 1
            answer(ErrorCode.NONE)
            return
        self._carry_out(update)
        answer(ErrorCode.NONE)

    def _carry_out(self, update: ControlUpdate) -> None:
        if update.controller_epoch < self.cache.controller_epoch:
            detail = f"broker {self.broker_id} follows controller epoch {update.controller_epoch}"
            raise Violation(f"{detail} after {self.cache.controller_epoch}", rule="control requests fenced")
        self._lost_page_cache = False  # a controller has told this incarnation what it is: it has taken note
        before = self.cache.incarnations
        self.cache.apply(update)
        if self.cache.incarnations != before:
            changed = ev.BrokersChanged(self.cache.incarnations)
            for tp, hosted in list(self.hosted.items()):
                if hosted.replica is not None:
                    self.handle(tp, changed)
        for decision in update.partitions:
            if decision.version >= 0:
                self._decide(decision)
        gone = set(update.deleted)
        own = {
            (TopicPartition(decision.topic, decision.partition), decision.topic_id)
            for decision in update.partitions
            if self.broker_id in decision.replicas or self.broker_id in decision.state.isr
        }
        for tp, hosted in list(self.hosted.items()):
            if (tp.topic, hosted.topic_id) in gone or (update.full and (tp, hosted.topic_id) not in own):
                self.drop(tp)

    def _decide(self, decision: PartitionDecision) -> None:
        """Also what is not this broker's any more: it goes, unless others may still count on it."""
        topic = self.cache.topic(decision.topic)
        if topic is None or topic.change.topic_id != decision.topic_id:
            raise Violation(f"{decision.topic}: topic id {decision.topic_id} came without its topic", rule="TypeOk")
        tp = TopicPartition(decision.topic, decision.partition)
        own = self.broker_id in decision.replicas
        if own:
            self._host(tp, decision.topic_id)
        hosted = self.hosted.get(tp)
        if hosted is not None and hosted.replica is None:
            self._let_go(tp)
            return
        if hosted is None or hosted.topic_id != decision.topic_id:
            return
        decided = ev.Decided(
            state=decision.state,
            version=decision.version,
            replicas=decision.replicas,
            incarnations=self.cache.incarnations,
            min_isr=topic.config.min_insync_replicas,
            leaving=frozenset(decision.leaving),
            factor=min(len(decision.original), len(decision.target)),
        )
        self.handle(tp, decided)
        if not own and hosted.replica is not None and hosted.replica.dismissed:
            self.drop(tp)

    def _let_go(self, tp: TopicPartition) -> None:
        """Data found at start that was kept for the ISR goes when this broker is in neither it nor the replicas."""
        known = self.cache.partition(tp)
        if known is not None and self.broker_id not in (*known.replicas, *known.state.isr):
            self.drop(tp)

    def _host(self, tp: TopicPartition, topic_id: str) -> None:
        """The replica of ``tp``, created with an empty log if need be. Data of another topic id is deleted."""
        hosted = self.hosted.get(tp)
        if hosted is not None and hosted.topic_id != topic_id:
            self.drop(tp)
            hosted = None
        if hosted is None:
            checker = self.cluster.checker(tp, topic_id)
            hosted = self.hosted[tp] = Hosted(topic_id, self.cluster.log_type(), checker)
            checker.logs[self.broker_id] = hosted.log
        if hosted.replica is None:
            hosted.replica = self.cluster.replica_type(
                self.broker_id, hosted.log, high_watermark=hosted.checkpoint, settings=self.cluster.settings
            )

    def drop(self, tp: TopicPartition) -> None:
        """Forget the replica and delete its data."""
        hosted = self.hosted[tp]
        self.world.note(f"b{self.broker_id} deletes {tp} of {hosted.topic_id}")
        self.world.happened["replica deleted"] += 1
        if hosted.replica is not None:
            self.handle(tp, ev.Stopped())
        hosted.forget_process()
        del self.hosted[tp]
        if self.zk.has_topic(tp.topic, hosted.topic_id):
            hosted.checker.forgot(self.broker_id)

    # --- stepping -----------------------------------------------------------------------------------------------

    def produce(self, tp: TopicPartition, produce: Produce) -> None:
        hosted = self.hosted.get(tp)
        if hosted is None or hosted.replica is None or hosted.topic_id != produce.topic_id:
            self._tell(produce, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return
        self._tickets += 1
        if produce.sequence is NOT_IDEMPOTENT:
            produce = replace(produce, body=f"{produce.body}.{self.broker_id}.{self._tickets}")
        hosted.produces[self._tickets] = produce
        self.handle(tp, ev.ProduceArrived(self._tickets, produce.acks, self.now_ms + produce.timeout_ms))

    def _tell(self, produce: Produce, code: ErrorCode) -> None:
        told = produce.told
        if told is not None:
            self.world.send(self.name, "client", partial(told, code))

    def handle(
        self,
        tp: TopicPartition,
        event: ev.Event,
        *,
        batches: tuple[SimBatch, ...] = (),
        asked: Asked | None = None,
    ) -> None:
        """Step the core, carry out its effects in order, then hand over what they led to."""
        hosted = self.hosted[tp]
        replica = hosted.replica
        if replica is None:
            return
        perform, now_ms = self._PERFORM, self.now_ms
        facts: list[ev.Event] = [event]
        for fact in facts:  # grows meanwhile
            for effect in replica.step(fact, now_ms):
                led_to = perform[type(effect)](self, tp, hosted, effect, batches, asked)
                if led_to is not None:
                    facts.append(led_to)
        if self.cluster.check_cores:
            replica.check_invariants()

    def _truncate(self, tp: TopicPartition, hosted: Hosted, effect: fx.TruncateLog, *_: object) -> ev.Event:
        self.world.note(f"b{self.broker_id} truncates {tp} from {hosted.log.log_end_offset} to {effect.offset}")
        end_offset = hosted.log.truncate(effect.offset)
        hosted.checker.cut(self.broker_id)
        return ev.Truncated(end_offset)

    def _restart_log(self, tp: TopicPartition, hosted: Hosted, effect: fx.RestartLog, *_: object) -> ev.Event:
        hosted.log.restart_at(effect.offset)
        hosted.checker.cut(self.broker_id)
        return ev.Truncated(effect.offset)

    def _answer_produce(self, tp: TopicPartition, hosted: Hosted, effect: fx.AnswerProduce, *_: object) -> None:
        produce = hosted.produces.pop(effect.ticket)
        if effect.code == ErrorCode.NONE:
            hosted.checker.answered(produce.body, produce.acks, effect.base_offset)
        self._tell(produce, effect.code)

    def _mark_moved(self, tp: TopicPartition, hosted: Hosted, effect: fx.HighWatermarkMoved, *_: object) -> None:
        assert hosted.replica is not None
        epoch = hosted.replica.leader_epoch
        hosted.checker.high_watermark_moved(self.broker_id, effect.high_watermark, epoch=epoch)
        self._wake(hosted)

    def _end_moved(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        self._wake(hosted)

    def _start_fetching(self, tp: TopicPartition, hosted: Hosted, effect: fx.StartFetching, *_: object) -> None:
        hosted.fetching = Fetching(effect.leader, effect.leader_epoch)
        self._fetch(tp, hosted, hosted.fetching)

    def _stop_fetching(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        hosted.fetching = None

    def _bad_decision(self, tp: TopicPartition, hosted: Hosted, effect: fx.ReportBadDecision, *_: object) -> None:
        raise Violation(f"{tp}: {effect.detail}", rule="TypeOk", partition=str(tp))

    def _role_changed(self, tp: TopicPartition, hosted: Hosted, effect: fx.RoleChanged, *_: object) -> None:
        role, epoch = effect.role, effect.leader_epoch
        self.world.note(f"b{self.broker_id} is {role} of {tp} in epoch {epoch}")
        if role == "leader":
            hosted.checker.became_leader(self.broker_id, self.process, epoch)
        parked, hosted.parked = list(hosted.parked.values()), {}
        for asked in parked:
            self._answer_fetch(hosted, fx.RefuseFetch(ErrorCode.NOT_LEADER_OR_FOLLOWER, ""), asked)

    # --- appending ----------------------------------------------------------------------------------------------

    def _append_as_leader(self, tp: TopicPartition, hosted: Hosted, effect: fx.AppendAsLeader, *_: object) -> ev.Event:
        ticket, leader_epoch = effect.ticket, effect.leader_epoch
        produce, log = hosted.produces[ticket], hosted.log
        if produce.sequence is not NOT_IDEMPOTENT:
            try:
                known = log.duplicate(produce.sequence, produce.count)
            except BrokerError as error:
                return self._refuse_append(hosted, ticket, error.code)
            if known is not None:
                self.world.happened["duplicate recognised"] += 1
                return ev.LeaderAppended(ticket, known.start, known.end)
        if self._has_no_room():
            return self._refuse_append(hosted, ticket, ErrorCode.KAFKA_STORAGE_ERROR)
        planned = log.planned(
            produce.body, produce.count, leader_epoch=leader_epoch, now_ms=self.now_ms, sequence=produce.sequence
        )
        if self.append_fault is not None:
            self._fail_append(hosted, planned)
            return ev.LogFailed("the disk failed")
        log.append_copies((planned,))
        hosted.checker.appended(self.broker_id, 1)
        return ev.LeaderAppended(ticket, planned.header.base_offset, planned.header.next_offset)

    def _refuse_append(self, hosted: Hosted, ticket: int, code: ErrorCode) -> ev.Event:
        self._tell(hosted.produces.pop(ticket), code)
        return ev.LeaderAppendFailed(ticket)

    def _append_as_follower(
        self, tp: TopicPartition, hosted: Hosted, effect: fx.Effect, batches: tuple[SimBatch, ...], *_: object
    ) -> ev.Event:
        """All of them or none."""
        if self._has_no_room() or not batches:
            return ev.FollowerAppended(hosted.log.log_end_offset)
        if self.append_fault is not None:
            self._fail_append(hosted, batches[0])
            return ev.LogFailed("the disk failed")
        end_offset = hosted.log.append_copies(batches)
        hosted.checker.appended(self.broker_id, len(batches))
        return ev.FollowerAppended(end_offset)

    def _has_no_room(self) -> bool:
        """A short write on a full disk is cut back, and so is one that fails its checks: nothing was appended."""
        if self.full_until_ms > self.world.now_ms:
            self.world.happened["append on a full disk"] += 1
            return True
        if self.world.random.random() < self.cluster.append_failure:
            self.world.happened["append refused"] += 1
            return True
        return False

    def _fail_append(self, hosted: Hosted, batch: SimBatch) -> None:
        fault, self.append_fault = self.append_fault, None
        assert fault is not None
        fault(hosted, batch)
        if not self.alive:
            raise ProcessEnded

    def disk_failed(self, stopped: Callable[[], None]) -> None:
        """One directory is one disk: all replicas go offline, and the process ends. The log keeps what it held."""
        self.world.note(f"b{self.broker_id} finds its disk failing")

        def fail_all() -> None:
            for tp, hosted in list(self.hosted.items()):
                self.handle(tp, ev.LogFailed("the disk failed"))
                for ticket in list(hosted.produces):
                    self._tell(hosted.produces.pop(ticket), ErrorCode.KAFKA_STORAGE_ERROR)
            self.later(30, lambda: self.stop_in_order(stopped))

        self.later(0, fail_all)

    # --- fetching -----------------------------------------------------------------------------------------------

    def _fetch(self, tp: TopicPartition, hosted: Hosted, fetching: Fetching) -> None:
        """One request of the loop, from the log's present end. Every answer goes to the core, which knows the stale
        ones; only the first answer to the latest request goes on with the loop."""
        if hosted.fetching is not fetching:
            return
        fetching.request += 1
        fetching.sent_ms = self.now_ms
        number = fetching.request
        log, replica, process = hosted.log, hosted.replica, self.process
        assert replica is not None
        event = ev.FollowerFetched(
            self.broker_id, self.incarnation, fetching.leader_epoch, log.log_end_offset, log.last_epoch
        )
        leader = self.cluster.brokers[fetching.leader]

        def answered(answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
            if self.hosted.get(tp) is not hosted:
                return
            self.handle(tp, answer, batches=batches)
            if fetching.request == number and hosted.fetching is fetching:
                fetching.request += 1
                if answer.code:
                    self.later(FETCH_PAUSE_MS, lambda: self._fetch(tp, hosted, fetching))
                else:
                    self._fetch(tp, hosted, fetching)

        def reply(answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
            self.world.send(leader.name, self.name, partial(self.run, process, partial(answered, answer, batches)))

        asked = Asked(event, replica.high_watermark, reply)
        self.send(leader, partial(leader.fetched, tp, hosted.topic_id, asked))

    def fetched(self, tp: TopicPartition, topic_id: str, asked: Asked) -> None:
        hosted = self.hosted.get(tp)
        if hosted is not None and hosted.replica is not None and hosted.topic_id == topic_id:
            self.handle(tp, asked.event, asked=asked)

    def _verdict(
        self,
        tp: TopicPartition,
        hosted: Hosted,
        effect: FetchVerdict,
        batches: tuple[SimBatch, ...],
        asked: Asked | None,
    ) -> None:
        assert asked is not None
        self._answer_fetch(hosted, effect, asked)

    def _answer_fetch(self, hosted: Hosted, verdict: FetchVerdict, asked: Asked) -> None:
        log, replica, event = hosted.log, hosted.replica, asked.event
        assert replica is not None
        batches: tuple[SimBatch, ...] = ()
        code, diverging = ErrorCode.NONE, None
        match verdict:
            case fx.ServeFetch(offset):
                batches = log.read(offset, FETCH_BATCHES)
                if not batches and replica.high_watermark <= asked.mark:
                    hosted.parked[event.replica_id] = asked
                    return
            case fx.RefuseFetch(refusal):
                code = refusal
            case fx.AnswerDiverging(epoch, end_offset):
                diverging = (epoch, end_offset)
        answer = ev.LeaderAnswered(
            leader_epoch=event.leader_epoch,
            fetch_offset=event.offset,
            code=code,
            high_watermark=replica.high_watermark,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.log_end_offset,
            diverging=diverging,
            batch_count=len(batches),
            end_offset=batches[-1].header.next_offset if batches else -1,
            last_epoch=event.last_epoch,
        )
        asked.reply(answer, batches)

    def _wake(self, hosted: Hosted) -> None:
        """Something moved: the long polls of this epoch end."""
        if hosted.parked and hosted.replica is not None:
            parked, hosted.parked = list(hosted.parked.values()), {}
            for asked in parked:
                if asked.event.leader_epoch == hosted.replica.leader_epoch:
                    self._answer_fetch(hosted, fx.ServeFetch(asked.event.offset), asked)

    # --- ZooKeeper ----------------------------------------------------------------------------------------------

    def _write_isr(self, tp: TopicPartition, hosted: Hosted, order: fx.WriteIsr, *_: object) -> None:
        """Compare-and-set. When no answer comes in time its fate is unknown: report that and read until it is known;
        an answer that comes later still is not believed, as a lost connection would not bring it."""
        expected, incarnation, session = order.expected_version, self.incarnation, self.session
        state = LeaderAndIsr(order.leader, order.leader_epoch, order.isr, order.controller_epoch)
        hosted.checker.proposed.add((expected, order.isr))
        assert session is not None

        def execute() -> VersionedState | BadVersion | NodeGone:
            return self.zk.write_state(
                tp, state, expected, topic_id=hosted.topic_id, leader_incarnation=incarnation, added=order.added
            )

        def answered(result: VersionedState | BadVersion | NodeGone) -> None:
            if isinstance(result, VersionedState):
                self.cache.state_written(tp, state, version=result.version, topic_id=hosted.topic_id)
                self._back(tp, hosted, ev.IsrWritten(result.state.isr, result.version))
            elif isinstance(result, BadVersion) and result.found is not None:
                self._refused(tp, hosted, result.found, expected)

        def lost() -> None:
            self._back(tp, hosted, ev.IsrWriteFailed(expected))
            self._read_back(tp, hosted, expected)

        session.ask(execute, answered, lost)

    def _back(self, tp: TopicPartition, hosted: Hosted, event: ev.Event) -> None:
        """A result for a replica that is gone meanwhile is nobody's."""
        if self.hosted.get(tp) is hosted:
            self.handle(tp, event)

    def _refused(self, tp: TopicPartition, hosted: Hosted, found: VersionedState, expected: int) -> None:
        self.cache.state_written(tp, found.state, version=found.version, topic_id=hosted.topic_id)
        self._back(tp, hosted, ev.IsrRefused(found.state, found.version, expected))

    def _read_back(self, tp: TopicPartition, hosted: Hosted, expected: int) -> None:
        session = self.session
        assert session is not None

        def execute() -> VersionedState | None:
            return self.zk.read(tp) if self.zk.has_topic(tp.topic, hosted.topic_id) else None

        def answered(found: VersionedState | None) -> None:
            if found is not None:
                self._refused(tp, hosted, found, expected)

        def lost() -> None:
            self.later(10, lambda: self._read_back(tp, hosted, expected))

        session.ask(execute, answered, lost)

    def _isr_changed(self, tp: TopicPartition, *_: object) -> None:
        """Tell the controller, together with whatever else changes in the next moment."""
        if not self._changed:
            self.later(NOTIFY_MS, self._notify)
        self._changed[tp] = None

    def _notify(self) -> None:
        changed, self._changed = tuple(self._changed), {}
        self._send_notice(changed)

    def _send_notice(self, changed: tuple[TopicPartition, ...]) -> None:
        assert self.session is not None
        self.session.ask(
            lambda: self.zk.notify(changed),
            lambda _: None,
            lambda: self.later(20, lambda: self._send_notice(changed)),
        )

    #: by type: half of the simulator's time passes here
    _PERFORM: ClassVar[dict[type, Callable[..., ev.Event | None]]] = {
        fx.AppendAsLeader: _append_as_leader,
        fx.AnswerProduce: _answer_produce,
        fx.AppendAsFollower: _append_as_follower,
        fx.HighWatermarkMoved: _mark_moved,
        fx.LogEndMoved: _end_moved,
        fx.ServeFetch: _verdict,
        fx.RefuseFetch: _verdict,
        fx.AnswerDiverging: _verdict,
        fx.TruncateLog: _truncate,
        fx.RestartLog: _restart_log,
        fx.WriteIsr: _write_isr,
        fx.IsrChanged: _isr_changed,
        fx.StartFetching: _start_fetching,
        fx.StopFetching: _stop_fetching,
        fx.RoleChanged: _role_changed,
        fx.ReportBadDecision: _bad_decision,
    }
