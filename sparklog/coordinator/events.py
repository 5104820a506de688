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
    """A ``messages.BeginTransaction`` request.

    ``producer_id`` is an unused producer id, which the response contains if a transaction begins.
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
    """A ``messages.SettleVersion`` request."""

    ticket: int
    key: str
    run_id: str
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """A ``messages.AddToTransaction`` request."""

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
    """A ``messages.TouchTransaction`` request, which keeps the transaction alive."""

    ticket: int
    key: str
    run_id: str
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A ``messages.EndTransaction`` request. It gets its response at ``deadline_ms`` at the latest."""

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
    """A ``messages.VerifyTransaction`` request."""

    ticket: int
    key: str
    producer_id: int
    producer_epoch: int
    place: PartitionPlace


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """An operator's request to abort the open transaction of the key."""

    ticket: int
    key: str


@dataclass(frozen=True, slots=True)
class Appended:
    """The commit of the records of an ``Append``."""

    append: int


@dataclass(frozen=True, slots=True)
class AppendRefused:
    """The failure of an ``Append``: its records are not in the log and never will be."""

    append: int
    detail: str


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """Partitions in which the markers of this part of a decision are committed, or whose topics no longer exist."""

    key: str
    decision: int
    places: tuple[PartitionPlace, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """A group whose coordinator has committed the offsets of this decision."""

    key: str
    decision: int
    group: str


@dataclass(frozen=True, slots=True)
class RewriteRequested:
    """A request to rewrite all live entries, because the log has become long. The effect Rewritten reports its end."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """The passage of time; sent at ``Transactions.deadline_ms`` or later."""


TransactionRequest = (
    BeginRequested | SettleRequested | AddRequested | TouchRequested | EndRequested | VerifyRequested | AbortRequested
)
TransactionEvent = TransactionRequest | MarkersWritten | OffsetsWritten
Event = TransactionEvent | Appended | AppendRefused | RewriteRequested | Ticked
