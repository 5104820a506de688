"""The performer of one simulated broker: it performs the effects of the ``Replica`` cores in the simulation.

A core decides and returns effects: the actions to perform. This module does in the simulation what ``broker/`` does
with sockets, files and kazoo: appends as leader and follower, fetch loops and long polls, and conditional writes of
ISRs. ``SimBroker`` starts and ends the process and handles the controller's updates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import ClassVar

from msgspec import structs

from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.replication.throttle import TokenBucket, limit_of
from sparklog.controller.events import TruncationRefused
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import LeaderAndIsr, TopicPartition, TopicStates, VersionedState
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.testing.sim_checks import SimViolation
from sparklog.testing.sim_hosted import Asked, Fetching, Hosted, PeerBroker, SimBrokerHost, SimProduce
from sparklog.testing.sim_log import SimBatch
from sparklog.testing.sim_process import ProcessEnded
from sparklog.testing.sim_session import SimSession
from sparklog.testing.sim_zk import BadVersion, NodeGone

FETCH_PAUSE_MS = 20
FETCH_BATCHES = 4
NOTIFY_MS = 5
#: The maximum time that a throttled copy waits before it checks again whether it is still throttled.
HOLD_MS = 100
#: The durations of truncations. 0 means that the truncation is done immediately.
CUTS_MS = (1000, 15, 0)
#: The probability that a truncation that takes time finds no disk space.
CUT_FAILURE = 0.4

FetchVerdict = fx.ServeFetch | fx.RefuseFetch | fx.AnswerDiverging


class ReplicaPerformer(PeerBroker):
    """The part of a simulated broker that performs the effects of the replica cores."""

    def __init__(self, broker_id: int, cluster: SimBrokerHost) -> None:
        super().__init__(broker_id, cluster.world)
        self.broker_id = broker_id
        self.cluster = cluster
        self.zk = cluster.zk
        self.hosted: dict[TopicPartition, Hosted] = {}
        self.incarnation = -1
        self.cache = MetadataCache("simulated", {})
        self.session: SimSession | None = None
        #: The time, by the clock of the simulation, until which the disk is full.
        self.full_until_ms = -1
        #: The function to call instead of the next append; None means that the append succeeds.
        self.append_fault: Callable[[Hosted, SimBatch], None] | None = None
        #: The byte budget of throttled moves.
        self.bucket: TokenBucket | None = None
        self._tickets = 0
        #: The states that this broker has written to ZooKeeper and not yet reported to the controller, by topic, topic
        #: id and partition.
        self._changed: dict[tuple[str, str], dict[int, VersionedState]] = {}
        self._known: VersionedState | None = None

    # --- stepping -----------------------------------------------------------------------------------------------

    def produce(self, tp: TopicPartition, produce: SimProduce) -> None:
        hosted = self.hosted.get(tp)
        if hosted is None or hosted.replica is None or hosted.topic_id != produce.topic_id:
            self._tell(produce, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return
        self._tickets += 1
        if produce.sequence.first_sequence < 0:
            produce = structs.replace(produce, body=f"{produce.body}.{self.broker_id}.{self._tickets}")
        hosted.produces[self._tickets] = produce
        deadline_ms = self.now_ms + produce.timeout_ms
        self.handle(tp, ev.ProduceArrived(self._tickets, produce.acks, deadline_ms))

    def _tell(self, produce: SimProduce, code: ErrorCode) -> None:
        told, on_result = produce.told, produce.on_result
        if told is not None:
            self.world.send(self.name, "client", (None, 0, partial(told, code)))
        if on_result is not None:
            self.later(0, partial(on_result, code))

    def handle(
        self,
        tp: TopicPartition,
        event: ev.Event,
        *,
        batches: tuple[SimBatch, ...] = (),
        asked: Asked | None = None,
    ) -> None:
        """Pass an event to the replica core of ``tp``, and perform its effects in order.

        Then pass the events that these effects caused to the core as well.
        """
        hosted = self.hosted[tp]
        replica = hosted.replica
        if replica is None:
            return
        perform, now_ms = self._PERFORM, self.now_ms
        facts: list[ev.Event] = [event]
        step = replica.step
        for fact in facts:  # the list grows during the loop
            for effect in step(fact, now_ms):
                led_to = perform[type(effect)](self, tp, hosted, effect, batches, asked)
                if led_to is not None:
                    facts.append(led_to)
        if self.cluster.check_cores:
            replica.check_invariants()

    def _truncate(
        self,
        tp: TopicPartition,
        hosted: Hosted,
        effect: fx.TruncateLog,
        batches: tuple[SimBatch, ...],
        asked: Asked | None,
    ) -> ev.Event | None:
        """Truncate the log immediately or later.

        A real broker has both cases: it truncates later if a thread must first copy a segment, which may fail for lack
        of space. Only variants of the cores truncate without a response of a leader.
        """
        takes_ms = CUTS_MS[hosted.log.log_end_offset % len(CUTS_MS)] if asked is not None else 0
        if not takes_ms:
            return self._truncate_now(tp, hosted, effect)
        hosted.truncation = effect
        self.later(takes_ms, lambda: self._truncate_late(tp, hosted, effect))
        return None

    def _truncate_late(self, tp: TopicPartition, hosted: Hosted, effect: fx.TruncateLog) -> None:
        """Perform a delayed truncation, unless the replica's role has changed since then."""
        if self.hosted.get(tp) is not hosted or hosted.truncation is not effect:
            return
        assert hosted.replica is not None
        hosted.truncation = None
        may_fail = self.cluster.append_failure > 0  # no failures in the last phase of the run
        if self.full_until_ms > self.world.now_ms or (may_fail and self.world.random.random() < CUT_FAILURE):
            self.world.happened["cut without room"] += 1
            self.handle(tp, ev.TruncationFailed())
            return
        self.world.happened["cut in a thread"] += 1
        self.handle(tp, self._truncate_now(tp, hosted, effect))
        following = fx.StartFetching(hosted.replica.leader, hosted.replica.leader_epoch)
        self._start_fetching(tp, hosted, following)

    def _truncate_now(self, tp: TopicPartition, hosted: Hosted, effect: fx.TruncateLog) -> ev.Event:
        self.world.note(f"b{self.broker_id} truncates {tp} from {hosted.log.log_end_offset} to {effect.offset}")
        end_offset = hosted.log.truncate(effect.offset)
        hosted.checkpoint = min(hosted.checkpoint, end_offset)
        hosted.checker.cut(self.broker_id)
        return ev.Truncated(end_offset)

    def _restart_log(self, tp: TopicPartition, hosted: Hosted, effect: fx.RestartLog, *_: object) -> ev.Event:
        hosted.log.restart_at(effect.offset)
        hosted.checker.cut(self.broker_id)
        return ev.Truncated(effect.offset)

    def _refuse_truncation(self, tp: TopicPartition, hosted: Hosted, effect: fx.RefuseTruncation, *_: object) -> None:
        """Record that the replica refuses to truncate, and publish this in ZooKeeper."""
        self.world.happened["cut refused"] += 1
        self.world.note(f"b{self.broker_id} refuses to cut {tp} to {effect.offset}, below {effect.high_watermark}")
        hosted.refused = effect
        self._say_refused(tp, hosted, effect)

    def _say_refused(self, tp: TopicPartition, hosted: Hosted, effect: fx.RefuseTruncation) -> None:
        session = self.session
        if hosted.refused is not effect or session is None:
            return
        refusal = TruncationRefused(
            tp,
            hosted.topic_id,
            self.broker_id,
            self.incarnation,
            effect.leader_epoch,
            effect.offset,
            effect.high_watermark,
        )

        def said() -> None:
            if hosted.refused is not effect:
                self._unsay_refused(tp)

        session.ask(
            lambda: self.zk.refuse_truncation(session.session_id, refusal),
            lambda _: said(),
            lambda: self.later(20, lambda: self._say_refused(tp, hosted, effect)),
        )

    def _accept_truncation(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        if hosted.refused is not None:
            hosted.refused = None
            self._unsay_refused(tp)

    def _unsay_refused(self, tp: TopicPartition) -> None:
        if self.session is not None:
            self.session.ask(
                lambda: self.zk.accept_truncation(self.broker_id, tp),
                lambda _: None,
                lambda: self.later(20, lambda: self._unsay_refused(tp)),
            )

    def _respond_to_produce(self, tp: TopicPartition, hosted: Hosted, effect: fx.RespondToProduce, *_: object) -> None:
        produce = hosted.produces.pop(effect.ticket)
        if effect.code == ErrorCode.NONE:
            assert hosted.replica is not None
            epoch = hosted.replica.leader_epoch
            hosted.checker.answered(produce.body, produce.acks, effect.base_offset, epoch=epoch)
        self._tell(produce, effect.code)

    def _mark_moved(self, tp: TopicPartition, hosted: Hosted, effect: fx.HighWatermarkMoved, *_: object) -> None:
        assert hosted.replica is not None
        epoch, before, hosted.mark = hosted.replica.leader_epoch, hosted.mark, effect.high_watermark
        hosted.checker.high_watermark_moved(self.broker_id, effect.high_watermark, before=before, epoch=epoch)
        self._wake(hosted)

    def _end_moved(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        self._wake(hosted)

    def _start_fetching(self, tp: TopicPartition, hosted: Hosted, effect: fx.StartFetching, *_: object) -> None:
        hosted.fetching = Fetching(effect.leader, effect.leader_epoch)
        self._fetch(tp, hosted, hosted.fetching)

    def _stop_fetching(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        hosted.fetching = None

    def _bad_decision(self, tp: TopicPartition, hosted: Hosted, effect: fx.ReportBadDecision, *_: object) -> None:
        raise SimViolation(f"{tp}: {effect.detail}", rule="TypeOk", partition=str(tp))

    def _role_changed(self, tp: TopicPartition, hosted: Hosted, effect: fx.RoleChanged, *_: object) -> None:
        role, epoch = effect.role, effect.leader_epoch
        self.world.note(f"b{self.broker_id} is {role} of {tp} in epoch {epoch}")
        if hosted.truncation is not None:
            self.world.happened["cut forgotten"] += 1
            hosted.truncation = None
        self._accept_truncation(tp, hosted)
        if role == "leader":
            hosted.checker.became_leader(self.broker_id, self.process, epoch)
        parked, hosted.parked = list(hosted.parked.values()), {}
        for asked in parked:
            self._answer_fetch(hosted, fx.RefuseFetch(ErrorCode.NOT_LEADER_OR_FOLLOWER, ""), asked)

    # --- appending ----------------------------------------------------------------------------------------------

    def _append_as_leader(self, tp: TopicPartition, hosted: Hosted, effect: fx.AppendAsLeader, *_: object) -> ev.Event:
        ticket, leader_epoch = effect.ticket, effect.leader_epoch
        produce, log = hosted.produces[ticket], hosted.log
        planned = log.planned(
            produce.body,
            produce.count,
            leader_epoch=leader_epoch,
            now_ms=self.now_ms,
            sequence=produce.sequence,
            content=produce.content,
        )
        if produce.sequence.first_sequence >= 0:
            try:
                known = log.known([(planned.header, None)], begins_anywhere=produce.begins_anywhere)
            except BrokerError as error:
                unknown = log.producers.get(planned.header.producer_id) is None
                hosted.checker.sequence_refused(error, unknown=unknown and produce.begins_anywhere)
                return self._refuse_append(hosted, ticket, error.code)
            if known:
                self.world.happened["duplicate recognised"] += 1
                if produce.content is not None and planned.header.producer_id not in log.transactions:
                    self.world.happened["duplicate after its marker"] += 1
                return ev.LeaderAppended(ticket, known[0].start, known[0].end)
        if self._has_no_room():
            return self._refuse_append(hosted, ticket, ErrorCode.KAFKA_STORAGE_ERROR)
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
        """Append all batches of a leader's response, or none."""
        if self._has_no_room() or not batches:
            return ev.FollowerAppended(hosted.log.log_end_offset)
        if self.append_fault is not None:
            self._fail_append(hosted, batches[0])
            return ev.LogFailed("the disk failed")
        end_offset = hosted.log.append_copies(batches)
        hosted.checker.appended(self.broker_id, len(batches))
        return ev.FollowerAppended(end_offset)

    def _has_no_room(self) -> bool:
        """Return whether this append fails without effect.

        Neither a short write on a full disk nor a batch that fails its checks changes the log.
        """
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

    # --- fetching -----------------------------------------------------------------------------------------------

    def _fetch(self, tp: TopicPartition, hosted: Hosted, fetching: Fetching) -> None:
        """Send one request of the fetch loop, from the current log end offset.

        Every response goes to the core, which recognizes stale responses. Only the first response to the latest request
        continues the loop.
        """
        if hosted.fetching is not fetching:
            return
        wait_ms = self._held_ms(tp)
        if wait_ms > 0 and hosted.log.log_end_offset < fetching.mark:
            self.world.happened["copy held back"] += 1
            fetching.sent_ms = self.now_ms + wait_ms
            self.later(wait_ms, lambda: self._fetch(tp, hosted, fetching))
            return
        replica = hosted.replica
        assert replica is not None
        fetching.request += 1
        fetching.sent_ms = self.now_ms
        log, leader = hosted.log, self.cluster.brokers[fetching.leader]
        asked = Asked(
            event=ev.FollowerFetched(
                self.broker_id,
                self.incarnation,
                fetching.leader_epoch,
                log.log_end_offset,
                log.last_epoch,
                replica.refuses_truncation,
            ),
            mark=replica.high_watermark,
            follower=self,
            process=self.process,
            tp=tp,
            hosted=hosted,
            fetching=fetching,
            request=fetching.request,
        )
        self.send(leader, partial(leader.fetched, asked))

    def fetch_answered(self, asked: Asked, answer: ev.LeaderResponded, batches: tuple[SimBatch, ...]) -> None:
        tp, hosted, fetching = asked.tp, asked.hosted, asked.fetching
        if self.hosted.get(tp) is not hosted:
            return
        log = hosted.log
        if batches and self.limit(tp):
            self._copied(batches)
        end_offset = log.log_end_offset
        self.handle(tp, answer, batches=batches, asked=asked)
        unused = batches and log.log_end_offset == end_offset
        fetching.mark = answer.high_watermark
        if hosted.truncation is not None:
            return  # the fetch loop starts again after the truncation
        if fetching.request == asked.request and hosted.fetching is fetching:
            fetching.request += 1
            refused = answer.diverging is not None and hosted.replica is not None and hosted.replica.refuses_truncation
            if answer.code or unused or refused:
                self.later(FETCH_PAUSE_MS, lambda: self._fetch(tp, hosted, fetching))
            else:
                self._fetch(tp, hosted, fetching)

    def limit(self, tp: TopicPartition) -> int:
        """Return the limit in bytes per second for copying the partition during a reassignment; 0 means no limit."""
        moving = self.cache.moving
        return limit_of(moving[tp], self.broker_id) if tp in moving else 0

    def _held_ms(self, tp: TopicPartition) -> int:
        """Return the delay of a copy in milliseconds.

        As in ``broker/replication/throttle.py``, the lowest limit counts.
        """
        if not self.cache.moving or not self.limit(tp):
            return 0
        rate, now_s = min(limit for limit in map(self.limit, self.cache.moving) if limit), self.now_ms / 1000
        if self.bucket is None:
            self.bucket = TokenBucket(rate, now_s)
        elif self.bucket.rate != rate:
            self.bucket.set_rate(rate, now_s)
        return min(ceil(self.bucket.wait_s(now_s) * 1000), HOLD_MS)

    def _copied(self, batches: tuple[SimBatch, ...]) -> None:
        if self.bucket is not None:
            self.bucket.consume(sum(batch.header.length for batch in batches), self.now_ms / 1000)

    def fetched(self, asked: Asked) -> None:
        hosted = self.hosted.get(asked.tp)
        if hosted is not None and hosted.replica is not None and hosted.topic_id == asked.hosted.topic_id:
            self.handle(asked.tp, asked.event, asked=asked)

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
        if isinstance(verdict, fx.ServeFetch):  # not ``match``, which is slower: every fetch runs this
            batches = log.read(verdict.offset, FETCH_BATCHES)
            if not batches and replica.high_watermark <= asked.mark:
                hosted.parked[event.replica_id] = asked
                return
        elif isinstance(verdict, fx.RefuseFetch):
            code = verdict.code
        else:
            diverging = (verdict.epoch, verdict.end_offset)
        answer = ev.LeaderResponded(
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
        follower = asked.follower
        self.reply(follower, asked.process, partial(follower.fetch_answered, asked, answer, batches))

    def _wake(self, hosted: Hosted) -> None:
        """Respond to the waiting fetches of this epoch, because log end offset or high watermark has changed."""
        if hosted.parked and hosted.replica is not None:
            parked, hosted.parked = list(hosted.parked.values()), {}
            for asked in parked:
                if asked.event.leader_epoch == hosted.replica.leader_epoch:
                    self._answer_fetch(hosted, fx.ServeFetch(asked.event.offset), asked)

    # --- ZooKeeper ----------------------------------------------------------------------------------------------

    def _write_isr(self, tp: TopicPartition, hosted: Hosted, order: fx.WriteIsr, *_: object) -> None:
        """Write the ISR to ZooKeeper, with the expected version.

        Without a response in time, the outcome of the write is unknown. Then the broker reports this to the core, and
        reads the node until the outcome is known. A later response is ignored, because a lost connection would not
        deliver it.
        """
        expected, incarnation, session = order.expected_version, self.incarnation, self.session
        state = LeaderAndIsr(
            order.leader, order.leader_epoch, order.isr, order.controller_epoch, lossy_epoch=order.lossy_epoch
        )
        hosted.checker.proposed.add((expected, order.isr))
        assert session is not None

        def execute() -> VersionedState | BadVersion | NodeGone:
            return self.zk.write_state(
                tp, state, expected, topic_id=hosted.topic_id, leader_incarnation=incarnation, added=order.added
            )

        def answered(result: VersionedState | BadVersion | NodeGone) -> None:
            if isinstance(result, VersionedState):
                self._known_is(tp, hosted, result, ev.IsrWritten(result.state.isr, result.version))
            elif isinstance(result, BadVersion) and result.found is not None:
                self._refused(tp, hosted, result.found, expected)

        def lost() -> None:
            self._back(tp, hosted, ev.IsrWriteFailed(expected))
            self._read_back(tp, hosted, expected)

        session.ask(execute, answered, lost)

    def _back(self, tp: TopicPartition, hosted: Hosted, event: ev.Event) -> None:
        """Pass the result of a request to the replica, unless the broker has dropped the replica since then."""
        if self.hosted.get(tp) is hosted:
            self.handle(tp, event)

    def _refused(self, tp: TopicPartition, hosted: Hosted, found: VersionedState, expected: int) -> None:
        self._known_is(tp, hosted, found, ev.IsrRefused(found.state, found.version, expected))

    def _known_is(self, tp: TopicPartition, hosted: Hosted, stored: VersionedState, event: ev.Event) -> None:
        self.cache.state_written(tp, stored.state, version=stored.version, topic_id=hosted.topic_id)
        self._known = stored
        self._back(tp, hosted, event)

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

    def _isr_changed(self, tp: TopicPartition, hosted: Hosted, *_: object) -> None:
        """Notify the controller of a written state soon, together with other states that are written until then."""
        assert self._known is not None and hosted.replica is not None
        assert self._known.version == hosted.replica.version
        if not self._changed:
            self.later(NOTIFY_MS, self._notify)
        self._changed.setdefault((tp.topic, hosted.topic_id), {})[tp.partition] = self._known

    def _notify(self) -> None:
        changed, self._changed = self._changed, {}
        self._send_notice(tuple(TopicStates(topic, topic_id, states) for (topic, topic_id), states in changed.items()))

    def _send_notice(self, told: tuple[TopicStates, ...]) -> None:
        assert self.session is not None
        self.session.ask(
            lambda: self.zk.notify(self.broker_id, told),
            lambda _: None,
            lambda: self.later(20, lambda: self._send_notice(told)),
        )

    #: The method for each type of effect. A table, because half of the simulator's time is spent here.
    _PERFORM: ClassVar[dict[type, Callable[..., ev.Event | None]]] = {
        fx.AppendAsLeader: _append_as_leader,
        fx.RespondToProduce: _respond_to_produce,
        fx.AppendAsFollower: _append_as_follower,
        fx.HighWatermarkMoved: _mark_moved,
        fx.LogEndMoved: _end_moved,
        fx.ServeFetch: _verdict,
        fx.RefuseFetch: _verdict,
        fx.AnswerDiverging: _verdict,
        fx.TruncateLog: _truncate,
        fx.RestartLog: _restart_log,
        fx.RefuseTruncation: _refuse_truncation,
        fx.TruncationAccepted: _accept_truncation,
        fx.WriteIsr: _write_isr,
        fx.IsrChanged: _isr_changed,
        fx.StartFetching: _start_fetching,
        fx.StopFetching: _stop_fetching,
        fx.RoleChanged: _role_changed,
        fx.ReportBadDecision: _bad_decision,
    }
