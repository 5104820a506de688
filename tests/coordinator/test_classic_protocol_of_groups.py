"""Tests of classic groups in the coordinator: what the log has, the change of a group's protocol, and its offsets."""

from __future__ import annotations

import random
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
from sparklog.coordinator.classic_group import ENTRY_BYTES
from sparklog.coordinator.consumer_protocol import assigned_partitions, subscribed_topics
from sparklog.coordinator.effects import OffsetsDeleted, Outcome, Refused
from sparklog.coordinator.events import CoordinatorTicked, RewriteRequested
from sparklog.coordinator.group_events import CommitRequested, OffsetsDeleteRequested
from sparklog.coordinator.group_records import EpochKey, GroupEpoch, decode_group_record
from sparklog.coordinator.group_state import GroupSettings
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


def test_members_continue_after_a_failover() -> None:
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


def test_members_continue_after_a_rewrite_and_a_failover() -> None:
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


def test_a_member_that_commits_stays_without_heartbeats() -> None:
    host = Host()
    host.stable()
    for offset in range(4):
        host.wait(900)
        assert host.commit_as("a", 1, offset) == "Done"
    host.wait(900)
    assert host.commit_as("a", 0) == "ILLEGAL_GENERATION"
    host.wait(900)
    assert host.beat_of("a", 1) == "UNKNOWN_MEMBER_ID", "a refused commit keeps no session"


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


def bounded(most: int) -> Host:
    """Return a coordinator whose classic groups hold at most ``most`` bytes."""
    host = Host()
    host.settings = GroupSettings(initial_delay_ms=0, max_classic_bytes=most)
    host.crash()
    return host


