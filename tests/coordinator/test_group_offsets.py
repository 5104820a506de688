"""Tests of groups' offsets: shown after their commit, in the order of the requests, and handed over once."""

from __future__ import annotations

import pytest

from sparklog.coordinator.effects import Append, Done, Outcome, Refused, Respond, Rewritten
from sparklog.coordinator.events import Appended, AppendRefused, CoordinatorTicked, RewriteRequested
from sparklog.coordinator.group_events import CommitRequested, DeleteRequested, TopicsGone
from sparklog.coordinator.group_records import FORMAT_VERSION, CommittedOffset, OffsetKey, group_record
from sparklog.coordinator.group_state import GroupSettings
from sparklog.coordinator.groups import Groups
from sparklog.coordinator.log_records import Record
from sparklog.errors import ClusterError, ErrorCode
from sparklog.protocol.messages import GroupOffset

HOUR_MS = 3_600_000
SETTINGS = GroupSettings(retention_ms=24 * HOUR_MS, handover_ms=HOUR_MS)


class Host:
    """A host whose appends are committed when the test commits them. ``crash`` keeps the log."""

    def __init__(self, settings: GroupSettings = SETTINGS) -> None:
        self._settings = settings
        self.now_ms = 1_000_000
        self.log: list[Record] = []
        self.log_start = 0
        self.rewrite_from = 0
        self.appends: list[Append] = []
        self.answers: dict[int, Outcome] = {}
        self.tickets = 0
        self.core = self._fresh()

    def _fresh(self) -> Groups:
        core = Groups(self._settings)
        core.load(self.log[self.log_start :])
        core.start(self.now_ms)
        return core

    def crash(self) -> None:
        self.appends = []
        self.core = self._fresh()

    def step(self, event: object) -> None:
        for effect in self.core.step(event, self.now_ms):
            if isinstance(effect, Append):
                self.appends.append(effect)
            elif isinstance(effect, Respond):
                assert effect.ticket not in self.answers, "a second response to one request"
                self.answers[effect.ticket] = effect.outcome
            else:
                assert isinstance(effect, Rewritten)
                self.log_start = self.rewrite_from

    def commit(self, *offsets: int, group: str = "g", transaction: tuple[str, int] | None = None) -> int:
        """Commit offsets for partitions 0, 1, ... of topic t."""
        self.tickets += 1
        named = tuple(GroupOffset("t", number, offset, "id-1") for number, offset in enumerate(offsets))
        self.step(CommitRequested(self.tickets, group, named, transaction))
        return self.tickets

    def settle(self) -> None:
        while self.appends:
            append = self.appends.pop(0)
            self.log += append.records
            self.step(Appended(append.append))

    def offsets(self, group: str = "g") -> list[int]:
        return [found.offset for _, found in sorted(self.core.offsets(group).items())]


def test_an_offset_counts_once_it_is_committed() -> None:
    host = Host()
    ticket = host.commit(5)
    assert (host.offsets(), host.answers) == ([], {})
    host.settle()
    assert (host.offsets(), host.answers[ticket]) == ([5], Done())
    host.commit(9)
    host.crash()
    assert host.offsets() == [5]
    assert host.core.names() == ["g"]


def test_commits_during_an_append_share_the_next_one_in_order() -> None:
    host = Host()
    host.commit(1)
    tickets = [host.commit(offset, 10 * offset) for offset in (2, 3, 4)]
    assert len(host.appends) == 1
    host.settle()
    assert host.offsets() == [4, 40]
    assert all(host.answers[ticket] == Done() for ticket in tickets)
    assert len(host.log) == 3, "one record for the first append, two for all later ones"


def test_groups_do_not_wait_for_each_other() -> None:
    host = Host()
    host.commit(1, group="a")
    host.commit(2, group="b")
    assert len(host.appends) == 2


def test_a_refused_append_changes_nothing() -> None:
    host = Host()
    refused, waiting = host.commit(1), host.commit(2)
    host.step(AppendRefused(host.appends.pop(0).append, "too few"))
    assert isinstance(host.answers[refused], Refused)
    host.settle()
    assert (host.offsets(), host.answers[waiting]) == ([2], Done())


@pytest.mark.parametrize("crash", [False, True])
def test_a_transaction_hands_over_its_offsets_once(crash: bool) -> None:
    host = Host()
    host.commit(5, transaction=("k", 3))
    host.settle()
    host.commit(7)
    host.settle()
    if crash:
        host.crash()
    again = host.commit(5, transaction=("k", 3))
    host.commit(4, transaction=("k", 2))
    assert host.answers[again] == Done()
    assert not host.appends
    assert host.offsets() == [7], "a repetition and an older handover must not reset an offset"
    host.commit(8, transaction=("k", 4))
    host.settle()
    assert host.offsets() == [8]
    host.commit(1, transaction=("other", 1))
    host.settle()
    assert host.offsets() == [1]


