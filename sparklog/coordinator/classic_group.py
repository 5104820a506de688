"""The state machine of one classic group: in Kafka's classic protocol one member, the leader, computes the assignment.

The module is pure. ``ClassicGroup.step`` takes one event and returns the effects.

A *rebalance* has two phases. In the first one, all members send JoinGroup requests, which wait. When all known members
have joined, or the rebalance timeout is over, the next *generation* begins: each request gets its response, and the
leader's response has all members with their metadata. In the second phase, all members send SyncGroup requests, and the
leader's request has the assignment. The coordinator commits the assignment to the log (``StoreClassic``) before it
sends the responses.

    Empty --join--> PreparingRebalance --all joined--> CompletingRebalance --leader's sync--> Stable
      ^                  |     ^                               |                                |
      +---no members-----+     +------- a member joins, leaves, is removed or changes ----------+

The group is Dead after it was deleted.

The log has the members of the last generation that became stable. A new coordinator continues with these members, so
that they do not need a rebalance. Members that joined since then have to join again. The coordinator also writes a
record when a group becomes empty.

A static member is a member with an instance id. If it restarts while the group is stable, it gets its old assignment
under a new member id, without a rebalance. The group fences the old member id.

Source: Kafka's classic group protocol, with KIP-62 (session and rebalance timeouts), KIP-134 (initial delay), KIP-345
(static members), KIP-394 (member ids before members), KIP-559 (protocol in SyncGroup), KIP-814 (skipped assignments).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from sparklog.coordinator.classic_events import (
    BeatRequested,
    ClassicRequest,
    Delayed,
    GroupEnded,
    Joined,
    JoinedMember,
    JoinRequested,
    LeaveRequested,
    LeavingMember,
    Left,
    MemberIdGiven,
    OffsetsAccepted,
    Protocols,
    StoreRefused,
    Synced,
    SyncRequested,
)
from sparklog.coordinator.classic_member import ClassicMember, member_size, restored_member
from sparklog.coordinator.effects import CoordinatorReport, Done, Outcome, Refused, Respond, StoreClassic
from sparklog.coordinator.events import CoordinatorTicked
from sparklog.coordinator.group_member import NEVER
from sparklog.coordinator.group_records import ClassicState
from sparklog.errors import ErrorCode
from sparklog.model import assert_never

#: The time after which a new member that waits for its first generation is removed. Such a member cannot send
#: heartbeats, because it may not know its id. Source: Kafka, NEW_MEMBER_JOIN_TIMEOUT_MS.
NEW_MEMBER_MS = 300_000
#: The maximum number of protocols that a member may support.
MAX_PROTOCOLS = 100
#: The number of bytes that a group counts for each member, and for each id of a new member, in addition to the bytes of
#: its fields.
ENTRY_BYTES = 256


class GroupPhase(Enum):
    """The state of a classic group. The values are Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class ClassicSettings:
    """The settings and bounds of classic groups."""

    #: The time for which the first rebalance of an empty group waits for further members.
    initial_delay_ms: int = 3000
    #: The maximum number of members, and of members that have received an id and not joined yet.
    max_size: int = 10_000
    #: The maximum number of bytes of one member's protocols and names.
    max_member_bytes: int = 2**20
    #: The maximum number of bytes of all members' protocols and names, and of all assignments. The record of the group
    #: has both, and must fit into one batch.
    max_group_bytes: int = 4 * 2**20


Event = ClassicRequest | OffsetsAccepted | CoordinatorTicked | StoreRefused | Delayed | GroupEnded


