"""Tests of the failures that get a second attempt, in nested runs of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.out_of_time import SECOND_ATTEMPTS

pytest_plugins = ["pytester"]

WAITS = """
import pathlib
from sparklog.errors import ClusterError
def test_that_waits():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise ClusterError("waited 60 s in vain for a leader")
"""
LOSES = "def test_that_loses():\n    assert [1] == [1, 2]\n"


def run(pytester: pytest.Pytester, *arguments: str) -> int:
    return int(
        pytester.runpytest_inprocess("-q", "-p", "no:hypothesispytest", "-p", "tests.out_of_time", *arguments).ret
    )


@pytest.fixture(autouse=True)
def in_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.delenv(SECOND_ATTEMPTS, raising=False)  # the report of the outer run


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_timeout_is_retried(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makepyfile(test_a=WAITS, test_b="def test_fine(): pass")
    assert run(pytester, "-n", workers) == 1
    assert run(pytester, "--again") == 0


def test_a_second_attempt_is_reported_by_name(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = tmp_path / "attempts"
    monkeypatch.setenv(SECOND_ATTEMPTS, str(attempts))
    pytester.makepyfile(test_a=WAITS, test_b="def test_fine(): pass")
    assert run(pytester) == 1
    assert not attempts.exists()
    assert run(pytester, "--again") == 0
    assert attempts.read_text() == "test_a.py::test_that_waits\n"


def test_a_test_that_fails_again_has_failed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a():\n    raise TimeoutError('slow')\n")
    assert run(pytester) == 1
    assert run(pytester, "--again") == 1


def test_a_wrong_result_is_not_retried(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a=WAITS, test_b=LOSES)
    assert run(pytester) == 1
    assert run(pytester, "--again") == 1


def test_many_timeouts_have_another_cause(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(**{f"test_{name}": WAITS.replace("seen", f"seen_{name}") for name in "abcd"})
    assert run(pytester) == 1
    assert run(pytester, "--again") == 1
