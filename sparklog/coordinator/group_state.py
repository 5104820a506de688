"""One group of a coordinator: its settings, its state in memory and in the log, and its change in flight."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from sparklog.coordinator.classic_events import Delayed
from sparklog.coordinator.classic_group import ClassicGroup, ClassicSettings
from sparklog.coordinator.effects import Refused, Respond
from sparklog.coordinator.group_events import (
    CommitRequested,
    GroupRequest,
    HoldEnded,
    HoldRequested,
    TargetComputed,
    TopicsGone,
)
from sparklog.coordinator.group_member import NEVER
from sparklog.coordinator.group_records import GroupKey, GroupValue, MemberState, group_record
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.membership import Membership


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of consumer groups.

    A group without members expires ``retention_ms`` after its last commit or the departure of its last member,
    whichever is later. A transaction coordinator may repeat the request that commits the offsets of a transaction. The
    group recognizes a repetition, and ignores it, for ``handover_ms`` after it committed these offsets.
    """

    retention_ms: int = 7 * 86_400_000
    handover_ms: int = 86_400_000
    #: The maximum number of members of one group.
    max_size: int = 10_000
    #: The maximum number of groups of this coordinator.
    max_groups: int = 1_000_000
    #: The age at which a hold is removed. No transaction can be open for that long.
    hold_ms: int = 2 * 86_400_000
    #: The maximum number of bytes that all classic groups of this coordinator hold: members, assignments and the ids of
    #: new members. If the record of a group in the log is larger than its members in memory, the record counts instead.
    max_classic_bytes: int = 64 * 2**20
    #: The time for which the first rebalance of a classic group waits for further members.
    initial_delay_ms: int = 3000

    @property
    def classic(self) -> ClassicSettings:
        """Return the settings of classic groups."""
        return ClassicSettings(initial_delay_ms=self.initial_delay_ms, max_size=self.max_size)


@dataclass(slots=True)
class GroupDraft:
    """A change of one group that is being appended to the log."""

    changes: dict[GroupKey, GroupValue | None] = field(default_factory=dict)
    answers: list[Respond] = field(default_factory=list)
    began_ms: int = 0
    #: The members whose heartbeat responses are in ``answers``.
    responded: Set[str] = frozenset()
    #: The topic deletions that this change applies. The broker reports a deletion again only with the next deletion, or
    #: to the next coordinator.
    gone: list[TopicsGone] = field(default_factory=list)


#: An item in a group's queue.
Queued = GroupRequest | HoldEnded | TopicsGone | TargetComputed


@dataclass(slots=True)
class Group:
    """One group of a coordinator: its members, its committed state, and the requests that wait."""

    #: The group's name.
    key: str
    membership: Membership
    #: The state machine of a classic group, or None for any other group.
    classic: ClassicGroup | None = None
    #: Whether an append with the classic group's state was refused, and the group does not know it yet.
    store_refused: bool = False
    #: The number of bytes of the classic group's record in ``state``, and the number of bytes of this group that count
    #: towards ``max_classic_bytes``.
    record_bytes: int = 0
    counted_bytes: int = 0
    #: The state that is committed in the log.
    state: dict[GroupKey, GroupValue] = field(default_factory=dict)
    draft: GroupDraft | None = None
    queue: list[Queued] = field(default_factory=list)
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
        """Extend the members' deadlines after the coordinator was unavailable for ``late_ms``.

        If ``informed`` is given, only some members get more time: those in ``informed``, whose responses were delayed,
        and those with a waiting heartbeat. In a classic group all members get more time.
        """
        if self.classic is not None:
            self.classic.step(Delayed(late_ms), now_ms)
        else:
            self.membership.postpone(late_ms, informed)

    @property
    def last_commit_ms(self) -> int:
        """Return the time of the last commit or of the departure of the last member, whichever is later."""
        return max((value.commit_ms for value in self.state.values() if not isinstance(value, MemberState)), default=0)

    @property
    def record_count(self) -> int:
        return len(self.state)

    def record_keys(self) -> list[GroupKey]:
        return list(self.state)

    def records_of(self, keys: Iterable[GroupKey]) -> list[Record]:
        return [group_record(key, self.state[key]) for key in keys if key in self.state]

    def refuses_commit(self, request: CommitRequested | HoldRequested) -> Refused | None:
        """Return why the sender may not commit offsets, or None if it may."""
        member_id, epoch, instance_id = request.member_id, request.member_epoch, request.instance_id
        if self.classic is not None:
            transactional = isinstance(request, HoldRequested)
            return self.classic.refuses_commit(member_id, epoch, instance_id, transactional=transactional)
        return self.membership.refuses_commit(member_id, epoch, request.offsets)
