"""Tests of the simulator's command: its output, its exit codes, and the replay of a failing seed."""

from __future__ import annotations

import shlex

import pytest

from sparklog.testing.simulate import main


def test_passing_seeds_exit_with_0_and_print_their_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..3", "--partitions", "2", "--steps", "2000"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 schedules of 3 brokers and 2 partitions in ")
    assert "schedules/s" in printed
    assert "ms for each simulated second" in printed


def test_a_failing_seed_prints_a_small_reproducible_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds", "0..100", "--mutant", "truncate to the high watermark", "--budget", "60"]
    assert main(arguments) == 0, "the mutant must be caught"
    first = capsys.readouterr().out.splitlines()
    assert first[2].startswith("minimised in ")
    command = shlex.split(first[-1].removeprefix("again: "))
    assert command[:3] == ["python", "-m", "sparklog.testing.simulate"]
    assert main(command[3:]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[2:] == first[3:], "the output must have the trace, the finding and the command"
    assert again[1].endswith(again[-2].strip().split(" ", 1)[1]), "the trace must end with the finding"
    assert len(again) > 10, "the output must have a trace"


def test_two_processes_find_what_one_finds(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds", "0..12", "--mutant", "ISR used before it is written", "--all", "--no-minimise"]
    printed = []
    for jobs in ("1", "2"):
        assert main([*arguments, "--jobs", jobs]) == 0
        printed.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")])
    assert printed[0] == printed[1]
    assert len(printed[0]) > 5


def test_a_mutant_that_is_not_caught_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0", "--mutant", "no epoch fence on fetches"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("text", ["few", "5..5", "9..3", "1..x"])
def test_an_invalid_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", text])
    assert f"'{text}': expected A..B with A < B, or one seed" in capsys.readouterr().err
