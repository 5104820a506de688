"""One key of a transaction coordinator: its durable state, its draft and its waiting requests.

Mutable, owned by one ``Transactions``; nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparklog.coordinator.effects import Respond
from sparklog.coordinator.events import BeginRequested, SettleRequested, TransactionRequest
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import (
    ABORTING,
    COMMITTING,
    NO_PRODUCER,
    OPEN,
    Participant,
    PartitionPlace,
    Transaction,
    participant_record,
    transaction_record,
)


@dataclass(slots=True)
class TransactionDraft:
    """A change of one key on its way into the log. It has no effect, and causes no response, before its commit."""

    transaction: Transaction | None  #: None: the key is removed
    participants: dict[int, Participant | None] = field(default_factory=dict)
    answers: list[Respond] = field(default_factory=list)
    #: (ticket, deadline) of the end request that this performs
    ended: tuple[int, int] | None = None
    #: The work on the requests that share this change so far: about the number of partitions, offsets and versions
    work: int = 0

    @property
    def changes_nothing(self) -> bool:
        """Return whether this changes nothing: its commit then proves that no other coordinator is active."""
        return NO_PRODUCER in self.participants

    def records(self, key: str, before: Transaction) -> list[Record]:
        changed = [participant_record(key, found, value) for found, value in self.participants.items()]
        if self.transaction != before:
            changed.append(transaction_record(key, self.transaction))
        return changed


class TransactionEntry:
    """The state of a key, created when a request first names it or a record has it."""

    __slots__ = ("begins", "draft", "key", "marked", "missing", "missing_groups", "participants", "parts", "queue",
                 "touched_ms", "transaction", "waiting")  # fmt: skip

    def __init__(self, key: str, now_ms: int) -> None:
        self.key = key
        self.transaction = Transaction()
        self.participants: dict[int, Participant] = {}
        #: The change in flight. Until it ends the coordinator serves no other request.
        self.draft: TransactionDraft | None = None
        #: Requests that are not examined yet.
        self.queue: deque[TransactionRequest] = deque()
        #: Begin and settle requests that wait until the previous transaction has ended completely.
        self.begins: list[BeginRequested | SettleRequested] = []
        #: End requests that wait for the markers: ticket to deadline.
        self.waiting: dict[int, int] = {}
        #: The participants of the present part of a decision: their markers are sent, and they are not removed yet.
        self.marked: set[int] = set()
        #: The number of parts that this coordinator has sent of the decision so far.
        self.parts = 0
        #: Partitions without the present part's markers, and groups without their offsets so far.
        self.missing: set[PartitionPlace] = set()
        self.missing_groups: set[str] = set()
        #: The time of the last request that keeps the transaction alive.
        self.touched_ms = now_ms

    @property
    def ending(self) -> bool:
        return self.transaction.state in {COMMITTING, ABORTING}

    @property
    def idle(self) -> bool:
        """Return whether the entry needs no periodic check."""
        return self.transaction.state != OPEN and not (self.ending or self.waiting or self.begins or self.draft)

    def record_keys(self) -> list[int | None]:
        """Return None for the transaction, and the ids of the participants."""
        return [None, *self.participants]

    def records_of(self, keys: Iterable[int | None]) -> list[Record]:
        """Return the records with these keys, as ``record_keys`` returns them, without removed participants."""
        return [
            transaction_record(self.key, self.transaction)
            if found is None
            else participant_record(self.key, found, self.participants[found])
            for found in keys
            if found is None or found in self.participants
        ]

    @property
    def record_count(self) -> int:
        return 1 + len(self.participants)

    def apply(self, draft: TransactionDraft) -> None:
        if draft.transaction is not None:
            self.transaction = draft.transaction
        for producer_id, participant in draft.participants.items():
            if participant is None:
                self.participants.pop(producer_id, None)
                self.marked.discard(producer_id)
            else:
                self.participants[producer_id] = participant
