"""The group coordinator of one partition: the members of groups and their committed offsets.

The module is pure: events in, effects out. ``membership`` decides about members, and ``classic_group`` about the
members of classic groups. This module writes their changes together with offsets in one append, and sends the responses
after the commit.

A group with members is a classic group or one of KIP-848, never both. A group without members may become either. The
generation of a classic group and the epoch of the other kind count on from each other.

An offset becomes visible, and is acknowledged, when its record is committed in the coordinator's log. At most one
append is in flight per group. The requests that arrive meanwhile share the next append, so offsets take effect in the
order of their arrival.

Before a member sends offsets with a transaction, it requests a *hold* on their partitions. The hold is refused if a
commit of these offsets would be refused. Until the transaction ends, no other member can fetch the committed offsets of
these partitions; otherwise two members could process the same records (KIP-447). A hold ends when the transaction's
offsets are handed over, or when a member that waits for it finds that the transaction is over.

In a *handover* a transaction coordinator sends the offsets of a committed transaction, with the transaction's key and
decision number. It repeats the handover until it gets a response. The group coordinator therefore keeps the last
decision number of each key, so that a repetition changes nothing. The decision numbers of a key rise, but start again
after the key has expired. So the last number is kept for a shorter time than the key.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from sparklog.coordinator.classic_description import classic_condition, classic_topics, describe_classic
from sparklog.coordinator.classic_events import (
    BeatRequested,
    ClassicRequest,
    Delayed,
    GroupEnded,
    JoinRequested,
    LeaveRequested,
    OffsetsAccepted,
    StoreRefused,
    SyncRequested,
)
from sparklog.coordinator.classic_group import ENTRY_BYTES, ClassicGroup, ClassicSettings
from sparklog.coordinator.classic_group import Event as ClassicEvent
from sparklog.coordinator.core import CoordinatorCore
from sparklog.coordinator.effects import (
    ComputeTarget,
    CoordinatorReport,
    Done,
    Effect,
    OffsetsDeleted,
    Refused,
    Respond,
    Resume,
    StoreClassic,
)
from sparklog.coordinator.events import Ticked
from sparklog.coordinator.group_events import (
    CommitRequested,
    ConsumerHeartbeatRequested,
    DeleteRequested,
    GroupEvent,
    GroupRequest,
    HeartbeatRequested,
    HoldEnded,
    HoldRequested,
    OffsetsDeleteRequested,
    Resumed,
    TargetComputed,
    TopicsGone,
    TopicsSeen,
)
from sparklog.coordinator.group_member import NEVER
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    ClassicState,
    CommittedOffset,
    EpochKey,
    GroupEpoch,
    GroupKey,
    GroupValue,
    Handover,
    HandoverKey,
    Hold,
    HoldKey,
    MemberKey,
    MemberState,
    OffsetKey,
    decode_group_record,
    group_record,
)
from sparklog.coordinator.group_topics import Topics
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.membership import Membership
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import assert_never
from sparklog.protocol.messages import DescribedGroup, GroupOffset

#: The number of requests of one group that may wait.
MAX_QUEUED = 10_000
#: The maximum work of one step, measured as the number of partitions and offsets in its requests. A single request may
#: exceed it.
WORK_AT_ONCE = 10_000
#: A delay of more than this shows that the process was paused and could not receive heartbeats meanwhile.
_LATE_MS = 250
#: The pause after a refused append before partitions are assigned again.
_AGAIN_MS = 1000


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of consumer groups.

    A group without members expires ``retention_ms`` after its last commit or the departure of its last member. For
    ``handover_ms``, the group recognizes a repeated handover of a transaction's offsets and ignores it.
    """

    retention_ms: int = 7 * 86_400_000
    handover_ms: int = 86_400_000
    #: The maximum number of members of one group.
    max_size: int = 10_000
    #: The maximum number of groups of this coordinator.
    max_groups: int = 1_000_000
    #: The time after which no transaction can be open any more.
    hold_ms: int = 2 * 86_400_000
    #: The maximum number of bytes that all classic groups of this coordinator hold: members, assignments and the ids of
    #: new members. A group whose record in the log is larger than that counts with its record.
    max_classic_bytes: int = 64 * 2**20
    #: The time for which the first rebalance of a classic group waits for further members.
    initial_delay_ms: int = 3000

    @property
    def classic(self) -> ClassicSettings:
        """Return the settings of classic groups."""
        return ClassicSettings(initial_delay_ms=self.initial_delay_ms, max_size=self.max_size)