class ClassicGroup:
    """The state machine of one classic group. ``Groups`` owns it.

    The group's state may include a ``StoreClassic`` that is not committed yet. Until the commit the owner must hold
    back all responses that come after this effect, in the same step or in later steps. If the log refuses the record,
    the owner must drop these responses.
    """

    def __init__(self, group: str, settings: ClassicSettings, *, generation: int = 0) -> None:
        self.group = group
        self.phase = GroupPhase.EMPTY
        self.generation = generation
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, ClassicMember] = {}
        #: The latest time at which the owner must pass ``CoordinatorTicked`` to ``step``. It may be earlier than
        #: necessary.
        self.deadline_ms = NEVER
        self._settings = settings
        self._effects: list[Respond | StoreClassic | CoordinatorReport] = []
        self._instances: dict[str, str] = {}
        #: The ids that the group has given to new members before they join, and the time at which each id expires.
        self._given: dict[str, int] = {}
        self._given_bytes = 0
        #: The number of members that support each protocol, and the number of members whose JoinGroup waits.
        self._supported: Counter[str] = Counter()
        self._waiting = 0
        self._bytes = 0
        #: The number of bytes of the assignments that the leader sent last.
        self._assigned_bytes = 0
        #: The ``limit_bytes`` of the last ``step``: the bound of ``held_bytes``, or None.
        self._limit_bytes: int | None = None
        #: The end of the first phase. During the initial delay ``_extend_ms`` is the time by which the delay may still
        #: be extended; otherwise it is None. ``_extends`` means that a member has joined during the delay.
        self._join_until_ms = NEVER
        self._extend_ms: int | None = None
        self._extends = False
        #: The members that have not sent SyncGroup in this generation, and the time at which the group removes them.
        self._unsynced: set[str] = set()
        self._sync_until_ms = NEVER

    @classmethod
    def restored(
        cls, group: str, settings: ClassicSettings, state: ClassicState, *, generation: int, now_ms: int
    ) -> ClassicGroup:
        """Restore a group from its record in the log. Each member gets a whole session timeout."""
        found = cls(group, settings, generation=generation)
        found.protocol_type, found.protocol, found.leader = state.protocol_type, state.protocol, state.leader
        for one in state.members:
            member = restored_member(one, state.protocol)
            found._add(member)
            member.session_ms = now_ms + member.session_timeout_ms
        found._assigned_bytes = sum(len(one.assignment) for one in state.members)
        found.phase = GroupPhase.STABLE if found.members else GroupPhase.EMPTY
        found._schedule()
        return found

    # --- the entry point -------------------------------------------------------------------------------------------

    def step(
        self, event: Event, now_ms: int, *, limit_bytes: int | None = None
    ) -> list[Respond | StoreClassic | CoordinatorReport]:
        """Handle one event, and return its effects in order.

        A request after which ``held_bytes`` would be larger than before, and larger than ``limit_bytes``, is refused.
        """
        self._effects, self._limit_bytes = [], limit_bytes
        match event:
            case JoinRequested():
                self._join(event, now_ms)
            case SyncRequested():
                self._sync(event, now_ms)
            case BeatRequested():
                self._beat(event, now_ms)
            case LeaveRequested():
                codes = tuple(self._leave(one, now_ms) for one in event.members)
                self._answer(event.ticket, Left(codes))
            case OffsetsAccepted():
                if event.member_id in self.members:
                    self._renew_if_active(self.members[event.member_id], now_ms)
            case CoordinatorTicked():
                self._time_passed(now_ms)
            case StoreRefused():
                if self.members:
                    self._prepare_rebalance(now_ms)
            case Delayed():
                self._delay(event.by_ms)
            case GroupEnded():
                assert not self.members, self.group
                self.phase = GroupPhase.DEAD
                for member_id in list(self._given):
                    self._forget_id(member_id)
            case _:
                assert_never(event)
        if self.phase is GroupPhase.PREPARING and not isinstance(event, Delayed):
            self._complete_join_if_due(now_ms)
        return self._effects

    @property
    def is_idle(self) -> bool:
        """Return whether the group has no members, and no new member has an id with which it may join."""
        return not self.members and not self._given

    @property
    def held_bytes(self) -> int:
        """Return the number of bytes of the members, their assignments and the ids of new members."""
        entries = len(self.members) + len(self._given)
        return self._bytes + self._assigned_bytes + self._given_bytes + ENTRY_BYTES * entries

    def state(self) -> ClassicState:
        """Return the record that stores the current generation in the log."""
        members = tuple(member.state(self.protocol) for member in self.members.values())
        return ClassicState(self.protocol_type, self.protocol, self.leader, members)

    def refuses_commit(
        self, member_id: str, generation: int, instance_id: str = "", *, transactional: bool = False
    ) -> Refused | None:
        """Return the error if the sender may not commit offsets, or None if it may.

        A sender that is not a member has a negative generation. It may commit while the group is empty.
        """
        if generation < 0 and self.phase is GroupPhase.EMPTY:
            return None
        if generation >= 0 or member_id or instance_id:
            refused = self._refuses(member_id, instance_id, generation)
            if refused is not None:
                return refused
        elif not transactional and self.phase is not GroupPhase.EMPTY:
            detail = f"the group has {len(self.members)} members, and only they may commit"
            return self._refused(ErrorCode.NON_EMPTY_GROUP, detail)
        if not transactional and self.phase is GroupPhase.COMPLETING:
            return self._refused(ErrorCode.REBALANCE_IN_PROGRESS, "the assignment is not complete")
        return None

    def check_invariants(self) -> None:
        """Check the relations between the fields. Tests call this method after each step."""
        phase, members = self.phase, self.members
        assert bool(members) == (phase not in {GroupPhase.EMPTY, GroupPhase.DEAD}), phase
        assert self._waiting == sum(member.joining is not None for member in members.values())
        assert self._bytes == sum(member.size for member in members.values())
        assert self._assigned_bytes >= sum(len(member.assignment) for member in members.values())
        assert self._given_bytes == sum(map(len, self._given))
        assert self.held_bytes == 0 or members or self._given
        assert self._instances == {one.instance_id: name for name, one in members.items() if one.instance_id}
        assert len(members) <= self._settings.max_size
        assert len(self._given) <= self._settings.max_size
        assert members.keys().isdisjoint(self._given)
        assert all(name == member.member_id for name, member in members.items())
        names = Counter(name for member in members.values() for name, _ in member.protocols)
        assert self._supported == names
        if members:
            assert len(members) in names.values(), "no protocol is supported by all members"
            assert self.protocol_type
        if phase is not GroupPhase.PREPARING:
            assert not self._waiting
            assert self._join_until_ms == NEVER
            assert self._extend_ms is None
        else:
            assert self._join_until_ms < NEVER
        if phase in {GroupPhase.COMPLETING, GroupPhase.STABLE}:
            assert self.leader in members
            assert names[self.protocol] == len(members)
            assert self._unsynced <= members.keys()
        else:
            assert not self._unsynced
            assert self._sync_until_ms == NEVER
        for member in members.values():
            assert member.syncing is None or phase is GroupPhase.COMPLETING
            assert member.joining is None or member.syncing is None
            assert member.session_ms < NEVER or member.joining is not None or member.syncing is not None
            assert self.deadline_ms <= member.session_ms
        assert self.deadline_ms <= min(self._join_until_ms, self._sync_until_ms, *self._given.values(), NEVER)

    # --- join ------------------------------------------------------------------------------------------------------

    def _join(self, event: JoinRequested, now_ms: int) -> None:
        refused = self._refuses_join(event)
        if refused is not None:
            self._answer(event.ticket, refused)
        elif not event.member_id:
            self._join_new(event, now_ms)
        elif event.member_id in self._given:
            self._forget_id(event.member_id)
            self._add_joining(event, event.member_id, now_ms)
        else:
            self._join_again(self.members[event.member_id], event, now_ms)

    def _refuses_join(self, event: JoinRequested) -> Refused | None:
        if self.phase is GroupPhase.DEAD:
            return self._refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the group was deleted")
        member_id = event.member_id or event.new_member_id
        size = member_size(event.protocols, member_id, event.instance_id, event.client_id, event.host)
        known = self.members.get(event.member_id or self._instances.get(event.instance_id, ""))
        if event.member_id and (event.member_id not in self._given or event.instance_id):
            refused = self._refuses(event.member_id, event.instance_id)
            if refused is not None:
                return refused
        if size > self._settings.max_member_bytes or len(event.protocols) > MAX_PROTOCOLS:
            most = f"{MAX_PROTOCOLS} protocols and {self._settings.max_member_bytes} bytes"
            detail = f"{len(event.protocols)} protocols with {size} bytes found, at most {most} expected"
            return self._refused(ErrorCode.INVALID_REQUEST, detail)
        if not self._supports(event):
            detail = (
                f"protocol type {event.protocol_type!r} with {', '.join(name for name, _ in event.protocols)!r} found, "
                f"{self.protocol_type!r} with one of {', '.join(self._common())!r} expected"
            )
            return self._refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, detail)
        total = self._bytes + size - (known.size if known is not None else 0)
        if (known is None and len(self.members) >= self._settings.max_size) or total > self._settings.max_group_bytes:
            detail = (
                f"it has {len(self.members)} members with {self._bytes} bytes; at most {self._settings.max_size} "
                f"members (group.max.size) with {self._settings.max_group_bytes} bytes expected"
            )
            return self._refused(ErrorCode.GROUP_MAX_SIZE_REACHED, detail)
        if known is not None:
            # Clients repeat the request after this error. The other one would end a consumer that works.
            return self._refuses_growth(size - known.size, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if event.member_id:
            return self._refuses_growth(size - len(event.member_id), ErrorCode.GROUP_MAX_SIZE_REACHED)
        first = len(member_id) if event.needs_member_id and not event.instance_id else size
        return self._refuses_growth(ENTRY_BYTES + first, ErrorCode.GROUP_MAX_SIZE_REACHED)

    def _refuses_growth(self, by: int, code: ErrorCode) -> Refused | None:
        """Return a refusal with ``code`` if the group must not hold ``by`` bytes more, or None if it may."""
        if by <= 0 or self._limit_bytes is None or self.held_bytes + by <= self._limit_bytes:
            return None
        detail = (
            f"it holds {self.held_bytes} bytes and needs {by} more; at most {self._limit_bytes} expected, because of "
            "the other classic groups of its coordinator"
        )
        return self._refused(code, detail)

    def _supports(self, event: JoinRequested) -> bool:
        """Return whether the member has the group's protocol type and a protocol that all members support."""
        if not event.protocol_type or not event.protocols:
            return False
        if not self.members:
            return True
        same = event.protocol_type == self.protocol_type
        return same and any(self._supported[name] == len(self.members) for name, _ in event.protocols)

    def _join_new(self, event: JoinRequested, now_ms: int) -> None:
        replaced = self._instances.get(event.instance_id) if event.instance_id else None
        if replaced is not None:
            self._replace(self.members[replaced], event, now_ms)
        elif event.needs_member_id and not event.instance_id:
            if len(self._given) >= self._settings.max_size:
                detail = f"{len(self._given)} new members have received an id and not joined yet"
                self._answer(event.ticket, self._refused(ErrorCode.GROUP_MAX_SIZE_REACHED, detail))
                return
            self._given[event.new_member_id] = now_ms + event.session_timeout_ms
            self._given_bytes += len(event.new_member_id)
            self._note(self._given[event.new_member_id])
            self._answer(event.ticket, MemberIdGiven(event.new_member_id))
        else:
            self._add_joining(event, event.new_member_id, now_ms)

    def _add_joining(self, event: JoinRequested, member_id: str, now_ms: int) -> None:
        if not self.members:
            self.protocol_type = event.protocol_type
        member = ClassicMember(
            member_id,
            event.instance_id,
            event.client_id,
            event.host,
            event.session_timeout_ms,
            event.rebalance_timeout_ms,
            unique(event.protocols),
        )
        self._add(member)
        self._extends |= self._extend_ms is not None
        self._wait_for_join(member, event.ticket, now_ms)
        self._prepare_rebalance(now_ms)

    def _join_again(self, member: ClassicMember, event: JoinRequested, now_ms: int) -> None:
        unchanged = unique(event.protocols) == member.protocols
        leads = member.member_id == self.leader
        if self.phase is GroupPhase.COMPLETING and unchanged:
            # The member has probably not received the response to its last request.
            self._release_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, "it has joined again")
            self._unsynced.add(member.member_id)
            self._answer(event.ticket, self._joined(member))
            self._renew(member, now_ms)
        elif self.phase is GroupPhase.STABLE and unchanged and not leads:
            self._answer(event.ticket, self._joined(member))
            self._renew(member, now_ms)
        else:
            self._update(member, event)
            self._prepare_rebalance(now_ms)
            self._wait_for_join(member, event.ticket, now_ms)

    def _replace(self, old: ClassicMember, event: JoinRequested, now_ms: int) -> None:
        """Replace a static member that has restarted: give its place to the member id of the new request."""
        led, generation_protocol = self.leader, self.protocol
        self._release(old, ErrorCode.FENCED_INSTANCE_ID, f"{old.instance_id!r} is another member now")
        member = ClassicMember(
            event.new_member_id,
            event.instance_id,
            event.client_id,
            event.host,
            event.session_timeout_ms,
            event.rebalance_timeout_ms,
            unique(event.protocols),
            assignment=old.assignment,
            is_new=old.is_new,
        )
        unsynced = old.member_id in self._unsynced
        self._forget(old)
        self._add(member)
        if led == old.member_id:
            self.leader = member.member_id
        if self.phase is GroupPhase.STABLE and self._select() == generation_protocol:
            if unsynced:
                self._unsynced.add(member.member_id)
            self._renew(member, now_ms)
            self._store()
            self._answer(event.ticket, self._rejoined(member, led, can_skip=event.can_skip))
        else:
            # In CompletingRebalance the leader may have assigned partitions to the replaced member id.
            self._prepare_rebalance(now_ms)
            self._wait_for_join(member, event.ticket, now_ms)

    def _rejoined(self, member: ClassicMember, led: str, *, can_skip: bool) -> Joined:
        """Return the response to a static member that has restarted. The member must not compute an assignment.

        If the member's version has the flag that skips the assignment (``can_skip``), a leader gets this flag.
        Otherwise the response has ``led``, the leader's id before the restart, so that the member acts as a follower.
        """
        found = self._joined(member)
        if not can_skip:
            return Joined(found.generation, found.protocol_type, found.protocol, led, found.member_id)
        leads = member.member_id == self.leader
        return Joined(
            found.generation,
            found.protocol_type,
            found.protocol,
            found.leader,
            found.member_id,
            found.members,
            skip_assignment=leads,
        )

    def _update(self, member: ClassicMember, event: JoinRequested) -> None:
        self._count(member, -1)
        member.protocols = unique(event.protocols)
        member.client_id, member.host = event.client_id, event.host
        member.session_timeout_ms = event.session_timeout_ms
        member.rebalance_timeout_ms = event.rebalance_timeout_ms
        member.size = member_size(member.protocols, member.member_id, member.instance_id, member.client_id, member.host)
        self._count(member, 1)

    def _wait_for_join(self, member: ClassicMember, ticket: int, now_ms: int) -> None:
        """Let the member's JoinGroup wait.

        If an earlier JoinGroup of the member waits, it gets an error, because the member has sent the request again.
        """
        if member.joining is not None:
            self._answer(member.joining, self._refused(ErrorCode.REBALANCE_IN_PROGRESS, "it has joined again"))
        else:
            self._waiting += 1
        member.joining = ticket
        member.session_ms = now_ms + NEW_MEMBER_MS if member.is_new else NEVER
        self._note(member.session_ms)

    def _joined(self, member: ClassicMember) -> Joined:
        """Return the response to the member's JoinGroup in the current generation."""
        members: Iterable[ClassicMember] = self.members.values() if member.member_id == self.leader else ()
        return Joined(
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            member.member_id,
            tuple(JoinedMember(one.member_id, one.instance_id, one.metadata(self.protocol)) for one in members),
        )

    # --- rebalance -------------------------------------------------------------------------------------------------

    def _prepare_rebalance(self, now_ms: int) -> None:
        """Begin the first phase of a rebalance, unless it has begun already."""
        if self.phase is GroupPhase.PREPARING:
            return
        timeout_ms = self._rebalance_timeout_ms()
        if self.phase is GroupPhase.EMPTY:
            self._extend_ms = max(timeout_ms - self._settings.initial_delay_ms, 0)
            self._extends = False
            self._join_until_ms = now_ms + self._settings.initial_delay_ms
        else:
            self._join_until_ms = now_ms + timeout_ms
        for member in self.members.values() if self.phase is GroupPhase.COMPLETING else ():
            member.assignment = b""
            if member.syncing is not None:
                self._release_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, "another rebalance has begun")
                self._renew(member, now_ms)
        self._unsynced.clear()
        self._sync_until_ms = NEVER
        self.phase = GroupPhase.PREPARING
        self._note(self._join_until_ms)

    def _complete_join_if_due(self, now_ms: int) -> None:
        if self._extend_ms is not None and self.members:
            if now_ms < self._join_until_ms:
                return
            if self._extends and self._extend_ms > 0:
                delay_ms = min(self._settings.initial_delay_ms, self._extend_ms)
                self._extend_ms -= delay_ms
                self._extends = False
                self._join_until_ms = now_ms + delay_ms
                self._note(self._join_until_ms)
                return
        elif self.members and (self._waiting < len(self.members) or self._given) and now_ms < self._join_until_ms:
            return
        self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        """Begin the next generation with the members that have joined. Remove the others, except static members."""
        for member in [one for one in self.members.values() if one.joining is None and not one.instance_id]:
            self._expel(member, "did not join in time")
        if self.members and not self._waiting:
            # All members are static and silent. Their session timeouts end the wait.
            self._join_until_ms = now_ms + self._rebalance_timeout_ms()
            self._extend_ms = None
            self._note(self._join_until_ms)
            return
        self._join_until_ms, self._extend_ms = NEVER, None
        self._assigned_bytes = 0
        self.generation += 1
        if not self.members:
            self.phase, self.protocol, self.leader = GroupPhase.EMPTY, "", ""
            self._store()
            return
        leader = self.members.get(self.leader)
        if leader is None or leader.joining is None:
            self.leader = next(name for name, member in self.members.items() if member.joining is not None)
        self.protocol = self._select()
        self.phase = GroupPhase.COMPLETING
        self._unsynced = set(self.members)
        self._sync_until_ms = now_ms + self._rebalance_timeout_ms()
        self._note(self._sync_until_ms)
        for member in self.members.values():
            member.assignment = b""
            if member.joining is not None:
                ticket, member.joining = member.joining, None
                self._answer(ticket, self._joined(member))
                member.is_new = False
                self._renew(member, now_ms)
        self._waiting = 0

    def _select(self) -> str:
        """Return the protocol with the most votes.

        Each member votes for the first protocol in its list that all members support.
        """
        common = self._common()
        if len(common) == 1:
            return common[0]
        allowed = set(common)
        votes = Counter(
            next(name for name, _ in member.protocols if name in allowed) for member in self.members.values()
        )
        return max(common, key=lambda name: votes[name])

    def _common(self) -> list[str]:
        """Return the protocols that all members support, in the order of the first member's preference."""
        first = next(iter(self.members.values()), None)
        names = (name for name, _ in first.protocols) if first is not None else ()
        return [name for name in names if self._supported[name] == len(self.members)]

    def _rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # --- sync, heartbeat, leave ------------------------------------------------------------------------------------

    def _sync(self, event: SyncRequested, now_ms: int) -> None:
        refused = self._refuses(event.member_id, event.instance_id, event.generation)
        if refused is None and self.phase is GroupPhase.PREPARING:
            refused = self._refused(ErrorCode.REBALANCE_IN_PROGRESS, "another rebalance has begun")
        if refused is None and (
            event.protocol_type not in {"", self.protocol_type} or event.protocol not in {"", self.protocol}
        ):
            found = f"{event.protocol_type!r} with {event.protocol!r} found"
            detail = f"protocol type {found}, {self.protocol_type!r} with {self.protocol!r} expected"
            refused = self._refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, detail)
        if refused is None and self.phase is GroupPhase.COMPLETING and event.member_id == self.leader:
            refused = self._refuses_assignments(event)
        if refused is not None:
            self._answer(event.ticket, refused)
            return
        member = self.members[event.member_id]
        self._unsynced.discard(member.member_id)
        if self.phase is GroupPhase.STABLE:
            self._renew(member, now_ms)
            self._answer(event.ticket, self._synced(member))
            return
        self._release_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, "it has sent SyncGroup again")
        member.syncing = event.ticket
        member.session_ms = NEVER
        if member.member_id == self.leader:
            self._assign(dict(event.assignments), now_ms)

    def _refuses_assignments(self, event: SyncRequested) -> Refused | None:
        size = sum(len(assignment) for _, assignment in event.assignments)
        if size <= self._settings.max_group_bytes:
            return self._refuses_growth(size - self._assigned_bytes, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        detail = f"assignments of {size} bytes found, at most {self._settings.max_group_bytes} expected"
        return self._refused(ErrorCode.INVALID_REQUEST, detail)

    def _assign(self, assignments: dict[str, bytes], now_ms: int) -> None:
        self.phase = GroupPhase.STABLE
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        self._assigned_bytes = sum(len(member.assignment) for member in self.members.values())
        self._store()
        for member in self.members.values():
            if member.syncing is not None:
                ticket, member.syncing = member.syncing, None
                self._answer(ticket, self._synced(member))
                self._renew(member, now_ms)

    def _synced(self, member: ClassicMember) -> Synced:
        return Synced(self.protocol_type, self.protocol, member.assignment)

    def _beat(self, event: BeatRequested, now_ms: int) -> None:
        refused = self._refuses(event.member_id, event.instance_id, event.generation)
        if refused is not None:
            self._answer(event.ticket, refused)
            return
        self._renew_if_active(self.members[event.member_id], now_ms)
        if self.phase is GroupPhase.PREPARING:
            self._answer(event.ticket, self._refused(ErrorCode.REBALANCE_IN_PROGRESS, "a rebalance has begun"))
        else:
            self._answer(event.ticket, Done())

    def _leave(self, leaving: LeavingMember, now_ms: int) -> ErrorCode:
        """Remove a member that a LeaveGroup request names. Return the error code of this member."""
        member_id = leaving.member_id
        if member_id in self._given:
            self._forget_id(member_id)
            return ErrorCode.NONE
        if not member_id:
            member_id = self._instances.get(leaving.instance_id, "")
        refused = self._refuses(member_id, leaving.instance_id)
        if refused is not None:
            return refused.code
        self._remove(self.members[member_id], "has left")
        self._prepare_rebalance(now_ms)
        return ErrorCode.NONE

    def _refuses(self, member_id: str, instance_id: str, generation: int | None = None) -> Refused | None:
        """Return the error if a request of this member must be refused, or None."""
        if self.phase is GroupPhase.DEAD:
            return self._refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the group was deleted")
        if instance_id:
            known = self._instances.get(instance_id)
            if known is None:
                return self._refused(ErrorCode.UNKNOWN_MEMBER_ID, f"it has no static member {instance_id!r}")
            if known != member_id:
                return self._refused(ErrorCode.FENCED_INSTANCE_ID, f"{instance_id!r} is another member now")
        elif member_id not in self.members:
            return self._refused(ErrorCode.UNKNOWN_MEMBER_ID, f"it has no member {member_id!r}")
        if generation is not None and generation != self.generation:
            detail = f"generation {generation} found, {self.generation} expected"
            return self._refused(ErrorCode.ILLEGAL_GENERATION, detail)
        return None

    # --- time ------------------------------------------------------------------------------------------------------

    def _time_passed(self, now_ms: int) -> None:
        if now_ms < self.deadline_ms:
            return
        for member_id in [name for name, until_ms in self._given.items() if now_ms >= until_ms]:
            self._forget_id(member_id)
        before = len(self.members)
        for member in [one for one in self.members.values() if now_ms >= one.session_ms]:
            self._expel(member, "was silent for its session.timeout.ms")
        if now_ms >= self._sync_until_ms:
            self._sync_until_ms = NEVER
            for member_id in sorted(self._unsynced):
                self._expel(self.members[member_id], "sent no SyncGroup in time")
        if len(self.members) < before:
            self._prepare_rebalance(now_ms)
        if self.phase is GroupPhase.PREPARING:
            self._complete_join_if_due(now_ms)
        self._schedule()

    def _delay(self, by_ms: int) -> None:
        for member in self.members.values():
            member.session_ms = min(member.session_ms + by_ms, NEVER)
        self._given = {name: until_ms + by_ms for name, until_ms in self._given.items()}
        self._join_until_ms = min(self._join_until_ms + by_ms, NEVER)
        self._sync_until_ms = min(self._sync_until_ms + by_ms, NEVER)
        self._schedule()

    def _schedule(self) -> None:
        times = [member.session_ms for member in self.members.values()]
        self.deadline_ms = min(self._join_until_ms, self._sync_until_ms, *times, *self._given.values(), NEVER)

    def _note(self, until_ms: int) -> None:
        self.deadline_ms = min(self.deadline_ms, until_ms)

    def _renew(self, member: ClassicMember, now_ms: int) -> None:
        """Restart the session timeout of a member that has just sent a request or received a response."""
        member.session_ms = now_ms + member.session_timeout_ms
        self._note(member.session_ms)

    def _renew_if_active(self, member: ClassicMember, now_ms: int) -> None:
        """Restart the session timeout of a member, unless its JoinGroup or SyncGroup waits for a response."""
        if member.joining is None and member.syncing is None:
            self._renew(member, now_ms)

    # --- the table of members --------------------------------------------------------------------------------------

    def _add(self, member: ClassicMember) -> None:
        self.members[member.member_id] = member
        if member.instance_id:
            self._instances[member.instance_id] = member.member_id
        self._count(member, 1)

    def _count(self, member: ClassicMember, sign: int) -> None:
        self._bytes += sign * member.size
        for name, _ in member.protocols:
            self._supported[name] += sign
            if not self._supported[name]:
                del self._supported[name]

    def _forget_id(self, member_id: str) -> None:
        """Forget the id that a new member has received."""
        del self._given[member_id]
        self._given_bytes -= len(member_id)

    def _remove(self, member: ClassicMember, why: str) -> None:
        self._release(member, ErrorCode.UNKNOWN_MEMBER_ID, why)
        self._forget(member)
        if member.member_id == self.leader:
            self.leader = next(iter(self.members), "")

    def _expel(self, member: ClassicMember, why: str) -> None:
        """Remove a member that has not sent a required request in time, and report the removal."""
        self._remove(member, why)
        detail = f"group {self.group}: member {member.member_id} {why}: removed"
        self._effects.append(CoordinatorReport("groups.members.removed", detail))

    def _release(self, member: ClassicMember, code: ErrorCode, why: str) -> None:
        """Answer the member's waiting requests with an error."""
        if member.joining is not None:
            ticket, member.joining = member.joining, None
            self._waiting -= 1
            self._answer(ticket, self._refused(code, f"member {member.member_id}: {why}"))
        self._release_sync(member, code, why)

    def _release_sync(self, member: ClassicMember, code: ErrorCode, why: str) -> None:
        if member.syncing is not None:
            ticket, member.syncing = member.syncing, None
            self._answer(ticket, self._refused(code, f"member {member.member_id}: {why}"))

    def _forget(self, member: ClassicMember) -> None:
        del self.members[member.member_id]
        if self._instances.get(member.instance_id) == member.member_id:
            del self._instances[member.instance_id]
        self._unsynced.discard(member.member_id)
        self._count(member, -1)

    # --- effects ---------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        self._effects.append(StoreClassic(self.generation, self.state()))

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        self._effects.append(Respond(ticket, outcome))

    def _refused(self, code: ErrorCode, detail: str) -> Refused:
        return Refused(code, f"group {self.group!r}: {detail}")


def unique(protocols: Protocols) -> Protocols:
    """Return the protocols without repeated names. The first protocol of each name stays."""
    found: dict[str, bytes] = {}
    for name, metadata in protocols:
        found.setdefault(name, metadata)
    return tuple(found.items())
