"""The transaction coordinator of one partition: a pure state machine, events in, effects out.

A key (a producer's transactional id, or the name of a sink) has at most one open transaction. A transaction begins,
registers each partition before its first write to the partition, is decided (commit or abort), has markers written in
every registered partition, and ends. All state is in the log of the coordinator's partition. The coordinator first
appends a change. After the commit it applies the change, sends the resulting effects and responds. A new leader of the
partition therefore reads the log and continues; it may repeat only effects that are safe to repeat.

A producer has a new *run* id each time it is created, and a query has a new run id each time it is started. A new run
id fences all earlier runs of the key. The *version* is the number of a sink's transaction. A transaction with a version
at or below the last committed one is a replay, and its records are not written again. Either the key has one last
committed version, or each topic has its own. Source: KIP-98, KIP-890; runs and versions are sparklog's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from sparklog.coordinator import kafka_transactions, transaction_end
from sparklog.coordinator.core import CoordinatorCore
from sparklog.coordinator.effects import Begun, CoordinatorReport, Done, Outcome, Refused, Respond, Settled
from sparklog.coordinator.events import (
    AbortRequested,
    AddRequested,
    BeginRequested,
    EndRequested,
    KafkaAddRequested,
    KafkaEndRequested,
    KafkaInitRequested,
    MarkersWritten,
    OffsetsWritten,
    SettleRequested,
    TouchRequested,
    TransactionEvent,
    TransactionRequest,
    VerifyRequested,
)
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import (
    EMPTY,
    ONCE_PREFIX,
    OPEN,
    UNNUMBERED,
    Participant,
    Transaction,
    TransactionKey,
    decode_record,
)
from sparklog.coordinator.transaction_entry import TransactionDraft, TransactionEntry
from sparklog.errors import ErrorCode
from sparklog.model import assert_never
from sparklog.protocol.fields import MAX_ENTRIES

#: The number of requests of one key that may wait; a Spark stage has a few thousand tasks.
MAX_QUEUED = 10_000

#: The ``TransactionDraft.work`` above which waiting requests are left to the next append.
_WORK_AT_ONCE = 10_000

#: The producer epoch in the transactions of sparklog's producers. It never changes, because only one attempt uses each
#: producer id.
EPOCH = 0


#: The requests that may be the first one of a key.
_FIRST_REQUESTS = (BeginRequested, SettleRequested, EndRequested, KafkaInitRequested)


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    max_timeout_ms: int = 86_400_000
    producer_expiration_ms: int = 7 * 86_400_000
    sink_expiration_ms: int = 30 * 86_400_000
    once_expiration_ms: int = 3_600_000
    #: The maximum number of keys of this coordinator.
    max_keys: int = 1_000_000


class Transactions(CoordinatorCore[TransactionEntry, TransactionDraft]):
    """The state machine of the transactional keys of one coordinator partition."""

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or TransactionSettings()
        #: Entries that need periodic checks: entries with an open or ending transaction, a waiting request or a change
        #: in flight.
        self._active: dict[str, TransactionEntry] = {}

    # --- the entry point -------------------------------------------------------------------------------------------

    def load(self, records: Iterable[Record]) -> None:
        """Apply the records of the partition's log, in order. Raises ClusterError for an unreadable record."""
        for record in records:
            key, value = decode_record(record)
            if isinstance(key, TransactionKey):
                if value is None:
                    self._entries.pop(key.key, None)
                else:
                    assert isinstance(value, Transaction)
                    self._entry(key.key, 0).transaction = value
            elif value is None:
                if key.key in self._entries:
                    self._entries[key.key].participants.pop(key.producer_id, None)
            else:
                assert isinstance(value, Participant)
                self._entry(key.key, 0).participants[key.producer_id] = value

    def _started(self, now_ms: int) -> None:
        """Restart the timeouts of transactions, because their runs may still be alive, and continue decisions."""
        for entry in self._entries.values():
            entry.touched_ms = now_ms
            self._carry_out(entry, now_ms)

    def _handle(self, event: TransactionEvent, now_ms: int) -> None:
        match event:
            case BeginRequested() | SettleRequested() | AddRequested() | EndRequested() | AbortRequested():
                self._enqueue(event, now_ms)
            case KafkaInitRequested() | KafkaAddRequested() | KafkaEndRequested():
                self._enqueue(event, now_ms)
            case TouchRequested():
                self._touch(event, now_ms)
            case VerifyRequested():
                self._answer(event.ticket, self._verified(event))
            case MarkersWritten():
                self._markers_written(event, now_ms)
            case OffsetsWritten():
                self._offsets_written(event, now_ms)
            case _:
                assert_never(event)

    # --- queries ---------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[str, Transaction, dict[int, Participant], int]]:
        """Yield each key with its transaction, participants and keep-alive deadline, as ``entry`` returns them."""
        for key in self.names():
            found = self.entry(key)
            assert found is not None, key
            yield key, *found

    def names(self) -> list[str]:
        """Return all transactional keys, in order."""
        return sorted(self._entries)

    def entry(self, key: str) -> tuple[Transaction, dict[int, Participant], int] | None:
        """Return a key's transaction, participants and keep-alive deadline, or None for an unknown key.

        The deadline is the time, in milliseconds, at which the open transaction is aborted unless a request keeps it
        alive. It is 0 if no transaction is open.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        due = self._due_ms(entry) if entry.transaction.state == OPEN else 0
        return entry.transaction, entry.participants, due

    def participants(self, producer_ids: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield the ``producer_ids`` that take part in an open or ending transaction, each with its key."""
        wanted = set(producer_ids)
        for key, entry in self._entries.items():
            yield from ((found, key) for found in entry.participants.keys() & wanted)

    # --- requests --------------------------------------------------------------------------------------------------

    def _entry(self, key: str, now_ms: int) -> TransactionEntry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = TransactionEntry(key, now_ms)
        return entry

    def _enqueue(self, request: TransactionRequest, now_ms: int) -> None:
        known = self._entries.get(request.key)
        if known is None and isinstance(request, KafkaAddRequested | KafkaEndRequested):
            detail = f"{request.key}: producer {request.producer_id} does not have this transactional id"
            self._answer(request.ticket, Refused(ErrorCode.UNKNOWN_PRODUCER_ID, detail))
            return
        if known is None and not isinstance(request, _FIRST_REQUESTS):
            self._answer(request.ticket, Refused(ErrorCode.INVALID_TXN_STATE, f"{request.key}: nothing is open"))
            return
        if known is None and len(self._entries) >= self._settings.max_keys:
            detail = (
                f"{request.key!r} is new, and its coordinator has {len(self._entries)} transactional ids, at most "
                f"{self._settings.max_keys} expected (transactional.ids.max): wait until idle ones expire, or raise it"
            )
            self._answer(request.ticket, Refused(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail))
            return
        entry = known or self._entry(request.key, now_ms)
        waits = isinstance(request, BeginRequested | SettleRequested | KafkaInitRequested)
        begins = len(entry.begins) if waits else 0
        if len(entry.queue) + begins >= MAX_QUEUED:
            detail = f"{request.key}: {MAX_QUEUED} requests are waiting"
            self._answer(request.ticket, Refused(ErrorCode.CONCURRENT_TRANSACTIONS, detail))
            return
        entry.queue.append(request)
        self._serve(entry, now_ms)

    def _serve(self, entry: TransactionEntry, now_ms: int) -> None:
        """Handle the waiting requests in order, until a change has to be committed.

        Consecutive registrations share one change, and so do consecutive SettleVersion requests.
        """
        if entry.draft is not None:
            return
        draft: TransactionDraft | None = None
        while entry.queue:
            request = entry.queue[0]
            if draft is not None and not _joins(draft, request, entry.transaction):
                break
            entry.queue.popleft()
            match request:
                case AddRequested():
                    draft = self._add(entry, request, draft, now_ms)
                case BeginRequested():
                    draft = self._begin(entry, request, now_ms)
                case SettleRequested():
                    draft = self._settle(entry, request, draft, now_ms)
                case EndRequested():
                    draft = self._end(entry, request, now_ms)
                case AbortRequested():
                    draft = self._abort(entry, request, now_ms)
                case KafkaInitRequested():
                    draft = self._kafka_init(entry, request, now_ms)
                case KafkaAddRequested():
                    draft = self._kafka_add(entry, request, draft, now_ms)
                case KafkaEndRequested():
                    draft = self._kafka_end(entry, request, now_ms)
                case _:
                    raise AssertionError(f"not queued: {request!r}")
            adds = isinstance(request, AddRequested | KafkaAddRequested)
            if draft is not None and not (draft.changes_nothing or adds):
                break
        if draft is not None:
            self._change(entry, draft)
        self._watch(entry)

    def _begin(self, entry: TransactionEntry, request: BeginRequested, now_ms: int) -> TransactionDraft | None:
        now, ticket = entry.transaction, request.ticket
        if request.run_id in now.fenced:
            self._answer(ticket, _fenced(entry.key, request.run_id))
            return None
        if request.version != UNNUMBERED and not request.by_topic and request.version <= now.decided_version:
            self._answer(ticket, Begun(True, now.decided_version, -1, -1, now.run))
            return None
        same = request.run_id == now.run_id
        if same and _is_late(now, request):
            self._answer(
                ticket, transaction_end.another_open(entry.key, now, version=request.version, turn=request.turn)
            )
            return None
        if entry.ending:
            entry.begins.append(request)
            return None
        if now.state == OPEN:
            if same and (request.version, request.turn) == (now.version, now.turn):
                entry.touched_ms = now_ms
                producer_id = request.producer_id if now.numbered else now.producer_id
                self._answer(ticket, Begun(False, now.last_version, producer_id, EPOCH, now.run))
                return None
            entry.begins.append(request)
            return transaction_end.decide(entry, commit=False, now_ms=now_ms, fence=not same)
        fresh = replace(
            now,
            state=OPEN,
            run_id=request.run_id,
            run=now.run if same else now.run + 1,
            version=request.version,
            timeout_ms=max(1, min(request.timeout_ms, self._settings.max_timeout_ms)),
            began_ms=now_ms,
            used_ms=now_ms,
            winners=(),
            offsets=(),
            fenced=now.fenced if same else now.fencing(now.run_id),
            turn=request.turn,
            producer_id=request.producer_id if request.version == UNNUMBERED else -1,
            by_topic=request.by_topic,
            versions=now.versions_used_since(now_ms - self._settings.sink_expiration_ms),
            kafka=None,
        )
        entry.touched_ms = now_ms
        begun = Begun(False, now.last_version, request.producer_id, EPOCH, fresh.run)
        return TransactionDraft(fresh, answers=[Respond(ticket, begun)])

    def _settle(
        self, entry: TransactionEntry, request: SettleRequested, draft: TransactionDraft | None, now_ms: int
    ) -> TransactionDraft | None:
        """Handle a SettleVersion request. Unlike BeginTransaction it does not begin a new run of the key.

        The response is sent only after a write to the log. If a coordinator that has been replaced responded, the
        version could seem uncommitted and its rows would be written twice.
        """
        now = entry.transaction
        if request.run_id in now.fenced:
            self._answer(request.ticket, _fenced(entry.key, request.run_id))
            return draft
        if entry.ending:
            entry.begins.append(request)
            return draft
        if _blocks(now, request):
            entry.begins.append(request)
            return transaction_end.decide(entry, commit=False, now_ms=now_ms, fence=True)
        draft = draft or transaction_end.unchanged(entry)
        draft.work += 1 + len(now.versions)
        draft.answers.append(Respond(request.ticket, Settled(now.version_in(request.topic_id))))
        return draft

    def _add(
        self, entry: TransactionEntry, request: AddRequested, draft: TransactionDraft | None, now_ms: int
    ) -> TransactionDraft | None:
        """Register partitions for one producer id, in addition to the registrations in the change ``draft``."""
        now = draft.transaction if draft is not None and draft.transaction is not None else entry.transaction
        refusal = _not_open(entry.key, now, request)
        if refusal is None and request.producer_epoch != EPOCH:
            refusal = _fenced(entry.key, f"{request.run_id}, producer epoch {request.producer_epoch}")
        if refusal is None and not now.numbered and request.producer_id != now.producer_id:
            detail = f"{entry.key}: producer {request.producer_id} found, {now.producer_id} has this transaction"
            refusal = Refused(ErrorCode.INVALID_PRODUCER_EPOCH, detail)
        offsets = now.offsets
        if refusal is None and request.offsets:
            offsets = transaction_end.with_offsets(offsets, request.group, request.offsets)
            refusal = _too_many(entry.key, sum(len(found) for _, found in offsets))
        if refusal is not None:
            self._answer(request.ticket, refusal)
            return draft
        entry.touched_ms = now_ms
        staged = draft.participants.get(request.producer_id) if draft is not None else None
        known = staged or entry.participants.get(request.producer_id)
        participant = (known or Participant(EPOCH)).with_places(request.places)
        if known is participant and staged is None and not request.offsets:
            self._answer(request.ticket, Done())
            return draft
        draft = draft or TransactionDraft(entry.transaction)
        draft.work += 1 + len(request.places) + participant.place_count
        if known is not participant:
            draft.participants[request.producer_id] = participant
        if request.offsets:
            draft.transaction = replace(now, offsets=offsets)
            draft.work += sum(len(found) for _, found in offsets)
        draft.answers.append(Respond(request.ticket, Done()))
        return draft

    def _end(self, entry: TransactionEntry, request: EndRequested, now_ms: int) -> TransactionDraft | None:
        now = entry.transaction
        answer = transaction_end.known_outcome(entry, request)
        if answer is not None:
            self._answer(request.ticket, answer)
            return None
        if entry.ending:
            entry.waiting[request.ticket] = request.deadline_ms
            return None
        if now.state == EMPTY and not request.commit:
            return transaction_end.fenced_early(entry, request, now_ms=now_ms)
        if now.state == EMPTY:  # No task wrote records in this version, so its run did not begin a transaction.
            return transaction_end.empty_version(entry, request, now_ms=now_ms)
        # Fence a sink's run after an abort: its remaining tasks must not begin a transaction again. After a commit the
        # version refuses them, unless versions count by topic.
        fence = now.numbered and (now.by_topic or not request.commit)
        draft = transaction_end.decide(
            entry, commit=request.commit, winners=request.winners, now_ms=now_ms, fence=fence
        )
        draft.ended = (request.ticket, request.deadline_ms)
        return draft

    def _kafka_init(self, entry: TransactionEntry, request: KafkaInitRequested, now_ms: int) -> TransactionDraft | None:
        if entry.ending:
            entry.begins.append(request)
            return None
        opened = entry.transaction.state == OPEN
        found = kafka_transactions.init(entry, request, now_ms=now_ms)
        if isinstance(found, Refused):
            self._answer(request.ticket, found)
            return None
        if opened:
            entry.begins.append(request)
        return found

    def _kafka_add(
        self, entry: TransactionEntry, request: KafkaAddRequested, draft: TransactionDraft | None, now_ms: int
    ) -> TransactionDraft | None:
        found = kafka_transactions.add(entry, request, draft, now_ms=now_ms)
        if isinstance(found, TransactionDraft):
            entry.touched_ms = now_ms
            return found
        self._answer(request.ticket, found)
        return draft

    def _kafka_end(self, entry: TransactionEntry, request: KafkaEndRequested, now_ms: int) -> TransactionDraft | None:
        found = kafka_transactions.end(entry, request, now_ms=now_ms)
        if isinstance(found, Refused):
            self._answer(request.ticket, found)
            return None
        if found is None:
            entry.waiting[request.ticket] = request.deadline_ms
        return found

    def _abort(self, entry: TransactionEntry, request: AbortRequested, now_ms: int) -> TransactionDraft | None:
        if entry.transaction.state != OPEN:
            detail = f"{entry.key}: nothing is open, it is {entry.transaction.state}"
            self._answer(request.ticket, Refused(ErrorCode.INVALID_TXN_STATE, detail))
            return None
        draft = transaction_end.decide(entry, commit=False, now_ms=now_ms, fence=True)
        draft.answers.append(Respond(request.ticket, Done()))
        return draft

    def _touch(self, request: TouchRequested, now_ms: int) -> None:
        entry = self._entries.get(request.key)
        now = entry.transaction if entry is not None else Transaction()
        refusal = _not_open(request.key, now, request)
        if refusal is None and entry is not None:
            entry.touched_ms = now_ms
        self._answer(request.ticket, refusal or Done())

    def _verified(self, request: VerifyRequested) -> Outcome:
        """Return whether the producer may append. A decision that is being appended counts as made.

        Otherwise a record could be appended after the transaction's marker.
        """
        entry = self._entries.get(request.key)
        if entry is not None and entry.transaction.kafka is not None:
            # A fenced producer gets INVALID_PRODUCER_EPOCH, as from Kafka: its client must not try to abort.
            refusal = kafka_transactions.not_current(entry.key, entry.transaction, request)
            if refusal is not None:
                return refusal
        participant = entry.participants.get(request.producer_id) if entry is not None else None
        if entry is None or participant is None or entry.transaction.state != OPEN:
            detail = f"{request.key}: producer {request.producer_id} takes part in no open transaction"
            return Refused(ErrorCode.INVALID_TXN_STATE, detail)
        if entry.draft is not None and entry.draft.transaction is not None and entry.draft.transaction.state != OPEN:
            return Refused(ErrorCode.INVALID_TXN_STATE, f"{request.key}: the transaction is being ended")
        if not participant.has(request.place):
            topic, number, _ = request.place
            detail = f"{request.key}: {topic}-{number} is not registered for {request.producer_id}"
            return Refused(ErrorCode.INVALID_TXN_STATE, detail)
        if request.producer_epoch != participant.epoch:
            return _fenced(request.key, f"producer epoch {request.producer_epoch}")
        return Done(entry.transaction.decision if entry.transaction.kafka is not None else -1)

    # --- durability ------------------------------------------------------------------------------------------------

    def _change(self, entry: TransactionEntry, draft: TransactionDraft) -> None:
        self._stage(entry, draft, draft.records(entry.key, entry.transaction))

    def _unchanged(self, entry: TransactionEntry) -> TransactionDraft:
        return TransactionDraft(entry.transaction)

    def _committed(self, entry: TransactionEntry, draft: TransactionDraft, now_ms: int) -> None:
        entry.apply(draft)
        self._effects += draft.answers
        if draft.ended is not None:
            ticket, deadline_ms = draft.ended
            if entry.ending:
                entry.waiting[ticket] = deadline_ms
            else:
                self._answer(ticket, kafka_transactions.ended(entry.transaction, complete=True))
        if draft.transaction is None:
            self._drop(entry, now_ms)
            return
        self._carry_out(entry, now_ms)
        self._serve(entry, now_ms)

    def _refused(self, entry: TransactionEntry, draft: TransactionDraft, detail: str, now_ms: int) -> None:
        """Refuse the requests of the change ``draft``. Work that no client waits for is retried at the next tick."""
        refusal = Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{entry.key}: {detail}")
        tickets = [answer.ticket for answer in draft.answers] + [begin.ticket for begin in entry.begins]
        if draft.ended is not None:
            tickets.append(draft.ended[0])
        for ticket in tickets:
            self._answer(ticket, refusal)
        entry.begins.clear()
        self._watch(entry)
        self._serve(entry, now_ms)

    def _drop(self, entry: TransactionEntry, now_ms: int) -> None:
        """Remove an expired key. Requests that arrived meanwhile are handled as for an unknown key."""
        del self._entries[entry.key]
        self._active.pop(entry.key, None)
        for request in entry.queue:
            self._enqueue(request, now_ms)

    # --- after the decision ----------------------------------------------------------------------------------------

    def _carry_out(self, entry: TransactionEntry, now_ms: int) -> None:
        """Send the effects of a decision, one group of participants (a part) after the other.

        A part is complete when nothing that was sent for it awaits a response any more.
        """
        if entry.ending:
            if not entry.marked and (entry.participants or entry.parts == 0):
                self._effects += transaction_end.send_part(entry)
            self._complete_if_done(entry, now_ms)
        elif entry.transaction.state == EMPTY:
            entry.parts = 0
            self._resume_begins(entry, now_ms)
        self._watch(entry)

    def _markers_written(self, event: MarkersWritten, now_ms: int) -> None:
        entry = self._decided(event.key, event.decision)
        # Ignore a repeated event about an earlier part, which had other producers.
        if entry is not None and event.part == entry.parts - 1:
            entry.missing.difference_update(event.places)
            self._complete_if_done(entry, now_ms)

    def _offsets_written(self, event: OffsetsWritten, now_ms: int) -> None:
        entry = self._decided(event.key, event.decision)
        if entry is not None:
            entry.missing_groups.discard(event.group)
            self._complete_if_done(entry, now_ms)

    def _decided(self, key: str, decision: int) -> TransactionEntry | None:
        """Return the key's entry if this decision is being carried out, otherwise None."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.ending and entry.transaction.decision == decision else None

    def _complete_if_done(self, entry: TransactionEntry, now_ms: int) -> None:
        """Remove the participants of a part whose markers are all written. After the last part, respond."""
        if entry.missing or entry.missing_groups or entry.draft is not None:
            return
        if len(entry.marked) == len(entry.participants):
            for ticket in entry.waiting:
                self._answer(ticket, kafka_transactions.ended(entry.transaction, complete=True))
            entry.waiting.clear()
        self._change(entry, transaction_end.completed(entry, now_ms=now_ms))

    def _resume_begins(self, entry: TransactionEntry, now_ms: int) -> None:
        begins, entry.begins = entry.begins, []
        entry.queue.extendleft(reversed(begins))
        if begins:
            self._serve(entry, now_ms)

    # --- time ------------------------------------------------------------------------------------------------------

    def _watch(self, entry: TransactionEntry) -> None:
        if entry.idle:
            self._active.pop(entry.key, None)
        else:
            self._active[entry.key] = entry

    def _due_ms(self, entry: TransactionEntry) -> int:
        now = entry.transaction
        if now.kafka is not None:  # Kafka's producers send no keep-alive.
            return now.began_ms + min(now.timeout_ms, self._settings.max_timeout_ms)
        return min(entry.touched_ms + now.timeout_ms, now.began_ms + self._settings.max_timeout_ms)

    def _watches(self) -> bool:
        return bool(self._active)

    def _ticked(self, now_ms: int) -> None:
        for entry in list(self._active.values()):
            self._check_deadlines(entry, now_ms)

    def _check_deadlines(self, entry: TransactionEntry, now_ms: int) -> None:
        for ticket in [ticket for ticket, deadline_ms in entry.waiting.items() if now_ms >= deadline_ms]:
            del entry.waiting[ticket]
            self._answer(ticket, kafka_transactions.ended(entry.transaction, complete=False))
        if entry.draft is not None:
            return
        if entry.transaction.state == OPEN and now_ms >= self._due_ms(entry):
            detail = f"{entry.key}: run {entry.transaction.run_id} sent no keep-alive in time"
            self._effects.append(CoordinatorReport("transactions.timed_out", detail))
            self._change(entry, transaction_end.decide(entry, commit=False, now_ms=now_ms, fence=True))
        elif entry.ending:
            self._complete_if_done(entry, now_ms)
        self._watch(entry)

    def _expire(self, entry: TransactionEntry, now_ms: int) -> None:
        now = entry.transaction
        settings = self._settings
        counted = now.last_version != UNNUMBERED or now.by_topic
        limit_ms = settings.sink_expiration_ms if counted else settings.producer_expiration_ms
        if entry.key.startswith(ONCE_PREFIX):
            limit_ms = settings.once_expiration_ms
        if entry.idle and not entry.queue and now.state == EMPTY and now_ms >= now.used_ms + limit_ms:
            self._change(entry, TransactionDraft(None))

    # --- responses -------------------------------------------------------------------------------------------------

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        self._effects.append(Respond(ticket, outcome))


def _fenced(key: str, run: str) -> Refused:
    return Refused(ErrorCode.INVALID_PRODUCER_EPOCH, f"{key}: a later run has fenced run {run}, or its time was up")


def _too_many(key: str, count: int) -> Refused | None:
    """Return the refusal if one transaction sends too many offsets, or None.

    All offsets of a transaction are in one record, and are handed over in one request.
    """
    if count <= MAX_ENTRIES:
        return None
    detail = f"{key}: {count} offsets sent with one transaction, at most {MAX_ENTRIES} expected"
    return Refused(ErrorCode.INVALID_REQUEST, detail)


def _blocks(now: Transaction, request: SettleRequested) -> bool:
    """Return whether a run other than the request's has an open transaction."""
    return now.state == OPEN and now.run_id != request.run_id


