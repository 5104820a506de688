"""Tests of the stages of ``tests/run``: the tests of each, the files that it does not import, and the end of a run."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

from tests import stages
from tests.conftest import may_have
from tests.stages import Run, Stage

pytest_plugins = ["pytester"]

MARKS = ("integration", "alone", "extended", "long")
BOTH = "pytestmark = pytest.mark.integration\n\n\n@pytest.mark.alone\ndef test_of_time() -> None: ..."
PASSES = [sys.executable, "-c", "print('fine')"]
FAILS = [sys.executable, "-c", "raise SystemExit('wrong')"]


def selecting(tier: str, marks: dict[str, bool]) -> list[str]:
    """Return the names of a tier's stages that run a test of these marks."""
    return [stage.name for stage in stages.stages(tier) if eval(stage.marks, {}, marks)]


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=len(MARKS))), ids=str)
def test_each_test_belongs_to_one_tier_and_one_stage(values: tuple[bool, ...]) -> None:
    marks = dict(zip(MARKS, values, strict=True))
    both_tiers, third = selecting("--all", marks), selecting("--long", marks)
    assert len(both_tiers) + len(third) == 1
    assert selecting("", marks) == ([] if marks["extended"] else both_tiers)
    assert bool(third) == marks["long"]


def test_every_mark_of_a_stage_is_known(pytestconfig: pytest.Config) -> None:
    known = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert set(MARKS) <= known
    named = {word for tier in ("", "--all", "--long") for stage in stages.stages(tier) for word in stage.marks.split()}
    assert named <= {*MARKS, "and", "not"}


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    path = tmp_path / "attempts"
    path.touch()
    return path


def test_a_step_ends_at_its_first_failure(attempts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(attempts)
    assert run.step("good", PASSES)
    assert not run.step("bad", FAILS, PASSES)
    run.report(passed=False)
    said = capfd.readouterr().out
    assert said.count("fine") == 2, "one command must run, with its output"
    assert re.search(r"== good \d+ s, bad \d+ s FAILED\n== FAILED in \d+ s", said), said


def test_a_failure_beside_the_first_stage_ends_the_run(
    attempts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The types are wrong: the first stage ends, and no other begins."""
    ran: list[str] = []

    class Checks(Run):
        def step(self, name: str, *commands: object) -> bool:
            return name == "lint"

        def tests(self, stage: Stage) -> bool:
            ran.append(stage.name)
            return True

    (tmp_path / "mypy").write_text("#!/bin/sh\necho wrong types\nexit 1\n")
    (tmp_path / "mypy").chmod(0o755)
    assert not stages.run_tier("", Checks(attempts), tmp_path)
    assert ran == ["fast"]
    assert "wrong types" in capfd.readouterr().out


def test_a_second_attempt_is_reported_loudly_at_the_end(attempts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(attempts)
    run.report(passed=True)
    assert "RAN OUT OF TIME" not in capfd.readouterr().out
    attempts.write_text("tests/test_a.py::test_slow\n")
    run.report(passed=True)
    assert "RAN OUT OF TIME" in (said := capfd.readouterr().out)
    assert "\ntests/test_a.py::test_slow\n" in said


@pytest.mark.parametrize(
    ("expression", "text", "may"),
    [
        ("integration and not alone", "def test_fast() -> None: ...", False),
        ("integration and not alone", BOTH, True),
        ("alone", "pytestmark = pytest.mark.integration", False),
        ("alone", BOTH, True),
        ("alone and not extended and not long", BOTH, True),
        ("long", BOTH, False),
        ("long", "@pytest.mark.long\ndef test_hours() -> None: ...", True),
        ("not integration and not alone", "def test_fast() -> None: ...", True),
        ("not integration and not alone", BOTH, True),
        ("", "def test_fast() -> None: ...", True),
        ("alone or integration", "pytestmark = pytest.mark.integration", True),
        ("slow or fast and integration", "pytestmark = pytest.mark.slow", True),
        ("not (fast and integration and alone)", "def test_fast() -> None: ...", True),
    ],
)
def test_a_file_is_skipped_only_without_the_requested_mark(expression: str, text: str, may: bool) -> None:
    assert may_have(expression, text) is may


def test_a_mark_missing_in_its_tests_file_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect")
    pytester.makepyfile(marks="import pytest\nreal = getattr(pytest.mark, 'integration')")
    pytester.makepyfile(test_hidden="from marks import real\n@real\ndef test_it(): pass")
    pytester.makeini("[pytest]\nmarkers = integration: real\npythonpath = .")
    ran = pytester.runpytest_inprocess("-q", "-p", "no:hypothesispytest")
    ran.stdout.fnmatch_lines(["*test_hidden.py::test_it: its marks must stand in its own file*"])
