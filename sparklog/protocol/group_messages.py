"""Messages about consumer groups: their members, subscriptions and committed offsets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import NO_EPOCH
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain

#: ``Heartbeat.member_epoch`` of a member that joins, that leaves, and that leaves but is expected back under its
#: instance id.
JOIN, LEAVE, LEAVE_STATIC = 0, -1, -2


class GroupOffset(msgspec.Struct, frozen=True, array_like=True):
    """A committed offset.

    ``offset`` is the next one that the group reads.

    ``topic_id`` and ``leader_epoch`` identify the log; they are empty and -1 if they are unknown.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    leader_epoch: int = -1
    metadata: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class CommitOffsets(Message, frozen=True, tag="commit_offsets"):
    """A request to set a group's offsets; the reply follows after they are committed.

    ``transaction`` (key and decision number) is set if a transaction's coordinator hands over the offsets that were
    sent with it. The request is idempotent. ``member_id`` and ``member_epoch`` name the member that reads these
    partitions; if empty, the group must not have members. A client names at most ``MAX_ENTRIES`` offsets.
    """

    group: Name
    offsets: PeerEntries[GroupOffset]
    transaction: tuple[str, int] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class CommitOffsetsReply(Message, frozen=True, tag="commit_offsets_reply"):
    results: Listed[PartitionResult]


class HoldOffsets(Message, frozen=True, tag="hold_offsets"):
    """A request to hold back the committed offsets of partitions: a member has sent new ones with a transaction.

    ``key`` names the transaction, in which ``producer_id`` takes part. The coordinator refuses the request in the same
    cases as a commit of the member, and then the transaction must not commit. Otherwise a member that gets one of these
    partitions receives no offset for it until the transaction has ended. The reply, an Ack, follows when the hold is
    durable. Source: KIP-447.
    """

    group: Name
    key: Name
    producer_id: int
    offsets: Entries[GroupOffset]
    member_id: Name
    member_epoch: int


class FetchOffsets(Message, frozen=True, tag="fetch_offsets"):
    """A request for committed offsets.

    ``partitions`` None means all of the group.

    A member (``member_id``, ``member_epoch``) requests its own partitions, and the coordinator need not confirm the
    reply: a coordinator that knows the member as their owner also knows all earlier commits. While other members' open
    transactions have offsets of some partitions, these are ``held``. A request for all partitions is then refused with
    UNSTABLE_OFFSET_COMMIT.
    """

    group: Name
    partitions: Entries[tuple[str, int]] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class FetchOffsetsReply(Message, frozen=True, tag="fetch_offsets_reply"):
    """The reply to FetchOffsets, without partitions that have no offset. A member gets those of ``held`` later."""

    offsets: Listed[GroupOffset]
    held: Listed[tuple[str, int]] = ()


class TopicPartitions(msgspec.Struct, frozen=True, array_like=True):
    """Some partitions of one topic."""

    topic: Name
    topic_id: Name
    partitions: Plain[int]


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A member's complete state; the reply has the partitions to own.

    Source: KIP-848, ConsumerGroupHeartbeat.

    ``member_epoch`` is the last received one; 0 (JOIN) at the start, with no owned partitions; LEAVE; LEAVE_STATIC: the
    instance is expected back. ``sequence`` rises with each heartbeat of a member: an older heartbeat that arrives late
    changes nothing. The coordinator may delay the reply for ``heartbeat_interval_ms`` while there is no news; the next
    heartbeat of the member ends the delay. ``pattern`` is RE2, for whole names. Times are in milliseconds;
    ``rebalance_timeout_ms`` is the time to give up partitions.
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

    The member gives up all partitions but ``assigned``, reports that, and only then takes new ones.
    """

    member_epoch: int
    assigned: Listed[TopicPartitions] = ()


class MemberDescription(msgspec.Struct, frozen=True, array_like=True):
    """A member.

    ``owned`` partitions may include some that it has yet to give up; ``target`` are those that it should have.
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
    """A group. ``state`` is empty (only offsets), reconciling (partitions change their owners) or stable."""

    group: str
    state: str
    group_epoch: int
    members: Listed[MemberDescription] = ()


class DescribeGroup(Message, frozen=True, tag="describe_group"):
    group: Name


class DescribeGroupReply(Message, frozen=True, tag="describe_group_reply"):
    """The reply to DescribeGroup; None if there is no such group."""

    description: DescribedGroup | None


class DeleteGroup(Message, frozen=True, tag="delete_group"):
    """A request to delete a group's offsets. It is refused while the group has members. The reply is an Ack."""

    group: Name


class ListGroups(Message, frozen=True, tag="list_groups"):
    """A request for the groups that this broker coordinates."""


class ListGroupsReply(Message, frozen=True, tag="list_groups_reply"):
    groups: Listed[str]
    #: For each group its state and its number of members.
    states: Listed[tuple[str, int]] = ()
