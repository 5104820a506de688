"""A simulator that finds nothing proves nothing: each broken variant must be caught within its number of seeds.

Which seed catches which is fixed, so a variant that is no longer caught was either mended or hidden by a change of the
simulator, and both want a look.
"""

from __future__ import annotations

import pytest

from sparklog.testing.sim_case import Case
from sparklog.testing.sim_mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    for seed in range(mutant.within):
        if Case(seed, mutant=mutant.name, partitions=mutant.partitions).play() is not None:
            return
    pytest.fail(f"not caught within {mutant.within} seeds")
