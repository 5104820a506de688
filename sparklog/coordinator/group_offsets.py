"""One partition's group coordinator: how far groups have read. Events in, effects out. Pure.

An offset is shown and acknowledged once it is committed in the coordinator's log. One append is under way for each
group, and what comes meanwhile goes together into the next, so that offsets take effect in the order in which they
came.

What a transaction's coordinator hands over carries (key, decision): it tries again until it is answered, so the last
decision of each key is remembered and a repetition changes nothing. Decisions of a key count up, but begin anew when
the key has expired: the memory of one is kept for a shorter time than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparklog.coordinator.core import CoordinatorCore
from sparklog.coordinator.effects import Answer, Done, Refused
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    CommittedOffset,
    GroupKey,
    GroupValue,
    Handover,
    HandoverKey,
    OffsetKey,
    decode_group_record,
    group_record,
)
from sparklog.coordinator.log_records import Record
from sparklog.errors import ErrorCode
from sparklog.model import assert_never
from sparklog.protocol.messages import GroupOffset

#: Commits of one group that may wait.
MAX_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """``retention_ms``: after the last commit of a group. ``handover_ms``: how long a repetition is recognised."""

    retention_ms: int = 7 * 86_400_000
    handover_ms: int = 86_400_000


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """As ``messages.CommitOffsets``."""

    ticket: int
    group: str
    offsets: tuple[GroupOffset, ...]
    transaction: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class TopicsGone:
    """These topics (name, topic id) were deleted; an empty id: whatever had this name."""

    topics: tuple[tuple[str, str], ...]


GroupEvent = CommitRequested | TopicsGone


@dataclass(slots=True)
class _Draft:
    """A change of one group on its way into the log."""

    changes: dict[GroupKey, GroupValue | None] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    #: Its name.
    key: str
    #: What is committed in the log.
    state: dict[GroupKey, GroupValue] = field(default_factory=dict)
    draft: _Draft | None = None
    queue: list[CommitRequested | TopicsGone] = field(default_factory=list)

    @property
    def last_commit_ms(self) -> int:
        return max((value.commit_ms for value in self.state.values()), default=0)

    @property
    def record_count(self) -> int:
        return len(self.state)

    def all_records(self) -> list[Record]:
        return [group_record(key, value) for key, value in self.state.items()]


class Groups(CoordinatorCore[_Group, _Draft]):
    """One entry for each group."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or GroupSettings()

    # --- the door --------------------------------------------------------------------------------------------------

    def load(self, records: Iterable[Record]) -> None:
        """Take what the partition's log holds, in order. Raises ClusterError for what cannot be read."""
        for record in records:
            key, value = decode_group_record(record)
            group = self._group(key.group)
            if value is None:
                group.state.pop(key, None)
            else:
                group.state[key] = value
            if not group.state:
                del self._entries[key.group]

    def _take(self, event: GroupEvent, now_ms: int) -> None:
        match event:
            case CommitRequested():
                self._enqueue(event, now_ms)
            case TopicsGone():
                for group in list(self._entries.values()):
                    group.queue.append(event)
                    self._serve(group, now_ms)
            case _:
                assert_never(event)

    # --- questions -------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Groups that have committed something."""
        return sorted(name for name, group in self._entries.items() if group.state)

    def offsets(self, group: str) -> Mapping[tuple[str, int], GroupOffset]:
        """By topic and partition."""
        known = self._entries.get(group)
        return {
            (key.topic, key.partition): value.offset
            for key, value in (known.state.items() if known else ())
            if isinstance(key, OffsetKey) and isinstance(value, CommittedOffset)
        }

    def topics(self) -> set[tuple[str, str]]:
        """Topics (name, topic id) that groups have offsets in."""
        return {
            (value.offset.topic, value.offset.topic_id)
            for group in self._entries.values()
            for value in group.state.values()
            if isinstance(value, CommittedOffset)
        }

    # --- commits ---------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> _Group:
        group = self._entries.get(name)
        if group is None:
            group = self._entries[name] = _Group(name)
        return group

    def _enqueue(self, request: CommitRequested, now_ms: int) -> None:
        group = self._group(request.group)
        if len(group.queue) >= MAX_QUEUED:
            detail = f"{request.group}: {MAX_QUEUED} commits are waiting"
            self._effects.append(Answer(request.ticket, Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)))
            return
        group.queue.append(request)
        self._serve(group, now_ms)

    def _serve(self, group: _Group, now_ms: int) -> None:
        """Put all that waits into one append."""
        if group.draft is not None or not group.queue:
            return
        draft = _Draft()
        waiting, group.queue = group.queue, []
        for event in waiting:
            if isinstance(event, TopicsGone):
                self._drop_topics(group, event, draft)
            else:
                self._commit(group, event, draft, now_ms)
        if draft.changes:
            self._change(group, draft)
        else:
            self._effects += draft.answers
            self._forget_if_empty(group)

    def _commit(self, group: _Group, request: CommitRequested, draft: _Draft, now_ms: int) -> None:
        if request.transaction is not None:
            key, decision = request.transaction
            handover = HandoverKey(FORMAT_VERSION, group.key, key)
            known = draft.changes.get(handover) or group.state.get(handover)
            if (
                isinstance(known, Handover)
                and decision <= known.decision
                and now_ms < known.commit_ms + self._settings.handover_ms
            ):
                draft.answers.append(Answer(request.ticket, Done()))
                return
            draft.changes[handover] = Handover(FORMAT_VERSION, decision, now_ms)
        for offset in request.offsets:
            place = OffsetKey(FORMAT_VERSION, group.key, offset.topic, offset.partition)
            draft.changes[place] = CommittedOffset(FORMAT_VERSION, offset, now_ms)
        draft.answers.append(Answer(request.ticket, Done()))

    def _drop_topics(self, group: _Group, event: TopicsGone, draft: _Draft) -> None:
        gone = set(event.topics)
        for key, value in {**group.state, **draft.changes}.items():
            if isinstance(value, CommittedOffset):
                topic = value.offset.topic
                if (topic, value.offset.topic_id) in gone or (topic, "") in gone:
                    draft.changes[key] = None

    # --- durability ------------------------------------------------------------------------------------------------

    def _change(self, group: _Group, draft: _Draft) -> None:
        self._stage(group, draft, [group_record(key, value) for key, value in draft.changes.items()])

    def _unchanged(self, entry: _Group) -> _Draft:
        return _Draft()

    def _committed(self, entry: _Group, draft: _Draft, now_ms: int) -> None:
        for key, value in draft.changes.items():
            if value is None:
                entry.state.pop(key, None)
            else:
                entry.state[key] = value
        self._effects += draft.answers
        self._serve(entry, now_ms)
        self._forget_if_empty(entry)

    def _refused(self, entry: _Group, draft: _Draft, detail: str, now_ms: int) -> None:
        """What nobody waits for comes again."""
        refusal = Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{entry.key}: {detail}")
        self._effects += [Answer(answer.ticket, refusal) for answer in draft.answers]
        self._serve(entry, now_ms)
        self._forget_if_empty(entry)

    def _forget_if_empty(self, group: _Group) -> None:
        if not group.state and group.draft is None and not group.queue:
            self._entries.pop(group.key, None)

    # --- time ------------------------------------------------------------------------------------------------------

    def _expire(self, entry: _Group, now_ms: int) -> None:
        """A group that commits no more goes whole; of others only the memory of what transactions handed over."""
        over = now_ms >= entry.last_commit_ms + self._settings.retention_ms
        gone = [
            key
            for key, value in entry.state.items()
            if over or (isinstance(value, Handover) and now_ms >= value.commit_ms + self._settings.handover_ms)
        ]
        if gone and not entry.queue:
            self._change(entry, _Draft(dict.fromkeys(gone)))
