"""A group coordinator with its log in a list, and members that behave as clients do, or worse."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterable
from typing import Any

from sparklog.coordinator.assignor import Part, TopicView
from sparklog.coordinator.effects import (
    Append,
    Assigned,
    ComputeTarget,
    CoordinatorReport,
    Outcome,
    Refused,
    Respond,
    Resume,
    Rewritten,
)
from sparklog.coordinator.events import Appended, AppendRefused, CoordinatorTicked
from sparklog.coordinator.group_events import (
    CommitRequested,
    DeleteRequested,
    HeartbeatRequested,
    Resumed,
    TargetComputed,
    TopicsSeen,
)
from sparklog.coordinator.group_member import owned_parts, topic_partitions
from sparklog.coordinator.group_records import About, MemberKey, MemberState, decode_group_record
from sparklog.coordinator.group_state import GroupSettings
from sparklog.coordinator.groups import Groups
from sparklog.coordinator.log_records import Record
from sparklog.protocol.messages import JOIN, LEAVE, LEAVE_STATIC, DescribedGroup, GroupOffset

SESSION_MS = 6000


class GroupsHost:
    """A host whose appends are committed when the test calls it. It records each partition given to a member, by
    epoch."""

    def __init__(self, topics: dict[str, int], settings: GroupSettings | None = None) -> None:
        self.settings = settings
        self.now_ms = 1_000_000
        self.log: list[Record] = []
        self.appends: list[Append] = []
        #: What another thread computes, and what waits for the next turn of the loop.
        self.later: list[ComputeTarget | Resume] = []
        self.answers: dict[int, Outcome] = {}
        self.reports: list[str] = []
        self.views = {name: TopicView(f"id-{name}", count) for name, count in topics.items()}
        self.tickets = 0
        #: the member that received each (partition, epoch)
        self.given: dict[tuple[Part, int], str] = {}
        self.core = self._fresh()

    def _fresh(self) -> Groups:
        core = Groups(self.settings)
        core.load(self.log)
        core.start(self.now_ms)
        return core

    def crash(self, *, keep: int = 0) -> None:
        """Start another coordinator. Its log has the first ``keep`` appends in flight. Open tickets never get a
        response."""
        for append in self.appends[:keep]:
            self._write(append)
        self.appends, self.later = [], []
        self.core = self._fresh()
        self.see()

    def see(self) -> None:
        self.step(TopicsSeen(dict(self.views)))

    def step(self, event: object) -> None:
        self.perform(self.core.step(event, self.now_ms))

    def perform(self, effects: Iterable[object]) -> None:
        for effect in effects:
            match effect:
                case Append():
                    self.appends.append(effect)
                case Respond():
                    assert effect.ticket not in self.answers, "a second response to one request"
                    self.answers[effect.ticket] = effect.outcome
                case CoordinatorReport():
                    self.reports.append(effect.detail)
                case ComputeTarget() | Resume():
                    self.later.append(effect)
                case _:
                    assert isinstance(effect, Rewritten)

    def _write(self, append: Append) -> None:
        self.log += append.records
        self.check()

    def check(self) -> None:
        """Check the log: each partition has one owner, and one owner in each epoch.

        Also check that each member has the same partitions by topic.
        """
        for group_now in self.core._active.values():
            for member in group_now.membership.members.values():
                assert dict(owned_parts(member.state().owned)) == member.owned
        members: dict[tuple[str, str], MemberState] = {}
        for record in self.log:
            key, value = decode_group_record(record)
            if isinstance(key, MemberKey):
                members.pop((key.group, key.member_id), None)
                if isinstance(value, MemberState):
                    members[key.group, key.member_id] = value
        owners: dict[tuple[str, Part], str] = {}
        for (group, member_id), state in members.items():
            for found in state.owned:
                for number, epoch in zip(found.partitions, found.epochs, strict=True):
                    part = (found.topic, found.topic_id, number)
                    assert owners.setdefault((group, part), member_id) == member_id, f"{part} has two owners"
                    given = self.given.setdefault((part, epoch), member_id)
                    assert given == member_id, f"{part} was given to {given} and {member_id} in epoch {epoch}"

    def commit_one(self) -> None:
        append = self.appends.pop(0)
        self._write(append)
        self.step(Appended(append.append))

    def refuse_one(self) -> None:
        self.step(AppendRefused(self.appends.pop(0).append, "too few in-sync replicas"))

    def settle(self) -> None:
        while self.appends or self.later:
            while self.appends:
                self.commit_one()
            if self.later:
                self.do_later()

    def do_later(self, number: int = 0) -> None:
        effect = self.later.pop(number)
        if isinstance(effect, Resume):
            self.step(Resumed(effect.group))
        else:
            self.step(TargetComputed(effect.group, effect.inputs, effect.inputs.compute()))

    def wait(self, ms: int) -> None:
        """Advance the time tick by tick, as the core requests."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            due_ms = self.core.deadline_ms
            self.now_ms = min(end_ms, max(self.now_ms + 1, due_ms if due_ms is not None else end_ms))
            self.step(CoordinatorTicked())
            self.settle()

    def describe(self) -> DescribedGroup:
        parts = self.core.describe("g")
        try:
            while True:
                next(parts)
        except StopIteration as described:
            assert isinstance(described.value, DescribedGroup)
            return described.value

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def commit(self, member: SimMember | None, offsets: dict[Part, int], *, epoch: int | None = None) -> str:
        ticket = self.ticket()
        named = tuple(GroupOffset(part[0], part[2], offset, part[1]) for part, offset in offsets.items())
        who = ("", -1) if member is None else (member.member_id, member.epoch if epoch is None else epoch)
        self.step(CommitRequested(ticket, "g", named, None, *who))
        self.settle()
        return code(self.answers[ticket])

    def delete(self, group: str = "g") -> str:
        ticket = self.ticket()
        self.step(DeleteRequested(ticket, group))
        self.settle()
        self.given.clear()  # a recreated group starts with new epochs
        return code(self.answers[ticket])


