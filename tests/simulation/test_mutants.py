"""A simulator that finds nothing proves nothing: each broken variant must be caught within its number of seeds."""

from __future__ import annotations

import pytest

from sparklog.testing.sim_checks import Violation
from sparklog.testing.sim_mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    assert any(caught(mutant, seed) for seed in range(mutant.within)), f"not caught within {mutant.within} seeds"


def caught(mutant: Mutant, seed: int) -> bool:
    try:
        mutant.run(seed)
    except Violation:
        return True
    return False
