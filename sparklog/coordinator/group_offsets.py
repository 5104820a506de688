"""One partition's group coordinator: how far groups have read. Events in, effects out. Pure.

As for transactions, the log of the coordinator's partition is the only memory: an offset is shown and acknowledged
once it is committed there. One append is under way for each group, and what comes meanwhile goes together into the
next, so that offsets take effect in the order in which they came.

What a transaction's coordinator hands over carries (key, decision): it tries again until it is answered, so the last
decision of each key is remembered and a repetition changes nothing. Decisions of a key count up, but begin anew when
the key has expired: the memory of one is kept for a shorter time than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparklog.coordinator.effects import Answer, Append, Done, Effect, Refused, Rewritten
from sparklog.coordinator.events import Appended, AppendRefused, RewriteRequested, Ticked
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
from sparklog.coordinator.records import Record
from sparklog.errors import ErrorCode
from sparklog.model import assert_never
from sparklog.protocol.messages import GroupOffset

#: Commits of one group that may wait.
MAX_QUEUED = 10_000
#: Groups nobody commits for are looked for so often.
EXPIRY_CHECK_MS = 60_000
#: Groups written anew in one append.
REWRITE_GROUPS = 200


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


GroupEvent = CommitRequested | TopicsGone | Appended | AppendRefused | RewriteRequested | Ticked


@dataclass(slots=True)
class _Draft:
    """A change of one group on its way into the log."""

    changes: dict[GroupKey, GroupValue | None] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    name: str
    #: What is committed in the log.
    state: dict[GroupKey, GroupValue] = field(default_factory=dict)
    draft: _Draft | None = None
    queue: list[CommitRequested | TopicsGone] = field(default_factory=list)

    @property
    def last_commit_ms(self) -> int:
        return max((value.commit_ms for value in self.state.values()), default=0)


class Groups:
    """Owner: the broker's event loop, for one leader epoch of one partition. ``load`` all records, then ``start``."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self._settings = settings or GroupSettings()
        self._groups: dict[str, _Group] = {}
        self._appends: dict[int, list[_Group]] = {}
        self._append = 0
        #: Groups still to be written anew, and appends that do it; None when there is no need.
        self._rewrite: dict[str, None] | None = None
        self._rewriting: set[int] = set()
        self._next_expiry_ms = 0
        self._effects: list[Effect] = []

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
                del self._groups[key.group]

    def start(self, now_ms: int) -> Sequence[Effect]:
        """All is read."""
        self._next_expiry_ms = now_ms + EXPIRY_CHECK_MS
        return []

    def step(self, event: GroupEvent, now_ms: int) -> Sequence[Effect]:
        """Take one fact; return what is to be done about it, in order."""
        self._effects = []
        match event:
            case CommitRequested():
                self._enqueue(event, now_ms)
            case TopicsGone():
                for group in list(self._groups.values()):
                    group.queue.append(event)
                    self._serve(group, now_ms)
            case Appended():
                self._appended(event.append, now_ms)
            case AppendRefused():
                self._append_refused(event, now_ms)
            case RewriteRequested():
                if self._rewrite is None:
                    self._rewrite = dict.fromkeys(self._groups)
                self._rewrite_more()
            case Ticked():
                self._ticked(now_ms)
            case _:
                assert_never(event)
        return self._effects

    @property
    def deadline_ms(self) -> int | None:
        """When to send ``Ticked``, at the latest."""
        return self._next_expiry_ms if self._groups else None

    # --- questions -------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Groups that have committed something."""
        return sorted(name for name, group in self._groups.items() if group.state)

    def offsets(self, group: str) -> Mapping[tuple[str, int], GroupOffset]:
        """By topic and partition."""
        known = self._groups.get(group)
        return {
            (key.topic, key.partition): value.offset
            for key, value in (known.state.items() if known else ())
            if isinstance(key, OffsetKey) and isinstance(value, CommittedOffset)
        }

    def topics(self) -> dict[tuple[str, str], int]:
        """Topics that groups have offsets in, by (name, topic id): when one was last committed."""
        found: dict[tuple[str, str], int] = {}
        for group in self._groups.values():
            for value in group.state.values():
                if isinstance(value, CommittedOffset):
                    topic = (value.offset.topic, value.offset.topic_id)
                    found[topic] = max(found.get(topic, 0), value.commit_ms)
        return found

    @property
    def live_records(self) -> int:
        return sum(len(group.state) for group in self._groups.values())

    # --- commits ---------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name)
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
            self._stage([group], draft)
        else:
            self._effects += draft.answers
            self._forget_if_empty(group)

    def _commit(self, group: _Group, request: CommitRequested, draft: _Draft, now_ms: int) -> None:
        if request.transaction is not None:
            key, decision = request.transaction
            handover = HandoverKey(FORMAT_VERSION, group.name, key)
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
            place = OffsetKey(FORMAT_VERSION, group.name, offset.topic, offset.partition)
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

    def _stage(self, groups: list[_Group], draft: _Draft) -> None:
        for group in groups:
            group.draft = draft
        self._order(groups, [group_record(key, value) for key, value in draft.changes.items()])

    def _order(self, groups: list[_Group], records: list[Record]) -> int:
        self._append += 1
        self._appends[self._append] = groups
        self._effects.append(Append(self._append, tuple(records)))
        return self._append

    def _appended(self, append: int, now_ms: int) -> None:
        self._rewriting.discard(append)
        for group in self._appends.pop(append, ()):
            draft, group.draft = group.draft, None
            assert draft is not None
            for key, value in draft.changes.items():
                if value is None:
                    group.state.pop(key, None)
                else:
                    group.state[key] = value
            self._effects += draft.answers
            self._serve(group, now_ms)
            self._forget_if_empty(group)
        self._rewrite_more()

    def _append_refused(self, event: AppendRefused, now_ms: int) -> None:
        """Nothing has changed. Who waits is told; what nobody waits for comes again."""
        rewriting = event.append in self._rewriting
        self._rewriting.discard(event.append)
        for group in self._appends.pop(event.append, ()):
            draft, group.draft = group.draft, None
            assert draft is not None
            if rewriting and self._rewrite is not None:
                self._rewrite[group.name] = None
            refusal = Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{group.name}: {event.detail}")
            self._effects += [Answer(answer.ticket, refusal) for answer in draft.answers]
            self._serve(group, now_ms)
            self._forget_if_empty(group)

    def _forget_if_empty(self, group: _Group) -> None:
        if not group.state and group.draft is None and not group.queue:
            self._groups.pop(group.name, None)

    # --- time ------------------------------------------------------------------------------------------------------

    def _ticked(self, now_ms: int) -> None:
        if now_ms < self._next_expiry_ms:
            return
        self._next_expiry_ms = now_ms + EXPIRY_CHECK_MS
        for group in list(self._groups.values()):
            if group.draft is None and not group.queue:
                self._expire(group, now_ms)
        self._rewrite_more()

    def _expire(self, group: _Group, now_ms: int) -> None:
        """A group that commits no more goes whole; of others only the memory of what transactions handed over."""
        over = now_ms >= group.last_commit_ms + self._settings.retention_ms
        gone = [
            key
            for key, value in group.state.items()
            if over or (isinstance(value, Handover) and now_ms >= value.commit_ms + self._settings.handover_ms)
        ]
        if gone:
            self._stage([group], _Draft(dict.fromkeys(gone)))

    # --- bounding the log ------------------------------------------------------------------------------------------

    def _rewrite_more(self) -> None:
        """Write groups anew that nothing else is being written for; the others follow when that is done."""
        if self._rewrite is None:
            return
        ready: list[_Group] = []
        for name in list(self._rewrite):
            group = self._groups.get(name)
            if group is None:
                del self._rewrite[name]
            elif group.draft is None and len(ready) < REWRITE_GROUPS:
                ready.append(group)
        if ready:
            records: list[Record] = []
            for group in ready:
                del self._rewrite[group.name]
                group.draft = _Draft()
                records += [group_record(key, value) for key, value in group.state.items()]
            self._rewriting.add(self._order(ready, records))
        elif not self._rewrite and not self._rewriting:
            self._rewrite = None
            self._effects.append(Rewritten())