def _joins(draft: TransactionDraft, request: TransactionRequest, now: Transaction) -> bool:
    """Return whether the request can join the change ``draft``. The work of one change is limited."""
    if draft.work > _WORK_AT_ONCE:
        return False
    if draft.changes_nothing:
        return isinstance(request, SettleRequested) and not _blocks(now, request)
    # A key has a producer of one kind only, so its waiting additions are of one kind, or some of them are refused.
    return isinstance(request, AddRequested | KafkaAddRequested)


def _is_late(now: Transaction, request: BeginRequested) -> bool:
    """Return whether the request is outdated: the run's transaction is over, or a later one is open."""
    if request.version != UNNUMBERED:
        return now.numbered and request.version < now.version
    return request.turn < now.turn or (request.turn == now.turn and now.state != OPEN)


def _not_open(key: str, now: Transaction, request: AddRequested | TouchRequested) -> Refused | None:
    """Return the refusal of a request that needs the open transaction, or None if the request is valid."""
    run_id = request.run_id
    if run_id in now.fenced or (now.run_id and run_id != now.run_id):
        return _fenced(key, run_id)
    if now.state != OPEN:
        return Refused(ErrorCode.INVALID_TXN_STATE, f"{key}: nothing is open, it is {now.state}")
    if (request.version, request.turn) != (now.version, now.turn):
        return transaction_end.another_open(key, now, version=request.version, turn=request.turn)
    return None
