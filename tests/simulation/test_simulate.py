"""The simulator's command: what it prints, its exit codes, and that a failing seed plays again exactly."""

from __future__ import annotations

import shlex

import pytest

from sparklog.testing.simulate import main


def test_seeds_that_hold_exit_0_and_say_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..3", "--partitions", "2", "--steps", "2000"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 schedules of 3 brokers and 2 partitions in ")
    assert "schedules/s" in printed
    assert "ms for each simulated second" in printed


def test_a_failing_seed_prints_its_trace_and_plays_again_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..100", "--mutant", "truncate to the high watermark"]) == 0, "a mutant is to be caught"
    first = capsys.readouterr().out.splitlines()
    command = shlex.split(first[-1].removeprefix("again: "))
    assert command[:3] == ["python", "-m", "sparklog.testing.simulate"]
    assert main(command[3:]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == first[1:]
    assert len(first) > 10, "there is a trace to read"


def test_a_mutant_that_is_not_caught_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0", "--mutant", "no epoch fence"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("text", ["few", "5..5", "9..3", "1..x"])
def test_a_range_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", text])
    assert f"'{text}': expected A..B with A < B, or one seed" in capsys.readouterr().err
