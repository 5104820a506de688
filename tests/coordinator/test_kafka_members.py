"""Tests of members of groups of KIP-848 that are Kafka clients: they report only changes, and take partitions late."""

from __future__ import annotations

from typing import Any

import pytest

from sparklog.coordinator.assignor import Part
from sparklog.coordinator.effects import Assigned, Refused
from sparklog.coordinator.group_events import ConsumerHeartbeatRequested
from sparklog.protocol.messages import JOIN, LEAVE
from tests.coordinator.group_host import SESSION_MS, Chaos, GroupsHost, SimMember, balance, code, parts

Listed = tuple[tuple[str, tuple[int, ...]], ...]


class KafkaMember(SimMember):
    """A member that behaves as Kafka's clients: it sends its partitions only when they have changed, or after an error.

    It takes assigned partitions when ``give_up`` is called, and not when it receives them.
    """

    def __init__(self, host: GroupsHost, member_id: str, topics: tuple[str, ...] = ("t",), **about: Any) -> None:
        super().__init__(host, member_id, topics, **about)
        self.reported: Listed | None = None
        self.whole = True

    def send(self, epoch: int | None = None) -> int:
        self.ticket = self.host.ticket()
        epoch = self.epoch if epoch is None else epoch
        if epoch == JOIN:
            self.owned = set()
        listed = self._listed()
        full = epoch == JOIN or self.reported is None
        self.whole = full or listed != self.reported
        event = ConsumerHeartbeatRequested(
            self.ticket,
            "g",
            self.member_id,
            epoch,
            SESSION_MS,
            3000,
            owned=listed if self.whole else None,
            topics=self.about.topics if full else None,
            pattern=self.about.pattern if full else None,
            instance_id=self.about.instance_id,
            rack=self.about.rack if full else None,
            rebalance_timeout_ms=self.about.rebalance_timeout_ms if full else None,
        )
        self.reported = listed
        self.host.step(event)
        return event.ticket

    def _listed(self) -> Listed:
        by_topic: dict[str, list[int]] = {}
        for _, topic_id, number in sorted(self.owned):
            by_topic.setdefault(topic_id, []).append(number)
        return tuple((topic_id, tuple(numbers)) for topic_id, numbers in by_topic.items())

    def lose(self) -> None:
        """Lose the response. The client then sends its whole state."""
        self.ticket = None
        self.reported = None

    def receive(self) -> bool:
        outcome = self.host.answers.get(self.ticket) if self.ticket is not None else None
        if outcome is None:
            return False
        self.ticket = None
        if isinstance(outcome, Refused):
            self.reported = None
            if outcome.code.name in {"UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH"}:
                self.epoch, self.owned, self.assigned = JOIN, set(), set()
            elif outcome.code.name != "COORDINATOR_NOT_AVAILABLE":
                self.refused = outcome.code.name
            return True
        assert isinstance(outcome, Assigned)
        self.epoch = outcome.member_epoch
        if self.whole or not outcome.unchanged:
            self.assigned = {
                (found.topic, found.topic_id, number) for found in outcome.assigned for number in found.partitions
            }
        return True

    def give_up(self) -> None:
        self.owned = set(self.assigned)


class KafkaChaos(Chaos):
    """Members of both kinds of clients, in any state."""

    def _join(self) -> None:
        if len(self.members) < 6 and self.random.random() < 0.6:
            self.made += 1
            topics = self.random.choice([("t",), ("t", "u")])
            self.members.append(KafkaMember(self.host, f"k{self.made}", topics))
        else:
            super()._join()

    def _lose_answer(self) -> None:
        member = self._pick()
        if isinstance(member, KafkaMember):
            member.lose()
        elif member is not None:
            member.ticket = None

    def _crash(self) -> None:
        super()._crash()
        for member in self.members:
            if isinstance(member, KafkaMember):
                member.lose()


def test_a_response_is_immediate() -> None:
    host = GroupsHost({"t": 4})
    host.see()
    member = KafkaMember(host, "k")
    ticket = member.send()
    host.settle()
    assert isinstance(host.answers[ticket], Assigned)
    member.receive()
    assert member.assigned == parts(0, 1, 2, 3)
    assert member.epoch == 1, "a member must leave the epoch 0 with its first response"
    again = member.send()
    found = host.answers[again]
    assert isinstance(found, Assigned)
    assert found.unchanged


