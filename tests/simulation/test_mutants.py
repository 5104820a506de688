"""A simulator that finds nothing proves nothing: each broken variant must be caught within its number of seeds.

The table says which seed shows it now. A change of the simulator, or of the code it plays, may move it: then another
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
    """One search for each mutant, over two processes; the long ones begin first."""
    with ProcessPoolExecutor(JOBS) as pool:
        names = sorted(BY_NAME, key=lambda name: -BY_NAME[name].caught.within)
        yield {name: pool.submit(_search, name) for name in names if not BY_NAME[name].sound}
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_catches(mutant: Mutant, searches: dict[str, Future[str]]) -> None:
    rule = searches[mutant.name].result()
    assert rule, f"not caught within {mutant.caught.within} seeds"


def test_the_table_is_whole() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    for mutant in MUTANTS:
        assert mutant.caught.seed < mutant.caught.within, mutant.name


def _search(name: str) -> str:
    """The stated seed, and where that misses, all others: which rule was found broken, empty for none. A mutant breaks
    more than one, and which of them shows first is chance."""
    mutant = BY_NAME[name]
    for seed in (mutant.caught.seed, *range(mutant.caught.within)):
        found = Case(seed, mutant=name, partitions=mutant.partitions).play()
        if found is not None:
            return found.rule
    return ""
