"""One member of a group: its subscription, its owned and its target partitions, and its deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from sparklog.coordinator.assignor import Part
from sparklog.coordinator.group_records import FORMAT_VERSION, About, MemberState, OwnedTopic
from sparklog.protocol.messages import MemberDescription, TopicPartitions

NEVER = 2**63 - 1
#: The epoch of each partition, by topic, topic id and partition number.
ByTopic = dict[str, dict[str, dict[int, int]]]


@dataclass(slots=True)
class Member:
    """A member of a group, with its owned and target partitions and its deadlines. Only ``Membership`` uses it."""

    member_id: str
    about: About
    #: The newest group epoch that the member has received.
    epoch: int = 0
    #: The group's epoch when the member joined. A request with an earlier epoch is from an earlier membership of the
    #: same member id.
    joined: int = 0
    #: The owned partitions, each with the group epoch in which it was assigned. ``own`` and ``disown`` change them.
    owned: dict[Part, int] = field(default_factory=dict)
    #: The owned partitions and epochs by topic and topic id, or None if ``grouped`` must compute them again. To group
    #: 100,000 partitions takes much longer than to apply the changes of one step.
    by_topic: ByTopic | None = None
    target: set[Part] = field(default_factory=set)
    #: The partitions that the member reported in its last heartbeat, as a set (``reported``) and as the heartbeat
    #: listed them (``named``), and the sequence number of that heartbeat.
    reported: frozenset[Part] = frozenset()
    named: tuple[TopicPartitions, ...] = ()
    sequence: int = -1
    #: The partitions of the last response, as a set and in the form of the response. It is kept because most responses
    #: equal the last one.
    responded: tuple[frozenset[Part], tuple[TopicPartitions, ...]] = (frozenset(), ())
    #: The partitions that the member received last from this coordinator; None if it has received none yet. The member
    #: of a Kafka client (``of_kafka``) may not have taken them when it sends the next heartbeat.
    told: frozenset[Part] | None = None
    of_kafka: bool = False
    #: The time at which the member is removed if it sends no heartbeat, and the time at which it is removed if it has
    #: not given up its partitions.
    session_ms: int = NEVER
    give_up_ms: int = NEVER
    #: The ticket of the heartbeat that waits for a change, and the time at which it gets its response even without one.
    held: int | None = None
    held_until_ms: int = NEVER

    @property
    def giving_up(self) -> bool:
        # A set copies the hashes of the dict's keys; a comparison with a view of the keys would compute each hash
        # again.
        return not frozenset(self.owned) <= self.target

    @property
    def assigned(self) -> frozenset[Part]:
        owned = frozenset(self.owned)
        return owned if owned <= self.target else owned & self.target

    def own(self, parts: Iterable[Part], epoch: int) -> None:
        """Add partitions, which were assigned in the group epoch ``epoch``, to the owned partitions."""
        owned, grouped = self.owned, self.grouped
        for part in parts:
            owned[part] = epoch
            topic, topic_id, number = part
            _numbers(grouped, topic, topic_id)[number] = epoch

    def disown(self, parts: Collection[Part]) -> None:
        """Remove partitions from the owned partitions."""
        # This is optimized, because a member may give up 100,000 partitions at once and each lookup takes a few hundred
        # nanoseconds.
        if len(self.owned) < 2 * len(parts):
            kept = frozenset(self.owned).difference(parts)
            self.owned, self.by_topic = {part: self.owned[part] for part in kept}, None
            return
        deque(map(self.owned.__delitem__, parts), maxlen=0)
        grouped = self.grouped if self.by_topic is not None else {}
        for topic, topic_id, number in parts if grouped else ():
            numbers = grouped[topic][topic_id]
            del numbers[number]
            if not numbers:
                del grouped[topic][topic_id]

    @property
    def grouped(self) -> ByTopic:
        """Return the owned partitions by topic and topic id, each with the group epoch in which it was assigned."""
        grouped = self.by_topic
        if grouped is None:
            grouped = self.by_topic = {}
            for (topic, topic_id, number), epoch in self.owned.items():
                _numbers(grouped, topic, topic_id)[number] = epoch
        return grouped

    def report(self, named: tuple[TopicPartitions, ...]) -> None:
        """Record the owned partitions that a heartbeat of the member reports.

        Usually they are the same as in the last heartbeat or response.
        """
        if named == self.named:
            return
        self.named = named
        if named == self.responded[1]:
            self.reported = self.responded[0]
            return
        self.reported = frozenset(
            (found.topic, found.topic_id, number) for found in named for number in found.partitions
        )

    def response(self, assigned: frozenset[Part]) -> tuple[TopicPartitions, ...]:
        """Return the assigned partitions, grouped by topic as in the response to a heartbeat."""
        if assigned != self.responded[0]:
            whole = len(assigned) == len(self.owned)
            named = self._owned_partitions() if whole else topic_partitions(assigned)
            self.responded = (assigned, named)
        return self.responded[1]

    @property
    def due_ms(self) -> int:
        return min(self.session_ms, self.give_up_ms, self.held_until_ms if self.held is not None else NEVER)

    def state(self) -> MemberState:
        return MemberState(FORMAT_VERSION, self.about, self.epoch, self._owned_topics(), self.sequence, self.joined)

    def _owned_topics(self) -> tuple[OwnedTopic, ...]:
        return tuple(
            OwnedTopic(topic, topic_id, tuple(numbers := sorted(epochs)), tuple(map(epochs.__getitem__, numbers)))
            for topic, by_id in sorted(self.grouped.items())
            for topic_id, epochs in sorted(by_id.items())
        )

    def _owned_partitions(self) -> tuple[TopicPartitions, ...]:
        return tuple(
            TopicPartitions(topic, topic_id, tuple(sorted(epochs)))
            for topic, by_id in sorted(self.grouped.items())
            for topic_id, epochs in sorted(by_id.items())
        )

    def describe(self) -> MemberDescription:
        about = self.about
        owned = self._owned_partitions()
        target = owned if self.target == frozenset(self.owned) else topic_partitions(self.target)
        return MemberDescription(
            self.member_id,
            about.instance_id,
            about.client_id,
            about.host,
            about.rack,
            self.epoch,
            about.topics,
            about.pattern,
            owned,
            target,
        )


def topic_partitions(parts: Iterable[Part]) -> tuple[TopicPartitions, ...]:
    """Return the partitions, sorted and grouped by topic."""
    # Nested dicts, because a lookup by one string is faster than by a pair, and sorting numbers is faster than sorting
    # tuples.
    by_topic: dict[str, dict[str, list[int]]] = {}
    for topic, topic_id, number in parts:
        by_id = by_topic.get(topic)
        if by_id is None:
            by_id = by_topic[topic] = {}
        numbers = by_id.get(topic_id)
        if numbers is None:
            numbers = by_id[topic_id] = []
        numbers.append(number)
    return tuple(
        TopicPartitions(topic, topic_id, tuple(sorted(numbers)))
        for topic, by_id in sorted(by_topic.items())
        for topic_id, numbers in sorted(by_id.items())
    )


def _numbers(grouped: ByTopic, topic: str, topic_id: str) -> dict[int, int]:
    by_id = grouped.get(topic)
    if by_id is None:
        by_id = grouped[topic] = {}
    numbers = by_id.get(topic_id)
    if numbers is None:
        numbers = by_id[topic_id] = {}
    return numbers


def owned_parts(owned: Iterable[OwnedTopic]) -> Iterable[tuple[Part, int]]:
    """Yield each owned partition with the group epoch in which it was assigned."""
    for found in owned:
        for number, epoch in zip(found.partitions, found.epochs, strict=True):
            yield (found.topic, found.topic_id, number), epoch
