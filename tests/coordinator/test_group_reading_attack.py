"""Tests of a whole group, by seed: no record is skipped and no commit goes back.

The members read a log and commit, coordinators crash, and deposed coordinators continue without knowing it.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from sparklog.coordinator.assignor import Part
from sparklog.coordinator.effects import Respond
from sparklog.coordinator.events import CoordinatorTicked
from sparklog.coordinator.group_events import CommitRequested, HeartbeatRequested
from sparklog.coordinator.group_member import topic_partitions
from sparklog.coordinator.groups import Groups
from sparklog.protocol.messages import JOIN, LEAVE, GroupOffset
from tests.coordinator.group_host import SESSION_MS, GroupsHost, SimMember, balance


class Reader(SimMember):
    """A member with positions: it fetches the committed offsets of its partitions, reads from there and commits."""

    positions: dict[Part, int]

    def begin(self, deposed: Groups | None) -> None:
        """Return the partitions without a position. ``deposed`` is a coordinator that the member asks instead of the
        present one."""
        new = self.owned - self.positions.keys()
        core = deposed or self.host.core
        named = [(part[0], part[2]) for part in new]
        if new and not core.refuses_fetch("g", self.member_id, self.epoch, named):
            known = core.offsets("g")
            for part in new:
                found = known.get((part[0], part[2]))
                self.positions[part] = found.offset if found is not None else 0

    def give_up(self) -> None:
        super().give_up()
        self.positions = {part: at for part, at in self.positions.items() if part in self.owned}


class Attack:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.host = GroupsHost({"t": self.random.randint(1, 8)})
        self.host.see()
        self.members: list[Reader] = []
        self.made = 0
        #: The end of the records that the group has read of each partition, from the beginning.
        self.read: dict[Part, int] = {}
        self.committed: dict[Part, int] = {}
        self.deposed: Groups | None = None
        self.delayed: list[object] = []

    def run(self, steps: int) -> None:
        acts = [
            (self._join, 6), (self._beat, 60), (self._begin, 40), (self._work, 40), (self._commit, 20),
            (self._give_up, 20), (self._lose_answer, 3), (self._die, 1), (self._leave, 1), (self._append, 80),
            (self._refuse, 1), (self._crash, 1), (self._time, 6), (self._late, 8),
        ]  # fmt: skip
        for _ in range(steps):
            self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
            self.check()

    def check(self) -> None:
        for (topic, number), found in self.host.core.offsets("g").items():
            part = (topic, found.topic_id, number)
            assert found.offset <= self.read.get(part, 0), (
                f"{part}: committed {found.offset}, but no member read to there"
            )
            assert found.offset >= self.committed.get(part, 0), f"{part}: a commit went back to {found.offset}"
            self.committed[part] = found.offset

    def pick(self) -> Reader | None:
        return self.random.choice(self.members) if self.members else None

    def _join(self) -> None:
        if len(self.members) < 5:
            self.made += 1
            member = Reader(self.host, f"m{self.made}", ("t",))
            member.positions = {}
            self.members.append(member)

    def _beat(self) -> None:
        member = self.pick()
        if member is None:
            return
        if member.ticket is None:
            member.send()
        else:
            member.receive()
        if member.refused:
            self.members.remove(member)

    def _begin(self) -> None:
        member = self.pick()
        if member is not None:
            member.begin(self.deposed if self.random.random() < 0.3 else None)

    def _work(self) -> None:
        """Read further: each record directly follows the records that the group has read, or is read again."""
        member = self.pick()
        if member is not None and member.positions:
            part = self.random.choice(sorted(member.positions))
            at = member.positions[part]
            assert at <= self.read.get(part, 0), f"{part}: {member.member_id} reads from {at} and skips records"
            member.positions[part] = at + self.random.randint(1, 5)
            self.read[part] = max(self.read.get(part, 0), member.positions[part])

    def _commit(self) -> None:
        member = self.pick()
        if member is not None and member.positions and member.epoch > JOIN:
            ticket = self.host.ticket()
            named = tuple(GroupOffset(part[0], part[2], at, part[1]) for part, at in sorted(member.positions.items()))
            event = CommitRequested(ticket, "g", named, None, member.member_id, member.epoch)
            if self.random.random() < 0.95:
                self.host.step(event)
            else:  # a request to an unknown place is in flight; a client sends nothing more before its response
                self.delayed.append(event)
                self.members.remove(member)

    def _give_up(self) -> None:
        member = self.pick()
        if member is not None:
            member.give_up()

    def _lose_answer(self) -> None:
        member = self.pick()
        if member is not None:
            member.ticket = None

    def _late(self) -> None:
        """Deliver an old request, here or to a deposed coordinator, whose appends never count."""
        member = self.pick()
        events: list[object] = list(self.delayed)
        if member is not None and len(member.sent) > 1:
            events.append(dataclasses.replace(self.random.choice(member.sent[-4:-1]), ticket=self.host.ticket()))
        if events:
            event = self.random.choice(events)
            if event in self.delayed:
                self.delayed.remove(event)
            if self.deposed is not None and self.random.random() < 0.5:
                self._at_deposed(event)
            else:
                self.host.step(event)

    def _at_deposed(self, event: object) -> None:
        assert self.deposed is not None
        for effect in self.deposed.step(event, self.host.now_ms):
            if isinstance(effect, Respond) and isinstance(event, CommitRequested) and effect.ticket == event.ticket:
                assert "Done" not in type(effect.outcome).__name__, "a deposed coordinator acknowledged a commit"

    def _die(self) -> None:
        member = self.pick()
        if member is not None:
            self.members.remove(member)

    def _leave(self) -> None:
        member = self.pick()
        if member is not None:
            member.send(LEAVE)
            self.members.remove(member)

    def _append(self) -> None:
        if self.host.appends:
            self.host.commit_one()

    def _refuse(self) -> None:
        if self.host.appends:
            self.host.refuse_one()

    def _crash(self) -> None:
        if self.random.random() < 0.7:
            self.deposed = self.host.core
        self.host.crash(keep=self.random.randint(0, len(self.host.appends)))
        for member in self.members:
            member.ticket = None

    def _time(self) -> None:
        self.host.now_ms += self.random.choice([1, 50, 500, 2500])
        self.host.step(CoordinatorTicked())


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(at, at + 50) for at in range(0, 200, 50)),
        pytest.param(range(200, 10_000), marks=[pytest.mark.long, pytest.mark.timeout(3 * 3600)]),
    ],
    ids=str,
)
def test_no_record_is_skipped_and_no_commit_goes_back(seeds: range) -> None:
    commits = 0
    for seed in seeds:
        attack = Attack(seed)
        attack.run(400)
        commits += sum(attack.committed.values())
    assert commits > 1000, "the seeds must read enough records to prove something"


def test_a_dead_member_is_removed_although_every_append_is_slow() -> None:
    """Appends follow each other without a gap, and each is so slow that the coordinator doubts its view of the
    members."""
    host = GroupsHost({"t": 2})
    host.see()
    alive, dead = SimMember(host, "m1"), SimMember(host, "m2")
    balance(host, [alive, dead])
    assert alive.owned and dead.owned
    for turn in range(4 * SESSION_MS // 300):
        part = min(alive.owned)
        named = (GroupOffset(part[0], part[2], turn, part[1]),)
        host.step(CommitRequested(host.ticket(), "g", named, None, alive.member_id, alive.epoch))
        if alive.ticket is None or alive.receive():
            alive.send()
        host.now_ms += 300
        host.step(CoordinatorTicked())
        if host.appends:
            host.commit_one()
    assert [report for report in host.reports if "m2" in report]
    assert not [report for report in host.reports if "m1" in report]


def test_a_coordinator_with_partial_metadata_revokes_no_partition() -> None:
    host = GroupsHost({"t": 6})
    host.see()
    members = [SimMember(host, "m1"), SimMember(host, "m2")]
    balance(host, members)
    before = [set(member.owned) for member in members]
    assert [len(owned) for owned in before] == [3, 3]
    host.views["t"] = host.views["t"]._replace(partitions=2)
    host.crash()
    for member in members:
        member.ticket = None
    balance(host, members)
    assert [set(member.assigned) for member in members] == before


def test_heartbeats_name_partitions_as_assigned() -> None:
    """A member does not receive a partition because it claims to own it."""
    host = GroupsHost({"t": 2})
    host.see()
    first = SimMember(host, "m1")
    balance(host, [first])
    assert len(first.owned) == 2
    claims = topic_partitions({("t", "id-t", 0), ("t", "id-t", 1), ("t", "other", 7), ("u", "", -1)})
    thief = SimMember(host, "m2")
    host.step(HeartbeatRequested(host.ticket(), "g", "m2", JOIN, 1, claims, thief.about))
    host.settle()
    found = host.describe()
    assert found is not None
    assert [len(one.owned) for one in found.members if one.member_id == "m2"] == [0]
