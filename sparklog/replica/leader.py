"""The leader role of a replica: it accepts appends, tracks its followers, and decides what is committed.

A ``LeaderRole`` exists for exactly one leader epoch; ``replica.py`` creates and drops it. Its rules, most of which
prevent a loss of records:

- The high watermark is the smallest log end offset in the *maximal* ISR. The high watermark moves only while the
  *committed* ISR has min(min.insync.replicas, replication factor) members.
- A follower may join the ISR when its log end offset reaches max(high watermark, epoch start). The offset counts only
  if the follower's current incarnation fetched from it in this epoch. All records that earlier leaders committed are
  below the epoch start, but this leader's high watermark may still be lower. Source: KAFKA-7128.
- An ISR change takes effect when it is written to ZooKeeper. Until then both the old and the new ISR count (see
  ``isr.py``).
- The leader first removes replicas that are out of sync from the ISR, and only then the replicas that a reassignment
  removes. The controller orders the removal of these replicas for one ISR. If the leader removes any other replica
  from this ISR, it drops the order.
- The leader's own log counts for the high watermark only when a durable checkpoint contains the log. Otherwise a leader
  that restarts could not distinguish a lost log from a log that never had records.
- While a follower holds committed records that the leader's log lacks, the leader acknowledges no records, for any
  acks.
- The lag time of every follower starts with the epoch, so no follower is removed because of a delay under an earlier
  leader.
"""

from __future__ import annotations

from msgspec import structs

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr
from sparklog.replica.effects import (
    AnswerDiverging,
    AppendAsLeader,
    Effect,
    HighWatermarkMoved,
    IsrChanged,
    LogEndMoved,
    RefuseFetch,
    RespondToProduce,
    ServeFetch,
    WriteIsr,
)
from sparklog.replica.events import (
    FollowerConnectionLost,
    FollowerFetched,
    IsrRefused,
    IsrWriteFailed,
    IsrWritten,
    LeaderAppended,
    LeaderAppendFailed,
    ProduceArrived,
)
from sparklog.replica.isr import CommittedIsr, IsrState, PendingExpand, PendingIsr, PendingShrink
from sparklog.replica.progress import UNKNOWN_END, Progress
from sparklog.replica.purgatory import NEVER, Purgatory, Waiting
from sparklog.replica.view import PartitionView, divergence_point

#: If ``replica.lag.max.messages`` is set, the leader checks the lag in records at least this often.
LAG_MESSAGES_CHECK_MS = 500


