"""A simulated broker process: its start, registration, handling of controller requests, stop and crash.

``ReplicaPerformer`` performs the effects of the broker's ``Replica`` cores. The replica cores, the metadata cache and
the producer tables are the production code. A crash ends the process. After a crash, either the whole log still exists
or only its flushed part.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sparklog.broker.metadata_cache import MetadataCache
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import ControlUpdate, PartitionDecision
from sparklog.replica import events as ev
from sparklog.testing.sim_checks import SimViolation
from sparklog.testing.sim_hosted import Hosted, SimBrokerHost
from sparklog.testing.sim_performer import ReplicaPerformer
from sparklog.testing.sim_session import SimSession

FETCH_TIMEOUT_MS = 150
TICK_MS = 40
CHECKPOINT_MS = 300
REGISTER_MS = 50
#: The maximum wait of a controller's update that is for an incarnation that the broker does not know yet.
REGISTRATION_MS = 300
STOP_MS = 500
#: The time after which the broker repeats a stop request, or its withdrawal, to ZooKeeper.
TELL_MS = 50


class SimBroker(ReplicaPerformer):
    """A simulated broker process. A part of ``SimCluster``."""

    def __init__(self, broker_id: int, cluster: SimBrokerHost) -> None:
        super().__init__(broker_id, cluster)
        self.stopping = False
        #: True if the page cache was lost, as the host's boot id shows, and no controller has recorded this yet.
        self._lost_page_cache = False
        #: The logs that the checkpoint names but the start has not found, until a controller has recorded the loss.
        self._lost_logs: set[TopicPartition] = set()

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process with the data on the disk. It leads no partition until a controller's update arrives."""
        self.begin()
        self.incarnation = -1
        self.cache = MetadataCache("simulated", {})
        self.append_fault = None
        self.bucket = None
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
        """Open a ZooKeeper session and register in it.

        After an expired session the same process, with its logs intact, registers under a new incarnation.
        """
        self.session = SimSession(self, self.zk, on_over=self._open_session)
        self._register(self.session)

    def _register(self, session: SimSession) -> None:
        """Read the last incarnation, then register as the next one.

        This starts again if a response is lost, or if another registration (perhaps a late one of an earlier process)
        came between the two requests.
        """
        if session is not self.session:
            return
        broker_id, lost, lost_logs = self.broker_id, self._lost_page_cache, frozenset(self._lost_logs)

        def again() -> None:
            self.later(REGISTER_MS, lambda: self._register(session))

        def registered(incarnation: int | None) -> None:
            if incarnation is None:
                again()
            elif session is self.session and incarnation != self.incarnation:
                self.incarnation = incarnation
                self.world.note(f"b{broker_id} is registered as {incarnation}")
                if self.stopping:
                    self._tell_stopping()
                for tp, hosted in self.hosted.items():
                    if hosted.refused is not None:
                        self._say_refused(tp, hosted, hosted.refused)

        def read(last: int) -> None:
            session.ask(
                lambda: self.zk.register(
                    broker_id, session.session_id, after=last, lost_page_cache=lost, lost_logs=lost_logs
                ),
                registered,
                again,
            )

        session.ask(lambda: self.zk.incarnation(broker_id), read, again)

    def crash(self, *, lose_page_cache: bool, chance: Random | None = None) -> None:
        """End the process. With ``lose_page_cache``, the host crashes as well and loses its page cache.

        The other brokers see that their connections are closed only if the host survives.
        """
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

    def lose_log(self, tp: TopicPartition) -> None:
        """Remove this log, as if its directory were missing, were damaged, or contained another log.

        The next start detects the loss, because the checkpoint names every log that has a record.
        """
        hosted = self.hosted[tp]
        if hosted.log.log_end_offset > hosted.log.first_segment_offset:
            self._lost_logs.add(tp)
        hosted.log, hosted.checkpoint = self.cluster.log_type(), 0
        hosted.checker.logs[self.broker_id] = hosted.log
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

    # --- controlled shutdown -----------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Ask the controller to move this broker's leaderships."""
        if self.session is not None and self.incarnation != -1:
            self.stopping = True
            self.world.note(f"b{self.broker_id} asks to be relieved")
            self._tell_stopping()

    def withdraw_stop(self) -> None:
        if self.stopping:
            self.stopping = False
            self._tell_stopping()

    def _tell_stopping(self) -> None:
        """Send the stop request, or its withdrawal, until ZooKeeper responds.

        Each attempt sends the current one of the two.
        """
        zk, session, incarnation, stopping = self.zk, self.session, self.incarnation, self.stopping
        if session is None:
            return

        def tell() -> None:
            if stopping:
                zk.ask_to_stop(self.broker_id, incarnation)
            else:
                zk.withdraw_stop(self.broker_id)

        session.ask(tell, lambda _: None, lambda: self.later(TELL_MS, self._tell_stopping))

    def stop_in_order(self, stopped: Callable[[], None]) -> None:
        """Perform a controlled shutdown: move leaderships to other brokers where possible, flush, and exit.

        ``stopped`` is called at the end.
        """
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
        """Return the number of partitions that this broker leads and that another live in-sync replica could lead."""
        live, own = self.cache.incarnations, self.broker_id
        return sum(
            hosted.replica is not None
            and hosted.replica.is_leader
            and any(b != own and b in live for b in hosted.replica.isr)
            for hosted in self.hosted.values()
        )

    @property
    def in_sync(self) -> int:
        """Return the number of partitions that have this broker in the ISR, as far as this broker knows."""
        replicas = [hosted.replica for hosted in self.hosted.values() if hosted.replica is not None]
        return sum(self.broker_id in replica.isr for replica in replicas)

    def disk_failed(self, stopped: Callable[[], None]) -> None:
        """Take all replicas offline, because they share one disk, and then end the process.

        The logs keep their content. ``stopped`` is called at the end.
        """
        self.world.note(f"b{self.broker_id} finds its disk failing")

        def fail_all() -> None:
            for tp, hosted in list(self.hosted.items()):
                self.handle(tp, ev.LogFailed("the disk failed"))
                for ticket in list(hosted.produces):
                    self._tell(hosted.produces.pop(ticket), ErrorCode.KAFKA_STORAGE_ERROR)
            self.later(30, lambda: self.stop_in_order(stopped))

        self.later(0, fail_all)

    # --- timers -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_ms = self.now_ms
        for tp, hosted in list(self.hosted.items()):
            fetching = hosted.fetching
            if fetching is not None:  # a follower that waits for a fetch has no other timer
                if now_ms - fetching.sent_ms >= FETCH_TIMEOUT_MS:
                    self._fetch(tp, hosted, fetching)
            elif hosted.replica is not None and hosted.replica.deadline_ms() <= now_ms:
                self.handle(tp, ev.ReplicaTicked())
        self.later(TICK_MS, self._tick)

    def _checkpoint(self) -> None:
        for hosted in self.hosted.values():
            if hosted.replica is not None:
                hosted.checkpoint = hosted.replica.high_watermark
            if self.world.random.random() < 0.5:
                hosted.log.flush()
        self.later(CHECKPOINT_MS, self._checkpoint)

    # --- updates of the controller ------------------------------------------------------------------------------

    def refusal(self, update: ControlUpdate) -> ErrorCode | None:
        """Return the error code with which this broker refuses an update, or None if it accepts the update."""
        if update.controller_epoch < self.cache.controller_epoch:
            return ErrorCode.STALE_CONTROLLER_EPOCH
        return ErrorCode.STALE_BROKER_EPOCH if update.incarnation != self.incarnation else None

    def updated(self, update: ControlUpdate, answer: Callable[[ErrorCode], None], *, waited_ms: int = 0) -> None:
        """Handle a controller's request.

        The checks are the same, in the same order, as in ``broker/replication/leader_and_isr.py``.
        """
        if update.incarnation > self.incarnation and waited_ms < REGISTRATION_MS:
            self.later(20, lambda: self.updated(update, answer, waited_ms=waited_ms + 20))
            return
        refusal = self.refusal(update)
        if refusal is not None:
            self.world.happened["update refused"] += 1
            answer(refusal)
            return
        if self.cache.is_overtaken(update):
            self.world.happened["update overtaken"] += 1
            answer(ErrorCode.STALE_CONTROLLER_EPOCH)
            return
        self._carry_out(update)
        answer(ErrorCode.NONE)

    def _carry_out(self, update: ControlUpdate) -> None:
        if update.controller_epoch < self.cache.controller_epoch:
            detail = f"broker {self.broker_id} follows controller epoch {update.controller_epoch}"
            raise SimViolation(f"{detail} after {self.cache.controller_epoch}", rule="control requests fenced")
        self._lost_logs.clear()
        self._lost_page_cache = False  # the controller that has sent this update has read the registration
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
        if update.full or update.deleted:
            self._drop_what_is_gone(update)

    def _drop_what_is_gone(self, update: ControlUpdate) -> None:
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
        """Apply one decision.

        If the replica has left this broker, drop it, unless the broker may still be in the ISR.
        """
        topic = self.cache.topic(decision.topic)
        if topic is None or topic.change.topic_id != decision.topic_id:
            raise SimViolation(f"{decision.topic}: topic id {decision.topic_id} came without its topic", rule="TypeOk")
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
        """Drop data that was kept only because of the ISR, once this broker is neither in the ISR nor a replica."""
        known = self.cache.partition(tp)
        if known is not None and self.broker_id not in (*known.replicas, *known.state.isr):
            self.drop(tp)

    def _host(self, tp: TopicPartition, topic_id: str) -> None:
        """Host the replica of ``tp``. Create an empty log if there is none, and delete data of another topic id."""
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
            hosted.mark = hosted.replica.high_watermark

    def drop(self, tp: TopicPartition) -> None:
        """Stop the replica and delete its data."""
        hosted = self.hosted[tp]
        self.world.note(f"b{self.broker_id} deletes {tp} of {hosted.topic_id}")
        self.world.happened["replica deleted"] += 1
        if hosted.replica is not None:
            self.handle(tp, ev.Stopped())
        hosted.forget_process()
        del self.hosted[tp]
        if self.zk.has_topic(tp.topic, hosted.topic_id):
            hosted.checker.forgot(self.broker_id)
