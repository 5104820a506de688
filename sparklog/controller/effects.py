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
    """A compare-and-set of the ZooKeeper node of one partition.

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
    """A command to send these writes one after the other, without waiting for the results.

    The result of each write is in a StatesWritten, StatesRefused or StatesUnknown, unless the event Fenced comes first.
    """

    writes: tuple[StateWrite, ...]


@dataclass(frozen=True, slots=True)
class ReadStates:
    """A command to read the nodes of these partitions after all earlier writes. The result is StatesRead."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class WriteTopic:
    """A command to write a topic's metadata and, if ``writes`` are given, states of its partitions, in one multi.

    The multi (ZooKeeper transaction) also checks the controller epoch and the topic id. The result is TopicWritten,
    TopicNotWritten or Fenced. At most one WriteTopic is in flight per topic. ``ended`` are the partitions whose
    reassignments this write completes.
    """

    record: TopicRecord
    expected_version: int
    writes: tuple[StateWrite, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadTopic:
    """A command to read a topic's metadata after all earlier writes. The result is TopicRead or TopicGone."""

    name: str


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """A command to send an update to a broker. The result is UpdateReplied or UpdateLost."""

    broker: BrokerEndpoint
    update_id: int
    update: ControlUpdate


@dataclass(frozen=True, slots=True)
class DeleteTopicNodes:
    """A command to delete a topic's nodes and its deletion request, provided that the controller epoch is unchanged.

    The result is TopicDeleted.
    """

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropDeletionRequest:
    """A command to delete only a deletion request, because its topic no longer exists. There is no result."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropElection:
    """A command to delete a finished request for elections, which notifies the requester. There is no result."""

    name: str


@dataclass(frozen=True, slots=True)
class TrustBroker:
    """A command to trust an untrusted broker again, unless a later incarnation of it has registered.

    The controller returns this command when no ISR has a member from an earlier incarnation of the broker any more.
    There is no result.
    """

    broker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RequestLogEnds:
    """A command to request the log ends of these partitions from a broker.

    The result is LogEndsRead. If the broker does not respond, there is no result.
    """

    broker: BrokerEndpoint
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RaiseCounters:
    """A command to raise ``/controller_epoch`` and ``/brokers/producer_ids`` to at least these values.

    This is the last effect of the term. The term then ends; ``detail`` is the reason.
    """

    controller_epoch: int
    producer_ids: int
    detail: str


@dataclass(frozen=True, slots=True)
class Resign:
    """A command to end the controller's term and to perform no further effect. ``detail`` is the reason."""

    detail: str


@dataclass(frozen=True, slots=True)
class ControllerReport:
    """A command to log a line with ``detail`` and to increase a counter by ``count``.

    ``kind`` is the counter's name. ``grave`` means that an operator should read the line.
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
