"""One member of a group: its subscription, its owned and its target partitions, and its deadlines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparklog.coordinator.assignor import Part
from sparklog.coordinator.group_records import FORMAT_VERSION, About, MemberState, OwnedTopic
from sparklog.protocol.messages import MemberDescription, TopicPartitions

NEVER = 2**63 - 1


@dataclass(slots=True)
class Member:
    """A member, owned by its group's ``Membership``."""

    member_id: str
    about: About
    #: The newest epoch that the member has received.
    epoch: int = 0
    #: The group's epoch when the member joined. A request with an earlier epoch belongs to an earlier membership.
    joined: int = 0
    #: The owned partitions, each with the group epoch in which it was assigned.
    owned: dict[Part, int] = field(default_factory=dict)
    target: set[Part] = field(default_factory=set)
    #: The partitions that the member had, or was about to take, in its last heartbeat, which had this sequence.
    reported: frozenset[Part] = frozenset()
    sequence: int = -1
    #: The times at which the member is removed for silence, and for partitions that it does not give up.
    session_ms: int = NEVER
    give_up_ms: int = NEVER
    #: The ticket of the heartbeat that waits for news, and the time at which it gets its response anyway.
    held: int | None = None
    held_until_ms: int = NEVER

    @property
    def giving_up(self) -> bool:
        # A set of a dict's keys has their hashes already; a view of the keys computes each again.
        return not frozenset(self.owned) <= self.target

    @property
    def assigned(self) -> frozenset[Part]:
        return frozenset(self.owned) & self.target

    @property
    def due_ms(self) -> int:
        return min(self.session_ms, self.give_up_ms, self.held_until_ms if self.held is not None else NEVER)

    def state(self) -> MemberState:
        return MemberState(
            FORMAT_VERSION, self.about, self.epoch, _owned_topics(self.owned), self.sequence, self.joined
        )

    def describe(self) -> MemberDescription:
        about = self.about
        return MemberDescription(
            self.member_id,
            about.instance_id,
            about.client_id,
            about.host,
            about.rack,
            self.epoch,
            about.topics,
            about.pattern,
            topic_partitions(self.owned),
            topic_partitions(self.target),
        )


def topic_partitions(parts: Iterable[Part]) -> tuple[TopicPartitions, ...]:
    """Return the partitions grouped by topic, in order."""
    by_topic: dict[tuple[str, str], list[int]] = {}
    for topic, topic_id, number in parts:
        by_topic.setdefault((topic, topic_id), []).append(number)
    # To sort the numbers of each topic takes a fraction of the time that to sort the parts takes.
    return tuple(TopicPartitions(*topic, tuple(sorted(numbers))) for topic, numbers in sorted(by_topic.items()))


def _owned_topics(owned: Mapping[Part, int]) -> tuple[OwnedTopic, ...]:
    by_topic: dict[tuple[str, str], dict[int, int]] = {}
    for (topic, topic_id, number), epoch in owned.items():
        by_topic.setdefault((topic, topic_id), {})[number] = epoch
    return tuple(
        OwnedTopic(*topic, tuple(numbers := sorted(epochs)), tuple(map(epochs.__getitem__, numbers)))
        for topic, epochs in sorted(by_topic.items(), key=lambda found: found[0])
    )


def owned_parts(owned: Iterable[OwnedTopic]) -> Iterable[tuple[Part, int]]:
    """Yield each partition with the epoch in which it was assigned."""
    for found in owned:
        for number, epoch in zip(found.partitions, found.epochs, strict=True):
            yield (found.topic, found.topic_id, number), epoch
