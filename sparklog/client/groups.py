"""Offsets of consumer groups: setting, asking, listing. A group here is a name with offsets, not a set of members."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.client.coordination import GROUP, Coordination, ask_all_brokers
from sparklog.client.link import ClusterLink
from sparklog.errors import BrokerError
from sparklog.model import INTERNAL_PREFIX, TopicPartition
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    FetchOffsets,
    FetchOffsetsReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    ListGroups,
    ListGroupsReply,
)

#: A group's coordinator is the leader of one of its partitions.
OFFSETS_TOPIC = INTERNAL_PREFIX + "consumer_offsets"


def commit_offsets(
    link: ClusterLink, group: str, offsets: Sequence[GroupOffset], *, timeout_s: float | None = None
) -> None:
    """Set offsets of a group; the others stay. Answered when they are committed.

    Raises:
        BrokerError: of the first partition refused.
        ClientTimeout: no coordinator answered in time; they may have been set.
    """
    request = CommitOffsets(0, group, tuple(offsets))
    reply = Coordination(link).ask(GROUP, group, request, CommitOffsetsReply, timeout_s=timeout_s)
    for result in reply.results:
        if result.code:
            raise BrokerError(result.code, result.detail or f"group {group!r}, {result.topic}-{result.partition}")


def group_offsets(link: ClusterLink, group: str, *, timeout_s: float | None = None) -> tuple[GroupOffset, ...]:
    """All offsets a group has; none for a group that nobody has written to.

    A coordinator that was cut off and deposed does not know it. Who went on from what it tells would do twice what has
    been committed since, so the other brokers have to confirm it.

    Raises:
        ClientTimeout: no coordinator answered in time, or not more than half of the brokers confirmed the one that did.
    """
    asked_before = False

    def attempt() -> tuple[GroupOffset, ...]:
        nonlocal asked_before
        found = link.ask_any(FindCoordinator(0, GROUP, group), FindCoordinatorReply)
        tp = TopicPartition(OFFSETS_TOPIC, found.partition)
        leader = link.leader(tp, refresh=asked_before)
        asked_before = True
        reply = link.ask_broker(leader.broker_id, FetchOffsets(0, group), FetchOffsetsReply)
        link.confirm(tp, leader)
        return reply.offsets

    return link.retrying(f"offsets of group {group!r}", attempt, timeout_s=timeout_s)


def list_groups(link: ClusterLink) -> list[str]:
    """The groups of all live brokers, in order. Raises as ``ask_all_brokers``."""
    replies = ask_all_brokers(link, "groups", ListGroups(0), ListGroupsReply)
    return sorted({group for reply in replies for group in reply.groups})
