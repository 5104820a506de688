"""Runs of a suite's program, each with a time limit and in its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_limited(command: Sequence[str], folder: Path, output: Path, *, env: Mapping[str, str], limit_s: float) -> bool:
    """Run a program with all its output in a file; return whether it ended within the limit.

    At the limit, all processes of its group get SIGKILL.
    """
    # Without the modules of this project: other projects also have packages with the name "tests".
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**clean, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
