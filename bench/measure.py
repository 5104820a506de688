"""How a row of the table is measured: contestants take turns, and the medians of what they reached are compared.

A row opens its contestants once (topics filled, sessions warm) and each of them runs as often as the others, in turns,
so that what the machine does meanwhile meets all of them. A run checks what it read or wrote and raises when a record
is missing: a figure of a run that lost something does not exist.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from bench.machine import Others

if TYPE_CHECKING:
    from bench.sides import Bench, Side

#: Of other programs: more of it and a round is done again.
_QUIET_CORES = 0.3
#: What one run reached, by name: ``rate`` in records/s, ``p50`` in ms, ...
Figures = Mapping[str, float]
#: A contestant's name and a figure's.
Of = tuple[str, str]


class Lost(Exception):
    """What was read is not what was written."""


class Contestant(NamedTuple):
    """One way to do the work of a row."""

    name: str
    run: Callable[[], Figures]
    #: Whose work it is: the other one is paused meanwhile. None: nobody is.
    side: Side | None = None
    #: What a run is to find done; not before the one that does not count.
    before: Callable[[], None] | None = None


class Ratio(NamedTuple):
    """A line of the table: one figure of ours over the best of those it is compared with."""

    title: str
    unit: str
    ours: Of
    #: Empty: the figure stands for itself.
    against: tuple[Of, ...] = ()
    #: Of the ratio, or of the figure where there is none; None: only reported.
    goal: float | None = None
    #: The smaller figure is the better one, and the ratio is to be at most the goal.
    lower: bool = False


class Row(NamedTuple):
    """A piece of work, and what is said about it."""

    name: str
    ratios: tuple[Ratio, ...]
    open: Callable[[Bench], AbstractContextManager[Sequence[Contestant]]]
    #: A first run of each that is not counted: JVMs compile, files come into the page cache.
    warm_up: bool = True
    #: Runs of each, at most; what takes long is not run as often as the rest.
    at_most: int = 100
    #: The session has to know Delta, whose jars Spark fetches.
    needs_delta: bool = False


class Line(NamedTuple):
    """A line of the table as printed and stored. ``theirs`` is None where nobody was there to compare with."""

    row: str
    title: str
    unit: str
    ours: float
    theirs: float | None
    against: str
    goal: float | None
    lower: bool
    #: Of each contestant's figure, run by run.
    runs: dict[str, list[float]]
    #: Cores that programs besides the bench took during its most disturbed run.
    others: float = 0.0

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def met(self) -> bool | None:
        """None: no goal, or nothing to compare with."""
        reached = self.ratio if self.against else self.ours
        if self.goal is None or reached is None:
            return None
        return reached <= self.goal if self.lower else reached >= self.goal


class Round(NamedTuple):
    """One run of each contestant, one after the other."""

    figures: Mapping[str, Figures]
    #: Cores that other programs took meanwhile, in the run they disturbed most.
    others: float


def measure(row: Row, bench: Bench, runs: int) -> list[Line]:
    """So many rounds, and up to as many again when other programs were busy meanwhile: then the quietest count.

    Raises Lost, or whatever ends a run, when a contestant does not do its work.
    """
    wanted = 1 if bench.quick else min(runs, row.at_most)
    most = wanted if bench.quick else 2 * wanted
    rounds: list[Round] = []
    with row.open(bench) as contestants:
        try:
            if row.warm_up and not bench.quick:
                for contestant in contestants:
                    bench.give_machine_to(contestant.side)
                    bench.fill_memory()
                    contestant.run()
            while len(rounds) < most and sum(found.others <= _QUIET_CORES for found in rounds) < wanted:
                rounds.append(one_round(row, bench, contestants))
        finally:
            bench.give_machine_to(None)
    return list(lines(row, quietest(rounds, wanted)))


def quietest(rounds: Sequence[Round], count: int) -> list[Round]:
    return sorted(rounds, key=lambda found: found.others)[:count]


def one_round(row: Row, bench: Bench, contestants: Sequence[Contestant]) -> Round:
    figures, disturbed = {}, 0.0
    for contestant in contestants:
        os.sync()  # else the disk is still busy with what the one before wrote
        bench.give_machine_to(contestant.side)
        if contestant.before is not None and not bench.quick:
            contestant.before()
        bench.fill_memory()  # behind it: logs that were deleted meanwhile have freed some
        with Others() as others:
            figures[contestant.name] = contestant.run()
        disturbed = max(disturbed, others.cores)
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in figures[contestant.name].items())
        bench.say(f"  {row.name}: {contestant.name} {shown}; others {others.cores:.2f} cores")
    return Round(figures, disturbed)


def lines(row: Row, rounds: Sequence[Round]) -> Iterator[Line]:
    def runs_of(of: Of) -> list[float]:
        return [found.figures[of[0]][of[1]] for found in rounds if of[0] in found.figures]

    for ratio in row.ratios:
        ours = runs_of(ratio.ours)
        if not ours:
            continue
        others = {of: runs_of(of) for of in ratio.against}
        medians = {of: statistics.median(runs) for of, runs in others.items() if runs}
        best = (min if ratio.lower else max)(medians, key=lambda of: medians[of], default=None)
        yield Line(
            row.name,
            ratio.title,
            ratio.unit,
            statistics.median(ours),
            None if best is None else medians[best],
            " or ".join(of[0] for of in ratio.against) if best is None else best[0],
            ratio.goal,
            ratio.lower,
            {" ".join(of): runs for of, runs in {ratio.ours: ours, **others}.items() if runs},
            max(found.others for found in rounds),
        )
