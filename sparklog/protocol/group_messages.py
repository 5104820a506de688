"""Messages about consumer groups: who is in one and reads what, and how far they have read."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import NO_EPOCH
from sparklog.protocol.fields import Entries, Listed, Message, Name, PartitionResult, PeerEntries, Plain

#: ``Heartbeat.member_epoch`` of who joins, who leaves, and who leaves but is expected back under its instance id.
JOIN, LEAVE, LEAVE_STATIC = 0, -1, -2


class GroupOffset(msgspec.Struct, frozen=True, array_like=True):
    """``offset``: the next one the group will read. ``topic_id`` and ``leader_epoch`` say of which log; empty and -1
    when not known."""

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    leader_epoch: int = -1
    metadata: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class CommitOffsets(Message, frozen=True, tag="commit_offsets"):
    """Set a group's offsets. Answered when they are committed. ``transaction`` (key and decision number) when a
    transaction's coordinator hands over what was sent with it: repeating one is doing it once. ``member_id`` and
    ``member_epoch`` of who reads these partitions; empty: nobody may be a member then. A client names ``MAX_ENTRIES``
    offsets at most."""

    group: Name
    offsets: PeerEntries[GroupOffset]
    transaction: tuple[str, int] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class CommitOffsetsReply(Message, frozen=True, tag="commit_offsets_reply"):
    results: Listed[PartitionResult]


class HoldOffsets(Message, frozen=True, tag="hold_offsets"):
    """A member has sent these offsets with the transaction of ``key``, in which ``producer_id`` takes part by now.
    Refused as its commits are, and then the transaction must not commit. Otherwise whoever is given one of these
    partitions is told no offset of it until the transaction has ended. Answered with Ack when that is durable. Source:
    KIP-447."""

    group: Name
    key: Name
    producer_id: int
    offsets: Entries[GroupOffset]
    member_id: Name
    member_epoch: int


class FetchOffsets(Message, frozen=True, tag="fetch_offsets"):
    """``partitions`` None: all the group has. A member (``member_id``, ``member_epoch``) is told of its own partitions,
    and need not have the answer confirmed: whoever knows that they are its own knows what was committed before. While
    transactions are open that others have sent offsets of some with, these are ``held``; of all, it is refused with
    UNSTABLE_OFFSET_COMMIT."""

    group: Name
    partitions: Entries[tuple[str, int]] | None = None
    member_id: Name = ""
    member_epoch: int = NO_EPOCH


class FetchOffsetsReply(Message, frozen=True, tag="fetch_offsets_reply"):
    """Partitions without an offset are left out. ``held``: of these a member is told later."""

    offsets: Listed[GroupOffset]
    held: Listed[tuple[str, int]] = ()


class TopicPartitions(msgspec.Struct, frozen=True, array_like=True):
    """Some partitions of one topic."""

    topic: Name
    topic_id: Name
    partitions: Plain[int]


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """All that a member is and has; the answer says what it should have. Source: KIP-848, ConsumerGroupHeartbeat.

    ``member_epoch``: as told last; 0 (JOIN) to begin, with nothing owned; LEAVE; LEAVE_STATIC: the instance is expected
    back. ``sequence`` rises with each heartbeat of a member: an older one that comes late changes nothing. The
    coordinator may keep the answer for ``heartbeat_interval_ms`` while there is nothing new; the next heartbeat of the
    member ends that. ``pattern``: RE2, for whole names. Times in milliseconds; ``rebalance_timeout_ms``: for giving up
    partitions.
    """

    group: Name
    member_id: Name
    member_epoch: int
    sequence: int
    owned: Entries[TopicPartitions] = ()
    topics: Entries[Name] = ()
    pattern: Name = ""
    instance_id: Name = ""
    rack: Name = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    heartbeat_interval_ms: int = 3000


class HeartbeatReply(Message, frozen=True, tag="heartbeat_reply"):
    """``assigned``: what the member should have: it gives up all else, says so, and only then takes what is new."""

    member_epoch: int
    assigned: Listed[TopicPartitions] = ()


class MemberDescription(msgspec.Struct, frozen=True, array_like=True):
    """``owned``: what it has, perhaps not given up yet; ``target``: what it should have."""

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


class GroupDescription(msgspec.Struct, frozen=True, array_like=True):
    """``state``: empty (offsets alone), reconciling (partitions are changing hands), stable."""

    group: str
    state: str
    group_epoch: int
    members: Listed[MemberDescription] = ()


class DescribeGroup(Message, frozen=True, tag="describe_group"):
    group: Name


class DescribeGroupReply(Message, frozen=True, tag="describe_group_reply"):
    """None: there is no such group."""

    description: GroupDescription | None


class DeleteGroup(Message, frozen=True, tag="delete_group"):
    """Forget its offsets. Refused while it has members. Answered with Ack."""

    group: Name


class ListGroups(Message, frozen=True, tag="list_groups"):
    """Groups that this broker coordinates."""


class ListGroupsReply(Message, frozen=True, tag="list_groups_reply"):
    groups: Listed[str]
    #: Of each: its state, and how many members.
    states: Listed[tuple[str, int]] = ()