@dataclass(slots=True)
class _GroupDraft:
    """A change of one group that is being appended to the log."""

    changes: dict[GroupKey, GroupValue | None] = field(default_factory=dict)
    answers: list[Respond] = field(default_factory=list)
    began_ms: int = 0
    #: The members whose heartbeat responses are in ``answers``.
    responded: Set[str] = frozenset()
    #: The topic deletions that this change applies. The broker reports a deletion again only with the next deletion, or
    #: to the next coordinator.
    gone: list[TopicsGone] = field(default_factory=list)


_Queued = GroupRequest | HoldEnded | TopicsGone | TargetComputed


@dataclass(slots=True)
class _Group:
    #: The group's name.
    key: str
    membership: Membership
    #: The members of a classic group. It is None unless the group is one.
    classic: ClassicGroup | None = None
    #: Whether an append with the classic group's state was refused, and the group does not know it yet.
    store_refused: bool = False
    #: The number of bytes of the classic group's record in ``state``, and the number that the bound counts.
    record_bytes: int = 0
    counted_bytes: int = 0
    #: The state that is committed in the log.
    state: dict[GroupKey, GroupValue] = field(default_factory=dict)
    draft: _GroupDraft | None = None
    queue: list[_Queued] = field(default_factory=list)
    #: Whether the group waits for Resumed. Until then its requests wait as well.
    resuming: bool = False
    #: Deletions of topics whose append was refused. They are applied again after another append succeeds, or with the
    #: check for expired groups.
    again: list[TopicsGone] = field(default_factory=list)

    @property
    def has_members(self) -> bool:
        """Return whether the group has members, or a classic group has given an id to a new member."""
        return bool(self.membership.members) or (self.classic is not None and not self.classic.is_idle)

    @property
    def member_count(self) -> int:
        return len(self.membership.members if self.classic is None else self.classic.members)

    @property
    def due_ms(self) -> int:
        """Return the time at which the members' deadlines must be checked."""
        if self.classic is None:
            return self.membership.due_ms if self.membership.members else NEVER
        return self.classic.deadline_ms

    def postpone(self, late_ms: int, now_ms: int, informed: Set[str] | None = None) -> None:
        """Extend the members' deadlines after the coordinator was unavailable for ``late_ms``."""
        if self.classic is not None:
            self.classic.step(Delayed(late_ms), now_ms)
        else:
            self.membership.postpone(late_ms, informed)

    @property
    def last_commit_ms(self) -> int:
        """Return the time of the last commit, or of the departure of the last member."""
        return max((value.commit_ms for value in self.state.values() if not isinstance(value, MemberState)), default=0)

    @property
    def record_count(self) -> int:
        return len(self.state)

    def record_keys(self) -> list[GroupKey]:
        return list(self.state)

    def records_of(self, keys: Iterable[GroupKey]) -> list[Record]:
        return [group_record(key, self.state[key]) for key in keys if key in self.state]


