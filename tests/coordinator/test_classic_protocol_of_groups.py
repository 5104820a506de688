"""Tests of classic groups in the coordinator: what the log has, the change of a group's protocol, and its offsets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparklog.coordinator.classic_events import (
    BeatRequested,
    Joined,
    JoinRequested,
    LeaveRequested,
    LeavingMember,
    Left,
    MemberIdGiven,
    Synced,
    SyncRequested,
)
from sparklog.coordinator.classic_group import GIVEN_ID_BYTES
from sparklog.coordinator.consumer_protocol import assigned_partitions, subscribed_topics
from sparklog.coordinator.effects import OffsetsDeleted, Outcome, Refused
from sparklog.coordinator.events import RewriteRequested
from sparklog.coordinator.group_events import CommitRequested, OffsetsDeleteRequested
from sparklog.coordinator.group_offsets import GroupSettings
from sparklog.coordinator.group_records import EpochKey, GroupEpoch, decode_group_record
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TopicPartitions
from tests.coordinator.group_host import GroupsHost, SimMember, balance, code

#: A subscription to topic t and an assignment of t-0 and t-2, as Kafka's consumers write them.
SUBSCRIPTION = b"\x00\x01\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff\x00\x00\x00\x00"
ASSIGNMENT = b"\x00\x01\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x02\xff\xff\xff\xff"
SETTINGS = GroupSettings(initial_delay_ms=0, retention_ms=3_600_000)


class Host(GroupsHost):
    """A coordinator with requests of classic members."""

    def __init__(self) -> None:
        super().__init__({"t": 4, "u": 1}, SETTINGS)
        self.see()

    def ask(self, kind: Any, *args: Any, **named: Any) -> Outcome | None:
        ticket = self.ticket()
        self.step(kind(ticket, "g", *args, **named))
        self.settle()
        return self.answers.get(ticket)

    def join(self, new_id: str, member_id: str = "", **named: Any) -> Outcome | None:
        request = (member_id, new_id, "consumer", (("range", SUBSCRIPTION),))
        return self.ask(JoinRequested, *request, session_timeout_ms=1000, **named)

    def sync(self, member_id: str, generation: int, **assignments: bytes) -> Outcome | None:
        return self.ask(SyncRequested, member_id, generation, assignments=tuple(assignments.items()))

    def beat_of(self, member_id: str, generation: int) -> str:
        outcome = self.ask(BeatRequested, member_id, generation)
        assert outcome is not None
        return code(outcome)

    def commit_as(self, member_id: str, generation: int, offset: int = 1, *, topic: str = "t") -> str:
        offsets = (GroupOffset(topic, 0, offset, f"id-{topic}"),)
        outcome = self.ask(CommitRequested, offsets, None, member_id, generation)
        assert outcome is not None
        return code(outcome)

    def stable(self) -> None:
        """Let member a join, and give it t-0 and t-2."""
        joined = self.join("a")
        assert isinstance(joined, Joined)
        assert self.sync("a", joined.generation, a=ASSIGNMENT) == Synced("consumer", "range", ASSIGNMENT)

    def record(self) -> GroupEpoch:
        """Return the group's record in the log."""
        found = [decode_group_record(record) for record in self.log]
        values = [value for key, value in found if isinstance(key, EpochKey)]
        assert isinstance(values[-1], GroupEpoch)
        return values[-1]


def test_the_assignment_is_in_the_log_before_any_member_gets_it() -> None:
    host = Host()
    host.join("a")
    ticket = host.ticket()
    host.step(SyncRequested(ticket, "g", "a", 1, assignments=(("a", b"x"),)))
    assert ticket not in host.answers
    assert len(host.appends) == 1
    host.settle()
    assert host.answers[ticket] == Synced("consumer", "range", b"x")
    record = host.record()
    assert record.classic is not None
    assert (record.epoch, record.classic.leader, record.classic.members[0].assignment) == (1, "a", b"x")


def test_members_go_on_after_a_failover() -> None:
    host = Host()
    host.stable()
    assert host.commit_as("a", 1, 7) == "Done"
    host.crash()
    assert host.beat_of("a", 1) == "Done"
    assert host.commit_as("a", 1, 8) == "Done"
    assert host.core.offsets("g")["t", 0].offset == 8
    assert host.sync("a", 1) == Synced("consumer", "range", ASSIGNMENT)
    host.wait(1500)
    assert host.beat_of("a", 1) == "UNKNOWN_MEMBER_ID", "its new session has ended"


def test_members_go_on_after_a_rewrite_and_a_failover() -> None:
    host = Host()
    host.stable()
    start = len(host.log)
    host.step(RewriteRequested())
    host.settle()
    del host.log[:start]
    host.crash()
    assert host.beat_of("a", 1) == "Done"


