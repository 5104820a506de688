"""Messages about consumer groups: how far they have read."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.protocol.fields import Entries, Message, Name, PartitionResult


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
    transaction's coordinator hands over what was sent with it: repeating one is doing it once."""

    group: Name
    offsets: Entries[GroupOffset]
    transaction: tuple[str, int] | None = None


class CommitOffsetsReply(Message, frozen=True, tag="commit_offsets_reply"):
    results: tuple[PartitionResult, ...]


class FetchOffsets(Message, frozen=True, tag="fetch_offsets"):
    """``partitions`` None: all the group has."""

    group: Name
    partitions: Entries[tuple[str, int]] | None = None


class FetchOffsetsReply(Message, frozen=True, tag="fetch_offsets_reply"):
    """Partitions without an offset are left out."""

    offsets: tuple[GroupOffset, ...]


class ListGroups(Message, frozen=True, tag="list_groups"):
    """Groups that this broker coordinates."""


class ListGroupsReply(Message, frozen=True, tag="list_groups_reply"):
    groups: tuple[str, ...]
