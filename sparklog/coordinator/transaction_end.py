"""The end of a transaction: the outcome of an EndTransaction request, the records of a decision, and its effects.

The functions are pure and take a ``TransactionEntry``. ``transactions`` calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from msgspec.structs import replace

from sparklog.coordinator.effects import Effect, Ended, Outcome, Refused, Respond, SendMarkers, SendOffsets
from sparklog.coordinator.events import EndRequested
from sparklog.coordinator.records import (
    ABORTING,
    COMMITTING,
    EMPTY,
    NO_PRODUCER,
    UNNUMBERED,
    KafkaProducer,
    PartitionPlace,
    RegisteredTopic,
    TopicVersion,
    Transaction,
)
from sparklog.coordinator.transaction_entry import TransactionDraft, TransactionEntry
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TransactionMarker

#: The markers of a decision are sent in parts. The limits of one part: its participants, its pairs of a participant and
#: a partition, and its partitions (participants with the same partitions count these once). The coordinator builds the
#: markers of a part in one step, and removes its participants with one append. The leader of a partition writes a
#: marker without a pause, for a time that grows with the number of participants.
PARTICIPANTS_AT_ONCE, PAIRS_AT_ONCE, PLACES_AT_ONCE = 20_000, 200_000, 40_000

_Ids = tuple[tuple[int, int], ...]
#: The (producer id, epoch) pairs that commit, and the pairs that abort.
_Fates = tuple[list[tuple[int, int]], list[tuple[int, int]]]
_GroupOffsets = tuple[tuple[str, tuple[GroupOffset, ...]], ...]


def known_outcome(entry: TransactionEntry, request: EndRequested) -> Outcome | None:
    """Return the outcome of an EndTransaction request, or None if it needs a decision or must wait for one.

    A version is the number of a sink's transaction. The first durable decision about a version counts. A repetition of
    the request that caused this decision succeeds. A commit of a version that is already committed succeeds if the
    repeated transaction has no records. An abort of a committed version succeeds as well, without effect: Spark calls
    abort if the commit call failed, even if the decision to commit was made.
    """
    now = entry.transaction
    numbered = request.version != UNNUMBERED
    if entry.ending:
        if _repeats(now, request):
            return None
        if numbered and request.version <= now.decided_version and (not request.winners or not request.commit):
            return Ended(True, replayed=True)
        if now.by_topic and now.decided_run == request.run_id and not request.commit:
            return Ended(True, replayed=True)  # An abort after a commit whose response was lost.
        return _refused(entry.key, now, request)
    if numbered and request.version <= now.last_version:
        if not request.winners or not request.commit:
            return Ended(True, replayed=True)
        own = now.decided_run == request.run_id and request.version == now.last_version
        return Ended(True) if own and set(request.winners) == set(now.winners) else _refused(entry.key, now, request)
    if now.state == EMPTY:
        return _when_empty(entry.key, now, request)
    if request.run_id != now.run_id or request.run_id in now.fenced:
        return _refused(entry.key, now, request)
    if (request.version, request.turn) != (now.version, now.turn):
        return another_open(entry.key, now, version=request.version, turn=request.turn)
    strangers = sorted(set(request.winners) - set(entry.participants))
    if request.commit and strangers:
        detail = f"{entry.key}: producers {strangers[:8]} have registered nothing in this transaction"
        return Refused(ErrorCode.INVALID_TXN_STATE, detail)
    if request.commit and not now.numbered and not request.winners and (entry.participants or now.offsets):
        # Such a commit would hand over the offsets but abort the records.
        detail = f"{entry.key}: a commit without producers found, {sorted(entry.participants)} take part"
        return Refused(ErrorCode.INVALID_TXN_STATE, detail)
    return None


def another_open(key: str, now: Transaction, *, version: int, turn: int) -> Refused:
    """Return the refusal of a late request that belongs to a transaction other than the open one."""
    detail = f"{key}: version {version}, turn {turn} found, version {now.version}, turn {now.turn} is open"
    return Refused(ErrorCode.INVALID_TXN_STATE, detail)


def _when_empty(key: str, now: Transaction, request: EndRequested) -> Outcome | None:
    if not request.commit and now.decided_run == request.run_id and _is_over(now, request):
        return Ended(True)  # This is a repetition: the first response was lost.
    known = (now.decided_run, now.turn, now.winners)
    repeated = request.commit and (request.run_id, request.turn, tuple(sorted(request.winners))) == known
    if repeated and now.by_topic and request.winners:
        return Ended(True)  # This is a repetition. Its run is fenced only because the commit fenced it.
    if request.run_id in now.fenced:
        return _refused(key, now, request)
    if not request.commit:
        return None
    if repeated and request.version == UNNUMBERED:
        return Ended(True)
    if request.version == UNNUMBERED and request.run_id != now.run_id:
        return _refused(key, now, request)  # Another run has begun, or the key has expired.
    if request.version == UNNUMBERED or request.winners:
        return Refused(ErrorCode.INVALID_TXN_STATE, f"{key}: nothing is open that could be committed")
    return None


def _is_over(now: Transaction, request: EndRequested) -> bool:
    """Return whether the run has ended the transaction of the request, or a later one.

    Otherwise the transaction may not have begun here yet, so its abort must still be recorded.
    """
    return request.turn <= now.turn if request.version == UNNUMBERED else request.run_id in now.fenced


def _repeats(now: Transaction, request: EndRequested) -> bool:
    return (
        now.decided_run == request.run_id
        and (now.version, now.turn) == (request.version, request.turn)
        and request.commit == (now.state == COMMITTING)
        and (not request.commit or set(request.winners) == set(now.winners))
    )


def _refused(key: str, now: Transaction, request: EndRequested) -> Refused:
    wish = "commit" if request.commit else "abort"
    detail = (
        f"{key}: run {request.run_id} cannot {wish} version {request.version}: run {now.run_id} is {now.state}, "
        f"last committed version {now.last_version}"
    )
    if request.commit and request.version == UNNUMBERED and request.run_id != now.run_id:
        # The request may be a repetition of a commit that succeeded. That is no longer known, because the next run has
        # begun.
        return Refused(ErrorCode.UNKNOWN_PRODUCER_ID, detail)
    return Refused(ErrorCode.INVALID_PRODUCER_EPOCH, detail)


def decide(
    entry: TransactionEntry, *, commit: bool, now_ms: int, winners: tuple[int, ...] = (), fence: bool = False
) -> TransactionDraft:
    """Return the change of state that records the decision to commit or abort the open transaction.

    If ``fence`` is true, the change also fences the run (the producer, or the start of a query) that opened the
    transaction.

    If there are no markers to write and no offsets to hand over, the same change ends the transaction.
    """
    now = entry.transaction
    decided = replace(
        now,
        state=COMMITTING if commit else ABORTING,
        decision=now.decision + 1,
        winners=tuple(sorted(winners)) if commit else (),
        decided_run=now.run_id,
        offsets=now.offsets if commit else (),
        versions=_raised(entry, winners, now_ms) if commit and now.by_topic else now.versions,
        fenced=now.fencing(now.run_id) if fence else now.fenced,
        used_ms=now_ms,
        kafka=_kafka_decided(now.kafka, commit=commit, fence=fence),
    )
    many = len(entry.participants) > PARTICIPANTS_AT_ONCE
    if many or decided.offsets or any(participant.topics for participant in entry.participants.values()):
        return TransactionDraft(decided)
    return TransactionDraft(_over(decided, now_ms), dict.fromkeys(entry.participants))


def _kafka_decided(kafka: KafkaProducer | None, *, commit: bool, fence: bool) -> KafkaProducer | None:
    if kafka is None:
        return None
    decided = kafka.decided(commit=commit)
    return decided.fenced() if fence else decided


def _raised(entry: TransactionEntry, winners: tuple[int, ...], now_ms: int) -> tuple[TopicVersion, ...]:
    """Return the versions of the topics after the commit of these producers.

    The version rises for each topic of which the producers registered partitions.
    """
    now = entry.transaction
    written = {found.topic_id for winner in winners for found in entry.participants[winner].topics}
    known = {found.topic_id: found for found in now.versions}
    for topic_id in written:
        known[topic_id] = TopicVersion(topic_id, max(now.version, now.version_in(topic_id)), now_ms)
    return tuple(known[topic_id] for topic_id in sorted(known))


def fenced_early(entry: TransactionEntry, request: EndRequested, *, now_ms: int) -> TransactionDraft:
    """Return the change of state for an abort by a producer or a query that has not begun a transaction.

    For a query, the change fences this start of the query (its run), so that its later tasks are refused. For a
    producer, whose request has no version, nothing changes.
    """
    now = entry.transaction
    if request.version == UNNUMBERED:
        return unchanged(entry, Respond(request.ticket, Ended(True)))
    out = replace(now, fenced=now.fencing(request.run_id), used_ms=now_ms)
    return TransactionDraft(out, answers=[Respond(request.ticket, Ended(True))])


def unchanged(entry: TransactionEntry, *answers: Respond) -> TransactionDraft:
    """Return an empty change of state with these responses, which are sent only after a write to the log.

    Otherwise a coordinator that has been replaced, and does not know it yet, could respond without knowing the
    transactions of its successor.
    """
    now = entry.transaction
    # A request that changes nothing does not create the key.
    return TransactionDraft(None if now == Transaction() else now, {NO_PRODUCER: None}, list(answers))


def empty_version(entry: TransactionEntry, request: EndRequested, *, now_ms: int) -> TransactionDraft:
    """Return the change of state that commits a sink's transaction without records.

    No task of the query wrote records, so the transaction was not begun. The change only records its number
    (``version``) as the last committed one.
    """
    now = entry.transaction
    over = replace(
        now,
        version=UNNUMBERED,
        last_version=request.version,
        decision=now.decision + 1,
        winners=(),
        decided_run=request.run_id,
        used_ms=now_ms,
    )
    return TransactionDraft(over, answers=[Respond(request.ticket, Ended(True))])


def next_part(entry: TransactionEntry) -> set[int]:
    """Return the participants whose markers are sent together next, or an empty set if no participants remain."""
    part: set[int] = set()
    seen: set[tuple[RegisteredTopic, ...]] = set()
    pairs = places = 0
    for producer_id, participant in entry.participants.items():
        pairs += participant.place_count
        if participant.topics not in seen:
            seen.add(participant.topics)
            places += participant.place_count
        full = len(part) == PARTICIPANTS_AT_ONCE or pairs > PAIRS_AT_ONCE or places > PLACES_AT_ONCE
        if part and full:
            break
        part.add(producer_id)
    return part


def completed(entry: TransactionEntry, *, now_ms: int) -> TransactionDraft:
    """Return the change of state after all markers of the current part are written. It removes the part's participants.

    A part is a group of participants whose markers are sent together. After the last part the change also ends the
    transaction. If the coordinator crashes between two parts, the next coordinator sends the markers of the remaining
    participants.
    """
    removed = dict.fromkeys(entry.marked)
    if len(removed) < len(entry.participants):
        return TransactionDraft(entry.transaction, removed)
    return TransactionDraft(_over(entry.transaction, now_ms), removed)


def _over(decided: Transaction, now_ms: int) -> Transaction:
    return replace(
        decided,
        state=EMPTY,
        version=UNNUMBERED,
        last_version=decided.decided_version,
        offsets=(),
        used_ms=now_ms,
    )


def send_part(entry: TransactionEntry) -> list[Effect]:
    """Begin the next part of a decision: a group of participants whose markers are sent together. Return the effects.

    The effects send markers to every partition that these participants registered. With the first part they also send
    the offsets that a commit hands over.
    """
    now, part = entry.transaction, entry.parts
    effects: list[Effect] = []
    entry.marked = next_part(entry)
    entry.parts += 1
    if markers := _markers(entry, sorted(entry.marked)):
        effects.append(SendMarkers(entry.key, now.decision, tuple(markers.values()), part))
        entry.missing = set(markers)
    if part == 0:
        effects += [SendOffsets(entry.key, now.decision, group, offsets) for group, offsets in now.offsets]
        entry.missing_groups = {group for group, _ in now.offsets}
    return effects


def _markers(entry: TransactionEntry, part: Iterable[int]) -> dict[PartitionPlace, TransactionMarker]:
    """Return the markers for these participants. Their ids are sorted."""
    winners = set(entry.transaction.winners) if entry.transaction.state == COMMITTING else set()
    # The tasks of a sink often write to the same partitions. Therefore visit each set of partitions once, with the ids
    # of all its participants.
    by_topics: dict[tuple[RegisteredTopic, ...], _Fates] = {}
    for producer_id in part:
        participant = entry.participants[producer_id]
        committed, aborted = by_topics.setdefault(participant.topics, ([], []))
        (committed if producer_id in winners else aborted).append((producer_id, participant.epoch))
    fates: dict[tuple[str, str], dict[int, list[_Fates]]] = {}
    for topics, found in by_topics.items():
        for written in topics:
            by_number = fates.setdefault((written.topic, written.topic_id), {})
            for number in written.numbers:
                by_number.setdefault(number, []).append(found)
    return {
        PartitionPlace(topic, number, topic_id): TransactionMarker(topic, number, *_merged(by_number[number]), topic_id)
        for (topic, topic_id), by_number in sorted(fates.items(), key=lambda found: found[0])
        for number in sorted(by_number)
    }


def _merged(fates: list[_Fates]) -> tuple[_Ids, _Ids]:
    """Merge lists of ids; return the sorted committed ids and the sorted aborted ids."""
    if len(fates) == 1:
        committed, aborted = fates[0]
        return tuple(committed), tuple(aborted)
    return (
        tuple(sorted(chain.from_iterable(committed for committed, _ in fates))),
        tuple(sorted(chain.from_iterable(aborted for _, aborted in fates))),
    )


def with_offsets(known: _GroupOffsets, group: str, added: tuple[GroupOffset, ...]) -> _GroupOffsets:
    """Return ``known`` with offsets added for ``group``. An added offset replaces a known one of the same partition."""
    groups = dict(known)
    merged = {(found.topic, found.partition): found for found in (*groups.get(group, ()), *added)}
    groups[group] = tuple(merged.values())
    return tuple(groups.items())
