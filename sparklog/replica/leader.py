"""A replica while it leads: appends, follower progress, high watermark, in-sync set, waiting produces.

Lives for exactly one leader epoch; ``replica.py`` makes and drops it. The rules, each with the loss it prevents:

- The high watermark is the smallest log end in the *maximal* ISR, and moves only while the *committed* ISR has
  min(min.insync.replicas, replication factor) members.
- A follower enters the ISR when its log end, as fetched in this epoch by its current incarnation, has reached
  max(high watermark, epoch start): what earlier leaders committed lies below the epoch start, though this leader's
  own high watermark may lag behind it. Source: KAFKA-7128.
- An ISR change acts only once it is written; until then both the old and the new set count (see ``isr.py``).
- Replicas that leave because the partition moves go when nobody who stays has to; if one who stays falls out first,
  the order to let them go lapses, for it was given on the strength of an ISR that is no more.
- The leader's own log counts once its name is durable: a leader that restarts without its log must be able to tell that
  from a log that never held anything.
- A leader whose follower holds committed records that its log lacks acknowledges nothing, whatever the acks.
- The lag clock of every follower starts with the epoch: nobody is shrunk for what an earlier leader had not seen.
"""

from __future__ import annotations

from msgspec import structs

from sparklog.errors import ErrorCode
from sparklog.model import NO_EPOCH, LeaderAndIsr
from sparklog.replica.effects import (
    AnswerDiverging,
    AnswerProduce,
    AppendAsLeader,
    Effect,
    HighWatermarkMoved,
    IsrChanged,
    LogEndMoved,
    RefuseFetch,
    ServeFetch,
    WriteIsr,
)
from sparklog.replica.events import (
    AppendedAtOnce,
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
from sparklog.replica.view import PartitionView, parted

#: With ``replica.lag.max.messages`` set, lag in records is looked at this often at least.
LAG_MESSAGES_CHECK_MS = 500
_NOT_ALL = frozenset({0, 1})


class Leader:
    """Mutable, owned by one ``Replica``. Methods are told facts and return effects; every queue is the purgatory's."""

    name = "leader"

    __slots__ = ("_end", "_may_commit", "_members", "_peers", "check_ms", "contested_by", "epoch", "epoch_start", "isr",
                 "progress", "purgatory", "view")  # fmt: skip

    def __init__(self, view: PartitionView, state: LeaderAndIsr, now_ms: int, *, purgatory: Purgatory) -> None:
        self.view = view
        self.epoch = state.leader_epoch
        #: log end when the epoch began: what earlier leaders may have committed lies below
        self.epoch_start = view.log.log_end_offset
        self._end = self.epoch_start
        self.purgatory = purgatory
        self.isr: IsrState = CommittedIsr(view.broker_id, state.isr)
        self.progress: dict[int, Progress] = {}
        #: replicas that hold committed records which this log lacks: while there is one, nothing is acknowledged
        self.contested_by: set[int] = set()
        #: when to look for followers that fell behind
        self.check_ms = NEVER
        self.follow_assignment(now_ms)
        self._isr_became(self.isr)

    # --- produce ------------------------------------------------------------------------------------------------

    def produce_arrived(self, event: ProduceArrived) -> list[Effect]:
        acks = event.acks
        if self.contested_by:
            return [AnswerProduce(event.ticket, ErrorCode.NOT_ENOUGH_REPLICAS, -1, self._contest)]
        if acks == -1 and len(self.isr.committed) < self.view.min_committed:
            detail = f"{len(self.isr.committed)} in sync {self.isr.committed}, {self.view.min_committed} needed"
            return [AnswerProduce(event.ticket, ErrorCode.NOT_ENOUGH_REPLICAS, -1, detail)]
        if acks not in {-1, 1, 0}:
            detail = f"acks={acks}: expected 0, 1 or -1"
            return [AnswerProduce(event.ticket, ErrorCode.INVALID_REQUIRED_ACKS, -1, detail)]
        self.purgatory.ordered[event.ticket] = (acks, event.deadline_ms)
        return [AppendAsLeader(event.ticket, self.epoch)]

    def appended(self, event: LeaderAppended, now_ms: int) -> list[Effect]:
        order = self.purgatory.ordered.pop(event.ticket, None)
        if order is None:
            return []
        acks, deadline_ms = order
        return self.appended_at_once(
            AppendedAtOnce(event.ticket, acks, deadline_ms, event.base_offset, event.end_offset), now_ms
        )

    def append_epoch(self, acks: int) -> int:
        """As ``Replica.append_epoch``."""
        if acks in _NOT_ALL:
            return NO_EPOCH if self.contested_by else self.epoch
        return self.epoch if acks == -1 and self._may_commit else NO_EPOCH

    def appended_at_once(self, event: AppendedAtOnce, now_ms: int) -> list[Effect]:
        """Followers that held the whole log until now were caught up until now, however long ago they fetched: the
        followers of an idle partition are not late. A duplicate leaves the end where it was."""
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
        if event.acks == -1 and event.end_offset > self.view.high_watermark:
            self.purgatory.wait(Waiting(event.end_offset, event.ticket, event.base_offset, event.deadline_ms))
        else:
            effects.append(AnswerProduce(event.ticket, ErrorCode.NONE, event.base_offset))
        return effects

    def append_failed(self, event: LeaderAppendFailed) -> list[Effect]:
        """The performer answers the client, for it knows the reason; here only the ticket ends."""
        self.purgatory.ordered.pop(event.ticket, None)
        return []

    # --- followers ----------------------------------------------------------------------------------------------

    def fetched(self, event: FollowerFetched, now_ms: int) -> list[Effect]:
        """A follower's fetch: fence it, compare histories, and only then believe its offset."""
        peer = self.progress.get(event.replica_id)
        if event.leader_epoch != self.epoch or peer is None or event.incarnation != peer.incarnation:
            refusal = self._fence(event, peer)
            if refusal is not None:
                return [refusal]
            assert peer is not None
            self._check_in_time(now_ms)  # what it has is unknown
        view = self.view
        log, offset = view.log, event.offset
        end = log.log_end_offset
        outside = offset != end and (offset > end or offset < log.log_start_offset)
        if outside or event.last_epoch != log.last_epoch:
            objection = self._compare(event, end)
            if objection is not None:
                if event.refuses:
                    self._contested(event.replica_id)
                return [objection]
        if event.replica_id in self.contested_by:
            return self._agreed(event, now_ms)
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

    def _contested(self, replica_id: int) -> None:
        """A replica keeps committed records that this log lacks. What is acknowledged here may have to go."""
        self.contested_by.add(replica_id)
        self._may_commit = False

    def _agreed(self, event: FollowerFetched, now_ms: int) -> list[Effect]:
        """The replica has cut them, or their histories agree by now."""
        self.contested_by.discard(event.replica_id)
        self._isr_became(self.isr)
        effects = self.fetched(event, now_ms)
        self.advance(effects)
        return effects

    def _fence(self, event: FollowerFetched, peer: Progress | None) -> RefuseFetch | None:
        """Why the fetch is refused, or None after taking note of a newer incarnation."""
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
        """Whether the follower's history is ours up to its offset. Source: KIP-101, KIP-279, KIP-595."""
        offset = event.offset
        log = self.view.log
        # Not the log start: it may lie inside the first segment, and whoever begins anew begins with that.
        first = log.first_segment_offset
        if offset < first or (event.last_epoch < 0 and offset > end):
            detail = f"offset {offset} is outside [{first}, {end}]"
            return RefuseFetch(ErrorCode.OFFSET_OUT_OF_RANGE, detail)
        if event.last_epoch < 0:
            if offset != first and end > first:
                # what it lost of a segment cannot be gone on with in the middle: its file would not be ours
                return RefuseFetch(ErrorCode.OFFSET_OUT_OF_RANGE, f"an empty log begins at {first}, not at {offset}")
            return None
        parting = parted(log, offset, event.last_epoch)
        return None if parting is None else AnswerDiverging(parting.epoch, parting.end_offset)

    def connection_lost(self, event: FollowerConnectionLost, now_ms: int) -> list[Effect]:
        peer = self.progress.get(event.replica_id)
        if peer is not None and peer.disconnected_ms is None:
            peer.disconnected_ms = now_ms
            if event.replica_id in self._members:  # else nothing changes when its grace is over
                self.check_ms = min(self.check_ms, now_ms + self.view.settings.connection_grace_ms)
        return []

    # --- high watermark -----------------------------------------------------------------------------------------

    @property
    def replicated_end(self) -> int:
        """Up to here all in-sync replicas have the log, whether or not they are enough for it to be committed."""
        return min([self.view.log.log_end_offset, *(peer.log_end for peer in self._peers)])

    def advance(self, effects: list[Effect]) -> None:
        """Raise the high watermark as far as the maximal ISR's log ends allow, and answer whom it releases."""
        if not self._may_commit:
            return
        view = self.view
        before, mark = view.high_watermark, view.log.log_end_offset
        for peer in self._peers:
            if peer.log_end <= before:
                return
            if peer.log_end < mark:  # noqa: PLR1730 - hot, and min() costs three times as much
                mark = peer.log_end
        if mark <= before:
            return
        view.high_watermark = mark
        effects.append(HighWatermarkMoved(mark))
        if self.purgatory.first_end <= mark:
            effects += [
                AnswerProduce(entry.ticket, ErrorCode.NONE, entry.base_offset)
                for entry in self.purgatory.complete(mark)
            ]

    def _isr_became(self, isr: IsrState) -> None:
        self.isr = isr
        self._members = frozenset(isr.maximal)
        self._peers = [self.progress[broker] for broker in isr.maximal if broker != self.view.broker_id]
        view = self.view
        enough = len(isr.committed) >= view.min_committed
        self._may_commit = enough and view.log.named and not self.contested_by

    # --- in-sync set --------------------------------------------------------------------------------------------

    def reconsider(self, effects: list[Effect], now_ms: int) -> None:
        """Propose the change the ISR needs now, if none is under way: removals first, they free commits."""
        if type(self.isr) is CommittedIsr:
            # Lists, and no more than is needed: thousands do this at once when a broker goes.
            out = [broker for broker in self.isr.committed if self._out_of_sync(broker, now_ms)]
            removed = tuple(out) or self._leaving_members()
            if removed:
                self._propose(self.isr.shrink(removed, expected_version=self.view.version), effects)
            else:
                self._let_in(effects, now_ms)
        self._schedule_check(now_ms)

    def _let_in(self, effects: list[Effect], now_ms: int) -> None:
        members = self._members
        added = tuple(
            [
                (broker, peer.incarnation)
                for broker, peer in self.progress.items()
                if broker not in members and self._may_join(broker, peer, now_ms)
            ]
        )
        if added:
            for broker, _ in added:  # a fresh lag clock, or who was away for long would be removed at once
                self.progress[broker].caught_up_ms = now_ms
            assert isinstance(self.isr, CommittedIsr)
            self._propose(self.isr.expand(added, expected_version=self.view.version), effects)

    def _leaving_members(self) -> tuple[int, ...]:
        """Members to be let go. The leader itself stays, until another one is decided on."""
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
        """Live, of the incarnation that fetched, not on its way out, and holding all that may be committed. One that
        lags must have fetched lately: who just left for its silence would come back on what is known of old. Nobody
        before the controller has told who the replicas of this epoch are: a move may have ended with it."""
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
            and view.told_epoch == self.epoch
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
        """Somebody may not have everything."""
        self.check_ms = min(self.check_ms, now_ms + self._patience_ms)

    @property
    def _patience_ms(self) -> int:
        """For how long somebody who has not everything need not be looked at."""
        settings = self.view.settings
        lag_ms = settings.lag_time_max_ms
        return min(lag_ms, LAG_MESSAGES_CHECK_MS) if settings.lag_max_messages else lag_ms

    def _schedule_check(self, now_ms: int) -> None:
        """The earliest time a member could fall behind. Members that hold everything now can only do so after the next
        append, which sees to that: an idle partition is not looked at. A pending change is reconsidered when it is
        settled."""
        settings = self.view.settings
        end = self.view.log.log_end_offset
        check_ms = NEVER
        for broker in self.isr.committed:
            if broker == self.view.broker_id:
                continue
            peer = self.progress[broker]
            if peer.log_end != end:
                check_ms = min(check_ms, peer.caught_up_ms + settings.lag_time_max_ms, now_ms + self._patience_ms)
            if peer.disconnected_ms is not None:
                check_ms = min(check_ms, peer.disconnected_ms + settings.connection_grace_ms)
        for broker, peer in self.progress.items():
            if broker not in self._members and peer.retry_ms > now_ms:
                check_ms = min(check_ms, peer.retry_ms)
        if type(self.isr) is not CommittedIsr:
            check_ms = max(check_ms, now_ms + settings.isr_retry_ms)
        self.check_ms = check_ms

    # --- answers from ZooKeeper ---------------------------------------------------------------------------------

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
        """The node has not moved: the addition's incarnation check failed, or a lost write has not arrived.

        A write whose answer was lost may still be on its way, so a re-read that shows the old version proves nothing:
        only another compare-and-set of the same version does, for the two cannot both succeed.
        """
        pending = self.isr
        if isinstance(pending, CommittedIsr) or event.expected_version not in {-1, pending.expected_version}:
            return []
        if pending.fate_unknown:
            self._isr_became(pending.lost_answer(unknown=False))
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
        """Whatever the node holds now, the maximal ISR covers it; it stays until a re-read settles it."""
        pending = self.isr
        if not isinstance(pending, CommittedIsr) and event.expected_version in {-1, pending.expected_version}:
            self._isr_became(pending.lost_answer(unknown=True))
        return []

    def isr_known(self, isr: tuple[int, ...], now_ms: int, *, announce: bool) -> list[Effect]:
        """``isr`` is durable at the view's version: act on it. ``announce`` where the controller cannot know yet."""
        effects: list[Effect] = []
        if announce and self.isr.committed != isr:
            effects.append(IsrChanged(isr))
        self.isr = CommittedIsr(self.view.broker_id, isr)
        self.follow_assignment(now_ms)
        self._isr_became(self.isr)
        self.advance(effects)
        self.reconsider(effects, now_ms)
        return effects

    # --- other news ---------------------------------------------------------------------------------------------

    def follow_assignment(self, now_ms: int) -> None:
        """Keep one ``Progress`` for each other replica and member; new ones get a fresh lag clock."""
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
        """Assignment, live brokers or min.insync.replicas may have changed: look at everything again."""
        self.follow_assignment(now_ms)
        self._take_incarnations()
        self._isr_became(self.isr)
        effects: list[Effect] = []
        self.advance(effects)
        self.reconsider(effects, now_ms)
        return effects

    def log_named(self) -> list[Effect]:
        """Count this replica's own log towards the high watermark from now on."""
        self._isr_became(self.isr)
        effects: list[Effect] = []
        self.advance(effects)
        return effects

    def brokers_changed(self, now_ms: int) -> list[Effect]:
        """Who is alive has changed, and nothing else. Nobody has more records by that: nothing is committed."""
        self._take_incarnations()
        effects: list[Effect] = []
        self.reconsider(effects, now_ms)
        return effects

    def _take_incarnations(self) -> None:
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
                AnswerProduce(entry.ticket, code, entry.base_offset, detail) for entry in self.purgatory.expire(now_ms)
            ]
        if now_ms >= self.check_ms:
            self.reconsider(effects, now_ms)
        return effects
