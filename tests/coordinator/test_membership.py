"""Tests of a group's members: one owner at a time, few moves, and no effect before its record is in the log."""

from __future__ import annotations

import dataclasses
import time

import pytest

from sparklog.coordinator import groups, membership
from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.effects import Assigned
from sparklog.coordinator.events import CoordinatorTicked
from sparklog.coordinator.group_events import CommitRequested, HeartbeatRequested, TopicsGone
from sparklog.coordinator.group_records import decode_group_record
from sparklog.protocol.messages import GroupOffset
from tests.coordinator.group_host import SESSION_MS, Chaos, GroupsHost, SimMember, balance, code, group, parts


def loads(members: list[SimMember]) -> list[int]:
    return sorted(len(member.owned) for member in members)


def test_members_join_and_leave_and_few_partitions_move() -> None:
    host = GroupsHost({"t": 10})
    members = group(host, 3)
    assert loads(members) == [3, 3, 4]
    before = {member.member_id: set(member.owned) for member in members}
    members[0].leave()
    balance(host, members[1:])
    assert loads(members[1:]) == [5, 5]
    assert all(before[member.member_id] <= member.owned for member in members[1:])
    last = SimMember(host, "m3")
    balance(host, [*members[1:], last])
    assert loads([*members[1:], last]) == [3, 3, 4]
    described = host.describe()
    assert described.state == "stable"
    assert [len(found.owned[0].partitions) for found in described.members] == [
        len(m.owned) for m in [*members[1:], last]
    ]


def test_a_partition_is_assigned_only_after_it_was_given_up() -> None:
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1)
    second = SimMember(host, "m9")
    first.send()
    second.send()
    host.settle()
    assert second.ticket is not None and not second.receive(), "no partition is free, so its heartbeat must wait"
    assert first.receive()
    assert (first.owned, len(first.assigned)) == (parts(0, 1, 2, 3), 2)
    host.wait(1000)
    first.send()
    host.settle()
    assert not second.receive(), "no partition was given up yet"
    first.receive()
    first.give_up()
    first.send()
    host.settle()
    assert second.receive(), "the response must come without another heartbeat"
    assert second.owned == parts(0, 1, 2, 3) - first.owned
    assert second.epoch == host.describe().group_epoch


def test_a_heartbeat_without_changes_is_held_and_answered_in_time() -> None:
    host = GroupsHost({"t": 4})
    (member,) = group(host, 1, heartbeat_interval_ms=1500)
    member.receive()
    appended = len(host.log)
    member.send()
    assert not host.appends
    host.wait(1300)
    assert not member.receive()
    host.wait(300)
    assert member.receive()
    earlier, later = member.send(), member.send()
    assert isinstance(host.answers[earlier], Assigned), "the next heartbeat must end the wait"
    assert later not in host.answers
    assert len(host.log) == appended, "a heartbeat without changes must write nothing"


def test_a_silent_member_is_removed_and_others_take_over() -> None:
    host = GroupsHost({"t": 6})
    members = group(host, 3)
    dead, alive = members[0], members[1:]
    began = host.now_ms
    lost = set(dead.owned)
    while loads(alive) != [3, 3]:
        for member in alive:
            member.beat()
        host.wait(50)
        assert host.now_ms < began + SESSION_MS + 1000
    assert host.now_ms >= began + SESSION_MS - 3000
    assert "was silent" in host.reports[-1]
    assert host.commit(dead, dict.fromkeys(lost, 1)) == "UNKNOWN_MEMBER_ID"
    dead.ticket = None
    dead.beat()
    assert dead.refused == "UNKNOWN_MEMBER_ID"


def test_a_member_that_does_not_revoke_in_time_is_removed() -> None:
    host = GroupsHost({"t": 4})
    (slow,) = group(host, 1, rebalance_timeout_ms=10_000, session_timeout_ms=30_000)
    other = SimMember(host, "m9")
    for _ in range(19):
        slow.ticket = None
        slow.send()
        other.beat()
        host.wait(500)
    assert not other.owned
    for _ in range(4):
        if slow.ticket is None:
            slow.send()
        slow.receive()
        other.beat()
        host.wait(500)
    assert other.owned == parts(0, 1, 2, 3)
    assert slow.refused == "UNKNOWN_MEMBER_ID" or (
        slow.send() and code(host.answers[host.tickets]) == "UNKNOWN_MEMBER_ID"
    )
    assert "did not give" in host.reports[-1]


