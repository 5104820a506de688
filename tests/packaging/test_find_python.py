"""Tests of the Python that ``spark-submit.sh`` chooses for its environment.

No environment is created here: the last line of the script's output names the chosen Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.test_spark_submit import TOOLS, environment

pytestmark = pytest.mark.integration

PYTHON = """#!/bin/sh
case $1$2 in
    -mvenv) exit 1 ;;
    -c*ensurepip*) exit {without_venv} ;;
    -c*optimizations*) exit {plain} ;;
esac
exec "{python}" "$@"
"""


class Machine:
    """A PATH of several Pythons, and a folder with the script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path: list[Path] = []
        (directory / "root" / "sparklog").mkdir(parents=True)
        for name in ("spark-submit.sh", "setup.cfg", "pyproject.toml"):
            shutil.copy2(ROOT / name, directory / "root")
        (directory / "tools").mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (directory / "tools" / tool).symlink_to(found)

    def add(self, name: str, *, version: str = "3.12", plain: bool = False, without_venv: bool = False) -> str:
        """Add a Python after the existing ones, and return its path. ``plain``: built without optimizations."""
        place = self.directory / name
        place.mkdir()
        program = place / f"python{version}"
        program.write_text(PYTHON.format(python=sys.executable, plain=int(plain), without_venv=int(without_venv)))
        program.chmod(0o755)
        self.path.append(place)
        return str(program)

    def set_up(self, **changes: str) -> str:
        """Run the script and return its output."""
        path = ":".join(map(str, [*self.path, self.directory / "tools"]))
        done = subprocess.run(
            [str(self.directory / "root" / "spark-submit.sh"), "--setup"],
            env=environment(PATH=path, **changes),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        return done.stderr


def chosen(words: str) -> str:
    return words.splitlines()[-1].removeprefix("sparklog: ").partition(" cannot create virtual environments")[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_optimized_python_comes_first_in_any_position(machine: Machine) -> None:
    plain, optimised = machine.add("plain", version="3.13", plain=True), machine.add("optimised", version="3.11")
    words = machine.set_up()
    assert chosen(words) == optimised
    assert (
        f"sparklog: using {optimised}, because {plain} is built without optimisations (set PYTHON to choose another)\n"
        in words
    )


def test_the_newest_of_equal_pythons_is_chosen_silently(machine: Machine) -> None:
    machine.add("old", version="3.10")
    new = machine.add("new", version="3.12")
    machine.add("plain", version="3.11", plain=True)
    words = machine.set_up()
    assert chosen(words) == new
    assert "optimisations" not in words


def test_a_named_python_is_chosen(machine: Machine) -> None:
    plain, _ = machine.add("plain", plain=True), machine.add("optimised")
    assert chosen(machine.set_up(PYTHON=plain)) == plain


def test_an_unoptimized_python_is_reported(machine: Machine) -> None:
    plain = machine.add("plain", plain=True)
    words = machine.set_up()
    assert chosen(words) == plain
    assert f"sparklog: {plain} is built without optimisations: " in words


def test_a_python_without_venv_comes_last(machine: Machine) -> None:
    bare = machine.add("bare", without_venv=True)
    machine.add("plain", plain=True)
    assert chosen(machine.set_up()) == str(machine.path[-1] / "python3.12")
    shutil.rmtree(machine.path.pop())
    words = machine.set_up()
    assert chosen(words) == bare
    assert "install its venv module" in words


def test_a_missing_python_is_one_line(machine: Machine) -> None:
    assert machine.set_up() == "sparklog: no Python 3.10 to 3.13 found: install one, or set PYTHON to its path\n"
