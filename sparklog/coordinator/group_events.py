"""Events of a group coordinator: requests about groups, and news of topics and transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.group_records import About
from sparklog.coordinator.group_target import Target, TargetInputs
from sparklog.protocol.messages import GroupOffset, TopicPartitions


@dataclass(frozen=True, slots=True)
class HeartbeatRequested:
    """A request as ``messages.Heartbeat``."""

    ticket: int
    group: str
    member_id: str
    member_epoch: int
    sequence: int
    owned: tuple[TopicPartitions, ...]
    about: About


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """A request as ``messages.CommitOffsets``."""

    ticket: int
    group: str
    offsets: tuple[GroupOffset, ...]
    transaction: tuple[str, int] | None = None
    member_id: str = ""
    member_epoch: int = -1


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """A request as ``messages.HoldOffsets``.

    ``coordinator_epoch`` is the epoch of the transaction coordinator, which knows the producer.
    """

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
    """The end of the transaction of ``key`` that ``producer_id`` took part in."""

    group: str
    key: str
    producer_id: int


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """A request as ``messages.DeleteGroup``."""

    ticket: int
    group: str


@dataclass(frozen=True, slots=True)
class TopicsSeen:
    """The current state of topics; a topic that is not named is unchanged."""

    topics: Mapping[str, TopicView]


@dataclass(frozen=True, slots=True)
class TopicsGone:
    """The topics (name, topic id) that were deleted; an empty id means any topic with this name."""

    topics: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TargetComputed:
    """The target that was computed from these inputs."""

    group: str
    inputs: TargetInputs
    target: Target


@dataclass(frozen=True, slots=True)
class Resumed:
    """The turn of the event loop in which the group's remaining work continues."""

    group: str


GroupRequest = CommitRequested | HoldRequested | HeartbeatRequested | DeleteRequested
GroupEvent = GroupRequest | HoldEnded | TopicsSeen | TopicsGone | TargetComputed | Resumed
