"""What becomes of one partition: its next state, from its stored one and the standing of its brokers.

Pure and stateless; everything the controller writes is decided here. Always with leader epoch + 1 where a state is
replaced: whatever an older leader still does under the old epoch is fenced.

Rules, in order:
- no state yet: the first live replica leads, the live replicas are the ISR, leader epoch 0;
- the leader stands and is not stopping: nothing, but for members that cannot open their logs: they leave;
- otherwise the first live replica of the assignment that is in the ISR leads;
- a stopping broker keeps what nobody else in the ISR can take over;
- nobody in the ISR is alive: no leader, and the ISR keeps its claim, unless the topic allows unclean elections;
- a disputed partition has no leader before an unclean election, which the topic allows or an operator asks for.

Members that are dead, stopping, or under suspicion of a lost tail keep their place in the ISR: taking them out is for
the partition's leader alone, which does it as soon as it hears of them. Only a leader at work proves, by that very
write, that a member with all records is alive. This controller cannot: whom it would leave in the ISR may be dead
itself, with the tail of its log lost and the loss not seen yet, while the log of the member it takes out is whole. That
goes for a suspect as well: it may have been added honestly since its return. (The simulator found both.)
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

#: Leader epochs that are left out where a log proves that ZooKeeper was put back from an older copy: logs that have not
#: been heard of may have some more than the one that proves it.
EPOCH_STRIDE = 100
RESTORED = "restored"
DISPUTED = "disputed"

#: Elections after which committed records may be missing.
LOSSY = frozenset({UNCLEAN, RECOVERED})


class IsrLiveness(NamedTuple):
    """How the brokers stand. ``held``: vanished, but not yet given up; their fate is open."""

    live: Mapping[int, int]  #: id to incarnation
    held: Collection[int]
    stopping: Collection[int]
    controller_epoch: int


class Decision(NamedTuple):
    state: LeaderAndIsr
    leader_incarnation: int
    reason: str


def decide(
    replicas: tuple[int, ...],
    stored: VersionedState | None,
    standing: IsrLiveness,
    *,
    suspects: Collection[int] = (),
    broken: Collection[int] = (),
    copying: Collection[int] = (),
    unclean: bool = False,
) -> Decision | None:
    """The next state of a partition, or None when the stored one is right.

    The replicas of live ``suspects`` may have lost their tails, those of ``broken`` brokers cannot be opened: neither
    is elected cleanly. Uncleanly, replicas that are ``copying`` for the first time are elected only if nobody else is
    there, but for broken ones.
    """
    live, held, stopping, _ = standing
    if stored is None:
        return _first(replicas, standing)
    state = stored.state
    leader = state.leader
    if leader in held or (state.disputed and not unclean):
        return None
    unfit = {*suspects, *broken}
    standing_leader = stands(stored, standing, unfit)
    kept = tuple(m for m in state.isr if m not in broken or m not in live)
    if standing_leader and leader not in stopping:
        return None if kept == state.isr else _next(stored, standing, leader, kept, STRIPPED)

    sound = [m for m in state.isr if m in live and m not in unfit]
    staying = [m for m in sound if m not in stopping]
    if standing_leader and not staying:
        return None
    electable = staying or sound
    if electable and not state.disputed:
        new_leader = next((r for r in replicas if r in electable), electable[0])
        return _next(stored, standing, new_leader, kept, MOVED if standing_leader else ELECTED)

    if unclean and not any(m in held for m in state.isr):
        candidates = [r for r in replicas if r in live]
        # A lost tail is less than most of a log. Stable: assignment order within.
        candidates.sort(key=lambda r: (r in broken, r in copying, r in suspects, r in stopping))
        if candidates:
            return _next(stored, standing, candidates[0], (candidates[0],), UNCLEAN)
    if leader == NO_LEADER:
        return None
    return _next(stored, standing, NO_LEADER, state.isr, LEADERLESS)


def stands(stored: VersionedState, standing: IsrLiveness, unfit: Collection[int]) -> bool:
    """Whether the leader is at work: live, the process its epoch was given to, and with a sound replica."""
    state = stored.state
    return (
        standing.live.get(state.leader) == stored.leader_incarnation
        and state.leader in state.isr
        and state.leader not in unfit
        and state.leader not in standing.held
    )


def held_up(stored: VersionedState, standing: IsrLiveness, unfit: Collection[int]) -> bool:
    """Whether there is no leader at work, and the fate of a member that could lead again is open."""
    return not stands(stored, standing, unfit) and any(m in standing.held for m in stored.state.isr)


def fit(stored: VersionedState, standing: IsrLiveness, unfit: Collection[int]) -> list[int]:
    """Members of the ISR to whom leadership may be moved from a leader that stands."""
    live, _, stopping, _ = standing
    return [m for m in stored.state.isr if m in live and m not in unfit and m not in stopping]


def move(stored: VersionedState, standing: IsrLiveness, leader: int) -> Decision:
    """``leader``, a member of the ISR, leads in a new epoch."""
    return _next(stored, standing, leader, stored.state.isr, MOVED)


def prefer(
    replicas: tuple[int, ...], stored: VersionedState, standing: IsrLiveness, unfit: Collection[int]
) -> Decision | None:
    """Leadership goes from a leader that stands to the first replica, where that one may lead."""
    preferred = replicas[0]
    if preferred == stored.state.leader or not stands(stored, standing, unfit):
        return None
    return move(stored, standing, preferred) if preferred in fit(stored, standing, unfit) else None


def raised(stored: VersionedState, standing: IsrLiveness, above: int) -> Decision:
    """Return the state of a partition whose epochs up to ``above`` were given before: a leader that stands leads on."""
    leader = stored.state.leader if stands(stored, standing, ()) else NO_LEADER
    epoch = above + EPOCH_STRIDE
    state = msgspec.structs.replace(
        stored.state,
        leader=leader,
        leader_epoch=epoch,
        controller_epoch=standing.controller_epoch,
    )
    return Decision(state, standing.live.get(leader, NO_EPOCH), RAISED)


def recover(stored: VersionedState, standing: IsrLiveness, ends: Mapping[int, tuple[int, int]]) -> Decision:
    """Every member of the ISR lost its tail: the one with the greatest (last epoch, log end) leads alone. ``ends`` may
    be of other replicas as well, which lead only where they have more."""
    isr = stored.state.isr
    best = max(ends, key=lambda broker_id: (ends[broker_id], broker_id in isr, -broker_id))
    return _next(stored, standing, best, (best,), RECOVERED)


def settle(stored: VersionedState, standing: IsrLiveness, refuser: int, *, sound: bool) -> Decision:
    """A replica refuses to cut committed records that its leader lacks: it leads alone where its log is ``sound``. Else
    nobody leads before an operator has decided."""
    if sound:
        return _next(stored, standing, refuser, (refuser,), RESTORED)
    decision = _next(stored, standing, NO_LEADER, stored.state.isr, DISPUTED)
    return decision._replace(state=msgspec.structs.replace(decision.state, disputed=True))


def _first(replicas: tuple[int, ...], standing: IsrLiveness) -> Decision | None:
    live = standing.live
    chosen = [r for r in replicas if r in live and r not in standing.stopping] or [r for r in replicas if r in live]
    if not chosen:
        return None
    state = LeaderAndIsr(chosen[0], 0, tuple(chosen), standing.controller_epoch, lossy_epoch=NO_LOSS)
    return Decision(state, live[chosen[0]], CREATED)


def _next(stored: VersionedState, standing: IsrLiveness, leader: int, isr: tuple[int, ...], reason: str) -> Decision:
    epoch = stored.state.leader_epoch + 1
    # What an earlier release left out may have been an epoch up to this one.
    lossy = epoch if reason in LOSSY or stored.state.lossy_epoch == UNKNOWN_LOSS else stored.state.lossy_epoch
    state = LeaderAndIsr(leader, epoch, isr, standing.controller_epoch, lossy_epoch=lossy)
    return Decision(state, standing.live.get(leader, NO_EPOCH), reason)
