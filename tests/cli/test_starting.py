"""Tests of Ctrl-C during a program's imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: A stand-in for a library that takes long to import: it prints a line and waits.
SLOW = """
import signal
print("importing", flush=True)
while True:
    signal.pause()
"""
PROGRAMS = {
    "sparklog": ["-m", "sparklog.cli.main", "topics", "list"],
    **{name: [str(ROOT / "jobs" / f"{name}.py")] for name in ("archive", "cluster", "demo", "pipeline")},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_during_imports_exits_without_a_traceback(program: str, tmp_path: Path) -> None:
    for name in ("msgspec", "pyspark", "typer"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, *PROGRAMS[program]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, rest, errors) == (130, "", "")


def test_a_started_program_handles_ctrl_c_as_python_does() -> None:
    code = (
        "import signal, sparklog.cli.starting as first; held = signal.getsignal(signal.SIGINT) is first._leave;"
        " import sparklog.cli.main; print(held, signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
