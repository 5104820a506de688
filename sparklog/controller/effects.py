"""What a controller orders: carried out by its loop (or the simulator), in the order given.

Each docstring says which event brings back the result. Orders of different kinds may overlap in time; at most one
write per partition and one update per broker are under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.model import BrokerEndpoint, LeaderAndIsr, TopicPartition, TopicRecord
from sparklog.protocol.messages import ControlUpdate

#: ``StateWrite.expected_version`` of a node that is to be created.
CREATE = -1


@dataclass(frozen=True, slots=True)
class StateWrite:
    """Compare-and-set one partition's node, in a multi of its own that also checks the controller epoch and that the
    topic of this id still exists."""

    tp: TopicPartition
    topic_id: str
    state: LeaderAndIsr
    leader_incarnation: int
    expected_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteStates:
    """Send all of these pipelined, in this order. Then StatesWritten, StatesRefused or StatesUnknown for each, or
    Fenced."""

    writes: tuple[StateWrite, ...]


@dataclass(frozen=True, slots=True)
class ReadStates:
    """Read these nodes, after everything written so far. Then StatesRead."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class WriteTopic:
    """Set the topic's record and, where ``writes`` are given, these partitions' states: one multi that also checks the
    controller epoch and the topic id. Then TopicWritten or TopicNotWritten, or Fenced. One per topic at a time.
    ``ended``: partitions whose moves this ends."""

    record: TopicRecord
    expected_version: int
    writes: tuple[StateWrite, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadTopic:
    """Read the topic's record, after everything written so far. Then TopicRead, or TopicGone."""

    name: str


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send the update to this broker. Then UpdateAnswered or UpdateLost."""

    broker: BrokerEndpoint
    update_id: int
    update: ControlUpdate


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """Delete the topic's nodes and its deletion request, checking the controller epoch. Then TopicDeleted."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropDeletionRequest:
    """Delete a request that means a topic which is no more, and only that. No result."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class DropElection:
    """Delete a request for elections: it is carried out, which its deletion tells the requester. No result."""

    name: str


@dataclass(frozen=True, slots=True)
class TrustBroker:
    """All in-sync claims from before this untrusted incarnation are gone: forget the mark, unless yet another
    incarnation has registered. No result."""

    broker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskLogEnds:
    """Ask the broker what its logs of these partitions end with. Then LogEndsRead, or nothing."""

    broker: BrokerEndpoint
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class RaiseCounters:
    """Raise ``/controller_epoch`` and ``/brokers/producer_ids`` to these values at least, as the last act of this term.
    Then the term is over, for the reason ``detail``."""

    controller_epoch: int
    producer_ids: int
    detail: str


@dataclass(frozen=True, slots=True)
class Resign:
    """The end of the controller's term: no further effect may be performed in its name."""

    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """For log and counters; ``kind`` is the counter's name. ``grave``: somebody should look at it."""

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
    | DeleteTopic
    | DropDeletionRequest
    | DropElection
    | TrustBroker
    | AskLogEnds
    | RaiseCounters
    | Resign
    | Report
)
