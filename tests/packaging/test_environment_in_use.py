"""Tests of ``spark-submit.sh`` while processes run from its environment: a cluster keeps the files that it started
with.

A stand-in for pip records what it should install, so nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.test_spark_submit import PARTS, environment
from tests.spark_classes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(300)]

PIP = """
import pathlib, sys
if sys.argv[1] == "list":
    print("pyspark==4.2.0")
else:
    with (pathlib.Path(sys.prefix) / "asked").open("a") as file:
        print(*[word for word in sys.argv[2:] if not word.startswith("--")], sep="|", file=file)
"""
JOB = "import sys\nprint('ran', sys.argv[1:])\n"


class Clone:
    """Create a clone of the project with a complete environment."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        for part in PARTS:
            (directory / part).symlink_to(ROOT / part)
        for part in ("sparklog", "setup.cfg", "spark-submit.sh"):
            (directory / part).unlink()
        (directory / "sparklog").mkdir()
        for module in (ROOT / "sparklog").iterdir():
            if module.name != "__pycache__":
                (directory / "sparklog" / module.name).symlink_to(module)
        for part in ("setup.cfg", "spark-submit.sh"):
            (directory / part).write_bytes((ROOT / part).read_bytes())
        (directory / "spark-submit.sh").chmod(0o755)
        (directory / "job.py").write_text(JOB)
        self.venv = directory / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        (packages,) = self.venv.glob("lib/python3*/site-packages")
        (packages / "lent.pth").write_text(f"{directory}\n{sysconfig.get_path('purelib')}\n")
        (packages / "pip").mkdir()
        (packages / "pip" / "__init__.py").touch()
        (packages / "pip" / "__main__.py").write_text(PIP)

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "spark-submit.sh"), *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def asked(self) -> list[list[str]]:
        """Return what pip should have installed since the last call."""
        file = self.venv / "asked"
        found = [line.split("|") for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        return found


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    made = Clone(tmp_path)
    done = made.submit("--setup")
    assert done.returncode == 0, done.stderr
    assert made.asked()[-1] == [f"{tmp_path}[spark,uvloop,demo,certs]"]
    return made


@pytest.fixture
def running(clone: Clone) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of a cluster that runs from the environment."""
    with subprocess.Popen(
        [str(clone.venv / "bin" / "python"), "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_delta_adds_packages_and_leaves_the_environment_alone(clone: Clone, running: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        done = clone.submit("--delta", str(clone.root / "job.py"), "x")
        assert done.stdout == "ran ['x']\n", done.stderr
    constraints = str(clone.venv / ".sparklog-constraints")
    assert clone.asked() == [[constraints, "delta-spark == 4.4.0", "deltalake >= 1.6"]]
    assert Path(constraints).read_text() == "pyspark==4.2.0\n"


def test_changed_sources_wait_until_no_process_uses_the_environment(
    clone: Clone, running: subprocess.Popen[bytes]
) -> None:
    (clone.root / "sparklog" / "extra.py").write_text("VALUE = 1\n")
    for job in (["--delta", str(clone.root / "job.py")], [str(clone.root / "job.py")]):
        done = clone.submit(*job)
        assert done.stdout == "ran []\n"
        expected = f"sparklog: keeping the sources installed before, because process {running.pid} uses {clone.venv}\n"
        assert done.stderr.endswith(expected)
    assert str(clone.root) not in [word for words in clone.asked() for word in words]
    running.kill()
    running.wait()
    done = clone.submit(str(clone.root / "job.py"))
    assert done.stderr == "sparklog: installing the changed sources\n"
    assert clone.asked() == [[str(clone.root)]]


def test_changed_requirements_are_refused_while_the_environment_is_used(
    clone: Clone, running: subprocess.Popen[bytes]
) -> None:
    with (clone.root / "setup.cfg").open("a") as file:
        file.write("# a change\n")
    for job in (["--delta", str(clone.root / "job.py")], [str(clone.root / "job.py")]):
        done = clone.submit(*job)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"sparklog: {clone.venv} must be installed again, but process {running.pid} uses it:"
            " stop the process first\n"
        )
    assert clone.asked() == []
    running.kill()
    running.wait()
    assert clone.submit(str(clone.root / "job.py")).returncode == 0
    assert clone.asked()[-1] == [f"{clone.root}[spark,uvloop,demo,certs]"]
