"""The uniform assignor, which decides which member of a group reads which partition.

It is a pure function.

- Even: the partition counts of two members with the same topics differ by at most one. If members read different
  topics, no move of a single partition to another subscriber would make the counts more even.
- Sticky: within the first rule, a member keeps as many of its partitions as possible.
- Near: when a member can keep or get only some of several partitions, it preferably gets the partitions with a replica
  in its rack. Racks never override the other two rules.

The first step computes the number of partitions of each member, and the second step chooses the partitions. The time
grows with the numbers of partitions, members and different subscriptions. Source: KIP-848, server-side assignors; the
algorithm is sparklog's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

#: Topic name, topic id, partition.
Part = tuple[str, str, int]
#: The maximum number of passes that even out the counts. More than one may be needed: evening out one class of topics
#: can make a class that shares members with it less even.
_PASSES = 50


class TopicView(NamedTuple):
    """A topic as the assignor sees it.

    ``racks`` has the racks of each partition's replicas; it is empty if no broker has a rack.
    """

    topic_id: str
    partitions: int
    racks: tuple[frozenset[str], ...] = ()


class Subscriber(NamedTuple):
    """A group member as the assignor sees it. ``topics`` are the existing topics to which it subscribes."""

    topics: frozenset[str]
    rack: str = ""


class _Class(NamedTuple):
    """A group of topics with the same subscribers. Their partitions are interchangeable except for racks."""

    members: Sequence[str]
    parts: Sequence[Part]


def assign(
    subscribers: Mapping[str, Subscriber], topics: Mapping[str, TopicView], owners: Mapping[Part, str]
) -> dict[str, list[Part]]:
    """Assign every partition of the subscribed topics to one subscriber. Return the partitions of each subscriber.

    ``owners`` has one member for each partition: the member that got it in the last target assignment, or else its
    current owner.
    """
    classes = list(_classes(subscribers, topics))
    kept = [_kept(found, owners) for found in classes]
    counts = _counts(subscribers, classes, kept)
    target: dict[str, list[Part]] = {member: [] for member in subscribers}
    for found, having, count in zip(classes, kept, counts, strict=True):
        _choose(found, subscribers, topics, having=having, count=count, target=target)
    return target


def _classes(subscribers: Mapping[str, Subscriber], topics: Mapping[str, TopicView]) -> Iterable[_Class]:
    """Return the classes, those with the fewest subscribers first, because these have the fewest choices."""
    by_subscription: dict[frozenset[str], list[str]] = {}
    for member in sorted(subscribers):
        by_subscription.setdefault(subscribers[member].topics, []).append(member)
    subscriptions = list(by_subscription)
    by_readers: dict[tuple[int, ...], list[str]] = {}
    for topic in sorted(frozenset().union(*subscriptions)):
        readers = tuple(index for index, wanted in enumerate(subscriptions) if topic in wanted)
        by_readers.setdefault(readers, []).append(topic)
    found = []
    for readers, names in by_readers.items():
        members = sorted(member for index in readers for member in by_subscription[subscriptions[index]])
        numbered = [
            (number, name, topics[name].topic_id) for name in names for number in range(topics[name].partitions)
        ]
        # Sort by partition number first, so that a member that gets consecutive partitions gets some of every topic.
        parts = [(name, topic_id, number) for number, name, topic_id in sorted(numbered)]
        found.append(_Class(members, parts))
    return sorted(found, key=lambda one: len(one.members))


def _kept(found: _Class, owners: Mapping[Part, str]) -> dict[str, list[Part]]:
    kept: dict[str, list[Part]] = {member: [] for member in found.members}
    for part in found.parts:
        owner = owners.get(part)
        if owner in kept:
            kept[owner].append(part)
    return kept


# --- how many ----------------------------------------------------------------------------------------------------


def _counts(
    subscribers: Iterable[str], classes: Sequence[_Class], kept: Sequence[Mapping[str, Sequence[Part]]]
) -> list[dict[str, int]]:
    """Return for each class the number of partitions of each member.

    Each member starts with the partitions that it has. Free partitions go to the least loaded members. Then the counts
    are evened out.
    """
    if len(classes) == 1:
        return [_even(kept[0], len(classes[0].parts))]
    counts = [{member: len(parts) for member, parts in having.items()} for having in kept]
    loads = dict.fromkeys(subscribers, 0)
    for count in counts:
        for member, number in count.items():
            loads[member] += number
    for found, count in zip(classes, counts, strict=True):
        _fill(len(found.parts) - sum(count.values()), count, loads)
    for _ in range(_PASSES):
        if not sum(_level(count, loads) for count in counts):
            break
    return counts


def _even(having: Mapping[str, Sequence[Part]], total: int) -> dict[str, int]:
    """Return even counts for one class.

    If the division leaves a remainder, the members with the most partitions get one more.
    """
    each, over = divmod(total, len(having))
    by_most = sorted(having, key=lambda member: (-len(having[member]), member))
    return {member: each + (place < over) for place, member in enumerate(by_most)}


def _fill(free: int, count: dict[str, int], loads: dict[str, int]) -> None:
    heap = [(loads[member], member) for member in count]
    heapify(heap)
    for _ in range(free):
        load, member = heappop(heap)
        count[member] += 1
        loads[member] = load + 1
        heappush(heap, (load + 1, member))


def _level(count: dict[str, int], loads: dict[str, int]) -> int:
    """Even out the counts of one class: move partitions until loads differ by at most one; return the number moved."""
    least = [(loads[member], member) for member in count]
    most = [(-loads[member], member) for member, number in count.items() if number]
    heapify(least)
    heapify(most)
    moved = 0
    while most:
        load, giver = most[0]
        if -load != loads[giver] or not count[giver]:
            heappop(most)  # The heap entry is stale.
            continue
        while least[0][0] != loads[least[0][1]]:
            heappop(least)
        taker = least[0][1]
        if loads[giver] - loads[taker] < 2:
            break
        moved += 1
        for member, change in ((giver, -1), (taker, 1)):
            count[member] += change
            loads[member] += change
            heappush(least, (loads[member], member))
            heappush(most, (-loads[member], member))
    return moved


# --- which -------------------------------------------------------------------------------------------------------


def _choose(
    found: _Class,
    subscribers: Mapping[str, Subscriber],
    topics: Mapping[str, TopicView],
    *,
    having: Mapping[str, list[Part]],
    count: Mapping[str, int],
    target: dict[str, list[Part]],
) -> None:
    """Choose the partitions of each member.

    A member keeps as many of its partitions as its count allows, and gets the rest from the free ones.
    """
    racks = _racks(found, subscribers, topics)
    taken: set[Part] = set()
    slots: dict[str, int] = {}
    for member in found.members:
        parts, rack = having[member], subscribers[member].rack
        if len(parts) > count[member] and rack and racks:
            parts = sorted(parts, key=lambda part: rack not in racks.get(part, ()))
        parts = parts[: count[member]]
        target[member] += parts
        taken.update(parts)
        if len(parts) < count[member]:
            slots[member] = count[member] - len(parts)
    free = [part for part in found.parts if part not in taken]
    if racks:
        free = _near(free, racks, subscribers, slots=slots, target=target)
    turns = deque(slots)
    for part in free:
        member = turns.popleft()
        target[member].append(part)
        slots[member] -= 1
        if slots[member]:
            turns.append(member)


def _racks(
    found: _Class, subscribers: Mapping[str, Subscriber], topics: Mapping[str, TopicView]
) -> dict[Part, frozenset[str]]:
    """Return for each partition the racks with both a replica and a subscriber; empty if no subscriber has a rack."""
    here = {subscribers[member].rack for member in found.members} - {""}
    if not here:
        return {}
    racks = {}
    for part in found.parts:
        known = topics[part[0]].racks
        near = known[part[2]] & here if part[2] < len(known) else None
        if near:
            racks[part] = near
    return racks


def _near(
    free: Sequence[Part],
    racks: Mapping[Part, frozenset[str]],
    subscribers: Mapping[str, Subscriber],
    *,
    slots: dict[str, int],
    target: dict[str, list[Part]],
) -> list[Part]:
    """Assign free partitions to members in a rack of their replicas; return the partitions that are left.

    Partitions with the fewest such racks come first.
    """
    by_rack: dict[str, deque[str]] = {}
    room: dict[str, int] = {}
    for member, number in slots.items():
        rack = subscribers[member].rack
        by_rack.setdefault(rack, deque()).append(member)
        room[rack] = room.get(rack, 0) + number
    left = []
    for part in sorted(free, key=lambda part: len(racks.get(part, ()))):
        rack = max(racks.get(part, ()), key=lambda rack: (room.get(rack, 0), rack), default="")
        if not rack or not room.get(rack):
            left.append(part)
            continue
        turns = by_rack[rack]
        member = turns.popleft()
        target[member].append(part)
        slots[member] -= 1
        room[rack] -= 1
        if slots[member]:
            turns.append(member)
        else:
            del slots[member]
    return left