def test_two_repetitions_in_one_append_count_once() -> None:
    host = Host()
    host.commit(0)
    host.commit(5, transaction=("k", 1))
    host.commit(6)
    host.commit(5, transaction=("k", 1))
    host.settle()
    assert host.offsets() == [6]


def test_restarted_decision_numbers_are_not_treated_as_repetitions() -> None:
    host = Host()
    host.commit(5, transaction=("k", 3))
    host.settle()
    host.now_ms += HOUR_MS
    host.commit(6, transaction=("k", 1))
    host.settle()
    assert host.offsets() == [6]


def test_a_deleted_topic_removes_its_offsets() -> None:
    host = Host()
    host.commit(5, 6)
    host.settle()
    host.step(TopicsGone((("t", "id-0"), ("u", "id-1"))))
    assert not host.appends, "the id is that of another topic with this name"
    host.step(TopicsGone((("t", "id-1"),)))
    host.settle()
    assert host.offsets() == []
    host.crash()
    assert (host.offsets(), host.core.names(), host.core.live_records) == ([], [], 0)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_deleted_topics_offsets_go_although_an_append_was_refused(busy: bool) -> None:
    host = Host()
    host.commit(5, 6)
    host.step(CommitRequested(-1, "g", (GroupOffset("u", 0, 7, ""),), None))
    host.settle()
    host.step(TopicsGone((("t", "id-1"), ("u", ""))))
    host.step(AppendRefused(host.appends.pop().append, "too few in-sync replicas"))
    assert host.offsets() == [5, 6, 7] and not host.appends, "an immediate retry would be refused again"
    if busy:
        host.step(CommitRequested(-2, "g", (GroupOffset("u", 0, 8, "id-2"),), None))
    else:
        host.now_ms += 60_000
        host.step(CoordinatorTicked())
    host.settle()
    assert host.offsets() == [8 if busy else 7], "without an id the offset may belong to the next topic by then"


def test_groups_expire_and_memories_of_transactions_sooner() -> None:
    host = Host()
    host.commit(5, group="old", transaction=("k", 1))
    host.commit(5, group="used")
    host.settle()
    host.now_ms += 2 * HOUR_MS
    host.step(CoordinatorTicked())
    host.settle()
    assert host.core.live_records == 2, "the handover must have expired"
    host.now_ms += 21 * HOUR_MS
    host.commit(6, group="used")
    host.settle()
    host.now_ms += 2 * HOUR_MS
    host.step(CoordinatorTicked())
    host.settle()
    assert host.core.names() == ["used"]
    host.crash()
    assert host.core.names() == ["used"]


def test_a_rewrite_loses_no_group() -> None:
    host = Host()
    for number in range(500):
        host.commit(number, group=f"g{number % 250}")
        host.settle()
    host.commit(7000, group="g7")
    host.rewrite_from = len(host.log)
    host.step(RewriteRequested())
    assert host.log_start == 0, "one group has an append in flight"
    host.settle()
    assert host.log_start == 500
    host.crash()
    assert len(host.core.names()) == 250
    assert [host.offsets(group) for group in ("g7", "g8")] == [[7000], [258]]


def test_a_newer_format_is_refused_with_its_number() -> None:
    newer = group_record(
        OffsetKey(FORMAT_VERSION + 1, "g", "t", 0), CommittedOffset(FORMAT_VERSION, GroupOffset("t", 0, 1), 0)
    )
    with pytest.raises(ClusterError, match="format version 2"):
        Groups().load([newer])
    with pytest.raises(ClusterError, match="cannot be read"):
        Groups().load([(b"\xc1", b"")])


def test_a_new_group_beyond_the_limit_is_refused() -> None:
    host = Host(GroupSettings(max_groups=2))
    first, second = host.commit(1, group="a"), host.commit(1, group="b")
    third = host.commit(1, group="c")
    refusal = host.answers[third]
    assert isinstance(refusal, Refused) and refusal.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert "groups.max" in refusal.detail and "'c'" in refusal.detail
    again = host.commit(2, group="b")
    handed_over = host.commit(3, group="d", transaction=("key", 1))
    host.settle()
    assert [host.answers[ticket] for ticket in (first, second, again, handed_over)] == [Done()] * 4
    assert host.core.names() == ["a", "b", "d"], "a transaction's decision must be accepted"


def test_a_deleted_group_makes_room_for_another() -> None:
    host = Host(GroupSettings(max_groups=1))
    host.commit(1, group="a")
    host.settle()
    assert isinstance(host.answers[host.commit(1, group="b")], Refused)
    host.tickets += 1
    host.step(DeleteRequested(host.tickets, "a"))
    host.settle()
    ticket = host.commit(1, group="b")
    host.settle()
    assert host.answers[ticket] == Done()
