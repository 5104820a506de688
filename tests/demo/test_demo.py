"""A test that runs the demonstration as a user does: two kills during a write, and every row is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(400)
def test_all_rows_survive_a_killed_executor_and_a_killed_leader(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("wb") as sink:
        job = subprocess.Popen(
            [sys.executable, str(ROOT / "jobs" / "demo.py"), "--data-dir", str(tmp_path / "data")],
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            code = job.wait(360)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # the job stops its cluster and then exits
                job.wait(60)
    text = output.read_text()
    assert code == 0, text
    for event in ("executor killed", "broker killed", "leader elected", "All data is equal."):
        assert event in text, text
    assert "DIFFERENT" not in text
    assert "sealed files with one SHA-256" in text