class Groups(CoordinatorCore[_Group, _GroupDraft]):
    """The state machine of the consumer groups of one coordinator partition."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or GroupSettings()
        self._topics = Topics()
        #: The groups with members, and the time at which they must be checked next.
        self._active: dict[str, _Group] = {}
        self._classic_bytes = 0
        self._due_ms = NEVER

    # --- the entry point -------------------------------------------------------------------------------------------

    def load(self, records: Iterable[Record]) -> None:
        """Apply the records of the partition's log, in order. Raises ClusterError for an unreadable record."""
        for record in records:
            key, value = decode_group_record(record)
            group = self._group(key.group)
            if value is None:
                group.state.pop(key, None)
            else:
                group.state[key] = value
            if not group.state:
                del self._entries[key.group]

    def _started(self, now_ms: int) -> None:
        for group in self._entries.values():
            group.membership.restore(group.state, now_ms)
            record = group.state.get(EpochKey(FORMAT_VERSION, group.key))
            if isinstance(record, GroupEpoch) and record.classic is not None and not group.membership.members:
                group.classic = ClassicGroup.restored(
                    group.key, self._settings.classic, record.classic, generation=record.epoch, now_ms=now_ms
                )
                group.record_bytes = _record_bytes(record.classic)
                self._count_classic(group)
            self._note_members(group)

    def step(self, event: Any, now_ms: int) -> list[Effect]:
        late_ms = now_ms - self._due_ms
        if late_ms > _LATE_MS:
            for group in self._active.values():
                group.postpone(late_ms, now_ms)
            self._schedule()
            self._due_ms = max(self._due_ms, now_ms)  # further events before the check are not late again
        return super().step(event, now_ms)

    @property
    def deadline_ms(self) -> int | None:
        base_ms = super().deadline_ms
        return min(self._due_ms, NEVER if base_ms is None else base_ms) if self._active else base_ms

    def _handle(self, event: GroupEvent, now_ms: int) -> None:
        match event:
            case CommitRequested() | HoldRequested() | HeartbeatRequested() | DeleteRequested():
                self._enqueue(event, now_ms)
            case ConsumerHeartbeatRequested() | OffsetsDeleteRequested():
                self._enqueue(event, now_ms)
            case JoinRequested() | SyncRequested() | BeatRequested() | LeaveRequested():
                self._enqueue(event, now_ms)
            case HoldEnded() | TargetComputed():
                known = self._entries.get(event.group)
                if known is not None:
                    known.queue.append(event)
                    self._serve(known, now_ms)
            case Resumed():
                known = self._entries.get(event.group)
                if known is not None:
                    known.resuming = False
                    self._serve(known, now_ms)
            case TopicsSeen():
                first = not self._topics.is_known
                changed = self._topics.seen(event.topics)
                for group in list(self._active.values()):
                    if group.membership.topics_changed(changed) or first:
                        self._serve(group, now_ms)
            case TopicsGone():
                self._topics.gone(event.topics)
                for group in list(self._entries.values()):
                    group.queue.append(event)
                    self._serve(group, now_ms)
            case _:
                assert_never(event)

    # --- queries ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the groups that have committed offsets or members."""
        return sorted(name for name, group in self._entries.items() if group.state or group.has_members)

    def describe(self, group: str) -> Generator[None, None, DescribedGroup | None]:
        """Return a description of a group, or None if it does not exist.

        This is a generator, because the description is made in steps (``Membership.describe``).
        """
        known = self._entries.get(group)
        if known is None or not (known.state or known.has_members):
            return None
        return (yield from known.membership.describe() if known.classic is None else describe_classic(known.classic))

    def classic(self, group: str) -> ClassicGroup | None:
        """Return the classic group with this name, or None if there is none. The caller must not change it."""
        known = self._entries.get(group)
        return known.classic if known is not None else None

    def is_consumer_group(self, group: str) -> bool:
        """Return whether the group is one of KIP-848. A group that has only offsets is not one."""
        known = self._entries.get(group)
        if known is None or known.classic is not None:
            return False
        return bool(known.membership.members) or EpochKey(FORMAT_VERSION, group) in known.state

    def check_fetch(self, group: str, member_id: str, epoch: int) -> None:
        """Check the member in a Kafka client's request for offsets of a group of KIP-848.

        Raises:
            BrokerError: UNKNOWN_MEMBER_ID, or STALE_MEMBER_EPOCH if the group has not reached this epoch.
        """
        known = self._entries.get(group)
        if not member_id or epoch < 0 or known is None or known.classic is not None:
            return
        if member_id not in known.membership.members:
            raise BrokerError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group!r} has no member {member_id}")
        if epoch > known.membership.epoch:
            detail = f"group {group!r}: epoch {epoch} found, the group is in {known.membership.epoch}"
            raise BrokerError(ErrorCode.STALE_MEMBER_EPOCH, detail)

    def exists(self, group: str) -> bool:
        """Return whether the group has committed offsets or members."""
        known = self._entries.get(group)
        return known is not None and (bool(known.state) or known.has_members)

    def summary(self, group: str) -> tuple[str, int]:
        """Return the group's state and its number of members."""
        known = self._entries.get(group)
        if known is None:
            return "empty", 0
        condition = known.membership.condition if known.classic is None else classic_condition(known.classic)
        return condition, known.member_count

    def refuses_fetch(self, group: str, member_id: str, epoch: int, partitions: Collection[tuple[str, int]]) -> str:
        """Return why a member may not fetch the offsets of these partitions from this coordinator, or an empty string.

        Only the committed state is considered. If this coordinator has been replaced without knowing it, its pending
        changes will never be committed, and it does not know later commits.
        """
        known = self._entries.get(group)
        state = known.state if known is not None else {}
        member = state.get(MemberKey(FORMAT_VERSION, group, member_id))
        now = state.get(EpochKey(FORMAT_VERSION, group))
        if not isinstance(member, MemberState) or not isinstance(now, GroupEpoch) or epoch > now.epoch:
            return f"group {group!r} has no member {member_id} in epoch {epoch}, as far as this coordinator knows"
        own = {place for place, given in _given(member, {topic for topic, _ in partitions}).items() if given <= epoch}
        missing = [place for place in partitions if tuple(place) not in own]
        return f"{missing[0][0]}-{missing[0][1]} is not member {member_id}'s in epoch {epoch}" if missing else ""

    def holds(self, group: str, member_id: str, partitions: Iterable[tuple[str, int]]) -> list[tuple[str, Hold]]:
        """Return the holds that prevent ``member_id`` from fetching offsets, each with the key of its transaction.

        While a transaction has a hold on the offsets of a partition, it may still commit newer ones. A hold of the
        member's own transaction counts only if the member has since lost the partition and got it again. Without the
        hold, the member would start at the old offset and process the records twice.
        """
        return [(key, hold) for key, hold, _ in self._holds(group, member_id, partitions)]

    def held(self, group: str, member_id: str, partitions: Iterable[tuple[str, int]]) -> Set[tuple[str, int]]:
        """Return the ``partitions`` whose offsets ``member_id`` may not fetch because of one of its ``holds``."""
        return frozenset[tuple[str, int]]().union(*(found for *_, found in self._holds(group, member_id, partitions)))

    def _holds(
        self, group: str, member_id: str, partitions: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[str, Hold, Set[tuple[str, int]]]]:
        known = self._entries.get(group)
        state = known.state if known is not None else {}
        holds = [(key, value) for key, value in state.items() if isinstance(value, Hold)]
        if not holds:
            return
        wanted = set(partitions)
        given = _given(state.get(MemberKey(FORMAT_VERSION, group, member_id)), {topic for topic, _ in wanted})
        for key, value in holds:
            if isinstance(key, HoldKey):
                # An empty member id is that of any Kafka client.
                others = value.member_id != member_id or not member_id
                found = wanted.intersection(value.partitions)
                found = {at for at in found if others or given.get(at, value.member_epoch) > value.member_epoch}
                if found:
                    yield key.key, value, found

    def offsets(
        self, group: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> Mapping[tuple[str, int], GroupOffset]:
        """Return the group's committed offsets of ``partitions``, or all if None, by topic and partition."""
        known = self._entries.get(group)
        state = known.state if known is not None else {}
        if partitions is None:
            found = [value.offset for value in state.values() if isinstance(value, CommittedOffset)]
        else:
            places = (state.get(OffsetKey(FORMAT_VERSION, group, *place)) for place in partitions)
            found = [value.offset for value in places if isinstance(value, CommittedOffset)]
        return {(offset.topic, offset.partition): offset for offset in found}

    def values(self, group: str) -> list[GroupValue]:
        """Return the values of all current records of a group in the log."""
        known = self._entries.get(group)
        return list(known.state.values()) if known is not None else []

    def topics(self) -> set[tuple[str, str]]:
        """Return the topics (name, topic id) in which groups have offsets or partitions.

        If any group has members, all topics that this coordinator knows are included.
        """
        found: set[tuple[str, str]] = {(name, view.topic_id) for name, view in self._topics.views.items()}
        found = found if self._active else set()
        for group in self._entries.values():
            for value in group.state.values():
                if isinstance(value, CommittedOffset):
                    found.add((value.offset.topic, value.offset.topic_id))
                elif isinstance(value, MemberState):
                    found.update((owned.topic, owned.topic_id) for owned in value.owned)
        return found

    # --- commits ---------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> _Group:
        group = self._entries.get(name)
        if group is None:
            group = self._entries[name] = _Group(name, Membership(name, max_size=self._settings.max_size))
        return group

    def _has_room(self, request: GroupRequest) -> bool:
        """Return whether the request's group exists or may be created. A handover may always create it."""
        if request.group in self._entries or len(self._entries) < self._settings.max_groups:
            return True
        if isinstance(request, SyncRequested | BeatRequested | LeaveRequested):
            return True  # A group that does not exist answers at once.
        return isinstance(request, CommitRequested) and request.transaction is not None

    def _enqueue(self, request: GroupRequest, now_ms: int) -> None:
        if not self._has_room(request):
            detail = (
                f"group {request.group!r} is new, and its coordinator has {len(self._entries)} groups, at most "
                f"{self._settings.max_groups} expected (groups.max): delete groups, or raise the limit"
            )
            self._effects.append(Respond(request.ticket, Refused(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)))
            return
        group = self._group(request.group)
        if len(group.queue) >= MAX_QUEUED:
            detail = f"{request.group}: {MAX_QUEUED} requests are waiting"
            self._effects.append(Respond(request.ticket, Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)))
            return
        group.queue.append(request)
        self._serve(group, now_ms)

    def _serve(self, group: _Group, now_ms: int) -> None:
        """Put waiting requests and due changes of members into one append, up to the maximum work of one step.

        The rest follows after the commit, or after Resumed if there is nothing to append.
        """
        if group.draft is not None or group.resuming:
            return
        draft = _GroupDraft(began_ms=now_ms)
        if group.store_refused and group.classic is not None:
            self._step_classic(group, group.classic, StoreRefused(), draft, now_ms)
        group.store_refused = False
        for event in _pop_share(group.queue):
            match event:
                case TopicsGone():
                    self._drop_topics(group, event, draft)
                case HeartbeatRequested() | ConsumerHeartbeatRequested():
                    self._heartbeat(group, event, draft, now_ms)
                case JoinRequested() | SyncRequested() | BeatRequested() | LeaveRequested():
                    self._classic_request(group, event, draft, now_ms)
                case DeleteRequested():
                    self._delete(group, event, draft, now_ms)
                case OffsetsDeleteRequested():
                    self._delete_offsets(group, event, draft)
                case CommitRequested():
                    self._commit(group, event, draft, now_ms)
                case HoldRequested():
                    self._hold(group, event, draft, now_ms)
                case HoldEnded():
                    self._end_hold(group, event, draft)
                case TargetComputed():
                    group.membership.target_computed(event.inputs, event.target, now_ms)
        if group.classic is not None and now_ms >= group.classic.deadline_ms:
            self._step_classic(group, group.classic, Ticked(), draft, now_ms)
        for detail in group.membership.settle(self._topics, now_ms):
            self._effects.append(CoordinatorReport("groups.members.removed", detail))
        draft.changes.update(self._membership_changes(group, now_ms))
        draft.answers += group.membership.pop_answers()
        draft.responded = group.membership.pop_responded()
        self._note_members(group)
        inputs = group.membership.pop_inputs()
        if inputs is not None:
            self._effects.append(ComputeTarget(group.key, inputs))
        if draft.changes:
            self._change(group, draft)
            return
        self._effects += draft.answers
        if group.queue or group.membership.unfinished:
            group.resuming = True
            self._effects.append(Resume(group.key))
        self._drop_if_empty(group)

    def _heartbeat(
        self,
        group: _Group,
        request: HeartbeatRequested | ConsumerHeartbeatRequested,
        draft: _GroupDraft,
        now_ms: int,
    ) -> None:
        if group.classic is not None:
            if group.classic.members:
                detail = f"group {group.key!r} has {len(group.classic.members)} members of Kafka's classic protocol"
                refusal = Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, detail)
                draft.answers.append(Respond(request.ticket, refusal))
                return
            self._end_classic(group, draft, now_ms)
        if isinstance(request, ConsumerHeartbeatRequested):
            group.membership.kafka_heartbeat(request, now_ms)
        else:
            group.membership.heartbeat(request, now_ms)

    def _membership_changes(self, group: _Group, now_ms: int) -> dict[GroupKey, GroupValue | None]:
        """Return the changes of the members. With the first member, the group's record says that it is not classic."""
        changes = group.membership.pop_changes(now_ms)
        key = EpochKey(FORMAT_VERSION, group.key)
        record = group.state.get(key)
        if changes and key not in changes and isinstance(record, GroupEpoch) and record.classic is not None:
            changes[key] = GroupEpoch(FORMAT_VERSION, group.membership.epoch, now_ms)
        return changes

    def _classic_request(self, group: _Group, request: ClassicRequest, draft: _GroupDraft, now_ms: int) -> None:
        """Handle a request of a member of a classic group. A group without members becomes a classic group."""
        if group.membership.members:
            detail = f"group {group.key!r} has {len(group.membership.members)} members of the protocol of KIP-848"
            joins = isinstance(request, JoinRequested)
            code = ErrorCode.INCONSISTENT_GROUP_PROTOCOL if joins else ErrorCode.UNKNOWN_MEMBER_ID
            draft.answers.append(Respond(request.ticket, Refused(code, detail)))
            return
        classic = group.classic
        if classic is None:
            classic = ClassicGroup(group.key, self._settings.classic, generation=group.membership.epoch)
        group.classic = classic
        self._step_classic(group, classic, request, draft, now_ms)
        record = draft.changes.get(key := EpochKey(FORMAT_VERSION, group.key), group.state.get(key))
        if classic.is_idle and not (isinstance(record, GroupEpoch) and record.classic is not None):
            group.classic = None

    def _step_classic(
        self, group: _Group, classic: ClassicGroup, event: ClassicEvent, draft: _GroupDraft, now_ms: int
    ) -> None:
        limit = self._settings.max_classic_bytes - (self._classic_bytes - group.counted_bytes)
        effects = classic.step(event, now_ms, limit_bytes=limit)
        self._count_classic(group)
        for effect in effects:
            match effect:
                case Respond():
                    draft.answers.append(effect)
                case StoreClassic():
                    draft.changes[EpochKey(FORMAT_VERSION, group.key)] = GroupEpoch(
                        FORMAT_VERSION, effect.generation, now_ms, effect.state
                    )
                case CoordinatorReport():
                    self._effects.append(effect)

    def _count_classic(self, group: _Group) -> None:
        """Count the bytes of the classic group again. Its members may have more or fewer than its record."""
        held = max(group.classic.held_bytes if group.classic is not None else 0, group.record_bytes)
        self._classic_bytes += held - group.counted_bytes
        group.counted_bytes = held

    def _end_classic(self, group: _Group, draft: _GroupDraft, now_ms: int) -> None:
        """End the classic protocol of a group without members."""
        classic = group.classic
        if classic is not None:
            self._step_classic(group, classic, GroupEnded(), draft, now_ms)
            group.classic = None
            group.membership.epoch = max(group.membership.epoch, classic.generation)

    def refuses_hold(self, request: HoldRequested) -> Refused | None:
        """Return why the sender may not send offsets of the group with a transaction, or None if it may.

        This method changes nothing. ``HoldRequested`` makes the check again.
        """
        group = self._entries.get(request.group)
        return self._refuses_commit(group, request) if group is not None else None

    def _refuses_commit(self, group: _Group, request: CommitRequested | HoldRequested) -> Refused | None:
        member_id, epoch, instance_id = request.member_id, request.member_epoch, request.instance_id
        if group.classic is not None:
            transactional = isinstance(request, HoldRequested)
            return group.classic.refuses_commit(member_id, epoch, instance_id, transactional=transactional)
        return group.membership.refuses_commit(member_id, epoch, request.offsets)

    def _delete_offsets(self, group: _Group, request: OffsetsDeleteRequested, draft: _GroupDraft) -> None:
        if not (group.state or draft.changes or group.has_members):
            detail = f"there is no group {group.key!r}"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.GROUP_ID_NOT_FOUND, detail)))
            return
        wanted = {topic for topic, _ in request.partitions}
        kept = frozenset(group.membership.subscribed(wanted, self._topics))
        if group.classic is not None and group.classic.members:
            subscribed = classic_topics(group.classic)
            if subscribed is None:
                detail = f"group {group.key!r} has {len(group.classic.members)} members, which are not consumers"
                draft.answers.append(Respond(request.ticket, Refused(ErrorCode.NON_EMPTY_GROUP, detail)))
                return
            kept = subscribed & wanted
        for topic, number in request.partitions:
            key = OffsetKey(FORMAT_VERSION, group.key, topic, number)
            if topic not in kept and (key in group.state or key in draft.changes):
                draft.changes[key] = None
        draft.answers.append(Respond(request.ticket, OffsetsDeleted(kept)))

    def _delete(self, group: _Group, request: DeleteRequested, draft: _GroupDraft, now_ms: int) -> None:
        if group.member_count:
            detail = f"group {group.key!r} has {group.member_count} members"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.NON_EMPTY_GROUP, detail)))
        elif not (group.state or draft.changes):
            detail = f"there is no group {group.key!r}"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.GROUP_ID_NOT_FOUND, detail)))
        else:
            self._end_classic(group, draft, now_ms)
            draft.changes.update(group.membership.pop_changes(now_ms))
            draft.changes.update(dict.fromkeys([*group.state, *draft.changes]))
            draft.answers += group.membership.pop_answers()  # Responses to members that left in this step.
            group.membership = Membership(group.key, max_size=self._settings.max_size)
            draft.answers.append(Respond(request.ticket, Done()))

    def _commit(self, group: _Group, request: CommitRequested, draft: _GroupDraft, now_ms: int) -> None:
        if request.transaction is not None:
            key, decision = request.transaction
            handover = HandoverKey(FORMAT_VERSION, group.key, key)
            known = draft.changes.get(handover) or group.state.get(handover)
            if (
                isinstance(known, Handover)
                and decision <= known.decision
                and now_ms < known.commit_ms + self._settings.handover_ms
            ):
                draft.answers.append(Respond(request.ticket, Done()))
                return
            draft.changes[handover] = Handover(FORMAT_VERSION, decision, now_ms)
            hold = HoldKey(FORMAT_VERSION, group.key, key)
            if hold in group.state or hold in draft.changes:
                draft.changes[hold] = None
        else:
            refusal = self._refuses_commit(group, request)
            if refusal is not None:
                draft.answers.append(Respond(request.ticket, refusal))
                return
            if group.classic is not None:
                self._step_classic(group, group.classic, OffsetsAccepted(request.member_id), draft, now_ms)
        for offset in request.offsets:
            place = OffsetKey(FORMAT_VERSION, group.key, offset.topic, offset.partition)
            draft.changes[place] = CommittedOffset(FORMAT_VERSION, offset, now_ms)
        draft.answers.append(Respond(request.ticket, Done()))

    def _hold(self, group: _Group, request: HoldRequested, draft: _GroupDraft, now_ms: int) -> None:
        refusal = self._refuses_commit(group, request)
        if refusal is not None:
            draft.answers.append(Respond(request.ticket, refusal))
            return
        key = HoldKey(FORMAT_VERSION, group.key, request.key)
        known = draft.changes.get(key, group.state.get(key))
        partitions = {(offset.topic, offset.partition) for offset in request.offsets}
        epoch = request.member_epoch
        if isinstance(known, Hold) and known.producer_id == request.producer_id:
            partitions.update(known.partitions)
            epoch = min(epoch, known.member_epoch)
        draft.changes[key] = Hold(
            FORMAT_VERSION,
            request.member_id,
            epoch,
            request.producer_id,
            request.coordinator_epoch,
            tuple(sorted(partitions)),
            now_ms,
        )
        draft.answers.append(Respond(request.ticket, Done()))

    def _end_hold(self, group: _Group, event: HoldEnded, draft: _GroupDraft) -> None:
        key = HoldKey(FORMAT_VERSION, group.key, event.key)
        known = draft.changes.get(key, group.state.get(key))
        if isinstance(known, Hold) and known.producer_id == event.producer_id:
            draft.changes[key] = None

    def _drop_topics(self, group: _Group, event: TopicsGone, draft: _GroupDraft) -> None:
        draft.gone.append(event)
        gone = set(event.topics)
        for key, value in {**group.state, **draft.changes}.items():
            if isinstance(value, CommittedOffset):
                topic = value.offset.topic
                if (topic, value.offset.topic_id) in gone or (topic, "") in gone:
                    draft.changes[key] = None
        group.membership.topics_gone(gone)

    # --- durability ------------------------------------------------------------------------------------------------

    def _change(self, group: _Group, draft: _GroupDraft) -> None:
        self._stage(group, draft, [group_record(key, value) for key, value in draft.changes.items()])

    def _unchanged(self, entry: _Group) -> _GroupDraft:
        return _GroupDraft(began_ms=NEVER - _LATE_MS)

    def _committed(self, entry: _Group, draft: _GroupDraft, now_ms: int) -> None:
        for key, value in draft.changes.items():
            if value is None:
                entry.state.pop(key, None)
            else:
                entry.state[key] = value
        if (epoch := EpochKey(FORMAT_VERSION, entry.key)) in draft.changes:
            record = draft.changes[epoch]
            classic = record.classic if isinstance(record, GroupEpoch) else None
            entry.record_bytes = _record_bytes(classic) if classic is not None else 0
            self._count_classic(entry)
        if now_ms > draft.began_ms + _LATE_MS:  # The members had to wait.
            entry.postpone(now_ms - draft.began_ms, now_ms, draft.responded)
        self._effects += draft.answers
        self._serve_again(entry, now_ms)
        self._drop_if_empty(entry)

    def _refused(self, entry: _Group, draft: _GroupDraft, detail: str, now_ms: int) -> None:
        """Refuse the requests of the change ``draft``. Apply topic deletions again later: no client repeats them."""
        refusal = Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{entry.key}: {detail}")
        self._effects += [Respond(answer.ticket, refusal) for answer in draft.answers]
        # Leave out deletions without a topic id: by then a new topic may have the name.
        named = [tuple(one for one in event.topics if one[1]) for event in draft.gone]
        entry.again += [TopicsGone(topics) for topics in named if topics]
        if draft.changes:
            entry.membership.restore(entry.state, now_ms, delay_ms=_AGAIN_MS)
        entry.store_refused = EpochKey(FORMAT_VERSION, entry.key) in draft.changes
        self._serve(entry, now_ms)
        self._drop_if_empty(entry)

    def _serve_again(self, group: _Group, now_ms: int) -> None:
        group.queue[:0], group.again = group.again, []
        self._serve(group, now_ms)

    def _drop_if_empty(self, group: _Group) -> None:
        if not group.state and group.draft is None and not group.queue and not group.has_members:
            self._entries.pop(group.key, None)

    # --- time ------------------------------------------------------------------------------------------------------

    def _time_passed(self, now_ms: int) -> None:
        super()._time_passed(now_ms)
        if now_ms >= self._due_ms:
            for group in list(self._active.values()):
                if now_ms >= group.due_ms:
                    self._serve(group, now_ms)
            self._schedule()

    def _schedule(self) -> None:
        """Compute the time of the next check of members' deadlines.

        A group with a change in flight is checked when that change ends. A group that waits for Resumed is checked at
        Resumed.
        """
        ready = (group for group in self._active.values() if group.draft is None and not group.resuming)
        self._due_ms = min((group.due_ms for group in ready), default=NEVER)

    def _note_members(self, group: _Group) -> None:
        if group.has_members:
            self._active[group.key] = group
            self._due_ms = min(self._due_ms, group.due_ms)
        else:
            self._active.pop(group.key, None)

    def _expire(self, entry: _Group, now_ms: int) -> None:
        """Remove a group without members whose retention is over; otherwise remove expired handovers and holds."""
        if entry.again:
            self._serve_again(entry, now_ms)
            return
        over = not entry.has_members and now_ms >= entry.last_commit_ms + self._settings.retention_ms
        gone = [
            key
            for key, value in entry.state.items()
            if over
            or (isinstance(value, Handover) and now_ms >= value.commit_ms + self._settings.handover_ms)
            or (isinstance(value, Hold) and now_ms >= value.commit_ms + self._settings.hold_ms)
        ]
        if gone and not entry.queue:
            self._change(entry, _GroupDraft(dict.fromkeys(gone), began_ms=now_ms))