def test_a_partition_of_the_last_response_is_kept_until_the_member_takes_it() -> None:
    """A heartbeat that does not name it was perhaps sent while the member is taking it."""
    host = GroupsHost({"t": 2})
    host.see()
    first, second = KafkaMember(host, "k1"), KafkaMember(host, "k2")
    first.beat()
    for _ in range(3):  # It has not taken its partitions yet.
        first.reported = None
        first.owned = set()
        first.send()
        host.settle()
        first.receive()
    second.send()
    host.settle()
    second.receive()
    assert not second.assigned
    first.give_up()
    first.beat()
    second.beat()
    assert not first.owned & second.owned
    balance(host, [first, second])
    assert (len(first.owned), len(second.owned)) == (1, 1)


def test_a_member_that_gave_partitions_up_at_a_failover_is_not_stuck() -> None:
    host = GroupsHost({"t": 2})
    host.see()
    first, second = KafkaMember(host, "k1"), KafkaMember(host, "k2")
    balance(host, [first])
    second.beat()
    first.send()
    host.settle()
    first.receive()
    first.give_up()
    assert len(first.owned) == 1
    host.crash()
    first.lose()
    second.lose()
    began = host.now_ms
    balance(host, [first, second])
    assert (len(first.owned), len(second.owned)) == (1, 1)
    assert host.now_ms < began + 5000


def test_kafka_clients_and_sparklogs_share_a_group() -> None:
    host = GroupsHost({"t": 6})
    host.see()
    members: list[SimMember] = [KafkaMember(host, "k1"), SimMember(host, "m1"), KafkaMember(host, "k2")]
    balance(host, members)
    assert [len(member.owned) for member in members] == [2, 2, 2]
    assert set().union(*(member.owned for member in members)) == parts(0, 1, 2, 3, 4, 5)
    members[0].send(LEAVE)
    host.settle()
    balance(host, members[1:])
    assert [len(member.owned) for member in members[1:]] == [3, 3]


def test_commits_of_kafka_clients_are_fenced_by_partition() -> None:
    host = GroupsHost({"t": 2})
    host.see()
    first, second = KafkaMember(host, "k1"), KafkaMember(host, "k2")
    balance(host, [first])
    moved: dict[Part, int] = dict.fromkeys(parts(0, 1), 5)
    assert host.commit(first, moved) == "Done"
    balance(host, [first, second])
    assert host.commit(first, dict.fromkeys(second.owned, 6)) == "STALE_MEMBER_EPOCH"
    assert host.commit(first, dict.fromkeys(first.owned, 6)) == "Done"


def test_a_static_member_gets_its_partitions_back() -> None:
    host = GroupsHost({"t": 4})
    host.see()
    members = [KafkaMember(host, f"k{number}", instance_id=f"s{number}") for number in range(2)]
    balance(host, members)
    before = set(members[0].owned)
    again = KafkaMember(host, "k9", instance_id="s0")
    again.beat()
    assert again.assigned == before
    old = members[0].send()
    host.settle()
    assert code(host.answers[old]) == "FENCED_INSTANCE_ID"


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_two_owners_in_any_history(seed: int) -> None:
    chaos = KafkaChaos(seed)
    chaos.run(400)


@pytest.mark.parametrize("seed", range(10))
def test_members_share_all_partitions_after_any_history(seed: int) -> None:
    chaos = KafkaChaos(seed)
    chaos.run(300)
    host, members = chaos.host, [member for member in chaos.members if not member.refused]
    host.settle()
    host.wait(2 * SESSION_MS)
    for member in members:
        if isinstance(member, KafkaMember):
            member.lose()
        member.ticket = None
        member.epoch, member.owned, member.assigned = JOIN, set(), set()
        member.sequence += 100
    balance(host, members, turns=80)
    if members:
        assert len(set().union(*(member.owned for member in members))) == sum(len(one.owned) for one in members)
        assert {part for member in members for part in member.owned if part[0] == "t"} == parts(
            *range(host.views["t"].partitions)
        )
