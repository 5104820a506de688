"""The transactions of Kafka's producers: the changes of state for the requests of Kafka's protocol.

One producer id serves many transactions of a Kafka producer, and its epoch fences earlier producers. The epoch rises
when another producer takes the transactional id, and when a transaction is aborted without a request of its producer.
For clients with Kafka's transaction.version 2, it also rises at the end of each transaction. Other Kafka clients keep
their epoch and continue their sequences.

The functions are pure and take a ``TransactionEntry``. ``transactions`` calls them. A returned draft is appended to the
log. Source: KIP-98, KIP-360, KIP-890.
"""

from __future__ import annotations

from msgspec.structs import replace

from sparklog.coordinator import transaction_end
from sparklog.coordinator.effects import Done, Ended, KafkaProducerGiven, Refused, Respond
from sparklog.coordinator.events import KafkaAddRequested, KafkaEndRequested, KafkaInitRequested, VerifyRequested
from sparklog.coordinator.records import (
    EMPTY,
    FIRST_EPOCH,
    OPEN,
    UNNUMBERED,
    KafkaProducer,
    Participant,
    Transaction,
)
from sparklog.coordinator.transaction_entry import TransactionDraft, TransactionEntry
from sparklog.errors import ErrorCode
from sparklog.protocol.fields import MAX_ENTRIES


def init(entry: TransactionEntry, request: KafkaInitRequested, *, now_ms: int) -> TransactionDraft | Refused:
    """Return the change of state that gives the producer its id and epoch.

    If a transaction is open, the change aborts it instead. The caller then handles the request again after the
    transaction has ended. Do not call this function while a transaction is being committed or aborted.
    """
    now = entry.transaction
    kafka = now.kafka
    continues = request.producer_epoch >= 0
    if continues and now != Transaction():
        if kafka is None or not _is_own(kafka, request):
            return fenced(entry.key, request.producer_id, request.producer_epoch)
        if kafka.is_last(request.producer_id, request.producer_epoch) and now.state == EMPTY:
            # A repetition, or the producer's transaction has been aborted for this request.
            return transaction_end.unchanged(entry, Respond(request.ticket, _given(kafka)))
    if now.state == OPEN:
        draft = transaction_end.decide(entry, commit=False, now_ms=now_ms, fence=not continues)
        assert draft.transaction is not None
        if continues and kafka is not None:
            raised = kafka.decided(commit=False).raised(request.fresh_id)
            draft.transaction = replace(draft.transaction, kafka=raised)
        return draft
    if kafka is None:
        fresh = KafkaProducer(request.fresh_id, FIRST_EPOCH, request.timeout_ms)
    else:
        raised = kafka.raised(request.fresh_id)
        assert raised is not None
        fresh = raised if continues else replace(raised, last_producer_id=-1, last_epoch=-1)
    began = replace(
        now,
        run_id=f"kafka:{fresh.producer_id}:{fresh.epoch}",
        run=now.run + 1,
        fenced=now.fencing(now.run_id),
        used_ms=now_ms,
        kafka=replace(fresh, timeout_ms=request.timeout_ms),
    )
    return TransactionDraft(began, answers=[Respond(request.ticket, _given(fresh))])


def _given(kafka: KafkaProducer) -> KafkaProducerGiven:
    return KafkaProducerGiven(kafka.producer_id, kafka.epoch)


def _is_own(kafka: KafkaProducer, request: KafkaInitRequested) -> bool:
    sent = (request.producer_id, request.producer_epoch)
    return sent == (kafka.producer_id, kafka.epoch) or kafka.is_last(*sent)


def add(
    entry: TransactionEntry, request: KafkaAddRequested, draft: TransactionDraft | None, *, now_ms: int
) -> TransactionDraft | Refused | Done:
    """Return the change ``draft`` with the additions of the request, or the response if nothing changes.

    The first addition begins the transaction.
    """
    now = draft.transaction if draft is not None and draft.transaction is not None else entry.transaction
    refusal = not_current(entry.key, now, request)
    if refusal is None and entry.ending:
        detail = f"{entry.key}: the last transaction is {now.state}, its markers are not written yet"
        refusal = Refused(ErrorCode.CONCURRENT_TRANSACTIONS, detail)
    kafka = now.kafka
    if refusal is not None or kafka is None:
        return refusal or _unknown(entry.key, request.producer_id)
    if not request.begins and (now.state != OPEN or request.group not in dict(now.offsets)):
        detail = f"{entry.key}: group {request.group!r} is not part of an open transaction"
        return Refused(ErrorCode.INVALID_TXN_STATE, detail)
    if now.state != OPEN:
        now = replace(
            now,
            state=OPEN,
            version=UNNUMBERED,
            timeout_ms=kafka.timeout_ms,
            began_ms=now_ms,
            used_ms=now_ms,
            winners=(),
            offsets=(),
            turn=now.turn + 1,
            producer_id=kafka.producer_id,
            by_topic=False,
        )
    if request.group:
        offsets = transaction_end.with_offsets(now.offsets, request.group, request.offsets)
        if sum(len(found) for _, found in offsets) > MAX_ENTRIES:
            detail = f"{entry.key}: too many offsets sent with one transaction, at most {MAX_ENTRIES} expected"
            return Refused(ErrorCode.INVALID_REQUEST, detail)
        now = replace(now, offsets=offsets)
    staged = draft.participants.get(kafka.producer_id) if draft is not None else None
    known = staged or entry.participants.get(kafka.producer_id)
    participant = (known or Participant(kafka.epoch)).with_places(request.places)
    if draft is None and known is participant and now == entry.transaction:
        return Done(now.decision)
    draft = draft or TransactionDraft(entry.transaction)
    draft.transaction = now
    draft.participants[kafka.producer_id] = participant
    draft.work += 1 + len(request.places) + participant.place_count + len(request.offsets)
    draft.answers.append(Respond(request.ticket, Done(now.decision)))
    return draft


