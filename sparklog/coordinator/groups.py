"""The group coordinator of one partition: the members of groups and their committed offsets.

The module is pure: events in, effects out. ``membership`` decides about members of KIP-848 groups, ``classic_groups``
about members of classic groups, and ``group_offsets`` about offsets. This module writes their changes in one append,
and sends the responses after the commit.

A group with members is a classic group or one of KIP-848, never both. A group without members may become either. When
the protocol of a group changes, the new epoch or generation continues from the old number.

An offset becomes visible, and is acknowledged, when its record is committed in the coordinator's log. At most one
append is in flight per group. The requests that arrive meanwhile share the next append, so offsets take effect in the
order of their arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Set
from typing import Any

from sparklog.coordinator import group_offsets
from sparklog.coordinator.classic_description import classic_condition, describe_classic
from sparklog.coordinator.classic_events import (
    BeatRequested,
    JoinRequested,
    LeaveRequested,
    OffsetsAccepted,
    StoreRefused,
    SyncRequested,
)
from sparklog.coordinator.classic_group import ClassicGroup
from sparklog.coordinator.classic_groups import ClassicGroups
from sparklog.coordinator.core import CoordinatorCore
from sparklog.coordinator.effects import ComputeTarget, CoordinatorReport, Done, Effect, Refused, Respond, Resume
from sparklog.coordinator.events import CoordinatorTicked
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
    CommittedOffset,
    EpochKey,
    GroupEpoch,
    GroupKey,
    GroupValue,
    Handover,
    Hold,
    MemberState,
    decode_group_record,
    group_record,
)
from sparklog.coordinator.group_state import Group, GroupDraft, GroupSettings, Queued
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


class Groups(CoordinatorCore[Group, GroupDraft]):
    """The state machine of the consumer groups of one coordinator partition."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or GroupSettings()
        self._topics = Topics()
        #: The groups with members, and the time at which they must be checked next.
        self._active: dict[str, Group] = {}
        self._classic_groups = ClassicGroups(self._settings)
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
            self._classic_groups.restore(group, now_ms)
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
        """Check the member id and epoch with which a Kafka client requests offsets of a KIP-848 group.

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

        The answer follows from the changes that are committed in the log. A pending change does not count, because it
        may never be committed: another coordinator may have replaced this one without its knowledge.
        """
        return group_offsets.refuses_fetch(group, self._state(group), member_id, epoch, partitions)

    def holds(self, group: str, member_id: str, partitions: Iterable[tuple[str, int]]) -> list[tuple[str, Hold]]:
        """Return the holds that prevent ``member_id`` from fetching offsets, each with the key of its transaction.

        A hold keeps offsets from other members while an open transaction may still commit newer offsets.
        """
        return group_offsets.holds(group, self._state(group), member_id, partitions)

    def held(self, group: str, member_id: str, partitions: Iterable[tuple[str, int]]) -> Set[tuple[str, int]]:
        """Return the ``partitions`` whose offsets ``member_id`` may not fetch now.

        An open transaction may still commit newer offsets of these partitions (see ``holds``).
        """
        return group_offsets.held(group, self._state(group), member_id, partitions)

    def offsets(
        self, group: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> Mapping[tuple[str, int], GroupOffset]:
        """Return the group's committed offsets, by topic and partition. ``partitions`` limits them; None means all."""
        return group_offsets.committed_offsets(group, self._state(group), partitions)

    def _state(self, group: str) -> group_offsets.State:
        known = self._entries.get(group)
        return known.state if known is not None else {}

    def refuses_hold(self, request: HoldRequested) -> Refused | None:
        """Return why the sender may not send offsets of the group with a transaction, or None if it may.

        The call has no effect on the group. The handler of ``HoldRequested`` makes the same check again.
        """
        known = self._entries.get(request.group)
        return (known or Group(request.group, Membership(request.group, max_size=0))).refuses_commit(request)

    def values(self, group: str) -> list[GroupValue]:
        """Return the values of all current records of a group in the log."""
        return list(self._state(group).values())

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

    # --- requests --------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> Group:
        group = self._entries.get(name)
        if group is None:
            group = self._entries[name] = Group(name, Membership(name, max_size=self._settings.max_size))
        return group

    def _has_room(self, request: GroupRequest) -> bool:
        """Return whether the request's group exists or may be created. A handover may always create it."""
        if request.group in self._entries or len(self._entries) < self._settings.max_groups:
            return True
        if isinstance(request, SyncRequested | BeatRequested | LeaveRequested):
            return True  # A request about a group that does not exist gets its response at once.
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

    def _serve(self, group: Group, now_ms: int) -> None:
        """Put waiting requests and due changes of members into one append, up to the maximum work of one step.

        The rest follows after the commit, or after Resumed if there is nothing to append.
        """
        if group.draft is not None or group.resuming:
            return
        draft = GroupDraft(began_ms=now_ms)
        if group.store_refused and group.classic is not None:
            self._effects += self._classic_groups.step(group, group.classic, StoreRefused(), draft, now_ms)
        group.store_refused = False
        for event in _pop_share(group.queue):
            match event:
                case TopicsGone():
                    group_offsets.drop_topics(group, event, draft)
                    group.membership.topics_gone(set(event.topics))
                case HeartbeatRequested() | ConsumerHeartbeatRequested():
                    self._heartbeat(group, event, draft, now_ms)
                case JoinRequested() | SyncRequested() | BeatRequested() | LeaveRequested():
                    self._effects += self._classic_groups.request(group, event, draft, now_ms)
                case DeleteRequested():
                    self._delete(group, event, draft, now_ms)
                case OffsetsDeleteRequested():
                    group_offsets.delete_offsets(group, event, draft, self._topics)
                case CommitRequested():
                    self._commit(group, event, draft, now_ms)
                case HoldRequested():
                    group_offsets.hold(group, event, draft, now_ms)
                case HoldEnded():
                    group_offsets.end_hold(group, event, draft)
                case TargetComputed():
                    group.membership.target_computed(event.inputs, event.target, now_ms)
        if group.classic is not None and now_ms >= group.classic.deadline_ms:
            self._effects += self._classic_groups.step(group, group.classic, CoordinatorTicked(), draft, now_ms)
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

    def _commit(self, group: Group, request: CommitRequested, draft: GroupDraft, now_ms: int) -> None:
        accepted = group_offsets.commit(group, request, draft, now_ms, handover_ms=self._settings.handover_ms)
        if accepted and request.transaction is None and group.classic is not None:
            event = OffsetsAccepted(request.member_id)
            self._effects += self._classic_groups.step(group, group.classic, event, draft, now_ms)

    def _heartbeat(
        self,
        group: Group,
        request: HeartbeatRequested | ConsumerHeartbeatRequested,
        draft: GroupDraft,
        now_ms: int,
    ) -> None:
        if group.classic is not None:
            if group.classic.members:
                detail = f"group {group.key!r} has {len(group.classic.members)} members of Kafka's classic protocol"
                refusal = Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, detail)
                draft.answers.append(Respond(request.ticket, refusal))
                return
            self._classic_groups.end(group, draft, now_ms)
        if isinstance(request, ConsumerHeartbeatRequested):
            group.membership.kafka_heartbeat(request, now_ms)
        else:
            group.membership.heartbeat(request, now_ms)

    def _membership_changes(self, group: Group, now_ms: int) -> dict[GroupKey, GroupValue | None]:
        """Return the changes of the members. With the first member, the group's record says that it is not classic."""
        changes = group.membership.pop_changes(now_ms)
        key = EpochKey(FORMAT_VERSION, group.key)
        record = group.state.get(key)
        if changes and key not in changes and isinstance(record, GroupEpoch) and record.classic is not None:
            changes[key] = GroupEpoch(FORMAT_VERSION, group.membership.epoch, now_ms)
        return changes

    def _delete(self, group: Group, request: DeleteRequested, draft: GroupDraft, now_ms: int) -> None:
        if group.member_count:
            detail = f"group {group.key!r} has {group.member_count} members"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.NON_EMPTY_GROUP, detail)))
        elif not (group.state or draft.changes):
            detail = f"there is no group {group.key!r}"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.GROUP_ID_NOT_FOUND, detail)))
        else:
            self._classic_groups.end(group, draft, now_ms)
            draft.changes.update(group.membership.pop_changes(now_ms))
            draft.changes.update(dict.fromkeys([*group.state, *draft.changes]))
            draft.answers += group.membership.pop_answers()  # Responses to members that left in this step.
            group.membership = Membership(group.key, max_size=self._settings.max_size)
            draft.answers.append(Respond(request.ticket, Done()))

    # --- durability ------------------------------------------------------------------------------------------------

    def _change(self, group: Group, draft: GroupDraft) -> None:
        self._stage(group, draft, [group_record(key, value) for key, value in draft.changes.items()])

    def _unchanged(self, entry: Group) -> GroupDraft:
        return GroupDraft(began_ms=NEVER - _LATE_MS)

    def _committed(self, entry: Group, draft: GroupDraft, now_ms: int) -> None:
        for key, value in draft.changes.items():
            if value is None:
                entry.state.pop(key, None)
            else:
                entry.state[key] = value
        if (epoch := EpochKey(FORMAT_VERSION, entry.key)) in draft.changes:
            self._classic_groups.on_stored(entry, draft.changes[epoch])
        if now_ms > draft.began_ms + _LATE_MS:  # The members had to wait.
            entry.postpone(now_ms - draft.began_ms, now_ms, draft.responded)
        self._effects += draft.answers
        self._serve_again(entry, now_ms)
        self._drop_if_empty(entry)

    def _refused(self, entry: Group, draft: GroupDraft, detail: str, now_ms: int) -> None:
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

    def _serve_again(self, group: Group, now_ms: int) -> None:
        group.queue[:0], group.again = group.again, []
        self._serve(group, now_ms)

    def _drop_if_empty(self, group: Group) -> None:
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

    def _note_members(self, group: Group) -> None:
        if group.has_members:
            self._active[group.key] = group
            self._due_ms = min(self._due_ms, group.due_ms)
        else:
            self._active.pop(group.key, None)

    def _expire(self, entry: Group, now_ms: int) -> None:
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
            self._change(entry, GroupDraft(dict.fromkeys(gone), began_ms=now_ms))


def _pop_share(queue: list[Queued]) -> list[Queued]:
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