def code(outcome: Outcome) -> str:
    return outcome.code.name if isinstance(outcome, Refused) else type(outcome).__name__


class SimMember:
    """A member as a client implements it: it accepts its assignment immediately, and revokes partitions when
    ``give_up`` is called."""

    def __init__(self, host: GroupsHost, member_id: str, topics: Iterable[str] = ("t",), **about: Any) -> None:
        self.host = host
        self.member_id = member_id
        named: dict[str, Any] = {"topics": tuple(topics), "session_timeout_ms": SESSION_MS, **about}
        self.about = About(**named)
        self.epoch = JOIN
        self.owned: set[Part] = set()
        self.assigned: set[Part] = set()
        self.sequence = 0
        self.ticket: int | None = None
        self.refused = ""
        self.sent: list[HeartbeatRequested] = []

    def send(self, epoch: int | None = None) -> int:
        self.sequence += 1
        self.ticket = self.host.ticket()
        named = topic_partitions(self.owned)
        epoch = self.epoch if epoch is None else epoch
        event = HeartbeatRequested(self.ticket, "g", self.member_id, epoch, self.sequence, named, self.about)
        self.sent.append(event)
        self.host.step(event)
        return event.ticket

    def receive(self) -> bool:
        """Process the response to the last heartbeat, if there is one."""
        outcome = self.host.answers.get(self.ticket) if self.ticket is not None else None
        if outcome is None:
            return False
        self.ticket = None
        if isinstance(outcome, Refused):
            self.refused = outcome.code.name
            return True
        assert isinstance(outcome, Assigned)
        self.epoch = outcome.member_epoch
        self.assigned = {
            (found.topic, found.topic_id, number) for found in outcome.assigned for number in found.partitions
        }
        self.owned |= self.assigned
        return True

    def give_up(self) -> None:
        self.owned &= self.assigned

    def beat(self) -> None:
        """Run a whole turn: send the state, receive the target, apply it."""
        if self.ticket is None:
            self.send()
            self.host.settle()
        self.receive()
        self.give_up()

    def leave(self, *, static: bool = False) -> None:
        self.send(LEAVE_STATIC if static else LEAVE)
        self.host.settle()
        self.receive()
        self.owned.clear()


