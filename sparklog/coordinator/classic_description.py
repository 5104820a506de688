"""Descriptions of classic groups, for lists of groups and for the deletion of offsets."""

from __future__ import annotations

from collections.abc import Generator

from sparklog.coordinator.classic_group import ClassicGroup, GroupPhase
from sparklog.coordinator.classic_member import ClassicMember
from sparklog.coordinator.consumer_protocol import CONSUMER, assigned_partitions, subscribed_topics
from sparklog.protocol.messages import DescribedGroup, MemberDescription, TopicPartitions

_CONDITIONS = {GroupPhase.EMPTY: "empty", GroupPhase.STABLE: "stable"}


def classic_condition(group: ClassicGroup) -> str:
    """Return the group's state in the terms of KIP-848: "empty", "reconciling" or "stable"."""
    return _CONDITIONS.get(group.phase, "reconciling")


def classic_topics(group: ClassicGroup) -> frozenset[str] | None:
    """Return the topics to which the members of a group of consumers subscribe, or None for other groups."""
    if group.protocol_type != CONSUMER:
        return None
    metadata = (data for member in group.members.values() for _, data in member.protocols)
    return frozenset(topic for found in metadata for topic in subscribed_topics(found))


def describe_classic(group: ClassicGroup) -> Generator[None, None, DescribedGroup]:
    """Return a description of the group. This is a generator that yields before each member."""
    members = []
    for _, member in sorted(group.members.items()):
        yield
        members.append(_described(group, member))
    return DescribedGroup(
        group.group, classic_condition(group), group.generation, tuple(members), group.protocol or "classic"
    )


def _described(group: ClassicGroup, member: ClassicMember) -> MemberDescription:
    topics: tuple[str, ...] = ()
    owned: tuple[TopicPartitions, ...] = ()
    if group.protocol_type == CONSUMER:
        topics = tuple(sorted({one for _, data in member.protocols for one in subscribed_topics(data)}))
        if group.phase is GroupPhase.STABLE:
            found = assigned_partitions(member.assignment)
            owned = tuple(TopicPartitions(topic, "", tuple(sorted(numbers))) for topic, numbers in sorted(found))
    return MemberDescription(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.host,
        "",
        group.generation,
        topics,
        "",
        owned,
        owned,
    )
