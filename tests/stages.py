"""The stages of ``tests/run``: ``python -m tests.stages [--all | --long]``.

Every test belongs to one tier and one stage, by its marks. ``tests/run`` runs the first tier, ``--all`` the first and
the second (``extended``) in the same stages, ``--long`` the third (``long``) alone. A stage that fails ends the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.out_of_time import SECOND_ATTEMPTS

#: What a tier adds to the marks of its stages.
_REST = {"": " and not extended and not long", "--all": " and not long"}


class Stage(NamedTuple):
    """Tests that run together."""

    name: str
    #: the expression for pytest's ``-m``
    marks: str
    #: processes that share the tests; 0: pytest itself runs them, one after the other
    processes: int


def stages(tier: str) -> list[Stage]:
    """Return the stages of a tier in their order, the fastest first.

    Tests of real processes wait half of the time, for sessions, elections and each other. Four of them keep two
    processors busy, except those that assert a duration.
    """
    if tier == "--long":
        return [Stage("long", "long", 0)]
    rest = _REST[tier]
    return [
        Stage("fast", f"not integration and not alone{rest}", 3),
        Stage("integration", f"integration and not alone{rest}", 4),
        Stage("alone", f"alone{rest}", 0),
    ]


class Run:
    """One run of ``tests/run``: its commands, their durations, and its report at the end. Owner: ``main``."""

    def __init__(self, attempts: Path) -> None:
        #: pytest writes each test here that it tries a second time
        self._attempts = attempts
        self._took: list[str] = []
        self._began = time.monotonic()

    def step(self, name: str, *commands: Sequence[str]) -> bool:
        """Run commands one after the other until one fails, print how long they took, and return whether all passed."""
        began = time.monotonic()
        passed = all(self._passes(command) for command in commands)
        self._note(name, began, passed)
        return passed

    def beside(self, name: str, command: Sequence[str]) -> Callable[[], bool]:
        """Start a command. Calling the result waits for its end, prints its output, and returns whether it passed."""
        began = time.monotonic()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def passed() -> bool:
            said, _ = running.communicate()
            _say(f"\n== {' '.join(command)}\n{said.rstrip()}")
            self._note(name, began, running.returncode == 0)
            return running.returncode == 0

        return passed

    def tests(self, stage: Stage) -> bool:
        """Run a stage's tests, and again those that only timed out."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", stage.marks, "--durations=10", "--durations-min=5"]
        if not stage.processes:
            return self.step(stage.name, command)
        command += ["-p", "tests.out_of_time"]
        first = [*command, "-n", str(stage.processes), "--no-loadscope-reorder"]
        if self.step(stage.name, first):
            return True
        passed = self.step(f"{stage.name}, second attempt", [*command, "--again"])
        self._say_attempts()
        return passed

    def report(self, *, passed: bool) -> None:
        """Print the durations, the result, and the tests that needed a second attempt."""
        _say(f"\n== {', '.join(self._took)}")
        self._say_attempts()
        _say(f"== {'passed' if passed else 'FAILED'} in {time.monotonic() - self._began:.0f} s, without the set-up")

    def _say_attempts(self) -> None:
        tried = self._attempts.read_text()
        if tried:
            line = "!" * 100
            _say(f"\n{line}\nRAN OUT OF TIME, and repeated alone. A test that does so twice has a bug:\n{tried}{line}")

    def _passes(self, command: Sequence[str]) -> bool:
        _say(f"\n== {' '.join(command)}")
        return subprocess.Popen(command).wait() == 0

    def _note(self, name: str, began: float, passed: bool) -> None:
        self._took.append(f"{name} {time.monotonic() - began:.0f} s{'' if passed else ' FAILED'}")
        _say(f"== {self._took[-1]}")


def run_tier(tier: str, run: Run, tools: Path) -> bool:
    """Run lint, types and the tests of a tier, with ruff and mypy from ``tools``, and return whether all passed.

    mypy runs beside the first stage.
    """
    first, *others = stages(tier)
    if tier == "--long":
        return run.tests(first)
    ruff = str(tools / "ruff")
    if not run.step("lint", [ruff, "check"], [ruff, "format", "--check"]):
        return False
    typed = run.beside("types", [str(tools / "mypy")])
    passed = run.tests(first)
    return typed() and passed and all(run.tests(stage) for stage in others)


def main(tier: str = "") -> int:
    # Ctrl-C reaches pytest as well: it ends all that it has started, and its exit code ends the run.
    signal.signal(signal.SIGINT, lambda *_: None)
    with tempfile.TemporaryDirectory() as directory:
        attempts = Path(directory, "attempts")
        attempts.touch()
        os.environ[SECOND_ATTEMPTS] = str(attempts)
        run = Run(attempts)
        passed = run_tier(tier, run, Path(sys.executable).parent)
        run.report(passed=passed)
    return 0 if passed else 1


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
