"""Tests of the end of a group: by deletion, or by expiry after its last member has left."""

from __future__ import annotations

from sparklog.coordinator.group_events import CommitRequested, DeleteRequested
from sparklog.coordinator.group_state import GroupSettings
from sparklog.protocol.messages import LEAVE, GroupOffset
from tests.coordinator.group_host import GroupsHost, SimMember, balance, code, group


def test_a_leave_just_before_the_groups_deletion_is_answered() -> None:
    host = GroupsHost({"t": 2})
    (member,) = group(host, 1)
    (part, *_) = member.owned
    offset = GroupOffset(part[0], part[2], 5, part[1])
    host.step(CommitRequested(host.ticket(), "g", (offset,), None, member.member_id, member.epoch))
    leaving, deleting = member.send(LEAVE), host.ticket()
    host.step(DeleteRequested(deleting, "g"))  # both wait until the commit is in the log
    host.settle()
    assert (code(host.answers[deleting]), code(host.answers[leaving])) == ("Done", "Assigned")
    assert host.core.names() == []


def test_groups_with_members_are_neither_deleted_nor_expired() -> None:
    host = GroupsHost({"t": 2}, GroupSettings(retention_ms=60_000, max_size=2))
    members = group(host, 2)
    third = SimMember(host, "m9")
    third.beat()
    assert third.refused == "GROUP_MAX_SIZE_REACHED"
    for _ in range(30):
        for member in members:
            member.beat()
        host.wait(2500)
        for member in members:
            member.receive()
    assert host.core.names() == ["g"]
    assert host.delete() == "NON_EMPTY_GROUP"
    host.commit(members[0], dict.fromkeys(members[0].owned, 3))
    for member in members:
        member.leave()
    assert host.describe().state == "empty"
    assert host.delete() == "Done"
    assert (host.core.names(), host.core.live_records, host.delete()) == ([], 0, "GROUP_ID_NOT_FOUND")
    balance(host, [back := SimMember(host, "back")])
    assert len(back.owned) == 2
    back.leave()
    host.wait(130_000)
    assert host.core.names() == []


def test_offset_retention_starts_when_the_last_member_leaves() -> None:
    host = GroupsHost({"t": 2}, GroupSettings(retention_ms=200_000))
    (member,) = group(host, 1)
    host.commit(member, dict.fromkeys(member.owned, 7))
    for _ in range(150):
        member.beat()
        host.wait(2000)
    member.receive()
    member.send(LEAVE)
    host.refuse_one()
    host.now_ms += 100
    member.leave()
    assert host.describe().state == "empty"
    host.wait(150_000)
    assert [found.offset for found in host.core.offsets("g").values()] == [7, 7]
    host.wait(130_000)
    assert host.core.names() == []