class LeaderRole:
    """The leader role of a replica in one leader epoch.

    A part of ``Replica``; mutable. Its methods handle events and return effects. ``purgatory`` has the waiting
    produces.
    """

    name = "leader"

    __slots__ = ("_end", "_is_large_enough", "_may_commit", "_members", "_peers", "check_ms", "contested_by", "epoch",
                 "epoch_start", "isr", "progress", "purgatory", "view")  # fmt: skip

    def __init__(self, view: PartitionView, state: LeaderAndIsr, now_ms: int, *, purgatory: Purgatory) -> None:
        self.view = view
        self.epoch = state.leader_epoch
        #: The log end offset at the start of the epoch. All records that earlier leaders committed are below it.
        self.epoch_start = view.log.log_end_offset
        #: The log end offset as of the last append. Only the appends of this leader move it.
        self._end = self.epoch_start
        self.purgatory = purgatory
        self.isr: IsrState = CommittedIsr(view.broker_id, state.isr)
        self.progress: dict[int, Progress] = {}
        #: Replicas that hold committed records that this log lacks. While there is one, the leader acknowledges no
        #: records.
        self.contested_by: set[int] = set()
        #: The time of the next check for followers that have fallen out of sync.
        self.check_ms = NEVER
        self.follow_assignment(now_ms)
        self._isr_became(self.isr)

    # --- produce ------------------------------------------------------------------------------------------------

    def produce_arrived(self, event: ProduceArrived) -> list[Effect]:
        acks = event.acks
        if self.contested_by:
            return [RespondToProduce(event.ticket, ErrorCode.NOT_ENOUGH_REPLICAS, -1, self._contest)]
        if acks == -1 and not self._is_large_enough:
            detail = f"{len(self.isr.committed)} in sync {self.isr.committed}, {self.view.min_committed} needed"
            return [RespondToProduce(event.ticket, ErrorCode.NOT_ENOUGH_REPLICAS, -1, detail)]
        if acks not in {-1, 1, 0}:
            detail = f"acks={acks}: expected 0, 1 or -1"
            return [RespondToProduce(event.ticket, ErrorCode.INVALID_REQUIRED_ACKS, -1, detail)]
        self.purgatory.ordered[event.ticket] = (acks, event.deadline_ms)
        return [AppendAsLeader(event.ticket, self.epoch)]

    def appended(self, event: LeaderAppended, now_ms: int) -> list[Effect]:
        """Respond to the produce, or add it to the purgatory until its records are committed.

        A follower that has all records before this append counts as caught up until now, even if it last fetched long
        ago. So the followers of an idle partition do not count as lagging. An append of a duplicate does not move the
        log end offset.
        """
        order = self.purgatory.ordered.pop(event.ticket, None)
        if order is None:
            return []
        acks, deadline_ms = order
        end = self.view.log.log_end_offset
        effects: list[Effect] = []
        if end > self._end:
            for peer in self.progress.values():
                if peer.log_end >= self._end:
                    peer.caught_up_ms = now_ms
            self._end = end
            if self.check_ms == NEVER:
                self._check_in_time(now_ms)
            effects.append(LogEndMoved(end))
        if not self._peers:
            self.advance(effects)
        if acks == -1 and event.end_offset > self.view.high_watermark:
            self.purgatory.wait(Waiting(event.end_offset, event.ticket, event.base_offset, deadline_ms))
        else:
            effects.append(RespondToProduce(event.ticket, ErrorCode.NONE, event.base_offset))
        return effects

    def append_failed(self, event: LeaderAppendFailed) -> list[Effect]:
        """Drop the ticket. The caller responds to the client, because the caller knows why the append failed."""
        self.purgatory.ordered.pop(event.ticket, None)
        return []

    # --- followers ----------------------------------------------------------------------------------------------

    def fetched(self, event: FollowerFetched, now_ms: int) -> list[Effect]:
        """Handle a follower's fetch.

        The leader first checks the follower's epoch and incarnation, then compares the two logs, and only then uses the
        offset.
        """
        peer = self.progress.get(event.replica_id)
        if event.leader_epoch != self.epoch or peer is None or event.incarnation != peer.incarnation:
            refusal = self._fence(event, peer)
            if refusal is not None:
                return [refusal]
            assert peer is not None
            self._check_in_time(now_ms)  # The new incarnation may lag.
        view = self.view
        log, offset, end = view.log, event.offset, self._end
        outside = offset != end and (offset > end or offset < log.log_start_offset)
        if outside or event.last_epoch != log.last_epoch:
            objection = self._compare(event, end)
            if objection is not None:
                if event.refuses:
                    self._mark_contested(event.replica_id)
                return [objection]
        if event.replica_id in self.contested_by:
            return self._resolve_contest(event, now_ms)
        held_back = peer.log_end <= view.high_watermark
        peer.fetched(offset, end, now_ms=now_ms)
        if offset < end and self.check_ms == NEVER:
            self._check_in_time(now_ms)
        effects: list[Effect] = []
        if event.replica_id in self._members:
            if held_back:
                self.advance(effects)
        elif type(self.isr) is CommittedIsr and self._may_join(event.replica_id, peer, now_ms):
            self.reconsider(effects, now_ms)
        effects.append(ServeFetch(offset))
        return effects

    @property
    def _contest(self) -> str:
        return (
            f"replicas {sorted(self.contested_by)} hold committed records that the log of this leader lacks: the "
            f"controller decides which copy counts"
        )

    def _mark_contested(self, replica_id: int) -> None:
        """Acknowledge no more records, because a replica keeps committed records that this log lacks.

        Records that this leader acknowledged now could be truncated later.
        """
        self.contested_by.add(replica_id)
        self._may_commit = False

    def _resolve_contest(self, event: FollowerFetched, now_ms: int) -> list[Effect]:
        """Handle the fetch of a replica that no longer refuses to truncate.

        It has truncated its records, or the histories agree now.
        """
        self.contested_by.discard(event.replica_id)
        self._isr_became(self.isr)
        effects = self.fetched(event, now_ms)
        self.advance(effects)
        return effects

    def _fence(self, event: FollowerFetched, peer: Progress | None) -> RefuseFetch | None:
        """Return the refusal of a fetch, or None if it is accepted. Record a newer incarnation of the follower."""
        if event.leader_epoch != self.epoch:
            code = ErrorCode.FENCED_LEADER_EPOCH if event.leader_epoch < self.epoch else ErrorCode.UNKNOWN_LEADER_EPOCH
            return RefuseFetch(code, f"fetch of leader epoch {event.leader_epoch}, this is {self.epoch}")
        if peer is None:
            detail = f"broker {event.replica_id} is not among the replicas {self.view.replicas}"
            return RefuseFetch(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail)
        if event.incarnation < peer.incarnation:
            detail = f"incarnation {event.incarnation} of broker {event.replica_id}, {peer.incarnation} is known"
            return RefuseFetch(ErrorCode.STALE_BROKER_EPOCH, detail)
        if event.incarnation > peer.incarnation:
            peer.reincarnated(event.incarnation)
        return None

    def _compare(self, event: FollowerFetched, end: int) -> Effect | None:
        """Return the divergence or error if the follower's log differs from this log below its offset, or None.

        Source: KIP-101, KIP-279, KIP-595.
        """
        offset = event.offset
        log = self.view.log
        # Do not use the log start offset: it may lie inside the first segment, and a follower that starts again copies
        # that segment from its beginning.
        first = log.first_segment_offset
        if offset < first or (event.last_epoch < 0 and offset > end):
            detail = f"offset {offset} is outside [{first}, {end}]"
            return RefuseFetch(ErrorCode.OFFSET_OUT_OF_RANGE, detail)
        if event.last_epoch < 0:
            if offset != first and end > first:
                # The follower lost part of a segment. If it continued in the middle, its segment file would differ from
                # this one.
                return RefuseFetch(ErrorCode.OFFSET_OUT_OF_RANGE, f"an empty log begins at {first}, not at {offset}")
            return None
        divergence = divergence_point(log, offset, event.last_epoch)
        return None if divergence is None else AnswerDiverging(divergence.epoch, divergence.end_offset)

    def connection_lost(self, event: FollowerConnectionLost, now_ms: int) -> list[Effect]:
        peer = self.progress.get(event.replica_id)
        if peer is not None and peer.disconnected_ms is None:
            peer.disconnected_ms = now_ms
            if event.replica_id in self._members:  # A broker outside the ISR cannot fall out.
                self.check_ms = min(self.check_ms, now_ms + self.view.settings.connection_grace_ms)
        return []

    # --- high watermark -----------------------------------------------------------------------------------------

    @property
    def replicated_end(self) -> int:
        """Return the offset up to which all in-sync replicas have the log.

        This does not depend on whether the ISR is large enough to commit records.
        """
        return min([self.view.log.log_end_offset, *(peer.log_end for peer in self._peers)])

    def advance(self, effects: list[Effect]) -> None:
        """Raise the high watermark as far as the log end offsets of the maximal ISR allow.

        Respond to the produces whose records are then committed. Add the effects to ``effects``.
        """
        if not self._may_commit:
            return
        view = self.view
        before, mark = view.high_watermark, self._end
        for peer in self._peers:
            if peer.log_end <= before:
                return
            if peer.log_end < mark:  # noqa: PLR1730 - this is hot, and min() takes three times as long
                mark = peer.log_end
        if mark <= before:
            return
        view.high_watermark = mark
        effects.append(HighWatermarkMoved(mark))
        effects += [
            RespondToProduce(entry.ticket, ErrorCode.NONE, entry.base_offset) for entry in self.purgatory.complete(mark)
        ]

    def _isr_became(self, isr: IsrState) -> None:
        self.isr = isr
        self._members = frozenset(isr.maximal)
        self._peers = [self.progress[broker] for broker in isr.maximal if broker != self.view.broker_id]
        view = self.view
        enough = len(isr.committed) >= view.min_committed
        self._is_large_enough = enough
        self._may_commit = enough and view.log.named and not self.contested_by

    # --- in-sync replicas ---------------------------------------------------------------------------------------

    def reconsider(self, effects: list[Effect], now_ms: int) -> None:
        """Start the ISR change that is needed now, unless another change is in flight.

        Removals come first, because they let the high watermark rise. Add the effects to ``effects``.
        """
        if type(self.isr) is CommittedIsr:
            # Use lists, and build only those that are needed: when a broker fails, thousands of partitions do this at
            # the same time.
            out = [broker for broker in self.isr.committed if self._out_of_sync(broker, now_ms)]
            removed = tuple(out) or self._leaving_members()
            if removed:
                self._propose(self.isr.shrink(removed, expected_version=self.view.version), effects)
            else:
                self._propose_additions(effects, now_ms)
        self._schedule_check(now_ms)

    def _propose_additions(self, effects: list[Effect], now_ms: int) -> None:
        members = self._members
        added = tuple(
            [
                (broker, peer.incarnation)
                for broker, peer in self.progress.items()
                if broker not in members and self._may_join(broker, peer, now_ms)
            ]
        )
        if added:
            # Restart the lag time. Otherwise the next check would remove a follower that was absent for long.
            for broker, _ in added:
                self.progress[broker].caught_up_ms = now_ms
            assert isinstance(self.isr, CommittedIsr)
            self._propose(self.isr.expand(added, expected_version=self.view.version), effects)

    def _leaving_members(self) -> tuple[int, ...]:
        """Return the members that a reassignment removes.

        The leader itself stays until the controller elects another one.
        """
        leaving = self.view.leaving
        return tuple(b for b in self.isr.committed if b in leaving and b != self.view.broker_id) if leaving else ()

    def _propose(self, pending: PendingIsr, effects: list[Effect]) -> None:
        self._isr_became(pending)
        effects.append(self._order(pending))

    def _order(self, pending: PendingIsr) -> WriteIsr:
        state = self.view.state
        assert state is not None
        return WriteIsr(
            leader=self.view.broker_id,
            leader_epoch=self.epoch,
            controller_epoch=state.controller_epoch,
            isr=pending.proposed,
            expected_version=pending.expected_version,
            added=pending.added,
            lossy_epoch=state.lossy_epoch,
        )

    def _may_join(self, broker: int, peer: Progress, now_ms: int) -> bool:
        """Return whether the leader may add ``broker`` to the ISR.

        The broker must be alive in the incarnation that fetched, must not be about to stop or leave, and must hold all
        records that may be committed. If the broker lags, it must also have fetched recently: otherwise a broker that
        was just removed because it does not fetch would return because of its old progress. No broker joins before the
        controller has sent the replicas of this epoch, because a reassignment may have ended with the epoch.
        """
        view = self.view
        settings = view.settings
        lag = view.log.log_end_offset - peer.log_end
        return (
            peer.log_end >= view.high_watermark
            and peer.log_end >= self.epoch_start
            and view.incarnations.get(broker) == peer.incarnation
            and broker not in view.stopping
            and broker not in view.leaving
            and broker in view.replicas
            and view.replicas_epoch == self.epoch
            and peer.disconnected_ms is None
            and now_ms >= peer.retry_ms
            and (not lag or now_ms < peer.fetched_ms + settings.lag_time_max_ms)
            and (not settings.lag_max_messages or lag <= settings.lag_max_messages)
        )

    def _out_of_sync(self, broker: int, now_ms: int) -> bool:
        view = self.view
        if broker == view.broker_id:
            return False
        if view.known_dead(broker):
            return True
        peer = self.progress[broker]
        settings = view.settings
        if peer.disconnected_ms is not None and now_ms >= peer.disconnected_ms + settings.connection_grace_ms:
            return True
        lag = view.log.log_end_offset - peer.log_end
        if lag and now_ms >= peer.caught_up_ms + settings.lag_time_max_ms:
            return True
        return peer.log_end != UNKNOWN_END and 0 < settings.lag_max_messages < lag

    def _check_in_time(self, now_ms: int) -> None:
        """Schedule a check, because a follower may lag."""
        self.check_ms = min(self.check_ms, now_ms + self._check_interval_ms)

    @property
    def _check_interval_ms(self) -> int:
        """Return the longest time between two checks of a follower that lags."""
        settings = self.view.settings
        lag_ms = settings.lag_time_max_ms
        return min(lag_ms, LAG_MESSAGES_CHECK_MS) if settings.lag_max_messages else lag_ms

    def _schedule_check(self, now_ms: int) -> None:
        """Set the next check to the earliest time at which a member could fall out of sync.

        A member that has all records can fall out of sync only after the next append, and that append schedules a
        check. So an idle partition is not checked. While an ISR change is in flight, its result triggers the next
        check.
        """
        settings = self.view.settings
        end = self.view.log.log_end_offset
        check_ms = NEVER
        for broker in self.isr.committed:
            if broker == self.view.broker_id:
                continue
            peer = self.progress[broker]
            if peer.log_end != end:
                check_ms = min(check_ms, peer.caught_up_ms + settings.lag_time_max_ms, now_ms + self._check_interval_ms)
            if peer.disconnected_ms is not None:
                check_ms = min(check_ms, peer.disconnected_ms + settings.connection_grace_ms)
        for broker, peer in self.progress.items():
            if broker not in self._members and peer.retry_ms > now_ms:
                check_ms = min(check_ms, peer.retry_ms)
        if type(self.isr) is not CommittedIsr:
            check_ms = max(check_ms, now_ms + settings.isr_retry_ms)
        self.check_ms = check_ms

    # --- results from ZooKeeper ---------------------------------------------------------------------------------

    def isr_written(self, event: IsrWritten, now_ms: int) -> list[Effect]:
        pending = self.isr
        if (
            isinstance(pending, CommittedIsr)
            or event.version != pending.expected_version + 1
            or event.isr != pending.proposed
        ):
            return []
        view = self.view
        assert view.state is not None
        view.version = event.version
        view.state = structs.replace(view.state, isr=event.isr)
        if isinstance(pending, PendingShrink) and not view.leaving.issuperset(pending.removed):
            view.leaving = frozenset()
        return self.isr_known(event.isr, now_ms, announce=True)

    def isr_refused(self, event: IsrRefused, now_ms: int) -> list[Effect]:
        """Handle a refused ISR write, if the partition's node still has the expected version.

        If the write got a response, an added broker has another incarnation. The leader gives up the change for now.

        If the write got no response, it may still arrive, although the node has the old version now. The leader
        therefore writes again with the same expected version: only one of the two writes can succeed.
        """
        pending = self.isr
        if isinstance(pending, CommittedIsr) or event.expected_version not in {-1, pending.expected_version}:
            return []
        if pending.outcome_unknown:
            self._isr_became(pending.lost_response(unknown=False))
            return [self._order(pending)]
        retry_ms = now_ms + self.view.settings.isr_retry_ms
        for broker, _ in pending.added:
            self.progress[broker].retry_ms = retry_ms
        self._isr_became(pending.before)
        effects: list[Effect] = []
        self.advance(effects)
        if isinstance(pending, PendingExpand):
            self.reconsider(effects, now_ms)
        else:
            self.check_ms = retry_ms
        return effects

    def isr_write_failed(self, event: IsrWriteFailed) -> list[Effect]:
        """Keep the maximal ISR, which covers both possible contents of the node.

        A later read of the node shows whether the write has succeeded.
        """
        pending = self.isr
        if not isinstance(pending, CommittedIsr) and event.expected_version in {-1, pending.expected_version}:
            self._isr_became(pending.lost_response(unknown=True))
        return []

    def isr_known(self, isr: tuple[int, ...], now_ms: int, *, announce: bool) -> list[Effect]:
        """Use ``isr`` as the committed ISR. The partition's node has this ISR at the version ``PartitionView.version``.

        ``announce`` means that the controller may not know the ISR yet and must be notified.
        """
        effects: list[Effect] = []
        if announce and self.isr.committed != isr:
            effects.append(IsrChanged(isr))
        self.isr = CommittedIsr(self.view.broker_id, isr)
        self.follow_assignment(now_ms)
        self._isr_became(self.isr)
        self.advance(effects)
        self.reconsider(effects, now_ms)
        return effects

    # --- other events -------------------------------------------------------------------------------------------

    def follow_assignment(self, now_ms: int) -> None:
        """Keep one ``Progress`` for each other replica and each other member of the ISR.

        The lag time of a new ``Progress`` starts now.
        """
        others = dict.fromkeys((*self.view.replicas, *self.isr.maximal))
        others.pop(self.view.broker_id, None)
        if list(others) == list(self.progress):
            return
        incarnations = self.view.incarnations
        self.progress = {
            broker: self.progress.get(broker) or Progress(incarnations.get(broker, -1), now_ms) for broker in others
        }
        self.contested_by &= self.progress.keys()

    def cluster_changed(self, now_ms: int) -> list[Effect]:
        """Check the high watermark and ISR again after a change of replicas, live brokers or min.insync.replicas."""
        self.follow_assignment(now_ms)
        self._update_incarnations()
        self._isr_became(self.isr)
        effects: list[Effect] = []
        self.advance(effects)
        self.reconsider(effects, now_ms)
        return effects

    def log_named(self) -> list[Effect]:
        """Count this leader's log for the high watermark, because a durable checkpoint now contains it."""
        self._isr_became(self.isr)
        effects: list[Effect] = []
        self.advance(effects)
        return effects

    def brokers_changed(self, now_ms: int) -> list[Effect]:
        """Check after a change of the live brokers whether the ISR must change.

        The high watermark does not move, because no replica has got more records.
        """
        self._update_incarnations()
        effects: list[Effect] = []
        self.reconsider(effects, now_ms)
        return effects

    def _update_incarnations(self) -> None:
        incarnations = self.view.incarnations
        for broker, peer in self.progress.items():
            if incarnations.get(broker, -1) > peer.incarnation:
                peer.reincarnated(incarnations[broker])

    def ticked(self, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if now_ms >= self.purgatory.earliest_ms:
            enough = len(self.isr.committed) >= self.view.min_committed
            code = ErrorCode.REQUEST_TIMED_OUT if enough else ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
            detail = (
                f"appended, not committed in time: high watermark {self.view.high_watermark}, ISR {self.isr.committed}"
            )
            effects += [
                RespondToProduce(entry.ticket, code, entry.base_offset, detail)
                for entry in self.purgatory.expire(now_ms)
            ]
        if now_ms >= self.check_ms:
            self.reconsider(effects, now_ms)
        return effects
