"""The administration of consumer groups: listing, describing and deleting them, and setting their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.blocking_coordinator import BlockingCoordinator, ask_all_brokers
from sparklog.client.cluster.coordinator_search import GROUP
from sparklog.client.cluster.request_pieces import pieces
from sparklog.errors import BrokerError
from sparklog.model import INTERNAL_PREFIX, TopicPartition
from sparklog.protocol.messages import (
    Ack,
    CommitOffsets,
    CommitOffsetsReply,
    DeleteGroup,
    DescribeGroup,
    DescribeGroupReply,
    FetchOffsets,
    FetchOffsetsReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    ListGroups,
    ListGroupsReply,
    TopicPartitions,
)

#: The topic whose partition leaders are the groups' coordinators.
OFFSETS_TOPIC = INTERNAL_PREFIX + "consumer_offsets"


def commit_offsets(
    cluster: BlockingCluster, group: str, offsets: Sequence[GroupOffset], *, timeout_s: float | None = None
) -> None:
    """Set offsets of a group in some partitions. Return after the offsets are committed.

    The coordinator may not know a new topic yet. So the call is retried for a grace period if a partition is unknown.

    Raises:
        BrokerError: the error of the first refused partition; the offsets of the other partitions are set.
        ClientTimeout: no coordinator responded in time; the offsets may be set.
    """
    coordinator = BlockingCoordinator(cluster, GROUP, group)

    def attempt() -> None:
        refused: BrokerError | None = None
        for piece in pieces(offsets):
            request = CommitOffsets(0, group, tuple(piece))
            for result in coordinator.ask_once(request, CommitOffsetsReply).results:
                if result.code and refused is None:
                    place = f"group {group!r}, {result.topic}-{result.partition}"
                    refused = BrokerError(result.code, result.detail or place)
        if refused is not None:
            raise refused

    cluster.retrying(f"CommitOffsets, coordinator of group {group!r}", attempt, timeout_s=timeout_s)


def group_offsets(cluster: BlockingCluster, group: str, *, timeout_s: float | None = None) -> tuple[GroupOffset, ...]:
    """Return all offsets of a group; an empty tuple for an unknown group.

    A coordinator that is partitioned from the cluster does not know that it was replaced, and its offsets may be old. A
    client that continued from old offsets would read records again. So the other brokers must confirm that the
    coordinator is the current one.

    Raises:
        ClientTimeout: no coordinator responded in time, or at most half of the brokers confirmed the coordinator.
    """
    asked_before = False

    def attempt() -> tuple[GroupOffset, ...]:
        nonlocal asked_before
        found = cluster.ask_any(FindCoordinator(0, GROUP, group), FindCoordinatorReply)
        tp = TopicPartition(OFFSETS_TOPIC, found.partition)
        leader = cluster.leader(tp, refresh=asked_before)
        asked_before = True
        reply = cluster.ask_broker(leader.broker_id, FetchOffsets(0, group), FetchOffsetsReply)
        cluster.confirm(tp, leader)
        return reply.offsets

    return cluster.retrying(f"offsets of group {group!r}", attempt, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group with its state, as in ``GroupDescription``, and its number of members."""

    group: str
    state: str
    members: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group.

    ``owned`` are the partitions that only this member may read. ``target`` are the partitions that the member should
    have. The two differ during a rebalance.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    rack: str
    member_epoch: int
    topics: tuple[str, ...]
    pattern: str
    owned: tuple[TopicPartition, ...]
    target: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group with its members.

    ``state``: ``"empty"`` (no members), ``"reconciling"`` (a rebalance is in progress) or ``"stable"``. For a group of
    Kafka's classic protocol, ``protocol`` is the assignment strategy, or ``"classic"`` if the members have chosen none
    yet, and ``group_epoch`` is the generation. For any other group, ``protocol`` is empty.
    """

    group: str
    state: str
    group_epoch: int
    members: tuple[GroupMember, ...]
    protocol: str = ""


def list_groups(cluster: BlockingCluster) -> list[GroupListing]:
    """Return the groups of all live brokers, sorted by name.

    Raises ClientTimeout if a broker did not respond, or BrokerError for an error that is not retriable.
    """
    replies = ask_all_brokers(cluster, "groups", ListGroups(0), ListGroupsReply)
    found: dict[str, GroupListing] = {}
    for reply in replies:
        states = reply.states or (("", 0),) * len(reply.groups)
        found.update((name, GroupListing(name, *state)) for name, state in zip(reply.groups, states, strict=True))
    return [found[name] for name in sorted(found)]


def describe_group(cluster: BlockingCluster, group: str) -> GroupDescription | None:
    """Return the description of a group, or None if the group does not exist.

    Raises ClientTimeout if the group's coordinator did not respond.
    """
    reply = BlockingCoordinator(cluster, GROUP, group).ask(DescribeGroup(0, group), DescribeGroupReply)
    found = reply.description
    if found is None:
        return None
    members = tuple(
        GroupMember(
            one.member_id,
            one.instance_id,
            one.client_id,
            one.host,
            one.rack,
            one.member_epoch,
            one.topics,
            one.pattern,
            _partitions(one.owned),
            _partitions(one.target),
        )
        for one in found.members
    )
    return GroupDescription(found.group, found.state, found.group_epoch, members, found.protocol)


def _partitions(topics: Iterable[TopicPartitions]) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(found.topic, number) for found in topics for number in found.partitions)


def delete_group(cluster: BlockingCluster, group: str) -> None:
    """Delete a group and its offsets.

    Raises:
        BrokerError: NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND.
        ClientTimeout: the group's coordinator did not respond; the group may be deleted.
    """
    BlockingCoordinator(cluster, GROUP, group).ask(DeleteGroup(0, group), Ack)