def balance(host: GroupsHost, members: Iterable[SimMember], turns: int = 40) -> None:
    """Run turns until nothing changes any more."""
    members = list(members)
    quiet = 0
    for _ in range(turns):
        before = [(member.epoch, set(member.owned), set(member.assigned)) for member in members]
        for member in members:
            member.beat()
        host.wait(20)
        for member in members:
            member.receive()
        same = before == [(member.epoch, member.owned, member.assigned) for member in members]
        quiet = quiet + 1 if same else 0
        if quiet == 3:
            return


class Chaos:
    """Members that join, leave, die, hang and lose responses, and a coordinator that crashes, by seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.host = GroupsHost({"t": self.random.randint(1, 12), "u": self.random.randint(0, 5)})
        self.host.see()
        self.members: list[SimMember] = []
        self.made = 0

    def run(self, steps: int) -> None:
        acts = [
            (self._join, 3), (self._beat, 30), (self._give_up, 20), (self._lose_answer, 3), (self._die, 1),
            (self._leave, 1), (self._commit_append, 30), (self._refuse, 1), (self._crash, 1), (self._time, 6),
            (self._grow, 1), (self._late_heartbeat, 3), (self._do_later, 10),
        ]  # fmt: skip
        for _ in range(steps):
            act = self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
            act()
            self._check_clients()

    def _check_clients(self) -> None:
        """Check that no two members that the coordinator has not removed own the same partition, even from an
        earlier life."""
        group = self.host.core._active.get("g")
        known = {name: found.joined for name, found in group.membership.members.items()} if group else {}
        held: dict[Part, str] = {}
        for member in self.members:
            if member.epoch >= known.get(member.member_id, sys.maxsize) and not member.refused:
                for part in member.owned:
                    other = held.setdefault(part, member.member_id)
                    assert other == member.member_id, f"{other} and {member.member_id} both have {part}"

    def _pick(self) -> SimMember | None:
        return self.random.choice(self.members) if self.members else None

    def _join(self) -> None:
        if len(self.members) < 6:
            self.made += 1
            topics = self.random.choice([("t",), ("t", "u"), ("t", "u")])
            rack = self.random.choice(["", "a", "b"])
            self.members.append(SimMember(self.host, f"m{self.made}", topics, rack=rack))

    def _beat(self) -> None:
        member = self._pick()
        if member is None:
            return
        if member.ticket is None:
            member.send()
        else:
            member.receive()
        if member.refused:
            self.members.remove(member)

    def _give_up(self) -> None:
        member = self._pick()
        if member is not None:
            member.give_up()

    def _lose_answer(self) -> None:
        member = self._pick()
        if member is not None:
            member.ticket = None

    def _late_heartbeat(self) -> None:
        """Deliver a request that was sent before the last one, perhaps to another coordinator."""
        member = self._pick()
        if member is not None and len(member.sent) > 1:
            late = self.random.choice(member.sent[-4:-1])
            self.host.step(dataclasses.replace(late, ticket=self.host.ticket()))

    def _die(self) -> None:
        member = self._pick()
        if member is not None:
            self.members.remove(member)

    def _leave(self) -> None:
        member = self._pick()
        if member is not None:
            member.send(LEAVE)
            self.members.remove(member)

    def _commit_append(self) -> None:
        if self.host.appends:
            self.host.commit_one()

    def _do_later(self) -> None:
        if self.host.later:
            self.host.do_later(self.random.randrange(len(self.host.later)))

    def _refuse(self) -> None:
        if self.host.appends:
            self.host.refuse_one()

    def _crash(self) -> None:
        self.host.crash(keep=self.random.randint(0, len(self.host.appends)))
        for member in self.members:
            member.ticket = None

    def _time(self) -> None:
        self.host.now_ms += self.random.choice([1, 50, 500, 2500])
        self.host.step(CoordinatorTicked())

    def _grow(self) -> None:
        view = self.host.views["u"]
        self.host.views["u"] = view._replace(partitions=view.partitions + 1)
        self.host.see()


def parts(*numbers: int, topic: str = "t") -> set[Part]:
    """Return partitions of a topic."""
    return {(topic, f"id-{topic}", number) for number in numbers}


def group(host: GroupsHost, size: int, **about: Any) -> list[SimMember]:
    """Return this number of members, which share the partitions evenly."""
    members = [SimMember(host, f"m{number}", **about) for number in range(size)]
    host.see()
    balance(host, members)
    return members
