"""Tests of the uniform assignor: even, sticky, rack-aware, and fast enough for a broker's loop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.coordinator.assignor import Part, Subscriber, TopicView, assign


def topics_of(counts: Mapping[str, int]) -> dict[str, TopicView]:
    return {name: TopicView(f"id-{name}", count) for name, count in counts.items()}


def owners_of(target: Mapping[str, Iterable[Part]]) -> dict[Part, str]:
    found: dict[Part, str] = {}
    for member, parts in target.items():
        for part in parts:
            assert part not in found, f"{part} was given to {found[part]} and {member}"
            found[part] = member
    return found


def check(
    target: Mapping[str, list[Part]], subscribers: Mapping[str, Subscriber], topics: Mapping[str, TopicView]
) -> None:
    """Check that each subscribed partition has one subscriber, and that no single move makes the assignment more
    even."""
    owners = owners_of(target)
    read = frozenset().union(*(one.topics for one in subscribers.values()))
    assert owners.keys() == {
        (name, topics[name].topic_id, number) for name in read for number in range(topics[name].partitions)
    }
    loads = {member: len(parts) for member, parts in target.items()}
    for part, member in owners.items():
        assert part[0] in subscribers[member].topics
        least = min(loads[other] for other, one in subscribers.items() if part[0] in one.topics)
        assert loads[member] - least <= 1, f"{part} of {member} ({loads})"


counts = st.dictionaries(st.sampled_from("tuvw"), st.integers(0, 40), min_size=1)


@settings(deadline=None, max_examples=200)
@given(counts, st.integers(1, 12), st.integers(0, 11), st.randoms())
def test_members_with_equal_topics_join_and_leave(
    count: dict[str, int], size: int, who: int, dice: random.Random
) -> None:
    topics = topics_of(count)
    names = frozenset(topics)
    subscribers = {f"m{number}": Subscriber(names) for number in range(size)}
    total = sum(count.values())
    before = assign(subscribers, topics, {})
    check(before, subscribers, topics)
    assert assign(subscribers, topics, owners_of(before)) == {member: sorted(parts, key=lambda part: (part[2], part[0]))
                                                              for member, parts in before.items()}  # fmt: skip
    joined = assign({**subscribers, "new": Subscriber(names)}, topics, owners_of(before))
    check(joined, {**subscribers, "new": Subscriber(names)}, topics)
    moved = {part for part, member in owners_of(joined).items() if owners_of(before)[part] != member}
    assert moved == set(joined["new"]), "only the new member's partitions may move"
    assert len(joined["new"]) == total // (size + 1), "and the new member gets only these"
    gone = f"m{who % size}"
    left = {member: one for member, one in subscribers.items() if member != gone}
    if left:
        after = assign(left, topics, owners_of(before))
        check(after, left, topics)
        moved = {part for part, member in owners_of(after).items() if owners_of(before)[part] != member}
        assert moved == set(before[gone]), "only the partitions of the member that left may move"
    anyhow = {part: dice.choice([*subscribers, "unknown"]) for part in owners_of(before)}
    again = assign(subscribers, topics, anyhow)
    check(again, subscribers, topics)
    most, over = divmod(total, size)
    had = sorted((sum(owner == member for owner in anyhow.values()) for member in subscribers), reverse=True)
    must_move = sum(max(0, have - most - (place < over)) for place, have in enumerate(had))
    must_move += sum(owner == "unknown" for owner in anyhow.values())
    assert sum(owners_of(again)[part] != owner for part, owner in anyhow.items()) == must_move


@settings(deadline=None, max_examples=200)
@given(counts, st.lists(st.frozensets(st.sampled_from("tuvw")), min_size=1, max_size=9), st.randoms())
def test_members_may_read_different_topics(
    count: dict[str, int], wanted: list[frozenset[str]], dice: random.Random
) -> None:
    topics = topics_of(count)
    subscribers = {f"m{number}": Subscriber(frozenset(names & topics.keys())) for number, names in enumerate(wanted)}
    target = assign(subscribers, topics, {})
    check(target, subscribers, topics)
    assert owners_of(assign(subscribers, topics, owners_of(target))) == owners_of(target), (
        "an even assignment must stay"
    )
    anyhow = {part: dice.choice(list(subscribers)) for part in owners_of(target)}
    check(assign(subscribers, topics, anyhow), subscribers, topics)


def test_every_member_reads_some_of_several_topics() -> None:
    topics = topics_of({"t": 3, "u": 3})
    target = assign({f"m{number}": Subscriber(frozenset("tu")) for number in range(3)}, topics, {})
    assert all(sorted(part[0] for part in parts) == ["t", "u"] for parts in target.values())


def test_racks_decide_between_equally_even_assignments() -> None:
    racks = tuple(frozenset({"abc"[number % 3]}) for number in range(12))
    topics = {"t": TopicView("id", 12, racks)}
    names = frozenset("t")
    subscribers = {f"m{rack}{number}": Subscriber(names, rack) for rack in "abc" for number in range(2)}
    target = assign(subscribers, topics, {})
    assert all(racks[part[2]] == {subscribers[member].rack} for member, parts in target.items() for part in parts)
    one = dict.fromkeys(owners_of(target), "ma0")
    pair = {member: subscribers[member] for member in ("ma0", "mb0")}
    spread = assign(pair, topics, one)
    assert {len(parts) for parts in spread.values()} == {6}
    assert {"t0", "t3", "t6", "t9"} <= {f"t{part[2]}" for part in spread["ma0"]}, (
        "a member that gives up partitions must keep the near ones"
    )
    assert {"t4", "t7", "t10"} <= {f"t{part[2]}" for part in spread["mb0"]}
    elsewhere = {part: "mb0" if part[2] % 3 == 0 else "ma0" for part in owners_of(target)}
    kept = assign(pair, topics, {part: member for part, member in elsewhere.items() if part[2] < 6})
    assert all(owners_of(kept)[part] == member for part, member in elsewhere.items() if part[2] < 6), (
        "no partition may move"
    )
    nobody_there = assign({"m": Subscriber(names, "z"), "n": Subscriber(names)}, topics, {})
    assert {len(parts) for parts in nobody_there.values()} == {6}


@pytest.mark.alone
@pytest.mark.parametrize("racks", [False, True])
def test_an_assignment_of_ten_thousand_partitions_is_fast(racks: bool) -> None:
    """Each assignment takes less than 100 ms of processor time, after any change, and moves no partition without
    need."""
    near = tuple(frozenset({f"r{number % 3}", f"r{(number + 1) % 3}"}) for number in range(100)) if racks else ()
    topics = {f"t{number}": TopicView(f"id{number}", 100, near) for number in range(100)}
    names = frozenset(topics)
    subscribers = {f"m{number:04}": Subscriber(names, f"r{number % 3}" if racks else "") for number in range(1000)}
    took: list[float] = []

    def timed(members: Mapping[str, Subscriber], owners: Mapping[Part, str]) -> dict[Part, str]:
        best = float("inf")
        for _ in range(3):  # the machine may be busy with something else at the first attempt
            began = time.thread_time()
            target = assign(members, topics, owners)
            best = min(best, time.thread_time() - began)
        took.append(best)
        loads = {len(parts) for parts in target.values()}
        assert max(loads) - min(loads) <= 1
        return owners_of(target)

    first = timed(subscribers, {})
    left = {member: one for member, one in subscribers.items() if member != "m0500"}
    after = timed(left, first)
    assert {part for part in first if first[part] != after[part]} == {part for part in first if first[part] == "m0500"}
    more = timed({**subscribers, "new": Subscriber(names)}, first)
    moved = {part for part in first if first[part] != more[part]}
    assert len(moved) == 9 and {more[part] for part in moved} == {"new"}
    timed(subscribers, dict.fromkeys(first, "m0000"))
    assert max(took) < 0.1, took
