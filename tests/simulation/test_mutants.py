"""A simulator that finds nothing proves nothing: each broken variant must be caught within its number of seeds.

The table says which seed shows it now. A change of the simulator may move it: then another seed within the bound has
to, and the table wants a new number.
"""

from __future__ import annotations

import pytest

from sparklog.testing.sim_case import Case, Found
from sparklog.testing.sim_mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    found = _play(mutant, mutant.caught.seed)
    if found is not None:
        assert found.rule == mutant.caught.rule
        return
    within = mutant.caught.within
    assert any(_play(mutant, seed) for seed in range(within)), f"not caught within {within} seeds"


def test_the_table_is_whole_and_its_bounds_are_generous() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    for mutant in MUTANTS:
        assert mutant.caught.seed < mutant.caught.within, mutant.name


def _play(mutant: Mutant, seed: int) -> Found | None:
    return Case(seed, mutant=mutant.name, partitions=mutant.partitions).play()