def _record_bytes(state: ClassicState) -> int:
    """Return the number of bytes of the members and assignments in a classic group's record."""
    return sum(
        ENTRY_BYTES
        + len(state.protocol)
        + sum(map(len, (one.member_id, one.instance_id, one.client_id, one.host, one.metadata, one.assignment)))
        for one in state.members
    )


def _pop_share(queue: list[_Queued]) -> list[_Queued]:
    """Remove and return the first requests of the queue, up to the maximum work of one step."""
    work = count = 0
    for event in queue:
        match event:
            case CommitRequested() | HoldRequested():
                work += 1 + len(event.offsets)
            case HeartbeatRequested():
                work += 1 + sum(len(found.partitions) for found in event.owned)
            case ConsumerHeartbeatRequested():
                work += 1 + sum(len(numbers) for _, numbers in event.owned or ())
            case _:
                work += 1
        if count and work > WORK_AT_ONCE:
            break
        count += 1
    share = queue[:count]
    del queue[:count]
    return share


def _given(member: GroupValue | None, topics: Set[str]) -> dict[tuple[str, int], int]:
    """Return the partitions of these topics that a member owns, with the epochs of their assignment."""
    return {
        (found.topic, number): given
        for found in (member.owned if isinstance(member, MemberState) else ())
        if found.topic in topics
        for number, given in zip(found.partitions, found.epochs, strict=True)
    }
