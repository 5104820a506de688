"""Tests of offsets that a member sends with a transaction: fenced as its commits are, and held until the transaction
ends."""

from __future__ import annotations

from sparklog.coordinator.assignor import Part
from sparklog.coordinator.group_events import CommitRequested, HoldEnded, HoldRequested
from sparklog.protocol.messages import GroupOffset
from tests.coordinator.group_host import GroupsHost, SimMember, balance, code, group, parts


def hold(
    host: GroupsHost, member: SimMember, numbers: set[Part], *, producer: int = 7, epoch: int | None = None
) -> str:
    ticket = host.ticket()
    offsets = tuple(GroupOffset(part[0], part[2], 5, part[1]) for part in sorted(numbers))
    who = (member.member_id, member.epoch if epoch is None else epoch)
    host.step(HoldRequested(ticket, "g", "tx", producer, 3, offsets, *who))
    host.settle()
    return code(host.answers[ticket])


def held(host: GroupsHost, member: SimMember) -> set[tuple[str, int]]:
    asked = [(part[0], part[2]) for part in member.owned]
    return {place for _, found in host.core.holds("g", member.member_id, asked) for place in found.partitions}


def test_transactional_offsets_are_fenced_and_held_until_the_end() -> None:
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1)
    old_epoch = first.epoch
    assert hold(host, first, parts(0, 1)) == hold(host, first, parts(2, 3)) == "Done"
    second = SimMember(host, "m9")
    balance(host, [first, second])
    own = {(part[0], part[2]) for part in second.owned}
    assert held(host, second) >= own and not held(host, first), "a member must not wait for its own transaction"
    assert hold(host, first, second.owned, producer=8) == "STALE_MEMBER_EPOCH", "the member gave the partitions up"
    assert hold(host, second, second.owned, producer=9, epoch=old_epoch) == "STALE_MEMBER_EPOCH"
    assert hold(host, SimMember(host, "ghost"), second.owned, producer=9) == "UNKNOWN_MEMBER_ID"
    host.crash()
    assert held(host, second) >= own, "the next coordinator must know the hold from the log"
    host.step(HoldEnded("g", "tx", 6))
    host.settle()
    assert held(host, second) >= own, "an earlier transaction of the key has ended"
    host.step(HoldEnded("g", "tx", 7))
    host.settle()
    assert not held(host, second)
    host.crash()
    assert not held(host, second)


def test_a_member_waits_for_its_own_transaction_on_a_regained_partition() -> None:
    """Without the wait the member would start where that transaction began, and would commit the work twice."""
    host = GroupsHost({"t": 4})
    (first,) = group(host, 1)
    assert hold(host, first, first.owned) == "Done"
    second = SimMember(host, "m9")
    balance(host, [first, second])
    kept = set(first.owned)
    second.leave()
    balance(host, [first])
    back = {(part[0], part[2]) for part in first.owned - kept}
    assert back and all(host.core.holds("g", first.member_id, [place]) for place in back)
    assert not host.core.holds("g", first.member_id, [(part[0], part[2]) for part in kept])
    assert hold(host, first, kept) == "Done"
    assert all(host.core.holds("g", first.member_id, [place]) for place in back), (
        "the member has begun none of these again"
    )
    host.crash()
    assert all(host.core.holds("g", first.member_id, [place]) for place in back)
    host.step(HoldEnded("g", "tx", 7))
    host.settle()
    assert not held(host, first)


def test_a_hold_ends_when_the_transaction_hands_over_its_offsets() -> None:
    host = GroupsHost({"t": 2})
    first, second = group(host, 2)
    assert hold(host, first, first.owned) == "Done"
    first.leave()
    balance(host, [second])
    ((taken,),) = [held(host, second)]
    ticket = host.ticket()
    host.step(CommitRequested(ticket, "g", (GroupOffset(taken[0], taken[1], 5, "id-t"),), ("tx", 1)))
    assert host.core.holds("g", "m9", [taken]), "the hold must not end before the handover is in the log"
    host.settle()
    assert not held(host, second)
    assert host.core.offsets("g")[taken].offset == 5
