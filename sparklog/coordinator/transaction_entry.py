"""One key of a transaction coordinator: what is durable, what is being made durable, and who waits. Mutable, owned by
one ``Transactions``; nothing is decided here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sparklog.coordinator.effects import Answer
from sparklog.coordinator.events import BeginRequested, Request, SettleRequested
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import (
    ABORTING,
    COMMITTING,
    NOBODY,
    OPEN,
    Participant,
    Place,
    Transaction,
    participant_record,
    transaction_record,
)


@dataclass(slots=True)
class Draft:
    """A change of one key on its way into the log. Nothing acts on it, and nobody is told, before it is committed."""

    transaction: Transaction | None  #: None: the key is forgotten
    participants: dict[int, Participant | None] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    #: (ticket, deadline) of the end request that this carries out
    ended: tuple[int, int] | None = None

    @property
    def asks(self) -> bool:
        """It changes nothing: that it can be committed shows that nobody else coordinates."""
        return NOBODY in self.participants

    def records(self, key: str, before: Transaction) -> list[Record]:
        changed = [participant_record(key, found, value) for found, value in self.participants.items()]
        if self.transaction != before:
            changed.append(transaction_record(key, self.transaction))
        return changed


class Entry:
    """Made when a key is first named or read from the log."""

    __slots__ = ("begins", "draft", "key", "missing", "missing_groups", "participants", "queue", "touched_ms",
                 "transaction", "waiting")  # fmt: skip

    def __init__(self, key: str, now_ms: int) -> None:
        self.key = key
        self.transaction = Transaction()
        self.participants: dict[int, Participant] = {}
        #: The change under way. While there is one nothing else is served.
        self.draft: Draft | None = None
        #: Requests not looked at yet.
        self.queue: deque[Request] = deque()
        #: Begins, and questions, that wait until the transaction before is wholly ended.
        self.begins: list[BeginRequested | SettleRequested] = []
        #: End requests that wait for the markers: ticket to deadline.
        self.waiting: dict[int, int] = {}
        #: Partitions whose markers, and groups whose offsets, are still on their way.
        self.missing: set[Place] = set()
        self.missing_groups: set[str] = set()
        #: Last sign of life.
        self.touched_ms = now_ms

    @property
    def ending(self) -> bool:
        return self.transaction.state in {COMMITTING, ABORTING}

    @property
    def idle(self) -> bool:
        """Nothing to watch over."""
        return self.transaction.state != OPEN and not (self.ending or self.waiting or self.begins or self.draft)

    def all_records(self) -> list[Record]:
        return [
            transaction_record(self.key, self.transaction),
            *(participant_record(self.key, found, value) for found, value in self.participants.items()),
        ]

    @property
    def record_count(self) -> int:
        return 1 + len(self.participants)

    def apply(self, draft: Draft) -> None:
        if draft.transaction is not None:
            self.transaction = draft.transaction
        for producer_id, participant in draft.participants.items():
            if participant is None:
                self.participants.pop(producer_id, None)
            else:
                self.participants[producer_id] = participant
