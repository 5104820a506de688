"""Pauses of simulated processes: what they must not do to others, or to the order of things."""

from __future__ import annotations

import pytest

from sparklog.testing.sim_case import Case
from sparklog.testing.sim_faults import Faults
from sparklog.testing.sim_network import FINE, SimNetwork
from sparklog.testing.sim_process import SimProcess

#: a leader that is paused when the faults stop wakes later, refuses a write that has no place in its log, and
#: only then hears that others have gone on without it
SLEEPER = Case(
    16463,
    partitions=1,
    fault_ms=1897,
    only=((8, 1344), (10, 1523), (12, 1724), (13, 1760)),
    salt=106,
)


def test_a_pause_within_a_pause_does_not_shorten_it() -> None:
    """Else what comes after its end would be done before what has waited since the first."""
    world = SimNetwork(0, weather=FINE)
    process = SimProcess("p", world)
    process.begin()
    done: list[str] = []
    process.pause(700)
    process.run(process.process, lambda: done.append("first"))
    process.pause(100)
    world.at(200, lambda: process.run(process.process, lambda: done.append("second")))
    world.run_until(699)
    assert done == []
    world.run_until(700)
    assert done == ["first", "second"]


def test_a_paused_leader_may_refuse_writes_until_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SLEEPER.play() is None
    end = Faults.end
    monkeypatch.setattr(Faults, "end", lambda faults: min(end(faults), faults.world.now_ms))
    found = SLEEPER.play()
    assert found is not None, "it gave a write up after the faults had stopped"
    assert found.rule == "every write ends"
