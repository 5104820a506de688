"""Events of a group coordinator: requests about groups, and changes of topics and transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.classic_events import ClassicRequest
from sparklog.coordinator.group_records import About
from sparklog.coordinator.group_target import Target, TargetInputs
from sparklog.protocol.messages import GroupOffset, TopicPartitions


@dataclass(frozen=True, slots=True)
class HeartbeatRequested:
    """A ``messages.Heartbeat`` request of a group member."""

    ticket: int
    group: str
    member_id: str
    member_epoch: int
    sequence: int
    owned: tuple[TopicPartitions, ...]
    about: About


@dataclass(frozen=True, slots=True)
class ConsumerHeartbeatRequested:
    """Kafka's ConsumerGroupHeartbeat request of a member. The response is immediate.

    A field that is None has not changed since the member's last request. ``owned`` has the partitions that the member
    has, by topic id. It may lack partitions of the last response that the member has not taken yet.
    """

    ticket: int
    group: str
    member_id: str
    member_epoch: int
    session_timeout_ms: int
    heartbeat_interval_ms: int
    client_id: str = ""
    host: str = ""
    owned: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    instance_id: str | None = None
    rack: str | None = None
    rebalance_timeout_ms: int | None = None

    def about(self, before: About | None) -> About:
        """Return the member's data, with the fields of ``before`` that have not changed."""
        known = before or About()
        return About(
            known.topics if self.topics is None else self.topics,
            known.pattern if self.pattern is None else self.pattern,
            known.rack if self.rack is None else self.rack,
            known.instance_id if self.instance_id is None else self.instance_id,
            self.session_timeout_ms,
            known.rebalance_timeout_ms if self.rebalance_timeout_ms is None else self.rebalance_timeout_ms,
            self.heartbeat_interval_ms,
            self.client_id,
            self.host,
        )


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """A request to commit offsets of a group: ``messages.CommitOffsets``, or Kafka's OffsetCommit.

    Members of a classic group have a generation instead of an epoch, and may have an instance id.
    """

    ticket: int
    group: str
    offsets: tuple[GroupOffset, ...]
    transaction: tuple[str, int] | None = None
    member_id: str = ""
    member_epoch: int = -1
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """A ``messages.HoldOffsets`` request: a member is about to send offsets of these partitions with a transaction.

    Until the transaction ends, no other member may fetch the committed offsets of the partitions.
    ``coordinator_epoch`` is the leader epoch in which the transaction's coordinator leads its own partition.
    """

    ticket: int
    group: str
    key: str
    producer_id: int
    coordinator_epoch: int
    offsets: tuple[GroupOffset, ...]
    member_id: str
    member_epoch: int
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class OffsetsDeleteRequested:
    """Kafka's OffsetDelete request: delete the offsets of some partitions (topic, number).

    The outcome is ``OffsetsDeleted``. The offsets of topics to which a member subscribes stay.
    """

    ticket: int
    group: str
    partitions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """The event that a transaction is over: the transaction of ``key`` in which ``producer_id`` took part.

    All members may again fetch the group's offsets that they could not fetch because of this transaction.
    """

    group: str
    key: str
    producer_id: int


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """A ``messages.DeleteGroup`` request to delete a consumer group."""

    ticket: int
    group: str


@dataclass(frozen=True, slots=True)
class TopicsSeen:
    """The event that the broker reports the current state of some topics. Other topics are unchanged."""

    topics: Mapping[str, TopicView]


@dataclass(frozen=True, slots=True)
class TopicsGone:
    """The event that topics (name, topic id) were deleted. An empty topic id means every topic with this name."""

    topics: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TargetComputed:
    """The event that another thread has computed a target assignment from these inputs."""

    group: str
    inputs: TargetInputs
    target: Target


@dataclass(frozen=True, slots=True)
class Resumed:
    """The event that a later iteration of the event loop has begun, as Resume has requested.

    The remaining work of the group continues.
    """

    group: str


GroupRequest = (
    CommitRequested
    | HoldRequested
    | HeartbeatRequested
    | ConsumerHeartbeatRequested
    | DeleteRequested
    | OffsetsDeleteRequested
    | ClassicRequest
)
GroupEvent = GroupRequest | HoldEnded | TopicsSeen | TopicsGone | TargetComputed | Resumed
