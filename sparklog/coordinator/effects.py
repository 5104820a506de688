"""What coordinators order. Each docstring says which event brings back the result."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.log_records import Record
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TopicPartitions, TransactionMarker


@dataclass(frozen=True, slots=True)
class Append:
    """Append these records as one batch to the coordinator's partition, acks=all. Then Appended once they are
    committed, or AppendRefused when nothing was appended. A host that cannot tell ends this coordinator: what is in
    the log is read again by the next."""

    append: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class SendMarkers:
    """Have the partitions' leaders write these markers, trying again until they have. Then MarkersWritten for each, in
    any order."""

    key: str
    decision: int
    markers: tuple[TransactionMarker, ...]


@dataclass(frozen=True, slots=True)
class SendOffsets:
    """Give the group's coordinator these offsets, trying again until it has them. Then OffsetsWritten."""

    key: str
    decision: int
    group: str
    offsets: tuple[GroupOffset, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """``committed``: nothing is to be written."""

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing is open under the key but what the asking run has; this is committed."""

    last_version: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request is carried out, and what it changed is durable."""


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
    """As ``messages.HeartbeatReply``."""

    member_epoch: int
    assigned: tuple[TopicPartitions, ...] = ()


Outcome = Begun | Settled | Done | Ended | Assigned | Refused


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the request of this ticket. No result."""

    ticket: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Rewritten:
    """All that was live when RewriteRequested came has been appended since, and is committed: what is below the log's
    end at that time may go. No result."""


@dataclass(frozen=True, slots=True)
class Report:
    """For log and counters; ``kind`` is the counter's name."""

    kind: str
    detail: str


Effect = Append | SendMarkers | SendOffsets | Answer | Rewritten | Report
