"""The reduction of a failing case to a small one that breaks the same promise: fewer partitions, steps and actions.

The omission of an action changes how the network treats everything after it, so the minimiser tries a smaller case
under a few networks before it rejects the case. The result is an ordinary ``Case`` and plays again exactly. Source:
delta debugging, "Simplifying and Isolating Failure-Inducing Input" (Zeller, Hildebrandt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sparklog.testing.sim_case import Case, Found
from sparklog.testing.sim_cluster import PRODUCE_MS

#: number of networks under which each smaller case is tried
SALTS = 6
#: number of networks that are tried for an earlier failure of the same actions
SOONER_SALTS = 16
#: total number of runs of the simulator
BUDGET = 1200
#: factors by which the pause between records grows
FEWER_RECORDS = (32, 16, 8, 4, 2)
#: time of the first action after the minimisation; by then the cluster has its leaders
FIRST_ACTION_MS = 150
GAP_MS = 20


class Minimiser:
    """The minimiser of one case. Mutable. ``case`` is the smallest one so far that breaks the promise of ``rule``."""

    def __init__(self, case: Case, found: Found, *, budget: int = BUDGET) -> None:
        self.rule = found.rule
        self.case = case
        self.found = found
        self.runs = 0
        self._budget = budget

    def run(self) -> Case:
        """Remove everything that is not needed for the failure; return the remaining case."""
        self._end_at_failure()
        for partitions in range(1, self.case.partitions):
            if self._take(replace(self.case, partitions=partitions)):
                break
        self._fail_sooner()
        self._fix_actions()
        self._keep_last_actions()
        self._take(replace(self.case, calm=True))
        self._drop_actions()
        self._close_gaps()
        self._produce_less()
        self._take(replace(self.case, calm=True))
        self._drop_actions()
        return self.case

    def _take(self, smaller: Case) -> bool:
        """Accept the smaller case if it fails in the same way under one of a few networks; return whether it does."""
        for salt in _salts(smaller.salt):
            if self.runs >= self._budget:
                return False
            self.runs += 1
            candidate = replace(smaller, salt=salt)
            found = candidate.play()
            if found is not None and found.rule == self.rule:
                self.case, self.found = candidate, found
                return True
        return False

    def _end_at_failure(self) -> None:
        """Remove the steps after the failure, which do not change its time."""
        if self.found.at_ms < self.case.fault_ms:
            self._take(replace(self.case, fault_ms=self.found.at_ms + 1, heal_ms=0))

    def _fail_sooner(self) -> None:
        """Play the same actions under other networks, and keep the case with the earliest failure."""
        for salt in range(1, SOONER_SALTS):
            self.runs += 1
            sooner = replace(self.case, salt=salt)
            found = sooner.play()
            if found is not None and found.rule == self.rule and found.at_ms < self.found.at_ms:
                self.case, self.found = sooner, found
                self._end_at_failure()

    def _keep_last_actions(self) -> None:
        """Keep only the last actions, soon after the start, if they suffice; often a few do."""
        count = 2
        while count < len(self._only):
            last = replace(self.case, only=self._only[-count:])
            ahead_ms = max(0, last.schedule()[0].at_ms - FIRST_ACTION_MS)
            if self._take(_sooner(last, 0, ahead_ms)):
                self._end_at_failure()
                return
            count *= 2

    def _fix_actions(self) -> None:
        """List the actions of the case explicitly, so that each of them can be removed or moved."""
        self.case = replace(self.case, only=tuple((action.number, action.at_ms) for action in self.case.schedule()))

    def _drop_actions(self) -> None:
        """Remove halves of the actions, then smaller parts, until every remaining action is needed."""
        size = max(1, len(self._only) // 2)
        while size:
            dropped = self._drop_parts(size)
            self._end_at_failure()
            size = size if dropped and size == 1 else size // 2

    def _drop_parts(self, size: int) -> bool:
        dropped = False
        at = 0
        while at < len(self._only):
            if self._take(replace(self.case, only=self._only[:at] + self._only[at + size :])):
                dropped = True
            else:
                at += size
        return dropped

    def _close_gaps(self) -> None:
        """Shorten the pause before each action."""
        for at in range(len(self._only)):
            before_ms = self._only[at - 1][1] if at else FIRST_ACTION_MS
            gap_ms = self._only[at][1] - before_ms
            while gap_ms > GAP_MS and not self._take(_sooner(self.case, at, gap_ms)):
                gap_ms //= 2
        self._end_at_failure()

    def _produce_less(self) -> None:
        """Produce fewer records, for a shorter trace.

        The fewest come first: a failed attempt with more records does not rule out fewer.
        """
        before_ms = self.case.produce_ms or PRODUCE_MS
        for factor in FEWER_RECORDS:
            if self._take(replace(self.case, produce_ms=factor * before_ms)):
                self._end_at_failure()
                return

    @property
    def _only(self) -> tuple[tuple[int, int], ...]:
        assert self.case.only is not None
        return self.case.only


def _sooner(case: Case, first: int, by_ms: int) -> Case:
    """Return the case with all actions from number ``first`` on, and the end, moved earlier."""
    only = case.only or ()
    moved = tuple((number, at_ms - by_ms) for number, at_ms in only[first:])
    return replace(case, only=only[:first] + moved, fault_ms=max(1, case.fault_ms - by_ms))


def _salts(first: int) -> Iterator[int]:
    """Yield the salt of the current network, then those of others."""
    yield first
    yield from (salt for salt in range(SALTS) if salt != first)


def minimised(case: Case, *, budget: int = BUDGET, tell: Callable[[str], None] | None = None) -> Case:
    """Return the smallest case found that breaks the same promise as ``case``; ``case`` itself if it breaks none."""
    found = case.play()
    if found is None:
        return case
    minimiser = Minimiser(case, found, budget=budget)
    smallest = minimiser.run()
    if tell is not None:
        tell(
            f"minimised in {minimiser.runs} runs: {_size(case)} -> {_size(smallest)}, "
            f"{found.at_ms} -> {minimiser.found.at_ms} ms"
        )
    return smallest


def _size(case: Case) -> str:
    return f"{len(case.schedule())} actions, {case.partitions} partitions"
