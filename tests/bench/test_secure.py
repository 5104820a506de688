"""Tests of the table that says what TLS, SCRAM and ACLs cost."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography")

from bench.secure import Turn, Work, text

#: The ratios of the figures of these pairs are 0.5, 0.6 and 10.
PAIRS = [
    (Turn(5, 2.0, 1.0, 3.0), Turn(10, 1.0, 1.0, 1.0, others=0.25)),
    (Turn(60, 2.0, 1.0, 3.0), Turn(100, 1.0, 1.0, 1.0)),
    (Turn(10, 2.0, 1.0, 3.0), Turn(1, 1.0, 1.0, 1.0)),
]


def test_the_table_has_the_medians_of_the_ratios_of_the_pairs() -> None:
    line = text([Work("tables", "records/s", 0.5, PAIRS, higher=True)]).splitlines()[-1]
    assert line == "| tables | records/s | 10 | 10 | 0.60x | 2.00x | 1.00x | 3.00x | 2.00x | >= 0.5x | yes | 0.25 |"


@pytest.mark.parametrize(
    ("of", "goal", "met", "shown"),
    [
        ("figure", 0.59, False, "<= 0.59x"),
        ("figure", 0.6, True, "<= 0.6x"),
        ("alone", 9, False, "<= 9 ms"),
        ("alone", 10, True, "<= 10 ms"),
        ("processor_s", 1.9, False, "CPU <= 1.9x"),
        ("processor_s", 2, True, "CPU <= 2x"),
    ],
)
def test_a_goal_is_an_upper_bound_of_what_it_names(of: str, goal: float, met: bool, shown: str) -> None:
    work = Work("work", "ms", goal, PAIRS, of=of)
    assert work.met is met
    assert f"| {shown} | {'yes' if met else 'no'} |" in text([work])
