"""The effects that a controller returns; its event loop or the simulator performs them in the given order.

Each docstring names the event that reports the result. Effects of different kinds may be in progress at the same time.
At most one write per partition and one update per broker are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicRecord
from sparklog.protocol.messages import ControlUpdate

#: The ``StateWrite.expected_version`` of a node to be created.
CREATE = -1


@dataclass(frozen=True, slots=True)
class StateWrite:
    """A compare-and-set of one partition's node.

    Each write is a separate ZooKeeper multi, which also checks the controller epoch and that the topic with this id
    still exists.
    """

    tp: TopicPartition
    topic_id: str
    state: LeaderAndIsr
    leader_incarnation: int
    expected_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteStates:
    """Send these writes in this order, without waiting for the result of one before the next.

    The result of each write is in a StatesWritten, StatesRefused or StatesUnknown, unless the controller is Fenced.
    """

    writes: tuple[StateWrite, ...]


@dataclass(frozen=True, slots=True)
class ReadStates:
    """Read these nodes after all earlier writes. The result is StatesRead."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class WriteTopic:
    """Set the topic's record and, if ``writes`` are given, these partitions' states, in one multi.

    The multi also checks the controller epoch and the topic id. The result is TopicWritten or TopicNotWritten, or
    Fenced. At most one WriteTopic is in flight per topic. ``ended`` are the partitions whose reassignments this write
    completes.
    """

    record: TopicRecord
    expected_version: int
    writes: tuple[StateWrite, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadTopic:
    """Read the topic's record after all earlier writes. The result is TopicRead or TopicGone."""

    name: str


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send the update to this broker. The result is UpdateReplied or UpdateLost."""

    broker: BrokerEndpoint
    update_id: int
    update: ControlUpdate


@dataclass(frozen=True, slots=True)
class DeleteTopicNodes:
    """Delete the topic's nodes and its deletion request, with a check of the controller epoch.

    The result is TopicDeleted.
    """

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropDeletionRequest:
    """Delete only the deletion request, because its topic no longer exists. There is no result."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropElection:
    """Delete a finished request for elections. The deletion notifies the requester. There is no result."""

    name: str


@dataclass(frozen=True, slots=True)
class TrustBroker:
    """Clear the broker's mark as untrusted, unless a later incarnation has registered.

    No ISR contains the broker any more because of an earlier incarnation. There is no result.
    """

    broker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RequestLogEnds:
    """Request the log ends of these partitions from the broker.

    The result is LogEndsRead, or no event if the broker does not respond.
    """

    broker: BrokerEndpoint
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RaiseCounters:
    """Raise ``/controller_epoch`` and ``/brokers/producer_ids`` to at least these values.

    This is the last effect of the term. The term then ends; ``detail`` is the reason.
    """

    controller_epoch: int
    producer_ids: int
    detail: str


@dataclass(frozen=True, slots=True)
class Resign:
    """The end of the controller's term. The performer performs no further effect of this term."""

    detail: str


@dataclass(frozen=True, slots=True)
class ControllerReport:
    """A report: the performer logs a line with ``detail`` and raises the counter ``kind``.

    ``kind`` is the counter's name. ``grave`` means that an operator should read the report.
    """

    kind: str
    detail: str
    count: int = 1
    grave: bool = False


Effect = (
    WriteStates
    | ReadStates
    | WriteTopic
    | ReadTopic
    | SendUpdate
    | DeleteTopicNodes
    | DropDeletionRequest
    | DropElection
    | TrustBroker
    | RequestLogEnds
    | RaiseCounters
    | Resign
    | ControllerReport
)
