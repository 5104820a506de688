"""Events of a transaction coordinator: facts. The names are in the past tense.

The caller (the broker that leads the partition, or a test) passes them to ``Transactions.step(event, now_ms)`` one at a
time. A request has a ``ticket``. Exactly one ``Respond`` with this ticket follows, at once or later.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.records import PartitionPlace
from sparklog.protocol.messages import GroupOffset


@dataclass(frozen=True, slots=True)
class BeginRequested:
    """A ``messages.BeginTransaction`` request: a producer or a task begins or joins a transaction.

    ``producer_id`` is an unused producer id, which the response contains if the transaction may write.
    """

    ticket: int
    key: str
    run_id: str
    version: int
    timeout_ms: int
    producer_id: int
    turn: int = 0
    by_topic: bool = False


@dataclass(frozen=True, slots=True)
class SettleRequested:
    """A ``messages.SettleVersion`` request for the last committed version of a sink.

    A version is the number of a sink's transaction, and ``key`` is the name of the sink. The version must not change
    after the response. Therefore the coordinator first aborts an open transaction of any other run (start of a query).
    """

    ticket: int
    key: str
    run_id: str
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """A ``messages.AddToTransaction`` request: a producer id adds partitions or offsets to its transaction."""

    ticket: int
    key: str
    run_id: str
    producer_id: int
    producer_epoch: int
    places: tuple[PartitionPlace, ...]
    group: str = ""
    offsets: tuple[GroupOffset, ...] = ()
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class TouchRequested:
    """A ``messages.TouchTransaction`` request, which keeps a transaction alive."""

    ticket: int
    key: str
    run_id: str
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A ``messages.EndTransaction`` request to commit or abort a transaction.

    If not all markers of the decision are written before ``deadline_ms``, the request gets its response at this time.
    """

    ticket: int
    key: str
    run_id: str
    version: int
    commit: bool
    winners: tuple[int, ...]
    deadline_ms: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class VerifyRequested:
    """A ``messages.VerifyTransaction`` request: a leader asks whether a producer may append to a partition."""

    ticket: int
    key: str
    producer_id: int
    producer_epoch: int
    place: PartitionPlace


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """An operator's request to abort the open transaction of a transactional key."""

    ticket: int
    key: str


@dataclass(frozen=True, slots=True)
class KafkaInitRequested:
    """Kafka's InitProducerId request: a Kafka producer takes the transactional id, or raises its own epoch.

    ``producer_id`` and ``producer_epoch`` are the current id and epoch of the producer (KIP-360), or -1 for a producer
    without an id. ``fresh_id`` is an unused producer id.
    """

    ticket: int
    key: str
    timeout_ms: int
    fresh_id: int
    producer_id: int = -1
    producer_epoch: int = -1


@dataclass(frozen=True, slots=True)
class KafkaAddRequested:
    """A Kafka producer's request to add partitions or offsets to its transaction.

    The first addition begins the transaction. The request is Kafka's AddPartitionsToTxn, AddOffsetsToTxn or
    TxnOffsetCommit, or the first Produce of a partition in version 12 and later.
    """

    ticket: int
    key: str
    producer_id: int
    producer_epoch: int
    places: tuple[PartitionPlace, ...] = ()
    group: str = ""
    offsets: tuple[GroupOffset, ...] = ()
    #: Whether the request may begin the transaction. If not, an earlier request must have added the group to it.
    begins: bool = True


@dataclass(frozen=True, slots=True)
class KafkaEndRequested:
    """Kafka's EndTxn request. With ``raises_epoch`` (version 5 and later) the producer gets its next epoch.

    ``fresh_id`` is an unused producer id, or -1 if the epochs are not used up.
    """

    ticket: int
    key: str
    producer_id: int
    producer_epoch: int
    commit: bool
    deadline_ms: int
    raises_epoch: bool = False
    fresh_id: int = -1


KafkaRequest = KafkaInitRequested | KafkaAddRequested | KafkaEndRequested


@dataclass(frozen=True, slots=True)
class Appended:
    """The event that the records of an ``Append`` are committed."""

    append: int


@dataclass(frozen=True, slots=True)
class AppendRefused:
    """The event that an ``Append`` failed: its records are not in the log and never will be."""

    append: int
    detail: str


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """The event that leaders have written the markers of one ``SendMarkers`` command to some partitions.

    In those partitions of ``places`` whose topics still exist, the markers are committed.
    """

    key: str
    decision: int
    places: tuple[PartitionPlace, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """The event that the coordinator of ``group`` has committed the offsets of a committed transaction."""

    key: str
    decision: int
    group: str


@dataclass(frozen=True, slots=True)
class RewriteRequested:
    """A request to append all live entries again, because the log has become long.

    The effect Rewritten reports the end.
    """


@dataclass(frozen=True, slots=True)
class CoordinatorTicked:
    """The event that time has passed. The caller sends it at the coordinator's ``deadline_ms`` or later."""


TransactionRequest = (
    BeginRequested
    | SettleRequested
    | AddRequested
    | TouchRequested
    | EndRequested
    | VerifyRequested
    | AbortRequested
    | KafkaRequest
)
TransactionEvent = TransactionRequest | MarkersWritten | OffsetsWritten
Event = TransactionEvent | Appended | AppendRefused | RewriteRequested | CoordinatorTicked