def test_a_refused_append_begins_another_rebalance() -> None:
    host = Host()
    host.join("a")
    ticket = host.ticket()
    host.step(SyncRequested(ticket, "g", "a", 1, assignments=(("a", b"x"),)))
    host.refuse_one()
    assert code(host.answers[ticket]) == "COORDINATOR_NOT_AVAILABLE"
    assert host.beat_of("a", 1) == "REBALANCE_IN_PROGRESS"
    joined = host.join("z", "a")
    assert isinstance(joined, Joined)
    assert joined.generation == 2
    assert host.sync("a", 2, a=b"y") == Synced("consumer", "range", b"y")


def test_a_group_with_members_keeps_its_protocol() -> None:
    host = Host()
    host.stable()
    other = SimMember(host, "m")
    other.beat()
    assert other.refused == "INCONSISTENT_GROUP_PROTOCOL"
    assert host.core.names() == ["g"]
    host.ask(LeaveRequested, (LeavingMember("a"),))
    native = SimMember(host, "m")
    balance(host, [native])
    assert len(native.owned) == 4
    assert native.epoch > 2, "epochs must grow over a change of the protocol"
    assert host.record().classic is None
    refused = host.join("b")
    assert isinstance(refused, Refused)
    assert refused.code.name == "INCONSISTENT_GROUP_PROTOCOL"
    assert host.beat_of("a", 2) == "UNKNOWN_MEMBER_ID"


def test_an_empty_group_changes_its_protocol_and_keeps_its_offsets() -> None:
    host = Host()
    native = SimMember(host, "m")
    balance(host, [native])
    assert host.commit(native, {("t", "id-t", 0): 5}) == "Done"
    epoch = native.epoch
    native.leave()
    joined = host.join("a")
    assert isinstance(joined, Joined)
    assert joined.generation > epoch
    host.sync("a", joined.generation, a=ASSIGNMENT)
    assert host.core.offsets("g")["t", 0].offset == 5
    host.crash()
    assert host.beat_of("a", joined.generation) == "Done"
    host.ask(LeaveRequested, (LeavingMember("a"),))
    again = SimMember(host, "n")
    balance(host, [again])
    host.crash()
    balance(host, [again])
    assert len(again.owned) == 4
    assert host.beat_of("a", joined.generation) == "UNKNOWN_MEMBER_ID"


def test_a_first_native_member_ends_the_classic_record_in_the_same_append() -> None:
    """Otherwise a coordinator that loads the log between two appends would find both protocols."""
    host = Host()
    host.stable()
    host.ask(LeaveRequested, (LeavingMember("a"),))
    SimMember(host, "m").send()
    kinds = [type(decode_group_record(record)[0]).__name__ for record in host.appends[0].records]
    assert sorted(kinds) == ["EpochKey", "MemberKey"]


def test_requests_for_an_unknown_group_leave_nothing() -> None:
    host = Host()
    assert host.beat_of("a", 1) == "UNKNOWN_MEMBER_ID"
    assert host.ask(LeaveRequested, (LeavingMember("a"),)) == Left((ErrorCode.UNKNOWN_MEMBER_ID,))
    assert not len(host.core)
    given = host.join("a", needs_member_id=True)
    assert given == MemberIdGiven("a")
    assert len(host.core) == 1
    host.wait(1500)
    host.join("b", "zz")
    assert not len(host.core)
    assert not host.log


def test_other_clients_commit_only_without_members() -> None:
    host = Host()
    assert host.commit_as("", -1, 3) == "Done"
    host.stable()
    assert host.commit_as("", -1, 4) == "NON_EMPTY_GROUP"
    assert host.commit_as("a", 2, 4) == "ILLEGAL_GENERATION"
    assert host.delete() == "NON_EMPTY_GROUP"
    host.ask(LeaveRequested, (LeavingMember("a"),))
    assert host.commit_as("", -1, 5) == "Done"
    assert host.delete() == "Done"
    assert not len(host.core)
    host.crash()
    assert not len(host.core)


def test_offsets_of_subscribed_topics_cannot_be_deleted() -> None:
    host = Host()
    unknown = host.ask(OffsetsDeleteRequested, (("t", 0),))
    assert isinstance(unknown, Refused)
    assert unknown.code is ErrorCode.GROUP_ID_NOT_FOUND
    for topic in "tu":
        host.commit_as("", -1, 3, topic=topic)
    host.stable()
    assert host.ask(OffsetsDeleteRequested, (("t", 0), ("u", 0))) == OffsetsDeleted(frozenset({"t"}))
    assert list(host.core.offsets("g")) == [("t", 0)]
    host.ask(LeaveRequested, (LeavingMember("a"),))
    assert host.ask(OffsetsDeleteRequested, (("t", 0),)) == OffsetsDeleted()
    assert not host.core.offsets("g")
    native = SimMember(host, "m")
    balance(host, [native])
    assert host.ask(OffsetsDeleteRequested, (("t", 0), ("u", 0))) == OffsetsDeleted(frozenset({"t"}))


