"""Effects of coordinators. Each docstring names the event that returns the result."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.group_target import TargetInputs
from sparklog.coordinator.log_records import Record
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TopicPartitions, TransactionMarker


@dataclass(frozen=True, slots=True)
class Append:
    """An append of these records as one batch to the coordinator's partition, with acks=all.

    The result is Appended after the commit, or AppendRefused if nothing was appended. A host that does not know the
    outcome ends this coordinator; the next one reads the log again.
    """

    append: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class SendMarkers:
    """Markers for the partitions' leaders, sent until the leaders have written them.

    The result is MarkersWritten for each, in any order. A decision about many participants is carried out in parts:
    ``part`` counts them from 0.
    """

    key: str
    decision: int
    markers: tuple[TransactionMarker, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class SendOffsets:
    """Offsets for the group's coordinator, sent until it has them. The result is OffsetsWritten."""

    key: str
    decision: int
    group: str
    offsets: tuple[GroupOffset, ...]


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """A call of ``inputs.compute`` in another thread. The result is TargetComputed."""

    group: str
    inputs: TargetInputs


@dataclass(frozen=True, slots=True)
class Resume:
    """Another step for the group, in a later turn of the event loop. The result is Resumed."""

    group: str


@dataclass(frozen=True, slots=True)
class Begun:
    """The outcome of a begin request.

    ``committed``: this version, or a later one, is already committed, so there is nothing to write.
    """

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a settle request: this version is committed, and no other run has an open transaction."""

    last_version: int


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a request whose changes are durable."""


@dataclass(frozen=True, slots=True)
class Ended:
    complete: bool
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """The outcome of a heartbeat, as ``messages.HeartbeatReply``."""

    member_epoch: int
    assigned: tuple[TopicPartitions, ...] = ()


Outcome = Begun | Settled | Done | Ended | Assigned | Refused


@dataclass(frozen=True, slots=True)
class Respond:
    """A response to the request with this ticket. There is no result."""

    ticket: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The end of a rewrite: all entries that were live at RewriteRequested have been appended since, and are committed.

    Records below the log end offset of that time may be deleted. There is no result.
    """


@dataclass(frozen=True, slots=True)
class CoordinatorReport:
    """A line for the log and a count for the counter ``kind``."""

    kind: str
    detail: str


Effect = Append | SendMarkers | SendOffsets | ComputeTarget | Resume | Respond | Rewritten | CoordinatorReport
