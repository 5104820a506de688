"""Messages about consumer groups: their members, subscriptions and committed offsets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import NO_EPOCH
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain

#: ``Heartbeat.member_epoch`` of a member that joins, of a member that leaves, and of a static member that leaves and is
#: expected to return with the same instance id.
JOIN, LEAVE, LEAVE_STATIC = 0, -1, -2


class GroupOffset(msgspec.Struct, frozen=True, array_like=True):
    """A group's committed offset in one partition.

    ``offset`` is the offset of the next record that the group reads. ``topic_id`` and ``leader_epoch`` show whether the
    log is still the one that the group has read. An unknown topic id is empty, and an unknown leader epoch is -1.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    leader_epoch: int = -1
    metadata: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class CommitOffsets(Message, frozen=True, tag="commit_offsets"):
    """A request to commit offsets of a group. The coordinator replies when they are committed.

    If a transaction with offsets has committed, its coordinator sends this request. ``transaction`` then has the key of
    the transaction, and the number of this commit among the key's commits and aborts. The request is idempotent.

    ``member_id`` and ``member_epoch`` identify the member that reads these partitions. If ``member_id`` is empty, the
    group must not have members. A client may commit at most ``MAX_ENTRIES`` offsets in one request.
    """

    group: Name
    offsets: PeerEntries[GroupOffset]
    transaction: tuple[str, int] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class CommitOffsetsReply(Message, frozen=True, tag="commit_offsets_reply"):
    """The reply to CommitOffsets: one result per partition, in the order of the request."""

    results: Listed[PartitionResult]
    throttle_time_ms: int = 0


class HoldOffsets(Message, frozen=True, tag="hold_offsets"):
    """A request to the group's coordinator to hold partitions whose offsets are part of an open transaction.

    ``key`` identifies the transaction, in which ``producer_id`` takes part. If the coordinator would refuse a commit of
    these offsets by the member, it also refuses this request, and then the transaction must not commit. Otherwise it
    holds these partitions: a member to which one of them is assigned gets no committed offset for it until the
    transaction has ended. The coordinator replies with an Ack when the hold is durable. Source: KIP-447.
    """

    group: Name
    key: Name
    producer_id: int
    offsets: Entries[GroupOffset]
    member_id: Name
    member_epoch: int


class FetchOffsets(Message, frozen=True, tag="fetch_offsets"):
    """A request for committed offsets of a group.

    If ``partitions`` is None, the request is for all partitions of the group.

    If a member (``member_id``, ``member_epoch``) requests its own partitions, the coordinator need not first confirm
    that it is still the coordinator. A coordinator that knows the member as the owner of these partitions also knows
    all earlier commits.

    While an open transaction of another member contains offsets of a partition (see HoldOffsets), the reply lists this
    partition in ``held`` and has no offset for it. A request for all partitions then fails with UNSTABLE_OFFSET_COMMIT.
    """

    group: Name
    partitions: Entries[tuple[str, int]] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class FetchOffsetsReply(Message, frozen=True, tag="fetch_offsets_reply"):
    """The reply to FetchOffsets. It omits partitions without a committed offset.

    A member must request the offsets of the ``held`` partitions again later. ``refused`` has the partitions of the
    request whose topics the principal may not describe.
    """

    offsets: Listed[GroupOffset]
    held: Listed[tuple[str, int]] = ()
    throttle_time_ms: int = 0
    refused: Listed[PartitionResult] = ()


class TopicPartitions(msgspec.Struct, frozen=True, array_like=True):
    """One topic with a list of its partitions."""

    topic: Name
    topic_id: Name
    partitions: Plain[int]


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A heartbeat of a group member, with its complete state. The reply has the partitions that it should own.

    - ``member_epoch``: the last epoch that the member received; JOIN when the member joins, and then owns no
      partitions; LEAVE or LEAVE_STATIC when it leaves.
    - ``sequence``: increases with each heartbeat of a member, so that the coordinator ignores an older heartbeat that
      arrives late.
    - ``heartbeat_interval_ms``: if nothing changes, the coordinator may delay the reply for this time. The next
      heartbeat of the member ends the delay.
    - ``pattern``: an RE2 expression that must match the whole name of a topic.
    - ``rebalance_timeout_ms``: the time within which the member must give up partitions.

    Source: KIP-848, ConsumerGroupHeartbeat.
    """

    group: Name
    member_id: Name
    member_epoch: int
    sequence: int
    owned: Plain[TopicPartitions] = ()
    topics: Plain[Name] = ()
    pattern: Name = ""
    instance_id: Name = ""
    rack: Name = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    heartbeat_interval_ms: int = 3000


class HeartbeatReply(Message, frozen=True, tag="heartbeat_reply"):
    """The reply to Heartbeat.

    The member first gives up all partitions that are not in ``assigned``, and reports that in a heartbeat. After this
    report, the member starts to read the new partitions.
    """

    member_epoch: int
    assigned: Listed[TopicPartitions] = ()
    throttle_time_ms: int = 0


class MemberDescription(msgspec.Struct, frozen=True, array_like=True):
    """A member of a group, in the reply to DescribeGroup.

    ``owned`` may include partitions that the member must give up. ``target`` lists the partitions that the member
    should have.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    rack: str
    member_epoch: int
    topics: Listed[str]
    pattern: str
    owned: Listed[TopicPartitions]
    target: Listed[TopicPartitions]


class DescribedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group with its members, in the reply to DescribeGroup.

    ``state`` is "empty" (no members), "reconciling" (partitions change their owners) or "stable". ``protocol`` is empty
    for a group of KIP-848. For a group of Kafka's classic protocol, it is the name of the assignment protocol, or
    "classic" while there is none, and ``group_epoch`` is the generation.
    """

    group: str
    state: str
    group_epoch: int
    members: Listed[MemberDescription] = ()
    protocol: str = ""


class DescribeGroup(Message, frozen=True, tag="describe_group"):
    """A request for the members and the state of a group."""

    group: Name


class DescribeGroupReply(Message, frozen=True, tag="describe_group_reply"):
    """The reply to DescribeGroup. ``description`` is None if there is no such group."""

    description: DescribedGroup | None
    throttle_time_ms: int = 0


class DeleteGroup(Message, frozen=True, tag="delete_group"):
    """A request to delete a group's offsets. The broker refuses it while the group has members. The reply is an Ack."""

    group: Name


class ListGroups(Message, frozen=True, tag="list_groups"):
    """A request for the groups that this broker coordinates."""


class ListGroupsReply(Message, frozen=True, tag="list_groups_reply"):
    """The reply to ListGroups: the groups that the broker coordinates."""

    groups: Listed[str]
    #: The state and the number of members of each group, in the order of ``groups``.
    states: Listed[tuple[str, int]] = ()
    throttle_time_ms: int = 0
