"""What can happen to a transaction coordinator: facts, in the past tense.

The host (a broker that leads the partition, or a test) hands them to ``Transactions.step(event, now_ms)`` one at a
time. Requests carry a ``ticket``, under which exactly one ``Answer`` comes back, at once or later.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.coordinator.records import Place
from sparklog.protocol.messages import GroupOffset


@dataclass(frozen=True, slots=True)
class BeginRequested:
    """As ``messages.BeginTransaction``. ``producer_id`` is a fresh one, used if the answer needs one."""

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
    """As ``messages.SettleVersion``."""

    ticket: int
    key: str
    run_id: str
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """As ``messages.AddToTransaction``."""

    ticket: int
    key: str
    run_id: str
    producer_id: int
    producer_epoch: int
    places: tuple[Place, ...]
    group: str = ""
    offsets: tuple[GroupOffset, ...] = ()
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class TouchRequested:
    """As ``messages.TouchTransaction``."""

    ticket: int
    key: str
    run_id: str
    version: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """As ``messages.EndTransaction``. ``deadline_ms``: when to answer at the latest."""

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
    """As ``messages.VerifyTransaction``."""

    ticket: int
    key: str
    producer_id: int
    producer_epoch: int
    place: Place


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """An operator ends what the key has open."""

    ticket: int
    key: str


@dataclass(frozen=True, slots=True)
class Appended:
    """The records ordered by ``Append`` are committed."""

    append: int


@dataclass(frozen=True, slots=True)
class AppendRefused:
    """The records ordered by ``Append`` are not in the log, and will not be."""

    append: int
    detail: str


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """These partitions hold the markers of this decision, committed; or their topics are no more."""

    key: str
    decision: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class OffsetsWritten:
    """The group has the offsets that this decision commits."""

    key: str
    decision: int
    group: str


@dataclass(frozen=True, slots=True)
class RewriteRequested:
    """The log has grown long: write all that is live anew. Ends with the effect Rewritten."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; sent when ``Transactions.deadline_ms`` is reached or later."""


Request = (
    BeginRequested | SettleRequested | AddRequested | TouchRequested | EndRequested | VerifyRequested | AbortRequested
)
TransactionEvent = Request | MarkersWritten | OffsetsWritten
Event = TransactionEvent | Appended | AppendRefused | RewriteRequested | Ticked
