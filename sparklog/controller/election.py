"""Elections: the next state of a partition follows from the stored state and from which brokers are live.

The module is pure and stateless. It decides every state that the controller writes. Each new state has a leader epoch
one higher than the old state, so an older leader that still acts in the old epoch is fenced.

Rules, in order:

- no state yet: the first live replica leads, the live replicas are the ISR, and the leader epoch is 0;
- the leader is live and not stopping: nothing changes, except that members that cannot open their logs leave the ISR;
- otherwise the first live replica of the assignment that is in the ISR leads;
- a stopping broker keeps a leadership that no other member of the ISR can take over;
- no member of the ISR is live: the partition has no leader, unless the topic allows unclean elections; the ISR stays;
- a disputed partition has no leader until an unclean election, which the topic allows or an operator requests; disputed
  means that replicas have contradictory committed records.

Members that are dead, stopping or untrusted stay in the ISR. Only the partition's leader may remove them, and it does
so as soon as it receives the update. The leader's write proves that a member with all records, the leader, is alive.
The controller has no such proof. If the controller removed a member with the whole log, the remaining member might also
be dead, and might have lost the tail of its log unnoticed. The same holds for an untrusted member, which may have been
added correctly since its return. (The simulator found both cases.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from sparklog.model import NO_EPOCH, NO_LEADER, NO_LOSS, UNKNOWN_LOSS, LeaderAndIsr, VersionedState

CREATED = "created"
ELECTED = "elected"
MOVED = "moved"
STRIPPED = "stripped"
LEADERLESS = "leaderless"
UNCLEAN = "unclean"
RECOVERED = "recovered"
RAISED = "raised"

#: The number of leader epochs that are skipped when a log proves that ZooKeeper was restored from an older copy. Other
#: logs, not reported yet, may have higher epochs than this log.
EPOCH_STRIDE = 100
RESTORED = "restored"
DISPUTED = "disputed"

#: The reasons of elections that may lose committed records.
LOSSY = frozenset({UNCLEAN, RECOVERED})


class IsrLiveness(NamedTuple):
    """The live brokers with their incarnations, the held brokers, and the stopping brokers.

    A held broker has disappeared, but does not count as failed yet. A stopping broker requests a controlled shutdown.
    """

    live: Mapping[int, int]  #: Broker id to incarnation.
    held: Collection[int]
    stopping: Collection[int]
    controller_epoch: int


class ElectionDecision(NamedTuple):
    state: LeaderAndIsr
    leader_incarnation: int
    reason: str


def decide(
    replicas: tuple[int, ...],
    stored: VersionedState | None,
    liveness: IsrLiveness,
    *,
    suspects: Collection[int] = (),
    broken: Collection[int] = (),
    copying: Collection[int] = (),
    unclean: bool = False,
) -> ElectionDecision | None:
    """Return the next state of a partition, or None if the stored state needs no change.

    The replicas of ``suspects`` may have lost the ends of their logs, and ``broken`` brokers cannot open their
    replicas. Only an unclean election may choose a suspect or broken replica. An unclean election chooses a replica
    that is still ``copying`` the log only if every other candidate is broken.
    """
    live, held, stopping, _ = liveness
    if stored is None:
        return _first(replicas, liveness)
    state = stored.state
    leader = state.leader
    if leader in held or (state.disputed and not unclean):
        return None
    unfit = {*suspects, *broken}
    remains = leader_remains(stored, liveness, unfit)
    kept = tuple(m for m in state.isr if m not in broken or m not in live)
    if remains and leader not in stopping:
        return None if kept == state.isr else _next(stored, liveness, leader, kept, STRIPPED)

    sound = [m for m in state.isr if m in live and m not in unfit]
    staying = [m for m in sound if m not in stopping]
    if remains and not staying:
        return None
    electable = staying or sound
    if electable and not state.disputed:
        new_leader = next((r for r in replicas if r in electable), electable[0])
        return _next(stored, liveness, new_leader, kept, MOVED if remains else ELECTED)

    if unclean and not any(m in held for m in state.isr):
        candidates = [r for r in replicas if r in live]
        # A replica that lost its tail has more than one that is still copying. The sort is stable: equal replicas stay
        # in assignment order.
        candidates.sort(key=lambda r: (r in broken, r in copying, r in suspects, r in stopping))
        if candidates:
            return _next(stored, liveness, candidates[0], (candidates[0],), UNCLEAN)
    if leader == NO_LEADER:
        return None
    return _next(stored, liveness, NO_LEADER, state.isr, LEADERLESS)


def leader_remains(stored: VersionedState, liveness: IsrLiveness, unfit: Collection[int]) -> bool:
    """Return whether the leader may stay: it is in the ISR, runs as the elected incarnation, and is not ``unfit``.

    ``unfit`` are the brokers whose replicas must not lead.
    """
    state = stored.state
    return (
        liveness.live.get(state.leader) == stored.leader_incarnation
        and state.leader in state.isr
        and state.leader not in unfit
        and state.leader not in liveness.held
    )


def held_up(stored: VersionedState, liveness: IsrLiveness, unfit: Collection[int]) -> bool:
    """Return whether a partition without a leader waits for a held member of the ISR, which may return and lead.

    A held broker has disappeared, but does not count as failed yet.
    """
    return not leader_remains(stored, liveness, unfit) and any(m in liveness.held for m in stored.state.isr)


def fit(stored: VersionedState, liveness: IsrLiveness, unfit: Collection[int]) -> list[int]:
    """Return the members of the ISR that may take over the leadership from a live leader.

    ``unfit`` are the brokers whose replicas must not lead.
    """
    live, _, stopping, _ = liveness
    return [m for m in stored.state.isr if m in live and m not in unfit and m not in stopping]


def move(stored: VersionedState, liveness: IsrLiveness, leader: int) -> ElectionDecision:
    """Return the decision that makes ``leader``, a member of the ISR, the leader in a new leader epoch."""
    return _next(stored, liveness, leader, stored.state.isr, MOVED)


def prefer(
    replicas: tuple[int, ...], stored: VersionedState, liveness: IsrLiveness, unfit: Collection[int]
) -> ElectionDecision | None:
    """Return the decision that moves the leadership from a live leader to the preferred replica.

    Return None if the preferred replica already leads or may not lead, or if the leader is not live.
    """
    preferred = replicas[0]
    if preferred == stored.state.leader or not leader_remains(stored, liveness, unfit):
        return None
    return move(stored, liveness, preferred) if preferred in fit(stored, liveness, unfit) else None


def raised(stored: VersionedState, liveness: IsrLiveness, above: int) -> ElectionDecision:
    """Return the decision that raises the leader epoch above ``above``, because that epoch was already used.

    A live leader stays the leader. Otherwise the partition has no leader at first.
    """
    leader = stored.state.leader if leader_remains(stored, liveness, ()) else NO_LEADER
    epoch = above + EPOCH_STRIDE
    state = msgspec.structs.replace(
        stored.state,
        leader=leader,
        leader_epoch=epoch,
        controller_epoch=liveness.controller_epoch,
    )
    return ElectionDecision(state, liveness.live.get(leader, NO_EPOCH), RAISED)


def recover(stored: VersionedState, liveness: IsrLiveness, ends: Mapping[int, tuple[int, int]]) -> ElectionDecision:
    """Return the decision to elect the replica with the longest log, because all ISR members may have lost records.

    ``ends`` has the leader epoch of the last batch and the log end offset of each candidate. The replica with the
    greatest pair leads alone. Replicas outside the ISR may be candidates. They are elected only if their log is longer.
    """
    isr = stored.state.isr
    best = max(ends, key=lambda broker_id: (ends[broker_id], broker_id in isr, -broker_id))
    return _next(stored, liveness, best, (best,), RECOVERED)


def settle(stored: VersionedState, liveness: IsrLiveness, refuser: int, *, sound: bool) -> ElectionDecision:
    """Return the decision after a replica has refused to truncate committed records that its leader lacks.

    If the log of the replica is ``sound``, the replica becomes the leader and the only ISR member. Otherwise the
    partition has no leader until an operator decides.
    """
    if sound:
        return _next(stored, liveness, refuser, (refuser,), RESTORED)
    decision = _next(stored, liveness, NO_LEADER, stored.state.isr, DISPUTED)
    return decision._replace(state=msgspec.structs.replace(decision.state, disputed=True))


def _first(replicas: tuple[int, ...], liveness: IsrLiveness) -> ElectionDecision | None:
    live = liveness.live
    chosen = [r for r in replicas if r in live and r not in liveness.stopping] or [r for r in replicas if r in live]
    if not chosen:
        return None
    state = LeaderAndIsr(chosen[0], 0, tuple(chosen), liveness.controller_epoch, lossy_epoch=NO_LOSS)
    return ElectionDecision(state, live[chosen[0]], CREATED)


def _next(
    stored: VersionedState, liveness: IsrLiveness, leader: int, isr: tuple[int, ...], reason: str
) -> ElectionDecision:
    epoch = stored.state.leader_epoch + 1
    # An earlier release did not record the epoch of a lossy election, which may be any epoch up to this one.
    lossy = epoch if reason in LOSSY or stored.state.lossy_epoch == UNKNOWN_LOSS else stored.state.lossy_epoch
    state = LeaderAndIsr(leader, epoch, isr, liveness.controller_epoch, lossy_epoch=lossy)
    return ElectionDecision(state, liveness.live.get(leader, NO_EPOCH), reason)