def end(entry: TransactionEntry, request: KafkaEndRequested, *, now_ms: int) -> TransactionDraft | Refused | None:
    """Return the change of state that commits or aborts the open transaction.

    Return None if the request repeats an earlier request whose decision is being carried out.
    """
    now = entry.transaction
    kafka = now.kafka
    if kafka is not None and _is_decided(kafka, request) and now.state != OPEN:
        if request.commit != kafka.committed and request.raises_epoch and request.producer_epoch != kafka.epoch:
            decision = "committed" if kafka.committed else "aborted"
            return Refused(ErrorCode.INVALID_TXN_STATE, f"{entry.key}: the transaction has been {decision}")
        if request.commit == kafka.committed:
            if entry.ending:
                return None
            return transaction_end.unchanged(entry, Respond(request.ticket, ended(now, complete=True)))
    refusal = not_current(entry.key, now, request)
    if refusal is not None or kafka is None:
        return refusal or _unknown(entry.key, request.producer_id)
    if entry.ending:
        return Refused(ErrorCode.CONCURRENT_TRANSACTIONS, f"{entry.key}: the transaction is {now.state}")
    if now.state == OPEN:
        winners = (kafka.producer_id,) if request.commit and kafka.producer_id in entry.participants else ()
        draft = transaction_end.decide(entry, commit=request.commit, winners=winners, now_ms=now_ms)
        draft.ended = (request.ticket, request.deadline_ms)
        assert draft.transaction is not None
        if request.raises_epoch:
            raised = kafka.decided(commit=request.commit).raised(request.fresh_id)
            if raised is None:
                return _no_epoch(entry.key)
            draft.transaction = replace(draft.transaction, kafka=raised)
        return draft
    if request.commit or not request.raises_epoch:
        return Refused(ErrorCode.INVALID_TXN_STATE, f"{entry.key}: no transaction is open")
    # A client with transaction.version 2 may abort before its first record has reached a broker.
    raised = kafka.decided(commit=False).raised(request.fresh_id)
    if raised is None:
        return _no_epoch(entry.key)
    over = replace(now, kafka=raised, used_ms=now_ms)
    return TransactionDraft(over, answers=[Respond(request.ticket, ended(over, complete=True))])


def ended(now: Transaction, *, complete: bool) -> Ended:
    """Return the outcome of a request that ends a transaction."""
    if now.kafka is None:
        return Ended(complete)
    return Ended(complete, producer_id=now.kafka.producer_id, producer_epoch=now.kafka.epoch)


def _is_decided(kafka: KafkaProducer, request: KafkaEndRequested) -> bool:
    """Return whether the transaction of the request is the last one, which has been committed or aborted.

    The producer has the epoch of that transaction, or the one after it.
    """
    sent = (request.producer_id, request.producer_epoch)
    return (kafka.is_last(*sent) or sent == (kafka.producer_id, kafka.epoch)) and sent == (
        kafka.decided_producer_id,
        kafka.decided_epoch,
    )


def not_current(
    key: str, now: Transaction, request: KafkaAddRequested | KafkaEndRequested | VerifyRequested
) -> Refused | None:
    """Return the refusal of a request whose producer is not the current producer of the key, or None if it is."""
    if now.kafka is None:
        if now.run_id:
            return fenced(key, request.producer_id, request.producer_epoch)
        return _unknown(key, request.producer_id)
    if request.producer_id not in {now.kafka.producer_id, now.kafka.last_producer_id}:
        return _unknown(key, request.producer_id)
    if (request.producer_id, request.producer_epoch) != (now.kafka.producer_id, now.kafka.epoch):
        return fenced(key, request.producer_id, request.producer_epoch)
    return None


def fenced(key: str, producer_id: int, epoch: int) -> Refused:
    detail = f"{key}: producer {producer_id} with epoch {epoch} has been fenced, or its transaction has timed out"
    return Refused(ErrorCode.INVALID_PRODUCER_EPOCH, detail)


def _unknown(key: str, producer_id: int) -> Refused:
    detail = f"{key}: producer {producer_id} does not have this transactional id"
    return Refused(ErrorCode.UNKNOWN_PRODUCER_ID, detail)


def _no_epoch(key: str) -> Refused:
    return Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{key}: the epochs are used up, and no producer id is free")
