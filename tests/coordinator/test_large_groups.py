"""Groups of 100,000 partitions: no step of their coordinator takes long, whatever their members do.

What is measured is the processor time of this thread, without the garbage collector. Another thread computes the
targets, so that time does not count. On a busy machine, the longest step takes 0.09 s: a heartbeat by which a member
gives up half of the partitions. The other steps take 0.07 s there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import msgspec
import pytest

from sparklog.broker.transactions.coordinator_runtime import _encoded
from sparklog.coordinator.effects import Append, ComputeTarget
from sparklog.coordinator.group_events import TopicsGone
from tests.coordinator.group_host import GroupsHost, SimMember
from tests.tiers import marked_after

PARTITIONS = 100_000
LIMIT_S = 0.2


class TimedHost(GroupsHost):
    """A coordinator whose steps are measured, with the batches of what they append."""

    longest_s = 0.0

    def step(self, event: object) -> None:
        began_s = time.thread_time()
        effects = self.core.step(event, self.now_ms)
        for effect in effects:
            if isinstance(effect, Append):
                _encoded(effect.records, 0)
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)
        self.perform(effects)

    def check(self) -> None:
        """Check nothing: other tests do, with fewer partitions."""


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def rounds(host: TimedHost, members: list[SimMember], count: int = 8) -> None:
    for _ in range(count):
        for member in members:
            member.receive()
            member.give_up()
            if member.ticket is None:
                member.send()
        host.settle()
        host.wait(1000)


@pytest.mark.alone
@pytest.mark.parametrize("size", marked_after(1, [1000, 1, 10], pytest.mark.extended))
def test_no_step_of_a_large_group_takes_long(size: int) -> None:
    """Let members join, one more join, one leave, and a topic end. A member with all partitions takes the longest."""
    host = TimedHost({f"topic-{number:03}": PARTITIONS // 100 for number in range(100)})
    host.see()
    names = tuple(host.views)
    members = [SimMember(host, f"m{number:04}", names, session_timeout_ms=600_000) for number in range(size)]
    rounds(host, members)
    assert sum(len(member.owned) for member in members) == PARTITIONS
    members.append(SimMember(host, "zz", names, session_timeout_ms=600_000))
    rounds(host, members)
    assert len(members[-1].owned) == PARTITIONS // (size + 1)
    members.pop(0).leave()
    rounds(host, members)
    assert sum(len(member.owned) for member in members) == PARTITIONS
    del host.views[names[0]]
    host.step(TopicsGone(((names[0], f"id-{names[0]}"),)))
    rounds(host, members)
    assert sum(len(member.assigned) for member in members) == PARTITIONS - PARTITIONS // 100
    assert host.longest_s < LIMIT_S


def large(size: int, **about: str) -> tuple[GroupsHost, list[SimMember]]:
    """Return a group whose first target is being computed."""
    host = GroupsHost({"t": 20_000, "u": 10})
    host.see()
    names = (f"m{number}" for number in range(size))
    members = [SimMember(host, name, ("t", "u"), session_timeout_ms=600_000, **about) for name in names]
    for member in members:
        member.send()
    while host.appends:
        host.commit_one()
    assert any(isinstance(effect, ComputeTarget) for effect in host.later)
    return host, members


def test_a_group_is_reconciling_while_its_target_is_computed() -> None:
    host, _ = large(1)
    described = host.describe()
    assert described.state == "reconciling"
    host.settle()
    described = host.describe()
    assert described.state == "stable"


def test_a_member_that_leaves_during_the_computation_gets_nothing() -> None:
    host, (first,) = large(1)
    second = SimMember(host, "m1", ("t", "u"), session_timeout_ms=600_000)
    second.send()
    first.send(-1)
    while host.appends:
        host.commit_one()
    for _ in range(4):
        host.settle()
        host.wait(1000)
        second.beat()
    assert len(second.owned) == 20_010
    assert {part[0] for part in second.owned} == {"t", "u"}


def test_the_topic_that_ends_during_the_computation_is_not_assigned() -> None:
    host, (member,) = large(1)
    del host.views["u"]
    host.step(TopicsGone((("u", "id-u"),)))
    for _ in range(4):
        host.settle()
        host.wait(1000)
        member.beat()
    assert {part[0] for part in member.owned} == {"t"}
    assert {part[0] for part, _ in host.given} == {"t"}, "the late target was used"


def test_a_topic_that_ends_during_a_paused_assignment_stays_unassigned() -> None:
    host = GroupsHost({"t": 2000, "u": 10})
    host.see()
    member = SimMember(host, "m", ("t", "u"), session_timeout_ms=600_000)
    member.beat()
    assert len(member.owned) == 2010
    del host.views["u"]
    host.step(TopicsGone((("u", "id-u"),)))
    for _ in range(4):
        host.settle()
        host.wait(1000)
        member.beat()
    assert {part[0] for part in member.owned} == {"t"}


def test_a_late_target_of_a_deleted_group_is_dropped() -> None:
    host, (member,) = large(1)
    (late,) = host.later
    host.later.clear()
    member.send(-1)
    host.settle()
    assert host.delete() == "Done"
    again = SimMember(host, "m1", ("t",), session_timeout_ms=600_000)
    again.send()
    while host.appends:
        host.commit_one()
    host.later.insert(0, late)
    epoch = host.describe().group_epoch
    host.do_later()
    assert host.describe().group_epoch == epoch, "the late target was used"
    host.settle()
    host.wait(4000)
    again.receive()
    assert {part[0] for part in again.owned} == {"t"}


def test_a_static_member_replaced_during_the_computation_leaves_all_to_the_next() -> None:
    host, (first,) = large(1, instance_id="i")
    second = SimMember(host, "m1", ("t", "u"), session_timeout_ms=600_000, instance_id="i")
    second.send()
    for _ in range(4):
        host.settle()
        host.wait(1000)
        second.beat()
    assert len(second.owned) == 20_010
    assert first.receive() and first.refused == "FENCED_INSTANCE_ID"


def test_a_topic_unsubscribed_during_the_computation_is_not_assigned() -> None:
    host, (member,) = large(1)
    member.about = msgspec.structs.replace(member.about, topics=("t",))
    member.send()
    for _ in range(4):
        host.settle()
        host.wait(1000)
        member.beat()
    assert len(member.owned) == 20_000
    assert {part[0] for part, _ in host.given} == {"t"}