def test_all_classic_groups_of_a_coordinator_are_bounded() -> None:
    host = Host()
    host.settings = GroupSettings(initial_delay_ms=0, max_classic_bytes=150)
    host.crash()
    host.stable()
    used = host.core._classic_bytes
    assert used > len(SUBSCRIPTION) + len(ASSIGNMENT)
    host.crash()
    assert host.core._classic_bytes == used, "a new coordinator counts the members in the log"
    protocols = (("range", bytes(140)),)
    refused = host.ask(JoinRequested, "", "b", "consumer", protocols)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert isinstance(host.ask(JoinRequested, "a", "z", "consumer", protocols), Joined), "members may always join again"
    host.ask(LeaveRequested, (LeavingMember("a"),))
    assert not host.core._classic_bytes
    assert isinstance(host.ask(JoinRequested, "", "b", "consumer", protocols), Joined)


@pytest.mark.parametrize(("topic", "partitions"), [("t", 100_001), ("t" * 256, 1)])
def test_a_reply_has_no_assignment_that_clients_could_not_read(topic: str, partitions: int) -> None:
    name = len(topic).to_bytes(2, "big") + topic.encode()
    numbers = partitions.to_bytes(4, "big") + bytes(4 * partitions)
    host = Host()
    assert isinstance(host.join("a"), Joined)
    host.sync("a", 1, a=b"\0\1\0\0\0\1" + name + numbers + b"\xff\xff\xff\xff")
    (member,) = host.describe().members
    assert not member.owned
    msgspec.msgpack.decode(msgspec.msgpack.encode(member), type=type(member))


def test_ids_of_new_members_are_bounded_over_all_groups() -> None:
    host = Host()
    host.settings = GroupSettings(initial_delay_ms=0, max_classic_bytes=3 * GIVEN_ID_BYTES)
    host.crash()

    def ask(group: str, member_id: str) -> Outcome:
        ticket = host.ticket()
        protocols = (("range", b""),)
        new = JoinRequested(
            ticket, group, "", member_id, "consumer", protocols, session_timeout_ms=1000, needs_member_id=True
        )
        host.step(new)
        host.settle()
        return host.answers[ticket]

    assert [type(ask(f"g-{number}", "m")) for number in range(4)] == [MemberIdGiven] * 4
    refused = ask("g-4", "m")
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.GROUP_MAX_SIZE_REACHED
    host.wait(1000)
    host.settle()
    assert not host.core._classic_bytes, "the time of the ids is over"
    assert isinstance(ask("g-4", "m"), MemberIdGiven)


def test_a_group_expires_only_without_members() -> None:
    host = Host()
    host.stable()
    for _ in range(4100):
        host.wait(900)
        assert host.beat_of("a", 1) == "Done"
    host.ask(LeaveRequested, (LeavingMember("a"),))
    host.wait(3_500_000)
    assert len(host.core) == 1
    host.wait(200_000)
    assert not len(host.core)


def test_a_classic_group_is_described() -> None:
    host = Host()
    host.stable()
    found = host.describe()
    assert (found.state, found.group_epoch, found.protocol) == ("stable", 1, "range")
    (member,) = found.members
    assert (member.member_id, member.topics) == ("a", ("t",))
    assert member.owned == (TopicPartitions("t", "", (0, 2)),)
    assert host.core.summary("g") == ("stable", 1)
    host.join("b")
    assert host.core.summary("g") == ("reconciling", 2)


def test_earlier_releases_read_the_record_as_an_epoch() -> None:
    class Earlier(msgspec.Struct, frozen=True, array_like=True):
        version: int
        epoch: int
        commit_ms: int

    host = Host()
    host.stable()
    (value,) = [value for _, value in host.log if value is not None]
    assert msgspec.msgpack.decode(value, type=Earlier) == Earlier(1, 1, host.now_ms)


@pytest.mark.parametrize("cut", range(len(ASSIGNMENT)))
def test_bytes_that_are_no_assignment_are_ignored(cut: int) -> None:
    found = assigned_partitions(ASSIGNMENT[:cut])
    assert found in ((), (("t", (0, 2)),))
    assert subscribed_topics(SUBSCRIPTION[:cut]) in ((), ("t",))
    assert not assigned_partitions(b"\x00\x00\x7f\xff\xff\xff")
    assert not subscribed_topics(b"\x00\x00\x7f\xff\xff\xff")
    assert subscribed_topics(b"\x00\x00\x00\x00\x00\x01\x00\x01\xff") == ()
