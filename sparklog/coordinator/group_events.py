"""What a group coordinator is told: requests about groups, and what became of topics and transactions. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.group_records import About
from sparklog.protocol.messages import GroupOffset, TopicPartitions


@dataclass(frozen=True, slots=True)
class HeartbeatRequested:
    """As ``messages.Heartbeat``."""

    ticket: int
    group: str
    member_id: str
    member_epoch: int
    sequence: int
    owned: tuple[TopicPartitions, ...]
    about: About


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """As ``messages.CommitOffsets``."""

    ticket: int
    group: str
    offsets: tuple[GroupOffset, ...]
    transaction: tuple[str, int] | None = None
    member_id: str = ""
    member_epoch: int = -1


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """As ``messages.HoldOffsets``; ``coordinator_epoch``: of the transaction's, who knows the producer."""

    ticket: int
    group: str
    key: str
    producer_id: int
    coordinator_epoch: int
    offsets: tuple[GroupOffset, ...]
    member_id: str
    member_epoch: int


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """The transaction of ``key`` that ``producer_id`` took part in is over."""

    group: str
    key: str
    producer_id: int


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """As ``messages.DeleteGroup``."""

    ticket: int
    group: str


@dataclass(frozen=True, slots=True)
class TopicsSeen:
    """What is known of topics now; those left out are as they were."""

    topics: Mapping[str, TopicView]


@dataclass(frozen=True, slots=True)
class TopicsGone:
    """These topics (name, topic id) were deleted; an empty id: whatever had this name."""

    topics: tuple[tuple[str, str], ...]


GroupRequest = CommitRequested | HoldRequested | HeartbeatRequested | DeleteRequested
GroupEvent = GroupRequest | HoldEnded | TopicsSeen | TopicsGone
