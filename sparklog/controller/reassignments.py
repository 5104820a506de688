"""The phases of a reassignment: when replicas may leave, which replica leads meanwhile, and when the reassignment ends.

The module is pure. The topic's metadata in ZooKeeper has the reassignments in progress: its ``assignment`` has the
target replicas, followed by the replicas that will leave. The phase follows from the partition's state alone, so a new
controller continues where the last one stopped:

  copying   a target replica is not in sync: no replica leaves; the leader adds members as they catch up
  leaving   the target is in sync: leadership moves into the target; the leader removes other replicas from the ISR
  done      only the target is in the ISR: one write ends the move in the record and raises the leader epoch

The raised epoch shows the end of a reassignment to a leader and to replicas that were not notified. A broker that is no
longer a replica cannot fetch in the new epoch. Here too, only the leader removes members from the ISR.

A cancelled reassignment has the original assignment as its target. It does not wait for all of these replicas to be in
sync, because some may have been absent before it started: min.insync.replicas are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from sparklog.controller import election
from sparklog.model import Reassignment, TopicRecord, VersionedState

#: The number of reassignments that one write ends. With their partition states the write stays well below ZooKeeper's
#: size limit, even with a large record.
MAX_FINISHED = 200

REASSIGNED = "reassigned"


def may_leave(move: Reassignment, isr: Collection[int], min_isr: int) -> bool:
    """Return whether the leader may now remove the replicas outside the target from the ISR.

    ``min_isr`` is the topic's min.insync.replicas.
    """
    target = set(move.target)
    if target.issubset(isr):
        return True
    return target == set(move.original) and len(target.intersection(isr)) >= min(min_isr, len(target))


def leaving(
    replicas: tuple[int, ...], move: Reassignment | None, isr: Collection[int], min_isr: int
) -> tuple[int, ...]:
    """Return the replicas that the leader must now remove from the ISR because of the reassignment ``move``."""
    if move is None or not may_leave(move, isr, min_isr):
        return ()
    return tuple(r for r in replicas if r not in move.target)


def next_leader(
    move: Reassignment,
    stored: VersionedState,
    liveness: election.IsrLiveness,
    *,
    unfit: Collection[int],
    min_isr: int,
) -> election.ElectionDecision | None:
    """Return the decision that moves the leadership to one of the target replicas.

    Return None if no move is needed or possible now. The new leader is a live target replica that may lead. The
    leadership moves only when the leader may remove all other replicas from the ISR (``may_leave``).
    """
    state = stored.state
    if state.leader in move.target or not election.leader_remains(stored, liveness, unfit):
        return None
    if not may_leave(move, state.isr, min_isr):
        return None
    fit = election.fit(stored, liveness, unfit)
    leader = next((r for r in move.target if r in fit), None)
    return None if leader is None else election.move(stored, liveness, leader)


def only_reorders(replicas: tuple[int, ...], move: Reassignment) -> bool:
    """Return whether the reassignment only changes the order of the replicas."""
    return set(replicas) == set(move.target) == set(move.original)


def finish(
    move: Reassignment,
    stored: VersionedState,
    liveness: election.IsrLiveness,
    *,
    unfit: Collection[int],
    min_isr: int,
) -> election.ElectionDecision | None:
    """Return the decision that ends the reassignment. Return None if it is not finished or the leader is not live."""
    state = stored.state
    if state.leader not in move.target or not set(state.isr).issubset(move.target):
        return None
    if not may_leave(move, state.isr, min_isr) or not election.leader_remains(stored, liveness, unfit):
        return None
    return election.move(stored, liveness, state.leader)._replace(reason=REASSIGNED)


def finished_record(record: TopicRecord, partitions: Iterable[int]) -> TopicRecord:
    """Return the topic's metadata after the end of the reassignments of these partitions."""
    moves = dict(record.reassigning)
    assignment = list(record.assignment)
    for number in partitions:
        assignment[number] = moves.pop(number).target
    return msgspec.structs.replace(record, assignment=tuple(assignment), reassigning=moves)


def moving_record(record: TopicRecord, targets: Mapping[int, tuple[int, ...]]) -> TopicRecord:
    """Return the topic's metadata with added reassignments. ``targets`` has the target replicas of each partition.

    A reassignment that is already in progress gets the new target.
    """
    moves = dict(record.reassigning)
    assignment = list(record.assignment)
    for number, target in targets.items():
        known = moves.get(number)
        replicas = assignment[number]
        original, throttle_bytes = (known.original, known.throttle_bytes) if known else (replicas, 0)
        moves[number] = Reassignment(target, original, throttle_bytes)
        assignment[number] = (*target, *(r for r in replicas if r not in target))
    return msgspec.structs.replace(record, assignment=tuple(assignment), reassigning=moves)
