"""Effects of coordinators. Each docstring names the event that returns the result."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.classic_events import Joined, Left, MemberIdGiven, Synced
from sparklog.coordinator.group_records import ClassicState
from sparklog.coordinator.group_target import TargetInputs
from sparklog.coordinator.log_records import Record
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TopicPartitions, TransactionMarker


@dataclass(frozen=True, slots=True)
class Append:
    """A command to append these records as one batch to the coordinator's partition, with acks=all.

    The result is Appended after the commit, or AppendRefused if nothing was appended. If the broker does not know
    whether the append succeeded, it ends this coordinator; the next coordinator reads the log again.
    """

    append: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class SendMarkers:
    """A command to send transaction markers to the leaders of partitions until all of them have written the markers.

    MarkersWritten reports the partitions whose leaders have written the markers, in any order. If a decision to commit
    or abort has many participants, their markers are sent in parts, and ``part`` is the number of the part, from 0.
    """

    key: str
    decision: int
    markers: tuple[TransactionMarker, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class SendOffsets:
    """A command to send offsets to a group's coordinator until it has committed them. The result is OffsetsWritten."""

    key: str
    decision: int
    group: str
    offsets: tuple[GroupOffset, ...]


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """A command to call ``inputs.compute`` in another thread. The result is TargetComputed."""

    group: str
    inputs: TargetInputs


@dataclass(frozen=True, slots=True)
class Resume:
    """A command to continue with a group in a later iteration of the event loop, so that other work can run first.

    The result is Resumed.
    """

    group: str


@dataclass(frozen=True, slots=True)
class StoreClassic:
    """The command of a classic group to commit its generation and members to the log.

    ``Groups`` performs it with an ``Append``. The responses that follow this command are sent after the commit. If the
    append is refused, ``Groups`` passes StoreRefused to the group.
    """

    generation: int
    state: ClassicState


@dataclass(frozen=True, slots=True)
class Begun:
    """The outcome of a BeginTransaction request.

    ``committed`` means that a sink has already committed the requested version (the number of its transaction) or a
    later one, so there is nothing to write. ``run`` is the number of run ids that the key has had so far.
    """

    committed: bool
    last_version: int
    producer_id: int
    producer_epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a SettleVersion request.

    ``last_version`` is the last committed version, that is, the number of a sink's transaction. No other run (start of
    a query) has an open transaction any more.
    """

    last_version: int


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a request that succeeded. Its changes, if any, are durable.

    If the request verified a Kafka producer, ``decision`` is the number of transactions of the transactional id that
    were committed or aborted so far.
    """

    decision: int = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of an EndTransaction request.

    For a Kafka producer it has the producer id and epoch of the next transaction.
    """

    complete: bool
    replayed: bool = False
    producer_id: int = -1
    producer_epoch: int = -1


@dataclass(frozen=True, slots=True)
class KafkaProducerGiven:
    """The outcome of a Kafka producer's request for a producer id and epoch."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Refused:
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """The outcome of a heartbeat: the member's epoch and partitions, as in ``messages.HeartbeatReply``.

    ``unchanged`` is true if a Kafka client's member has received the same partitions in the last response.
    """

    member_epoch: int
    assigned: tuple[TopicPartitions, ...] = ()
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class OffsetsDeleted:
    """The outcome of a request to delete offsets. The offsets of the topics ``subscribed`` have been kept."""

    subscribed: frozenset[str] = frozenset()


Outcome = (
    Begun
    | Settled
    | Done
    | Ended
    | KafkaProducerGiven
    | Assigned
    | Joined
    | MemberIdGiven
    | Synced
    | Left
    | OffsetsDeleted
    | Refused
)


@dataclass(frozen=True, slots=True)
class Respond:
    """A command to respond to the request with this ticket. There is no result."""

    ticket: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The report that a rewrite is complete.

    All entries that were live at RewriteRequested have been appended again and committed. Records below the log end
    offset at the time of RewriteRequested may be deleted. There is no result.
    """


@dataclass(frozen=True, slots=True)
class CoordinatorReport:
    """A command to log a line with ``detail`` and to increment the counter ``kind``."""

    kind: str
    detail: str


Effect = Append | SendMarkers | SendOffsets | ComputeTarget | Resume | Respond | Rewritten | CoordinatorReport