def test_commits_are_fenced_by_partition_and_epoch() -> None:
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1)
    assert host.commit(first, dict.fromkeys(parts(0, 1, 2, 3), 5)) == "Done"
    old_epoch = first.epoch
    second = SimMember(host, "m9")
    balance(host, [first, second])
    moved = dict.fromkeys(second.owned, 9)
    assert host.commit(first, moved) == "STALE_MEMBER_EPOCH", "the member gave the partitions up"
    assert host.commit(second, moved, epoch=old_epoch) == "STALE_MEMBER_EPOCH", (
        "the member did not own the partitions in that epoch"
    )
    assert host.commit(second, moved) == "Done"
    assert host.commit(first, dict.fromkeys(first.owned, 7), epoch=old_epoch) == "Done", (
        "the member has owned these partitions since then"
    )
    assert host.commit(None, {("t", "id-t", 0): 0}) == "NON_EMPTY_GROUP"
    ticket = host.ticket()
    handed = CommitRequested(ticket, "g", (GroupOffset("t", 0, 42, "id-t"),), ("tx", 1))
    host.step(handed)
    host.settle()
    assert code(host.answers[ticket]) == "Done", "a transaction's decision must be accepted"
    for member in (first, second):
        member.leave()
    assert host.commit(None, {("t", "id-t", 0): 0}) == "Done"


def test_the_next_owner_sees_commits_made_before_revocation() -> None:
    host = GroupsHost({"t": 2})
    (first,) = group(host, 1)
    second = SimMember(host, "m9")
    second.send()
    first.send()
    host.settle()
    first.receive()
    given = first.owned - first.assigned
    ticket = host.ticket()
    offsets = tuple(GroupOffset(part[0], part[2], 77, part[1]) for part in given)
    host.step(CommitRequested(ticket, "g", offsets, None, first.member_id, first.epoch))
    first.give_up()
    first.send()  # the commit is not in the log yet
    host.settle()
    assert code(host.answers[ticket]) == "Done"
    assert second.receive() and second.owned == given
    (place,) = [(part[0], part[2]) for part in given]
    assert host.core.offsets("g")[place].offset == 77
    refuses = host.core.refuses_fetch
    assert refuses("g", second.member_id, second.epoch, [place]) == ""
    assert "is not member" in refuses("g", first.member_id, first.epoch, [place])
    assert "has no member" in refuses("g", second.member_id, second.epoch + 1, [place])


def test_no_assignment_is_sent_before_it_is_in_the_log() -> None:
    host = GroupsHost({"t": 2})
    host.see()
    member = SimMember(host, "m")
    member.send()
    assert not member.receive() and len(host.appends) == 1
    host.refuse_one()
    assert member.receive() and member.refused == "COORDINATOR_NOT_AVAILABLE"
    assert next(host.core.describe("g"), None) is None
    member.refused = ""
    balance(host, [member])
    assert member.owned == parts(0, 1)


def test_a_refused_append_is_undone_and_retried_later() -> None:
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1)
    second = SimMember(host, "m9")
    second.send()
    host.refuse_one()
    assert second.receive() and second.refused
    assert first.owned == parts(0, 1, 2, 3)
    second.refused = ""
    began = host.now_ms
    balance(host, [first, second])
    assert loads([first, second]) == [0, 4], "an immediate retry would be refused repeatedly"
    host.wait(1000)
    balance(host, [first, second])
    assert loads([first, second]) == [2, 2]
    assert host.now_ms - began < 5000


@pytest.mark.parametrize("keep", [0, 1])
def test_another_coordinator_continues_with_the_same_members(keep: int) -> None:
    host = GroupsHost({"t": 6})
    members = group(host, 2)
    owned = [set(member.owned) for member in members]
    epoch = members[0].epoch
    third = SimMember(host, "m9")
    third.send()
    host.crash(keep=keep)
    for member in [*members, third]:
        member.ticket = None
    if not keep:
        third.beat()
        host.wait(50)
        balance(host, members)
    balance(host, [*members, third])
    assert loads([*members, third]) == [2, 2, 2]
    assert all(now.owned <= before for now, before in zip(members, owned, strict=True))
    assert host.describe().group_epoch > epoch + 1


def test_a_partly_replicated_append_leaves_one_owner() -> None:
    """The next leader's log may have the first batches of a large append and not the others."""
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1, rebalance_timeout_ms=60_000)
    second = SimMember(host, "a")  # written first
    second.send()
    first.send()
    host.settle()
    first.receive()
    first.give_up()
    first.send()
    (append,) = host.appends
    host.appends = []
    gift = append.records[0]
    assert decode_group_record(gift)[0].member_id == "a"  # type: ignore[union-attr]
    host.log.append(gift)
    host.core = host._fresh()
    host.see()
    host.settle()
    for member in (first, second):
        member.ticket = None
    balance(host, [first, second])
    assert loads([first, second]) == [2, 2]
    assert not first.owned & second.owned


def test_a_new_coordinator_without_topics_revokes_no_partition() -> None:
    host = GroupsHost({"t": 4})
    members = group(host, 2)
    views, host.views = host.views, {}
    host.crash()
    for member in members:
        member.ticket = None
    balance(host, members)
    assert loads(members) == [2, 2]
    host.views = views
    host.see()
    balance(host, members)
    assert loads(members) == [2, 2]


