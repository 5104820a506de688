"""Tests that a failing seed becomes a small case that breaks the same promise, is reproducible, and can be read."""

from __future__ import annotations

import shlex

import pytest

from sparklog.testing.sim_case import Case, Found, format_actions, parse_actions
from sparklog.testing.sim_minimise import Minimiser
from sparklog.testing.simulate import main

MUTANT = "truncate to the high watermark"
#: the minimum factor by which the list of actions and the trace become shorter
SHORTER = 4
#: the number of lines above which a trace is worth reducing
LONG = 450


@pytest.mark.extended
def test_a_mutants_failure_is_minimized_and_fails_in_the_same_way() -> None:
    case, found = _long_way_to_failure()
    minimiser = Minimiser(case, found, budget=400)
    smallest = minimiser.run()
    before, after = case.play_traced(), smallest.play_traced()
    assert before.found is not None and after.found is not None
    assert after.found.rule == before.found.rule
    assert len(after.lines) * SHORTER <= len(before.lines), f"{len(before.lines)} -> {len(after.lines)} lines"
    assert len(smallest.schedule()) * SHORTER <= len(case.schedule())
    assert smallest.partitions < case.partitions
    assert smallest.play_traced() == after, "the replay must be equal"
    assert smallest.play() == after.found, "tracing must not change the run"
    assert any("truncates to" in line for line in after.lines), "the trace must name the violation"
    other = {"t-0", "t-1"} - {after.found.partition}
    assert not any(name in line for name in other for line in after.lines), (
        "the trace must be that of the violated partition"
    )


def test_omitted_actions_leave_the_others_unchanged() -> None:
    case = Case(3, partitions=1)
    schedule = case.schedule()
    kept = tuple((action.number, action.at_ms) for action in schedule[::3])
    assert Case(3, partitions=1, only=kept).schedule() == schedule[::3]
    assert Case(3, partitions=1, fault_ms=3000).schedule() == tuple(a for a in schedule if a.at_ms < 3000)


def test_the_printed_command_replays_the_small_case() -> None:
    small = Case(9, mutant=MUTANT, partitions=2, only=parse_actions("4@150,9@197"), fault_ms=300, heal_ms=0, salt=2)
    words = shlex.split(small.command())
    assert words[:3] == ["python", "-m", "sparklog.testing.simulate"]
    assert "--only 4@150,9@197" in small.command()
    assert main(words[3:]) == (0 if small.play() is not None else 1)


def test_lists_of_actions_are_parsed_as_they_are_formatted() -> None:
    for only in ((), ((7, 300),), ((7, 300), (12, 410))):
        assert parse_actions(format_actions(only)) == only


def _long_way_to_failure() -> tuple[Case, Found]:
    for seed in range(100):
        case = Case(seed, mutant=MUTANT, partitions=2, produce_ms=25)
        found = case.play()
        if found is not None and len(case.play_traced().lines) > LONG:
            return case, found
    raise AssertionError("every seed must fail soon")
