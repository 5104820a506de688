"""How a transaction ends: what an end request finds, what a decision writes, and what it sends. Pure functions over an
``Entry``; ``transactions`` decides when."""

from __future__ import annotations

from msgspec.structs import replace

from sparklog.coordinator.effects import Answer, Effect, Ended, Outcome, Refused, SendMarkers, SendOffsets
from sparklog.coordinator.events import EndRequested
from sparklog.coordinator.records import (
    ABORTING,
    COMMITTING,
    EMPTY,
    NOBODY,
    UNNUMBERED,
    Place,
    TopicVersion,
    Transaction,
)
from sparklog.coordinator.transaction_entry import Draft, Entry
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset, TransactionMarker

_GroupOffsets = tuple[tuple[str, tuple[GroupOffset, ...]], ...]


def known_outcome(entry: Entry, request: EndRequested) -> Outcome | None:
    """What can be said about an end request without deciding anything; None: it is to be decided, or waited for.

    The first durable decision about a version counts. Repeating it succeeds; so does a replay that wrote nothing, and
    an abort of what was committed (Spark calls abort after a failed commit call whose decision had gone through).
    """
    now = entry.transaction
    numbered = request.version != UNNUMBERED
    if entry.ending:
        if _repeats(now, request):
            return None
        if numbered and request.version <= now.decided_version and (not request.winners or not request.commit):
            return Ended(True, replayed=True)
        if now.by_topic and now.decided_run == request.run_id and not request.commit:
            return Ended(True, replayed=True)  # an abort after a commit whose answer was lost
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
        # It must not hand over offsets without the records.
        detail = f"{entry.key}: a commit without producers found, {sorted(entry.participants)} take part"
        return Refused(ErrorCode.INVALID_TXN_STATE, detail)
    return None


def another_open(key: str, now: Transaction, *, version: int, turn: int) -> Refused:
    """The request is about another transaction than the one that is open: it comes late."""
    detail = f"{key}: version {version}, turn {turn} found, version {now.version}, turn {now.turn} is open"
    return Refused(ErrorCode.INVALID_TXN_STATE, detail)


def _when_empty(key: str, now: Transaction, request: EndRequested) -> Outcome | None:
    if not request.commit and now.decided_run == request.run_id and _is_over(now, request):
        return Ended(True)  # asked again: the answer was lost
    known = (now.decided_run, now.turn, now.winners)
    repeated = request.commit and (request.run_id, request.turn, tuple(sorted(request.winners))) == known
    if repeated and now.by_topic and request.winners:
        return Ended(True)  # by a run that has been fenced since, by this very commit
    if request.run_id in now.fenced:
        return _refused(key, now, request)
    if not request.commit:
        return None
    if repeated and request.version == UNNUMBERED:
        return Ended(True)
    if request.version == UNNUMBERED and request.run_id != now.run_id:
        return _refused(key, now, request)  # of a run forgotten since, perhaps with its key
    if request.version == UNNUMBERED or request.winners:
        return Refused(ErrorCode.INVALID_TXN_STATE, f"{key}: nothing is open that could be committed")
    return None


def _is_over(now: Transaction, request: EndRequested) -> bool:
    """Of a run that has ended something: whether that was what is asked about, or something later. What comes next of
    the run may be open at a successor, or its tasks may still come."""
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
        # It may have been committed, and is asked about again: that is not remembered once the next run has begun.
        return Refused(ErrorCode.UNKNOWN_PRODUCER_ID, detail)
    return Refused(ErrorCode.INVALID_PRODUCER_EPOCH, detail)


def decide(entry: Entry, *, commit: bool, now_ms: int, winners: tuple[int, ...] = (), fence: bool = False) -> Draft:
    """The change that makes the decision durable. ``fence``: the run that is open may do nothing any more.

    Where there is nothing to mark and nothing to hand over the transaction is over with the decision itself.
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
    )
    if any(participant.topics for participant in entry.participants.values()) or decided.offsets:
        return Draft(decided)
    return Draft(_over(decided, now_ms), dict.fromkeys(entry.participants))


def _raised(entry: Entry, winners: tuple[int, ...], now_ms: int) -> tuple[TopicVersion, ...]:
    """The versions of topics once these producers are committed: in every topic they may have written to."""
    now = entry.transaction
    written = {place.topic_id for winner in winners for place in entry.participants[winner].places()}
    known = {found.topic_id: found for found in now.versions}
    for topic_id in written:
        known[topic_id] = TopicVersion(topic_id, max(now.version, now.version_in(topic_id)), now_ms)
    return tuple(known[topic_id] for topic_id in sorted(known))


def kept_out(entry: Entry, request: EndRequested, *, now_ms: int) -> Draft:
    """Abort a sink's run before any of its tasks has come: those that still come find it fenced. Of a producer there is
    nothing to abort."""
    now = entry.transaction
    if request.version == UNNUMBERED:
        return unchanged(entry, Answer(request.ticket, Ended(True)))
    out = replace(now, fenced=now.fencing(request.run_id), used_ms=now_ms)
    return Draft(out, answers=[Answer(request.ticket, Ended(True))])


def unchanged(entry: Entry, *answers: Answer) -> Draft:
    """Nothing changes, but who answers has written to the log first: a coordinator that was deposed and does not know
    it would tell nothing of what its successor has begun or committed."""
    now = entry.transaction
    # A key that nobody has used is not made by asking.
    return Draft(None if now == Transaction() else now, {NOBODY: None}, list(answers))


def empty_version(entry: Entry, request: EndRequested, *, now_ms: int) -> Draft:
    """Commit a version in which nobody wrote, from a run that had nothing to begin."""
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
    return Draft(over, answers=[Answer(request.ticket, Ended(True))])


def completed(entry: Entry, *, now_ms: int) -> Draft:
    """Every marker is written: the participants leave."""
    return Draft(_over(entry.transaction, now_ms), dict.fromkeys(entry.participants))


def _over(decided: Transaction, now_ms: int) -> Transaction:
    return replace(
        decided,
        state=EMPTY,
        version=UNNUMBERED,
        last_version=decided.decided_version,
        offsets=(),
        used_ms=now_ms,
    )


def orders(entry: Entry) -> list[Effect]:
    """Markers for every registered partition, and the offsets that a commit hands over."""
    now = entry.transaction
    effects: list[Effect] = []
    if markers := _markers(entry):
        effects.append(SendMarkers(entry.key, now.decision, markers))
    effects += [SendOffsets(entry.key, now.decision, group, offsets) for group, offsets in now.offsets]
    return effects


def marked_places(entry: Entry) -> set[Place]:
    return {found for participant in entry.participants.values() for found in participant.places()}


def _markers(entry: Entry) -> tuple[TransactionMarker, ...]:
    winners = set(entry.transaction.winners) if entry.transaction.state == COMMITTING else set()
    fates: dict[Place, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for producer_id, participant in sorted(entry.participants.items()):
        for place in participant.places():
            committed, aborted = fates.setdefault(place, ([], []))
            (committed if producer_id in winners else aborted).append((producer_id, participant.epoch))
    return tuple(
        TransactionMarker(place.topic, place.partition, tuple(committed), tuple(aborted), place.topic_id)
        for place, (committed, aborted) in sorted(fates.items())
    )


def with_offsets(known: _GroupOffsets, group: str, added: tuple[GroupOffset, ...]) -> _GroupOffsets:
    """The newest offset of each partition counts."""
    groups = dict(known)
    merged = {(found.topic, found.partition): found for found in (*groups.get(group, ()), *added)}
    groups[group] = tuple(merged.values())
    return tuple(groups.items())