def test_topics_appear_grow_and_disappear() -> None:
    host = GroupsHost({"t": 2})
    members = group(host, 2, topics=("t", "later"))
    assert loads(members) == [1, 1]
    host.views["later"] = TopicView("id-later", 2)
    host.see()
    balance(host, members)
    assert loads(members) == [2, 2]
    host.views["t"] = TopicView("id-t", 4)
    host.see()
    balance(host, members)
    assert loads(members) == [3, 3]
    appended = len(host.log)
    host.views["other"] = TopicView("id-other", 9)
    host.see()
    host.settle()
    assert len(host.log) == appended, "a topic without a subscriber"
    del host.views["t"]
    host.step(TopicsGone((("t", "id-t"),)))
    balance(host, members)
    assert sorted(member.owned for member in members) == sorted([parts(0, topic="later"), parts(1, topic="later")])
    host.views["later"] = TopicView("id-again", 2)
    host.see()
    balance(host, members)
    assert {part[1] for member in members for part in member.owned} == {"id-again"}


@pytest.mark.alone
def test_patterns_match_existing_and_later_topics() -> None:
    host = GroupsHost({"orders-eu": 2, "orders": 1, "__orders-x": 1})
    (member,) = group(host, 1, topics=(), pattern="orders-.*")
    assert {part[0] for part in member.owned} == {"orders-eu"}
    host.views["orders-us"] = TopicView("id", 1)
    host.see()
    balance(host, [member])
    assert {part[0] for part in member.owned} == {"orders-eu", "orders-us"}
    wrong = SimMember(host, "w", (), pattern="orders-(")
    wrong.beat()
    assert wrong.refused == "INVALID_REGULAR_EXPRESSION"
    host.views["a" * 200] = TopicView("long", 1)
    host.see()
    began = time.thread_time()
    slow = SimMember(host, "s", (), pattern="(a+)+b" * 20)
    balance(host, [member, slow])
    assert time.thread_time() - began < 5, "no pattern may block the coordinator"


def test_a_static_member_returns_to_its_partitions() -> None:
    host = GroupsHost({"t": 6})
    members = [SimMember(host, f"m{number}", instance_id=f"i{number}") for number in range(3)]
    host.see()
    balance(host, members)
    had, others = set(members[0].owned), [set(member.owned) for member in members[1:]]
    members[0].leave(static=True)
    host.wait(2000)
    for member in members[1:]:
        member.beat()
    again = SimMember(host, "m0-again", instance_id="i0")
    balance(host, [again, *members[1:]])
    assert again.owned == had
    assert [member.owned for member in members[1:]] == others
    killed, again.ticket = again, None
    third = SimMember(host, "m0-third", instance_id="i0")
    balance(host, [third, *members[1:]])
    assert third.owned == had, "a member with the same id must take over, whether the first one left or not"
    assert host.commit(killed, dict.fromkeys(had, 1)) == "UNKNOWN_MEMBER_ID"
    killed.beat()
    assert killed.refused == "FENCED_INSTANCE_ID"
    host.wait(SESSION_MS + 100)
    described = host.describe()
    assert not described.members, "a static member must expire as well"


def test_late_heartbeats_and_lost_responses_do_no_harm() -> None:
    host = GroupsHost({"t": 2})
    (first,) = group(host, 1)
    old = HeartbeatRequested(host.ticket(), "g", first.member_id, first.epoch, first.sequence - 1, (), first.about)
    host.step(old)
    host.settle()
    assert isinstance(host.answers[old.ticket], Assigned)
    second = SimMember(host, "m9")
    second.beat()
    assert not second.owned, "a late heartbeat without partitions must give none up"
    joined = SimMember(host, "m10", ("u",))
    joined.send()
    host.settle()
    joined.ticket = None
    joined.send()
    host.settle()
    assert sum(found.member_id == "m10" for found in host.describe().members) == 1
    ahead = SimMember(host, first.member_id)
    ahead.sequence, ahead.epoch = 1000, 99
    ahead.beat()
    assert ahead.refused == "FENCED_MEMBER_EPOCH"


def test_a_paused_coordinator_removes_no_member() -> None:
    host = GroupsHost({"t": 2})
    members = group(host, 2)
    host.now_ms += 20 * SESSION_MS
    host.step(CoordinatorTicked())
    balance(host, members)
    assert not host.reports
    assert host.describe().state == "stable"
    host.wait(SESSION_MS + 1)
    assert len(host.reports) == 2, "but a member that stays silent must be removed"


