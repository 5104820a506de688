"""Tests of the simulator itself: it must catch each broken variant within a number of seeds.

The table names the seed that shows it now. A change of the simulator or of the simulated code may move it: then another
seed within the bound has to show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from sparklog.testing.sim_case import Case
from sparklog.testing.sim_mutants import BY_NAME, MUTANTS, Mutant

JOBS = 2


@pytest.fixture(scope="module")
def searches() -> Iterator[dict[str, Future[str]]]:
    """Search all mutants with two processes. The long searches begin first."""
    with ProcessPoolExecutor(JOBS) as pool:
        names = sorted(BY_NAME, key=lambda name: -BY_NAME[name].caught.within)
        yield {name: pool.submit(_search, name) for name in names if not BY_NAME[name].sound}
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_catches(mutant: Mutant, searches: dict[str, Future[str]]) -> None:
    rule = searches[mutant.name].result()
    assert rule, f"not caught within {mutant.caught.within} seeds"


def test_the_table_is_complete() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    for mutant in MUTANTS:
        assert mutant.caught.seed < mutant.caught.within, mutant.name


def _search(name: str) -> str:
    """Return the first broken rule for the stated seed, or for another one, or an empty string.

    A mutant breaks several rules, and chance decides which one is found first.
    """
    mutant = BY_NAME[name]
    for seed in (mutant.caught.seed, *range(mutant.caught.within)):
        found = Case(seed, mutant=name, partitions=mutant.partitions).play()
        if found is not None:
            return found.rule
    return ""
