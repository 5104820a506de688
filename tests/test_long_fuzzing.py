"""Tests of properties with thousands of random inputs each: their usual runs have about a hundred.

Hypothesis decodes each input from random bytes. The test prints an input that breaks a property, and
``test_name.hypothesis.fuzz_one_input(bytes.fromhex(...))`` replays it.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * 3600)]

ROUNDS = 10_000
#: Lengths of inputs in bytes: small examples, and those with long lists.
LENGTHS = (64, 512, 4096)


#: Modules whose properties need fixtures.
_EXCEPT = {"tests.cli.test_round_trips"}


def _modules() -> list[str]:
    """Return the names of all test modules with properties."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    stating = [path.relative_to(ROOT).with_suffix("") for path in files if "\n@given(" in path.read_text()]
    return [name for path in stating if (name := ".".join(path.parts)) not in _EXCEPT]


def _properties(module: str) -> Iterator[Callable[..., Any]]:
    """Yield the properties of a module that need no fixtures or parameters."""
    for function in vars(importlib.import_module(module)).values():
        if hasattr(function, "hypothesis") and not inspect.signature(function).parameters:
            yield function


@pytest.mark.parametrize("module", _modules())
def test_properties_hold_on_thousands_of_inputs(module: str) -> None:
    dice = random.Random()
    properties = list(_properties(module))
    assert properties
    for test in properties:
        accepted = 0
        for _ in range(ROUNDS):
            given = dice.randbytes(dice.choice(LENGTHS))
            try:
                accepted += test.hypothesis.fuzz_one_input(given) is not None  # type: ignore[attr-defined]
            except BaseException as error:
                raise AssertionError(f"{module}: {test.__name__} fails on {given.hex()}") from error
        assert accepted > ROUNDS / 10, f"{module}: {test.__name__} took {accepted} of {ROUNDS} inputs"


def test_a_log_equals_its_model_in_thousands_of_histories() -> None:
    from tests.storage.test_log_model import LogMachine

    often = settings(max_examples=2000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(LogMachine, settings=often)
