"""The members of one group: owned and target partitions, epochs and deadlines.

The module is pure. It works as follows:

- A ``HeartbeatRequested`` has a member's whole state: epoch, owned partitions and subscription. Its response is
  ``Assigned`` (the epoch and the partitions that the member should own) or ``Refused``. If nothing has changed for the
  member, the response waits for a change, at most for the heartbeat interval. The state also changes when time passes
  (``expire``) and when topics change (``topics_changed``).
- The group's epoch rises with every change of members, subscriptions or topics. Each epoch has one *target*, which
  gives every partition to one member (``assignor``).
- A member *owns* a partition after the partition was assigned to it in some epoch. No other member may then have it. A
  member that owns partitions outside its target is notified, gives them up (its next heartbeat omits them), and only
  then gets other partitions. A partition without an owner is assigned, in the current epoch, to the member that has it
  in the target. So a partition has at most one owner at a time, and at most one per epoch.
- For a large group another thread computes the target (``ComputeTarget``). When its result arrives
  (``target_computed``), a new epoch begins. The result is dropped if a member changed its subscription, a static member
  was replaced, or a topic was deleted during the computation. Members that joined meanwhile get partitions in the next
  target. The partitions of a large target are assigned in several steps (``unfinished``).
- A commit has the member's id and epoch. It is valid if the member owns the partitions and they were assigned to it in
  that epoch or earlier. A member cannot commit offsets of partitions that it has given up, or after it was removed
  (KIP-1251).

The members with their reported data and owned partitions, and the group's epoch, are committed to the log before a
response that depends on them is sent (``pop_changes``). Targets, deadlines and waiting heartbeats are not written, nor
is a change of a member's epoch that assigns no partitions. A new coordinator computes the target again in a new epoch,
and deadlines start again.

The sequence number of a member's last heartbeat is written with its owned partitions. So a heartbeat that arrives late,
perhaps at the next coordinator, does not give up partitions that were assigned after it was sent. A late heartbeat also
does not add a removed member again.

Members that send no heartbeat in time, or do not give up partitions in time, are removed. If a new member has the
instance id of a static member, it replaces that member at once and gets its partitions in a new epoch.

Source: KIP-848. In KIP-848 the member's epoch alone decides whether a commit is valid, and targets are written to the
log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Set
from itertools import islice

from sparklog.coordinator.assignor import Part, Subscriber, TopicView
from sparklog.coordinator.effects import Assigned, Outcome, Refused, Respond
from sparklog.coordinator.group_events import ConsumerHeartbeatRequested, HeartbeatRequested
from sparklog.coordinator.group_member import NEVER, Member, owned_parts, topic_partitions
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    About,
    EpochKey,
    GroupEpoch,
    GroupKey,
    GroupValue,
    MemberKey,
    MemberState,
)
from sparklog.coordinator.group_target import Target, TargetInputs
from sparklog.coordinator.group_topics import Topics, pattern_error
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    JOIN,
    LEAVE,
    LEAVE_STATIC,
    DescribedGroup,
    GroupOffset,
)

#: Waiting heartbeats that become due within this time get their responses together.
_TOGETHER_MS = 100
#: The divisor of the pause between two targets. The pause in milliseconds is the number of members and partitions of
#: the first target, divided by this value. Without the pause, many members that join one after the other could keep the
#: coordinator busy with targets alone.
_PER_MS = 50
#: The number of members and partitions up to which a target is computed in the step that needs it, not in another
#: thread.
COMPUTED_AT_ONCE = 10_000
#: The maximum number of partitions that one step examines and assigns. A single member may have more.
PARTS_AT_ONCE = 10_000


class Membership:
    """The state machine of the members of one group. A part of ``Groups``.

    Its state may include the changes of one append that is not committed yet. ``restore`` resets it to the committed
    state.
    """

    def __init__(self, group: str, *, max_size: int) -> None:
        self.group = group
        self.epoch = 0
        self.members: dict[str, Member] = {}
        #: Responses, to be sent after the changes that ``pop_changes`` returned are committed.
        self.answers: list[Respond] = []
        #: The time at which ``settle`` must be called at the latest.
        self.due_ms = NEVER
        self._max_size = max_size
        self._instances: dict[str, str] = {}
        self._owner: dict[Part, str] = {}
        self._target_owner: dict[Part, str] = {}
        #: Whether the target is older than the current members, subscriptions and topics.
        self.dirty = False
        #: The inputs of a target that another thread has to compute, until ``pop_inputs`` returns them.
        self._inputs: TargetInputs | None = None
        #: The inputs of the target that another thread is computing. Results for other inputs are ignored.
        self._computing: TargetInputs | None = None
        self._assign_ms = 0
        #: The approximate number of partitions that this step has examined. After ``PARTS_AT_ONCE`` partitions, the
        #: step leaves the remaining partitions to another step.
        self._examined = 0
        #: Whether a new target is due but was left to another step.
        self._postponed = False
        #: Members to check: their owned, target or reported partitions changed.
        self._touched: set[str] = set()
        #: Members of Kafka clients whose heartbeats get their responses in this step.
        self._at_once: list[str] = []
        #: Members whose records must be written or removed.
        self._changed: set[str] = set()
        self._epoch_changed = False
        #: Members whose heartbeats got a response since ``pop_responded``.
        self._responded: set[str] = set()

    def restore(self, state: Mapping[GroupKey, GroupValue], now_ms: int, *, delay_ms: int = 0) -> None:
        """Start from the committed state, or reset to it.

        Members keep the partitions that they own until the next target assignment, which is computed after ``delay_ms``
        at the earliest.
        """
        before, self.members = self.members, {}
        self._instances, self._owner, self._target_owner = {}, {}, {}
        self._changed, self._touched, self._epoch_changed = set(), set(), False
        self._inputs = self._computing = None
        self.epoch = 0
        for key, value in state.items():
            if isinstance(key, EpochKey) and isinstance(value, GroupEpoch):
                self.epoch = value.epoch
            elif isinstance(key, MemberKey) and isinstance(value, MemberState):
                self._restore_member(key.member_id, value, before.get(key.member_id), now_ms)
        for member in before.values():
            if member.held is not None and member.member_id not in self.members:
                detail = f"group {self.group!r}: its heartbeat could not be written"
                self._answer(member.held, Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail))
        for member in self.members.values():
            member.target = set(member.owned)
        self.dirty = bool(self.members)
        self._assign_ms = now_ms + delay_ms
        self._schedule()

    def _restore_member(self, member_id: str, value: MemberState, before: Member | None, now_ms: int) -> None:
        member = Member(member_id, value.about, value.epoch, owned=dict(owned_parts(value.owned)))
        member.sequence, member.joined = value.sequence, value.joined
        member.session_ms = now_ms + value.about.session_timeout_ms
        if before is not None:
            member.sequence, member.reported, member.named = before.sequence, before.reported, before.named
            member.session_ms = before.session_ms
            member.held, member.held_until_ms = before.held, before.held_until_ms
        self.members[member_id] = member
        if value.about.instance_id:
            self._instances[value.about.instance_id] = member_id
        for part, given in list(member.owned.items()):
            other = self.members.get(self._owner.get(part, ""))
            # If only a part of an append is in the log, a partition may have two owners: the assignment is there, but
            # the earlier owner's release is not.
            if other is not None:
                loser = member if other.owned[part] > given else other
                loser.disown((part,))
                self._changed.add(loser.member_id)
                if loser is member:
                    continue
            self._owner[part] = self._target_owner[part] = member_id

    # --- events ----------------------------------------------------------------------------------------------------

    def heartbeat(self, event: HeartbeatRequested, now_ms: int) -> None:
        """Handle a heartbeat. This call or a later ``settle`` adds the response to ``answers``."""
        refusal = self._admit(event)
        if refusal is not None:
            self._answer(event.ticket, refusal)
            return
        if event.member_epoch in {LEAVE, LEAVE_STATIC}:
            self._leave(event, now_ms)
            return
        member = self.members.get(event.member_id) or self._join(event)
        if event.sequence <= member.sequence:
            self._answer(event.ticket, self._assignment(member))  # A newer heartbeat came first.
            return
        self._release(member)
        member.sequence = event.sequence
        member.epoch = max(member.epoch, event.member_epoch)
        member.session_ms = now_ms + event.about.session_timeout_ms
        if event.about != member.about:
            if event.about.subscription != member.about.subscription:
                self._outdate()
            member.about = event.about
            self._changed.add(member.member_id)
        member.report(event.owned)
        self._disown_unreported(member)
        member.held = event.ticket
        hold_ms = min(event.about.heartbeat_interval_ms, event.about.session_timeout_ms // 3)
        member.held_until_ms = now_ms + hold_ms
        self._touched.add(member.member_id)
        self.due_ms = min(self.due_ms, member.due_ms)

    def kafka_heartbeat(self, event: ConsumerHeartbeatRequested, now_ms: int) -> None:
        """Handle a heartbeat of a Kafka client. The next ``settle`` adds the response to ``answers``.

        Kafka's clients send only what has changed, and do not number their heartbeats.
        """
        member = self.members.get(event.member_id)
        if member is None and event.member_epoch == JOIN and event.topics is None and event.pattern is None:
            detail = f"group {self.group!r}: a member that joins must name topics or a pattern"
            self._answer(event.ticket, Refused(ErrorCode.INVALID_REQUEST, detail))
            return
        whole = HeartbeatRequested(
            event.ticket,
            event.group,
            event.member_id,
            event.member_epoch,
            0 if member is None else member.sequence + 1,
            () if member is None else topic_partitions(_kept(member, event)),
            event.about(None if member is None else member.about),
        )
        self.heartbeat(whole, now_ms)
        member = self.members.get(event.member_id)
        if member is not None and member.held == event.ticket:
            member.of_kafka = True
            self._at_once.append(member.member_id)

    def topics_changed(self, names: frozenset[str]) -> bool:
        """Record that these topics are new or have changed. Return whether this affects the group."""
        patterns = {member.about.pattern for member in self.members.values()} - {""}
        concerned = any(not names.isdisjoint(member.about.topics) for member in self.members.values())
        concerned = concerned or any(Topics.among(pattern, names) for pattern in patterns)
        self.dirty |= concerned
        return concerned

    def topics_gone(self, gone: Iterable[tuple[str, str]]) -> None:
        """Remove the partitions of deleted topics (name, topic id) from the members and from the target.

        An empty topic id means every topic with the name.
        """
        ended = set(gone)
        names = {name for name, _ in ended}

        def among(parts: Iterable[Part]) -> list[Part]:
            named = (part for part in parts if part[0] in names)
            return [part for part in named if part[:2] in ended or (part[0], "") in ended]

        self._examined += len(self._owner)
        for part in among(self._target_owner):
            self._remove_from_target(part)
            self.dirty = True
        owned = among(self._owner)
        self._disown_gone(owned)
        self.dirty |= bool(owned)
        if self._computing is not None and not names.isdisjoint(self._computing.topics):
            self._outdate()

    def expire(self, now_ms: int) -> list[str]:
        """Remove members that did not send a heartbeat or give up partitions in time. Return a message about each."""
        messages = []
        for member in list(self.members.values()):
            if now_ms >= min(member.session_ms, member.give_up_ms):
                silent = now_ms >= member.session_ms
                why = "was silent for its session.timeout.ms" if silent else "did not give partitions up in time"
                messages.append(f"group {self.group}: member {member.member_id} {why}: removed")
                self._remove(member, ErrorCode.UNKNOWN_MEMBER_ID, why)
        return messages

    def postpone(self, late_ms: int, informed: Set[str] | None = None) -> None:
        """Extend the members' deadlines after the coordinator itself was unavailable for ``late_ms``.

        If ``informed`` is given, only some members get more time: those in ``informed``, whose responses were delayed,
        and those with a waiting heartbeat. The other members get none, because they could have sent a heartbeat.
        """
        for member in self.members.values():
            if informed is None or member.held is not None or member.member_id in informed:
                member.session_ms += late_ms
                if member.give_up_ms != NEVER:
                    member.give_up_ms += late_ms
        self._schedule()

    def settle(self, topics: Topics, now_ms: int) -> list[str]:
        """Do the work that follows from recent events: compute a new target, assign partitions, respond to heartbeats.

        Return the messages of ``expire`` about removed members.
        """
        messages = self.expire(now_ms) if now_ms >= self.due_ms else []
        # An empty group gets its new epoch at once, so that the epoch's time is the time at which the last member left.
        due = topics.is_known and self._computing is None and now_ms >= self._assign_ms
        self._postponed = self.dirty and due and bool(self.members) and self._examined >= PARTS_AT_ONCE
        if self.dirty and (due or not self.members) and not self._postponed:
            self._assign(topics, now_ms)
        self._settle_touched(now_ms)
        self._examined = 0
        at_once, self._at_once = self._at_once, []
        for member_id in at_once:
            if member_id in self.members:
                self._release(self.members[member_id])
        if now_ms >= self.due_ms:
            for member in self.members.values():
                if member.held is not None and member.held_until_ms <= now_ms + _TOGETHER_MS:
                    self._release(member)
            self._schedule()
        # A postponed target is for the next step. Its time has passed, and would look like a pause of the process.
        if self.dirty and topics.is_known and self._computing is None and not self._postponed:
            self.due_ms = min(self.due_ms, self._assign_ms)
        return messages

    def _settle_touched(self, now_ms: int) -> None:
        """Assign partitions to members whose partitions changed, and respond to them, as many as one step may."""
        for member_id in sorted(self._touched):
            if self._examined >= PARTS_AT_ONCE:
                return
            self._touched.discard(member_id)
            member = self.members.get(member_id)
            if member is None:
                continue
            self._examined += 1 + max(len(member.owned), len(member.target))
            self._assign_free(member, now_ms)
            if member.held is not None and member_id not in self._touched:
                assigned = member.assigned
                if assigned != member.reported:
                    self._release(member, assigned)

    @property
    def unfinished(self) -> bool:
        """Return whether ``settle`` has left work for a later step."""
        return bool(self._touched) or self._postponed

    def target_computed(self, inputs: TargetInputs, target: Target, now_ms: int) -> None:
        """Begin a new group epoch with a target that another thread has computed.

        A target for outdated inputs is ignored.
        """
        if inputs is self._computing:
            self._computing = None
            self._install(target, now_ms)

    def pop_inputs(self) -> TargetInputs | None:
        """Remove and return the inputs from which another thread must compute the target assignment.

        Return None if no thread has to compute a target.
        """
        inputs, self._inputs = self._inputs, None
        return inputs

    def pop_changes(self, now_ms: int) -> dict[GroupKey, GroupValue | None]:
        """Return the changes that must be committed to the log before ``answers`` may be sent."""
        changes: dict[GroupKey, GroupValue | None] = {}
        for member_id in sorted(self._changed):
            member = self.members.get(member_id)
            key = MemberKey(FORMAT_VERSION, self.group, member_id)
            changes[key] = None if member is None else member.state()
        if self._epoch_changed:
            changes[EpochKey(FORMAT_VERSION, self.group)] = GroupEpoch(FORMAT_VERSION, self.epoch, now_ms)
        self._changed, self._epoch_changed = set(), False
        return changes

    def pop_responded(self) -> Set[str]:
        responded, self._responded = self._responded, set()
        return responded

    def pop_answers(self) -> list[Respond]:
        answers, self.answers = self.answers, []
        return answers

    # --- queries ---------------------------------------------------------------------------------------------------

    def refuses_commit(self, member_id: str, epoch: int, offsets: Iterable[GroupOffset]) -> Refused | None:
        """Return an error with the reason why the member may not commit these offsets, or None if it may."""
        member = self.members.get(member_id)
        if not member_id:
            if not self.members:
                return None
            detail = f"group {self.group!r} has {len(self.members)} members, and only they may commit"
            return Refused(ErrorCode.NON_EMPTY_GROUP, detail)
        if member is None:
            return self._unknown(member_id)
        for offset in offsets:
            given = member.owned.get((offset.topic, offset.topic_id, offset.partition))
            if given is None or given > epoch:
                now = "not its own" if given is None else f"its own since epoch {given}"
                detail = f"{offset.topic}-{offset.partition} is {now}; member {member_id} commits in epoch {epoch}"
                return Refused(ErrorCode.STALE_MEMBER_EPOCH, f"group {self.group!r}: {detail}")
        return None

    def subscribed(self, names: Iterable[str], topics: Topics) -> set[str]:
        """Return the topics in ``names`` to which a member subscribes."""
        wanted = set(names)
        found = {name for member in self.members.values() for name in member.about.topics if name in wanted}
        for pattern in {member.about.pattern for member in self.members.values()} - {""}:
            found |= topics.among(pattern, wanted)
        return found

    def describe(self) -> Generator[None, None, DescribedGroup]:
        """Return a description of the group. This is a generator that yields before each member.

        The caller can do other work meanwhile, because the description of a large group takes long.

        A partition that moves between two members meanwhile may be listed for both.
        """
        state, epoch = self.condition, self.epoch
        described = []
        for _, member in sorted(self.members.items()):
            yield
            described.append(member.describe())
        return DescribedGroup(self.group, state, epoch, tuple(described))

    @property
    def condition(self) -> str:
        """Return the group's state: "empty", "reconciling" or "stable"."""
        if not self.members:
            return "empty"
        changing = self.dirty or self._computing is not None
        changing = changing or any(member.owned.keys() != member.target for member in self.members.values())
        return "reconciling" if changing else "stable"

    # --- join and leave --------------------------------------------------------------------------------------------

    def _admit(self, event: HeartbeatRequested) -> Refused | None:
        about, member = event.about, self.members.get(event.member_id)
        if member is None and event.member_epoch != JOIN:
            if about.instance_id and about.instance_id in self._instances:
                detail = f"group {self.group!r}: {about.instance_id!r} is another member now"
                return Refused(ErrorCode.FENCED_INSTANCE_ID, detail)
            return self._unknown(event.member_id)
        if member is not None and event.member_epoch > self.epoch:
            detail = f"group {self.group!r}: epoch {event.member_epoch} found, the group is in {self.epoch}"
            self._remove(member, ErrorCode.FENCED_MEMBER_EPOCH, detail)
            return Refused(ErrorCode.FENCED_MEMBER_EPOCH, detail)
        if member is not None and JOIN < event.member_epoch < member.joined:
            return self._unknown(event.member_id)
        if member is not None and about.instance_id != member.about.instance_id:
            detail = f"instance id {about.instance_id!r} found, member {member.member_id} has another"
            return Refused(ErrorCode.INVALID_REQUEST, f"group {self.group!r}: {detail}")
        wrong = about.pattern and (member is None or member.about.pattern != about.pattern)
        if wrong and (detail := pattern_error(about.pattern)):
            return Refused(ErrorCode.INVALID_REGULAR_EXPRESSION, detail)
        if member is None and about.instance_id not in self._instances and len(self.members) >= self._max_size:
            detail = f"group {self.group!r} has {len(self.members)} members, as many as group.max.size allows"
            return Refused(ErrorCode.GROUP_MAX_SIZE_REACHED, detail)
        return None

    def _unknown(self, member_id: str) -> Refused:
        return Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"group {self.group!r} has no member {member_id}")

    def _join(self, event: HeartbeatRequested) -> Member:
        member = Member(event.member_id, event.about, joined=self.epoch)
        replaced = self.members.get(self._instances.get(event.about.instance_id, ""))
        self.members[member.member_id] = member
        self._changed.add(member.member_id)
        if replaced is None or not event.about.instance_id:
            self.dirty = True
        else:
            self._replace(replaced, member)
        if event.about.instance_id:
            self._instances[event.about.instance_id] = member.member_id
        return member

    def _replace(self, old: Member, new: Member) -> None:
        """Give a static member's target to the member that replaces it, in a new epoch.

        Other members are not affected.
        """
        dirty = self.dirty or self._computing is not None or old.about.subscription != new.about.subscription
        new.target = old.target
        self._remove(old, ErrorCode.FENCED_INSTANCE_ID, f"{old.about.instance_id!r} is another member now")
        for part in new.target:
            self._target_owner[part] = new.member_id
        self._next_epoch()
        self._inputs = self._computing = None
        self.dirty = dirty

    def _leave(self, event: HeartbeatRequested, now_ms: int) -> None:
        member = self.members[event.member_id]
        if event.member_epoch == LEAVE:
            self._remove(member, ErrorCode.UNKNOWN_MEMBER_ID, "it has left")
        else:
            self._release(member)
            member.session_ms = now_ms + member.about.session_timeout_ms
        self._answer(event.ticket, Assigned(event.member_epoch))

    def _remove(self, member: Member, code: ErrorCode, why: str) -> None:
        if member.held is not None:
            ticket, member.held = member.held, None
            self._answer(ticket, Refused(code, f"group {self.group!r}: member {member.member_id}: {why}"))
        for part in member.owned:
            del self._owner[part]
        for part in member.target:
            if self._target_owner.get(part) == member.member_id:
                del self._target_owner[part]
        self._examined += len(member.owned)
        del self.members[member.member_id]
        if self._instances.get(member.about.instance_id) == member.member_id:
            del self._instances[member.about.instance_id]
        self._changed.add(member.member_id)
        self.dirty = True

    # --- partitions ------------------------------------------------------------------------------------------------

    def _disown_unreported(self, member: Member) -> None:
        """Remove from the member the partitions that its heartbeat does not name.

        The member does not have them and will not take them, because it ignores responses to its earlier heartbeats.
        """
        unreported = frozenset(member.owned) - member.reported
        if unreported:
            self._disown(member, unreported)

    def _disown(self, member: Member, parts: Collection[Part]) -> None:
        """Remove partitions from the member that owns them, and record the members that may get them."""
        deque(map(self._owner.__delitem__, parts), maxlen=0)
        member.disown(parts)
        self._examined += len(parts)
        self._changed.add(member.member_id)
        self._touched.add(member.member_id)
        if len(parts) < len(self.members):
            self._touched.update(filter(None, map(self._target_owner.get, parts)))
        else:
            found = self.members.items()
            self._touched.update(name for name, other in found if len(other.owned) < len(other.target))

    def _disown_gone(self, parts: Iterable[Part]) -> None:
        """Remove partitions that no longer exist from their owners and from the target."""
        by_owner: dict[str, list[Part]] = {}
        for part in parts:
            by_owner.setdefault(self._owner[part], []).append(part)
        for member_id, owned in by_owner.items():
            for part in owned:  # Otherwise the partition would be assigned again.
                self._remove_from_target(part)
            self._disown(self.members[member_id], owned)

    def _assign_free(self, member: Member, now_ms: int) -> None:
        """Assign the free partitions of the member's target to it. A member that has to give up others gets none.

        Only a part of a large target is assigned. The member then stays in ``_touched``, and gets its response in a
        later step.
        """
        if member.giving_up:
            if member.give_up_ms == NEVER:
                member.give_up_ms = now_ms + member.about.rebalance_timeout_ms
                self.due_ms = min(self.due_ms, member.give_up_ms)
            return
        member.give_up_ms = NEVER
        if len(member.owned) == len(member.target):
            return
        missing = member.target.difference(member.owned)
        free = list(islice((part for part in missing if part not in self._owner), PARTS_AT_ONCE))
        member.own(free, self.epoch)
        self._owner.update(dict.fromkeys(free, member.member_id))
        if free:
            member.epoch = self.epoch
            self._changed.add(member.member_id)
            if len(member.target) > PARTS_AT_ONCE:
                self._touched.add(member.member_id)

    def _assign(self, topics: Topics, now_ms: int) -> None:
        """Compute a new target, or order its computation in another thread if the group is large."""
        self.dirty = False
        views = self._views(topics)
        # Topics with these names were deleted and created again.
        self._disown_gone([part for part in self._owner if views[part[0]].topic_id != part[1]])
        wanted: dict[tuple[tuple[str, ...], str], frozenset[str]] = {}
        subscribers = {}
        for member_id, member in self.members.items():
            named = (member.about.topics, member.about.pattern)
            if named not in wanted:
                wanted[named] = self._wanted(member.about, topics, views)
            subscribers[member_id] = Subscriber(wanted[named], member.about.rack)
        inputs = TargetInputs(subscribers, dict(views), self._owner.copy(), self._target_owner.copy())
        self._inputs = self._computing = None
        if inputs.size <= COMPUTED_AT_ONCE:
            self._install(inputs.compute(), now_ms)
        else:
            self._inputs = self._computing = inputs
            self._examined += inputs.size

    def _install(self, target: Target, now_ms: int) -> None:
        """Begin the epoch of ``target``."""
        self._next_epoch()
        for member_id in target.parts.keys() - self.members.keys():
            for part in target.parts[member_id]:  # The member was removed during the computation of the target.
                del target.members[part]
        self._target_owner = target.members
        for member_id, member in self.members.items():
            member.target = target.parts.get(member_id) or set()
        self._touched.update(self.members)
        self._assign_ms = now_ms + (len(self.members) + len(self._target_owner)) // _PER_MS

    def _outdate(self) -> None:
        """Record a change that makes a target that is being computed unusable."""
        self.dirty = True
        self._inputs = self._computing = None

    def _remove_from_target(self, part: Part) -> None:
        """Remove a partition that no longer exists from the target."""
        member_id = self._target_owner.pop(part, None)
        if member_id is not None:
            self.members[member_id].target.discard(part)
            self._touched.add(member_id)

    def _views(self, topics: Topics) -> Mapping[str, TopicView]:
        """Return the known topics and, in addition, topics and partitions known only because members own them."""
        unknown: dict[str, TopicView] = {}
        for name, topic_id, number in self._owner:
            known = unknown.get(name) or topics.views.get(name)
            if known is None or (known.topic_id == topic_id and number >= known.partitions):
                unknown[name] = TopicView(topic_id, number + 1, known.racks if known is not None else ())
        return {**topics.views, **unknown} if unknown else topics.views

    @staticmethod
    def _wanted(about: About, topics: Topics, views: Mapping[str, TopicView]) -> frozenset[str]:
        named = frozenset(name for name in about.topics if name in views)
        if not about.pattern:
            return named
        unknown = views.keys() - topics.views.keys()
        return named | topics.matching(about.pattern) | topics.among(about.pattern, unknown)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._epoch_changed = True

    # --- responses -------------------------------------------------------------------------------------------------

    def _assignment(self, member: Member, assigned: frozenset[Part] | None = None) -> Assigned:
        assigned = member.assigned if assigned is None else assigned
        if len(assigned) == len(member.owned):  # The member has nothing to give up.
            member.epoch = self.epoch
        elif member.of_kafka and member.told is None:
            # After a failover, a Kafka client may have given partitions up already. It reports that only once, so it
            # must get them back before this coordinator can take them away.
            assigned = frozenset(member.owned)
        unchanged, member.told = member.of_kafka and member.told == assigned, assigned
        return Assigned(member.epoch, member.response(assigned), unchanged)

    def _release(self, member: Member, assigned: frozenset[Part] | None = None) -> None:
        """Respond to the member's waiting heartbeat, if there is one.

        ``assigned`` is ``member.assigned`` if the caller has already computed it.
        """
        if member.held is not None:
            ticket, member.held = member.held, None
            self._responded.add(member.member_id)
            self._answer(ticket, self._assignment(member, assigned))

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        self.answers.append(Respond(ticket, outcome))

    def _schedule(self) -> None:
        self.due_ms = min((member.due_ms for member in self.members.values()), default=NEVER)


def _kept(member: Member, event: ConsumerHeartbeatRequested) -> Iterable[Part]:
    """Return the partitions that the member has not given up, according to the heartbeat of a Kafka client.

    The member gives up a partition when it omits it after a response without it. If it omits a partition of the last
    response, it may be about to take it. A new coordinator does not know the last response, which may have named any
    partition that the member owns.
    """
    if event.member_epoch == JOIN and event.owned is not None:
        return ()
    if event.owned is None or member.told is None:
        return member.owned
    named = {(topic_id, number) for topic_id, numbers in event.owned for number in numbers}
    told = member.told
    return [part for part in member.owned if part in told or part[1:] in named]
