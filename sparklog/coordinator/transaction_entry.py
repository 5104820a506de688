"""One key of a transaction coordinator: its durable state, its change in flight, and its waiting requests.

The objects of this module are not thread-safe: they are parts of ``Transactions``, which makes all decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparklog.coordinator.effects import Respond
from sparklog.coordinator.events import BeginRequested, KafkaInitRequested, SettleRequested, TransactionRequest
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
    """A change of one key that is being appended to the log.

    After its commit the coordinator applies it and responds to the requests that caused it.
    """

    transaction: Transaction | None  #: the new state; None removes the key
    participants: dict[int, Participant | None] = field(default_factory=dict)
    answers: list[Respond] = field(default_factory=list)
    #: The ticket and deadline of the EndTransaction request that this change carries out.
    ended: tuple[int, int] | None = None
    #: The work of the requests that share this change: about the number of their partitions, offsets and versions.
    work: int = 0

    @property
    def changes_nothing(self) -> bool:
        """Return whether the change is empty. A coordinator writes such a change to prove that it was not replaced."""
        return NO_PRODUCER in self.participants

    def records(self, key: str, before: Transaction) -> list[Record]:
        changed = [participant_record(key, found, value) for found, value in self.participants.items()]
        if self.transaction != before:
            changed.append(transaction_record(key, self.transaction))
        return changed


class TransactionEntry:
    """The state of one transactional key, with its change in flight and its waiting requests.

    The first request or record with the key creates it.
    """

    __slots__ = ("begins", "draft", "key", "marked", "missing", "missing_groups", "participants", "parts", "queue",
                 "touched_ms", "transaction", "waiting")  # fmt: skip

    def __init__(self, key: str, now_ms: int) -> None:
        self.key = key
        self.transaction = Transaction()
        self.participants: dict[int, Participant] = {}
        #: The change in flight. Until it ends the coordinator serves no other request.
        self.draft: TransactionDraft | None = None
        #: Requests that have not been examined yet.
        self.queue: deque[TransactionRequest] = deque()
        #: BeginTransaction, SettleVersion and InitProducerId requests that wait until the previous transaction has
        #: ended completely.
        self.begins: list[BeginRequested | SettleRequested | KafkaInitRequested] = []
        #: EndTransaction requests that wait until all markers are written: ticket to deadline.
        self.waiting: dict[int, int] = {}
        #: The participants of the current part of a decision. Their markers have been sent, but they are not removed
        #: yet.
        self.marked: set[int] = set()
        #: The number of parts of the decision that this coordinator has sent so far.
        self.parts = 0
        #: Partitions that have not written the current part's markers yet, and groups that have not committed their
        #: offsets yet.
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
        """Return the keys of the entry's records.

        The key of the transaction's record is None, and the key of a participant's record is its producer id.
        """
        return [None, *self.participants]

    def records_of(self, keys: Iterable[int | None]) -> list[Record]:
        """Return the records with these keys of ``record_keys``. Participants removed since then are omitted."""
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