def test_all_classic_groups_of_a_coordinator_are_bounded() -> None:
    host = bounded(600)
    host.stable()
    used = host.core._classic_groups.held_bytes
    assert used > ENTRY_BYTES + len(SUBSCRIPTION) + len(ASSIGNMENT)
    host.crash()
    assert host.core._classic_groups.held_bytes == used, "a new coordinator counts the members in the log"
    protocols = (("range", bytes(140)),)
    refused = host.ask(JoinRequested, "", "b", "consumer", protocols)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert isinstance(host.ask(JoinRequested, "a", "z", "consumer", protocols), Joined)
    host.ask(LeaveRequested, (LeavingMember("a"),))
    assert not host.core._classic_groups.held_bytes
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
    host.settings = GroupSettings(initial_delay_ms=0, max_classic_bytes=4 * (ENTRY_BYTES + len("m")))
    host.crash()

    def ask(group: str, member_id: str) -> Outcome:
        ticket = host.ticket()
        protocols = (("range", b""),)
        new = JoinRequested(
            ticket,
            group,
            member_id="",
            new_member_id=member_id,
            protocol_type="consumer",
            protocols=protocols,
            session_timeout_ms=1000,
            needs_member_id=True,
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
    assert not host.core._classic_groups.held_bytes, "the time of the ids is over"
    assert isinstance(ask("g-4", "m"), MemberIdGiven)


def test_a_member_that_joins_again_stays_within_the_bound() -> None:
    host = bounded(600)
    host.stable()
    refused = host.ask(JoinRequested, "a", "z", "consumer", (("range", bytes(400)),))
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.COORDINATOR_NOT_AVAILABLE, "clients repeat the request"
    assert host.beat_of("a", 1) == "Done", "the member stays"
    assert isinstance(host.join("z", "a"), Joined), "a member that does not grow may join again"


def test_assignments_stay_within_the_bound() -> None:
    host = bounded(600)
    host.join("a")
    refused = host.sync("a", 1, a=bytes(400))
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert host.sync("a", 1, a=bytes(100)) == Synced("consumer", "range", bytes(100))


def test_the_record_counts_while_the_members_are_smaller() -> None:
    host = bounded(2000)
    host.join("a")
    host.sync("a", 1, a=bytes(1500))
    used = host.core._classic_groups.held_bytes
    assert isinstance(host.join("z", "a"), Joined)
    assert host.core._classic_groups.held_bytes == used, "the log still has the assignments"
    host.sync("a", 2, a=b"x")
    assert host.core._classic_groups.held_bytes < used - 1000


def test_a_join_that_ends_while_the_coordinator_is_late_gets_its_response() -> None:
    host = Host()
    request = ("consumer", (("range", SUBSCRIPTION),), "", 60_000, 500)
    host.ask(JoinRequested, "", "a", *request)
    host.sync("a", 1, a=ASSIGNMENT)
    ticket = host.ticket()
    host.step(JoinRequested(ticket, "g", "", "b", *request))
    due_ms = host.core.deadline_ms
    assert due_ms is not None
    host.now_ms = due_ms + 1000
    host.step(CoordinatorTicked())
    host.wait(1)
    assert isinstance(host.answers.get(ticket), Joined)


def test_a_refused_append_may_leave_the_group_empty() -> None:
    host = Host()
    host.step(CommitRequested(host.ticket(), "g", (GroupOffset("t", 0, 1, "id-t"),)))
    # Both requests wait for the commit of the offset. So no time passes between them.
    protocols = (("range", SUBSCRIPTION),)
    join = JoinRequested(
        host.ticket(),
        "g",
        member_id="",
        new_member_id="a",
        protocol_type="consumer",
        protocols=protocols,
        rebalance_timeout_ms=0,
    )
    host.step(join)
    ticket = host.ticket()
    host.step(SyncRequested(ticket, "g", "a", 1, assignments=(("a", b"x"),)))
    host.commit_one()
    host.refuse_one()
    host.settle()
    assert code(host.answers[ticket]) == "COORDINATOR_NOT_AVAILABLE"
    assert host.beat_of("a", 1) == "UNKNOWN_MEMBER_ID"
    assert host.record().classic is not None
    host.stable()


@pytest.mark.parametrize("seed", range(40))
def test_refused_appends_and_no_timeouts_keep_the_counts(seed: int) -> None:
    """Play random requests with zero time-outs, large members and refused appends. Check the counts and the bound."""
    rng = random.Random(seed)
    host = bounded(4000)
    names = ["a", "b", "c"]
    for number in range(150):
        group = rng.choice(["g", "h"])
        found = host.core.classic(group)
        generation = found.generation if found is not None else 0
        name = rng.choice([*(found.members if found is not None else ()), *names])
        session_ms, rebalance_ms = rng.choice([0, 1000]), rng.choice([0, 0, 2000])
        match rng.choice(["join", "join", "sync", "sync", "beat", "leave", "wait", "both", "commit", "refuse"]):
            case "join":
                protocols = (("range", bytes(rng.choice([1, 400, 1500]))),)
                member_id = name if rng.random() < 0.5 else ""
                instance_id = rng.choice(["", "", "s"])
                host.step(
                    JoinRequested(
                        host.ticket(),
                        group,
                        member_id=member_id,
                        new_member_id=f"m{number}",
                        protocol_type="consumer",
                        protocols=protocols,
                        instance_id=instance_id,
                        session_timeout_ms=session_ms,
                        rebalance_timeout_ms=rebalance_ms,
                        needs_member_id=rng.random() < 0.3,
                    )
                )
            case "sync":
                assignments = ((name, bytes(rng.choice([1, 400, 1500]))),)
                host.step(SyncRequested(host.ticket(), group, name, generation, assignments=assignments))
            case "both":
                # An offset's append is in flight, so the requests wait and are handled together.
                host.step(CommitRequested(host.ticket(), group, (GroupOffset("t", 0, number, "id-t"),)))
                protocols = (("range", b"x"),)
                join = JoinRequested(
                    host.ticket(),
                    group,
                    member_id="",
                    new_member_id=f"m{number}",
                    protocol_type="consumer",
                    protocols=protocols,
                    session_timeout_ms=session_ms,
                    rebalance_timeout_ms=rebalance_ms,
                )
                host.step(join)
                assignments = ((f"m{number}", b"y"),)
                host.step(SyncRequested(host.ticket(), group, f"m{number}", generation + 1, assignments=assignments))
            case "beat":
                host.step(BeatRequested(host.ticket(), group, name, generation))
            case "leave":
                host.step(LeaveRequested(host.ticket(), group, (LeavingMember(name),)))
            case "wait":
                host.now_ms += rng.choice([1, 200, 1100])
                host.step(CoordinatorTicked())
            case "commit" if host.appends:
                host.commit_one()
            case "refuse" if host.appends:
                host.refuse_one()
        groups = list(filter(None, map(host.core.classic, ["g", "h"])))
        for one in groups:
            one.check_invariants()
        assert sum(one.held_bytes for one in groups) <= host.core._classic_groups.held_bytes <= 4000
    host.settle()
    found_groups = filter(None, map(host.core.classic, ["g", "h"]))
    members = [member for found in found_groups for member in found.members.values()]
    waiting = sum((member.joining is not None) + (member.syncing is not None) for member in members)
    assert host.tickets == len(host.answers) + waiting


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
