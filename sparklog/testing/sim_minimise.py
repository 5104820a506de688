"""The reduction of a failing case: a search for a smaller case that violates the same guarantee.

A smaller case has fewer partitions, steps and actions. If an action is omitted, all later messages have other delays
and losses. So the minimizer plays a smaller case with a few network seeds (``salt``) before it rejects the case. The
result is an ordinary ``Case``, which fails again in the same way. Source: delta debugging, "Simplifying and Isolating
Failure-Inducing Input" (Zeller, Hildebrandt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sparklog.testing.sim_case import Case, Found
from sparklog.testing.sim_cluster import PRODUCE_MS

#: The number of network seeds with which each smaller case is played.
SALTS = 6
#: The number of network seeds that are tried for an earlier failure with the same actions.
SOONER_SALTS = 16
#: The maximum number of runs of the simulator.
BUDGET = 1200
#: The factors by which the pause between records is extended.
FEWER_RECORDS = (32, 16, 8, 4, 2)
#: The time of the first action after the minimisation. The cluster has elected its leaders by then.
FIRST_ACTION_MS = 150
GAP_MS = 20


class Minimiser:
    """A minimizer of one failing case. ``case`` is the smallest case so far that violates ``rule``."""

    def __init__(self, case: Case, found: Found, *, budget: int = BUDGET) -> None:
        self.rule = found.rule
        self.case = case
        self.found = found
        self.runs = 0
        self._budget = budget

    def run(self) -> Case:
        """Remove all parts of the case that the failure does not need; return the remaining case."""
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
        """Accept the smaller case if it fails in the same way with one of a few network seeds.

        Return whether it fails.
        """
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
        """End the case right after the failure."""
        if self.found.at_ms < self.case.fault_ms:
            self._take(replace(self.case, fault_ms=self.found.at_ms + 1, heal_ms=0))

    def _fail_sooner(self) -> None:
        """Play the same actions with other network seeds, and keep the case with the earliest failure."""
        for salt in range(1, SOONER_SALTS):
            self.runs += 1
            sooner = replace(self.case, salt=salt)
            found = sooner.play()
            if found is not None and found.rule == self.rule and found.at_ms < self.found.at_ms:
                self.case, self.found = sooner, found
                self._end_at_failure()

    def _keep_last_actions(self) -> None:
        """Keep only the last few actions, moved close to the start, if they suffice for the failure."""
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

        The fewest records are tried first, because a case with few records may fail although one with more does not.
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
    """Yield the salt of the current case, then other salts."""
    yield first
    yield from (salt for salt in range(SALTS) if salt != first)


def minimised(case: Case, *, budget: int = BUDGET, tell: Callable[[str], None] | None = None) -> Case:
    """Return the smallest case found that violates the same guarantee as ``case``.

    Return ``case`` itself if it violates no guarantee.
    """
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