def test_a_pause_counts_once_whatever_events_follow_it() -> None:
    host = GroupsHost({"t": 2})
    alive, _ = members = group(host, 2)
    balance(host, members)
    host.now_ms += SESSION_MS
    for _ in range(10):
        host.see()
    for _ in range(10):
        alive.beat()
        host.wait(SESSION_MS // 4)
        alive.receive()
    assert len(host.reports) == 1, "the silent member must be removed"


def test_a_postponed_target_extends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    host = GroupsHost({"t": 6})
    members = group(host, 3)

    def rounds(count: int, *senders: SimMember) -> None:
        for _ in range(count):
            for member in senders:
                member.beat()
            host.wait(SESSION_MS // 4)
            for member in senders:
                member.receive()

    rounds(40, *members)
    assert loads(members) == [2, 2, 2]
    monkeypatch.setattr(membership, "PARTS_AT_ONCE", 2)
    alive, leaves, _ = members
    leaves.leave()
    rounds(6, alive)
    assert len(host.reports) == 1, "the silent member must be removed"
    rounds(4, alive)
    assert loads([alive]) == [6]


def test_a_slow_append_removes_no_member() -> None:
    host = GroupsHost({"t": 2})
    members = group(host, 2)
    for member in members:
        member.beat()
    late = SimMember(host, "m9")
    late.send()
    assert host.appends
    for _ in range(3 * SESSION_MS // 100):
        host.now_ms += 100
        host.step(CoordinatorTicked())
    host.commit_one()
    balance(host, [*members, late])
    assert not host.reports


def test_a_heartbeat_of_an_earlier_life_revives_no_member() -> None:
    host = GroupsHost({"t": 2})
    (ghost,) = group(host, 1)
    owned, first = set(ghost.owned), ghost.sent[0]
    host.wait(SESSION_MS + 4000)
    assert host.reports
    host.step(dataclasses.replace(first, ticket=host.ticket()))
    host.settle()
    assert host.describe().members, "the member has joined"
    ghost.ticket = None
    ghost.beat()
    assert ghost.refused == "UNKNOWN_MEMBER_ID", "a removed member that continues must receive an error"
    assert host.commit(ghost, dict.fromkeys(owned, 1)) == "STALE_MEMBER_EPOCH"


@pytest.mark.parametrize(
    "seeds",
    [
        range(50),
        pytest.param(range(50, 200), marks=pytest.mark.extended),
        pytest.param(range(200, 10_000), marks=[pytest.mark.long, pytest.mark.timeout(3 * 3600)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_every_partition_has_one_owner_and_balance_returns(
    seeds: range, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Balance the groups at once, or with targets of another thread that are assigned in small parts."""
    if in_parts:
        monkeypatch.setattr(membership, "COMPUTED_AT_ONCE", 0)
        monkeypatch.setattr(membership, "PARTS_AT_ONCE", 2)
        monkeypatch.setattr(groups, "WORK_AT_ONCE", 3)
    for seed in seeds:
        chaos = Chaos(seed)
        chaos.run(250)
        host, members = chaos.host, chaos.members
        host.settle()
        host.wait(SESSION_MS // 2)
        for _ in range(60):
            for member in members:
                member.ticket = None if member.ticket not in host.answers else member.ticket
                member.beat()
            host.wait(200)
            for member in list(members):
                member.receive()
                if member.refused:
                    members.remove(member)
            chaos._check_clients()
        owned = [part for member in members for part in member.owned]
        assert len(owned) == len(set(owned)), f"seed {seed}"
        read = {name for member in members for name in member.about.topics}
        expected = {(name, f"id-{name}", n) for name in read for n in range(host.views[name].partitions)}
        assert set(owned) == expected, f"seed {seed}"


@pytest.mark.alone
def test_a_thousand_members_join_and_one_dies() -> None:
    """The test measures the processor time of everything that a coordinator does after one death, for ten thousand
    partitions."""
    host = GroupsHost({f"t{number}": 100 for number in range(100)})
    host.see()
    names = tuple(host.views)
    members = [SimMember(host, f"m{number:04}", names, session_timeout_ms=600_000) for number in range(1000)]
    for member in members:
        member.send()
    for _ in range(6):
        host.settle()
        host.wait(300)
        for member in members:
            member.receive()
            member.give_up()
            if member.ticket is None:
                member.send()
    assert {len(member.owned) for member in members} == {10}
    dead, alive = members[500], members[501:] + members[:500]
    before = {member.member_id: set(member.owned) for member in alive}
    host.now_ms += 1000
    began = time.thread_time()
    dead.send(-1)
    assert time.thread_time() - began < 0.25
    host.settle()
    host.wait(300)
    for member in alive:
        member.receive()
    assert sum(len(member.owned) for member in alive) == 10_000
    moved = set().union(*(member.owned - before[member.member_id] for member in alive))
    assert moved == dead.owned, "no other partition may move"
