"""The measurement of a row of the table: contestants take turns, and the medians of their results are compared.

A row opens its contestants once (with filled topics and warm sessions). All of them run equally often, in turns, so
that other load on the machine affects all. A run checks the records that it read or wrote, and raises when one is
missing: a run with a loss has no figure.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from bench.machine import Others, compiled

if TYPE_CHECKING:
    from bench.sides import Bench, Side

#: Load of other programs above which a round is repeated.
_QUIET_CORES = 0.3
#: The figures of one run by name: ``rate`` in records/s, ``p50`` in ms, ...
Figures = Mapping[str, float]
#: The name of a contestant and of a figure.
Of = tuple[str, str]


class Lost(Exception):
    """The error that the records that were read differ from the written records."""


class Contestant(NamedTuple):
    """One way to do the work of a row."""

    name: str
    run: Callable[[], Figures]
    #: The side that works; the other side is paused. None: no side is paused.
    side: Side | None = None
    #: The preparation of a counted run.
    before: Callable[[], None] | None = None


class Ratio(NamedTuple):
    """A line of the table: one figure of sparklog divided by the best of the figures with which it is compared."""

    title: str
    unit: str
    ours: Of
    #: The figures with which ``ours`` is compared. Empty: the figure has no comparison.
    against: tuple[Of, ...] = ()
    #: The goal of the ratio, or of a figure without a ratio. None: the figure is only reported.
    goal: float | None = None
    #: Whether a smaller figure is better. The goal is then an upper bound of the ratio.
    lower: bool = False
    #: The goal of the compiled modules; None if it equals ``goal``.
    compiled_goal: float | None = None


class Row(NamedTuple):
    """A piece of work and its lines in the table."""

    name: str
    ratios: tuple[Ratio, ...]
    open: Callable[[Bench], AbstractContextManager[Sequence[Contestant]]]
    #: Whether each contestant has a first run that does not count: JVMs compile, and files enter the page cache.
    warm_up: bool = True
    #: The largest number of runs of each contestant: long runs are repeated less often than others.
    at_most: int = 100
    #: Whether the session needs Delta, whose jars Spark fetches.
    needs_delta: bool = False


class Line(NamedTuple):
    """A line of the table as printed and stored. ``theirs`` is None without another system."""

    row: str
    title: str
    unit: str
    ours: float
    theirs: float | None
    against: str
    goal: float | None
    lower: bool
    #: The figure of each contestant, run by run.
    runs: dict[str, list[float]]
    #: Cores that unrelated programs used during the most disturbed run.
    others: float = 0.0

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met; None without a goal or without a figure to compare."""
        reached = self.ratio if self.against else self.ours
        if self.goal is None or reached is None:
            return None
        return reached <= self.goal if self.lower else reached >= self.goal


class Round(NamedTuple):
    """One run of each contestant, in sequence."""

    figures: Mapping[str, Figures]
    #: Cores that unrelated programs used in the most disturbed run.
    others: float


def measure(row: Row, bench: Bench, runs: int) -> list[Line]:
    """Measure ``runs`` rounds. If other programs were busy, measure up to twice as many, and use the quietest rounds.

    Raises Lost, or the error of a run, when a contestant fails.
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
        os.sync()  # without the sync, the disk is still busy with the writes of the last run
        bench.give_machine_to(contestant.side)
        if contestant.before is not None and not bench.quick:
            contestant.before()
        bench.fill_memory()  # after the sync: deleted logs have freed some memory
        with Others() as others:
            figures[contestant.name] = contestant.run()
        disturbed = max(disturbed, others.cores)
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in figures[contestant.name].items())
        bench.say(f"  {row.name}: {contestant.name} {shown}; others {others.cores:.2f} cores")
    return Round(figures, disturbed)


def lines(row: Row, rounds: Sequence[Round]) -> Iterator[Line]:
    def runs_of(of: Of) -> list[float]:
        return [found.figures[of[0]][of[1]] for found in rounds if of[0] in found.figures]

    is_compiled = compiled()
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
            ratio.compiled_goal if is_compiled and ratio.compiled_goal is not None else ratio.goal,
            ratio.lower,
            {" ".join(of): runs for of, runs in {ratio.ours: ours, **others}.items() if runs},
            max(found.others for found in rounds),
        )
