"""When a partition that moves may let replicas go, who leads it meanwhile, and when the move is done. Pure.

A move is a level in the topic's record: ``assignment`` holds the target, followed by the replicas that will go. The
phases follow from the partition's state alone, so that a new controller goes on where the last one was:

    copying   the target is not all in sync: nobody goes; the leader adds members as they catch up
    leaving   it is: leadership moves into the target; the leader takes the others out of the ISR
    done      nobody but the target is in the ISR: one write ends the move in the record and raises the leader epoch

The raised epoch makes the end of a move known to a leader and to replicas that nobody could tell: whoever is no
replica any more cannot fetch in it. Members are taken out of the ISR by the leader only, as everywhere.

A cancelled move (its target is what it began with) need not wait for replicas that were away before it began.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from sparklog.controller import election
from sparklog.model import Reassignment, TopicRecord, VersionedState

#: Ends of moves in one write: with their states well below ZooKeeper's limit, whatever the record's own size.
MAX_FINISHED = 200

REASSIGNED = "reassigned"


def may_leave(move: Reassignment, isr: Collection[int], min_isr: int) -> bool:
    """Whether the replicas that are not in the target may go. ``min_isr`` is the topic's min.insync.replicas."""
    target = set(move.target)
    if target.issubset(isr):
        return True
    return target == set(move.original) and len(target.intersection(isr)) >= min(min_isr, len(target))


def leaving(
    replicas: tuple[int, ...], move: Reassignment | None, isr: Collection[int], min_isr: int
) -> tuple[int, ...]:
    """Whom the partition's leader is to take out of the ISR."""
    if move is None or not may_leave(move, isr, min_isr):
        return ()
    return tuple(r for r in replicas if r not in move.target)


def next_leader(
    move: Reassignment,
    stored: VersionedState,
    standing: election.IsrLiveness,
    *,
    unfit: Collection[int],
    min_isr: int,
) -> election.Decision | None:
    """Leadership moves into the target once the others may go, to a member that is live, sound and stays."""
    state = stored.state
    if state.leader in move.target or not election.stands(stored, standing, unfit):
        return None
    if not may_leave(move, state.isr, min_isr):
        return None
    fit = election.fit(stored, standing, unfit)
    leader = next((r for r in move.target if r in fit), None)
    return None if leader is None else election.move(stored, standing, leader)


def only_reorders(replicas: tuple[int, ...], move: Reassignment) -> bool:
    """The same replicas in another order: nothing is copied and nobody goes."""
    return set(replicas) == set(move.target) == set(move.original)


def finish(
    move: Reassignment,
    stored: VersionedState,
    standing: election.IsrLiveness,
    *,
    unfit: Collection[int],
    min_isr: int,
) -> election.Decision | None:
    """The state that ends the move, or None while it goes on. Only under a leader that stands."""
    state = stored.state
    if state.leader not in move.target or not set(state.isr).issubset(move.target):
        return None
    if not may_leave(move, state.isr, min_isr) or not election.stands(stored, standing, unfit):
        return None
    return election.move(stored, standing, state.leader)._replace(reason=REASSIGNED)


def finished_record(record: TopicRecord, partitions: Iterable[int]) -> TopicRecord:
    """The record once these partitions have moved."""
    moves = dict(record.reassigning)
    assignment = list(record.assignment)
    for number in partitions:
        assignment[number] = moves.pop(number).target
    return msgspec.structs.replace(record, assignment=tuple(assignment), reassigning=moves)


def moving_record(record: TopicRecord, targets: Mapping[int, tuple[int, ...]]) -> TopicRecord:
    """The record with moves to ``targets`` begun, or those under way turned to them."""
    moves = dict(record.reassigning)
    assignment = list(record.assignment)
    for number, target in targets.items():
        known = moves.get(number)
        replicas = assignment[number]
        original, throttle_bytes = (known.original, known.throttle_bytes) if known else (replicas, 0)
        moves[number] = Reassignment(target, original, throttle_bytes)
        assignment[number] = (*target, *(r for r in replicas if r not in target))
    return msgspec.structs.replace(record, assignment=tuple(assignment), reassigning=moves)
