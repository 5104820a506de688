"""Tests of pauses of simulated processes: they must not affect other processes or the order of events."""

from __future__ import annotations

import pytest

from sparklog.testing.sim_case import Case
from sparklog.testing.sim_faults import SimFaults
from sparklog.testing.sim_network import FINE, SimNetwork
from sparklog.testing.sim_process import SimProcess

#: A leader that is paused when the faults stop wakes later and refuses a write that does not follow its log. Only then
#: does it learn that others have continued without it.
SLEEPER = Case(
    16463,
    partitions=1,
    fault_ms=1897,
    only=((8, 1344), (10, 1523), (12, 1724), (13, 1760)),
    salt=106,
)


def test_a_pause_within_a_pause_does_not_shorten_it() -> None:
    """If the second pause shortened the first, later events would happen before events that wait since the first
    pause."""
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
    end = SimFaults.end
    monkeypatch.setattr(SimFaults, "end", lambda faults: min(end(faults), faults.world.now_ms))
    found = SLEEPER.play()
    assert found is not None, "the producer gave up a write after the end of the faults"
    assert found.rule == "every write ends"
