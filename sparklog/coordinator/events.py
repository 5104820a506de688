"""Events of a transaction coordinator: facts, in the past tense.

The host (a broker that leads the partition, or a test) gives them to ``Transactions.step(event, now_ms)`` one at a
time. Requests have a ``ticket``; exactly one ``Respond`` with this ticket follows, at once or later.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.records import PartitionPlace
from sparklog.protocol.messages import GroupOffset


@dataclass(frozen=True, slots=True)
class BeginRequested:
    """A request as ``messages.BeginTransaction``.

    ``producer_id`` is an unused one for the response, if it needs one.
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
    """A request as ``messages.SettleVersion``."""

    ticket: int
    key: str
    run_id: str
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """A request as ``messages.AddToTransaction``."""

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
    """A request as ``messages.TouchTransaction``."""

    ticket: int
    key: str
    run_id: str
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A request as ``messages.EndTransaction``. ``deadline_ms`` is the latest time of the response."""

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
    """A request as ``messages.VerifyTransaction``."""

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
    """The partitions that have the committed markers of this part of a decision, or whose topics no longer exist."""

    key: str
    decision: int
    places: tuple[PartitionPlace, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """The group whose coordinator has the offsets that this decision commits."""

    key: str
    decision: int
    group: str


@dataclass(frozen=True, slots=True)
class RewriteRequested:
    """A request to write all live entries again, because the log is long. It ends with the effect Rewritten."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """The passage of time; sent at ``Transactions.deadline_ms`` or later."""


TransactionRequest = (
    BeginRequested | SettleRequested | AddRequested | TouchRequested | EndRequested | VerifyRequested | AbortRequested
)
TransactionEvent = TransactionRequest | MarkersWritten | OffsetsWritten
Event = TransactionEvent | Appended | AppendRefused | RewriteRequested | Ticked
